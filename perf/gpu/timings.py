"""What of fastkv is timed, on which shapes, in which order, and the bytes each operation has to move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastkv import corrections, ops, reference
from fastkv.reference import LayerState
from fastkv.reference.geometry import sketch_matrix

from ..micro import states
from ..micro.states import filled
from .clock import COPY_BYTES, MAX_PASSES, Case, Work, copy_work, num_sets, randn
from .heads import GEMMA, HALF, LLAMA, TOY, decode_bytes, moment_bytes, shapes
from .state import Place

FREE = 16  # slots beyond L: what is appended between two evictions
BLOCK = 128  # tokens of a prompt block
LONG = 65_536  # keys that scoring reads
CORRECTED = {"fastkv": "moments", "fastkv order 0": "mean", "fastkv no correction": "none"}
CHECKED: dict[str, tuple[str, ...]] = {  # which checks have to be green before a part is timed
    "copy": (),
    "decode": ("decode_step", "graph", "ticket", "split_kv_baseline"),
    "flex": ("decode_step",),
    "evict": ("evict", "moment_scores"),
    "prefill": ("prefill_attention",),
    "select": ("compact",),
    "scores": ("keydiff_scores", "manifold_scores", "window_scores", "leverage_scores", "noncausal_attention_mass"),
}
LAYER = "fastkv.ops.layer"  # and `fastkv.ops.operator`, which it imports
CODE: dict[str, tuple[str, ...]] = {  # modules of the library that a part times
    "decode": (LAYER, "fastkv.kernels.decode_attention"),
    "evict": (LAYER, "fastkv.ops.scores", "fastkv.kernels.evict", "fastkv.kernels.moment_scores"),
    "prefill": (LAYER, "fastkv.kernels.prefill_attention"),
    "select": (LAYER, "fastkv.ops.scores", "fastkv.kernels.select", "fastkv.kernels.compact"),
    "scores": (
        "fastkv.ops.scores",
        *(f"fastkv.kernels.{name}" for name in ("key_scores", "window_scores", "leverage", "noncausal_mass")),
    ),
}


def layer(case: Case, place: Place, lengths: torch.Tensor, free: int = 0, correction: str = "moments") -> LayerState:
    """A random layer of the case whose lengths are these, so that those of all layers are restored at once."""
    heads, device = case.heads, place.device
    sizes = case.batch, heads.num_kv_heads, heads.head_dim, case.length
    state = filled(*sizes, free=free, correction=correction, dtype=place.half, device=device)
    state.exact.lengths = lengths
    return state


def lengths_of(case: Case, place: Place, sets: int, length: int) -> torch.Tensor:
    """Lengths of so many layers, [sets, B, Hkv]."""
    shape = sets, case.batch, case.heads.num_kv_heads
    return torch.full(shape, length, dtype=torch.int32, device=place.device)


def tokens(case: Case, place: Place, num: int) -> list[torch.Tensor]:
    """q [B, Hq, T, D], k and v [B, Hkv, T, D] of T = num tokens."""
    heads = case.heads
    return [randn(place, case.batch, n, num, heads.head_dim) for n in (heads.num_heads, *(heads.num_kv_heads,) * 2)]


def decode(correction: str) -> Callable[[Case, Place], Work]:
    """One step, append included; lengths grow by one per launch and are restored between replays."""

    def build(case: Case, place: Place) -> Work:
        needed = decode_bytes(case.heads, case.batch, case.length, corrections.get(correction).order)
        sets = num_sets(place, needed)
        lengths = lengths_of(case, place, sets, case.length)
        cells = []
        for index in range(sets):
            q, k, v = tokens(case, place, 1)
            cells.append((q[:, :, 0], k, v, layer(case, place, lengths[index], FREE, correction)))
        spec = states.spec(correction, backend="triton")
        scratch = ops.workspace(case.heads.num_heads, cells[0][-1], spec)
        for *_, state in cells:
            state.scratch = scratch

        def launch(index: int) -> Any:
            return ops.decode_step(*cells[index], spec)

        def reset() -> None:
            lengths.fill_(case.length - MAX_PASSES // 2)

        reset()
        return Work(launch, sets, needed, reset, keep=(cells,))

    return build


def evict(case: Case, place: Place) -> Work:
    """Score L + 16 slots by attention times residual, drop 16, merge them into the moments: what one flush costs."""
    num, dim, slots = case.heads.num_kv_heads, case.heads.head_dim, case.length + FREE
    each = 2 * HALF * dim * slots + 12 * slots + 2 * 8 * dim + (2 * 4 + 2 * HALF) * dim * dim  # slope read and written
    needed = case.batch * num * each
    sets = num_sets(place, needed, once=True)
    lengths = lengths_of(case, place, sets, slots)
    cells = [layer(case, place, lengths[index], FREE) for index in range(sets)]
    for state in cells:
        state.seen.fill_(slots)
    weight = [torch.rand(case.batch, num, slots, device=place.device) for _ in cells]
    spec = states.spec(tokens=case.length, backend="triton")

    def launch(index: int) -> None:
        state, slot = cells[index], cells[index].exact
        assert slot.values is not None
        args = weight[index], slot.keys, slot.values, state.moments
        ops.evict(ops.moment_scores(*args, states.SCALE, backend="triton"), None, state, spec)

    return Work(launch, sets, needed, lambda: lengths.fill_(slots), once=True, keep=(cells, weight))


def prefill(case: Case, place: Place) -> Work:
    """A block of queries over the slots, the moments and itself."""
    heads, num_new = case.heads, 8 if place.toy else BLOCK
    each = 2 * HALF * heads.head_dim * (case.length + num_new * (1 + heads.groups)) + moment_bytes(heads.head_dim, 1)
    needed = case.batch * heads.num_kv_heads * each
    sets = num_sets(place, needed)
    lengths = lengths_of(case, place, sets, case.length)
    valid = torch.ones(case.batch, num_new, dtype=torch.bool, device=place.device)
    spec = states.spec(backend="triton")
    cells = [(*tokens(case, place, num_new), valid, layer(case, place, lengths[index])) for index in range(sets)]
    return Work(lambda index: ops.prefill_attention(*cells[index], spec), sets, needed, keep=(cells,))


def select_compact(case: Case, place: Place) -> Work:
    """Keep L of L + 128 scored candidates: selection, merge of the evicted into the moments, survivors into holes."""
    batch, num, dim = case.batch, case.heads.num_kv_heads, case.heads.head_dim
    num_new = 8 if place.toy else BLOCK
    candidates = case.length + num_new
    each = 14 * candidates + 2 * HALF * dim * 3 * num_new + 16 * dim + (8 + HALF) * dim * dim  # rows: evicted, moved
    needed = batch * num * each
    sets = num_sets(place, needed, once=True)
    lengths = lengths_of(case, place, sets, case.length)
    shape = batch, num, candidates
    positions = torch.arange(candidates, dtype=torch.int32, device=place.device).expand(shape).contiguous()
    cells = [
        (layer(case, place, lengths[index]), *tokens(case, place, num_new)[1:], torch.rand(shape, device=place.device))
        for index in range(sets)
    ]
    valid = torch.ones(shape, dtype=torch.bool, device=place.device)
    seen = torch.full((batch,), candidates, device=place.device)
    guard = reference.protected(positions, seen, states.SINKS, states.RECENT)
    new = positions[..., case.length :].contiguous()

    def launch(index: int) -> None:
        state, k, v, scores = cells[index]
        chosen = ops.select(scores, positions, valid, guard, case.length, backend="triton")
        ops.compact(valid, chosen, (k, v, new), state, states.spec(backend="triton"))

    return Work(launch, sets, needed, once=True, keep=(cells,))


def scoring(op: str) -> Callable[[Case, Place], Work]:
    """One score for every key."""

    def build(case: Case, place: Place) -> Work:
        heads, batch, length = case.heads, case.batch, case.length
        num, dim = heads.num_kv_heads, heads.head_dim
        queries = {"window_scores": 32, "noncausal_attention_mass": length}.get(op, 0)
        needed = batch * num * (HALF * dim * (length + heads.groups * queries) + 4 * length)
        sets = num_sets(place, needed)
        keys = [randn(place, batch, num, length, dim) for _ in range(sets)]
        q = [randn(place, batch, heads.num_heads, queries, dim) for _ in range(sets)]
        if op == "leverage_scores":
            from fastkv.kernels.leverage import leverage_scores

            sketch = sketch_matrix(dim, 16 if place.toy else 64).to(place.device)
            return Work(lambda i: leverage_scores(keys=keys[i], sketch=sketch), sets, needed, keep=(keys,))
        call = getattr(ops, op)
        if queries:
            return Work(lambda i: call(q[i], keys[i], states.SCALE, backend="triton"), sets, needed, keep=(keys, q))
        return Work(lambda i: call(keys[i], backend="triton"), sets, needed, keep=(keys,))

    return build


def copy(case: Case, place: Place) -> Work:
    """The bandwidth ceiling: one large copy."""
    return copy_work(place, 1024 if place.toy else COPY_BYTES, 2)


def cases(part: str, toy: bool) -> list[Case]:
    """All cases of a part, the most important first; peers are added to the decode part."""
    from .peers import FLEX, PEERS

    models, long = ((TOY,), 32) if toy else ((LLAMA, GEMMA), LONG)
    grid = [(1, 40)] if toy else shapes()
    if part == "copy":
        return [Case(part, "copy", models[0], 1, 0, copy)]
    if part == "scores":
        return [Case(part, op, h, 1, long, scoring(op)) for h in models for op in CHECKED["scores"]]
    if part == "flex":
        variants = list(FLEX.items())[:1] if toy else FLEX.items()
        return [Case(part, n, h, b, c, f, peer=True) for h in models for b, c in grid[:9] for n, f in variants]
    if part == "decode":
        timed = {name: decode(correction) for name, correction in CORRECTED.items()} | PEERS
    else:
        timed = {part: {"evict": evict, "prefill": prefill, "select": select_compact}[part]}
        grid = grid if toy else [(b, n) for b, n in grid if n <= 4096 and (part != "prefill" or b <= 8)]
    # Both models' first shapes before the rest of either.
    order = [(h, b, n) for some in (grid[:9], grid[9:]) for h in models for b, n in some]
    return [Case(part, name, h, b, n, build, name in PEERS) for h, b, n in order for name, build in timed.items()]


SECTIONS = tuple(CHECKED)
