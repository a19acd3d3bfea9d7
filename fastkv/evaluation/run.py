"""`fastkv eval`: lm-evaluation-harness tasks with the full cache and with every policy at every budget.

Each finished cache is a JSON file in `--out`, so that the same command, given again, goes on where it was interrupted.
Several GPUs, on one node or several, with a folder that all of them see:

    accelerate launch -m fastkv.cli eval --model PATH --tasks arc_easy --out results
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from .. import __version__, demo
from ..budget import Budget
from ..demo.run import policy_of
from ..errors import FastKVError
from . import _check_harness, budgets
from .budgets import listed
from .equal_bytes import assert_equal_bytes
from .harness import first_line, load_tasks, metadata_of
from .results import FULL, Row, load, name_of, save, scores_of, table_of, write_plot

DEMO = "demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastkv eval`."""
    parser.add_argument(
        "--model", default=DEMO, metavar="PATH", help="folder or name; demo is the bundled one (default)"
    )
    parser.add_argument(
        "--tasks",
        required=True,
        metavar="NAME,...",
        help="tasks of lm-evaluation-harness, your own in --include-path, or their YAML files",
    )
    parser.add_argument(
        "--policies",
        "--policy",
        default="momentkv,keydiff,snapkv",
        metavar="NAME,...",
        help="policies (default: %(default)s)",
    )
    budgets.add_arguments(parser)
    parser.add_argument(
        "--mode",
        choices=("auto", "stream", "prefix"),
        default="auto",
        help="log-likelihoods: stream reads the whole text in blocks, prefix compresses the context before it scores "
        "the continuation; auto (the default) is stream with --prefill-block, prefix without",
    )
    parser.add_argument("--limit", type=float, metavar="N", help="questions of each task, or the share of them below 1")
    parser.add_argument("--num-fewshot", type=int, metavar="N", help="worked examples in each prompt")
    parser.add_argument("--batch-size", default="1", metavar="N", help="sequences in a batch, or auto (default: 1)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of examples and sampling (default: 0)")
    parser.add_argument("--device", metavar="NAME", help="default: the GPU if there is one")
    parser.add_argument(
        "--model-args",
        default="",
        metavar="K=V,...",
        help="more of what the harness's own model takes, as dtype=bfloat16",
    )
    parser.add_argument(
        "--metadata",
        nargs="+",
        default=[],
        metavar="K=V",
        help="what tasks can be told, as max_seq_lengths=[4096,8192] num_samples=20, or a JSON object",
    )
    parser.add_argument("--include-path", metavar="DIR", help="folder with task YAML files of your own")
    parser.add_argument(
        "--out", type=Path, default=Path("fastkv-eval"), metavar="DIR", help="where results go (default: fastkv-eval)"
    )


