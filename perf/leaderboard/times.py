"""How long reading a whole prompt and a step after it take, under each policy and with the full cache."""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from subprocess import PIPE, Popen
from typing import Any

import torch
from torch import Tensor

from fastkv import Budget, patched, policies, unpatch
from fastkv.integrations.transformers.stock import CACHE
from fastkv.lab import facts, reading
from perf.engine import ROOT

from .measure import tokens_of

LENGTH, KEEP = 2048, 0.125
TURNS, ROUNDS, STEPS = 3, 6, 16  # of reading and of stepping, and steps of a turn: one of them evicts
FULL = "full cache"
HEADS, KEPT, BATCHES = ("uniform", "calibrated"), (512, 4096), (1, 4)


@torch.no_grad()
def head_steps(model: Any, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Steps with calibrated heads and with heads that are alike, of as many tokens in all; both take turns."""
    for tokens in KEPT:
        ids = torch.tensor([facts.sample(tokenizer, tokens + tokens // 4, seed=0).prefix])
        caches = {}
        for heads in HEADS:
            with patched(model, "keydiff", Budget(tokens=tokens, heads=heads)):
                caches[heads] = reading.read(model, ids)
        for batch in BATCHES:
            best = dict.fromkeys(HEADS, float("inf"))
            for _ in range(ROUNDS):
                for heads, cache in caches.items():
                    with patched(model, "keydiff", Budget(tokens=tokens, heads=heads)):
                        best[heads] = min(best[heads], stepped(model, ids[:, -1:].repeat(batch, 1), cache.fork(batch)))
            yield {"kept": tokens, "batch": batch, **{f"{heads}_s": best[heads] for heads in HEADS}}


def stepped(model: Any, fed: Tensor, cache: Any) -> float:
    """The mean of as many steps as lie between evictions, so that one of them evicts. A step before them is not
    counted: others had their turn, and a module that was patched is asked once how it attends.
    """
    model(fed, **{CACHE: cache}, use_cache=True)
    begun = time.perf_counter()
    for _ in range(STEPS):
        model(fed, **{CACHE: cache}, use_cache=True)
    return (time.perf_counter() - begun) / STEPS


class Ours:
    """The full cache and the caches of some policies, in this process."""

    def __init__(self, model: Any, ids: Tensor, names: Sequence[str]) -> None:
        self.model, self.ids, self.names = model, ids, (FULL, *names)
        self.caches: dict[str, Any] = {}

    def turn(self, what: str) -> Iterator[tuple[str, float]]:
        """Seconds of "read" or "step", of each by name."""
        for number, name in enumerate(self.names, 1):
            print(f"{what}: {name}, {number} of {len(self.names)}", file=sys.stderr, flush=True)
            with self._patched(name):
                if what == "step":
                    yield name, stepped(self.model, self.ids[:, :1], self.caches[name])
                    continue
                begun = time.perf_counter()
                self.caches[name] = reading.read(self.model, self.ids)
                yield name, time.perf_counter() - begun

    def _patched(self, name: str) -> AbstractContextManager[Any]:
        if name == FULL:
            return nullcontext(unpatch(self.model))
        policy = policies.get(name)
        budget, told = tokens_of(self.model, KEEP, LENGTH, "bytes", policy, {})
        return patched(self.model, policy, budget, **told)


class Presses:
    """Those of kvpress, in a process and an environment of their own; where: the model's directory."""

    def __init__(self, python: str, ids: Tensor, where: str) -> None:
        self.tokens = tempfile.NamedTemporaryFile()
        torch.save(ids, self.tokens.name)
        command = [python, "-m", "perf.leaderboard.presses", self.tokens.name, where]
        self.worker: Any = Popen(command, cwd=ROOT, stdin=PIPE, stdout=PIPE, text=True)
        self.told = json.loads(self.worker.stdout.readline())

    def turn(self, what: str) -> Iterator[tuple[str, float]]:
        """As `Ours.turn`."""
        self.worker.stdin.write(f"{what}\n")
        self.worker.stdin.flush()
        yield from json.loads(self.worker.stdout.readline()).items()


@torch.no_grad()
def rows(
    model: Any, tokenizer: Any, names: Sequence[str], python: str | None = None, where: str = ""
) -> Iterator[dict[str, Any]]:
    """A row for the full cache and each policy. All take turns, so that a slow minute of the machine meets them all:
    the least of some readings, the median over turns of some steps each.

    Args: python, where: of an environment with kvpress, and the model's directory, to time its presses in turn.
    """
    ids = torch.tensor([facts.sample(tokenizer, LENGTH, seed=0).prefix])
    sides: list[Any] = [Ours(model, ids, names)]
    if python:
        sides.append(Presses(python, ids, where))
    found: dict[str, dict[str, list[float]]] = {"read": {}, "step": {}}
    for what, turns in (("read", TURNS), ("step", ROUNDS)):
        for side in sides * turns:
            for name, seconds in side.turn(what):
                found[what].setdefault(name, []).append(seconds)
    for name, read in found["read"].items():
        step = statistics.median(found["step"][name])
        row = {"policy": name, "read_s": min(read), "step_s": step, "threads": torch.get_num_threads()}
        yield row if name in (FULL, *names) else row | sides[-1].told
