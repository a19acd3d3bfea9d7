"""How long the commands take that README and getting started print, for a newcomer: in a new clone and environment.

    python -m perf.commands                           # all of them
    python -m perf.commands --only doctor "make docs" # those with these words, again; the others stay as they are

What is committed is cloned. A PATH is the bundled model, and book.txt a text in its words. Seconds of the first call,
installation included, go to perf/results/commands.json with the load of the machine, which should have nothing else to
do; `python -m perf.report --readme` writes them beside the commands.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cached_property
from pathlib import Path

from fastkv.demo import MODEL_DIR
from fastkv.demo.tasks import generate

from .engine import RESULTS, ROOT
from .environment import environment

COMMANDS = (
    "pip install '.[cli]'",
    "fastkv doctor",
    "fastkv doctor --model PATH",
    "fastkv demo",
    "fastkv bench",
    "fastkv fidelity --model PATH --text book.txt",
    "fastkv inspect --model PATH --text book.txt",
    "make demo",
    "make test",
    "make docs",
    "make bench",
)
FILE = RESULTS / "commands.json"
TEXTS, WORDS = 8, 1024  # of book.txt


class Newcomer:
    """Who has Python, pip and git, and nothing else yet.

    Args: place: an empty directory.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.variables = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}

    def clone(self, name: str) -> Path:
        """A new clone of what is committed."""
        subprocess.run(["git", "clone", "--quiet", ROOT, self.place / name], check=True)
        return self.place / name

    @cached_property
    def installed(self) -> float:
        """Seconds that the installation takes, into an environment of its own."""
        subprocess.run([sys.executable, "-m", "venv", self.place / "env"], check=True)
        return self.typed(COMMANDS[0], self.clone("checkout"))

    def seconds(self, command: str) -> float:
        """Of one command. Raises: CalledProcessError if it fails."""
        if command.startswith("make "):
            return self.typed(command, self.clone(command.replace(" ", "-")))
        installed = self.installed
        if command == COMMANDS[0]:
            return installed
        desk = self.place / "desk"
        desk.mkdir(exist_ok=True)
        (desk / "book.txt").write_text(" ".join(generate("facts", WORDS, seed).context for seed in range(TEXTS)))
        return self.typed(command.replace("PATH", str(MODEL_DIR)), desk)

    def typed(self, command: str, where: Path) -> float:
        """Seconds of a command line in that directory, where the environment is active."""
        path = f"{self.place / 'env' / 'bin'}{os.pathsep}{self.variables['PATH']}"
        start = time.perf_counter()
        subprocess.run(
            ["bash", "-c", command], cwd=where, env={**self.variables, "PATH": path}, check=True, stdout=sys.stderr
        )
        return time.perf_counter() - start


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.commands", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORDS", help="commands that these words are part of"
    )
    options = parser.parse_args(arguments)
    file = json.loads(FILE.read_text()) if FILE.exists() else {"rows": []}
    rows = {row["command"]: row for row in file["rows"]}
    place = Path(tempfile.mkdtemp())
    try:
        newcomer = Newcomer(place)
        for command in COMMANDS:
            if any(words in command for words in options.only):
                load, seconds = os.getloadavg()[0], newcomer.seconds(command)
                rows[command] = {"command": command, "seconds": round(seconds, 1), "load": load}
                made = [rows[known] for known in COMMANDS if known in rows]
                FILE.write_text(json.dumps({"environment": environment(), "rows": made}, indent=1) + "\n")
                print(f"{seconds:.1f} s  {command}", flush=True)
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
