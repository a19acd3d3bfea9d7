"""RULER offline: needles where they are said to be, exact lengths, counts by definition, metrics by hand, and grids."""

import random
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastkv import FastKVError
from fastkv.lab import ruler
from fastkv.lab.harness import TASK_FILES
from fastkv.lab.ruler import NOISE, SENTENCES, Request, longest, prose, string_match_all

from .conftest import examples
from .models import raises

NIAH = [task for task in ruler.TASKS if task.startswith("niah")]
TOKENS = {**dict.fromkeys(NIAH, 128), "vt": 30, "cwe": 120, "fwe": 50}
UUID = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}\b")
# At least as many tokens as one unit of filler; other tasks have sentences.
LARGEST = {"niah_single_1": NOISE, "vt": NOISE, "cwe": 3 * "12345. wwwwwwwwwwww ", "fwe": "wwwwww "}
NUMBER = re.compile(r"\b[1-9][0-9]{6}\b")


def toy_bpe():
    """Byte-level BPE of 400 tokens, trained here; adds a start token."""
    from tokenizers import ByteLevelBPETokenizer, processors
    from transformers import PreTrainedTokenizerFast

    sentences = prose(random.Random(0))
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([next(sentences) for _ in range(300)], 400, special_tokens=["<s>"], show_progress=False)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token="<s>")


@pytest.fixture(scope="module")
def tokenizers(bundled):
    """Three of them, each with an independent way to count."""
    words, bpe = bundled[1], toy_bpe()
    return {
        "words": (words, lambda text: len(text.split()) + 1),  # and <bos>
        "characters": (len, len),
        "bpe": (bpe, lambda text: len(bpe.backend_tokenizer.encode(text).ids)),
    }


def by_words(text):
    return len(text.split())


@pytest.mark.parametrize("name", ["words", "characters", "bpe"])
@pytest.mark.parametrize("task", ruler.TASKS)
def test_length_is_exact(task, name, tokenizers):
    """The prompt and the answer fit, and with one more unit of filler, which is small, they would not."""
    tokenizer, count = tokenizers[name]
    for length in (3001, 12000 if task == "cwe" else 4200):
        sample = ruler.generate(task, tokenizer, length, seed=1)
        assert sample.tokens_to_generate == TOKENS[task]
        assert sample.prompt.endswith(sample.question) and sample.context in sample.prompt
        left = length - TOKENS[task] - count(sample.prompt)
        units = sample.metadata["units"]
        draft = ruler.TASKS[task](Request(task, length, seed=1, index=0))
        assert draft(units) == sample
        more = count(draft(units + 1).prompt) - count(sample.prompt)
        assert 0 <= left < more
        assert more <= count(LARGEST.get(task, 12 * "sentence word ")) + 1


@pytest.mark.parametrize("task", ruler.TASKS)
def test_same_seed_same_sample_other_seed_other_sample(task):
    first = ruler.generate(task, by_words, 1500, seed=3, index=2)
    assert first == ruler.generate(task, by_words, 1500, seed=3, index=2)
    others = [ruler.generate(task, by_words, 1500, seed, index) for seed, index in ((4, 2), (3, 3))]
    others.append(ruler.generate(task, by_words, 1501, seed=3, index=2))
    assert len({first.answers, *(other.answers for other in others)}) == 4


@pytest.mark.parametrize("task", NIAH)
def test_answers_are_in_the_context_once_and_belong_to_the_key(task):
    """Counted against the paper's definitions: keys, values and queries, and what kind they are."""
    for index in range(5):
        sample = ruler.generate(task, by_words, 1200, index=index)
        answers = 4 if task in ("niah_multivalue", "niah_multiquery") else 1
        hidden = 4 if task in ("niah_multivalue", "niah_multiquery", "niah_multikey_1") else 1
        assert len(set(sample.answers)) == answers and len(sample.metadata["needles"]) == hidden
        kind = UUID if task in ("niah_single_3", "niah_multikey_3") else NUMBER
        assert all(kind.fullmatch(answer) and sample.context.count(answer) == 1 for answer in sample.answers)
        asked = sample.question.partition(" for ")[2].partition("?")[0].replace(" and ", ", ").split(", ")
        owner = {value: key for key, value in re.findall(r"of (\S+) is (\S+)\.", sample.context)}
        assert {owner[answer] for answer in sample.answers} == set(asked)
        assert sorted(value for value, key in owner.items() if key in asked) == sorted(sample.answers)
        assert len(asked) == (4 if task == "niah_multiquery" else 1)
        key_kind = UUID if task == "niah_multikey_3" else re.compile(r"[a-z]+-[a-z]+")
        assert all(key_kind.fullmatch(key) for key in owner.values())
        needles_as_haystack = task in ("niah_multikey_2", "niah_multikey_3")
        assert len(owner) == (sample.metadata["units"] + 1 if needles_as_haystack else hidden)
        assert not any(answer in sample.question for answer in sample.answers)


