"""How kernels are compiled ahead of time, as data for `perf.aot`: a table for each module of `fastkv.kernels`.

Block sizes, warps and stages are asked of the kernel's own module, so that what is checked here is what runs.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fastkv.kernels import (
    _flash,
    compact,
    decode_attention,
    evict,
    key_scores,
    leverage,
    moment_scores,
    noncausal_mass,
    peak_attention,
    prefill_attention,
    remember,
    select,
    slot_signals,
    vector_decode,
    window_scores,
)
from fastkv.kernels._arguments import Attended
from fastkv.kernels._evicted import CENTROIDS
from fastkv.kernels._launch import pow2
from fastkv.reference import FORMATS

SLOTS = 1040  # of a head: a budget of 1024 and 16 tokens between evictions
CUDA, HIP = VENDORS = ("80", "90", "100"), ("gfx942",)
MEANS, MANY = "*bf16", 64  # of centroids
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MODEL_TYPED = ("q", "keys", "values", "k", "v", "new_keys", "new_values", "approx_keys", "out", "slope", "sketch")
TYPES = {  # of pointers that are neither in the model's dtype nor fp32
    "*i32": (
        *("lengths", "positions", "starts", "tickets", "approx_lengths", "approx_positions", "approx_starts"),
        *("new_positions", "lists", "listed", "candidate_slots", "counts", "key", "places", "runs"),
    ),
    "*i64": ("count", "seen", "rows", "tally", "candidate_keys", "order", "query_places"),
    "*u8": ("kept", "valid", "new_valid", "mask", "protected", "query_valid"),
}
SCALES = ("key_scales_ptr", "value_scales_ptr")  # where slots hold codes
CODES = {  # of codes of keys and of values, then of their scales
    "int8": ("*i8", "*i8", "*fp32", "*fp32"),
    "fp8": ("*u8", "*u8", "*fp32", "*fp32"),
    "int4": ("*u8", "*u8", "*i8", "*i8"),
    "k8v4": ("*i8", "*u8", "*fp32", "*i8"),
}
FOUR = ("int4", "k8v4")  # whose values are packed
DIM_80 = {form: 96 if form in FOUR else 80 for form in CODES}  # a head that is no power of two
BIAS = ("bias_ptr",)  # where slots have one
ROWS = ("rows_ptr", "page")  # where the batch lives in chosen rows of pages
CHOSEN = ("INTERP", "HIP")  # constants that follow from the chip
USUAL = {f"{name}_ptr": kind for kind, names in TYPES.items() for name in names} | {"scale": "fp32", "softcap": "fp32"}


@dataclass(frozen=True)
class Variant:
    """One way a kernel is compiled.

    Attributes:
        types: argument name -> Triton type ("*bf16", "*fp32", "i32", "fp32"; "i32:16" for multiples of 16, which
            pointers always are), None where it is absent, or a tuple of those.  constants: constexpr values.
        wide: 16-byte loads are expected.  narrow: some of 2 bytes are fine, of tiles with no more numbers than threads,
            or twice as many codes.
        once: no product of so many columns or more is computed by several warps; 0 if some may be. With a few
            centroids it costs nothing twice.
        arches: where it is used, all if empty ("80", "90", "100", "gfx942").
        slot_bytes: that attention loads of a slot, 0 for kernels that are not attention over slots.
        further: launch options by chip, beside warps and stages.
    """

    name: str
    kernel: Any
    types: Mapping[str, Any]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    wide: bool = True
    narrow: bool = False
    once: int = 0
    arches: tuple[str, ...] = ()
    slot_bytes: int = 0
    further: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Whether a tensor of that name is there, as an argument or in a tuple."""
        tuples = (one._asdict() for one in self.types.values() if isinstance(one, tuple))  # type: ignore[attr-defined]
        return any(one.get(name) is not None for one in (self.types, *tuples))


def variant(
    name: str, kernel: Any, constants: Mapping[str, Any], dtype: str = "bf16", types: Mapping[str, str] | None = None,
    *, given: Mapping[str, Any] | None = None, even: tuple[str, ...] = ("stride_",), **options: Any,
) -> Variant:  # fmt: skip
    """A variant from tables for all kernels: what this one does not take is left out.

    A member of a tuple is looked up as `tuple_member`, then as `member`.

    Args:
        dtype: of the model.  types: of arguments, where they are not the usual ones.
        given: tensors that may be None, and whether they are there.  options: further attributes of the variant.
        even: how the names of numbers that are multiples of 16 begin.
    """
    usual = USUAL | {f"{one}_ptr": f"*{dtype}" for one in MODEL_TYPED} | dict(types or {})
    given = dict.fromkeys(ROWS + SCALES + BIAS, False) | dict(given or {})
    options_of = getattr(kernel, "kwargs", vars(kernel))  # the interpreter's kernel keeps them for later
    unknown = options_of.get("do_not_specialize") or ()  # numbers of which launches say nothing

    def kind(*names: str) -> str | None:
        if not next((given[name] for name in names if name in given), True):
            return None
        usually = "*fp32" if names[-1].endswith("ptr") else "i32"
        found = next((usual[name] for name in names if name in usual), usually)
        aligned = found == "i32" and names[-1].startswith(even) and names[0] not in unknown
        return f"{found}:16" if aligned else found

    hints, found = typing.get_type_hints(kernel.fn), {}
    for one in kernel.arg_names:
        members = getattr(hints.get(one), "_fields", None)
        if members:
            found[one] = hints[one](*(kind(f"{one}_{member}", member) for member in members))
        elif one not in constants and one not in CHOSEN:
            found[one] = kind(one)
    used = {n: value for n, value in constants.items() if n in kernel.arg_names}
    return Variant(name, kernel, found, used, **options)


