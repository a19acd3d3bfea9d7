"""Fidelity: exact where nothing is evicted, equal to brute force where something is, at bytes that are equal."""

import io
import itertools
import json
import math
from dataclasses import dataclass, replace

import pytest
import torch
from rich.console import Console

import fastkv
from fastkv import Budget, FastKVError
from fastkv.integrations.transformers.layer import FastKVLayer
from fastkv.lab import fidelity as module
from fastkv.lab.cli import build_parser
from fastkv.lab.fidelity import measure, read_full, run
from fastkv.lab.reading import equal_bytes, stored_bytes

from .equal_bytes import assert_equal_bytes, token_bytes
from .models import build, policy, positions, prompt, raises
from .pairwise import named
from .test_vector_cache import mapping
from .toy import MODEL
from .toy import text as toy_text

STEPS = 12


def text(length=60, rows=2):
    return prompt(batch=rows, length=length, pads=(0,) * rows)[0]


def measured(model, tokens, *args, steps=STEPS, **kwargs):
    """Fidelity of the model patched with the other arguments."""
    full = read_full(model, tokens, steps)
    with fastkv.patched(model, *args, **kwargs):
        return measure(model, tokens, steps, full)


@pytest.mark.parametrize(
    "name,base,rule", [("qwen3", "sdpa", "momentkv"), ("gemma2", "eager", "kvzip"), ("gemma3", "sdpa", "streaming")]
)
def test_a_budget_larger_than_the_context_changes_nothing(name, base, rule):
    got = measured(build(name, base), text(), rule, 80)
    assert got.error.max() < 1e-5 and got.heads.own_error.max() < 1e-5
    left = [name for layer in got.cache.layers for name in ("attend", "step") if name in vars(layer)]
    assert not left, "nothing is left in the cache"
    assert got.kl.abs().max() < 1e-8 and got.agreement.all() and got.excess.abs().max() < 1e-4
    assert (got.heads.mass == 0).all() and (got.heads.log_evicted == -math.inf).all()
    for number in (got.heads.cosine, got.heads.retained_cosine, got.heads.gap):
        assert number.isnan().all()


@dataclass
class Step:
    """What one decoded token met in one compressed layer; stored: positions, a set for each row and head."""

    layer: int
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    stored: list
    scale: float
    softcap: float | None
    out: torch.Tensor


def spy_on_attention(monkeypatch):
    """The list that every decoded token of every compressed layer will be added to."""
    steps, pairs, attend, decode = [], {}, FastKVLayer.attend, FastKVLayer.step

    def remembered(layer, k, v):
        before = pairs.get(id(layer), (k[:, :, :0], v[:, :, :0]))
        pairs[id(layer)] = tuple(torch.cat(two, 2) for two in zip(before, (k, v)))
        return pairs[id(layer)]

    def read(self, q, k, v, *rest):
        remembered(self, k, v)
        return attend(self, q, k, v, *rest)

    def step(self, q, k, v, how):
        keys, values = remembered(self, k, v)
        stored = [[set().union(*head) for head in positions(self.state, row)] for row in range(len(q))]
        out = decode(self, q, k, v, how)
        tensors = [one.double() for one in (q[:, :, 0], keys, values)]
        steps.append(Step(self.cache.layer, *tensors, stored, how.scale, how.softcap, out[:, :, 0].double()))
        return out

    monkeypatch.setattr(FastKVLayer, "attend", read)
    monkeypatch.setattr(FastKVLayer, "step", step)
    return steps


