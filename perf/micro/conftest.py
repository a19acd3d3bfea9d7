"""Where and how a benchmark is timed: on the CPU, and on a GPU where there is one; shapes of named models.

The statistics are pytest-benchmark's own: of calls on a CPU, and on a GPU of launches inside a CUDA graph, see
`perf.gpu.clock`. On a CPU one thread computes: two wait for each other wherever anything else runs.
"""

import copy
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fastkv import ops, reference
from perf.environment import environment
from perf.gpu.clock import Work, num_sets, right, samples
from perf.gpu.place import Place
from perf.micro.states import GEMMA, LLAMA, RECENT, SINKS, Heads

SECONDS = 0.2  # spent on the rounds of one benchmark
LEAST, MOST = 3, 200  # rounds
WORST = {"cpu": 1e-4, "cuda": 2e-2}  # relative error of an operator that is worth timing: fp32, and bf16
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


READINGS: deque[float] = deque()  # of the clock on a GPU: before each round, and its length in seconds after it


def clock() -> float:
    return READINGS.popleft()


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A benchmark on a GPU reads the clock of the device."""
    for item in items:
        if getattr(item, "callspec", None) and item.callspec.params.get("device") == "cuda":
            item.add_marker(pytest.mark.benchmark(timer=clock))


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """GPU, versions and commit beside what pytest-benchmark knows of the machine."""
    machine_info["fastkv"] = environment()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where it runs: fp32 on a CPU, bf16 on a GPU."""
    return torch.device(request.param)


@pytest.fixture
def dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@pytest.fixture(params=(LLAMA, GEMMA), ids=lambda heads: heads.name)
def heads(request: pytest.FixtureRequest) -> Heads:
    return request.param


@pytest.fixture
def candidates(heads: Heads, device: torch.device) -> Any:
    """Makes positions [1, Hkv, num], which of them are tokens, all, and which are protected."""

    def make(num: int) -> tuple[Tensor, Tensor, Tensor]:
        positions = torch.arange(num, dtype=torch.int32, device=device).expand(1, heads.num_kv_heads, num).contiguous()
        guard = reference.protected(positions, torch.tensor([num], device=device), SINKS, RECENT)
        return positions, torch.ones_like(positions, dtype=torch.bool), guard

    return make


def nothing(*cell: Any) -> None:
    """Where a call changes nothing."""


@dataclass
class Timed:
    """Times `run(*make())`. benchmark: of pytest-benchmark.  device: where everything that is made lies."""

    benchmark: Any
    device: torch.device

    def __call__(self, make: Callable[[], tuple], run: Callable[..., Any], reset: Callable[..., Any] = nothing) -> None:
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
        rounds = int(min(MOST, max(LEAST, SECONDS / (time.perf_counter() - begun))))

        def setup() -> None:
            reset(*cell)

        self.benchmark.pedantic(lambda: run(*cell), setup=setup, rounds=rounds, warmup_rounds=1)

    def on_gpu(self, cell: tuple, make: Callable, run: Callable, reset: Callable, size: int) -> None:
        """Launches rotate over copies that together exceed the L2 cache, inside one graph."""
        place = Place(self.device)
        cells = [cell, *(make() for _ in range(num_sets(place, max(size, 1)) - 1))]
        work = Work(lambda index: run(*cells[index]), len(cells), 0, lambda: [reset(*one) for one in cells], once=True)
        times, self.benchmark.extra_info["launches"] = samples(work, place)
        READINGS.extend(reading for one in times for reading in (0.0, 1e-6 * one))
        self.benchmark.pedantic(lambda: None, rounds=len(times))


@pytest.fixture
def timed(benchmark: Any, device: torch.device) -> Any:
    """`Timed` of this test; nothing is random from run to run, and no gradient is kept."""
    torch.manual_seed(0)
    with torch.no_grad():
        yield Timed(benchmark, device)


@pytest.fixture
def compared(timed: Any) -> Any:
    """Times `run(ops, *make())`, once it returns what `run(reference, *make())` does: what is wrong is not timed."""

    def compare(make: Callable[[], tuple], run: Callable[..., Tensor], reset: Callable[..., Any] = nothing) -> None:
        cell = make()
        other = copy.deepcopy(cell)
        check(run(ops, *cell), run(reference, *other))
        timed(make, partial(run, ops), reset)

    return compare


def check(got: Tensor, want: Tensor) -> None:
    right(got, want, WORST[got.device.type])
