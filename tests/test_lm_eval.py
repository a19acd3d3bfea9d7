"""lm-evaluation-harness with a compressed cache: scores while all fits, scores under compression, and the command."""

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
from lm_eval.models.huggingface import HFLM
from transformers import LlamaConfig, LlamaForCausalLM

import fastkv
from fastkv import Budget, FastKVError
from fastkv.api import answers
from fastkv.lab import reading
from fastkv.lab.cli import build_parser, main
from fastkv.lab.common import FULL, to_budget
from fastkv.lab.harness import FastKVLM, load_tasks, metadata_of, run, scores_of, table_of

from .models import raises
from .test_ruler import toy_bpe
from .toy import MODEL, MODEL_DIR, generate, load

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
    texts = {one: (one.answers[0], wrong(one, 1), one.answers[0].split()[0]) for one in samples()}
    pairs = [(prompt(one), f" {text}") for one, some in texts.items() for text in some]
    return [Instance(kind, {}, pair, index) for index, pair in enumerate(pairs)]


@pytest.fixture(scope="module")
def stock():
    """The harness's own model, in float64 so that scores differ by more than rounding where they differ at all."""
    return HFLM(str(MODEL_DIR), batch_size=3, **FLOAT64)


@pytest.fixture(scope="module")
def compressed():
    """One compressed model; tests give it the cache they need."""
    return FastKVLM(str(MODEL_DIR), batch_size=3, **FLOAT64)


def test_a_checkpoint_that_asks_for_no_cache_gets_one():
    model, tokenizer = load()
    model.config.use_cache = False
    lm = FastKVLM(model, tokenizer=tokenizer)
    lm.set_cache("keydiff", 64)
    lm.model(torch.zeros(1, 100, dtype=torch.long))
    assert 0 < lm.cache_bytes < 100 * 2 * model.config.num_hidden_layers * model.config.head_dim * 4 * 8


@pytest.fixture(scope="module")
def expected(stock):
    return stock.loglikelihood(requests(), disable_tqdm=True)


def doubles(numbers):
    return torch.tensor(list(numbers), dtype=torch.float64)


def assert_same(got, expected):
    assert [greedy for _, greedy in got] == [greedy for _, greedy in expected]
    torch.testing.assert_close(doubles(score for score, _ in got), doubles(score for score, _ in expected))


# Everything fits: the harness's own scores.


STREAM, PREFIX = {"mode": "stream", "prefill_block": 40}, {"mode": "prefix"}
MODES = {"stream": ("momentkv", STREAM), "prefix": ("snapkv", PREFIX), "kvzip": ("kvzip", PREFIX)}


@pytest.mark.parametrize("policy, settings", MODES.values(), ids=MODES)
def test_likelihood_is_the_stock_one_while_all_fits(compressed, expected, policy, settings):
    compressed.set_cache(policy, LARGE, **settings)
    assert_same(compressed.loglikelihood(requests(), disable_tqdm=True), expected)


def test_rolling_likelihood_is_the_stock_one_while_all_fits(compressed, stock):
    texts = [Instance("loglikelihood_rolling", {}, (prompt(sample),), 0) for sample in samples()]
    compressed.set_cache("keydiff", LARGE, prefill_block=40)
    got = compressed.loglikelihood_rolling(texts, disable_tqdm=True)
    torch.testing.assert_close(doubles(got), doubles(stock.loglikelihood_rolling(texts, disable_tqdm=True)))


@pytest.mark.parametrize("policy, settings", [MODES["stream"], MODES["prefix"]], ids=["stream", "prefix"])
def test_left_padded_generation_is_the_stock_one_while_all_fits(compressed, stock, policy, settings):
    """20 tokens: past an eviction that is due but finds nothing to evict."""
    generation = {"until": ["never"], "max_gen_toks": 20, "min_new_tokens": 20}
    asked = [Instance("generate_until", {}, (prompt(sample), generation), 0) for sample in samples()]
    compressed.set_cache(policy, LARGE, **settings)
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
            ids, target = torch.tensor([whole]), torch.tensor(whole[len(before) :])
            edges = edges_of(ids.shape[1] - 1, len(before))
            cache, logits = None, []
            for start, end in zip(edges[:-1], edges[1:]):
                out = model(ids[:, start:end], past_key_values=cache, use_cache=True)
                cache, logits = out.past_key_values, [*logits, out.logits[0]]
            log_probabilities = torch.cat(logits).log_softmax(-1)[len(before) - 1 :]
            score = sum(row[word].item() for row, word in zip(log_probabilities, target))
            answers.append((score, torch.equal(log_probabilities.argmax(-1), target)))
    return answers


@pytest.fixture(scope="module")
def plain():
    return load(dtype=torch.float64)


