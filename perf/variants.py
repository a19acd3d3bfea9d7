"""How kernels are compiled ahead of time, as data for `perf.aot`: a table for each module of `fastkv.kernels`.

Block sizes, warps and stages are asked of the kernel's own module, so that what is checked here is what runs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fastkv.kernels import (
    centroids,
    compact,
    decode_attention,
    evict,
    key_scores,
    leverage,
    moment_scores,
    noncausal_mass,
    prefill_attention,
    select,
    vector_decode,
    window_scores,
)
from fastkv.kernels._evicted import CENTROIDS
from fastkv.kernels._launch import pow2

SLOTS = 1040  # of a head: a budget of 1024 and 16 tokens between evictions
CUDA, HIP = VENDORS = ("80", "90", "100"), ("gfx942",)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MODEL_TYPED = ("q", "keys", "values", "k", "v", "new_keys", "new_values", "approx_keys", "out", "slope", "sketch")
TYPES = {  # of pointers that are neither in the model's dtype nor fp32
    "*i32": (
        *("lengths", "positions", "starts", "tickets", "approx_lengths", "approx_positions", "approx_starts"),
        *("new_positions", "lists", "listed", "candidate_slots", "counts", "key", "places"),
    ),
    "*i64": ("count", "seen", "tally", "candidate_keys", "order", "query_places"),
    "*u8": ("kept", "valid", "new_valid", "mask", "protected", "query_valid"),
}
USUAL = {f"{name}_ptr": kind for kind, names in TYPES.items() for name in names} | {"scale": "fp32", "softcap": "fp32"}


@dataclass(frozen=True)
class Variant:
    """One way a kernel is compiled. An argument in neither `types` nor `constants` is None (an absent tensor), INTERP
    is False.

    Attributes:
        types: argument name -> Triton type ("*bf16", "*fp32", "i32", "fp32").  constants: constexpr values.
        div16: integer arguments that are multiples of 16 (pointers always are).
        wide: 16-byte loads are expected.  once: no product is computed by more than one warp.
        arches: where it is used, all if empty ("80", "90", "100", "gfx942").
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    div16: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    wide: bool = True
    once: bool = False
    arches: tuple[str, ...] = ()


def variant(
    name: str, kernel: Any, constants: Mapping[str, Any], dtype: str = "bf16", types: Mapping[str, str] | None = None,
    *, given: Mapping[str, Any] | None = None, even: tuple[str, ...] = ("stride_",), **options: Any,
) -> Variant:  # fmt: skip
    """A variant from tables for all kernels: what this one does not take is left out.

    Args:
        dtype: of the model.  types: of arguments, where they are not the usual ones.
        given: tensors that may be None, and whether they are there.  options: further attributes of the variant.
        even: how the names of numbers that are multiples of 16 begin.
    """
    usual = USUAL | {f"{one}_ptr": f"*{dtype}" for one in MODEL_TYPED} | dict(types or {})
    absent = {"INTERP", *constants, *(n for n, there in (given or {}).items() if not there)}
    names = [n for n in kernel.arg_names if n not in absent]
    found = {n: usual.get(n, "*fp32" if n.endswith("_ptr") else "i32") for n in names}
    used = {n: value for n, value in constants.items() if n in kernel.arg_names}
    return Variant(name, kernel, found, used, tuple(n for n in names if n.startswith(even)), **options)


def of_centroids(dim: int, dtype: str = "bf16", capped: bool = False) -> Variant:
    """Of `fastkv.kernels.centroids`."""
    rows, block_k, warps = centroids.BLOCKS[pow2(dim, 16)]
    constants = dict(
        HEADS=8, G=4, D=dim, DV=dim, BLOCK_V=pow2(dim), BLOCK_M=rows, BLOCK_C=centroids.BLOCK_C, BLOCK_K=block_k,
        HAS_CAP=capped,
    )  # fmt: skip
    exact = dict.fromkeys(("keys_ptr", "values_ptr", "out_ptr"), "*fp32")
    name = f"centroids {dtype} D{dim}" + " cap" * capped
    return variant(name, centroids._centroid_kernel, constants, dtype, exact, num_warps=warps)


