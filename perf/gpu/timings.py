"""What of fastkv is timed, on which shapes, in which order: decode steps, the default's first, and blocks of prompts,
beside their peers.

Each is compared with the reference at its own shape before it is timed. Every other operation is timed by `perf.micro`,
which replays CUDA graphs on a GPU, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import torch
from torch import Tensor

from fastkv import corrections, ops, reference
from fastkv.backend import flash_attention
from fastkv.cache.pages import PageFormat
from fastkv.kernels import _flash
from fastkv.reference import FORMATS, LayerState, Spec

from ..engine import Row, Unmeasured
from ..micro import states
from ..micro.states import filled
from .checks import CRASHES, still_there
from .clock import COPY_BYTES, MAX_PASSES, Case, Work, copy_work, measure, num_sets, randn, relative_error
from .heads import GEMMA, KEY, LLAMA, OTHERS, PROMPTS, SHARES, Heads, decode_bytes
from .peers import CAUSAL, PEERS, WORST
from .place import HALF, Place

FREE = 16  # slots beyond L: what is appended between two evictions
TOY_LENGTH = 32  # in a dry run
KEPT = 1024  # tokens that a prompt's block attends to beside itself
DEFAULT, PLAIN = "fastkv default", "fastkv no correction"


def decode(
    correction: str, attention: bool = False, slots: str = "model", shares: Sequence[float] | None = None,
    pages: bool = False,
) -> Callable[[Case, Place], Work]:  # fmt: skip
    """One step, append included; lengths grow by one per launch and are restored between replays.

    Args: attention: whether the attention of each slot is added up, as the default policy needs it.  slots: how pairs
        are stored.  shares: of the tokens of each head, of which fewer heads take some.  pages: whether sequences live
        in pages, in another order than in the batch.
    """

    def build(case: Case, place: Place) -> Work:
        heads, batch = case.heads, case.batch
        form, like = FORMATS[slots], (torch.float16, torch.device("cpu"))
        pair = *form.keys.empty((1,), heads.head_dim, *like), *form.values.empty((1,), heads.head_dim, *like)
        row = sum(tensor.nbytes for tensor in pair if tensor is not None) // 2  # of keys and values, on average
        needed = decode_bytes(heads, batch, case.length, corrections.get(correction).order, row)
        sets = num_sets(place, needed)
        own = None if shares is None else shares[:: len(shares) // heads.num_kv_heads]
        cells, lengths = [], []
        for _ in range(sets):
            sizes = batch, heads.num_kv_heads, heads.head_dim, case.length
            kept = dict(free=FREE, correction=correction, attention=attention, slots=slots, shares=own)
            state = filled(*sizes, **kept, dtype=HALF, device=place.device)  # type: ignore[arg-type]
            state = in_pages(state) if pages else state
            lengths.append((state.exact.lengths, state.exact.lengths - MAX_PASSES // 2))
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
            for held, first in lengths:
                held.copy_(first)

        reset()
        error = wrong(cells[0], spec)
        reset()
        return Work(lambda index: ops.decode_step(*cells[index], spec), sets, needed, reset, error=error, keep=(cells,))

    return build


def in_pages(state: LayerState) -> LayerState:
    """The same sequences, each in a page, the last one first."""
    form, rows = PageFormat.of(state), torch.arange(state.batch, 0, -1, device=state.seen.device)
    pages = torch.zeros(state.batch + 1, form.nbytes, dtype=torch.uint8, device=rows.device)
    placed = form.view(pages).at(rows)
    placed.put(state)
    return placed


def wrong(cell: tuple, spec: Spec) -> float:
    """Relative error of a step beside the reference. Raises: RuntimeError if it is too large."""
    *token, state = cell
    twin = deepcopy(state) if state.rows is None else state.taken()
    want = reference.decode_step(*token, twin, spec)[0]
    return small_enough(relative_error(ops.decode_step(*cell, spec)[0], want))


def small_enough(error: float) -> float:
    """The error. Raises: RuntimeError if it is too large."""
    if not error < WORST:
        raise RuntimeError(f"wrong result: relative error {error:.1e}")
    return error


def block(flash: bool) -> Callable[[Case, Place], Work]:
    """Attention of a block of a prompt over the slots of the default's budget, what was evicted, and itself.

    Args: flash: whether it attends to itself by flash-attn, which then has to be installed.
    """

    def build(case: Case, place: Place) -> Work:
        heads, spec = case.heads, states.spec("centroids", backend=place.backend)
        if flash and not place.toy and flash_attention(place.device) is None:
            raise ImportError("flash-attn 2 or 3 is not installed")
        sizes = case.batch, heads.num_kv_heads, heads.head_dim, TOY_LENGTH if place.toy else KEPT
        shapes = [(case.batch, case.length, n, heads.head_dim) for n in (heads.num_heads, *2 * (heads.num_kv_heads,))]
        needed = 2 * HALF.itemsize * sum(math.prod(shape) for shape in shapes[:2]) + state_bytes(*sizes)
        valid = torch.ones(case.batch, case.length, dtype=torch.bool, device=place.device)
        cells = []
        for _ in range(num_sets(place, needed)):
            state = filled(*sizes, correction="centroids", dtype=HALF, device=place.device)
            cells.append((*(randn(place, *shape).transpose(1, 2) for shape in shapes), valid, state))

        def launch(index: int) -> Tensor:
            with nullcontext() if flash else patch.object(_flash, "flash_attention", lambda device: None):
                return ops.prefill_attention(*cells[index], spec)[0]

        error = small_enough(relative_error(launch(0), reference.prefill_attention(*cells[0], spec)[0]))
        return Work(launch, len(cells), needed, error=error, keep=(cells,))

    return build


def state_bytes(batch: int, num_kv_heads: int, head_dim: int, tokens: int) -> int:
    """Of keys and values in half precision."""
    return 2 * HALF.itemsize * batch * num_kv_heads * head_dim * tokens


def copy(case: Case, place: Place) -> Work:
    """The bandwidth ceiling: one large copy."""
    return copy_work(place, 1024 if place.toy else COPY_BYTES, 2)


OWN: dict[str, tuple[str, Callable[[Case, Place], Work]]] = {  # by name: what it remembers, and what builds the work
    DEFAULT: ("centroids", decode("centroids", attention=True)),
    "fastkv moments": ("moments", decode("moments")),
    PLAIN: ("moments", decode("none")),
    **{f"fastkv {slots}": ("centroids", decode("centroids", True, slots)) for slots in FORMATS if slots != "model"},
    "fastkv unequal heads": ("centroids", decode("centroids", True, shares=SHARES)),
    "fastkv in pages": ("centroids", decode("centroids", True, pages=True)),
}
# Of blocks of prompts; the second is like a peer in that it needs a package.
BLOCKS = {"fastkv block": ("centroids", block(flash=False)), "fastkv block by flash-attn": ("", block(flash=True))}


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


def prompt_cases() -> list[Case]:
    """Blocks of prompts over slots, beside the same tokens' attention to themselves alone."""
    found = [(b, n, name, *made) for b, n in PROMPTS for name, made in (BLOCKS | CAUSAL).items()]
    return [Case("prompt", name, LLAMA, b, n, build, memory, seconds=2.0) for b, n, name, memory, build in found]


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
