"""Where operations run: in which implementation, "reference" (torch), "cpu" (C++ and fused torch) or "triton", and in
which of several processes (tensor parallelism): each holds some of the KV heads, in order of rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, distributed
from torch.nn import Module

from .errors import FastKVError

MODULES = {"reference": ".reference", "cpu": ".cpu.operations", "triton": ".kernels.operations"}
BACKENDS = ("auto", *MODULES)
ON_CPU = ("auto", "cpu")  # those that `resolve` to "cpu" for tensors of a CPU
OLDEST_TRITON = Version("3.6")
MAX_GROUPS, MAX_HEAD_DIM = 16, 512  # what the kernels handle
INT4_GROUP = 32  # numbers of a key or a value that share a step
# Packages with flash-attn's functions, the newest first, and the generations of GPUs that they are written for.
FLASH = {"flash_attn_interface": (9,), "flash_attn": (8, 9, 10, 11, 12)}
OLDEST_FLASH = Version("2.6")  # earlier ones lay log-sum-exps out otherwise
# Above, fp32 attention does not fit into registers, and nothing into an AMD GPU's shared memory.
MAX_COMMON_HEAD_DIM = 256


def resolve(backend: str, device: torch.device) -> str:
    """The backend that runs for tensors of this device: "auto" is triton on an accelerator and cpu on a CPU.

    Raises: FastKVError for an unknown backend.
    """
    if backend == "auto":
        return "triton" if device.type == "cuda" else "cpu" if device.type == "cpu" else "reference"
    if backend not in MODULES:
        raise FastKVError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    return backend


@cache
def implementation(name: str, backend: str, device: str) -> Callable[..., Any]:
    """The function of that name in a backend; the reference's where it has none, on the same tensors.

    Args: device: the type of the tensors' device. Modules are imported on first use, triton not before.
    Raises: FastKVError for an unknown backend, and for kernels on a CPU without Triton's interpreter.
    """
    chosen = resolve(backend, torch.device(device))
    problem = why_not(chosen, torch.device(device)) if device == "cpu" else None
    if problem is not None:
        raise FastKVError(f"the Triton kernels cannot run: {problem}; use backend='reference'")
    module = import_module(MODULES[chosen], __package__)
    return getattr(module, name, None) or getattr(import_module(MODULES["reference"], __package__), name)


@cache
def follows_rows(name: str, backend: str, device: str) -> bool:
    """Whether that backend's function of that name works on `LayerState.rows` in place; others are given a copy."""
    module = import_module(MODULES[resolve(backend, torch.device(device))], __package__)
    return name in getattr(module, "FOLLOWS_ROWS", ())


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """What autocast would have attention compute a tensor in, None without autocast; float64 it leaves alone."""
    kind = tensor.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return tensor.dtype if tensor.dtype == torch.float64 else torch.get_autocast_dtype(kind)


@cache
def why_no_triton() -> str | None:
    """Why the kernels cannot be compiled here, in a few words; None if they can."""
    try:
        found = Version(version("triton"))
    except PackageNotFoundError:
        return "triton is not installed"
    return None if found >= OLDEST_TRITON else f"triton {found} is older than {OLDEST_TRITON}"


def interpreted() -> bool:
    """Whether Triton's interpreter is on, which runs kernels on the CPU."""
    import triton

    return bool(triton.knobs.runtime.interpret)


