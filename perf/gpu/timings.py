"""What of fastkv is timed, on which shapes, in which order, and the bytes each operation has to move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from fastkv import corrections, ops, reference
from fastkv.reference import FORMATS, LayerState
from fastkv.reference.geometry import sketch_matrix

from ..engine import Job, Row, Unmeasured
from ..micro import states
from ..micro.states import filled
from .checks import CRASHES, still_there
from .clock import COPY_BYTES, MAX_PASSES, Case, Work, copy_work, measure, num_sets, randn
from .heads import FIRST, GEMMA, HALF, LLAMA, Heads, decode_bytes, moment_bytes, shapes
from .operations import code_of
from .peers import FLEX, PEERS
from .place import Place

FREE = 16  # slots beyond L: what is appended between two evictions
BLOCK = 128  # tokens of a prompt block
LONG = 65_536  # keys that scoring reads
SCORES = ("keydiff_scores", "manifold_scores", "window_scores", "leverage_scores", "noncausal_attention_mass")
KEY = ((1, 1024), (32, 4096), (8, 1024), (1, 4096), (32, 1024), (8, 4096))  # shapes of the key timings
TOY_LENGTH = 32  # in a dry run
COMPILING = {"Flex": 12.0, "FlashInfer": 15.0, "split-KV": 4.0}  # predicted seconds, of peers


def layer(
    case: Case,
    place: Place,
    lengths: torch.Tensor,
    free: int = 0,
    correction: str = "moments",
    attention: bool = False,
    slots: str = "auto",
) -> LayerState:
    """A random layer of the case whose lengths are these, so that those of all layers are restored at once."""
    heads, device = case.heads, place.device
    sizes = case.batch, heads.num_kv_heads, heads.head_dim, case.length
    kept = dict(free=free, correction=correction, attention=attention, slots=slots)
    state = filled(*sizes, **kept, dtype=place.half, device=device)  # type: ignore[arg-type]
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


def decode(correction: str, attention: bool = False, slots: str = "auto") -> Callable[[Case, Place], Work]:
    """One step, append included; lengths grow by one per launch and are restored between replays.

    Args: attention: whether the attention of each slot is added up, as the default policy needs it.  slots: how pairs
        are stored.
    """
    form = FORMATS[slots]

    def build(case: Case, place: Place) -> Work:
        made = form.empty((1,), case.heads.head_dim, torch.float16, torch.device("cpu"))
        row = sum(tensor.nbytes for tensor in made if tensor is not None)
        needed = decode_bytes(case.heads, case.batch, case.length, corrections.get(correction).order, row)
        sets = num_sets(place, needed)
        lengths = lengths_of(case, place, sets, case.length)
        cells = []
        for index in range(sets):
            q, k, v = tokens(case, place, 1)
            cells.append((q[:, :, 0], k, v, layer(case, place, lengths[index], FREE, correction, attention, slots)))
        first = cells[0][-1]
        needed += sum(t.nbytes for t in first.parts.tensors()) if first.parts is not None else 0
        needed += 2 * 4 * case.batch * case.heads.num_kv_heads * case.length if attention else 0  # read and written
        spec = states.spec(correction, backend=place.backend)
        scratch = ops.workspace(case.heads.num_heads, first, spec)
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
    spec = states.spec(tokens=case.length, backend=place.backend)

    def launch(index: int) -> None:
        state, slot = cells[index], cells[index].exact
        assert slot.values is not None
        args = weight[index], slot.keys, slot.values, state.moments
        ops.evict(ops.moment_scores(*args, states.SCALE, backend=place.backend), None, state, spec)

    return Work(launch, sets, needed, lambda: lengths.fill_(slots), once=True, keep=(cells, weight))


def prefill(correction: str) -> Callable[[Case, Place], Work]:
    """A block of queries over the slots, what is remembered of evicted tokens, and itself."""

    def build(case: Case, place: Place) -> Work:
        heads, num_new = case.heads, 8 if place.toy else BLOCK
        each = 2 * HALF * heads.head_dim * (case.length + num_new * (1 + heads.groups))
        each += moment_bytes(heads.head_dim, corrections.get(correction).order)
        needed = case.batch * heads.num_kv_heads * each
        sets = num_sets(place, needed)
        lengths = lengths_of(case, place, sets, case.length)
        valid = torch.ones(case.batch, num_new, dtype=torch.bool, device=place.device)
        spec = states.spec(correction, backend=place.backend)
        cells = [
            (*tokens(case, place, num_new), valid, layer(case, place, lengths[index], correction=correction))
            for index in range(sets)
        ]
        return Work(lambda index: ops.prefill_attention(*cells[index], spec), sets, needed, keep=(cells,))

    return build


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
        chosen = ops.select(scores, positions, valid, guard, case.length, backend=place.backend)
        ops.compact(valid, chosen, (k, v, new), state, states.spec(backend=place.backend))

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
            sketch = sketch_matrix(dim, 16 if place.toy else 64).to(place.device)
            leverage = partial(ops.sketched_leverage, backend=place.backend)
            return Work(lambda i: leverage(keys[i], sketch, "cholesky", None, False), sets, needed, keep=(keys, sketch))
        call = getattr(ops, op)
        if queries:
            return Work(
                lambda i: call(q[i], keys[i], states.SCALE, backend=place.backend), sets, needed, keep=(keys, q)
            )
        return Work(lambda i: call(keys[i], backend=place.backend), sets, needed, keep=(keys,))

    return build


def copy(case: Case, place: Place) -> Work:
    """The bandwidth ceiling: one large copy."""
    return copy_work(place, 1024 if place.toy else COPY_BYTES, 2)


@dataclass(frozen=True)
class Timed:
    """An operation of the library as it is timed: its name in `operations.OPERATIONS`, and what builds the work."""

    operation: str
    build: Callable[[Case, Place], Work]

    def case(self, part: str, op: str, heads: Heads, batch: int, length: int) -> Case:
        """One case of it."""
        return Case(part, op, heads, batch, length, self.build, self.operation, compiling=6.0)


DEFAULT = {"fastkv default": Timed("decode_centroids", decode("centroids", attention=True))}
CODED = {
    f"fastkv {slots}": Timed(f"decode_{slots}", decode("centroids", attention=True, slots=slots))
    for slots in FORMATS
    if slots != "auto"
}
OWN = {
    "fastkv": Timed("decode_step", decode("moments")),
    "fastkv no correction": Timed("decode_step", decode("none")),
    "fastkv order 0": Timed("decode_step", decode("mean")),
}
OTHERS = {
    "evict": Timed("evict", evict),
    "select": Timed("compact", select_compact),
    "prefill": Timed("prefill_attention", prefill("moments")),
    "prefill centroids": Timed("prefill_centroids", prefill("centroids")),
}


def peers_of(names: Sequence[str], heads: Heads, batch: int, length: int) -> list[Case]:
    """Others at this shape. FlashInfer is compiled by nvcc on first use, FlexAttention for every shape."""
    found = []
    for name in names:
        part, build = ("flex", FLEX[name]) if name in FLEX else ("decode", PEERS[name])
        tuned = "autotuned" in name
        seconds = 20.0 if tuned else 6.0 if name in FLEX else 0.8
        compiling = 30.0 if tuned else next((s for kind, s in COMPILING.items() if name.startswith(kind)), 0.0)
        if name != "FlashInfer single" or batch == 1:
            found.append(Case(part, name, heads, batch, length, build, seconds=seconds, compiling=compiling))
    return found


def decode_cases(heads: Heads, batch: int, length: int, own: Mapping[str, Timed], peers: Sequence[str]) -> list[Case]:
    """Contenders at one shape."""
    mine = [timed.case("decode", name, heads, batch, length) for name, timed in own.items()]
    return mine + peers_of(peers, heads, batch, length)


def key_cases() -> list[Case]:
    """The bandwidth of a copy; then at six shapes the default's step beside everybody else."""
    beside = ("copy", "SDPA flash", "SDPA cuDNN", "FlashInfer", "FlashInfer tensor cores", "FlexAttention")
    large = Case("copy", "copy 1 GiB", LLAMA, 1, 0, copy, seconds=2.0)
    return [large, *(one for b, n in KEY for one in decode_cases(LLAMA, b, n, DEFAULT, beside))]


