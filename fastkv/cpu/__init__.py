"""The backend of a CPU.

`operations` has the functions of `reference` that a CPU can do faster. What no operator of torch does well is C++
beside this file, built on first use by torch's own builder for CPUs, for the processor at hand, and kept in the user's
cache. Where there is no C++ compiler, callers do without. Nothing here is imported until an operation runs on a CPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..calibration import user_cache

HERE = Path(__file__).parent
FLAGS = ("-ffp-contract=fast", "-fopenmp")  # products and sums in one instruction, and threads, as torch's kernels have
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
    source = "\n".join((HERE / file).read_text() for file in ("vectors.hpp", f"{name}.cpp"))
    asked = "\n".join((source, *FLAGS, torch.__version__, instructions()))
    target = user_cache("compiled") / f"{name}-{hashlib.sha256(asked.encode()).hexdigest()[:16]}.so"
    if not target.exists():
        # To import it takes a second and 140 MB, which is why it is not asked for its command line each time.
        from torch._inductor.cpp_builder import CppBuilder, CppOptions

        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as room:  # others may be building it, too
            file = Path(room, f"{name}.cpp")
            file.write_text(source)
            builder = CppBuilder(name, str(file), CppOptions(extra_flags=FLAGS), room)
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


@cache
def structs(name: str) -> SimpleNamespace:
    """The structs of NAME.cpp that its functions are given, with pointers as addresses."""
    made: dict[str, Any] = {"int64_t": ctypes.c_int64, "float": ctypes.c_float, "double": ctypes.c_double}
    text = (HERE / f"{name}.cpp").read_text().partition('extern "C" {\n')[2]
    for title, body in re.findall(r"^struct (\w+) {\n(.*?)^};", text, re.M | re.S):
        fields = []
        for kind, star, names in re.findall(r"^    (?:const )?(\w+)(\*?) ([^(){};]+);", body, re.M):
            for pointer, field, number in re.findall(r"(\*?)(\w+)(?:\[(\d+)\])?", names):
                one = ctypes.c_void_p if star or pointer else made[kind]
                fields.append((field, one * int(number) if number else one))
        made[title] = type(title, (ctypes.Structure,), {"_fields_": fields})
    return SimpleNamespace(**made)


def call(name: str, function: str, given: ctypes.Structure) -> int:
    """A function of NAME.cpp, whose only argument is where `given` lies. Returns: what it does, if it is an int."""
    found: int = getattr(library(name), function)(ctypes.byref(given))
    return found


def bound(name: str, function: str, given: ctypes.Structure) -> Callable[[], int]:
    """`call` with what will be in `given` by then, looked up once."""
    return partial(getattr(library(name), function), ctypes.byref(given))


def run(name: str, function: str, struct: str, *given: Any) -> None:
    """`call` with a struct of NAME.cpp that is made of numbers and of tensors, each in one piece."""
    fields = (one.data_ptr() if isinstance(one, torch.Tensor) else one for one in given)
    call(name, function, getattr(structs(name), struct)(*fields))
