"""What more tokens in fewer bits are worth: slots of 16, 8 and 4 bits in the same bytes.

    python -m perf.quality.slots                       # all parts, three quarters of an hour of one core
    python -m perf.quality.slots --parts language      # held-out text and the model in --language
    python -m perf.quality.slots --parts rounding      # the same tokens there, of many texts
    python -m perf.quality.slots --parts shares shares-bundled   # more tokens, more bits or more centroids
    python -m perf.quality.slots --parts quantized     # transformers' QuantizedCache, with hqq and optimum-quanto
    python -m perf.quality.slots --report              # only tables and picture, from perf/results/slots/*.json

Models compute in bf16, and the bytes of a budget are those that a cache in bf16 spends on so many tokens per KV head,
without moments and scores. "same" has the tokens of bf16 instead, so that it shows rounding alone. A QuantizedCache
keeps all tokens, so the bytes there are its own, and other caches get them.

A part's file is rewritten after every case. Exit code: 0 complete, 1 something failed, 2 refused, 3 cases are left.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from fastkv import Budget, FastKVError, corrections, patched
from fastkv.corrections import CENTROIDS
from fastkv.demo import MODEL_DIR, load
from fastkv.demo.measure import make_questions
from fastkv.demo.tasks import TASKS
from fastkv.evaluation import fidelity
from fastkv.evaluation.common import COLOURS, MARKERS
from fastkv.evaluation.equal_bytes import assert_equal_bytes, equal_bytes, stored_bytes
from fastkv.reference import FORMATS
from tools.language_model import corpus, encoded, stretches

from .. import engine
from ..engine import COMPLETE, REFUSED, Deadline, Job, OtherSettings, Results, Row, Unmeasured
from ..environment import environment, source
from .__main__ import models
from .plots import tidy
from .results import Mean
from .verdict.cases import LATER, RECENT, SINKS
from .verdict.trained import answered, divergence, mean_distance

OUT = engine.RESULTS / "slots"
LANGUAGE_MODEL = engine.ROOT / "perf" / "language_model"
PARTS = "bundled", "language", "rounding", "shares", "shares-bundled", "quantized"
BUNDLED, LANGUAGE, ROUNDING, SHARES, SHARES_BUNDLED, QUANTIZED = PARTS
ASKED = (BUNDLED, SHARES_BUNDLED)  # parts of questions to the bundled model
TOKENS = (48, 96, 160, 256)  # per KV head, of a cache in bf16
TITLES = {
    BUNDLED: "The bundled model",
    LANGUAGE: "The language model",
    ROUNDING: "The language model: the same tokens, more texts",
    SHARES: "The language model: tokens, bits or centroids",
    SHARES_BUNDLED: "The bundled model: tokens, bits or centroids",
    QUANTIZED: "The language model: transformers' QuantizedCache",
}
SHARED = ("auto", "int8", "int4")
OF_CENTROIDS = (0, 32, 16, 8)  # their bytes, one of so many that pairs in bf16 take; 0 for none
BITS = ((4, 64), (2, 64))  # of a QuantizedCache, and numbers to a scale: transformers' default and its smallest
LIBRARIES = {"hqq": 1, "quanto": 0}  # what quantises for it, and the axis that each recommends
POLICIES = ("fastkv", "momentkv", "snapkv")
PLAIN, SAME = "auto", "int8"  # what others are compared with, and what is measured with its tokens, too


@dataclass(frozen=True)
class Case:
    """A cache of one part.

    Attributes:
        tokens: whose bytes it has; same: whether it keeps just as many.
        share: of centroids, one of `OF_CENTROIDS`, None for the policy's own.
        beside: bits and group of the QuantizedCache whose bytes it has instead of those of tokens; its policy is the
            library if it is that cache.
    """

    part: str
    policy: str
    tokens: int
    slots: str
    same: bool = False
    share: int | None = None
    beside: tuple[int, int] | None = None

    @property
    def id(self) -> str:
        """The name of its row."""
        more = "" if self.share is None else f"-{self.share}"
        more += "" if self.beside is None else "-{}-bits-{}".format(*self.beside)
        return f"{self.part}-{self.policy}-{self.tokens}-{self.slots}{'-same' if self.same else ''}{more}"

    @property
    def row(self) -> Row:
        """As it stands in the results: without what does not concern it."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def cases() -> list[Case]:
    """All of them, in the order of the tables."""
    found = []
    for part, policy, tokens in itertools.product((BUNDLED, LANGUAGE, ROUNDING), POLICIES, TOKENS):
        formats = (PLAIN,) if part == ROUNDING else FORMATS
        found += [Case(part, policy, tokens, slots) for slots in formats]
        found.append(Case(part, policy, tokens, SAME, same=True))
    for part, *one in itertools.product((SHARES, SHARES_BUNDLED), TOKENS, SHARED, OF_CENTROIDS):
        tokens, slots, share = one
        found.append(Case(part, "fastkv", tokens, slots, share=share))
    for beside in BITS:
        found += [Case(QUANTIZED, library, 0, "auto", beside=beside) for library in LIBRARIES]
        found += [Case(QUANTIZED, *one, beside=beside) for one in itertools.product(POLICIES[::2], (0,), SHARED)]
    return found


