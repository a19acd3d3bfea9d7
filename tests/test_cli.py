"""The command line: help, doctor, mistakes, and the demo on the toy."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
import transformers

import fastkv
from fastkv.lab import asking, demo, facts
from fastkv.lab.cli import main
from fastkv.lab.equal_bytes import EVICT_EVERY, equal_bytes
from fastkv.lab.pictures import labelled, spread
from fastkv.lab.recording import cache_bytes

from .pairwise import each
from .processes import of_module, run
from .toy import MODEL, generate, load, make_questions, measure, policy_of, relative_error

OPTIONS = ("--model", "--text", "--context", "--budgets", "--policies", "--seed", "--out", "--quick")


@pytest.fixture(scope="module")
def bundled():
    return load()


@pytest.mark.parametrize("arguments", [[], ["demo"], ["doctor"]], ids=lambda a: " ".join(a) or "fastkv")
def test_help_explains_and_gives_an_example(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "example: fastkv" in text
    if arguments == ["demo"]:
        assert all(option in text for option in OPTIONS)
    if not arguments:
        assert "demo" in text and "doctor" in text


def test_runs_as_a_command(tmp_path):
    code, said, errors = run(of_module("fastkv.lab.cli"), tmp_path, "doctor")
    assert code == 0, errors
    assert torch.__version__ in said


def test_doctor_prints_versions_backends_and_reasons(capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    said = dict(line.split(maxsplit=1) for line in lines if line.startswith("  "))
    assert said["fastkv"] == fastkv.__version__
    assert said["torch"] == torch.__version__
    assert said["transformers"] == transformers.__version__
    assert said["reference"].startswith("available")
    assert said["eager"] == "available"
    for name in ("triton", "flash_attention_2"):
        assert said[name].startswith("available") or said[name].startswith("not available: ")
    if not torch.cuda.is_available():
        assert said["flash_attention_2"].startswith("not available: ")


@pytest.mark.parametrize(
    "arguments, names",
    [
        ([], "COMMAND"),
        (["nonsense"], "nonsense"),
        (["demo", "--budgets", "many"], "many"),
        (["demo", "--budgets", "8"], "sinks"),
        (["demo", "--budgets", "-1"], "-1"),
        (["demo", "--budgets", "1/200"], "sinks"),
        (["demo", "--budgets", "1/4,1/100"], "sinks"),
        (["demo", "--budgets", "3/2"], "3/2"),
        (["demo", "--budgets", "1/0"], "1/0"),
        (["demo", "--policies", "nope"], "momentkv"),
        (["demo", "--policies", ","], "policies"),
        (["demo", "--context", "10"], "context"),
        (["demo", "--context", "1000000"], "context"),
        (["demo", "--words", "0"], "words"),
        (["demo", "--text", "/nowhere"], "/nowhere"),
        (["demo", "--text", __file__, "--context", "6000"], "give a longer text or ask for less"),
        (["demo", "--model", "/nowhere"], "cannot load a model from /nowhere"),
        (["demo", "--equal", "luck"], "luck"),
        (["demo", "--slots", "int2"], "int8"),
        (["view", "--slots", "int2"], "int8"),
        (["calibrate", "context", "--lengths", "many"], "many"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else "",
)
def test_a_mistake_gives_one_sentence_and_code_2(arguments, names, capsys, tmp_path):
    if arguments[:1] == ["demo"]:
        arguments = ["demo", "--model", MODEL, *arguments[1:], "--out", str(tmp_path / "out")]
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1 and said.err.startswith("fastkv")
    assert names in said.err
    assert not (tmp_path / "out").exists()


DEMO = ("demo", "--model", MODEL, "--context", "300", "--words", "4")


def test_the_demo_asks_every_cache(capsys, tmp_path):
    """Answers as they are, right or wrong; a row, a line and a point for each cache; memory that stops growing."""
    out = tmp_path / "results"
    assert main([*DEMO, "--policies", "fastkv,kvzip", "--budgets", "1/4,1/2", "--out", str(out)]) == 0
    text, record = capsys.readouterr().out, json.loads((out / "demo.json").read_text())
    tokenizer = load()[1]
    sample = facts.sample(tokenizer, 300, 6, "topics", "tuning")
    assert [one["text"] for one in record["questions"]] == [question.text for question in sample.questions]
    assert all(question.text in " ".join(text.split()) for question in sample.questions)
    rows = record["rows"]
    caches = [(row["policy"], row["budget"]) for row in rows]
    assert caches == [("full", 300), ("fastkv", "1/4"), ("kvzip", "1/4"), ("fastkv", "1/2"), ("kvzip", "1/2")]
    for row in rows:
        marks = [question.answered_by(said) for question, said in zip(sample.questions, row["answers"], strict=True)]
        assert row["right"] == sum(marks) and row["kl"] >= 0 and min(row["seconds"]) > 0
    assert len(re.findall("^  [✓✗] [1-6] ", text, re.M)) == 6 * len(rows)
    for row in rows[1:]:
        assert row["kl"] > 0 and row["nbytes"] <= rows[0]["nbytes"] * Fraction(row["budget"])
    full, small = record["memory"]
    assert full["tokens"] == small["tokens"] == [256, 300] and full["nbytes"][-1] == rows[0]["nbytes"]
    assert small["policy"] == "fastkv" and max(small["nbytes"]) <= rows[0]["nbytes"] / 4
    for name in ("demo.png", "demo-memory.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    assert record["versions"]["fastkv"] == fastkv.__version__


def test_the_demo_stores_keys_and_values_as_it_is_told(bundled):
    for slots in ("int4", "model"):
        with demo.cached(bundled[0], "fastkv", fastkv.Budget(tokens=48, recent=16), slots) as model:
            cache = model(torch.ones(1, 4, dtype=torch.int64)).past_key_values
        assert {layer.state.exact.format.name for layer in cache.layers} == {slots}


def test_the_demo_asks_as_if_each_question_were_the_only_one(bundled):
    """Forked caches, stock and compressed, against text and question one after the other; the cache stays as it was."""
    model, tokenizer = bundled
    sample = generate("facts", 400, 5, questions=3)
    seen = tokenizer(sample.context, return_tensors="pt").input_ids
    asked = [tokenizer(question, add_special_tokens=False).input_ids for question in sample.questions]
    asked[1] = asked[1][-5:]  # they may differ in length
    for how in (nullcontext(), fastkv.patched(model, "fastkv", fastkv.Budget(tokens=128, recent=16))):
        with how:
            cache = asking.read(model, seen)
            before = cache_bytes(cache)
            together = asking.answers(model, tokenizer, cache, seen, asked, 4)
            apart = [asking.answers(model, tokenizer, asking.read(model, seen), seen, [one], 4)[0] for one in asked]
            assert together == apart and cache_bytes(cache) == before and cache.get_seq_length() == seen.shape[1]
            plain = []
            for one in asked:
                past, new, written = asking.read(model, seen), torch.tensor([one]), []
                for _ in range(4):
                    new = model(new, past_key_values=past).logits[:, -1:].argmax(-1)
                    written.append(int(new))
                plain.append(written)
        assert [own[: len(one)] for own, one in zip(plain, together)] == together
        answers = [tokenizer(answer, add_special_tokens=False).input_ids for answer in sample.answers]
        if isinstance(how, nullcontext):
            assert together[0] == answers[0] and together[2] == answers[2]


def test_at_most_six_lines_have_a_name():
    names = labelled(fastkv.policies.names())
    assert names == ["kvzip", "fastkv", "compactor", "streaming", "snapkv"]  # and the full cache
    assert labelled(("tova", "knorm", "fastkv")) == ["fastkv", "tova", "knorm"]


@pytest.mark.parametrize("heights", [[0.5], [0.1, 0.1, 0.1, 0.9], [0.97, 0.98, 1.0], [0.0, 0.3, 0.31, 0.6]])
def test_labels_are_moved_apart(heights):
    moved = spread(heights, 0.1)
    assert all(low + 0.1 <= high + 1e-9 for low, high in zip(moved, moved[1:])) and 0 <= moved[0] and moved[-1] <= 1
    if heights == [0.5]:
        assert moved == heights


@pytest.mark.parametrize("task", ["facts", "pairs", "hops"])
@pytest.mark.parametrize("block", [None, 128], ids=["whole", "blocks"])
def test_an_answer_is_right_exactly_if_generate_gives_it(bundled, task, block):
    model, tokenizer = bundled
    asked = make_questions(tokenizer, task, 256, 4, seed=7)
    new = asked.answers.shape[1]
    with fastkv.patched(model, "snapkv", fastkv.Budget(tokens=64, recent=16), prefill_block=block):
        written = model.generate(
            asked.prompts, attention_mask=torch.ones_like(asked.prompts), max_new_tokens=new, do_sample=False
        )[:, asked.prompts.shape[1] :]
        written = torch.nn.functional.pad(written, (0, new - written.shape[1]), value=tokenizer.pad_token_id)
        assert torch.equal(measure(model, asked).right, (written == asked.answers).all(-1))
        # The same, whatever the model has learned: what it writes is right, and anything else is wrong.
        itself = measure(model, replace(asked, answers=written)).right
        assert torch.equal(itself, (written != tokenizer.pad_token_id).all(-1)) and itself.any()
        other = written.clone()
        other[:, -1] = (other[:, -1] + 1) % model.config.vocab_size
        assert not measure(model, replace(asked, answers=other)).right.any()


def test_questions_to_one_text_are_questions_to_copies_of_it(bundled):
    """Read and compressed once for all of them, or once for each."""
    model, tokenizer = bundled
    together = make_questions(tokenizer, "facts", 256, 2, seed=3, each=3)
    assert torch.equal(together.prompts[0, : -together.question], together.prompts[2, : -together.question])
    assert not torch.equal(together.prompts[2, : -together.question], together.prompts[3, : -together.question])
    with fastkv.patched(model, "fastkv", fastkv.Budget(tokens=64, recent=16)):
        once = measure(model, together, question_later=True)
        apart = measure(model, replace(together, each=1), question_later=True)
    assert torch.equal(once.right, apart.right) and once.nbytes == apart.nbytes
    torch.testing.assert_close(once.attention, apart.attention)


def test_nothing_evicted_has_no_error(bundled):
    model, tokenizer = bundled
    asked = make_questions(tokenizer, "facts", 128, 2, seed=0)
    full = measure(model, asked)
    with fastkv.patched(model, "momentkv", 256):
        same = measure(model, asked)
    assert relative_error(same.attention, full.attention) < 1e-5
    assert torch.equal(same.right, full.right)


@pytest.mark.parametrize("policy", each(fastkv.policies.names(), often=("expected-attention",)))
def test_equal_bytes_are_equal(bundled, policy):
    model, tokenizer = bundled
    asked = make_questions(tokenizer, "facts", 256, 2, seed=0)
    sizes = {}
    for name in ("streaming", policy):
        budget = equal_bytes(model.config, 96, model.dtype, sinks=4, recent=16)
        with fastkv.patched(model, policy_of(name), budget, evict_every=EVICT_EVERY, slots="model"):
            sizes[name] = measure(model, asked).nbytes
    slot = sizes["streaming"] / (96 + EVICT_EVERY)
    assert sizes["streaming"] - slot * 1.1 <= sizes[policy] <= sizes["streaming"]
