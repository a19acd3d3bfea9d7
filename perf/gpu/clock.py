"""How a case is timed: graph replays between two CUDA events, each launch on the next of several sets of buffers.

Sets are rotated so that no launch finds its inputs in the L2 cache: at least four, and together at least twice the L2.
One sample is one replay divided by its launches; the first samples are thrown away.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastkv.reference import LayerState

from ..engine import Row
from ..micro.states import Heads, filled
from .place import HALF, Place

LAUNCHES = 100  # in one graph, if the buffers are small
MAX_PASSES = 5  # over the sets in one graph: a decode step appends this often before its lengths are restored
WARM, LEAST, MOST, SECONDS = 3, 10, 100, 0.25  # replays that are thrown away; samples; seconds spent on them
WORST = 2e-2  # relative error in half precision beyond which something is not what it should be


@dataclass
class Work:
    """Something to time.

    Attributes:
        launch: does it once on the set of that number.  sets: how many there are.  needed: bytes a launch must move.
        reset: restores what launches change, before every replay.  once: each set serves once per replay.
        error: largest relative error against the reference, for work that has no check of its own.
    """

    launch: Callable[[int], Any]
    sets: int
    needed: int
    reset: Callable[[], Any] = lambda: None
    once: bool = False
    error: float | None = None


@dataclass(frozen=True)
class Case:
    """One row of a table: what, on which heads, how many sequences, how many tokens each.

    Attributes:
        part, op: for the tables; op names the peer or variant.  build: makes the work, or raises to say why not.
        memory: what fastkv remembers evicted tokens by; empty for somebody else's code, which may be unable to run.
        seconds: predicted.
    """

    part: str
    op: str
    heads: Heads
    batch: int
    length: int
    build: Callable[[Case, Place], Work] = field(compare=False)
    memory: str = ""
    seconds: float = 0.8

    @property
    def name(self) -> str:
        return f"{self.op}[{self.heads.name}-B{self.batch}-L{self.length}]"


def num_sets(place: Place, size: int) -> int:
    """Sets of `size` bytes to rotate: more than four of small ones, fewer only if four exceed half the memory."""
    if place.toy:
        return 1
    properties = place.cuda.get_device_properties(place.device)
    wanted = max(4, -(-2 * properties.L2_cache_size // size))
    return max(2, min(wanted, 256, properties.total_memory // 2 // size))


def record(place: Place, launches: Sequence[Callable[[], Any]], warm: Callable[[], Any]) -> Any:
    """A CUDA graph of these launches. `warm` runs three times before: everything is compiled by then."""
    cuda = place.cuda
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        for _ in range(1 if place.toy else 3):
            warm()
    cuda.current_stream().wait_stream(side)
    cuda.synchronize()
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        for launch in launches:
            launch()
    return graph


def samples(work: Work, place: Place) -> tuple[list[float], int]:
    """Microseconds per launch, of so many replays of a graph, and how many launches it has; 2 of 2 ms in a dry run."""

    def warm() -> None:
        work.reset()
        work.launch(0)

    passes = 1 if work.once or place.toy else max(1, min(MAX_PASSES, -(-LAUNCHES // work.sets)))
    order = [index for _ in range(passes) for index in range(work.sets)]
    graph = record(place, [partial(work.launch, index) for index in order], warm)
    start, end = (place.cuda.Event(enable_timing=True) for _ in range(2))

    def replay() -> float:
        work.reset()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / len(order)

    first = [replay() for _ in range(1 if place.toy else WARM)]
    rounds = int(min(MOST, max(LEAST, SECONDS * 1e6 / (first[-1] * len(order)))))
    return [replay() for _ in range(2 if place.toy else rounds)], len(order)


def measure(work: Work, place: Place) -> Row:
    """Microseconds per launch, and GB/s of the bytes needed.

    Returns: median_us, p20_us, p80_us, gbps, samples, launches, sets; None instead of times in a dry run.
    """
    times, launches = samples(work, place)
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    row: Row = {"needed_bytes": work.needed, "sets": work.sets, "error": work.error}
    row |= {"samples": len(times), "launches": launches}
    found: Row = {"median_us": statistics.median(times), "p20_us": cuts[1], "p80_us": cuts[7]}
    found["gbps"] = work.needed / found["median_us"] / 1e3
    return row | ({"dry_run": True} | dict.fromkeys(found) if place.toy else found)


def right(got: Tensor, want: Tensor, worst: float = WORST) -> float:
    """Their relative error, |got - want| / |want| in the Frobenius norm, in float64.

    Raises: RuntimeError if it is too large: what is wrong is not timed.
    """
    error = float((got.double() - want.double()).norm() / want.double().norm())
    if not error < worst:
        raise RuntimeError(f"wrong result: relative error {error:.1e}")
    return error


def nbytes(*tensors: Tensor | None) -> int:
    """Of all that there are."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def randn(place: Place, *shape: int, dtype: torch.dtype = HALF) -> Tensor:
    """Random numbers, never zeros: zeros run faster than data."""
    return torch.randn(*shape, device=place.device, dtype=dtype)


def tokens(place: Place, heads: Heads, batch: int, length: int, dtype: torch.dtype = HALF) -> list[Tensor]:
    """q [B, Hq, T, D], k and v [B, Hkv, T, D] of new tokens."""
    sizes = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    return [randn(place, batch, size, length, heads.head_dim, dtype=dtype) for size in sizes]


def token(place: Place, heads: Heads, batch: int) -> list[Tensor]:
    """q [B, Hq, D], k and v [B, Hkv, 1, D] of one."""
    q, k, v = tokens(place, heads, batch, 1)
    return [q[:, :, 0], k, v]


def layer(place: Place, heads: Heads, batch: int, length: int, correction: str, **kept: Any) -> LayerState:
    """A random layer of these heads that keeps so many tokens; see `micro.states.filled`."""
    sizes = batch, heads.num_kv_heads, heads.head_dim, length
    return filled(*sizes, correction=correction, dtype=HALF, device=place.device, **kept)
