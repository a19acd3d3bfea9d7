"""docs/papers.md and its pictures, from JSON and nothing else; its words: page.jinja."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastkv.lab import common
from perf.tables import filled

from .row import FILTERS, PAPERS, VERDICTS, Row

DIGITS = 6


def rounded(value: Any) -> Any:
    """JSON with floats of a few digits, which is more than the page shows."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {str(name): rounded(one) for name, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, (list, tuple)) else value


def load(folder: Path) -> dict[str, dict[str, Any]]:
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}


def render(rows: Sequence[Row], results: dict[str, dict[str, Any]], pictures: str) -> str:
    shown = [told(row, results) for row in rows if row.judge is None or row.name in results]
    measured = machines([one["result"] for one in shown if "result" in one])
    facts = {"shown": shown, "papers": PAPERS, "pictures": pictures, "machines": measured}
    return filled(Path(__file__).with_suffix(".jinja"), **facts) + "\n"


def told(row: Row, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the page says of a row: its verdict, in words, and why, with a table."""
    if row.judge is None:
        return {"row": row, "verdict": VERDICTS[None], "here": row.why}
    result = results[row.name]
    judged = row.judge(result["numbers"])
    facts = {"n": result["numbers"], "row": row, **judged.facts}
    words = {"here": row.here, "evidence": row.evidence, "table": "" if judged.agrees is None else row.table}
    said = {name: filled(text, FILTERS, **facts) for name, text in words.items()}
    return {"row": row, "result": result, "verdict": VERDICTS[judged.agrees], **said}


def machines(results: Sequence[dict[str, Any]]) -> str:
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
    results = load(folder)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render(rows, results, f"{pictures.parent.name}/{pictures.name}"), encoding="utf-8")
    draw(rows, results, pictures)
