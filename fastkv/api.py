"""patch, unpatch and patched: the front door."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch.nn import Module

from . import integrations
from .budget import Budget
from .plan import Plan
from .policies import Policy

Model = TypeVar("Model", bound=Module)


def patch(
    model: Model,
    policy: str | Policy = "momentkv",
    budget: int | Budget = 1024,
    *,
    prefill_block: int | None = None,
    evict_every: int = 16,
    correction: str | bool | None = "auto",
    backend: str = "auto",
    static: bool | None = None,
) -> Model:
    """Give a transformers model a key-value cache of fixed size, in place.

    Afterwards `model.generate(...)` and `model(...)` use a `FastKVCache`; training, `use_cache=False` and caches that
    the caller passes in are untouched. A model that is already patched is unpatched first.

    Args:
        model: a causal language model of a supported family, loaded with eager, sdpa or flash_attention_2 attention.
        policy: name from `fastkv.policies.names()` or a `Policy`: which tokens stay.
        budget: tokens per KV head, or a `Budget`.
        prefill_block: None reads the whole prompt with the stock kernel and compresses each layer right after its own
            attention; a number reads it in blocks of that many tokens, so that memory never exceeds the bound.
        evict_every: decode steps between evictions; the cache holds up to `budget + evict_every` tokens per head.
        correction: "moments" adds the first-order estimate of the evicted tokens to attention, "mean" only its
            zeroth-order part, "none" nothing; "auto" is what the policy's paper does.
        backend: "auto" runs Triton kernels on an accelerator and the reference on a CPU; "reference" and "triton"
            insist.
        static: reserved; only None and False.

    Returns: the same model.
    Raises: FastKVError if the model or an argument cannot be used; the model is then as it was.
    """
    plan = Plan.make(policy, budget, prefill_block, evict_every, correction, backend, static)
    modules = integrations.check(model, integrations.FAMILIES, plan)
    integrations.detach(model)
    integrations.attach(model, modules, plan)
    return model


def unpatch(model: Model) -> Model:
    """Make a model what it was before `patch`, bit for bit; a model that is not patched is returned as it is."""
    integrations.detach(model)
    return model


@contextmanager
def patched(model: Model, *args: Any, **kwargs: Any) -> Iterator[Model]:
    """`patch` for the length of a with block; arguments as there. The model is unpatched at its end."""
    yield_model = patch(model, *args, **kwargs)
    try:
        yield yield_model
    finally:
        unpatch(model)
