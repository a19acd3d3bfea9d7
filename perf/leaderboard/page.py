"""docs/results.md, its picture and README's table, from what was measured and nothing else; its words: page.jinja."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from fastkv import policies
from fastkv.lab import common
from perf.engine import ROOT
from perf.tables import Row, chosen, filled, write_section

from . import another, onward, times
from .cells import rows_of
from .onward import SOURCES

if TYPE_CHECKING:
    from .__main__ import Table

MARK, END = "<!-- results: written by `make report`, do not edit -->", "<!-- results: end -->"
README = ROOT / "README.md"
PAGE, PICTURE = ROOT / "docs" / "results.md", ROOT / "docs" / "pictures" / "results.png"
TIMES, HEADS = "times_2048", "times_heads"
KVPRESS, BESIDE = "kvpress_2048", 6  # its table, and texts of it
OURS, DEFAULT = "bfloat16_2048", "later_2048"  # beside it
MINE = ("fastkv", "fastkv-reread", "kvzip")  # policies beside it
LEAST = 30  # answerable questions of a cell that is published
DRAWN = ("fastkv", "fastkv-reread", "kvzip", "momentkv", "compactor", "keydiff", "snapkv", "streaming")


def removed(keep: float) -> str:
    return f"{100 * (1 - keep):g} %"


def link(name: str) -> str:
    """A policy's name, class and paper, as cells of a table; a press has its name alone."""
    if name not in policies.names():
        return f"{name} | | " if name.startswith(times.FULL) else f"`{name}` | | "
    kind = type(policies.get(name))
    file = kind.__module__.rpartition(".")[2]
    found = re.search(r"Source: fastkv's own|arXiv:(\d{4}\.\d{5})", str(kind.__doc__))
    paper = "" if found is None else f"[{found[1]}](https://arxiv.org/abs/{found[1]})" if found[1] else "fastkv's own"
    return f"`{name}` | [`{kind.__name__}`](../fastkv/policies/{file}.py) | {paper}"


def fewest(rows: list[Row]) -> int:
    """Questions asked of the policy that was asked fewest."""
    asked: Counter[str] = Counter()
    for row in rows:
        asked[row["policy"]] += row.get("asked", 0)
    return min(asked.values(), default=0)


def scores(cell: list[Row]) -> tuple[float, float, float]:
    """Share of right answers, its standard error over texts (of a ratio of means), and KL along the answers."""
    told = [row for row in cell if row.get("asked")]
    texts = [chosen(told, seed=seed) for seed in {row["seed"] for row in told}]
    counts = [[sum(row[part] for row in text) for part in ("right", "asked")] for text in texts]
    right, asked = map(sum, zip(*counts))
    spread, num = sum((here - right / asked * of) ** 2 for here, of in counts), len(counts)
    error = math.sqrt(num / (num - 1) * spread) / asked if num > 1 else math.nan
    return right / asked, error, sum(row["answer_kl"] * row["asked"] for row in told) / asked


def table_of(rows: list[Row], keeps: Sequence[float]) -> tuple[list[Row], list[float]]:
    """Policies with the scores of their cells, the best first, and the columns: those with enough questions in every
    cell.
    """
    columns = [keep for keep in keeps if fewest(chosen(rows, keep=keep)) >= LEAST]
    lines = []
    for name in {row["policy"] for row in rows}:
        cells = [chosen(rows, policy=name, keep=keep) for keep in columns]
        told = [(*scores(cell), mean(row["text_kl"] for row in cell)) for cell in cells]
        total = sum(right - 1e-3 * apart for right, _, apart, _ in told)
        lines.append({"policy": name, "cells": told, "total": total})
    return sorted(lines, key=lambda line: (line["total"], link(line["policy"])), reverse=True), columns


def where_of(rows: list[Row]) -> str:
    """Versions, commits and machines of some cells."""
    told = {name: list(dict.fromkeys(row[name] for row in rows)) for name in ("commit", "torch", "transformers", "cpu")}
    code = f"commit{'s' if len(told['commit']) > 1 else ''} {', '.join(told['commit'])}"
    versions = f"torch {' and '.join(told['torch'])}, transformers {' and '.join(told['transformers'])}"
    return f"{versions}, {code}, {' and '.join(told['cpu'])}"


def complete(rows: list[Row], table: Table, keep: float) -> set[int]:
    """Seeds of texts on which every cell of a column was measured."""
    count = Counter(row["seed"] for row in chosen(rows, keep=keep) if row["policy"] in table.names)
    return {seed for seed, num in count.items() if num >= len(table.names) * table.parts}


