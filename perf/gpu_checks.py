"""Correctness of every operation on real hardware: half precision against the float64 reference.

The limit is twice the error of the same computation in torch (the reference under autocast for results in half
precision, in float32 for results in float32) plus a tiny share of the largest value. Which tokens stay is compared
exactly, as sets. Slots that hold nothing are NaN. Races, graphs and host syncs: `perf.gpu_checks_device`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

from fastkv import ops, reference
from fastkv.reference import Selection
from fastkv.reference.geometry import sketch_matrix

from .gpu_checks_state import Finding, Place, State, attention_findings, close, equal, randn
from .gpu_results import Deadline, Heads, Results, Row

CRASHES = (
    RuntimeError,
    ValueError,
    TypeError,
    AssertionError,
    KeyError,
    AttributeError,
    OSError,
    ImportError,
    TritonError,
)


def check_decode(place: Place, heads: Heads, dtype: torch.dtype, step: bool = False) -> list[Finding]:
    """decode_attention, or decode_step: every order, with and without softcap, with the attention of each slot."""
    findings = []
    variants: list[tuple[int | None, float | None, int]] = [(1, None, 2), (1, 20.0, 2), (0, None, 2), (None, None, 2)]
    if not place.toy:
        variants.append((1, None, 64))  # so many pairs that one program does all of each
    for order, cap, size in variants:
        start = State.make(place, heads, dtype, size, place.slots if size == 2 else 136)
        batch, num = start.lengths.shape
        q = randn(place, dtype, batch, heads.num_heads, heads.head_dim)
        k, v = (randn(place, dtype, batch, num, 1, heads.head_dim) for _ in "kv")

        def call(module, state: State, to: torch.dtype, order=order, cap=cap, q=q, k=k, v=v, **extra) -> tuple:
            total = torch.zeros(
                state.keys.shape[:3], dtype=torch.float64 if to == torch.float64 else torch.float32, device=q.device
            )
            rest = {"order": order, "attention": total, **extra}
            if not step:
                held = (state.keys, state.values, state.lengths)
                return *module.decode_attention(q.to(to), *held, state.moments, 0.1, cap, **rest), total
            return *module.decode_step(
                q.to(to), k.to(to), v.to(to), *state.slots, state.seen, state.moments, 0.1, cap, **rest
            ), total  # fmt: skip

        mine = start.copy()
        got = call(ops, mine, dtype, backend="triton")

        def run(to: torch.dtype, start=start, call=call) -> tuple:
            return call(reference, start.copy(to if to == torch.float64 else None), to)

        label = f"B={size} order {order}{'' if cap is None else ' softcap'}"
        findings += [replace(f, name=f"{label} {f.name}") for f in attention_findings(place, dtype, got, run)]
        if step:
            after = start.copy()
            call(reference, after, dtype)
            pairs = zip(("keys", "values", "positions", "lengths"), mine.slots, after.slots)
            findings += [equal(f"{label} {name}", a, b) for name, a, b in pairs]
            findings.append(equal(f"{label} seen", mine.seen, after.seen))
    return findings


def check_prefill_attention(place: Place, heads: Heads, dtype: torch.dtype) -> list[Finding]:
    """A block over slots, moments and itself, with padding at its start."""
    start, num = State.make(place, heads, dtype), 9 if place.toy else 128
    batch, kv = start.lengths.shape
    q = randn(place, dtype, batch, heads.num_heads, num, heads.head_dim)
    k, v = (randn(place, dtype, batch, kv, num, heads.head_dim) for _ in "kv")
    valid = torch.arange(num, device=place.device) >= torch.tensor([[0], [5]], device=place.device)

    def call(module, state: State, to: torch.dtype, **extra) -> tuple:
        held = (state.keys, state.values, state.lengths)
        return module.prefill_attention(q.to(to), *held, k.to(to), v.to(to), valid, state.moments, 0.1, **extra)

    got = call(ops, start.copy(), dtype, backend="triton")
    return attention_findings(
        place, dtype, got, lambda to: call(reference, start.copy(to if to == torch.float64 else None), to)
    )


def check_evict(place: Place, heads: Heads, dtype: torch.dtype) -> list[Finding]:
    """Evict 16 tokens a head; scores tie."""
    findings = []
    for slots in place.sizes:
        start = State.make(place, heads, dtype, slots=slots)
        scores = torch.randint(0, 50, start.positions.shape, device=place.device).float()
        states = [start.copy(), start.copy(torch.float64), start.copy()]
        for state, module, extra in zip(states, (ops, reference, reference), ({"backend": "triton"}, {}, {})):
            module.evict(*state.slots, state.seen, state.moments, scores, slots - 16, 4, 8, **extra)
        findings += states[0].compare(*states[1:], label=f"C={slots} ")
    return findings


def check_compact(place: Place, heads: Heads, dtype: torch.dtype) -> list[Finding]:
    """Select the budget among slots and a block, then compact; scores tie. Checks select as well."""
    return [finding for slots in place.sizes for finding in _compact(place, heads, dtype, slots)]


def _compact(place: Place, heads: Heads, dtype: torch.dtype, slots: int) -> list[Finding]:
    start, num = State.make(place, heads, dtype, slots=slots), 16 if place.toy else 128
    batch, kv = start.lengths.shape
    tokens = slots - 8
    k, v = (randn(place, dtype, batch, kv, num, heads.head_dim) for _ in "kv")
    new = (start.seen[:, None, None] + torch.arange(num, device=place.device)).expand(batch, kv, num).int()
    valid = torch.arange(start.keys.shape[2], device=place.device) < start.lengths[..., None]
    valid = torch.cat([valid, torch.ones_like(new, dtype=torch.bool)], 2)
    positions = torch.cat([start.positions, new], 2)
    scores = torch.randint(0, 50, positions.shape, device=place.device).float()
    guard = reference.protected(positions, start.seen + num, 4, 8)
    want = reference.select(scores, positions, valid, guard, tokens)
    got = ops.select(scores, positions, valid, guard, tokens, backend="triton")
    states = [start.copy(), start.copy(torch.float64), start.copy()]
    for state, module, extra in zip(states, (ops, reference, reference), ({"backend": "triton"}, {}, {})):
        to, chosen = state.keys.dtype, Selection(want.kept.clone(), want.counts.clone())
        module.compact(*state.slots, state.moments, k.to(to), v.to(to), new, valid, chosen, **extra)
    label = f"C={slots} "
    chosen = [equal(f"{label}{n}", a, b) for n, a, b in zip(("kept", "counts"), got, want)]
    return chosen + states[0].compare(*states[1:], label=label)


def check_moment_scores(place: Place, heads: Heads, dtype: torch.dtype) -> list[Finding]:
    """Attention times residual; slots that hold nothing are zero here, because the operation scores all it is given."""
    state = State.make(place, heads, dtype)
    keys, values = state.keys.nan_to_num(0.0), state.values.nan_to_num(0.0)
    weight = torch.rand(keys.shape[:3], device=place.device)
    got = ops.moment_scores(weight, keys, values, state.moments, 0.1, backend="triton")
    wide = state.copy(torch.float64).moments
    truth = weight.double() * reference.moment_residual(keys.double(), values.double(), wide, 0.1)
    return [close("scores", got, truth, weight * reference.moment_residual(keys, values, state.moments, 0.1))]


def check_leverage(place: Place, heads: Heads, dtype: torch.dtype) -> list[Finding]:
    """Leverage in the sketched space; the kernel's Gram matrix is in float32, hence the wider share."""
    from fastkv.kernels.leverage import leverage_scores

    torch.manual_seed(1)
    size = min(64, heads.head_dim // 2)
    keys = randn(place, dtype, 2, heads.num_kv_heads, 70 if place.toy else 4099, heads.head_dim) + 1
    got = leverage_scores(keys=keys, sketch=sketch_matrix(heads.head_dim, size).to(place.device))
    truth, plain = (reference.leverage_scores(keys.to(to), size) for to in (torch.float64, dtype))
    return [close("scores", got, truth, plain, 2e-4)]


Call = Callable[[Any, Tensor, Tensor, dict[str, str]], Tensor]  # module, q, keys, further arguments
SCORES: dict[str, tuple[Call, ...]] = {
    "keydiff_scores": (
        lambda module, q, keys, extra: module.keydiff_scores(keys, **extra),
        lambda module, q, keys, extra: module.keydiff_scores(keys, "normalized_mean", **extra),
    ),
    "manifold_scores": (
        lambda module, q, keys, extra: module.manifold_scores(keys, **extra),
        lambda module, q, keys, extra: module.manifold_scores(keys, 48, **extra),
    ),
    "window_scores": (lambda module, q, keys, extra: module.window_scores(q[:, :, -32:], keys, 0.1, **extra),),
    "noncausal_attention_mass": (
        lambda module, q, keys, extra: module.noncausal_attention_mass(q, keys, 0.1, **extra),
    ),
}  # fmt: skip


def check_scores(name: str) -> Callable[[Place, Heads, torch.dtype], list[Finding]]:
    """A check of one scoring operation on keys away from zero; the number of keys is odd."""

    def check(place: Place, heads: Heads, dtype: torch.dtype) -> list[Finding]:
        torch.manual_seed(1)
        num = 71 if place.toy else 4099
        keys = randn(place, dtype, 2, heads.num_kv_heads, num, heads.head_dim) + 1
        q = randn(place, dtype, 2, heads.num_heads, num, heads.head_dim)
        findings = []
        for index, call in enumerate(SCORES[name]):
            got = call(ops, q, keys, {"backend": "triton"})
            truth, plain = (call(reference, q.to(to), keys.to(to), {}) for to in (torch.float64, dtype))
            findings.append(close(f"scores, variant {index}", got, truth, plain))
        return findings

    return check


def check_split_kv(place: Place, heads: Heads, dtype: torch.dtype) -> list[Finding]:
    """The baseline that fastkv is compared with has to be right as well."""
    from .split_kv_baseline import split_kv_attention

    if heads.head_dim & (heads.head_dim - 1):
        return []
    q = randn(place, dtype, 2, heads.num_heads, heads.head_dim)
    keys, values = (randn(place, dtype, 2, heads.num_kv_heads, place.slots, heads.head_dim) for _ in "kv")
    lengths = torch.full(keys.shape[:2], place.slots, device=place.device)

    def run(to: torch.dtype) -> tuple:
        return reference.decode_attention(q.to(to), keys.to(to), values.to(to), lengths, None, 0.1)[:1]

    return attention_findings(place, dtype, (split_kv_attention(q, keys, values, 0.1),), run)


CHECKS: dict[str, Callable[[Place, Heads, torch.dtype], list[Finding]]] = {
    "decode_step": lambda *a: check_decode(*a, step=True),
    "decode_attention": check_decode,
    "evict": check_evict,
    "compact": check_compact,
    "prefill_attention": check_prefill_attention,
    **{name: check_scores(name) for name in SCORES},
    "leverage_scores": check_leverage,
    "moment_scores": check_moment_scores,
    "split_kv_baseline": check_split_kv,
}


def run_checks(place: Place, results: Results, deadline: Deadline) -> None:
    """Everything that has no row yet, until the time is over; a crash is a failed check with its message."""
    from .gpu_checks_device import DEVICE_CHECKS
    from .gpu_checks_graphs import MODEL_CHECKS

    plan: list[tuple[str, str, Callable[[], list[Finding]]]] = []
    slow = DEVICE_CHECKS | MODEL_CHECKS
    for name, check in slow.items():
        plan.append((name, name, lambda check=check: check(place)))
    for heads in place.shapes:
        for dtype in place.dtypes(heads):
            for name, check in CHECKS.items():
                case = f"{name}[{heads.name}-{str(dtype).removeprefix('torch.')}]"
                plan.append((name, case, lambda check=check, heads=heads, dtype=dtype: check(place, heads, dtype)))
    plan.sort(key=lambda entry: entry[1] in slow)  # last
    for op, case, run in plan:
        if results.has(case):
            continue
        if deadline.over(20):
            return
        start, findings, error = time.perf_counter(), [], None
        try:
            with torch.no_grad():
                findings = run()
        except CRASHES as crash:
            error = f"{type(crash).__name__}: {str(crash)[:500]}"
        passed = error is None and all(f.passed for f in findings)
        row: Row = {"id": case, "op": op, "passed": passed, "seconds": round(time.perf_counter() - start, 2)}
        bad = [f for f in findings if not f.passed]
        worst = [max(findings, key=lambda f: f.error / (f.limit or 1))] if findings else []
        row["findings"] = [vars(f) for f in (bad or worst)]
        row["compared"] = len(findings)
        results.add(row | ({"error": error} if error else {}))
        print(f"{'ok  ' if passed else 'FAIL'} {case}  {error or ', '.join(f.name for f in bad)}", flush=True)
    results.complete = True
    results.write()
