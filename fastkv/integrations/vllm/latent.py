"""vLLM's backends of a CPU for layers that cache latents (MLA), which refuse settings that would do nothing there."""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

from ...errors import FastKVError
from . import settings


def check() -> None:
    """Raise FastKVError if the model that is being made has settings for fastkv."""
    if settings.asked(get_current_vllm_config()):
        raise FastKVError("fastkv does not compress latents (MLA) in vLLM; serve the model without its settings")


class CPULatentBackend(CPUMLABackend):
    """`CPUMLABackend` for models without settings."""

    @staticmethod
    def get_impl_cls() -> Any:
        """What attends."""
        check()
        return CPUMLABackend.get_impl_cls()


class AMXLatentBackend(AMXMLABackend):
    """`AMXMLABackend` for models without settings."""

    @staticmethod
    def get_impl_cls() -> Any:
        """What attends."""
        check()
        return AMXMLABackend.get_impl_cls()