@dataclass(frozen=True)
class Settings:
    """What all results of a part share.

    Attributes:
        seeds: groups of texts, the unit of the standard errors.  texts: of each task in a group, or stretches of text.
        first: seed of the first text.  context: tokens of a prompt.  continued: of a stretch, after its prompt.
    """

    seeds: int = 3
    texts: int = 1
    first: int = 900_000
    context: int = 1024
    continued: int = 32


SETTINGS = {
    BUNDLED: Settings(),
    LANGUAGE: Settings(),
    ROUNDING: Settings(seeds=18, first=920_000),
    SHARES: Settings(seeds=6, first=940_000),
    SHARES_BUNDLED: Settings(first=940_000),
    QUANTIZED: Settings(seeds=9, first=960_000),
}


class Bench:
    """A model in bf16 and what its full cache makes of texts: questions, or stretches of text it was not trained on."""

    def __init__(self, directory: Path, settings: Settings, asks: bool) -> None:
        transformers.utils.logging.disable_progress_bar()
        self.model, tokenizer = load(dtype=torch.bfloat16, directory=directory)
        self.settings, self.number = settings, settings.seeds * settings.texts
        if asks:
            drawn = (self.number, settings.first)
            self.asked = [make_questions(tokenizer, task, settings.context, *drawn) for task in TASKS]
            self.answers = [answered(self.model, questions, LATER) for questions in self.asked]
            self.first = self.asked[0].prompts[:1, :1]
        else:
            size = settings.context + settings.continued
            self.texts = stretches(encoded(tokenizer, corpus()[1]), self.number, size, settings.first)
            self.full = fidelity.read_full(self.model, self.texts, settings.continued)
            self.first = self.texts[:1, :1]
        self.asks = asks

    def run(self, case: Case) -> Row:
        """KL of next tokens from the full cache, nats; error of attention outputs; right answers, where asked.

        Raises: FastKVError if the cache does not hold the bytes that it was given; Unmeasured if they are too few for
            the policy in bf16, with which others would be compared.
        """
        if case.policy in LIBRARIES:
            return self.quantized(case)
        bound = self.bound(case)
        try:
            same = Budget(tokens=self.kept(case), sinks=SINKS, recent=RECENT)
        except FastKVError as error:
            raise Unmeasured(str(error)) from error
        correction = "none" if case.share == 0 else "auto"
        settings: dict[str, Any] = {"slots": case.slots, "correction": correction}
        parts = replace(CENTROIDS, share=case.share) if case.share else CENTROIDS
        shared = mock.patch.object(corrections, "ALL", [parts if one is CENTROIDS else one for one in corrections.ALL])
        with shared, patched(self.model, case.policy, same if case.same else bound, **settings), torch.no_grad():
            cache = self.model(self.first, use_cache=True).past_key_values
            if not case.same:
                assert bound.bytes is not None
                assert_equal_bytes({case.id: cache}, bound.bytes)
            facts = {"kept": cache.layers[0].cache.rule.layout.total, "bytes": stored_bytes(cache)}
            return facts | (self.questions() if self.asks else self.prose())

    def bound(self, case: Case) -> Budget:
        """The bytes of a case."""
        shares: dict[str, Any] = {"sinks": SINKS, "recent": RECENT}
        if case.beside is None:
            return equal_bytes(self.model.config, case.tokens, self.model.dtype, **shares)
        bits, group = case.beside
        config, settings = self.model.config, self.settings
        numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        # A scale and a zero point of 2 bytes for each group; the tokens after the prompt stay as they are.
        each = settings.context * (bits * group + 32) // (8 * group) + 2 * settings.continued
        return Budget(bytes=numbers * each, **shares)

    @torch.no_grad()
    def kept(self, case: Case) -> int:
        """Tokens that the case's policy keeps per KV head in its bytes, in bf16."""
        with patched(self.model, case.policy, self.bound(case), slots=PLAIN):
            layout = self.model(self.first, use_cache=True).past_key_values.layers[0].cache.rule.layout
        return int(layout.total)

    def quantized(self, case: Case) -> Row:
        """The stock model with a QuantizedCache, which keeps every token. Raises: Unmeasured without its library."""
        assert case.beside is not None
        (bits, group), axis = case.beside, LIBRARIES[case.policy]
        options = {"nbits": bits, "q_group_size": group, "axis_key": axis, "axis_value": axis}
        try:
            cache = transformers.QuantizedCache(case.policy, self.model.config, **options)
        except ImportError as error:
            raise Unmeasured(f"QuantizedCache needs {case.policy}, which is not installed: {error}") from error
        found = self.prose(cache)
        held = sum(map(nbytes, (vars(layer) for layer in cache.layers))) // self.number
        bound = self.bound(case).bytes
        assert bound is not None and held <= bound, (held, bound)
        return {"kept": self.settings.context, "bytes": held} | found

    def questions(self) -> Row:
        """The text is compressed before the question is known, as for a user who asks later."""
        found = [answered(self.model, questions, LATER) for questions in self.asked]
        right = [(one.log_probs.argmax(-1) == asked.answers).all(-1) for asked, one in zip(self.asked, found)]
        error = [mean_distance(one.attention, full.attention) for one, full in zip(found, self.answers)]
        kl = [divergence(one, full) for one, full in zip(found, self.answers)]
        every = {"kl": kl, "error": error, "right": right}
        return {name: self.by_seed(torch.stack(values).double().mean(0)) for name, values in every.items()}

    @torch.no_grad()
    def prose(self, cache: Any = None) -> Row:
        """The last tokens of a stretch are fed one at a time."""
        prompt, rest = self.texts.split([self.settings.context, self.settings.continued], 1)
        cache = self.model(prompt, past_key_values=cache, logits_to_keep=1, use_cache=True).past_key_values
        attention, log_probs = fidelity.feed(self.model, rest, cache)
        kl = (self.full.log_probs.exp() * (self.full.log_probs - log_probs)).sum(-1).mean(-1)
        return {"kl": self.by_seed(kl), "error": self.by_seed(mean_distance(attention, self.full.attention))}

    def by_seed(self, numbers: Tensor) -> list[float]:
        """Means over the texts of a seed; numbers [N]."""
        return numbers.double().unflatten(0, (self.settings.seeds, -1)).mean(-1).tolist()


