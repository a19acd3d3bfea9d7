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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

import fastkv
from fastkv import ops
from fastkv.cache.layer import LayerCache
from fastkv.cache.layout import Attends, LayerPlan
from fastkv.cache.pages import PagedBlocks, PagedClock, PagedLayer, PagedRule, PageFormat
from fastkv.cache.workspace import CacheWorkspace
from fastkv.config import Config
from fastkv.reference import LayerState
from fastkv.rotary import Rotary

from ..engine import LIMIT, ROOT, Row
from ..micro.states import SCALE, spec
from ..speed.models import build
from .clock import layer, randn, record, relative_error, token, tokens
from .heads import Heads
from .place import Place, forget_compiled

BROKEN = (RuntimeError, ValueError, TypeError, AssertionError, LookupError, AttributeError)
CRASHES = (*BROKEN, OSError, ImportError, TritonError)
LAUNCHES, PER_GRAPH = 100_000, 100
CORRECTIONS = ("centroids", "moments")
FAMILIES = ("llama", "gemma-3")  # the second has layers with a window
EVERY = 4  # tokens between evictions
PAGES = 7
# Median over steps of |compiled - eager| / |eager| of the logits. An inductor graph keeps in float32 what eager steps
# round to bf16 in between (2^-8 each), and a close choice of what to evict may fall the other way.
COMPILED = 0.05
NEAR = 1e-4  # relative error in float32 of a batch of sequences, whose heads are split otherwise than those of one


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
    try:
        with torch.no_grad():
            findings = check()
    except CRASHES as crash:
        still_there(place, crash)
        return {"passed": False, "compared": 0, "findings": [], "error": f"{type(crash).__name__}: {str(crash)[:500]}"}
    bad = [one for one in findings if not one.passed]
    worst = bad or [max(findings, key=lambda one: one.error / (one.limit or 1))]
    return {"passed": not bad, "compared": len(findings), "findings": [vars(one) for one in worst]}


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


def recorded(place: Place, run: Callable[[], None]) -> Callable[[], None]:
    """The function as a captured CUDA graph; in a dry run it is captured by the stand-in, and then the function."""
    graph = record(place, [run], run)
    return run if place.toy else graph.replay


