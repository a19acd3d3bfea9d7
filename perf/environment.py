"""What a number was measured on: machine, versions and commit, to stand beside it."""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("torch", "triton", "transformers", "numpy")
ROOT = Path(__file__).parent.parent


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


def gpu_environment() -> dict[str, str | int]:
    """`environment` with the CUDA version, the driver and a digest of the sources, which names them without git."""
    facts = environment()
    facts["cuda"] = torch.version.cuda or "none"
    facts["driver"] = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "unknown"
    facts["source"] = source_digest("gpu_*.py", "split_*.py")
    return facts


def speed_environment() -> dict[str, str | int]:
    """`environment` for measurements of whole models, on either device."""
    facts = gpu_environment() if torch.cuda.is_available() else environment()
    facts["source"] = source_digest("speed_[cmw]*.py")
    return facts


def source_digest(*scripts: str) -> str:
    """First 12 hexadecimal digits of the SHA-256 of what a measurement runs: fastkv/ and these patterns of perf/."""
    digest = hashlib.sha256()
    files = [*(ROOT / "fastkv").rglob("*.py"), *(f for script in scripts for f in Path(__file__).parent.glob(script))]
    for path in sorted(files):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


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
