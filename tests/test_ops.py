"""Every operator passes opcheck on every backend, and all backends drive a whole model to the same tokens."""

import pytest
import torch
from fastkv.ops._register import flat, flat_parts
from hypothesis import given, settings
from hypothesis import strategies as st

import fastkv
from fastkv import ops, reference
from fastkv.reference import Centroids, Moments

from .conftest import examples
from .models import build, generate, prompt
from .pairwise import named

B, HKV, G, C, T, D = 1, 2, 2, 10, 3, 16
BACKENDS = ["reference", "triton", "auto"]  # the last is what a CPU runs


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def moments():
    """Of 7 and 12 tokens: with the lengths of `slots` each head has seen 16."""
    gone = torch.arange(12) < torch.tensor([[[7], [12]]])
    pairs = randn(B, HKV, 12, D, seed=1), randn(B, HKV, 12, D, seed=2)
    return Moments.empty(B, HKV, D, D, spread=True).add(*pairs, gone)


def centroids(num):
    """Of 3 and 12 tokens, so that with many of them some of the first head are unused."""
    gone = torch.arange(12) < torch.tensor([[[3], [12]]])
    return Centroids.empty(B, HKV, num, D, D).add(randn(B, HKV, 12, D, seed=1), randn(B, HKV, 12, D, seed=2), gone)


def parts(num=None):
    return flat_parts(None if num is None else centroids(num))


def slots():
    positions = torch.arange(C, dtype=torch.int32).repeat(B, HKV, 1)
    lengths = torch.tensor([[9, 4]], dtype=torch.int32)
    return randn(B, HKV, C, D, seed=3), randn(B, HKV, C, D, seed=4), positions, lengths


def block():
    positions = torch.arange(C, C + T, dtype=torch.int32).repeat(B, HKV, 1)
    return randn(B, HKV, T, D, seed=5), randn(B, HKV, T, D, seed=6), positions


def token():
    return randn(B, HKV, 1, D, seed=8), randn(B, HKV, 1, D, seed=9)


