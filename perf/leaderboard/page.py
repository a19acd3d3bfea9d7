"""docs/results.md and its picture, from what was measured and nothing else."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from fastkv import policies

from . import another, onward, times

if TYPE_CHECKING:
    from . import Table

ROOT = Path(__file__).parents[2]
MARK, END = "<!-- results: written by `make report`, do not edit -->", "<!-- results: end -->"
README = ROOT / "README.md"
PAGE, PICTURE = ROOT / "docs" / "results.md", ROOT / "docs" / "pictures" / "results.png"
TIMES, HEADS = "times_2048", "times_heads"
KVPRESS, BESIDE = "kvpress_2048", 6  # its table, and texts of it
OURS, DEFAULT = "bfloat16_2048", "later_2048"  # beside it
MINE = ("fastkv", "fastkv-reread", "kvzip")  # policies beside it
LEAST = 30  # answerable questions of a cell that is published
GONE = ("grkv",)
DRAWN = ("fastkv", "fastkv-reread", "kvzip", "momentkv", "compactor", "keydiff", "snapkv", "streaming")
INTRO = """# Results

SmolLM2-135M-Instruct reads docstrings of Python's standard library, into which six facts of nine kinds were inserted.
It is asked about each fact twice: in the words of the text, and in other words. Nothing was tuned on these texts or
facts. All policies, budgets and corrections share one reading of each text. The model computes in float32.

