"""The operations of the flow: what one layer does with its state (attend to a block or a token, shrink, remember what
leaves), and scores of tokens. Every caller comes here.

Each operation that has a kernel is one opaque torch operator (`torch.ops.fastkv.*`, see `operator`). Its body is a
backend's: Triton kernels (imported on first use) on an accelerator, `fastkv.cpu` on a CPU, or the reference.
`backend="triton"` on a CPU runs the kernels in Triton's interpreter, for tests. Functions without a kernel are the
reference itself, on any device. Operations without a body here have signature and docstring of the reference's function
of that name; which backend runs is the spec's or, where there is none, that of one more keyword, `backend`.
"""

from __future__ import annotations

import functools
from math import prod
from typing import Any

import torch
from torch import Tensor

from .. import corrections, reference
from ..backend import implementation, resolve
from ..errors import FastKVError
from ..reference import (
    Evicted,
    LayerState,
    Moments,
    Slots,
    Spec,
    compute_dtype,
    moment_estimate,
    moment_residual,
    output_norms,
    protected,
    random_scores,
)
from ..rotary import Rotary
from .operator import by_keyword, by_spec, nothing, opaque


def _attended(q: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for attention of q [..., D] to values of that width, and two log-sum-exps."""
    lse = q.new_empty(q.shape[:-1], dtype=compute_dtype(q))
    return q.new_empty(*q.shape[:-1], width), lse, torch.empty_like(lse)


# Kernel: one launch, append included; no allocation but the results.
decode_step = opaque(lambda q, k, v, state, spec: _attended(q, state.exact.value_dim), changes=("state",))(
    by_spec(reference.decode_step)
)


@opaque(nothing, changes=("out", "state"))
def decode_into(q: Tensor, k: Tensor | None, v: Tensor | None, out: Tensor, state: LayerState, spec: Spec) -> None:
    """`decode_step`, whose attention is written into `out` [B, Hq, Dv]. Kernel: one launch, if that is contiguous."""
    backend = resolve(spec.backend, q.device)
    if backend == "reference":
        made, _, _ = decode_step(q, k, v, state, spec)
    else:
        made, _, _ = implementation("decode_step", backend, q.device.type)(q, k, v, state, spec, out)
    if made is not out:
        out.copy_(made)


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    moments: Evicted | None,
    scale: float,
    softcap: float | None = None,
    *,
    order: int | None = 1,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.decode_attention`. Kernel: one launch, and copies of what is not contiguous."""
    q, keys, values = q.contiguous(), *reference.check_decode(q, keys, values, lengths, moments)
    keys, values, lengths = keys.contiguous(), values.contiguous(), lengths.clamp(max=keys.shape[2]).int()
    counted = moments if isinstance(moments, Moments) else Moments(torch.zeros_like(lengths, dtype=torch.int64))
    parts = None if isinstance(moments, Moments) else moments
    seen = torch.zeros(len(q), dtype=torch.int64, device=q.device)
    state = LayerState(Slots(keys, values, lengths), seen, counted, parts=parts)
    return decode_step(q, None, None, state, Spec(scale, softcap, corrections.reading(state, order), backend))


# Kernel: one launch.
prefill_attention = opaque(lambda q, k, v, *rest: _attended(q, v.shape[-1]))(
    by_spec(reference.prefill_attention, changes=False)
)


def _slot_outputs(positions: Tensor, state: LayerState, spec: Spec) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def made(there: bool, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(positions, dtype=dtype) if there else positions.new_empty(0, dtype=dtype)

    attends = state.exact.attention is not None
    return made(True, torch.bool), made(True, torch.bool), made(attends, torch.float32), made(attends, torch.float32)


# Kernel: one launch, unless unequal heads collect attention.
slot_signals = opaque(_slot_outputs, changes=("state",))(by_spec(reference.slot_signals))

# Static shapes, no host sync. Kernel: for centroids, one launch while decoding.
remember = opaque(nothing, changes=("state",))(by_spec(reference.remember))

# Kernel: two launches, three with moments; survivors stay in place, only holes are filled; refreshes `moments.slope`.
compact = opaque(nothing, changes=("state",))(by_spec(reference.compact))


def _candidates(
    keys: Tensor, values: Tensor, positions: Tensor, memory: Tensor | None, lengths: Tensor, k: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    shape = *positions.shape[:2], positions.shape[2] + k.shape[2]
    both = [t.new_empty((*shape, t.shape[-1]) if positions.shape[2] else (0,)) for t in (keys, values)]
    known = keys.new_empty(0 if memory is None else shape, dtype=torch.float32)
    real = positions.new_empty(shape, dtype=torch.bool)
    return both[0], both[1], positions.new_empty(shape), real, torch.empty_like(real), known


# Kernel: one launch.
candidates = opaque(_candidates)(by_keyword(reference.candidates))


def workspace(num_heads: int, state: LayerState, spec: Spec, room: list[Tensor] | None = None) -> list[Tensor]:
    """Scratch for the decode steps of `num_heads` query heads, for `LayerState.scratch`; empty without kernels.

    Layers whose slots have the same sizes may share it.
    Args: room: of `workspace_room`, to be viewed; None for new memory.
    """
    if resolve(spec.backend, state.seen.device) != "triton":
        return []
    return implementation("workspace", "triton", state.seen.device.type)(num_heads, state, room)


def workspace_room(
    num_heads: int, state: LayerState, spec: Spec, most: int, device: torch.device
) -> list[tuple[int, torch.dtype]]:
    """Numbers and dtype of each tensor of the memory that `workspace` views for batches of up to `most` sequences, one
    at a time; nothing without kernels. All of it has to be zero at first.

    Args: state: a layer's, of any batch; it may be on "meta".  device: where it will be, which says how many programs
        run at once; where there is no GPU, as many as on an H100.
    """
    if resolve(spec.backend, device) != "triton":
        return []
    return implementation("workspace_room", "triton", device.type)(num_heads, state, most, device)


# Copies of the rows that a batch lives in, where they are pages: all tensors of the state in one launch, with blocks
# of tokens that are read there, or were. They mean `LayerState.taken` and `put`, and `reference.blocks_of` and
# `of_blocks`. A tensor of the copy is contiguous, as kernels want it.

BLOCK = 2048  # words that a program copies
ALIGNED = 128  # bytes: where each tensor of a copy begins, a line of a GPU's cache
LAST = 2**31 - 1


def _blocks(q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    made = [part.new_empty(len(tokens), part.shape[1], tokens.shape[1], part.shape[2]) for part in (q, k, v)]
    return made[0], made[1], made[2]


@opaque(_blocks, changes=("copy",))
def read_rows(
    q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, pages: Tensor, copy: Tensor, table: Tensor, starts: Tensor | None,
    rows: Tensor, slots: int, programs: int, block: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`reference.blocks_of`, and stretches of the rows of pages [P, bytes] to a copy, both uint8. Only kernels do this.

    Args: table [6, F] int64, of each stretch: its first program, its first byte in a page, bytes of one row before it
        in the copy, bytes of its row in the copy, of a slot if it is a slab, and of a word.  starts: [P, Hkv + 1] of
        slabs, of which the copy has `slots` slots of each head.  rows [B] int64.  programs: how many each row has, of
        `block` words each.
    """
    moved = pages, copy, table, starts, rows, slots, programs, block
    return implementation("read_rows", "triton", q.device.type)(q, k, v, tokens, *moved)  # type: ignore[no-any-return]


@opaque(nothing, changes=("out", "pages"))
def write_rows(
    blocks: Tensor, own: Tensor, sequence: Tensor, within: Tensor, out: Tensor, pages: Tensor, copy: Tensor,
    table: Tensor, starts: Tensor | None, rows: Tensor, slots: int, programs: int, block: int,
) -> None:  # fmt: skip
    """`read_rows`, back, and `reference.of_blocks`."""
    moved = pages, copy, table, starts, rows, slots, programs, block
    implementation("write_rows", "triton", out.device.type)(blocks, own, sequence, within, out, *moved)


@functools.lru_cache(maxsize=4096)  # of each layer, whose heads may differ, a few
def _table(stretches: tuple[tuple[int, int, int], ...], device: torch.device) -> tuple[Tensor, list[int], int, int]:
    """The table for stretches of which are given: first byte in a page, bytes of a row of the copy, of a slot.

    Returns: with it, bytes of one row before each in the copy, and of all; the number of programs.
    """
    columns, places, end, programs = [], [], 0, 0
    for first, size, slot in stretches:
        word = 1 if (slot or size) % 4 else 4
        columns.append((programs, first, end, size, slot, word))
        places.append(end)
        end += -(-size // ALIGNED) * ALIGNED
        programs += -(-size // (word * BLOCK))
    columns += [(LAST, 0, 0, 0, 0, 1)] * ((1 << (len(columns) - 1).bit_length()) - len(columns))
    return torch.tensor(list(zip(*columns)), device=device), places, end, programs


def _moved(
    state: LayerState, names: list[str], copy: Tensor | None = None
) -> tuple[dict[str, Tensor], tuple[Any, ...]]:
    """Where the named tensors of the batch's rows are in their pages and in a copy, which is made if there is none.

    Of a slab, the copy has heads of equally many slots. Returns: the tensors that are views of the copy, and arguments
    of `read_rows`.
    """
    named, exact, rows, pages = dict(state.named_tensors()), state.exact, state.rows, state.pages
    assert rows is not None and pages is not None
    starts, stretches, shapes = exact.starts, [], []
    for name in names:
        tensor = named[name]
        if tensor.stride(0) * tensor.itemsize != pages.stride(0):
            raise FastKVError(f"rows: {name} must be a view of the state's pages; see fastkv.cache.pages")
        slab = starts is not None and name in state.SLABS
        shape = (state.heads, exact.limit, *tensor.shape[2:]) if slab else tensor.shape[1:]
        first = tensor.storage_offset() * tensor.itemsize - pages.storage_offset()
        stretches.append((first, prod(shape) * tensor.itemsize, prod(tensor.shape[2:]) * tensor.itemsize * slab))
        shapes.append((shape, tensor.dtype))
    table, places, each, programs = _table(tuple(stretches), pages.device)
    if copy is None:
        copy = torch.empty(len(rows) * each, dtype=torch.uint8, device=pages.device)
    found = {}
    for name, (shape, dtype), (_, size, _), place in zip(names, shapes, stretches, places):
        part = copy[len(rows) * place : len(rows) * (place + size)]
        found[name] = part.view(dtype).view(len(rows), *shape)
    return found, (pages, copy, table, starts, rows, exact.limit, programs, BLOCK)


def _own(state: LayerState, but: tuple[str, ...]) -> tuple[LayerState, tuple[Any, ...]]:
    """A state for a copy that `read_rows` is going to fill, and its arguments."""
    own = state.shell()
    found, moved = _moved(state, [name for name in state.names_but(but) if name != "exact.starts"])
    for name, tensor in found.items():
        own.replace(name, tensor)
    own.pages, own.exact.starts = moved[1], None
    return own, moved


def _copies(state: LayerState, spec: Spec, equal: bool) -> bool:
    """Whether kernels copy the rows: of pages whose heads have equally many slots or can be copied so."""
    if state.pages is None or (state.exact.starts is not None and not equal):
        return False
    return resolve(spec.backend, state.pages.device) == "triton"


def taken(state: LayerState, spec: Spec, but: tuple[str, ...] = (), equal: bool = False) -> LayerState:
    """`LayerState.taken`. Kernel: one launch."""
    if not _copies(state, spec, equal):
        return state.taken(but, equal=equal)
    assert state.rows is not None
    own, moved = _own(state, but)
    nobody = own.exact.keys.new_empty(0, 1, 16)
    read_rows(nobody, nobody, nobody, state.rows.new_empty(len(state.rows), 0), *moved)
    return own


def read(
    state: LayerState, spec: Spec, q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, equal: bool
) -> tuple[LayerState, Tensor, Tensor, Tensor]:
    """`taken`, and q, k and v as `reference.blocks_of` makes them. Kernel: one launch."""
    if not _copies(state, spec, equal):
        return state.taken(equal=equal), *reference.blocks_of(q, k, v, tokens)
    own, moved = _own(state, ())
    return own, *read_rows(q, k, v, tokens, *moved)


def write(
    state: LayerState, own: LayerState, blocks: Tensor, token: Tensor, sequence: Tensor, within: Tensor, out: Tensor
) -> None:
    """`LayerState.put` of what `read` made, and `reference.of_blocks`. Kernel: one launch, into pages."""
    if own.pages is None:
        state.put(own)
        reference.of_blocks(blocks, token, sequence, within, out)
        return
    here = dict(state.named_tensors())
    changed = [name for name, tensor in own.named_tensors() if tensor is not here[name]]
    write_rows(blocks, token, sequence, within, out, *_moved(state, changed, own.pages)[1])


# Scores: how much each cached token matters. And which of them stay.


def _of_first(keys: Tensor, *rest: Any) -> Tensor:
    return keys.new_empty(keys.shape[:3], dtype=compute_dtype(keys))


def _of_second(first: Tensor | None, *rest: Any) -> Tensor:
    return _of_first(*rest)


# Kernel: two passes over the keys, for the anchors mean and normalized_mean.
keydiff_scores = opaque(_of_first)(by_keyword(reference.keydiff_scores))

# Kernel: two passes over the keys.
manifold_scores = opaque(_of_first)(by_keyword(reference.manifold_scores))


# Kernel: two passes over the keys around a small Cholesky factorisation.
sketched_leverage = opaque(_of_first)(by_keyword(reference.sketched_leverage))


@opaque(lambda keys, columns, *rest: keys.new_empty(keys.shape[-1], columns, dtype=torch.float32))
def sketch(keys: Tensor, columns: int, method: str, seed: int) -> Tensor:
    """`reference.make_sketch` from a seed: a compiled step cannot make generators.

    It is drawn and sent to a device once; then a copy never leaves it, which a captured graph can repeat.
    """
    return _drawn(keys.shape[-1], columns, method, seed, keys.device).clone()


@functools.lru_cache(maxsize=64)
def _drawn(dim: int, columns: int, method: str, seed: int, device: torch.device) -> Tensor:
    """The sketch [dim, columns] fp32 of that seed: the same for keys of every dtype."""
    keys = torch.empty(1, 1, 0, dim, device=device)
    made = reference.make_sketch(keys, columns, method, torch.Generator("cpu").manual_seed(seed))
    assert made is not None
    return made


def leverage_scores(
    pre_rope_keys: Tensor,
    sketch_dim: int | None = 64,
    method: str = "cholesky",
    generator: torch.Generator | int | None = None,
    *,
    mask: Tensor | None = None,
    centre: bool = False,
    backend: str = "auto",
) -> Tensor:
    """`reference.leverage_scores`; generator may also be a seed."""
    if isinstance(generator, int) and method != "exact" and sketch_dim and sketch_dim < pre_rope_keys.shape[-1]:
        made: Tensor | None = sketch(pre_rope_keys, sketch_dim, method, generator)
    else:
        random = None if isinstance(generator, int) else generator
        made = reference.make_sketch(pre_rope_keys, sketch_dim, method, random)
    return sketched_leverage(pre_rope_keys, made, method, mask=mask, centre=centre, backend=backend)


# Kernel: one launch up to chunks of 256.
noncausal_attention_mass = opaque(_of_second)(by_keyword(reference.noncausal_attention_mass))


# Kernel: two launches each, and a sort of many candidates.
pool_scores = opaque(lambda scores, *rest: torch.empty_like(scores))(by_keyword(reference.pool_scores))
chunk_mean = opaque(lambda scores, *rest: torch.empty_like(scores))(by_keyword(reference.chunk_mean))

# Kernel: one launch.
most_attended = opaque(_of_second)(by_keyword(reference.most_attended))


def _observed(q: Tensor, keys: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    scores = _of_first(keys)
    return scores, scores.new_empty(len(keys), 1, 1)


# Kernel: two launches, no logits in memory.
observed_attention = opaque(_observed)(by_keyword(reference.observed_attention))


def window_scores(q: Tensor, keys: Tensor, scale: float, pool: int = 7, *, backend: str = "auto") -> Tensor:
    """`reference.window_scores`: `observed_attention` of all queries to all keys."""
    reference.check_pool(pool)
    if q.shape[2] > keys.shape[2]:  # kernels observe queries of tokens that are among the keys
        return reference.window_scores(q, keys, scale, pool)
    places = torch.zeros(keys.shape[:3], dtype=torch.int32, device=keys.device)
    scores, _ = observed_attention(q, keys, places, torch.ones_like(places, dtype=torch.bool), scale, backend=backend)
    return reference.pool_scores(scores, pool)


# Kernel: one launch.
moment_scores = opaque(_of_second)(by_keyword(reference.moment_scores))


def _selected(scores: Tensor, positions: Tensor, valid: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(valid), valid.new_empty(valid.shape[:2], dtype=torch.int64)


def _ahead(queries: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    (batch, heads, _, dim), dtype = queries.shape, compute_dtype(queries)
    covariance = queries.new_empty(batch, heads, dim, dim, dtype=dtype)
    return covariance[:, :, :1].clone(), covariance, queries.new_empty(batch, 1, 1, dtype=torch.int64)


# Kernel: one launch.
queries_ahead = opaque(_ahead)(by_keyword(reference.queries_ahead))

# Kernel: three launches, no copies of keys.
expected_attention = opaque(lambda keys, *rest: keys.new_empty(keys.shape[:3], dtype=torch.float32))(
    by_keyword(reference.expected_attention)
)

# Kernel: one launch.
needed_scores = opaque(lambda unlike, *rest: torch.empty_like(unlike))(by_keyword(reference.needed_scores))

# Kernel: one launch.
z_scores = opaque(lambda scores, *rest: torch.empty_like(scores))(by_keyword(reference.z_scores))


# Kernel: one launch, bisection instead of sorting.
select = opaque(_selected)(by_keyword(reference.select))
select_each = opaque(_selected)(by_keyword(reference.select_each))