def other_decode_cases() -> list[Case]:
    """Every contender at the first shapes, and some at the others; without what the key timings have."""
    grid, done = shapes(), {case.name for case in key_cases()}
    few = {name: OWN[name] for name in ("fastkv", "fastkv no correction")} | DEFAULT
    found = [one for b, n in FIRST for h in (LLAMA, GEMMA) for one in decode_cases(h, b, n, DEFAULT | OWN, [*PEERS])]
    found += [one for b, n in FIRST[:3] for one in decode_cases(LLAMA, b, n, CODED, ())]
    for batch, length in grid:
        if (batch, length) not in FIRST:
            for heads in (LLAMA, GEMMA):
                found += decode_cases(heads, batch, length, few, ("copy", "FlashInfer"))
    return [case for case in found if case.name not in done]


def other_cases(part: str) -> list[Case]:
    """The cases of a part that is neither decode nor flex."""
    if part == "scores":
        return [Timed(op, scoring(op)).case(part, op, h, 1, LONG) for h in (LLAMA, GEMMA) for op in SCORES]
    most = 8 if part == "prefill" else 128
    grid = [(b, n) for b, n in FIRST if n <= 4096 and b <= most]
    named = {name: timed for name, timed in OTHERS.items() if name.startswith(part)}
    return [one.case(part, op, h, b, n) for b, n in grid for h in (LLAMA, GEMMA) for op, one in named.items()]


