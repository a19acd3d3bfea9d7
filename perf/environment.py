"""What a number was measured on: machine, versions and commit, to stand beside it."""

import platform
import re
import shutil
import subprocess
from importlib.metadata import distributions
from pathlib import Path

import torch

from .engine import ROOT

PACKAGES = ("torch", "triton", "transformers", "numpy")


def environment(commit: str | None = None, dry_run: bool = False) -> dict[str, str | int]:
    """Machine, device with driver and CUDA version, thread count, package versions and git commit.

    Args: commit: to name where there is no git; by default the one checked out, with + if the tree has changes.
    """
    told = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpu = re.search(r"^model name\s*: (.*)$", told, re.M)
    changed = "+" if _run("git", "status", "--porcelain", "--untracked-files=no") else ""
    facts: dict[str, str | int] = {
        "machine": platform.machine(),
        "cpu": cpu[1].strip() if cpu else platform.processor() or "unknown",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "commit": commit or (_run("git", "rev-parse", "--short", "HEAD") or "unknown") + changed,
    }
    installed = {one.name: one.version for one in distributions() if one.name in PACKAGES}
    facts |= {package: installed.get(package, "not installed") for package in PACKAGES}
    if torch.cuda.is_available():
        facts["cuda"] = torch.version.cuda or "none"
        facts["driver"] = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "unknown"
    return facts | ({"dry_run": 1} if dry_run else {})


def _run(*command: str) -> str:
    """What the command prints, or nothing where it is not installed."""
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
