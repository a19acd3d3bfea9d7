"""What of fastkv is timed, on which shapes, in which order: decode steps, the default's first, and blocks of prompts,
beside their peers.

Each is compared with the reference at its own shape before it is timed. Every other operation is timed by `perf.micro`,
which replays CUDA graphs on a GPU, too.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fastkv import ops, reference
from fastkv.backend import flash_attention
from fastkv.cache.pages import PageFormat
from fastkv.kernels import _flash
from fastkv.reference import FORMATS, LayerState

from ..engine import Row, Unmeasured
from ..micro import states
from ..micro.states import GEMMA, LLAMA, Heads
from .checks import CRASHES, still_there
from .clock import MAX_PASSES, Case, Work, layer, measure, nbytes, num_sets, right, token
from .peers import PEERS, Builder, causal, prompt
from .place import HALF, Place

FREE = 16  # slots beyond L: what is appended between two evictions
TOY_LENGTH = 32  # in a dry run
KEPT = 1024  # tokens that a prompt's block attends to beside itself
DEFAULT, SECONDS = "fastkv default", {"FlexAttention": 6.0}  # seconds: of who takes long
KEY = ((1, 1024), (32, 4096), (8, 1024), (1, 4096), (32, 1024), (8, 4096))  # batch and tokens, what counts most first
PROMPTS = ((1, 2048), (8, 512), (1, 8192))  # batch and tokens of a prompt's block
OTHERS = ((1, 512), (128, 1024), (1, 128), (128, 4096))
SHARES = (0.4, 0.5, 0.6, 0.8, 1.0, 1.2, 1.5, 2.0)  # tokens of each KV head, unequal as calibrated heads are


def decode(case: Case, place: Place, correction: str, pages: bool = False, **kept: Any) -> Work:
    """One step, append included; lengths grow by one per launch and are restored between replays.

    Args: pages: whether sequences live in pages, in another order than in the batch.  kept: of layers, as in
        `micro.states.filled`; of `shares` fewer heads take some.
    """
    heads, batch, length = case.heads, case.batch, case.length
    if "shares" in kept:
        kept["shares"] = kept["shares"][:: len(kept["shares"]) // heads.num_kv_heads]
    new = partial(layer, place, heads, batch, length, correction, free=FREE, **kept)
    spec = states.spec(correction, 0, place.backend)
    needed = needed_bytes(new(), heads, length)
    held = [in_pages(new()) if pages else new() for _ in range(num_sets(place, needed))]
    scratch = ops.workspace(heads.num_heads, held[0], spec)
    for state in held:
        state.scratch = scratch
    cells = [(*token(place, heads, batch), state) for state in held]
    lengths = [(state.exact.lengths, state.exact.lengths - MAX_PASSES // 2) for state in held]

    def reset() -> None:
        for now, first in lengths:
            now.copy_(first)

    reset()
    twin = held[0].taken() if pages else deepcopy(held[0])
    want = reference.decode_step(*cells[0][:-1], twin, spec)[0]
    error = right(ops.decode_step(*cells[0], spec)[0], want)
    reset()
    return Work(lambda index: ops.decode_step(*cells[index], spec), len(cells), needed, reset, error=error)


def needed_bytes(state: LayerState, heads: Heads, length: int) -> int:
    """Of a step: its slots, what is remembered of the others, the query and its output, the appended token."""
    exact, moments = state.exact, state.moments
    slots = nbytes(*(rows for name, rows in exact.moving().items() if name in exact.PAIRS))
    slots += 2 * nbytes(exact.attention)  # read and written
    memory = nbytes(moments.key_mean, moments.value_mean, moments.slope)
    memory += nbytes(*state.parts.tensors()) if state.parts is not None else 0
    token = 2 * HALF.itemsize * state.batch * heads.head_dim * (heads.num_heads + heads.num_kv_heads)
    return slots * length // (length + FREE) + memory + token


def in_pages(state: LayerState) -> LayerState:
    """The same sequences, each in a page, the last one first."""
    form, rows = PageFormat.of(state), torch.arange(state.batch, 0, -1, device=state.seen.device)
    placed = form.allocate(state.batch + 1, rows.device).at(rows)
    placed.put(state)
    return placed


def block(case: Case, place: Place, flash: bool) -> Work:
    """Attention of a block of a prompt over the slots of the default's budget, what was evicted, and itself.

    Args: flash: whether it attends to itself by flash-attn, which then has to be installed.
    """
    spec = states.spec("centroids", 0, place.backend)
    if flash and not place.toy and flash_attention(place.device) is None:
        raise ImportError("flash-attn 2 or 3 is not installed")
    new = partial(layer, place, case.heads, case.batch, TOY_LENGTH if place.toy else KEPT, "centroids")
    valid, first = torch.ones(case.batch, case.length, dtype=torch.bool, device=place.device), prompt(place, case)
    needed = nbytes(*first, first[0], *(getattr(new().exact, name) for name in ("keys", "values")))
    cells = [
        (*(part.transpose(1, 2) for part in prompt(place, case)), valid, new()) for _ in range(num_sets(place, needed))
    ]

    def launch(index: int) -> Tensor:
        with nullcontext() if flash else patch.object(_flash, "flash_attention", lambda device: None):
            return ops.prefill_attention(*cells[index], spec)[0]

    error = right(launch(0), reference.prefill_attention(*cells[0], spec)[0])
    return Work(launch, len(cells), needed, error=error)


def default(**options: object) -> tuple[str, Builder]:
    """The default's step; options: what it has otherwise."""
    return "centroids", partial(decode, correction="centroids", **options)


