"""torch.compile of a decode step: one graph, and one for steps that evict; static caches leave no number in them."""

import pytest
import torch
from transformers import CompileConfig, DynamicCache

import fastkv
from fastkv.integrations.transformers import captured

from .families import tiny
from .models import FAMILIES, LATENT, VOCAB, account, build, generate, prompt, raises, small
from .pairwise import named
from .test_head_shares import shares_of
from .test_vector_cache import mapping

EVERY = 4
TWO = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
CHANGES = {"gemma3": TWO, "falcon_h1": {"num_hidden_layers": 2}, "lfm2": {}, "gemma4_text:shared-keys": {}}
KINDS = [
    ("llama", "momentkv", {}), ("llama", "h2o", {"correction": "mean"}), ("qwen3", "snapkv", {"heads": "adaptive"}),
    ("llama", "keydiff", {"correction": "vector+moments"}), ("gemma3", "keydiff", {}), ("llama", "fastkv", {}),
    ("qwen3", "fastkv", {"heads": "adaptive"}), ("deepseek_v3", "momentkv", {}), ("llama", "momentkv", {"every": 1}),
    ("falcon_h1", "momentkv", {}), ("lfm2", "momentkv", {}), ("gemma4_text:shared-keys", "momentkv", {}),
]  # fmt: skip


def kinds(*often):
    """All of them, of which those are compiled every day."""
    return [named(*kind, slow=at not in often) for at, kind in enumerate(KINDS)]


class Graphs:
    """A backend that runs graphs as they are and remembers what kinds of inputs they have."""

    def __init__(self):
        self.inputs = []

    def __deepcopy__(self, memo):
        return self  # transformers copies its settings

    def __call__(self, graph, inputs):
        self.inputs.append({type(node.meta["example_value"]) for node in graph.graph.nodes if node.op == "placeholder"})
        return graph.forward


def decode(model, step, cache, token, steps, start):
    """Logits of `steps` decoded tokens, fed greedily."""
    found = []
    for index in range(steps):
        out = step(token, past_key_values=cache, position_ids=torch.full((len(token), 1), start + index))
        found.append(out.logits)
        token = out.logits[:, -1:].argmax(-1).clone()
    return torch.cat(found, 1)


def compiled(name, policy, options, static):
    """A patched model with its first tokens, the logits that should follow them, the compiled step and its graphs."""
    torch._dynamo.reset()
    make = build if name in {**FAMILIES, **LATENT} else tiny.build
    model = make(name, **CHANGES.get(name, {"num_hidden_layers": 1}))
    ids, _ = prompt(2, 30, (0, 0))
    budget, every = small(heads=options.get("heads", "uniform")), options.get("every", EVERY)
    correction = options.get("correction", "auto")
    vector = mapping(model) if correction.startswith("vector") else None
    fastkv.patch(model, policy, budget, evict_every=every, correction=correction, static=static, vector=vector)
    want = decode(model, model, model(ids).past_key_values, ids[:, -1:].clone(), 12, 30)
    graphs = Graphs()
    return model, ids, want, torch.compile(model, fullgraph=True, backend=graphs), graphs


@pytest.mark.parametrize("name,policy,options", kinds(3, 6, 7, 8))
def test_a_static_step_is_two_graphs_of_tensors(name, policy, options):
    """One where every step evicts."""
    model, ids, want, step, graphs = compiled(name, policy, options, static=True)
    for _ in range(2):  # the second time with another cache
        got = decode(model, step, model(ids).past_key_values, ids[:, -1:].clone(), 12, 30)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    assert len(graphs.inputs) == (1 if "every" in options else 2)
    # A number would be another graph to a CUDA graph each time it changes.
    assert all(not issubclass(kind, torch.SymInt | int) for kinds in graphs.inputs for kind in kinds)


