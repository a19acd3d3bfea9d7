"""How everything in perf/ is measured: jobs, each a row of a result file that a stopped run goes on with.

A job is a name, the case that it measures as data, a digest of the code that it runs, and a function. A row goes on
counting while its case, that code, and the machine and versions of its file are the same; anything else is measured
again. Standard library only, because peers run in environments of their own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

Row = dict[str, Any]

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "perf" / "results"
COMPLETE, FAILED, REFUSED, LEFT = 0, 1, 2, 3  # exit codes
SAME = ("device", "driver", "torch", "triton", "transformers", "dry_run")
LIMIT = 900  # seconds after which a process is given up


class Unmeasured(RuntimeError):
    """A case cannot be measured here; the message says why, and stands in its row."""


class OtherSettings(RuntimeError):
    """A file holds results that do not belong into one table with the new ones."""


@dataclass(frozen=True)
class Job:
    """One row.

    Attributes:
        name: unique within the file.  case: what is measured, as data.  run: measures it, or raises Unmeasured.
        source: digest of the code that it runs, see `digest`.
        optional: somebody else's code, who may be unable to run; of any other job that is a failure.
    """

    name: str
    case: Row
    run: Callable[[], Row]
    source: str = ""
    optional: bool = False


@dataclass
class Results:
    """A result file: the rows there are, and the jobs that there should be rows of.

    Attributes:
        environment: what it was measured on, see `perf.environment`.  settings: what all its rows have in common.
        rows: each has the name of its job as "id", its "case", "source", "seconds", and what was measured; or
            "skipped", the reason; or "passed", where it is a check.
    """

    path: Path
    environment: Row
    planned: Sequence[Job] = ()
    settings: Row = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    written: list[str] = field(default_factory=list)  # rows as they stand in the file; a row never changes

    @classmethod
    def open(
        cls,
        path: Path,
        environment: Row,
        planned: Sequence[Job],
        settings: Row | None = None,
        fresh: bool = False,
        retry: bool = False,
    ) -> Results:
        """Go on with the file, if there is one, without the rows that do not count any more.

        Args: fresh: start again; retry: also without the rows of what could not be measured.
        Raises: OtherSettings if the file has other settings.
        """
        results = cls(path, environment, planned, settings or {})
        path.with_suffix(".part").unlink(missing_ok=True)  # of a run that was killed while it wrote
        if not path.exists() or fresh:
            return results
        old = json.loads(path.read_text())
        if old.get("settings", results.settings) != results.settings:
            raise OtherSettings(
                f"{path} has results of other settings; measure all again with --fresh, or give another --out"
            )
        was = old.get("environment", {})
        wanted = {job.name: (plain(job.case), job.source) for job in planned}
        if all(was.get(key) == environment.get(key) for key in SAME):
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
        """Whether the job of that name has a row."""
        return any(row["id"] == name for row in self.rows)

    @property
    def complete(self) -> bool:
        """Whether every job has a row."""
        return {job.name for job in self.planned} <= {row["id"] for row in self.rows}

    @cached_property
    def planned_lines(self) -> list[str]:
        """The cases of the jobs, as they stand in the file."""
        return [line(job.case) for job in self.planned]

    def add(self, row: Row) -> None:
        """Add a row and write the file."""
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        """Replace the file in one step, so that a killed run leaves a readable one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        head = {"environment": self.environment, "settings": self.settings, "complete": self.complete}
        text = json.dumps(plain(head), indent=1)[:-2]
        self.written += map(line, self.rows[len(self.written) :])
        for name, lines in (("planned", self.planned_lines), ("rows", self.written)):
            text += f',\n "{name}": [\n' + ",\n".join(lines) + "\n ]"
        part = self.path.with_suffix(".part")
        try:
            part.write_text(text + "\n}\n")
            part.replace(self.path)
        finally:
            part.unlink(missing_ok=True)


def line(item: Row) -> str:
    """An item as it stands in the file. JSON has no NaN or infinity."""
    return json.dumps(plain(item), allow_nan=False)


