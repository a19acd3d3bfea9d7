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
    """Give a transformers model a KV cache of fixed size, in place.

    Afterwards `model.generate(...)` and `model(...)` use a `FastKVCache`. Training, `use_cache=False` and caches that
    the caller passes in are unaffected. A model that is already patched is unpatched first.

    Args:
        model: a causal language model of a supported family, loaded with eager, sdpa or flash-attn's attention.
        policy: which tokens stay: a name from `fastkv.policies.names()` or a `Policy`. None: "fastkv", or "momentkv"
            for models whose rotary embedding cannot be undone (frequencies that depend on the length).
        budget: tokens per KV head, mean over all heads; "16x" for a cache that is sixteen times smaller than a bfloat16
            cache of the first prompt; or a `Budget`. Heads get what they need (see `Budget.heads`), which is measured
            now if the model was not calibrated yet.
        prefill_block: None reads the whole prompt with the stock attention and compresses each layer right after its
            own attention. A number reads the prompt in blocks of that many tokens, which bounds memory. "auto" is the
            smallest block that computes as long as the weights take to read.
        evict_every: decode steps between evictions; the cache holds up to `budget + evict_every` tokens per head.
        correction: what evicted tokens add to attention. "moments": their first-order estimate; "mean": its
            zeroth-order part; "centroids": a few weighted pairs; "none": nothing. "matching": values and biases of the
            kept tokens are fitted to a second reading instead (Attention Matching). "vector": half of the pairs make
            room for twice as many tokens that keep only their key, and a linear map recovers their values (VECTOR);
            "vector+mean" and "vector+moments" do both. "auto": the policy's own. An object has other settings, as
            `fastkv.corrections.get("centroids", share=8)`.
        backend: "triton": Triton kernels; "cpu": C++ and torch's fused attention; "reference": plain torch. "auto":
            "triton" on an accelerator, "cpu" on a CPU.
        static: whether decode steps change tensors at fixed addresses only, so that they can be compiled and captured
            as CUDA graphs; on CUDA `model.generate` then compiles by itself. None: on a single CUDA device.
        slots: how keys and values are stored. "model": in the model's dtype; "int8", "fp8": 8 bits a number, about
            half the bytes of bfloat16; "int4": 4 bits, about 0.29 of the bytes; "k8v4": keys as int8, values as int4.
            "auto": for a budget in bytes int8, or int4 from "12x" on; for a budget in tokens "model".
        vector: file of `fastkv calibrate vector` for this model, or the result of `VectorMap.load`. None: the model's
            own directory is searched for vector.safetensors.

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
    """Undo `patch` exactly, in place; a model that is not patched is returned as it is."""
    engine.detach(model)
    return model


@contextmanager
def patched(model: Model, *args: Any, **kwargs: Any) -> Iterator[Model]:
    """`patch` for the duration of a with block, with the same arguments; the model is unpatched at its end."""
    yield_model = patch(model, *args, **kwargs)
    try:
        yield yield_model
    finally:
        unpatch(model)
