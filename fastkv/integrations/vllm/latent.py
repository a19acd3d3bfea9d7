"""vLLM's backends of a CPU for layers that cache latents (MLA), which refuse settings that would do nothing there."""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

from ...errors import FastKVError
from . import settings


class Refusing:
    """A backend for models without settings."""

    @classmethod
    def get_impl_cls(cls) -> Any:
        """What attends. Raises: FastKVError if the model that is being made has settings for fastkv."""
        if settings.asked(get_current_vllm_config()):
            raise FastKVError("fastkv does not compress latents (MLA) in vLLM; serve the model without its settings")
        return super().get_impl_cls()  # type: ignore[misc]


class CPULatentBackend(Refusing, CPUMLABackend):
    """`CPUMLABackend` for models without settings."""


class AMXLatentBackend(Refusing, AMXMLABackend):
    """`AMXMLABackend` for models without settings."""
