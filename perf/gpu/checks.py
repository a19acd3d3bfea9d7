"""Correctness on a device: what only it can show, and the kernels' own tests, which run on a GPU where there is one.

The race of the ticket merge, captured graphs, host syncs of decode steps, captured and compiled steps of whole models
beside eager ones. A timing is compared with the reference at its own shape besides (`perf.gpu.timings`).
"""

import copy
import importlib.util
import random
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

import fastkv
from fastkv import ops
from fastkv.cache.pages import PageFormat
from fastkv.integrations.transformers.captured import GeneratedSteps
from fastkv.reference import LayerState

from ..engine import LIMIT, ROOT, Row
from ..micro.states import Heads, spec
from ..speed.contenders import build
from .clock import layer, randn, record, token
from .place import Place, forget_compiled

BROKEN = (RuntimeError, ValueError, TypeError, AssertionError, LookupError, AttributeError)
CRASHES = (*BROKEN, OSError, ImportError, TritonError)
TESTS = ("test_kernels_*", "test_rows", "test_ragged_ops")  # of kernels, launched wherever their tensors are
LAUNCHES, PER_GRAPH = 100_000, 100
CORRECTIONS = ("centroids", "moments")
FAMILIES = ("llama", "gemma-3")  # the second has layers with a window
EVERY = 4  # tokens between evictions
PAGES = 7
# Median over steps of |compiled - eager| / |eager| of the logits. An inductor graph keeps in float32 what eager steps
# round to bf16 in between (2^-8 each), and a close choice of what to evict may fall the other way.
COMPILED = 0.05


class DeviceLost(Exception):
    """An error after which nothing can be computed on the device in this process, such as an illegal access."""


def equal(told: str, got: Any, want: Any) -> None:
    """Raise AssertionError unless tensors, or all of a dict, are equal bit for bit, NaN equal to NaN."""
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{told}: {text}")


def still_there(place: Place, crash: BaseException) -> None:
    """Raise DeviceLost if the crash broke the device: every later result would be wrong or an error."""
    try:
        place.cuda.synchronize()
    except RuntimeError as lost:
        raise DeviceLost(f"{type(crash).__name__}: {str(crash).partition(chr(10))[0][:300]}") from lost


def row_of(check: Callable[[], None], place: Place) -> Row:
    """Whether a check "passed", or the "error" that it raised. Raises: DeviceLost if that broke the device."""
    try:
        with torch.no_grad():
            check()
    except CRASHES as crash:
        still_there(place, crash)
        return {"passed": False, "error": f"{type(crash).__name__}: {str(crash)[:500]}"}
    return {"passed": True}


def check_kernels(place: Place) -> None:
    """The kernels' tests on the GPU, in a process of their own; in a dry run they are collected only."""
    files = [str(path.relative_to(ROOT)) for name in TESTS for path in sorted(ROOT.glob(f"tests/{name}.py"))]
    how = ["--collect-only"] if place.toy else ["-p", "tests.on_gpu", "-m", "not slow and not real and not ptx"]
    if importlib.util.find_spec("xdist") and not place.toy:
        how += ["-n", "16"]
    command = [sys.executable, "-m", "pytest", "-q", *how, *files]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT)
    except subprocess.TimeoutExpired as late:
        raise RuntimeError(f"not finished after {LIMIT} seconds") from late
    if done.returncode:
        red = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
        raise AssertionError(", ".join(red) or (done.stdout + done.stderr).strip()[-500:])


def recorded(place: Place, run: Callable[[], None]) -> Callable[[], None]:
    """The function as a captured CUDA graph; in a dry run it is captured by the stand-in, and then the function."""
    graph = record(place, [run], run)
    return run if place.toy else graph.replay


