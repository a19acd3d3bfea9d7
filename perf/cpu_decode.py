"""Decode and prompt speed on a CPU: the full cache and fastkv, side by side in one process on one random-weight model.

    python -m perf.cpu_decode --context 16384 --batch 4 --budget 512 --out perf/results/cpu_decode.json

The model has the shape that needs no download: Llama architecture, 4 layers, width 256, 4 query and 2 KV heads of 64.
Time per token is the median over decode steps; evictions fall inside the timed steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import fastkv

from .environment import environment

CASES: tuple[tuple[str, int | None], ...] = (("full", None), ("keydiff", 512), ("momentkv", 512), ("snapkv", 512))


def build_model(max_length: int) -> LlamaForCausalLM:
    """The random-weight model, seeded."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=max_length,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def measure(model: Any, ids: torch.Tensor, steps: int, warmup: int) -> dict[str, float]:
    """Seconds until the first token, milliseconds per further token (median, p20, p80) and bytes of the cache."""
    start = time.perf_counter()
    out = model(ids, logits_to_keep=1)
    first = time.perf_counter() - start
    cache = out.past_key_values
    token = out.logits[:, -1:].argmax(-1)
    times = []
    for step in range(warmup + steps):
        start = time.perf_counter()
        token = model(token, past_key_values=cache).logits.argmax(-1)
        if step >= warmup:
            times.append((time.perf_counter() - start) * 1e3)
    p20, p50, p80 = (statistics.quantiles(times, n=10)[i] for i in (1, 4, 7))
    if isinstance(cache, fastkv.FastKVCache):
        size = cache.nbytes()
    else:
        size = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    mean = statistics.fmean(times)
    return {"first_token_s": first, "ms_p20": p20, "ms_p50": p50, "ms_p80": p80, "ms_mean": mean, "cache_bytes": size}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=16_384, help="prompt tokens (default %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="sequences (default %(default)s)")
    parser.add_argument("--budget", type=int, default=512, help="tokens kept per KV head (default %(default)s)")
    parser.add_argument("--block", type=int, default=512, help="prompt block, tokens (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default %(default)s)")
    parser.add_argument("--out", type=Path, help="write the rows and the environment as JSON")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(arguments.threads)
    model = build_model(2 * arguments.context)
    ids = torch.randint(3, 1000, (arguments.batch, arguments.context), generator=torch.Generator().manual_seed(0))
    console, rows = Console(), []
    for name, budget in CASES:
        with console.status(f"{name}: reading {arguments.context} tokens x {arguments.batch}"):
            if budget is None:
                row = measure(model, ids, steps=16, warmup=2)
            else:
                with fastkv.patched(model, name, arguments.budget, prefill_block=arguments.block):
                    row = measure(model, ids, steps=128, warmup=16)
        rows.append({"cache": name, **row})
    full = rows[0]
    a = arguments
    title = f"{a.context} tokens seen, batch {a.batch}, budget {a.budget}, blocks of {a.block}"
    table = Table("cache", "first token s", "ms/token p50", "p20 - p80", "mean", "x full", "cache MiB", title=title)
    for row in rows:
        row["speedup"] = full["ms_p50"] / row["ms_p50"]
        table.add_row(
            row["cache"],
            f"{row['first_token_s']:.1f}",
            f"{row['ms_p50']:.2f}",
            f"{row['ms_p20']:.2f} - {row['ms_p80']:.2f}",
            f"{row['ms_mean']:.2f}",
            f"{row['speedup']:.1f}",
            f"{row['cache_bytes'] / 2**20:.2f}",
        )
    console.print(table)
    if arguments.out:
        settings = {k: v for k, v in vars(arguments).items() if k != "out"}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(
            json.dumps({"settings": settings, "environment": environment(), "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
