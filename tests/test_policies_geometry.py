"""ManifoldKV, leverage, non-causal attention, Compactor and KNorm: against brute force, and what must not matter.

Brute force is one token at a time in float64, over the valid tokens of one head, in order of position.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from transformers.models.llama import modeling_llama

from fastkv import ops
from fastkv.integrations.transformers import rotations
from fastkv.policies.compactor import Compactor, Leverage, NonCausal
from fastkv.policies.keys import KeyDiff, KNorm, Manifold, WindowedManifold
from fastkv.reference import Moments
from fastkv.reference.geometry import sketch_matrix
from fastkv.reference.scores import z_scores
from fastkv.rotary import Rotary
from tests.models import build

from .states import changed, make_signals, randn
from .test_no_sync import Crossings

F64 = torch.float64
DIM = 8
FREQUENCIES = {dim: 10000.0 ** -(torch.arange(dim // 2) / (dim // 2)) for dim in (DIM, 16)}
ROTARY = Rotary(FREQUENCIES[DIM])
PLAIN = Rotary(torch.zeros(DIM // 2))  # turns nothing
NAN = float("nan")

POLICIES = {
    **{f"keydiff-{anchor}": KeyDiff(anchor) for anchor in ("mean", "normalized_mean", "median", "pairwise")},
    **{f"keydiff-{distance}": KeyDiff(distance=distance) for distance in ("dot", "euclidean")},
    "knorm": KNorm(), "manifold": Manifold(), "manifold-l1": Manifold(metric="l1"),
    "manifold-linf": Manifold(metric="linf"), "manifold-cosine": Manifold(metric="cosine"),
    "manifold-windowed": WindowedManifold(window=4), "manifold-windowed-paper": WindowedManifold(),
    "leverage": Leverage(sketch=4), "leverage-seed": Leverage(sketch=4, seed=7),
    "leverage-srht": Leverage(sketch=4, method="srht"), "leverage-qr": Leverage(sketch=3, method="qr"),
    "leverage-svd": Leverage(sketch=None, method="svd"), "leverage-eig": Leverage(sketch=5, method="eig"),
    "leverage-exact": Leverage(method="exact"), "leverage-centred": Leverage(sketch=4, centred=True),
    "noncausal": NonCausal(chunk=4, pool=3), "noncausal-unpooled": NonCausal(chunk=5, pool=1),
    "noncausal-scaled": NonCausal(chunk=5, pool=5, scaled=True),
    "noncausal-pooled-alone": NonCausal(chunk=5, pool=3, values_first=False),
    "compactor": Compactor(chunk=4, pool=3, sketch=4),
    "compactor-seed": Compactor(chunk=4, pool=3, sketch=4, method="qr", seed=5),
    "compactor-centred": Compactor(chunk=6, pool=3, sketch=4, scaled=True, values_first=False, centred=True),
    "compactor-paper": Compactor(),
}  # fmt: skip
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
both_times = pytest.mark.parametrize("decoding", [False, True], ids=["prompt", "decode"])


def made(held=9, new=11, batch=2, heads=2, seed=0, decoding=False, pads=(0, 3), holes=(2, 0), dtype=None, dim=DIM):
    """Signals with `held` retained tokens in random order and a block of `new`.

    The block of row b starts with pads[b] padding tokens, its last holes[b] slots are empty; both hold NaN. While
    decoding there is no block: the `new` tokens were generated one by one and have no memory."""
    num = held + new
    keys, values = randn(batch, heads, num, dim, seed=seed), randn(batch, heads, num, dim, seed=seed + 1)
    queries = 2 * randn(batch, 2 * heads, new, dim, seed=seed + 2)
    memory = randn(batch, heads, num, seed=seed + 3).abs() + 0.1
    memory[..., held:] = 0
    memory[..., : held // 4] = 0  # retained, but generated
    positions = torch.zeros(batch, heads, num, dtype=torch.int32)
    valid = torch.ones(batch, heads, num, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            order = torch.randperm(2 * held, generator=torch.Generator().manual_seed(seed + 10 * b + h))
            positions[b, h, :held] = order[:held]
        positions[b, :, held:] = 2 * held + (torch.arange(new) - pads[b]).clamp(min=-1)
        valid[b, :, held : held + pads[b]] = False
        valid[b, :, held - holes[b] : held] = False
        queries[b, :, : pads[b]] = NAN
    keys, values = (torch.where(valid[..., None], x, NAN) for x in (keys, values))
    keys, values, queries = (x.to(dtype or torch.float32) for x in (keys, values, queries))
    moments, memory = Moments.empty(batch, heads, dim, dim, "cpu"), torch.where(valid, memory, NAN).float()
    return make_signals(
        keys=keys, values=values, positions=positions, valid=valid, moments=moments, scale=0.4, layer=3,
        decoding=decoding, queries=None if decoding else queries, memory=memory, rotary=Rotary(FREQUENCIES[dim]),
        backend="reference",
    )  # fmt: skip


def scored(policy, signals):
    """Scores as the flow asks for them: first what to remember, then the score."""
    if "memory" in policy.needs:
        signals = changed(signals, memory=policy.remember(signals))
    return policy.score(signals)


def kept(scores, signals, tokens=6):
    """Positions that `ops.select` keeps, as one sorted list per (row, head)."""
    chosen = ops.select(scores, signals.positions, signals.valid, torch.zeros_like(signals.valid), tokens).kept
    rows = zip(chosen.flatten(0, 1), signals.positions.flatten(0, 1))
    return [sorted(positions[keep].tolist()) for keep, positions in rows]


def brute_kept(scores, signals, tokens):
    """The same by sorting: larger score first, then lower position."""
    lists = []
    for row, positions, valid in zip(*(x.flatten(0, 1).tolist() for x in (scores, signals.positions, signals.valid))):
        order = sorted((-score, position) for score, position, real in zip(row, positions, valid) if real)
        lists.append(sorted(position for _, position in order[:tokens]))
    return lists


def brute_head(policy, signals, b, h, index):
    """Scores of the tokens `index` of one head, in order of position."""
    keys = signals.keys[b, h, index].double()
    if isinstance(policy, KNorm):
        return torch.stack([-sum(x * x for x in k).sqrt() for k in keys])
    if isinstance(policy, KeyDiff):
        return brute_keydiff(keys, policy.anchor, policy.distance)
    if isinstance(policy, Manifold):
        return brute_manifold(keys, policy.window or len(index), policy.metric)
    if not isinstance(policy, NonCausal):
        return brute_leverage(keys, signals.positions[b, h, index].double(), policy)
    mass = brute_noncausal(policy, signals, b, h, index)
    if not isinstance(policy, Compactor):
        return mass
    other = brute_leverage(keys, signals.positions[b, h, index].double(), policy)
    return brute_z(mass) + policy.blend * brute_z(other)


def brute(policy, signals, of_head=brute_head):
    """[B, Hkv, N] float64, 0 where not valid; of_head: scores of the tokens of one head, in order of position."""
    out = torch.zeros(signals.valid.shape, dtype=F64)
    for b, h in itertools.product(*map(range, out.shape[:2])):
        index = [i for i in range(out.shape[2]) if signals.valid[b, h, i]]
        index.sort(key=lambda i: int(signals.positions[b, h, i]))
        if index:
            out[b, h, index] = torch.as_tensor(of_head(policy, signals, b, h, index), dtype=F64)
    return out


def brute_keydiff(keys, anchor, distance):
    unit = keys / keys.norm(dim=-1, keepdim=True)
    if anchor == "pairwise":
        return torch.stack([-sum(one @ other for other in unit) for one in unit])
    center = {"mean": sum(keys) / len(keys), "normalized_mean": sum(unit) / len(unit), "median": keys.median(0).values}
    if distance == "euclidean":
        return torch.stack([(center[anchor] - k).norm() for k in keys])
    length = center[anchor].norm() if distance == "cosine" else 1
    return torch.stack([-(center[anchor] / length) @ k for k in (unit if distance == "cosine" else keys)])


def brute_manifold(keys, window, metric):
    out = []
    for i, k in enumerate(keys):
        near = keys[i // window * window :][:window]
        mean = sum(near) / len(near)
        gap, norms = k - mean, max(float(k.norm() * mean.norm()), 1e-12)
        value = {"l2": gap.norm(), "l1": gap.abs().sum(), "linf": gap.abs().max(), "cosine": 1 - k @ mean / norms}
        out.append(value[metric])
    return torch.stack(out)


def brute_leverage(keys, positions, policy):
    turn = torch.exp(-1j * positions[:, None] * ROTARY.frequencies.double())
    turned = torch.complex(keys[:, : DIM // 2], keys[:, DIM // 2 :]) * turn
    rows = torch.cat([turned.real, turned.imag], -1)
    if policy.centred:
        rows = rows - sum(rows) / len(rows)
    if policy.method != "exact" and policy.sketch is not None and policy.sketch < DIM:
        kind = "srht" if policy.method == "srht" else "gaussian"
        rows = rows @ sketch_matrix(DIM, policy.sketch, torch.Generator().manual_seed(policy.seed), kind=kind).double()
    gram = rows.T @ rows
    if policy.method in ("cholesky", "srht"):
        gram = gram + 1e-6 * gram.trace() / len(gram) * torch.eye(len(gram), dtype=F64)  # the documented ridge
        return torch.stack([x @ torch.linalg.inv(gram) @ x for x in rows])
    return torch.stack([x @ torch.linalg.pinv(gram, rtol=1e-10) @ x for x in rows])


def brute_noncausal(policy, signals, b, h, index):
    memory = {i: float(signals.memory[b, h, i]) for i in index}
    if signals.queries is not None:
        start = signals.keys.shape[2] - signals.queries.shape[2]
        block = [i for i in index if i >= start]
        groups = signals.queries.shape[1] // signals.keys.shape[1]
        mass = dict.fromkeys(block, 0.0)
        for first in range(0, len(block), policy.chunk):
            members = block[first : first + policy.chunk]
            for g in range(groups):
                for i in members:
                    q = signals.queries[b, h * groups + g, i - start].double()
                    scale = signals.layer.scale if policy.scaled else 1.0
                    logits = [scale * float(q @ signals.keys[b, h, j].double()) for j in members]
                    if policy.scaled and signals.layer.softcap is not None:
                        logits = [signals.layer.softcap * math.tanh(x / signals.layer.softcap) for x in logits]
                    total = sum(math.exp(x) for x in logits)
                    for j, x in zip(members, logits):
                        mass[j] += math.exp(x) / total / groups
        for rank, i in enumerate(block):
            near = block[max(0, rank - policy.pool // 2) : rank + policy.pool // 2 + 1]
            size = {j: float(signals.values[b, h, j].double().norm()) for j in near}
            if policy.values_first:
                memory[i] = sum(mass[j] * size[j] for j in near) / len(near)
            else:
                memory[i] = sum(mass[j] for j in near) / len(near) * size[i]
    known = [m for m in memory.values() if m > 0]
    mean = sum(known) / len(known) if known else 0.0
    return torch.tensor([memory[i] or mean for i in index], dtype=F64)


def brute_z(scores):
    mean = sum(scores) / len(scores)
    std = (sum((x - mean) ** 2 for x in scores) / len(scores)).sqrt()
    return torch.stack([(x - mean) / std if std > 1e-9 else 0 * x for x in scores])


@each_policy
@both_times
@pytest.mark.parametrize("seed", [0, 2])
def test_score_and_kept_set_equal_brute_force(policy, decoding, seed):
    """Of each row as if it were alone, whatever is padding or empty beside its tokens, in whichever slots these are."""
    signals = made(seed=seed, decoding=decoding, pads=(0, 3 + seed), holes=(2, seed))
    got, expected = scored(policy, signals), brute(policy, signals)
    assert got.dtype == torch.float32 and got.shape == signals.valid.shape
    torch.testing.assert_close(torch.where(signals.valid, got, 0), expected.float())
    for tokens in (1, 5, 12):
        assert kept(got, signals, tokens) == brute_kept(expected, signals, tokens)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("policy", [NonCausal(chunk=4, pool=3), Compactor(chunk=4)], ids=lambda p: p.name)
def test_softcap_reaches_scaled_attention(policy, scaled):
    policy, signals = replace(policy, scaled=scaled), changed(made(), softcap=0.5)
    expected = brute(policy, signals)
    torch.testing.assert_close(torch.where(signals.valid, scored(policy, signals), 0), expected.float())
    assert torch.allclose(expected, brute(policy, made())) != scaled


@each_policy
@both_times
def test_few_and_equal_tokens_have_finite_scores(policy, decoding):
    signals = made(decoding=decoding)
    same = {f: torch.ones_like(getattr(signals, f)) for f in ("keys", "values")}
    memory = torch.full_like(signals.memory, DIM**0.5)  # what such a token is remembered with: mass 1, this norm
    equal = changed(signals, **same, memory=memory, rotary=PLAIN)
    for scores, real in zip(scored(policy, equal).flatten(0, 1), equal.valid.flatten(0, 1)):
        torch.testing.assert_close(scores[real], scores[real][:1].expand_as(scores[real]))
    for tokens in (0, 1, 2):
        few = torch.zeros_like(signals.valid)
        few[:, :, -tokens or 20 :] = True
        scores = scored(policy, changed(signals, valid=few & signals.valid))
        assert scores[few & signals.valid].isfinite().all()


def test_a_sketch_is_sent_to_a_device_once():
    """Then an eviction copies nothing from the host, and can be captured; whoever changes a sketch changes no other."""
    keys, seen = randn(1, 1, 30, DIM), set()
    for moved in (keys.to("meta", torch.float32), keys.to("meta", torch.bfloat16)):
        for seed in (11, 11, 12, 11):
            with Crossings() as crossings:
                made = ops.sketch.__wrapped__(moved, 4, "cholesky", seed)
            assert made.shape == (DIM, 4) and made.dtype == torch.float32 and made.device == moved.device
            first = moved.dtype == torch.float32 and seed not in seen
            assert bool(crossings.found) == first
            seen.add(seed)
    expected = sketch_matrix(DIM, 4, torch.Generator().manual_seed(11))
    for _ in range(2):
        made = ops.sketch(keys, 4, "cholesky", 11)
        assert torch.equal(made, expected)
        made.zero_()


def test_a_block_is_remembered_and_what_was_known_stays():
    policy, signals = NonCausal(chunk=4, pool=1), made(pads=(0, 3))
    signals.values[0, 0, 12] = 0
    memory = policy.remember(signals)
    assert torch.equal(memory[..., :9].nan_to_num(-1), signals.memory[..., :9].nan_to_num(-1))
    assert (memory[..., 9:][signals.valid[..., 9:]] > 0).all() and (memory[..., 9:][~signals.valid[..., 9:]] == 0).all()
    assert policy.score(changed(signals, memory=memory))[0, 0, 12] < 1e-30  # known to be worthless, not unknown
    later = changed(signals, memory=memory, queries=None, decoding=True)
    assert torch.equal(policy.remember(later).nan_to_num(-1), memory.nan_to_num(-1))


@pytest.mark.parametrize("value", [0.0, 1 / 3, -1e6, 1e-20])
def test_a_constant_vector_has_z_0_also_with_rounding_noise(value):
    mask = torch.ones(1, 2, 50, dtype=torch.bool)
    constant = torch.full((1, 2, 50), value)
    noise = constant * (1 + 3e-7 * randn(1, 2, 50).float())
    assert (z_scores(constant, mask) == 0).all() and (z_scores(noise, mask) == 0).all()
    assert (z_scores(randn(1, 2, 1), mask[..., :1]) == 0).all()
    assert (z_scores(randn(1, 2, 50), torch.zeros_like(mask)) == 0).all()


def test_fewer_tokens_than_columns_all_have_leverage_1_and_the_ridge_does_not_show():
    signals = made(held=2, new=4, batch=1, pads=(0,), holes=(0,))
    assert torch.equal(scored(Compactor(sketch=None), signals), z_scores(scored(NonCausal(), signals), signals.valid))


ROPE = {
    "default": {}, "linear": {"factor": 2.0}, "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128},
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPE)
def test_keys_of_llama_are_unrotated(kind):
    """Keys that transformers rotated come back, left padding and long texts included."""
    model = build("llama", rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **ROPE[kind]})
    assert (rotations(model, [0])[0].scaling != 1) == (kind == "yarn")
    keys = randn(2, 2, 9, 16).float()
    position = torch.arange(9) + torch.tensor([[0], [3000]])
    cos, sin = model.model.rotary_emb(keys, position)
    _, rotated = modeling_llama.apply_rotary_pos_emb(keys, keys, cos, sin)
    assert not torch.allclose(rotated, keys, atol=0.1)
    signals = changed(made(), keys=rotated, positions=position[:, None].expand(-1, 2, -1).int())
    torch.testing.assert_close(changed(signals, rotary=rotations(model, [1])[1]).pre_rope_keys, keys)
