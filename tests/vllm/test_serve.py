"""The server: clients of the openai package that stream at the same time, a server that is killed and started again,
and settings that end it at once.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from urllib.request import urlopen

import pytest
from openai import APIError, BadRequestError

from perf.serving_answers import server

from .engine import Alone, prompt

SETTINGS = {"policy": "fastkv", "budget": 64, "prefill_block": 64}
LONGEST = 512
LIMITS = {
    **{"max_model_len": LONGEST, "max_num_seqs": 8, "max_num_batched_tokens": 256, "kv_cache_memory_bytes": 2**26},
    "enable_prompt_tokens_details": True,
}
NUM = 24  # tokens of an answer


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
    settings = {"fastkv": {**SETTINGS, "prefixes": 0.5, "classes": {"small": {"budget": 48}}}}
    for number in range(2):
        started = server(model, settings, tmp_path / f"{number}.log", **LIMITS)
        with started as client, ThreadPoolExecutor(len(prompts)) as clients:
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


DRAFTS = '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}'


@pytest.mark.parametrize(
    "settings, more, message",
    [
        ({"budgt": 1}, {}, "additional_config['fastkv'] has no setting budgt"),
        ({}, {"speculative_config": DRAFTS}, "speculative decoding does not work with a compressed cache: a"),
    ],
    ids=["unknown setting", "speculative decoding"],
)
def test_settings_that_cannot_be_used_end_the_server(model, settings, more, message, tmp_path):
    with pytest.raises(SystemExit, match=re.escape(f"FastKVError: {message}")):
        with server(model, {"fastkv": {**SETTINGS, **settings}}, tmp_path / "log", **LIMITS, **more):
            raise AssertionError("it started")