OWN: dict[str, tuple[str, Builder]] = {  # by name: what it remembers, and what builds the work
    DEFAULT: default(),
    "fastkv with sums": default(attention=True),  # of the attention that each token receives
    "fastkv moments": ("moments", partial(decode, correction="moments")),
    "fastkv moments with sums": ("moments", partial(decode, correction="moments", attention=True)),  # momentkv's
    "fastkv no correction": ("moments", partial(decode, correction="none")),
    **{f"fastkv {slots}": default(slots=slots) for slots in FORMATS if slots != "model"},
    "fastkv unequal heads": default(shares=SHARES),
    "fastkv in pages": default(pages=True),
}
# Of blocks of prompts; the second is like a peer in that it needs a package, and the last is the same tokens alone.
BLOCKS: dict[str, tuple[str, Builder]] = {
    "fastkv block": ("centroids", partial(block, flash=False)),
    "fastkv block by flash-attn": ("", partial(block, flash=True)),
    "SDPA flash, itself alone": ("", causal),
}


def decode_cases(
    heads: Heads, shapes: Sequence[tuple[int, int]], own: Sequence[str], peers: Sequence[str]
) -> list[Case]:
    """Contenders at some shapes. FlashInfer is compiled by nvcc on first use, FlexAttention for every shape."""
    found = []
    for shape in shapes:
        found += [Case("decode", name, heads, *shape, OWN[name][1], OWN[name][0]) for name in own]
        found += [Case("decode", name, heads, *shape, PEERS[name], seconds=SECONDS.get(name, 0.8)) for name in peers]
    return found


def cases() -> dict[str, list[Case]]:
    """By section of the plan: at six shapes the default's step beside all peers; blocks of prompts over slots, beside
    the same tokens alone; every step of fastkv there, and other heads and shapes, beside a copy and FlashInfer."""
    rest, few = [name for name in OWN if name != DEFAULT], ("copy", "FlashInfer")
    blocks = product(PROMPTS, BLOCKS.items())
    other = decode_cases(LLAMA, KEY, rest, ()) + decode_cases(GEMMA, KEY, [DEFAULT, *rest[:2]], few)
    other += [one for shape in OTHERS for h in (LLAMA, GEMMA) for one in decode_cases(h, [shape], [DEFAULT], few)]
    return {
        "key": decode_cases(LLAMA, KEY, [DEFAULT], [*PEERS]),
        "prompt": [Case("prompt", name, LLAMA, *at, build, of, seconds=2.0) for at, (name, (of, build)) in blocks],
        "decode": other,
    }


def run(case: Case, place: Place) -> Row:
    """A row. What crashes leaves its reason; a peer may, anything else has then failed. A dry run is of a tiny case."""
    torch.manual_seed(0)
    if place.toy:
        small = {"batch": min(case.batch, 2), "length": min(case.length, TOY_LENGTH)}
        case = replace(case, heads=place.heads(case.heads), **small)
    try:
        with torch.no_grad(), place.stance:
            work = case.build(case, place)
            work.launch(0)  # compile
            work.reset()
            row = measure(work, place)
    except CRASHES as reason:
        still_there(place, reason)
        raise Unmeasured(f"{type(reason).__name__}: {str(reason).partition(chr(10))[0][:200]}") from reason
    del work
    place.cuda.empty_cache()
    return row
