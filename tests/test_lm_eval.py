"""lm-evaluation-harness with a compressed cache: scores while all fits, scores under compression, and the command."""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM

import fastkv
import fastkv.evaluation
from fastkv import Budget, FastKVError
from fastkv.demo import MODEL_DIR
from fastkv.demo.tasks import generate
from fastkv.evaluation import FastKVLM
from fastkv.evaluation.lm_eval_model import to_budget
from fastkv.evaluation.results import FULL, Row, Score, load, save, scores_of, table_of
from fastkv.evaluation.run import add_arguments, run

LARGE = 1024  # more than any text here
FLOAT64 = {"dtype": "float64", "device": "cpu"}


def samples(lengths=(96, 130, 151, 97)):
    return [generate("facts", length, seed) for seed, length in enumerate(lengths)]


def prompt(sample):
    return f"{sample.context} {sample.questions[0]}"


def wrong(sample, index):
    """Another value: the words of the answer, turned."""
    words = sample.answers[0].split()
    return " ".join([*words[index:-1], *words[:index], words[-1]])


def requests(kind="loglikelihood"):
    """Three continuations of each text, one of them a single word."""
    arguments = [
        (prompt(sample), f" {text}")
        for sample in samples()
        for text in (sample.answers[0], wrong(sample, 1), sample.answers[0].split()[0])
    ]
    return [Instance(kind, {}, args, index) for index, args in enumerate(arguments)]


@pytest.fixture(scope="module")
def stock():
    """The harness's own model, in float64 so that scores differ by more than rounding where they differ at all."""
    return HFLM(str(MODEL_DIR), batch_size=3, **FLOAT64)


@pytest.fixture(scope="module")
def compressed():
    """One compressed model; tests give it the cache they need."""
    return FastKVLM(str(MODEL_DIR), policy="momentkv", budget=LARGE, batch_size=3, **FLOAT64)


@pytest.fixture(scope="module")
def expected(stock):
    return stock.loglikelihood(requests(), disable_tqdm=True)


def doubles(numbers):
    return torch.tensor(list(numbers), dtype=torch.float64)


def assert_same(got, expected):
    assert [greedy for _, greedy in got] == [greedy for _, greedy in expected]
    torch.testing.assert_close(doubles(score for score, _ in got), doubles(score for score, _ in expected))


# Everything fits: the harness's own scores.


@pytest.mark.parametrize("policy", ["momentkv", "snapkv", "kvzip"])
@pytest.mark.parametrize(
    "settings", [{"mode": "stream", "prefill_block": 40}, {"mode": "prefix"}], ids=["stream", "prefix"]
)
def test_likelihood_is_the_stock_one_while_all_fits(compressed, expected, policy, settings):
    if policy == "kvzip" and settings["mode"] == "stream":
        with pytest.raises(FastKVError, match="whole context"):
            compressed.set_cache(policy, LARGE, **settings)
        return
    compressed.set_cache(policy, LARGE, **settings)
    assert_same(compressed.loglikelihood(requests(), disable_tqdm=True), expected)


def test_rolling_likelihood_is_the_stock_one_while_all_fits(compressed, stock):
    texts = [Instance("loglikelihood_rolling", {}, (prompt(sample),), 0) for sample in samples()]
    compressed.set_cache("keydiff", LARGE, prefill_block=40)
    got = compressed.loglikelihood_rolling(texts, disable_tqdm=True)
    torch.testing.assert_close(doubles(got), doubles(stock.loglikelihood_rolling(texts, disable_tqdm=True)))


@pytest.mark.parametrize("block", [None, 40])
def test_left_padded_generation_is_the_stock_one_while_all_fits(compressed, stock, block):
    asked = [
        Instance("generate_until", {}, (prompt(sample), {"until": ["."], "max_gen_toks": 8}), 0) for sample in samples()
    ]
    compressed.set_cache("snapkv", LARGE, prefill_block=block)
    assert compressed.generate_until(asked, disable_tqdm=True) == stock.generate_until(asked, disable_tqdm=True)


def test_full_is_the_stock_model(compressed, expected):
    compressed.set_cache(FULL)
    assert compressed.loglikelihood(requests(), disable_tqdm=True) == expected


# Under compression: what a plain loop over the same cache gives.


