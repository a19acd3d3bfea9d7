"""How a case is timed: graph replays between two CUDA events, each launch on the next of several sets of buffers.

Sets are rotated so that no launch finds its inputs in the L2 cache: at least four, and together at least twice the L2.
One sample is one replay divided by its launches; the first samples are thrown away.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..engine import Row
from .heads import Heads
from .state import Place

WARMUP, LEAST, MOST = 3, 10, 100  # replays
SAMPLE_SECONDS = 0.4  # spent on the samples of one case
LAUNCHES = 100  # in one graph, if the buffers are small
MAX_PASSES = 5  # over the sets in one graph: a decode step appends this often before its lengths are restored
COPY_BYTES = 1 << 30  # of each of the two buffers of the bandwidth measurement


def nothing() -> None:
    """No state to restore."""


@dataclass
class Work:
    """Something to time.

    Attributes:
        launch: does it once on the set of that number.  sets: how many there are.  needed: bytes a launch must move.
        reset: restores what launches change, before every replay.  once: each set serves once per replay.
        error: largest relative error against the reference, for work that has no check of its own.
        keep: whatever must stay alive while the graph does.
    """

    launch: Callable[[int], Any]
    sets: int
    needed: int
    reset: Callable[[], None] = nothing
    once: bool = False
    error: float | None = None
    keep: tuple = ()


@dataclass(frozen=True)
class Case:
    """One row of a table: what, on which heads, how many sequences, how many tokens each.

    Attributes:
        part, op: for the tables; op names the peer or variant.  build: makes the work, or raises to say why not.
        peer: whether it is somebody else's, who may be unable to run.
    """

    part: str
    op: str
    heads: Heads
    batch: int
    length: int
    build: Callable[[Case, Place], Work] = field(compare=False)
    peer: bool = False

    @property
    def name(self) -> str:
        """Unique within the part."""
        return f"{self.op}[{self.heads.name}-B{self.batch}-L{self.length}]"


def num_sets(place: Place, size: int, once: bool = False) -> int:
    """Sets of `size` bytes to rotate: more than four of small ones, fewer only if four exceed half the memory."""
    if place.toy:
        return 2
    properties = torch.cuda.get_device_properties(place.device)
    wanted = max(20 if once and size < 2**28 else 4, -(-2 * properties.L2_cache_size // size))
    return max(2, min(wanted, 256, properties.total_memory // 2 // size))


def passes(work: Work) -> int:
    """How often one graph goes through all sets."""
    return 1 if work.once else max(1, min(MAX_PASSES, -(-LAUNCHES // work.sets)))


def record(work: Work) -> tuple[torch.cuda.CUDAGraph, int]:
    """The captured launches and their number. Everything is compiled and warm before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work.reset()
            work.launch(0)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    order = [index for _ in range(passes(work)) for index in range(work.sets)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in order:
            work.launch(index)
    return graph, len(order)


def measure(work: Work, place: Place) -> Row:
    """Microseconds per launch, and GB/s of the bytes needed.

    Returns: median_us, p20_us, p80_us, gbps, samples, launches, sets; None instead of times in a dry run.
    """
    row: Row = {"needed_bytes": work.needed, "sets": work.sets, "error": work.error}
    if place.toy:
        work.reset()
        for index in range(work.sets):
            work.launch(index)
        return row | {"dry_run": True, "median_us": None, "p20_us": None, "p80_us": None, "gbps": None}
    graph, launches = record(work)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []

    def replay() -> None:
        work.reset()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)

    for _ in range(WARMUP):
        replay()
    rounds = int(min(MOST, max(LEAST, SAMPLE_SECONDS * 1e6 / (times[-1] * launches))))
    times.clear()
    for _ in range(rounds):
        replay()
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    row |= {"samples": len(times), "launches": launches}
    row |= {"median_us": statistics.median(times), "p20_us": cuts[1], "p80_us": cuts[7]}
    return row | {"gbps": work.needed / row["median_us"] / 1e3}


def copy_work(place: Place, size: int, sets: int) -> Work:
    """Copies of `size` bytes on the device, read and written: the ceiling."""
    source = torch.randint(0, 100, (sets, max(size, 16)), dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    return Work(lambda index: target[index].copy_(source[index]), sets, 2 * size, keep=(source, target))


def randn(place: Place, *shape: int) -> Tensor:
    """Random half-precision numbers, never zeros: zeros run faster than data."""
    return torch.randn(*shape, device=place.device, dtype=place.half)


def relative_error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| in the Frobenius norm, in float64."""
    return float((got.double() - want.double()).norm() / want.double().norm())