def of_compact(
    name: str, kernel: Any, dim: int, splits: int = 1, spread: bool = False,
    even: tuple[str, ...] = ("N", "stride_k", "stride_v"), **launch: int,
) -> Variant:  # fmt: skip
    """Of `fastkv.kernels.compact`."""
    constants = dict(
        HEADS=8, DK=dim, DV=dim, BK=pow2(dim), BV=pow2(dim), ROWS=compact.ROWS, COLUMNS=compact.COLUMNS,
        BLOCK=compact.PLAN, SPLITS=splits, HAS_MEANS=True, HAS_CROSS=True, HAS_SLOPE=True, SPREAD=spread,
    )  # fmt: skip
    given = dict(spread_ptr=spread, part_spread_ptr=spread)
    return variant(name, kernel, constants, given=given, even=even, **launch)


def of_merge(kernel: Any, dim: int, splits: int, spread: bool = False) -> Variant:
    """Of the kernels of `fastkv.kernels.compact` that merge rows into the moments."""
    name = f"{kernel.__name__.strip('_')} D{dim} splits{splits}" + " spread1" * spread
    launch = dict(num_warps=compact.WARPS[pow2(dim, 64)], num_stages=2)
    return of_compact(name, kernel, dim, splits, spread, even=("stride_",), **launch)


def of_decode(
    head_dim: int, splits: int, order: int | None, dtype: str = "bf16", matrix: str = "bf16", groups: int = 4,
    capped: bool = False, append: bool = True, attention: bool = False, arches: tuple[str, ...] = (),
    ragged: bool = False, spread: bool = False,
) -> Variant:  # fmt: skip
    """Of `fastkv.kernels.decode_attention`."""
    constants, num_warps, num_stages = decode_attention._constants(
        DTYPES[dtype], DTYPES[matrix], 8, groups, head_dim, SLOTS, splits, order, spread, capped, arches == HIP
    )
    given = dict.fromkeys(("k_ptr", "v_ptr", "positions_ptr", "seen_ptr"), append)
    given |= dict.fromkeys(("accs_ptr", "tops_ptr", "totals_ptr", "tickets_ptr"), splits > 1)
    given |= dict.fromkeys(("key_mean_ptr", "value_mean_ptr"), order is not None)
    given |= dict(
        matrix_ptr=order == 1, spread_ptr=spread, sizes_ptr=order == CENTROIDS.value, attention_ptr=attention,
        logits_ptr=attention, starts_ptr=ragged,
    )  # fmt: skip
    name = (
        f"decode {dtype} D{head_dim} G{groups} splits {splits} "
        + ("centroids" if order == CENTROIDS.value else f"order {order}") + " spread 1" * spread
        + (f" {matrix}" if order == 1 and matrix != dtype else "")
        + " cap" * capped + " append" * append + " attention" * attention + " ragged" * ragged
    )  # fmt: skip
    return variant(
        name, decode_attention._decode_attention_kernel, constants, dtype, dict(matrix_ptr=f"*{matrix}"),
        given=given, even=() if ragged else ("slots", "pool"),
        num_warps=num_warps, num_stages=num_stages, arches=arches,
    )  # fmt: skip


