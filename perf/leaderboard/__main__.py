"""Measure what is missing of the leaderboard, cell by cell, and write its page.

python -m perf.leaderboard                       # everything, some hours; killed, it goes on where it was
python -m perf.leaderboard --quick               # two texts of the first table, some 12 minutes
python -m perf.leaderboard --page                # the page alone, from what is measured
python -m perf.leaderboard --tables "" --times   # reading and steps, on a quiet machine; with --kvpress-python its, too
python -m perf.leaderboard --tables "" --kvpress-python PATH   # kvpress on the same texts, in an environment of its own
"""

import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby, product
from pathlib import Path
from typing import Any

import torch
import yaml

from fastkv import policies
from fastkv.lab import facts
from fastkv.lab.pretrained import load, place
from perf.engine import ROOT, digest, parser_of
from perf.environment import environment

from . import measure, onward, page, samples, times
from .cells import Cell, add, missing

RESULTS = ROOT / "perf" / "results" / "leaderboard"
KEEPS = (0.5, 0.25, 0.125, 0.0625)
NARROW = (0.25, 0.125)
FITTED = ("duoattention", "triattention")  # need a file fitted to the model
ALL = tuple(name for name in policies.names() if name not in FITTED)
QUICK = 2  # texts, of the first table in its narrow columns


@dataclass(frozen=True)
class Table:
    """One table of the leaderboard.

    Attributes:
        names: of policies.  keeps: shares of the bytes.  texts: how many; seeds count from 0, the same for all tables.
        length: tokens of a text.  settings: more arguments of `fastkv.patch`.
        question: "later", "seen", or "none" where the text goes on.  equal: "bytes" or "tokens".
        sample: makes a text with questions, as `facts.sample`.
    """

    title: str
    names: tuple[str, ...]
    keeps: Sequence[float] = NARROW
    texts: int = 8
    length: int = 2048
    settings: dict[str, Any] = field(default_factory=dict)
    question: str = "later"
    equal: str = "bytes"
    sample: Callable[..., facts.Sample] = facts.sample

    @property
    def parts(self) -> int:
        """Texts of a seed: one for each question where it is seen."""
        return 2 * facts.ASKED if self.question == "seen" else 1


def tables() -> dict[str, Table]:
    """Those of tables.yaml."""
    told = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8"))
    for row in told.values():
        row["names"] = ALL if row["names"] == "all" else tuple(row["names"].split())
        if "sample" in row:
            row["sample"] = getattr(samples, row["sample"])
    return {name: Table(**row) for name, row in told.items()}


TABLES = tables()


def texts_of(table: Table, model: Any, tokenizer: Any, seed: int) -> Iterator[Any]:
    """The text of a seed; one for each question where it is seen."""
    if table.question == "none":
        yield onward.read(model, tokenizer, table.length, seed)
        return
    sample = table.sample(tokenizer, table.length, seed, both=True)
    for one in measure.seen(sample) if table.question == "seen" else [sample]:
        yield measure.read(model, tokenizer, one)


def groups(names: Sequence[str]) -> list[list[str]]:
    """Tables of the same texts together, in the order of the first of each."""
    found: dict[Any, list[str]] = {}
    for name in names:
        found.setdefault((TABLES[name].length, TABLES[name].question, TABLES[name].sample), []).append(name)
    return list(found.values())


def run(
    names: Sequence[str], model: Any, tokenizer: Any, seeds: range, keeps: tuple[float, ...], told: dict[str, Any]
) -> None:
    """Measure the cells that the files of some tables lack; tables of the same texts share each reading."""
    left: list[tuple[str, Cell]] = []
    for name in names:
        table = TABLES[name]
        of = {"seed": seeds[: max(table.texts - seeds.start, 0)], "part": range(table.parts), "policy": table.names}
        every = product(*of.values(), (keep for keep in table.keeps if keep in keeps))
        cells = missing(RESULTS / f"{name}.jsonl", (dict(zip((*of, "keep"), one)) for one in every))
        left += [(name, cell) for cell in cells]
    left.sort(key=lambda one: one[1]["seed"])
    done = count(1)
    for seed, waiting in groupby(left, lambda one: one[1]["seed"]):
        waiting = list(waiting)
        for part, text in enumerate(texts_of(TABLES[names[0]], model, tokenizer, seed)):
            for name, cell in waiting:
                if cell["part"] == part:
                    table, one = TABLES[name], (cell["policy"], cell["keep"])
                    if table.question == "none":
                        found = onward.cell(model, text, *one, table.settings)
                    else:
                        found = measure.cell(model, tokenizer, text, *one, table.equal, table.settings)
                    add(RESULTS / f"{name}.jsonl", cell | found | told)
                    print(f"{name} {seed}: {next(done)}/{len(left)} cells", flush=True)