def test_haystacks_are_of_their_kind():
    line = ruler.generate("niah_single_1", by_words, 800)
    assert set(line.context.split("\n")) == {NOISE, *line.metadata["needles"]}
    essay = ruler.generate("niah_single_2", by_words, 800)
    text = essay.context.replace(essay.metadata["needles"][0], "")
    assert not re.search(r"[\d{}-]", text) and text.count(".") == essay.metadata["units"] > 20
    assert len(set(re.split(r"(?<=\.) +", text))) > 0.95 * essay.metadata["units"]
    assert "{" not in "".join(next(prose(random.Random(seed))) for seed in range(20 * len(SENTENCES)))


@pytest.mark.parametrize("task", NIAH)
@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_needle_is_at_the_stated_depth(task, depth):
    sample = ruler.generate(task, by_words, 1600, seed=5, depth=depth)
    between = "\n" if task in ("niah_single_1", "niah_multikey_2", "niah_multikey_3") else " "
    for needle in sample.metadata["needles"]:
        assert sample.context.count(needle) == 1
    asked = [n for n in sample.metadata["needles"] if any(answer in n for answer in sample.answers)]
    before = sample.context[: sample.context.index(asked[0])]
    for needle in sample.metadata["needles"]:
        before = before.replace(needle, "")
    filler = [one for one in (re.split(r"(?<=\.) +", before) if between == " " else before.split("\n")) if one.strip()]
    assert len(filler) == round(depth * sample.metadata["units"])
    free = ruler.generate(task, by_words, 1600, seed=5)
    assert free.answers == sample.answers and free.question == sample.question, "only the place differs"


def test_variable_tracking():
    """One chain of four hops; following it by hand gives the answers, each set once and all but the last passed on."""
    for index in range(10):
        sample = ruler.generate("vt", by_words, 1000, index=index)
        value = re.search(r"value (\d{5}) in", sample.question)[1]
        lines = sample.context.split("\n")
        assert {line for line in lines if not line.startswith("SET")} == {NOISE}
        held = {}
        for line in lines:
            if line.startswith("SET"):
                _, name, _, given = line.split()
                held[name] = held.get(given, given)
        assert tuple(held) == sample.answers and set(held.values()) == {value} and len(held) == 5
        assert [sample.context.count(name) for name in sample.answers] == [2, 2, 2, 2, 1]
        for needle, depth in zip(sample.metadata["needles"], sample.metadata["depths"]):
            assert lines[: lines.index(needle)].count(NOISE) == round(depth * sample.metadata["units"])
        example = sample.prompt.replace(sample.context, "").replace(sample.question, "")
        assert not any(name in example for name in sample.answers) and example.count("SET") == 5


@pytest.mark.parametrize("length,often,seldom", [(2000, 6, 1), (4096, 30, 3), (30000, 30, 3)])
def test_common_words(length, often, seldom):
    sample = ruler.generate("cwe", by_words, length, seed=2)
    numbers, words = sample.context.split()[::2], sample.context.split()[1::2]
    assert numbers == [f"{number}." for number in range(1, len(words) + 1)]
    counts = Counter(words)
    assert counts == sample.metadata["counts"]
    assert {word for word, times in counts.items() if times == often} == set(sample.answers)
    assert len(sample.answers) == 10 and set(counts.values()) == {often, seldom}
    assert len(counts) == 10 + sample.metadata["units"]
    assert words != sorted(words) and len(set(words[:40])) > 15, "shuffled"
    assert not any(one != other and one in other for one in sample.answers for other in counts)
    example = sample.prompt[: sample.prompt.index(sample.context)]
    assert not set(counts) & set(re.findall(r"\d+\. (\w+)", example)), "the worked example has other words"
    best = Counter(re.findall(r"\d+\. (\w+)", example)).most_common(10)
    assert set(example.split("most often are ")[1].split(".")[0].split(", ")) == set(dict(best))


