"""What each correction remembers of evicted tokens, mixes into attention and costs, by its name."""

import re

import pytest
import torch

from fastkv import Budget, corrections
from fastkv.cache.layout import LayerPlan, cost
from fastkv.config import Config
from fastkv.corrections import Shape
from fastkv.policies import get
from fastkv.reference import Centroids, Moments

from .models import raises
from .states import make_spec, make_state

B, HKV, D, DV = 2, 3, 16, 8
NAMES = corrections.names()
SHARES = {"centroids": 16}  # of the bytes of the pairs, one of so many
MIXED_IN = {  # order of the moments, another class, or nothing
    "none": None, "mean": 0, "moments": 1, "centroids": Centroids, "matching": None, "vector": None,
    "vector+mean": 0, "vector+moments": 1,
}  # fmt: skip


def state_of(name, order=1):
    """A state that remembers what the correction asks for, and no less than moments of the given order."""
    correction, rows = corrections.get(name), torch.randn(B, HKV, 5, D)
    values = rows[..., :DV]
    moments = Moments.empty(B, HKV, D, DV, order=order).add(rows, values)
    parts = correction.empty(B, Shape(HKV, D, DV, 4), 40, rows.device)
    return make_state(rows, values, torch.full((B, HKV), 5), moments=moments, parts=parts)


def layout(name, tokens, heads=HKV, slope=False):
    budget, backend = Budget(tokens=tokens, sinks=1, recent=2), "triton" if slope else "auto"
    config = Config(get("keydiff"), budget, correction=corrections.get(name), backend=backend)
    return LayerPlan(config).layout(heads, torch.device("cpu"), tokens)


def test_all_are_known_by_name():
    assert list(MIXED_IN) == NAMES and len(set(NAMES)) == len(NAMES)
    for one in corrections.ALL:
        assert corrections.get(one.name) is one
        hash(one)  # frozen
    assert corrections.get(True).name == "moments" and corrections.get("centroids:8").share == 8
    assert corrections.get(False) is corrections.get(None) is corrections.NONE


def test_an_unknown_name_is_refused_with_all_there_are():
    for bad in ("median", "", "Moments", 3):
        said = f"correction must be one of auto, {', '.join(NAMES)}, got {bad!r}"
        raises(f"^{re.escape(said)}$", corrections.get, bad)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_mixed_in(name):
    """Of a state that knows more than the correction reads, too; tensors are the state's own."""
    state, wanted = state_of(name), MIXED_IN[name]
    found = corrections.get(name).evicted(state)
    assert make_spec(correction=name).evicted(state) is found or isinstance(found, Moments)
    if wanted is None:
        assert found is None
    elif wanted is Centroids:
        assert found is state.parts
    else:
        assert found.order == wanted
        assert found.key_mean is state.moments.key_mean and found.count is state.moments.count


@pytest.mark.parametrize("name", NAMES)
def test_what_is_remembered_besides_moments(name):
    """Nothing, or centroids in their share of the bytes of the pairs that stay: no fewer than four of a head."""
    correction, device = corrections.get(name), torch.device("cpu")
    for tokens, itemsize in ((1, 2), (700, 2), (1000, 4)):
        found = correction.empty(B, Shape(HKV, D, DV, itemsize), tokens, device)
        if name not in SHARES:
            assert found is None and correction.kind is None
            continue
        assert found.kind == correction.kind == "centroids" and not any(part.any() for part in found.tensors())
        assert found.keys.shape == (B, HKV, found.num, D) and found.values.shape == (B, HKV, found.num, DV)
        assert {found.keys.dtype, found.values.dtype} == {torch.bfloat16}
        assert {found.count.dtype, found.spread.dtype} == {torch.float32}
        nbytes = sum(part.nbytes for part in found.tensors())
        assert nbytes == B * HKV * found.num * (2 * (D + DV) + 8)
        room = B * HKV * tokens * (D + DV) * itemsize / SHARES[name]
        one = nbytes // found.num
        assert nbytes <= room < nbytes + one or (found.num == 4 and room < 5 * one)


@pytest.mark.parametrize("slope", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_cost_is_what_the_state_holds(name, dtype, slope):
    keys, values = torch.zeros(1, HKV, 0, D, dtype=dtype), torch.zeros(1, HKV, 0, DV, dtype=dtype)
    price = cost(keys, values, lambda tokens: layout(name, tokens, slope=slope))
    for tokens in (8, 64, 500, 1002):
        assert price.spent(tokens) == layout(name, tokens, slope=slope).allocate(keys, values).nbytes()


@pytest.mark.parametrize("name", NAMES)
def test_two_keys_take_the_room_of_a_pair(name):
    correction = corrections.get(name)
    for keep in (None, 0.1, 0.4, 0.9):
        for tokens, reserved in ((1, 0), (20, 3), (21, 15), (100, 100)):
            pairs, keys = correction.split((tokens,) * 3, tokens, reserved, keep, [True, False, True])
            assert pairs[1] == tokens and pairs[0] == pairs[2]
            if not correction.key_only:
                assert keys == () and pairs[0] == tokens
                continue
            keys = keys or (0, 0, 0)
            assert keys[1] == 0 and keys[0] == keys[2] == 2 * (tokens - pairs[0])
            assert pairs[0] >= min(max(reserved, 1), tokens)
    assert correction.split((20, 20), 20, 3, None, [False, False]) == ((20, 20), ())
    if correction.key_only:  # p_a = min(p_c / 2, (1 - p_c) / 2) of every prompt token (VECTOR, Sec. 4, Eq. 1)
        for keep in (0.25, 0.5, 0.75):
            _, keys = correction.split((round(1000 * keep),), round(1000 * keep), 1, keep, [True])
            assert keys == (2 * round(1000 * min((1 - keep) / 2, keep / 2)),)
        for share in (0, 0.25, 1):  # its sweep of p_a
            pairs, keys = corrections.get(correction.name, share=share).split((400,), 400, 1, 0.4, [True])
            given = min(400 * share, 399, 1000 * 0.6 / 2)
            assert (pairs, keys) == ((400 - given,), (2 * given,) if given else ())


@pytest.mark.parametrize("known", [None, 0, 1])
@pytest.mark.parametrize("order", [None, 0, 1])
def test_reading_takes_what_is_known_up_to_an_order(order, known):
    expected = "none" if order is None or known is None else ["mean", "moments"][min(order, known)]
    assert corrections.reading(state_of("none", known), order).name == expected


def test_reading_prefers_centroids():
    for order in (None, 0, 1):
        assert corrections.reading(state_of("centroids"), order) is corrections.get("centroids")


def test_centroids_in_another_share_of_the_bytes():
    """An eighth holds twice as many as a sixteenth; what cannot be a share is refused."""
    shape = Shape(HKV, D, DV, 4)
    found = [corrections.get("centroids", share=one).empty(1, shape, 1024, torch.device("cpu")).num for one in (16, 8)]
    assert found[1] in (2 * found[0], 2 * found[0] + 1)
    for share in (0, 0.5, True, -8):
        raises("share must be a whole number", corrections.get, "centroids", share=share)


def test_unequal_heads_of_a_share_of_the_prompt():
    assert corrections.get("vector").split((30, 10), 20, 2, 0.8, [True, True]) == ((30, 5), (0, 10))


def test_a_share_that_floats_cannot_hold_gives_as_many_keys():
    assert corrections.key_only(1000, 0, 0.8, 0.5) == 250 and corrections.key_only(64, 0, 0.8, 0.5) == 16
