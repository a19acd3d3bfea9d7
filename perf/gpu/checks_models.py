"""Whole decode steps on a device: captured, compiled with CUDA graphs and eager ones choose the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

import fastkv
from fastkv.calibration.files import fingerprint
from fastkv.calibration.vector_map import VectorMap

from .checks_device import syncs_raise
from .state import Finding, Place, equal

EVERY = 4
# policy, correction, heads: equal and unequal heads, sums of attention, tokens without values in all or some heads.
KINDS = (
    ("momentkv", "auto", "uniform"),
    ("keydiff", "none", "adaptive"),
    ("h2o", "mean", "uniform"),
    ("snapkv", "moments", "adaptive"),
    ("keydiff", "vector", "uniform"),
    ("keydiff", "vector+moments", "uniform"),
)


def small_model(place: Place, family: str) -> Any:
    """A random model with real head sizes, seeded."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 64 if place.toy else 512,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16 if place.toy else 128,
        "max_position_embeddings": 4096,
        "initializer_range": 0.3 if place.toy else 0.1,
        "eos_token_id": None,
    }
    if family == "llama":
        made: Any = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        layers = ["sliding_attention", "full_attention"]
        made = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, sliding_window=24, layer_types=layers))
    return made.to(place.device, torch.float32 if place.toy else torch.bfloat16).eval()


def some_map(model: Any) -> VectorMap:
    """A random map from keys to values; one head of the second layer does without."""
    config = model.config
    heads, dim = config.num_key_value_heads, config.head_dim
    weights = {layer: torch.randn(heads, dim, dim, device=model.device) / dim for layer in range(2)}
    r2 = {layer: torch.tensor([0.9, 0.9 - 0.8 * layer], dtype=torch.float64) for layer in range(2)}
    return VectorMap(weights, r2, threshold=0.5, fingerprint=fingerprint(config), model="random", tokens=1)


def tokens_of(place: Place, model: Any, ids: Tensor, how: str, steps: int) -> Tensor:
    """Greedy tokens after a prompt, [B, steps]; no step waits for the device."""
    cache = fastkv.FastKVCache(model)
    token = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
    positions = torch.full_like(token, ids.shape[1])
    step: Callable[[Tensor], Tensor] = lambda token: model(  # noqa: E731
        token, past_key_values=cache, position_ids=positions
    ).logits[:, -1]
    if how == "captured":
        step = fastkv.capture_decode(model, cache, len(ids))
    elif how == "compiled":
        call = torch.compile(model, fullgraph=True, mode=None if place.toy else "reduce-overhead")
        step = lambda token: call(token, past_key_values=cache, position_ids=positions).logits[:, -1].clone()  # noqa: E731
    found = []

    def decode(count: int) -> None:
        nonlocal token
        for _ in range(count):
            token = step(token).argmax(-1, keepdim=True)
            positions.add_(1)
            found.append(token)

    warm = 2 * EVERY + 1  # everything is compiled and recorded by then
    decode(warm)
    with syncs_raise(place):
        decode(steps - warm)
    return torch.cat(found, 1)


def check_steps(place: Place) -> list[Finding]:
    """Every kind of cache, eager, captured, and compiled with CUDA graphs: tokens are the same."""
    findings = []
    for family in ("llama", "gemma3"):
        for policy, correction, heads in KINDS[:2] if place.toy else KINDS:
            torch._dynamo.reset()
            model = small_model(place, family)
            vector = some_map(model) if correction.startswith("vector") else None
            budget = fastkv.Budget(tokens=16 if place.toy else 64, sinks=2, recent=4, heads=heads)
            backend = "reference" if place.toy else "triton"
            settings: dict[str, Any] = dict(correction=correction, evict_every=EVERY, backend=backend, vector=vector)
            fastkv.patch(model, policy, budget, static=True, **settings)
            ids = torch.randint(3, 256, (2, 40 if place.toy else 160), device=place.device)
            want = tokens_of(place, model, ids, "eager", 20)
            for how in ("captured",) if place.toy else ("captured", "compiled"):
                got = tokens_of(place, model, ids, how, 20)
                findings.append(equal(f"{how} {family} {policy} {correction} {heads}", got, want))
    return findings


def check_kinds(place: Place) -> list[Finding]:
    """Prompts and steps of every kind of cache: the kernels choose nearly the tokens that the reference does.

    Half-precision sums differ in their last bits, so that a close choice may fall the other way: at most one token in
    ten differs while both are fed the same tokens.
    """
    findings = []
    for policy, correction, heads in KINDS:
        model = small_model(place, "llama")
        vector = some_map(model) if correction.startswith("vector") else None
        budget = fastkv.Budget(tokens=16 if place.toy else 64, sinks=2, recent=4, heads=heads)
        ids = torch.randint(3, 256, (4, 40 if place.toy else 300), device=place.device)
        fed = torch.randint(3, 256, (4, 6 if place.toy else 60), device=place.device)
        chosen = []
        for backend in ("reference", "triton"):
            settings: dict[str, Any] = dict(correction=correction, evict_every=EVERY, backend=backend, vector=vector)
            fastkv.patch(model, policy, budget, prefill_block=None if place.toy else 64, static=False, **settings)
            cache = model(ids).past_key_values
            chosen.append(
                torch.cat([model(one, past_key_values=cache).logits.argmax(-1) for one in fed.split(1, 1)], 1)
            )
        wrong = float((chosen[0] != chosen[1]).float().mean())
        findings.append(Finding(f"{policy} {correction} {heads}", wrong, limit=0.1))
    return findings


MODEL_CHECKS: dict[str, Callable[[Place], list[Finding]]] = {"steps": check_steps, "kinds": check_kinds}
