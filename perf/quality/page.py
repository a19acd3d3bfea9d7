"""docs/choosing.md: the words are written there by hand, everything between its markers is written here."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from fastkv import FastKVError

from ..engine import ROOT
from ..tables import table
from .ablations import against_best, share
from .cases import BLOCK, BUDGETS, LANGUAGE, READS
from .report import disagreement_table, separation_table, twins
from .results import STUDENT, Mean, Results, Row, difference, leaders, load, on_par, ranking

PAGE = ROOT / "docs" / "choosing.md"
MARKED = re.compile(r"(<!-- from results: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
WORKLOADS = {
    "context": "The text is read before the question is known: saved prefixes, one document and many questions",
    "whole": "Prompt and question come together and fit into memory while they are read",
    BLOCK: "The prompt is too long for memory and is read in blocks",
}
MARGIN = 0.10  # of all answers: a cache that keeps up with the full one loses no more
CORRECTIONS = {"SnapKV": "none", "SnapKV + mean (order 0)": "mean", "correction only": "moments"}


def write_page(folder: Path, page: Path) -> None:
    """Renew what is between the markers of the page. Raises: FastKVError if there is no page."""
    if not page.is_file():
        raise FastKVError(f"there is no {page} whose tables could be renewed; give another --page")
    page.write_text(renewed(page.read_text(), load(folder)))


def renewed(text: str, results: Results) -> str:
    """The page with what the results say between its markers.

    Raises: FastKVError for a marker that nothing is written for.
    """

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        if name not in SECTIONS:
            raise FastKVError(f"unknown marker {name!r}; there are {', '.join(SECTIONS)}")
        body = SECTIONS[name](results).strip("\n") or "Nothing has been measured yet: `make eval-report`."
        return f"{match[1]}\n{body}\n\n{match[3]}"

    return MARKED.sub(fill, text)


def evidence(results: Results) -> str:
    """What all numbers of the page rest on."""
    settings, parts = results.settings, results.planned
    there = sum(len(rows) for rows in results.rows.values()) + len(results.refused)
    return (
        f"{there} of {sum(map(len, parts.values()))} caches have been measured: {settings['seeds']} seeds, "
        f"{settings['texts']} texts of {settings['context']} tokens for each seed and task, one question each. A `±` "
        "is a standard error over the seeds."
    )


def choices(results: Results) -> str:
    """For each workload the smallest budget at which a policy keeps up with the full cache, and which ones do."""
    lines = []
    for read, what in WORKLOADS.items():
        for tokens in BUDGETS:
            rows = results.of(f"tasks_{read}", tokens=tokens)
            if results.full is None or not results.complete(f"tasks_{read}", tokens):
                break  # a better policy may be among those that are missing
            good = [row for row in ranking(rows, "answers") if enough(row, results.full)]
            if good or tokens == BUDGETS[-1]:
                best = good or leaders(rows, "answers")
                lines.append(choice(read, what, tokens, best, bool(good)))
                break
    if not lines or results.full is None:
        return ""
    return f"The full cache answers {Mean.of(results.full.answers).percent} % right.\n\n" + "\n".join(lines)


def choice(read: str, what: str, tokens: int, best: Sequence[Row], enough: bool) -> str:
    """One recommendation as a list entry."""
    names = ", ".join(f"`{row.name}` ({Mean.of(row.answers).percent} %)" for row in best)
    verdict = "keeping up with the full cache at" if enough else "best, but short of the full cache, at"
    source = f"table {READS[read]}, {share(tokens)}; `python -m perf.quality --parts tasks_{read}`"
    return f"- **{what}**: {verdict} {share(tokens)} of the tokens: {names}. ({source})"


def enough(row: Row, full: Row) -> bool:
    """Whether the mean keeps up with the full cache; a t-test would let the noisiest caches pass."""
    return Mean.of(full.answers).value - Mean.of(row.answers).value <= MARGIN + 1e-9


def budgets(results: Results) -> str:
    """A line for each policy: the smallest budget at which it keeps up with the full cache, for each workload."""
    if results.full is None:
        return ""
    names = dict.fromkeys(row.name for read in READS for row in results.of(f"tasks_{read}"))
    lines = [(f"`{name}`", *(smallest(results, read, name) for read in READS)) for name in names]
    return table(("policy", *READS.values()), sorted(lines, key=lambda line: [rank(cell) for cell in line[1:]]))


def smallest(results: Results, read: str, name: str) -> str:
    """The smallest budget that is enough, with the answers there; or the best that there is."""
    assert results.full is not None
    part = f"tasks_{read}"
    rows = [row for row in results.of(part) if row.name == name]
    if not rows:
        return "not measured" if name in dict(results.planned.get(part, [(name, 0)])) else "not possible"
    row = next((row for row in rows if enough(row, results.full)), None)
    if row is not None:
        return f"{share(row.tokens)} ({Mean.of(row.answers).percent})"
    return f"> {share(rows[-1].tokens)} ({Mean.of(rows[-1].answers).percent})"


def rank(cell: str) -> float:
    """Sorts cells by budget; what is not enough comes last."""
    number = re.match(r"(> )?([\d.]+) %", cell)
    return 1000 if number is None else float(number[2]) + (500 if number[1] else 0)


def question(results: Results) -> str:
    """What each policy loses when the question comes after compression."""
    tokens = BUDGETS[1]
    whole, later = (
        {row.name: row for row in results.of(f"tasks_{read}", tokens=tokens)} for read in ("whole", "context")
    )
    lines = []
    both = [name for name in whole if name in later]
    for name in sorted(both, key=lambda one: difference(whole[one].answers, later[one].answers).value):
        seen, unseen = whole[name].answers, later[name].answers
        lost = "" if on_par(seen, unseen) else difference(seen, unseen).percent
        lines.append((f"`{name}`", Mean.of(seen).percent, Mean.of(unseen).percent, lost or "not beyond chance"))
    return table(("policy", f"question seen, {share(tokens)}", "question later", "lost"), lines)


def language(results: Results) -> str:
    """Smallest divergence of next tokens on held-out text, for each budget."""
    lines = []
    for tokens in BUDGETS:
        rows = results.of(LANGUAGE, tokens=tokens)
        if results.complete(LANGUAGE, tokens):
            best = ranking(rows, "kl", smallest=True)[:5]
            names = ", ".join(f"`{row.name}` ({Mean.of(row.fidelity['kl']).show('{:.3f}')})" for row in best)
            par = ", ".join(f"`{row.name}`" for row in leaders(rows, "kl", smallest=True)[1:])
            lines.append((share(tokens), names, par or "none"))
    return table(("budget", "smallest KL, nats", "on par with the first"), lines)


def correction(results: Results) -> str:
    """What the estimate of the evicted tokens does to one policy's attention error and to its answers."""
    lines = []
    for row in results.of("momentkv"):
        if row.name in CORRECTIONS:
            numbers = f"{row.kept:.0f}", Mean.of(row.errors).show(), Mean.of(row.answers).percent
            lines.append((READS[row.read], share(row.tokens), CORRECTIONS[row.name], *numbers))
    return table(("prompt", "budget", "correction", "kept", "attention error", "% right"), lines)


def separation(results: Results) -> str:
    """Where the seeds do not rank policies, and which ones made the same choice everywhere."""
    return f"{separation_table(results)}\n{twins(results)}"


def threshold(results: Results) -> str:
    """How "keeps up" and "on par" are decided."""
    number = results.settings["seeds"]
    if number < 2:
        return ""
    quantile = STUDENT[min(number, len(STUDENT) + 1) - 2]
    return (
        f"A cache *keeps up* with the full one if its mean is at most {100 * MARGIN:.0f} points of right answers "
        "lower. "
        f"Two caches are *on par* if a paired t-test over the {number} seeds does not tell them apart at 95 %: their "
        f"mean difference is at most {quantile} of its standard errors. With so few seeds the test misses real "
        "differences, and with so many comparisons one in twenty is chance."
    )


SECTIONS: dict[str, Callable[[Results], str]] = {
    "evidence": evidence,
    "threshold": threshold,
    "choices": choices,
    "budgets": budgets,
    "question": question,
    "language": language,
    "disagreement": disagreement_table,
    "correction": correction,
    "ablations": against_best,
    "separation": separation,
}
