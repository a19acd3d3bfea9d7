"""Correctness on a device: what only it can show, and the kernels' own tests, which run on a GPU where there is one.

The race of the ticket merge, captured graphs, host syncs of decode steps, captured and compiled steps of whole models
beside eager ones. A timing is compared with the reference at its own shape besides (`perf.gpu.timings`).
"""

from __future__ import annotations

import copy
import importlib.util
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

import fastkv
from fastkv import ops
from fastkv.cache.layer import LayerCache
from fastkv.cache.layout import Attends, LayerPlan
from fastkv.cache.paged import PagedBlocks, PagedClock, PagedLayer, PagedRule
from fastkv.cache.pages import PageFormat
from fastkv.cache.workspace import CacheWorkspace
from fastkv.config import Config
from fastkv.reference import LayerState
from fastkv.rotary import Rotary

from ..engine import LIMIT, ROOT, Row
from ..micro.states import SCALE, filled, spec
from ..speed.models import build
from .clock import nothing, randn, record
from .heads import Heads
from .place import HALF, Place, forget_compiled

BROKEN = (RuntimeError, ValueError, TypeError, AssertionError, LookupError, AttributeError)
CRASHES = (*BROKEN, OSError, ImportError, TritonError)
LAUNCHES, PER_GRAPH = 100_000, 100
CORRECTIONS = ("centroids", "moments")
FAMILIES = ("llama", "gemma-3")  # the second has layers with a window
EVERY = 4  # tokens between evictions
# Median over steps of |compiled - eager| / |eager| of the logits. An inductor graph keeps in float32 what eager steps
# round to bf16 in between (2^-8 each), and a close choice of what to evict may fall the other way.
COMPILED = 0.05
NEAR = (
    1e-4  # relative error of a batch of several sequences in float32, whose heads are split otherwise than those of one
)


class DeviceLost(Exception):
    """An error after which nothing can be computed on the device in this process, such as an illegal access."""