def coded(
    name: str, types: Mapping[str, str], given: Mapping[str, Any], slots: str
) -> tuple[str, dict[str, str], dict[str, Any]]:
    """Name, types and given tensors of a variant whose slots are stored so: "model" or one of CODES."""
    if slots == "model":
        return name, dict(types), dict(given)
    codes = dict(zip(("keys_ptr", "values_ptr", *SCALES), CODES[slots]))
    return f"{name} {slots}", dict(types) | codes, dict(given) | dict.fromkeys(SCALES, True)


def slot_bytes(dim: int, slots: str, dtype: str = "bf16") -> int:
    """Bytes that attention loads of a slot, with its scales."""
    form, like = FORMATS[slots], (DTYPES[dtype], torch.device("cpu"))
    stored = *form.keys.empty((1,), dim, *like), *form.values.empty((1,), dim, *like)
    return sum(tensor.nbytes for tensor in stored if tensor is not None)


def of_compact(
    name: str, kernel: Any, dim: int, splits: int = 1,
    even: tuple[str, ...] = ("stride_k", "stride_v"), rows: bool = False, slots: str = "model", bias: bool = False,
    **launch: Any,
) -> Variant:  # fmt: skip
    """Of `fastkv.kernels.compact`."""
    tile, columns, _ = compact.MERGE[pow2(dim, 64)]
    if kernel is compact._move_kernel:
        tile, launch["num_warps"] = compact.move_tile(pow2(dim, 64), slots in FOUR)
    constants = dict(
        HEADS=8, DK=dim, DV=dim, BK=pow2(dim), BV=pow2(dim), COLUMNS=columns, ROWS=tile,
        BLOCK=compact.PLAN, SINGLE=splits == 1, HAS_MEANS=True, HAS_CROSS=True, HAS_SLOPE=True,
    )  # fmt: skip
    given = dict(bias_ptr=bias) | dict.fromkeys(ROWS, rows)
    name, types, given = coded(name + " rows" * rows + " bias" * bias, {}, given, slots)
    return variant(name, kernel, constants, types=types, given=given, even=even, **launch)


def of_merge(
    kernel: Any, dim: int, splits: int, arches: tuple[str, ...] = (), rows: bool = False,
    slots: str = "model",
) -> Variant:  # fmt: skip
    """Of the kernels of `fastkv.kernels.compact` that merge rows into the moments."""
    name = f"{kernel.__name__.strip('_')} D{dim} splits{splits}"
    narrow = dim > 256 or slots in FOUR or (slots != "model" and dim == 256)
    launch = dict(num_warps=compact.MERGE[pow2(dim, 64)][2], num_stages=2, narrow=narrow)
    return of_compact(name, kernel, dim, splits, even=("stride_",), rows=rows, arches=arches, slots=slots, **launch)


def of_decode(
    head_dim: int, splits: int, order: int | None, dtype: str = "bf16", matrix: str = "bf16", groups: int = 4,
    capped: bool = False, append: bool = True, attention: bool = False, arches: tuple[str, ...] = (),
    ragged: bool = False, sinks: bool = False, rows: bool = False, slots: str = "model",
    bias: bool = False,
) -> Variant:  # fmt: skip
    """Of `fastkv.kernels.decode_attention`."""
    tile, num_warps, num_stages = decode_attention._constants(
        DTYPES[dtype], DTYPES[matrix], 8, groups, head_dim, SLOTS, splits, order, capped, arches == HIP,
        slots != "model", slots in FOUR, ragged,
    )  # fmt: skip
    given = dict.fromkeys(("k_ptr", "v_ptr", "positions_ptr", "seen_ptr"), append)
    given |= dict.fromkeys(("accs_ptr", "tops_ptr", "totals_ptr", "tickets_ptr"), splits > 1)
    given |= dict.fromkeys(("key_mean_ptr", "value_mean_ptr"), order is not None) | dict.fromkeys(ROWS, rows)
    given |= dict(
        matrix_ptr=order == 1, spread_ptr=order == CENTROIDS, sizes_ptr=order == CENTROIDS, attention_ptr=attention,
        logits_ptr=attention, starts_ptr=ragged, sink_ptr=sinks, bias_ptr=bias, softcap=capped,
        centroids=order == CENTROIDS,
    )  # fmt: skip
    name = (
        f"decode {dtype} D{head_dim} G{groups} splits {splits} "
        + ("centroids" if order == CENTROIDS else f"order {order}")
        + (f" {matrix}" if order == 1 and matrix != dtype else "")
        + " cap" * capped + " append" * append + " attention" * attention + " ragged" * ragged + " sinks" * sinks
        + " rows" * rows + " bias" * bias
    )  # fmt: skip
    types = dict(matrix_ptr=f"*{matrix}")
    if order == CENTROIDS:
        types |= dict(key_mean_ptr=MEANS, value_mean_ptr=MEANS)
    name, types, given = coded(name, types, given, slots)
    return variant(
        name, decode_attention._decode_attention_kernel, {"TILE": tile}, dtype, types, given=given,
        even=() if ragged else ("slots", "pool"), num_warps=num_warps, num_stages=num_stages, arches=arches,
        narrow=slots in FOUR, slot_bytes=slot_bytes(head_dim, slots, dtype),
        further={chip: decode_attention.most_registers(order, tile, slots != "model", chip) for chip in CUDA},
    )  # fmt: skip


