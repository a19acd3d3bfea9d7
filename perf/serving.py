"""vLLM's own cache against a compressed one, in the same bytes: sequences that fit, speed and latency under load.

    python -m perf.serving                                          # SmolLM2, 1 and 16 requests at once
    python -m perf.serving --model DIR --prompts 8192 --requests 16 --cache-mib 256

Needs vLLM (`make test-vllm` makes an environment for a CPU: .venv-vllm/bin/python -m perf.serving). All requests of a
case arrive at once; each engine runs in a process of its own. Writes <device>.json and a table. The machine
should have nothing else to do: its load stands beside every number.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fastkv.lab import pretrained

from .environment import environment

RESULTS = Path(__file__).parent / "results" / "serving"
STOCK, OURS = "vLLM", "fastkv"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="perf.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=pretrained.SMOLLM2, help="smollm2 (default), or a directory or name")
    parser.add_argument("--policy", default="fastkv", help="of the compressed cache")
    parser.add_argument("--budget", type=int, default=1024, help="tokens per KV head that are kept")
    parser.add_argument("--block", type=int, default=512, help="prefill_block")
    parser.add_argument("--prompts", type=int, nargs="+", default=[2048, 7680], help="lengths of prompts, tokens")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16], help="how many arrive at once")
    parser.add_argument("--answer", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--cache-mib", type=int, default=1024, help="memory of either cache")
    parser.add_argument("--dtype", default="float32", help="of the model")
    parser.add_argument("--output", type=Path, default=RESULTS, help="directory for the results")
    parser.add_argument("--engine", choices=[STOCK, OURS], help=argparse.SUPPRESS)  # the process of one engine
    return parser.parse_args(arguments)


def engine_of(options: argparse.Namespace) -> Any:
    """vLLM with either cache."""
    from vllm import LLM

    longest, settings = max(options.prompts) + options.answer + 1, {}
    if options.engine == OURS:
        settings = {"fastkv": {"policy": options.policy, "budget": options.budget, "prefill_block": options.block}}
    return LLM(
        pretrained.place(options.model)[0],
        dtype=options.dtype,
        max_model_len=longest,
        max_num_seqs=max(options.requests),
        max_num_batched_tokens=2048 + max(options.requests),
        kv_cache_memory_bytes=options.cache_mib * 2**20,
        enable_prefix_caching=False,
        enforce_eager=not torch.cuda.is_available(),
        skip_tokenizer_init=True,
        additional_config=settings,
    )


def served(engine: Any, length: int, requests: int, answer: int, seed: int) -> dict[str, float]:
    """So many requests at once: seconds to first tokens and between tokens, and tokens of answers per second."""
    from vllm import SamplingParams

    draw = torch.Generator().manual_seed(seed)
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
    begin, first, last = time.perf_counter(), {}, {}
    for i in range(requests):
        tokens = torch.randint(3, 500, (length,), generator=draw).tolist()
        engine.add_request(f"{seed}-{i}", {"prompt_token_ids": tokens}, params)
    most = 0
    while engine.has_unfinished_requests():
        running = 0
        for output in engine.step():
            last[output.request_id] = time.perf_counter() - begin
            first.setdefault(output.request_id, last[output.request_id])
            running += 1
        most = max(most, running)
    gaps = [(last[name] - first[name]) / (answer - 1) for name in first]
    return {
        "prompt": length,
        "requests": requests,
        "at_once": most,
        "ttft": median(first.values()),
        "tpot": median(gaps),
        "tokens_per_s": requests * answer / max(last.values()),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """What one engine does, in this process."""
    llm = engine_of(options)
    config = llm.llm_engine.vllm_config
    block, blocks = config.cache_config.block_size, config.cache_config.num_gpu_blocks
    pages = {
        length: 1 if options.engine == OURS else -(-(length + options.answer) // block) for length in options.prompts
    }
    served(llm.llm_engine, min(options.prompts), 1, 4, 0)  # warm up
    rows = []
    for length in options.prompts:
        for number in options.requests:
            row = served(llm.llm_engine, length, number, options.answer, length + number)
            rows.append(
                {"engine": options.engine, "fit": (blocks - 1) // pages[length], **row, "load": os.getloadavg()[0]}
            )
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return {"rows": rows}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, one line for each case with both engines."""
    lines = ["| prompt | requests | | sequences that fit | tokens/s | first token, s | between tokens, ms | load |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: (row["prompt"], row["requests"], row["engine"] == OURS)):
        numbers = f"{row['tokens_per_s']:.1f} | {row['ttft']:.2f} | {1000 * row['tpot']:.1f} | {row['load']:.1f} |"
        lines.append(f"| {row['prompt']} | {row['requests']} | {row['engine']} | {row['fit']} | {numbers}")
    return "\n".join(lines)


def in_process(module: str, given: list[str], engine: object) -> Any:
    """What `python -m module` prints last, as JSON, of the engine that is named so: each has a process of its own."""
    command = [sys.executable, "-m", module, *given, "--engine", str(engine)]
    child = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, env=child, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def write(path: Path, settings: dict[str, Any], rows: list[dict[str, Any]], page: str) -> None:
    """The results as JSON, and beside them the page of their table, which is printed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(), "settings": settings, "rows": rows}, indent=1) + "\n")
    path.with_suffix(".md").write_text(page + "\n")
    print(page)


def main(arguments: list[str] | None = None) -> int:
    """Run both engines, each in a process of its own."""
    options = parse(arguments)
    if options.engine:
        print(json.dumps(measure(options)))
        return 0
    given, rows = sys.argv[1:] if arguments is None else arguments, []
    for engine in (STOCK, OURS):
        rows += in_process("perf.serving", given, engine)["rows"]
    names = ("policy", "budget", "block", "answer", "cache_mib", "dtype", "model")
    settings = {name: getattr(options, name) for name in names}
    device = "gpu" if torch.cuda.is_available() else "cpu"
    said = ", ".join(f"{name} {value}" for name, value in settings.items())
    page = f"Written by `python -m perf.serving`: {said}.\n\n{table(rows)}"
    write(options.output / f"{device}.json", settings, rows, page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
