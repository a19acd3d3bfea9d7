"""vLLM's schedulers, with steps that end where blocks of a prompt end, so that answers do not depend on the load; and
what they manage: a page for each request, for life (`FastKVSpec`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger
from vllm.outputs import RequestError
from vllm.sampling_params import SamplingType
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager
from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec, KVCacheSpec, MambaSpec
from vllm.v1.kv_cache_spec_registry import register_kv_cache_spec
from vllm.v1.request import RequestStatus

from ...errors import FastKVError
from . import settings
from .prefixes import Prefixes, is_kept
from .requests import BUDGET, KEEP, Menu
from .settings import Kind

logger = init_logger(__name__)
TOKENS = 16  # a block size for vLLM to reckon with; a page never fills up


def tokens_now(prompt: int, computed: int, offered: int, block: int | None) -> int:
    """How many of the `offered` next tokens of a request are computed in one step.

    Of a prompt of so many tokens, a block or what is left of it, so that all prompts of a step are read at once;
    without blocks, all of it. Or nothing. Behind it one at a time, also where a request was preempted and its own
    answer is computed again: by steps of decoding.

    Args: computed: tokens so far.
    """
    if computed >= prompt:
        return min(offered, 1)
    wanted = min(prompt - computed, block or prompt)
    return wanted if wanted <= offered else 0


def what_fits(vllm_config: Any, kv_cache_config: Any) -> str:
    """How many requests fit into the cache that vLLM allocated, and what each takes of it at most."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    pages = sum(-(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes) for spec in specs)
    number = kv_cache_config.num_blocks
    each = pages * kv_cache_config.kv_cache_tensors[0].size / number
    longest = vllm_config.model_config.max_model_len
    return f"{(number - 1) // pages} requests of up to {longest:,} tokens fit, {each / 1e6:.2f} MB each"


class InBlocks:
    """Part of a scheduler that cuts steps by `tokens_now`.

    Attributes: streams: names of requests that were refused and whose end is still to come.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)  # type: ignore[call-arg]
        self.block, self.menu = settings.config_of(vllm_config).prefill_block, Menu.of(vllm_config)
        self.streams: set[str] = set()
        logger.info("fastkv: %s", what_fits(vllm_config, kv_cache_config))

    def add_request(self, request: Any) -> None:
        """One that asks for what there is not ends with an error; a server has told it so before."""
        super().add_request(request)  # type: ignore[misc]
        try:
            self._check(request)
            kind = self.kind_of(request)
        except ValueError as refusal:
            logger.warning("fastkv: request %s is refused: %s", request.request_id, refusal)
            ending = self.grammar_compile_error_reqs  # type: ignore[attr-defined]
            if isinstance(ending, dict):  # since vLLM 0.33, which passes the error on
                ending[request.request_id] = RequestError("validation_error", str(refusal))
            else:
                ending.add(request.request_id)
            (self.streams.add if request.resumable else self.streams.discard)(request.request_id)
            return
        params = request.sampling_params
        if request.prompt_token_ids is None and params and KEEP in (params.extra_args or {}):
            params = request.sampling_params = params.clone()  # a runner may not know how long embeddings are
            del params.extra_args[KEEP]
            if kind is not None:
                params.extra_args[BUDGET] = kind

    def kind_of(self, request: Any) -> Kind:
        """What the request asks for. Raises: as `Menu.chosen`."""
        params = request.sampling_params
        return self.menu.chosen(params and params.extra_args, request.num_prompt_tokens)

    def _check(self, request: Any) -> None:
        """Raise ValueError for a request that cannot be read in blocks."""
        if request.resumable or request.request_id in self.streams:  # of a stream that was refused its end, too
            raise ValueError("a compressed cache reads a prompt once, got one that goes on; send it whole")
        params, size = request.sampling_params, self.block or request.num_prompt_tokens
        on_cpu = self.vllm_config.device_config.device_type == "cpu"  # type: ignore[attr-defined]
        seeded = params and params.sampling_type == SamplingType.RANDOM_SEED
        if on_cpu and seeded and request.num_prompt_tokens > size:
            raise ValueError(
                f"on a CPU vLLM cannot draw by a seed behind a prompt of more than one block of {size} tokens, got "
                f"{request.num_prompt_tokens}; leave seed out"
            )
        shown = defaultdict[int, dict[str, int]](dict)  # pictures of each block, with their tokens
        for place, picture in enumerate(request.mm_features):
            where = picture.mm_position
            for block in range(where.offset // size, (where.offset + where.length - 1) // size + 1):
                shown[block][picture.identifier] = request.get_num_encoder_embeds(place)
        most = max((sum(sizes.values()) for sizes in shown.values()), default=0)
        room = min(self.encoder_cache_manager.cache_size, self.max_num_encoder_input_tokens)  # type: ignore[attr-defined]
        if most > room:
            raise ValueError(
                f"images that share a block of {size} tokens of a prompt must fit into the encoder's cache of {room} "
                f"tokens, got {most}; send smaller ones, lower prefill_block or raise max_num_batched_tokens"
            )

    def _try_schedule_encoder_inputs(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int, encoder_compute_budget: int, **more: Any
    ) -> Any:
        """The pictures of the block that is read next: all, or none is held, as others may wait for those."""
        wanted = tokens_now(request.num_prompt_tokens, num_computed_tokens, num_new_tokens, self.block)
        given = request, num_computed_tokens, wanted, encoder_compute_budget
        found = super()._try_schedule_encoder_inputs(*given, **more)  # type: ignore[misc]
        if found[1] == wanted:
            return found
        self.encoder_cache_manager.free(request)  # type: ignore[attr-defined]
        return [], 0, encoder_compute_budget, [], []

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """A step. Requests begin in order: nobody behind one that has to wait for tokens. vLLM 0.33 looks at all who
        wait, however many.
        """
        state = self.pause_state  # type: ignore[attr-defined]
        step = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._pause_state = state
        return step

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """vLLM's last word on the number of tokens."""
        if request.request_id in self.grammar_compile_error_reqs:  # type: ignore[attr-defined]
            return 0  # refused: it ends with this step
        offered = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)  # type: ignore[misc]
        found = tokens_now(request.num_prompt_tokens, num_computed_tokens, offered, self.block)
        if not found and request.status != RequestStatus.RUNNING:
            self._pause_state = PauseState.PAUSED_NEW  # until the step is made
        return found


