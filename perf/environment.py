"""What a number was measured on: machine, versions and commit, to stand beside it."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("torch", "triton", "transformers", "numpy")


def environment() -> dict[str, str | int]:
    """Machine, device, thread count, package versions and git commit (with + if the tree has changes)."""
    facts: dict[str, str | int] = {
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "commit": _commit(),
    }
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    return facts


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _git(*arguments: str) -> str:
    root = Path(__file__).parent.parent
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False).stdout.strip()


def _commit() -> str:
    changed = "+" if _git("status", "--porcelain", "--untracked-files=no") else ""
    return (_git("rev-parse", "--short", "HEAD") or "unknown") + changed
