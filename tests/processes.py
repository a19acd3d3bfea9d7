"""Processes of their own in a fifth of the time: torch and transformers have been imported in them, fastkv has not.

They are forked from a server that the first of them starts, which knows nothing of Triton's interpreter.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "torch._dynamo", "transformers", "transformers.modeling_utils"])


@dataclass
class Script:
    """Python that runs beside the test: what it prints goes to files in a folder."""

    process: multiprocessing.process.BaseProcess
    folder: Path

    def ended(self, timeout: float = 280) -> tuple[int, str, str]:
        """Its exit code and what it has printed as output and as errors; it is killed if it takes longer."""
        self.process.join(timeout)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        assert self.process.exitcode is not None
        said, errors = ((self.folder / name).read_text() for name in ("said", "errors"))
        return self.process.exitcode, said, errors


def begin(text: str, folder: Path, *arguments: str, env: Mapping[str, str] | None = None) -> Script:
    """Run a script in the repository's root. Args: folder: its own; env: more of the environment."""
    folder.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        forkserver.ensure_running()
    process = PROCESSES.Process(target=_execute, args=(text, folder, arguments, dict(env or {})))
    process.start()
    return Script(process, folder)


def run(text: str, folder: Path, *arguments: str, **options: Mapping[str, str]) -> tuple[int, str, str]:
    """`begin` and wait for the end."""
    return begin(text, folder, *arguments, **options).ended()


def of_module(name: str) -> str:
    """The script that `python -m name` is."""
    return f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"


def _execute(text: str, folder: Path, arguments: tuple[str, ...], env: dict[str, str]) -> None:
    for name, number in (("said", 1), ("errors", 2)):
        with open(folder / name, "wb") as file:
            os.dup2(file.fileno(), number)
    os.environ.update(env)
    os.chdir(ROOT)
    sys.argv = ["script", *arguments]
    exec(compile(text, "script", "exec"), {"__name__": "__main__"})