def of_evict(
    head_dim: int, slots: int, tokens: int, order: int | None = 1, dtype: str = "bf16", slope: bool = True,
    arches: tuple[str, ...] = (), ragged: bool = False, spread: bool = False,
) -> Variant:  # fmt: skip
    """Of `fastkv.kernels.evict`."""
    drop = slots - tokens
    constants, chunks, num_warps = evict._constants(8, slots, drop, head_dim, spread, arches == HIP)
    given = dict(
        key_mean_ptr=order is not None, value_mean_ptr=order is not None, cross_ptr=order == 1, starts_ptr=ragged,
        slope_ptr=order == 1 and slope, spread_ptr=spread, candidate_keys_ptr=chunks, candidate_slots_ptr=chunks,
    )  # fmt: skip
    name = f"evict {dtype} D{head_dim} slots {slots} drop {drop} order {order}" + " slope" * slope
    even = ("candidates",) if ragged else ("slots", "width", "candidates")
    return variant(
        name + " ragged" * ragged + " spread 1" * spread, evict._evict_kernel, constants, dtype,
        given=given, even=even, num_warps=num_warps, arches=arches,
    )  # fmt: skip


def of_candidates(name: str, drop: int, ragged: bool = False) -> Variant:
    """Of the kernel of `fastkv.kernels.evict` that finds candidates among many slots."""
    constants = dict(HEADS=8, BLOCK_C=evict.MAX_SCAN, R=drop)
    options: dict[str, Any] = dict(wide=False) if ragged else dict(even=("slots", "width"))
    given = dict(starts_ptr=ragged)
    return variant(f"evict candidates {name}", evict._candidates_kernel, constants, given=given, **options)


def of_key_scores(kernel: Any, dim: int, metric: str, real: str) -> Variant:
    """Of `fastkv.kernels.key_scores`."""
    width = pow2(dim, 16)
    flags = dict(
        HEADS=8, D=dim, BD=width, BLOCK_N=key_scores.BLOCK_N[width], SPLITS=4, HAS_ORDER=real == "order",
        HAS_MASK=real == "mask", UNIT=metric == "unit", METRIC=key_scores.METRICS.get(metric),
    )  # fmt: skip
    name = f"{kernel.__name__.strip('_')} D{dim} {metric} {real}"
    even = ("N", "window", "rows_per_split", "stride_")
    return variant(name, kernel, flags, types=dict(lengths_ptr="*i64"), even=even)


def of_leverage(kernel: Any, dim: int, hip: bool) -> Variant:
    """Of `fastkv.kernels.leverage`."""
    tile, warps = leverage._tile(pow2(dim), hip)
    flags = dict(HEADS=8, D=dim, BD=pow2(dim), K=64, BK=64, BLOCK_N=tile, HAS_MASK=True, CENTRE=True)
    return variant(
        f"leverage {kernel.__name__.strip('_')} D{dim}", kernel, flags, even=("N", "rows_per_split", "stride_"),
        num_warps=warps, num_stages=2, arches=HIP if hip else CUDA,
    )  # fmt: skip


def of_moment_scores(
    head_dim: int, matrix: str | None = "bf16", dtype: str = "bf16", attention: bool = True
) -> Variant:
    """Of `fastkv.kernels.moment_scores`."""
    constants, num_warps = moment_scores._constants("fp32" in (matrix, dtype), head_dim)
    return variant(
        f"moment_scores {dtype} D{head_dim} matrix {matrix}" + " attention" * attention,
        moment_scores._moment_scores_kernel, constants, dtype, dict(matrix_ptr=f"*{matrix}", out_ptr="*fp32"),
        given=dict(matrix_ptr=matrix, attention_ptr=attention), even=("slots",), num_warps=num_warps,
    )  # fmt: skip


def of_mass(kernel: Any, dim: int, ordered: bool = False) -> Variant:
    """Of `fastkv.kernels.noncausal_mass`."""
    single, width = kernel is noncausal_mass._single_kernel, pow2(dim)
    rows, columns, warps = (noncausal_mass.SINGLE[width][0], 256, 8) if single else noncausal_mass.DOUBLE[width]
    flags = dict(
        HEADS=8, G=4, D=dim, BD=width, HAS_ORDER=ordered, HAS_CAP=False, BLOCK_M=rows, BLOCK_N=columns,
        BLOCK_C=columns,
    )  # fmt: skip
    return variant(
        f"mass {kernel.__name__.strip('_')} D{dim}{' order' if ordered else ''}", kernel, flags,
        even=("chunk", "N", "stride_"), num_warps=warps, num_stages=2,
        arches=() if not single or width * 256 <= noncausal_mass._room(2, hip=True) else CUDA,
    )  # fmt: skip


