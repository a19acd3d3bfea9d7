"""Attention over pages: what vLLM calls in each layer, and what it is told of the batch before."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from math import lcm
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config, get_layers_from_vllm_config
from vllm.distributed import get_tp_group, get_world_group
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from ...backend import Parallel, check_backend, resolve
from ...cache import CacheWorkspace
from ...cache.layout import LayerPlan
from ...cache.pages import PagedLayer, PagedRule, Traffic, warm_up
from ...config import Config, check_shares
from ...errors import FastKVError
from . import settings
from .batch import Batch, Batcher
from .requests import Menu, RequestArguments
from .scheduler import FastKVSpec
from .settings import Kind

logger = init_logger(__name__)
SLIDING_WINDOW = 5  # its place among the arguments of an implementation


class Compression:
    """What the layers of a model have in common.

    Attributes: config: the server's settings.  shared: scratch of kernels, processes that share heads.
        batches: describes them to all layers, if they share a block table.
        classes: the server's own settings, None, and those with a name.
        latest: of the model that was made last in this process.
    """

    latest: ClassVar[Compression | None] = None

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.classes: list[Kind] = [None, *(settings.setting(vllm_config, "classes") or ())]
        self.configs = {
            kind: settings.fitted(settings.config_of(vllm_config, kind), vllm_config) for kind in self.classes
        }
        self.config = self.configs[None]
        group = get_tp_group()
        parallel = Parallel(group.rank_in_group, group.world_size, group.device_group) if group.world_size > 1 else None
        positions, sequences = vllm_config.model_config.max_model_len, vllm_config.scheduler_config.max_num_seqs
        self.shared = CacheWorkspace(parallel, self.config.evict_every, positions, sequences)
        self.device = torch.device(vllm_config.device_config.device_type)
        self.warm: set[tuple[Any, ...]] = set()
        self.batches = self.batcher()

    def batcher(self) -> Batcher:
        """What describes batches to layers that share a block table."""
        sequences = self.vllm_config.scheduler_config.max_num_seqs
        copies = settings.setting(self.vllm_config, "prefixes") > 0
        return Batcher(self.config, sequences, copies, RequestArguments.kinds)

    def warm_up(self, impl: FastKVImpl, layer: Any, device: torch.device) -> None:
        """Compile what the layer's kernels will need and make their scratch, once for layers that are alike.

        vLLM measures itself meanwhile, so that what it then gives to pages leaves room for both.
        """
        if resolve(self.config.backend, device) != "triton":
            return
        how = impl.num_heads, impl.scale, impl.softcap, impl.sinks is not None
        for kind, rules in self.rules.items():
            rule = rules[layer.layer_name]
            sort = rule.layer.layout, rule.layer.spec, rule.form.nbytes, device, *how
            if sort in self.warm:
                continue
            self.warm.add(sort)
            sequences = self.vllm_config.scheduler_config.max_num_seqs
            traffic = Traffic(self.vllm_config.model_config.max_model_len, self.config.prefill_block, sequences)
            warm_up(partial(impl.made, layer, kind), rule, traffic, device)
            room = rule.scratch_bytes(impl.num_heads, sequences, device)
            what = room / 1e6, sequences, layer.layer_name
            logger.info("fastkv: %.1f MB of scratch for up to %d sequences in %s", *what)

    @classmethod
    def current(cls) -> Compression | None:
        """Of the model that is being made, the same for all its layers; None without settings."""
        vllm_config = get_current_vllm_config()
        if not settings.asked(vllm_config):
            cls.latest = None
        elif cls.latest is None or cls.latest.vllm_config is not vllm_config:
            cls.latest = cls(vllm_config)
        return cls.latest

    @cached_property
    def rules(self) -> dict[Kind, dict[str, PagedRule]]:
        """What each compressed layer needs, by name of the layer, of the settings of each kind of request. All of the
        model exist by now.
        """
        configs = {kind: settings.calibrated(config, self.vllm_config) for kind, config in self.configs.items()}
        made, own = {kind: self._rules(config) for kind, config in configs.items()}, configs[None]
        for size in Menu.of(self.vllm_config).sizes:
            smaller = self._rules(replace(own, budget=replace(own.budget, tokens=size)))
            for name, rule in smaller.items():  # what was fitted is the server's: one copy of it, a layer's buffers
                fitted = {part: getattr(made[None][name].layer, part) for part in ("rotary", "queries", "weight")}
                smaller[name] = replace(rule, layer=replace(rule.layer, **fitted))
            made[size] = smaller
        return made

    def _rules(self, config: Config) -> dict[str, PagedRule]:
        """`rules` for these settings."""
        layers = compressed(self.vllm_config)
        if self.others and config.budget.shared is not None and config.budget.layers == "uniform":
            # Pages are as large as the largest, so heads share within their layer only.
            config = replace(config, budget=replace(config.budget, layers=(1.0,) * len(layers)))
        heads = [layer.num_kv_heads * self.shared.parallel.size for layer in layers.values()]
        config.budget.check_layers(len(layers))
        check_shares(config, heads)
        made = {}
        for place, (name, layer) in enumerate(layers.items()):
            keys, values = (
                torch.empty(1, layer.num_kv_heads, 0, dim, dtype=layer.kv_cache_torch_dtype, device=self.device)
                for dim in (layer.head_size, layer.head_size_v)
            )
            plan = LayerPlan(config, extract_layer_index(name), place, len(layers), self.shared.parallel)
            made[name] = PagedRule.of(plan, keys, values)
        return made

    @cached_property
    def others(self) -> list[KVCacheSpec]:
        """What vLLM keeps caches of besides, in blocks of the size that it will choose; it then gives every layer a
        page as large as the largest.
        """
        if not self.vllm_config.model_config.is_hybrid:  # it fits states to our pages, which are not known yet
            current_platform.update_block_size_for_backend(self.vllm_config)  # vLLM 0.33 calls it after this
        ours = compressed(self.vllm_config)
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)  # type: ignore[type-abstract]
        specs = [layer.get_kv_cache_spec(self.vllm_config) for name, layer in layers.items() if name not in ours]
        return [spec for spec in specs if spec is not None]

    def equal(self, page: int) -> int:
        """The bytes of a page where there are other layers: vLLM makes larger blocks of a multiple of theirs; of any
        other page most stays empty. Prefixes are shared in such blocks and need small ones.
        """
        unit = lcm(*(spec.page_size_bytes for spec in self.others))
        return page if settings.setting(self.vllm_config, "prefixes") or unit > page else -(-page // unit) * unit

    def bound_captures(self, request: int) -> None:
        """Capture no steps of more requests, of so many bytes each, than fit into half of the memory: to see what they
        take, vLLM captures them in a cache of as many requests.
        """
        config, cache = self.vllm_config.compilation_config, self.vllm_config.cache_config
        sizes = config.cudagraph_capture_sizes
        if self.device.type == "cpu" or not sizes or cache.kv_cache_memory_bytes is not None:
            return
        free, total = torch.cuda.mem_get_info(self.device)
        most = fewest(int((free - (1 - cache.gpu_memory_utilization) * total) / 2 / request))
        kept = [size for size in sizes if size <= max(most, min(sizes))]
        if len(kept) < len(sizes):
            logger.info(
                "fastkv: steps of more than %d requests are not captured; with kv_cache_memory_bytes they are", most
            )
            config.cudagraph_capture_sizes, config.max_cudagraph_capture_size = kept, max(kept)

    def bind(self) -> None:
        """Let every compressed layer tell vLLM its own page. All of the model exist by now."""
        if all(layer.attn_backend.page is not None for layer in compressed(self.vllm_config).values()):
            return  # every layer asks, each time its weights are loaded
        # With fewer tokens calibrated heads differ more, so that a layer may need more than with all.
        forms = [{name: rule.form.nbytes for name, rule in rules.items()} for rules in self.rules.values()]
        pages = {name: max(form[name] for form in forms) for name in forms[0]}
        if self.others:
            pages = dict.fromkeys(pages, self.equal(max(pages.values())))
        self.bound_captures(sum(pages.values()))
        for name, layer in compressed(self.vllm_config).items():
            base = layer.attn_backend  # of the same name, by which vLLM groups layers
            layer.attn_backend = type(base.__name__, (base,), {"page": pages[name], "__module__": base.__module__})
            for number, kind in enumerate(self.classes):  # as buffers, which vLLM brings back after sleep
                fitted = self.rules[kind][name].layer
                turning = None if fitted.rotary is None else fitted.rotary.frequencies
                for place, tensor in enumerate((turning, fitted.weight, *(fitted.queries or ()))):
                    if tensor is not None:
                        layer.register_buffer(f"fastkv_{number}_{place}", tensor, persistent=False)


def fewest(number: int) -> int:
    """The least of what all processes of the engine say: captured steps of all of them must have the same sizes."""
    group = get_world_group()
    if group.world_size > 1:
        told = torch.tensor(number)
        torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MIN, group.cpu_group)
        number = int(told)
    return number


def compressed(vllm_config: Any) -> dict[str, Any]:
    """The layers of the model that have a compressed cache, in order."""
    layers = get_layers_from_vllm_config(vllm_config, Attention)
    return {name: layer for name, layer in layers.items() if isinstance(layer.impl, FastKVImpl)}


class BatchBuilder(AttentionMetadataBuilder[Batch]):
    """Describes a batch to the layers, see `Batcher`. Steps of decoding come first in it."""

    reorder_batch_threshold = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        known = compressed(vllm_config)
        self.layers = [known[name] for name in layer_names]
        common = self.layers[0].impl.common
        # Beside others, layers are in several groups with a block table each.
        self.batches = common.batcher() if common.others else common.batches
        for layer in self.layers:  # the small cache, in which vLLM has captured steps to see what they take, is to go
            layer.impl.close()

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Batch:
        """For a batch as vLLM describes it; what comes before it in the layers is done."""
        batch = self.batches.batch(common_attn_metadata)
        for kind, part in batch.items():
            for layer in self.layers:
                part.prepare(layer.impl.opened(layer, kind))
        return batch

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Batch:
        """For a step that is captured, and then replayed for other sequences."""
        for layer in self.layers:
            layer.impl.opened(layer, None)
        return self.batches.nobody(common_attn_metadata.num_reqs, self.device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """A step that decodes launches the same whoever is in it, where all requests have the same settings."""
        alike = not settings.asked(vllm_config) or settings.setting(vllm_config, "classes") is None
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if alike else AttentionCGSupport.NEVER


class FastKVImpl(AttentionImpl[Batch]):
    """Attention of one layer over what its pages hold, and what becomes of the new tokens there."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.softcap, self.sinks = num_kv_heads or num_heads, logits_soft_cap or None, sinks
        self.kv_cache_dtype = kv_cache_dtype
        unusable = {
            "ALiBi": alibi_slopes is not None,
            "a sliding window": sliding_window is not None,
            f"attention of type {attn_type!r}": attn_type != AttentionType.DECODER,
            "keys of another layer": kv_sharing_target_layer_name is not None,
        }
        for what, there in unusable.items():
            if there:
                raise FastKVError(f"a compressed layer cannot have {what}; use the model without fastkv")
        common = Compression.current()
        if common is None:
            raise FastKVError(
                f"the backend of fastkv was chosen without settings; give additional_config[{settings.KEY!r}]"
            )
        self.common = common
        config, groups = self.common.config, num_heads // self.num_kv_heads
        device, dtype = self.common.device, torch.get_default_dtype()
        for slots in {one.slots.name for one in self.common.configs.values()}:
            check_backend(config.backend, device, dtype, head_size, groups, slots=slots)
        self.pages: Tensor | None = None
        self.paged: dict[Kind, PagedLayer] = {}

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """vLLM calls it when all layers of the model are made, and before it asks for their pages."""
        self.common.bind()

    def close(self) -> None:
        """Let go of the pages."""
        self.pages, self.paged = None, {}

    def opened(self, layer: Any, kind: Kind) -> PagedLayer:
        """The layer in the pages that vLLM has allocated last, for requests of that kind."""
        if layer.kv_cache is not self.pages:  # vLLM captures steps with a small cache first, to see what they take
            self.close()
            self.pages = layer.kv_cache
        if kind not in self.paged:
            self.paged[kind] = self.made(layer, kind, layer.kv_cache)
        return self.paged[kind]

    def made(self, layer: Any, kind: Kind, kv_cache: Tensor) -> PagedLayer:
        """The layer in these pages, [P, ...], for requests of that kind."""
        pages = kv_cache.view(torch.uint8).view(len(kv_cache), -1)
        rule = self.common.rules[kind][layer.layer_name]
        return PagedLayer(rule, pages, self.num_heads, self.scale, self.softcap, self.common.shared, self.sinks)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Batch | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the attention of all tokens of the batch, [N, Hq, D], into `output`.

        Args: query [N, Hq, D]; key, value [N, Hkv, D]; kv_cache: the pages; attn_metadata: None while vLLM measures
            itself.
        """
        batch = attn_metadata
        if batch is None:
            self.common.warm_up(self, layer, query.device)
            return output.zero_()
        for kind, part in batch.items():
            part.attend(self.paged[kind], query, key, value, output)
        return output


class FastKVBackend(AttentionBackend):
    """For layers that attend to everything.

    Attributes: page: bytes of a page of the layer that has this class for itself, None before `Compression.bind`.
    """

    page: ClassVar[int | None] = None
    supported_dtypes: ClassVar = [torch.float32, torch.bfloat16, torch.float16]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        """As in `AttentionBackendEnum`."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FastKVImpl]:
        """What attends."""
        return FastKVImpl

    @staticmethod
    def get_builder_cls() -> type[BatchBuilder]:
        """What describes a batch."""
        return BatchBuilder

    @classmethod
    def supports_sink(cls) -> bool:
        """Learned attention sinks take part."""
        return True

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """The pages of a layer."""
        assert cls.page is not None
        return FastKVSpec.like(spec, cls.page)


