"""What a model answers through vLLM's server, with its own cache and with a compressed one, and in the library.

    python -m perf.serving_answers                                  # SmolLM2, 4,096 tokens, a quarter kept
    python -m perf.serving_answers --texts 1 --length 2048 --budget 512 --output /tmp/answers

The leaderboard's questions about its texts, a request each, 16 at once, asked over HTTP: a text is compressed block by
block before the model reads the question at its end. Needs vLLM's environment (.venv-vllm/bin/python), and SmolLM2,
which any other command unpacks, or --model DIR. Writes answers.json and answers.md; time is not its subject.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from openai import APIError, OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

import fastkv
from fastkv.lab import facts, pretrained

from .serving import RESULTS, write

NEW, CLIENTS, START = 24, 16, 600  # tokens of an answer, requests at once, seconds
STOCK, OURS, LIBRARY = "vLLM", "fastkv in vLLM", "fastkv.patch"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="perf.serving_answers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--model", default=pretrained.SMOLLM2, help="smollm2 or a directory (default: %(default)s)")
    option("--length", type=int, default=4096, help="tokens of a text (default: %(default)s)")
    option("--texts", type=int, default=3, help="texts, twelve questions each (default: %(default)s)")
    option("--budget", type=int, default=1024, help="tokens per KV head, mean (default: %(default)s)")
    option("--slots", default="int8", help="how they are stored (default: %(default)s)")
    option("--block", type=int, default=512, help="prefill_block (default: %(default)s)")
    option("--cache-mib", type=int, default=512, help="memory of either cache (default: %(default)s)")
    option("--output", type=Path, default=RESULTS, help="directory for the results")
    return parser.parse_args(arguments)


@contextmanager
def server(model: str, options: argparse.Namespace, settings: dict[str, Any], log: Path) -> Iterator[OpenAI]:
    """A client of a server with these settings of fastkv, {} for none; it is killed at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {
        "model": model,
        "port": port,
        "dtype": "float32",
        "max-model-len": longest(options),
        "max-num-seqs": CLIENTS,
        "max-num-batched-tokens": 2048 + CLIENTS,
        "kv-cache-memory-bytes": options.cache_mib * 2**20,
        "additional-config": json.dumps(settings),
    }
    words = [f"--{name}={value}" for name, value in given.items()]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", *words]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=START)
    try:
        deadline = time.monotonic() + START
        while not there(client):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start:\n{log.read_text()[-3000:]}")
            time.sleep(1)
        yield client
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def longest(options: argparse.Namespace) -> int:
    """max_model_len: room for a question and its answer behind a text."""
    return int(options.length) + 256


def there(client: OpenAI) -> bool:
    """Whether the server answers."""
    try:
        return bool(client.models.list().data)
    except APIError:
        return False


def asked(client: OpenAI, model: str, prompts: list[list[int]]) -> list[str]:
    """Greedy answers to prompts, so many at once."""

    def ask(prompt: list[int]) -> str:
        made = client.completions.create(model=model, prompt=prompt, max_tokens=NEW, temperature=0)
        return made.choices[0].text

    with ThreadPoolExecutor(CLIENTS) as clients:
        return list(clients.map(ask, prompts))


@torch.no_grad()
def alone(model: str, tokenizer: Any, options: argparse.Namespace, prompts: list[list[int]]) -> list[str]:
    """Greedy answers of the library, each prompt by itself, with the settings of the server."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    budget = fastkv.Budget(tokens=options.budget, context=longest(options))
    fastkv.patch(loaded, budget=budget, prefill_block=options.block, slots=options.slots)
    said = []
    for number, prompt in enumerate(prompts, 1):
        out = loaded.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
        said.append(tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True))
        print(f"{LIBRARY}: {number}/{len(prompts)}", flush=True)
    return said


def table(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """Markdown, one line for each that answered."""
    lines = [
        f"| | right, of {rows[0]['asked']} that vLLM's own cache answers | answers equal to those of `{LIBRARY}` |",
        "|---|---|---|",
    ]
    lines += [f"| {row['who']} | {row['right']} | {row['equal']} of {row['all']} |" for row in rows]
    said = (
        f"{options.texts} texts of {options.length} tokens, {options.budget} tokens per KV head kept in {options.slots}"
    )
    return f"Written by `python -m perf.serving_answers`: {said}, blocks of {options.block}.\n\n" + "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Ask two servers, one after the other, and the library."""
    options = parse(arguments)
    model, _ = pretrained.place(options.model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    samples = [facts.sample(tokenizer, options.length, seed, both=True) for seed in range(options.texts)]
    questions = [(one.prefix + question.ids, question) for one in samples for question in one.questions]
    prompts = [prompt for prompt, _ in questions]
    ours = {"budget": options.budget, "slots": options.slots, "prefill_block": options.block, "prefixes": 0.5}
    said: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as logs:
        for who, settings in ((STOCK, {}), (OURS, {"fastkv": ours})):
            with server(model, options, settings, Path(logs, "server.log")) as client:
                said[who] = asked(client, model, prompts)
            print(f"{who}: {len(prompts)} answers", flush=True)
    said[LIBRARY] = alone(model, tokenizer, options, prompts)
    right = {who: [one.answered_by(text) for text, (_, one) in zip(texts, questions)] for who, texts in said.items()}
    known = right[STOCK]
    rows = [
        {
            "who": who,
            "asked": sum(known),
            "right": sum(yes for yes, full in zip(right[who], known) if full),
            "equal": sum(one == other for one, other in zip(texts, said[LIBRARY])),
            "all": len(texts),
            "answers": texts,
        }
        for who, texts in said.items()
    ]
    settings = {name: value for name, value in vars(options).items() if name != "output"}
    write(options.output / "answers.json", settings, rows, table(rows, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