def of_evict(
    head_dim: int, slots: int, tokens: int, order: int | None = 1, dtype: str = "bf16", slope: bool = True,
    arches: tuple[str, ...] = (), ragged: bool = False, rows: bool = False, codes: str = "model",
    bias: bool = False,
) -> Variant:  # fmt: skip
    """Of `fastkv.kernels.evict`; codes: how slots are stored."""
    drop = slots - tokens
    chip = "hip" if arches == HIP else arches[0] if arches else ""
    constants, chunks, num_warps = evict._constants(
        8, slots, drop, head_dim, chip, dtype == "fp32" and codes == "model", codes in FOUR
    )
    given = dict(
        key_mean_ptr=order is not None, value_mean_ptr=order is not None, cross_ptr=order == 1, starts_ptr=ragged,
        slope_ptr=order == 1 and slope, candidate_keys_ptr=chunks, candidate_slots_ptr=chunks,
        **dict.fromkeys(ROWS, rows), bias_ptr=bias,
    )  # fmt: skip
    name = f"evict {dtype} D{head_dim} slots {slots} drop {drop} order {order}" + " slope" * slope
    even = () if ragged else ("slots", "width")
    name += " ragged" * ragged + " rows" * rows + " bias" * bias
    name, types, given = coded(name, {}, given, codes)
    return variant(
        name, evict._evict_kernel, constants, dtype, types, given=given, even=even, num_warps=num_warps,
        narrow=head_dim > 256 or codes != "model", arches=arches,
    )  # fmt: skip


def of_candidates(name: str, drop: int, ragged: bool = False, rows: bool = False) -> Variant:
    """Of the kernel of `fastkv.kernels.evict` that finds candidates among many slots."""
    constants = dict(HEADS=8, BLOCK_C=evict.MAX_SCAN, R=drop)
    options: dict[str, Any] = dict(wide=False) if ragged else dict(even=("slots", "width"))
    given = dict(starts_ptr=ragged) | dict.fromkeys(ROWS, rows)
    return variant(f"evict candidates {name}", evict._candidates_kernel, constants, given=given, **options)


def of_key_scores(kernel: Any, dim: int, metric: str, real: str, arches: tuple[str, ...] = ()) -> Variant:
    """Of `fastkv.kernels.key_scores`."""
    width = pow2(dim, 16)
    flags = dict(
        HEADS=8, D=dim, BD=width, BLOCK_N=key_scores.BLOCK_N[width], HAS_ORDER=real == "order",
        HAS_MASK=real == "mask", UNIT=metric == "unit", METRIC=key_scores.METRICS.get(metric),
    )  # fmt: skip
    name = f"{kernel.__name__.strip('_')} D{dim} {metric} {real}"
    return variant(name, kernel, flags, types=dict(lengths_ptr="*i64"), arches=arches)


def of_leverage(kernel: Any, dim: int, hip: bool, columns: int = 64) -> Variant:
    """Of `fastkv.kernels.leverage`."""
    tile, warps = leverage._tile(pow2(dim), hip)
    flags = dict(HEADS=8, D=dim, BD=pow2(dim), K=columns, BK=columns, BLOCK_N=tile, HAS_MASK=True, CENTRE=True)
    if kernel is leverage._norm_kernel:
        flags["PART"] = min(leverage._part(torch.bfloat16), columns)
    return variant(
        f"leverage {kernel.__name__.strip('_')} D{dim}" + f" columns {columns}" * (columns != 64), kernel, flags,
        even=("stride_",), num_warps=warps, num_stages=2, arches=HIP if hip else CUDA,
    )  # fmt: skip