def of_prefill(
    chip: str, dim: int, dtype: str = "bf16", slope: bool = True, order: int = 1, groups: int = 4,
    spread: bool = False,
) -> Variant:  # fmt: skip
    """Of `fastkv.kernels.prefill_attention` on one chip; another number than 4 of groups stands for a softcap."""
    hip = chip in HIP
    rows, tile, warps, depth = prefill_attention._blocks(pow2(dim, 16), DTYPES[dtype], "hip" if hip else chip)
    tile = prefill_attention.CAP_TILE_HIP if hip and groups != 4 else tile
    flags = dict(
        HEADS=8, G=groups, D=dim, DV=dim, BD=pow2(dim), BV=pow2(dim), BLOCK_M=rows, BLOCK_N=tile,
        SEED=prefill_attention.SEED[pow2(dim)], ORDER=order, HAS_SLOPE=slope, HAS_CAP=groups != 4, SPREAD=spread,
    )  # fmt: skip
    name = f"prefill_kernel D{dim} {dtype} G{groups} order{order}" + " fp32 cross" * (not slope) + " spread1" * spread
    return variant(
        name, prefill_attention._prefill_kernel, flags, dtype, {} if slope else dict(slope_ptr="*fp32"),
        given=dict(spread_ptr=spread), even=("slots", "stride_"),
        num_warps=warps, num_stages=depth, arches=(chip,), once=(chip, pow2(dim)) != ("80", 256),
    )  # fmt: skip


def of_select(block: int, single: bool, mask: bool) -> Variant:
    """Of `fastkv.kernels.select`."""
    return variant(
        f"select {block}{'' if single else ' looped'}{' mask' if mask else ''}", select._select_kernel,
        dict(HEADS=8, USE_MASK=mask, SINGLE=single, BLOCK=block), types=dict(counts_ptr="*i64"), even=("N",),
        num_warps=select.WARPS[block], num_stages=1,
    )  # fmt: skip


def of_vector(
    head_dim: int, splits: int, order: int | None = 1, dtype: str = "bf16", matrix: str = "bf16", groups: int = 4,
    capped: bool = False, append: bool = True, arches: tuple[str, ...] = (), ragged: bool = False,
) -> Variant:  # fmt: skip
    """Of `fastkv.kernels.vector_decode`."""
    constants, num_warps, num_stages = vector_decode._constants(
        8, groups, head_dim, splits, splits, order, capped, DTYPES[dtype], DTYPES[matrix], arches == HIP
    )
    given = dict.fromkeys(("k_ptr", "v_ptr", "positions_ptr", "seen_ptr"), append)
    given |= dict.fromkeys(("key_mean_ptr", "value_mean_ptr"), order is not None) | dict(matrix_ptr=order == 1)
    # where heads are unequal attention is usually collected, too
    collected = ("starts_ptr", "approx_starts_ptr", "attention_ptr", "approx_attention_ptr", "logits_ptr")
    given |= dict.fromkeys(collected, ragged)
    name = (
        f"vector {dtype} D{head_dim} G{groups} splits {splits} order {order}"
        + f" {matrix}" * (matrix != dtype) + " cap" * capped + " append" * append + " ragged" * ragged
    )  # fmt: skip
    return variant(
        name, vector_decode._vector_decode_kernel, constants, dtype,
        dict.fromkeys(("weight_ptr", "matrix_ptr"), f"*{matrix}"),
        given=given, even=() if ragged else ("slots", "approx_slots", "pool", "approx_pool"),
        num_warps=num_warps, num_stages=num_stages, arches=arches,
    )  # fmt: skip


