"""How many sequences fit into the same memory, with vLLM's own cache and with compressed ones: vLLM's own numbers.

    python -m perf.serving_fit                          # SmolLM2 at 16,384 tokens: 4,096 and 1,024 kept, in int8
    python -m perf.serving_fit --model DIR --budgets 2048 --output /tmp/fit

Engines are started and asked nothing, each in a process of its own. Needs vLLM's environment (.venv-vllm/bin/python),
and SmolLM2, which any other command unpacks, or --model DIR. Writes fit.json and fit.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from fastkv.lab import pretrained

from .serving import RESULTS, in_process, write


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="perf.serving_fit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--model", default=pretrained.SMOLLM2, help="smollm2 or a directory (default: %(default)s)")
    option("--length", type=int, default=16384, help="tokens of a sequence (default: %(default)s)")
    option("--budgets", type=int, nargs="+", default=[4096, 1024], help="tokens per KV head, mean")
    option("--slots", default="int8", help="how they are stored (default: %(default)s)")
    option("--cache-mib", type=int, default=8192, help="memory of either cache (default: %(default)s)")
    option("--output", type=Path, default=RESULTS, help="directory for the results")
    option("--engine", type=int, help=argparse.SUPPRESS)  # budget of the engine of this process, 0 for vLLM's own
    return parser.parse_args(arguments)


def fit(options: argparse.Namespace) -> int:
    """Sequences that fit into one engine, in this process. Block 0 is nobody's."""
    from vllm import LLM

    model, _ = pretrained.place(options.model)
    settings = {"budget": options.engine, "slots": options.slots, "prefill_block": 512}
    llm = LLM(
        model,
        dtype="bfloat16",
        hf_overrides={"max_position_embeddings": options.length},
        max_model_len=options.length,
        max_num_seqs=16,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=options.cache_mib * 2**20,
        enforce_eager=True,
        skip_tokenizer_init=True,
        additional_config={"fastkv": settings} if options.engine else {},
    )
    config = llm.llm_engine.vllm_config
    blocks = 1 if options.engine else -(-options.length // config.cache_config.block_size)
    return int((config.cache_config.num_gpu_blocks - 1) // blocks)


def table(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """Markdown, one line for each engine."""
    stock = rows[0]["fit"]
    said = f"sequences of {options.length} tokens in {options.cache_mib} MiB, model in bfloat16"
    lines = [
        f"Written by `python -m perf.serving_fit`: {said}, slots in {options.slots}.",
        "",
        "| cache | sequences | times vLLM's |",
        "|---|---|---|",
    ]
    for row in rows:
        who = f"{row['budget']} tokens per KV head" if row["budget"] else "vLLM"
        lines.append(f"| {who} | {row['fit']} | {row['fit'] / stock:.1f} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Start all engines, one after the other."""
    options = parse(arguments)
    if options.engine is not None:
        print(json.dumps(fit(options)))
        return 0
    given, rows = sys.argv[1:] if arguments is None else arguments, []
    for budget in (0, *options.budgets):
        rows.append({"budget": budget, "fit": in_process("perf.serving_fit", given, budget)})
    settings = {name: value for name, value in vars(options).items() if name not in ("output", "engine")}
    write(options.output / "fit.json", settings, rows, table(rows, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
