"""vLLM's own cache against a compressed one, in the same bytes: sequences that fit, speed and latency under load.

    python -m perf.serving                                          # SmolLM2, 1 and 16 requests at once
    python -m perf.serving --model DIR --prompts 8192 --requests 16 --cache-mib 256

Needs vLLM (`make test-vllm` makes an environment for a CPU: .venv-vllm/bin/python -m perf.serving). All requests of a
case arrive at once. For each case the engines run one after the other, in processes of their own. Writes <device>.json
and a table. The machine should have nothing else to do: its load stands beside every number.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fastkv.lab import pretrained

from .engine import parser_of
from .environment import environment
from .tables import Row, filled

RESULTS = Path(__file__).parent / "results" / "serving"
STOCK, OURS = "vLLM", "fastkv"
OPTIONS = {  # of the three commands
    "model": "smollm2, a directory or a name",
    "policy": "of the compressed cache",
    "length": "tokens of a text or sequence",
    "texts": "how many, twelve questions each",
    "budget": "tokens per KV head that are kept, mean",
    "budgets": "the same of each compressed cache; a correction after a colon",
    "slots": "how they are stored",
    "block": "prefill_block",
    "prompts": "lengths of prompts, tokens",
    "requests": "how many arrive at once",
    "answer": "tokens of an answer",
    "cache_mib": "memory of either cache",
    "dtype": "of the model",
    "heads": "how many tokens each keeps: calibrated, uniform, or a file",
    "batched": "tokens of a step at most, beside one of each request",
    "compilation": "vLLM's compilation_config on a GPU, JSON",
    "output": "directory for the results",
}


def parse(prog: str, text: str | None, arguments: list[str] | None, **defaults: Any) -> argparse.Namespace:
    """Options of a command, of the types of their defaults."""
    parser = parser_of(prog, text)
    for name, default in {"model": pretrained.SMOLLM2, **defaults, "output": RESULTS}.items():
        kind = {"type": type(default[0]), "nargs": "+"} if isinstance(default, list) else {"type": type(default)}
        told = f"{OPTIONS[name]} (default: %(default)s)"
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, help=told, **kind)
    parser.add_argument("--engine", help=argparse.SUPPRESS)  # of this process: the name that `in_process` gave it
    return parser.parse_args(arguments)


def engine_of(options: argparse.Namespace, longest: int, requests: int, settings: Row, **more: Any) -> Any:
    """vLLM for sequences of that length at most, with these settings of fastkv, {} for its own cache.

    A directory that holds a model's config and no weights is a model of random ones.
    """
    from vllm import LLM

    model = pretrained.place(options.model)[0]
    if not any(Path(model).glob("*.safetensors")):
        more["load_format"] = "dummy"
    if settings and torch.cuda.is_available():
        more["attention_config"] = {"backend_per_kind": {"full_attention": "CUSTOM"}}
    return LLM(
        model,
        max_model_len=longest,
        max_num_seqs=requests,
        kv_cache_memory_bytes=options.cache_mib * 2**20,
        skip_tokenizer_init=True,
        additional_config={"fastkv": settings} if settings else {},
        **{"max_num_batched_tokens": 2048 + requests} | more,
    )


def fitting(engine: Any, length: int, paged: bool) -> int:
    """Sequences of so many tokens that fit, by vLLM's own count; paged: one block each. Block 0 is nobody's."""
    cache = engine.llm_engine.vllm_config.cache_config
    return (cache.num_gpu_blocks - 1) // (1 if paged else -(-length // cache.block_size))


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
        outputs = engine.step()
        for output in outputs:
            last[output.request_id] = time.perf_counter() - begin
            first.setdefault(output.request_id, last[output.request_id])
        most = max(most, len(outputs))
    gaps = [(last[name] - first[name]) / (answer - 1) for name in first]
    return {
        "prompt": length,
        "requests": requests,
        "at_once": most,
        "ttft": median(first.values()),
        "tpot": median(gaps),
        "tokens_per_s": requests * answer / max(last.values()),
    }


def measure(options: argparse.Namespace) -> list[Row]:
    """What one engine does, in this process."""
    ours, longest = options.engine == OURS, max(options.prompts) + options.answer + 1
    budget = {"tokens": options.budget, "heads": options.heads}
    given = {"policy": options.policy, "budget": budget, "prefill_block": options.block, "slots": options.slots}
    settings = given if ours else {}
    how: Row = {"dtype": options.dtype, "enable_prefix_caching": False, "enforce_eager": not torch.cuda.is_available()}
    if torch.cuda.is_available():
        how["compilation_config"] = json.loads(options.compilation)
    most = max(options.requests)
    how["max_num_batched_tokens"] = options.batched + most
    llm, rows = engine_of(options, longest, most, settings, **how), []
    served(llm.llm_engine, min(options.prompts), 1, 4, 0)  # warm up
    for length in options.prompts:
        for requests in options.requests:
            row = served(llm.llm_engine, length, requests, options.answer, len(rows) + 1)
            fit = fitting(llm, length + options.answer, ours)
            rows.append({"engine": options.engine, "fit": fit, **row, "load": os.getloadavg()[0]})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def in_process(module: str, arguments: list[str] | None, engine: object) -> Any:
    """What `python -m module` prints last, as JSON, of the engine that is named so: each has a process of its own."""
    given = sys.argv[1:] if arguments is None else arguments
    command = [sys.executable, "-m", module, *given, "--engine", str(engine)]
    child = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, env=child, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def write(path: Path, options: argparse.Namespace, rows: list[Row], words: Path) -> None:
    """The results as JSON, and beside them the page that the template `words` makes of them, which is printed."""
    settings = {name: value for name, value in vars(options).items() if name not in ("output", "engine")}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(), "settings": settings, "rows": rows}, indent=1) + "\n")
    page = filled(words, rows=rows, **settings) + "\n"
    path.with_suffix(".md").write_text(page)
    print(page)


def main(arguments: list[str] | None = None) -> None:
    """Run both engines, in turn for each case, each in a process of its own."""
    how = {"policy": "fastkv", "budget": 1024, "block": 512, "prompts": [2048, 7680], "requests": [1, 16]}
    stored = {"slots": "auto", "heads": "calibrated", "cache_mib": 1024, "dtype": "float32"}
    options = parse("perf.serving", __doc__, arguments, **how, **stored, answer=256, batched=2048, compilation="{}")
    if options.engine:
        print(json.dumps(measure(options)))
        return
    given, rows = sys.argv[1:] if arguments is None else arguments, []
    for prompt, requests in product(options.prompts, options.requests):
        case = [*given, "--prompts", str(prompt), "--requests", str(requests)]
        rows += [row for engine in (STOCK, OURS) for row in in_process("perf.serving", case, engine)]
    device = "gpu" if torch.cuda.is_available() else "cpu"
    write(options.output / f"{device}.json", options, rows, Path(__file__).with_suffix(".jinja"))


if __name__ == "__main__":
    main()
