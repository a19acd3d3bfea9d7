"""The command line: help, doctor, mistakes, and the demo on the bundled model."""

import argparse
import json
import re
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
import transformers
from fastkv.evaluation.comparison import cached
from fastkv.evaluation.story import bar

import fastkv
from fastkv import Budget
from fastkv.cli import main
from fastkv.evaluation import demo
from fastkv.evaluation.equal_bytes import EVICT_EVERY, equal_bytes
from fastkv.evaluation.pictures import labelled, spread

from .pairwise import each
from .processes import of_module, run
from .toy import generate, load, make_questions, measure, policy_of, relative_error

OPTIONS = ("--context", "--budgets", "--policies", "--tasks", "--samples", "--seed", "--out", "--all", "--quick")
POLICIES = ("momentkv", "streaming")  # of --all --quick


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
    code, said, errors = run(of_module("fastkv.cli"), tmp_path, "doctor")
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
        (["demo", "--budgets", "1/4,1/100"], "tokens per KV head, fewer than"),
        (["demo", "--budgets", "3/2"], "3/2"),
        (["demo", "--budgets", "1/0"], "1/0"),
        (["demo", "--all", "--budgets", "8"], "sinks"),
        (["demo", "--policies", "nope"], "momentkv"),
        (["demo", "--policies", ","], "policies"),
        (["demo", "--tasks", "riddles"], "facts"),
        (["demo", "--context", "10"], "context"),
        (["demo", "--context", "1000000"], "context"),
        (["demo", "--samples", "0"], "samples"),
        (["demo", "--equal", "luck"], "luck"),
        (["demo", "--slots", "int2"], "int8"),
        (["view", "--slots", "int2"], "int8"),
        (["calibrate", "context", "--lengths", "many"], "many"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else "",
)
def test_a_mistake_gives_one_sentence_and_code_2(arguments, names, capsys, tmp_path):
    if arguments[:1] == ["demo"]:
        arguments = [*arguments, "--out", str(tmp_path / "out")]
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


def test_demo_stores_keys_and_values_as_it_is_told(bundled):
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    for words, slots in ((["--slots", "int4"], "int4"), ([], "auto")):
        settings = demo.settings_of(parser.parse_args(words))
        with cached(bundled[0], "fastkv", Budget(tokens=48, recent=16), settings.slots) as model:
            cache = model(torch.ones(1, 4, dtype=torch.int64)).past_key_values
        assert {layer.state.exact.format.name for layer in cache.layers} == {slots}


def test_demo_tells_a_story(capsys, tmp_path):
    """A few answers of each cache, a line for each policy, two pictures, and all of it in a file."""
    out = tmp_path / "results"
    assert main(["demo", "--quick", "--tasks", "facts", "--out", str(out)]) == 0
    text, record = capsys.readouterr().out, json.loads((out / "demo.json").read_text())
    sample = generate("facts", 512, 0, 3)
    assert sample.questions[0] in text and "--all" in text
    lines = [line for line in text.splitlines() if line.strip().startswith(("full cache", "fastkv", "streaming"))]
    assert len(lines) == 2 * 3
    for line in lines[:3]:
        answers = re.findall("[✓✗] ([^✓✗]+)", line)
        marks = ["✓" if said.strip() == answer else "✗" for said, answer in zip(answers, sample.answers, strict=True)]
        assert re.findall("[✓✗]", line) == marks
    rows = record["rows"]
    assert [(row["policy"], row["budget"]) for row in rows] == [
        ("full", 512), ("fastkv", "1/8"), ("fastkv", "1/4"), ("streaming", "1/8"), ("streaming", "1/4")
    ]  # fmt: skip
    for row in rows[1:]:
        assert 0 < row["share"] <= Fraction(row["budget"]) and row["error"] > 0
    for line, counts in zip(lines[3:], ([rows[0]], rows[1:3], rows[3:])):
        said = re.findall(r"(\d+) [█▏▎▍▌▋▊▉]*", line.removesuffix(line.split()[-1]).removesuffix(line.split()[-2]))
        assert [4 * row["accuracy"] for row in counts] == [int(one) for one in said[: len(counts)]]
    full, small = record["memory"]
    assert full["tokens"] == small["tokens"] and full["nbytes"][-1] > 1.9 * rows[0]["nbytes"]
    assert max(small["nbytes"]) <= rows[0]["nbytes"] / 8 and len(set(small["nbytes"])) == 1
    for name in ("demo.png", "demo-memory.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")


def test_at_most_six_lines_have_a_name():
    names = labelled(fastkv.policies.names())
    assert names == ["fastkv", "snapkv", "h2o", "streaming", "keydiff"]  # and the full cache
    assert labelled(("tova", "knorm", "fastkv")) == ["fastkv", "tova", "knorm"]


@pytest.mark.parametrize("heights", [[0.5], [0.1, 0.1, 0.1, 0.9], [0.97, 0.98, 1.0], [0.0, 0.3, 0.31, 0.6]])
def test_labels_are_moved_apart(heights):
    moved = spread(heights, 0.1)
    assert all(low + 0.1 <= high + 1e-9 for low, high in zip(moved, moved[1:])) and 0 <= moved[0] and moved[-1] <= 1
    if heights == [0.5]:
        assert moved == heights


@pytest.mark.parametrize("share, shown", [(0, ""), (0.5, "█████"), (1, "██████████"), (0.9625, "█████████▋")])
def test_a_bar_has_the_length_of_its_share(share, shown):
    assert bar(share) == f"{shown:<10}"


def test_demo_all_writes_table_json_and_picture(capsys, tmp_path):
    out = tmp_path / "results"
    assert main(["demo", "--all", "--quick", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    record = json.loads((out / "demo.json").read_text())
    rows = record["rows"]
    assert len(rows) == 1 + 2 * 2 * 2  # the full cache; two policies, two budgets, two prefill modes
    table = [line.split() for line in text.splitlines() if line.split()[:1] and line.split()[0] in ("full", *POLICIES)]
    assert [(line[0], line[1], int(line[2])) for line in table] == [
        (row["policy"], row["prefill"], row["budget"]) for row in rows
    ]
    full = rows[0]
    assert full["policy"] == "full" and full["error"] == 0 and full["share"] == 1
    for row in rows[1:]:
        assert 0 < row["share"] < 1 and row["nbytes"] < full["nbytes"]
        assert 0 <= row["accuracy"] <= 1 and row["error"] > 0 and row["tokens_per_second"] > 0
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert record["versions"]["fastkv"] == fastkv.__version__


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
        with fastkv.patched(model, policy_of(name), budget, evict_every=EVICT_EVERY):
            sizes[name] = measure(model, asked).nbytes
    slot = sizes["streaming"] / (96 + EVICT_EVERY)
    assert sizes["streaming"] - slot * 1.1 <= sizes[policy] <= sizes["streaming"]