def plain(value: Any) -> Any:
    """The value as it comes back from JSON, non-finite numbers as text."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Deadline:
    """When to start nothing new."""

    def __init__(self, minutes: float, spare: float = 0.0) -> None:
        """spare: seconds that must be left to start a case."""
        self.begin = time.monotonic()
        self.end = self.begin + 60 * minutes - spare

    @property
    def elapsed(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self.begin

    @property
    def left(self) -> float:
        """Seconds until it is over."""
        return self.end - time.monotonic()

    @property
    def over(self) -> bool:
        """Whether it is too late for another case."""
        return time.monotonic() >= self.end


def measure(jobs: Iterable[Job], results: Results, deadline: Deadline) -> int:
    """Run the jobs that have no row, one after the other. Returns: COMPLETE, FAILED or LEFT, as of all planned."""
    waiting = [job for job in jobs if not results.has(job.name)]
    with progress(results.path.stem, len(waiting)) as tell:
        for job in waiting:
            if deadline.over:
                break
            tell(job.name)
            results.add(row_of(job))
    return concluded(results)


def row_of(job: Job) -> Row:
    """Run a job. Returns: its row, with the reason if it could not be measured."""
    row: Row = {"id": job.name, "case": plain(job.case), "source": job.source}
    started = time.perf_counter()
    try:
        row |= job.run()
    except Unmeasured as reason:
        row["skipped"] = str(reason)
    return row | {"seconds": round(time.perf_counter() - started, 2)}


def concluded(results: Results) -> int:
    """Say what failed. Returns: COMPLETE, FAILED or LEFT, as of all planned."""
    if results.complete:
        results.write()  # what was planned may have become less; rows that lack their successors stay in the file
    peers = {job.name for job in results.planned if job.optional}
    broken = [row for row in results.rows if "skipped" in row and row["id"] not in peers]
    red = broken + [row for row in results.rows if row.get("passed") is False]
    for row in red:
        print(f"{row['id']}: {row.get('skipped') or 'the check failed'}")
    return FAILED if red else COMPLETE if results.complete else LEFT


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal, else a line for each job. Gives what to call with the name of the job that begins."""
    if not sys.stdout.isatty():
        numbers = iter(range(1, total + 1))
        yield lambda name: print(f"{title} {next(numbers)}/{total}: {name}", flush=True)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as bar:
        task, begun = bar.add_task(title, total=total), iter(range(total))
        yield lambda name: bar.update(task, completed=next(begun), description=f"{title}: {name}")
        bar.update(task, completed=next(begun, total))


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


def command(
    prog: str, text: str | None, parts: Sequence[str], minutes: float, out: Path = RESULTS
) -> argparse.ArgumentParser:
    """The options that all measurements share. text: the docstring, whose example belongs to --help."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {prog}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=parts, metavar="PART", help="some of the parts; see --list")
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains this")
    add_options(parser, minutes, out)
    return parser


def add_options(parser: argparse.ArgumentParser, minutes: float, out: Path = RESULTS) -> None:
    """How long to measure, and which files to go on with."""
    where = out.relative_to(ROOT)
    parser.add_argument("--minutes", type=float, default=minutes, help="start nothing after so many (%(default)s)")
    parser.add_argument("--fresh", action="store_true", help="do not go on with earlier files")
    parser.add_argument("--retry-skipped", action="store_true", help="try again what could not be measured before")
    parser.add_argument("--list", action="store_true", help="print parts and cases, measure nothing")
    parser.add_argument("--out", type=Path, help=f"folder of the results (default {where}; none in a dry run)")
    parser.add_argument("--commit", help="the commit to name where there is no git")


def folder(options: argparse.Namespace, default: Path = RESULTS) -> Path:
    """Where results go. Raises: SystemExit for a dry run into the committed results, because it measures nothing."""
    dry = getattr(options, "dry_run", False)
    out = options.out or (Path(tempfile.mkdtemp(prefix="fastkv-dry-run-")) if dry else default)
    if dry and out.resolve().is_relative_to(RESULTS):
        raise SystemExit("a dry run measures nothing and does not write into perf/results")
    return out


def listed(parts: dict[str, list[str]]) -> int:
    """Print parts and the names of their cases. Returns: COMPLETE."""
    for part, names in parts.items():
        print(part, *(f"\n  {name}" for name in names))
    return COMPLETE


def worst(codes: Iterable[int]) -> int:
    """One exit code for several parts."""
    codes = list(codes)
    return FAILED if FAILED in codes else max(codes, default=COMPLETE)
