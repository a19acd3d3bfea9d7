"""C++ beside a module, built on first use by torch's own builder for CPUs, for the processor at hand, and kept in its
cache of compiled code. Where there is no C++ compiler, callers do without.
"""

from __future__ import annotations

import ctypes
import hashlib
import tempfile
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
PROCESSOR = Path("/proc/cpuinfo")


@cache
def library(name: str) -> ctypes.CDLL | str:
    """What NAME.cpp makes, or why there is nothing, in one line."""
    try:
        return ctypes.CDLL(str(built(name)))
    except (ImportError, OSError, RuntimeError, AttributeError, TypeError) as problem:
        return f"{type(problem).__name__}: {(str(problem).strip() or 'no reason given').splitlines()[0]}"


def built(name: str) -> Path:
    """The library of NAME.cpp, which is built unless this source was, with these options, on such a processor.

    Raises: RuntimeError, OSError or ImportError if it cannot be built here.
    """
    from torch._inductor.cpp_builder import CppBuilder, CppOptions
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    # Products and sums in one instruction, as torch's own kernels have them, and its threads.
    options = CppOptions(extra_flags=("-ffp-contract=fast", "-fopenmp"))
    source = "\n".join((HERE / file).read_text() for file in ("vectors.hpp", f"{name}.cpp"))
    asked = CppBuilder(name, f"{name}.cpp", options).get_command_line()
    key = hashlib.sha256("\n".join((source, asked, instructions())).encode()).hexdigest()[:16]
    folder = Path(cache_dir()) / "fastkv"
    target = folder / f"{name}-{key}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as room:  # others may be building it, too
            file = Path(room, f"{name}.cpp")
            file.write_text(source)
            builder = CppBuilder(name, str(file), options, room)
            builder.build()
            Path(builder.get_target_file_path()).replace(target)
    return target


def instructions() -> str:
    """What the processor can do, in its own words; empty where it does not say."""
    lines = PROCESSOR.read_text().splitlines() if PROCESSOR.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def available(name: str) -> bool:
    """Whether NAME.cpp can be used. The first question compiles it."""
    return not isinstance(library(name), str)


def call(name: str, function: str, given: ctypes.Structure) -> None:
    """A function of NAME.cpp, whose only argument is where `given` lies."""
    getattr(library(name), function)(ctypes.byref(given))