def brute_force(step, row, head):
    """Every number about one query of one head, pair by pair."""
    owner = head // (step.q.shape[1] // step.keys.shape[1])
    keys, values, q = step.keys[row, owner], step.values[row, owner], step.q[row, head]
    bend = (lambda x: x) if step.softcap is None else (lambda x: step.softcap * math.tanh(x / step.softcap))
    weights = [math.exp(bend(step.scale * float(q @ key))) for key in keys]

    def attention(chosen):
        return sum(weights[j] * values[j] for j in chosen) / sum(weights[j] for j in chosen)

    everything = set(range(len(weights)))
    stays = step.stored[row][owner] | {len(weights) - 1}
    goes = everything - stays
    whole = attention(everything)
    found = {
        "mass": sum(weights[j] for j in goes) / sum(weights),
        "total": sum(weights),
        "own_error": float((step.out[row, head] - whole).norm() / whole.norm()),
    }
    if goes:
        mean = keys[sorted(goes)].mean(0)
        found["log_estimate"] = math.log(len(goes)) + bend(step.scale * float(q @ mean))
        found["retained_cosine"] = float(torch.cosine_similarity(attention(goes), attention(stays), dim=0))
        if step.softcap is None:
            keyed, valued = keys[sorted(goes)] - mean, values[sorted(goes)]
            linear = valued.mean(0) + step.scale * (keyed @ q) @ valued / len(goes)
            found["cosine"] = float(torch.cosine_similarity(attention(goes), linear, dim=0))
    return found


SMALL = Budget(tokens=20, sinks=1, recent=4)
CASES = {
    "momentkv": ("llama", "sdpa", "momentkv", SMALL, {}),
    "every-step": ("llama", "sdpa", "snapkv", SMALL, {"evict_every": 1}),
    "blocks": ("qwen3", "sdpa", "keydiff", SMALL, {"prefill_block": 7, "correction": "moments"}),
    "adaptive": ("llama", "sdpa", "momentkv", replace(SMALL, heads="adaptive"), {"evict_every": 5}),
    "softcap": ("gemma2", "eager", "momentkv", SMALL, {"evict_every": 3}),
    "means": ("llama", "sdpa", "h2o", SMALL, {"correction": "mean", "evict_every": 4}),
    "vector": ("llama", "sdpa", "streaming", SMALL, {"correction": "vector+moments", "evict_every": 4}),
}


@pytest.mark.parametrize("case", [named(case, slow=case in ("every-step", "means")) for case in CASES])
def test_every_number_equals_brute_force(case, monkeypatch):
    name, base, rule, budget, options = CASES[case]
    model = build(name, base)
    correction = options.get("correction", "moments" if rule == "momentkv" else "none")
    if correction.startswith("vector"):
        options = {**options, "vector": mapping(model)}
    steps = spy_on_attention(monkeypatch)
    got = measured(model, text(), rule, budget, **options)
    assert len(steps) == STEPS * len(got.layers) and got.heads.mass.max() > 0.01
    for place, layer in enumerate(got.layers):
        for index, step in enumerate(step for step in steps if step.layer == layer):
            for row, head in itertools.product(range(2), range(4)):
                at = (place, row, index, head)
                expected = brute_force(step, row, head)
                total = expected.pop("total")
                kept, gone = got.heads.log_retained[at].exp().item(), got.heads.log_evicted[at].exp().item()
                assert kept + gone == pytest.approx(total, rel=1e-6)
                if correction == "none":
                    assert got.heads.cosine[at].isnan() and got.heads.log_estimate[at].isnan()
                    expected = {key: expected[key] for key in ("mass", "own_error", "retained_cosine")}
                elif correction != "moments":  # of a token that lost its value before, VECTOR evicts what it recovers
                    expected.pop("cosine", None)
                for key, number in expected.items():
                    tolerance = 1e-5 if key in ("log_estimate", "cosine") else 1e-9  # moments are kept in float32
                    assert getattr(got.heads, key)[at].item() == pytest.approx(number, rel=tolerance, abs=tolerance)


