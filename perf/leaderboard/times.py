"""How long reading a whole prompt and a step after it take, under each policy and with the full cache."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastkv import Budget, FastKVCache, patched, policies, unpatch
from fastkv.integrations.transformers.stock import CACHE
from fastkv.lab import facts

from .measure import tokens_of

LENGTH, KEEP, STEPS, TURNS = 2048, 0.125, 32, 2
FULL = "full cache"
HEADS, KEPT, BATCHES = ("uniform", "calibrated"), (512, 4096), (1, 4)


def timed(model: Any, ids: Tensor, cache: Any) -> tuple[float, float]:
    """Seconds of reading `ids` [1, N], and the median of some steps after it."""
    begun = time.perf_counter()
    out = model(ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
    read = time.perf_counter() - begun
    return read, stepped(model, ids[:, :1], out[CACHE])


@torch.no_grad()
def head_steps(model: Any, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Steps with calibrated heads and with heads that are alike, of as many tokens in all; both take turns."""
    for tokens in KEPT:
        ids = torch.tensor([facts.sample(tokenizer, tokens + tokens // 4, seed=0).prefix])
        caches = {}
        for heads in HEADS:
            with patched(model, "keydiff", Budget(tokens=tokens, heads=heads)):
                model(ids, **{CACHE: (cache := FastKVCache(model))}, logits_to_keep=1)
                caches[heads] = cache
        for batch in BATCHES:
            best = dict.fromkeys(HEADS, float("inf"))
            for _ in range(TURNS + 1):
                for heads, cache in caches.items():
                    with patched(model, "keydiff", Budget(tokens=tokens, heads=heads)):
                        best[heads] = min(best[heads], stepped(model, ids[:, -1:].repeat(batch, 1), cache.fork(batch)))
            yield {"kept": tokens, "batch": batch, **{f"{heads}_s": best[heads] for heads in HEADS}}


def stepped(model: Any, fed: Tensor, cache: Any) -> float:
    """The median of some steps."""
    steps = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        model(fed, **{CACHE: cache}, use_cache=True)
        steps.append(time.perf_counter() - begun)
    return statistics.median(steps)


def least(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    """The shorter reading and the shorter step."""
    return min(one[0], other[0]), min(one[1], other[1])


def presses(python: str, ids: Tensor, where: str) -> dict[str, tuple[float, float]]:
    """The same of kvpress's presses, in an environment of its own; where: the model's directory."""
    with tempfile.NamedTemporaryFile() as file:
        torch.save(ids, file.name)
        command = [python, str(Path(__file__).with_name("presses.py")), file.name, where]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return {row["policy"]: (row["read_s"], row["step_s"]) for row in found}


@torch.no_grad()
def rows(
    model: Any, tokenizer: Any, names: Sequence[str], python: str | None = None, where: str = ""
) -> Iterator[dict[str, Any]]:
    """A row for the full cache and each policy; all take turns, so that a slow minute of the machine meets them all.

    Args: python, where: of an environment with kvpress, and the model's directory, to time its presses in turn.
    """
    ids = torch.tensor([facts.sample(tokenizer, LENGTH, seed=0).prefix])
    best: dict[str, tuple[float, float]] = {}
    for turn in range(TURNS):
        for number, name in enumerate((FULL, *names), 1):
            print(f"turn {turn + 1} of {TURNS}: {name}, {number} of {len(names) + 1}", file=sys.stderr, flush=True)
            if name == FULL:
                found = timed(unpatch(model), ids, None)
            else:
                policy = policies.get(name)
                budget, told = tokens_of(model, KEEP, LENGTH, "bytes", policy, {})
                with patched(model, policy, budget, **told):
                    found = timed(model, ids, FastKVCache(model))
            best[name] = least(best.get(name, found), found)
        for name, found in (presses(python, ids, where) if python else {}).items():
            best[name] = least(best.get(name, found), found)
    for name, (read, step) in best.items():
        yield {"policy": name, "read_s": read, "step_s": step, "threads": torch.get_num_threads()}