class FromPrefixes(InBlocks):
    """Part of a scheduler whose requests begin where `Prefixes` knows somebody else who began the same way.

    vLLM's own prefix caching is on only for layers that stay with vLLM, which must know the same beginning. Used of it
    are copies of blocks between steps, the count of tokens found, and hashes of what a block depends on: tokens, cache
    salt, adapter, pictures.

    Attributes:
        size: of a block of a prompt.  own: groups of layers whose requests have a page for life.
        mixed: whether there are others.  stride: how many of vLLM's blocks make one of a prompt.
        looked: tokens found for the requests that were to begin in this step, by name.
        granted: names of requests that had tokens in this step.
        passed_over: names of those that found some, had tokens and did not begin: for lack of the pages that were held.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        groups = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        if any(isinstance(spec, MambaSpec) for spec in groups):
            raise FastKVError(
                "prefixes keeps no states of vLLM's own layers (Mamba), got a model with some; leave it out"
            )
        self.own = [place for place, spec in enumerate(groups) if not spec.prefix_cacheable]
        self.mixed = len(self.own) < len(groups)
        vllm_config.cache_config.enable_prefix_caching = self.mixed
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        assert self.block is not None  # as the settings were checked
        self.size, unit = self.block, self.hash_block_size  # type: ignore[attr-defined]
        if self.mixed and self.size % unit:
            raise FastKVError(
                f"with prefixes, blocks of a prompt must be blocks of vLLM's own layers, of {unit} tokens, got "
                f"prefill_block={self.size}; give a multiple"
            )
        self.stride = self.size // unit if self.mixed else 1
        function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        init_none_hash(function)
        self.hashes = get_request_block_hasher(self.size, function)
        pool = self.kv_cache_manager.block_pool  # type: ignore[attr-defined]
        pages = pool.num_gpu_blocks - 1  # page 0 is nobody's
        self.prefixes = Prefixes(pool, max(1, int(settings.setting(vllm_config, "prefixes") * pages / len(self.own))))
        self.looked: dict[str, int] = {}
        self.granted: set[str] = set()
        self.passed_over: set[str] = set()
        logger.info("fastkv: up to %d beginnings of prompts are kept in %d pages", self.prefixes.most, pages)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """A step, with the copies of pages that come before it."""
        self.prefixes.begin()
        self.looked.clear()
        self.granted.clear()
        step = super().schedule(*args, **kwargs)  # type: ignore[misc]
        begun = {name: found for name, found in self.looked.items() if name in step.num_scheduled_tokens}
        tried = self.granted - begun.keys()
        self.passed_over = {name for name, found in self.looked.items() if found and name in tried}
        copies = self.prefixes.copies({name: [page.block_id for page in self._pages(name)] for name in begun})
        if copies:
            others = step.kv_cache_block_copies or ()
            step.kv_cache_block_copies = [*others, *(KVCacheBlockCopy(*copy) for copy in copies)]
        self._count(begun)
        return step

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Who gets none waits for tokens and not for pages."""
        found = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        if found:
            self.granted.add(request.request_id)
        return found

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Forget all prefixes, as far as vLLM forgets its own."""
        self.prefixes.clear()
        return super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc, no-any-return]

    def _get_local_prefix_cache_hit(self, request: Any, most: int | None = None) -> tuple[Any, int, int, bool]:
        """For a request that may begin: blocks of vLLM's own layers; how many tokens it need not compute; how many of
        its tokens are known, if vLLM's layers know fewer, which will keep those.

        Args: most: tokens that it need not compute, at most; vLLM says so since 0.33.
        """
        blocks, name = self.kv_cache_manager.empty_kv_cache_blocks, request.request_id  # type: ignore[attr-defined]
        if request.skip_reading_prefix_cache or name in self.passed_over:
            return blocks, 0, 0, False
        shared = 0

        def accept(number: int) -> bool:
            nonlocal shared
            shared = max(shared, number * self.size)
            return self._others(request, number * self.size) is not None

        # Two tokens at least are read: of a single one, which is decoded, nobody knows that a prompt ends with it.
        end = max(request.num_prompt_tokens - 2, 0)
        keys = self._keys(request)[: (end if most is None else min(end, most)) // self.size]
        self.looked[name] = found = self.prefixes.find(name, keys, accept) * self.size
        if found:
            blocks = self._others(request, found)
        return blocks, found, shared if shared > found else 0, False

    def _others(self, request: Any, tokens: int) -> Any:
        """What vLLM's own layers know of exactly so many tokens of a request: their blocks, None if not that many."""
        manager = self.kv_cache_manager  # type: ignore[attr-defined]
        if not self.mixed:
            return manager.empty_kv_cache_blocks
        blocks, hit, _ = manager.coordinator.find_longest_cache_hit(request.block_hashes, tokens)
        return manager.create_kv_cache_blocks(blocks) if hit == tokens else None

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        """The requests now have the tokens that they will have after this step."""
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]
        for name in scheduler_output.num_scheduled_tokens:
            request = self.requests[name]  # type: ignore[attr-defined]
            block, rest = divmod(request.num_computed_tokens, self.size)
            if not rest and is_kept(block, request.num_prompt_tokens // self.size) and (keys := self._keys(request)):
                self.prefixes.reach(keys[block - 1], self._pages(name))

    def _keys(self, request: Any) -> list[Hashable]:
        """What each whole block of its tokens, and all before it, is known by, among requests of its kind."""
        if not self.mixed and not request.block_hashes:  # vLLM makes none without its own prefix caching
            request.block_hashes.extend(self.hashes(request))
        try:
            kind = self.kind_of(request)
        except ValueError:
            return []
        return [(kind, known) for known in request.block_hashes[self.stride - 1 :: self.stride]]

    def _pages(self, name: str) -> list[Any]:
        """Of a request, one of each group."""
        blocks = self.kv_cache_manager.get_blocks(name).blocks  # type: ignore[attr-defined]
        return [blocks[group][0] for group in self.own]

    def _count(self, begun: dict[str, int]) -> None:
        """Tell vLLM's statistics of tokens found, where it does not look itself."""
        told = self.kv_cache_manager.prefix_cache_stats  # type: ignore[attr-defined]
        if self.mixed or told is None:
            return
        for name, found in begun.items():
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
    kept = settings.setting(vllm_config, "prefixes") > 0
    kind = SCHEDULERS[bool(chosen.async_scheduling), kept]
    if chosen.scheduler_cls is None:
        chosen.scheduler_cls = kind
    elif not issubclass(chosen.get_scheduler_cls(), InBlocks):
        raise FastKVError(
            f"a compressed cache needs a scheduler that keeps to blocks of a prompt, got {chosen.scheduler_cls!r}; "
            "leave scheduler_cls out"
        )
    else:
        return  # it was done before; what the scheduler has made of prefix caching stays
    if vllm_config.cache_config.enable_prefix_caching:
        if not kept:
            logger.info("fastkv: prefix caching is off; prefixes=0.5 lets half of the pages keep beginnings of prompts")
        vllm_config.cache_config.enable_prefix_caching = False


@register_kv_cache_spec(manager_class=CircularBufferManager)
@dataclass(frozen=True, kw_only=True)
class FastKVSpec(CircularBufferSpec):
    """A page holds all that a layer remembers of a sequence, in one piece."""

    @classmethod
    def like(cls, spec: AttentionSpec, nbytes: int) -> FastKVSpec:
        """For a layer with that spec of vLLM's and pages of so many bytes."""
        return cls(
            block_size=TOKENS,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            dtype=spec.dtype,
            num_head_slots=1,
            tokens_per_state=TOKENS,
            state_content_bytes=nbytes,
            dcp_sharded=False,
        )

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Whether the layers can share a block table."""
        return all(isinstance(spec, FastKVSpec) for spec in kv_cache_specs.values())

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """A page. vLLM asks before it makes its scheduler and in the process of the scheduler, which is told here."""
        prepare(vllm_config)
        return self.page_size_bytes