@pytest.mark.parametrize("name,policy,options", kinds(4))
def test_other_caches_compile_too(name, policy, options):
    model, ids, want, step, graphs = compiled(name, policy, options, static=False)
    for num in (9, 12):  # the second time with another cache, and longer
        before = len(graphs.inputs)
        got = decode(model, step, model(ids).past_key_values, ids[:, -1:].clone(), num, 30)
        torch.testing.assert_close(got, want[:, :num], atol=1e-4, rtol=0)
    # The first graph has today's length built in, transformers' sliding layers add one.
    assert len(graphs.inputs) == before <= (4 if name == "gemma3" else 3)


@pytest.mark.parametrize("name", [named("llama", slow=True), "gemma3"])
def test_generate_compiles(name):
    torch._dynamo.reset()
    model, (ids, mask) = build(name, **CHANGES.get(name, {"num_hidden_layers": 2})), prompt()
    fastkv.patch(model, "momentkv", small(), evict_every=EVERY, static=False)
    want = generate(model, ids, mask, new=12)
    fastkv.patch(model, "momentkv", small(), evict_every=EVERY, static=True)
    graphs = Graphs()
    config = CompileConfig(fullgraph=True, backend=graphs, mode=None)
    config._compile_all_devices = True
    for _ in range(2):
        assert torch.equal(generate(model, ids, mask, new=12, compile_config=config), want)
        assert len(graphs.inputs) == 2
    fastkv.unpatch(model)
    assert "create_masks_for_generate" not in model.__dict__


@pytest.mark.parametrize("name,base,block", [("gemma3", "sdpa", None), ("gemma2", "eager", 13)])
def test_static_changes_no_token(name, base, block):
    """Padding, beams, a second turn over a ring that has wrapped, and rows that are chosen."""
    model, (ids, mask) = build(name, base), prompt()
    found = []
    for static in (False, True):
        fastkv.patch(model, "momentkv", small(), evict_every=EVERY, prefill_block=block, static=static)
        first = generate(model, ids, mask, new=25, return_dict_in_generate=True)
        cache = first.past_key_values
        assert cache.is_compileable == static
        more = torch.cat([mask, torch.ones(3, first.sequences.shape[1] - mask.shape[1], dtype=torch.long)], 1)
        second = generate(model, first.sequences, more, new=9, past_key_values=cache)
        cache.batch_select_indices(torch.tensor([2, 0]))
        more = torch.cat([more, torch.ones(3, 9, dtype=torch.long)], 1)[[2, 0]]
        third = generate(model, second[[2, 0]], more, new=7, past_key_values=cache)
        found.append((second, third, generate(model, ids, mask, new=8, num_beams=2)))
    assert all(map(torch.equal, *found))


def test_saving_leaves_a_padded_ring_as_it_is(tmp_path):
    """What was padding stays padding, here and, once the loaded cache is told, there."""
    model, (ids, mask) = build("gemma3"), prompt()
    fastkv.patch(model, "keydiff", small(), evict_every=EVERY, static=True)
    cache = model(ids, attention_mask=mask).past_key_values
    twin = cache.clone()
    assert twin.is_compileable
    want = decode(model, model, twin, ids[:, :1], 9, 50)
    cache.save(tmp_path / "cache")
    assert torch.equal(decode(model, model, cache, ids[:, :1], 9, 50), want)
    loaded = fastkv.FastKVCache.load(tmp_path / "cache", model)
    raises("sliding windows of a loaded cache do not know its padding", fastkv.capture_decode, model, loaded, 3)
    assert loaded.is_compileable
    longer = torch.cat([mask, mask.new_ones(3, 1)], 1)
    out = model(ids[:, :1], attention_mask=longer, past_key_values=loaded, position_ids=torch.full((3, 1), 50))
    assert torch.equal(out.logits, want[:, :1])
    loaded.compressed[0].cache.anew = True  # as where its heads had other shares
    raises("heads of a loaded cache get other slots at its next eviction", fastkv.capture_decode, model, loaded, 3)
    loaded.compressed[0].cache.anew = False
    fastkv.capture_decode(model, loaded, 3)


def test_refusals():
    raises(r"static must be True, False or None .*got 1", fastkv.patch, build(), static=1)
    gemma = build("gemma3")
    gemma.config._attn_implementation_internal = "flash_attention_2"
    raises("static=True with sliding-window layers", fastkv.patch, gemma, static=True)


