"""Long decoding: nearly all of the context is what came token by token, and the model must look back at it.

    python -m perf.long_decoding                       # what is missing; stop at any time and go on
    python -m perf.long_decoding --parts chains        # one part
    python -m perf.long_decoding --only rkv            # some caches
    python -m perf.long_decoding --report              # tables and plot again, from the JSON

`chains`: the bundled model decodes 4096 tokens after a prompt of 128. Several chains of dependent steps take turns: a
step states who the friend of somebody new is, and this is the name that the model itself wrote at the chain's step
before; then it asks what the friend's box holds, which was said once, at the chain's first step, and after that only in
the model's own answers. The answer is decoded greedily and stays in the context. Between two steps of a chain lie
`chains * turn` tokens. Statements, filler and questions are fed, answers are the model's own.

`language`: the language model is fed 1984 tokens of held-out text one by one after a prompt of 64; the KL of its next
tokens from those of the full cache, over length. Its context ends at 2048.

All caches of a part hold equal bytes. Exit code: 0 complete, 1 something failed, 2 refused, 3 cases are left.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from fastkv import Budget, FastKVError, patched
from fastkv.demo import MODEL_DIR, load
from fastkv.demo.measure import cache_bytes
from fastkv.demo.tasks import NAMES, NUMBERS, generate
from fastkv.evaluation import common, fidelity
from fastkv.evaluation.equal_bytes import assert_equal_bytes, equal_bytes
from tools import language_model

from . import engine
from .engine import COMPLETE, REFUSED, Deadline, Job, OtherSettings, Results, Row
from .environment import environment, source
from .quality.__main__ import models
from .quality.results import Mean
from .tables import table

OUT = engine.RESULTS / "long_decoding"
CHAINS, LANGUAGE = "chains", "language"
FULL = "full cache"
POLICIES = {
    CHAINS: ("streaming", "snapkv", "rkv", "triattention", "momentkv", "fastkv"),
    LANGUAGE: ("streaming", "snapkv", "rkv", "triattention", "momentkv", "fastkv"),
}
SHARES = {"sinks": 4, "recent": 16}
QUESTION = "question : what does the box of the friend of {0} hold ? answer : the friend of {0} is"
ANSWER = "{0} and the box of {0} holds {1} ."
WORDS = len(ANSWER.format("name", "1 2 3").split())


@dataclass(frozen=True)
class Settings:
    """What all results share.

    Attributes:
        rows: texts, the unit of the standard errors.  first: seed of the first.
        tokens: decoded after a prompt of `turn`.  turn: tokens of a step.  chains: that take turns.
        budget: tokens per KV head that a cache without moments would keep in the bytes of all.
        prose: tokens of a held-out text, its first `prompt` read at once.  kept: as `budget`, for prose.
        bins: parts of the length that numbers are given for.
    """

    rows: int = 8
    first: int = 900_000
    tokens: int = 4096
    turn: int = 128
    chains: int = 6
    budget: int = 256
    prose: int = 2048
    prompt: int = 64
    kept: int = 128
    bins: int = 8


class Stream:
    """The words of one row: what is fed at each turn, given what the model wrote at the turns before.

    Args: seed: of names, numbers and filler; settings: of all results.
    """

    def __init__(self, seed: int, settings: Settings) -> None:
        self.settings, self.rng = settings, random.Random(seed)
        names = self.rng.sample(NAMES, settings.chains + settings.tokens // settings.turn)
        self.owners, self.friends = names[: settings.chains], names[settings.chains :]
        self.values = [" ".join(self.rng.choices(NUMBERS, k=3)) for _ in self.owners]
        self.written = list(self.owners)  # who the model last said that a chain is about
        self.filler = self.sentences()

    def sentences(self) -> Iterator[str]:
        """Sentences of the bundled model's language that state no fact, for ever."""
        while True:
            text = generate("facts", 1024, self.rng.randrange(1 << 40)).context
            yield from (one for one in text.split(" . ") if not one.startswith("the code of") and one)

    def filled(self, statements: list[str], room: int) -> str:
        """`room` words: the statements at random places among filler, whose last sentence may be cut."""
        room -= sum(len(one.split()) for one in statements)
        words: list[str] = []
        while len(words) < room:
            words += [*next(self.filler).split(), "."]
        words = [*words[: room - 1], "."]
        ends = [0, *(place + 1 for place, word in enumerate(words) if word == ".")]
        for statement in statements:
            place = self.rng.choice(ends)
            words[place:place] = statement.split()
            ends = [0, *(place + 1 for place, word in enumerate(words) if word == ".")]
        return " ".join(words)

    def fed(self, step: int) -> str:
        """The words of a turn before the answer."""
        chain, friend = step % self.settings.chains, self.friends[step]
        statements = [f"the friend of {friend} is {self.written[chain]} ."]
        if step < self.settings.chains:
            statements.append(f"the box of {self.owners[chain]} holds {self.values[chain]} .")
        question = QUESTION.format(friend)
        room = self.settings.turn - WORDS - len(question.split())
        return f"{self.filled(statements, room)} {question}"

    def right(self, step: int, words: list[str]) -> bool:
        """Whether the model wrote the chain's name and its box; the next step is about the name it wrote."""
        chain = step % self.settings.chains
        self.written[chain] = words[0]
        return words == ANSWER.format(self.owners[chain], self.values[chain]).split()