def looped(model, tokenizer, policy, budget, edges_of, settings):
    """Log-likelihoods, each text alone, fed to a fresh cache in the parts that edges_of(length, prompt length) says."""
    answers = []
    with fastkv.patched(model, policy, budget, **settings):
        for request in requests():
            before, whole = (tokenizer(text).input_ids for text in (request.args[0], "".join(request.args)))
            after = whole[len(before) :]
            ids = torch.tensor([whole])
            edges = edges_of(ids.shape[1] - 1, len(before))
            cache, logits = None, []
            for start, end in zip(edges[:-1], edges[1:]):
                out = model(ids[:, start:end], past_key_values=cache, use_cache=True)
                cache, logits = out.past_key_values, [*logits, out.logits[0]]
            log_probabilities = torch.cat(logits).log_softmax(-1)[len(before) - 1 :]
            target = torch.tensor(after)
            score = sum(row[word].item() for row, word in zip(log_probabilities, target))
            answers.append((score, bool((log_probabilities.argmax(-1) == target).all())))
    return answers


@pytest.fixture(scope="module")
def plain():
    return fastkv.demo.load(dtype=torch.float64)


@pytest.mark.parametrize("policy", ["momentkv", "keydiff"])
@pytest.mark.parametrize("mode", ["stream", "prefix"])
def test_likelihood_under_compression_is_that_of_a_plain_loop(compressed, plain, expected, mode, policy):
    if mode == "stream":
        settings, edges_of = {"prefill_block": 40}, lambda length, _: [*range(0, length, 40), length]
    else:
        # Word by word after the context; the harness model reads the words together, before any eviction is due.
        settings, edges_of = {}, lambda length, known: [0, *range(known - 1, length + 1)]
    compressed.set_cache(policy, 48, mode=mode, **settings)
    got = compressed.loglikelihood(requests(), disable_tqdm=True)
    assert_same(got, looped(*plain, policy, 48, edges_of, settings))
    differences = [abs(one[0] - other[0]) for one, other in zip(got, expected)]
    assert min(differences[2::3]) > 1e-6, "a continuation of one word is affected too"


@pytest.mark.parametrize("settings", [{"prefill_block": 40}, {}], ids=["stream", "prefix"])
@pytest.mark.parametrize("budget", [48, "keep=0.4"], ids=str)
def test_likelihood_does_not_depend_on_the_batch(compressed, settings, budget):
    compressed.set_cache("momentkv", to_budget(budget), **settings)
    together = compressed.loglikelihood(requests(), disable_tqdm=True)
    alone = [compressed.loglikelihood([request], disable_tqdm=True)[0] for request in requests()]
    assert_same(together, alone)


def test_prefix_drops_the_beginning_of_what_is_too_long(stock, compressed, monkeypatch):
    for lm in (stock, compressed):
        monkeypatch.setattr(lm, "_max_length", 80)
    compressed.set_cache("momentkv", LARGE)
    assert_same(
        compressed.loglikelihood(requests(), disable_tqdm=True), stock.loglikelihood(requests(), disable_tqdm=True)
    )


def test_a_budget_that_follows_the_prompt_is_not_shared_by_a_batch(compressed):
    compressed.set_cache("snapkv", Budget(keep=0.5))
    assert compressed.batch_size == 1
    compressed.set_cache("snapkv", 64)
    assert compressed.batch_size == 3


def test_bytes_are_those_of_the_largest_sequence(compressed):
    head = compressed.patched.config
    token = 2 * head.num_hidden_layers * head.num_key_value_heads * head.head_dim * 8
    longest = max(requests(), key=lambda request: len(" ".join(request.args).split()))
    compressed.set_cache(FULL)
    compressed.loglikelihood([requests()[0], longest], disable_tqdm=True)
    words = compressed.tok_encode("".join(longest.args))
    assert compressed.cache_bytes == token * (len(words) - 1)
    compressed.set_cache("streaming", 64)
    assert compressed.cache_bytes == 0
    compressed.loglikelihood([longest], disable_tqdm=True)
    assert 64 * token < compressed.cache_bytes < 96 * token


# What cannot be done is said in one sentence.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "stream"}, "mode stream needs prefill_block"),
        ({"mode": "both"}, "mode must be one of auto, stream, prefix, got 'both'"),
        ({"evict_every": 0}, "evict_every must be"),
    ],
    ids=["stream", "mode", "patch"],
)
def test_refused_settings_leave_the_cache_as_it_was(compressed, settings, message):
    compressed.set_cache("keydiff", 64)
    with pytest.raises(FastKVError, match=message):
        compressed.set_cache("snapkv", 48, **settings)
    assert fastkv.FastKVCache(compressed.patched).plan.policy.name == "keydiff"


def test_rolling_likelihood_has_no_prefix(compressed):
    compressed.set_cache("keydiff", 64, mode="prefix")
    with pytest.raises(FastKVError, match="rolling log-likelihoods have no context"):
        compressed.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("what is the code",), 0)])