class CPUImpl(FastKVImpl):
    """Ours for layers that attend to everything, if there are settings; vLLM's own for the others."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Arguments as in `FastKVImpl`."""
        window = args[SLIDING_WINDOW] if len(args) > SLIDING_WINDOW else kwargs.get("sliding_window")
        if Compression.current() is not None and window is None:
            return super().__new__(cls)
        return CPUAttentionBackendImpl(*args, **kwargs)

    def do_kv_cache_update(self, *args: Any) -> None:
        """Nothing: `forward` does it. vLLM's own backend stores keys before it attends."""


class CPUBuilder(BatchBuilder):
    """Ours for our pages, vLLM's own for the others."""

    def __new__(cls, kv_cache_spec: Any, *args: Any, **kwargs: Any) -> Any:
        """Arguments as in `BatchBuilder`."""
        kind = BatchBuilder if isinstance(kv_cache_spec, FastKVSpec) else CPUAttentionMetadataBuilder
        return kind(kv_cache_spec, *args, **kwargs)


class CPUBackend(CPUAttentionBackend):
    """A CPU has one backend for all layers, so this one deals them out: ours, or vLLM's own.

    Attributes: page: as in `FastKVBackend`; None for layers of vLLM's own.
    """

    page: ClassVar[int | None] = None

    @staticmethod
    def get_impl_cls() -> Any:
        """What attends."""
        return CPUImpl

    @staticmethod
    def get_builder_cls() -> Any:
        """What describes a batch."""
        return CPUBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        """A page of ours is never split."""
        if isinstance(kv_cache_spec, FastKVSpec):
            return [MultipleOf(1)]
        return CPUAttentionBackend.get_supported_kernel_block_sizes(kv_cache_spec)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """The pages of a layer."""
        return spec if cls.page is None else FastKVSpec.like(spec, cls.page)
