"""`fastkv view`: what the page says is what the cache holds; texts, mistakes, and the page in a browser."""

import base64
import json
import math
import re
import types
import zlib
from contextlib import nullcontext

import pytest
import tokenizers
import torch
from tokenizers.pre_tokenizers import ByteLevel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedTokenizerFast

from fastkv import Budget, FastKVCache, FastKVError, corrections, patched, policies
from fastkv.cache.layout import Layout
from fastkv.integrations.transformers import modules
from fastkv.integrations.transformers.layer import FastKVLayer
from fastkv.integrations.transformers.stock import CACHE
from fastkv.lab import common, fidelity, view
from fastkv.lab.cli import main
from fastkv.lab.equal_bytes import EVICT_EVERY, equal_bytes
from fastkv.lab.view import FINE, LEVELS, TOP, Reading, read_full, trace

from .browser import Browser, find
from .families import tiny
from .models import FAMILIES, LATENT, build
from .pairwise import named
from .toy import MODEL, generate, told
from .toy import text as toy_text

CONTEXT, BLOCK, STEPS, BUDGETS = 150, 32, 18, (28, 48)
POLICIES = ("fastkv", "snapkv")
TEXT = generate("facts", 150, 3).context
VIEW = ("view", "--model", MODEL, "--text", toy_text())


def unpacked(text, shape):
    """The inverse of `packed`, all arrays [layers, heads, N] in one, int32."""
    raw = bytearray(zlib.decompress(base64.b64decode(text)))
    first, second = torch.frombuffer(raw, dtype=torch.uint8).int().view(2, -1)
    layers, heads, num = shape
    return (first + 256 * second).view(-1, num, layers, heads).permute(0, 2, 3, 1)


