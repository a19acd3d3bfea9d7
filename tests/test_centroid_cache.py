"""Centroids of the evicted tokens in a cache: which tokens join when, what attention makes of them, their bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastkv
from fastkv import Budget, FastKVCache, FastKVError, corrections
from fastkv.cache import signals
from fastkv.cache.layout import LayerPlan, cost
from fastkv.cache.wrappers import Rollback
from fastkv.config import Config
from fastkv.policies import get
from fastkv.reference.centroids import BLOCK

from .conftest import examples
from .models import build, generate, policy, prompt
from .pairwise import named
from .test_batches import distinct, roll, rows_of
from .test_module import HQ, B, D, fresh, tokens
from .test_policy_matrix import EVERY, small
from .test_saved import rewritten

F64 = torch.float64


# Against the documented rule, literally: parts are lists of tokens, and everything follows from their members.


def joined(parts, new, keys, values, num):
    """Parts of one head after the tokens `new`, oldest first, have joined `num` of them."""
    for start in range(0, len(new), BLOCK):
        parts, half = [*parts, *([token] for token in new[start : start + BLOCK])], 0
        while len(parts) > num:
            share = 8 if len(parts) <= 288 else 4 if len(parts) <= 4 * num else 2
            joins, table = min(len(parts) - num, max(len(parts) // share, 1)), costs(parts, keys, values)
            offers = [
                min((table[mover][to], mover, to) for to in range(1 - half, len(parts), 2))
                for mover in range(half, len(parts), 2)
            ]
            gone = {mover: to for _, mover, to in sorted(offers)[:joins]}
            groups = {index: list(part) for index, part in enumerate(parts) if index not in gone}
            for mover, to in gone.items():
                groups[to] += parts[mover]
            parts, half = list(groups.values()), 1 - half
    return parts


def costs(parts, keys, values):
    """What joining two parts adds to the sum of squares within parts, relative to the variance of all parts' means."""
    sizes, found = torch.tensor([len(part) for part in parts], dtype=F64), 0.0
    for rows in (keys, values):
        means = torch.stack([rows[part].mean(0) for part in parts])
        away = means - sizes @ means / sizes.sum()
        variance = sizes @ away.square().sum(-1) / sizes.sum()
        found = found + (means[:, None] - means).square().sum(-1) / variance
    return (found * sizes[:, None] * sizes / (sizes[:, None] + sizes)).tolist()


def attention(query, keys, values, kept, parts, scale, softcap=None):
    """Attention over the kept tokens and the parts, and the weights of the kept ones."""
    logits, pairs = [bent(scale * keys[token] @ query, softcap)[0] for token in kept], [values[token] for token in kept]
    for part in parts:
        mean = keys[part].mean(0)
        sigma = (keys[part] - mean).square().mean().sqrt()
        logit, slope = bent(scale * mean @ query, softcap)
        logits.append(logit + torch.tensor(float(len(part)), dtype=F64).log())
        logits[-1] = logits[-1] + torch.cosh(scale * slope * query.norm() * sigma).log()
        pairs.append(values[part].mean(0))
    weights = torch.stack(logits).softmax(0)
    return weights @ torch.stack(pairs), weights[: len(kept)]


def bent(logit, softcap):
    if softcap is None:
        return logit, 1.0
    slope = torch.tanh(logit / softcap)
    return softcap * slope, 1 - slope**2


