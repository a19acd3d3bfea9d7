"""What a number was measured on: machine, versions and commit, to stand beside it."""

from __future__ import annotations

import platform
import shutil
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .engine import ROOT, digest

PACKAGES = ("torch", "triton", "transformers", "numpy")


def environment(commit: str | None = None, dry_run: bool = False) -> dict[str, str | int]:
    """Machine, device with driver and CUDA version, thread count, package versions and git commit.

    Args: commit: to name where there is no git; by default the one checked out, with + if the tree has changes.
    """
    facts: dict[str, str | int] = {
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "commit": commit or _commit(),
    }
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    if torch.cuda.is_available():
        facts["cuda"] = torch.version.cuda or "none"
        facts["driver"] = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "unknown"
    return facts | ({"dry_run": 1} if dry_run else {})


LEFT_OUT = ("fastkv/lab", "fastkv/integrations/vllm")  # of the library, by what is measured


@cache
def source(*places: str, texts: tuple[str, ...] = ()) -> str:
    """Digest of the code that a case runs: these files and folders, texts, and the library."""
    return digest("fastkv", *places, texts=texts, without=LEFT_OUT)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _run(*command: str) -> str:
    """What the command prints, or nothing where it is not installed."""
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def _commit() -> str:
    changed = "+" if _run("git", "status", "--porcelain", "--untracked-files=no") else ""
    return (_run("git", "rev-parse", "--short", "HEAD") or "unknown") + changed