def test_errors_and_next_tokens_equal_brute_force():
    """Against two plain runs: of the stock model in one forward, of the patched one token by token."""
    model, tokens = build("llama", "eager").double(), text()
    inputs = {}

    def hook(layer):
        return lambda module, args: inputs.setdefault(layer, []).append(args[0].clone())

    def outputs(forward):
        inputs.clear()
        handles = [one.self_attn.o_proj.register_forward_pre_hook(hook(i)) for i, one in enumerate(model.model.layers)]
        logits = forward()[:, -STEPS:]
        for handle in handles:
            handle.remove()
        return logits, torch.stack([torch.cat(parts, 1)[:, -STEPS:] for parts in inputs.values()])

    def token_by_token():
        cache = model(tokens[:, :-STEPS]).past_key_values
        return torch.cat([model(word, past_key_values=cache).logits for word in tokens[:, -STEPS:].split(1, 1)], 1)

    settings = ("tova", Budget(tokens=46, sinks=1, recent=4))
    logits, o = outputs(lambda: model(tokens).logits)
    with fastkv.patched(model, *settings):
        other_logits, other = outputs(token_by_token)
    got = measured(model, tokens, *settings)
    for head in range(4):
        mine, theirs = (x[..., head * 16 : (head + 1) * 16] for x in (o, other))
        expected = (theirs - mine).square().sum(-1).sqrt() / mine.square().sum(-1).sqrt()
        torch.testing.assert_close(got.error[..., head], expected, rtol=1e-7, atol=1e-10)
    p, r = logits.softmax(-1), other_logits.softmax(-1)
    torch.testing.assert_close(got.kl, (p * (p / r).log()).sum(-1))
    assert torch.equal(got.agreement, p.argmax(-1) == r.argmax(-1)) and 0 < got.agreement.sum() < got.agreement.numel()
    targets = tokens[:, -STEPS + 1 :, None]
    ratio = (p[:, :-1].gather(-1, targets) / r[:, :-1].gather(-1, targets)).log()[..., 0]
    torch.testing.assert_close(got.excess, ratio)


def filled(model, rule, budget, rows=3, **options):
    with fastkv.patched(model, rule, budget, **options):
        return model(text(40, rows)).past_key_values


@pytest.mark.parametrize(
    "family,base,correction", [("llama", "sdpa", "auto"), ("gemma2", "eager", "moments"), ("gemma2", "eager", "none")]
)
def test_caches_of_equal_bytes_are(family, base, correction, tmp_path):
    model = build(family, base)
    budget = equal_bytes(model.config, 60, model.dtype, recent=4)
    how = {"correction": correction, "slots": "model"}
    rules = {*fastkv.policies.names()} - ({"duoattention"} if family == "gemma2" else set())  # a pattern of four layers
    caches = {rule: filled(model, policy(rule, tmp_path, model), budget, **how) for rule in rules}
    assert_equal_bytes(caches, budget.bytes)
    # What a baseline holds, counted by hand: keys, values, positions; lengths, tokens seen and evicted.
    layers = 4 if family == "llama" else 2
    by_hand = layers * (2 * (60 + 16) * (2 * 16 * 4 + 4) + 2 * 4 + 8 + 2 * 8)
    assert budget.bytes == by_hand
    if correction in ("auto", "none"):
        assert stored_bytes(caches["streaming"]) == by_hand
    assert token_bytes(caches["streaming"]) == layers * 2 * (2 * 16 * 4 + 4)


@pytest.mark.parametrize(
    "shares",
    [{"sinks": 1, "recent": 7}, {"layers": "pyramid"}, {"layers": (2.0, 1.0, 1.0, 1.0)}, {"heads": "adaptive"}],
    ids=lambda shares: next(iter(shares)),
)
def test_equal_bytes_keep_the_shares_of_a_budget(shares):
    model, budget, rule = build(), Budget(tokens=90, **shares), "momentkv"
    same = equal_bytes(model.config, budget, model.dtype)
    assert same == equal_bytes(model.config, 90, model.dtype, **shares)
    assert same == replace(budget, tokens=None, bytes=same.bytes)
    assert same.bytes == equal_bytes(model.config, 90, model.dtype).bytes, "however they are shared out"
    assert_equal_bytes({rule: filled(model, rule, same)}, same.bytes)


