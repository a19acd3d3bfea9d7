"""perf/results/evaluation/README.md and its plots from the JSON files beside it; no number is typed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fastkv.demo.tasks import TASKS

from ..tables import table
from .ablations import chapter, share
from .cases import BUDGETS, FIDELITY, LANGUAGE, READS
from .plots import plot_fidelity, plot_tasks
from .results import STUDENT, Mean, Results, Row, correlation, leaders, load, on_par, ranking

HEADER = """# Evaluation of the bundled model

Written by `make eval-report` (`python -m perf.quality`) from the JSON files beside it; do not edit. What follows
from it: [choosing.md](../../../docs/choosing.md).
"""
COLUMNS = """
Every number is a mean over seeds ± its standard error; ± 0 means that the seeds agree, not that more texts would. A
seed is a group of texts that all caches answer questions about, so differences between caches are paired. `kept`:
tokens per KV head; `KiB`: bytes of one sequence, everything counted. The report refuses caches of one budget whose
bytes, from `nbytes()`, differ by a token per head or more. `error`: |o - full| / |full| of attention outputs while the
reference answer is fed.
"""
FIDELITY_TEXT = """## Fidelity to the full cache

One text for each seed, compressed except for its last {steps} tokens, which are fed one at a time and end with a
question and its answer. `error`: of attention outputs against the run of the full cache; `own`: against the pairs that
the layer itself was given; `KL` (nats) and `top-1`: of next-token distributions; `ppl`: perplexity relative to the full
cache.
Command: `python -m perf.quality --parts fidelity`
"""
LANGUAGE_TEXT = """## The language model

{seeds} stretches of {context} tokens of source code that the model was not trained on, their last {steps} fed one
at a time; columns as above. It says nothing about retrieval, and the bundled model nothing about prose.
Command: `python -m perf.quality --parts language`
"""
DISAGREE = """## Attention error and next tokens

Who is first by each measure, and Spearman's correlation of the attention error with the others over all policies: +1
would mean that one could stand for the other. KL and error are of the same texts and tokens.
"""
SMALL = """## Where the bundled model is too small to tell policies apart

