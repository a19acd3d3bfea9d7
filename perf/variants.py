"""What kernels are compiled for: launches by the backend's own functions, recorded for every chip and run on none.

A case is a call of a function of `fastkv.kernels` with tensors that have shapes and no memory. What its launches would
have compiled is a variant: types, specialisations, constants and options are the launchers' own.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import fastkv.kernels
from fastkv import ops
from fastkv.cache.pages import PageFormat
from fastkv.errors import FastKVError
from fastkv.kernels import _flash, operations
from fastkv.reference import Centroids, LayerState, Recovery, Selection, Spec
from fastkv.reference.slots import Codec, RowFormat
from fastkv.rotary import Rotary

from .micro.states import filled, spec

TOKENS, SPARE = 1024, 16  # of a head: a budget, and what comes between evictions
BLOCK = 500  # of a prompt: no multiple of 16
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FOUR = ("int4", "k8v4")  # whose values are packed
# Kernels that read nothing else, a few bytes at a time.
NUMBERS = (
    "_flash.runs slot_signals.key slot_signals.rank pooling.pool z_scores.needed expected_attention.weight"
).split()
LEAVING = ("compact.moments", "compact.merge")
PREFILL = "prefill_attention.prefill"
AHEAD = "expected_attention.ahead"
SHARES = (0.3, 0.5, 0.7, 0.9, 1.1, 1.3, 1.5, 1.7)  # of heads of unequally many slots
# A line: a function or score below and its arguments, see `cases`.
CASES = Path(__file__).with_suffix(".txt").read_text()
BATCH = {16: 1, 8: 4, 4: 8, 1: 16}  # in which 8 heads have so many programs each, on an H200


@dataclass(frozen=True)
class Chip:
    """What limits a kernel: shared memory per SM and per CTA in bytes (1 KiB per CTA is reserved), and its target."""

    target: GPUTarget
    per_sm: int
    per_cta: int


CHIPS = {
    "80": Chip(GPUTarget("cuda", 80, 32), 164 << 10, 163 << 10),
    "90": Chip(GPUTarget("cuda", 90, 32), 228 << 10, 227 << 10),
    "100": Chip(GPUTarget("cuda", 100, 32), 228 << 10, 227 << 10),
    "gfx942": Chip(GPUTarget("hip", "gfx942", 64), 64 << 10, 64 << 10),
}


def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Shapes(Codec):
    """Of slots without memory: what is decoded has none, either."""

    def decode(self, form: RowFormat, codes: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """A tensor of the shape of the rows."""
        return new(*codes.shape[:-1], form.dim(codes.shape[-1]), dtype=dtype)


def layer(
    dim: int, *, batch: int = 1, heads: int = 8, tokens: int = TOKENS, spare: int = SPARE, dtype: str = "bf16",
    correction: str = "moments", cross: bool = False, parts: int = 31, groups: int = 4, cap: bool = False,
    attention: bool = False, slots: str = "model", ragged: bool = False, rows: bool = False, sinks: bool = False,
) -> tuple[LayerState, Spec]:  # fmt: skip
    """A layer and how it attends.

    Args: cross: whether the moments have no copy in half precision; parts: centroids of a head; rows: whether the batch
        lives in pages.
    """
    kept, shares = dict(correction=correction, attention=attention, slots=slots), SHARES[:heads] if ragged else None
    like: dict[str, Any] = dict(shares=shares, dtype=DTYPES[dtype], device="meta")
    state = filled(batch, heads, dim, tokens, free=spare, **kept, **like)
    state.exact.codec = Shapes()
    if cross:
        state.moments.slope = None
    if isinstance(state.parts, Centroids):
        state.parts = Centroids.empty(batch, heads, parts, dim, dim, "meta", torch.bfloat16)
    if rows:
        state = PageFormat.of(state).allocate(batch + 1, "meta").at(new(batch, dtype=torch.int64))
    if state.approx is not None:
        state.recovery = Recovery(new(heads, dim, dim), new(TOKENS, dim // 2), new(TOKENS, dim // 2))
    state.sink_logits = new(heads * groups) if sinks else None
    rule = spec(correction, tokens, "triton", spare=spare)
    return state, replace(rule, softcap=50.0) if cap else rule


def block(state: LayerState, length: int, groups: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of so many tokens."""
    sizes = (state.heads * groups, state.heads, state.heads)
    return tuple(new(state.batch, size, length, dim, dtype=state.exact.dtype) for size in sizes)