def of_moment_scores(
    head_dim: int, matrix: str | None = "bf16", dtype: str = "bf16", attention: bool = True,
    arches: tuple[str, ...] = (),
) -> Variant:  # fmt: skip
    """Of `fastkv.kernels.moment_scores`."""
    constants, num_warps = moment_scores._constants("fp32" in (matrix, dtype), head_dim)
    return variant(
        f"moment_scores {dtype} D{head_dim} matrix {matrix}" + " attention" * attention,
        moment_scores._moment_scores_kernel, constants, dtype, dict(matrix_ptr=f"*{matrix}", out_ptr="*fp32"),
        given=dict(matrix_ptr=matrix, attention_ptr=attention), even=("slots",), num_warps=num_warps,
        arches=arches,
    )  # fmt: skip


def of_mass(kernel: Any, dim: int, ordered: bool = False, sinks: bool = False) -> Variant:
    """Of `fastkv.kernels.noncausal_mass`."""
    single, width = kernel is noncausal_mass._single_kernel, pow2(dim)
    rows, columns, warps = noncausal_mass.DOUBLE[width]
    if single:
        rows, columns, warps = noncausal_mass.SINGLE[width][0], min(256, noncausal_mass._room(2, False) // width), 8
    flags = dict(
        HEADS=8, G=4, D=dim, BD=width, HAS_ORDER=ordered, BLOCK_M=rows, BLOCK_N=columns,
        BLOCK_C=columns,
    )  # fmt: skip
    return variant(
        f"mass {kernel.__name__.strip('_')} D{dim}{' order' if ordered else ''}" + " sinks" * sinks, kernel, flags,
        given=dict(sink_ptr=sinks, softcap=False), even=("stride_",), num_warps=warps, num_stages=2,
        arches=() if (not single or width * columns <= noncausal_mass._room(2, hip=True)) and dim <= 256 else CUDA,
    )  # fmt: skip


def of_peaks(kernel: Any, dim: int, sinks: bool = False) -> Variant:
    """Of `fastkv.kernels.peak_attention`."""
    rows, columns, warps = peak_attention.TILES[pow2(dim)]
    flags = dict(HEADS=8, G=4, D=dim, BD=pow2(dim), BLOCK_M=rows, BLOCK_N=columns)
    return variant(
        f"peaks {kernel.__name__.strip('_')} D{dim}" + " sinks" * sinks, kernel, flags,
        given=dict(sink_ptr=sinks, softcap=False), num_warps=warps, num_stages=2, arches=() if dim <= 256 else CUDA,
    )  # fmt: skip


def of_prefill(
    chip: str, dim: int, dtype: str = "bf16", slope: bool = True, order: int | None = 1, groups: int = 4,
    sinks: bool = False, slots: str = "model", bias: bool = False, rows: bool = False,
    flash: bool = False,
) -> Variant | None:  # fmt: skip
    """Of `fastkv.kernels.prefill_attention` on one chip; another number than 4 of groups stands for a softcap. None
    where slots are decoded first. flash: beside flash-attn."""
    vendor = "hip" if chip in HIP else chip
    bits, cross = FORMATS[slots].values.bits, order == 1 and not slope
    case = prefill_attention.Case(
        pow2(dim, 16), DTYPES[dtype], vendor, groups != 4, order, bits, bias, cross, rows, flash
    )
    tile = prefill_attention.tile_of(case)
    if tile is None:
        return None
    sizes = prefill_attention.PrefillTile(
        8, groups, dim, dim, pow2(dim), pow2(dim), tile.rows, tile.keys,
        prefill_attention.centroids_at_once(tile, MANY if order == CENTROIDS else None),
        min(tile.seed, pow2(dim)), min(tile.slice or pow2(dim), pow2(dim)), slope,
    )  # fmt: skip
    remembered = "centroids" if order == CENTROIDS else f"order{order}"
    name = f"prefill_kernel D{dim} {dtype} G{groups} {remembered}" + " fp32 cross" * (not slope)
    name += " sinks" * sinks + " bias" * bias + " rows" * rows + " flash" * flash
    given = dict.fromkeys(("key_mean_ptr", "value_mean_ptr"), order is not None) | dict.fromkeys(ROWS, rows)
    given |= dict.fromkeys((f"attended_{one}" for one in Attended._fields), flash)
    given |= dict(
        count_ptr=order in (0, 1), matrix_ptr=order == 1, spread_ptr=order == CENTROIDS, sizes_ptr=order == CENTROIDS,
        sink_ptr=sinks, bias_ptr=bias, softcap=groups != 4, num=order == CENTROIDS, seen_ptr=False, positions_ptr=False,
        attention_ptr=False, starts_ptr=False,
    )  # fmt: skip
    types = dict(matrix_ptr=f"*{dtype}" if slope else "*fp32")
    means = sizes.BLOCK_C * sizes.SLICE  # of a tile
    if order == CENTROIDS:
        types |= dict(key_mean_ptr=MEANS, value_mean_ptr=MEANS)
    name, types, given = coded(name, types, given, slots)
    return variant(
        name, prefill_attention._prefill_kernel, {"TILE": sizes}, dtype, types, given=given, even=("slots", "stride_"),
        num_warps=tile.warps, num_stages=tile.stages, arches=(chip,), once=tile.keys,
        slot_bytes=slot_bytes(dim, slots, dtype),
        narrow=slots in FOUR or (order == CENTROIDS and means <= tile.warps * (64 if chip in HIP else 32)),
    )  # fmt: skip


def of_remember(
    vendor: tuple[str, ...], kernel: Any, dim: int, num: int = 31, most: int = 16, dtype: str = "bf16",
    rows: bool = False,
) -> Variant:  # fmt: skip
    """Of `fastkv.kernels.remember` for the chips of one vendor."""
    sizes, offers, merges = remember._constants(dim, dim)
    few, settles = kernel is remember._few_kernel, kernel is remember._settle_kernel
    lanes = pow2((num + most) // 2 + 1, remember.MOVERS) if few else pow2(remember.SETTLED // 2) if settles else 1024
    flags = dict(
        **sizes, **offers, **merges, HEADS=8, R=pow2(most, 16), LANES=lanes, SCAN=remember.SCAN, SLICE=remember.SLICE,
        ROWS=remember.ROWS, HIP=vendor == HIP,
    )  # fmt: skip
    types = dict(keys_ptr=MEANS, values_ptr=MEANS)
    types |= dict(index_ptr="*i64", gone_ptr="*i64")
    name = f"{kernel.__name__.strip('_')} {dtype} D{dim}" + f" M{num} +{most}" * few + " rows" * rows
    even = ("rows", "stride_k", "stride_v")
    warps = remember._warps(dim, lanes if few or kernel is remember._receive_kernel else 0, vendor == HIP)
    return variant(
        name, kernel, flags, dtype, types, given=dict.fromkeys(ROWS, rows), even=even, num_warps=warps, num_stages=2,
        arches=vendor,
    )  # fmt: skip


def of_remembers(vendor: tuple[str, ...]) -> list[Variant]:
    """All of `fastkv.kernels.remember` for the chips of one vendor."""
    of = functools.partial(of_remember, vendor)
    return [
        *(of(remember._few_kernel, dim) for dim in (64, 80, 96, 128, 256)),
        *(of(remember._few_kernel, 128, 63, 64), of(remember._few_kernel, 128, 510)),
        *(of(remember._few_kernel, dim, dtype="fp32") for dim in (128, 256)),
        *(of(kernel, dim) for kernel in (*JOINING, remember._receive_kernel) for dim in (64, 80, 128, 256)),
        *(of(remember._few_kernel, dim, rows=True) for dim in (64, 128, 256)),
        *(of(kernel, 128, rows=True) for kernel in (remember._gather_kernel, remember._settle_kernel)),
    ]


def of_select(block: int, single: bool, mask: bool, arches: tuple[str, ...] = ()) -> Variant:
    """Of `fastkv.kernels.select`."""
    return variant(
        f"select {block}{'' if single else ' looped'}{' mask' if mask else ''}", select._select_kernel,
        dict(HEADS=8, USE_MASK=mask, SINGLE=single, BLOCK=block, HIP=False), types=dict(counts_ptr="*i64"),
        num_warps=select.WARPS["80" if block == 4096 else ""][block], num_stages=1, wide=not single,
        arches=arches,
    )  # fmt: skip


def of_slots(guard: bool, attention: bool, rows: bool = False) -> Variant:
    """Of `fastkv.kernels.slot_signals`."""
    given = dict.fromkeys(("received_ptr", "attention_ptr", "queried_ptr"), attention) | dict(guard_ptr=guard)
    given |= dict.fromkeys(ROWS, rows)
    flags = dict(HEADS=8, BLOCK=slot_signals.BLOCK)
    return variant(
        "slots" + " guard" * guard + " attention" * attention + " rows" * rows, slot_signals._slot_kernel, flags,
        types=dict(guard_ptr="*u8"), given=given, even=("slots",),
    )  # fmt: skip


def of_vector(
    head_dim: int, splits: int, order: int | None = 1, dtype: str = "bf16", matrix: str = "bf16", groups: int = 4,
    capped: bool = False, append: bool = True, arches: tuple[str, ...] = (), ragged: bool = False,
    sinks: bool = False, rows: bool = False,
) -> Variant:  # fmt: skip
    """Of `fastkv.kernels.vector_decode`."""
    tile, num_warps, num_stages = vector_decode._constants(
        8, groups, head_dim, splits, splits, DTYPES[dtype], DTYPES[matrix], arches == HIP
    )
    given = dict.fromkeys(("k_ptr", "v_ptr", "positions_ptr", "seen_ptr"), append)
    given |= dict.fromkeys(("key_mean_ptr", "value_mean_ptr"), order is not None) | dict(matrix_ptr=order == 1)
    # where heads are unequal attention is usually collected, too
    collected = ("starts_ptr", "approx_starts_ptr", "attention_ptr", "approx_attention_ptr", "logits_ptr")
    given |= dict.fromkeys(collected, ragged) | dict(sink_ptr=sinks) | dict.fromkeys(ROWS, rows)
    absent = ("approx_values_ptr", "approx_seen_ptr", "spread_ptr", "sizes_ptr")
    given |= dict.fromkeys(absent, False) | dict(softcap=capped, approx_positions_ptr=True)
    name = (
        f"vector {dtype} D{head_dim} G{groups} splits {splits} order {order}"
        + f" {matrix}" * (matrix != dtype) + " cap" * capped + " append" * append + " ragged" * ragged
        + " sinks" * sinks + " rows" * rows
    )  # fmt: skip
    return variant(
        name, vector_decode._vector_decode_kernel, {"TILE": tile}, dtype,
        dict.fromkeys(("weight_ptr", "matrix_ptr"), f"*{matrix}"),
        given=given, even=() if ragged else ("slots", "approx_slots", "pool", "approx_pool"),
        num_warps=num_warps, num_stages=num_stages, arches=arches,
    )  # fmt: skip


def of_window(kernel: Any, dim: int, bias: bool = False, capped: bool = False) -> Variant:
    """Of `fastkv.kernels.window_scores`."""
    tile, warps, depth = window_scores.BLOCKS[pow2(dim, 16)]
    flags = dict(
        HEADS=8, G=4, D=dim, BD=pow2(dim), ROWS=window_scores.MAX_ROWS, BLOCK_N=tile, CAUSAL=True, HAS_PLACES=True,
        HAS_MASS=True, HAS_QUERIES=True, QUERIES=32,
    )  # fmt: skip
    return variant(
        f"window {kernel.__name__.strip('_')} D{dim}" + " cap" * capped + " bias" * bias, kernel, flags,
        given=dict(bias_ptr=bias, softcap=capped),
        even=("N", "keys_per_split", "stride_"), num_warps=warps, num_stages=depth,
        wide=kernel is not window_scores._merge_kernel, arches=() if dim <= 256 else CUDA,
    )  # fmt: skip


JOINING = (remember._gather_kernel, remember._offer_kernel, remember._settle_kernel)
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
        *(of(128, 1, o, "fp32", "fp32") for o in (1, CENTROIDS)),
        *(of(d, s, 1, attention=True, ragged=True) for d, s in SPLIT),
        of(128, 16, 1, capped=True),
        *(of(d, s, CENTROIDS, attention=d == 128) for d, s in SPLIT),
        *(of(d, 16, CENTROIDS, capped=True, ragged=True) for d in (80, 128, 256)),
        *(of(d, s, 1, attention=True, sinks=True) for d, s in SPLIT if d < 256),
        *(of(64, s, CENTROIDS, groups=8, sinks=True) for s in (1, 16)),
        *(of(d, s, 1, rows=True) for d in (64, 128, 256) for s in (1, 16)),
        *(of(128, s, CENTROIDS, attention=True, rows=True) for s in (1, 16)),
        of(128, 16, 1, attention=True, ragged=True, rows=True),
        *(of(d, s, None, attention=True, bias=True) for d, s in SPLIT if d < 256),
        *(of(128, 16, None, attention=True, bias=True, **how) for how in ({"slots": "int8"}, {"ragged": True})),
        *(of(d, s, 1, slots=form) for form in ("int8", "fp8") for d, s in ((80, 16), *SPLIT)),
        *(
            of(d, s, 1, slots=form)
            for form in FOUR
            for d, s in ((96, 16), *((d, max(s, 2 if d > 128 else 1)) for d, s in SPLIT))
        ),
        *(of(d, 16, CENTROIDS, attention=True, slots=form) for form in CODES for d in (64, 128)),
        *(of(128, 16, 1, dtype, dtype, slots=form) for form in CODES for dtype in ("fp16", "fp32")),
        *(of(128, 16, 1, capped=True, attention=True, ragged=True, rows=True, slots=form) for form in CODES),
    ]


def of_prefills(chip: str) -> list[Variant]:
    """Of `fastkv.kernels.prefill_attention` for one chip."""
    of = functools.partial(of_prefill, chip)
    variants = [
        *(of(dim) for dim in ((16, 32) if chip == "90" else ()) + (64, 80, 128, 256)),
        *(of(128, slope=False), of(128, "fp16", slope=False), of(128, order=None), of(128, "fp16", groups=7)),
        of(128, order=0),
        *(of(dim, sinks=True) for dim in (64, 128)),
        *(of(dim, order=CENTROIDS) for dim in (64, 80, 128, 256)),
        of(128, "fp16", order=CENTROIDS, groups=7),
        *(of(dim, "fp32", order=o) for dim in (64, 128, 256) for o in (1, CENTROIDS)),
        *(of(dim, order=None, bias=True) for dim in (64, 128)),
        *(of(dim, rows=True) for dim in (64, 128, 256)),
        *(of(128, slots=form, rows=True) for form in CODES),
        *(of(dim, order=CENTROIDS, rows=True) for dim in (64, 128, 256)),
        *(of(dim, slots=form) for form in CODES for dim in (64, DIM_80[form], 128)),
        *(of(256, slots=form) for form in CODES),
        *(of(128, order=CENTROIDS, slots=form) for form in CODES),
        *(of(128, dtype, groups=7, slots=form) for form in CODES for dtype in ("fp16", "fp32")),
        *(of(dim, order=CENTROIDS, flash=True) for dim in (64, 128, 256) if chip in CUDA),
        *(of(128, flash=True, rows=rows) for rows in (False, True) if chip in CUDA),
    ]
    return [one for one in variants if one is not None]


AOT: dict[str, list[Variant]] = {  # by module of fastkv.kernels
    "compact": [
        of_compact("compact plan D128", compact._plan_kernel, 128, even=("N",), num_stages=1),
        *(of_compact(f"compact move D{dim}", compact._move_kernel, dim) for dim in (64, 80, 128, 256)),
        *(of_merge(compact._moments_kernel, dim, 1) for dim in (64, 80, 128, 256)),
        of_merge(compact._moments_kernel, 128, 4),
        *(of_merge(compact._merge_kernel, dim, 4) for dim in (128, 256)),
        *(of_merge(compact._moments_kernel, 128, splits, rows=True) for splits in (1, 4)),
        of_merge(compact._merge_kernel, 128, 4, rows=True),
        of_compact("compact move D128", compact._move_kernel, 128, rows=True),
        *(of_compact(f"compact move D{dim}", compact._move_kernel, dim, bias=True) for dim in (64, 128)),
        of_compact("compact move D512", compact._move_kernel, 512, arches=CUDA),
        *(of_merge(compact._moments_kernel, 512, splits, arches=CUDA) for splits in (1, 4)),
        of_merge(compact._merge_kernel, 512, 4, arches=CUDA),
        *(
            of_compact(f"compact move D{d}", compact._move_kernel, d, slots=f, narrow=f in FOUR)
            for f in CODES
            for d in (64, DIM_80[f], 128, 256)
        ),
        *(of_compact("compact move D512", compact._move_kernel, 512, slots=f, narrow=True, arches=CUDA) for f in FOUR),
        *(of_merge(compact._moments_kernel, d, s, slots=f) for f in CODES for d, s in ((64, 1), (128, 4), (256, 1))),
        *(of_merge(compact._moments_kernel, 128, 1, rows=True, slots=f) for f in CODES),
    ],
    "decode_attention": [
        *(one for vendor in VENDORS for one in of_decodes(vendor)),
        *(of_decode(512, s, o, arches=CUDA) for s in (1, 16) for o in (None, 1)),
        *(of_decode(512, s, 1, matrix="fp32", arches=CUDA) for s in (1, 4)),
        of_decode(512, 16, CENTROIDS, arches=CUDA),
        of_decode(512, 16, 1, attention=True, capped=True, ragged=True, arches=CUDA),
    ],
    "evict": [
        *(of_evict(d, 1040, 1024) for d in (64, 80, 96, 128)),
        *(of_evict(256, c, t, arches=a) for c, t in ((1040, 1024), (2048, 1984)) for a in VENDORS),
        *(of_evict(128, 1040, 1024, o, slope=False) for o in (None, 0, 1)),
        *(of_evict(d, 1040, 1024, None, slope=False, bias=True) for d in (64, 128)),
        *(of_evict(128, slots, tokens) for slots, tokens in ((144, 128), (2048, 1984), (16400, 16384))),
        *(of_evict(128, 544, 512, dtype=t) for t in DTYPES if t != "fp32"),
        *(of_evict(128, 544, 512, dtype="fp32", arches=a) for a in VENDORS),
        *(of_candidates("drop 16", 16), of_candidates("drop 64", 64), of_candidates("ragged", 64, True)),
        of_candidates("rows", 16, rows=True),
        *(of_evict(d, 1040, 1024, rows=True) for d in (64, 128)),
        *(of_evict(128, 1040, 1024, ragged=True, rows=True), of_evict(128, 16400, 16384, rows=True)),
        *(of_evict(d, 1040, 1024, ragged=True) for d in (64, 128)),
        of_evict(128, 16400, 16384, ragged=True),
        *(of_evict(256, 1040, 1024, arches=a, ragged=True) for a in VENDORS),
        *(of_evict(512, c, t, arches=CUDA) for c, t in ((1040, 1024), (2048, 1984))),
        of_evict(512, 1040, 1024, arches=CUDA, ragged=True),
        *(of_evict(d, 1040, 1024, codes=form) for form in ("int8", "fp8") for d in (64, 80, 128)),
        *(of_evict(256, 1040, 1024, arches=a, codes=f) for f in ("int8", "fp8") for a in VENDORS),
        *(of_evict(128, 1040, 1024, ragged=True, rows=True, codes=form) for form in ("int8", "fp8")),
        *(of_evict(d, 1040, 1024, arches=a, codes=f) for f in FOUR for d in (64, 96, 128) for a in VENDORS),
        *(of_evict(256, 1040, 1024, arches=(a,), codes=f) for f in FOUR for a in (*CUDA, *HIP)),
        *(of_evict(128, 1040, 1024, arches=a, ragged=True, rows=True, codes=f) for f in FOUR for a in VENDORS),
    ],
    "key_scores": [
        *(of_key_scores(key_scores._sum_kernel, dim, "unit", "mask") for dim in (64, 80, 128, 256)),
        *(of_key_scores(key_scores._score_kernel, dim, "keydiff", "mask") for dim in (64, 80, 128, 256)),
        of_key_scores(key_scores._sum_kernel, 128, "sum", "order"),
        of_key_scores(key_scores._score_kernel, 128, "linf", "order"),
        of_key_scores(key_scores._sum_kernel, 512, "unit", "mask", CUDA),
        of_key_scores(key_scores._score_kernel, 512, "keydiff", "mask", CUDA),
    ],
    "leverage": [
        of_leverage(kernel, dim, hip)
        for hip in (False, True)
        for kernel in (leverage._gram_kernel, leverage._norm_kernel)
        for dim in (64, 80, 128, 256, 512)
        if not (hip and dim > 256)
    ]
    + [of_leverage(leverage._norm_kernel, dim, False, 128) for dim in (128, 256)],
    "moment_scores": [
        *(of_moment_scores(d) for d in (64, 80, 96, 128, 256)),
        *(of_moment_scores(d, "fp32") for d in (128, 256)),
        *(of_moment_scores(128, None), of_moment_scores(128, attention=False)),
        *(of_moment_scores(128, "fp16", "fp16"), of_moment_scores(128, "fp32", "fp32")),
        *(of_moment_scores(512, matrix, arches=CUDA) for matrix in ("bf16", "fp32")),
    ],
    "noncausal_mass": [
        *(of_mass(noncausal_mass._single_kernel, dim) for dim in (64, 80, 128, 256, 512)),
        of_mass(noncausal_mass._single_kernel, 128, True),
        *(of_mass(noncausal_mass._lse_kernel, dim) for dim in (128, 256, 512)),
        *(of_mass(noncausal_mass._column_kernel, dim) for dim in (128, 256, 512)),
        *(of_mass(kernel, 64, sinks=True) for kernel in (noncausal_mass._single_kernel, noncausal_mass._lse_kernel)),
    ],
    "peak_attention": [
        *(of_peaks(peak_attention._lse_kernel, dim) for dim in (64, 80, 128, 256, 512)),
        *(of_peaks(peak_attention._peak_kernel, dim) for dim in (64, 80, 128, 256, 512)),
        of_peaks(peak_attention._lse_kernel, 128, sinks=True),
    ],
    "_flash": [
        variant("prefill runs", _flash._runs_kernel, dict(CHUNK=_flash.CHUNK), wide=False, num_warps=4, arches=CUDA),
    ],
    "prefill_attention": [
        *(one for chip in (*CUDA, *HIP) for one in of_prefills(chip)),
        *(of_prefill(chip, 512, **more) for chip in CUDA for more in ({}, {"order": None})),
        *(of_prefill(chip, 512, order=CENTROIDS) for chip in CUDA),
        *(of_prefill(chip, 512, groups=7) for chip in CUDA),
    ],
    "remember": [one for vendor in VENDORS for one in of_remembers(vendor)],
    "select": [
        *(of_select(2048, True, True), of_select(2048, True, False)),
        *(of_select(8192, single, single, ("90", "100")) for single in (True, False)),
        *(of_select(4096, single, single, ("80", *HIP)) for single in (True, False)),
    ],
    "slot_signals": [of_slots(True, True), of_slots(True, False), of_slots(False, True), of_slots(True, True, True)],
    "vector_decode": [
        *(of_vector(d, 8) for d in (64, 80, 96, 128, 256)),
        *(of_vector(128, s, o) for s in (1, 8) for o in (None, 0)),
        *(of_vector(d, 4, matrix="fp32", capped=True, arches=a) for d in (128, 256) for a in VENDORS),
        of_vector(128, 4, dtype="fp32", matrix="fp32"),
        *(of_vector(128, 1, groups=16, append=False), of_vector(128, 8, dtype="fp16", matrix="fp16")),
        *(of_vector(d, 8, ragged=True) for d in (64, 128, 256)),
        *(of_vector(64, 8, sinks=True), of_vector(128, 8, ragged=True, sinks=True)),
        *(of_vector(128, 8, rows=True), of_vector(128, 8, ragged=True, rows=True)),
        *(of_vector(512, s, arches=CUDA) for s in (1, 8)),
        *(of_vector(512, 4, matrix="fp32", capped=True, arches=CUDA), of_vector(512, 8, ragged=True, arches=CUDA)),
    ],
    "window_scores": [
        *(of_window(window_scores._lse_kernel, dim) for dim in (64, 80, 128, 256, 512)),
        *(of_window(window_scores._column_kernel, dim) for dim in (64, 80, 128, 256, 512)),
        *(of_window(window_scores._lse_kernel, dim, bias=True) for dim in (64, 128)),
        *(of_window(window_scores._column_kernel, dim, bias=True) for dim in (64, 128)),
        *(of_window(window_scores._lse_kernel, 128, capped=True), of_window(window_scores._merge_kernel, 128)),
    ],
}
