"""Correctness of every operation on real hardware: half precision against the float64 reference.

The limit is twice the error of the same computation in torch (the reference under autocast for results in half
precision, in float32 for results in float32) plus a tiny share of the largest value. Which tokens stay is compared
exactly, as sets. Slots that hold nothing are NaN. Races, graphs and host syncs: `perf.gpu.checks_device`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

import fastkv
from fastkv import ops, reference
from fastkv.reference import FORMATS, Centroids, LayerState, Selection
from fastkv.reference.geometry import sketch_matrix

from ..engine import Row
from ..micro import states
from ..micro.states import SCALE
from .heads import Heads
from .place import Place, plain_attention
from .split_kv import split_kv_attention
from .state import (
    Finding,
    attention_findings,
    close,
    compare,
    copied,
    encoded,
    equal,
    ragged,
    randn,
    slab,
    with_keys_only,
)

Check = Callable[[Place, Heads, torch.dtype], list[Finding]]
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


class DeviceLost(Exception):
    """An error after which nothing can be computed on the device in this process, such as an illegal access."""


@dataclass(frozen=True)
class Decode:
    """A case of `decode_step`.

    Attributes:
        reads: the correction, by name.  holds: the one whose state it reads; the same if empty.
        softcap: of the logits.  batch: sequences; of 64 one program does all of each pair.
        shape: how tokens are held: equal heads, a slab of unequal ones, or some as keys only.
        step: whether a token is appended.  slots: how pairs are stored.
    """

    reads: str
    holds: str = ""
    softcap: float | None = None
    batch: int = 2
    shape: str = "equal"
    step: bool = True
    slots: str = "auto"

    @property
    def label(self) -> str:
        """In words."""
        cap = "" if self.softcap is None else " softcap"
        kind = "" if self.slots == "auto" else f" {self.slots}"
        return f"B={self.batch} {self.reads}{kind} {self.shape}{cap}" + ("" if self.step else ", no token")

    def state(self, place: Place, heads: Heads, dtype: torch.dtype) -> LayerState:
        """A random layer that adds up the attention of each slot."""
        few = self.batch == 2 or place.toy
        batch, slots = (2, place.slots) if few else (self.batch, 136)
        state = ragged(place, heads, dtype, batch, slots, self.holds or self.reads)
        if self.shape == "slab":
            state = slab(state)
        if self.shape == "keys only":
            state = with_keys_only(state)
        state = encoded(state, FORMATS[self.slots])
        for tier in state.tiers.values():
            tier.attention = torch.zeros(tier.keys.shape[:-1], device=place.device)
        return state


MANY = 64  # sequences
CODED = tuple(f"decode_{slots}" for slots in FORMATS if slots != "auto")
DECODES: dict[str, tuple[Decode, ...]] = {
    "decode_centroids": (
        *(Decode("centroids"), Decode("centroids", softcap=20.0), Decode("centroids", batch=MANY)),
        Decode("centroids", step=False),
    ),
    "decode_step": (
        *(Decode("moments"), Decode("moments", softcap=20.0), Decode("moments", batch=MANY)),
        *(Decode("mean", "moments"), Decode("none", "moments"), Decode("moments", step=False)),
    ),
    "decode_cosh": (Decode("cosh"), Decode("cosh", softcap=20.0), Decode("cosh", batch=MANY)),
    "decode_slab": (Decode("moments", shape="slab"), Decode("centroids", shape="slab"), Decode("none", shape="slab")),
    **{
        name: (
            *(Decode("centroids", slots=slots), Decode("centroids", batch=MANY, slots=slots)),
            *(Decode("moments", slots=slots), Decode("none", "moments", shape="slab", slots=slots)),
        )
        for name in CODED
        for slots in [name.removeprefix("decode_")]
    },
    "decode_vector": (
        *(Decode("vector", "none", shape="keys only"), Decode("vector+moments", "moments", shape="keys only")),
        Decode("vector", "none", batch=MANY, shape="keys only"),
    ),
}


def still_there(place: Place, crash: BaseException) -> None:
    """Raise DeviceLost if the crash broke the device: every later result would be wrong or an error."""
    try:
        place.cuda.synchronize()
    except RuntimeError as lost:
        raise DeviceLost(f"{type(crash).__name__}: {str(crash).partition(chr(10))[0][:300]}") from lost


def check_decode(name: str) -> Check:
    """A check of `decode_step` in several cases: results, the attention of each slot, and what the step changes."""

    def check(place: Place, heads: Heads, dtype: torch.dtype) -> list[Finding]:
        return [finding for case in DECODES[name] for finding in decode_findings(case, place, heads, dtype)]

    return check


def decode_findings(case: Decode, place: Place, heads: Heads, dtype: torch.dtype) -> list[Finding]:
    """One case against the reference."""
    start = case.state(place, heads, dtype)
    spec = replace(states.spec(case.reads, backend=place.backend), softcap=case.softcap)
    batch, num = start.exact.lengths.shape
    q = randn(place, dtype, batch, heads.num_heads, heads.head_dim)
    token = [randn(place, dtype, batch, num, 1, heads.head_dim) if case.step else None for _ in "kv"]

    def call(module: Any, state: LayerState, to: torch.dtype) -> tuple:
        k, v = (None if one is None else one.to(to) for one in token)
        found = module.decode_step(q.to(to), k, v, state, spec)
        return *found, *(tier.attention for tier in state.tiers.values())

    mine = copied(start)
    got = call(ops, mine, dtype)
    findings = attention_findings(
        place, dtype, got, lambda to: call(reference, copied(start, to if to == torch.float64 else None), to)
    )
    after = copied(start)
    call(reference, after, dtype)
    pairs = [(name, getattr(mine.exact, name), getattr(after.exact, name)) for name in ("lengths", "positions")]
    pairs += [(name, getattr(mine.exact, name), getattr(after.exact, name)) for name in ("keys", "values")]
    findings += [equal(*pair) for pair in (*pairs, ("seen", mine.seen, after.seen))]
    return [replace(finding, name=f"{case.label} {finding.name}") for finding in findings]


def check_prefill(correction: str) -> Check:
    """A check of a block over slots, what is remembered of evicted tokens, and itself; padding at its start."""
    return lambda place, heads, dtype: prefill_findings(correction, place, heads, dtype)


def prefill_findings(correction: str, place: Place, heads: Heads, dtype: torch.dtype) -> list[Finding]:
    """The block against the reference."""
    start, num = ragged(place, heads, dtype, correction=correction), 9 if place.toy else 128
    batch, kv = start.exact.lengths.shape
    q = randn(place, dtype, batch, heads.num_heads, num, heads.head_dim)
    k, v = (randn(place, dtype, batch, kv, num, heads.head_dim) for _ in "kv")
    valid = torch.arange(num, device=place.device) >= torch.tensor([[0], [5]], device=place.device)
    spec = states.spec(correction, backend=place.backend)

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
            module.evict(scores, None, state, states.spec(tokens=slots - 16, backend=place.backend))
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
    got = ops.select(scores, positions, valid, guard, tokens, backend=place.backend)
    changed = [copied(start), copied(start, torch.float64), copied(start)]
    for state, module in zip(changed, (ops, reference, reference)):
        to, chosen = state.exact.keys.dtype, Selection(want.kept.clone(), want.counts.clone())
        module.compact(valid, chosen, (k.to(to), v.to(to), new), state, states.spec(backend=place.backend))
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
    return [close("scores", call(ops, state, backend=place.backend), truth, plain)]


def check_leverage(place: Place, heads: Heads, dtype: torch.dtype) -> list[Finding]:
    """Leverage in the sketched space; the kernel's Gram matrix is in float32, hence the wider share."""
    torch.manual_seed(1)
    size = min(64, heads.head_dim // 2)
    keys = randn(place, dtype, 2, heads.num_kv_heads, 70 if place.toy else 4099, heads.head_dim) + 1
    sketch = sketch_matrix(heads.head_dim, size).to(place.device)
    got = ops.sketched_leverage(keys, sketch, "cholesky", None, False, backend=place.backend)
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
            got = call(ops, q, keys, {"backend": place.backend})
            truth, plain = (call(reference, q.to(to), keys.to(to), {}) for to in (torch.float64, dtype))
            findings.append(close(f"scores, variant {index}", got, truth, plain))
        return findings

    return check


def check_split_kv(place: Place, heads: Heads, dtype: torch.dtype) -> list[Finding]:
    """The baseline that fastkv is compared with has to be right as well."""
    q = randn(place, dtype, 2, heads.num_heads, heads.head_dim)
    keys, values = (randn(place, dtype, 2, heads.num_kv_heads, place.slots, heads.head_dim) for _ in "kv")
    lengths = torch.full(keys.shape[:2], place.slots, device=place.device)

    def run(to: torch.dtype) -> tuple:
        return reference.decode_attention(q.to(to), keys.to(to), values.to(to), lengths, None, 0.1)[:1]

    attend = split_kv_attention if place.backend == "triton" else plain_attention
    return attention_findings(place, dtype, (attend(q, keys, values, 0.1),), run)


def check_layer(place: Place, heads: Heads, dtype: torch.dtype) -> list[Finding]:
    """A layer of the default policy reads a prompt in blocks and then tokens, evicting all the way.

    Which centroids join may hang on the last bit of a cost, so that two correct implementations differ. What no join
    changes is compared: tokens, sums of keys and of values, and the sum of squared keys, of stored and evicted tokens
    together; and how well joins were chosen, by the squares within centroids.
    """
    batch, prompt, steps, budget = (2, 40, 9, 16) if place.toy else (2, 1500, 40, 256)
    torch.manual_seed(2)
    k, v = (randn(place, dtype, batch, heads.num_kv_heads, prompt + steps, heads.head_dim) for _ in "kv")
    q = randn(place, dtype, batch, heads.num_heads, prompt + steps, heads.head_dim)
    sizes = heads.num_heads, heads.num_kv_heads, heads.head_dim
    held, outs = [], []
    for backend in (place.backend, "reference"):
        layer = fastkv.FastKVAttention(
            *sizes, "fastkv", fastkv.Budget(budget, sinks=2, recent=4),
            prefill_block=16 if place.toy else 512, evict_every=4, backend=backend,
        )  # fmt: skip
        layer(*(rows[:, :, :prompt].contiguous() for rows in (q, k, v)))
        for index in range(prompt, prompt + steps):
            last = layer(*(rows[:, :, index : index + 1].contiguous() for rows in (q, k, v)))
        assert layer.state is not None
        outs.append(last)
        held.append(layer.state)
    mine, other = (conserved(state) for state in held)
    squares = k.double().square().sum((2, 3))
    findings = [
        equal("tokens", mine["tokens"].round(), torch.full_like(squares, prompt + steps)),
        _close_sum("sum of keys", mine["keys"], k),
        _close_sum("sum of values", mine["values"], v),
        Finding("sum of squared keys", float(((mine["squares"] - squares) / squares).abs().max()), 1e-3),
    ]
    spread, wanted = (float(one["within"].sum()) for one in (mine, other))
    findings.append(Finding("squares within centroids, above the reference's", spread / max(wanted, 1e-9) - 1, 0.05))
    # A token more or less of hundreds, where scores are close, changes little; a wrong step changes most of it.
    error = float((outs[0].double() - outs[1].double()).norm() / outs[1].double().norm())
    return [*findings, Finding("the last step, relative", error, 0.2)]


def conserved(state: LayerState) -> dict[str, Tensor]:
    """Of stored tokens and centroids together, per head, in float64: tokens, sums of keys, values and squared keys;
    and "within", the squares within centroids.
    """
    slots, parts = state.exact, state.parts
    assert isinstance(parts, Centroids)
    mask = slots.valid[..., None]
    keys, values = (slots[name].double().masked_fill(~mask, 0) for name in ("keys", "values"))
    count, within = parts.count.double()[..., None], parts.spread.double() * keys.shape[-1]
    return {
        "tokens": slots.lengths + count.sum((2, 3)),
        "keys": keys.sum(2) + (count * parts.keys.double()).sum(2),
        "values": values.sum(2) + (count * parts.values.double()).sum(2),
        "squares": keys.square().sum((2, 3)) + (count * parts.keys.double().square()).sum((2, 3)) + within.sum(2),
        "within": within.sum(2),
    }


def _close_sum(name: str, got: Tensor, tokens: Tensor) -> Finding:
    """A sum over the tokens against that of all that came, as a share of the sum of their sizes: of a mean in bfloat16
    the last bit is uncertain.
    """
    error = (got - tokens.double().sum(2)).abs() / tokens.double().abs().sum(2)
    return Finding(name, float(error.max()), 2**-7)


CHECKS: dict[str, Check] = {  # the default policy first
    "decode_centroids": check_decode("decode_centroids"),
    "prefill_centroids": check_prefill("centroids"),
    "layer_centroids": check_layer,
    "decode_step": check_decode("decode_step"),
    "evict": check_evict,
    "moment_scores": check_moment_scores,
    "prefill_attention": check_prefill("moments"),
    "decode_cosh": check_decode("decode_cosh"),
    "decode_slab": check_decode("decode_slab"),
    **{name: check_decode(name) for name in CODED},
    "decode_vector": check_decode("decode_vector"),
    "compact": check_compact,
    **{name: check_scores(name) for name in SCORES},
    "leverage_scores": check_leverage,
    "split_kv_baseline": check_split_kv,
}


def row_of(check: Callable[[], list[Finding]], place: Place) -> Row:
    """What a check found: "passed", how much was compared, what was wrong or the closest call, and how it crashed.

    Raises: DeviceLost if nothing can be computed on the device any more.
    """
    findings, error = [], None
    try:
        with torch.no_grad():
            findings = check()
    except CRASHES as crash:
        still_there(place, crash)
        error = f"{type(crash).__name__}: {str(crash)[:500]}"
    bad = [one for one in findings if not one.passed]
    worst = [max(findings, key=lambda one: one.error / (one.limit or 1))] if findings else []
    row: Row = {"passed": error is None and not bad, "compared": len(findings)}
    row["findings"] = [vars(one) for one in (bad or worst)]
    return row | ({"error": error} if error else {})


def red(rows: list[Row], needed: Sequence[str]) -> list[str]:
    """Of the checks needed, by name, those that failed or have no row."""
    green = {row["id"] for row in rows if row.get("passed")}
    return [name for name in needed if name not in green]
