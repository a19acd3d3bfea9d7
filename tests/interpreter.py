"""Triton's interpreter in a part of its time: it patches its language anew at every call inside a kernel, in vain.

What a launch patches, it restores at its end; until then the patches of a module are the same at every call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from triton.language import core
from triton.runtime import interpreter


@functools.cache
def builtins_of(package: Any) -> tuple[str, ...]:
    """Names in a part of the language of what is patched, from before it is."""
    return tuple(name for name, member in inspect.getmembers(package) if core.is_builtin(member))


def patch_builtin(package: Any, *rest: Any) -> None:
    """As the interpreter's own, without a look at every member of the package."""
    for name in builtins_of(package):
        member = getattr(package, name)
        if core.is_builtin(member):
            interpreter._patch_attr(package, name, member, *rest)


def patch_once() -> None:
    """From now on a launch patches the language once for each module whose functions it calls."""
    stock_call, stock_patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    done: set[int] = set()

    def call(self: interpreter.GridExecutor, *args: Any, **kwargs: Any) -> None:
        done.clear()
        stock_call(self, *args, **kwargs)

    def patch(fn: Callable) -> Any:
        if id(fn.__globals__) in done:
            return None
        done.add(id(fn.__globals__))
        return stock_patch(fn)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = call, patch
    interpreter._patch_builtin = patch_builtin
