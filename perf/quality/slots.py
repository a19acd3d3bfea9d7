"""What more tokens in fewer bits are worth: slots of 16, 8 and 4 bits in the same bytes.

    python -m perf.quality.slots                       # all parts, half an hour of one core
    python -m perf.quality.slots --parts language      # held-out text and the model in --language
    python -m perf.quality.slots --parts rounding      # the same tokens there, of many texts
    python -m perf.quality.slots --report              # only tables and picture, from perf/results/slots/*.json

Models compute in bf16, and the bytes of a budget are those that a cache in bf16 spends on so many tokens per KV head,
without moments and scores. "same" has the tokens of bf16 instead, so that it shows rounding alone. A part's file is
rewritten after every case. Exit code: 0 complete, 1 something failed, 2 refused, 3 cases are left.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from fastkv import Budget, FastKVError, patched
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
BUNDLED, LANGUAGE, ROUNDING = PARTS = "bundled", "language", "rounding"
TOKENS = (48, 96, 160, 256)  # per KV head, of a cache in bf16
TITLES = {
    BUNDLED: "The bundled model",
    LANGUAGE: "The language model",
    ROUNDING: "The language model: the same tokens, more texts",
}
POLICIES = ("fastkv", "momentkv", "snapkv")
PLAIN, SAME = "auto", "int8"  # what others are compared with, and what is measured with its tokens, too


@dataclass(frozen=True)
class Case:
    """A cache of one part. tokens: whose bytes it has; same: whether it keeps just as many."""

    part: str
    policy: str
    tokens: int
    slots: str
    same: bool = False

    @property
    def id(self) -> str:
        """The name of its row."""
        return f"{self.part}-{self.policy}-{self.tokens}-{self.slots}{'-same' if self.same else ''}"


def cases() -> list[Case]:
    """All of them, in the order of the tables."""
    found = []
    for part, policy, tokens in itertools.product(PARTS, POLICIES, TOKENS):
        formats = (PLAIN,) if part == ROUNDING else FORMATS
        found += [Case(part, policy, tokens, slots) for slots in formats]
        found.append(Case(part, policy, tokens, SAME, same=True))
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


SETTINGS = {BUNDLED: Settings(), LANGUAGE: Settings(), ROUNDING: Settings(seeds=18, first=920_000)}


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
        shares: dict[str, Any] = {"sinks": SINKS, "recent": RECENT}
        bound = equal_bytes(self.model.config, case.tokens, self.model.dtype, **shares)
        try:
            budget = Budget(tokens=self.kept(Case(case.part, case.policy, case.tokens, PLAIN)), **shares)
        except FastKVError as error:
            raise Unmeasured(str(error)) from error
        with patched(self.model, case.policy, budget if case.same else bound, slots=case.slots), torch.no_grad():
            cache = self.model(self.first, use_cache=True).past_key_values
            if not case.same:
                assert bound.bytes is not None
                assert_equal_bytes({case.id: cache}, bound.bytes)
            facts = {"kept": cache.layers[0].cache.rule.layout.total, "bytes": stored_bytes(cache)}
            return facts | (self.questions() if self.asks else self.prose())

    @torch.no_grad()
    def kept(self, plain: Case) -> int:
        """Tokens that a case keeps per KV head."""
        bound = equal_bytes(self.model.config, plain.tokens, self.model.dtype, sinks=SINKS, recent=RECENT)
        with patched(self.model, plain.policy, bound, slots=plain.slots):
            layout = self.model(self.first, use_cache=True).past_key_values.layers[0].cache.rule.layout
        return int(layout.total)

    def questions(self) -> Row:
        """The text is compressed before the question is known, as for a user who asks later."""
        found = [answered(self.model, questions, LATER) for questions in self.asked]
        right = [(one.log_probs.argmax(-1) == asked.answers).all(-1) for asked, one in zip(self.asked, found)]
        error = [mean_distance(one.attention, full.attention) for one, full in zip(found, self.answers)]
        kl = [divergence(one, full) for one, full in zip(found, self.answers)]
        every = {"kl": kl, "error": error, "right": right}
        return {name: self.by_seed(torch.stack(values).double().mean(0)) for name, values in every.items()}

    def prose(self) -> Row:
        """The last tokens of a stretch are fed one at a time."""
        prompt, rest = self.texts.split([self.settings.context, self.settings.continued], 1)
        cache = self.model(prompt, logits_to_keep=1, use_cache=True).past_key_values
        attention, log_probs = fidelity.feed(self.model, rest, cache)
        kl = (self.full.log_probs.exp() * (self.full.log_probs - log_probs)).sum(-1).mean(-1)
        return {"kl": self.by_seed(kl), "error": self.by_seed(mean_distance(attention, self.full.attention))}

    def by_seed(self, numbers: Tensor) -> list[float]:
        """Means over the texts of a seed; numbers [N]."""
        return numbers.double().unflatten(0, (self.settings.seeds, -1)).mean(-1).tolist()


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
        kl = Mean.of(row["kl"])
        lines.append(
            f"| {case.tokens} | {name} | {row['kept']} | {kl.value:.4f} ± {kl.error or 0:.4f} | {share} | "
            f"{mean(row['error']):.3f} | {right} |"
        )
    return [*lines, ""]


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
    directory = MODEL_DIR if part == BUNDLED else options.language

    @functools.cache
    def bench() -> Bench:
        return Bench(directory, settings, asks=part == BUNDLED)

    def job(case: Case) -> Job:
        code = source("perf.quality.slots", policy=case.policy)
        return Job(case.id, asdict(case), lambda: bench().run(case), code)

    jobs = [job(one) for one in cases() if one.part == part]
    facts, again = environment(options.commit) | models(directory), (options.fresh, options.retry_skipped)
    results = Results.open(folder / f"{part}.json", facts, jobs, asdict(settings), *again)
    chosen = [one for one in jobs if options.only in one.name]
    return engine.measure(chosen, results, Deadline(options.minutes))


if __name__ == "__main__":
    raise SystemExit(main())
