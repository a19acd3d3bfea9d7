"""What a method needs to know of the model besides queries, keys and values: fitted files, and how keys are turned."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from ...calibration import HeadShares, describe, digest_of
from ...config import Config, with_fits, with_shares
from ...errors import FastKVError
from ..transformers import rotations
from ..transformers.calibrate import checked_shares, stored_shares
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
    if (config.vector is not None or config.queries is not None) and heads % processes:
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


def calibrated(config: Config, vllm_config: Any) -> Config:
    """The config with the shares of heads that its budget asks for, of a text as long as vLLM lets one be unless the
    budget says for which. The weights are loaded by now.

    Raises: FastKVError if the model was not calibrated, or if a file is damaged or of another one.
    """
    model, known = vllm_config.model_config, vllm_config.model_config.hf_config

    def find(wanted: str | Path) -> HeadShares:
        weights = weights_digest(vllm_config)
        if wanted != "calibrated":
            return checked_shares(Path(wanted), known, weights)
        found = stored_shares(known, weights)
        if found is None:
            raise FastKVError(
                f"the heads of {describe(known)} were not calibrated, which is not possible inside vLLM; do it with "
                f"fastkv calibrate heads --model {model.model} --out heads.safetensors and give the budget "
                '"heads": "heads.safetensors", or "heads": "uniform"'
            )
        return found

    config = with_shares(config, known, find)
    budget = config.budget
    if budget.shared is None or budget.follows_prompt:
        return config
    processes = vllm_config.parallel_config.tensor_parallel_size
    if model.get_total_num_kv_heads() % processes:
        raise FastKVError(
            f"what {model.get_total_num_kv_heads()} KV heads were calibrated to keep cannot be dealt to {processes} "
            "processes, which repeat heads; use a tensor_parallel_size that divides them, or heads='uniform'"
        )
    return replace(config, budget=replace(budget, context=budget.context or model.max_model_len))


def weights_digest(vllm_config: Any) -> str | None:
    """As that of `fastkv.patch` for the model that vLLM loaded, from its files. None if there are none on this machine
    whose names are those of transformers.
    """
    model, known = vllm_config.model_config, vllm_config.model_config.hf_config
    folder = Path(model.model)
    if not folder.exists():
        where = {"revision": model.revision, "cache_dir": vllm_config.load_config.download_dir}
        try:
            folder = Path(snapshot_download(model.model, local_files_only=True, **where))
        except LocalEntryNotFoundError:
            return None
    with torch.device("meta"):
        twin = AutoModelForCausalLM.from_config(known.get_text_config(decoder=True))
    files: dict[str, Path] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            files |= dict.fromkeys(opened.keys(), file)
    names = sorted(name for name, _ in twin.named_parameters())
    if not files.keys() >= set(names):
        return None

    def parameters() -> Iterator[Tensor]:
        for name in names:
            with safe_open(files[name], framework="pt") as opened:
                yield opened.get_tensor(name)

    return digest_of(known, parameters())


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
