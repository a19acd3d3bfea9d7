"""FastKVAttention: the flow of a patched model as a module of its own."""

import copy
import io
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import fastkv
from fastkv import Budget, FastKVAttention
from fastkv.calibration.fits import QueryCalibration, VectorMap
from fastkv.integrations.transformers import rotations
from fastkv.integrations.transformers.layer import FastKVLayer
from fastkv.policies import Policy, QueryStatistics
from fastkv.rotary import Rotary

from .models import build, generate, policy, prompt, raises, small
from .pairwise import covering, each, named
from .states import assert_same, attention
from .test_paged import calibrated

B, HQ, HKV, D = 2, 4, 2, 16
TOKENS, EVERY = 20, 5
NAMES = [name for name in fastkv.policies.names() if not fastkv.policies.get(name).second_reading]


def fresh(chosen="keydiff", budget=None, **options):
    return FastKVAttention(HQ, HKV, D, chosen, budget or small(), **{"evict_every": EVERY, **options})


def tokens(num, batch=B, dtype=torch.float32):
    """Random q, k and v of num tokens."""
    return tuple(torch.randn(batch, heads, num, D, dtype=dtype) for heads in (HQ, HKV, HKV))


def mapping():
    """A map from keys to values for one layer."""
    r2 = torch.ones(HKV, dtype=torch.float64)
    weight = torch.randn(HKV, D, D, generator=torch.Generator().manual_seed(3)) / 4
    return VectorMap({0: weight}, {0: r2}, threshold=0.5, fingerprint="", model="", tokens=1)