@cache
def flash_attention(device: torch.device) -> Callable[..., Any] | None:
    """flash-attn's function of sequences of unequal lengths, of the newest version that serves this device; None for
    none: without the package, on another device than a GPU of NVIDIA's, or where it does not load.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    for name, generations in FLASH.items():
        if torch.cuda.get_device_capability(device)[0] in generations:
            try:
                module = import_module(name)
            except ImportError:  # it is not there, or was built for another torch
                continue
            old = Version(getattr(module, "__version__", str(OLDEST_FLASH))) < OLDEST_FLASH
            found: Callable[..., Any] | None = getattr(module, "flash_attn_varlen_func", None)
            if found is not None and not old:
                return found
    return None


def why_not(
    backend: str,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 128,
    groups: int = 1,
    value_dim: int | None = None,
    latent: bool = False,
) -> str | None:
    """Why a backend (not "auto") cannot serve a model with these sizes, in a few words; None if it can.

    Args: head_dim: of queries and keys; value_dim: of values, None for the same.  latent: whether values are the first
        numbers of keys.
    """
    if backend == "cpu" and device.type != "cpu":
        return f"the model is on {device.type}"
    if backend != "triton":
        return None
    if (problem := why_no_triton()) is not None:
        return problem
    if device.type != "cuda" and not interpreted():
        return f"on {device.type} they need Triton's interpreter, which is off (TRITON_INTERPRET=1 turns it on)"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"they compute in float32, float16 and bfloat16, not {dtype}"
    if latent:
        return "they read values from slots of their own, not out of latents (MLA)"
    if head_dim > MAX_HEAD_DIM or head_dim % 16:
        return f"head_dim must be a multiple of 16 up to {MAX_HEAD_DIM}, got {head_dim}"
    if value_dim not in (None, head_dim):
        return f"keys and values must be equally wide, got {head_dim} and {value_dim}"
    if head_dim > MAX_COMMON_HEAD_DIM and (dtype == torch.float32 or torch.version.hip is not None):
        where = "on AMD" if torch.version.hip is not None else "in float32"
        return f"head_dim may be at most {MAX_COMMON_HEAD_DIM} {where}, got {head_dim}"
    if groups > MAX_GROUPS:
        return f"at most {MAX_GROUPS} query heads may share a KV head, got {groups}"
    return None


def check_backend(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    groups: int,
    value_dim: int | None = None,
    latent: bool = False,
    slots: str = "model",
) -> None:
    """Raise FastKVError unless the backend can serve a model with these sizes; never fall back silently."""
    unfit = [dim for dim in (head_dim, value_dim or head_dim) if dim % INT4_GROUP]
    if slots in ("int4", "k8v4") and unfit:
        raise FastKVError(
            f"slots={slots!r} needs keys and values of a multiple of {INT4_GROUP} numbers, got {unfit[0]}; use "
            "slots='int8'"
        )
    chosen = resolve(backend, device)
    problem = why_not(chosen, device, dtype, head_dim, groups, value_dim, latent)
    if problem is not None:
        what = "the Triton kernels" if chosen == "triton" else f"backend={chosen!r}"
        raise FastKVError(f"{what} cannot run: {problem}; use backend='reference'")


MESHES = ("_device_mesh", "device_mesh")  # the second in transformers 5.17


@dataclass(frozen=True)
class Parallel:
    """The processes that share the heads of every layer; the default is one process alone.

    Attributes:
        rank, size: this process among them.  group: of torch.distributed, None if alone.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    @classmethod
    def of(cls, model: Module) -> Parallel:
        """What transformers loaded the model with (`tp_plan="auto"`)."""
        mesh = next((m for name in MESHES if (m := getattr(model, name, None)) is not None), None)
        if mesh is None or not distributed.is_initialized():
            return cls()
        names = mesh.mesh_dim_names or ()
        if mesh.ndim > 1:
            if "tp" not in names:
                return cls()
            mesh = mesh["tp"]
        return cls(mesh.get_local_rank(), mesh.size(), mesh.get_group()) if mesh.size() > 1 else cls()

    def gather(self, part: Tensor) -> Tensor:
        """[B, Hkv, ...] of all heads of the layer, from what each process has of its own heads."""
        if self.size == 1:
            return part
        parts = [torch.empty_like(part) for _ in range(self.size)]
        distributed.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, 1)

    def own(self, whole: Tensor) -> Tensor:
        """This process's heads of [B, all heads, ...]."""
        return whole.chunk(self.size, 1)[self.rank].contiguous()
