"""`fastkv view`: what the page says is what the cache holds; texts, mistakes, and the page in a browser."""

import base64
import json
import math
import re
import types
import zlib

import pytest
import tokenizers
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from fastkv import Budget, FastKVCache, FastKVError, corrections, patched, policies
from fastkv.cache.layout import Layout
from fastkv.config import EVICT_EVERY
from fastkv.integrations.transformers import modules
from fastkv.integrations.transformers.layer import FastKVLayer
from fastkv.integrations.transformers.stock import CACHE
from fastkv.lab import common, fidelity, view
from fastkv.lab.cli import main
from fastkv.lab.reading import equal_bytes
from fastkv.lab.view import FINE, LEVELS, TOP, Full, Reading, read_full, trace

from .browser import Browser, find
from .families import tiny
from .models import FAMILIES, LATENT, build, raises
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
    sizes = [f"--context={CONTEXT}", f"--prefill-block={BLOCK}", f"--steps={STEPS}", f"--text={text}"]
    made(path, *sizes, f"--policies={','.join(POLICIES)}", f"--budgets={','.join(map(str, BUDGETS))}")
    return path


@pytest.fixture(scope="module")
def data(page):
    return data_of(page.read_text())


@pytest.fixture(scope="module")
def ids(bundled):
    sample = generate("facts", CONTEXT, 1)
    return torch.tensor([bundled[1](f"{sample.context} {sample.questions[0]} {sample.answers[0]}").input_ids])


def made(path, *arguments):
    """What the page holds that the command writes there."""
    assert main([*VIEW, *arguments, "--out", str(path)]) == 0
    return data_of(path.read_text())


