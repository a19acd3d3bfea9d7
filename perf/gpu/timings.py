"""What of fastkv is timed, on which shapes, in which order: decode steps, the default's first, beside its peers.

Each is compared with the reference at its own shape before it is timed. Every other operation is timed by `perf.micro`,
which replays CUDA graphs on a GPU, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache

import torch

from fastkv import corrections, ops, reference
from fastkv.reference import FORMATS, Spec

from ..engine import Row, Unmeasured
from ..micro import states
from ..micro.states import filled
from .checks import CRASHES, still_there
from .clock import COPY_BYTES, MAX_PASSES, Case, Work, copy_work, measure, num_sets, randn, relative_error
from .heads import GEMMA, KEY, LLAMA, OTHERS, Heads, decode_bytes
from .peers import PEERS, WORST
from .place import HALF, Place

FREE = 16  # slots beyond L: what is appended between two evictions
TOY_LENGTH = 32  # in a dry run
DEFAULT, PLAIN = "fastkv default", "fastkv no correction"


def decode(correction: str, attention: bool = False, slots: str = "model") -> Callable[[Case, Place], Work]:
    """One step, append included; lengths grow by one per launch and are restored between replays.

    Args: attention: whether the attention of each slot is added up, as the default policy needs it.  slots: how pairs
        are stored.
    """

    def build(case: Case, place: Place) -> Work:
        heads, batch = case.heads, case.batch
        form, like = FORMATS[slots], (torch.float16, torch.device("cpu"))
        pair = *form.keys.empty((1,), heads.head_dim, *like), *form.values.empty((1,), heads.head_dim, *like)
        row = sum(tensor.nbytes for tensor in pair if tensor is not None) // 2  # of keys and values, on average
        needed = decode_bytes(heads, batch, case.length, corrections.get(correction).order, row)
        sets = num_sets(place, needed)
        shape = sets, batch, heads.num_kv_heads
        lengths = torch.full(shape, case.length, dtype=torch.int32, device=place.device)
        cells = []
        for index in range(sets):
            sizes = batch, heads.num_kv_heads, heads.head_dim, case.length
            kept = dict(free=FREE, correction=correction, attention=attention, slots=slots)
            state = filled(*sizes, **kept, dtype=HALF, device=place.device)  # type: ignore[arg-type]
            state.exact.lengths = lengths[index]  # those of all layers are restored at once
            q = randn(place, batch, heads.num_heads, heads.head_dim)
            k, v = (randn(place, batch, heads.num_kv_heads, 1, heads.head_dim) for _ in "kv")
            cells.append((q, k, v, state))
        first = cells[0][-1]
        needed += sum(t.nbytes for t in first.parts.tensors()) if first.parts is not None else 0
        needed += 2 * 4 * batch * heads.num_kv_heads * case.length if attention else 0  # read and written
        spec = states.spec(correction, backend=place.backend)
        scratch = ops.workspace(heads.num_heads, first, spec)
        for *_, state in cells:
            state.scratch = scratch

        def reset() -> None:
            lengths.fill_(case.length - MAX_PASSES // 2)

        reset()
        error = wrong(cells[0], spec)
        reset()
        return Work(lambda index: ops.decode_step(*cells[index], spec), sets, needed, reset, error=error, keep=(cells,))

    return build


def wrong(cell: tuple, spec: Spec) -> float:
    """Relative error of a step beside the reference. Raises: RuntimeError if it is too large."""
    twin = deepcopy(cell)
    want = reference.decode_step(*twin, spec)[0]
    error = relative_error(ops.decode_step(*cell, spec)[0], want)
    if not error < WORST:
        raise RuntimeError(f"wrong result: relative error {error:.1e}")
    return error


def copy(case: Case, place: Place) -> Work:
    """The bandwidth ceiling: one large copy."""
    return copy_work(place, 1024 if place.toy else COPY_BYTES, 2)


OWN: dict[str, tuple[str, Callable[[Case, Place], Work]]] = {  # by name: what it remembers, and what builds the work
    DEFAULT: ("centroids", decode("centroids", attention=True)),
    "fastkv moments": ("moments", decode("moments")),
    PLAIN: ("moments", decode("none")),
    **{f"fastkv {slots}": ("centroids", decode("centroids", True, slots)) for slots in FORMATS if slots != "model"},
}


def decode_cases(heads: Heads, batch: int, length: int, own: Sequence[str], peers: Sequence[str]) -> list[Case]:
    """Contenders at one shape. FlashInfer is compiled by nvcc on first use, FlexAttention for every shape."""
    mine = [Case("decode", name, heads, batch, length, OWN[name][1], OWN[name][0]) for name in own]
    shape = heads, batch, length
    return mine + [
        Case("decode", name, *shape, PEERS[name], seconds=6.0 if name.startswith("Flex") else 0.8) for name in peers
    ]


def key_cases() -> list[Case]:
    """The bandwidth of a copy; then at six shapes the default's step beside everybody else."""
    large = Case("copy", "copy 1 GiB", LLAMA, 1, 0, copy, seconds=2.0)
    return [large, *(one for b, n in KEY for one in decode_cases(LLAMA, b, n, [DEFAULT], [*PEERS]))]


def other_cases() -> list[Case]:
    """Every step of fastkv at these shapes; other heads and shapes, beside a copy and FlashInfer."""
    rest, few = [name for name in OWN if name != DEFAULT], ("copy", "FlashInfer")
    found = [one for b, n in KEY for one in decode_cases(LLAMA, b, n, rest, ())]
    found += [one for b, n in KEY for one in decode_cases(GEMMA, b, n, [DEFAULT, *rest[:2]], few)]
    return found + [one for b, n in OTHERS for h in (LLAMA, GEMMA) for one in decode_cases(h, b, n, [DEFAULT], few)]


def sized(case: Case, place: Place) -> Case:
    """The case, or in a dry run a tiny one in its place."""
    if not place.toy:
        return case
    length = min(case.length, TOY_LENGTH)
    return replace(case, heads=place.heads(case.heads), batch=min(case.batch, 2), length=length)


def run(case: Case, place: Place) -> Row:
    """A row. What crashes leaves its reason; a peer may, anything else has then failed."""
    torch.manual_seed(0)
    try:
        with torch.no_grad(), place.stance:
            work = case.build(sized(case, place), place)
            work.launch(0)  # compile
            work.reset()
            row = measure(work, place)
    except CRASHES as reason:
        still_there(place, reason)
        raise Unmeasured(f"{type(reason).__name__}: {str(reason).partition(chr(10))[0][:200]}") from reason
    del work
    place.cuda.empty_cache()
    share = row["gbps"] / ceiling(place) if row["gbps"] else None
    return row | {"copy_gbps": ceiling(place), "of_copy": share}


def row_of(case: Case) -> Row:
    """A case as data."""
    heads = case.heads
    row = {"part": case.part, "op": case.op, "heads": heads.name, "batch": case.batch, "length": case.length}
    return row | {"head_dim": heads.head_dim}


@cache
def ceiling(place: Place) -> float | None:
    """GB/s of a large device copy in this run; None in a dry one."""
    found = measure(copy_work(place, 1024 if place.toy else COPY_BYTES, 2), place)["gbps"]
    place.cuda.empty_cache()
    return found
