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
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..errors import FastKVError, check_installed
from . import common, pretrained

TASK_FILES = Path(__file__).parent / "tasks"  # what the harness takes as --include_path: fastkv's own tasks
NEEDS = ("running tasks of lm-evaluation-harness", "eval")  # which extra
OWN = "fastkv_"  # how the names of fastkv's tasks begin
KEPT = "results groups group_subtasks configs versions n-shot n-samples higher_is_better config git_hash".split()
ADVICE = (
    "where a dataset cannot be reached, copy it to this machine, write a file my.yaml with the lines 'include: FILE OF "
    "THE TASK', 'task: my_task' and 'dataset_path: FOLDER', and run --tasks my.yaml"
)


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


def run(options: argparse.Namespace, console: Console | None = None) -> list[Row]:
    """Evaluate every cache that has no file yet, print the table, and write results.json."""
    check_installed(*NEEDS)
    names = "model tasks mode question limit num_fewshot metadata batch_size seed model_args"
    results = common.Results(options, names, common.caches_of(options))
    where, gguf = pretrained.place(options.model)
    metadata = {"pretrained": where, "seed": options.seed, "tokenizer": options.model, **metadata_of(options.metadata)}
    manager = load_tasks(options.tasks, options.include_path, metadata)
    lm = load_model(where, gguf, options)
    console = console or common.console_of(quiet=lm.rank != 0)
    lengths = metadata.get("max_seq_lengths", 0)
    longest = max(lengths) if isinstance(lengths, list) else lengths
    if longest > lm.max_length:
        raise FastKVError(
            f"texts must have at most {lm.max_length} tokens for {options.model}, got max_seq_lengths {longest}, and "
            "longer ones would lose their beginning; give smaller ones or another model"
        )
    caches, how = common.caches_of(options, lm.patched), {"mode": options.mode, "question": options.question}
    for cache in caches:  # what cannot be used is refused before anything slow
        lm.set_cache(**cache.arguments, **how)
        common.check_first(cache.name, lm.patched, cache.arguments.get("budget"))
    rows = []
    for place, cache in enumerate(caches, 1):
        record = results.known.get(cache.name)
        console.print(f"{place}/{len(caches)} {cache.name}{' is known already' * (record is not None)}")
        if record is None:
            lm.set_cache(**cache.arguments, **how)
            record = evaluate(lm, manager, options)
            if lm.rank == 0:
                results.keep(cache, record)
        if lm.rank == 0:
            scores = scores_of(record["harness"])
            rows.append(Row(cache.policy, cache.budget, record["nbytes"], record["seconds"], scores))
    lm.set_cache(common.FULL)
    if lm.rank == 0:
        versions = common.versions(lm_eval=importlib.metadata.version("lm_eval"))
        common.write_json(
            options.out / "results.json", {"versions": versions, "settings": results.settings, "rows": rows}
        )
        console.print(table_of(rows))
        console.print(
            "KiB is the largest cache of one sequence, everything counted; share: of the full cache.\n"
            f"{options.out / 'results.json'} written"
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


def evaluate(lm: Any, manager: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Run the tasks with the cache that the model has: its bytes, seconds, and what the harness found.

    The last is empty in every process but the first.
    """
    import lm_eval

    started = time.perf_counter()
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    found = lm_eval.simple_evaluate(
        lm,
        tasks=list(options.tasks),
        task_manager=manager,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        log_samples=False,
        **dict.fromkeys(seeds, options.seed),
    )
    largest = lm.all_gather(torch.tensor([lm.cache_bytes], device=lm.device)).max()
    kept = {name: found[name] for name in KEPT if name in found} if found else {}
    return {"nbytes": int(largest), "seconds": time.perf_counter() - started, "harness": kept}


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


def load_tasks(tasks: Sequence[str], include_path: str | None, metadata: dict[str, Any]) -> Any:
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
        except (ImportError, OSError, ValueError) as error:  # without a package, a connection, a file, a configuration
            raise FastKVError(f"task {task} cannot be loaded ({pretrained.first_line(error)}); {ADVICE}") from error
    return manager


def metadata_of(words: list[str]) -> dict[str, Any]:
    """`--metadata` as the harness takes it: K=V words. Raises FastKVError for anything else."""
    from lm_eval._cli.utils import key_val_to_dict

    try:
        return {name: value for word in words for name, value in key_val_to_dict(word).items()}
    except ValueError as error:
        raise FastKVError(f"metadata must be K=V, got {words}; for example max_seq_lengths=[4096,8192]") from error
