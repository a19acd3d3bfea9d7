"""What a request asks of its cache: nothing, as all requests have the settings of the server."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as NewerProcessor

from . import settings


class RequestArguments(LogitsProcessor, NewerProcessor):
    """Looks at the arguments of a request and leaves logits alone: `vllm.logits_processors` are what vLLM lets look.

    It has the interfaces of both of vLLM's model runners: each refuses to start beside a plugin without its own.
    """

    def __init__(self, vllm_config: Any, *rest: Any) -> None:
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

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Whether its logits change: never."""
        return False

    def apply(self, logits: Tensor, *rest: Any) -> Tensor:
        """The logits as they are."""
        return logits

    def is_argmax_invariant(self) -> bool:
        """True: greedy sampling passes it over."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """Nothing is remembered of requests."""
