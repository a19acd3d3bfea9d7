"""Try every type of model that the installed transformers has, and write down which work.

    python -m tests.families                        all of them: a line each, and a table at the end
    python -m tests.families --types llama,gemma3   only these
    python -m tests.families --missing --write      those that were not tried before, then docs/models.md and the list

Each type runs in a process of its own. What is found is kept in build/families.jsonl, which --write reads. Exits with 1
if a patched model is wrong anywhere.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import time
import warnings
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import transformers

from . import lists, tiny
from .checks import CHECKS
from .examine import FAILS, Result, examine

RESULTS = lists.ROOT / "build" / "families.jsonl"
LIMIT = 300  # seconds for one type


def arguments(given=None):
    parser = argparse.ArgumentParser(
        prog="python -m tests.families", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", metavar="A,B", help="model types, of a variant as type:variant; all if left out")
    parser.add_argument("--checks", metavar="A,B", help=f"only some of {', '.join(CHECKS)}")
    parser.add_argument("--missing", action="store_true", help="only types that were not tried before")
    parser.add_argument("--write", action="store_true", help="write docs/models.md and families.json")
    parser.add_argument("--list", action="store_true", help="print the names of all types and leave")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="where results are kept")
    return parser.parse_args(given)


def child(pipe, name, checks):
    """Examine one kind and send what came of it."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    pipe.send(asdict(examine(name, checks)))


def apart(name, checks, limit=LIMIT):
    """The result of a kind, examined in a process of its own."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(there, name, checks))
    process.start()
    there.close()
    try:
        if here.poll(limit):
            return Result(**here.recv())
        why = f"did not end within {limit} s"
    except EOFError:
        why = "the process ended without a result"
    finally:
        process.kill()
        process.join()
    return Result(name, FAILS, why)


def load(file):
    """Results by name; the last line of a name counts."""
    lines = file.read_text().splitlines() if file.is_file() else []
    return {found["name"]: Result(**found) for found in map(json.loads, lines)}


def keep(file, results):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(asdict(result)) + "\n" for _, result in sorted(results.items())))


def main(given=None):
    options = arguments(given)
    if options.list:
        print("\n".join(tiny.kinds()))
        return 0
    known = load(options.results)
    names = options.types.split(",") if options.types else tiny.kinds()
    names = [name for name in names if not (options.missing and name in known)]
    checks = tuple(options.checks.split(",")) if options.checks else tuple(CHECKS)
    importlib.import_module("fastkv.kernels.operations")  # once for all children
    found = {}
    for at, name in enumerate(names, 1):
        start = time.perf_counter()
        found[name] = apart(name, checks)
        print(f"{at:>3}/{len(names)} {time.perf_counter() - start:4.0f} s  {found[name]}", flush=True)
        keep(options.results, known | found)
    for status, number in Counter(result.status for result in found.values()).items():
        print(f"{number:>4} {status}")
    if options.write:
        lists.write(load(options.results))
    return int(any(result.status == FAILS for result in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
