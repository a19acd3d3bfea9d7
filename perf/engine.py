"""How speed and GPUs are measured: jobs, each a row of a result file that a stopped run goes on with.

A job is a name, the case that it measures as data, a digest of the code that it runs, and a function. A row goes on
counting while its case, that code, and the machine and versions of its file are the same; anything else is measured
again. Standard library only, because peers run in environments of their own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

Row = dict[str, Any]

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "perf" / "results"
COMPLETE, FAILED, LEFT = 0, 1, 3  # exit codes
SAME = ("device", "driver", "torch", "triton", "transformers", "dry_run")
LIMIT = 900  # seconds after which a process is given up


class Unmeasured(RuntimeError):
    """A case cannot be measured here; the message says why, and stands in its row."""


@dataclass(frozen=True)
class Job:
    """One row.

    Attributes:
        name: unique within the file.  case: what is measured, as data.  run: measures it, or raises Unmeasured.
        source: digest of the code that it runs, see `digest`.
        optional: somebody else's code, who may be unable to run; of any other job that is a failure.
        seconds: predicted.  needs: checks, by name, that have to have passed.  file: that its row stands in.
    """

    name: str
    case: Row
    run: Callable[[], Row]
    source: str = ""
    optional: bool = False
    seconds: float = 0.0
    needs: tuple[str, ...] = ()
    file: str = ""


@dataclass
class Results:
    """A result file: the rows there are, and the jobs that there should be rows of.

    Attributes:
        environment: what it was measured on, see `perf.environment`.
        rows: each has the name of its job as "id", its "case", "source", "seconds", and what was measured; or
            "skipped", the reason; or "passed", where it is a check.
    """

    path: Path
    environment: Row
    planned: Sequence[Job] = ()
    rows: list[Row] = field(default_factory=list)

    @classmethod
    def open(
        cls, path: Path, environment: Row, planned: Sequence[Job], fresh: bool = False, retry: bool = False
    ) -> Results:
        """Go on with the file, if there is one, without the rows that do not count any more.

        Args: fresh: start again; retry: also without the rows of what could not be measured.
        """
        results = cls(path, environment, planned)
        if not path.exists() or fresh:
            return results
        old = json.loads(path.read_text())
        wanted = {job.name: (plain(job.case), job.source) for job in planned}
        same = (*SAME, "cpu", "threads") if environment.get("device") == "cpu" else SAME
        if all(old["environment"].get(key) == environment.get(key) for key in same):
            results.rows = [
                row
                for row in old["rows"]
                if (row.get("case"), row.get("source")) == wanted.get(row.get("id"))
                and not (retry and "skipped" in row)
            ]
        stale = len(old["rows"]) - len(results.rows)
        if stale:
            print(f"{path.name}: {stale} of {len(old['rows'])} rows are of other code, cases or machines: once more")
        return results

    def has(self, name: str) -> bool:
        return any(row["id"] == name for row in self.rows)

    @property
    def complete(self) -> bool:
        return {job.name for job in self.planned} <= {row["id"] for row in self.rows}

    def write(self) -> None:
        """Replace the file in one step, so that a killed run leaves a readable one, with a line for each row."""
        head = json.dumps({"environment": self.environment, "complete": self.complete}, indent=1)[:-2]
        rows = ",\n".join(json.dumps(row, allow_nan=False) for row in self.rows)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(f'{head},\n "rows": [\n{rows}\n ]\n}}\n')
        part.replace(self.path)

    def concluded(self) -> int:
        """Say what failed. Returns: COMPLETE, FAILED or LEFT, as of all planned."""
        if self.complete:
            self.write()  # what was planned may have become less; rows that lack their successors stay in the file
        peers = {job.name for job in self.planned if job.optional}
        broken = [row for row in self.rows if "skipped" in row and row["id"] not in peers]
        red = broken + [row for row in self.rows if row.get("passed") is False]
        for row in red:
            print(f"{row['id']}: {row.get('skipped') or 'the check failed'}")
        return FAILED if red else COMPLETE if self.complete else LEFT


def plain(value: Any) -> Any:
    """The value as it comes back from JSON."""
    return json.loads(json.dumps(value, allow_nan=False))


def measure(jobs: Sequence[Job], files: Mapping[str, Results], deadline: float) -> int:
    """Run the jobs that have no row yet, in order; what is predicted to outlast the deadline is left.

    Args: files: by the jobs' `file`.  deadline: as `time.monotonic` counts.
    Returns: COMPLETE, FAILED or LEFT, as of all planned; FAILED if checks are red that some job needs.
    """
    waiting = [job for job in jobs if not files[job.file].has(job.name)]
    blocked: dict[str, list[str]] = {}
    for number, job in enumerate(waiting, 1):
        green = {row["id"] for results in files.values() for row in results.rows if row.get("passed")}
        red = ", ".join(name for name in job.needs if name not in green)
        if red:
            blocked.setdefault(red, []).append(job.name)
        elif time.monotonic() + job.seconds < deadline:
            print(f"{number}/{len(waiting)} {job.name}", end=" ", flush=True)
            row = row_of(job)
            files[job.file].rows.append(row)
            files[job.file].write()
            state = row.get("skipped") or ("RED" if row.get("passed") is False else "")
            print(f"{row['seconds']:.1f} s {state}".rstrip(), flush=True)
    code = worst(results.concluded() for results in files.values())
    for red, names in blocked.items():
        print(f"{len(names)} not measured, because {red} is not green: {names[0]} ...")
    return FAILED if blocked else code


def row_of(job: Job) -> Row:
    """Run a job. Returns: its row, with the reason if it could not be measured."""
    row: Row = {"id": job.name, "case": plain(job.case), "source": job.source}
    started = time.perf_counter()
    try:
        row |= job.run()
    except Unmeasured as reason:
        row["skipped"] = str(reason)
    return row | {"seconds": round(time.perf_counter() - started, 2)}


def in_process(module: str, settings: Row, python: str = sys.executable) -> Row:
    """The row that `python -m module SETTINGS` prints as its last line, in a fresh process of that interpreter.

    Returns: {"out_of_memory": True} for a process that was killed.  Raises: Unmeasured with its last words.
    """
    command = [python, "-m", module, json.dumps(settings)]
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT)
    except subprocess.TimeoutExpired as late:
        raise Unmeasured(f"not finished after {LIMIT} seconds") from late
    if result.returncode == -signal.SIGKILL:
        return {"out_of_memory": True}
    if result.returncode:
        raise Unmeasured((result.stderr.strip() or "no message").splitlines()[-1][:200])
    return json.loads(result.stdout.splitlines()[-1])


def digest(*places: str, texts: Sequence[str] = (), without: Sequence[str] = ()) -> str:
    """First 12 hexadecimal digits of the SHA-256 of all source files at these places, and of texts.

    Args: places: files and folders, relative to the repository.  without: places that do not count.
    """
    found = hashlib.sha256()
    roots, left_out = [ROOT / place for place in places], [ROOT / place for place in without]
    files = {file for root in roots for file in (root.rglob("*") if root.is_dir() else [root])}
    for path in sorted(files):
        if path.suffix in (".py", ".cpp", ".hpp") and not any(path.is_relative_to(place) for place in left_out):
            found.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    for text in texts:
        found.update(text.encode())
    return found.hexdigest()[:12]


@cache
def source(*places: str, texts: tuple[str, ...] = ()) -> str:
    """Digest of the code that a case runs: these files and folders, texts, and what is measured of the library."""
    return digest("fastkv", *places, texts=texts, without=("fastkv/lab", "fastkv/integrations/vllm"))


def parser_of(prog: str, text: str | None) -> argparse.ArgumentParser:
    """Of the options of `python -m prog`. text: the docstring, whose example belongs to --help."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=f"python -m {prog}", description=text, formatter_class=form)


