"""The pipeline: a context that is read once, plain prompts, and what it refuses."""

from contextlib import nullcontext

import pytest
import torch
import transformers

import fastkv
import fastkv.pipeline
from fastkv.api import answers
from fastkv.lab import reading

from .models import raises
from .processes import run
from .toy import generate, load


@pytest.fixture(scope="module")
def parts():
    model, tokenizer = load()
    return model, tokenizer, generate("facts", 512, 0, questions=3)


def made(parts, **options):
    return transformers.pipeline("fastkv-text-generation", model=parts[0], tokenizer=parts[1], **options)


def test_questions_to_a_context_that_is_read_once(parts):
    model, tokenizer, sample = parts
    ask = made(parts, policy="keydiff", budget=256, max_new_tokens=4)
    read = []
    hook = model.get_input_embeddings().register_forward_pre_hook(lambda _, given: read.append(given[0].shape))
    said = ask(context=sample.context, questions=list(sample.questions))["answers"]
    hook.remove()
    assert sum(shape[1] > 300 for shape in read) == 1 and len(said) == 3
    assert "_fastkv_config" not in vars(model), "patched while the call lasts"
    ids = tokenizer(sample.context, return_tensors="pt").input_ids
    for question, answer in zip(sample.questions, said):
        rows = [tokenizer(f"\n{question}", add_special_tokens=False).input_ids]
        with fastkv.patched(model, "keydiff", 256):
            (want,) = answers(model, tokenizer, reading.read(model, ids), ids, rows, 4)
        assert answer == tokenizer.decode(want, skip_special_tokens=True).strip()
        assert ask(context=sample.context, question=question) == {"answer": answer}


def test_a_call_may_say_more_than_the_pipeline(parts):
    ask, context = made(parts, budget=64, policy="streaming"), parts[2].context
    few = ask(context=context, question="What?", max_new_tokens=2)
    assert few != ask(context=context, question="What?", max_new_tokens=9)
    with fastkv.patched(parts[0], "streaming", 64):
        plain = made(parts)
        assert plain(context=context, question="What?", max_new_tokens=2) == few
        plain(context=context, question="What?", max_new_tokens=2, policy="knorm", budget=64)
        assert vars(parts[0])["_fastkv_config"].policy.name == "streaming", "a model that was patched stays as it was"


def test_arguments_of_a_call_are_added_to_those_of_the_pipeline(parts, monkeypatch):
    told = []
    monkeypatch.setattr(fastkv.pipeline, "patched", lambda model, **given: told.append(given) or nullcontext())
    made(parts, budget=64, policy="keydiff")("the river", policy="streaming", max_new_tokens=1)
    assert told == [{"budget": 64, "policy": "streaming"}]


def test_a_plain_prompt(parts):
    (model, tokenizer, _), text = parts, "the river and the hill"
    ids = tokenizer(text, return_tensors="pt").input_ids
    with fastkv.patched(model, "keydiff", 64):
        written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
    want = text + tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
    assert made(parts, policy="keydiff", budget=64)(text, max_new_tokens=5) == {"generated_text": want}
    assert made(parts, policy="keydiff", budget=64)([text, text], max_new_tokens=5) == [{"generated_text": want}] * 2


def test_an_answer_ends_where_the_model_says(parts, monkeypatch):
    model, tokenizer, _ = parts
    ids = tokenizer("the river and the hill", return_tensors="pt").input_ids
    cache = reading.read(model, ids)
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    (whole,) = answers(model, tokenizer, cache, ids, [[9]], 6)
    assert len(whole) == 6
    for told in (whole[3], [0, whole[3]]):
        monkeypatch.setattr(model.generation_config, "eos_token_id", told)
        assert answers(model, tokenizer, cache, ids, [[9]], 6) == [whole[: whole.index(whole[3])]]


def test_decoding_is_greedy_whatever_the_model_says(parts, monkeypatch):
    ask = made(parts, policy="keydiff", budget=64, max_new_tokens=3)
    want = ask("the river"), ask(context="the river", question="what")
    for name, value in (("num_beams", 3), ("do_sample", True), ("return_dict_in_generate", True), ("use_cache", False)):
        monkeypatch.setattr(parts[0].generation_config, name, value)
    assert (ask("the river"), ask(context="the river", question="what")) == want


def test_a_chat_template_holds_context_and_question(parts):
    tokenizer = load()[1]
    begins = "{% if add_generation_prompt %} answer :{% endif %}"
    tokenizer.chat_template = "user : {{ messages[0]['content'] }} ." + begins
    ask = made((parts[0], tokenizer), policy="streaming", budget=64)
    found = ask.preprocess("the river", ["what", "who"])
    texts = [tokenizer.decode([*found["ids"][0], *row]) for row in found["questions"]]
    assert texts == [tokenizer.decode(tokenizer(f"user : the river {q} . answer :", add_special_tokens=False).input_ids)
                     for q in ("what", "who")]  # fmt: skip
    tokenizer.chat_template = "{{ messages[0]['content'] | upper }}" + begins
    raises("a chat template that leaves messages as they are", ask.preprocess, "the river", ["what"])


def test_questions_of_the_pipeline_are_those_of_a_call(parts):
    one, several = made(parts, question="what"), made(parts, questions=["what", "who"])
    assert one(context="the river") == made(parts)(context="the river", question="what")
    assert several(context="the river") == made(parts)(context="the river", questions=["what", "who"])
    assert one(context="the river", questions=["who"]) == made(parts)(context="the river", questions=["who"])
    raises("got a prompt and questions", one, "the river")


@pytest.mark.parametrize(
    "given, message",
    [({}, "got nothing"), ({"context": "a"}, "got a context"),
     ({"inputs": "a", "question": "b"}, "got a prompt and question"),
     ({"inputs": "a", "context": "a", "question": "b"}, "got a prompt and a context and question"),
     ({"context": "a", "questions": []}, "at least one"), ({"context": "a", "questions": "b"}, "at least one"),
     ({"context": "a", "questions": ["b", None]}, "at least one text"), ({"context": "a", "questions": 5}, "at least"),
     ({"context": "a", "question": ["b"]}, "at least one text"),
     ({"inputs": "a", "max_new_tokens": "a"}, "max_new_tokens must be an integer of at least 1, got 'a'"),
     ({"inputs": "a", "temperature": 0.5}, "the arguments of fastkv.patch, got 'temperature'"),
     ({"inputs": ["a", "b"], "batch_size": 2}, "one text at a time, got a batch_size"),
     ({"context": "a", "question": "b", "policy": "nope"}, "unknown policy"),
     ({"context": "a", "question": "b", "budget": 8}, "smaller than sinks")],
    ids=str,
)  # fmt: skip
def test_refusals(parts, given, message):
    raises(message, made(parts), **given)
    assert "_fastkv_config" not in vars(parts[0])


def test_only_the_import_registers(tmp_path):
    code, said, errors = run(
        "import fastkv, fastkv.api\nfrom transformers.pipelines import PIPELINE_REGISTRY as known\n"
        "before = 'fastkv-text-generation' in known.get_supported_tasks()\nimport fastkv.pipeline\n"
        "print(before, 'fastkv-text-generation' in known.get_supported_tasks())",
        tmp_path,
    )
    assert (code, said) == (0, "False True\n"), errors
