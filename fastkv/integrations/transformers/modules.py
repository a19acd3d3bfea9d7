"""What attends in a transformers model: its decoder, the attention modules in it, and what they are like; MLA.

Nothing is known by a model's name. An attention module has a place in the cache (an integer `layer_idx`) and a forward
that goes through transformers' attention interface; what it passes there shows in the code of that forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module
from transformers.pytorch_utils import Conv1D

from ...errors import FastKVError

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "wo")  # what an output projection is called
# What the code of a forward names that projects, turns, caches, attends and projects again, as Llama's and Qwen 3's do.
LIKE_LLAMA = frozenset(
    "shape head_dim q_proj k_proj v_proj o_proj q_norm k_norm view transpose reshape contiguous apply_rotary_pos_emb "
    "update layer_idx ALL_ATTENTION_FUNCTIONS get_interface config _attn_implementation eager_attention_forward "
    "training attention_dropout scaling sliding_window getattr".split()
)
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


def _forward(module: Module) -> CodeType:
    """The code of its forward, whatever wraps it."""
    forward: Any = inspect.unwrap(type(module).forward)
    return forward.__code__  # type: ignore[no-any-return]


def passes(module: Module, keyword: str) -> bool:
    """Whether the forward of an attention module calls something, the attention interface, with that keyword."""
    return any(keyword in names for names in _forward(module).co_consts if isinstance(names, tuple))


def sinks(module: Module) -> str | None:
    """The name of learned attention sinks; None if there are none."""
    return "s_aux" if passes(module, "s_aux") else None


def softcap(module: Module) -> str | None:
    """Name of the soft-cap of logits that an attention module passes on and has set; None without one."""
    if not passes(module, "softcap"):
        return None
    names = (name for name in _forward(module).co_names if "softcap" in name)
    return next((name for name in names if getattr(module, name, None) is not None), None)


def is_like_llama(module: Module) -> bool:
    """Whether the forward of an attention module does no more to a token than Llama's or Qwen 3's may."""
    return LIKE_LLAMA.issuperset(_forward(module).co_names)


def is_cross(module: Module) -> bool:
    """Whether the keys of an attention module are another model's: of an image, which its tokens do not add to."""
    return "cross_attention_states" in _forward(module).co_varnames


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
        if is_latent(module):  # all query heads share one key: the latent, which is the value, then the rotated part
            groups = known.kv_b_proj.weight.shape[0] // (known.qk_nope_head_dim + known.v_head_dim)
            key_dim, value_dim = known.kv_lora_rank + known.qk_rope_head_dim, known.kv_lora_rank
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
    return {dim for size in known for dim in (size.key_dim, size.value_dim)}, any(map(is_latent, found))


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
    return found.weight.T if isinstance(found, Conv1D) else found.weight


def output_projection(module: Module, value_dim: int) -> Tensor:
    """Weight of the output projection, [hidden, Hq, Dv]; under tensor parallelism of this process's heads."""
    weight: Any = output_weight(module)
    local: Tensor = weight.to_local() if hasattr(weight, "to_local") else weight
    return local.detach().unflatten(1, (-1, value_dim))


# Multi-head latent attention (MLA): the cache keeps latents, and attention meets them as they are.
#
# transformers caches of each token a latent c, `kv_lora_rank` numbers, and a rotated part r of its key, both of which
# all heads share; `expand_kv` of the attention module makes keys [K c, r] and values V c of them, K and V being the two
# parts of a head's rows of `kv_b_proj`. Because
#
#     q . [K c, r] = [K^T q', q''] . [c, r]    with q = [q', q'']    and    sum_j p_j V c_j = V (sum_j p_j c_j),
#
# the same attention is one over a single KV head with keys [c, r] and values c. Queries go through K^T before it,
# outputs through V after it ("absorption": DeepSeek-V2, arXiv:2405.04434, section 2.1.2).

LATENT_NEEDS = ("kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # not float8, which comes with scales


def is_latent(module: Module) -> bool:
    """Whether what an attention module caches is a latent that it expands to keys and values itself."""
    return hasattr(type(module), "expand_kv")


def check_latents(module: Any, where: str) -> None:
    """Raise FastKVError unless the module expands latents as told here, by trying it on two of them.

    Args: where: what to call the module.
    """
    missing = [name for name in LATENT_NEEDS if getattr(module, name, None) is None]
    projection = getattr(module, "kv_b_proj", None)
    weight: Any = getattr(projection, "weight", None)
    if missing or not isinstance(projection, Linear) or weight.dtype not in FLOATS:
        dtype = getattr(weight, "dtype", None)
        got = f"no {missing[0]}" if missing else f"{type(projection).__name__} with weights of {dtype}"
        raise FastKVError(
            f"{where} caches latents (MLA), expected a linear kv_b_proj with floating-point weights to expand them, "
            f"got {got}; load the model without quantisation and with its adapters merged, or use it without fastkv"
        )
    like: Any = {"device": weight.device, "dtype": weight.dtype}
    rank, turned = module.kv_lora_rank, module.qk_rope_head_dim
    key = torch.linspace(-2, 3, 2 * (rank + turned), device=like["device"]).sin().to(**like).view(1, 1, 2, -1)
    latent = key[..., :rank]
    with torch.no_grad():
        keys, values = expanded(module, key, latent)
        to_key, to_value = _maps(module)
        rotated = key[..., rank:].expand(-1, len(to_key), -1, -1)
        expected = torch.cat([latent @ to_key.mT, rotated], -1), latent @ to_value.mT
    limit = torch.finfo(weight.dtype).eps ** 0.5
    for found, wanted in zip((keys, values), expected):
        if found.shape != wanted.shape or not (found - wanted).norm() <= limit * wanted.norm():
            raise FastKVError(
                f"{where} caches latents (MLA) and expands them to other keys and values than its kv_b_proj makes of "
                "them, expected these; use the model without fastkv"
            )


def unexpanded(self: Module, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """In the place of `expand_kv`: latents [B, 1, T, rank] and rotated parts as they are cached, key and value."""
    return torch.cat([latent, rotated], -1), latent


def expanded(module: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """What `unexpanded` made, as keys and values of all heads [B, H, T, D]."""
    keys, values = type(module).expand_kv(module, value, key[..., value.shape[-1] :])
    return keys, values


def absorbed(module: Any, query: Tensor) -> Tensor:
    """Queries [B, H, T, nope + rope] as they meet latents: [B, H, T, rank + rope]."""
    plain, turned = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], -1)
    return torch.cat([plain @ _maps(module)[0], turned], -1)


def lifted(module: Any, out: Tensor) -> Tensor:
    """Attention over latents [B, H, T, rank] as attention over values, [B, H, T, v]."""
    return out @ _maps(module)[1].mT


def _maps(module: Any) -> tuple[Tensor, Tensor]:
    """From latents to keys [H, nope, rank] and to values [H, v, rank], of each head."""
    if not isinstance(module.kv_b_proj, Linear):
        raise FastKVError(
            f"kv_b_proj of {type(module).__name__} became a {type(module.kv_b_proj).__name__} after the model was "
            "patched; merge the adapter, or unpatch the model"
        )
    rows = module.kv_b_proj.weight.detach().unflatten(0, (-1, module.qk_nope_head_dim + module.v_head_dim))
    to_key, to_value = rows.split([module.qk_nope_head_dim, module.v_head_dim], 1)
    return to_key, to_value
