"""What one watches of `fastkv demo`: a question and its answers from several caches, then all answers, line by line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..demo.measure import cache_bytes
from ..demo.tasks import generate, max_questions
from . import common
from .comparison import Row, budget_of, cached

if TYPE_CHECKING:
    from rich.console import Console

ASKED = 3  # questions that one watches
ANSWERING = 4  # policies that answer them
AROUND = 34  # characters of the text on either side of a fact
WORDS = 17  # room for an answer, characters
BAR = 10  # characters that stand for all answers
BLOCK = 256  # tokens that are read between two looks at the memory
NAMES = {common.FULL: "full cache"}  # of caches, where they differ from the policy's


@dataclass(frozen=True)
class Memory:
    """Bytes of one cache after each number of tokens."""

    policy: str
    tokens: tuple[int, ...]
    nbytes: tuple[int, ...]


def tell(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: argparse.Namespace,
    whole: int,
    console: Console,
) -> None:
    """Ask for some facts of one text: print where they stand and what the model writes from each cache.

    whole: as in `budget_of`.
    """
    asked = middle(settings)
    sample = generate("facts", settings.context, settings.seed, min(ASKED, max_questions("facts", settings.context)))
    starts = [question.partition("answer : ")[2] for question in sample.questions]
    facts = [f"{start} {answer}" for start, answer in zip(starts, sample.answers)]
    console.print(
        f"A text of {len(sample.context.split())} words is read once, and its cache is cut to {asked}. Only then come "
        f"the questions.\n\n  {excerpt(sample.context, facts[0])}\n  {sample.questions[0]} [bold]...[/bold]\n"
    )
    places = [f"word {len(sample.context.partition(fact)[0].split()) + 1}" for fact in facts]
    keys = [start.removeprefix("the code of ").removesuffix(" is") for start in starts]
    for cells in (keys, places):
        console.print(f"  {'':<24}{''.join(f'{cell:<{WORDS}}' for cell in cells)}".rstrip(), style="dim")
    ids = tokenizer(sample.context, return_tensors="pt").input_ids
    questions = tokenizer(sample.questions, add_special_tokens=False, return_tensors="pt").input_ids
    for policy in (common.FULL, *settings.policies[:ANSWERING]):
        budget = None if policy == common.FULL else budget_of(asked, settings, model.config, model.dtype, whole)
        with console.status(f"{policy} reads"), cached(model, policy, budget, settings.slots):
            written, nbytes = write(model, ids, questions, len(sample.answers[0].split()))
        said = tokenizer.decode(written)
        marks = ("[green]✓[/green]" if one == answer else "[red]✗[/red]" for one, answer in zip(said, sample.answers))
        answers = "".join(f"{mark} {one:<{WORDS - 2}}" for mark, one in zip(marks, said))
        console.print(f"  {NAMES.get(policy, policy):<12}{nbytes / 2**10:6.0f} KiB  {answers}".rstrip())
    console.print()


def middle(settings: argparse.Namespace) -> int | Fraction:
    """The size at which some questions are shown: the middle one, the smaller of two."""
    return settings.budgets[(len(settings.budgets) - 1) // 2]


def excerpt(text: str, fact: str) -> str:
    """The text around a fact, with the fact in bold."""
    before, _, after = text.partition(fact)
    return f"... {before[-AROUND:].partition(' ')[2]}[bold]{fact}[/bold]{after[:AROUND].rpartition(' ')[0]} ..."


@torch.no_grad()
def write(model: PreTrainedModel, text: Tensor, questions: Tensor, words: int) -> tuple[Tensor, int]:
    """Read the text [1, N], then ask the questions [Q, T] of the same cache.

    Returns: the words [Q, words] that greedy decoding adds; bytes of the cache after the text.
    """
    cache = model(text, logits_to_keep=1, use_cache=True).past_key_values
    nbytes, new, written = cache_bytes(cache), questions, []
    cache.batch_repeat_interleave(len(questions))
    for _ in range(words):
        new = model(new, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)
        written.append(new)
    return torch.cat(written, 1), nbytes


def watch(rows: Iterable[Row], settings: argparse.Namespace, console: Console) -> Iterator[Row]:
    """Print a line for each policy as soon as its rows are there, and hand them on."""
    texts = len(settings.tasks) * settings.samples
    number, room = texts * settings.questions, BAR + 5
    console.print(
        f"Right answers of {number} ({', '.join(settings.tasks)}; texts: {texts}), and the error of attention's output "
        f"at {middle(settings)}.\n"
    )
    sizes = "".join(f"{size!s:>4}{'':<{room - 4}}" for size in settings.budgets)
    console.print(f"  {'':<12}{sizes}  error  tok/s", style="dim")
    line: list[Row] = []
    for row in rows:
        line.append(row)
        if row.policy == common.FULL or len(line) == len(settings.budgets):
            bars = "".join(f"{one.accuracy * number:4.0f} {bar(one.accuracy)}" for one in line)
            shown = next((one for one in line if one.budget == middle(settings)), row)
            console.print(
                f"  {NAMES.get(row.policy, row.policy):<12}{bars:<{room * len(settings.budgets)}}"
                f"{shown.error:7.3f} {shown.tokens_per_second:6.0f}"
            )
            line = []
        yield row


def bar(share: float) -> str:
    """A share as a bar of `BAR` characters, in eighths."""
    whole, eighths = divmod(round(share * BAR * 8), 8)
    return f"{'█' * whole + ' ▏▎▍▌▋▊▉'[eighths]:<{BAR}}"[:BAR]


@torch.no_grad()
def memories(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: argparse.Namespace, whole: int
) -> list[Memory]:
    """Bytes of the full cache and of the first policy's while a text of twice the length is read in blocks."""
    length = min(2 * settings.context, common.longest_text(model))
    ids = tokenizer(generate(settings.tasks[0], length, settings.seed).context, return_tensors="pt").input_ids
    found = []
    for policy, asked in ((common.FULL, None), (settings.policies[0], middle(settings))):
        budget = None if asked is None else budget_of(asked, settings, model.config, model.dtype, whole)
        with cached(model, policy, budget, settings.slots, BLOCK):
            cache, seen, nbytes = None, [], []
            for block in ids.split(BLOCK, 1):
                cache = model(block, past_key_values=cache, logits_to_keep=1, use_cache=True).past_key_values
                seen.append(cache.get_seq_length())
                nbytes.append(cache_bytes(cache))
        found.append(Memory(policy, tuple(seen), tuple(nbytes)))
    return found