@pytest.mark.parametrize("policy, mode", [("momentkv", "stream"), ("keydiff", "prefix")])
def test_likelihood_under_compression_is_that_of_a_plain_loop(compressed, plain, expected, mode, policy):
    if mode == "stream":
        settings, edges_of = {"prefill_block": 40}, lambda length, _: [*range(0, length, 40), length]
    else:
        # Word by word after the context; the harness model reads the words together, before any eviction is due.
        settings, edges_of = {}, lambda length, known: [0, *range(known - 1, length + 1)]
    compressed.set_cache(policy, 48, mode=mode, **settings)
    got = compressed.loglikelihood(requests(), disable_tqdm=True)
    assert_same(got, looped(*plain, policy, 48, edges_of, settings))
    differences = [abs(one[0] - other[0]) for one, other in zip(got[2::3], expected[2::3])]
    assert min(differences) > 1e-6, "a continuation of one word is affected too"


def test_prefix_drops_the_beginning_of_what_is_too_long(stock, compressed, monkeypatch):
    for lm in (stock, compressed):
        monkeypatch.setattr(lm, "_max_length", 80)
    compressed.set_cache("momentkv", LARGE)
    assert_same(*(lm.loglikelihood(requests(), disable_tqdm=True) for lm in (compressed, stock)))


def test_a_question_comes_later_where_the_task_says_what_it_is(compressed, stock):
    """The text before it is compressed alone; where everything fits, the answer is that of the whole prompt."""
    sample = generate("facts", 300, 4)
    prompt, how = f"{sample.context} {sample.questions[0]}", {"until": [" ."], "max_gen_toks": 4}

    def asked(doc, **settings):
        compressed.set_cache(*settings.pop("cache"), **settings)
        return compressed.generate_until([Instance("generate_until", doc, (prompt, how), 0)], disable_tqdm=True)[0]

    doc = {"question": sample.questions[0]}
    want = stock.generate_until([Instance("generate_until", doc, (prompt, how), 0)], disable_tqdm=True)[0]
    assert want.strip() == sample.answers[0].removesuffix(" .")
    for cache, until in (((FULL,), [" ."]), (("momentkv", LARGE), " .")):  # the harness takes either
        how["until"] = until
        assert asked(doc, cache=cache, question="later").strip() == want.strip()
    small = asked(doc, cache=("snapkv", 64), question="later")
    model, tokenizer, last = compressed.patched, compressed.tokenizer, sample.questions[0]
    before = torch.tensor([tokenizer(prompt.removesuffix(last)).input_ids])
    ids = tokenizer(last, add_special_tokens=False).input_ids
    (alone,) = answers(model, tokenizer, reading.read(model, before), before, [ids], 4)
    assert small == compressed.tok_decode(alone).partition(" .")[0]
    assert asked(doc, cache=("snapkv", 64), question="seen") != small, "snapkv looks at the question"
    for doc in ({}, {"question": "another"}):
        with pytest.raises(FastKVError, match=r"prompts end with the question .* choose question 'seen'"):
            asked(doc, cache=("snapkv", 64), question="later")
    compressed.set_cache("snapkv", 64, question="later")
    raises("answers are generated", compressed.loglikelihood, requests(), disable_tqdm=True)


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
    assert compressed.cache_bytes == token * (len(compressed.tok_encode("".join(longest.args))) - 1)
    compressed.set_cache("streaming", 64)
    assert compressed.cache_bytes == 0
    compressed.loglikelihood([longest], disable_tqdm=True)
    assert 64 * token < compressed.cache_bytes < 96 * token


# What cannot be done is said in one sentence.


def test_refused_settings_leave_the_cache_as_it_was(compressed):
    compressed.set_cache("keydiff", 64)
    raises("mode stream needs prefill_block", compressed.set_cache, "snapkv", 48, mode="stream")
    raises("evict_every must be", compressed.set_cache, "snapkv", 48, evict_every=0)
    assert fastkv.FastKVCache(compressed.patched).config.policy.name == "keydiff"


def test_rolling_likelihood_has_no_prefix(compressed):
    compressed.set_cache("keydiff", 64, mode="prefix")
    with pytest.raises(FastKVError, match="rolling log-likelihoods have no context"):
        compressed.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("what is the code",), 0)])


def test_budgets_of_a_command_line():
    assert to_budget(256) == to_budget("256") == to_budget("tokens=256") == Budget(tokens=256)
    assert to_budget("keep=0.25", sinks=2) == Budget(keep=0.25, sinks=2)
    assert to_budget("bytes=2000000") == Budget(bytes=2_000_000)
    for value in ("half", "share=0.5", "keep=", "2.5"):
        raises("budget must be a number of tokens, 16x or one of", to_budget, value)
    raises("keep must be in", to_budget, "keep=2.0")


def test_the_command_needs_the_harness(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["eval", "--tasks", "arc_easy"]) == 2
    assert "pip install 'fastkv-attn[eval]'" in capsys.readouterr().err