def candidates(state: LayerState, more: int = 0) -> tuple[int, int, int]:
    """Batch, heads, and the slots of a head and so many more."""
    return state.batch, state.heads, state.exact.limit + more


def mask(*shape: int) -> Tensor:
    return new(*shape, dtype=torch.bool)


def decode(dim: int, splits: int = 16, groups: int = 4, append: bool = True, **kept: Any) -> None:
    state, rule = layer(dim, groups=groups, **{"batch": BATCH[splits]} | kept)
    q, k, v = block(state, 1, groups, dim)
    operations.decode_step(q[:, :, 0], *((k, v) if append else (None, None)), state, rule)


def prefill(dim: int, groups: int = 4, flash: bool = False, **kept: Any) -> None:
    """A block of a prompt; flash: beside flash-attn."""
    state, rule = layer(dim, groups=groups, **kept)

    def attend(q: Tensor, *rest: Any, **how: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), new(q.shape[1], len(q))

    with mock.patch.object(_flash, "flash_attention", lambda device: attend if flash else None):
        operations.prefill_attention(*block(state, BLOCK, groups, dim), mask(state.batch, BLOCK), state, rule)


def compact(dim: int, length: int = 512, known: bool = False, **kept: Any) -> None:
    """What leaves after a block of that length; between tokens if there is none."""
    state, rule = layer(dim, **kept)
    shape = candidates(state, length)
    chosen = Selection(mask(*shape), new(*shape[:2], dtype=torch.int64))
    places, numbers, fresh = state.exact.positions, new(*shape) if known else None, None
    state.exact.memory = torch.empty_strided(places.shape, places.stride(), device="meta") if known else None
    if length:
        _, k, v = block(state, length, 1, dim)
        fresh = k, v, new(*k.shape[:3], dtype=torch.int32)
    operations.compact(mask(*shape), chosen, fresh, numbers, state, rule)


def remember(dim: int, parts: int = 31, most: int = SPARE, **kept: Any) -> None:
    """At most so many tokens join centroids."""
    state, rule = layer(dim, correction="centroids", parts=parts, **kept)
    shape = candidates(state, max(most - SPARE, 0))
    _, k, v = block(state, shape[2], 1, dim)
    positions = new(*shape, dtype=torch.int32)
    operations.remember(k, v, positions, mask(*shape), mask(*shape), most, state, rule)


def signals(dim: int, **kept: Any) -> None:
    """What is known of slots before an eviction."""
    state, rule = layer(dim, **kept)
    operations.slot_signals(new(*candidates(state), dtype=torch.int32), state, rule)


def reading(dim: int, **kept: Any) -> None:
    """What a layer chooses from."""
    state, _ = layer(dim, **kept)
    _, k, v = block(state, BLOCK, 4, dim)
    exact, given = state.exact, (k, v, mask(1, BLOCK), state.seen)
    for memory in (new(*exact.positions.shape), None):
        operations.candidates(exact.keys, exact.values, exact.positions, memory, exact.lengths, *given, 4, 32)


def rows(dim: int, **kept: Any) -> None:
    """Copies of pages, alone and with the tokens of an engine, and back."""
    state, rule = layer(dim, rows=True, **kept)
    moves = ("read_rows", "write_rows")
    with mock.patch.multiple(ops, **{name: getattr(operations, name) for name in moves}):
        ops.taken(state, rule, equal=True)
        q, k, v = (new(2 * BLOCK, heads, dim, dtype=state.exact.dtype) for heads in (32, 8, 8))
        own, q, k, v = ops.read(state, rule, q, k, v, new(state.batch, BLOCK, dtype=torch.int64), True)
        ops.write(state, own, q, *new(3, 2 * BLOCK, dtype=torch.int64), new(2 * BLOCK, 32, dim, dtype=q.dtype))


