"""What vLLM's `additional_config` says to fastkv, checked once; which of vLLM's own settings do not go with it; and
what a method needs to know of the model besides: fitted files, and how keys are turned.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from ...budget import Budget
from ...cache.prefill import block_tokens
from ...calibration import HeadShares, describe, digest_of
from ...config import BUDGET, EVICT_EVERY, POLICY, Config, with_fits, with_shares
from ...errors import FastKVError, is_number
from ...policies import get
from ..transformers import rotations
from ..transformers.calibrate import stored_shares

KEY = "fastkv"
DEFAULTS: dict[str, Any] = {  # as in `fastkv.patch`
    "policy": POLICY,
    "budget": BUDGET,
    "prefill_block": None,
    "evict_every": EVICT_EVERY,
    "correction": "auto",
    "backend": "auto",
    "slots": "auto",
    "vector": None,
    "prefixes": 0,  # a server's alone, and classes
    "classes": None,
}
CLASS = ("policy", "budget", "correction", "slots")  # settings that a class may have of its own
SMALL = {  # what a model can be made without while its heads stay as wide as they are
    "vocab_size": 64,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "num_experts": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "pad_token_id": None,
}
LEAST_BLOCK = 64  # tokens: what "auto" takes a step to have room for, and rounds down to
Kind = str | int | None  # of a request: its class, tokens that it keeps, None for the server's own settings


def asked(vllm_config: Any) -> bool:
    """Whether there are settings for fastkv; without, nothing is to change."""
    extra = vllm_config.additional_config
    return isinstance(extra, dict) and KEY in extra


def config_of(vllm_config: Any, kind: Kind = None) -> Config:
    """The settings, checked as `fastkv.patch` does; those of all classes are checked with the server's own.

    A policy or a budget may also be a dictionary: {"name": "snapkv", "window": 16}, {"tokens": 512, "sinks": 8}.

    Args: kind: the name of a class, None for the server's own.
    Raises: FastKVError for each that cannot be used, here or in vLLM.
    """
    settings = _given(vllm_config)
    _check_names(f"additional_config[{KEY!r}]", settings, list(DEFAULTS))
    _check_classes(settings.get("classes"))
    chosen = {**DEFAULTS, **settings}
    if kind is not None:
        chosen |= chosen["classes"][kind]
    if chosen["prefill_block"] == "auto":
        size = block_tokens(torch.device(vllm_config.device_config.device_type))
        chosen["prefill_block"] = min(size, max(_room(vllm_config.scheduler_config) // LEAST_BLOCK, 1) * LEAST_BLOCK)
    policy, budget = chosen["policy"], chosen["budget"]
    if isinstance(policy, dict):
        chosen["policy"] = get(**{"name": "", **policy})
    if isinstance(budget, dict):
        _check_names("the budget", budget, [one.name for one in fields(Budget)])
        chosen["budget"] = Budget(**budget)
    _check_prefixes(chosen)
    # Of the model, see `fitted`; of the scheduler; of requests.
    chosen = {name: value for name, value in chosen.items() if name not in ("vector", "prefixes", "classes")}
    config = Config.make(**chosen, static=None).coded(())
    _check_method(config)
    _check_engine(vllm_config, config)
    if kind is None:
        every = [config, *(config_of(vllm_config, name) for name in settings.get("classes") or ())]
        if settings.get("vector") is not None and not any(one.correction.key_only for one in every):
            raise FastKVError("vector=... is for correction='vector', got others; add it or leave vector out")
    return config


def setting(vllm_config: Any, name: str) -> Any:
    """One of the settings of `DEFAULTS`, as it was given.

    "classes": the settings of each class that requests may ask for, None where they may ask for nothing.  "vector": the
    file of VECTOR's maps.  "prefixes": the share of the pages that may keep beginnings of prompts for others.
    """
    return {**DEFAULTS, **_given(vllm_config)}[name]


def _given(vllm_config: Any) -> dict[str, Any]:
    settings = vllm_config.additional_config[KEY]
    if not isinstance(settings, dict):
        raise FastKVError(f"additional_config[{KEY!r}] must be a dictionary of settings, got {settings!r}; give one")
    return settings


def _check_names(what: str, settings: dict[str, Any], known: list[str]) -> None:
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise FastKVError(f"{what} has no setting {', '.join(unknown)}; it has {', '.join(known)}")


def _check_classes(classes: Any) -> None:
    """Raise FastKVError for classes without a name, or whose settings are the engine's."""
    if classes is None:
        return
    named = isinstance(classes, dict) and all(isinstance(name, str) for name in classes)
    if not named or not all(isinstance(one, dict) for one in classes.values()):
        raise FastKVError(
            f'classes must be like {{"small": {{"budget": 256}}}}, got {classes!r}; give names and settings'
        )
    for name, own in classes.items():
        _check_names(f"class {name!r}", own, list(CLASS))


