"""vLLM's schedulers, with steps that end where blocks of a prompt end, so that answers do not depend on the load."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from vllm.logger import init_logger
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from ...errors import FastKVError
from . import settings
from .prefixes import Prefixes, is_kept, next_stop

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


class FromPrefixes(InBlocks):
    """Part of a scheduler whose requests begin where `Prefixes` knows somebody else who began the same way.

    vLLM's own prefix caching is off, but what it has for copies of blocks between steps, for tokens that were found and
    for hashes of what a block depends on (tokens, cache salt, adapter, pictures) is used here.

    Attributes: size: of a block of a prompt.  looked: tokens found for the requests that were to begin in this step, by
        name.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        if len(kv_cache_config.kv_cache_groups) > 1:
            raise FastKVError(
                "prefixes keeps pages of compressed layers, but this model has others too, with sliding windows or "
                "states of vLLM's own; leave prefixes out"
            )
        assert self.block is not None  # as the settings were checked
        self.size = self.block
        function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        init_none_hash(function)
        self.hashes = get_request_block_hasher(self.size, function)
        pool = self.kv_cache_manager.block_pool  # type: ignore[attr-defined]
        pages = pool.num_gpu_blocks - 1  # page 0 is nobody's
        self.prefixes = Prefixes(pool, max(1, int(settings.prefixes(vllm_config) * pages)))
        self.looked: dict[str, int] = {}
        logger.info("fastkv: up to %d of %d pages keep beginnings of prompts", self.prefixes.most, pages)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """A step, with the copies of pages that come before it."""
        self.prefixes.begin()
        self.looked.clear()
        step = super().schedule(*args, **kwargs)  # type: ignore[misc]
        begun = {name: found for name, found in self.looked.items() if name in step.num_scheduled_tokens}
        copies = self.prefixes.copies({name: self._page(name).block_id for name in begun})
        if copies:
            step.kv_cache_block_copies = [KVCacheBlockCopy(*copy) for copy in copies]
        self._count(begun)
        return step

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Forget all prefixes, as far as vLLM forgets its own."""
        self.prefixes.clear()
        return super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc, no-any-return]

    def _get_local_prefix_cache_hit(self, request: Any) -> tuple[Any, int, int, bool]:
        """For a request that may begin: no blocks of vLLM's, how many tokens it need not compute, and no more."""
        none, found, *rest = super()._get_local_prefix_cache_hit(request)  # type: ignore[misc]
        if not request.skip_reading_prefix_cache and not request.resumable:
            # Two tokens at least are read: vLLM may take a single one behind others for a step of decoding.
            keys = self._keys(request)[: (request.num_prompt_tokens - 2) // self.size]
            found = self.prefixes.find(request.request_id, keys) * self.size
            self.looked[request.request_id] = found
        return none, found, *rest

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """A step also ends where what it leaves is to be kept."""
        if num_computed_tokens < request.num_prompt_tokens:
            stop = next_stop(request.num_prompt_tokens, num_computed_tokens, self.size)
            num_new_tokens = min(num_new_tokens, stop - num_computed_tokens)
        return super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        """The requests now have the tokens that they will have after this step."""
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]
        for name in scheduler_output.num_scheduled_tokens:
            request = self.requests[name]  # type: ignore[attr-defined]
            block, rest = divmod(request.num_computed_tokens, self.size)
            if not rest and not request.resumable and is_kept(block, request.num_prompt_tokens // self.size):
                self.prefixes.reach(self._keys(request)[block - 1], self._page(name))

    def _keys(self, request: Any) -> list[Hashable]:
        """What each whole block of its tokens, and all before it, is known by."""
        if not request.block_hashes:  # vLLM makes none without its own prefix caching
            request.block_hashes.extend(self.hashes(request))
        return list(request.block_hashes)

    def _page(self, name: str) -> Any:
        ((page,),) = self.kv_cache_manager.get_blocks(name).blocks  # type: ignore[attr-defined]
        return page

    def _count(self, begun: dict[str, int]) -> None:
        """Tell vLLM's statistics of tokens found."""
        told = self.kv_cache_manager.prefix_cache_stats  # type: ignore[attr-defined]
        for name, found in begun.items() if told is not None else ():
            request = self.requests[name]  # type: ignore[attr-defined]
            told.record(num_tokens=request.num_tokens, num_hits=found, preempted=request.num_preemptions > 0)


class BlockScheduler(InBlocks, Scheduler):
    """`Scheduler` in blocks."""


class AsyncBlockScheduler(InBlocks, AsyncScheduler):
    """`AsyncScheduler` in blocks."""


class PrefixScheduler(FromPrefixes, Scheduler):
    """`Scheduler` in blocks, with prefixes."""


class AsyncPrefixScheduler(FromPrefixes, AsyncScheduler):
    """`AsyncScheduler` in blocks, with prefixes."""


SCHEDULERS = {  # by whether steps are made ahead, and whether prefixes are kept
    (False, False): BlockScheduler,
    (True, False): AsyncBlockScheduler,
    (False, True): PrefixScheduler,
    (True, True): AsyncPrefixScheduler,
}


def prepare(vllm_config: Any) -> None:
    """Let vLLM use one of these schedulers, without its own prefix caching, whose blocks several requests read.

    Raises: FastKVError if a scheduler was asked for that is none of these.
    """
    chosen = vllm_config.scheduler_config
    kept = settings.prefixes(vllm_config) > 0
    kind = SCHEDULERS[bool(chosen.async_scheduling), kept]
    if chosen.scheduler_cls is None:
        chosen.scheduler_cls = kind
    elif not issubclass(chosen.get_scheduler_cls(), InBlocks):
        raise FastKVError(
            f"a compressed cache needs a scheduler that keeps to blocks of a prompt, got {chosen.scheduler_cls!r}; "
            "leave scheduler_cls out"
        )
    if vllm_config.cache_config.enable_prefix_caching:
        if not kept:
            logger.info("fastkv: prefix caching is off; prefixes=0.5 lets half of the pages keep beginnings of prompts")
        vllm_config.cache_config.enable_prefix_caching = False
