"""`fastkv inspect`: estimators find dimensions that are known, geometry equals brute force, the command tells both."""

import io
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from transformers import DynamicCache

from fastkv import FastKVError
from fastkv.lab import inspection as geometry
from fastkv.lab.cli import build_parser
from fastkv.lab.common import read_stock
from fastkv.lab.inspection import measure_layer, nearest_distances

from .models import build, raises
from .states import randn
from .toy import MODEL, load
from .toy import told as toy_told

N = 2000


def two_nn(points, discard=0.1):
    return geometry.two_nn(nearest_distances(points, 2), points.shape[1], discard)


def levina_bickel(points, k=geometry.NEIGHBOURS):
    return geometry.levina_bickel(nearest_distances(points, max(k)), points.shape[1], k)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def uniform(num, dim, seed=0):
    return torch.rand(num, dim, generator=seeded(seed), dtype=torch.float64)


def rotation(dim, seed=1):
    return torch.linalg.qr(randn(dim, dim, seed=seed))[0]


def embedded(points, dim):
    """The points in a randomly turned subspace of a larger space, away from the origin."""
    return torch.nn.functional.pad(points, (0, dim - points.shape[1])) @ rotation(dim) + 3.0


def sphere(dim):
    points = randn(N, dim + 1)
    return points / points.norm(dim=1, keepdim=True)


def swiss_roll():
    angle, height = (uniform(N, 2) * torch.tensor([3 * math.pi, 20.0]) + torch.tensor([1.5 * math.pi, 0.0])).unbind(1)
    return torch.stack([angle * angle.cos(), height, angle * angle.sin()], 1)


def torus(dim):
    angle = 2 * math.pi * uniform(N, dim)
    return torch.cat([angle.cos(), angle.sin()], 1)


# Cloud, its dimension, and that of the flat space it spans.
CLOUDS = {f"{dim} flat": (uniform(N, dim), dim, dim) for dim in (1, 2, 5, 8)}
CLOUDS |= {"sphere": (sphere(2), 2, 3), "swiss roll": (swiss_roll(), 2, 3), "torus": (torus(3), 3, 6)}


@pytest.mark.parametrize("name", CLOUDS)
def test_estimators_recover_known_dimensions(name):
    """Within 10 % up to dimension 5. At 8 most of a cube is boundary, where neighbours are missing, which reads low."""
    cloud, local, flat = CLOUDS[name]
    got = geometry.dimensions(embedded(cloud, 24))
    assert got.pca == flat
    for found in (got.two_nn, got.mle):
        assert (0.9 if local <= 5 else 0.8) * local <= found <= 1.1 * local


@pytest.mark.parametrize("variance", (0.3, 0.6, 0.9, 0.95, 1.0))
def test_pca_counts_the_components_of_a_known_spectrum(variance):
    """Orthogonal directions with variances 8, 4, 2, 1: shares 8/15, 12/15, 14/15, 1."""
    basis = torch.linalg.qr(randn(64, 4) - randn(64, 4).mean(0))[0]
    centred = torch.linalg.qr(basis - basis.mean(0))[0]  # orthonormal columns of mean zero
    assert centred.mean(0).abs().max() < 1e-12
    points = embedded(centred * torch.tensor([8.0, 4.0, 2.0, 1.0], dtype=torch.float64).sqrt(), 9)
    shares = (8 / 15, 12 / 15, 14 / 15, 1.0)
    assert geometry.pca(points, variance) == 1 + sum(share < variance for share in shares)


def brute_neighbours(points):
    """Ascending distances from each point to all others, by the definition."""
    rows = points.double().tolist()
    return [sorted(math.dist(a, b) for j, b in enumerate(rows) if j != i) for i, a in enumerate(rows)]


@pytest.mark.parametrize("discard", (0.0, 0.1, 0.35))
def test_two_nn_maximises_the_likelihood_of_the_ratios(discard):
    points = embedded(randn(57, 6), 12)
    ratios = sorted(math.log(near[1] / near[0]) for near in brute_neighbours(points))
    kept = len(ratios) - math.floor(discard * len(ratios))

    def log_likelihood(d):
        """Kept ratios are exponential with rate d; each of the others is at least the largest kept one."""
        seen = sum(math.log(d) - d * ratio for ratio in ratios[:kept])
        return seen - (len(ratios) - kept) * d * ratios[kept - 1]

    got = two_nn(points, discard)
    assert 0 < got < 12
    assert log_likelihood(got) > max(log_likelihood(got * 1.001), log_likelihood(got / 1.001))
    if discard == 0:
        assert got == pytest.approx(len(ratios) / sum(ratios), rel=1e-12)


@pytest.mark.parametrize("k", ((2,), (5, 9), range(10, 21)), ids=str)
def test_levina_bickel_averages_inverses(k):
    points = randn(41, 5)
    near = brute_neighbours(points)

    def estimate(count):
        inverses = [sum(math.log(row[count - 1] / row[j]) for j in range(count - 1)) / (count - 1) for row in near]
        return len(inverses) / sum(inverses)

    assert levina_bickel(points, k) == pytest.approx(min(5, sum(map(estimate, k)) / len(k)), rel=1e-12)


@given(
    seed=st.integers(0, 10**6), num=st.integers(0, 30), dim=st.integers(1, 5), values=st.integers(1, 3),
    dtype=st.sampled_from((torch.bfloat16, torch.float32, torch.float64)),
)  # fmt: skip
def test_every_cloud_has_a_finite_dimension(seed, num, dim, values, dtype):
    """Grids with repeated points, down to a single point or none."""
    points = (torch.randint(0, values, (num, dim), generator=seeded(seed)) * 0.1).to(dtype)
    got = geometry.dimensions(points)
    different = len({tuple(row) for row in points.tolist()})
    assert 0 <= got.pca <= min(dim, max(0, different - 1))
    for estimate in (got.two_nn, got.mle):
        assert 0 <= estimate <= dim
        assert (estimate == 0) == (different < 3)
    if different <= 1:
        assert got.pca == 0


