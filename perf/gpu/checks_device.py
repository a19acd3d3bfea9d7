"""What only a device can show: the race of the ticket merge, captured graphs, host syncs of a decode step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import fastkv
from fastkv import ops

from ..micro.states import filled, spec
from .clock import nothing, record
from .heads import Heads
from .models import small_model
from .place import Place
from .state import Finding, copied, equal, ragged, randn

LAUNCHES = 100_000
PER_GRAPH = 100
CORRECTIONS = ("centroids", "moments")


def recorded(place: Place, run: Callable[[], None], restore: Callable[[], None] = nothing) -> Callable[[], None]:
    """The function as a captured CUDA graph; in a dry run it is captured by the stand-in, and then the function.

    Args: restore: takes back what running it has changed, before and after it is captured.
    """

    def warm() -> None:
        run()
        restore()

    graph = record(place, [run], warm)
    restore()
    return run if place.toy else graph.replay


def check_ticket(place: Place, heads: Heads, correction: str) -> list[Finding]:
    """10^5 launches of the split decode on the same inputs, other streams busy at random: all results bitwise equal."""
    findings = []
    for batch, slots in ((1, 64),) if place.toy else ((1, 1024), (8, 4096)):
        sizes = batch, heads.num_kv_heads, heads.head_dim, slots
        state = filled(*sizes, correction=correction, attention=True, dtype=place.half, device=place.device)
        rule = spec(correction, backend=place.backend)
        state.scratch = ops.workspace(heads.num_heads, state, rule)
        q = randn(place, place.half, batch, heads.num_heads, heads.head_dim)

        def launch(state=state, q=q, rule=rule) -> list[Tensor]:
            collected = state.exact.attention.zero_()
            return [*ops.decode_step(q, None, None, state, rule), collected]

        first = [t.clone() for t in launch()]
        wrong = torch.zeros((), dtype=torch.int64, device=place.device)

        def launches(first=first, wrong=wrong, launch=launch) -> None:
            for _ in range(2 if place.toy else PER_GRAPH):
                for got, want in zip(launch(), first):
                    wrong.add_((got != want).sum())

        replay, noise = recorded(place, launches), Noise(place)
        for _ in range(1 if place.toy or place.brief else LAUNCHES // PER_GRAPH):
            noise.make()
            replay()
        place.cuda.synchronize()
        findings.append(Finding(f"elements that changed, B={batch} C={slots}", float(wrong)))
        if state.scratch:
            findings.append(Finding("tickets left", float(state.scratch[3].abs().sum())))
    return findings


class Noise:
    """Other work on the device: matrix products and sleeps of random length on two more streams."""

    def __init__(self, place: Place) -> None:
        self.cuda, self.size = place.cuda, 64 if place.toy else 2048
        self.streams = [self.cuda.Stream() for _ in range(2)]
        self.matrix = torch.randn(self.size, self.size, device=place.device, dtype=torch.bfloat16)
        self.random = random.Random(0)

    def make(self) -> None:
        """Queue some on each stream, and delay the current one by up to 20 microseconds or so."""
        for stream in self.streams:
            with self.cuda.stream(stream):
                self.cuda._sleep(self.random.randrange(100_000))
                rows = self.random.randrange(32, self.size, 32)
                torch.mm(self.matrix[:rows], self.matrix)
        self.cuda._sleep(self.random.randrange(40_000))


def check_graph(place: Place, heads: Heads, correction: str) -> list[Finding]:
    """A captured decode_step, replayed with new tokens while lengths change on the device, equals eager steps."""
    findings, dtype, rule = [], place.half, spec(correction, backend=place.backend)
    start = ragged(place, heads, dtype, correction=correction)
    batch, kv = start.exact.lengths.shape
    start.exact.keys, start.exact.values = start.exact.keys.nan_to_num(0.5), start.exact.values.nan_to_num(0.5)
    start.exact.attention = torch.zeros(start.exact.keys.shape[:3], device=place.device)
    token = [randn(place, dtype, batch, heads.num_heads, heads.head_dim)]
    token += [randn(place, dtype, batch, kv, 1, heads.head_dim) for _ in "kv"]
    graphed, eager = copied(start), copied(start)
    for state in (graphed, eager):
        state.scratch = ops.workspace(heads.num_heads, state, rule)
    results: list[Tensor] = []

    def run() -> None:
        results[:] = ops.decode_step(*token, graphed, rule)

    def restore() -> None:
        for (_, mine), (_, other) in zip(graphed.named_tensors(), eager.named_tensors()):
            mine.copy_(other)

    replay = recorded(place, run, restore)
    slots, lengths = start.exact.limit, start.exact.lengths
    for base in (0, slots // 2, slots - 4):  # short, middle, up to the last slot
        for state in (graphed, eager):
            state.exact.lengths.copy_((lengths % 3 + base).clamp(max=slots - 4))
            state.seen.copy_((state.exact.lengths + state.moments.count).amax(1))
        for index in range(3):
            for tensor in token:
                tensor.normal_()
            replay()
            for name, got, want in zip(("out", "lse", "lse_evicted"), results, ops.decode_step(*token, eager, rule)):
                findings.append(equal(f"from {base}, step {index}: {name}", got, want))
        pairs = zip(graphed.named_tensors(), eager.named_tensors())
        findings += [equal(f"from {base}: {name}", mine, other) for (name, mine), (_, other) in pairs]
    return findings


@contextmanager
def syncs_raise(place: Place) -> Iterator[None]:
    """Until the end of the with block, whatever waits for the device raises."""
    place.cuda.synchronize()
    place.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        place.cuda.set_sync_debug_mode("default")


def check_sync(place: Place, policy: str) -> list[Finding]:
    """Decode steps of a patched model, evictions among them, ask the host for nothing (a sync raises)."""
    model = small_model(place, "llama")
    budget, warm, timed = (16, 4, 4) if place.toy else (128, 40, 20)
    ids = torch.randint(3, 256, (2, 2 * budget), device=place.device)
    kept = fastkv.Budget(budget, sinks=2, recent=4)
    fastkv.patch(model, policy, kept, evict_every=4, backend=place.backend)
    out = model(ids, logits_to_keep=1)
    cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
    for _ in range(warm):
        token = model(token, past_key_values=cache).logits.argmax(-1)
    with syncs_raise(place):
        for _ in range(timed):
            token = model(token, past_key_values=cache).logits.argmax(-1)
    wrong = float((cache.stored(0) > budget + 4).sum())
    missed = abs(cache.get_seq_length() - (2 * budget + warm + timed))
    return [Finding("heads above the bound", wrong), Finding("tokens missed", float(missed))]


PER_HEADS: dict[str, Callable[[Place, Heads, str], list[Finding]]] = {"ticket": check_ticket, "graph": check_graph}