def clock(model: Any, tokenizer: Any, told: dict[str, Any], python: str | None = None, where: str = "") -> None:
    """Measure reading and steps anew; the machine has to be quiet. python, where: as of `times.rows`."""
    found = list(times.rows(model, tokenizer, ALL, python, where))
    heads = list(times.head_steps(model, tokenizer))
    for name, rows in ((page.TIMES, found), (page.HEADS, heads)):
        file = RESULTS / f"{name}.jsonl"
        file.unlink(missing_ok=True)
        add(file, *(told | row for row in rows))


def beside_kvpress(model: Any, tokenizer: Any, where: str, python: str, told: dict[str, Any]) -> None:
    """What kvpress answers on the texts of the first table; see `presses.py`. where: the model's directory."""
    texts = ROOT / "build" / "leaderboard" / f"texts-{digest('fastkv', 'perf/leaderboard/measure.py')}.pt"
    if not texts.is_file():
        texts.parent.mkdir(parents=True, exist_ok=True)
        samples = [facts.sample(tokenizer, 2048, seed, both=True) for seed in range(page.BESIDE)]
        read = [measure.given(measure.read(model, tokenizer, one), seed, told) for seed, one in enumerate(samples)]
        torch.save(read, texts)
    command = [python, "-m", "perf.leaderboard.presses", texts, RESULTS / f"{page.KVPRESS}.jsonl", where]
    subprocess.run(command, cwd=ROOT, check=True)


def main() -> None:
    parser = parser_of("perf.leaderboard", __doc__)
    option, shares = parser.add_argument, ",".join(map(str, KEEPS))
    option("--tables", metavar="NAME,...", help="which; by default all, or none beside --times and --kvpress-python")
    option("--quick", action="store_true", help=f"{QUICK} texts in the first table")
    option("--texts", type=int, default=99, metavar="N", help="texts of a table at most")
    option("--first", type=int, default=0, metavar="N", help="text to begin with, for a second process")
    option("--keeps", default=shares, metavar="SHARE,...", help=f"of {shares}, all by default")
    option("--times", action="store_true", help="how long policies read and step, some 15 quiet minutes")
    option("--page", action="store_true", help="measure nothing, write docs/results.md")
    option("--kvpress-python", metavar="PATH", help="interpreter of an environment with kvpress, to try it")
    option("--model", default="smollm2", help="smollm2, a directory or a GGUF file")
    options = parser.parse_args()
    keeps = tuple(map(float, options.keeps.split(",")))
    if options.quick:
        options.tables, options.texts, keeps = next(iter(TABLES)), QUICK, NARROW
    alone = options.times or options.kvpress_python
    names = options.tables.split(",") if options.tables else [] if alone else list(TABLES)
    unknown = [name for name in names if name not in TABLES]
    if unknown:
        parser.error(f"unknown table {unknown[0]}; there are {', '.join(TABLES)}")
    if not options.page:
        model, tokenizer = load(options.model)
        told = {name: value for name, value in environment().items() if name in measure.TOLD}
        texts = range(options.first, min(options.texts, max(table.texts for table in TABLES.values())))
        with torch.no_grad():
            for same in groups(names):
                run(same, model, tokenizer, texts, keeps, told | {"model": options.model})
        if options.times:
            clock(model, tokenizer, told, options.kvpress_python, place(options.model)[0])
        elif options.kvpress_python:
            beside_kvpress(model, tokenizer, place(options.model)[0], options.kvpress_python, told)
    page.write(RESULTS, TABLES)


if __name__ == "__main__":
    main()
