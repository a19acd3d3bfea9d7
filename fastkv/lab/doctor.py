"""`fastkv doctor`: what is installed and usable here, and what would become of a model."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import Module

from .. import __version__
from ..backend import MODULES, flash_attention, why_not
from ..budget import Budget
from ..cache import CacheWorkspace
from ..calibration import HEADS_FILE, kv_shapes
from ..config import Config
from ..cpu import library
from ..errors import FastKVError
from ..integrations.transformers import TESTED, check, modules, sizes, stock
from ..integrations.transformers.cache import build_layers
from ..integrations.transformers.layer import FastKVLayer
from .pretrained import UNREADABLE, first_line, place

Lines = dict[str, str]
# Beside fastkv and torch; the last four hold attention on GPUs, and kernels of the hub.
PACKAGES = ("triton", "transformers", "numpy", "flash-attn", "flash-attn-3", "flash-attn-4", "kernels")
UNTESTED = "not tested: compared with the stock model when it is patched"


def run(options: argparse.Namespace) -> None:
    """The command."""
    budget = Budget.of(int(options.budget) if options.budget.isdecimal() else options.budget)
    config = Config.make(options.policy, budget, None, 16, "auto", "auto", None, options.slots)
    for title, lines in (machine() if options.model is None else checkpoint(options, config)).items():
        print(title)
        for name, text in lines.items():
            print(f"  {name:<{max(map(len, lines))}}  {text}")


def machine() -> dict[str, Lines]:
    """What there is here."""
    versions = {"python": platform.python_version(), "fastkv": __version__}
    versions |= {"torch": torch.__version__}  # with its build
    versions |= {name: version(name) for name in PACKAGES}
    devices = {"cpu": f"{platform.machine()}, {torch.get_num_threads()} threads"}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        gpu = torch.cuda.get_device_properties(index)
        devices[f"cuda:{index}"] = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"
    return {"versions": versions, "devices": devices, "backends": backends()}


def version(package: str) -> str:
    """Of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def backends() -> Lines:
    """What can compute fastkv's operations here, and why the rest cannot."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = library("slots")
    how = f"torch alone, as nothing was compiled: {found}" if isinstance(found, str) else "compiled C++"
    cpu = f"prompts: torch's fused attention; decode steps: {how}"
    theirs = flash_attention(device)
    blocks = "" if theirs is None else f"; blocks of a prompt attend to themselves by {theirs.__module__}"
    about = {"reference": "plain torch, any device", "cpu": cpu, "triton": f"the kernels{blocks}"}
    problems = {name: why_not(name, torch.device("cpu") if name == "cpu" else device) for name in MODULES}
    return {name: f"not available: {why}" if why else f"available ({about[name]})" for name, why in problems.items()}


def checkpoint(options: argparse.Namespace, config: Config) -> dict[str, Lines]:
    """What would become of a checkpoint. Raises FastKVError if there is none that transformers knows."""
    made = without_weights(options.model, None)
    known: Any = made.config
    text = known.get_text_config(decoder=True)
    model = {"class": type(made).__name__, "type": known.model_type}
    dtype = getattr(text, "dtype", None) or getattr(known, "dtype", None) or torch.bfloat16
    for attention in (None, "eager"):
        try:
            bare = made if attention is None else without_weights(options.model, attention)
            found = survey(bare, config, options.context, dtype)
            break
        except FastKVError as error:
            model.setdefault("refused", str(error))
    else:
        return {"model": model}
    if attention is not None:
        model["below"] = "with attn_implementation='eager'"
    model["tested"] = TESTED.get(known.model_type, UNTESTED)
    beside = Path(options.model) / HEADS_FILE
    model["heads"] = f"calibrated, {beside}" if os.path.isfile(beside) else "found or calibrated when first patched"
    layers = {"compressed": f"all {found.layers}"}
    if found.left:
        names = ", ".join(map(str, found.compressed))
        layers["compressed"] = f"{len(found.compressed)} of {found.layers}: {names}"
        layers["left to transformers"] = found.left
    size = f"{config.budget.tokens} tokens per KV head" if config.budget.tokens else f"budget {options.budget}"
    share = f"{found.before / found.after:.1f} times less" if found.after < found.before else "no less"
    memory = {
        "stock cache": f"{found.before / 2**20:.1f} MiB",
        "fastkv": f"{found.after / 2**20:.1f} MiB, {share} ({config.policy.name}, {size})",
    }
    title = f"memory of a sequence of {options.context} tokens in {str(dtype).removeprefix('torch.')}"
    return {"model": model, "layers": layers, title: memory}


def without_weights(path: str, attention: str | None) -> Any:
    """The model of a checkpoint on the meta device. Raises FastKVError if there is none that transformers knows."""
    try:
        where, gguf = place(path, weights=False)
        config = transformers.AutoConfig.from_pretrained(where, **gguf)
        config.dtype = torch.float32 if gguf else config.dtype  # in which weights of a few bits are read
        known = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        auto = transformers.AutoModelForImageTextToText if known else transformers.AutoModelForCausalLM
        with torch.device("meta"):
            return auto.from_config(config, attn_implementation=attention)
    except FastKVError:
        raise
    except UNREADABLE as error:
        raise FastKVError(
            f"cannot read the config of {path} ({first_line(error)}); give a directory with a config.json"
        ) from error


@dataclass(frozen=True)
class Survey:
    """What becomes of the cache of a model.

    Attributes:
        compressed: indices of the layers that are.  layers: how many there are.
        left: what the others are, in words; empty without others.
        before, after: bytes per sequence of the stock cache and of fastkv's, sliding windows included. States of linear
            attention, which are the same in both, are not.
    """

    compressed: list[int]
    layers: int
    left: str
    before: int
    after: int


def survey(model: Module, config: Config, context: int, dtype: torch.dtype) -> Survey:
    """What `patch` would do with a model, and the bytes of a sequence of `context` tokens.

    Args: model: of transformers, with weights or without.  dtype: of its cache.
    Raises: FastKVError if it cannot be patched, as far as that shows without running it.
    """
    config = config.coded(*sizes(check(model, config, runs=False)))
    attentions = modules.attentions(model)
    shapes = kv_shapes(model.config.get_text_config(decoder=True))  # type: ignore[union-attr, operator]
    layers = build_layers(model, config, CacheWorkspace())
    found = [index for index, layer in enumerate(layers) if isinstance(layer, FastKVLayer)]
    before = after = 0
    for index, layer in enumerate(layers):
        window = getattr(layer, "sliding_window", None)
        if index not in attentions or (index not in found and window is None):
            continue
        size = modules.Sizes.of(attentions[index])
        keys, values = (
            torch.empty(1, shapes[index][0], 1, dim, dtype=dtype, device="meta")
            for dim in (size.key_dim, size.value_dim)
        )
        seen = context if window is None else min(context, window - 1)  # the newest token is not among its past
        full = (keys.nbytes + values.nbytes) * seen
        before += full
        if window is None:
            layer.cache.allocate(shapes[index][0] * size.groups, keys, values, context)
        after += full if window is not None else layer.cache.nbytes()
    left = [layer for layer in layers if not isinstance(layer, FastKVLayer)]
    return Survey(found, len(layers), stock.census(left) if left else "", before, after)