def statistics():
    """What the queries of one layer may be like."""
    generator = torch.Generator().manual_seed(4)
    known = QueryStatistics(torch.randn(HQ, D, generator=generator), torch.rand(HQ, D // 2, generator=generator))
    return QueryCalibration({0: known}, fingerprint="", model="", tokens=1)


def rotary():
    return Rotary(100.0 ** -torch.linspace(0, 1, D // 2))


def one_layer(name, directory):
    """The policy of that name; DuoAttention with a pattern of one layer, both of whose heads keep the context."""
    return policy(name, directory, pattern="1.0\t0.9\n") if name == "duoattention" else name


KINDS = {
    "uniform": lambda: fresh(), "attention and memory": lambda: fresh("h2o"), "moments": lambda: fresh("momentkv"),
    "adaptive heads": lambda: fresh("snapkv", small(heads="adaptive")),
    "no values": lambda: fresh("keydiff", correction="vector", rotary=rotary(), vector=mapping()),
    "share of the prompt": lambda: fresh("keydiff", small(tokens=None, keep=0.5)),
    "bytes": lambda: fresh("keydiff", small(tokens=None, bytes=8000)),
    "blocks": lambda: fresh("keydiff", prefill_block=16),
}  # fmt: skip
each_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


# Against the patched model and against arithmetic.


@pytest.mark.parametrize("name,block", each(NAMES, [None, 16]))
def test_a_layer_of_a_patched_model(name, block, tmp_path, monkeypatch):
    """Fed with the q, k and v of every layer, it returns what the layer returns, and holds the same tokens after."""
    model, chosen = build(), policy(name, tmp_path)
    turning = rotations(model, [0])[0]
    projections = [layer.self_attn.o_proj.weight for layer in model.model.layers]
    fastkv.patch(model, chosen, small(), prefill_block=block, evict_every=EVERY)
    for one in model.model.layers:
        one.self_attn._fastkv_single = False  # its tokens go through `step`
    calls = []

    def recorded(method):
        def record(self, q, k, v, *rest):
            out = method(self, q, k, v, *rest)
            valid = rest[0].clone() if torch.is_tensor(rest[0]) else None  # a decoded token is no padding
            calls.append((self.cache.layer, q.clone(), k.clone(), v.clone(), valid, out.clone()))
            return out

        return record

    for name in ("attend", "step"):
        monkeypatch.setattr(FastKVLayer, name, recorded(getattr(FastKVLayer, name)))
    ids, mask = prompt()
    cache = generate(model, ids, mask, new=14, return_dict_in_generate=True).past_key_values
    assert len(calls) == 4 * (13 + (1 if block is None else 4))
    for layer in range(4):
        options = {"layer": layer, "num_layers": 4, "rotary": turning, "output": projections[layer]}
        options["queries"] = model._fastkv_config.queries
        module = fresh(chosen, **options)
        for _, q, k, v, valid, expected in (call for call in calls if call[0] == layer):
            if q.shape[2] == 1:
                assert torch.equal(module(q, k, v), expected)
                continue
            real = valid[:, None, :, None].expand_as(expected)
            torch.testing.assert_close(module(q, k, v, valid)[real], expected[real], atol=1e-5, rtol=1e-5)
        assert_same(module.state, cache.layers[layer].state)


@pytest.mark.parametrize("masked", [False, True])
def test_one_token_behind_the_blocks_of_a_prompt_is_decoded(masked):
    """Unless there is a mask, which may hide it."""
    q, k, v = tokens(33)
    once, parts = fresh("keydiff", prefill_block=16), fresh("keydiff", prefill_block=16)
    got = once(q, k, v, torch.ones(len(q), 33, dtype=torch.bool) if masked else None)
    want = [parts(*(part[:, :, now] for part in (q, k, v))) for now in (slice(0, 32), slice(32, 33))]
    torch.testing.assert_close(got, torch.cat(want, 2), atol=1e-5, rtol=0)
    assert once.cache.workspace.clock.now.steps == (not masked)
    assert torch.equal(once.stored(), parts.stored()) == (not masked)


@pytest.mark.parametrize("name,softcap,block", covering(NAMES, [None, 3.0], [None, 7], together=1))
def test_with_room_for_everything_it_is_attention(name, softcap, block, tmp_path):
    options = {"rotary": rotary(), "output": torch.randn(24, HQ * D), "queries": statistics()}
    options |= {"softcap": softcap, "prefill_block": block}
    module = fresh(one_layer(name, tmp_path), Budget(tokens=80, sinks=2, recent=4), **options)
    q, k, v = tokens(40, dtype=torch.float64)
    real = torch.ones(B, 40, dtype=torch.bool)
    real[1, :9] = False
    first, *rest = zip(*(rows.split([30, *[1] * 6, 4], 2) for rows in (q, k, v)))
    outs = [module(*first, real[:, :30]), *(module(*part) for part in rest)]
    causal = torch.ones(40, 40, dtype=torch.bool).tril()
    want, *_ = attention(q, k, v, D**-0.5, (causal & real[:, None])[:, None], softcap)
    hidden = ~real[:, None, :, None]
    got = torch.cat(outs, 2).masked_fill(hidden, 0)
    torch.testing.assert_close(got, want.masked_fill(hidden, 0), atol=1e-12, rtol=0)
    assert torch.equal(module.stored(), torch.tensor([[40], [31]], dtype=torch.int32).expand(B, HKV))


def test_a_masked_token_is_not_absorbed():
    module = fresh()
    module(*tokens(30))
    module(*tokens(1), torch.tensor([[True], [False]]))
    assert torch.equal(module.stored() + module.moments().count, torch.tensor([[31, 31], [30, 30]]))


@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
def test_slices_of_a_fused_projection(backend):
    """They have gaps between heads, as GPT-NeoX's do."""
    whole, sliced = fresh("momentkv", backend=backend), fresh("momentkv", backend=backend)
    prompt_ = tokens(30)
    whole(*prompt_), sliced(*prompt_)
    for _ in range(2):
        qkv = torch.randn(B, HQ, 1, 3, D)
        parts = qkv[:, :, :, 0], qkv[:, :HKV, :, 1], qkv[:, :HKV, :, 2]
        assert not any(part.is_contiguous() for part in parts)
        assert torch.equal(sliced(*parts), whole(*(part.contiguous() for part in parts)))


# What torch does with modules.


@each_kind
def test_state_dict_continues_the_sequence(make):
    """Saved in the middle, between two evictions, and loaded into a new module, a used one and one already made."""
    module = make()
    module(*tokens(44))
    for _ in range(EVERY + 2):
        module(*tokens(1))
    file = io.BytesIO()
    torch.save(torch.nn.ModuleDict({"attention": module}).state_dict(), file)
    copies = new, used, ready = make(), copy.deepcopy(module), copy.deepcopy(module)
    used.reset()
    used(*tokens(30))
    ready.reset()
    for one in copies:
        file.seek(0)
        torch.nn.ModuleDict({"attention": one}).load_state_dict(torch.load(file, weights_only=True))
    for num in (1, 1, 1, 1, 1, 1, 9, 1, 1):
        step = tokens(num)
        expected = module(*step)
        for one in copies:
            assert torch.equal(one(*step), expected)
    assert all(torch.equal(one.stored(), module.stored()) for one in copies)


def test_heads_of_a_loaded_sequence_are_dealt_anew():
    made = [fresh(budget=calibrated(*shares, tokens=16)) for shares in ((1.5, 0.5), (0.5, 1.5))]
    made[0](*tokens(40))
    made[1].load_state_dict(made[0].state_dict())
    for _ in range(EVERY):
        made[1](*tokens(1))
    starts, capacities = made[1].state.exact.starts, made[1].cache.rule.layout.capacities("exact")
    assert starts.diff().tolist() == [capacities] * B and (made[1].stored() <= torch.tensor(capacities)).all()


def test_loading_keeps_the_addresses():
    module, other = fresh(), fresh()
    module(*tokens(44))
    other(*tokens(30))
    addresses = {which: tensor.data_ptr() for which, tensor in other.named_buffers()}
    other.load_state_dict(module.state_dict())
    assert {which: tensor.data_ptr() for which, tensor in other.named_buffers()} == addresses
    other.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)
    step = tokens(1)
    assert torch.equal(other(*step), module(*step))


@each_kind
def test_copies_are_independent(make):
    """Also after steps: what was found out about tensors stays behind, as a copy has others."""
    module, file = make(), io.BytesIO()
    module(*tokens(44))
    module(*tokens(1))
    torch.save(module, file)
    file.seek(0)
    before = {which: tensor.clone() for which, tensor in module.named_buffers()}
    steps = [tokens(1) for _ in range(EVERY + 3)]
    outs = [[twin(*step) for step in steps] for twin in (copy.deepcopy(module), torch.load(file, weights_only=False))]
    assert all(torch.equal(tensor, before[which]) for which, tensor in module.named_buffers())
    assert all(torch.equal(one, two) and torch.equal(module(*step), one) for step, one, two in zip(steps, *outs))


@each_kind
def test_reset_starts_again(make):
    module = make()
    first, steps = tokens(44), [tokens(1) for _ in range(EVERY + 3)]
    expected = [module(*first), *(module(*step) for step in steps)]
    addresses = {which: tensor.data_ptr() for which, tensor in module.named_buffers()}
    module.reset()
    assert torch.equal(module(*first), expected[0])
    assert all(torch.equal(module(*step), out) for step, out in zip(steps, expected[1:]))
    if not module.config.budget.follows_prompt:
        assert {which: tensor.data_ptr() for which, tensor in module.named_buffers()} == addresses
    raises("needs a dtype of floating-point numbers, got torch.int64", module.allocate, 1, dtype=torch.int64, prompt=44)
    module.allocate(1, prompt=44)
    assert torch.equal(module(*(rows[:1] for rows in first)), expected[0][:1])


def test_a_change_of_dtype_keeps_statistics():
    module = fresh("h2o", correction="moments")
    module(*tokens(44))
    for _ in range(3):
        module(*tokens(1))
    kept = {"moments_count", "moments_key_mean", "moments_value_mean", "moments_cross", "exact_attention"}
    before = {which: tensor.clone() for which, tensor in module.named_buffers()}
    module.to(torch.bfloat16)
    after = dict(module.named_buffers())
    assert kept < after.keys()
    for which, tensor in before.items():
        changed = tensor.to(torch.bfloat16) if which in ("exact_keys", "exact_values") else tensor
        assert torch.equal(after[which], changed) and after[which].dtype == changed.dtype, which
    assert module(*tokens(1, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert module.to("meta").moments().cross.is_meta


def test_kernels_read_the_moments_after_a_change_of_dtype():
    made = {backend: partial(fresh, "keydiff", correction="moments", backend=backend) for backend in ("triton", "cpu")}
    step, half = tokens(1), partial(torch.Tensor.to, dtype=torch.bfloat16)
    for one, other in ("triton", "cpu"), ("cpu", "triton"):
        module, again = made[one](), made[other]()
        module(*map(half, tokens(44)))
        again.load_state_dict(module.state_dict())
        torch.testing.assert_close(module(*map(half, step)), again(*map(half, step)), atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(module.float()(*step), again.float()(*step), atol=1e-4, rtol=1e-4)


def test_a_module_whose_memory_is_shared_goes_on():
    module = fresh(evict_every=600)  # and whose copies know when they evict next
    module(*tokens(44)), module(*tokens(1))
    twin, step = copy.deepcopy(module), tokens(1)
    assert torch.equal(module.share_memory()(*step), twin(*step))


def test_a_projection_of_the_model_stays_the_models():
    model = torch.nn.ModuleDict({"attention": None, "proj": torch.nn.Linear(HQ * D, 24, bias=False)})
    model["attention"] = fresh("criticalkv", output=model["proj"].weight)
    assert set(model.state_dict()) == {"proj.weight", "attention._extra_state"}
    twin = copy.deepcopy(model)
    assert twin["attention"].borrowed[0] is twin["proj"].weight
    twin.double()["attention"](*tokens(30, dtype=torch.float64))


def test_sizes():
    module = fresh("momentkv", correction="moments")
    assert module.nbytes() == 0
    module.allocate(B)
    slots = HKV * (TOKENS + EVERY)
    moments = HKV * (8 + 4 * (2 * D + D * D))
    extra = sum(t.nbytes for which, t in module.named_buffers() if which in ("exact_attention", "exact_memory"))
    assert module.nbytes() - extra == B * (slots * (2 * D * 4 + 4) + HKV * 4 + 8 + moments)
    assert module.nbytes() == sum(tensor.nbytes for tensor in module.buffers())


# Compiled.


def compare(make, backend, first=50, steps=2 * EVERY + 3):
    """Graphs compiled for some steps after `first` tokens, and the largest difference from eager."""
    torch._dynamo.reset()
    module = make()
    module(*tokens(first))
    twin = copy.deepcopy(module)
    counter = CompileCounterWithBackend(backend)
    step = torch.compile(twin, fullgraph=True, backend=counter)
    new = [tokens(1) for _ in range(steps)]
    worst = max(float((step(*one) - module(*one)).abs().max()) for one in new)
    for (which, mine), (_, theirs) in zip(twin.named_buffers(), module.named_buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6, msg=which)
    return counter.frame_count, worst


COMPILED = ["keydiff", "tova", "random", "knorm", "manifold", "lagkv", "rkv", "streaming"]
DAILY = {"adaptive heads", "no values"}


@pytest.mark.parametrize(
    "name, backend, first",
    [("moments", "inductor", 50),
     *(named(name, "aot_eager", 50, slow=name not in DAILY) for name in (*KINDS, *COMPILED)),
     named("adaptive heads", "aot_eager", 1, slow=True)],
)  # fmt: skip
def test_compiled_decode(name, backend, first):
    """One graph, and one for steps that evict, also while slots are free; one more where the host counts (VECTOR)."""
    graphs, worst = compare(KINDS.get(name, lambda: fresh(name)), backend, first)
    assert graphs == (3 if name == "no values" else 2) and worst <= 1e-6


DOCS = Path(__file__).parent.parent / "docs" / "module.md"
EXAMPLE = DOCS.read_text().partition("```python\n")[2].partition("```")[0]


def test_the_example_of_the_docs():
    """The decoder of docs/module.md, compiled by a backend that is quick at it; every layer stays within its slots."""
    torch._dynamo.reset()
    counters.clear()
    names = {}
    exec(EXAMPLE.replace("fullgraph=True", "fullgraph=True, backend='aot_eager'"), names)
    assert counters["stats"]["unique_graphs"] <= 3
    for layer in names["model"].layers:
        assert torch.equal(layer.attention.stored() + layer.attention.moments().count, torch.tensor([[2060, 2060]]))
        assert 256 <= int(layer.attention.stored().max()) <= 256 + 16
        assert layer.attention.state.exact.limit == 256 + 16


# Refusals of its own; the others are `patch`'s.

MAKE = {
    "kvzip": (lambda: fresh("kvzip"), "reads the prompt with the whole model"),
    "no rotary": (lambda: fresh("compactor"), "pass rotary="),
    "no rotary for vector": (lambda: fresh(correction="vector", vector=mapping()), "correction='vector' needs keys"),
    "a rotary beyond the head": (lambda: fresh("leverage", rotary=Rotary(torch.ones(9))), "at most 16 .* got 18"),
    "a rotary across the end": (lambda: fresh("leverage", rotary=Rotary(torch.ones(8), start=3)), "got 16 from 3 on"),
    "another rotary": (lambda: fresh("leverage", rotary="x"), "must be a fastkv.rotary.Rotary, got str"),
    "partial": (lambda: fresh(correction="vector", rotary=Rotary(torch.ones(3)), vector=mapping()), "other one of 6"),
    "no maps": (lambda: fresh(correction="vector", rotary=rotary()), "got the first only"),
    "maps for nothing": (lambda: fresh(vector=mapping()), "got the second only"),
    "other maps": (lambda: fresh(correction="vector", rotary=rotary(), vector=mapping(), layer=3), "3 has no map"),
    "no projection": (lambda: fresh("criticalkv"), "pass output=proj.weight"),
    "wrong projection": (lambda: fresh("criticalkv", output=torch.randn(8, 9)), r"output must have shape \[any, 64\]"),
    "no statistics": (lambda: fresh("triattention", rotary=rotary()), "pass queries="),
    "others": (lambda: fresh("triattention", rotary=rotary(), queries=statistics(), layer=3), "3 has no statistics"),
    "few": (lambda: FastKVAttention(2, 2, D, "triattention", rotary=rotary(), queries=statistics()), r"ape \[2, 16\]"),
    "heads that do not divide": (lambda: FastKVAttention(4, 3, D), "multiple of the number of KV heads"),
    "no head_dim": (lambda: FastKVAttention(4, 2, 0), "head_dim must be a whole number of at least 1"),
    "a layer too many": (lambda: fresh(layer=2, num_layers=2), "from 0 below num_layers = 2, got 2"),
    **{f"{name} {value}": (partial(fresh, **{name: value}), "must be a finite number above 0")
       for name, value in (("scale", 0), ("scale", float("nan")), ("softcap", 0.0), ("softcap", float("inf")))},
}  # fmt: skip


@pytest.mark.parametrize("case", MAKE)
def test_refused_when_made(case):
    make, expected = MAKE[case]
    raises(expected, make)


def test_refused_when_called():
    module = fresh()
    raises("is empty; run it", module.stored)
    raises("follows the prompt", fresh("keydiff", small(tokens=None, keep=0.5)).allocate, 1)
    raises("give at least", fresh("keydiff", small(tokens=None, bytes=100)), *tokens(9))
    q, k, v = tokens(30)
    raises("begins with queries of torch.float32 on cpu, got tokens of torch.float16", module, q, k.half(), v)
    raises("at least one sequence in floating point", module, q.int(), k.int(), v.int())
    raises("at least one sequence and whole tokens, got 0", module.allocate, 0)
    assert module.state is None
    module(q, k, v)
    raises("use .to", module.type, torch.float16)
    calls = {
        r"q must have shape \[any, 4, any, 16\]": (q[:, :3], k, v),
        r"k must have shape \[2, 2, 30, 16\]": (q, k[:, :, :29], v),
        r"v must have shape \[2, 2, 30, 16\]": (q, k, v[..., :8]),
        r"mask must have shape \[2, 30\]": (q, k, v, torch.ones(2, 31)),
        "mask must be bool, false for padding, got torch.float32": (q, k, v, torch.zeros(2, 30)),
        "mask must be a tensor, got list": (q, k, v, [[True] * 30] * 2),
        "mask must be on cpu as q is, got meta": (q, k, v, torch.ones(2, 30, dtype=torch.bool, device="meta")),
        r"holds 2 sequences, got 1": (q[:1], k[:1], v[:1]),
        r"buffers of torch.float32 on cpu, got tokens of torch.float64": (q.double(), k.double(), v.double()),
        "needs at least one new token": (q[:, :, :0], k[:, :, :0], v[:, :, :0]),
    }
    for expected, arguments in calls.items():
        raises(expected, module, *arguments)
    other = fresh("keydiff", small(tokens=21), evict_every=4)
    other(*tokens(30, 1))
    raises("slots were saved", other.load_state_dict, module.state_dict())
    assert other.stored().tolist() == [[21, 21]]
    for chosen, correction, said in (
        ("momentkv", "auto", "policy 'keydiff' was saved, this module has 'momentkv'"),
        ("keydiff", "centroids", "centroids_count was saved as nothing, this module has"),
    ):
        another = fresh(chosen, small(tokens=20), evict_every=5, correction=correction)
        raises(said, another.load_state_dict, module.state_dict())
        assert another.state is None
    half = {name: part for name, part in module.state_dict().items() if name != "seen"}
    raises("holds a sequence but no seen", fresh().load_state_dict, half)


class Alike(Policy):
    """All tokens are worth the same."""

    name = "alike"

    def score(self, signals):
        return torch.zeros(signals.keys.shape[:3])


def test_of_equal_scores_heads_keep_the_same_tokens():
    """Heads that compete take turns, position by position: none of them comes first."""
    layer = FastKVAttention(4, 2, 16, Alike(), Budget(tokens=12, sinks=1, recent=1, heads="adaptive"))
    layer(torch.randn(1, 4, 40, 16), torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16))
    assert layer.state.exact.lengths.tolist() == [[12, 12]]


OPTIONS = {"scale": {"scale": 0.7}, "softcap": {"softcap": 3.0}, "sinks": {"sink_logits": torch.linspace(-2, 2, HQ)}}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_attention_hold_from_the_first_prompt_on(option):
    """Also without a mask, where torch's own attention reads a first prompt if it can."""
    given, room = OPTIONS[option], Budget(tokens=80, sinks=2, recent=4)
    module, (q, k, v) = fresh("keydiff", room, **given), tokens(34, dtype=torch.float64)
    outs = [module(*part) for part in zip(*(rows.split([30, 1, 1, 1, 1], 2) for rows in (q, k, v)))]
    causal, scale = torch.ones(1, 1, 34, 34).tril().bool(), given.get("scale", D**-0.5)
    want, *_ = attention(q, k, v, scale, causal, given.get("softcap"), given.get("sink_logits"))
    torch.testing.assert_close(torch.cat(outs, 2), want)


def test_the_default_policy_is_one_that_a_layer_can_have():
    found = [FastKVAttention(HQ, HKV, D, rotary=one).config.policy.name for one in (None, rotary())]
    assert found == ["momentkv", "fastkv"]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_what_padding_holds_is_read_by_nobody(backend):
    """A row is compressed as by itself, whatever queries, keys and values of its padding are."""
    q, k, v = tokens(40)
    mask = torch.arange(40) < torch.tensor([[40], [27]])
    hidden = [rows.masked_fill(~mask[:, None, :, None], torch.nan) for rows in (q, k, v)]
    padded, alone = fresh("h2o", backend=backend), fresh("h2o", backend=backend)
    padded(*hidden, mask)
    alone(*(rows[1:, :, :27] for rows in (q, k, v)))
    for name in ("positions", "memory"):
        torch.testing.assert_close(padded.state.exact[name][-1], alone.state.exact[name][-1])


def test_h2o_counts_what_tokens_received_before_another_prompt():
    """Between two prompts fewer tokens were generated than an eviction waits for."""
    module, (q, k, v) = fresh("h2o", Budget(tokens=64, sinks=0, recent=0), evict_every=16), tokens(38)
    for start, end in ((0, 20), *((at, at + 1) for at in range(20, 30)), (30, 38)):
        module(*(rows[:, :, start:end] for rows in (q, k, v)))
    *_, weights = attention(q, k, v, D**-0.5, torch.ones(1, 1, 38, 38).tril().bool())
    received = weights.sum(2).unflatten(1, (HKV, -1)).mean(2)
    torch.testing.assert_close(module.state.exact["memory"][:, :, :38].double(), received, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["h2o", "compactor"])
def test_of_tokens_to_come_nothing_is_known_where_some_heads_keep_keys_alone(name):
    """Slots that are free hold no other token's score."""
    known = mapping()
    known = VectorMap(known.weights, {0: torch.tensor([0.9, 0.1]).double()}, 0.5, fingerprint="", model="", tokens=1)
    module = fresh(name, Budget(tokens=24, sinks=2, recent=4), correction="vector", vector=known, rotary=rotary())
    module(*tokens(60))
    slots = module.state.exact
    assert slots.starts is not None
    for row, starts, lengths in zip(slots.memory, slots.starts, slots.lengths):
        for start, end, used in zip(starts, starts[1:], lengths):
            assert not row[start + used : end].any() and row[start : start + used].any()
