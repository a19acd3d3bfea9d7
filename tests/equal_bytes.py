"""Whether caches use the bytes that they were given: the check of what `fastkv.lab.reading.equal_bytes` promises."""

from dataclasses import replace

import torch

from fastkv.cache.layout import cost
from fastkv.lab.reading import stored_bytes


def token_bytes(cache):
    """Bytes per sequence of one more token in every KV head, with what of the evicted ones it lets be remembered."""
    return round(sum(layer_token_bytes(layer.cache) for layer in cache.compressed))


def layer_token_bytes(layer):
    slots, heads, layout = layer.state.exact, layer.state.heads, layer.rule.layout
    dims = slots.format.keys.dim(slots.keys.shape[-1]), slots.value_dim
    keys, values = (torch.empty(1, heads, 1, dim, dtype=slots.dtype, device="meta") for dim in dims)
    costs = cost(keys, values, lambda tokens: replace(layout, tokens=(tokens,) * heads))
    return costs.spent(layout.mean + 1) - costs.spent(layout.mean)


def assert_equal_bytes(caches, bound):
    """Every cache holds at most `bound` bytes per sequence, and less than one token per head fewer."""
    for name, cache in caches.items():
        assert bound - token_bytes(cache) < stored_bytes(cache) <= bound, name