def check_ticket(place: Place, heads: Heads, correction: str) -> None:
    """10^5 launches of the split decode on the same inputs, other streams busy at random: all results bitwise equal."""
    size, draw, streams = 64 if place.toy else 2048, random.Random(0), [place.cuda.Stream() for _ in range(2)]
    matrix = randn(place, size, size)

    def unchanged(batch: int, slots: int) -> None:
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
        replay = recorded(place, launches)
        for _ in range(1 if place.toy else LAUNCHES // PER_GRAPH):
            for stream in streams:
                with place.cuda.stream(stream):
                    place.cuda._sleep(draw.randrange(100_000))
                    torch.mm(matrix[: draw.randrange(32, size, 32)], matrix)
            place.cuda._sleep(draw.randrange(40_000))  # delays the current one by up to 20 µs or so
            replay()
        place.cuda.synchronize()
        assert not wrong, f"{wrong} elements changed, B={batch} C={slots}"
        assert not state.scratch or not state.scratch[3].any(), "tickets are left"

    for shape in ((1, 64),) if place.toy else ((1, 1024), (8, 4096)):
        unchanged(*shape)


def check_replays(place: Place, heads: Heads, correction: str, paged: bool) -> None:
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
    results = list[Tensor]()

    def step(of: LayerState) -> list[Tensor]:
        out = [*ops.decode_step(*new, of, rule)]
        positions = of.exact.positions if of.rows is None else of.exact.positions.index_select(0, of.rows)
        positions = positions.contiguous()
        valid, guard, *received = ops.slot_signals(positions, of, rule)
        kept = ops.select(scores, positions, valid, guard, rule.tokens, backend=rule.backend)
        ops.compact(valid, kept, None, None, of, rule)
        return [*out, valid, guard, *received]

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
        others = torch.tensor([row for row in range(1, PAGES) if row not in chosen], device=place.device)
        untouched = stored.at(others).taken() if paged else None
        for index in range(2):  # there is room for as many, even if nothing leaves
            for tensor in new:
                tensor.normal_()
            twin, told = here.taken() if paged else copy.deepcopy(here), f"from {base}, step {index}"
            replay()
            for number, (got, want) in enumerate(zip(results, step(twin))):
                if len(want):
                    equal(f"{told}, result {number}", got[live], want[live])
            same(told, here.taken() if paged else here, twin, live)
        if untouched is not None:
            same(f"from {base}, others'", stored.at(others).taken(), untouched)


def same(told: str, state: LayerState, other: LayerState, rows: Any = slice(None)) -> None:
    """Whether all tensors are equal in these rows."""
    equal(told, *({name: tensor[rows] for name, tensor in one.named_tensors()} for one in (state, other)))


PER_HEADS: dict[str, Callable[..., None]] = {
    "ticket": check_ticket,
    "graph": partial(check_replays, paged=False),
    "pages": partial(check_replays, paged=True),
}
# Caches: policy, correction, heads. The default first; then moments, unequal heads, sums of attention.
KINDS = (
    ("fastkv", "auto", "uniform"),
    ("momentkv", "auto", "uniform"),
    ("keydiff", "none", "adaptive"),
    ("h2o", "mean", "uniform"),
    ("compactor", "auto", "uniform"),
)


def logits_of(place: Place, model: Any, ids: Tensor, fed: Tensor, how: str) -> Tensor:
    """Logits [B, T, V] after each token fed [B, T] behind a prompt; no step waits once all is compiled and recorded."""
    cache = fastkv.FastKVCache(model)
    model(ids, past_key_values=cache, logits_to_keep=1)
    positions = torch.full_like(fed[:, :1], ids.shape[1])
    call = GeneratedSteps(model) if how == "generated" else model
    if how == "compiled":
        call = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    told = {"past_key_values": cache, "position_ids": positions}
    step: Callable[[Tensor], Tensor] = lambda token: call(input_ids=token, **told).logits[:, -1]  # noqa: E731
    if how == "captured":
        step = fastkv.capture_decode(model, cache, len(ids))
    found = []
    try:
        for number, token in enumerate(fed.split(1, 1)):
            if number == 2 * EVERY + 1 and how != "generated":  # which waits before it captures
                place.cuda.synchronize()
                place.cuda.set_sync_debug_mode("error")  # whatever waits raises
            found.append(step(token.contiguous()).clone())
            positions.add_(1)
    finally:
        place.cuda.set_sync_debug_mode("default")
    assert how != "generated" or call.step is not None, "no step was captured"
    return torch.stack(found, 1)


def check_steps(place: Place, family: str, kind: tuple[str, str, str], how: str) -> None:
    """Captured steps, also by `generate`, equal eager ones bit for bit; compiled ones are as close as `COMPILED`.

    Of a small model with seeded weights, whose cache evicts all the time; layers with a window have rings beside it.
    """
    forget_compiled()
    size, dtype = ("toy", torch.float32) if place.toy else ("small", torch.bfloat16)
    model, (policy, correction, heads) = build(f"{family}-{size}", place.device, dtype), kind
    budget = fastkv.Budget(tokens=16 if place.toy else 64, sinks=2, recent=4, heads=heads)
    told = {"correction": correction, "evict_every": EVERY, "backend": place.backend, "static": True}
    fastkv.patch(model, policy, budget, **told)
    ids = torch.randint(3, 97, (2, 40 if place.toy else 1200), device=place.device)  # beyond a window
    fed = torch.randint(3, 97, (2, 24), device=place.device)
    want = logits_of(place, model, ids, fed, "eager")
    with place.stance:
        got = logits_of(place, model, ids, fed, how)
    if how != "compiled":
        equal("logits", got, want)
        return
    errors = (got.double() - want.double()).norm(dim=(0, 2)) / want.double().norm(dim=(0, 2))
    assert errors.median() <= COMPILED, f"relative error of the logits: median {errors.median():.3f}"


def check_failed_capture(place: Place) -> None:
    """Random numbers go on after a capture that failed, as that of a model does whose step waits for the device."""
    model = build("llama-toy", place.device, torch.float32)
    budget = fastkv.Budget(tokens=16, sinks=2, recent=4, heads="uniform")
    fastkv.patch(model, budget=budget, backend=place.backend, static=True)
    cache, ids = fastkv.FastKVCache(model), torch.randint(3, 97, (1, 40), device=place.device)
    model(ids, past_key_values=cache, logits_to_keep=1)
    waits = model.register_forward_hook(lambda module, given, out: place.cuda.current_stream().synchronize())
    try:
        fastkv.capture_decode(model, cache, 1)
        assert place.toy, "a step that waits was captured"
    except RuntimeError:
        assert not place.toy
    waits.remove()
    assert len(torch.rand(8, device=place.device).unique()) > 1
