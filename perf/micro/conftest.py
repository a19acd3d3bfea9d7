"""Where and how a benchmark is timed: on the CPU, and on a GPU where there is one; shapes of named models.

The statistics are pytest-benchmark's own: of calls on a CPU, and on a GPU of launches inside a CUDA graph, which are
divided out by the clock. On a CPU one thread computes: two wait for each other wherever anything else runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from perf.environment import environment
from perf.gpu.clock import Work, num_sets, recorded
from perf.gpu.heads import GEMMA, LLAMA, Heads
from perf.gpu.place import Place

SECONDS = 0.2  # spent on the rounds of one benchmark
LEAST, MOST = 3, 200  # rounds
WORST = {"cpu": 1e-4, "cuda": 2e-2}  # relative error of an operator that is worth timing: fp32, and bf16
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


class GraphClock:
    """Seconds of device time, of which two readings around a graph differ by the time of one of its launches.

    Attributes:
        launches: in the graph that is timed.
    """

    launches = 1

    def __init__(self) -> None:
        self.reading = 0.0
        self.last: Any = None

    def __call__(self) -> float:
        """Read it."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        event.synchronize()
        if self.last is not None:
            self.reading += self.last.elapsed_time(event) / 1e3 / self.launches
        self.last = event
        return self.reading


CLOCK = GraphClock()


def pytest_configure(config: pytest.Config) -> None:
    """One thread."""
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A benchmark on a GPU reads the clock of the device."""
    for item in items:
        if getattr(item, "callspec", None) and item.callspec.params.get("device") == "cuda":
            item.add_marker(pytest.mark.benchmark(timer=CLOCK))


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """GPU, versions and commit beside what pytest-benchmark knows of the machine."""
    machine_info["fastkv"] = environment()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where it runs: fp32 on a CPU, bf16 on a GPU."""
    return torch.device(request.param)


@pytest.fixture
def dtype(device: torch.device) -> torch.dtype:
    """What it computes in."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@pytest.fixture(params=(LLAMA, GEMMA), ids=lambda heads: heads.name)
def heads(request: pytest.FixtureRequest) -> Heads:
    """Attention heads of a named model."""
    return request.param


@dataclass
class Timed:
    """Times `run(*make())`. benchmark: of pytest-benchmark.  device: where everything that is made lies."""

    benchmark: Any
    device: torch.device

    def __call__(
        self, make: Callable[[], tuple], run: Callable[..., Any], reset: Callable[..., Any] = lambda *cell: None
    ) -> None:
        """Call it once to compile, then round after round; `reset(*cell)` restores what a call changes, untimed."""
        before = torch.cuda.memory_allocated() if self.device.type == "cuda" else 0
        cell = make()
        run(*cell)
        if self.device.type == "cuda":
            self.on_gpu(cell, make, run, reset, torch.cuda.memory_allocated() - before)
            return
        reset(*cell)
        begun = time.perf_counter()
        run(*cell)
        self.rounds(lambda: run(*cell), lambda: reset(*cell), time.perf_counter() - begun)

    def on_gpu(self, cell: tuple, make: Callable, run: Callable, reset: Callable, size: int) -> None:
        """Launches rotate over copies that together exceed the L2 cache, inside one graph."""
        sets = num_sets(Place(self.device), max(size, 1))
        cells = [cell, *(make() for _ in range(sets - 1))]
        work = Work(lambda index: run(*cells[index]), sets, 0, lambda: [reset(*one) for one in cells], once=True)
        graph, CLOCK.launches = recorded(work, Place(self.device))
        self.benchmark.extra_info["launches"] = CLOCK.launches
        before = CLOCK()
        graph.replay()
        self.rounds(graph.replay, work.reset, (CLOCK() - before) * CLOCK.launches)

    def rounds(self, call: Callable[[], Any], reset: Callable[[], Any], seconds: float) -> None:
        """As many as fit, under pytest-benchmark."""

        def setup() -> None:
            reset()

        number = int(min(MOST, max(LEAST, SECONDS / max(seconds, 1e-9))))
        self.benchmark.pedantic(call, setup=setup, rounds=number, warmup_rounds=1)


@pytest.fixture
def timed(benchmark: Any, device: torch.device) -> Any:
    """`Timed` of this test; nothing is random from run to run, and no gradient is kept."""
    torch.manual_seed(0)
    with torch.no_grad():
        yield Timed(benchmark, device)


def check(got: Tensor, want: Tensor) -> None:
    """First the operator's correctness: what is wrong is not timed."""
    error = float((got.double() - want.double()).norm() / want.double().norm())
    assert error < WORST[got.device.type], f"relative error {error:.1e}"
