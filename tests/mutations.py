"""Seeded bugs, and whether the tests that should notice them do: `python -m tests.mutations`.

Each bug of `mutations.txt` is one replacement in a temporary copy of the package; the working tree is never touched.
The named tests first run on the unchanged copy, because a test that fails anyway notices nothing. They draw no more
examples than `make test` does, and none of them is slow: what is caught here is caught every day. Exits with 1 if a bug
survives or the text that it replaces is gone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COPIED = ("fastkv", "tests", "perf", "tools", "docs", "pyproject.toml", "README.md")
SECONDS = 600
OPTIONS = ("-x", "-q", "-o", "timeout=0", "--no-header", "-m", "not slow", "--hypothesis-profile=mutations")

# Every run is forked from a process that has imported the slow packages, none of which the bugs are in.
PROCESSES = multiprocessing.get_context("forkserver")
PRELOADED = ["torch", "torch._dynamo", "hypothesis.stateful", "pytest", "transformers", "transformers.modeling_utils"]


@dataclass(frozen=True)
class Mutation:
    """A bug: `original`, which occurs once in fastkv/`file`, becomes `replacement`; `tests` should fail."""

    what: str
    file: str
    original: str
    replacement: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> str:
        """Change the file under `root`; returns its text before. ValueError unless the original is there once."""
        path = root / "fastkv" / self.file
        text = path.read_text()
        if text.count(self.original) != 1:
            raise ValueError(f"fastkv/{self.file} has {text.count(self.original)} times {self.original!r}")
        path.write_text(text.replace(self.original, self.replacement))
        return text


def listed() -> list[Mutation]:
    """The bugs of `mutations.txt`, which says how it is written."""
    found, file, tests = [], "", ()
    for line in filter(None, Path(__file__).with_suffix(".txt").read_text().splitlines()):
        if line.startswith("["):
            file, _, names = line[1:].partition("] ")
            tests = tuple(f"tests/test_{name}" for name in names.split(", "))
        elif line.startswith("-"):
            found[-1]["original"].append(line[2:])
        elif line.startswith("+"):
            found[-1]["replacement"].append(line[2:])
        elif not line.startswith("#"):
            found.append({"what": line, "file": file, "original": [], "replacement": [], "tests": tests})
    return [Mutation(**{key: "\n".join(v) if isinstance(v, list) else v for key, v in one.items()}) for one in found]


MUTATIONS = listed()


def run_pytest(root: Path, tests: Sequence[str], log: Path) -> None:
    """In a process of its own, which has imported everything but the package and its tests: run tests under `root`."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("fastkv", "tests")]:
        del sys.modules[name]
    os.chdir(root)
    os.environ["PYTHONPATH"] = str(root)
    sys.path.insert(0, str(root))
    sys.dont_write_bytecode = True
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sys.exit(int(pytest.main([*OPTIONS, *tests])))


def run_tests(root: Path, tests: Sequence[str], seconds: float = SECONDS) -> tuple[str, str]:
    """("passed" | "failed" | "error", last words) of tests run on the package under `root`."""
    log = root / "log.txt"
    process = PROCESSES.Process(target=run_pytest, args=(root, tests, log))
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
        return "error", f"still running after {seconds} s"
    text = log.read_text()
    words = [line for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if process.exitcode == 0:
        return "passed", ""
    return "failed" if process.exitcode == 1 else "error", words[0].split(" - ")[0] if words else text.strip()[-500:]


def copies(number: int, directory: Path) -> queue.Queue[Path]:
    """As many copies of what the tests need."""
    made: queue.Queue[Path] = queue.Queue()
    for index in range(number):
        root = directory / str(index)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
            else:
                shutil.copy(ROOT / name, root / name)
        made.put(root)
    return made


def check(mutation: Mutation, free: queue.Queue[Path]) -> tuple[str, str, float]:
    """What became of a bug: "caught", "SURVIVED" or "ERROR", by which test, after how many seconds."""
    root, started = free.get(), time.monotonic()
    try:
        before = mutation.apply(root)
        try:
            outcome, words = run_tests(root, mutation.tests)
        finally:
            (root / "fastkv" / mutation.file).write_text(before)
    except ValueError as error:
        outcome, words = "error", str(error)
    finally:
        free.put(root)
    verdict = {"failed": "caught", "passed": "SURVIVED"}.get(outcome, "ERROR")
    words = words.removeprefix("FAILED tests/") if verdict == "caught" else words.replace("\n", " ")
    return verdict, words, time.monotonic() - started


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=2, help="bugs tried at once (default 2)")
    parser.add_argument("--only", default="", help="bugs whose file or description contains this text")
    options = parser.parse_args(arguments)
    chosen = [one for one in MUTATIONS if options.only in f"{one.file} {one.what}"]
    if not chosen:
        raise SystemExit(f"no bug's file or description contains {options.only!r}; leave --only away to try all")
    os.environ["TRITON_INTERPRET"] = "1"  # as in conftest, which comes too late where triton is imported already
    PROCESSES.set_forkserver_preload(PRELOADED)

    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(options.jobs) as pool:
        free = copies(options.jobs, Path(directory))
        tests = sorted({test for one in chosen for test in one.tests})
        root = free.get()
        unchanged = pool.submit(run_tests, root, tests, 10 * SECONDS)
        unchanged.add_done_callback(lambda _: free.put(root))
        caught = 0
        for one, (verdict, words, seconds) in zip(chosen, pool.map(lambda one: check(one, free), chosen)):
            caught += verdict == "caught"
            print(f"{verdict:8}  {seconds:4.0f} s  {one.file:28}  {one.what:62}  {words}", flush=True)
        outcome, words = unchanged.result()
    sound = "pass" if outcome == "passed" else f"do not pass: {words}"
    print(f"{caught} of {len(chosen)} bugs caught; without a bug the tests {sound}")
    return int(caught < len(chosen) or outcome != "passed")


if __name__ == "__main__":
    sys.exit(main())
