"""Triton's interpreter in a part of its time: what it looks up or computes again and again, in vain, it does once.

What a launch patches in its language, it restores at its end; until then the patches of a module are the same at every
call. What describes a shape is the same whenever it is made. Every sum of integers is computed twice, for an assertion
that only `debug` turns on.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from triton.language import core
from triton.language.semantic import TritonSemantic
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


def remember_types() -> None:
    """From now on what describes a shape is made once, and numpy's types are looked up by name."""
    stock_block, stock_tensor, stock_numpy = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    stock_broadcast = TritonSemantic.broadcast_impl_value
    blocks: dict[tuple[int, ...], tuple[core.tuple, int]] = {}  # shape and number of elements, as a type says them
    tensors: dict[tuple[int, ...], tuple[core.tuple, core.constexpr]] = {}  # and as a tensor does
    types: dict[str, np.dtype] = {}

    def block(self: core.block_type, element_ty: core.dtype, shape: Sequence) -> None:
        self.sizes = sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        if sizes in blocks:
            self.element_ty, self.name = element_ty, f"<{sizes}, {element_ty}>"
            self.shape, self.numel = blocks[sizes]
        else:
            stock_block(self, element_ty, shape)
            blocks[sizes] = self.shape, self.numel

    def tensor(self: core.tensor, handle: Any, type: core.dtype) -> None:
        sizes = getattr(type, "sizes", ())
        if sizes in tensors:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = tensors[sizes]
        else:
            stock_tensor(self, handle, type)
            tensors[sizes] = self.shape, self.numel

    def numpy(tt_dtype: core.dtype) -> np.dtype:
        name = tt_dtype.scalar.name
        if name not in types:
            types[name] = stock_numpy(tt_dtype)
        return types[name]

    def broadcast(self: TritonSemantic, lhs: core.tensor, rhs: core.tensor) -> tuple[core.tensor, core.tensor]:
        alike = getattr(lhs.type, "sizes", ()) == getattr(rhs.type, "sizes", ())
        return (lhs, rhs) if alike else stock_broadcast(self, lhs, rhs)

    core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype = block, tensor, numpy
    TritonSemantic.broadcast_impl_value = broadcast


def skip_overflow_sums() -> None:
    """From now on no integer operation computes a second time, in int64, what only an assertion of `debug` reads."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