def decode(model: Any, tokenizer: Any, settings: Settings) -> Row:
    """Decode all turns, greedily where the model answers.

    Returns: share of right answers by part of the length and row, bytes of a sequence, and tokens after each part.
    """
    streams = [Stream(settings.first + row, settings) for row in range(settings.rows)]
    prompts = [stream.filled([], settings.turn - 1) for stream in streams]
    cache = model(torch.tensor(tokenizer(prompts).input_ids), use_cache=True, logits_to_keep=1).past_key_values
    steps = settings.tokens // settings.turn
    each, right, nbytes = steps // settings.bins, [], []
    for step in range(steps):
        fed = tokenizer([stream.fed(step) for stream in streams], add_special_tokens=False).input_ids
        for word in torch.tensor(fed).split(1, 1):
            logits = model(word, past_key_values=cache).logits
        answer = []
        for _ in range(WORDS):
            answer.append(logits[:, -1:].argmax(-1))
            logits = model(answer[-1], past_key_values=cache).logits
        written = [tokenizer.convert_ids_to_tokens(row) for row in torch.cat(answer, 1)]
        right.append([stream.right(step, words) for stream, words in zip(streams, written)])
        if (step + 1) % each == 0:
            nbytes.append(cache_bytes(cache) // settings.rows)
    shares = torch.tensor(right).double().unflatten(0, (settings.bins, each)).mean(1)
    ends = [settings.turn * (1 + each * (part + 1)) for part in range(settings.bins)]
    return {"right": shares.tolist(), "nbytes": nbytes, "tokens": ends}


class Bench:
    """The two models, and what the full cache makes of the prose. Args: settings: of all results; language: folder."""

    def __init__(self, settings: Settings, language: Path) -> None:
        transformers.utils.logging.disable_progress_bar()
        self.settings = settings
        self.bundled = cache(load)
        self.language = cache(lambda: load(directory=language))
        self.read = cache(self.read_prose)

    def read_prose(self) -> tuple[Tensor, fidelity.Full]:
        """Held-out texts [rows, prose], and what the full cache makes of them."""
        model, tokenizer = self.language()
        ids = language_model.encoded(tokenizer, language_model.corpus()[1])
        texts = language_model.stretches(ids, self.settings.rows, self.settings.prose, self.settings.first)
        return texts, fidelity.read_full(model, texts, self.settings.prose - self.settings.prompt)

    @torch.no_grad()
    def run(self, part: str, name: str) -> Row:
        """Measure one cache. Raises: FastKVError if it does not hold the bytes of the others."""
        settings = self.settings
        model, tokenizer = self.bundled() if part == CHAINS else self.language()
        tokens = settings.budget if part == CHAINS else settings.kept
        if part == LANGUAGE:
            self.read()  # by the stock model
        budget = equal_bytes(model.config, tokens, model.dtype, **SHARES)
        with nullcontext() if name == FULL else patched(model, name, budget):
            if name != FULL:
                assert budget.bytes is not None
                first = torch.zeros(1, 1, dtype=torch.long)
                assert_equal_bytes({name: model(first, use_cache=True).past_key_values}, budget.bytes)
            return decode(model, tokenizer, settings) if part == CHAINS else self.prose(model, budget)

    def prose(self, model: Any, budget: Budget) -> Row:
        """KL of next tokens by part of the length and text, while the texts are fed."""
        texts, full = self.read()
        settings, fed = self.settings, self.settings.prose - self.settings.prompt
        held = model(texts[:, :-fed], use_cache=True, logits_to_keep=1).past_key_values
        _, log_probs = fidelity.feed(model, texts[:, -fed:], held)
        kl = (full.log_probs.exp() * (full.log_probs - log_probs)).sum(-1)
        parts = kl.tensor_split(settings.bins, 1)
        ends = torch.tensor([part.shape[1] for part in parts]).cumsum(0) + settings.prompt
        kept = {"nbytes": [cache_bytes(held) // len(texts)] * settings.bins, "tokens": ends.tolist()}
        return {"kl": [part.mean(1).tolist() for part in parts], **kept}


def cases() -> dict[str, list[str]]:
    """Names of the caches of each part. The full cache is what prose is compared with, so it has no row there."""
    return {CHAINS: [FULL, *POLICIES[CHAINS]], LANGUAGE: [*POLICIES[LANGUAGE]]}


def arguments(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = engine.command("perf.long_decoding", __doc__, (CHAINS, LANGUAGE), minutes=float("inf"), out=OUT)
    parser.add_argument("--report", action="store_true", help="measure nothing")
    default = Settings()
    parser.add_argument("--rows", type=int, default=default.rows, help="texts (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=default.tokens, help="decoded in chains (default: %(default)s)")
    parser.add_argument("--budget", type=int, default=default.budget, help="of chains, tokens (default: %(default)s)")
    parser.add_argument("--chains", type=int, default=default.chains, help="that take turns (default: %(default)s)")
    parser.add_argument("--language", type=Path, default=language_model.FOLDER, help="default: perf/language_model")
    options = parser.parse_args(words)
    options.out, options.parts = engine.folder(options, OUT), options.parts or (CHAINS, LANGUAGE)
    return options


def settings_of(options: argparse.Namespace) -> Settings:
    """What the command line says of the results.

    Raises: FastKVError for a length that does not divide into equal parts, or needs more names than there are.
    """
    settings = Settings(rows=options.rows, tokens=options.tokens, budget=options.budget, chains=options.chains)
    part, steps = settings.turn * settings.bins, settings.tokens // settings.turn
    if settings.tokens < part or settings.tokens % part:
        raise FastKVError(f"tokens must be a multiple of {part}, got {settings.tokens}; give --tokens {part}")
    if settings.chains < 1 or settings.chains + steps > len(NAMES):
        raise FastKVError(
            f"chains must be 1 to {len(NAMES) - steps} for {settings.tokens} tokens, got {settings.chains}; there are "
            f"{len(NAMES)} names, and each chain and each step needs one"
        )
    return settings


def main(words: list[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    options = arguments(words)
    if options.list:
        return engine.listed({part: cases()[part] for part in options.parts})
    code = COMPLETE
    try:
        if not options.report:
            code = measure(settings_of(options), options)
        write_report(options.out)
    except (FastKVError, OtherSettings) as error:
        print(f"perf.long_decoding: {error}", file=sys.stderr)
        return REFUSED
    return code


def measure(settings: Settings, options: argparse.Namespace) -> int:
    """Measure the caches without a result. Returns: the worst exit code."""
    bench, deadline = cache(lambda: Bench(settings, options.language)), Deadline(options.minutes)
    again = {"fresh": options.fresh, "retry": options.retry_skipped}
    codes = []
    for part in options.parts:
        facts: Row = environment(options.commit)
        facts |= models(MODEL_DIR) if part == CHAINS else models(MODEL_DIR, language=options.language)
        if part == LANGUAGE:
            facts["held-out text"] = language_model.held_out_digest()
        planned = [job(part, name, bench) for name in cases()[part]]
        results = Results.open(options.out / f"{part}.json", facts, planned, asdict(settings), **again)
        codes.append(engine.measure([one for one in planned if options.only in one.name], results, deadline))
    return engine.worst(codes)


def job(part: str, name: str, bench: Callable[[], Bench]) -> Job:
    """One cache."""
    code = source("perf.long_decoding", policy="" if name == FULL else name)
    return Job(name, {"part": part, "name": name}, lambda: bench().run(part, name), code)


# The report.


HEADER = """# Long decoding

Written by `python -m perf.long_decoding` from the JSON files beside it; do not edit. What it does: its `--help`.
"""
SHOWS = """
What it shows: whether a cache that evicts while it decodes still has what an earlier answer said. What it does not: the
bundled model finds names and numbers and does not reason, its full cache is the ceiling, and its longest training texts
had 5120 tokens; the prose is fed and not the model's own. Longer outputs need a model with a longer context.
"""


def write_report(folder: Path) -> None:
    """Write README.md and the plot. Raises: FastKVError without results."""
    files = {part: json.loads(path.read_text()) for part in cases() if (path := folder / f"{part}.json").is_file()}
    if not files:
        raise FastKVError(f"{folder} has no results; measure some with python -m perf.long_decoding")
    (folder / "README.md").write_text(report(files))
    plot(files, folder / "long_decoding.png")


def report(files: dict[str, dict[str, Any]]) -> str:
    """README.md."""
    parts = [HEADER, "![Answers and KL over length](long_decoding.png)\n"]
    for part, file in files.items():
        settings, facts = file["settings"], file["environment"]
        rows = {row["id"]: row for row in file["rows"]}
        order = [name for name in cases()[part] if name in rows]
        ends = next(iter(rows.values()))["tokens"]
        if part == CHAINS:
            title = "Right answers, %, by tokens of the context"
            what = (
                f"{settings['chains']} chains, a step every {settings['turn']} tokens, {settings['rows']} texts, the "
                f"bytes of {settings['budget']} tokens per KV head; mean over the texts ± standard error.\n"
            )
            lines = [line(rows[name], "right", "{:.0f}", 100) for name in order]
        else:
            title = "KL of next tokens on held-out text, nats, by tokens of the context"
            what = f"{settings['rows']} texts, the bytes of {settings['kept']} tokens per KV head.\n"
            lines = [line(rows[name], "kl", "{:.3f}", 1) for name in order]
        machine = f"{facts['cpu']}, {facts['threads']} thread, torch {facts['torch']}, commit {facts['commit']}.\n"
        left = ", ".join(name for name in cases()[part] if name not in rows)
        what += f"Not measured yet: {left}.\n" if left else ""
        header = (part, *(f"to {end}" for end in ends), "KiB at the end")
        parts += [f"## {title}\n", what, machine, table(header, lines)]
    parts += [f"The part {part} has not been measured yet.\n" for part in cases() if part not in files]
    return "\n".join(part.strip("\n") + "\n" for part in [*parts, SHOWS])


def line(row: Row, measure: str, form: str, times: float) -> tuple[str, ...]:
    """A line of a table."""
    means = (Mean.of(numbers).show(form, times) for numbers in row[measure])
    return row["id"], *means, f"{row['nbytes'][-1] / 2**10:.0f}"


def plot(files: dict[str, dict[str, Any]], path: Path) -> None:
    """Answers, KL and memory over length, six caches, and the full one dashed."""
    figure = common.figure(14, 4.4)
    axes = figure.subplots(1, 3)
    names = list(dict.fromkeys(name for part in POLICIES.values() for name in part))
    titles = (CHAINS, "right", 100, "right answers, %"), (LANGUAGE, "kl", 1, "KL of next tokens, nats")
    for axis, (part, measure, times, label) in zip(axes, titles):
        rows = {row["id"]: row for row in files.get(part, {"rows": []})["rows"]}
        if FULL in rows:
            means = [times * Mean.of(numbers).value for numbers in rows[FULL][measure]]
            axis.plot(rows[FULL]["tokens"], means, label=FULL, **common.DASHED)
        for index, name in enumerate(names):
            if name in rows:
                means = [times * Mean.of(numbers).value for numbers in rows[name][measure]]
                axis.plot(rows[name]["tokens"], means, label=name, **common.style(index))
        axis.set_xlabel("tokens of the context")
        axis.set_ylabel(label)
        common.finish(axis, part)
    for row in files.get(CHAINS, {"rows": []})["rows"]:
        look = common.DASHED if row["id"] == FULL else common.style(names.index(row["id"]))
        axes[2].plot(row["tokens"], [size / 2**10 for size in row["nbytes"]], label=row["id"], **look)
    axes[2].set_yscale("log")
    axes[2].set_xlabel("tokens of the context")
    axes[2].set_ylabel("KiB per sequence")
    common.finish(axes[2], "memory of chains")
    first = axes[0] if files.get(CHAINS) else axes[1]
    common.save(figure, path, "what a cache still knows of what came token by token", legend_of=first, columns=7)


if __name__ == "__main__":
    raise SystemExit(main())
