"""What only a device can show: the race of the ticket merge, captured graphs, host syncs of a decode step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import fastkv
from fastkv import ops

from ..micro.states import filled, spec
from .heads import LLAMA, TOY
from .state import Finding, Place, copied, equal, ragged, randn

LAUNCHES = 100_000
PER_GRAPH = 100
SPEC = spec(backend="triton")


def recorded(place: Place, run: Callable[[], None]) -> Callable[[], None]:
    """The function as a captured CUDA graph; in a dry run the function itself."""
    if place.toy:
        return run
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def check_ticket(place: Place) -> list[Finding]:
    """10^5 launches of the split decode on the same inputs, other streams busy at random: all results bitwise equal."""
    heads = TOY if place.toy else LLAMA
    findings = []
    for batch, slots in ((1, 64),) if place.toy else ((1, 1024), (8, 4096)):
        state = filled(
            batch, heads.num_kv_heads, heads.head_dim, slots, attention=True, dtype=place.half, device=place.device
        )
        state.scratch = ops.workspace(heads.num_heads, state, SPEC)
        q = randn(place, place.half, batch, heads.num_heads, heads.head_dim)

        def launch(state=state, q=q) -> list[Tensor]:
            collected = state.exact.attention.zero_()
            return [*ops.decode_step(q, None, None, state, SPEC), collected]

        first = [t.clone() for t in launch()]
        wrong = torch.zeros((), dtype=torch.int64, device=place.device)

        def launches(first=first, wrong=wrong, launch=launch) -> None:
            for _ in range(2 if place.toy else PER_GRAPH):
                for got, want in zip(launch(), first):
                    wrong.add_((got != want).sum())

        replay = recorded(place, launches)
        noise = None if place.toy else Noise(place.device)
        for _ in range(1 if place.toy else LAUNCHES // PER_GRAPH):
            if noise is not None:
                noise.make()
            replay()
        if noise is not None:
            torch.cuda.synchronize()
        findings.append(Finding(f"elements that changed, B={batch} C={slots}", float(wrong)))
        if state.scratch:
            findings.append(Finding("tickets left", float(state.scratch[3].abs().sum())))
    return findings


class Noise:
    """Other work on the device: matrix products and sleeps of random length on two more streams."""

    def __init__(self, device: torch.device) -> None:
        self.streams = [torch.cuda.Stream() for _ in range(2)]
        self.matrix = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16)
        self.random = random.Random(0)

    def make(self) -> None:
        """Queue some on each stream, and delay the current one by up to 20 microseconds or so."""
        for stream in self.streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(self.random.randrange(100_000))
                size = self.random.randrange(64, 2048, 64)
                torch.mm(self.matrix[:size], self.matrix)
        torch.cuda._sleep(self.random.randrange(40_000))


def check_graph(place: Place) -> list[Finding]:
    """A captured decode_step, replayed with new tokens while lengths change on the device, equals eager steps."""
    heads, dtype = (TOY, torch.float16) if place.toy else (LLAMA, torch.bfloat16)
    findings = []
    start = ragged(place, heads, dtype)
    batch, kv = start.exact.lengths.shape
    start.exact.keys, start.exact.values = start.exact.keys.nan_to_num(0.5), start.exact.values.nan_to_num(0.5)
    token = [randn(place, dtype, batch, heads.num_heads, heads.head_dim)]
    token += [randn(place, dtype, batch, kv, 1, heads.head_dim) for _ in "kv"]
    graphed, eager = copied(start), copied(start)
    for state in (graphed, eager):
        state.scratch = ops.workspace(heads.num_heads, state, SPEC)
    results: list[Tensor] = []

    def run() -> None:
        results[:] = ops.decode_step(*token, graphed, SPEC)

    replay = recorded(place, run)
    for (_, mine), (_, other) in zip(graphed.named_tensors(), eager.named_tensors()):
        mine.copy_(other)  # what warming up appended
    slots, lengths = start.exact.limit, start.exact.lengths
    for base in (0, slots // 2, slots - 4):  # short, middle, up to the last slot
        for state in (graphed, eager):
            state.exact.lengths.copy_((lengths % 3 + base).clamp(max=slots - 4))
            state.seen.copy_((state.exact.lengths + state.moments.count).amax(1))
        for index in range(3):
            for tensor in token:
                tensor.normal_()
            replay()
            for name, got, want in zip(("out", "lse", "lse_evicted"), results, ops.decode_step(*token, eager, SPEC)):
                findings.append(equal(f"from {base}, step {index}: {name}", got, want))
        pairs = zip(graphed.named_tensors(), eager.named_tensors())
        findings += [equal(f"from {base}: {name}", mine, other) for (name, mine), (_, other) in pairs]
    return findings


@contextmanager
def syncs_raise(place: Place) -> Iterator[None]:
    """Until the end of the with block, whatever waits for the device raises."""
    if place.toy:
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_sync(place: Place) -> list[Finding]:
    """Decode steps of a patched model, evictions among them, ask the host for nothing (a sync raises)."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64 if place.toy else 512,
        intermediate_size=128,
        num_hidden_layers=1 if place.toy else 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16 if place.toy else 128,
        max_position_embeddings=4096,
    )
    model = LlamaForCausalLM(config).to(place.device, torch.float32 if place.toy else torch.bfloat16).eval()
    budget, warm, timed = (16, 4, 4) if place.toy else (128, 40, 20)
    ids = torch.randint(3, 256, (2, 2 * budget), device=place.device)
    fastkv.patch(model, "momentkv", fastkv.Budget(budget, sinks=2, recent=4), evict_every=4, backend="triton")
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


DEVICE_CHECKS: dict[str, Callable[[Place], list[Finding]]] = {
    "graph": check_graph,
    "sync": check_sync,
    "ticket": check_ticket,
}
