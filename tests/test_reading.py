"""A text that is read once gives the caches that reading it for each policy gives, bit for bit."""

import pytest
import torch

import fastkv
from fastkv import Budget, policies
from fastkv.integrations.transformers.stock import CACHE
from fastkv.lab.reading import Reading, read

from .models import build, raises

KINDS = [name for name in policies.names() if name not in ("duoattention", "triattention")]


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(scope="module")
def reading(model):
    return Reading.of(model, ids_of(model))


def ids_of(model):
    return torch.randint(0, model.config.vocab_size, (1, 150), generator=torch.Generator().manual_seed(0))


def same(model, one, other):
    """The same tokens, and the same logits of 20 more of them, an eviction among them, bit for bit."""
    for layer in range(len(one.layers)):
        assert torch.equal(one.stored(layer), other.stored(layer))
    for _ in range(20):
        got, want = (model(torch.tensor([[5]]), past_key_values=cache).logits for cache in (one, other))
        assert torch.equal(got, want)


SETTINGS = [{"slots": "int8"}, {"slots": "fp8"}, {"correction": "moments"}, {"correction": "centroids"}]
SETTINGS += [{"backend": "reference"}, {"budget": Budget(keep=0.4, heads="adaptive")}]


@pytest.mark.parametrize(
    "policy, settings",
    [*((policy, {"budget": 48}) for policy in KINDS), *(("keydiff", {"budget": 64, **one}) for one in SETTINGS)],
    ids=str,
)
def test_compressed_is_what_the_model_makes(model, reading, policy, settings):
    same(model, reading.compressed(policy, **settings), model(reading.ids).past_key_values)


def test_full_is_the_stock_cache(model, reading):
    """And logits are the stock model's."""
    fastkv.unpatch(model)
    assert torch.equal(reading.logits, model(reading.ids, logits_to_keep=1).logits[0, -1].float())
    cache, other = reading.full(), read(model, reading.ids)
    assert cache.get_seq_length() == 150 and len(cache.layers) == len(other.layers)
    for own, stock in zip(cache.layers, other.layers):
        assert torch.equal(own.keys, stock.keys) and torch.equal(own.values, stock.values)
    model(reading.ids[:, :1], **{CACHE: cache})
    assert reading.full().get_seq_length() == 150  # a copy


@pytest.mark.parametrize("settings", [dict(prefill_block=64), dict(budget=Budget(quality=0.9))], ids=str)
def test_what_decides_while_reading_is_refused(reading, settings):
    raises("run the model for each", reading.compressed, "keydiff", settings.pop("budget", 48), **settings)


def test_several_sequences_are_refused(model):
    raises("one sequence", Reading.of, model, torch.zeros(2, 8, dtype=torch.long))
