"""C++ beside a module, built on first use by torch's own compiler for CPUs, for the processor at hand; it keeps what it
built. Where there is no C++ compiler, callers do without.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent


@cache
def library(name: str) -> ctypes.CDLL | str:
    """What NAME.cpp makes, or why there is nothing, in one line."""
    try:
        from torch._inductor.codecache import CppCodeCache

        source = "\n".join((HERE / file).read_text() for file in ("vectors.hpp", f"{name}.cpp"))
        # Products and sums in one instruction, as torch's own kernels have them.
        return CppCodeCache.load(source, extra_flags=("-ffp-contract=fast",))  # type: ignore[no-any-return]
    except (ImportError, OSError, RuntimeError, AttributeError, TypeError) as problem:
        return f"{type(problem).__name__}: {(str(problem).strip() or 'no reason given').splitlines()[0]}"


def available(name: str) -> bool:
    """Whether NAME.cpp can be used. The first question compiles it."""
    return not isinstance(library(name), str)


def call(name: str, function: str, given: ctypes.Structure) -> None:
    """A function of NAME.cpp, whose only argument is where `given` lies."""
    getattr(library(name), function)(ctypes.byref(given))