def approx():
    """Slots with a key only, the map from keys to values, cos and sin."""
    positions = torch.arange(5, dtype=torch.int32).repeat(B, HKV, 1)
    turn = randn(C, D // 2, seed=9)
    lengths = torch.tensor([[5, 2]], dtype=torch.int32)
    return randn(B, HKV, 5, D, seed=7), positions, lengths, randn(HKV, D, D, seed=8) / 4, turn.cos(), turn.sin()


def slab():
    """As `slots`, but the heads own 10 and 6 of 18 slots: slab, positions, lengths and starts."""
    positions = torch.arange(18, dtype=torch.int32).repeat(B, 1)
    starts = torch.tensor([[0, 10, 16]], dtype=torch.int32)
    return randn(B, 18, D, seed=3), randn(B, 18, D, seed=4), positions, slots()[3], starts


def approx_slab():
    """As `approx`, but the heads own 7 and 4 of 12 slots; and starts."""
    positions = torch.arange(12, dtype=torch.int32).repeat(B, 1) % C
    starts = torch.tensor([[0, 7, 11]], dtype=torch.int32)
    return (randn(B, 12, D, seed=7), positions, *approx()[2:]), starts


def candidates():
    return torch.arange(C, dtype=torch.int32).repeat(B, HKV, 1), torch.rand(B, HKV, C) > 0.2


CASES = {
    "decode_attention": lambda: (
        randn(B, HKV * G, D), *slots()[:2], slots()[3], *flat(moments()), *parts(), 0.3, None, 1, "jensen",
        None, None, None, [],
    ),
    "decode_step": lambda: (
        randn(B, HKV * G, D), *token(), *slots(),
        torch.tensor([16]), *flat(moments()), *parts(), 0.3, 4.0, 1, "cosh", torch.zeros(B, HKV, C), None, None, [],
    ),
    "centroid_attention": lambda: (randn(B, HKV * G, T, D), *parts(5), 0.3, 4.0),
    "centroids_add": lambda: (*parts(5), *block()[:2], torch.rand(B, HKV, T) > 0.2),
    "evict": lambda: (*slots(), torch.tensor([16]), *flat(moments()), randn(B, HKV, C), 6, 1, 2, None, None, None),
    "prefill_attention": lambda: (
        randn(B, HKV * G, T, D), *slots()[:2], slots()[3], *block()[:2], torch.ones(B, T, dtype=torch.bool),
        *flat(moments()), 0.3, None, 1, "cosh",
    ),
    "select": lambda: (randn(B, HKV, C), *candidates(), torch.zeros(B, HKV, C, dtype=torch.bool), 4),
    "compact": lambda: (*slots(), *flat(moments()), *block(), *compaction()),
    "keydiff_scores": lambda: (randn(B, HKV, C, D), "mean", "cosine", candidates()[1]),
    "manifold_scores": lambda: (randn(B, HKV, C, D), None, "l2", candidates()[1]),
    "sketch": lambda: (randn(B, HKV, C, D), 4, "cholesky", 0),
    "leverage_scores": lambda: (randn(B, HKV, C, D), randn(D, 4, seed=2), "cholesky", candidates()[1], False),
    "vector_decode_attention": lambda: (
        randn(B, HKV * G, D), *slots()[:2], slots()[3], *approx(), *flat(moments()), 0.3, None, 1,
        *[None] * 6, [],
    ),
    "vector_decode_step": lambda: (
        randn(B, HKV * G, D), *token(), *slots(), torch.tensor([16]), *approx(), *flat(moments()), 0.3, 4.0, 1,
        torch.zeros(B, HKV, C), torch.zeros(B, HKV, 5), *[None] * 4, [],
    ),
    "noncausal_attention_mass": lambda: (randn(B, HKV * G, C, D), randn(B, HKV, C, D), 0.3, 4, None, None),
    "window_scores": lambda: (
        randn(B, HKV * G, T, D), randn(B, HKV, C, D), 0.3, None, candidates()[0], torch.tensor([[7, 8, 9]]),
        candidates()[1], torch.ones(B, T, dtype=torch.bool), randn(B, HKV * G, T), 1,
    ),
    "moment_scores": lambda: (torch.rand(B, HKV, C), randn(B, HKV, C, D), randn(B, HKV, C, D), *flat(moments()), 0.3),
}  # fmt: skip

RAGGED = {
    "decode_attention": lambda: (
        randn(B, HKV * G, D), *slab()[:2], slab()[3], *flat(moments()), *parts(4), 0.3, None, 1, "cosh",
        torch.zeros(B, 18), slab()[4], 9, [],
    ),
    "decode_step": lambda: (
        randn(B, HKV * G, D), *token(), *slab()[:4], torch.tensor([16]), *flat(moments()), *parts(5), 0.3, 4.0, 1,
        "jensen", torch.zeros(B, 18), slab()[4], 10, [],
    ),
    "evict": lambda: (
        *slab()[:4], torch.tensor([16]), *flat(moments()), randn(B, HKV, 9), 0, 1, 2, slab()[4], 3, None,
    ),
    "vector_decode_attention": lambda: (
        randn(B, HKV * G, D), *slab()[:2], slab()[3], *approx_slab()[0], *flat(moments()), 0.3, None, 1,
        None, torch.zeros(B, 12), slab()[4], 10, approx_slab()[1], 7, [],
    ),
    "vector_decode_step": lambda: (
        randn(B, HKV * G, D), *token(), *slab()[:4], torch.tensor([16]), *approx_slab()[0], *flat(moments()), 0.3, 4.0,
        1, torch.zeros(B, 18), torch.zeros(B, 12), slab()[4], 10, approx_slab()[1], 7, [],
    ),
}  # fmt: skip


def compaction():
    valid = torch.ones(B, HKV, C + T, dtype=torch.bool)
    kept = reference.select(randn(B, HKV, C + T), torch.arange(C + T).int().repeat(B, HKV, 1), valid, ~valid, 6)
    return valid, kept.kept, kept.counts


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_opcheck(name, backend):
    torch.library.opcheck(getattr(torch.ops.fastkv, name).default, (*CASES[name](), backend))


def test_every_operator_is_checked():
    names = torch._C._dispatch_get_all_op_names()
    assert {name for name in names if name.startswith("fastkv::")} == {f"fastkv::{name}" for name in CASES}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", RAGGED)
def test_opcheck_of_unequal_heads(name, backend):
    torch.library.opcheck(getattr(torch.ops.fastkv, name).default, (*RAGGED[name](), backend))


@pytest.mark.parametrize("name", CASES)
def test_backends_agree(name):
    """Results and everything mutated; slots as sets, because kernels fill holes where the reference keeps order."""
    results, states = [], []
    for backend in BACKENDS:
        torch.manual_seed(0)
        arguments = CASES[name]()
        out = getattr(torch.ops.fastkv, name)(*arguments, backend)
        results.append([out] if isinstance(out, torch.Tensor) else list(out or []))
        states.append([a for a in arguments if isinstance(a, torch.Tensor)])
    for expected, *others in zip(*results):
        for got in others:
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    if name in ("evict", "compact"):
        for state in states:
            keys, values, positions, lengths = state[:4]
            held = torch.arange(C) < lengths[..., None]
            order = torch.where(held, positions, C + T + 1).argsort(-1)
            state[2] = positions.gather(-1, order).masked_fill(~held, 0)
            for index in (0, 1):
                rows = state[index].gather(2, order[..., None].expand_as(keys))
                state[index] = rows.masked_fill(~held[..., None], 0)
    for expected, *others in zip(*states):
        for got in others:
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=examples(200))
@given(
    lengths=st.lists(st.integers(0, 6), min_size=2, max_size=2),
    evicted=st.integers(0, 5),
    order=st.sampled_from([None, 0, 1]),
    softcap=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 2**31),
)
def test_decode_attention_backends_agree(lengths, evicted, order, softcap, seed):
    q, keys, values = randn(1, 4, 16, seed=seed), randn(1, 2, 6, 16, seed=seed + 1), randn(1, 2, 6, 16, seed=seed + 2)
    gone = randn(1, 2, evicted, 16, seed=seed + 3), randn(1, 2, evicted, 16, seed=seed + 4)
    state = Moments.empty(1, 2, 16, 16).add(*gone)
    held = torch.tensor([lengths], dtype=torch.int32)
    expected = ops.decode_attention(q, keys, values, held, state, 0.3, softcap, order=order, backend="reference")
    got = ops.decode_attention(q, keys, values, held, state, 0.3, softcap, order=order, backend="triton")
    for mine, theirs in zip(got, expected):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "policy,block", [("momentkv", 16), named("snapkv", None, slow=True), named("keydiff", 16, slow=True)]
)
def test_a_model_decodes_the_same_tokens_on_every_backend(policy, block):
    model = build(num_hidden_layers=2)
    ids, mask = prompt(2, 36, (0, 7))
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
        for layer in range(2):
            assert torch.equal(other[2].moments(layer).count, cache.moments(layer).count)
            assert torch.equal(other[2].stored(layer), cache.stored(layer))


