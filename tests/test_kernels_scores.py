"""Score kernels against the reference in float64: at most twice the error of the same computation in its dtype."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkv import ops, reference
from fastkv.kernels import expected_attention, key_scores, leverage, noncausal_mass, pooling, slot_signals, z_scores
from fastkv.kernels.most_attended import most_attended
from fastkv.kernels.window_scores import observed_attention
from fastkv.reference import geometry
from fastkv.rotary import Rotary

from .conftest import examples
from .models import raises
from .pairwise import covering, named
from .states import sinks

# The interpreter truncates fp32 to bf16 where the GPU rounds; nothing here casts to bf16, so bf16 inputs are exact too.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MASKS = ("none", "left", "scattered", "one", "empty")
ANCHORS, DISTANCES = ("mean", "normalized_mean"), ("cosine", "dot", "euclidean")
pytestmark = pytest.mark.usefixtures("unwritten_is_nan")


def tokens(batch, heads, num, dim, dtype=torch.float32, seed=0, shift=0.0, size=1.0):
    """Keys or queries as Hugging Face makes them: a transposed view."""
    generator = torch.Generator().manual_seed(seed)
    return ((torch.randn(batch, num, heads, dim, generator=generator) + shift) * size).to(dtype).transpose(1, 2)


def make_mask(kind, batch, heads, num, seed=0):
    mask = torch.ones(batch, heads, num, dtype=torch.bool)
    if kind == "left":
        mask[-1, :, : (num + 2) // 3] = False
    elif kind == "scattered":
        mask = torch.rand(batch, heads, num, generator=torch.Generator().manual_seed(seed)) > 0.4
    elif kind == "one":
        mask[:] = False
        mask[..., num // 2] = True
    elif kind == "empty":
        mask[0] = False
    return None if kind == "none" else mask


def every(mask, keys):
    """The mask, all of the keys where there is none."""
    return torch.ones(keys.shape[:3], dtype=torch.bool) if mask is None else mask


def hide(keys, mask):
    return keys if mask is None else keys.masked_fill(~mask[..., None], float("nan"))


def close(got, specified, tiny=1e-6):
    """got is as near to the float64 result as the same-dtype torch computation, within a factor of two.

    Args: specified: the specification, as a function of the dtype that it computes in."""
    exact, plain = specified(torch.float64), specified(torch.float32)
    assert got.dtype == torch.float32 and got.isfinite().all()
    if exact.numel():
        allowed = 2 * (plain.double() - exact).abs().max() + tiny * (1 + exact.abs().max())
        assert (got.double() - exact).abs().max() <= allowed
    return got


# One problem of each kernel.


def rotary(dim, turned):
    """In halves, or half of the numbers, next to each other, within the head."""
    if turned == "halves":
        return Rotary(10000.0 ** -torch.linspace(0, 1, dim // 2))
    return Rotary(10000.0 ** -torch.linspace(0, 1, dim // 4), 1.3, True, -dim // 2 - 4)


def keydiff(batch=2, heads=2, num=37, dim=64, dtype=torch.float32, kind="left", seed=0, anchor="mean",
            distance="cosine", size=1.0, turned=None):  # fmt: skip
    keys, mask = tokens(batch, heads, num, dim, dtype, seed, size=size), make_mask(kind, batch, heads, num, seed)
    given, before = {"anchor": anchor, "distance": distance, "mask": mask}, {}
    if turned is not None:
        before = {"positions": every(mask, keys).cumsum(-1).int() + 700, "rotary": rotary(dim, turned)}
    got, real = key_scores.keydiff_scores(keys=hide(keys, mask), **given, **before), every(mask, keys)
    assert (got[~real] == 0).all()
    if turned is not None:
        keys = before["rotary"].unrotate(keys.float(), before["positions"])
    close(got, lambda to: torch.where(real, reference.keydiff_scores(keys.to(to), **given), 0), 3e-6)


def manifold(batch=2, heads=1, num=71, dim=64, dtype=torch.float32, kind="left", seed=0, window=None, metric="l2",
             shift=0.0, tiny=3e-6):  # fmt: skip
    keys, mask = tokens(batch, heads, num, dim, dtype, seed, shift), make_mask(kind, batch, heads, num, seed)
    got = key_scores.manifold_scores(keys=hide(keys, mask), window=window, metric=metric, mask=mask)
    close(got, lambda to: geometry.manifold_scores(keys.to(to), window, metric, mask=mask), tiny)


def window(batch=2, heads=1, groups=2, num=50, dim=64, dtype=torch.float32, kind="left", softcap=None, seed=0,
           asking=12, watched=8, mass=True, padding=True, size=1.0, scale=0.125, sink_logits=None):  # fmt: skip
    """The second row's first queries are padding; a query head of the first has evicted nothing."""
    generator, asking = torch.Generator().manual_seed(seed), min(asking, num)
    q = tokens(batch, heads * groups, asking, dim, dtype, seed + 1, size=size)
    keys = tokens(batch, heads, num, dim, dtype, seed + 2)
    valid = every(make_mask(kind, batch, heads, num, seed), keys).clone()
    valid[-1, :, num - asking : num - asking // 2 if padding else num - asking] = False
    valid[:, :, num - asking :] = valid[:, :1, num - asking :]  # of a block as of its first head
    positions = torch.rand(batch, 1, 2 * num, generator=generator).argsort(-1)[..., :num].to(torch.int32)
    positions = positions.repeat(1, heads, 1)
    log_mass = torch.randn(batch, heads * groups, asking, generator=generator) if mass else None
    if mass:
        log_mass[0, 0] = -float("inf")
    given = {"window": watched, "sink_logits": sink_logits}
    rest = positions, valid, scale, softcap
    got, queried = observed_attention(q, hide(keys, valid), *rest, **given, log_mass=log_mass)

    def specified(to):
        known = None if log_mass is None else log_mass.to(to)
        found, number = reference.observed_attention(q.to(to), keys.to(to), *rest, **given, log_mass=known)
        assert torch.equal(number, queried)
        return found

    close(got, specified)


def ahead(batch=2, heads=2, groups=2, num=45, dim=64, dtype=torch.float32, kind="left", seed=0, turned="halves",
          asking=37, ends=None):  # fmt: skip
    """ends: of what is real."""
    asking = min(num, asking)
    queries, keys = tokens(batch, heads * groups, asking, dim, dtype, seed), tokens(batch, heads, num, dim)
    valid = every(make_mask(kind, batch, heads, num, seed), keys) & (torch.arange(num) < (ends or num))
    positions = valid.cumsum(-1).int() - 1
    given = {"positions": positions, "valid": valid, "rotary": rotary(dim, turned), "horizon": 70, "sinks": 2}
    asked = valid[:, :1, -asking:] & (positions[:, :1, -asking:] >= 2)
    known = hide(queries, asked.expand(-1, heads * groups, -1))
    mean, covariance, count = expected_attention.queries_ahead(known, **given)
    assert torch.equal(count, asked.sum(-1, keepdim=True))
    close(mean, lambda to: reference.queries_ahead(queries.to(to), **given)[0], 3e-6)
    close(covariance, lambda to: reference.queries_ahead(queries.to(to), **given)[1], 3e-6)


def expected(batch=2, heads=2, groups=2, num=45, dim=64, dtype=torch.float32, kind="left", seed=0, size=1.0,
             scale=0.125):  # fmt: skip
    keys, generator = tokens(batch, heads, num, dim, dtype, seed, size=size), torch.Generator().manual_seed(1)
    values, count = tokens(batch, heads, num, dim + 16, dtype, seed + 1), torch.ones(batch, 1, 1, dtype=torch.int64)
    count[-1] = kind != "left"
    mean = torch.randn(batch, groups * heads, 1, dim, generator=generator)
    root = torch.randn(batch, groups * heads, dim, dim, generator=generator)
    covariance, valid = root @ root.mT / dim, every(make_mask(kind, batch, heads, num, seed), keys)
    memory = torch.where(torch.rand(valid.shape, generator=generator) < 0.5, 0.0, 0.25)
    rest = count, scale, 0.1, memory
    got = expected_attention.expected_attention(hide(keys, valid), values, mean, covariance, *rest, valid=valid)
    assert torch.equal(got > 0, torch.where(valid & (count > 0), True, memory > 0))
    known = lambda to: (keys, values, mean.to(to), covariance.to(to))  # noqa: E731
    close(got, lambda to: reference.expected_attention(*known(to), *rest, valid=valid))


def mass(batch=2, heads=1, groups=2, num=45, dim=64, dtype=torch.float32, kind="left", softcap=None, seed=0, chunk=16,
         sink_logits=None, size=1.0, scale=0.125):  # fmt: skip
    q = tokens(batch, heads * groups, num, dim, dtype, seed, size=size)
    keys = tokens(batch, heads, num, dim, dtype, seed + 1)
    given = {"softcap": softcap, "mask": make_mask(kind, batch, heads, num, seed), "sink_logits": sink_logits}
    keys_given = hide(keys, given["mask"])
    got = noncausal_mass.noncausal_attention_mass(q=q, keys=keys_given, scale=scale, chunk=chunk, **given)
    close(got, lambda to: geometry.noncausal_attention_mass(q.to(to), keys.to(to), scale, chunk, **given))


def pooled(batch=2, heads=2, num=75, dim=64, dtype=torch.float32, kind="left", seed=0, pool=5):
    """Slots come in any order before the block."""
    draw = torch.Generator().manual_seed(seed)
    valid = every(make_mask(kind, batch, heads, num, seed), tokens(batch, heads, num, dim, dtype))
    scores, positions = torch.rand(batch, heads, num, generator=draw), torch.randperm(num, generator=draw).int()
    rest, real = (pool, positions.expand(batch, heads, -1).contiguous(), valid), valid.float()
    for mean in ("pool_scores", "chunk_mean"):
        found = getattr(pooling, mean)(scores.masked_fill(~valid, torch.nan), *rest) * real
        close(found.nan_to_num(0), lambda to, mean=mean: getattr(reference, mean)(scores.to(to), *rest) * real)


def attended(batch=2, heads=2, groups=3, num=75, dim=64, dtype=torch.float32, kind="none", softcap=None, seed=0):
    """Keys are not masked here."""
    q, keys = tokens(batch, heads * groups, 70, dim, dtype, seed), tokens(batch, heads, num, dim, dtype, seed + 1)
    lse = 4 + torch.randn(batch, heads * groups, 70, generator=torch.Generator().manual_seed(2))
    lse[-1, :, 60:] = torch.inf  # padding
    got = most_attended(q, keys, lse, 0.125, softcap)
    tiny = 1e-6 if dtype == torch.float32 else dim * 2**-23  # tensor cores cut off what they add, 16 products at a time
    close(got, lambda to: reference.most_attended(q.to(to), keys.to(to), lse.to(to), 0.125, softcap), tiny)


def lever(batch=2, heads=2, num=90, dim=64, dtype=torch.float32, kind="left", seed=0, size=8, method="cholesky",
          centre=False, shift=1.0, tiny=1e-4):  # fmt: skip
    keys, mask = tokens(batch, heads, num, dim, dtype, seed, shift), make_mask(kind, batch, heads, num, seed)
    sketch = geometry.sketch_matrix(dim, size, kind="srht" if method == "srht" else "gaussian")
    got = leverage.sketched_leverage(hide(keys, mask), sketch, mask=mask, centre=centre)
    close(got, lambda to: geometry.leverage_scores(keys.to(to), size, method, mask=mask, centre=centre), tiny)


OF_KEYS, OF_QUERIES = (keydiff, manifold, lever, pooled), (window, ahead, expected, mass, attended)
each_kernel = pytest.mark.parametrize("kernel", (*OF_KEYS, *OF_QUERIES), ids=lambda kernel: kernel.__name__)
SOFTCAPS = st.sampled_from([None, 3.0])
TURNED = st.sampled_from([None, "halves", "part"])
OWN = {  # what else is drawn for a kernel
    keydiff: {"anchor": st.sampled_from(ANCHORS), "distance": st.sampled_from(DISTANCES), "turned": TURNED},
    manifold: {"window": st.none() | st.integers(1, 22), "metric": st.sampled_from(geometry.METRICS)},
    window: {"asking": st.integers(1, 9), "watched": st.none() | st.integers(1, 6), "softcap": SOFTCAPS}
    | dict.fromkeys(("mass", "padding"), st.booleans()),
    ahead: {"turned": st.sampled_from(["halves", "part"])},
    expected: {},
    mass: {"chunk": st.integers(1, 22), "softcap": SOFTCAPS},
    pooled: {"pool": st.sampled_from([1, 3, 5])},
    attended: {"softcap": SOFTCAPS},
}


# All of them.


@pytest.mark.parametrize(
    "kernel, groups, dtype",
    covering(OF_QUERIES, [3, 8], DTYPES[1:], where=lambda kernel, groups, dtype: kernel != expected or groups != 8),
)
def test_groups(kernel, groups, dtype):
    kernel(groups=groups, dtype=dtype)


@pytest.mark.parametrize("dim", [named(dim, slow=dim in (96, 128, 256)) for dim in (16, 80, 96, 128, 256, 512)])
@each_kernel
def test_head_dims(kernel, dim):
    heads = 2 if dim < 512 else 1  # a minute less where compiled code is executed
    kernel(batch=1, heads=heads, num=65 if kernel in OF_KEYS else 40, dim=dim, dtype=torch.float16, kind="none")


@pytest.mark.parametrize("kind", MASKS)
@each_kernel
def test_masks(kernel, kind):
    kernel(kind=kind)
    if "softcap" in OWN.get(kernel, ()):
        kernel(kind=kind, softcap=3.0)


@pytest.mark.parametrize("kernel", OWN, ids=lambda kernel: kernel.__name__)
@settings(max_examples=examples(200), deadline=None)
@given(
    groups=st.sampled_from([1, 2, 3, 7]), num=st.integers(1, 20), kind=st.sampled_from(MASKS),
    dtype=st.sampled_from([torch.float32, torch.float16]), seed=st.integers(0, 10**6), data=st.data(),
)  # fmt: skip
def test_any_case(kernel, groups, num, kind, dtype, seed, data):
    own = data.draw(st.fixed_dictionaries(OWN[kernel]))
    if kernel in OF_QUERIES:
        own["groups"] = groups
    if kernel in (mass, window):
        own["sink_logits"] = data.draw(sinks(groups))
    kernel(batch=1, heads=1, num=num, dim=16, kind=kind, dtype=dtype, seed=seed, **own)


# KeyDiff and ManifoldKV


@pytest.mark.parametrize(
    "distance, anchor, dtype, turned", covering(DISTANCES, ANCHORS, DTYPES, [None, "halves", "part"], together=1)
)
def test_keydiff(anchor, distance, dtype, turned):
    keydiff(anchor=anchor, distance=distance, dtype=dtype, turned=turned)


@pytest.mark.parametrize("width, metric, dtype", covering([None, 16, 30, 500], geometry.METRICS, DTYPES, together=1))
def test_manifold(metric, width, dtype):
    manifold(window=width, metric=metric, dtype=dtype)


def test_splits_of_the_keys(monkeypatch):
    monkeypatch.setattr(key_scores, "LEAST_ROWS", 64)
    monkeypatch.setattr(leverage, "LEAST_ROWS", 64)
    for kind in ("none", "left"):
        keydiff(1, 2, 300, kind=kind, anchor="normalized_mean")
        for width in (None, 140):
            manifold(1, 2, 300, kind=kind, window=width)
        for centre in (False, True):
            lever(1, 2, 300, kind=kind, centre=centre, shift=0.0)


def test_far_from_zero_nothing_cancels():
    """|k|^2 - 2 k.mu + |mu|^2 in fp32 would be wrong in the second digit here."""
    manifold(1, 1, 90, kind="none", shift=3000.0, tiny=1e-4)  # the mean itself rounds at 3000
    keydiff(1, 1, 90, kind="none", size=1e4)


# SnapKV and TOVA


@pytest.mark.parametrize("asking, num, watched", [(1, 1, 1), (1, 130, 32), (7, 7, 32), (40, 200, None), (90, 90, 33)])
def test_window_sizes(asking, num, watched):
    """TOVA is a window of one query, H2O watches all; several tiles of rows are fine."""
    window(batch=1, groups=3, asking=asking, num=num, watched=watched, padding=asking > 1)
    window(groups=3, asking=asking, num=num, watched=watched, mass=False, padding=False)
    window(groups=3, asking=asking, num=num, watched=watched, kind="scattered", sink_logits=torch.randn(3))


def test_queries_ahead_in_the_tiles_of_sm_80(monkeypatch):
    monkeypatch.setattr(expected_attention, "chip_of", lambda device: "80")
    ahead(1, 1, 1, dim=128, dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", MASKS)
def test_queries_ahead_of_several_stretches(kind):
    """Programs share the queries of a head; what they add up is turned together."""
    ahead(1, 2, 2, 560, 32, kind=kind, asking=2 * expected_attention.STRETCH + 9)
    ahead(1, 2, 2, 560, 32, kind=kind, asking=2 * expected_attention.STRETCH + 9, ends=200)


@pytest.mark.parametrize("size", [1e3, 1e4])
def test_huge_logits(size):
    window(size=size, mass=False)
    mass(num=50, size=size, chunk=20, kind="none")
    expected(batch=1, heads=1, num=40, kind="none", size=30.0)


def test_window_splits_of_the_keys(monkeypatch):
    monkeypatch.setattr("fastkv.kernels.window_scores.LEAST_KEYS", 64)
    window(num=200)


def test_window_with_everything_visible():
    q, keys = tokens(2, 4, 6, 64), tokens(2, 2, 45, 64, seed=1)
    for pool in (1, 7):
        wanted = reference.window_scores(q.double(), keys.double(), 0.125, pool)
        got = ops.window_scores(q, keys, 0.125, pool, backend="triton")
        torch.testing.assert_close(got.double(), wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", MASKS)
def test_weights_of_several_tiles(kind, monkeypatch):
    monkeypatch.setattr(expected_attention, "KEYS", 4)
    expected(2, 1, num=150, dim=16, kind=kind)


@pytest.mark.parametrize("kind", MASKS)
def test_z_scores(kind, monkeypatch):
    monkeypatch.setattr(z_scores, "BLOCK", 32)
    scores = torch.randn(3, 2, 2, 75, generator=torch.Generator().manual_seed(0)) + 5
    scores[1] = 0.3  # all equal
    scores[2] *= 1e4
    mask = every(make_mask(kind, 2, 2, 75), scores[0])
    got = z_scores.z_scores(scores.masked_fill(~mask, float("nan")), mask)
    close(got, lambda to: reference.z_scores(scores.to(to), mask), 3e-6)
    assert (got[~mask.expand_as(got)] == 0).all()


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("given", [(), ("expected",), ("reread",), ("expected", "reread")])
def test_sum_of_z_scores(given, kind, monkeypatch):
    """Of what is known only in part, too, or of no token of a head."""
    monkeypatch.setattr(z_scores, "BLOCK", 32)
    unlike, *known = torch.randn(3, 2, 2, 275, generator=torch.Generator().manual_seed(0))
    unlike, (expected, reread) = unlike - 3, (one.clamp(min=0) for one in known)
    expected[1, 1] = reread[0, 1] = 0.0
    valid = every(make_mask(kind, 2, 2, 275), unlike)
    scores = unlike, *(one if name in given else None for name, one in (("expected", expected), ("reread", reread)))

    got = z_scores.needed_scores(*(one if one is None else one.masked_fill(~valid, torch.nan) for one in scores), valid)
    close(got, lambda to: reference.needed_scores(*(one if one is None else one.to(to) for one in scores), valid), 3e-6)
    assert (got[~valid] == 0).all()


@pytest.mark.parametrize("few", [0, 4096])
@pytest.mark.parametrize("kind", MASKS)
def test_order(kind, few, monkeypatch):
    monkeypatch.setattr(slot_signals, "FEW", few)
    monkeypatch.setattr(slot_signals, "BLOCK", 64)
    draw = torch.Generator().manual_seed(0)
    positions = torch.stack([torch.randperm(150, generator=draw) for _ in range(4)]).int().view(2, 2, 150)
    chosen, but = every(make_mask(kind, 2, 2, 150), positions), torch.rand(2, 2, 150, generator=draw) > 0.5
    for skipped in (None, but):
        meant = chosen if skipped is None else chosen & ~skipped
        got, counts = slot_signals.in_order(positions, chosen, skipped)
        assert torch.equal(got, reference.in_order(positions, meant)) and torch.equal(counts, meant.sum(-1))


# Compactor


@pytest.mark.parametrize("kind, sizes", covering(MASKS, [(70, 64), (200, 256), (140, 512)], together=1))
def test_mass_in_two_passes(kind, sizes, monkeypatch):
    monkeypatch.setattr(noncausal_mass, "ON_CHIP", 0)
    mass(num=150, dim=sizes[1], chunk=sizes[0], kind=kind)
    mass(1, 1, num=14, dim=16, chunk=5, kind=kind, softcap=2.0, sink_logits=torch.tensor([-torch.inf, 1.0]))


@pytest.mark.parametrize("num, chunk", [(75, 7), (75, 1000), (300, 256), (300, 280)])
def test_chunks(num, chunk):
    mass(1, groups=1, num=num, chunk=chunk, softcap=3.0)


@pytest.mark.parametrize("centre", [False, True])
def test_leverage_of_equal_and_nearly_equal_keys(centre):
    """Centred, nothing is left but rounding: no score may explode."""
    keys = tokens(1, 1, 1, 64).expand(1, 1, 80, 64).contiguous()
    score = leverage.sketched_leverage(keys, geometry.sketch_matrix(64, 16), centre=centre)
    assert score.isfinite().all() and score.max() < 0.05
    if centre:  # what rounding leaves of 16 coordinates, at most an ulp each, against the ridge of 1e-12 per key
        left = 16 * torch.finfo(torch.float32).eps ** 2
        assert score.sum() <= left / (left + 1e-12)
    else:
        torch.testing.assert_close(score.sum(), torch.tensor(1.0), atol=1e-4, rtol=0)
    lever(1, 1, 200, kind="none", centre=True, shift=1000.0, tiny=5e-3)


@pytest.mark.parametrize(
    "dim, size, method, dtype, centre",
    [(80, 64, "srht", torch.float16, False), (128, 64, "srht", torch.float16, False),
     (256, 100, "cholesky", torch.float16, False), (512, 64, "srht", torch.float16, False),
     (128, 100, "cholesky", torch.float32, True), (256, 64, "cholesky", torch.float32, False)],
)  # fmt: skip
def test_leverage_of_wide_sketches(dim, size, method, dtype, centre):
    num, shift = 150 if dtype == torch.float16 else 70, 3.0 * centre
    lever(1, 2, num, dim, dtype, "none", size=size, method=method, centre=centre, shift=shift)


@pytest.mark.parametrize("num, rank", [(5, 64), (1, 64), (200, 3), (200, 0)])
def test_leverage_survives_rank_deficiency(num, rank):
    keys = tokens(1, 2, num, 64, seed=1)
    if rank < 64:
        keys = keys[..., :rank] @ tokens(1, 1, rank, 64, seed=2)[0, 0] if rank else torch.zeros(1, 2, num, 64)
    score = leverage.sketched_leverage(keys, geometry.sketch_matrix(64, 32))
    assert score.isfinite().all() and score.min() >= 0 and score.max() < 1 + 1e-3
    torch.testing.assert_close(score.sum(-1), torch.full((1, 2), float(min(num, rank, 32))), atol=1e-4, rtol=0)


@settings(max_examples=examples(200), deadline=None)
@given(
    num=st.integers(1, 40), size=st.integers(1, 16), kind=st.sampled_from(MASKS),
    method=st.sampled_from(["cholesky", "srht"]), centre=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16]), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_leverage_any_case(num, size, kind, method, centre, dtype, seed):
    keys, mask = tokens(1, 2, num, 16, dtype, seed), make_mask(kind, 1, 2, num, seed)
    sketch = geometry.sketch_matrix(16, size, kind="srht" if method == "srht" else "gaussian")
    got = leverage.sketched_leverage(hide(keys, mask), sketch, mask=mask, centre=centre)
    exact = geometry.leverage_scores(keys.double(), None if size >= 16 else size, method, mask=mask, centre=centre)
    real = num if mask is None else int(mask.sum(-1).min())
    assert got.isfinite().all() and got.min() >= 0
    # Fewer keys than directions leave the ridge in charge of the rest; compare where the Gram matrix is regular.
    if size < 16 and real > 4 * size:
        assert (got - exact).abs().max() < 1e-3


levers = leverage.sketched_leverage


@pytest.mark.parametrize(
    "match, kernel, given",
    [("metric must be one of", key_scores.manifold_scores, {"metric": "l7"}),
     ("at most 128 columns", levers, {"sketch": torch.ones(128, 256)}),
     ("at most 64 columns for torch.float32 of size 256", levers, {"sketch": torch.ones(256, 65)}),
     ("at most 64 columns for torch.float16 of size 512", levers, {"sketch": torch.ones(512, 65)})],
)  # fmt: skip
def test_what_is_refused(match, kernel, given):
    dim = len(given.get("sketch", range(16)))
    raises(match, kernel, keys=tokens(1, 1, 4, dim, torch.float16 if dim == 512 else torch.float32), **given)


def test_z_scores_refuse_a_mask_of_another_shape():
    mask = torch.ones(1, 2, 5, dtype=torch.bool)
    raises(r"unlike must have shape \[3, 1, 2, 5\]", z_scores.z_scores, torch.zeros(3, 2, 2, 5), mask)