`on par with the best`: a paired t-test over the seeds at 95 % does not tell them from the best policy of the line; `no
better than random`: nor, or worse, from a random choice. With the first list long the line ranks nothing; with the
second long the budget is too small for anything that does not find the asked words.
"""


def write_report(folder: Path) -> None:
    """Write README.md and the plots. Raises: FastKVError if the files do not fit together."""
    results = load(folder)
    plot_tasks(results, folder / "tasks.png")
    plot_fidelity(results, folder / "fidelity.png")
    (folder / "README.md").write_text(report(results))


def report(results: Results) -> str:
    """README.md."""
    settings = results.settings
    asked = settings["seeds"] * settings["texts"]
    setup = (
        f"{settings['seeds']} seeds, {settings['texts']} texts of {settings['context']} tokens for each seed and task "
        f"({asked} questions a task). Versions: "
        + "; ".join(", ".join(f"{name} {value}" for name, value in one.items()) for one in results.versions)
        + ".\n"
    )
    parts = [HEADER, setup, COLUMNS, unfinished(results), tasks(results), fidelity(results), language(results)]
    parts += [disagreement(results), too_small(results)]
    ablations = chapter(results)
    if ablations:
        parts.append("## Ablations, in the shape of the papers' tables\n\nBold is the default.\n\n" + ablations)
    return "\n".join(part.strip("\n") + "\n" for part in parts if part)


def unfinished(results: Results) -> str:
    """Parts with cases that have no result, and what fastkv refused."""
    lines = []
    for part, planned in results.planned.items():
        there = len(results.rows[part]) + sum(one == part for one, *_ in results.refused)
        if there < len(planned):
            lines.append(f"- {part}: {there} of {len(planned)} caches; `python -m perf.quality --parts {part}`")
    lines += [f"- {part}: {name}, {share(tokens)}, refused: {reason}" for part, name, tokens, reason in results.refused]
    return "Not in the tables:\n\n" + "\n".join(lines) + "\n" if lines else ""


def tasks(results: Results) -> str:
    """Tables of the tasks for every way of reading and every budget."""
    sections = []
    for read, what in READS.items():
        part = f"tasks_{read}"
        tables = []
        for tokens in BUDGETS:
            rows = results.of(part, tokens=tokens)
            if rows:
                full = [results.full] if results.full else []
                tables.append(f"#### {share(tokens)} of the tokens\n\n{task_table([*full, *rows])}")
        if tables:
            command = f"Command: `python -m perf.quality --parts {part}`\n"
            sections.append("\n".join((f"### Tasks: {what}\n", command, *tables)))
    picture = "![Answers right over cache size](tasks.png)\n\n" if sections else ""
    return "## Tasks\n\nAnswers that greedy decoding gives exactly, in %.\n\n" + picture + "\n".join(sections)


def task_table(rows: Sequence[Row]) -> str:
    """A line for each cache, best first below the full cache."""
    ordered = sorted(rows, key=lambda row: (row.policy != "full", -Mean.of(row.answers).value))
    header = ("policy", "kept", "KiB", *TASKS, "all", "error")
    return table(header, [task_line(row) for row in ordered])


def task_line(row: Row) -> tuple[str, ...]:
    kept = "all" if row.kept is None else f"{row.kept:.0f}"
    by_task = (Mean.of(row.right[task]).percent for task in TASKS)
    return (
        row.name,
        kept,
        f"{row.nbytes / 2**10:.0f}",
        *by_task,
        Mean.of(row.answers).percent,
        Mean.of(row.errors).show(),
    )


def language(results: Results) -> str:
    """Tables of the language part."""
    tables = fidelity_tables(results, LANGUAGE)
    return "\n".join((LANGUAGE_TEXT.format(**results.settings), *tables)) if tables else ""


def fidelity(results: Results) -> str:
    """Tables of the fidelity part."""
    tables = fidelity_tables(results, FIDELITY)
    if not tables:
        return ""
    picture = "![Attention error against divergence of next tokens](fidelity.png)\n"
    return "\n".join((FIDELITY_TEXT.format(**results.settings), picture, *tables))


def fidelity_tables(results: Results, part: str) -> list[str]:
    """A table for each budget of a part that was measured against the full cache, smallest KL first."""
    tables = []
    for tokens in BUDGETS:
        rows = results.of(part, tokens=tokens)
        if rows:
            lines = [fidelity_line(row) for row in ranking(rows, "kl", smallest=True)]
            header = ("policy", "kept", "KiB", "error", "own", "KL", "top-1, %", "ppl")
            tables.append(f"### {share(tokens)} of the tokens\n\n{table(header, lines)}")
    return tables


def fidelity_line(row: Row) -> tuple[str, ...]:
    numbers = {name: Mean.of(values) for name, values in row.fidelity.items()}
    ppl = row.extra["perplexity_ratio"]
    return (
        row.name,
        f"{row.kept:.0f}",
        f"{row.nbytes / 2**10:.0f}",
        numbers["error"].show("{:.3f}"),
        numbers["own_error"].show("{:.3f}"),
        numbers["kl"].show("{:.3f}"),
        numbers["agreement"].percent,
        f"{ppl:.2f}",
    )


def disagreement(results: Results) -> str:
    """Who leads by attention error and by next tokens, and whether the two go together."""
    lines = disagreement_table(results)
    return f"{DISAGREE}\n{lines}" if lines else ""


def disagreement_table(results: Results, first: int = 3) -> str:
    """A line for each budget."""
    lines = []
    for tokens in BUDGETS:
        rows = results.of(FIDELITY, tokens=tokens)
        if len(rows) < 3 or not results.complete(FIDELITY, tokens):
            continue
        by_error, by_kl = (ranking(rows, name, smallest=True)[:first] for name in ("error", "kl"))
        by_top = ranking(rows, "agreement")[:first]
        error, kl, top = ([Mean.of(row.fidelity[name]).value for row in rows] for name in ("error", "kl", "agreement"))
        pairs = correlation(error, kl), correlation(error, [-one for one in top])
        lines.append(
            (
                share(tokens),
                listed(by_error, "error", "{:.2f}"),
                f"{ranking(rows, 'kl', smallest=True).index(by_error[0]) + 1} of {len(rows)}",
                listed(by_kl, "kl", "{:.2f}"),
                listed(by_top, "agreement", "{:.2f}"),
                *("-" if pair is None else f"{pair:+.2f}" for pair in pairs),
            )
        )
    header = (
        "budget",
        "smallest error",
        "its first by KL",
        "smallest KL",
        "most top-1",
        "error with KL",
        "error with 1 - top-1",
    )
    return table(header, lines)


def listed(rows: Sequence[Row], name: str, form: str) -> str:
    return ", ".join(f"{row.name} ({Mean.of(row.fidelity[name]).show(form)})" for row in rows)


def too_small(results: Results) -> str:
    """Which comparisons rank nothing."""
    lines = separation_table(results)
    quantile = STUDENT[min(results.settings["seeds"], len(STUDENT) + 1) - 2] if results.settings["seeds"] > 1 else None
    test = f"The t-test's threshold is {quantile} standard errors.\n"
    return f"{SMALL}\n{lines}\n{test}\n{twins(results)}" if lines else ""


def twins(results: Results) -> str:
    """Policies whose answers and errors are the same wherever both were measured."""
    numbers: dict[str, dict[tuple[str, int], object]] = {}
    for read in READS:
        for row in results.of(f"tasks_{read}"):
            numbers.setdefault(row.name, {})[read, row.tokens] = row.right, row.error
    groups: dict[str, list[str]] = {}
    for name, mine in numbers.items():
        groups.setdefault(repr(mine), []).append(name)
    same = [" and ".join(names) for names in groups.values() if len(names) > 1]
    return f"The same in every number, hence one choice of tokens: {'; '.join(same)}.\n" if same else ""


def separation_table(results: Results) -> str:
    """A line for each way of reading and budget."""
    lines = []
    for read, what in READS.items():
        for tokens in BUDGETS:
            rows = results.of(f"tasks_{read}", tokens=tokens)
            if len(rows) < 3 or not results.complete(f"tasks_{read}", tokens):
                continue
            best = leaders(rows, "answers")
            chance = next((row for row in rows if row.policy == "random"), None)
            weak = [row for row in rows if chance and row is not chance and not better(row, chance)]
            lines.append(
                (
                    what,
                    share(tokens),
                    Mean.of(best[0].answers).percent,
                    f"{len(best)} of {len(rows)}: {', '.join(row.name for row in best)}",
                    ", ".join(row.name for row in weak) or "none",
                )
            )
    header = ("prompt", "budget", "best, % right", "on par with the best", "no better than random")
    return table(header, lines)


def better(row: Row, other: Row) -> bool:
    """Whether the seeds tell that a row answers more."""
    return Mean.of(row.answers).value > Mean.of(other.answers).value and not on_par(row.answers, other.answers)
