"""Which implementation runs: Triton kernels on an accelerator, `cpu` or the reference on a CPU, or what is wanted."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch
from packaging.version import Version

from .errors import FastKVError

BACKENDS = ("auto", "reference", "triton")
OLDEST_TRITON = Version("3.6")
MAX_GROUPS, MAX_HEAD_DIM, MAX_EVICTED = 16, 256, 64  # what the kernels handle


def uses_kernels(backend: str, device: torch.device) -> bool:
    """Whether an operation on tensors of this device runs the Triton kernels."""
    return backend == "triton" or (backend == "auto" and device.type == "cuda")


@cache
def why_no_triton() -> str | None:
    """Why the kernels cannot be compiled here, in a few words; None if they can."""
    try:
        found = Version(version("triton"))
    except PackageNotFoundError:
        return "triton is not installed"
    return None if found >= OLDEST_TRITON else f"triton {found} is older than {OLDEST_TRITON}"


def check_backend(
    backend: str, device: torch.device, dtype: torch.dtype, head_dim: int, groups: int, evict_every: int
) -> None:
    """Raise FastKVError unless the backend can serve a model with these sizes; never fall back silently."""
    if backend not in BACKENDS:
        raise FastKVError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if not uses_kernels(backend, device):
        return
    instead = "use backend='reference'"
    problem = why_no_triton()
    if problem is None and device.type != "cuda":
        import triton

        if not triton.knobs.runtime.interpret:
            problem = f"the model is on {device.type} and Triton's interpreter is off (TRITON_INTERPRET=1 turns it on)"
    if problem is None and dtype not in (torch.float32, torch.float16, torch.bfloat16):
        problem = f"they compute in float32, float16 and bfloat16, not {dtype}"
    if problem is None and (head_dim > MAX_HEAD_DIM or head_dim % 16):
        problem = f"head_dim must be a multiple of 16 up to {MAX_HEAD_DIM}, got {head_dim}"
    if problem is None and groups > MAX_GROUPS:
        problem = f"at most {MAX_GROUPS} query heads may share a KV head, got {groups}"
    if problem is None and evict_every > MAX_EVICTED:
        problem, instead = f"evict_every may be at most {MAX_EVICTED}, got {evict_every}", "lower it"
    if problem is not None:
        raise FastKVError(f"the Triton kernels cannot run: {problem}; {instead}")
