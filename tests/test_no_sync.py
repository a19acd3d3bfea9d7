"""A decode step never waits for the device and never feeds it from the host.

Checked without an accelerator: the step runs on tensors that have a device, meta, but no data. Whatever would wait for
a value (item, nonzero, boolean indexing, a branch) has none to wait for and raises, and copies between host and device
are seen as such. What the operators do inside is Triton on an accelerator and is checked there (perf/gpu/checks).
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastkv
from fastkv import reference
from fastkv.cache import CacheWorkspace
from fastkv.cache.layout import LayerPlan
from fastkv.cache.pages import PagedBlocks, PagedLayer, PagedRule
from fastkv.config import Config

from .models import build, compressed_layers, policy, prompt
from .pairwise import covering
from .states import make_spec, make_state
from .test_paged import calibrated
from .test_vector_cache import mapping

EVERY = 3


class Crossings(TorchDispatchMode):
    """Collects operations that have tensors on more than one device; numbers in tensors without dimensions are none."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor) and t.ndim]
        if len({t.device.type for t in tensors}) > 1:
            self.found.append(str(func))
        return out


def to_device_without_data(model, cache):
    """The model and the states of its cache, moved."""
    model.to("meta")
    for (rotary, _), table in list(cache.workspace.tables.items()):
        cache.workspace.tables[rotary, torch.device("meta")] = tuple(part.to("meta") for part in table)
    for layer in compressed_layers(cache):
        state = cache.layers[layer].state
        for name, tensor in list(state.named_tensors()):
            state.replace(name, tensor.to("meta"))
        cache.layers[layer].seen = cache.layers[layer].seen.to("meta")
        own = cache.layers[layer].cache
        own.adopt(state, own.rule.layout, own.num_heads)


HEADS = ["uniform", "adaptive"]
CORRECTIONS = ["none", "mean", "moments", "centroids"]


def can_have(name, correction, heads):
    """Whether heads of the policy may be such."""
    return heads != "adaptive" or next(made for made in fastkv.policies.ALL if made.name == name).adaptive


SOME = [[0.9, 0.1], [0.2, 0.3], [0.8, 0.9], [0.4, 0.6]]  # heads whose values are known from their keys


@pytest.mark.parametrize(
    "name, correction, heads",
    [*covering(fastkv.policies.names(), ["auto"], HEADS, together=1, where=can_have),
     *covering(["keydiff"], CORRECTIONS, HEADS, together=1),
     *(("keydiff", correction, "uniform") for correction in ("vector", "vector+moments"))],
)  # fmt: skip
def test_a_step_neither_waits_nor_copies(name, correction, heads, tmp_path):
    model, chosen = build(), policy(name, tmp_path)
    vector = {"vector": 1.0, "vector+moments": SOME}.get(correction)
    vector = None if vector is None else mapping(model, r2=vector)
    ids, _ = prompt(2, 30, (0, 0))
    budget = fastkv.Budget(tokens=12, sinks=2, recent=4, heads=heads)
    fastkv.patch(model, chosen, budget, evict_every=EVERY, correction=correction, static=True, vector=vector)
    cache = model(ids).past_key_values
    model(ids[:, :1], past_key_values=cache)  # whatever is made once is made
    to_device_without_data(model, cache)
    token = torch.zeros(2, 1, dtype=torch.long, device="meta")
    evictions = 0
    with Crossings() as crossings:
        for _ in range(EVERY):
            assert model(token, past_key_values=cache).logits.device.type == "meta"
            evictions += cache.workspace.clock.now.evicts
    assert evictions == 1 and not crossings.found


def test_nor_does_a_step_of_the_reference_in_a_slab():
    """Which a GPU takes where values are recovered from the keys of all heads."""
    with torch.device("meta"):
        slab, numbers = torch.empty(1, 20, 16), torch.zeros(1, 20, dtype=torch.int32)
        lengths, starts = (torch.zeros(1, heads, dtype=torch.int32) for heads in (2, 3))
        state = make_state(slab, slab.clone(), lengths, numbers, starts=starts, limit=12)
        q, k = torch.empty(1, 4, 16), torch.empty(1, 2, 1, 16)
        assert reference.decode_step(q, k, k, state, make_spec(backend="reference"))[0].shape == q.shape


@pytest.mark.parametrize("name,heads", covering(["keydiff", "momentkv", "h2o", "noncausal"], [*HEADS, "calibrated"]))
def test_nor_do_pages(name, heads, monkeypatch):
    """Of a serving engine: when one is cleared, a prompt is read into it, and sequences decode and evict."""
    budget = calibrated(1.5, 0.5)
    if heads != "calibrated":
        budget = fastkv.Budget(tokens=12, sinks=2, recent=4, heads=heads)
    config = Config.make(name, budget, 8, EVERY, "auto", "reference", None)
    like, shared = torch.empty(1, 2, 0, 16, device="meta"), CacheWorkspace(evict_every=EVERY, sequences=4)
    rule = PagedRule.of(LayerPlan(config), like, like)
    pages = torch.empty(5, rule.form.nbytes, dtype=torch.uint8, device="meta")
    layer = PagedLayer(rule, pages, 4, 0.3, None, shared)

    def tokens(num):
        return tuple(torch.empty(num, heads, 16, device="meta") for heads in (4, 2, 2))

    def serve():
        numbers = torch.empty(3, 2, dtype=torch.int64, device="meta")
        for turn in range(1 if heads == "adaptive" else 3):  # heads that trade slots wait when they do
            layer.clear(numbers[0])
            q, k, v = tokens(15)
            layer.read(PagedBlocks.of([8, 7], [8 * turn] * 2, numbers), q, k, v, torch.empty_like(q))
        rows = torch.empty(3, dtype=torch.int64, device="meta")
        layer.evict(rows[:2])
        layer.step(rows, *tokens(3))

    serve()  # what is sent once
    monkeypatch.setattr(torch, "tensor", None)  # numbers of the host that it sends, where the mode sees nothing
    with Crossings() as crossings:
        serve()
    assert not crossings.found
