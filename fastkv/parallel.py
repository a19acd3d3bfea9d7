"""Tensor parallelism: each process holds some of the KV heads, in order of rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import Module

MESHES = ("_device_mesh", "device_mesh")  # the second in transformers 5.10


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
        return whole.chunk(self.size, 1)[self.rank]