def nbytes(held: Any) -> int:
    """Bytes of all tensors in it; a quantised one of quanto consists of others."""
    if isinstance(held, Tensor):
        inner = getattr(held, "__tensor_flatten__", None)
        return held.nbytes if inner is None else sum(nbytes(getattr(held, name)) for name in inner()[0])
    if isinstance(held, dict):
        held = held.values()
    return sum(map(nbytes, held)) if isinstance(held, Iterable) and not isinstance(held, str) else 0


def write_report(folder: Path) -> None:
    """README.md with a table for each model and policy, and slots.png, beside the results."""
    rows: dict[str, Row] = {}
    lines = ["# Slots of 16, 8 and 4 bits in the same bytes", "", "Written by `python -m perf.quality.slots`.", ""]
    for part in PARTS:
        path = folder / f"{part}.json"
        if path.exists():
            results = json.loads(path.read_text())
            facts = results["environment"]
            rows |= {row["id"]: row for row in results["rows"] if "kl" in row}
            lines += [f"## {TITLES[part]}", "", f"{facts['cpu']}, torch {facts['torch']}. {explained(results)}", ""]
            if part in (SHARES, SHARES_BUNDLED):
                lines += table_of_shares(rows, part)
            elif part == QUANTIZED:
                lines += table_of_bits(rows)
            else:
                for policy in POLICIES:
                    lines += table(rows, part, policy)
    (folder / "README.md").write_text("\n".join([*lines, "![KL over bytes](slots.png)", ""]))
    plot(rows, folder / "slots.png")