@pytest.mark.parametrize("block, softcap", [(None, 3.0), (32, None)], ids=["whole", "blocks"])
def test_a_window_with_the_centroids_of_the_rest(monkeypatch, block, softcap):
    """StreamingLLM keeps a set that is known beforehand; the rest joins in the order in which it leaves. Unrounded."""
    monkeypatch.setattr(corrections.kinds, "MEANS", torch.float32)
    budget, every, length = Budget(tokens=64, sinks=2, recent=4), 3, 110
    options = {"correction": "centroids", "evict_every": every, "prefill_block": block, "softcap": softcap}
    module = fresh("streaming", budget, **options)
    q, k, v = tokens(length + 10, dtype=F64)
    first = module(q[:, :, :length], k[:, :, :length], v[:, :, :length])
    num = module.state.parts.num
    assert num == 64 * 2 * D * 8 // (16 * 4 * (2 * D + 2)) == 7
    parts = {(row, head): [] for row in range(B) for head in range(2)}
    kept = {place: [] for place in parts}

    def absorb(end):
        """Keep the first two and the last 62 of `end` tokens."""
        for (row, head), held in kept.items():
            stay = [0, 1, *range(end - 62, end)]
            new = [token for token in range(end) if token not in stay and not any(token in p for p in parts[row, head])]
            parts[row, head] = joined(parts[row, head], new, k[row, head], v[row, head], num)
            held[:] = stay

    if block is not None:
        absorb(96)  # the first block that does not fit is the third
        row, head, at = 1, 3, 103
        now = [*kept[row, 1], *range(96, at + 1)]
        want, _ = attention(q[row, head, at], k[row, 1], v[row, 1], now, parts[row, 1], D**-0.5, softcap)
        torch.testing.assert_close(first[row, head, at], want, atol=2e-6, rtol=0)
    absorb(length)
    for at in range(length, length + 10):
        got = module(*(rows[:, :, at : at + 1] for rows in (q, k, v)))
        for row in range(B):
            for head in range(HQ):
                place = row, head // 2
                kept[place] += [at] if head % 2 == 0 else []
                pairs = q[row, head, at], k[place], v[place]
                want, _ = attention(*pairs, kept[place], parts[place], D**-0.5, softcap)
                torch.testing.assert_close(got[row, head, 0], want, atol=2e-6, rtol=0)
        if (at - length) % every == every - 1:
            absorb(at + 1)
    counts = module.state.parts.count[0, 0]
    assert sorted(counts.tolist()) == sorted(len(part) for part in parts[0, 0])


def test_attention_that_is_added_up_knows_the_evicted_mass():
    """H2O adds up what each slot receives: of a sum over evicted tokens too."""
    module = fresh("h2o", correction="centroids", evict_every=4)
    q, k, v = tokens(60, dtype=F64)
    module(q[:, :, :58], k[:, :, :58], v[:, :, :58])
    for at in (58, 59):
        module(*(rows[:, :, at : at + 1] for rows in (q, k, v)))
    state = module.state
    for row in range(B):
        for head in range(2):
            held = state.exact.positions[row, head, : int(state.exact.lengths[row, head])].tolist()
            parts = state.parts
            want = torch.zeros(len(held), dtype=F64)
            for at in (58, 59):
                for query in (q[row, 2 * head, at], q[row, 2 * head + 1, at]):
                    kept = [token for token in held if token <= at]
                    spread = (parts.spread[row, head] / parts.count[row, head].clamp(min=1)).sqrt()
                    mean = parts.count[row, head].log() + parts.keys[row, head].double() @ query / D**0.5
                    mass = mean + torch.cosh(D**-0.5 * query.norm() * spread.double()).log()
                    exact = k[row, head][kept] @ query / D**0.5
                    total = torch.cat([exact, mass]).logsumexp(0)
                    want[: len(kept)] += (exact - total).exp() / 2
            got = state.exact.attention[row, head, : len(held)].double()
            torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


@pytest.mark.parametrize("wrapper", [None, Rollback])
def test_the_evicted_mass_of_a_block_reaches_what_is_observed(monkeypatch, wrapper):
    module, told, observe = fresh("snapkv", correction="centroids", prefill_block=16), [], signals.observe
    q, k, v = tokens(60)
    module(*(rows[:, :, :50] for rows in (q, k, v)))
    monkeypatch.setattr(signals, "observe", lambda *given: told.append(given[-1]) or observe(*given))
    want = fastkv.reference.centroid_estimate(q[:, :, 50:], module.state.parts, D**-0.5)[1]
    reader = module.cache if wrapper is None else wrapper(module.cache)
    reader.read(*(rows[:, :, 50:] for rows in (q, k, v)), torch.ones(B, 10, dtype=torch.bool), None)
    if wrapper is not None:
        reader.accept(3)
        want = want[:, :, :7]
    torch.testing.assert_close(*told, want)


# Nothing is lost: the same tokens leave as with moments, and their centroids have the moments' mean.


