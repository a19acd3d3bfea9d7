"""What attends in a transformers model: its decoder, the attention modules in it, and what they are like.

Nothing is known by a model's name. An attention module has a place in the cache (an integer `layer_idx`) and a forward
that goes through transformers' attention interface; what it passes there shows in the code of that forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers.pytorch_utils import Conv1D

from ...errors import FastKVError
from . import latent

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "wo")  # what an output projection is called
HEAD_DIMS = ("head_dim", "head_size", "qk_head_dim")
# Keywords of what attention then depends on besides queries and keys, and what that is called.
UNHANDLED = {
    "position_bias": "a bias that depends on positions",
    "sinks": "sinks that take part in its bias",
    "indices": "which tokens an indexer picks",
    "block_indices": "which blocks of tokens an indexer picks",
}


def decoder(model: Module) -> Module:
    """The stack of layers, without head; of a multimodal model, its language model."""
    found: Any = model.get_decoder() if hasattr(model, "get_decoder") else None  # type: ignore[operator]
    found = model.base_model if found is None else found
    while get_head(found) is not None and isinstance(getattr(found, "model", None), Module):
        found = found.model  # Llama 4 names a language model with its head
    return found  # type: ignore[no-any-return]


def base(model: Module) -> Module:
    """What a model is a head on, where 2-D masks still exist; of a model without a head, itself."""
    found: Any = model.base_model
    return decoder(model) if found is model and get_head(model) is not None else found


def get_head(model: Module) -> Module | None:
    """What turns hidden states into logits; None for a model without."""
    get: Any = getattr(model, "get_output_embeddings", None)
    return None if get is None else get()


def attentions(model: Module) -> dict[int, Module]:
    """The attention module of each layer of the decoder that has one, by the layer's index.

    Raises: FastKVError if several modules share a place in the cache.
    """
    found: dict[int, Module] = {}
    for layer, module in _placed(model):
        if INTERFACE not in _forward(module).co_names:
            continue
        if layer in found:
            raise FastKVError(
                f"layer {layer} of {type(model).__name__} has several attention modules, expected one, got "
                f"{type(found[layer]).__name__} and {type(module).__name__}; such layers cannot be compressed"
            )
        found[layer] = module
    return found


def devices(model: Module) -> dict[int, torch.device]:
    """The device of each layer that has a place in the cache, attention or not."""
    found: dict[int, torch.device] = {}
    for layer, module in _placed(model):
        weight = next(module.parameters(), None)
        if weight is not None:
            found.setdefault(layer, weight.device)
    return found


def _placed(model: Module) -> Iterator[tuple[int, Module]]:
    for module in decoder(model).modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int):
            yield layer, module


@cache
def _code(kind: Any) -> CodeType:
    code: CodeType = inspect.unwrap(kind.forward).__code__
    return code


def _forward(module: Module) -> CodeType:
    """The code of its forward, whatever wraps it."""
    kind: Any = type(module)
    return _code(kind)


def passes(module: Module, keyword: str) -> bool:
    """Whether the forward of an attention module calls something, the attention interface, with that keyword."""
    return any(keyword in names for names in _forward(module).co_consts if isinstance(names, tuple))


def unhandled(module: Module) -> str | None:
    """What the attention of a module depends on that a compressed cache cannot know; None for nothing."""
    return next((what for keyword, what in UNHANDLED.items() if passes(module, keyword)), None)


def sinks(module: Module) -> str | None:
    """The name of learned attention sinks; None if there are none."""
    return "s_aux" if passes(module, "s_aux") else None


def softcap(module: Module) -> str | None:
    """Name of the soft-cap of logits that an attention module passes on and has set; None without one."""
    if not passes(module, "softcap"):
        return None
    names = (name for name in _forward(module).co_names if "softcap" in name)
    return next((name for name in names if getattr(module, name, None) is not None), None)


def is_cross(module: Module) -> bool:
    """Whether the keys of an attention module are another model's: of an image, which its tokens do not add to."""
    return "cross_attention_states" in _forward(module).co_varnames


def is_causal(module: Module) -> bool:
    """Whether tokens see earlier ones only."""
    return getattr(module, "is_causal", True) is not False


def sources(model: Module) -> dict[int, int]:
    """Of each layer that reads the keys and values of another: the index of that one.

    Layers share with the last one before them that has keys and attends to the same tokens (Gemma 3n, Gemma 4).
    """
    own: dict[Any, int] = {}
    read: dict[int, int] = {}
    for layer, module in sorted(attentions(model).items()):
        kind = getattr(module, "layer_type", None)
        if getattr(module, "is_kv_shared_layer", False) and kind in own:
            read[layer] = own[kind]
        else:
            own[kind] = layer
    return read


@dataclass(frozen=True)
class Sizes:
    """What an attention module says of the tensors it hands to attention.

    Attributes:
        groups: query heads per KV head.  key_dim, value_dim: of a head.  device, dtype: of its weights.
    """

    groups: int
    key_dim: int
    value_dim: int
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, module: Module) -> Sizes:
        """Of one attention module; of one that caches latents, of these."""
        known: Any = module
        key_dim = next((dim for name in HEAD_DIMS if (dim := getattr(known, name, None))), None)
        key_dim = key_dim or known.config.hidden_size // known.config.num_attention_heads
        groups, value_dim = getattr(known, "num_key_value_groups", None) or 1, getattr(known, "v_head_dim", None)
        if latent.is_latent(module):
            groups, key_dim, value_dim = latent.sizes(module)
        weights = list(module.parameters())
        return cls(
            groups=groups,
            key_dim=key_dim,
            value_dim=value_dim or key_dim,
            device=weights[0].device,
            dtype=next((weight.dtype for weight in weights if weight.is_floating_point()), torch.float32),
        )


def sizes(found: Iterable[Module]) -> tuple[set[int], bool]:
    """Numbers of keys and values that attention modules hand to attention, and whether any are of latents."""
    known = [Sizes.of(module) for module in found]
    return {dim for size in known for dim in (size.key_dim, size.value_dim)}, any(map(latent.is_latent, found))


def output(module: Module) -> Module | None:
    """The output projection of an attention module; None for one without any that is known by its name."""
    return next((one for name in OUTPUTS if (one := getattr(module, name, None)) is not None), None)


def output_weight(module: Module) -> Tensor:
    """Weight of the output projection, [hidden, Hq * Dv].

    Raises: FastKVError for a module without one that is known by its name.
    """
    found: Any = output(module)
    if found is None:
        raise FastKVError(
            f"this policy reads the output projection of attention, expected one named {', '.join(OUTPUTS)}, got none "
            f"in {type(module).__name__}; use another policy"
        )
    weight: Tensor = found.weight.T if isinstance(found, Conv1D) else found.weight
    return weight


def output_projection(module: Module, value_dim: int) -> Tensor:
    """Weight of the output projection, [hidden, Hq, Dv]; under tensor parallelism of this process's heads."""
    weight: Any = output_weight(module)
    local: Tensor = weight.to_local() if hasattr(weight, "to_local") else weight
    return local.detach().unflatten(1, (-1, value_dim))