# The command.


@pytest.fixture
def tasks(tmp_path):
    """Two tasks over local files: a multiple choice and a question to be answered."""
    lines = [
        {"text": prompt(one), "choices": [one.answers[0], wrong(one, 1), wrong(one, 2)], "answer": one.answers[0]}
        for one in TEXTS
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    places = {"data_files": {"test": str(tmp_path / "data.jsonl")}, "cache_dir": str(tmp_path / "cache")}
    data = {"dataset_path": "json", "dataset_kwargs": places, "test_split": "test", "doc_to_text": "{{text}}"}
    choose = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": 0}
    answer = {
        "output_type": "generate_until", "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["<eos>"], "max_gen_toks": 4, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    files = []
    for name, task in (("choose_code", choose), ("answer_code", answer)):
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(yaml.safe_dump({**data, "task": name, **task}))
    return ",".join(map(str, files))


TEXTS = samples((200, 221, 240, 203))  # longer than the 128 tokens of the budget


def evaluated(*arguments):
    return run(build_parser().parse_args(["eval", "--model", MODEL, *arguments]))


def test_command_evaluates_resumes_and_refuses_a_mix(tasks, tmp_path, capsys):
    out = tmp_path / "out"
    command = f"--tasks {tasks} --policies momentkv,keydiff --budgets 128 --out {out} --batch-size 4".split()
    rows = evaluated(*command)
    assert [(row["policy"], row["budget"]) for row in rows] == [(FULL, ""), ("momentkv", "128"), ("keydiff", "128")]
    right = HFLM(str(MODEL_DIR), device="cpu").generate_until(
        [Instance("generate_until", {}, (prompt(s), {"until": ["<eos>"], "max_gen_toks": 4}), 0) for s in TEXTS]
    )
    accuracy = sum(got == sample.answers[0] for got, sample in zip(right, TEXTS)) / len(right)
    first = rows[0]["scores"]["answer_code"][0]
    assert (first["metric"], first["value"]) == ("exact_match,none", accuracy)
    assert {score["metric"] for score in rows[0]["scores"]["choose_code"]} == {"acc,none", "acc_norm,none"}
    sizes = [row["nbytes"] for row in rows]
    assert max(sizes[1:]) < sizes[0] and abs(sizes[1] - sizes[2]) < 0.02 * sizes[2]
    assert json.loads((out / "results.json").read_text())["rows"] == rows
    assert "choose_code" in capsys.readouterr().out

    (out / "keydiff-128.json").unlink()
    kept = {path: path.stat().st_mtime_ns for path in (out / "full.json", out / "momentkv-128.json")}
    again = evaluated(*command)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert again[:2] == rows[:2]
    assert {**again[2], "seconds": 0} == {**rows[2], "seconds": 0}
    assert "full is known already" in capsys.readouterr().out
    raises(r"was written with limit None, this run has 2\.0", evaluated, *command, "--limit", "2")
    raises("no attribute 'none-such'", evaluated, *command, "--model-args", "dtype=none-such")
    other = [*command[:-4], "--out", str(tmp_path / "other")]
    raises("--num-fewshot must be fewer than a task has, got 9", evaluated, *other, "--num-fewshot", "9")


@pytest.mark.slow
def test_accelerate_launch_equals_one_process(tasks, tmp_path):
    """`accelerate launch` on the CPU: --multi_gpu is what starts several processes."""
    flags = ["--tasks", tasks, "--policies", "keydiff", "--budgets", "128", "--evict-every", "4", "--limit", "4"]
    launcher = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu"]
    launcher += ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command = ["-m", "fastkv.lab.cli", "eval", "--model", MODEL, *flags, "--device", "cpu"]
    result = subprocess.run(
        [*launcher, *command, "--out", str(tmp_path / "two")],
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(Path(fastkv.__file__).parent.parent)},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert set(re.findall(r"generate_until requests: 100%\D*(\d+)/", result.stderr)) == {"2"}, "of four, in the first"
    one = evaluated(*flags, "--out", str(tmp_path / "one"))
    two = json.loads((tmp_path / "two" / "results.json").read_text())["rows"]
    assert [row["scores"] for row in two] == [row["scores"] for row in one]


@pytest.mark.parametrize(
    ("change", "message"),
    [(["--policies", "nonsense"], "unknown policy 'nonsense'"),
     (["--budgets", "half"], "budget must be a number of tokens"), (["--budgets", "8"], "smaller than sinks"),
     (["--budgets", "64"], "leaves 30 tokens per KV head"),
     (["--policies", "kvzip", "--prefill-block", "64"], "whole context"),
     (["--mode", "stream"], "mode stream needs prefill_block"),
     (["--model", str(MODEL_DIR.parent)], "cannot load a model from"),
     (["--device", "nope"], "there is no device 'nope' here")],
    ids=["policy", "budget", "small", "moments", "combination", "stream", "model", "device"],
)  # fmt: skip
def test_command_refuses_before_it_evaluates(tasks, tmp_path, change, message):
    raises(message, evaluated, "--tasks", tasks, "--out", str(tmp_path / "out"), *change)
    assert not list((tmp_path / "out").glob("*.json"))


def test_equal_bytes_keep_the_users_shares(tasks, tmp_path, monkeypatch):
    """What reaches the model is the user's budget, in bytes."""
    given, stock_set = [], FastKVLM.set_cache

    def spy(self, policy, budget=1024, **settings):
        given.append(budget)
        return stock_set(self, policy, budget, **settings)

    monkeypatch.setattr(FastKVLM, "set_cache", spy)
    limits = ["--limit", "1", "--policy", "keydiff", "--budget", "128", "--tasks", tasks.split(",")[1]]
    shares = ["--layers", "pyramid", "--heads", "adaptive", "--sinks", "2", "--recent", "9"]
    evaluated(*limits, *shares, "--out", str(tmp_path / "out"))
    last = [budget for budget in given if isinstance(budget, Budget) and budget.bytes]
    wanted = {"layers": "pyramid", "heads": "adaptive", "sinks": 2, "recent": 9}
    assert len(last) == 2 and last[0] == last[1] == Budget(bytes=last[0].bytes, **wanted)
    assert json.loads((tmp_path / "out" / "results.json").read_text())["settings"]["recent"] == 9


def test_command_says_which_dataset_is_missing(tmp_path):
    file = tmp_path / "lost.yaml"
    file.write_text(yaml.safe_dump({"task": "lost", "dataset_path": str(tmp_path / "no_data"), "test_split": "test"}))
    with pytest.raises(FastKVError, match=r"cannot be loaded \(.*no_data.*copy it to this machine") as caught:
        evaluated("--tasks", str(file), "--out", str(tmp_path / "out"))
    assert str(file) in str(caught.value)


def test_what_a_task_needs_is_said(tmp_path):
    (tmp_path / "code.py").write_text("import no_such_package\n")
    file = tmp_path / "coded.yaml"
    file.write_text("task: coded\ncustom_dataset: !function code.load\ntest_split: test\n")
    raises(r"task .*coded\.yaml cannot be loaded .*no_such_package", load_tasks, [str(file)], None, {})
    raises("knows no task 'fastkv_nothing'", load_tasks, ["fastkv_nothing"], None, {})


def test_metadata_is_the_harness_own():
    assert metadata_of([]) == {}
    found = metadata_of(["max_seq_lengths=[1024,2048]", "num_samples=3,haystack=a/b.txt"])
    assert found == {"max_seq_lengths": [1024, 2048], "num_samples": 3, "haystack": "a/b.txt"}
    raises("metadata must be K=V, got \\['many'\\]", metadata_of, ["many"])


@pytest.fixture
def tiny(tmp_path):
    """A folder with a tiny random model and its tokenizer, which knows every word."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    folder = tmp_path / "tiny"
    config = LlamaConfig(vocab_size=400, **sizes, max_position_embeddings=1300, bos_token_id=0, eos_token_id=1)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = toy_bpe()
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(1)
    tokenizer.save_pretrained(folder)
    return folder, tokenizer


def test_ruler_through_the_command(tiny, tmp_path):
    """A cache that holds everything scores as the stock one, at every length; the model has to reach it."""
    command = f"--model {tiny[0]} --tasks fastkv_ruler_vt --policies keydiff --budgets 1300 --equal tokens".split()
    texts = ["--metadata", "max_seq_lengths=[1000,1100]", "num_samples=1", "--out", str(tmp_path / "out")]
    stock, compressed = evaluated(*command, *texts)
    assert stock["scores"] == compressed["scores"]
    first = [score["metric"] for score in stock["scores"]["fastkv_ruler_vt"]]
    assert first == ["score,none", "score_1000,none", "score_1100,none"]
    with pytest.raises(FastKVError, match=r"max_seq_lengths must be at most 1300 tokens for .*, got 1400"):
        evaluated(*command, "--metadata", "max_seq_lengths=1400", "num_samples=1", "--out", str(tmp_path / "long"))


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
        "a": [{"metric": "acc,none", "value": 0.5, "stderr": 0.1, "higher_is_better": True}],
        "b": [{"metric": "word_perplexity,none", "value": 9.0, "stderr": None, "higher_is_better": False}],
        "all": [{"metric": "acc,none", "value": 0.75, "stderr": None, "higher_is_better": True}],
    }
    assert scores_of(json.loads(json.dumps(results))) == scores
    assert table_of([{"policy": "keydiff", "budget": "keep=0.5", "nbytes": 1024, "scores": scores}]).row_count == 1
