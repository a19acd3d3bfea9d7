"""vLLM's schedulers, with steps that end where blocks of a prompt end, so that answers do not depend on the load."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from ...errors import FastKVError
from . import settings

logger = init_logger(__name__)


def tokens_now(prompt: int, computed: int, offered: int, block: int | None) -> int:
    """How many of the `offered` next tokens of a request are computed in one step.

    Of a prompt of so many tokens, whole blocks, or all that is left; without blocks, all of it or nothing. Behind it
    one at a time, also where a request was preempted and its own answer is computed again: by steps of decoding.

    Args: computed: tokens so far.
    """
    if computed >= prompt:
        return min(offered, 1)
    if computed + offered >= prompt:
        return prompt - computed
    return 0 if block is None else (computed + offered) // block * block - computed


class InBlocks:
    """Part of a scheduler that cuts steps by `tokens_now`."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        self.block = settings.config_of(vllm_config).prefill_block

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """vLLM's last word on the number of tokens."""
        offered = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)  # type: ignore[misc]
        return tokens_now(request.num_prompt_tokens, num_computed_tokens, offered, self.block)


class BlockScheduler(InBlocks, Scheduler):
    """`Scheduler` in blocks."""


class AsyncBlockScheduler(InBlocks, AsyncScheduler):
    """`AsyncScheduler` in blocks."""


def prepare(vllm_config: Any) -> None:
    """Let vLLM use one of these schedulers, without prefix caching: a page holds what only its own request may read.

    Raises: FastKVError if a scheduler was asked for that is none of these.
    """
    chosen = vllm_config.scheduler_config
    kind = AsyncBlockScheduler if chosen.async_scheduling else BlockScheduler
    if chosen.scheduler_cls is None:
        chosen.scheduler_cls = kind
    elif not issubclass(chosen.get_scheduler_cls(), InBlocks):
        raise FastKVError(
            f"a compressed cache needs a scheduler that keeps to blocks of a prompt, got {chosen.scheduler_cls!r}; "
            "leave scheduler_cls out"
        )
    if vllm_config.cache_config.enable_prefix_caching:
        logger.info("fastkv: prefix caching is off, because the pages of a compressed cache cannot be shared")
        vllm_config.cache_config.enable_prefix_caching = False
