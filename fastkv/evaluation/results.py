"""What `fastkv eval` found: one JSON file for each cache, a table and a picture of all of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..demo.plot import COLOURS, MARKERS
from ..errors import FastKVError

FULL = "full"  # the stock cache, under the name of a policy


@dataclass(frozen=True)
class Score:
    """One metric of one task: its value, the harness's standard error or None, and whether more is better."""

    metric: str
    value: float
    stderr: float | None
    higher_is_better: bool


@dataclass(frozen=True)
class Row:
    """One cache on all tasks.

    Attributes:
        policy: name; "full" for the stock cache.  budget: as on the command line; "" for the stock cache.
        nbytes: the largest cache of one sequence.  seconds: of the whole evaluation.
        scores: by task; the first is what the task reports first.
    """

    policy: str
    budget: str
    nbytes: int
    seconds: float
    scores: dict[str, list[Score]]


def scores_of(results: dict[str, Any]) -> dict[str, list[Score]]:
    """The metrics in what the harness returned, by task, under the harness's "metric,filter" names.

    A group that has a score of its own stands for its tasks.
    """
    found: dict[str, list[Score]] = {}
    for task, numbers in results["results"].items():
        better = results["higher_is_better"].get(task, {})
        for key, value in numbers.items():
            metric, comma, rest = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            stderr = numbers.get(f"{metric}_stderr,{rest}")
            known = isinstance(stderr, (int, float)) and math.isfinite(stderr)  # the harness also writes N/A and NaN
            score = Score(key, value, stderr if known else None, better.get(metric) is not False)
            found.setdefault(task, []).append(score)
    groups: dict[str, list[str]] = results.get("group_subtasks", {})
    parts = {task for group, tasks in groups.items() if group in found for task in tasks}
    return {task: scores for task, scores in found.items() if task not in parts}


def name_of(policy: str, budget: str) -> str:
    """What a cache is called in file names and messages."""
    return f"{policy}-{budget}" if budget else policy


def save(row: Row, settings: dict[str, Any], harness: dict[str, Any], directory: Path) -> None:
    """Write the file of one cache, whole or not at all: an interrupted run leaves no half of one."""
    path = directory / f"{name_of(row.policy, row.budget)}.json"
    record = {"settings": settings, "row": asdict(row), "harness": harness}
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(record, indent=2, default=str) + "\n")
    unfinished.replace(path)


def load(policy: str, budget: str, settings: dict[str, Any], directory: Path) -> Row | None:
    """The row of a cache that was evaluated before, or None. Raises FastKVError if that was with other settings."""
    path = directory / f"{name_of(policy, budget)}.json"
    if not path.is_file():
        return None
    record = json.loads(path.read_text())
    for name, now in settings.items():
        before = record["settings"].get(name)
        if before != now:
            raise FastKVError(
                f"{path} was written with {name} {before}, this run has {now}; choose another --out or delete the file"
            )
    row = record["row"]
    scores = {task: [Score(**score) for score in found] for task, found in row["scores"].items()}
    return Row(**{**row, "scores": scores})


def table_of(rows: Sequence[Row]) -> Table:
    """The rows as a table: bytes, share of the full cache, first metric of each task with its standard error."""
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    table.add_column("policy", no_wrap=True)
    tasks = list(rows[0].scores)
    for name in ("budget", "KiB", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for task in tasks:
        first = rows[0].scores[task][0]
        metric = first.metric.removesuffix(",none")
        table.add_column(f"{task}\n{metric}{'' if first.higher_is_better else ', less is better'}", justify="right")
    for row in rows:
        firsts = [row.scores[task][0] for task in tasks]
        table.add_row(
            row.policy,
            row.budget,
            f"{row.nbytes / 2**10:.0f}",
            f"{row.nbytes / rows[0].nbytes:.1%}",
            *(f"{one.value:.4g}" + ("" if one.stderr is None else f" ± {one.stderr:.2g}") for one in firsts),
        )
    return table


def write_plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Write a PNG: a panel for each task, its first metric over the bytes of a sequence's cache, a line per policy.

    Bars are standard errors; the dashed line is the full cache, `rows[0]`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    full, compressed = rows[0], rows[1:]
    tasks = list(full.scores)
    columns = min(len(tasks), 3)
    height = -(-len(tasks) // columns)
    figure = Figure(figsize=(4.6 * columns + 0.6, 3.6 * height + 1.2), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    panels = figure.subplots(height, columns, squeeze=False).flatten()
    for panel in panels[len(tasks) :]:
        panel.set_visible(False)
    policies = list(dict.fromkeys(row.policy for row in compressed))
    for panel, task in zip(panels, tasks):
        panel.axhline(full.scores[task][0].value, color="#444444", linestyle=(0, (4, 3)), label="full cache")
        for index, policy in enumerate(policies):
            line = sorted((row for row in compressed if row.policy == policy), key=lambda row: row.nbytes)
            firsts = [row.scores[task][0] for row in line]
            panel.errorbar(
                [row.nbytes / 2**10 for row in line],
                [first.value for first in firsts],
                yerr=[first.stderr or 0.0 for first in firsts],
                color=COLOURS[index % len(COLOURS)],
                marker=MARKERS[index % len(MARKERS)],
                capsize=3,
                label=policy,
            )
        panel.set_title(task, fontsize=11)
        panel.set_ylabel(full.scores[task][0].metric.removesuffix(",none"))
        panel.set_xlabel(f"cache, KiB per sequence (full cache: {full.nbytes / 2**10:.0f})")
        panel.grid(color="#dddddd", linewidth=0.8)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4 * columns), frameon=False)
    figure.suptitle(title, fontsize=12)
    figure.savefig(path)