Every cache has the stated share of the bytes of a bfloat16 cache of the whole text; everything that it stores counts.
Unless a title says otherwise, each head has its calibrated budget ([heads](budgets.md#heads)), and slots have the bits
of `budget="4x"`, `"8x"` and `"16x"`: 8, and 4 at 93.75 % removed ([bits](budgets.md#bits)).

- **right**: of the questions that the full cache answers correctly, the share that the compressed cache answers
  correctly, too, decoding greedily; ± one standard error over texts.
- **answer KL**: divergence from the full cache along its answer, in nats per token.
- **text KL**: the same along the next 64 tokens of the text.

Columns say which share of the full cache's bytes is removed. Rows are sorted by right answers over all columns. The
full cache has 1.00, 0 and 0 by definition.
"""


def rows_of(file: Path) -> list[dict[str, Any]]:
    """The cells in a file, without those of policies that are gone."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return [row for row in rows if row.get("policy") not in GONE]


def link(name: str) -> str:
    """A policy's name, class and paper, as cells of a table; a press has its name alone."""
    if name not in policies.names():
        return f"`{name}` | | " if name != times.FULL else f"{name} | | "
    kind = type(policies.get(name))
    file = kind.__module__.rpartition(".")[2]
    found = re.search(r"arXiv:(\d{4}\.\d{5})", str(kind.__doc__))
    paper = "" if found is None else f"[{found[1]}](https://arxiv.org/abs/{found[1]})"
    return f"`{name}` | [`{kind.__name__}`](../fastkv/policies/{file}.py) | {paper}"


def fewest(rows: list[dict[str, Any]]) -> int:
    """Questions asked of the policy that was asked fewest."""
    asked: Counter[str] = Counter()
    for row in rows:
        asked[row["policy"]] += row.get("asked", 0)
    return min(asked.values(), default=0)


def table_of(rows: list[dict[str, Any]], keeps: tuple[float, ...]) -> tuple[str, list[float]]:
    """A table in Markdown, and its columns: those with enough questions in every cell."""
    cells: dict[tuple[str, float], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        cells[row["policy"], row["keep"]].append(row)
    columns = [keep for keep in keeps if fewest([row for row in rows if row["keep"] == keep]) >= LEAST]
    lines = []
    for name in sorted({name for name, _ in cells}):
        shown, total = [], 0.0
        for keep in columns:
            cell = cells[name, keep]
            asked = sum(row.get("asked", 0) for row in cell)
            right = sum(row["right"] for row in cell if "right" in row) / asked
            apart = sum(row["answer_kl"] * row["asked"] for row in cell if "answer_kl" in row) / asked
            total += right - 1e-3 * apart
            text_kl = sum(row["text_kl"] for row in cell) / len(cell)
            shown.append(f"**{right:.2f}** ± {error(cell):.2f}<br>{apart:.3f} · {text_kl:.3f}")
        lines.append((total, f"| {link(name)} | {' | '.join(shown)} |"))
    head = " | ".join(f"{100 * (1 - keep):g} % removed" for keep in columns)
    body = "\n".join(line for _, line in sorted(lines, reverse=True))
    full = f"| full cache | | | {' | '.join(['**1.00**<br>0 · 0'] * len(columns))} |"
    return f"| policy | class | paper | {head} |\n|---|---|---|{'---|' * len(columns)}\n{full}\n{body}\n", columns


def onward_table(rows: list[dict[str, Any]]) -> str:
    """KL by source of the text, over the tokens after the prompt; rows are sorted by its mean at the end."""
    by_policy: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_policy[row["policy"]].append(row)
    lines = []
    for name, cells in by_policy.items():
        spans = [
            [mean(one["kl"][part][place] for one in cells) for part in onward.PARTS]
            for place in range(len(onward.SOURCES))
        ]
        same = mean(mean(one["top1"]) for one in cells)
        worse = mean(mean(one["nll"]) - mean(one["full_nll"]) for one in cells)
        shown = [" · ".join(f"{kl:.3f}" for kl in span) for span in spans]
        last = mean(span[-1] for span in spans)
        lines.append((last, f"| {link(name)} | {' | '.join(shown)} | {same:.3f} | {math.exp(worse):.3f} |"))
    head = f"| policy | class | paper | {' | '.join(onward.SOURCES)} | same top token | perplexity, times |"
    return "\n".join(
        [head, f"|---|---|---|{'---|' * len(onward.SOURCES)}---|---|", *(line for _, line in sorted(lines)), ""]
    )


def times_table(rows: list[dict[str, Any]]) -> str:
    """Seconds of reading and milliseconds of a step."""
    lines = [f"| {link(row['policy'])} | {row['read_s']:.1f} | {1e3 * row['step_s']:.1f} |" for row in rows]
    return "\n".join(["| policy | class | paper | prefill, s | decode step, ms |", "|---|---|---|---|---|", *lines, ""])


def error(cell: list[dict[str, Any]]) -> float:
    """Standard error of the share of right answers, over texts: of a ratio of means."""
    told = [(row["right"], row["asked"]) for row in cell if row.get("asked")]
    num, asked = len(told), sum(of for _, of in told)
    share = sum(right for right, _ in told) / asked
    spread = sum((right - share * of) ** 2 for right, of in told)
    return math.sqrt(num / (num - 1) * spread) / asked if num > 1 else math.nan


def write(results: Path, tables: Mapping[str, Table]) -> None:
    """Write the page and the picture; a table without enough questions is named with what it lacks."""
    parts, missing = [INTRO], []
    for name, table in tables.items():
        rows = rows_of(results / f"{name}.jsonl")
        if table.question == "none":
            parts += ahead(rows, table)
            continue
        finished = {keep: complete(rows, table, keep) for keep in table.keeps}
        whole = [row for row in rows if row["seed"] in finished.get(row["keep"], ())]
        made, columns = table_of(whole, table.keeps)
        lacking = [keep for keep in table.keeps if keep not in columns]
        if lacking:
            asked = [str(fewest([row for row in whole if row["keep"] == keep])) for keep in lacking]
            at = ", ".join(f"{100 * (1 - keep):g} %" for keep in lacking)
            missing.append(f"- {table.title}, at {at} removed: {', '.join(asked)} questions so far.")
        if not columns:
            continue
        where = where_of(whole)
        count = min(len(finished[keep]) for keep in columns)
        asked = min(fewest([row for row in whole if row["keep"] == keep]) for keep in columns)
        note = f"{count} texts, {asked} answerable questions or more in each cell; {where}."
        parts.append(f"## {table.title}\n\nEach cell: **right** ± error, then answer KL · text KL. {note}\n\n{made}")
        if name == "later_2048":
            show_in_readme(whole, columns, f"{count} texts, {asked} questions or more; {where}")
            draw(whole, columns)
            parts.append("![Right answers and answer KL over the share of bytes kept](pictures/results.png)\n")
    parts += [on_another_model(file) for file in sorted((results / another.RESULTS.name).glob("*.jsonl"))]
    parts += clocked(results)
    parts += beside_kvpress(results)
    if missing:
        lead = f"A column is published from {LEAST} questions of every policy on. `make report` continues measuring."
        parts.append("## Not yet published\n\n" + "\n".join([lead, "", *missing]) + "\n")
    PAGE.write_text("\n".join(parts))


def where_of(rows: list[dict[str, Any]]) -> str:
    """Versions, commits and machine of some cells."""
    commits = list(dict.fromkeys(row["commit"] for row in rows))
    code = f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}"
    told = rows[0]
    return f"torch {told['torch']}, transformers {told['transformers']}, {code}, {told['cpu']}"


def ahead(rows: list[dict[str, Any]], table: Table) -> list[str]:
    """The tables of texts that go on, from the texts that every policy has read."""
    parts = []
    for keep in table.keeps:
        finished = complete(rows, table, keep)
        whole = [row for row in rows if row["seed"] in finished and row["keep"] == keep]
        if whole:
            parts.append(
                f"## {table.title}, at {100 * (1 - keep):g} % removed\n\nThe rest of the text is decoded token by "
                "token, within the bytes that the compressed prompt takes. Columns of sources: KL from the full "
                "cache's next token in nats, mean over tokens "
                f"{' · '.join(onward.PARTS)} after the prompt. Same top token: how often the most likely token is that "
                "of the full cache. The last column: perplexity divided by "
                f"that of the full cache. Texts of each source: {len(finished)}; {where_of(whole)}.\n\n"
                f"{onward_table(whole)}"
            )
    return parts


def on_another_model(file: Path) -> str:
    """The table of another model, over the texts on which every cell was measured."""
    rows = rows_of(file)
    cells = Counter(row["seed"] for row in rows)
    rows = [row for row in rows if cells[row["seed"]] == len(another.NAMES) * len(another.KEEPS) * len(times.HEADS)]
    lines, ratios = [], []
    for policy in another.NAMES:
        shown = []
        for keep in another.KEEPS:
            uniform, calibrated = (
                mean(row["text_kl"] for row in rows if (row["policy"], row["keep"], row["heads"]) == (policy, keep, of))
                for of in times.HEADS
            )
            shown.append(f"{uniform:.3f} | {calibrated:.3f}")
            ratios.append(calibrated / uniform)
        lines.append(f"| `{policy}` | {' | '.join(shown)} |")
    together = math.exp(mean(map(math.log, ratios)))
    head = " | ".join(f"{100 * (1 - keep):g} % removed, uniform | calibrated" for keep in another.KEEPS)
    return (
        f"## {file.stem}: uniform and calibrated heads\n\nText KL over 64 tokens that go on after "
        f"{another.LENGTH:,}, at equal tokens; texts: {len({row['seed'] for row in rows})}; {where_of(rows)}. "
        "Policies were not tuned on this model; "
        "how its heads are calibrated was chosen on the first text. "
        "Geometric mean of the ratio of calibrated to uniform heads: "
        f"{together:.2f}.\n\n"
        + "\n".join([f"| policy | {head} |", f"|---|{'---|' * 2 * len(another.KEEPS)}", *lines, ""])
    )


def clocked(results: Path) -> list[str]:
    """The table of prefill and steps, if it was measured."""
    rows = rows_of(results / f"{TIMES}.jsonl")
    if not rows:
        return []
    parts = [
        "## Time\n\nOne sequence of 2,048 tokens is read whole and compressed to an eighth of the bytes; then it is "
        f"decoded. All policies take turns: the best of {times.TURNS} readings, the median of {times.ROUNDS} turns of "
        f"{times.STEPS} steps; {rows[0]['threads']} threads; "
        f"{where_of(rows)}.\n\n{times_table(rows)}"
    ]
    steps = rows_of(results / f"{HEADS}.jsonl")
    if steps:
        lines = [
            f"| {row['kept']:,} | {row['batch']} | {1e3 * row['uniform_s']:.1f} | {1e3 * row['calibrated_s']:.1f} | "
            f"{row['calibrated_s'] / row['uniform_s']:.2f} |"
            for row in steps
        ]
        head = [
            "| tokens kept | sequences | uniform heads, ms | calibrated heads, ms | ratio |",
            "|---|---|---|---|---|",
        ]
        parts.append(
            "A decode step of `keydiff` that keeps the same number of tokens in all:\n\n"
            + "\n".join([*head, *lines, ""])
        )
    return parts


def beside_kvpress(results: Path) -> list[str]:
    """The table of kvpress's presses, once all of them were measured on all texts."""
    theirs, keeps = [row for row in rows_of(results / f"{KVPRESS}.jsonl") if row["seed"] < BESIDE], (0.25, 0.125)
    if len(theirs) < BESIDE * len({(row["policy"], row["keep"]) for row in theirs}) or not theirs:
        return []
    known = {row["seed"] for row in theirs}
    ours = [
        row | {"policy": f"{row['policy']}{said}"}
        for table, said in ((OURS, ""), (DEFAULT, ", slots of 8 bits"))
        for row in rows_of(results / f"{table}.jsonl")
        if row["policy"] in MINE and row["seed"] in known and row["keep"] in keeps
    ]
    made, _ = table_of(theirs + ours, keeps)
    told, asked = theirs[0], fewest([row for row in theirs if row["keep"] == keeps[0]])
    versions = f"kvpress {told['kvpress']}, torch {told['torch']}, transformers {told['transformers']}, {told['cpu']}"
    return [
        "## Beside kvpress\n\nPresses of kvpress that need no training, on the same texts and questions "
        f"({len(known)} texts, {asked} questions; {versions}). They have kvpress's defaults, except that "
        "`AdaKVPress(ExpectedAttentionPress)` has an epsilon of 0.01. The comparison is not equal in all respects:\n\n"
        "- A press keeps a quarter or an eighth of the pairs. fastkv takes a quarter or an eighth of bfloat16's bytes "
        "for all that it stores, in bfloat16 or, which is its default, in 8 bits.\n"
        "- Tokens of questions and answers are added to what a press keeps. fastkv evicts to stay within its budget.\n"
        "- fastkv calibrated the budgets of heads beforehand, on text that the model generated "
        "([heads](budgets.md#heads)). Presses are not calibrated.\n"
        "- `KVzipPress`, `KVgradPress`, `kvzip` and `fastkv-reread` read a text twice.\n"
        "- At an eighth `LagKVPress` keeps what `StreamingLLMPress` keeps, because its windows leave no choice.\n"
        "- `PyramidKVPress` falls back to SnapKV where its last layers would keep less than its window; its numbers "
        f"are then those of `SnapKVPress`.\n\nEach cell: **right** ± error, then answer KL · text KL.\n\n{made}"
    ]


def show_in_readme(rows: list[dict[str, Any]], keeps: list[float], where: str) -> None:
    """Replace the table in README by one of a few policies."""
    text = README.read_text()
    before, rest = text.split(MARK)
    head = " | ".join(f"{100 * keep:g} % of the bytes" for keep in keeps)
    lines = [
        "",
        "Share of right answers and KL of the answers in nats per token; SmolLM2-135M, 2,048 tokens, compressed",
        f"before the question ({where}; `make report`):",
        "",
        f"| policy | {head} |",
        f"|---|{'---|' * len(keeps)}",
    ]
    for name in DRAWN:
        shown = []
        for keep in keeps:
            cell = [row for row in rows if (row["policy"], row["keep"]) == (name, keep) and "right" in row]
            asked = sum(row["asked"] for row in cell)
            apart = sum(row["answer_kl"] * row["asked"] for row in cell) / asked
            shown.append(f"{sum(row['right'] for row in cell) / asked:.2f}, {apart:.3f}")
        lines.append(f"| {name} | {' | '.join(shown)} |")
    README.write_text(f"{before}{MARK}\n" + "\n".join(lines) + f"\n\n{END}{rest.split(END)[1]}")


def complete(rows: list[dict[str, Any]], table: Table, keep: float) -> set[int]:
    """Seeds of texts on which every cell of a column was measured."""
    count = Counter(row["seed"] for row in rows if row["keep"] == keep and row["policy"] in table.names)
    return {seed for seed, num in count.items() if num >= len(table.names) * table.parts}


def draw(rows: list[dict[str, Any]], keeps: list[float]) -> None:
    """Right answers and answer KL over the share of bytes, a line for each of a few policies."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), dpi=110)
    for name in DRAWN:
        xs, ys, zs = [], [], []
        for keep in sorted(keeps):
            cell = [row for row in rows if (row["policy"], row["keep"]) == (name, keep) and "right" in row]
            asked = sum(row["asked"] for row in cell)
            xs.append(100 * keep)
            ys.append(sum(row["right"] for row in cell) / asked)
            zs.append(sum(row["answer_kl"] * row["asked"] for row in cell) / asked)
        left.plot(xs, ys, marker="o", label=name)
        right.plot(xs, zs, marker="o", label=name)
    left.set_ylabel("right answers")
    right.set_ylabel("answer KL, nats a token")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks([100 * keep for keep in keeps], [f"{100 * keep:g}" for keep in keeps])
        axes.set_xlabel("% of the full cache's bytes")
        axes.spines[["top", "right"]].set_visible(False)
    right.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE)
    plt.close(figure)
