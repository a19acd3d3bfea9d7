"""perf/micro as code: every operator runs and is right, and the clock of a GPU divides by the launches of a graph."""

import pytest
import torch

from fastkv import corrections
from perf.micro import conftest, states

from .processes import of_module, run

SMALL = "(llama and 1024 and not 8-1024) or llama-3.1-8b-32 or keydiff_scores or (policy and keydiff)"


def test_operators_are_right_before_they_are_timed(tmp_path):
    """What `make bench` runs, on the smaller shapes, each once."""
    code, said, _ = run(of_module("pytest"), tmp_path, "perf/micro", "-q", "--benchmark-disable", "-k", SMALL)
    assert code == 0 and "passed" in said, said[-2000:]


def test_what_is_wrong_is_not_timed():
    want = torch.ones(10)
    conftest.check(want, want.double())
    with pytest.raises(AssertionError, match="relative error"):
        conftest.check(want + 1e-3, want)


class Event:
    """An event of a device on which every replay of the graph takes 2 ms."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Event.now

    def synchronize(self):
        pass

    def elapsed_time(self, later):
        return later.at - self.at


def test_the_clock_counts_launches_and_not_what_lies_between_rounds(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = conftest.GraphClock()
    clock.launches, seconds = 40, []
    for _ in range(3):
        Event.now += 100.0  # states are restored
        start = clock()
        Event.now += 2.0
        seconds.append(clock() - start)
    assert seconds == pytest.approx([2e-3 / 40] * 3)


def test_a_gpu_benchmark_replays_one_graph_over_many_copies(monkeypatch):
    launched, rounds = [], []

    class Benchmark:
        extra_info: dict = {}  # noqa: RUF012

        def pedantic(self, call, setup, rounds, warmup_rounds):
            setup()
            call()

    class Graph:
        def replay(self):
            rounds.append(len(launched))

    def recorded(work, place):
        work.reset()
        for index in range(work.sets):
            work.launch(index)
        return Graph(), work.sets

    monkeypatch.setattr(conftest, "num_sets", lambda place, size: 3)
    monkeypatch.setattr(conftest, "recorded", recorded)
    monkeypatch.setattr(conftest, "CLOCK", conftest.GraphClock())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    cells = iter("abcd")
    conftest.Timed(Benchmark(), torch.device("cuda"))(lambda: (next(cells),), launched.append)
    assert launched == ["a", "a", "b", "c"] and rounds == [4, 4] and Benchmark.extra_info == {"launches": 3}


@pytest.mark.parametrize("correction", corrections.names())
def test_layers_hold_what_they_say(correction):
    state = states.filled(2, 3, 16, 64, free=4, correction=correction, attention=True)
    pairs = 64 if state.approx is None else 64 - state.approx.keys.shape[2] // 2
    assert state.exact.keys.shape == (2, 3, pairs + 4, 16) and (state.exact.lengths == pairs).all()
    assert (state.approx is not None) == (state.recovery is not None) == corrections.get(correction).key_only
    assert (state.seen[:, None] == state.stored + state.moments.count).all()
    assert all(
        tensor.any() for name, tensor in state.named_tensors() if name != "exact.attention" and "approx.att" not in name
    )
