"""Every operator passes opcheck on every backend, and all backends drive a whole model to the same tokens."""

import inspect
import typing

import pytest
import torch

import fastkv
from fastkv import ops, reference
from fastkv.ops.operator import FORMS, flat_state, spec_of, spec_text, state_of
from fastkv.reference import Centroids, LayerState, Moments, Recovery, Slots
from fastkv.rotary import Rotary
from perf.micro.states import filled

from .models import build, generate, prompt, raises
from .pairwise import covering, named
from .states import BACKENDS, assert_same, best_slots, copied, encoded, make_spec

B, HKV, G, C, T, D = 1, 2, 2, 10, 3, 16


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pairs(num):
    return randn(B, HKV, num, D, seed=1), randn(B, HKV, num, D, seed=2)


def evicted(*counts):
    """Moments of the first so many of twelve tokens of each head."""
    return Moments.empty(B, HKV, D, D).add(*pairs(12), torch.arange(12) < torch.tensor(counts)[None, :, None])


def centroids(num):
    """Of 3 and 12 tokens, so that with many of them some of the first head are unused."""
    return Centroids.empty(B, HKV, num, D, D).add(*pairs(12), torch.arange(12) < torch.tensor([[[3], [12]]]))


def slots(ragged=False, attention=True):
    """9 and 4 tokens; the heads own 10 slots each, or 10 and 6 of 18."""
    place = (18,) if ragged else (HKV, C)
    lengths = torch.tensor([[9, 4]], dtype=torch.int32)
    positions = torch.arange(place[-1], dtype=torch.int32).expand(B, *place).contiguous()
    made = Slots(randn(B, *place, D, seed=3), randn(B, *place, D, seed=4), lengths, positions)
    made.attention = torch.zeros(B, *place) if attention else None
    if ragged:
        made.starts, made.limit, made.filled = torch.tensor([[0, 10, 16]], dtype=torch.int32), 10, 10
    return made


def layer(ragged=False, attention=True, counts=(7, 12), parts=None):
    """A layer of which every head has seen 16 tokens."""
    known = None if parts is None else centroids(parts)
    return LayerState(slots(ragged, attention), torch.tensor([16]), evicted(*counts), parts=known)


def sunk(state):
    """The layer of a model with attention sinks."""
    state.sink_logits = torch.nn.Parameter(randn(HKV * G, seed=9).half())
    return state


def biased(state):
    """The layer whose slots have a bias."""
    state.exact.bias = randn(*state.exact.positions.shape, seed=10)
    return state


