"""Budgets add up."""

import pytest

from fastkv import Budget
from fastkv.budget import LayerCost
from fastkv.config import Config
from fastkv.reference import INT4, INT8

from .models import raises


def test_times_smaller_is_of_a_bfloat16_cache_of_the_prompt():
    """Sixteen times smaller: per layer a sixteenth of `full` bytes for each of its tokens."""
    cost = LayerCost(per_token=40, fixed=100, full=64)
    for times, context in ((1.0, 100), (2, 1000), (16, 10_000)):
        tokens = Budget(compress=times).average(3, context, cost)
        assert cost.spent(tokens) <= 64 * context / times < cost.spent(tokens + 1)
    assert Budget(compress=16).average(1, 40, cost) == 36  # what is protected stays
    assert Budget.of("16x") == Budget(compress=16) and Budget.of("2.5x") == Budget(compress=2.5)
    assert Budget(compress=2).follows_prompt and Budget(compress=2).in_bytes


@pytest.mark.parametrize("value", [0.5, 0, -1, float("nan"), float("inf"), True, "16"])
def test_it_cannot_be_larger_than_the_cache_it_is_smaller_than(value):
    raises("compress must be at least 1, got", Budget, compress=value)


@pytest.mark.parametrize("sizes", [{"tokens": 10**20}, {"bytes": 10**25}, {"tokens": 64, "recent": 10**20}], ids=str)
def test_it_fits_into_some_memory(sizes):
    raises(f"{[*sizes][-1]} must be an integer of at least . and at most 2.40", Budget, **sizes)


@pytest.mark.parametrize("value", ["x", "16", "-2x", "16x ", "1/4", "0.5x"])
def test_words_that_are_no_budget(value):
    raises(r"budget must be|must be at least 1", Budget.of, value)


@pytest.mark.parametrize("context, tokens", [(100, 7), (10000, 700), (101, 8)])
def test_a_share_that_floats_cannot_hold_keeps_as_many_tokens(context, tokens):
    assert Budget(keep=0.07, sinks=0, recent=0, heads="uniform").average(1, context, LayerCost(0, 0)) == tokens


def test_of_a_short_prompt_every_layer_keeps_what_is_protected():
    budget = Budget(keep=0.25, layers=[1, 2, 1, 2], heads="uniform")
    average = budget.average(4, 10, LayerCost(0, 0))
    assert [budget.layer_tokens(average, layer, 4) for layer in range(4)] == [36, 48, 36, 48]


@pytest.mark.parametrize("times, slots", [("11.9x", INT8), ("12x", INT4)])
def test_from_twelve_times_smaller_on_slots_have_four_bits(times, slots):
    assert Config.make("keydiff", times, None, 16, "auto", "auto", None).coded((32,)).slots is slots