def _check_prefixes(chosen: dict[str, Any]) -> None:
    """Raise FastKVError for a share that is none, or where no step of a prompt ends before the prompt does."""
    share = chosen["prefixes"]
    if not is_number(share) or not 0 <= share <= 1:
        raise FastKVError(
            f"prefixes is the share of pages that may keep beginnings of prompts, 0 to 1, got {share!r}; give one"
        )
    if share and chosen["prefill_block"] is None:
        raise FastKVError(
            f"prefixes={share} keeps what blocks of a prompt left, but prefill_block=None reads a prompt whole; give "
            "prefill_block a number or 'auto'"
        )


def _check_method(config: Config) -> None:
    """Raise FastKVError for a method that needs more than vLLM hands to attention, or reads a prompt twice."""
    if config.deferred:
        raise FastKVError(
            f"{config.deferred} needs the whole context before anything is evicted, vLLM reads it once; use another"
        )
    if config.needs("output"):
        raise FastKVError(
            f"policy {config.policy.name!r} reads the layers' output projections, which vLLM hands to no attention; "
            "use another"
        )


def _check_engine(vllm_config: Any, config: Config) -> None:
    """Raise FastKVError for settings of vLLM that a page for life cannot serve."""
    parallel, cache, scheduler = vllm_config.parallel_config, vllm_config.cache_config, vllm_config.scheduler_config
    attention, block = vllm_config.attention_config, config.prefill_block
    chosen = {one.name for one in (attention.backend, *attention.backend_per_kind.values()) if one is not None}
    if vllm_config.device_config.device_type != "cpu" and "CUSTOM" not in chosen:
        raise FastKVError(
            "fastkv's settings need its attention backend, got vLLM's own; add --attention-config "
            """'{"backend_per_kind": {"full_attention": "CUSTOM"}}'"""
        )
    unusable = {
        "long_prefill_token_threshold": (
            scheduler.long_prefill_token_threshold > 0,
            "a prompt is read in whole blocks of prefill_block tokens",
        ),
        "disable_chunked_mm_input": (
            block is not None and vllm_config.model_config.is_multimodal_model and scheduler.disable_chunked_mm_input,
            "blocks of a prompt end where they end, in pictures, too",
        ),
        "enable_chunked_prefill=False, which vLLM chooses for some pooling,": (
            block is not None and not scheduler.enable_chunked_prefill,
            "blocks of a prompt are read in several steps",
        ),
        "attention that looks ahead within images": (
            vllm_config.model_config.is_mm_prefix_lm,
            "pages are read causally, and --language-model-only serves text alone",
        ),
        "speculative decoding": (
            vllm_config.speculative_config is not None,
            "a draft that is rejected cannot be taken out of a page that has evicted other tokens for it",
        ),
        "a model that caches latents (MLA)": (
            vllm_config.model_config.use_mla,
            "a page holds keys and values",
        ),
        "a KV connector": (
            vllm_config.kv_transfer_config is not None,
            "it carries blocks of tokens, and a page is all that a sequence left",
        ),
        f"kv_cache_dtype={cache.cache_dtype!r}": (
            cache.cache_dtype not in ("auto", str(vllm_config.model_config.dtype).removeprefix("torch.")),
            "its numbers of 8 or 4 bits are chosen with slots",
        ),
        "dual batch overlap": (
            parallel.use_ubatching,
            "halves of a batch are described at once, where steps that are captured look for one of them",
        ),
        "a choice of classes with pipeline parallelism": (
            setting(vllm_config, "classes") is not None and parallel.pipeline_parallel_size > 1,
            "the last process alone is told what requests ask for",
        ),
        "context parallelism": (
            max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1,
            "all tokens of a sequence compete for one page",
        ),
    }
    for what, (wanted, why) in unusable.items():
        if wanted:
            raise FastKVError(f"{what} does not work with a compressed cache: {why}; leave it or fastkv out")
    budget = config.budget
    alike = budget.layers == "uniform" and budget.heads == "uniform" and budget.tokens is not None
    if parallel.pipeline_parallel_size > 1 and not alike:
        raise FastKVError(
            "with pipeline parallelism a budget must be a number of tokens, the same for all layers and heads, got "
            f"{budget}; give tokens and heads='uniform'"
        )
    if parallel.tensor_parallel_size > 1 and budget.heads == "adaptive":
        raise FastKVError(
            "Budget(heads='adaptive') lets heads of all processes trade slots, whose pages have a fixed size; use "
            "heads='uniform' with tensor parallelism"
        )
    length, others = vllm_config.model_config.max_model_len, scheduler.max_num_seqs - 1
    size = length if block is None else min(block, length)
    if _room(scheduler) < size:
        what = "a whole prompt" if block is None else "a block of a prompt"
        raise FastKVError(
            f"prefill_block={block} reads {what} in one step, beside {others} other sequences; that takes "
            f"max_num_batched_tokens of at least {size + others}, got {_room(scheduler) + others}; raise it, "
            "or lower prefill_block or max_num_seqs"
        )


