"""What of fastkv is timed, on which shapes, in which order, and the bytes each operation has to move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastkv import ops, reference
from fastkv.reference import Moments
from fastkv.reference.geometry import sketch_matrix

from .gpu_checks_state import Place
from .gpu_results import GEMMA, HALF, LLAMA, TOY, Heads, decode_bytes, moment_bytes, shapes
from .gpu_timings_clock import COPY_BYTES, MAX_PASSES, Case, Work, copy_work, num_sets

SLACK = 16  # free slots beyond L: what is appended between two evictions
BLOCK = 128  # tokens of a prompt block
LONG = 65_536  # keys that scoring reads
SCALE = 0.1
ORDERS: dict[str, int | None] = {"fastkv": 1, "fastkv order 0": 0, "fastkv no correction": None}
CHECKED: dict[str, tuple[str, ...]] = {  # which checks have to be green before a section is timed
    "copy": (),
    "decode": ("decode_step", "graph", "ticket", "split_kv_baseline"),
    "flex": ("decode_step",),
    "evict": ("evict", "moment_scores"),
    "prefill": ("prefill_attention",),
    "select": ("compact",),
    "scores": ("keydiff_scores", "manifold_scores", "window_scores", "leverage_scores", "noncausal_attention_mass"),
}


def dtype(place: Place) -> torch.dtype:
    """bf16; fp16 in the interpreter, which cannot compute in bf16."""
    return torch.float16 if place.toy else torch.bfloat16


def randn(place: Place, *shape: int) -> Tensor:
    """Random half-precision numbers, never zeros: zeros run faster than data."""
    return torch.randn(*shape, device=place.device, dtype=dtype(place))


def moments(place: Place, heads: Heads, batch: int, order: int | None = 1, evicted: int = 5000) -> Moments:
    """Random statistics of `evicted` tokens, the half-precision slope included."""
    num, dim, device = heads.num_kv_heads, heads.head_dim, place.device
    count = torch.full((batch, num), evicted, device=device)
    if order is None:
        return Moments(count)
    means = [torch.randn(batch, num, dim, device=device) * 0.1 for _ in range(2)]
    if order == 0:
        return Moments(count, *means)
    slope = torch.randn(batch, num, dim, dim, device=device, dtype=dtype(place)) * 0.1
    return Moments(count, *means, slope.float() * evicted, slope)


def decode(order: int | None) -> Callable[[Case, Place], Work]:
    """One step, append included; lengths grow by one per launch and are restored between replays."""

    def build(case: Case, place: Place) -> Work:
        heads, batch = case.heads, case.batch
        num, dim = heads.num_kv_heads, heads.head_dim
        needed = decode_bytes(heads, batch, case.length, order)
        sets = num_sets(place, needed)
        slots = case.length + SLACK
        lengths = torch.empty(sets, batch, num, dtype=torch.int32, device=place.device)
        seen = torch.full((sets, batch), case.length + 5000, device=place.device)
        cells = []
        for index in range(sets):
            keys, values = randn(place, batch, num, slots, dim), randn(place, batch, num, slots, dim)
            positions = torch.zeros(batch, num, slots, dtype=torch.int32, device=place.device)
            token = [
                randn(place, batch, n, *rest, dim) for n, rest in ((heads.num_heads, ()), (num, (1,)), (num, (1,)))
            ]
            cells.append(
                (*token, keys, values, positions, lengths[index], seen[index], moments(place, heads, batch, order))
            )
        scratch = ops.workspace(cells[0][0][:, :, None], cells[0][3], attention=False, backend="triton")

        def launch(index: int) -> Any:
            return ops.decode_step(*cells[index], SCALE, order=order, scratch=scratch, backend="triton")

        def reset() -> None:
            lengths.fill_(case.length - MAX_PASSES // 2)

        reset()
        return Work(launch, sets, needed, reset, keep=(cells, scratch))

    return build


def evict(case: Case, place: Place) -> Work:
    """Score L + 16 slots by attention times residual, drop 16, merge them into the moments: what one flush costs."""
    heads, batch, slots = case.heads, case.batch, case.length + SLACK
    num, dim = heads.num_kv_heads, heads.head_dim
    each = 2 * HALF * dim * slots + 12 * slots + 2 * 8 * dim + (2 * 4 + 2 * HALF) * dim * dim  # slope read and written
    needed = batch * num * each
    sets = num_sets(place, needed, once=True)
    lengths = torch.full((sets, batch, num), slots, dtype=torch.int32, device=place.device)
    positions = torch.arange(slots, dtype=torch.int32, device=place.device).expand(batch, num, slots)
    cells = [
        (randn(place, batch, num, slots, dim), randn(place, batch, num, slots, dim), positions.contiguous(), lengths[i])
        for i in range(sets)
    ]
    gone = [moments(place, heads, batch) for _ in cells]
    weight = [torch.rand(batch, num, slots, device=place.device) for _ in cells]
    seen = torch.full((batch,), slots, device=place.device)

    def launch(index: int) -> None:
        keys, values = cells[index][:2]
        scores = ops.moment_scores(weight[index], keys, values, gone[index], SCALE, backend="triton")
        ops.evict(*cells[index], seen, gone[index], scores, case.length, 4, 8, backend="triton")

    return Work(launch, sets, needed, lambda: lengths.fill_(slots), once=True, keep=(cells, gone, weight))


def prefill(case: Case, place: Place) -> Work:
    """A block of queries over the slots, the moments and itself."""
    heads, batch, num_new = case.heads, case.batch, 8 if place.toy else BLOCK
    num, dim = heads.num_kv_heads, heads.head_dim
    each = 2 * HALF * dim * (case.length + num_new * (1 + heads.groups)) + moment_bytes(dim, 1)
    needed = batch * num * each
    sets = num_sets(place, needed)
    lengths = torch.full((batch, num), case.length, dtype=torch.int32, device=place.device)
    valid = torch.ones(batch, num_new, dtype=torch.bool, device=place.device)
    cells = []
    for _ in range(sets):
        slots = [randn(place, batch, num, case.length, dim) for _ in "kv"]
        block = [randn(place, batch, num, num_new, dim) for _ in "kv"]
        q = randn(place, batch, heads.num_heads, num_new, dim)
        cells.append((q, *slots, lengths, *block, valid, moments(place, heads, batch)))
    return Work(lambda i: ops.prefill_attention(*cells[i], SCALE, backend="triton"), sets, needed, keep=(cells,))


def select_compact(case: Case, place: Place) -> Work:
    """Keep L of L + 128 scored candidates: selection, merge of the evicted into the moments, survivors into holes."""
    heads, batch, num_new = case.heads, case.batch, 8 if place.toy else BLOCK
    num, dim, candidates = heads.num_kv_heads, heads.head_dim, case.length + num_new
    each = 14 * candidates + 2 * HALF * dim * 3 * num_new + 16 * dim + (8 + HALF) * dim * dim  # rows: evicted, moved
    needed = batch * num * each
    sets = num_sets(place, needed, once=True)

    def make() -> tuple:
        positions = torch.arange(candidates, dtype=torch.int32, device=place.device).expand(batch, num, candidates)
        slots = [randn(place, batch, num, case.length, dim) for _ in "kv"]
        block = [randn(place, batch, num, num_new, dim) for _ in "kv"]
        lengths = torch.full((batch, num), case.length, dtype=torch.int32, device=place.device)
        held, new = positions[..., : case.length].contiguous(), positions[..., case.length :].contiguous()
        scores = torch.rand(batch, num, candidates, device=place.device)
        return positions.contiguous(), scores, (*slots, held, lengths), moments(place, heads, batch), (*block, new)

    cells = [make() for _ in range(sets)]
    valid = torch.ones(batch, num, candidates, dtype=torch.bool, device=place.device)
    guard = reference.protected(cells[0][0], torch.full((batch,), candidates, device=place.device), 4, 8)

    def launch(index: int) -> None:
        positions, scores, slots, gone, block = cells[index]
        chosen = ops.select(scores, positions, valid, guard, case.length, backend="triton")
        ops.compact(*slots, gone, *block, valid, chosen, backend="triton")

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
            return Work(lambda i: call(q[i], keys[i], SCALE, backend="triton"), sets, needed, keep=(keys, q))
        return Work(lambda i: call(keys[i], backend="triton"), sets, needed, keep=(keys,))

    return build


def copy(case: Case, place: Place) -> Work:
    """The bandwidth ceiling: one large copy."""
    return copy_work(place, 1024 if place.toy else COPY_BYTES, 2)


def cases(section: str, toy: bool) -> list[Case]:
    """All cases of a section, the most important first; peers are added to the decode section."""
    from .gpu_timings_peers import FLEX, PEERS

    models, long = ((TOY,), 32) if toy else ((LLAMA, GEMMA), LONG)
    grid = [(1, 40)] if toy else shapes()
    if section == "copy":
        return [Case(section, "copy", models[0], 1, 0, copy)]
    if section == "scores":
        return [Case(section, op, h, 1, long, scoring(op)) for h in models for op in CHECKED["scores"]]
    if section == "flex":
        variants = list(FLEX.items())[:1] if toy else FLEX.items()
        return [Case(section, n, h, b, c, f, peer=True) for h in models for b, c in grid[:9] for n, f in variants]
    if section == "decode":
        timed = {name: decode(order) for name, order in ORDERS.items()} | PEERS
    else:
        timed = {section: {"evict": evict, "prefill": prefill, "select": select_compact}[section]}
        grid = grid if toy else [(b, n) for b, n in grid if n <= 4096 and (section != "prefill" or b <= 8)]
    # Both models' first shapes before the rest of either.
    order = [(h, b, n) for part in (grid[:9], grid[9:]) for h in models for b, n in part]
    return [Case(section, name, h, b, n, build, name in PEERS) for h, b, n in order for name, build in timed.items()]


SECTIONS = tuple(CHECKED)