def explained(results: Row) -> str:
    """What the numbers are."""
    found = Settings(**results["settings"])
    return (
        f"Means and standard errors over {found.seeds} groups, {found.texts} to a group of each task or of held-out "
        f"text, prompts of {found.context} tokens. KL: of next tokens from the full cache, nats. Error: of attention "
        "outputs, relative. Right: answers, of those asked after the text was compressed. Same: with the tokens, and "
        "the centroids, of bf16."
    )


def table(rows: dict[str, Row], part: str, policy: str) -> list[str]:
    """The lines of one table; none without results."""
    found = [case for case in cases() if (case.part, case.policy) == (part, policy) and case.id in rows]
    if not found:
        return []
    lines = [f"### {policy}", "", "| bytes of | slots | kept | KL | of bf16's | error | right |"]
    lines.append("|--:|---|--:|--:|--:|--:|--:|")
    for case in found:
        row, plain = rows[case.id], rows.get(Case(part, policy, case.tokens, PLAIN).id)
        share = f"{mean(row['kl']) / mean(plain['kl']):.3f}" if plain and case.slots != PLAIN else ""
        name = {"auto": "bf16"}.get(case.slots, case.slots) + (" same" if case.same else "")
        right = f"{100 * mean(row['right']):.0f} %" if "right" in row else ""
        lines.append(
            f"| {case.tokens} | {name} | {row['kept']} | {closeness(row)} | {share} | "
            f"{mean(row['error']):.3f} | {right} |"
        )
    return [*lines, ""]


def table_of_shares(rows: dict[str, Row], part: str) -> list[str]:
    """KL of `policy="fastkv"` for every share of centroids."""
    lines = [
        'KL of `policy="fastkv"`, and the tokens that it keeps, by the bytes of centroids: one of so many that pairs '
        "of the kept tokens take in bf16. The default is 1/16; the least of a row is bold.",
        "",
    ]
    lines += ["| bytes of | slots | " + " | ".join(f"1/{one}" if one else "none" for one in OF_CENTROIDS) + " |"]
    lines += ["|--:|---|" + "--:|" * len(OF_CENTROIDS)]
    for tokens, slots in itertools.product(TOKENS, SHARED):
        found = [rows.get(Case(part, "fastkv", tokens, slots, share=share).id) for share in OF_CENTROIDS]
        least = min((mean(row["kl"]) for row in found if row), default=None)
        cells = []
        for row in found:
            cell = "" if row is None else f"{closeness(row)} ({row['kept']})"
            cells.append(f"**{cell}**" if row and mean(row["kl"]) == least else cell)
        lines.append(f"| {tokens} | {'bf16' if slots == PLAIN else slots} | {' | '.join(cells)} |")
    return [*lines, ""]


