"""What every report is made of: result files, Markdown tables, plots."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import ScalarFormatter

NONE = "not measured"


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Every result file by name, without those of dry runs; what names a case stands beside what was measured of it."""
    files = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    rows = {name: file for name, file in files.items() if "rows" in file}  # not pytest-benchmark's micro.json
    known = {name: file for name, file in rows.items() if "dry_run" not in file.get("environment", {})}
    return {name: file | {"rows": [row.get("case", {}) | row for row in file["rows"]]} for name, file in known.items()}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; empty without rows."""
    rows = list(rows)
    if not rows:
        return ""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def plot(
    folder: Path,
    name: str,
    title: str,
    labels: tuple[str, str],
    lines: dict[str, list[tuple[float, float]]],
    log: bool = False,
) -> str:
    """A PNG of lines with one marker a measurement. `labels`: of x and y.

    Returns: its Markdown, or nothing without points.
    """
    drawn = {label: sorted(points) for label, points in lines.items() if points}
    if not drawn:
        return ""
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for label, points in drawn.items():
        axes.plot(*zip(*points), marker="o", ms=4, label=label, lw=2 if label.startswith("fastkv") else 1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({x for points in drawn.values() for x, _ in points}))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(ScalarFormatter())
    axes.set(title=title, xlabel=labels[0], ylabel=labels[1])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(folder / f"{name}.png", dpi=120)
    plt.close(figure)
    return f"![{title}]({name}.png)\n"
