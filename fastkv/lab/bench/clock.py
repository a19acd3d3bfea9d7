"""Seconds, decode steps and bytes of a process. torch alone, so that environments of peers can use it, too."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

Step = Callable[[Tensor, Tensor], Tensor]  # tokens and their positions, both [B, 1], to logits [B, 1, V] or [B, V]


def decode(step: Step, token: Tensor, position: Tensor, num: int) -> Tensor:
    """The token [B, 1] after `num` greedy steps from a token [B, 1]; position [B, 1] is advanced in place."""
    for _ in range(num):
        token = step(token, position).reshape(len(token), -1).argmax(-1, keepdim=True)
        position += 1
    return token


def now() -> float:
    """Seconds, when everything launched so far is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Memory:
    """Bytes above those when it was made: allocations on a GPU, the resident set of this process on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats(device)
            self.start: int | None = torch.cuda.memory_allocated(device)
        else:
            release()
            self.start = resident_set("VmRSS") if forget_peak() else None

    def peak(self) -> int | None:
        """The most so far; None where the system does not say."""
        if self.start is None:
            return None
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.start
        return max(resident_set("VmHWM") - self.start, 0)


def release() -> None:
    """Give memory that was freed back to the system, or what takes its place later would not be seen."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


def forget_peak() -> bool:
    """From here on the high-water mark of this process is that of what follows. False where that is not allowed."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def resident_set(name: str) -> int:
    """Bytes of this process in memory, now ("VmRSS") or at most ("VmHWM")."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