def table_of_bits(rows: dict[str, Row]) -> list[str]:
    """What a QuantizedCache of each number of bits costs, and what others make of the bytes."""
    lines = ["A QuantizedCache keeps every token of the prompt, those after it in bf16.", ""]
    lines += ["| bits, group | cache | kept | bytes | KL | error |", "|---|---|--:|--:|--:|--:|"]
    for case in cases():
        row = rows.get(case.id)
        if case.part == QUANTIZED and case.beside and row:
            slots = "bf16" if case.slots == PLAIN else case.slots
            name = f"QuantizedCache, {case.policy}" if case.policy in LIBRARIES else f"{case.policy}, {slots}"
            bits, group = case.beside
            lines.append(
                f"| {bits}, {group} | {name} | {row['kept']} | {row['bytes']} | {closeness(row)} | "
                f"{mean(row['error']):.3f} |"
            )
    return [*lines, ""]


def closeness(row: Row) -> str:
    """KL with its standard error."""
    kl = Mean.of(row["kl"])
    return f"{kl.value:.4f} ± {kl.error or 0:.4f}"


def mean(numbers: list[float]) -> float:
    """Of a number of each seed."""
    return sum(numbers) / len(numbers)


def plot(rows: dict[str, Row], path: Path) -> None:
    """KL over the tokens whose bytes are spent, a panel for each model and policy that has results."""
    panels = [
        (one, each) for one in (BUNDLED, LANGUAGE) for each in POLICIES if f"{one}-{each}-{TOKENS[0]}-auto" in rows
    ]
    if not panels:
        return
    height = -(-len(panels) // len(POLICIES))
    figure = Figure(figsize=(3.6 * len(POLICIES), 3.2 * height + 0.5), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    axes = figure.subplots(height, len(POLICIES), squeeze=False).ravel()
    for axis, (model, policy) in zip(axes, panels):
        for index, slots in enumerate(FORMATS):
            measured = [(one, rows[name]) for one in TOKENS if (name := Case(model, policy, one, slots).id) in rows]
            look = {"color": COLOURS[index], "marker": MARKERS[index], "label": "bf16" if slots == PLAIN else slots}
            axis.plot([one for one, _ in measured], [mean(row["kl"]) for _, row in measured], ms=4, **look)
        axis.set_title(f"{model}: {policy}", fontsize=9)
        axis.set_xlabel("bytes, as tokens in bf16", fontsize=9)
        axis.set_ylabel("KL, nats", fontsize=9)
        axis.set_yscale("log")
        tidy(axis)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path)


def main(words: list[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    parser = engine.command("perf.quality.slots", __doc__, PARTS, minutes=float("inf"), out=OUT)
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--language", type=Path, default=LANGUAGE_MODEL, help="folder of its model")
    options = parser.parse_args(words)
    parts = options.parts or PARTS
    if options.list:
        return engine.listed({part: [one.id for one in cases() if one.part == part] for part in parts})
    folder, code = engine.folder(options, OUT), COMPLETE
    try:
        if not options.report:
            code = engine.worst(measure(folder, SETTINGS[part], options, part) for part in parts)
        write_report(folder)
    except (FastKVError, OtherSettings) as error:
        print(f"perf.quality.slots: {error}", file=sys.stderr)
        return REFUSED
    return code


def measure(folder: Path, settings: Settings, options: argparse.Namespace, part: str) -> int:
    """Measure the cases of a part without a result. Returns: the exit code."""
    directory = MODEL_DIR if part in ASKED else options.language

    @functools.cache
    def bench() -> Bench:
        return Bench(directory, settings, asks=part in ASKED)

    def job(case: Case) -> Job:
        code = source("perf.quality.slots", policy="fastkv" if case.policy in LIBRARIES else case.policy)
        return Job(case.id, case.row, lambda: bench().run(case), code, optional=case.policy in LIBRARIES)

    jobs = [job(one) for one in cases() if one.part == part]
    facts, again = environment(options.commit) | models(directory), (options.fresh, options.retry_skipped)
    results = Results.open(folder / f"{part}.json", facts, jobs, asdict(settings), *again)
    chosen = [one for one in jobs if options.only in one.name]
    return engine.measure(chosen, results, Deadline(options.minutes))


if __name__ == "__main__":
    raise SystemExit(main())