@pytest.mark.parametrize("length", [170, 500, 3000, 20000])
def test_frequent_words_follow_the_zeta_distribution(length):
    """Counts are floor(t / k^2) for one t, up to words that are due at the same t; alpha is 2."""
    sample = ruler.generate("fwe", by_words, length, seed=9)
    words = sample.context.split()
    counts = Counter(words)
    assert counts == sample.metadata["counts"] and len(words) == sample.metadata["units"]
    ranked = [word for word, _ in counts.most_common()]
    assert ranked[0] == "..." and tuple(ranked[1:4]) == sample.answers
    times = [counts[word] for word in ranked]
    assert times[0] > times[1] > times[2] > times[3] > times[4]
    t = times[0]
    for rank, got in enumerate(times, 1):
        assert (t - 1) // rank**2 <= got <= (t + 1) // rank**2
    assert all(re.fullmatch("[a-z]{6}", word) for word in ranked[1:])
    assert words != sorted(words, key=ranked.index), "shuffled"


@pytest.mark.parametrize("task", ruler.TASKS)
def test_too_short_says_how_long(task):
    with pytest.raises(FastKVError, match=rf"{task} needs at least \d+ tokens.*got length 140") as refused:
        ruler.generate(task, len, 140)
    if task == "fwe":
        least = int(re.search(r"at least (\d+)", str(refused.value))[1])
        assert len(ruler.generate(task, len, least).context.split()) == 46


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(1, 40), min_size=120, max_size=120), st.integers(0, 100), st.integers(1, 5))
def test_longest_is_what_trying_every_length_finds(sizes, room, least):
    """Units of very different sizes; by brute force over all numbers of units."""

    def draft(units):
        return ruler.Sample("task", (10 + sum(sizes[:units])) * "x", "", "", ("x",), 7)

    fitting = [units for units in range(least, 120) if len(draft(units).prompt) + 7 <= room]
    if fitting:
        assert longest(draft, len, room, least) == draft(max(fitting))
    else:
        raises(f"at least {len(draft(least).prompt) + 7} tokens", longest, draft, len, room, least)