def test_budgets_of_a_command_line():
    assert to_budget(256) == to_budget("256") == to_budget("tokens=256") == Budget(tokens=256)
    assert to_budget("keep=0.25", sinks=2) == Budget(keep=0.25, sinks=2)
    assert to_budget("bytes=2000000") == Budget(bytes=2_000_000)
    for value in ("half", "share=0.5", "keep=", "2.5"):
        with pytest.raises(FastKVError, match="budget must be a number of tokens or one of"):
            to_budget(value)
    with pytest.raises(FastKVError, match="keep must be in"):
        to_budget("keep=2.0")


def test_registration_needs_the_harness(monkeypatch, capsys):
    assert get_model("fastkv") is FastKVLM
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    bare = importlib.reload(fastkv.evaluation)
    with pytest.raises(FastKVError, match=r"pip install fastkv\[eval\]"):
        _ = bare.FastKVLM
    assert importlib.import_module("fastkv.evaluation.__main__").main() == 2
    assert "pip install fastkv[eval]" in capsys.readouterr().err


# The command.


@pytest.fixture
def tasks(tmp_path):
    """Two tasks over local files: a multiple choice and a question to be answered."""
    lines = [
        {
            "text": prompt(sample),
            "choices": [sample.answers[0], wrong(sample, 1), wrong(sample, 2)],
            "answer": sample.answers[0],
        }
        for sample in TEXTS
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "doc_to_text": "{{text}}",
    }
    choose = {
        **data,
        "task": "choose_code",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
    }
    answer = {
        **data,
        "task": "answer_code",
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["<eos>"], "max_gen_toks": 4, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    files = []
    for task in (choose, answer):
        files.append(tmp_path / f"{task['task']}.yaml")
        files[-1].write_text(yaml.safe_dump(task))
    return ",".join(map(str, files))


TEXTS = samples((200, 221, 240, 203))  # longer than the 128 tokens of the budget


def evaluated(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(list(arguments)))


def test_command_evaluates_resumes_and_refuses_a_mix(tasks, tmp_path, capsys):
    out = tmp_path / "out"
    command = [
        "--tasks",
        tasks,
        "--policies",
        "momentkv,keydiff",
        "--budgets",
        "128",
        "--out",
        str(out),
        "--batch-size",
        "4",
    ]
    rows = evaluated(*command)
    assert [(row.policy, row.budget) for row in rows] == [(FULL, ""), ("momentkv", "128"), ("keydiff", "128")]
    right = HFLM(str(MODEL_DIR), device="cpu").generate_until(
        [Instance("generate_until", {}, (prompt(s), {"until": ["<eos>"], "max_gen_toks": 4}), 0) for s in TEXTS]
    )
    accuracy = sum(got == sample.answers[0] for got, sample in zip(right, TEXTS)) / len(right)
    first = rows[0].scores["answer_code"][0]
    assert (first.metric, first.value) == ("exact_match,none", accuracy)
    assert {score.metric for score in rows[0].scores["choose_code"]} == {"acc,none", "acc_norm,none"}
    assert rows[2].nbytes < rows[0].nbytes and abs(rows[1].nbytes - rows[2].nbytes) < 0.02 * rows[2].nbytes
    record = json.loads((out / "results.json").read_text())
    assert [row["nbytes"] for row in record["rows"]] == [row.nbytes for row in rows]
    assert (out / "results.png").read_bytes().startswith(b"\x89PNG")
    assert "choose_code" in capsys.readouterr().out

    (out / "keydiff-128.json").unlink()
    kept = {path: path.stat().st_mtime_ns for path in (out / "full.json", out / "momentkv-128.json")}
    again = evaluated(*command)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert again[:2] == rows[:2]
    assert (again[2].nbytes, again[2].scores) == (rows[2].nbytes, rows[2].scores)
    assert "full is in" in capsys.readouterr().out
    with pytest.raises(FastKVError, match=r"was written with limit None, this run has 2\.0"):
        evaluated(*command, "--limit", "2")


LAUNCHED = """
import argparse
from fastkv.evaluation.run import add_arguments, run

parser = argparse.ArgumentParser()
add_arguments(parser)
run(parser.parse_args())
"""


def test_processes_share_the_questions(tasks, tmp_path):
    """Three questions, two processes: each has its own, the first reports the scores and bytes of all."""
    script = tmp_path / "launched.py"
    script.write_text(LAUNCHED)
    command = ["--tasks", tasks, "--policies", "keydiff", "--budgets", "128", "--limit", "3", "--device", "cpu"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    result = subprocess.run(
        [*launcher, *command, "--out", str(tmp_path / "two")],
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(Path(fastkv.__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    assert set(re.findall(r"generate_until requests: 100%\D*(\d+)/", result.stderr)) == {"2"}, "of three, in the first"
    assert result.stdout.count("keydiff-128") == 1, "one process speaks"
    rows = json.loads((tmp_path / "two" / "results.json").read_text())["rows"]
    for row, alone in zip(rows, evaluated(*command, "--out", str(tmp_path / "one"))):
        assert {task: [score["value"] for score in scores] for task, scores in row["scores"].items()} == {
            task: [score.value for score in scores] for task, scores in alone.scores.items()
        }
        assert row["nbytes"] == alone.nbytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--policies", "nonsense"], "unknown policy 'nonsense'"),
        (["--policies", ","], "policies must name at least one"),
        (["--budgets", "half"], "budget must be a number of tokens"),
        (["--budgets", "8"], "smaller than sinks"),
        (["--budgets", "64"], "leaves 0 tokens per KV head"),
        (["--policies", "kvzip", "--prefill-block", "64"], "whole context"),
        (["--mode", "stream"], "mode stream needs prefill_block"),
        (["--model", str(MODEL_DIR.parent)], "cannot load a model from"),
    ],
    ids=["policy", "none", "budget", "small", "moments", "combination", "stream", "model"],
)
def test_command_refuses_before_it_evaluates(tasks, tmp_path, change, message):
    with pytest.raises(FastKVError, match=message):
        evaluated("--tasks", tasks, "--out", str(tmp_path / "out"), *change)
    assert not list((tmp_path / "out").glob("*.json"))


def test_command_says_which_dataset_is_missing(tmp_path):
    file = tmp_path / "lost.yaml"
    file.write_text(yaml.safe_dump({"task": "lost", "dataset_path": str(tmp_path / "no_data"), "test_split": "test"}))
    with pytest.raises(FastKVError, match=r"cannot load .*no_data.*copy the dataset to this machine") as caught:
        evaluated("--tasks", str(file), "--out", str(tmp_path / "out"))
    assert str(file) in str(caught.value)


def test_the_harness_command_line_knows_the_model(tasks, tmp_path, monkeypatch):
    from lm_eval.tasks import TaskManager

    stock_init = TaskManager.__init__
    monkeypatch.setattr(  # the index of thousands of tasks that are not needed here
        TaskManager, "__init__", lambda self, *a, **k: stock_init(self, *a, **{**k, "include_defaults": False})
    )
    arguments = f"pretrained={MODEL_DIR},policy=keydiff,budget=keep=0.5,prefill_block=40"
    flags = {"--model": "fastkv", "--model_args": arguments, "--tasks": tasks, "--limit": "2", "--device": "cpu"}
    line = [word for pair in flags.items() for word in pair]
    monkeypatch.setattr(sys, "argv", ["fastkv.evaluation", *line, "--output_path", str(tmp_path / "out.json")])
    assert importlib.import_module("fastkv.evaluation.__main__").main() == 0
    written = json.loads(next(tmp_path.glob("out_*.json")).read_text())
    assert set(written["results"]) == {"choose_code", "answer_code"}
    assert written["config"]["model_args"]["budget"] == "keep=0.5"


def test_scores_and_rows_survive_a_file(tmp_path):
    results = {
        "results": {
            "a": {"alias": "a", "acc,none": 0.5, "acc_stderr,none": 0.1, "sample_len": 4},
            "b": {"alias": "b", "word_perplexity,none": 9.0, "word_perplexity_stderr,none": "N/A"},
            "group": {"alias": "group"},
            "all": {"alias": "all", "acc,none": 0.75, "acc_stderr,none": float("nan")},
            "one": {"alias": " - one", "acc,none": 0.75},
        },
        "group_subtasks": {"group": ["a", "b"], "all": ["one"]},
        "higher_is_better": {"a": {"acc": True}, "b": {"word_perplexity": False}},
    }
    scores = scores_of(results)
    assert scores == {
        "a": [Score("acc,none", 0.5, 0.1, True)],
        "b": [Score("word_perplexity,none", 9.0, None, False)],
        "all": [Score("acc,none", 0.75, None, True)],
    }
    row = Row("keydiff", "keep=0.5", 1024, 1.5, scores)
    save(row, {"seed": 0}, results, tmp_path)
    assert load("keydiff", "keep=0.5", {"seed": 0}, tmp_path) == row
    assert load("keydiff", "64", {"seed": 0}, tmp_path) is None
    assert table_of([row]).row_count == 1
