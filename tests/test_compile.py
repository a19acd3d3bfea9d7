"""torch.compile of a decode step: one graph without breaks, a second for steps that evict, no others as it goes on."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import fastkv

from .models import build, prompt

EVERY = 4


def decode(model, step, cache, token, steps, start):
    """Logits of `steps` decoded tokens, fed greedily."""
    found = []
    for index in range(steps):
        positions = torch.full((len(token), 1), start + index)
        out = step(token, past_key_values=cache, position_ids=positions)
        found.append(out.logits)
        token = out.logits[:, -1:].argmax(-1).clone()
    return torch.cat(found, 1)


@pytest.mark.parametrize(
    "name,policy,options",
    [
        ("llama", "momentkv", {}),
        ("llama", "h2o", {"correction": "mean"}),
        ("qwen3", "snapkv", {"heads": "adaptive"}),
        ("gemma3", "keydiff", {}),
    ],
)
@torch.no_grad()
def test_a_compiled_step_equals_the_eager_one(name, policy, options):
    torch._dynamo.reset()
    model = build(name)
    ids, _ = prompt(2, 30, (0, 0))
    budget = fastkv.Budget(tokens=20, sinks=2, recent=4, heads=options.pop("heads", "uniform"))
    fastkv.patch(model, policy, budget, evict_every=EVERY, **options)
    first = ids[:, -1:].clone()
    want = decode(model, model, model(ids).past_key_values, first, 30, 30)
    graphs = CompileCounter()
    step = torch.compile(model, fullgraph=True, backend=graphs)
    got = decode(model, step, model(ids).past_key_values, first, 10, 30)
    # One with today's lengths built in, one for all lengths, one that evicts; Gemma's sliding layers add one.
    most = 4 if name == "gemma3" else 3
    assert graphs.frame_count <= most
    torch.testing.assert_close(got, want[:, :10], atol=1e-4, rtol=0)
    before = graphs.frame_count
    got = decode(model, step, model(ids).past_key_values, first, 30, 30)  # another cache, and longer
    assert graphs.frame_count == before
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@torch.no_grad()
def test_inductor_compiles_the_step():
    torch._dynamo.reset()
    model = build(num_hidden_layers=2)
    ids, _ = prompt(2, 30, (0, 0))
    fastkv.patch(model, "momentkv", fastkv.Budget(tokens=20, sinks=2, recent=4), evict_every=EVERY)
    first = ids[:, -1:].clone()
    want = decode(model, model, model(ids).past_key_values, first, 10, 30)
    got = decode(model, torch.compile(model, fullgraph=True), model(ids).past_key_values, first, 10, 30)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
