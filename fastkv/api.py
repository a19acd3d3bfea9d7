"""patch, unpatch and patched: the front door."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch.nn import Module

from . import config as settings
from .budget import Budget
from .cache import prefill
from .calibration.fits import VectorMap
from .config import Config
from .corrections import Correction
from .integrations import transformers as engine
from .integrations.transformers.calibrate import shares_for
from .policies import Policy

Model = TypeVar("Model", bound=Module)


def patch(
    model: Model,
    policy: str | Policy | None = None,
    budget: int | str | Budget = settings.BUDGET,
    *,
    prefill_block: int | str | None = None,
    evict_every: int = settings.EVICT_EVERY,
    correction: str | bool | Correction | None = "auto",
    backend: str = "auto",
    static: bool | None = None,
    slots: str = "auto",
    vector: str | Path | VectorMap | None = None,
) -> Model:
    """Give a transformers model a key-value cache of fixed size, in place.

    Afterwards `model.generate(...)` and `model(...)` use a `FastKVCache`; training, `use_cache=False` and caches that
    the caller passes in are untouched. A model that is already patched is unpatched first.

    Args:
        model: a causal language model of a supported family, loaded with eager, sdpa or flash-attn's attention.
        policy: name from `fastkv.policies.names()` or a `Policy`: which tokens stay. None: "fastkv", or "momentkv" for
            models whose rotary embedding cannot be undone (frequencies that follow the length).
        budget: tokens per KV head, mean over all heads; "16x" for a cache that is sixteen times smaller than a bfloat16
            cache of the first prompt; or a `Budget`. Heads keep what they need, see `Budget.heads`: for a model that
            was not calibrated yet, that is found out now.
        prefill_block: None reads the whole prompt with the stock kernel and compresses each layer right after its own
            attention; a number reads it in blocks of that many tokens, so that memory never exceeds the bound;
            "auto" in blocks just large enough for the device to compute while it reads the weights.
        evict_every: decode steps between evictions; the cache holds up to `budget + evict_every` tokens per head.
        correction: "moments" adds the first-order estimate of the evicted tokens to attention, "mean" only its
            zeroth-order part, "none" nothing; "centroids" keeps a few weighted pairs of the evicted tokens instead;
            "matching" fits values and biases after a second reading (Attention Matching); "auto" is what the policy
            brings. "vector" lets twice as many tokens keep their key only, in the room of half the pairs, and recovers
            their values with a linear map (VECTOR); "vector+mean" and "vector+moments" do both. An object has other
            settings, as `fastkv.corrections.get("centroids", share=8)`.
        backend: "auto" runs Triton kernels on an accelerator ("triton"), and C++ and torch's fused attention on a CPU
            ("cpu"); these two and "reference", plain torch, can be asked for.
        static: whether decode steps change tensors at fixed addresses only, so that they can be compiled and captured
            as CUDA graphs; `model.generate` then compiles by itself, on CUDA. None: on a single CUDA device.
        slots: how keys and values are stored: "model" in the model's dtype; "int8" and "fp8" in 8 bits a number, about
            half the bytes of bfloat16; "int4" in 4 bits, about 0.29 of them; "k8v4" keys as int8, values as int4.
            "auto": of a budget in bytes what answers best with them, int8, or int4 from "12x" on; of one in tokens
            "model".
        vector: file that `fastkv calibrate vector` wrote for this model, or what `VectorMap.load` returned; by default
            the model's own directory is searched for vector.safetensors.

    Returns: the same model.
    Raises: FastKVError if the model or an argument cannot be used; the model is then as it was.
    """
    block: Any = prefill.ELSEWHERE if prefill_block == "auto" else prefill_block
    rest = budget, block, evict_every, correction, backend, static, slots
    config = Config.make(policy or settings.POLICY, *rest)
    modules = engine.check(model, config)
    otherwise = Config.make(settings.WITHOUT_ROTARY, *rest) if policy is None else None
    config = engine.with_rotations(config, model, modules, otherwise).coded(*engine.sizes(modules))
    if prefill_block == "auto":
        weight = next(model.parameters())
        config = replace(config, prefill_block=prefill.block_tokens(weight.device, weight.dtype))
    config = settings.with_fits(config, model.config, vector)
    config = settings.with_shares(config, model.config, lambda wanted: shares_for(model, wanted))
    engine.detach(model)
    engine.attach(model, modules, config)
    return model


def unpatch(model: Model) -> Model:
    """Make a model what it was before `patch`, bit for bit; a model that is not patched is returned as it is."""
    engine.detach(model)
    return model


@contextmanager
def patched(model: Model, *args: Any, **kwargs: Any) -> Iterator[Model]:
    """`patch` for the length of a with block; arguments as there. The model is unpatched at its end."""
    yield_model = patch(model, *args, **kwargs)
    try:
        yield yield_model
    finally:
        unpatch(model)