def cosine(a, b):
    return math.fsum(x * y for x, y in zip(a, b)) / (math.hypot(*a) * math.hypot(*b))


def mean_row(rows):
    return [math.fsum(column) / len(rows) for column in zip(*rows)]


def variation(sizes):
    mean = math.fsum(sizes) / len(sizes)
    return math.sqrt(math.fsum((size - mean) ** 2 for size in sizes) / len(sizes)) / mean


KEYS = randn(3, 83, 6) * torch.tensor([0.2, 1.0, 30.0]).double()[:, None, None] + randn(3, 1, 6, seed=2)


def test_norms_and_anchor_similarity_are_what_they_say():
    got, anchors = geometry.norms(KEYS), measure_layer(0, KEYS, KEYS, [83])["anchor"]
    for head, keys in enumerate(KEYS.tolist()):
        sizes = [math.hypot(*key) for key in keys]
        assert got["norm"][head].item() == pytest.approx(math.fsum(sizes) / len(sizes), rel=1e-12)
        assert got["spread"][head].item() == pytest.approx(variation(sizes), rel=1e-12)
        wanted = math.fsum(cosine(mean_row(keys), key) for key in keys) / len(keys)
        assert anchors[head] == pytest.approx(wanted, rel=1e-10)


def test_dilution_equals_brute_force():
    lengths = [5, 32, 64, 83]
    got = geometry.dilution(KEYS.float(), lengths)
    assert got["pull"].shape == got["spread"].shape == (len(lengths), len(KEYS))
    for head, keys in enumerate(KEYS.float().tolist()):
        for place, length in enumerate(lengths):
            centre = mean_row(keys[:length])
            pull = math.hypot(*centre) * length / math.fsum(math.hypot(*key) for key in keys[:length])
            assert got["pull"][place, head].item() == pytest.approx(pull, rel=1e-10)
            distances = [math.dist(key, centre) for key in keys[:length]]
            assert got["spread"][place, head].item() == pytest.approx(variation(distances), rel=1e-10)


def options(*arguments):
    return build_parser().parse_args(["inspect", "--model", MODEL, *map(str, arguments)])


def inspect(*arguments, width=112):
    """The record and what was printed."""
    printed = io.StringIO()
    return geometry.run(options(*arguments), Console(file=printed, width=width)), printed.getvalue()


@pytest.mark.parametrize("width", (90, 120))
def test_the_bundled_model_is_inspected_from_end_to_end(width, tmp_path):
    out, text = tmp_path / "results", tmp_path / "text.txt"
    text.write_text(toy_told("facts", 256, 0))
    report, printed = inspect("--text", text, "--context", 256, "--out", out, width=width)
    model, tokenizer = load()
    record = json.loads((out / "inspect.json").read_text())
    assert record["tokens"] == 256 and record["lengths"] == [256]
    assert [layer["layer"] for layer in record["layers"]] == list(range(model.config.num_hidden_layers))
    table = printed[: printed.index("Means over")].splitlines()
    rows = {words[0]: words[1:] for words in map(str.split, table) if words and words[0].isdigit()}
    assert set(rows) == {str(index) for index in range(model.config.num_hidden_layers)}
    assert "…" not in printed, "the table fits"
    assert "what each head needs is not known yet" in printed or "what each head keeps of a text" in printed
    ids = tokenizer(text.read_text(), return_tensors="pt").input_ids
    cache = DynamicCache()
    model(ids, past_key_values=cache)
    for layer, stored, row in zip(report["layers"], cache.layers, rows.values()):
        keys = stored.keys[0].double()
        wanted = [geometry.dimensions(head) for head in keys]
        assert layer["pca"] == [one.pca for one in wanted]
        assert layer["two_nn"] == pytest.approx([one.two_nn for one in wanted], rel=1e-4)
        assert layer["mle"] == pytest.approx([one.mle for one in wanted], rel=1e-4)
        assert layer["key_norm"] == pytest.approx(keys.norm(dim=-1).mean(-1).tolist(), rel=1e-5)
        assert layer["value_norm"] == pytest.approx(stored.values[0].norm(dim=-1).mean(-1).tolist(), rel=1e-5)
        anchor = torch.nn.functional.cosine_similarity(keys, keys.mean(1, keepdim=True), dim=-1)
        assert layer["anchor"] == pytest.approx(anchor.mean(-1).tolist(), abs=1e-6)
        assert row[2] == f"{sum(layer['mle']) / len(layer['mle']):.1f}"


def test_only_full_attention_layers_are_read():
    model, ids = build("gemma3"), torch.randint(3, 90, (1, 40), generator=seeded())
    found = list(read_stock(model, ids))
    assert [index for index, _, _ in found] == [1, 3]
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    for index, keys, values in found:
        assert torch.equal(keys, cache.layers[index].keys) and torch.equal(values, cache.layers[index].values)
        assert keys.shape == (1, 2, 40, 16)


def test_what_cannot_be_measured_is_refused():
    ids = torch.arange(3, 90)[None]
    with pytest.raises(FastKVError, match="full-attention layers, got gemma3_text with none in 4"):
        list(read_stock(build("gemma3", layer_types=["sliding_attention"] * 4), ids))
    model = build("llama")
    model.model.layers[2].self_attn.k_proj.weight[0, 0] = math.nan
    raises("layer 2", list, read_stock(model, ids))