def _room(scheduler: Any) -> int:
    """Tokens of a prompt that fit into a step beside one of every other sequence."""
    offered: int = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    return offered - scheduler.max_num_seqs + 1


# What follows from the model.


def fitted(config: Config, vllm_config: Any) -> Config:
    """The config with the calibration files that it needs, and with how each layer turns its keys if it undoes that.

    Raises: FastKVError if a file is missing or of another model, or if the turning cannot be undone.
    """
    known = vllm_config.model_config.hf_config
    config = with_fits(config, known, setting(vllm_config, "vector") if config.correction.key_only else None)
    if config.vector is not None or config.queries is not None:
        _check_dealt(vllm_config, "fitted")
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


def _check_dealt(vllm_config: Any, what: str) -> None:
    """Raise FastKVError where processes repeat heads."""
    heads = vllm_config.model_config.get_total_num_kv_heads()
    processes = vllm_config.parallel_config.tensor_parallel_size
    if heads % processes:
        raise FastKVError(
            f"what is {what} for {heads} KV heads cannot be dealt to {processes} processes, which repeat heads; use a "
            "tensor_parallel_size that divides them, or heads='uniform'"
        )


def calibrated(config: Config, vllm_config: Any) -> Config:
    """The config with the shares of heads that its budget asks for, of a text as long as vLLM lets one be unless the
    budget says for which. The weights are loaded by now.

    Raises: FastKVError if the model was not calibrated, or if a file is damaged or of another one.
    """
    model, known = vllm_config.model_config, vllm_config.model_config.hf_config

    def find(wanted: str | Path) -> HeadShares:
        found = stored_shares(known, weights_digest(vllm_config), wanted)
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
    _check_dealt(vllm_config, "calibrated")
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
    small = copy.deepcopy(known)
    dim = getattr(known, "head_dim", None) or known.hidden_size // known.num_attention_heads
    changes = {**SMALL, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 2 * dim, "head_dim": dim}
    for name, value in changes.items():
        if hasattr(small, name):
            setattr(small, name, value)
    return small
