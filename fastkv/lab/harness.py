"""`fastkv eval`: lm-evaluation-harness tasks with the full cache and with every policy at every budget.

Each finished cache is a JSON file in `--out`, so that the same command, given again, goes on where it was interrupted.
Several GPUs, on one node or several, with a folder that all of them see:

    accelerate launch -m fastkv.lab.cli eval --model PATH --tasks arc_easy --out results
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..errors import FastKVError, check_installed
from . import common, pretrained, reading

TASK_FILES = Path(__file__).parent / "tasks"  # what the harness takes as --include_path: fastkv's own tasks
OWN = "fastkv_"  # how the names of fastkv's tasks begin
KEPT = ("results", "groups", "configs", "versions", "n-shot", "n-samples", "higher_is_better", "config", "git_hash")


def check_harness() -> None:
    """Raise FastKVError unless lm-evaluation-harness is installed."""
    check_installed("running tasks of lm-evaluation-harness", "eval")


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

    @classmethod
    def of(cls, record: dict[str, Any]) -> Row:
        """What was written to a file."""
        scores = {task: [Score(**score) for score in found] for task, found in record["scores"].items()}
        return cls(**{**record, "scores": scores})


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastkv eval`."""
    add, option = parser.add_argument, partial(common.option, parser)
    common.add_model(parser, "fastkv-eval")
    tasks = "tasks of lm-evaluation-harness, your own in --include-path, or their YAML files"
    add("--tasks", required=True, metavar="NAME,...", help=tasks)
    common.add_caches(parser)
    mode = (
        "log-likelihoods: stream reads the whole text in blocks, prefix compresses the context before it scores the "
        "continuation; auto (the default) is stream with --prefill-block, prefix without"
    )
    add("--mode", choices=("auto", "stream", "prefix"), default="auto", help=mode)
    asks = f"{reading.HELP}, for tasks that name it, as fastkv's do"
    add("--question", choices=reading.QUESTION, default="seen", help=f"{asks} (default: seen)")
    add("--limit", type=float, metavar="N", help="number of questions of each task, or below 1 their share")
    add("--num-fewshot", type=int, metavar="N", help="worked examples in each prompt")
    option("--batch-size", "1", "sequences in a batch, or auto")
    option("--seed", 0, "seed of examples and sampling")
    add("--device", metavar="NAME", help="default: the GPU if there is one")
    more = "more arguments of the harness's own model, as dtype=bfloat16"
    add("--model-args", default="", metavar="K=V,...", help=more)
    told = "metadata of tasks, as max_seq_lengths=[4096,8192] num_samples=20, or a JSON object"
    add("--metadata", nargs="+", default=[], metavar="K=V", help=told)
    add("--include-path", metavar="DIR", help="folder with task YAML files of your own")


def run(options: argparse.Namespace, console: Console | None = None) -> list[Row]:
    """Evaluate every cache that has no file yet, print the table, and write results.json and results.png."""
    check_harness()
    tasks = list(common.listed()(options.tasks))
    common.check_some("tasks", tasks)
    shared = "model tasks mode question limit num_fewshot metadata batch_size seed model_args".split()
    plan = common.planned(options, {name: getattr(options, name) for name in shared})
    where, gguf = pretrained.place(options.model)
    metadata = {"pretrained": where, "seed": options.seed, "tokenizer": options.model, **metadata_of(options.metadata)}
    manager = load_tasks(tasks, options.include_path, metadata)
    lm = load_model(where, gguf, options)
    console = console or common.console_of(quiet=lm.rank != 0)
    lengths = metadata.get("max_seq_lengths", 0)
    longest = max(lengths) if isinstance(lengths, list) else lengths
    if longest > lm.max_length:
        raise FastKVError(
            f"texts must have at most {lm.max_length} tokens for {options.model}, got max_seq_lengths {longest}, and "
            "longer ones would lose their beginning; give smaller ones or another model"
        )
    caches = [common.arguments(one, options, lm.patched) for one in plan]
    for one, cache in zip(plan, caches):  # what cannot be used is refused before anything slow
        lm.set_cache(**cache, mode=options.mode, question=options.question)
        common.check_first(one.name, lm.patched, cache["budget"])
    rows = []
    for place, (one, cache) in enumerate(zip(plan, caches), 1):
        if one.record is None:
            console.print(f"{place}/{len(plan)} {one.name}")
            lm.set_cache(**cache, mode=options.mode, question=options.question)
            row = evaluate(lm, one, tasks, manager, options)
        else:
            console.print(f"{place}/{len(plan)} {one.name} is in {options.out} already")
            row = Row.of(one.record["row"])
        if row is not None:
            rows.append(row)
    lm.set_cache(common.FULL)
    if lm.rank == 0:
        versions = common.versions(lm_eval=importlib.metadata.version("lm_eval"))
        record = {"versions": versions, "settings": plan[0].settings, "rows": rows}
        common.write_json(options.out / "results.json", record)
        write_plot(rows, options.out / "results.png", f"{options.model}: score over cache size")
        console.print(table_of(rows))
        console.print(
            "KiB is the largest cache of one sequence, everything counted; share: of the full cache.\n"
            f"{options.out / 'results.png'} and {options.out / 'results.json'} written"
        )
    return rows


