"""`fastkv chat`: a conversation in bounded memory, in the terminal.

One cache lives through all turns. Of each turn the model reads only what is new.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer

from ..api import as_chat, ends_of, patch
from ..errors import FastKVError
from ..integrations.transformers.cache import FastKVCache
from ..integrations.transformers.stock import CACHE
from ..policies import get
from . import common, facts

HELP = """/stats        settings, tokens seen and kept, bytes
/save FILE    write the conversation's cache
/load FILE    go on with one that was saved with the same settings
/reset        forget everything
/quit         end, as Ctrl-D; Ctrl-C ends an answer"""


class Conversation:
    """A model, the cache of what was said, and the tokens of it that the cache has not read yet.

    Attributes: read: [1, N] int64, tokens of the cache, 0 where they came from a file.  pending: [1, T] int64.
        ended: whether the last answer ended by itself, with one of the tokens `ends`.
    """

    def __init__(self, model: Any, tokenizer: Any, words: int) -> None:
        self.model, self.tokenizer, self.words = model, tokenizer, words
        self.cache = FastKVCache(model)
        self.read = self.pending = torch.zeros(1, 0, dtype=torch.long, device=model.device)
        self.ends = {said: one for one in ends_of(model) if (said := tokenizer.decode([one]))}
        self.ended = self.stopped = False

    @torch.no_grad()
    def answer(self, said: str, streamer: Any = None) -> str:
        """The model's answer to a message, drawn as its generation config says."""
        first = not self.cache.get_seq_length()
        words = turn(self.tokenizer, said, first, self.ends if self.ended else ())
        new = facts.start_of(self.tokenizer) if first and self.tokenizer.chat_template is None else []
        new += self.tokenizer(words, add_special_tokens=False)["input_ids"]
        ids = torch.cat([self.read, self.pending, self.read.new_tensor([new])], 1)  # `generate` reads what is new
        common.check_length("a conversation", ids.shape[1] + 1, self.model, "this model (/reset begins anew)")
        self.stopped, most = False, min(self.words, common.longest_text(self.model) - ids.shape[1])
        how = {"attention_mask": torch.ones_like(ids), CACHE: self.cache, "max_new_tokens": most}
        how["stopping_criteria"] = [lambda so_far, scores: so_far.new_full((1,), self.stopped, dtype=torch.bool)]
        before = signal.signal(signal.SIGINT, lambda *_: setattr(self, "stopped", True))  # Ctrl-C ends the answer
        try:
            made = self.model.generate(ids, **how, use_cache=True, streamer=streamer, return_dict_in_generate=True)
        finally:
            signal.signal(signal.SIGINT, before)
        reply, self.cache = made.sequences[0, ids.shape[1] :], made.past_key_values
        self.read, self.pending = made.sequences.tensor_split([int(self.cache.get_seq_length())], 1)
        self.ended = int(reply[-1]) in ends_of(self.model)
        return str(self.tokenizer.decode(reply, skip_special_tokens=True))

    def reset(self) -> None:
        """Forget everything."""
        self.cache, self.ended = FastKVCache(self.model), False
        self.read = self.pending = self.pending[:, :0]

    @torch.no_grad()
    def save(self, path: str) -> None:
        """Write the cache, which reads first what it has not read yet. Raises: FastKVError as `FastKVCache.save`."""
        if self.pending.shape[1]:
            cut = turn(self.tokenizer, "", first=False)
            found = [token for said, token in self.ends.items() if cut.startswith(said)]
            if found and not self.ended:  # as `load` expects
                self.pending, self.ended = torch.cat([self.pending, self.pending.new_tensor([found[:1]])], 1), True
            self.model(self.pending, **{CACHE: self.cache})
            self.read, self.pending = torch.cat([self.read, self.pending], 1), self.pending[:, :0]
        self.cache.save(path)

    def load(self, path: str) -> None:
        """Go on with a saved conversation. Raises: FastKVError as `FastKVCache.load`."""
        found = FastKVCache.load(path, self.model)
        if found.compressed[0].batch_size != 1:
            held = found.compressed[0].batch_size
            raise FastKVError(f"{path} holds {held} sequences, expected one conversation; load another file")
        self.cache = found
        self.read = self.pending.new_zeros(1, self.cache.get_seq_length())
        self.pending, self.ended = self.pending[:, :0], True


def turn(tokenizer: Any, said: str, first: bool, ended: Collection[str] = ()) -> str:
    """What is fed for a message: the end of the answer before it, the message, and the opening of the next answer, as
    the tokenizer's chat template has them.

    Args: ended: tokens one of which that answer has at its end already; none if it was cut.
    """
    if tokenizer.chat_template is None:
        return said if first else f"\n{said}"
    applied, message = partial(as_chat, tokenizer), ("user", said)
    if first:
        return applied([message])
    # Of three turns, the text behind the second answer; an answer of one letter says where it ends.
    past = [("user", "?"), ("assistant", "!")]
    opening, before, whole = applied(past[:1]), applied(past, opening=False), applied([*past, message])
    if not (before.startswith(f"{opening}!") and whole.startswith(before)):
        return applied([message])
    closing = before[len(opening) + 1 :]
    closing = next((closing.removeprefix(one) for one in ended if one and closing.startswith(one)), closing)
    return f"{closing}{whole[len(before) :]}"


def run(options: argparse.Namespace) -> None:
    """Talk until the input ends."""
    if get(options.policy).second_reading is not None:
        raise FastKVError(f"policy {options.policy!r} reads all of a text twice, a conversation only grows; use fastkv")
    console = common.console_of()
    model, tokenizer = common.load(options.model)
    budget = common.to_budget(options.budget)
    if budget.follows_prompt:
        raise FastKVError(f"a conversation needs a budget of tokens or bytes=N, got {options.budget}; for example 1024")
    patch(model, options.policy, budget, prefill_block="auto")
    conversation = Conversation(model, tokenizer, options.words)
    console.print(f"{Path(options.model).resolve().name}, {options.policy}, {options.budget}. /help lists commands.")
    while True:
        try:
            said = input("> ").strip()
            said.encode()  # what no UTF-8 was may have been read all the same
        except UnicodeError:
            console.print("the message is not text in UTF-8; type it again")
            continue
        except (EOFError, KeyboardInterrupt, RuntimeError):  # the last: there is no input
            console.print()
            return
        if said == "/quit":
            return
        try:
            if said.startswith("/"):
                console.print(commanded(conversation, said))
            elif said:
                conversation.answer(said, TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
        except FastKVError as error:  # the conversation goes on
            console.print(str(error))


def commanded(conversation: Conversation, words: str) -> str:
    """Do what a line that begins with / says; what there is to print about it."""
    name, _, file = map(str.strip, words.partition(" "))
    match name:
        case "/stats":
            return str(conversation.cache)
        case "/reset":
            conversation.reset()
            return "forgotten"
        case "/save" | "/load" if not file:
            raise FastKVError(f"{name} needs a file; for example {name} chat.fastkv")
        case "/save":
            conversation.save(file)
            return f"written: {file}"
        case "/load":
            conversation.load(file)
            return f"read: {file}"
        case "/help":
            return HELP
    raise FastKVError(f"there is no command {name}; /help lists them")