def array(data, cache, name):
    """[layers, heads, tokens] of a cache."""
    shape = (len(data["layers"]), data["heads"], len(data["tokens"]))
    return unpacked(data["numbers"], shape)[cache[name] // math.prod(shape)]


def assert_kept(cache, layers, gone):
    """Slots hold what did not go, by a page's data."""
    for place, layer in enumerate(layers):
        slots = cache.layers[layer].state.exact
        for head in range(slots.lengths.shape[1]):
            held = slots["positions"][0, head][slots.valid[0, head]].sort().values
            assert torch.equal(held.long(), (gone[place, head] == 0).nonzero()[:, 0]), layer


def plainly(bundled, cache):
    """The model patched as for that cache of the page."""
    budget = equal_bytes(bundled[0].config, Budget(tokens=cache["budget"], **common.SHARES), torch.float32)
    how = {"prefill_block": BLOCK, "evict_every": EVICT_EVERY, "slots": "model", "static": False}
    return patched(bundled[0], cache["policy"], budget, **how)


def test_the_page_says_what_the_cache_holds(bundled, data, ids):
    """A plain run, the prompt in one call, has the same tokens at the same places, and says the same."""
    for cache in data["caches"]:
        with plainly(bundled, cache) as model:
            mine = FastKVCache(model)
            said = [model(ids[:, :-STEPS], **{CACHE: mine}).logits[0, -1].argmax()]
            said += [model(one, **{CACHE: mine}).logits[0, -1].argmax() for one in ids[:, -STEPS:].split(1, 1)]
        gone = array(data, cache, "gone")
        assert_kept(mine, data["layers"], gone)
        assert [bundled[1].decode([one]) for one in said[:-1]] == [word.strip() for word in cache["said"]]
        events = cache["events"]
        assert gone.max() == len(events) and events == sorted(set(events)) and events[-1] <= CONTEXT
        first = torch.tensor([0, *events])[gone.long()]  # nothing leaves before it was read, nor while it is recent
        assert ((first == 0) | (first - common.SHARES["recent"] > torch.arange(CONTEXT))).all()
        assert (gone[..., : common.SHARES["sinks"]] == 0).all()


def test_of_every_policy_it_is_known_what_it_remembers():
    assert set(view.REMEMBERS) == {policies.get(name).correction for name in policies.names() if name != "duoattention"}


@pytest.mark.parametrize("policy", ["fastkv-reread", "kvzip"])
def test_a_text_read_twice_is_followed(policy, tmp_path):
    """Errors are of the first reading."""
    sizes = [f"--context={CONTEXT}", "--prefill-block=whole", f"--steps={STEPS}", "--budgets=28"]
    data = made(tmp_path / "view.html", *sizes, f"--policies={policy}")
    (cache,) = data["caches"]
    assert cache["events"][0] == CONTEXT - STEPS
    assert array(data, cache, "gone").unique().tolist() == [*range(len(cache["events"]) + 1)]


def test_slots_of_fewer_bits_are_followed(bundled, tmp_path):
    slots, bytes_of_a_token = "int4", 2 * (32 + 2 * 2) + 4
    sizes = [f"--context={CONTEXT}", f"--prefill-block={BLOCK}", f"--steps={STEPS}", "--equal=tokens"]
    sizes += ["--policies=fastkv", f"--budgets={BUDGETS[0]}"]
    found = {name: made(tmp_path / "view.html", *sizes, "--slots", name) for name in ("model", slots)}
    cache, plain = found[slots]["caches"][0], found["model"]["caches"][0]
    assert (found[slots]["slots"], found["model"]["slots"]) == (slots, "float32")
    assert cache["slot"] == bytes_of_a_token and plain["slot"] == 2 * 4 * 64 + 4
    assert cache["bytes"] < plain["bytes"] and cache["kept"] == plain["kept"]
    assert array(found[slots], cache, "gone").any()


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


def synthetic(num, layers, heads, seed):
    """A trace of a text of so many tokens that is harder to compress than real ones: nothing follows from anything."""
    drawn = torch.Generator().manual_seed(seed)
    shape = layers, heads, num
    events = list(range(256, num, 256))
    last = torch.arange(num) // 256 + 1
    waits = torch.zeros(shape).exponential_(1.0, generator=drawn).long()  # blocks that a token stays
    gone = torch.where(last + waits < len(events), last + waits, 0)
    error = torch.randn(shape, generator=drawn).sub(2).exp()
    said = torch.zeros(32, dtype=torch.long)
    found = {"layers": list(range(layers)), "events": events, "gone": gone, "error": error, "said": said}
    return {**found, "kept": 256.0, "bytes": 1, "slot": 1.0, "slots": "float32"}


@pytest.fixture(scope="module")
def long_page(bundled, tmp_path_factory):
    """8,000 tokens of a model of 30 layers with 3 KV heads, 15 caches: the path of the page, and the traces."""
    num, policies, budgets = 8000, ["a", "b", "c", "d", "e"], [128, 256, 512]
    one = synthetic(num, 30, 3, 0)
    traces = [(common.Cache(policy, tokens, {}), one, "none") for policy in policies for tokens in budgets]
    ids = torch.randint(5, 60, (1, num), generator=torch.Generator().manual_seed(2))
    text = view.Text(ids, [" wonderful"] * num, "a text", 0, 0)
    options = types.SimpleNamespace(model="model", policies=policies, budgets=budgets)
    full = Full({}, torch.zeros(32, dtype=torch.long), 1)
    data = view.page_of(text, Reading(ids, 256, 32), options, full, traces, bundled[1])
    view.written(data, path := tmp_path_factory.mktemp("long") / "view.html")
    return path, traces


def test_a_page_of_a_long_text_is_small_and_holds_the_trace(long_page):
    path, traces = long_page
    assert path.stat().st_size <= 15e6
    data = data_of(path.read_text())
    numbers = unpacked(data["numbers"], traces[0][1]["gone"].shape)
    for cache, (_, made, _) in zip(data["caches"], traces):
        for name, want in (("gone", made["gone"]), ("error", view.coded(made["error"]))):
            assert torch.equal(numbers[cache[name] // want.numel()], want.int()), name


def test_the_page_needs_nothing_else(page):
    text = page.read_text()
    assert "default-src 'none'" in text and len(text) < 150_000
    found = {word for word in re.findall(r"\w+://[^\"' ]+", text) if "www.w3.org" not in word}
    assert not found and not re.search(r"<link|<img|<iframe|@import|\bsrc=|fetch\(|XMLHttpRequest", text)


def test_a_text_cannot_leave_its_place(tmp_path, capsys):
    file, out = tmp_path / "a.txt", tmp_path / "a.html"
    file.write_text(f"{TEXT} </script><script>boom()</script> <!-- the end .\n")
    arguments = ["--context=170", "--policies=streaming", "--budgets=40", "--prefill-block=whole", "--equal=tokens"]
    data, page = made(out, "--text", str(file), *arguments), out.read_text()
    assert page.count("<script") == view.TEMPLATE.read_text().count("<script") and "<!--" not in page
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
    full = read_full(model, reading := Reading(ids, 32, 20))
    with patched(model, "fastkv", Budget(tokens=28, recent=8), prefill_block=32, backend="reference"):
        found = trace(model, reading, full)
        cache = FastKVCache(model)
        for part in (ids[:, :70], *ids[:, 70:].split(1, 1)):
            model(part, **{CACHE: cache})
    assert found["layers"] == [i for i, one in enumerate(cache.layers) if isinstance(one, FastKVLayer)]
    assert_kept(cache, found["layers"], found["gone"])
    assert found["error"][..., :32].max() < 1e-5 < found["error"].max() and found["error"].isfinite().all()


def test_layers_that_cannot_be_drawn_are_refused():
    model = build("llama")
    modules.attentions(model)[1].o_proj = None
    with pytest.raises(FastKVError, match=r"one named o_proj, out_proj, .*, got none in LlamaAttention"):
        read_full(model, Reading(torch.zeros(1, 9, dtype=torch.long), None, 2))
    shapes = [torch.zeros(1, heads, 3, 4) for heads in (2, 4)]
    layers = [types.SimpleNamespace(state=Layout((3,) * len(k[0]), corrections.NONE, 1).allocate(k, k)) for k in shapes]
    raises(r"equally many KV heads, got LlamaForCausalLM with \[2, 4\]", view.states_of, model, layers)


@pytest.fixture(scope="module")
def browser(page):
    if find() is None:
        pytest.skip("there is no Chromium on the PATH")
    with Browser() as opened:
        yield opened


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
    gone = array(data, cache, "gone")
    layer, head = 2, 1
    browser.run(f"show({{policy: 0, budget: 0, layer: {layer + 1}, head: {head + 1}}})")
    for token in (0, 20, 50, 77, CONTEXT - 1):
        browser.hover(f"#text [data-i='{token}']") if token == 77 else browser.run(f"select({token})")
        event, said = int(gone[layer, head, token]), browser.text("#fate")
        told = f"Evicted when {cache['events'][event - 1]} tokens had been read; it is part of a centroid."
        assert said == told if event else said.startswith("Kept.")
    cells = browser.run("Array.from(document.querySelectorAll('#heads td'), one => one.textContent)")
    assert cells == ["kept"] * len(cells) and len(cells) == len(data["layers"]) * data["heads"]
    assert browser.errors == []