def test_misuse_is_refused():
    model, tokens = build(), text()
    raises("patch", measure, model, tokens, STEPS, read_full(model, tokens, STEPS))
    with fastkv.patched(model, "streaming", 40), pytest.raises(FastKVError, match="stock"):
        read_full(model, tokens, STEPS)
    for steps in (1, 60):
        raises("steps", read_full, model, tokens, steps)
    raises("smaller than sinks", equal_bytes, model.config, 8, model.dtype)
    raises("turns tokens into bytes", equal_bytes, model.config, Budget(keep=0.5), model.dtype)


def fidelity(*arguments):
    """Rows and what was printed."""
    told, given = io.StringIO(), ("--model", MODEL, "--text", toy_text(), *arguments)
    rows = run(build_parser().parse_args(["fidelity", *map(str, given)]), Console(file=told, width=60))
    return rows, told.getvalue()


QUICK = ("--context", 160, "--steps", 8, "--seeds", 2)


def test_the_command_compares_and_writes(tmp_path):
    policies, out = ["momentkv", "kvzip"], tmp_path / "out"
    command = (*QUICK, "--policies", ",".join(policies), "--budgets", "64,256", "--out", out)
    rows, told = fidelity(*command)
    assert [(row["policy"], row["budget"]) for row in rows] == [(name, size) for size in (64, 256) for name in policies]
    written = (out / "fidelity.json").read_text()
    record = json.loads(written)
    assert record["rows"] == rows and record["options"]["correction"] == "auto"
    assert all(name in told for name in policies) and "KiB" in told
    for row in rows:
        assert row["standard_error"] > 0
        if row["budget"] == 256:
            assert row["error"] < 1e-5 and row["agreement"] == 1 and row["cosine"] is None and row["kl"] < 1e-8
        else:
            assert row["error"] > 0.01 and row["mass"] > 0.01 and row["retained_cosine"] is not None
            assert (row["gap"] is None) == (row["policy"] != "momentkv")
    sizes = [row["nbytes"] for row in rows if row["budget"] == 64]
    assert max(sizes) - min(sizes) < 64 * 2**10 / 16 and rows[0]["kept"] < rows[1]["kept"]
    fidelity(*command)
    assert (out / "fidelity.json").read_text() == written, "deterministic"


@pytest.mark.parametrize("question", ["later", "seen"])
def test_a_question_about_the_text(question, tmp_path, bundled):
    """What is fed is the full cache's own answer; with everything kept it is found whenever the question comes."""
    command = (*QUICK, "--text", "topics", "--question", question, "--policies", "snapkv", "--out", tmp_path)
    rows, _ = fidelity(*command, "--budgets", "64,256")
    for row in rows:
        assert row["standard_error"] >= 0
        assert row["kl"] < 1e-8 if row["budget"] == 256 else row["kl"] > 0
    assert json.loads((tmp_path / "fidelity.json").read_text())["options"]["question"] == question
    # By hand: the first text.
    model, tokenizer = bundled
    options = build_parser().parse_args(["fidelity", *map(str, command), "--model", MODEL])
    ids, steps, apart = module.asked(model, tokenizer, options, 0)
    split = ids.shape[1] - steps - apart
    assert (apart > 0) == (question == "later")
    cache = model(ids[:, :split]).past_key_values
    if apart:
        model(ids[:, split : split + apart], past_key_values=cache)
    fed = [model(one, past_key_values=cache).logits[0, -1] for one in ids[:, split + apart :].split(1, 1)]
    assert torch.equal(torch.stack(fed)[: steps - 2].argmax(-1), ids[0, split + apart + 1 :][: steps - 2])


def test_equal_tokens(tmp_path):
    """As papers compare: policies that store more than pairs keep as many tokens, in more bytes."""
    command = (*QUICK, "--policies", "momentkv,snapkv", "--budgets", 64, "--out", tmp_path)
    moments, snap = fidelity(*command, "--equal", "tokens")[0]
    assert moments["kept"] == snap["kept"] == 64 and moments["nbytes"] > snap["nbytes"]
