"""FastKVSpec: one page per request for life, as vLLM's block manager sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager
from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import register_kv_cache_spec

from . import scheduler

TOKENS = 16  # a block size for vLLM to reckon with; a page never fills up


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
        scheduler.prepare(vllm_config)
        return self.page_size_bytes
