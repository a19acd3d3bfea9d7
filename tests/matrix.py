"""Run the integration tests on several versions of transformers and the kernels on several versions of triton.

    python -m tests.matrix                                     all of it: each version goes to build/matrix with pip
    python -m tests.matrix --only transformers-5.17.0          one of them; what others found before stays recorded
    python -m tests.matrix --with transformers-5.17.0=DIR      DIR has that version already (pip install --target DIR)
    python -m tests.matrix --here                              the tests of every day, with what this environment has

A version lies in a directory of its own that is put before the environment's packages; nothing is installed into the
environment. Writes perf/results/versions/versions.json and exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

from perf.engine import digest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "perf" / "results" / "versions"
BUILD = ROOT / "build" / "matrix"

INTEGRATION = (
    *("versions", "exact", "generate", "flash_base", "refusals", "deferred", "compile", "saved", "batches"),
    *("interruption", "devices", "families", "architectures", "selfcheck", "multimodal", "single"),
)
INTERPRETED = ("ops", "kernels_decode", "kernels_evict", "kernels_select")
COMPILED = ("90",)  # for which chips a variant of every kernel is compiled; all variants: perf/results/aot_*.txt


@dataclass(frozen=True)
class Target:
    """One version of one package, and what runs on it.

    Attributes:
        requirement: for pip; "newest" is whatever it finds.  tests: files tests/test_*.py.  chips: for which one
            variant of every kernel is compiled ahead of time.
    """

    name: str
    requirement: str
    tests: tuple[str, ...] = ()
    chips: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        return self.name.split("-")[0]


TARGETS = (
    Target("transformers-5.17.0", "transformers==5.17.0", INTEGRATION),
    Target("transformers-newest", "transformers", INTEGRATION),
    Target("triton-3.6.0", "triton==3.6.0", chips=COMPILED),
    Target("triton-3.7.1", "triton==3.7.1", INTERPRETED, COMPILED),
    Target("triton-3.9.0", "triton==3.9.0", INTERPRETED, COMPILED),
)


def directory(target: Target, given: dict[str, Path]) -> Path:
    """Where the version lies; installed there first unless it was given."""
    if target.name in given:
        return given[target.name]
    place = BUILD / target.name
    if not place.is_dir():
        # The environment's numpy, because other packages are compiled against it.
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(place), target.requirement]
        subprocess.run([*command, f"numpy=={version('numpy')}"] if target.package != "triton" else command, check=True)
    return place


def environment(place: Path, interpret: bool) -> dict[str, str]:
    """This process's, with the version in front."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": f"{place}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    return {**env, "TRITON_INTERPRET": "1"} if interpret else env


def test(place: Path, file: str) -> tuple[int, list[str]]:
    """How many tests of a file passed, and which did not, and why."""
    return tested([f"tests/test_{file}.py"], environment(place, True))


def tested(arguments: list[str], env: dict[str, str] | None = None) -> tuple[int, list[str]]:
    """The same of all tests that pytest chooses by these arguments."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        if not report.is_file():
            return 0, [f"pytest died: {(done.stderr or done.stdout)[-300:]}"]
        cases = list(ET.parse(report).iter("testcase"))
    failures = []
    for case in cases:
        for problem in (*case.findall("failure"), *case.findall("error"), *case.findall("skipped")):
            why = (problem.get("message") or problem.tag).strip().splitlines()[0][:300]
            failures.append(f"{case.get('name')}: {why}")
    return len(cases) - len(failures), failures


def compile_ahead(place: Path, chip: str) -> tuple[int, list[str]]:
    """How many variants are within limits, and which are not: one variant of every kernel, for one chip."""
    command = [sys.executable, "-m", "perf.aot", "--sample", "--arch", chip]
    done = subprocess.run(command, cwd=ROOT, env=environment(place, False), capture_output=True, text=True)
    lines = done.stdout.splitlines()
    bad = [" ".join(line.split())[:300] for line in lines if "FAIL" in line]
    if done.returncode and not bad:
        bad = [f"{chip}: {(done.stderr or done.stdout)[-300:]}"]
    return sum(line.endswith(" ok") for line in lines), bad


def outcomes(target: Target, place: Path, only: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Of everything that the target asks for, one after the other: what was really there, which tests or variants of
    kernels passed, which failed and why, and of which fastkv."""
    (there,) = (one.version for one in distributions(path=[str(place)]) if one.metadata["Name"] == target.package)
    jobs = [(test, file, file) for file in target.tests]
    jobs += [(compile_ahead, chip, f"compile for {chip}") for chip in target.chips]
    for job, what, name in jobs:
        if not only or what in only:
            yield outcome({"target": target.name, "version": there, "what": name}, partial(job, place, what))


def outcome(named: dict[str, str], job: Callable[[], tuple[int, list[str]]]) -> dict[str, Any]:
    """What a job found."""
    start = time.monotonic()
    passed, failures = job()
    seconds = round(time.monotonic() - start, 1)
    words = f"{named['target']:22s} {named['what']:26s}"
    print(f"{words} {passed:4d} passed {len(failures):3d} failed {seconds:6.1f} s", flush=True)
    print(*(f"    {line}\n" for line in failures), sep="", end="", flush=True)
    found = {"passed": passed, "failed": len(failures), "seconds": seconds, "failures": failures}
    return {**named, **found, "source": digest("fastkv")}


def record(new: dict[str, Any]) -> None:
    """Put an outcome in the place of an old one of the same file and version."""
    path = RESULTS / "versions.json"
    old = json.loads(path.read_text()) if path.is_file() else []
    both = {(one["target"], one["what"]): one for one in [*old, new]}
    path.write_text(json.dumps([both[key] for key in sorted(both)], indent=1) + "\n")


def main() -> int:
    """Returns: 1 if anything that ran failed, else 0."""
    names = [target.name for target in TARGETS]
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=names, default=[], help="this version; can be repeated")
    parser.add_argument("--with", action="append", default=[], dest="given", metavar="VERSION=DIR", help="use DIR")
    parser.add_argument("--here", action="store_true", help="the tests of every day with the versions that run this")
    parser.add_argument("--files", default="", help="only these test files or chips, with commas between")
    options = parser.parse_args()
    given = {name: Path(place).resolve() for name, place in (one.split("=", 1) for one in options.given)}
    if set(given) - set(names):
        raise SystemExit(f"--with knows {', '.join(names)}; got {', '.join(sorted(set(given) - set(names)))}")
    only = tuple(filter(None, options.files.split(",")))
    failed = 0
    if options.here:
        versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "triton", "transformers"))
        named = {"target": "make test", "version": versions, "what": versions}
        record(one := outcome(named, partial(tested, ["-n", "2", "-m", "not slow and not real and not ptx"])))
        return int(one["failed"] > 0)
    for target in TARGETS:
        if not options.only or target.name in options.only:
            for one in outcomes(target, directory(target, given), only):
                failed += one["failed"]
                record(one)  # at once, because a run takes long and may be stopped
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