def flex_cases() -> list[Case]:
    """FlexAttention tuned by hand at the key shapes, and by its compiler at the first three of them."""
    tuned = [one for b, n in KEY for one in peers_of(("FlexAttention 3 stages",), LLAMA, b, n)]
    return tuned + [one for b, n in KEY[:3] for one in peers_of(("FlexAttention autotuned",), LLAMA, b, n)]


def sized(case: Case, place: Place) -> Case:
    """The case, or in a dry run a tiny one in its place."""
    if not place.toy:
        return case
    length = min(case.length, TOY_LENGTH)
    return replace(case, heads=place.heads(case.heads), batch=min(case.batch, 2), length=length)


def job(case: Case, place: Place) -> Job:
    """A case as a job. What crashes leaves its reason; a peer may, anything else has then failed."""

    def run() -> Row:
        torch.manual_seed(0)
        share = None
        try:
            with torch.no_grad(), place.stance:
                work = case.build(sized(case, place), place)
                work.launch(0)  # compile
                work.reset()
                row = measure(work, place)
        except CRASHES as reason:
            still_there(place, reason)
            raise Unmeasured(f"{type(reason).__name__}: {str(reason).partition(chr(10))[0][:200]}") from reason
        work = None
        place.cuda.empty_cache()
        if row["gbps"]:
            share = row["gbps"] / ceiling(place)
        return row | {"copy_gbps": ceiling(place), "of_copy": share}

    heads = case.heads
    row = {"part": case.part, "op": case.op, "heads": heads.name, "batch": case.batch, "length": case.length}
    code = code_of(case.operation, case.build, measure)
    return Job(case.name, row | {"head_dim": heads.head_dim}, run, code, optional=case.peer)


def warm(case: Case, place: Place) -> None:
    """Compile what the case needs, by one launch."""
    with torch.no_grad(), place.stance:
        case.build(sized(case, place), place).launch(0)
    place.cuda.empty_cache()


@cache
def ceiling(place: Place) -> float | None:
    """GB/s of a large device copy in this run; None in a dry one."""
    found = measure(copy_work(place, 1024 if place.toy else COPY_BYTES, 2), place)["gbps"]
    place.cuda.empty_cache()
    return found
