"""What one layer can do on its own, outside a transformers model: asked once, before anything is allocated."""

from __future__ import annotations

from torch import Tensor

from .config import Plan
from .errors import FastKVError, check_groups, check_shape
from .rotary import Rotary
from .state import LayerState

NAME = "FastKVAttention"


def check_sizes(num_heads: int, num_kv_heads: int, head_dim: int, layer: int, num_layers: int) -> None:
    """Raise FastKVError unless these are the sizes of a model and the index of one of its layers."""
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "num_layers": num_layers}
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise FastKVError(f"{NAME}: {name} must be a whole number of at least 1, got {value!r}; pass the model's")
    check_groups(NAME, num_heads, num_kv_heads)
    if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0 or 1 < num_layers <= layer:
        below = f" below num_layers = {num_layers}" if num_layers > 1 else ""
        raise FastKVError(f"{NAME}: layer must be a whole number from 0{below}, got {layer!r}; count from 0")


def check_alone(
    plan: Plan,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    layer: int,
    num_layers: int,
    rotary: Rotary | None,
    output: Tensor | None,
) -> None:
    """Raise FastKVError if the plan asks for something that a layer on its own does not have or was not given.

    Args: the arguments of `FastKVAttention`, with policy, budget, correction and maps in the plan.
    """
    name = f"policy {plan.policy.name!r}"
    if plan.deferred:
        what = name if plan.policy.rereads else "Budget(quality=...)"
        raise FastKVError(
            f"{NAME}: {what} reads the prompt with the whole model before it evicts, got one layer; use another method "
            "or fastkv.patch"
        )
    plan.budget.check_layers(num_layers)
    plan.policy.check([num_kv_heads] * num_layers)
    if plan.undoes_rotation and rotary is None:
        what = "correction='vector'" if plan.vector else name
        raise FastKVError(
            f"{NAME}: {what} needs keys as they were before the rotary embedding, got no embedding; pass "
            "rotary=fastkv.rotary.Rotary(frequencies)"
        )
    if rotary is not None and 2 * rotary.frequencies.numel() != head_dim:
        raise FastKVError(
            f"{NAME}: the rotary embedding must turn all {head_dim} dimensions of a head, got "
            f"{2 * rotary.frequencies.numel()}; pass head_dim / 2 frequencies"
        )
    if plan.needs("output"):
        if output is None:
            raise FastKVError(f"{NAME}: {name} needs the layer's output projection, got none; pass output=proj.weight")
        check_shape(NAME, "output", output, (None, num_heads * head_dim))
    if plan.vector != (plan.values is not None):
        given = "the first" if plan.vector else "the second"
        raise FastKVError(
            f"{NAME}: correction='vector' and vector=VectorMap(...) need each other, got {given} only; pass both"
        )
    if plan.values is not None:
        plan.values.usable(layer)
        check_shape(NAME, "vector", plan.values.weights[layer], (num_kv_heads, head_dim, head_dim))


def check_tokens(
    sizes: tuple[int, int, int], state: LayerState | None, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> None:
    """Raise FastKVError unless new tokens fit each other and the state.

    Args: sizes: Hq, Hkv, D; q [B, Hq, T, D]; k, v [B, Hkv, T, D]; mask [B, T] or None.
    """
    num_heads, num_kv_heads, head_dim = sizes
    check_shape(NAME, "q", q, (None, num_heads, None, head_dim))
    batch, _, num, _ = q.shape
    if not num:
        raise FastKVError(f"{NAME} needs at least one new token, got none; leave the call out")
    check_shape(NAME, "k", k, (batch, num_kv_heads, num, head_dim))
    check_shape(NAME, "v", v, (batch, num_kv_heads, num, head_dim))
    if mask is not None:
        check_shape(NAME, "mask", mask, (batch, num))
    if state is None:
        return
    keys = state.exact.keys
    if len(keys) != batch:
        raise FastKVError(f"{NAME} holds {len(keys)} sequences, got {batch}; allocate({batch}) forgets those it has")
    if any((one.dtype, one.device) != (keys.dtype, keys.device) for one in (q, k, v)):
        raise FastKVError(
            f"{NAME} has buffers of {keys.dtype} on {keys.device}, got tokens of {q.dtype} on {q.device}; move one of "
            "them with .to(...)"
        )
