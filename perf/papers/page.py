"""docs/papers.md and its pictures, from JSON and nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastkv.lab import common

from .row import PAPERS, UNTRIED, Judged, Row

INTRODUCTION = """# The papers' own figures

Written by `make papers` from `perf/results/papers/`; do not edit.

fastkv is based on five papers.
Each row repeats a figure or table of one of them with fastkv's own functions on a pretrained model, {model}.
The model has {parameters}.
Everything is smaller than in the papers, so the page compares directions and ratios, not scores.
`{agrees}` means that the paper's statement holds here, too.
Where it does not, the row says whether fastkv or the model is the cause.
"""
DIGITS = 6


def rounded(value: Any) -> Any:
    """JSON with floats of a few digits, which is more than the page shows."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {str(name): rounded(one) for name, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, (list, tuple)) else value


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """All results, by row."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}


def render(rows: Sequence[Row], results: dict[str, dict[str, Any]], pictures: str) -> str:
    """The page."""
    judged = {row.name: judge(row, results) for row in rows}
    shown = [row for row in rows if judged[row.name] is not None]
    intro = INTRODUCTION.format(
        model="SmolLM2-135M-Instruct",
        parameters="135 million weights, 30 layers, 9 query and 3 KV heads of 64",
        agrees="agrees",
    )
    lines = [intro, "| paper | figure or table | the paper | here | verdict |", "|---|---|---|---|---|"]
    for row in shown:
        one = judged[row.name]
        assert one is not None
        name = f"[{row.place}](#{row.name.replace('_', '-')})" if row.measure else row.place
        lines.append(f"| {row.paper} | {name} | {row.claim} | {one.ours or row.why} | {one.verdict} |")
    for row in shown:
        one = judged[row.name]
        if row.measure is None or one is None:
            continue
        lines += ["", f'<a id="{row.name.replace("_", "-")}"></a>', f"## {row.paper}, {row.place}: {one.verdict}", ""]
        lines += [f"{row.paper}, {PAPERS[row.paper]}, {row.place}: {row.claim}.", "", f"Here: {one.ours}.", ""]
        lines += [f"Settings: {row.setting}", ""] if row.setting else []
        if one.table:
            head, *body = one.table
            lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(x)} |" for x in body), ""]
        if row.draw is not None:
            lines += [f"![{row.paper}, {row.place}]({pictures}/{row.name}.png)", ""]
        lines += [one.evidence, ""] if one.evidence else []
        result = results[row.name]
        lines.append(f"Measured in {result['seconds']:.0f} s, commit {result['environment']['commit']}.")
    lines += ["", machines([results[row.name] for row in shown if row.name in results])]
    return "\n".join(lines).rstrip() + "\n"


def judge(row: Row, results: dict[str, dict[str, Any]]) -> Judged | None:
    """What the row says; None for one that was not measured yet."""
    if row.measure is None:
        return Judged(UNTRIED, "")
    known = row.name in results and row.judge is not None
    return row.judge(results[row.name]["numbers"]) if known else None  # type: ignore[misc]


def machines(results: Sequence[dict[str, Any]]) -> str:
    """What the numbers were measured on."""
    told = ("cpu", "threads", "python", "torch", "transformers")
    kinds = dict.fromkeys(", ".join(f"{name} {one['environment'][name]}" for name in told) for one in results)
    return "Machine: " + "; ".join(kinds) + "." if kinds else "Nothing has been measured yet."


def draw(rows: Sequence[Row], results: dict[str, dict[str, Any]], folder: Path) -> None:
    """A picture for each measured row that has one."""
    for row in rows:
        if row.draw is None or row.name not in results:
            continue
        figure = common.figure(5.2 * row.panels, 3.4)
        axes = figure.subplots(1, row.panels, squeeze=False)[0]
        row.draw(axes, results[row.name]["numbers"])
        for axis in axes:
            common.finish(axis, legend=bool(axis.get_legend_handles_labels()[1]))
        folder.mkdir(parents=True, exist_ok=True)
        figure.suptitle(f"{row.paper}, {row.place}, on SmolLM2-135M", fontsize=11)
        figure.savefig(folder / f"{row.name}.png", dpi=75)


def write(rows: Sequence[Row], folder: Path, page: Path, pictures: Path) -> None:
    """The page and the pictures."""
    results = load(folder)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render(rows, results, f"{pictures.parent.name}/{pictures.name}"), encoding="utf-8")
    draw(rows, results, pictures)
