"""`fastkv demo`: the bundled model answers questions over long texts with the full cache and with compressed ones."""

from __future__ import annotations

import argparse
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from .. import Budget, FastKVError, policies
from ..demo import MODEL_DIR, policy_of
from ..demo.measure import make_questions
from ..demo.tasks import TASKS, max_questions
from . import common, pictures
from .comparison import Row, check, compare, explain, full_bytes, size, table_of, tokens_of
from .story import memories, tell, watch

PREFILLS = ("whole", "context", "blocks")
OPTIONS: dict[str, tuple[Any, str, str]] = {  # default, help and what it is called there
    "context": (2048, "tokens of a prompt and its answer", "N"),
    "budgets": (
        (Fraction(1, 16), Fraction(1, 8), Fraction(1, 4)),
        "sizes of the cache: shares of the full one, or tokens per KV head",
        "N",
    ),
    "policies": (
        ("fastkv", "snapkv", "h2o", "streaming", "keydiff", "manifold", "momentkv"),
        "policies to compare",
        "NAME",
    ),
    "tasks": (TASKS, "kinds of questions", "NAME"),
    "samples": (2, "texts for each task", "N"),
    "questions": (4, "questions to each text, fewer if it is too short for so many", "N"),
    "seed": (0, "of the first text; the others follow it", "N"),
    "prefill": (("context",), "text before the question (context), prompt at once (whole), or blocks", "MODE"),
    "blocks": (256, "tokens of a block when the prompt is read in blocks", "N"),
    "out": (Path("fastkv-demo"), "where the files go", "DIR"),
}
FIXED = {"sinks": 4, "recent": 16}  # tokens that are never evicted: the first and the last
ALL = {
    "context": 1024,
    "budgets": (128, 256),
    "policies": tuple(policies.names()),
    "samples": 6,
    "questions": 1,
    "prefill": ("whole", "blocks"),
}
QUICK = {"context": 512, "budgets": (Fraction(1, 8), Fraction(1, 4)), "policies": ("fastkv", "streaming"), "samples": 1}
QUICK_ALL = {"context": 512, "budgets": (64, 128), "policies": ("momentkv", "streaming"), "samples": 2}

AFTER = (
    "\nPolicies that look at the last queries, as snapkv and momentkv do, answer more when the question is in the "
    "prompt: --prefill whole. Every policy, with more texts: fastkv demo --all.\n"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastkv demo`; those that are not given are of `OPTIONS`, `ALL` and `QUICK`."""
    for name, described in OPTIONS.items():
        added = common.option(parser, f"--{name}", *described)
        added.default = argparse.SUPPRESS
        if name == "budgets":
            added.type = common.listed(size)
    parser.add_argument("--equal", choices=("bytes", "tokens"), default="bytes", help=common.EQUAL)
    common.add_slots(parser)
    parser.add_argument(
        "--all",
        action="store_true",
        help="a table of every policy instead, which takes longer: 6 texts of 1024 tokens for each task, one question "
        "each, budgets of 128 and 256 tokens, prompts read whole and in blocks",
    )
    parser.add_argument("--quick", action="store_true", help="a shorter run: two policies, two budgets, short texts")


def settings_of(options: argparse.Namespace) -> argparse.Namespace:
    """The options with all defaults. Raises FastKVError if something cannot be compared."""
    defaults = {name: default for name, (default, _, _) in OPTIONS.items()}
    preset = {**(ALL if options.all else {}), **((QUICK_ALL if options.all else QUICK) if options.quick else {})}
    given = {name: value for name, value in vars(options).items() if name in (*defaults, "equal", "slots")}
    chosen = argparse.Namespace(**{**defaults, **FIXED, **preset, **given})
    for name, least in (("context", common.SHORTEST), ("samples", 1), ("questions", 1), ("blocks", 1)):
        if getattr(chosen, name) < least:
            raise FastKVError(f"{name} must be at least {least}, got {getattr(chosen, name)}")
    for name, known in (("budgets", None), ("policies", None), ("tasks", TASKS), ("prefill", PREFILLS)):
        common.check_some(name, getattr(chosen, name), known)
    for policy in chosen.policies:
        policy_of(policy)
    for wanted in chosen.budgets:
        Budget(tokens=tokens_of(wanted, chosen.context), sinks=chosen.sinks, recent=chosen.recent)
    chosen.questions = min(chosen.questions, *(max_questions(task, chosen.context) for task in chosen.tasks))
    return chosen


def title_of(settings: argparse.Namespace, *, short: bool) -> str:
    """What the picture is about, and whether `--all` asks more."""
    texts = len(settings.tasks) * settings.samples
    more = f"; --all takes {ALL['samples']}" if short else ""
    return (
        f"{texts * settings.questions} questions, texts of {settings.context} tokens: {texts} "
        f"({', '.join(settings.tasks)}, of each {settings.samples}{more})"
    )


def run(options: argparse.Namespace) -> list[Row]:
    """Ask the model with every cache, print the answers, and write demo.json, demo.png and demo-memory.png."""
    started, console, settings = time.perf_counter(), common.console_of(), settings_of(options)
    if not (MODEL_DIR / "config.json").is_file():
        raise FastKVError(f"the bundled model is missing, {MODEL_DIR} has no config.json; install fastkv again")
    model, tokenizer = common.load(common.DEMO, device="cpu")
    common.check_length("context", settings.context, model, "the bundled model")
    texts = settings.context, settings.samples, settings.seed, settings.questions
    asked = [make_questions(tokenizer, task, *texts) for task in settings.tasks]
    whole = full_bytes(model, asked)
    check(model, settings, whole)
    common.make_folder(settings.out)
    caches, held = compare(model, asked, settings, whole, console), []
    files = [settings.out / "demo.png", settings.out / "demo.json"]
    if options.all:
        rows = list(caches)
        console.print(table_of(rows, settings.tasks, roomy=console.width >= 112))
        console.print(explain(settings))
    else:
        tell(model, tokenizer, settings, whole, console)
        rows = list(watch(caches, settings, console))
        held = memories(model, tokenizer, settings, whole)
        files.append(settings.out / "demo-memory.png")
        pictures.write_memory(held, files[-1])
        console.print(AFTER)
    pictures.write_answers(rows, files[0], title_of(settings, short=not options.all))
    record = {"versions": common.versions(), "threads": torch.get_num_threads(), "settings": vars(settings)}
    common.write_json(files[1], {**record, "memory": held, "rows": rows})
    seconds = f"{time.perf_counter() - started:.0f} s in all"
    console.print(f"{', '.join(map(str, files))} written; {seconds}")
    return rows