# Captured. On a CPU the same class runs the model; graphs themselves are checked on a GPU (perf/gpu/checks).


@pytest.mark.parametrize("name, every", [("llama", 1), ("gemma3", EVERY)])
def test_a_captured_step_continues_prompts(name, every):
    model, (ids, mask) = build(name), prompt()
    fastkv.patch(model, "momentkv", small(), evict_every=every, static=True)
    want = generate(model, ids, mask, new=20, eos_token_id=VOCAB)[:, ids.shape[1] :]
    cache = fastkv.FastKVCache(model)
    step = fastkv.capture_decode(model, cache, 3)
    assert cache.get_seq_length() == 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for _ in range(2):
        out = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        tokens = [token]
        for _ in range(19):
            token = step(token).argmax(-1, keepdim=True)
            tokens.append(token)
        assert torch.equal(torch.cat(tokens, 1), want)
        account(cache, mask.sum(-1) + 19)
        cache.reset()


def test_capturing_leaves_a_cache_as_it_was():
    model, (ids, _) = build(), prompt(2, 30, (0, 0))
    fastkv.patch(model, "momentkv", small(), evict_every=EVERY, static=True)
    cache = model(ids).past_key_values
    decode(model, model, cache, ids[:, :1], 6, 30)
    want = decode(model, model, cache.clone(), ids[:, :1], 9, 36)
    step = fastkv.capture_decode(model, cache, 2)
    got, token = [], ids[:, :1]
    for _ in range(9):
        got.append(step(token).clone())
        token = got[-1].argmax(-1, keepdim=True)
    torch.testing.assert_close(torch.stack(got, 1), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("policy", ["keydiff", "momentkv"])
def test_a_prompt_after_a_capture_loses_no_token(policy, monkeypatch):
    """On a GPU a capture runs steps, and the one that evicts says how many slots it leaves in use."""

    def ran(self, link):
        self.cache.workspace.clock.now = link
        self._run()
        return self._run

    monkeypatch.setattr(captured.DecodeStep, "_captured", ran)
    model, (ids, _) = build(), prompt(2, 30, (0, 0))
    fastkv.patch(model, policy, small(), evict_every=EVERY, static=True)
    cache = model(ids).past_key_values
    decode(model, model, cache, ids[:, :1], EVERY - 1, 30)
    twin = cache.clone()
    fastkv.capture_decode(model, cache, 2)
    assert torch.equal(*(model(ids[:, :5], past_key_values=one).logits for one in (cache, twin)))
    account(cache, torch.tensor([34 + EVERY] * 2))


def test_captured_steps_refuse_what_they_cannot():
    model, (ids, _) = build(), prompt(2, 30, (0, 0))
    fastkv.patch(model, "momentkv", small(), static=False)
    raises("needs a cache that stays where it is", fastkv.capture_decode, model, fastkv.FastKVCache(model), 2)
    raises("needs a FastKVCache, got DynamicCache", fastkv.capture_decode, model, DynamicCache(), 2)
    fastkv.patch(model, "momentkv", fastkv.Budget(keep=0.5, sinks=2, recent=4), static=True)
    raises("depends on its prompt, got an empty cache", fastkv.capture_decode, model, fastkv.FastKVCache(model), 2)
    fastkv.patch(model, "momentkv", small(heads=shares_of(model)), static=True)
    raises("give Budget\\(context", fastkv.capture_decode, model, fastkv.FastKVCache(model), 2)
    fastkv.patch(model, "momentkv", small(heads=shares_of(model), context=60), static=True)
    fastkv.capture_decode(model, fastkv.FastKVCache(model), 2)
    fastkv.patch(model, "momentkv", fastkv.Budget(keep=0.5, sinks=2, recent=4), static=True)
    cache = model(ids).past_key_values
    raises("holds 2 sequences, got batch_size=3", fastkv.capture_decode, model, cache, 3)
    step = fastkv.capture_decode(model, cache, 2)
    raises(r"takes tokens \[2, 1\], got \[3, 1\]", step, torch.zeros(3, 1, dtype=torch.long))
    cache.batch_repeat_interleave(2)
    raises("has moved", step, ids[:, :1])
    cache.reset()
    raises("empty cache; read a prompt first", step, ids[:, :1])


# By `generate`, which asks for the call of its steps where it thinks that it can be compiled: on a GPU.


def asked(model, monkeypatch):
    """Let `generate` ask on a CPU, too. Returns: what it was told to call."""
    told, ask = [], model.get_compiled_call
    monkeypatch.setattr(model, "_valid_auto_compile_criteria", lambda *given: True, raising=False)
    monkeypatch.setattr(model, "get_compiled_call", lambda config: told.append(ask(config)) or told[-1])
    return told


@pytest.mark.parametrize("name, policy", [("llama", "fastkv"), ("gemma3", "momentkv")])
def test_generate_captures_its_steps(name, policy, monkeypatch):
    """After some by the model; the same tokens as without, with padding, from a prompt or from a cache."""
    model, (ids, mask) = build(name), prompt(4, 40, (0, 9, 0, 3))
    found = []
    for static in (False, True):
        fastkv.patch(model, policy, small(), evict_every=EVERY, static=static)
        told = asked(model, monkeypatch) if static else []
        first = generate(model, ids, mask, new=40, eos_token_id=VOCAB, return_dict_in_generate=True)
        more = torch.cat([mask, torch.ones(4, first.sequences.shape[1] - mask.shape[1], dtype=torch.long)], 1)
        again = {"past_key_values": first.past_key_values, "eos_token_id": VOCAB}
        found.append((first.sequences, generate(model, first.sequences, more, new=25, **again)))
    assert all(map(torch.equal, *found))
    assert [steps.step is not None for steps in told] == [True, True]


def test_generate_captures_what_is_only_tokens(monkeypatch):
    """Not where hidden states are asked for. A capture that fails is told once, and leaves the cache as it was."""
    model, (ids, mask) = build(), prompt()
    fastkv.patch(model, "keydiff", small(), evict_every=EVERY, static=True)
    told, how = asked(model, monkeypatch), {"new": 30, "eos_token_id": VOCAB}
    want = generate(model, ids, mask, **how)
    seen = generate(model, ids, mask, output_hidden_states=True, return_dict_in_generate=True, **how)
    assert torch.equal(seen.sequences, want) and len(seen.hidden_states) == 30 and told[-1].step is None

    for error, later in (torch.OutOfMemoryError, captured.GeneratedSteps), (RuntimeError, type(model.__call__)):

        def fails(self, link, error=error):
            self._run()
            raise error("no room for a graph\nand more")

        with monkeypatch.context() as patch:
            patch.setattr(captured.DecodeStep, "_captured", fails)
            with pytest.warns(UserWarning, match="not captured, which is slower: no room for a graph$") as said:
                assert torch.equal(generate(model, ids, mask, **how), want)
        assert len(said) == 1 and told[-1].step is None
        assert torch.equal(generate(model, ids, mask, **how), want) and type(told[-1]) is later
    monkeypatch.undo()
    fastkv.patch(model, "keydiff", small(), evict_every=EVERY, static=True)  # which may be captured again
    told = asked(model, monkeypatch)
    assert torch.equal(generate(model, ids, mask, **how), want) and told[0].step is not None


def test_generate_does_not_capture_tokens_at_positions_of_their_own():
    model, (ids, _) = build(), prompt(2, 30, (0, 0))
    fastkv.patch(model, "keydiff", small(), evict_every=EVERY, static=True)
    cache = model(ids).past_key_values
    steps = captured.GeneratedSteps(model)
    steps.eager = captured.EAGER
    with pytest.warns(UserWarning, match="not captured, which is slower: tokens have positions of their own"):
        steps(input_ids=ids[:, :1], position_ids=torch.full((2, 1), 40), use_cache=True, **{captured.CACHE: cache})
    assert steps.step is None and cache.get_seq_length() == 31