def load_model(where: str, gguf: dict[str, str], options: argparse.Namespace) -> Any:
    """The harness's model with the stock cache. Raises FastKVError if it cannot be loaded."""
    from lm_eval.utils import simple_parse_args_string

    from .plugins import FastKVLM

    with pretrained.loading(f"a model from {options.model}", "name a folder or a model, and check --model-args"):
        arguments = simple_parse_args_string(options.model_args)
        device = options.device or common.default_device()
        how: dict[str, Any] = {"batch_size": options.batch_size, "device": device, **gguf}
        return FastKVLM(where, policy=common.FULL, **how, **arguments)


def evaluate(lm: Any, cache: common.Planned, tasks: list[str], manager: Any, options: argparse.Namespace) -> Row | None:
    """Run the tasks with the cache that the model has, and keep the row; None in every process but the first."""
    import lm_eval

    started = time.perf_counter()
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    results = lm_eval.simple_evaluate(
        lm,
        tasks=tasks,
        task_manager=manager,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        log_samples=False,
        **dict.fromkeys(seeds, options.seed),
    )
    largest = lm.all_gather(torch.tensor([lm.cache_bytes], device=lm.device)).max()
    if results is None:
        return None
    row = Row(cache.policy, cache.budget, int(largest), time.perf_counter() - started, scores_of(results))
    cache.keep({"row": row, "harness": {name: results[name] for name in KEPT if name in results}})
    return row


def table_of(rows: Sequence[Row]) -> Table:
    """The rows as a table: bytes, share of the full cache, first metric of each task with its standard error."""
    tasks, titles = list(rows[0].scores), []
    for task in tasks:
        first = rows[0].scores[task][0]
        less = "" if first.higher_is_better else ", less is better"
        titles.append(f"{task}\n{first.metric.removesuffix(',none')}{less}")
    table = common.table(("policy",), ("budget", "KiB", "share", *titles))
    for row in rows:
        firsts = [row.scores[task][0] for task in tasks]
        marks = (f"{one.value:.4g}" + ("" if one.stderr is None else f" ± {one.stderr:.2g}") for one in firsts)
        share = f"{row.nbytes / rows[0].nbytes:.1%}"
        table.add_row(row.policy, row.budget, f"{row.nbytes / 2**10:.0f}", share, *marks)
    return table