def vector(ragged=False, attention=True):
    """A layer with 5 and 2 more tokens that have no value, in slots like `slots`."""
    state, place = layer(ragged, attention, counts=(2, 10)), (12,) if ragged else (HKV, 5)
    positions = (torch.arange(place[-1], dtype=torch.int32) % C).expand(B, *place).contiguous()
    state.approx = Slots(randn(B, *place, D, seed=7), None, torch.tensor([[5, 2]], dtype=torch.int32), positions)
    state.approx.attention = torch.zeros(B, *place)
    if ragged:
        state.approx.starts, state.approx.limit = torch.tensor([[0, 7, 11]], dtype=torch.int32), 7
        state.approx.filled = 7
    turn = randn(C, D // 2, seed=9)
    state.recovery = Recovery(randn(HKV, D, D, seed=8) / 4, turn.cos(), turn.sin())
    return state


def block():
    positions = torch.arange(C, C + T, dtype=torch.int32).repeat(B, HKV, 1)
    return randn(B, HKV, T, D, seed=5), randn(B, HKV, T, D, seed=6), positions


def token():
    return randn(B, HKV, 1, D, seed=8), randn(B, HKV, 1, D, seed=9)


def remembering(ragged=False):
    """A layer whose policy remembers a number with each token."""
    state = layer(ragged)
    state.exact.positions %= C
    state.exact.memory = torch.rand(state.exact.positions.shape)
    return state


def candidates():
    return torch.arange(C, dtype=torch.int32).repeat(B, HKV, 1), torch.rand(B, HKV, C) > 0.2


def stored(num, memory=True):
    """The first slots of a layer, the numbers that a policy stored there, and lengths."""
    exact = remembering().exact
    known = (part[:, :, :num] for part in (exact.keys, exact.values, exact.positions, exact.memory))
    return *[*known][: 3 + memory], *[None] * (not memory), exact.lengths


def moved():
    """Two rows of three pages, of which there is one stretch of 8 bytes."""
    pages, copy = torch.arange(96, dtype=torch.uint8).view(3, 32), torch.arange(16, dtype=torch.uint8)
    return pages, copy, torch.tensor([[0], [8], [0], [8], [0], [4]]), None, torch.tensor([2, 1]), 1, 1, 2048


def compaction(new):
    """Which of the slots and of `new` further tokens are tokens, and which of them stay."""
    valid = torch.arange(C + new) < torch.tensor([[[9], [4]]])
    valid[..., C:] = True
    positions = torch.arange(C + new, dtype=torch.int32).repeat(B, HKV, 1)
    return valid, reference.select(randn(B, HKV, C + new), positions, valid, torch.zeros_like(valid), 6)


def case(*arguments, **options):
    return arguments, options


def step(state, backend, append=True, **spec):
    new = token() if append else (None, None)
    return case(randn(B, HKV * G, D), *new, state, make_spec(0.3, backend=backend, **spec))


def grouped(backend, slots):
    """A step over slots of 4 bits, which take 32 numbers together."""
    torch.manual_seed(0)
    state = filled(B, HKV, 32, 16, free=2, correction="centroids", slots=slots)
    q, k, v = (torch.randn(B, *shape, 32) for shape in ((HKV * G,), (HKV, 1), (HKV, 1)))
    return case(q, k, v, state, make_spec(0.3, backend=backend, correction="centroids"))


def attend(state, backend, **spec):
    real = torch.ones(B, T, dtype=torch.bool)
    return case(randn(B, HKV * G, T, D), *block()[:2], real, state, make_spec(0.3, backend=backend, **spec))


def shrink(state, backend, scores):
    spec = make_spec(backend=backend, tokens=6, spare=3, sinks=1, recent=2)
    known = None if state.exact.memory is None else torch.rand_like(scores)
    return case(*best_slots(scores, state, spec), None, known, state, spec)


CASES = {  # the name of the operator, and what is special about the case
    "decode_step": lambda b: step(layer(), b, order=1),
    "decode_into": lambda b: case(
        randn(B, HKV * G, D), *token(), torch.zeros(B, HKV * G, D), layer(), make_spec(0.3, backend=b)),
    "decode_step without a token": lambda b: step(layer(attention=False), b, append=False, order=0),
    "decode_step with a softcap": lambda b: step(layer(), b, softcap=4.0, correction="moments"),
    "decode_step with centroids": lambda b: step(layer(parts=5), b, correction="centroids"),
    "decode_step of unequal heads": lambda b: step(layer(ragged=True, parts=4), b, correction="centroids"),
    "decode_step of unequal heads with a softcap": lambda b: step(layer(True), b, softcap=4.0, order=1),
    "decode_step without values": lambda b: step(vector(), b, softcap=4.0, correction="vector+moments"),
    "decode_step without values and token": lambda b: step(vector(True, False), b, False, correction="vector+mean"),
    "decode_step of unequal heads without values": lambda b: step(vector(True), b, correction="vector"),
    "decode_step with sinks": lambda b: step(sunk(layer()), b, order=1),
    "decode_step of unequal heads with sinks": lambda b: step(sunk(layer(True, parts=4)), b, correction="centroids"),
    "decode_step without values with sinks": lambda b: step(sunk(vector()), b, correction="vector+moments"),
    "decode_step with a bias": lambda b: step(biased(layer()), b),
    "prefill_attention with a bias": lambda b: attend(biased(layer()), b),
    "compact with a bias": lambda b: case(*compaction(T), block(), None, biased(layer()), make_spec(backend=b)),
    "compact of unequal heads with a bias": lambda b: shrink(biased(layer(ragged=True)), b, randn(B, HKV, 9)),
    "decode_step of int8 slots": lambda b: step(encoded(layer(), "int8"), b, order=1),
    "decode_step of fp8 slots": lambda b: step(encoded(layer(True, parts=4), "fp8"), b, correction="centroids"),
    "decode_step of int4 slots": lambda b: grouped(b, "int4"),
    "decode_step of k8v4 slots": lambda b: grouped(b, "k8v4"),
    "prefill_attention of fp8 slots": lambda b: attend(encoded(layer(), "fp8"), b, order=1),
    "compact to int8 slots": lambda b: case(
        *compaction(T), block(), None, encoded(layer(), "int8"), make_spec(backend=b)),
    "compact of unequal heads in fp8": lambda b: shrink(encoded(layer(ragged=True), "fp8"), b, randn(B, HKV, 9)),
    "prefill_attention": lambda b: attend(layer(), b, order=1),
    "prefill_attention with sinks": lambda b: attend(sunk(layer(parts=5)), b, correction="centroids"),
    "prefill_attention of unequal heads": lambda b: attend(biased(layer(True, parts=5)), b, correction="centroids"),
    "prefill_attention of unequal heads in int8": lambda b: attend(encoded(layer(ragged=True), "int8"), b, order=1),
    "prefill_attention with centroids": lambda b: attend(layer(parts=5), b, correction="centroids"),
    "remember": lambda b: case(
        *block(), torch.rand(B, HKV, T) > 0.2, torch.rand(B, HKV, T) > 0.6, T, layer(parts=5),
        make_spec(correction="centroids", backend=b)),
    "slot_signals": lambda b: case(candidates()[0], layer(parts=5), make_spec(spare=3, sinks=1, recent=2, backend=b)),
    "slot_signals of less": lambda b: case(candidates()[0], layer(attention=False), make_spec(spare=3, backend=b)),
    "candidates": lambda b: case(
        *stored(C), *block()[:2], torch.tensor([[False, True, True]]), torch.tensor([16]), 2, 5, backend=b),
    "candidates of a first block": lambda b: case(
        *stored(0, False), *block()[:2], torch.tensor([[True, True, False]]), torch.tensor([0]), 1, 1, backend=b),
    "read_rows": lambda b: case(
        randn(7, HKV * G, D), randn(7, HKV, D), randn(7, HKV, D, seed=1), torch.tensor([[0, 1, 2], [5, 6, 5]]), *moved()
    ),
    "write_rows": lambda b: case(
        randn(2, HKV * G, 3, D), torch.tensor([0, 1, 2, 5, 6]), torch.tensor([0, 0, 0, 1, 1]),
        torch.tensor([0, 1, 2, 0, 1]), torch.zeros(7, HKV * G, D), *moved()),
    "compact": lambda b: case(*compaction(T), block(), None, layer(), make_spec(backend=b)),
    "compact with a memory": lambda b: case(
        *compaction(T), block(), torch.rand(B, HKV, C + T), remembering(), make_spec(backend=b)),
    "compact without a block": lambda b: case(*compaction(0), None, None, layer(), make_spec(backend=b)),
    "compact of slots": lambda b: shrink(layer(), b, randn(B, HKV, C)),
    "compact of slots with a memory": lambda b: shrink(remembering(), b, randn(B, HKV, C)),
    "compact of unequal heads with a memory": lambda b: shrink(remembering(True), b, randn(B, HKV, 9)),
    "compact of unequal heads": lambda b: shrink(layer(ragged=True), b, randn(B, HKV, 9)),
    "select": lambda b: case(randn(B, HKV, C), *candidates(), torch.zeros(B, HKV, C, dtype=torch.bool), 4, backend=b),
    "keydiff_scores": lambda b: case(randn(B, HKV, C, D), mask=candidates()[1], backend=b),
    "keydiff_scores before the rotary embedding": lambda b: case(
        randn(B, HKV, C, D), mask=candidates()[1], positions=candidates()[0], rotary=Rotary(torch.ones(2), 1.2),
        backend=b),
    "manifold_scores": lambda b: case(randn(B, HKV, C, D), mask=candidates()[1], backend=b),
    "sketch": lambda b: case(randn(B, HKV, C, D), 4, "cholesky", 0),
    "sketched_leverage": lambda b: case(
        randn(B, HKV, C, D), randn(D, 4, seed=2), "cholesky", mask=candidates()[1], backend=b),
    "noncausal_attention_mass": lambda b: case(randn(B, HKV * G, C, D), randn(B, HKV, C, D), 0.3, 4, backend=b),
    "noncausal_attention_mass with sinks": lambda b: case(
        randn(B, HKV * G, C, D), randn(B, HKV, C, D), 0.3, 4, sink_logits=randn(HKV * G), backend=b),
    "pool_scores": lambda b: case(torch.rand(B, HKV, C), 3, *candidates(), backend=b),
    "chunk_mean": lambda b: case(torch.rand(B, HKV, C), 4, *candidates(), backend=b),
    "most_attended": lambda b: case(randn(B, HKV * G, T, D), randn(B, HKV, C, D), randn(B, HKV * G, T), 0.3, backend=b),
    "observed_attention": lambda b: case(
        randn(B, HKV * G, T, D), randn(B, HKV, C, D), *candidates(), 0.3, window=2, log_mass=randn(B, HKV * G, T),
        sink_logits=randn(HKV * G), backend=b),
    "moment_scores": lambda b: case(torch.rand(B, HKV, C), *pairs(C), evicted(7, 12), 0.3, backend=b),
    "queries_ahead": lambda b: case(
        randn(B, HKV * G, T, D), *candidates(), Rotary(torch.ones(2), 1.2), 9, 1, backend=b),
    "expected_attention": lambda b: case(
        *pairs(C), randn(B, HKV * G, 1, D), randn(B, HKV * G, D, D), torch.ones(B, 1, 1, dtype=torch.int64), 0.3, 0.1,
        torch.rand(B, HKV, C), valid=candidates()[1], backend=b),
    "needed_scores": lambda b: case(randn(B, HKV, C), *torch.rand(2, B, HKV, C), candidates()[1], backend=b),
    "needed_scores of a first reading": lambda b: case(
        randn(B, HKV, C), torch.rand(B, HKV, C), None, candidates()[1], backend=b),
    "z_scores": lambda b: case(randn(3, B, HKV, C), candidates()[1], backend=b),
    "select_each": lambda b: case(
        randn(B, HKV, C), *candidates(), torch.zeros(B, HKV, C, dtype=torch.bool), torch.tensor([[4, 2]]), backend=b),
}  # fmt: skip


def flattened(name, backend):
    """The operator, its arguments in one row as torch passes them, and the states that are among them."""
    operator = name.split()[0]
    function, (arguments, options) = getattr(ops, operator), CASES[name](backend)
    bound, kinds = inspect.signature(function).bind(*arguments, **options), typing.get_type_hints(function)
    bound.apply_defaults()
    pieces = [piece for one, given in bound.arguments.items() for piece in FORMS[kinds[one]].there(given)]
    found = [given for given in bound.arguments.values() if isinstance(given, LayerState)]
    return getattr(torch.ops.fastkv, operator), pieces, found


CALLED, TRACED = ("test_schema", "test_autograd_registration", "test_faketensor"), "test_aot_dispatch_dynamic"


@pytest.mark.parametrize("name, backend", covering(CASES, BACKENDS, together=1))
def test_opcheck(name, backend):
    operator, pieces, _ = flattened(name, backend)
    torch.library.opcheck(operator.default, tuple(pieces), test_utils=CALLED)


TRACED_DAILY = "decode_step prefill_attention remember compact evict slot_signals select most_attended".split()


@pytest.mark.parametrize("name", [named(name, slow=name not in TRACED_DAILY) for name in CASES])
def test_opcheck_of_a_trace(name):
    """Of one backend: what torch traces is the same for all. Schemas are made alike for all states."""
    operator, pieces, _ = flattened(name, "reference")
    torch.library.opcheck(operator.default, tuple(pieces), test_utils=TRACED)


def test_every_operator_is_checked():
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fastkv::")}
    assert names == {f"fastkv::{name.split()[0]}" for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_an_operator_is_its_function(name):
    """Through the dispatcher, where arguments are flat, and without: the same results and changes, bit for bit."""
    runs = []
    for opaque in (False, True):
        torch.manual_seed(0)
        if opaque:
            operator, pieces, found = flattened(name, "auto")
            out = operator(*pieces)
        else:
            arguments, options = CASES[name]("auto")
            out, found = getattr(ops, name.split()[0])(*arguments, **options), arguments
        runs.append(([out] if isinstance(out, torch.Tensor) else list(out or []), found))
    (results, found), (others, states) = runs
    assert all(torch.equal(one, other) for one, other in zip(results, others, strict=True))
    for one, other in zip((one for one in found if isinstance(one, LayerState)), states, strict=True):
        assert_same(one, other)


def test_flat_states_come_back_whole():
    for state in (vector(ragged=True), sunk(layer(parts=3))):
        state.scratch, state.exact.memory = [torch.zeros(3)], torch.zeros(B, HKV, C)
        state.moments.slope, state.exact.filled = torch.zeros(B, HKV, D, D).half(), 9
        back = state_of(*flat_state(state))
        assert dict(back.named_tensors()).keys() == dict(state.named_tensors()).keys()
        assert all(one is other for (_, one), (_, other) in zip(back.named_tensors(), state.named_tensors()))
        assert back.scratch == state.scratch
        for one, other in zip(back.tiers.values(), state.tiers.values(), strict=True):
            assert (one.limit, one.filled) == (other.limit, other.filled)
        assert (back.recovery is None) == (state.recovery is None)
        assert (back.sink_logits is None) == (state.sink_logits is None)
    assert torch.equal(back.sink_logits, state.sink_logits) and not back.sink_logits.requires_grad
    for spec in (make_spec(), make_spec(0.1, 2.5, 1, backend="cpu", tokens=3, spare=4, sinks=5, recent=6)):
        assert spec_of(spec_text(spec)) == spec


def sorted_slots(state):
    """Tokens in order of position, and zeros where nothing is stored."""
    state, slots = copied(state), state.exact
    order = torch.where(slots.valid, slots["positions"], 1 << 30).argsort(-1)
    for name in (*slots.moving(), *["memory"] * (slots.memory is not None)):
        (rows,) = slots.stored(name)
        rows = rows.flatten(3) if rows.dim() > 3 else rows[..., None]
        rows = rows.gather(2, order[..., None].expand_as(rows))
        free = name == "memory" and slots.starts is None  # where nothing is stored, nothing is known
        setattr(state.exact, name, rows if free else rows.masked_fill(~slots.valid[..., None], 0))
    return state


@pytest.mark.parametrize("name", CASES)
def test_backends_agree(name):
    """Results and everything mutated; slots as sets, because kernels fill holes where the reference keeps order."""
    results, states = [], []
    for backend in BACKENDS:
        torch.manual_seed(0)
        operator, pieces, found = flattened(name, backend)
        out = operator(*pieces)
        out = [out] if isinstance(out, torch.Tensor) else list(out or [])
        results.append(out + [piece for piece in pieces if isinstance(piece, torch.Tensor)])
        states.append([sorted_slots(state) if name.split()[0] == "compact" else state
                       for state in found])  # fmt: skip
    for expected, *others in zip(*results):
        for got in others:
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    for expected, *others in zip(*states):
        for got in others:
            for (one, mine), (other, theirs) in zip(got.named_tensors(), expected.named_tensors(), strict=True):
                assert one == other
                torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_known_may_be_the_memory(backend):
    memories = []  # as in a compiled step, which leaves copies out
    for own in (True, False):
        torch.manual_seed(0)
        (valid, chosen, _, _, state, spec), _ = shrink(remembering(), backend, randn(B, HKV, C))
        known = state.exact.memory
        ops.compact(valid, chosen, None, known if own else known.clone(), state, spec)
        memories.append(state.exact.memory)
    assert torch.equal(*memories)


WRONG = {
    "lengths must have shape": {"lengths": torch.ones(1, 1, dtype=torch.int32)},
    "values must have shape": {"values": randn(B, HKV, 5, D)},
    "keys must have shape": {"keys": randn(B, HKV, 6, 2 * D)},
    "key_mean must have shape": {"moments": Moments.empty(B, HKV, 2 * D, D)},
    "count must have shape": {"moments": Centroids.empty(B, HKV + 1, 3, D, D)},
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_attention_reads_what_belongs_to_it(backend):
    """Other shapes are refused. Lengths are of at most all slots, of which there may be none; any strides will do."""
    q, (keys, values), lengths = randn(B, HKV * G, D), pairs(6), torch.full((B, HKV), 6)
    given = {"q": q, "keys": keys, "values": values, "lengths": lengths, "moments": evicted(0, 12), "scale": 0.3}
    for words, wrong in WRONG.items():
        raises(words, ops.decode_attention, **{**given, **wrong}, backend=backend)
    turned = (part.transpose(1, 2).contiguous().transpose(1, 2) for part in (keys, values))
    same = {**given, **dict(zip(("keys", "values"), turned)), "lengths": lengths + 3}
    none = {**given, "keys": keys[:, :, :0], "values": values[:, :, :0], "lengths": 0 * lengths}
    for one, other in ((given, same), ({**given, "lengths": 0 * lengths}, none)):
        for mine, theirs in zip(ops.decode_attention(**other, backend=backend), reference.decode_attention(**one)):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("order, softcap", [(None, None), (0, 2.0), (1, None), (1, 2.0)])
def test_decode_attention_backends_agree(order, softcap):
    q, (keys, values), state = randn(B, HKV * G, D), pairs(6), evicted(0, 12)
    for lengths in ([[6, 0]], [[0, 3]]):
        given = q, keys, values, torch.tensor(lengths, dtype=torch.int32), state, 0.3, softcap
        expected, *others = (ops.decode_attention(*given, order=order, backend=backend) for backend in BACKENDS)
        for mine, theirs in ((mine, theirs) for got in others for mine, theirs in zip(got, expected)):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "policy,block",
    [("fastkv", None), *(named(name, block, slow=True) for name, block in (("momentkv", 16), ("snapkv", None)))],
)
def test_a_model_decodes_the_same_tokens_on_every_backend(policy, block):
    model, (ids, mask) = build(num_hidden_layers=1), prompt(2, 36, (0, 7))
    small = fastkv.Budget(tokens=20, sinks=2, recent=4)
    runs = []
    for backend in BACKENDS:
        fastkv.patch(model, policy, small, prefill_block=block, evict_every=3, backend=backend)
        out = generate(model, ids, mask, new=6, return_dict_in_generate=True, output_logits=True)
        runs.append((out.sequences, torch.stack(out.logits), out.past_key_values))
    tokens, logits, cache = runs[0]
    for other in runs[1:]:
        assert torch.equal(other[0], tokens)
        torch.testing.assert_close(other[1], logits, atol=1e-3, rtol=1e-3)
        assert torch.equal(other[2].moments(0).count, cache.moments(0).count)
        assert torch.equal(other[2].stored(0), cache.stored(0))


def test_operators_refuse_arguments_that_they_do_not_have():
    """On every device, not only where Python calls the function itself."""
    keys = randn(1, 1, 4, 16)
    assert torch.equal(ops.manifold_scores(keys=keys), ops.manifold_scores(keys))
    for given, options in (((), {}), ((keys, None, "l2", None, "auto", 3), {}), ((keys,), {"keys": keys, "metrik": 1})):
        with pytest.raises(TypeError):
            ops.manifold_scores(*given, **options)
        with pytest.raises(TypeError):
            ops.manifold_scores(*(one.to("meta") if one is keys else one for one in given), **options)
    assert torch.equal(ops.window_scores(keys, keys[:, :, :3], 0.3), reference.window_scores(keys, keys[:, :, :3], 0.3))
    raises("backend must be one of", ops.keydiff_scores, keys, "median", backend="nonsense")


def test_sizes_without_a_kernel_are_refused():
    raises("multiple of 16", fastkv.patch, build(head_dim=12), budget=64, backend="triton")