@pytest.mark.parametrize("heads, block", [("uniform", 16), ("adaptive", None), ("fixed", 16)])
def test_centroids_are_of_what_was_evicted(monkeypatch, block, heads, tmp_path):
    monkeypatch.setattr(corrections.kinds, "MEANS", torch.float32)
    chosen = policy("duoattention", tmp_path) if heads == "fixed" else get("keydiff")
    sharing = "adaptive" if heads == "adaptive" else "uniform"
    ids, mask = prompt()
    states = []
    for correction in ("moments", "centroids"):
        model = build(num_hidden_layers=2) if heads != "fixed" else build()
        fastkv.patch(model, chosen, small(heads=sharing), prefill_block=block, evict_every=EVERY, correction=correction)
        cache = FastKVCache(model)
        model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0), past_key_values=cache)
        for step in range(2 * EVERY + 1):
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            positions = mask.sum(-1, keepdim=True) - 1
            model(ids[:, step : step + 1], attention_mask=mask, position_ids=positions, past_key_values=cache)
        states.append(cache.layers[0].state)  # whose keys do not depend on the correction
        mask = mask[:, :50]
    moments, parts = states[0].moments, states[1].parts
    assert (moments.count > 0).all() and torch.equal(states[1].moments.count, moments.count)
    assert torch.equal(parts.count.sum(-1), moments.count.float())
    for rows, mean in ((parts.keys, moments.key_mean), (parts.values, moments.value_mean)):
        total = (parts.count[..., None] * rows).sum(2) / moments.count[..., None]
        torch.testing.assert_close(total, mean, atol=1e-4, rtol=1e-4)
    if heads == "uniform":
        assert ((parts.count > 0).sum(-1) == moments.count.clamp(max=4)).all()


def test_a_row_has_the_centroids_that_it_has_alone():
    """Far more padding than tokens, so that blocks of evicted tokens are filled very differently."""
    model, ids = distinct()
    fastkv.patch(model, "fastkv", Budget(tokens=14, sinks=2, recent=3), evict_every=3)
    batch, mask = rows_of(ids.repeat(4), (340, 40, 27), 340)
    _, cache = roll(model, batch, mask, ids[40:64].view(3, 8))
    for row in range(3):
        real = mask[row].bool()
        _, alone = roll(
            model, batch[row : row + 1, real], mask[row : row + 1, real], ids[40:64].view(3, 8)[row : row + 1]
        )
        for mine, own in zip(cache.layers[0].state.parts.tensors(), alone.layers[0].state.parts.tensors()):
            torch.testing.assert_close(mine[row], own[0], atol=1e-4, rtol=1e-4)


def test_room_for_everything_uses_no_centroid():
    model = build()
    ids, mask = prompt()
    want = generate(model, ids, mask, new=20)
    fastkv.patch(model, "fastkv", Budget(tokens=100, sinks=2, recent=4))
    found = generate(model, ids, mask, new=20, return_dict_in_generate=True)
    assert torch.equal(found.sequences, want)
    assert all(not layer.state.parts.count.any() for layer in found.past_key_values.layers)


@pytest.mark.parametrize("heads", [named("uniform", slow=True), "adaptive"])
def test_kernels_agree(heads):
    ids, mask = prompt(2, 40, (0, 7))
    found = []
    for backend in ("reference", "triton"):
        model = build(num_hidden_layers=1)
        fastkv.patch(model, "fastkv", small(heads=heads), prefill_block=16, evict_every=2, backend=backend)
        cache = FastKVCache(model)
        out = model(ids, attention_mask=mask, past_key_values=cache)
        found.append(out.logits[:, -1])
        for _ in range(3):
            mask_now = torch.ones(2, cache.get_seq_length() + 1, dtype=torch.long)
            mask_now[:, :40] = mask
            out = model(ids[:, :1], attention_mask=mask_now, past_key_values=cache)
        found.append(out.logits[:, -1])
    torch.testing.assert_close(found[0], found[2], atol=1e-4, rtol=0)
    torch.testing.assert_close(found[1], found[3], atol=1e-4, rtol=0)


# Bytes.