@pytest.mark.parametrize(
    "arguments,message",
    [({"task": "niah"}, "expected one of the tasks"), ({"task": "vt", "depth": 0.5}, "vt has no depth"),
     ({"task": "niah_single_1", "depth": 1.5}, "from 0 to 1, got 1.5")],
    ids=lambda value: value["task"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_refusals(arguments, message):
    raises(message, ruler.generate, tokenizer=by_words, length=1000, **arguments)
    raises("check the tokenizer", ruler.generate, "niah_single_1", lambda text: 1, 200)


@pytest.mark.parametrize(
    "prediction,answers,share",
    [("the numbers are 123, 456 and 789", ("123", "456", "789", "555"), 0.75), ("It is PARIS.", ("Paris",), 1.0),
     ("", ("a", "b"), 0.0), ("one\x00two\x1fthree", ("one", "two three"), 0.5), ("one\x07two", ("onetwo",), 0.0),
     ("one\x00two", ("one\ntwo",), 1.0), ("ab", ("a", "b", "c", "d", "e"), 0.4), ("abc", ("B",), 1.0),
     ("new york", ("New York City", "New York"), 0.5)],
)  # fmt: skip
def test_the_metric_by_hand(prediction, answers, share):
    assert string_match_all(prediction, answers) == share


# As tasks of lm-evaluation-harness.


def harness(**metadata):
    """The harness's task manager with fastkv's tasks, without its own thousands."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=[TASK_FILES], include_defaults=False, metadata=metadata)


def test_every_task_has_a_name_of_its_own():
    manager = harness()
    assert manager.all_subtasks == sorted(f"fastkv_ruler_{task}" for task in ruler.TASKS)
    assert manager.all_groups == ["fastkv_ruler"] and not manager.all_tags
    assert manager.task_index["fastkv_ruler"].cfg["task"] == [f"fastkv_ruler_{task}" for task in ruler.TASKS]


@pytest.mark.parametrize("task", ruler.TASKS)
def test_a_task_is_its_generator_and_its_metric(task, tokenizers):
    tokenizer, count = tokenizers["bpe"]
    length = 9000 if task == "cwe" else 2500
    chosen = {"max_seq_lengths": length, "num_samples": 2, "seed": 5, "tokenizer": tokenizer, "pretrained": "other"}
    loaded = harness(**chosen).load([f"fastkv_ruler_{task}"])["tasks"][f"fastkv_ruler_{task}"]
    loaded.set_config("num_fewshot", 0)
    loaded.build_all_requests(rank=0, world_size=1)
    assert len(loaded.instances) == 2
    for index, request in enumerate(loaded.instances):
        sample = ruler.generate(task, tokenizer, length, 5, index)
        text, generation = request.args
        assert text == sample.prompt and request.request_type == "generate_until"
        assert generation == {"until": [], "do_sample": False, "temperature": 0.0, "max_gen_toks": TOKENS[task]}
        assert count(text) + generation["max_gen_toks"] <= length
        for written in ("", sample.answers[0], f"They are {' and '.join(sample.answers)}."):
            score = string_match_all(written, sample.answers)
            assert loaded.process_results(request.doc, [written]) == {"score": score}


def test_scores_of_a_group_and_of_several_lengths():
    """Half of the answers at one length, all at the other; the score of a group is the mean of its tasks."""
    import lm_eval
    from lm_eval.api.model import LM

    class Half(LM):
        loglikelihood = loglikelihood_rolling = None

        def generate_until(self, requests, disable_tqdm=False):
            known = [(one.doc["answers"], 1 if one.doc["length"] == 3000 else 2) for one in requests]
            return [" ".join(answers[: len(answers) // part]).upper() for answers, part in known]

    manager = harness(max_seq_lengths=[1200, 3000], num_samples=2, tokenizer=by_words)
    found = lm_eval.simple_evaluate(Half(), tasks=["fastkv_ruler"], task_manager=manager, bootstrap_iters=0)
    results = found["results"]
    shares = {"niah_multivalue": 0.5, "niah_multiquery": 0.5, "vt": 0.4, "cwe": 0.5, "fwe": 1 / 3}
    for task in ruler.TASKS:
        found, short = results[f"fastkv_ruler_{task}"], shares.get(task, 0.0)
        assert found["score_3000,none"] == 1 and found["score_1200,none"] == pytest.approx(short)
        assert found["score,none"] == pytest.approx((1 + short) / 2)
    means = [results[f"fastkv_ruler_{task}"]["score,none"] for task in ruler.TASKS]
    assert results["fastkv_ruler"]["score,none"] == pytest.approx(sum(means) / 11)


@pytest.mark.parametrize(
    "task,metadata,message",
    [("vt", {"max_seq_lengths": 40}, "vt needs at least"),
     ("vt", {"max_seq_lengths": [1000, "long"]}, "max_seq_lengths must be whole numbers"),
     ("vt", {"max_seq_lengths": []}, "max_seq_lengths must be whole numbers"),
     ("vt", {"num_samples": [1, 2]}, "num_samples must be a whole number of at least 1"),
     ("vt", {"seed": -1}, "seed must be a whole number of at least 0"),
     ("vt", {"tokenizer": None}, "RULER needs a tokenizer"),
     ("vt", {"tokenizer": "no/such/folder"}, "cannot load a tokenizer from no/such/folder")],
    ids=lambda value: value if isinstance(value, str) and "_" in value and " " not in value else "",
)  # fmt: skip
def test_tasks_refuse(task, metadata, message):
    raises(message, harness(**{"tokenizer": by_words, **metadata}).load, [f"fastkv_ruler_{task}"])
