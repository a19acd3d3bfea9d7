"""The command line: help, doctor, mistakes, and the demo on the bundled model."""

import json
from dataclasses import replace

import pytest
import torch
import transformers

import fastkv
from fastkv.cli import main
from fastkv.demo import load, policy_of
from fastkv.demo.measure import make_questions, measure, relative_error
from fastkv.evaluation.equal_bytes import EVICT_EVERY, equal_bytes

from .processes import of_module, run

OPTIONS = ("--context", "--budgets", "--policies", "--tasks", "--samples", "--seed", "--out", "--quick")
POLICIES = ("momentkv", "streaming")  # of --quick


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
        (["demo", "--policies", "nope"], "momentkv"),
        (["demo", "--policies", ","], "policies"),
        (["demo", "--tasks", "riddles"], "facts"),
        (["demo", "--context", "10"], "context"),
        (["demo", "--context", "1000000"], "context"),
        (["demo", "--samples", "0"], "samples"),
        (["demo", "--equal", "luck"], "luck"),
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


def test_demo_writes_table_json_and_picture(capsys, tmp_path):
    out = tmp_path / "results"
    assert main(["demo", "--quick", "--out", str(out)]) == 0
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


def test_nothing_evicted_has_no_error(bundled):
    model, tokenizer = bundled
    asked = make_questions(tokenizer, "facts", 128, 2, seed=0)
    full = measure(model, asked)
    with fastkv.patched(model, "momentkv", 256):
        same = measure(model, asked)
    assert relative_error(same.attention, full.attention) < 1e-5
    assert torch.equal(same.right, full.right)


@pytest.mark.parametrize("policy", fastkv.policies.names())
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
