"""Facts in real text: questions and texts of tuning and reporting are apart, and a sample is what it says."""

import os
import random
import threading

import pytest

from fastkv.lab import facts

from . import toy
from .models import raises


@pytest.fixture(scope="module")
def tokenizer():
    return toy.load()[1]


@pytest.mark.parametrize("content, times", [("{{ m.content }} {{ m.content }}", 2), ("nothing of it", 0)])
def test_a_template_has_a_message_once(content, times):
    tokenizer = toy.load()[1]
    tokenizer.chat_template = f"{{% for m in messages %}}{content}{{% endfor %}}"
    raises(f"has it {times} times", facts.around, tokenizer, "Who?")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_a_pipe_is_a_text(tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe")
    writer = threading.Thread(target=pipe.write_text, args=("a river",))
    writer.start()
    assert facts.read(str(pipe)) == "a river"
    writer.join()


@pytest.mark.parametrize("split", facts.BANKS)
@pytest.mark.parametrize("both", [False, True])
def test_a_sample_has_its_facts_and_length(tokenizer, split, both):
    sample = facts.sample(tokenizer, 3000, seed=4, split=split, both=both)
    text = tokenizer.decode(sample.prefix)
    assert len(sample.prefix) == 3000 and len(sample.continuation) == facts.GOES_ON
    assert len({question.kind for question in sample.questions}) == facts.ASKED
    assert len(sample.questions) == facts.ASKED * (1 + both)
    assert sum(question.reworded for question in sample.questions) == len(sample.questions) // 2
    for question in sample.questions:
        assert tokenizer.decode(tokenizer(question.fact, add_special_tokens=False)["input_ids"]) in text
        assert question.answered_by(f"It is {question.answer}.") and not question.answered_by("no idea")


def test_seeds_decide_everything(tokenizer):
    assert facts.sample(tokenizer, 2000, 1) == facts.sample(tokenizer, 2000, 1) != facts.sample(tokenizer, 2000, 2)


def test_tuning_and_reported_share_nothing():
    tuning, reported = facts.BANKS["tuning"], facts.BANKS["reported"]
    assert facts.SPLITS["tuning"] != facts.SPLITS["reported"] and min(len(tuning), len(reported)) >= 8
    for what in ("name", "text", "literal", "reworded"):
        assert not {getattr(kind, what) for kind in tuning} & {getattr(kind, what) for kind in reported}
    for what in ("subjects", "values"):
        sets = [{one for kind in bank for one in getattr(kind, what) or ()} for bank in (tuning, reported)]
        assert not sets[0] & sets[1]


def test_python_brings_texts():
    assert all(len(facts.read(source)) > 100_000 for source in facts.SOURCES)
    assert '"""' not in facts.read("code")[:2000]


@pytest.mark.parametrize(
    ("call", "says"),
    [(lambda t: facts.sample(t, 60, 0), "no room"),
     (lambda t: facts.sample(t, 2000, 0, split="all"), "split must be one of"),
     (lambda t: facts.read("nowhere.txt"), "cannot read the text nowhere.txt"),
     (lambda t: facts.stretch(t, "topics", 10**9, random.Random(0)), "expected 1000000000 or more")],
)  # fmt: skip
def test_refusals_are_one_sentence(tokenizer, call, says):
    raises(says, call, tokenizer)


def test_files_that_are_no_text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(b"\xff\xfe\x00")
    raises("not UTF-8", facts.read, str(file))