@dataclass
class Finding:
    """One comparison: largest absolute error and its limit; a limit of 0 asks for equality."""

    name: str
    error: float
    limit: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the error is within the limit; NaN never is."""
        return self.error <= self.limit


def equal(name: str, got: Tensor, want: Tensor) -> Finding:
    """Number of elements that differ, NaN equal to NaN; the limit is none."""
    same = (got == want) | (got.isnan() & want.isnan()) if got.is_floating_point() else got == want
    return Finding(name, float((~same).sum()))


def still_there(place: Place, crash: BaseException) -> None:
    """Raise DeviceLost if the crash broke the device: every later result would be wrong or an error."""
    try:
        place.cuda.synchronize()
    except RuntimeError as lost:
        raise DeviceLost(f"{type(crash).__name__}: {str(crash).partition(chr(10))[0][:300]}") from lost


def row_of(check: Callable[[], list[Finding]], place: Place) -> Row:
    """What a check found: "passed", how much was compared, what was wrong or the closest call, and how it crashed.

    Raises: DeviceLost if nothing can be computed on the device any more.
    """
    findings, error = [], None
    try:
        with torch.no_grad():
            findings = check()
    except CRASHES as crash:
        still_there(place, crash)
        error = f"{type(crash).__name__}: {str(crash)[:500]}"
    bad = [one for one in findings if not one.passed]
    worst = [max(findings, key=lambda one: one.error / (one.limit or 1))] if findings else []
    row: Row = {"passed": error is None and not bad, "compared": len(findings)}
    row["findings"] = [vars(one) for one in (bad or worst)]
    return row | ({"error": error} if error else {})


def check_kernels(place: Place) -> list[Finding]:
    """`tests/test_kernels_*.py` in a process of its own; in a dry run they are collected only."""
    files = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/test_kernels_*.py"))
    how = ["--collect-only"] if place.toy else ["-m", "not slow"]
    if importlib.util.find_spec("xdist") and not place.toy:
        how += ["-n", "16"]
    command = [sys.executable, "-m", "pytest", "-q", *how, *files]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT)
    except subprocess.TimeoutExpired as late:
        raise RuntimeError(f"not finished after {LIMIT} seconds") from late
    if done.returncode > 1:
        raise RuntimeError((done.stdout + done.stderr).strip()[-500:])
    red = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    return [Finding(done.stdout.strip().splitlines()[-1], float(len(red))), *(Finding(name, 1.0) for name in red)]


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
        state = filled(*sizes, correction=correction, attention=True, dtype=HALF, device=place.device)
        rule = spec(correction, backend=place.backend)
        state.scratch = ops.workspace(heads.num_heads, state, rule)
        q = randn(place, batch, heads.num_heads, heads.head_dim)

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
        for _ in range(1 if place.toy else LAUNCHES // PER_GRAPH):
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
    findings, rule, batch = [], spec(correction, backend=place.backend), 2
    sizes = batch, heads.num_kv_heads, heads.head_dim, place.slots
    eager = filled(*sizes, correction=correction, attention=True, dtype=HALF, device=place.device)
    graphed = copy.deepcopy(eager)
    token = [randn(place, batch, heads.num_heads, heads.head_dim)]
    token += [randn(place, batch, heads.num_kv_heads, 1, heads.head_dim) for _ in "kv"]
    for state in (graphed, eager):
        state.scratch = ops.workspace(heads.num_heads, state, rule)
    results: list[Tensor] = []

    def run() -> None:
        results[:] = ops.decode_step(*token, graphed, rule)

    def restore() -> None:
        for (_, mine), (_, other) in zip(graphed.named_tensors(), eager.named_tensors()):
            mine.copy_(other)

    def shorten(base: int) -> None:
        for state in (graphed, eager):
            lengths = torch.arange(state.exact.lengths.numel(), device=place.device) % 3 + base
            state.exact.lengths.copy_(lengths.clamp(max=place.slots - 4).view_as(state.exact.lengths))
            state.seen.copy_((state.exact.lengths + state.moments.count).amax(1))

    shorten(0)
    replay = recorded(place, run, restore)
    for base in (0, place.slots // 2, place.slots - 4):  # short, middle, up to the last slot
        shorten(base)
        for index in range(3):
            for tensor in token:
                tensor.normal_()
            replay()
            for name, got, want in zip(("out", "lse", "lse_evicted"), results, ops.decode_step(*token, eager, rule)):
                findings.append(equal(f"from {base}, step {index}: {name}", got, want))
        pairs = zip(graphed.named_tensors(), eager.named_tensors())
        findings += [equal(f"from {base}: {name}", mine, other) for (name, mine), (_, other) in pairs]
    return findings


def check_pages(place: Place, heads: Heads, correction: str) -> list[Finding]:
    """What kernels do to sequences in pages they do to the same sequences side by side, bit for bit, and to no others.

    A captured step and eviction are replayed for other rows; row 0, which is nobody's, is among them twice.
    """
    batch, pages, drop = 4, 7, EVERY
    tokens = place.slots - drop
    rule = spec(correction, tokens, place.backend, spare=drop)
    sizes = 2, heads.num_kv_heads, heads.head_dim, tokens
    state = filled(*sizes, free=drop, correction=correction, attention=True, dtype=HALF, device=place.device)
    form = PageFormat.of(state)
    paged = form.view(torch.randint(1, 120, (pages, form.nbytes), dtype=torch.uint8, device=place.device))
    rows = torch.zeros(batch, dtype=torch.int64, device=place.device)
    for row in range(pages):  # each page has a sequence, row 0 none
        paged.at(rows[:1] + row).put(state.stretch(row % 2, row % 2 + 1))
    paged.exact.lengths[0], paged.exact.lengths[1:] = 0, place.slots - 2  # any of them has something to evict
    paged.seen += place.slots - 2 - tokens
    token = [randn(place, batch, heads.num_heads, heads.head_dim)]
    token += [randn(place, batch, heads.num_kv_heads, 1, heads.head_dim) for _ in "kv"]
    scores = randn(place, batch, heads.num_kv_heads, place.slots).float()
    results: list[Tensor] = []
    here = paged.at(rows)
    here.scratch = ops.workspace(heads.num_heads, here, rule)

    def step(of: LayerState) -> list[Tensor]:
        out = [*ops.decode_step(*token, of, rule), *ops.slot_signals(positions_of(of), of, rule)]
        ops.evict(scores, None, of, rule)
        return out

    def run() -> None:
        results[:] = step(here)

    replay, findings = recorded(place, run), []
    for chosen in ([3, 0, 1, 0], [0, 6, 0, 4], [1, 0, 0, 3]):
        rows.copy_(torch.tensor(chosen))
        live = torch.tensor([i for i, row in enumerate(chosen) if row], device=place.device)
        others = torch.tensor([row for row in range(1, pages) if row not in chosen], device=place.device)
        beside, untouched = here.taken(), paged.at(others).taken()
        replay()
        for number, (got, want) in enumerate(zip(results, step(beside))):
            if len(want):
                findings.append(equal(f"rows {chosen}, result {number}", got[live], want[live]))
        for (name, mine), (_, other) in zip(here.taken().named_tensors(), beside.named_tensors()):
            findings.append(equal(f"rows {chosen}, {name}", mine[live], other[live]))
        for (name, mine), (_, other) in zip(paged.at(others).taken().named_tensors(), untouched.named_tensors()):
            findings.append(equal(f"rows {chosen}, others' {name}", mine, other))
    return findings


def positions_of(state: LayerState) -> Tensor:
    """Positions [B, Hkv, C] of the slots of a batch."""
    positions = state.exact.positions
    assert positions is not None
    return positions.contiguous() if state.rows is None else positions.index_select(0, state.rows)


PER_HEADS: dict[str, Callable[[Place, Heads, str], list[Finding]]] = {
    "ticket": check_ticket,
    "graph": check_graph,
    "pages": check_pages,
}


@contextmanager
def syncs_raise(place: Place) -> Iterator[None]:
    """Until the end of the with block, whatever waits for the device raises."""
    place.cuda.synchronize()
    place.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        place.cuda.set_sync_debug_mode("default")


@dataclass(frozen=True)
class Kind:
    """A kind of cache: policy, correction, and whether heads are equal."""

    policy: str
    correction: str = "auto"
    heads: str = "uniform"

    @property
    def name(self) -> str:
        """Unique."""
        return f"{self.policy}-{self.correction}-{self.heads}"

    def patch(self, place: Place, model: Any, backend: str, **settings: Any) -> None:
        """Give the model such a cache, small enough for evictions all the time."""
        budget = fastkv.Budget(tokens=16 if place.toy else 64, sinks=2, recent=4, heads=self.heads)
        same: dict[str, Any] = dict(correction=self.correction, evict_every=EVERY)
        fastkv.patch(model, self.policy, budget, backend=backend, **same, **settings)


# The default first; then moments, unequal heads, sums of attention.
KINDS = (Kind("fastkv"), Kind("momentkv"), Kind("keydiff", "none", "adaptive"), Kind("h2o", "mean"))


def check_served(place: Place, heads: Heads, kind: Kind) -> list[Finding]:
    """Sequences in pages, which come one after another and evict by clocks of their own, get what each gets alone.

    In float32, in which no score is close to another by chance. No step waits for the device.
    """
    block, budget, steps = (8, 16, 3 * EVERY) if place.toy else (256, 512, 40)
    config = Config.make(
        kind.policy, fastkv.Budget(tokens=budget, sinks=2, recent=4, heads=kind.heads), block, EVERY, kind.correction,
        place.backend, None,
    )  # fmt: skip
    frequencies = 1e4 ** -torch.linspace(0, 1, heads.head_dim // 2, device=place.device)
    config = replace(config, rotations={0: Rotary(frequencies)})
    like = torch.empty(1, heads.num_kv_heads, 0, heads.head_dim, device=place.device)
    rows, lengths = [3, 1, 4], [2 * budget + 5, block - 3, budget + block]
    shared = CacheWorkspace(evict_every=EVERY, sequences=len(rows))
    rule = PagedRule.of(config, 0, 0, 1, like, like, shared)
    pages = torch.full((6, rule.form.nbytes), 0xFF, dtype=torch.uint8, device=place.device)
    layer = PagedLayer(rule, pages, heads.num_heads, SCALE, None, shared)

    def tokens(number: int) -> list[Tensor]:
        sizes = heads.num_heads, heads.num_kv_heads, heads.num_kv_heads
        return [torch.randn(1, size, number, heads.head_dim, device=place.device) for size in sizes]

    findings, clock, seen, following = [], PagedClock(EVERY), list(lengths), [tokens(steps) for _ in rows]
    expected = []
    for row, length, further in zip(rows, lengths, following):
        alone = LayerCache(LayerPlan(config), CacheWorkspace(evict_every=EVERY))
        prompt = tokens(length)
        alone.allocate(heads.num_heads, *prompt[1:], length)
        alone.configure(Attends(SCALE))
        layer.clear(torch.tensor([row], device=place.device))
        for at in range(0, length, block):
            q, k, v = (part[:, :, at : at + block] for part in prompt)
            number = q.shape[2]
            blocks = PagedBlocks.of([number], [at], torch.tensor([[row], [0], [number]], device=place.device))
            flat = [part[0].transpose(0, 1).contiguous() for part in (q, k, v)]  # as an engine has them
            got = torch.empty_like(flat[0])
            layer.read(blocks, flat[0], flat[1], flat[2], got)
            want = alone.read(q, k, v, torch.ones(1, number, dtype=torch.bool, device=place.device))
            findings.append(near(f"prompt of row {row}", got.transpose(0, 1)[None], want))
        clock.read(row, length)
        expected.append([alone.step(*(part[:, :, at : at + 1] for part in further)) for at in range(steps)])
    places = torch.tensor(rows, device=place.device)
    evicting = []
    for _ in range(steps):
        seen = [number + 1 for number in seen]
        evicting.append(torch.tensor([rows[i] for i in clock.due(rows, seen)], dtype=torch.int64, device=place.device))
    results = []
    q, k, v = (torch.cat(parts) for parts in zip(*following))

    def decode(first: int, stop: int) -> None:
        for at in range(first, stop):
            layer.evict(evicting[at])
            results.append(layer.step(places, *(part[:, :, at].contiguous() for part in (q, k, v))))

    warm = 2 * EVERY  # everything is compiled by then
    decode(0, warm)
    with syncs_raise(place):
        decode(warm, steps)
    for i, row in enumerate(rows):
        for at in range(steps):
            findings.append(near(f"step {at} of row {row}", results[at][i], expected[i][at][0, :, 0]))
    return findings


def near(name: str, got: Tensor, want: Tensor) -> Finding:
    """Relative error."""
    return Finding(name, float((got.double() - want.double()).norm() / want.double().norm()), NEAR)


def small_model(place: Place, family: str) -> Any:
    """A small model with seeded weights; its layers with a window have rings beside the cache."""
    dtype = torch.float32 if place.toy else torch.bfloat16
    return build(f"{family}-toy" if place.toy else f"{family}-small", place.device, dtype)


def logits_of(place: Place, model: Any, ids: Tensor, fed: Tensor, how: str) -> Tensor:
    """Logits [B, T, V] after each of the tokens fed [B, T] behind a prompt; no step waits for the device."""
    cache = fastkv.FastKVCache(model)
    model(ids, past_key_values=cache, logits_to_keep=1)
    positions = torch.full_like(fed[:, :1], ids.shape[1])
    call = torch.compile(model, fullgraph=True, mode="reduce-overhead") if how == "compiled" else model
    step: Callable[[Tensor], Tensor] = lambda token: call(  # noqa: E731
        token, past_key_values=cache, position_ids=positions
    ).logits[:, -1]
    if how == "captured":
        step = fastkv.capture_decode(model, cache, len(ids))
    found = []

    def decode(tokens: Tensor) -> None:
        for token in tokens.split(1, 1):
            found.append(step(token.contiguous()).clone())
            positions.add_(1)

    warm = 2 * EVERY + 1  # everything is compiled and recorded by then
    decode(fed[:, :warm])
    with syncs_raise(place):
        decode(fed[:, warm:])
    return torch.stack(found, 1)


def check_steps(place: Place, family: str, kind: Kind, how: str) -> list[Finding]:
    """Captured steps equal eager ones bit for bit; compiled ones, fed the same tokens, are as close as `COMPILED`."""
    forget_compiled()
    model = small_model(place, family)
    kind.patch(place, model, place.backend, static=True)
    ids = torch.randint(3, 97, (2, 40 if place.toy else 1200), device=place.device)  # beyond a window
    fed = torch.randint(3, 97, (2, 12 if place.toy else 24), device=place.device)
    want = logits_of(place, model, ids, fed, "eager")
    with place.stance:
        got = logits_of(place, model, ids, fed, how)
    if how == "captured":
        return [equal("logits", got, want)]
    errors = (got.double() - want.double()).norm(dim=(0, 2)) / want.double().norm(dim=(0, 2))
    return [Finding("relative error of the logits, median", float(errors.median()), COMPILED)]
