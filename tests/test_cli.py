"""The command line: help, doctor, mistakes, and the demo on the toy."""

import re
import resource
import shlex
import subprocess
import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from rich.console import Console

import fastkv
from fastkv.api import answers
from fastkv.config import BUDGET, EVICT_EVERY, POLICY
from fastkv.lab import cli, demo, reading
from fastkv.lab.cli import COMMANDS, build_parser, main
from fastkv.lab.reading import cache_bytes
from fastkv.lab.ruler import KINDS
from fastkv.reference import FORMATS

from .processes import ROOT
from .toy import MODEL, generate
from .toy import text as toy_text

OPTIONS = ("--model", "--text", "--ask", "--context", "--budgets", "--picture", "--quick")


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_explains_and_gives_an_example(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*name.split(), "--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"example: fastkv {name or 'demo'}" in text
    assert all(option in text for option in OPTIONS) or name != "demo"
    assert "doctor" in text or name


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from fastkv.lab.cli import main
for words in sys.argv[1:]:
    try:
        main(words.split())
    except SystemExit as stop:
        print(stop.code)
"""


def test_help_and_mistakes_need_no_torch():
    command = [sys.executable, "-c", WITHOUT_TORCH, "view --help", "demo --bogus", "bench --rounds 0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-3:] == ["0", "2", "2"] and "unknown arguments: --bogus" in done.stderr


def test_defaults_are_those_of_the_library():
    """They are written out where no torch is imported."""
    chat, needles = (build_parser().parse_args([name]) for name in ("chat", "needles"))
    assert (chat.policy, chat.budget, needles.evict_every) == (POLICY, str(BUDGET), EVICT_EVERY)
    assert cli.SLOTS == ("auto", *FORMATS) and cli.NEEDLES == tuple(KINDS)


def test_doctor_prints_versions_backends_and_reasons(capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    said = dict(line.split(maxsplit=1) for line in lines if line.startswith("  "))
    for package in (fastkv, torch, transformers):
        assert said[package.__name__] == package.__version__
    assert said["reference"].startswith("available")
    assert {"flash-attn", "flash-attn-3", "flash-attn-4", "kernels"} <= set(said)
    backend = next(line for line in lines if line.startswith("  triton") and "available" in line)
    assert re.match("  triton +(available|not available: )", backend)


MISTAKES = Path(__file__).with_name("mistakes.txt").read_text().splitlines()[1:]
GIVEN = {
    "demo": ["--model", MODEL, "--picture", "out/demo.png"],
    "view": ["--model", MODEL, "--text", toy_text(), "--out", "out/view.html"],
    "fidelity": ["--model", MODEL, "--text", toy_text(), "--out", "out"], "inspect": ["--model", MODEL, "--out", "out"],
    "bench": ["--model", MODEL, "--out", "out"],
    "needles": ["--model", MODEL, "--out", "out", *"--lengths 160,320 --depths 0,1 --samples 2 --budget 128".split()],
}  # fmt: skip
FILES = {
    "short.txt": "the dog slept .", "few.txt": "A text of few words. " * 5, "long.txt": "the old dog slept . " * 100,
}  # fmt: skip


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_gives_one_sentence_and_code_2_and_writes_nothing(line, capsys, tmp_path, monkeypatch):
    words, said = line.split(" | ")
    command, *rest = shlex.split(words) or [""]
    if "--graphs" in rest and torch.cuda.is_available():
        pytest.skip("there are graphs here")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no-model").mkdir()
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1") * 2000)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    before = {*tmp_path.rglob("*")}
    try:
        code = main([command, *GIVEN.get(command, []), *rest] if command else [])
    except SystemExit as stop:
        code = stop.code
    told = capsys.readouterr()
    assert code == 2
    assert len(told.err.splitlines()) == 1 and told.err.startswith("fastkv") and not told.err.rstrip().endswith(".")
    assert said in told.err
    assert {*tmp_path.rglob("*")} == before


def test_interrupted(capsys, monkeypatch):
    monkeypatch.setattr("fastkv.lab.doctor.run", mock.Mock(side_effect=KeyboardInterrupt))
    assert main(["doctor"]) == 130 and capsys.readouterr().err == "fastkv doctor: interrupted\n"


@pytest.mark.parametrize("error, said", [
    (BrokenPipeError(32, "Broken pipe"), ""),
    (OSError(28, "No space left on device"), "fastkv doctor: the output cannot be written (No space left on device)\n"),
])  # fmt: skip
def test_output_that_nobody_takes(error, said, capfd, monkeypatch):
    monkeypatch.setattr("fastkv.lab.doctor.run", mock.Mock(side_effect=error))
    with monkeypatch.context() as patch:
        patch.setattr("os.dup2", dup := mock.Mock())
        assert main(["doctor"]) == 1 and capfd.readouterr().err == said
    assert dup.called


ASK = ("--ask", "What is this?", "a text", "--ask", "And then?", "7")


@pytest.mark.parametrize("picture", ["demo.png", "demo.svg"])
def test_the_demo_asks_every_cache(capsys, tmp_path, bundled, picture):
    """A column for each cache, a row for each question, numbers, and one sentence that agrees with them."""
    path = tmp_path / "results" / picture
    words = ("demo", "--model", MODEL, "--context", "300", "--text", "topics", *ASK, "--budgets", "2x,4x")
    assert main([*words, "--picture", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    text = " ".join(" ".join(lines).split())
    assert "reads 300 tokens of topics" in text and "were tried" not in text
    assert next(line for line in lines if "question (answer)" in line).split()[2:] == ["full", "cache", "2x", "4x"]
    rows = [line for line in lines if line.startswith((" What is", " And then?"))]
    assert len(rows) == 2 and all(len(re.findall("[✓✗] ", line)) == 3 for line in rows)
    full, *smaller = map(float, next(line for line in lines if line.startswith(" cache, MiB")).split()[2:])
    assert all(small < full / 2 for small in smaller)  # of a full cache in float32, and of one in 16 bits
    assert re.search(r"Of \d answers that are right with the full cache, still right are \d at 2x, \d at 4x; ", text)
    assert path.read_bytes().startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")


def test_the_demo_measures_each_cache(bundled):
    """Rows agree with their answers and with the bytes that were asked for; words are shown while they are written."""
    model, tokenizer = bundled
    words = {"model": MODEL, "text": "topics", "context": 300, "ask": [("What is this?", "a text")]}
    task = demo.task_of(tokenizer, Namespace(**words))
    shown = []
    row = demo.Row("full", 0, 0.0)
    cache = reading.read(model, task.ids)
    demo.answer(model, tokenizer, cache, task, row, lambda: shown.append(row.answers[0]))
    assert 1 < len(shown) <= demo.WORDS and all(row.answers[0].startswith(part.strip()) for part in shown)
    rows = demo.compared(model, tokenizer, task, ("4x",), Console(quiet=True))
    fastkv.unpatch(model)
    assert rows[0].answers == row.answers and rows[0].nbytes == cache_bytes(cache)
    assert rows[0].kl == 0 < rows[1].kl and rows[1].nbytes <= rows[0].nbytes / 8  # the full cache is in float32
    for one in rows:
        assert one.right == [task.questions[0].answered_by(one.answers[0])] and min(one.made, one.answering) > 0


def test_a_model_that_reads_for_every_cache_answers_the_same(bundled, monkeypatch):
    """As one with a sliding window in some layers does."""
    model, tokenizer = bundled
    words = {"model": MODEL, "text": "topics", "context": 300, "ask": [("What is this?", "a text")]}
    task = demo.task_of(tokenizer, Namespace(**words))
    first = demo.compared(model, tokenizer, task, ("4x",), Console(quiet=True))
    fastkv.unpatch(model)
    monkeypatch.setattr(demo.Reading, "of", mock.Mock(side_effect=fastkv.FastKVError("")))
    again = demo.compared(model, tokenizer, task, ("4x",), Console(quiet=True))
    fastkv.unpatch(model)
    assert [(one.answers, one.kl, one.nbytes) for one in first] == [(one.answers, one.kl, one.nbytes) for one in again]


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_the_demo_takes_memory_from_the_kernel_once():
    demo.keep_freed_memory()
    torch.zeros(1 << 21)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.zeros(1 << 21)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1000  # pages; 40,960 are used


def test_the_document_answers_the_questions_of_the_demo():
    text = demo.DOCUMENT.read_text()
    places = [text.index(question.fact) for question in demo.QUESTIONS]
    assert len(places) == 6 and places == sorted(places)
    for question in demo.QUESTIONS:
        assert text.count(question.fact) == 1 and question.answered_by(question.fact)


@pytest.mark.parametrize(
    "answer, said, right",
    [("the bat", 'They called it "The Bat".', True), ("the bat", "They won the battle.", False),
     ("$25,000", "It paid 25000 dollars.", True), ("750", "It weighed 1750 pounds.", False),
     ("42.6", "42.6 miles.", True), ("42", "42.6 miles.", False)],
)  # fmt: skip
def test_an_answer_of_the_demo_is_whole_words(answer, said, right):
    assert demo.Question("?", answer).answered_by(said) == right


def test_the_demo_asks_as_if_each_question_were_the_only_one(bundled):
    """Forked caches, stock and compressed, against text and question one after the other; the cache stays as it was."""
    model, tokenizer = bundled
    sample = generate("facts", 400, 5, questions=3)
    seen = tokenizer(sample.context, return_tensors="pt").input_ids
    asked = [tokenizer(question, add_special_tokens=False).input_ids for question in sample.questions]
    asked[1] = asked[1][-5:]  # they may differ in length
    for how in (nullcontext(), fastkv.patched(model, "fastkv", fastkv.Budget(tokens=128, recent=16))):
        with how:
            cache = reading.read(model, seen)
            before = cache_bytes(cache)
            together = answers(model, tokenizer, cache, seen, asked, 4)
            apart = [answers(model, tokenizer, reading.read(model, seen), seen, [one], 4)[0] for one in asked]
            assert together == apart and cache_bytes(cache) == before and cache.get_seq_length() == seen.shape[1]
            for one, told in zip(asked, together):
                past, new = reading.read(model, seen), torch.tensor([one])
                for word in told:
                    new = model(new, past_key_values=past).logits[:, -1:].argmax(-1)
                    assert int(new) == word
        wanted = [tokenizer(answer, add_special_tokens=False).input_ids for answer in sample.answers]
        if isinstance(how, nullcontext):
            assert together[0] == wanted[0] and together[2] == wanted[2]