def test_half_precision_models_keep_a_slope_for_the_kernel():
    model = build(num_hidden_layers=2).half()
    ids, mask = prompt(1, 30)
    small = fastkv.Budget(tokens=20, sinks=2, recent=4)
    fastkv.patch(model, "momentkv", small, evict_every=3, backend="triton")
    cache = generate(model, ids, mask, new=5, return_dict_in_generate=True).past_key_values
    kept = cache.moments(0)
    assert kept.slope.dtype == torch.float16
    expected = kept.cross / kept.count[..., None, None]
    torch.testing.assert_close(kept.slope.float(), expected, atol=1e-3, rtol=1e-3)
    assert cache.nbytes() > sum(layer.state.nbytes() for layer in cache.layers)  # scratch counts too


def test_the_interpreter_has_to_be_asked_for(monkeypatch):
    import triton

    model = build()
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(fastkv.FastKVError, match="TRITON_INTERPRET=1 turns it on"):
        fastkv.patch(model, budget=64, backend="triton")


def test_a_missing_or_old_triton_is_said_at_patch_time(monkeypatch):
    from fastkv import backend

    model = build()
    for reason in ("triton is not installed", "triton 3.4.0 is older than 3.6"):
        monkeypatch.setattr(backend, "why_no_triton", lambda reason=reason: reason)
        with pytest.raises(fastkv.FastKVError, match=f"cannot run: {reason}; use backend='reference'"):
            fastkv.patch(model, budget=64, backend="triton")


def test_sizes_without_a_kernel_are_refused():
    with pytest.raises(fastkv.FastKVError, match="multiple of 16"):
        fastkv.patch(build(head_dim=12), budget=64, backend="triton")
    with pytest.raises(fastkv.FastKVError, match="evict_every may be at most 64"):
        fastkv.patch(build(), budget=64, evict_every=65, backend="triton")
