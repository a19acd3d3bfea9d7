"""What a request asks of its cache: nothing, as all requests have the settings of the server."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor

from . import settings


class RequestArguments(LogitsProcessor):
    """Looks at the arguments of a request and leaves logits alone: `vllm.logits_processors` are what vLLM lets look."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        """Arguments are vLLM's."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise ValueError, which vLLM answers with status 400, for arguments that would do nothing."""
        for name, value in (sampling_params.extra_args or {}).items():
            if name.startswith(settings.KEY):
                raise ValueError(
                    f"all requests have the server's settings for {settings.KEY}, got {name}={value!r} for one of "
                    "them; leave it out"
                )

    def apply(self, logits: Tensor) -> Tensor:
        """The logits as they are."""
        return logits

    def is_argmax_invariant(self) -> bool:
        """True: greedy sampling passes it over."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """Nothing is remembered of requests."""
