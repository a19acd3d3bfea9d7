"""Correctness of every operation on real hardware: half precision against the float64 reference.

The limit is twice the error of the same computation in torch (the reference under autocast for results in half
precision, in float32 for results in float32) plus a tiny share of the largest value. Which tokens stay is compared
exactly, as sets. Slots that hold nothing are NaN. Races, graphs and host syncs: `perf.gpu.checks_device`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

from fastkv import ops, reference
from fastkv.reference import LayerState, Selection
from fastkv.reference.geometry import sketch_matrix

from ..engine import Job, Row
from ..environment import source
from ..micro import states
from ..micro.states import SCALE
from .heads import Heads
from .state import Finding, Place, attention_findings, close, compare, copied, equal, ragged, randn

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


def check_decode(place: Place, heads: Heads, dtype: torch.dtype, step: bool = True) -> list[Finding]:
    """decode_step, of a token or of none: every order, with and without softcap, with the attention of each slot."""
    findings = []
    variants = [("moments", None, 2), ("moments", 20.0, 2), ("mean", None, 2), ("none", None, 2)]
    if not place.toy:
        variants.append(("moments", None, 64))  # so many pairs that one program does all of each
    for correction, cap, size in variants:
        start = ragged(place, heads, dtype, size, place.slots if size == 2 else 136)
        start.exact.attention = torch.zeros(start.exact.keys.shape[:3], device=place.device)
        spec = replace(states.spec(correction, backend="triton"), softcap=cap)
        batch, num = start.exact.lengths.shape
        q = randn(place, dtype, batch, heads.num_heads, heads.head_dim)
        token = [randn(place, dtype, batch, num, 1, heads.head_dim) if step else None for _ in "kv"]

        def call(module: Any, state: LayerState, to: torch.dtype, spec=spec, q=q, token=token) -> tuple:
            k, v = (None if one is None else one.to(to) for one in token)
            return *module.decode_step(q.to(to), k, v, state, spec), state.exact.attention

        mine = copied(start)
        got = call(ops, mine, dtype)

        def run(to: torch.dtype, start=start, call=call) -> tuple:
            return call(reference, copied(start, to if to == torch.float64 else None), to)

        label = f"B={size} {correction}{'' if cap is None else ' softcap'}"
        findings += [replace(f, name=f"{label} {f.name}") for f in attention_findings(place, dtype, got, run)]
        after = copied(start)
        call(reference, after, dtype)
        for name in ("keys", "values", "positions", "lengths"):
            findings.append(equal(f"{label} {name}", getattr(mine.exact, name), getattr(after.exact, name)))
        findings.append(equal(f"{label} seen", mine.seen, after.seen))
    return findings


def check_prefill_attention(place: Place, heads: Heads, dtype: torch.dtype) -> list[Finding]:
    """A block over slots, moments and itself, with padding at its start."""
    start, num = ragged(place, heads, dtype), 9 if place.toy else 128
    batch, kv = start.exact.lengths.shape
    q = randn(place, dtype, batch, heads.num_heads, num, heads.head_dim)
    k, v = (randn(place, dtype, batch, kv, num, heads.head_dim) for _ in "kv")
    valid = torch.arange(num, device=place.device) >= torch.tensor([[0], [5]], device=place.device)
    spec = states.spec(backend="triton")

    def call(module: Any, state: LayerState, to: torch.dtype) -> tuple:
        return module.prefill_attention(q.to(to), k.to(to), v.to(to), valid, state, spec)

    got = call(ops, copied(start), dtype)
    return attention_findings(
        place, dtype, got, lambda to: call(reference, copied(start, to if to == torch.float64 else None), to)
    )


def check_evict(place: Place, heads: Heads, dtype: torch.dtype) -> list[Finding]:
    """Evict 16 tokens a head; scores tie."""
    findings = []
    for slots in place.sizes:
        start = ragged(place, heads, dtype, slots=slots)
        scores = torch.randint(0, 50, start.exact.keys.shape[:3], device=place.device).float()
        changed = [copied(start), copied(start, torch.float64), copied(start)]
        for state, module in zip(changed, (ops, reference, reference)):
            module.evict(scores, None, state, states.spec(tokens=slots - 16, backend="triton"))
        findings += compare(changed, f"C={slots} ")
    return findings


def check_compact(place: Place, heads: Heads, dtype: torch.dtype) -> list[Finding]:
    """Select the budget among slots and a block, then compact; scores tie. Checks select as well."""
    return [finding for slots in place.sizes for finding in _compact(place, heads, dtype, slots)]


def _compact(place: Place, heads: Heads, dtype: torch.dtype, slots: int) -> list[Finding]:
    start, num = ragged(place, heads, dtype, slots=slots), 16 if place.toy else 128
    batch, kv = start.exact.lengths.shape
    tokens = slots - 8
    k, v = (randn(place, dtype, batch, kv, num, heads.head_dim) for _ in "kv")
    new = (start.seen[:, None, None] + torch.arange(num, device=place.device)).expand(batch, kv, num).int()
    valid = torch.cat([start.exact.valid, torch.ones_like(new, dtype=torch.bool)], 2)
    positions = torch.cat([start.exact["positions"], new], 2)
    scores = torch.randint(0, 50, positions.shape, device=place.device).float()
    guard = reference.protected(positions, start.seen + num, states.SINKS, states.RECENT)
    want = reference.select(scores, positions, valid, guard, tokens)
    got = ops.select(scores, positions, valid, guard, tokens, backend="triton")
    changed = [copied(start), copied(start, torch.float64), copied(start)]
    for state, module in zip(changed, (ops, reference, reference)):
        to, chosen = state.exact.keys.dtype, Selection(want.kept.clone(), want.counts.clone())
        module.compact(valid, chosen, (k.to(to), v.to(to), new), state, states.spec(backend="triton"))
    label = f"C={slots} "
    chosen = [equal(f"{label}{n}", a, b) for n, a, b in zip(("kept", "counts"), got, want)]
    return chosen + compare(changed, label)


def check_moment_scores(place: Place, heads: Heads, dtype: torch.dtype) -> list[Finding]:
    """Attention times residual; slots that hold nothing are zero here, because the operation scores all it is given."""
    state = ragged(place, heads, dtype)
    for name in ("exact.keys", "exact.values"):
        state.replace(name, dict(state.named_tensors())[name].nan_to_num(0.0))
    weight = torch.rand(state.exact.keys.shape[:3], device=place.device)

    def call(module: Any, one: LayerState, **extra: str) -> Tensor:
        return module.moment_scores(weight, one.exact.keys, one.exact.values, one.moments, SCALE, **extra)

    truth, plain = (call(reference, one) for one in (copied(state, torch.float64), state))
    return [close("scores", call(ops, state, backend="triton"), truth, plain)]


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
    from .split_kv import split_kv_attention

    if heads.head_dim & (heads.head_dim - 1):
        return []
    q = randn(place, dtype, 2, heads.num_heads, heads.head_dim)
    keys, values = (randn(place, dtype, 2, heads.num_kv_heads, place.slots, heads.head_dim) for _ in "kv")
    lengths = torch.full(keys.shape[:2], place.slots, device=place.device)

    def run(to: torch.dtype) -> tuple:
        return reference.decode_attention(q.to(to), keys.to(to), values.to(to), lengths, None, 0.1)[:1]

    return attention_findings(place, dtype, (split_kv_attention(q, keys, values, 0.1),), run)


CHECKS: dict[str, Callable[[Place, Heads, torch.dtype], list[Finding]]] = {
    "decode_step": check_decode,
    "decode_attention": lambda *a: check_decode(*a, step=False),
    "evict": check_evict,
    "compact": check_compact,
    "prefill_attention": check_prefill_attention,
    **{name: check_scores(name) for name in SCORES},
    "leverage_scores": check_leverage,
    "moment_scores": check_moment_scores,
    "split_kv_baseline": check_split_kv,
}


def jobs(place: Place) -> list[Job]:
    """A job for each check; a crash is a failed check with its message."""
    from .checks_device import DEVICE_CHECKS
    from .checks_models import MODEL_CHECKS

    found = []
    for heads in place.shapes:
        for dtype in place.dtypes(heads):
            for op, check in CHECKS.items():
                case = {"op": op, "heads": heads.name, "dtype": str(dtype).removeprefix("torch.")}
                name = f"{op}[{case['heads']}-{case['dtype']}]"
                found.append(job(name, case, lambda check=check, h=heads, d=dtype: check(place, h, d)))
    slow = DEVICE_CHECKS | MODEL_CHECKS
    return found + [job(op, {"op": op}, lambda check=check: check(place)) for op, check in slow.items()]


def job(name: str, case: Row, check: Callable[[], list[Finding]]) -> Job:
    """One check."""

    def run() -> Row:
        findings, error = [], None
        try:
            with torch.no_grad():
                findings = check()
        except CRASHES as crash:
            error = f"{type(crash).__name__}: {str(crash)[:500]}"
        bad = [one for one in findings if not one.passed]
        worst = [max(findings, key=lambda one: one.error / (one.limit or 1))] if findings else []
        row: Row = {"passed": error is None and not bad, "compared": len(findings)}
        row["findings"] = [vars(one) for one in (bad or worst)]
        return row | ({"error": error} if error else {})

    return Job(name, case, run, source("perf.gpu.checks"))


def red(rows: list[Row], needed: tuple[str, ...]) -> list[str]:
    """Of the operations needed, those with a failed check or none at all."""
    good = {row["case"]["op"] for row in rows} - {row["case"]["op"] for row in rows if not row["passed"]}
    return [op for op in needed if op not in good]