def write_plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Write a PNG: a panel for each task, its first metric over the bytes of a sequence's cache, a line per policy.

    Bars are standard errors; the dashed line is the full cache, `rows[0]`.
    """
    full, compressed = rows[0], rows[1:]
    tasks = list(full.scores)
    columns = min(len(tasks), 3)
    height = -(-len(tasks) // columns)
    figure = common.figure(4.6 * columns + 0.6, 3.6 * height + 1.2)
    panels = figure.subplots(height, columns, squeeze=False).flatten()
    for panel in panels[len(tasks) :]:
        panel.set_visible(False)
    for panel, task in zip(panels, tasks):
        panel.axhline(full.scores[task][0].value, label="full cache", **common.DASHED)
        for index, policy in enumerate(dict.fromkeys(row.policy for row in compressed)):
            line = sorted((row for row in compressed if row.policy == policy), key=lambda row: row.nbytes)
            firsts = [row.scores[task][0] for row in line]
            x, y, bars = zip(*((row.nbytes / 2**10, one.value, one.stderr or 0.0) for row, one in zip(line, firsts)))
            panel.errorbar(x, y, yerr=bars, capsize=3, label=policy, **common.style(index))
        panel.set_title(task, fontsize=11)
        panel.set_ylabel(full.scores[task][0].metric.removesuffix(",none"))
        panel.set_xlabel(f"cache, KiB per sequence (full cache: {full.nbytes / 2**10:.0f})")
        common.finish(panel)
    common.save(figure, path, title, legend_of=panels[0], columns=4 * columns)


def load_tasks(tasks: list[str], include_path: str | None, metadata: dict[str, Any]) -> Any:
    """The harness's task manager, after all tasks were loaded once.

    Args: tasks: names or YAML files.  include_path: folder with the user's YAML files.  metadata: for all tasks.
    """
    from lm_eval.tasks import TaskManager

    manager = TaskManager(
        include_path=[TASK_FILES, *([include_path] if include_path else [])],
        # Indexing the thousands of tasks that come with the harness takes a while; files and own tasks do without.
        include_defaults=not all(Path(task).is_file() or task.startswith(OWN) for task in tasks),
        metadata=metadata,
    )
    for task in tasks:
        try:
            manager.load([task])
        except FastKVError:
            raise
        except KeyError as error:
            raise FastKVError(
                f"lm-evaluation-harness knows no task {task!r}; lm-eval ls tasks lists what it knows, --include-path "
                "adds your own"
            ) from error
        except ImportError as error:
            raise FastKVError(
                f"task {task} needs a package that is not installed: {pretrained.first_line(error)}"
            ) from error
        except (OSError, ValueError) as error:  # what `datasets` raises without a connection, a file or a configuration
            name = culprit(manager, task)
            entry = manager.task_index.get(name)
            dataset = (entry.cfg if entry is not None else {}).get("dataset_path") or "its dataset"
            source = entry.yaml_path if entry is not None else name
            raise FastKVError(
                f"task {name} cannot load {dataset} ({pretrained.first_line(error)}); {advice(source, Path(name).stem)}"
            ) from error
    return manager


def culprit(manager: Any, task: str) -> str:
    """The first task of a group or tag of the harness's index that cannot be loaded, or the task itself."""
    from lm_eval.tasks._index import Kind

    entry = manager.task_index.get(task)
    kind = None if entry is None else entry.kind
    names = sorted(entry.tags) if kind is Kind.TAG else entry.cfg.get("task") or [] if kind is Kind.GROUP else []
    for one in names:
        name = str(one.get("group") or one.get("task")) if isinstance(one, dict) else one
        try:
            manager.load([name])
        except (OSError, ValueError, ImportError):
            return culprit(manager, name)
    return task


def advice(source: Any, name: str) -> str:
    """How to run a task on a copy of its dataset."""
    return (
        f"copy the dataset to this machine, write a file my.yaml with the lines 'include: {source}', 'task: my_{name}' "
        "and 'dataset_path: FOLDER', and run --tasks my.yaml"
    )


def metadata_of(words: list[str]) -> dict[str, Any]:
    """`--metadata` as the harness takes it: K=V words, or a JSON object. Raises FastKVError for anything else."""
    from lm_eval._cli.utils import key_val_to_dict, try_parse_json

    found: dict[str, Any] = {}
    for word in words:
        try:
            parsed = try_parse_json(word)
            found |= parsed if isinstance(parsed, dict) else key_val_to_dict(word)
        except ValueError as error:
            raise FastKVError(
                f"metadata must be K=V or a JSON object, got {word!r} ({pretrained.first_line(error)}); for example "
                "max_seq_lengths=[4096,8192]"
            ) from error
    return found
