"""What every report is made of: result files, Markdown tables, pages, plots."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from fastkv.lab import common

NONE = "not measured"
Row = dict[str, Any]


def read(folder: Path) -> dict[str, Row]:
    """Every result file by name, without those of dry runs; what names a case stands beside what was measured of it."""
    files = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    rows = {name: file for name, file in files.items() if "rows" in file}  # not pytest-benchmark's micro.json
    known = {name: file for name, file in rows.items() if "dry_run" not in file.get("environment", {})}
    return {name: file | {"rows": [row.get("case", {}) | row for row in file["rows"]]} for name, file in known.items()}


def chosen(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """The rows with these values, in order."""
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def table(header: Sequence[str], rows: Iterable[Sequence[object]], rule: str | Sequence[str] = " --- ") -> str:
    """A Markdown table; empty without rows. rule: below each name of the header, or below all of them."""
    head, *lines = ["| " + " | ".join(map(str, row)) + " |\n" for row in (header, *rows)]
    rules = [rule] * len(header) if isinstance(rule, str) else rule
    return "".join([head, f"|{'|'.join(rules)}|\n", *lines]) if lines else ""


def filled(template: str | Path, filters: Mapping[str, Callable[..., Any]] = {}, **facts: Any) -> str:
    """A Jinja template, or a file that holds one, filled in; without blanks around it.

    In it, `table` makes tables with the rule "---", `form` is Python's `format`, and files of perf/ can be imported.
    """
    files = jinja2.FileSystemLoader(Path(__file__).parent)
    words = jinja2.Environment(loader=files, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    words.globals["table"] = lambda header, rows: table(header, rows, "---")
    words.filters |= {"form": format, **filters}
    text = template if isinstance(template, str) else template.read_text(encoding="utf-8")
    return words.from_string(text).render(facts).strip()


def between(text: str, begin: str, end: str) -> str:
    """What a page has between two lines now, these included. Raises SystemExit without them."""
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise SystemExit(f"the page needs these two lines, once, around the section to write:\n{begin}\n{end}")
    return text[text.index(begin) : text.index(end) + len(end)]


def write_section(path: Path, begin: str, end: str, text: str) -> None:
    """Put a text with its first and last line in the place of the one that a page has."""
    whole = path.read_text()
    path.write_text(whole.replace(between(whole, begin, end), text))


def plot(
    folder: Path, name: str, title: str, labels: tuple[str, str], lines: dict[str, list[tuple[float, float]]]
) -> None:
    """A PNG of lines over logarithmic axes, with one marker a measurement. labels: of x and y."""
    from matplotlib.ticker import ScalarFormatter

    figure = common.figure(7, 4.5)
    axes = figure.subplots()
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points)), marker="o", ms=4, label=label, lw=2 if label.startswith("fastkv") else 1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({x for points in lines.values() for x, _ in points}))
    axes.set_yscale("log")
    for formatted in (axes.xaxis.set_major_formatter, axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatted(ScalarFormatter())
    axes.set(title=title, xlabel=labels[0], ylabel=labels[1])
    common.finish(axes)
    axes.legend(fontsize=7)
    figure.savefig(folder / f"{name}.png", dpi=120)
