"""`fastkv chat`: what is fed of each turn, commands, and a conversation through a terminal."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

import fastkv
from fastkv import FastKVCache
from fastkv.lab import chat

from .models import raises
from .processes import ROOT
from .toy import MODEL_DIR, load

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


class Templated:
    """A tokenizer of templates only."""

    chat_template, eos_token = TEMPLATE, "</e>"  # as Gemma's, which does not end turns

    def apply_chat_template(self, messages, tokenize, add_generation_prompt=False):
        assert not tokenize
        text = "".join(f"<s>{m['role']}\n{m['content']}</s>\n" for m in messages)
        return text + "<s>assistant\n" * add_generation_prompt


def test_turns_are_those_of_the_whole_conversation():
    """Ended by itself or cut, the pieces add up to what the template makes of all of it."""
    tokenizer, past, fed = Templated(), [], ""
    told = [("Hi", "Hello", True), ("Who?", "I a", False), ("Go on", "m", True)]
    for number, (said, reply, ended) in enumerate(told):
        past.append({"role": "user", "content": said})
        before = ("</e>", "</s>") if number and past[-2]["ended"] else ()
        fed += chat.turn(tokenizer, said, first=number == 0, ended=before)
        assert fed == tokenizer.apply_chat_template(past, False, True)
        past.append({"role": "assistant", "content": reply, "ended": ended})
        fed += reply + "</s>" * ended
    tokenizer.chat_template = None
    assert [chat.turn(tokenizer, "a", first, ("</s>",)) for first in (True, False)] == ["a", "\na"]


def test_a_template_that_refuses_is_one_sentence():
    tokenizer = load()[1]
    for template in ("{{ raise_exception('no users here') }}", "{{ 1 + messages[0]['content'] }}"):
        tokenizer.chat_template = template
        raises("the chat template of the tokenizer must take", chat.turn, tokenizer, "a", True)


def test_a_template_that_rewrites_the_past_is_used_turn_by_turn():
    tokenizer = Templated()
    plain = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda messages, **how: f"{len(messages)}{plain(messages, **how)}"
    assert chat.turn(tokenizer, "b", False, ("</s>",)) == "1<s>user\nb</s>\n<s>assistant\n"


@pytest.fixture
def conversation():
    model, tokenizer = load()
    fastkv.patch(model, "keydiff", 48 + 36, prefill_block=32)
    yield chat.Conversation(model, tokenizer, 6)
    fastkv.unpatch(model)


def test_memory_stays_and_a_saved_conversation_goes_on(conversation, tmp_path):
    file = str(tmp_path / "chat.fastkv")
    assert chat.commanded(conversation, "/stats").endswith(", empty)")
    sizes = []
    for word in ("the river and the hill " * 9, "a bird " * 40, "once more"):
        conversation.answer(word)
        sizes.append(conversation.cache.nbytes())
        assert conversation.cache.get_seq_length() + conversation.pending.shape[1] > len(word.split())
    assert len(set(sizes)) == 1
    assert re.search(r", \d+ tokens seen, \d+ kept per head, [\d.]+ MiB\)$", chat.commanded(conversation, "/stats"))
    conversation.save(file)
    assert conversation.pending.shape[1] == 0
    answers = []
    for _ in range(2):
        answers.append(conversation.answer("and then"))
        assert chat.commanded(conversation, "/reset") == "forgotten" and not conversation.cache.get_seq_length()
        assert chat.commanded(conversation, f"/load {file}").startswith("read")
    assert answers[0] == answers[1]
    conversation.cache.fork(3).save(file)
    raises("holds 3 sequences, expected one conversation", conversation.load, file)
    assert len(conversation.cache.compressed[0].state.seen) == 1


def test_the_whole_is_what_one_prompt_would_be(conversation):
    """Nothing is evicted: the tokens that the cache saw are those of one text, the last one apart."""
    model, tokenizer, words = conversation.model, conversation.tokenizer, ("the river", "a bird")
    fastkv.patch(model, "keydiff", 400)
    conversation.reset()
    text = torch.tensor([chat.facts.start_of(tokenizer)])
    for number, said in enumerate(words):
        new = tokenizer(said if not number else f"\n{said}", return_tensors="pt", add_special_tokens=False).input_ids
        text = torch.cat([text, new], 1)
        conversation.answer(said)
        with torch.no_grad(), fastkv.patched(model, "keydiff", 400):
            text = model.generate(text, attention_mask=torch.ones_like(text), max_new_tokens=6)
        fastkv.patch(model, "keydiff", 400)
        assert conversation.cache.get_seq_length() + conversation.pending.shape[1] == text.shape[1]
        assert torch.equal(torch.cat([conversation.read, conversation.pending], 1), text)


def test_an_answer_can_be_ended(conversation):
    conversation.words = 8_000
    seen = []

    def put(ids):
        seen.append(ids)
        if len(seen) == 4:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    conversation.answer("the river", SimpleNamespace(put=put, end=lambda: None))
    assert conversation.stopped and 4 <= len(seen) <= 6 and signal.getsignal(signal.SIGINT) is before
    conversation.words = 2
    conversation.answer("and")  # it goes on


def test_what_generate_is_given(conversation, monkeypatch):
    """The end of an answer lies where the answer does; positions that the model does not know are refused."""
    told = {}

    def generate(ids, **how):
        told.update(how, ids=ids)
        raise InterruptedError

    monkeypatch.setattr(conversation.model, "generate", generate)
    with pytest.raises(InterruptedError):
        conversation.answer("the river")
    (ends,) = told["stopping_criteria"]
    assert ends(torch.empty(1, 3, device="meta"), None).device.type == "meta" and told["use_cache"]
    monkeypatch.setattr(conversation.tokenizer, "chat_template", None)
    monkeypatch.setattr(chat.facts, "start_of", lambda tokenizer: [3])
    with pytest.raises(InterruptedError):
        conversation.answer("the river")
    assert told["ids"][0, 0] == 3 and told["ids"].shape[1] == 3
    conversation.words = 9_000
    with pytest.raises(InterruptedError):
        conversation.answer("and")
    assert told["max_new_tokens"] == 8_192 - told["ids"].shape[1]
    raises("at most 8192 tokens for this model .*/reset begins anew", conversation.answer, "and " * 8_192)


@pytest.mark.parametrize("words,said", [("/save", "needs a file"), ("/what", "no command /what"), ("/load /no", "/no")])
def test_a_wrong_command_is_one_sentence(conversation, words, said):
    raises(said, chat.commanded, conversation, words)
    assert isinstance(conversation.cache, FastKVCache)


def test_in_a_terminal(tmp_path):
    """Typed through a pseudo-terminal: an answer, what it holds, a mistake, the end."""
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "fastkv.lab.cli", "chat", "--model", str(MODEL_DIR), "--policy", "keydiff"]
    process = subprocess.Popen(
        [*command, "--budget", "64", "--words", "5"], cwd=ROOT, stdin=child, stdout=child, stderr=child, close_fds=True
    )
    os.close(child)
    said = ""

    def until(words, seconds=120):
        nonlocal said
        end = time.monotonic() + seconds
        while words not in said:
            assert time.monotonic() < end, said
            if select.select([parent], [], [], 1)[0]:
                said += os.read(parent, 4096).decode(errors="replace")

    def type_in(line):
        nonlocal said
        said = ""
        os.write(parent, f"{line}\n".encode())

    until("> ")
    type_in("the river")
    until("\n> ")
    type_in("/stats")
    until("tokens seen")
    type_in("/nothing")
    until("there is no command /nothing")
    until("> ")
    type_in("/quit")
    assert process.wait(30) == 0
    os.close(parent)
