"""A table for each ablation: what the paper reports, what the bundled model shows, and how they differ."""

from __future__ import annotations

from collections.abc import Sequence

from ..tables import table
from .cases import CONTEXT, READS, TIGHT
from .papers import ABLATIONS, Ablation
from .results import Mean, Results, Row, correlation, difference, on_par, ranking

NO_CELL = "-"


def share(tokens: int) -> str:
    """A budget as a share of the text."""
    return f"{100 * tokens / CONTEXT:g} %"


def chapter(results: Results) -> str:
    """All ablations of which anything has been measured."""
    sections = [section(results, one) for one in ABLATIONS]
    return "\n".join(text for text in sections if text)


def section(results: Results, ablation: Ablation) -> str:
    """One ablation; empty if none of its rows has been measured."""
    rows = found(results, ablation)
    if not rows:
        return ""
    known = [tokens for tokens in (*TIGHT, 512) if any(row.tokens == tokens for row in rows)]
    by_cell = {(row.name, row.tokens): row for row in rows}
    lines = []
    for name in ablation.rows:
        mine = [by_cell.get((name, tokens)) for tokens in known]
        if not any(mine):
            continue
        paper = ablation.numbers.get(name, (None,) * len(ablation.columns))
        title = f"**{name}**" if name == ablation.method else name
        numbers = [NO_CELL if number is None else f"{number:g}" for number in paper]
        right = [NO_CELL if row is None else Mean.of(row.answers).percent for row in mine]
        kept = [NO_CELL if row is None else f"{row.kept:.0f}" for row in mine]
        error = [NO_CELL if row is None else Mean.of(row.errors).show() for row in mine]
        lines.append((title, *numbers, *right, *error, " / ".join(kept)))
    shares = [share(tokens) for tokens in known]
    header = (
        "",
        *(f"paper, {column}" for column in ablation.columns),
        *(f"right, {one}" for one in shares),
        *(f"error, {one}" for one in shares),
        "kept",
    )
    where = f", {READS[ablation.read]}" if ablation.read in READS else ""
    return f"""### {ablation.title}{where}

Paper: {ablation.source}; {ablation.measured}.
Here: answers right in %, and relative error of attention outputs, at equal bytes.
Command: `python -m perf.quality --parts {ablation.part}`

{table(header, lines)}
{comparison(ablation, rows)} {ablation.differs}
"""


def found(results: Results, ablation: Ablation) -> list[Row]:
    """The measured rows of an ablation."""
    return [row for row in results.of(ablation.part, ablation.read) if row.name in ablation.rows]


def comparison(ablation: Ablation, rows: Sequence[Row]) -> str:
    """One sentence: who is first and last in the paper's first column, and who is here at the tightest budget."""
    tokens = min(row.tokens for row in rows)
    ours = {row.name: row for row in rows if row.tokens == tokens}
    paper = {name: cells[0] for name, cells in ablation.numbers.items() if cells[0] is not None and name in ours}
    if len(paper) < sum(cells[0] is not None for cells in ablation.numbers.values()):
        return "Too little of it has been measured to compare."
    first, last = max(paper, key=paper.__getitem__), min(paper, key=paper.__getitem__)
    ranked = ranking([ours[name] for name in paper], "answers")
    top, bottom = ranked[0], ranked[-1]
    apart = difference(top.answers, bottom.answers)
    verdict = "which the seeds cannot tell from nothing" if on_par(top.answers, bottom.answers) else "beyond chance"
    order = correlation(list(paper.values()), [Mean.of(ours[name].answers).value for name in paper])
    agreement = "" if order is None else f"; rank correlation {order:+.1f} over {len(paper)} rows"
    here = f"{top.name} is first and {bottom.name} last, {apart.percent} points apart, {verdict}"
    if apart.value == 0:
        here = "all are equal"
    return (
        f"Paper ({ablation.columns[0]}): {first} is first and {last} last, {paper[first] - paper[last]:.1f} points "
        f"apart; here ({share(tokens)}): {here}{agreement}."
    )


def against_best(results: Results) -> str:
    """For every ablation whether a variant beats the default at the tightest budget, as a table."""
    lines = []
    for ablation in ABLATIONS:
        rows = [row for row in found(results, ablation) if row.tokens == TIGHT[0]]
        method = next((row for row in rows if row.name == ablation.method), None)
        if method is None or len(rows) < len(ablation.rows):
            continue
        best = ranking(rows, "answers")[0]
        gain = difference(best.answers, method.answers)
        same = on_par(best.answers, method.answers)
        where = f", {READS[ablation.read]}" if ablation.read in READS else ""
        lines.append(
            (
                f"{ablation.title}{where}",
                f"{method.name}: {Mean.of(method.answers).percent}",
                f"{best.name}: {Mean.of(best.answers).percent}",
                NO_CELL if best is method else gain.percent,
                "no" if same else "yes",
                f"`--parts {ablation.part}`",
            )
        )
    header = ("ablation", "default, % right", "best, % right", "difference", "beyond chance?", "command")
    return table(header, lines)