def of_window(kernel: Any, dim: int, **change: bool) -> Variant:
    """Of `fastkv.kernels.window_scores`."""
    tile, warps, depth = window_scores.BLOCKS[pow2(dim, 16)]
    flags = dict(
        HEADS=8, G=4, D=dim, BD=pow2(dim), ROWS=window_scores.MAX_ROWS, BLOCK_N=tile, CAUSAL=True, HAS_PLACES=True,
        HAS_CAP=False, HAS_MASS=True, HAS_QUERIES=True, QUERIES=32,
    )  # fmt: skip
    return variant(
        f"window {kernel.__name__.strip('_')} D{dim} {change or ''}", kernel, flags | change,
        even=("N", "keys_per_split", "stride_"), num_warps=warps, num_stages=depth,
        wide=kernel is not window_scores._merge_kernel,
    )  # fmt: skip


SPLIT = tuple((d, s) for d in (64, 128, 256) for s in (1, 16))


def of_decodes(vendor: tuple[str, ...]) -> list[Variant]:
    """Of `fastkv.kernels.decode_attention` for the chips of one vendor."""
    of = functools.partial(of_decode, arches=vendor)
    return [
        *(of(d, s, 1) for d in (64, 80, 96, 128, 256) for s in (1, 16)),
        *(of(128, s, o) for s in (1, 16) for o in (None, 0)),
        *(of(d, s, 1, attention=True, capped=True) for d in (128, 256) for s in (1, 16)),
        *(of(d, s, 1, matrix="fp32") for d in (128, 256) for s in (1, 4)),
        of(128, 32, 1, groups=16, attention=True),
        *(of(128, 8, 1, groups=3), of(128, 4, 1, groups=1)),
        *(of(128, 4, 1, append=False), of(128, 4, 1, "fp16", "fp16")),
        *(of(128, 1, o, "fp32", "fp32", spread=s) for o, s in ((1, False), (CENTROIDS.value, True))),
        *(of(d, s, 1, attention=True, ragged=True) for d, s in SPLIT),
        *(of(d, s, 1, spread=True) for d, s in SPLIT),
        *(of(128, 16, 0, spread=True), of(128, 16, 1, spread=True, capped=True)),
        *(of(d, s, CENTROIDS.value, spread=True, attention=d == 128) for d, s in SPLIT),
        *(of(d, 16, CENTROIDS.value, spread=True, capped=True, ragged=True) for d in (80, 128, 256)),
    ]


def of_prefills(chip: str) -> list[Variant]:
    """Of `fastkv.kernels.prefill_attention` for one chip."""
    of = functools.partial(of_prefill, chip)
    return [
        *(of(dim) for dim in ((16, 32) if chip == "90" else ()) + (64, 80, 128, 256)),
        *(of(128, slope=False), of(128, "fp16", slope=False), of(128, order=-1), of(128, "fp16", groups=7)),
        *(of(dim, spread=True) for dim in (64, 128, 256)),
        *(of(128, slope=False, spread=True), of(128, order=0, spread=True)),
    ]


