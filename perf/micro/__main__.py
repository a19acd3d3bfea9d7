"""Every operator and whole layers under pytest-benchmark, and the committed report of it.

    python -m perf.micro                       # all of them, into perf/results/micro.json and micro.md; minutes
    python -m perf.micro --only "decode_step"  # some, as pytest's -k selects them; printed, nothing is written
    python -m perf.micro --report              # micro.md once more, from micro.json

The machine should have nothing else to do: its load before and after stands in the file. Exit code: that of pytest.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..engine import RESULTS, ROOT, parser_of
from ..tables import filled

NAME = "micro.json"


def trimmed(report: dict[str, Any]) -> dict[str, Any]:
    """Of pytest-benchmark's report what a reader asks for: medians, quartiles, rounds, machine, versions, commit."""
    rows = []
    for one in report["benchmarks"]:
        stats = one["stats"]
        times = {f"{name}_us": round(1e6 * stats[name], 2) for name in ("median", "q1", "q3")}
        case = one["name"].partition("[")[2].removesuffix("]")
        named = {"id": one["name"], "test": one["name"].partition("[")[0], "of": case}
        rows.append({**named, **times, "rounds": stats["rounds"]})
    facts = report["machine_info"]["fastkv"]
    return {"environment": facts, "measured": report["datetime"][:10], "tool": report["version"], "rows": rows}


def page(file: dict[str, Any] | None) -> str:
    """The report in Markdown: a table for each test."""
    return filled(Path(__file__).with_name("page.jinja"), file=file) + "\n"


def measure(only: str) -> tuple[int, dict[str, Any] | None]:
    """Run them in a process of its own. Returns: pytest's exit code, and what was measured if it is 0."""
    with tempfile.TemporaryDirectory() as room:
        path, before = Path(room) / "all.json", os.getloadavg()[0]
        command = [sys.executable, "-m", "pytest", "perf/micro", "-k", only]
        command += [f"--benchmark-json={path}", "--benchmark-columns=median"]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if code:
            return code, None
        return 0, trimmed(json.loads(path.read_text())) | {"load": [before, os.getloadavg()[0]]}


def main(arguments: list[str] | None = None) -> int:
    """Returns: pytest's exit code."""
    parser = parser_of("perf.micro", __doc__)
    parser.add_argument("--only", default="", metavar="WORDS", help="some benchmarks, as pytest's -k selects them")
    parser.add_argument("--report", action="store_true", help="measure nothing, write micro.md from micro.json")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of both files (default perf/results)")
    options = parser.parse_args(arguments)
    path = options.out / NAME
    if not options.report:
        code, file = measure(options.only)
        if file is None or options.only:
            print(page(file) if file else "something failed: nothing is written")
            return code
        path.write_text(json.dumps(file, indent=1) + "\n")
    found = json.loads(path.read_text()) if path.exists() else None
    path.with_suffix(".md").write_text(page(found))
    print(path.with_suffix(".md"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