def check_ticket(place: Place, heads: Heads, correction: str) -> list[Finding]:
    """10^5 launches of the split decode on the same inputs, other streams busy at random: all results bitwise equal."""

    def changed(batch: int, slots: int) -> Iterator[Finding]:
        state, rule = layer(place, heads, batch, slots, correction, attention=True), spec(correction, 0, place.backend)
        state.scratch, (q, _, _) = ops.workspace(heads.num_heads, state, rule), token(place, heads, batch)
        wrong = torch.zeros((), dtype=torch.int64, device=place.device)

        def launch() -> list[Tensor]:
            collected = state.exact.attention.zero_()
            return [*ops.decode_step(q, None, None, state, rule), collected]

        def launches() -> None:
            for _ in range(2 if place.toy else PER_GRAPH):
                for got, want in zip(launch(), first):
                    wrong.add_((got != want).sum())

        first = [t.clone() for t in launch()]
        replay, noise = recorded(place, launches), Noise(place)
        for _ in range(1 if place.toy else LAUNCHES // PER_GRAPH):
            noise.make()
            replay()
        place.cuda.synchronize()
        yield Finding(f"elements that changed, B={batch} C={slots}", float(wrong))
        if state.scratch:
            yield Finding("tickets left", float(state.scratch[3].abs().sum()))

    return [one for shape in (((1, 64),) if place.toy else ((1, 1024), (8, 4096))) for one in changed(*shape)]


class Noise:
    """Other work on the device: matrix products and sleeps of random length on two more streams."""

    def __init__(self, place: Place) -> None:
        self.cuda, self.size = place.cuda, 64 if place.toy else 2048
        self.streams = [self.cuda.Stream() for _ in range(2)]
        self.matrix, self.random = randn(place, self.size, self.size), random.Random(0)

    def make(self) -> None:
        """Queue some on each stream, and delay the current one by up to 20 microseconds or so."""
        for stream in self.streams:
            with self.cuda.stream(stream):
                self.cuda._sleep(self.random.randrange(100_000))
                rows = self.random.randrange(32, self.size, 32)
                torch.mm(self.matrix[:rows], self.matrix)
        self.cuda._sleep(self.random.randrange(40_000))


def check_replays(place: Place, heads: Heads, correction: str, paged: bool) -> list[Finding]:
    """A captured step and eviction, replayed for other tokens and lengths, equal eager ones bit for bit.

    paged: the sequences live in pages, for others of which each graph is replayed, row 0, which is nobody's, among them
    twice; what happens there happens to the same sequences side by side, and to no others.
    """
    batch, tokens = 4, place.slots - EVERY
    rule = spec(correction, tokens, place.backend, spare=EVERY)
    stored = here = layer(place, heads, batch, tokens, correction, free=EVERY, attention=True)
    rows = torch.zeros(batch, dtype=torch.int64, device=place.device)
    if paged:
        form = PageFormat.of(here)
        stored = form.view(torch.randint(1, 120, (PAGES, form.nbytes), dtype=torch.uint8, device=place.device))
        for row in range(PAGES):
            stored.at(rows[:1] + row).put(here.stretch(row % batch, row % batch + 1))
        here = stored.at(rows)
    here.scratch = ops.workspace(heads.num_heads, here, rule)
    scores, new = randn(place, batch, heads.num_kv_heads, place.slots).float(), token(place, heads, batch)
    findings, results, everybody = [], list[Tensor](), range(1, PAGES)

    def step(of: LayerState) -> list[Tensor]:
        out = [*ops.decode_step(*new, of, rule)]
        positions = of.exact.positions if of.rows is None else of.exact.positions.index_select(0, of.rows)
        out += ops.slot_signals(positions.contiguous(), of, rule)
        ops.evict(scores, None, of, rule)
        return out

    def run() -> None:
        results[:] = step(here)

    replay = recorded(place, run)
    short, middle, full = 0, place.slots // 2, place.slots - 2  # tokens of a head, the last with something to evict
    for base, chosen in ((short, [3, 0, 1, 0]), (middle, [0, 6, 0, 4]), (full, [1, 0, 0, 3])):
        lengths = torch.arange(stored.exact.lengths.numel(), device=place.device) % 3 + base
        stored.exact.lengths.copy_(lengths.clamp(max=full).view_as(stored.exact.lengths))
        if paged:
            stored.exact.lengths[0] = 0
            rows.copy_(torch.tensor(chosen))
        stored.seen.copy_((stored.exact.lengths + stored.moments.count).amax(1))
        live = [index for index, row in enumerate(chosen) if row or not paged]
        others = torch.tensor([row for row in everybody if row not in chosen], device=place.device)
        untouched = stored.at(others).taken() if paged else None
        for index in range(2):  # there is room for as many, even if nothing leaves
            for tensor in new:
                tensor.normal_()
            twin, told = here.taken() if paged else copy.deepcopy(here), f"from {base}, step {index}"
            replay()
            for number, (got, want) in enumerate(zip(results, step(twin))):
                if len(want):
                    findings.append(equal(f"{told}, result {number}", got[live], want[live]))
            findings += same(told, here.taken() if paged else here, twin, live)
        if untouched is not None:
            findings += same(f"from {base}, others'", stored.at(others).taken(), untouched)
    return findings


def same(told: str, state: LayerState, other: LayerState, rows: Any = slice(None)) -> Iterator[Finding]:
    """Whether all tensors are equal in these rows."""
    for (name, mine), (_, theirs) in zip(state.named_tensors(), other.named_tensors()):
        yield equal(f"{told} {name}", mine[rows], theirs[rows])


# Of the decode step on named heads, with other arguments than those.
PER_HEADS: dict[str, tuple[Callable[..., list[Finding]], dict[str, Any]]] = {
    "ticket": (check_ticket, {}),
    "graph": (check_replays, {"paged": False}),
    "pages": (check_replays, {"paged": True}),
}


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

    def budget(self, tokens: int) -> fastkv.Budget:
        """So many tokens of a head."""
        return fastkv.Budget(tokens=tokens, sinks=2, recent=4, heads=self.heads)


# The default first; then moments, unequal heads, sums of attention.
KINDS = (Kind("fastkv"), Kind("momentkv"), Kind("keydiff", "none", "adaptive"), Kind("h2o", "mean"))


def check_served(place: Place, heads: Heads, kind: Kind) -> list[Finding]:
    """Sequences in pages, which come one after another and evict by clocks of their own, get what each gets alone.

    In float32, in which no score is close to another by chance. No step waits for the device.
    """
    block, kept, steps = (8, 16, 3 * EVERY) if place.toy else (256, 512, 40)
    config = Config.make(kind.policy, kind.budget(kept), block, EVERY, kind.correction, place.backend, None)
    frequencies = 1e4 ** -torch.linspace(0, 1, heads.head_dim // 2, device=place.device)
    config = replace(config, rotations={0: Rotary(frequencies)})
    like = torch.empty(1, heads.num_kv_heads, 0, heads.head_dim, device=place.device)
    rows, lengths = [3, 1, 4], [2 * kept + 5, block - 3, kept + block]
    shared = CacheWorkspace(evict_every=EVERY, sequences=len(rows))
    rule = PagedRule.of(config, 0, 0, 1, like, like, shared)
    pages = torch.full((6, rule.form.nbytes), 0xFF, dtype=torch.uint8, device=place.device)
    served, clock = PagedLayer(rule, pages, heads.num_heads, SCALE, None, shared), PagedClock(EVERY)
    new = partial(tokens, place, heads, dtype=torch.float32)
    findings, expected, following = [], [], [new(1, steps) for _ in rows]
    for row, length, further in zip(rows, lengths, following):
        alone, prompt = LayerCache(LayerPlan(config), CacheWorkspace(evict_every=EVERY)), new(1, length)
        alone.allocate(heads.num_heads, *prompt[1:], length)
        alone.configure(Attends(SCALE))
        served.clear(torch.tensor([row], device=place.device))
        for at, parts in zip(range(0, length, block), zip(*(part.split(block, 2) for part in prompt))):
            number = parts[0].shape[2]
            blocks = PagedBlocks.of([number], [at], torch.tensor([[row], [0], [number]], device=place.device))
            flat = [part[0].transpose(0, 1).contiguous() for part in parts]  # as an engine has them
            got = torch.empty_like(flat[0])
            served.read(blocks, *flat, got)
            want = alone.read(*parts, torch.ones(1, number, dtype=torch.bool, device=place.device))
            findings.append(near(f"prompt of row {row}", got.transpose(0, 1)[None], want))
        clock.read(row, length)
        expected.append([alone.step(*(part[:, :, at : at + 1] for part in further)) for at in range(steps)])
    due = [clock.due(rows, [length + 1 + at for length in lengths]) for at in range(steps)]
    evicting = [torch.tensor([rows[i] for i in own], dtype=torch.int64, device=place.device) for own in due]
    places, results = torch.tensor(rows, device=place.device), list[Tensor]()
    q, k, v = (torch.cat(parts) for parts in zip(*following))

    def decode(at: int) -> None:
        served.evict(evicting[at])
        results.append(served.step(places, *(part[:, :, at].contiguous() for part in (q, k, v))))

    without_syncs(place, decode, range(steps))
    for i, row in enumerate(rows):
        for at in range(steps):
            findings.append(near(f"step {at} of row {row}", results[at][i], expected[i][at][0, :, 0]))
    return findings


def near(name: str, got: Tensor, want: Tensor) -> Finding:
    """Relative error."""
    return Finding(name, relative_error(got, want), NEAR)


def without_syncs(place: Place, step: Callable[[Any], None], given: Any) -> None:
    """Take steps, of which none waits for the device once everything is compiled and recorded."""
    warm = 2 * EVERY + 1
    for one in given[:warm]:
        step(one)
    place.cuda.synchronize()
    place.cuda.set_sync_debug_mode("error")  # whatever waits raises
    try:
        for one in given[warm:]:
            step(one)
    finally:
        place.cuda.set_sync_debug_mode("default")


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

    def decode(token: Tensor) -> None:
        found.append(step(token.contiguous()).clone())
        positions.add_(1)

    without_syncs(place, decode, fed.split(1, 1))
    return torch.stack(found, 1)


def check_steps(place: Place, family: str, kind: Kind, how: str) -> list[Finding]:
    """Captured steps equal eager ones bit for bit; compiled ones, fed the same tokens, are as close as `COMPILED`.

    Of a small model with seeded weights, whose cache evicts all the time; layers with a window have rings beside it.
    """
    forget_compiled()
    size, dtype = ("toy", torch.float32) if place.toy else ("small", torch.bfloat16)
    model, budget = build(f"{family}-{size}", place.device, dtype), kind.budget(16 if place.toy else 64)
    told = {"correction": kind.correction, "evict_every": EVERY, "backend": place.backend, "static": True}
    fastkv.patch(model, kind.policy, budget, **told)
    ids = torch.randint(3, 97, (2, 40 if place.toy else 1200), device=place.device)  # beyond a window
    fed = torch.randint(3, 97, (2, 12 if place.toy else 24), device=place.device)
    want = logits_of(place, model, ids, fed, "eager")
    with place.stance:
        got = logits_of(place, model, ids, fed, how)
    if how == "captured":
        return [equal("logits", got, want)]
    errors = (got.double() - want.double()).norm(dim=(0, 2)) / want.double().norm(dim=(0, 2))
    return [Finding("relative error of the logits, median", float(errors.median()), COMPILED)]