@settings(max_examples=examples(200))
@given(
    total=st.integers(3_000, 600_000),
    num_layers=st.integers(1, 5),
    heads=st.integers(1, 4),
    dim=st.sampled_from([8, 16, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    sharing=st.sampled_from(["uniform", "adaptive"]),
    layers=st.sampled_from(["uniform", "pyramid", (1.0, 2.0, 1.0, 3.0, 1.0)]),
    every=st.integers(1, 9),
)
def test_bytes_are_never_exceeded(total, num_layers, heads, dim, dtype, sharing, layers, every):
    """Of states as they are allocated; another token in every layer would not fit, up to a centroid if unequal."""
    layers = layers if isinstance(layers, str) else layers[:num_layers]
    budget = Budget(bytes=total, sinks=1, recent=2, heads=sharing, layers=layers)
    config = Config(get("fastkv"), budget, evict_every=every, correction=corrections.get("centroids"))
    like = torch.empty(1, heads, 0, dim, dtype=dtype, device="meta")

    def layout(tokens):
        return LayerPlan(config).layout(heads, torch.device("cpu"), tokens)

    def spent(tokens):
        return layout(tokens).allocate(like, like).nbytes()

    price = cost(like, like, layout)
    try:
        found = [budget.layer_tokens(layer, num_layers, 0, price) for layer in range(num_layers)]
    except FastKVError:
        assert layers != "uniform" or num_layers * spent(3) > total
        return
    rounding = 0 if layers == "uniform" else num_layers * heads * 4 * (2 * dim + 2)
    assert sum(map(spent, found)) <= total < sum(spent(one + 1) for one in found) + rounding


def test_centroids_take_a_sixteenth_of_the_pairs():
    model = build().bfloat16()
    fastkv.patch(model, "fastkv", Budget(tokens=1000), evict_every=EVERY)
    ids, mask = prompt()
    cache = model(ids, attention_mask=mask).past_key_values
    state = cache.layers[0].state
    pairs = 3 * 2 * 1000 * 2 * 16 * 2
    size = sum(part.nbytes for part in state.parts.tensors())
    assert 0.95 * pairs / 16 < size <= pairs / 16
    names = dict(state.named_tensors())
    assert {f"centroids.{name}" for name in ("count", "keys", "values", "spread")} <= names.keys()
    assert "moments.cross" not in names and state.nbytes() == sum(tensor.nbytes for tensor in names.values())


# What is done to a cache is done to them.


def continued(model, cache, ids, start):
    positions = torch.full((len(ids), 1), start)
    return torch.cat(
        [model(ids[:, i : i + 1], past_key_values=cache, position_ids=positions + i).logits for i in range(9)], 1
    )


def test_copies_forks_files_and_reset(tmp_path):
    model = fastkv.patch(build(), "fastkv", small(), evict_every=EVERY)
    ids, _ = prompt(2, 50, (0, 0))
    cache = model(ids).past_key_values
    before = [part.clone() for part in cache.layers[1].state.parts.tensors()]
    twin, forked = cache.clone(), cache.fork(2)
    cache.save(tmp_path / "cache")
    loaded = FastKVCache.load(tmp_path / "cache", model)
    want = continued(model, cache, ids, 50)
    assert torch.equal(continued(model, twin, ids, 50), want) and torch.equal(continued(model, loaded, ids, 50), want)
    rows = continued(model, forked, ids.repeat_interleave(2, 0), 50)
    torch.testing.assert_close(rows[::2], want, atol=1e-4, rtol=0)
    again = FastKVCache.load(tmp_path / "cache", model)
    for part, old in zip(again.layers[1].state.parts.tensors(), before):
        assert torch.equal(part, old)
    again.reorder_cache(torch.tensor([1, 0]))
    torch.testing.assert_close(continued(model, again, ids.flip(0), 50), want.flip(0), atol=1e-4, rtol=0)
    cache.reset()
    assert not any(part.any() for part in cache.layers[1].state.parts.tensors())
    model(ids, past_key_values=cache)
    assert torch.equal(continued(model, cache, ids, 50), want)


def test_files_of_something_else_are_refused(tmp_path):
    model = fastkv.patch(build(), "fastkv", small(), evict_every=EVERY)
    ids, _ = prompt(2, 50, (0, 0))
    model(ids).past_key_values.save(tmp_path / "cache")
    content = (tmp_path / "cache").read_bytes()

    def one_more(held):
        held["2.centroids.count"] = held["2.centroids.count"] + 1

    with pytest.raises(FastKVError, match="is damaged"):
        FastKVCache.load(rewritten(tmp_path / "forged", content, tensors=one_more), model)
    fastkv.patch(model, "fastkv", small(), evict_every=EVERY, correction="moments")
    with pytest.raises(FastKVError, match=r"was saved with correction=centroids, got correction=moments"):
        FastKVCache.load(tmp_path / "cache", model)


def test_a_module_changes_its_dtype_and_not_its_centroids():
    module = fresh("snapkv", correction="centroids")
    module(*tokens(60))
    before = [part.clone() for part in module.state.parts.tensors()]
    module.to(torch.bfloat16)
    assert module.state.exact.keys.dtype == torch.bfloat16
    for part, old in zip(module.state.parts.tensors(), before):
        assert part.dtype == old.dtype and torch.equal(part, old)
    other = fresh("snapkv", correction="centroids")
    other.load_state_dict(module.state_dict())
    for part, old in zip(other.state.parts.tensors(), before):
        assert torch.equal(part, old)