def residuals(dim: int, attention: bool = True, dtype: str = "bf16", **kept: Any) -> None:
    """What moments miss of stored tokens."""
    state, _ = layer(dim, dtype=dtype, **kept)
    exact, received = state.exact, new(*candidates(state)) if attention else None
    operations.moment_scores(received, exact.keys, exact.values, state.moments, 0.1)


def standard() -> None:
    """z-scores of three scores of each candidate, and their sum."""
    operations.z_scores(new(3, 1, 8, 4096), mask(1, 8, 4096))
    unlike, expected, reread = new(3, 1, 8, 4096)
    for given in ((expected, None), (expected, reread)):
        operations.needed_scores(unlike, *given, mask(1, 8, 4096))


def selected(length: int, ragged: bool = False) -> None:
    """The best of so many candidates; ragged: as many as a tensor says of each head."""
    shape, tokens = (1, 8, length), new(1, 8, dtype=torch.int64) if ragged else TOKENS
    operations.select(new(*shape), new(*shape, dtype=torch.int32), mask(*shape), mask(*shape), tokens)


def queries(keys: Tensor, num: int) -> Tensor:
    """Of four heads for each one of keys."""
    return new(1, 4 * keys.shape[1], num, keys.shape[-1], dtype=keys.dtype)


def before(keys: Tensor) -> dict[str, Any]:
    """What tells kernels how keys were before the rotary embedding."""
    return {"positions": new(*keys.shape[:3], dtype=torch.int32), "rotary": Rotary(new(keys.shape[-1] // 2))}


# Scores of a prompt: functions of its keys [1, 8, 4096, D], of which are real, and of the other words of a case.
SCORES: dict[str, Callable[..., Any]] = {
    "keydiff": lambda keys, real: operations.keydiff_scores(keys, "normalized_mean", distance="cosine", mask=real),
    "manifold": lambda keys, real, window: operations.manifold_scores(keys, window, "linf", mask=real),
    "leverage": lambda keys, real, columns=64: operations.sketched_leverage(
        keys, new(keys.shape[-1], columns), "cholesky", mask=real, centre=True
    ),
    "mass": lambda keys, real, chunk=256, ordered=False, sinks=False: operations.noncausal_attention_mass(
        queries(keys, 4096), keys, 0.1, chunk, mask=real if ordered else None, sink_logits=new(32) if sinks else None
    ),
    "attended": lambda keys, real: operations.most_attended(queries(keys, BLOCK), keys, new(1, 32, BLOCK), 0.1),
    "unlike": lambda keys, real: operations.keydiff_scores(keys, "normalized_mean", mask=real, **before(keys)),
    "ahead": lambda keys, real: operations.queries_ahead(
        queries(keys, BLOCK), before(keys)["positions"], real, before(keys)["rotary"], 512, 4
    ),
    "expected": lambda keys, real: operations.expected_attention(
        keys, keys, *(new(1, 32, rows, keys.shape[-1]) for rows in (1, keys.shape[-1])),
        new(1, 1, 1, dtype=torch.int64), 0.1, 0.0, new(*keys.shape[:3]), valid=real,
    ),
    "window": lambda keys, real, bias=False, cap=False: operations.observed_attention(
        queries(keys, BLOCK), keys, before(keys)["positions"], real, 0.1, 50.0 if cap else None, window=32,
        log_mass=new(1, 32, BLOCK), bias=new(1, 8, 4096) if bias else None,
    ),
    "pooled": lambda keys, real: operations.pool_scores(new(*keys.shape[:3]), 7, before(keys)["positions"], real),
    "chunked": lambda keys, real: operations.chunk_mean(new(*keys.shape[:3]), 4, before(keys)["positions"], real),
}  # fmt: skip


def launch(call: str, **given: Any) -> None:
    """What a case says."""
    if call in SCORES:
        keys = new(1, 8, 4096, given.pop("dim"), dtype=torch.bfloat16)
        SCORES[call](keys, mask(1, 8, 4096), **given)
    else:
        globals()[call](**given)


def cases(table: str = CASES) -> Iterator[tuple[str, dict[str, Any]]]:
    """A function above and its arguments, for all combinations of each line: words are true, or names and values."""
    for call, *words in (line.split() for line in table.strip().splitlines()):
        named = [word.partition("=") for word in words]
        for values in product(*(text.split(",") for *_, text in named)):
            read = [int(value) if value.isdigit() else value or True for value in values]
            yield call, dict(zip((name for name, *_ in named), read))


@dataclass(frozen=True)
class Variant:
    """One way in which a kernel is compiled for a chip.

    Attributes: of: module and function.  options: of the launch.  given: arguments of its first case.
    """

    of: str
    chip: str
    kernel: JITFunction
    source: ASTSource
    options: dict[str, Any]
    given: dict[str, Any]

    @property
    def name(self) -> str:
        words = (name if value is True else f"{name}={value}" for name, value in self.given.items())
        return " ".join((self.of, *words))

    def constant(self, name: str) -> Any:
        return self.source.constants[(self.kernel.arg_names.index(name),)]

    @property
    def tickets(self) -> bool:
        return any(name == "tickets_ptr" and kind != "constexpr" for name, kind in members(self.source.signature))

    @property
    def wide(self) -> bool:
        whole = self.of == "select.select" and self.source.signature["key_ptr"] == "constexpr"  # rows of any length
        ragged = self.of == "compact.plan" and "ragged" in self.given  # as many slots as the longest head has
        return not (whole or ragged or self.of in NUMBERS)

    @property
    def narrow(self) -> bool:
        """Whether loads of 2 bytes are fine, of tiles of no more numbers than threads, or twice as many codes."""
        dim, slots = self.given.get("dim", 0), self.given.get("slots", "model")
        if self.of == PREFILL:
            tile, threads = self.constant("TILE"), CHIPS[self.chip].target.warp_size * self.options["num_warps"]
            centroids = self.given.get("correction") == "centroids"
            evicted = tile.BLOCK_C * tile.SLICE if centroids else tile.SEED * tile.BV
            return slots in FOUR or evicted <= threads
        coded = slots != "model" and dim >= 256
        return slots in FOUR or (self.of in LEAVING and (dim > 256 or coded)) or (self.of == AHEAD and dim > 128)

    @property
    def once(self) -> int:
        """No product of so many columns or more is computed by several warps; 0 if some may be. With a few centroids it
        costs nothing twice."""
        return self.constant("TILE").BLOCK_N if self.of == PREFILL else 0


def members(kinds: Any) -> Iterator[tuple[str, Any]]:
    """Names and types of arguments, those in tuples too."""
    for name, kind in kinds.items() if isinstance(kinds, dict) else zip(kinds._fields, kinds):
        yield from members(kind) if hasattr(kind, "_fields") else [(name, kind)]


def recorded(chip: str, table: str = CASES) -> list[Variant]:
    """What launches of the cases would have compiled for a chip, each once; nothing of what it has no kernels for."""
    target, found, given, hip = CHIPS[chip].target, {}, {}, CHIPS[chip].target.backend == "hip"

    def note(self: JITFunction, key: Any, kinds: Any, device: Any, constants: Any, options: Any, *rest: Any) -> None:
        name = self.module.rpartition(".")[2] + self.__name__.replace("_", ".", 1).removesuffix("_kernel")
        source = ASTSource(self, kinds, constants, rest[0])
        found.setdefault((self, str(key)), Variant(name, chip, self, source, vars(options), given))

    asked = {"chip_of": lambda device: "hip" if hip else chip, "on_hip": lambda: hip}
    driver = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: chip, get_current_stream=lambda device: 0
    )
    with ExitStack() as changes:
        changes.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver))
        changes.enter_context(mock.patch.object(JITFunction, "_do_compile", note))
        for one in pkgutil.iter_modules(fastkv.kernels.__path__):
            module = importlib.import_module(f"fastkv.kernels.{one.name}")
            for name in asked.keys() & vars(module).keys():
                changes.enter_context(mock.patch.object(module, name, asked[name]))
        for call, given in cases(table):
            try:
                launch(call, **given)
            except FastKVError:
                if chip == "90":
                    raise
    return list(found.values())
