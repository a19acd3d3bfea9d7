"""Layers of transformers' own caches: which of them are compressed, which stay as they are, and how those travel; and
how transformers calls a cache, and implementations of attention.

Names that not every supported transformers has are looked up here, and nowhere else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)
from transformers.generation.utils import ALL_CACHE_NAMES
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...cache import fixed

# The argument that a cache is passed in, and the name of it in what comes back; the first until 5.23.
BEFORE, NOW = "past_key_values", "cache"
CACHE = NOW if NOW in ALL_CACHE_NAMES else BEFORE
DUMMIES = [vars(cache_utils)[name] for name in ("DummyLayer",) if name in vars(cache_utils)]  # 5.17 has none
# Bounded already, or empty: stay as they are.
LEFT = (DynamicSlidingWindowLayer, LinearAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer, *DUMMIES)
COMPRESSED = (DynamicLayer, LinearAttentionAndFullAttentionLayer)
PAIRS = ("keys", "values")
STATES = ("conv_states", "recurrent_states")
NUMBERS = ("cumulative_length", "record_past")  # of sliding-window layers, those that have them

# Attention implementations that compute what models mean, to fall back on and to read a first prompt with; and those
# of the hub that `is_hub_flash` knows.
BASES = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4")

WORDS: dict[type, str] = {
    DynamicLayer: "full attention",
    LinearAttentionAndFullAttentionLayer: "linear and full attention in one",
    DynamicSlidingWindowLayer: "a sliding window",
    LinearAttentionLayer: "linear attention",
}


def is_hub_flash(base: str) -> bool:
    """Whether an attention implementation is a kernel of the hub with the interface of flash-attn, as
    `kernels-community/flash-attn2`: transformers then calls it, and masks for it, as it does for flash_attention_2."""
    return "/" in base and ALL_ATTENTION_FUNCTIONS.get(base) is flash_attention_forward


def is_flash(base: str) -> bool:
    """Whether an attention implementation is one of flash-attn, which takes 2-D masks only."""
    return base.startswith("flash_attention_") or is_hub_flash(base)


def seen(mask: Tensor) -> Tensor:
    """What a 4-D mask, or a part of it, lets be seen, bool: sdpa's says so, that of eager attention is an addend."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def is_compressed(layer: Any) -> bool:
    """Whether fastkv puts its own layer in the place of this one."""
    return type(layer) in COMPRESSED


def census(layers: list[Any]) -> str:
    """What the layers are, in words: `24 use a sliding window, 4 linear attention`."""
    kinds = [WORDS.get(type(layer), type(layer).__name__) for layer in layers]
    return ", ".join(f"{kinds.count(kind)} use {kind}" for kind in dict.fromkeys(kinds))


def places(layer: Any) -> Iterator[tuple[str, Any, Any]]:
    """Where the tensors of a layer lie: a name, what holds the tensor, and the key or attribute in it."""
    held = vars(layer)
    for name in PAIRS if isinstance(layer, DynamicLayer) else ():
        if isinstance(held.get(name), Tensor):
            yield name, held, name
    for name in STATES:
        states = held.get(name) or {}
        for place, state in states.items():
            if isinstance(state, Tensor):
                yield f"{name}.{place}", states, place


def tensors(layer: Any) -> dict[str, Tensor]:
    """Every tensor [B, ...] that the layer holds."""
    return {name: holder[place] for name, holder, place in places(layer)}


def nbytes(layer: Any) -> int:
    """Bytes of its tensors."""
    return sum(tensor.nbytes for tensor in tensors(layer).values())


def map_batch(layer: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Apply a change of the batch axis to every tensor, in place where the shape stays."""
    for _, holder, place in places(layer):
        holder[place] = changed(holder[place], change)


def changed(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """The tensor after a change, in place where the shape stays."""
    new = change(tensor)
    return tensor.copy_(new) if new.shape == tensor.shape else fixed(new)


def separate(layer: Any) -> None:
    """Give a shallow copy of a layer tensors of its own."""
    vars(layer).update({name: copy.copy(value) for name, value in vars(layer).items() if isinstance(value, dict)})
    for _, holder, place in places(layer):
        holder[place] = holder[place].detach().clone()


def copied(layer: Any) -> Any:
    """A copy that shares no tensor which is ever written."""
    twin = copy.copy(layer)
    separate(twin)
    return twin


def numbers(layer: Any) -> dict[str, int]:
    """What the layer counts, for the header of a file."""
    found = {name: int(getattr(layer, name)) for name in NUMBERS if hasattr(layer, name)}
    if isinstance(layer, LinearAttentionLayer):
        previous: Any = layer.has_previous_state
        previous = previous if isinstance(previous, dict) else {0: previous}
        found |= {f"has_previous_state.{place}": int(value) for place, value in previous.items()}
    return found


def fits(layer: Any, saved: Mapping[str, Tensor]) -> bool:
    """Whether an empty layer could have held these tensors."""
    pairs = [name for name in PAIRS if name in saved]
    if (isinstance(layer, DynamicLayer) and len(pairs) == 1) or any(saved[name].ndim != 4 for name in pairs):
        return False
    held = [(name, vars(layer)[name]) for name in STATES if name in vars(layer)]
    known = {f"{name}.{place}" for name, states in held for place in (states if isinstance(states, dict) else (0,))}
    return saved.keys() <= known | (set(PAIRS) if isinstance(layer, DynamicLayer) else set())


def fill(layer: Any, saved: Mapping[str, Tensor], counts: Mapping[str, int], device: torch.device) -> None:
    """Make an empty layer what `tensors` and `numbers` said of another."""
    own = {name: tensor.to(device, copy=True) for name, tensor in saved.items()}
    if "keys" in own:
        layer.update(own["keys"], own["values"])
    vars(layer).update({name: counts[name] for name in NUMBERS if name in counts})  # update counted what was left only
    for name, tensor in own.items():
        kind, _, place = name.partition(".")
        if kind not in STATES:
            continue
        many = isinstance(vars(layer)[kind], dict)
        getattr(layer, f"update_{kind.removesuffix('s')}")(tensor, **({"state_idx": int(place)} if many else {}))
    for name, value in counts.items():
        kind, _, place = name.partition(".")
        if kind == "has_previous_state" and isinstance(layer.has_previous_state, dict):
            layer.has_previous_state[int(place)] = bool(value)
        elif kind == "has_previous_state":
            layer.has_previous_state = bool(value)