def command(prog: str, text: str | None, minutes: float) -> argparse.ArgumentParser:
    """The options that all measurements share."""
    parser = parser_of(prog, text)
    parser.add_argument("--minutes", type=float, default=minutes, help="start nothing after so many (%(default)s)")
    parser.add_argument("--fresh", action="store_true", help="do not go on with earlier files")
    parser.add_argument("--retry-skipped", action="store_true", help="try again what could not be measured before")
    parser.add_argument("--list", action="store_true", help="print parts and cases, measure nothing")
    parser.add_argument("--dry-run", action="store_true", help="toys and stand-ins on a CPU; claims no timings")
    parser.add_argument("--out", type=Path, help="folder of the results (default perf/results; none in a dry run)")
    parser.add_argument("--commit", help="the commit to name where there is no git")
    return parser


def folder(options: argparse.Namespace) -> Path:
    """Where results go. Raises: SystemExit for a dry run into the committed results, because it measures nothing."""
    out = options.out or (Path(tempfile.mkdtemp(prefix="fastkv-dry-run-")) if options.dry_run else RESULTS)
    if options.dry_run and out.resolve().is_relative_to(RESULTS):
        raise SystemExit("a dry run measures nothing and does not write into perf/results")
    return out


def listed(parts: Mapping[str, Iterable[str]]) -> int:
    """Print parts and the names of their cases. Returns: COMPLETE."""
    for part, names in parts.items():
        print(part, *(f"\n  {name}" for name in names))
    return COMPLETE


def worst(codes: Iterable[int]) -> int:
    """One exit code for several parts."""
    codes = list(codes)
    return FAILED if FAILED in codes else max(codes, default=COMPLETE)
