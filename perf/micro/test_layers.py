"""Whole layers and a whole model by policy and correction, evictions included. On a CPU; a GPU has `perf.speed`."""

from typing import Any

import pytest
import torch

import fastkv
from fastkv import corrections, policies
from fastkv.reference import FORMATS
from fastkv.rotary import Rotary
from perf.micro.states import LLAMA
from perf.speed import contenders as models

PROMPT, KEPT, PERIOD = 1024, 512, 16
TURNING = Rotary(10_000 ** -torch.linspace(0, 1, LLAMA.head_dim // 2))
# Than a layer by itself is given.
NEEDS_MORE = (
    "compactor", "leverage", "criticalkv", "kvzip", "fastkv-reread", "duoattention", "expected-attention",
    "triattention", "attention-matching",
)  # fmt: skip
POLICIES = [name for name in policies.names() if name not in NEEDS_MORE]
# The others need a map from keys to values, or a second reading.
CORRECTIONS = [one.name for one in corrections.ALL if not (one.key_only or one.match)]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu")


def new(num: int) -> list[torch.Tensor]:
    """q, k and v of tokens."""
    return [torch.randn(1, n, num, LLAMA.head_dim) for n in (LLAMA.num_heads, *(LLAMA.num_kv_heads,) * 2)]


def layer_of(policy: str, **options: Any) -> fastkv.FastKVAttention:
    sizes = LLAMA.num_heads, LLAMA.num_kv_heads, LLAMA.head_dim
    return fastkv.FastKVAttention(*sizes, policy, KEPT, evict_every=PERIOD, rotary=TURNING, **options)


def steps(policy: str, **options: Any) -> tuple:
    """A layer that has read a prompt, and the tokens of an eviction period, which always evicts once."""
    layer = layer_of(policy, **options)
    layer(*new(PROMPT))
    return layer, *new(PERIOD)


def period(layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for index in range(PERIOD):
        layer(*(one[:, :, index : index + 1] for one in (q, k, v)))


@pytest.mark.parametrize("policy", POLICIES)
def test_layer_by_policy(timed: Any, policy: str) -> None:
    timed(lambda: steps(policy), period)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_layer_by_correction(timed: Any, correction: str) -> None:
    timed(lambda: steps("snapkv", correction=correction), period)


@pytest.mark.parametrize("slots", FORMATS)
@pytest.mark.parametrize("policy", ["keydiff", "fastkv"])
def test_layer_by_slots(timed: Any, policy: str, slots: str) -> None:
    timed(lambda: steps(policy, slots=slots), period)


@pytest.mark.parametrize("policy", ["keydiff", "momentkv", "fastkv"])
def test_prompt_in_blocks(timed: Any, policy: str) -> None:
    layer = layer_of(policy, prefill_block=KEPT)
    timed(lambda: new(2 * PROMPT), layer, lambda *tokens: layer.reset())


@pytest.mark.parametrize("policy", ["full", "keydiff", "momentkv", "fastkv"])
def test_model(timed: Any, policy: str, device: torch.device) -> None:
    """Sixteen greedy steps of a small random model."""
    model = models.build("llama-small", device, torch.float32)
    if policy != "full":
        fastkv.patch(model, policy, fastkv.Budget(tokens=KEPT, heads="uniform"), evict_every=PERIOD)
    ids = models.prompt("llama-small", 1, PROMPT, device)

    def make() -> tuple:
        return (model(ids, use_cache=True, logits_to_keep=1).past_key_values,)

    def run(cache: Any) -> None:
        token = ids[:, -1:]
        for _ in range(PERIOD):
            token = model(token, past_key_values=cache, use_cache=True).logits.argmax(-1)

    timed(make, run)