def write(results: Path, tables: Mapping[str, Table]) -> None:
    """Write the page and the picture; a table without enough questions is named with what it lacks."""
    shown, ahead, missing = [], [], []
    for name, one in tables.items():
        rows = rows_of(results / f"{name}.jsonl")
        finished = {keep: complete(rows, one, keep) for keep in one.keeps}
        whole = [row for row in rows if row["seed"] in finished.get(row["keep"], ())]
        if one.question == "none":
            ahead += [going_on(chosen(whole, keep=keep), one, keep) for keep in one.keeps if finished[keep]]
            continue
        lines, columns = table_of(whole, one.keeps)
        asked = {keep: fewest(chosen(whole, keep=keep)) for keep in one.keeps}
        lacking = {keep: asked[keep] for keep in one.keeps if keep not in columns}
        if lacking:
            missing.append({"title": one.title, "lacking": lacking})
        if columns:
            texts = f"{min(len(finished[keep]) for keep in columns)} texts, {min(asked[keep] for keep in columns)}"
            told = {"texts": texts, "where": where_of(whole), "drawn": name == DEFAULT}
            shown.append({"title": one.title, "rows": lines, "columns": columns, **told})
            if name == DEFAULT:
                show(whole, columns, f"{texts} questions or more; {where_of(whole)}")
    read, heads = (rows_of(results / f"{name}.jsonl") for name in (TIMES, HEADS))
    facts = {"tables": shown, "onward": ahead, "missing": missing, "least": LEAST, "times": times, "sources": SOURCES}
    facts |= {"read": read, "heads": heads, "kvpress": beside_kvpress(results), "another": another}
    facts["others"] = [on_another_model(file) for file in sorted((results / another.RESULTS.name).glob("*.jsonl"))]
    told_by = {"removed": removed, "link": link, "where": where_of}
    PAGE.write_text(filled(Path(__file__).with_suffix(".jinja"), told_by, **facts) + "\n")


def going_on(rows: list[Row], of: Table, keep: float) -> Row:
    """Texts that go on: KL by source, over the tokens after the prompt; policies are sorted by its mean at the end."""
    lines = []
    for name in dict.fromkeys(row["policy"] for row in rows):
        cells = chosen(rows, policy=name)
        spans = [[mean(one["kl"][part][place] for one in cells) for part in onward.PARTS]
                 for place in range(len(SOURCES))]  # fmt: skip
        worse = math.exp(mean(mean(one["nll"]) - mean(one["full_nll"]) for one in cells))
        told = {"spans": spans, "same": mean(mean(one["top1"]) for one in cells), "worse": worse}
        lines.append({"policy": name, "last": mean(span[-1] for span in spans), **told})
    facts = {"spans": " · ".join(onward.PARTS), "texts": len({row["seed"] for row in rows}), "rows": rows}
    lines.sort(key=lambda line: (line["last"], link(line["policy"])))
    return {"title": of.title, "keep": keep, "lines": lines, **facts}


def on_another_model(file: Path) -> Row:
    """The table of another model, over the texts on which every cell was measured; of too few questions nothing."""
    rows, alike = rows_of(file), ", uniform heads"
    cells = Counter(row["seed"] for row in rows)
    rows = [row for row in rows if cells[row["seed"]] == len(another.NAMES) * len(another.KEEPS) * len(times.HEADS)]
    rows = [row | {"policy": row["policy"] + alike * (row["heads"] == "uniform")} for row in rows]
    lines, columns = table_of(rows, another.KEEPS)
    if not columns:
        return {}
    apart = {line["policy"]: [math.log(cell[2]) for cell in line["cells"]] for line in lines}
    ratio = math.exp(mean(a - b for name in another.NAMES for a, b in zip(apart[name], apart[name + alike])))
    told = {"texts": len({row["seed"] for row in rows}), "asked": fewest(chosen(rows, keep=columns[0])), "told": rows}
    return {"model": file.stem, "rows": lines, "columns": columns, "ratio": ratio} | told


def beside_kvpress(results: Path) -> Row:
    """The table of kvpress's presses, once all of them were measured on all texts."""
    theirs, keeps = [row for row in rows_of(results / f"{KVPRESS}.jsonl") if row["seed"] < BESIDE], (0.25, 0.125)
    if len(theirs) < BESIDE * len({(row["policy"], row["keep"]) for row in theirs}) or not theirs:
        return {}
    known = {row["seed"] for row in theirs}
    ours = [
        row | {"policy": f"{row['policy']}{said}"}
        for table, said in ((OURS, ""), (DEFAULT, ", slots of 8 bits"))
        for row in rows_of(results / f"{table}.jsonl")
        if row["policy"] in MINE and row["seed"] in known and row["keep"] in keeps
    ]
    facts = {"texts": len(known), "asked": fewest(chosen(theirs, keep=keeps[0])), "told": theirs[0]}
    return {"columns": keeps, "rows": table_of(theirs + ours, keeps)[0], **facts}


def show(rows: list[Row], keeps: list[float], where: str) -> None:
    """The table in README, and the picture: right answers and KL of the answers of a few policies by share of bytes."""
    figure = common.figure(9, 3.6)
    left, right = figure.subplots(1, 2)
    lines, shares = {}, [100 * keep for keep in keeps]
    for name in DRAWN:
        lines[name] = told = [scores(chosen(rows, policy=name, keep=keep)) for keep in keeps]
        for axes, values in ((left, [share for share, *_ in told]), (right, [apart for *_, apart in told])):
            axes.plot(*zip(*sorted(zip(shares, values))), marker="o", label=name)
    text = filled(Path(__file__).with_name("front.jinja"), lines=lines, shares=shares, where=where)
    write_section(README, MARK, END, f"{MARK}\n\n{text}\n\n{END}")
    right.set_yscale("log")
    for axes, label in ((left, "right answers"), (right, "answer KL, nats a token")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(shares, [f"{share:g}" for share in shares])
        axes.set(xlabel="% of the full cache's bytes", ylabel=label)
        common.finish(axes)
    right.legend(frameon=False, fontsize=8)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=110)