def data_of(page):
    """What a page holds."""
    _, _, rest = page.partition('id="data">')
    return json.loads(rest.partition("</script>")[0])


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A small page: its path."""
    path = tmp_path_factory.mktemp("view") / "new" / "view.html"
    text = path.parent.parent / "text.txt"
    text.write_text(told("facts", CONTEXT, 1))
    sizes = [f"--context={CONTEXT}", f"--prefill-block={BLOCK}", f"--steps={STEPS}", f"--text={text}", "--answer=4"]
    caches = [f"--policies={','.join(POLICIES)}", f"--budgets={','.join(map(str, BUDGETS))}"]
    assert main([*VIEW, *sizes, *caches, "--out", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def data(page):
    return data_of(page.read_text())


@pytest.fixture(scope="module")
def ids(bundled):
    sample = generate("facts", CONTEXT, 1)
    return torch.tensor([bundled[1](f"{sample.context} {sample.questions[0]} {sample.answers[0]}").input_ids])


def array(data, cache, name):
    """[layers, heads, tokens] of a cache."""
    shape = (len(data["layers"]), data["heads"], len(data["tokens"]))
    return unpacked(data["numbers"], shape)[cache[name] // math.prod(shape)]


def plainly(bundled, cache):
    """The model patched as for that cache of the page."""
    budget = equal_bytes(bundled[0].config, Budget(tokens=cache["budget"], **common.SHARES), torch.float32)
    told = {
        "policy": cache["policy"],
        "budget": budget,
        "prefill_block": BLOCK,
        "evict_every": EVICT_EVERY,
        "slots": "model",
    }
    return view.traceable(common.Cache(cache["policy"], cache["budget"], told)).of(bundled[0])


def test_the_page_says_what_the_cache_holds(bundled, data, ids):
    """A plain run, the prompt in one call, has the same tokens at the same places, and says the same."""
    for cache in data["caches"]:
        with plainly(bundled, cache) as model:
            mine = FastKVCache(model)
            said = [model(ids[:, :-STEPS], **{CACHE: mine}).logits[0, -1].argmax()]
            said += [model(one, **{CACHE: mine}).logits[0, -1].argmax() for one in ids[:, -STEPS:].split(1, 1)]
        gone = array(data, cache, "gone")
        for place, layer in enumerate(data["layers"]):
            slots = mine.layers[layer].state.exact
            for head in range(data["heads"]):
                held = slots["positions"][0, head][slots.valid[0, head]].sort().values
                assert torch.equal(held.long(), (gone[place, head] == 0).nonzero()[:, 0]), (cache["policy"], layer)
        assert [bundled[1].decode([one]) for one in said[:-1]] == [word.strip() for word in cache["said"]]
        events = cache["events"]
        assert gone.max() == len(events) and events == sorted(set(events)) and events[-1] <= CONTEXT
        first = torch.tensor([0, *events])[gone.long()]  # nothing leaves before it was read, nor while it is recent
        tokens = torch.arange(CONTEXT)
        assert ((first == 0) | (first - common.SHARES["recent"] > tokens)).all() and (
            gone[..., : common.SHARES["sinks"]] == 0
        ).all()


def test_centroids_are_those_of_the_cache(bundled, data, ids):
    model, _ = bundled
    stock = model(ids)[CACHE].layers[0].keys[0]  # the same in a compressed run, there is no layer below
    for cache in data["caches"]:
        assert (cache["centroid"] is not None) == (cache["policy"] == "fastkv")
        if cache["centroid"] is None:
            continue
        with plainly(bundled, cache):
            mine = FastKVCache(model)
            for part in (ids[:, :-STEPS], *ids[:, -STEPS:].split(1, 1)):
                model(part, **{CACHE: mine})
        gone, centroid = array(data, cache, "gone"), array(data, cache, "centroid")
        assert torch.equal(gone > 0, centroid > 0)
        for place, layer in enumerate(data["layers"]):
            parts = mine.layers[layer].state.parts
            for head in range(data["heads"]):
                members = [centroid[place, head] == number + 1 for number in range(parts.num)]
                assert parts.count[0, head].tolist() == [int(mask.sum()) for mask in members]
                for number, mask in enumerate(members if layer == 0 else ()):
                    if not mask.any():
                        continue
                    keys, found = stock[head, mask], parts.keys[0, head, number].float()
                    # A part has been rounded to bf16 whenever others joined it, at most to its own last bit.
                    limit = 2**-7 * keys.abs().amax(0)
                    assert ((keys.mean(0) - found).abs() <= limit).all()


class Passing(TorchDispatchMode):
    """Changes nothing; operators are no longer called directly, as on a GPU."""

    def __torch_dispatch__(self, function, kinds, arguments=(), options=None):
        return function(*arguments, **(options or {}))


def test_centroids_are_followed_through_operators():
    """As where tensors are on a GPU: an operator gets the tensors of a state, not the objects."""
    model = build("llama")
    reading = Reading(torch.randint(5, 60, (1, 90), generator=torch.Generator().manual_seed(0)), 32, 20)
    full, found = read_full(model, reading), []
    for mode in (nullcontext(), Passing()):
        with patched(model, "fastkv", Budget(tokens=28, recent=8), prefill_block=32, backend="reference"), mode:
            found.append(trace(model, reading, full))
    direct, through = found
    assert direct.centroid.max() > 1 and torch.equal(direct.centroid > 0, direct.gone > 0)
    assert torch.equal(direct.gone, through.gone) and torch.equal(direct.centroid, through.centroid)


def test_of_every_policy_it_is_known_what_it_remembers():
    assert set(view.REMEMBERS) == {policies.get(name).correction for name in policies.names() if name != "duoattention"}


@pytest.mark.parametrize("policy", ["fastkv-reread", "kvzip"])
def test_a_text_read_twice_is_followed(policy, tmp_path):
    """Errors are of the first reading; centroids of the second are followed bit for bit, or there would be no page."""
    path = tmp_path / "view.html"
    sizes = [f"--context={CONTEXT}", "--prefill-block=whole", f"--steps={STEPS}", "--budgets=28"]
    assert main([*VIEW, *sizes, f"--policies={policy}", "--out", str(path)]) == 0
    data = data_of(path.read_text())
    (cache,) = data["caches"]
    gone = array(data, cache, "gone")
    assert cache["events"][0] == CONTEXT - STEPS and set(gone.unique().tolist()) == set(range(len(cache["events"]) + 1))
    if policy == "fastkv-reread":
        assert torch.equal(array(data, cache, "centroid") > 0, gone > 0)


def test_slots_of_fewer_bits_are_followed(bundled, tmp_path):
    """Centroids are followed bit for bit, or there would be no page."""
    slots, bytes_of_a_token = "int4", 2 * (32 + 2 * 2) + 4
    sizes = [f"--context={CONTEXT}", f"--prefill-block={BLOCK}", f"--steps={STEPS}", "--equal=tokens"]
    found = {}
    for name in ("model", slots):
        path = tmp_path / f"{name}.html"
        caches = ["--policies=fastkv", f"--budgets={BUDGETS[0]}", "--slots", name]
        assert main([*VIEW, *sizes, *caches, "--out", str(path)]) == 0
        found[name] = data_of(path.read_text())
    cache, plain = found[slots]["caches"][0], found["model"]["caches"][0]
    assert (found[slots]["slots"], found["model"]["slots"]) == (slots, "float32")
    assert cache["slot"] == bytes_of_a_token and plain["slot"] == 2 * 4 * 64 + 4
    assert cache["bytes"] < plain["bytes"] and cache["kept"] == plain["kept"]
    gone, centroid = array(found[slots], cache, "gone"), array(found[slots], cache, "centroid")
    assert gone.any() and torch.equal(gone > 0, centroid > 0)


def test_errors_are_those_of_fidelity(bundled, data, ids):
    full = fidelity.read_full(bundled[0], ids, STEPS)
    for cache in data["caches"][::2]:  # both policies
        with plainly(bundled, cache) as model:
            exact = fidelity.measure(model, ids, STEPS, full).error[:, 0]  # [layers, steps, query heads]
        want = exact.unflatten(-1, (data["heads"], -1)).mean(-1).transpose(1, 2)
        codes = array(data, cache, "error")
        assert (codes[..., :BLOCK] == 0).all()  # nothing was evicted yet
        off = (codes[..., -STEPS:] - LEVELS * (1 + want.clamp(max=TOP) / FINE).log() / math.log(1 + TOP / FINE)).abs()
        assert off.max() <= 0.5 + 1e-3


def test_numbers_of_the_page_come_back():
    arrays = [torch.tensor([[[0, 1, 255], [256, 257, 65535]]]), torch.arange(6).view(1, 2, 3)]
    text, starts = view.packed(arrays)
    assert starts == [0, 6] and torch.equal(unpacked(text, (1, 2, 3)), torch.stack(arrays).int())
    assert view.coded(torch.tensor([0.0, 1e-9, 0.09, 1.0, 4.0, 9.0])).tolist() == [0, 0, 12, 24, 31, 31]


def test_the_page_needs_nothing_else(page):
    text = page.read_text()
    assert "default-src 'none'" in text and len(text) < 150_000
    found = {word for word in re.findall(r"\w+://[^\"' ]+", text) if "www.w3.org" not in word}
    assert not found and not re.search(r"<link|<img|<iframe|@import|\bsrc=|fetch\(|XMLHttpRequest", text)


def test_a_text_cannot_leave_its_place(tmp_path, capsys):
    file, out = tmp_path / "a.txt", tmp_path / "a.html"
    file.write_text(f"{TEXT} </script><script>boom()</script> <!-- the end .\n")
    arguments = ["--context=170", "--policies=streaming", "--budgets=40", "--prefill-block=whole", "--equal=tokens"]
    assert main([*VIEW, "--text", str(file), *arguments, "--out", str(out)]) == 0
    page = out.read_text()
    assert page.count("<script") == view.TEMPLATE.read_text().count("<script") and "<!--" not in page
    data = data_of(page)
    assert "".join(data["tokens"]).replace("<bos>", "") == file.read_text().rstrip()
    assert data["answer"] == 0 and len(data["said"]) == 32 and data["text"] == "a.txt"
    (cache,) = data["caches"]
    assert cache["kept"] == 40 and (array(data, cache, "gone")[..., -common.SHARES["recent"] :] == 0).all()


def test_pieces_are_the_text(bundled):
    text = "the  code ,\n of"
    encoded = bundled[1](text, return_offsets_mapping=True)
    pieces = view.pieces_of(bundled[1], text, encoded.input_ids, encoded.offset_mapping)
    assert pieces == ["<bos>", "the", "  code", " ,", "\n of"]
    assert view.pieces_of(bundled[1], text, encoded.input_ids, None) == ["<bos>", "the", "code", ",", "of"]


def test_a_page_begins_where_the_text_says_the_answer():
    pieces = ["<bos>", "A", " red", " butter", "cup", ".", " What", "?", " But", "ter", "cup"]
    assert view.found(pieces, 3) == 3
    assert view.found([*pieces[:8], " a", " rose"], 2) == 8  # it is not there
    assert view.found(["İ", " x", " y", " x"], 1) == 1  # a letter that is longer in lower case


def test_pieces_of_letters_that_are_several_tokens():
    text = "so  é\n🙂!"
    bytewise = tokenizers.Tokenizer(tokenizers.models.BPE({one: i for i, one in enumerate(ByteLevel.alphabet())}, []))
    bytewise.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise)
    encoded = tokenizer(text, return_offsets_mapping=True)
    pieces = view.pieces_of(tokenizer, text, encoded.input_ids, encoded.offset_mapping)
    assert pieces == ["s", "o", " ", " ", "é", "·", "\n", "🙂", "·", "·", "·", "!"]


@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3", named("gpt2", slow=True)])
def test_other_models(family):
    """Layers with a sliding window are left out; where the cache lies is where the trace says."""
    model = build(family) if family in {**FAMILIES, **LATENT} else tiny.build(family, "sdpa")
    ids = torch.randint(5, 60, (1, 90))
    reading = Reading(ids, 32, 20)
    full = read_full(model, reading)
    with patched(model, "fastkv", Budget(tokens=28, recent=8), prefill_block=32, backend="reference"):
        found = trace(model, reading, full)
        cache = FastKVCache(model)
        for part in (ids[:, :70], *ids[:, 70:].split(1, 1)):
            model(part, **{CACHE: cache})
    assert found.layers == [i for i, one in enumerate(cache.layers) if isinstance(one, FastKVLayer)]
    for place, layer in enumerate(found.layers):
        slots = cache.layers[layer].state.exact
        for head in range(slots.lengths.shape[1]):
            held = slots["positions"][0, head][slots.valid[0, head]].sort().values
            assert torch.equal(held.long(), (found.gone[place, head] == 0).nonzero()[:, 0])
    assert found.error[..., :32].max() < 1e-5 < found.error.max() and found.error.isfinite().all()


def test_layers_that_cannot_be_drawn_are_refused():
    model = build("llama")
    modules.attentions(model)[1].o_proj = None
    with pytest.raises(FastKVError, match=r"one named o_proj, out_proj, .*, got none in LlamaAttention"):
        read_full(model, Reading(torch.zeros(1, 9, dtype=torch.long), None, 2))
    shapes = [torch.zeros(1, heads, 3, 4) for heads in (2, 4)]
    layers = [types.SimpleNamespace(state=Layout((3,) * len(k[0]), corrections.NONE, 1).allocate(k, k)) for k in shapes]
    with pytest.raises(FastKVError, match=r"equally many KV heads, got LlamaForCausalLM with \[2, 4\]"):
        view.states_of(model, layers)


# In a browser.


@pytest.fixture(scope="module")
def browser(page):
    if find() is None:
        pytest.skip("there is no Chromium on the PATH")
    with Browser() as opened:
        yield opened


def at(browser, state):
    """What the page shows, of what is in its data: kept counts of the heads shown."""
    return browser.run(
        f"(Object.assign(state, {json.dumps(state)}), show(), Array.from(keptBy(cacheNow(), rows(), state.time)))"
    )


@pytest.mark.slow
def test_clicking_through_the_page(browser, page, data):
    browser.open(page)
    assert browser.errors == [] and browser.asked == [page.as_uri()]
    assert browser.text("h1") == f"What a cache kept of {CONTEXT} tokens"
    assert browser.run("document.querySelectorAll('#text span').length") == CONTEXT

    gone = {(c["policy"], c["budget"]): array(data, c, "gone") for c in data["caches"]}
    shown = "Array.from(document.querySelectorAll('#text span'), one => one.classList.contains('none'))"
    # A click on a policy and a budget.
    for policy, name in enumerate(POLICIES):
        for budget, tokens in enumerate(BUDGETS):
            browser.click(f"#policy label:nth-child({policy + 1})")
            browser.click(f"#budget label:nth-child({budget + 1})")
            assert browser.run("[state.policy, state.budget]") == [policy, budget]
            counts = (gone[name, tokens] == 0).sum((0, 1))
            assert browser.run("Array.from(keptBy(cacheNow(), rows(), state.time))") == counts.tolist()
            assert browser.run(shown) == (counts == 0).tolist()
    # The keyboard alone: along the sliders to one head, back in time, and behind the search to the text.
    browser.run("document.querySelector('#layer').focus()")
    browser.press("ArrowRight", 2)
    browser.press("Tab")
    browser.press("ArrowRight")
    assert browser.run("[state.layer, state.head]") == [2, 1] and browser.text("#layer-out") == "1"
    browser.press("Tab")
    browser.press("Home")
    cache = data["caches"][-1]
    first = cache["events"][0]
    assert browser.text("#time-out") == f"after {first} tokens"
    kept = (gone[cache["policy"], cache["budget"]][1, 0] != 1) & (torch.arange(CONTEXT) < first)
    assert browser.run("Array.from(keptBy(cacheNow(), rows(), state.time))") == kept.int().tolist()
    browser.press("Tab", 2)
    browser.press("Home")
    browser.press("ArrowRight", 3)
    assert browser.run("[state.token, document.activeElement.dataset.i]") == [3, "3"]
    assert browser.errors == []


@pytest.mark.slow
def test_fates_told_are_those_of_the_cache(browser, page, data):
    browser.open(page)
    cache = next(c for c in data["caches"] if c["policy"] == "fastkv" and c["budget"] == BUDGETS[0])
    gone, centroid = array(data, cache, "gone"), array(data, cache, "centroid")
    layer, head = 2, 1
    browser.run(f"show({{policy: 0, budget: 0, layer: {layer + 1}, head: {head + 1}}})")
    for token in (0, 20, 50, 77, CONTEXT - 1):
        browser.hover(f"#text [data-i='{token}']") if token == 77 else browser.run(f"select({token})")
        event, where = int(gone[layer, head, token]), int(centroid[layer, head, token])
        mates = (centroid[layer, head] == where).nonzero()[:, 0].tolist() if event else []
        said = browser.text("#fate")
        if event:
            assert (
                f"when {cache['events'][event - 1]} tokens" in said and f"centroid {where}, one of {len(mates)}" in said
            )
        else:
            assert said.startswith("Kept.")
        marked = "Array.from(document.querySelectorAll('#text span.mate'), one => Number(one.dataset.i))"
        assert browser.run(marked) == mates
    cells = browser.run("Array.from(document.querySelectorAll('#heads td'), one => one.textContent)")
    assert cells == ["kept"] * len(cells) and len(cells) == len(data["layers"]) * data["heads"]
    assert browser.errors == []
