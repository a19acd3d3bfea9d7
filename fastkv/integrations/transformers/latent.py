"""Multi-head latent attention (MLA): the cache keeps latents, and attention meets them as they are.

transformers caches of each token a latent c, `kv_lora_rank` numbers, and a rotated part r of its key, both of which all
heads share; `expand_kv` of the attention module makes keys [K c, r] and values V c of them, K and V being the two parts
of a head's rows of `kv_b_proj`. Because

    q . [K c, r] = [K^T q', q''] . [c, r]    with q = [q', q'']    and    sum_j p_j V c_j = V (sum_j p_j c_j),

the same attention is one over a single KV head with keys [c, r] and values c. Queries go through K^T before it, outputs
through V after it ("absorption": DeepSeek-V2, arXiv:2405.04434, section 2.1.2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module

from ...errors import FastKVError

NEEDED = ("kv_b_proj", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # not float8, which comes with scales


def is_latent(module: Module) -> bool:
    """Whether what an attention module caches is a latent that it expands to keys and values itself."""
    return hasattr(type(module), "expand_kv")


def sizes(module: Any) -> tuple[int, int, int]:
    """Query heads of a module, all of which share the one latent; numbers of a cached key, the latent and then the
    rotated part; and of the latent, which is the value, too.
    """
    heads = module.kv_b_proj.weight.shape[0] // (module.qk_nope_head_dim + module.v_head_dim)
    return heads, module.kv_lora_rank + module.qk_rope_head_dim, module.kv_lora_rank


def check(module: Any, where: str) -> None:
    """Raise FastKVError unless the module expands latents as this file says, by trying it on two of them.

    Args: where: what to call the module.
    """
    missing = [name for name in NEEDED if getattr(module, name, None) is None]
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
    rows = module.kv_b_proj.weight.detach().unflatten(0, (-1, module.qk_nope_head_dim + module.v_head_dim))
    to_key, to_value = rows.split([module.qk_nope_head_dim, module.v_head_dim], 1)
    return to_key, to_value