def run(options: argparse.Namespace, console: Console | None = None) -> list[Row]:
    """Evaluate every cache that has no file yet, print the table, and write results.json and results.png.

    Raises: FastKVError if the harness, a task, its dataset, the model, a policy, a budget or the directory cannot be
    used, or if the directory holds results of other settings.
    """
    _check_harness()
    from lm_eval.utils import simple_parse_args_string

    from .lm_eval_model import FastKVLM

    names, sizes = listed("policies", options.policies), listed("budgets", options.budgets)
    tasks = listed("tasks", options.tasks)
    caches = [(FULL, ""), *((name, budget) for name in names for budget in sizes)]
    for name in names:
        policy_of(name)
    for budget in sizes:
        budgets.wanted(budget, options)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FastKVError(f"cannot write to {options.out} ({error.strerror}); choose another directory") from error
    settings = settings_of(options)
    done = {cache: load(*cache, settings, options.out) for cache in caches}

    pretrained = str(demo.MODEL_DIR) if options.model == DEMO else options.model
    metadata = {"pretrained": pretrained, "seed": options.seed, **metadata_of(options.metadata)}
    manager = load_tasks(tasks, options.include_path, metadata)
    transformers.utils.logging.disable_progress_bar()
    try:
        lm = FastKVLM(
            pretrained,
            policy=FULL,
            batch_size=options.batch_size,
            device=options.device or ("cuda" if torch.cuda.is_available() else "cpu"),
            **simple_parse_args_string(options.model_args),
        )
    except (OSError, TypeError, ValueError) as error:
        raise FastKVError(
            f"cannot load a model from {options.model} ({first_line(error)}); name a folder or a model, and check "
            "--model-args"
        ) from error
    finally:
        transformers.utils.logging.enable_progress_bar()
    if console is None:
        console = Console(width=None if sys.stdout.isatty() else 100, quiet=lm.rank != 0)

    def use(policy: str, budget: str) -> Budget | None:
        """Give the model that cache. Returns: its budget, None for the stock cache."""
        if policy == FULL:
            lm.set_cache(FULL)
            return None
        share = budgets.given(budget, options, lm.patched)
        chosen = policy_of(policy) if options.model == DEMO else policy
        lm.set_cache(
            chosen,
            share,
            prefill_block=options.prefill_block,
            evict_every=options.evict_every,
            correction=options.correction,
            mode=options.mode,
        )
        return share

    lengths = metadata.get("max_seq_lengths", 0)
    longest = max(lengths) if isinstance(lengths, list) else lengths
    if longest > lm.max_length:
        raise FastKVError(
            f"texts must have at most {lm.max_length} tokens for {options.model}, got max_seq_lengths {longest}, and "
            "longer ones would lose their beginning; give smaller ones or another model"
        )
    for cache in caches:  # what cannot be used is refused before anything slow, bytes when the first token comes
        share = use(*cache)
        with torch.no_grad():
            first = lm.patched(torch.tensor([[lm.prefix_token_id]], device=lm.device), use_cache=True)
        if share is not None and share.bytes is not None:
            assert_equal_bytes({name_of(*cache): first.past_key_values}, share.bytes)
    rows = []
    for place, cache in enumerate(caches, 1):
        row = done[cache]
        if row is None:
            console.print(f"{place}/{len(caches)} {name_of(*cache)}", highlight=False)
            use(*cache)
            row = evaluate(lm, cache, tasks, manager, settings, options)
        else:
            console.print(f"{place}/{len(caches)} {name_of(*cache)} is in {options.out} already", highlight=False)
        if row is not None:
            rows.append(row)
    lm.set_cache(FULL)
    if lm.rank == 0:
        report(rows, settings, options, console)
    return rows


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What results must share to stand in one table."""
    names = ("model", "tasks", "equal", "mode", "prefill_block", "evict_every", "correction", "limit", "num_fewshot")
    shares = ("sinks", "recent", "layers", "heads", "metadata")
    return {name: getattr(options, name) for name in (*names, *shares, "batch_size", "seed", "model_args")}


def evaluate(
    lm: Any,
    cache: tuple[str, str],
    tasks: list[str],
    manager: Any,
    settings: dict[str, Any],
    options: argparse.Namespace,
) -> Row | None:
    """Run the tasks with the cache that the model has, and save the row; None in every process but the first."""
    import lm_eval

    started = time.perf_counter()
    results = lm_eval.simple_evaluate(
        lm,
        tasks=tasks,
        task_manager=manager,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        log_samples=False,
        random_seed=options.seed,
        numpy_random_seed=options.seed,
        torch_random_seed=options.seed,
        fewshot_random_seed=options.seed,
    )
    largest = lm.all_gather(torch.tensor([lm.cache_bytes], device=lm.device)).max()
    if results is None:
        return None
    row = Row(*cache, int(largest), time.perf_counter() - started, scores_of(results))
    kept = ("results", "groups", "configs", "versions", "n-shot", "n-samples", "higher_is_better", "config", "git_hash")
    save(row, settings, {name: results[name] for name in kept if name in results}, options.out)
    return row


def report(rows: list[Row], settings: dict[str, Any], options: argparse.Namespace, console: Console) -> None:
    """Print the table and write results.json and results.png."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "lm_eval")}
    record = {
        "versions": {"fastkv": __version__, **versions},
        "settings": settings,
        "rows": [asdict(row) for row in rows],
    }
    (options.out / "results.json").write_text(json.dumps(record, indent=2) + "\n")
    write_plot(rows, options.out / "results.png", f"{options.model}: score over cache size")
    console.print(table_of(rows))
    console.print(
        "KiB is the largest cache of one sequence, everything counted; share: of the full cache.\n"
        f"{options.out / 'results.png'} and {options.out / 'results.json'} written",
        highlight=False,
    )
