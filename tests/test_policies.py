"""Hyper-parameters of policies: what is refused, and that the defaults are the papers'."""

import math

import pytest

from fastkv import policies
from fastkv.policies import H2O, CriticalKV, DuoAttention, KVzip, MomentKV, PyramidKV, TriAttention

from .models import raises

NAN = math.nan
REFUSED = {
    "keydiff": [
        ({"anchr": "mean"}, "no hyper-parameter anchr"),
        ({"anchor": "mode"}, "anchor must be one of"),
        ({"anchor": "pairwise", "distance": "dot"}, "cosine only"),
        *(({"sliding_window": share}, r"finite number in \[0, 1\]") for share in (1.2, None)),
    ],
    "snapkv": [({"pool": 4}, "odd width")],
    "manifold": [
        ({"window": 0}, "window must be an integer of at least 1, got 0"),
        ({"metric": "l3"}, "metric must be one of l2, l1, linf, cosine"),
    ],
    "manifold-windowed": [({"window": 2.5}, "manifold-windowed: window must be an integer")],
    "leverage": [
        ({"sketch": 0}, "sketch must be an integer of at least 1"),
        ({"sketch": 129}, "at most 128 columns for method 'cholesky', got 129"),
        ({"method": "lu"}, "method must be one of cholesky, qr, svd, eig, exact, srht"),
    ],
    "noncausal": [({"chunk": 0}, "noncausal: chunk must be an integer of at least 1"), ({"pool": 4}, "odd width")],
    "compactor": [
        ({"chunk": 0}, "compactor: chunk must be"),
        ({"sketch": 500}, "at most 128 columns"),
        *(({"blend": blend}, "blend must be a finite number of at least 0") for blend in (-0.1, NAN, None)),
        ({"seed": "a"}, "compactor: seed must be an integer"),
    ],
    "lagkv": [({"lag": 1}, "lagkv: lag must be an integer of at least 2, got 1")],
    "rkv": [
        ({"window": 0}, "rkv: window must be an integer of at least 1"),
        ({"pool": 4}, "odd width"),
        *(({"weight": weight}, "weight must be a finite number in") for weight in (1.5, "0.1")),
        *(({"threshold": threshold}, "threshold must be a finite number in") for threshold in (NAN, None, 1.5)),
    ],
    "random": [({"seed": 1.5}, "random: seed must be an integer")],
    "duoattention": [({"threshold": "a"}, "threshold must be a finite number")],
    "expected-attention": [
        ({"horizon": 0}, "horizon must be an integer of at least 1"),
        *(({"epsilon": number}, "epsilon must be a finite number of at least 0") for number in (-1.0, "x")),
    ],
    "triattention": [({"horizon": 0.5}, "triattention: horizon must be an integer")],
    "h2o": [({"recent": recent}, "recent must be a finite number in") for recent in (-0.1, 1.1, NAN, "x")],
    "kvzip": [
        ({"chunk": 0}, "chunk must be an integer of at least 1, got 0"),
        *(({"prompt": prompt}, "prompt must hold token ids") for prompt in ((3, -1), 5)),
    ],
    "criticalkv": [
        ({"base": "criticalkv"}, "base must be another policy"),
        ({"base": CriticalKV()}, "base must be another policy"),
        ({"base": "nonsense"}, "unknown policy 'nonsense'"),
        ({"first": 1.5}, "first must be a finite number in"),
        *(({"epsilon": epsilon}, "epsilon must be a finite number of at least 1e-30") for epsilon in (0.0, math.inf)),
    ],
    "momentkv": [
        ({"residual_order": 2}, "residual_order must be 0 or 1, got 2"),
        ({"chunk": 0}, "chunk must be an integer of at least 1"),
        ({"rounds": 0}, "momentkv: rounds must be an integer of at least 1"),
    ],
}
DEFAULTS = {
    "snapkv": {"window": 32, "pool": 7}, "criticalkv": {"epsilon": 1e-4, "first": 0.5}, "lagkv": {"lag": 128},
    "leverage": {"sketch": 64, "method": "cholesky"}, "noncausal": {"chunk": 256, "pool": 3, "scaled": False},
    "momentkv": {"window": 32, "chunk": 4, "rounds": 1, "informed": True}, "attention-matching": {"chunk": 2048},
    "keydiff": {"anchor": "mean", "distance": "cosine", "sliding_window": 0.0}, "triattention": {"horizon": 65536},
    "manifold": {"window": None}, "manifold-windowed": {"window": 4096}, "duoattention": {"adaptive": False},
    "compactor": {
        "blend": 0.3, "sketch": 64, "chunk": 256, "pool": 3, "scaled": False, "values_first": True, "centred": False,
    },
    "rkv": {"window": 8, "pool": 7, "weight": 0.1, "threshold": 0.5}, "tova": {"observation": 1, "adaptive": False},
    "expected-attention": {"horizon": 512, "sinks": 4, "epsilon": 0.01},
    "kvzip": {"chunk": 2048, "second_reading": policies.SecondReading(2048)},
    "h2o": {"observation": None, "shares": policies.Shares(recent=0.5)},
    "pyramidkv": {"observation": 32, "shares": policies.Shares(layers="pyramid")},
}  # fmt: skip


@pytest.mark.parametrize("name,hyper,match", [(name, *one) for name, some in REFUSED.items() for one in some], ids=str)
def test_what_is_refused(name, hyper, match):
    raises(match, policies.get, name, **hyper)


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_those_of_the_papers(name):
    policy = policies.get(name)
    assert {field: getattr(policy, field) for field in DEFAULTS[name]} == DEFAULTS[name]


def test_what_follows_from_hyper_parameters():
    assert H2O(recent=0.25).shares.recent == 0.25
    assert KVzip(prompt=[5, 6]) == KVzip(prompt=(5, 6))
    assert policies.get("leverage", sketch=500, method="qr").sketch == 500
    assert MomentKV().moments.order == 1 and MomentKV(informed=False).moments.order is None


def test_criticalkv_passes_on_what_its_base_asks_for():
    on_h2o = CriticalKV(base=H2O(recent=0.25))
    assert on_h2o.needs == {"attention", "output", "memory"}
    assert on_h2o.observation is None and on_h2o.shares.recent == 0.25
    assert CriticalKV(base="momentkv").moments.order == 1 and CriticalKV(base="momentkv").observation == 32
    assert not CriticalKV(base="lagkv").adaptive and CriticalKV().adaptive
    assert CriticalKV(base="random").needs == {"output"} and CriticalKV(base=KVzip()).second_reading
    assert CriticalKV(base=PyramidKV()).shares.layers == "pyramid" and CriticalKV().shares.layers is None
    assert CriticalKV(base="fastkv-reread").needs == {"queries", "memory", "rotary", "output"}
    on_tri = CriticalKV(base=TriAttention(calibration="some.safetensors"))
    assert on_tri.calibration == "some.safetensors" and "query_statistics" in on_tri.needs
    raises("needs the pattern file", CriticalKV(base=DuoAttention()).shares.heads.check, [2, 2])