AOT: dict[str, list[Variant]] = {  # by module of fastkv.kernels
    "centroids": [
        *(of_centroids(dim) for dim in (64, 80, 128, 256)),
        *(of_centroids(128, "fp16", capped=True), of_centroids(128, "fp32"), of_centroids(256, capped=True)),
    ],
    "compact": [
        of_compact("compact plan D128", compact._plan_kernel, 128, num_stages=1),
        *(of_compact(f"compact move D{dim}", compact._move_kernel, dim) for dim in (64, 80, 128, 256)),
        *(of_merge(compact._moments_kernel, dim, 1) for dim in (64, 80, 128, 256)),
        of_merge(compact._moments_kernel, 128, 4),
        *(of_merge(compact._merge_kernel, dim, 4) for dim in (128, 256)),
        *(of_merge(compact._moments_kernel, dim, splits, True) for dim, splits in ((128, 1), (128, 4), (256, 1))),
        of_merge(compact._merge_kernel, 128, 4, True),
    ],
    "decode_attention": [one for vendor in VENDORS for one in of_decodes(vendor)],
    "evict": [
        *(of_evict(d, 1040, 1024) for d in (64, 80, 96, 128)),
        *(of_evict(256, c, t, arches=a) for c, t in ((1040, 1024), (2048, 1984)) for a in VENDORS),
        *(of_evict(128, 1040, 1024, o, slope=False) for o in (None, 0, 1)),
        *(of_evict(128, slots, tokens) for slots, tokens in ((144, 128), (2048, 1984), (16400, 16384))),
        *(of_evict(128, 544, 512, dtype=t) for t in DTYPES),
        *(of_candidates("drop 16", 16), of_candidates("drop 64", 64), of_candidates("ragged", 64, True)),
        *(of_evict(d, 1040, 1024, ragged=True) for d in (64, 128)),
        *(of_evict(128, 16400, 16384, ragged=True), of_evict(128, 1040, 1024, 0, slope=False, spread=True)),
        *(of_evict(d, 1040, 1024, spread=True) for d in (64, 128)),
        *(of_evict(256, 1040, 1024, arches=a, spread=True) for a in VENDORS),
        *(of_evict(256, 1040, 1024, arches=a, ragged=True) for a in VENDORS),
    ],
    "key_scores": [
        *(of_key_scores(key_scores._sum_kernel, dim, "unit", "mask") for dim in (64, 80, 128, 256)),
        *(of_key_scores(key_scores._score_kernel, dim, "keydiff", "mask") for dim in (64, 80, 128, 256)),
        of_key_scores(key_scores._sum_kernel, 128, "sum", "order"),
        of_key_scores(key_scores._score_kernel, 128, "linf", "order"),
    ],
    "leverage": [
        of_leverage(kernel, dim, hip)
        for hip in (False, True)
        for kernel in (leverage._gram_kernel, leverage._norm_kernel)
        for dim in (64, 80, 128, 256)
    ],
    "moment_scores": [
        *(of_moment_scores(d) for d in (64, 80, 96, 128, 256)),
        *(of_moment_scores(d, "fp32") for d in (128, 256)),
        *(of_moment_scores(128, None), of_moment_scores(128, attention=False)),
        *(of_moment_scores(128, "fp16", "fp16"), of_moment_scores(128, "fp32", "fp32")),
    ],
    "noncausal_mass": [
        *(of_mass(noncausal_mass._single_kernel, dim) for dim in (64, 80, 128, 256)),
        of_mass(noncausal_mass._single_kernel, 128, True),
        *(of_mass(noncausal_mass._lse_kernel, dim) for dim in (128, 256)),
        *(of_mass(noncausal_mass._column_kernel, dim) for dim in (128, 256)),
    ],
    "prefill_attention": [one for chip in (*CUDA, *HIP) for one in of_prefills(chip)],
    "select": [
        *(of_select(1024, True, True), of_select(2048, True, False)),
        *(of_select(8192, True, True), of_select(8192, False, False)),
    ],
    "vector_decode": [
        *(of_vector(d, 8) for d in (64, 80, 96, 128, 256)),
        *(of_vector(128, s, o) for s in (1, 8) for o in (None, 0)),
        *(of_vector(d, 4, matrix="fp32", capped=True, arches=a) for d in (128, 256) for a in VENDORS),
        of_vector(128, 4, dtype="fp32", matrix="fp32"),
        *(of_vector(128, 1, groups=16, append=False), of_vector(128, 8, dtype="fp16", matrix="fp16")),
        *(of_vector(d, 8, ragged=True) for d in (64, 128, 256)),
    ],
    "window_scores": [
        *(of_window(window_scores._lse_kernel, dim) for dim in (64, 80, 128, 256)),
        *(of_window(window_scores._column_kernel, dim) for dim in (64, 80, 128, 256)),
        *(of_window(window_scores._lse_kernel, 128, HAS_CAP=True), of_window(window_scores._merge_kernel, 128)),
    ],
}
