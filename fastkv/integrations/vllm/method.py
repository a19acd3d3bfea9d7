"""What a method needs to know of the model besides queries, keys and values: fitted files, and how keys are turned."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ...config import Config, with_fits
from ...errors import FastKVError
from ..transformers import rotations
from . import settings

SMALL = {  # what a model can be made without while its heads stay as wide as they are
    "vocab_size": 64,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "num_experts": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "pad_token_id": None,
}


def fitted(config: Config, vllm_config: Any) -> Config:
    """The config with the calibration files that it needs, and with how each layer turns its keys if it undoes that.

    Raises: FastKVError if a file is missing or of another model, or if the turning cannot be undone.
    """
    known = vllm_config.model_config.hf_config
    config = with_fits(config, known, settings.vector_file(vllm_config))
    heads, processes = (
        vllm_config.model_config.get_total_num_kv_heads(),
        vllm_config.parallel_config.tensor_parallel_size,
    )
    if (config.values is not None or config.queries is not None) and heads % processes:
        raise FastKVError(
            f"what was fitted to {heads} KV heads cannot be dealt to {processes} processes, which repeat heads; use a "
            "tensor_parallel_size that divides them"
        )
    if not config.undoes_rotation:
        return config
    if vllm_config.model_config.uses_mrope:
        raise FastKVError(
            f"policy {config.policy.name!r} or correction {config.correction.name!r} undoes the rotary embedding, "
            "but the positions of this model have three dimensions; use another policy or correction"
        )
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        twin = AutoModelForCausalLM.from_config(_small(known.get_text_config(decoder=True)), dtype=torch.float32)
    layers = range(twin.config.num_hidden_layers)
    return replace(config, rotations=rotations(twin, layers, halves=config.correction.key_only))


def _small(known: Any) -> Any:
    """The config of a small model of that type, which turns keys as the large one does: that depends on no weight."""
    small, dim = (
        copy.deepcopy(known),
        getattr(known, "head_dim", None) or known.hidden_size // known.num_attention_heads,
    )
    changes = {**SMALL, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 2 * dim, "head_dim": dim}
    for name, value in changes.items():
        if hasattr(small, name):
            setattr(small, name, value)
    return small
