"""What launchers share: checks, sizes, the scratch of split kernels."""

from __future__ import annotations

import functools
from math import prod

import torch
import triton
from torch import Tensor

from ..backend import MAX_COMMON_HEAD_DIM, MAX_HEAD_DIM
from ..errors import FastKVError, check_groups, check_shape
from ..reference import Centroids, LayerState, Slots
from ..reference.slots import GROUP
from ._arguments import ResultPointers

INTERPRET = bool(triton.knobs.runtime.interpret)  # fixed at import, as it is for every @triton.jit
MIN_ROWS = 16  # tl.dot pads fewer rows to this anyway
ATTENTION_TILE = 8192  # logits at once when attention is added up
SHARED = 4  # programs at least of a head, on average, where heads have unequally many slots
PER_SM = 2  # programs of any decode kernel that an SM holds at once (perf.aot): they are to run in one wave
ALIGNED = 32  # numbers: 128 bytes, a line of a GPU's cache
SMS = 132  # where there are none, in the interpreter: those of an H200


def cdiv(number: int, by: int) -> int:
    """number / by, rounded up. Triton's own is for kernels, and takes microseconds on the host."""
    return -(-number // by)


def pow2(number: int, least: int = 1) -> int:
    """The smallest power of two that is at least `number` and `least`."""
    return max(least, 1 << max(number - 1, 0).bit_length())


def attention_slots(rows: int) -> int:
    """Slots at once when the attention of so many query heads, a power of two, is added up."""
    return min(2048, ATTENTION_TILE // rows)


def on_hip() -> bool:
    """Whether kernels are compiled for AMD."""
    return torch.version.hip is not None and not INTERPRET


def stages(wanted: int, hip: bool | None = None) -> int:
    """Software-pipeline depth: AMD has a quarter of the shared memory and pipelines through registers."""
    return min(wanted, 2) if (on_hip() if hip is None else hip) else wanted


def addressed(op: str, slots: Tensor, starts: Tensor | None) -> Tensor:
    """What each head indexes into, [B, Hkv, C or S, ...]: the slots, or the whole slab [B, S, ...] where `starts`
    [B, Hkv + 1] says which stretch is whose. A view, so that both layouts are checked and measured alike.

    Raises: FastKVError for starts of another batch.
    """
    if starts is None:
        return slots
    check_shape(op, "starts", starts, (slots.shape[0], None))
    return slots[:, None].expand(-1, starts.shape[1] - 1, *slots.shape[1:])


def check_contiguous(op: str, each: bool = False, /, **tensors: Tensor | None) -> None:
    """Raise FastKVError for the first tensor that is not contiguous, or of which `each` sequence's part is not: kernels
    index by shape alone and never copy."""
    for name, tensor in tensors.items():
        if tensor is not None and not (tensor.is_contiguous() or (each and dense_rows(tensor))):
            raise FastKVError(
                f"{op}: {name} must be contiguous{' for each sequence' * each}, got strides {tensor.stride()} for "
                f"shape {list(tensor.shape)}; call .contiguous() where it is made"
            )


def check_rows(op: str, state: LayerState, *pointers: tuple) -> int | None:
    """How far it is from one row of these tensors of a state to the next, in units of 16 bytes, if they are views of
    pages; None if each lies by itself. pointers: tuples of `_arguments`.

    Raises: FastKVError for the first tensor that is not contiguous or, in pages, whose rows are not or are elsewhere.
    """
    keys = state.exact.keys
    named = {name.removesuffix("_ptr"): tensor for one in pointers for name, tensor in zip(one._fields, one)}  # type: ignore[attr-defined]
    if state.rows is None or keys.stride(0) == prod(keys.shape[1:]):
        check_contiguous(op, rows=state.rows, **named)
        return None
    page = keys.stride(0) * keys.itemsize
    for name, tensor in named.items():
        if tensor is not None and (tensor.stride(0) * tensor.itemsize != page or page % 16 or not dense_rows(tensor)):
            raise FastKVError(
                f"{op}: {name} must be contiguous in every page, and pages a multiple of 16 bytes apart as those of "
                f"keys, {page} bytes, got strides {tensor.stride()} of {tensor.itemsize} bytes for shape "
                f"{list(tensor.shape)}; see fastkv.cache.pages"
            )
    check_contiguous(op, rows=state.rows)
    return page // 16


def dense_rows(tensor: Tensor) -> bool:
    """Whether every row, tensor[b], is contiguous."""
    wanted = 1
    for size, stride in zip(tensor.shape[:0:-1], tensor.stride()[:0:-1]):
        if size != 1 and stride != wanted:
            return False
        wanted *= size
    return True


def check_like(op: str, shape: tuple[int | None, ...], **tensors: Tensor | None) -> None:
    """Raise FastKVError for the first given tensor that has another shape or is not contiguous."""
    for name, tensor in tensors.items():
        if tensor is not None:
            check_shape(op, name, tensor, shape)
    check_contiguous(op, **tensors)


def check_centroids(op: str, centroids: Centroids, shape: tuple[int, ...], dim: int, value_dim: int) -> None:
    """Raise FastKVError unless means are bf16 or fp32, the rest is fp32, and all are of `shape` [B, Hkv, M]."""
    count, keys, values, spread = centroids.tensors()
    check_shape(op, "centroids.count", count, shape)
    check_shape(op, "centroids.spread", spread, shape)
    check_shape(op, "centroids.keys", keys, (*shape, dim))
    check_shape(op, "centroids.values", values, (*shape, value_dim))
    exact = {count.dtype, spread.dtype} == {torch.float32}
    if not exact or keys.dtype != values.dtype or keys.dtype not in (torch.float32, torch.bfloat16):
        raise FastKVError(
            f"{op} needs centroids with means in bfloat16 or float32 and the rest in float32, got "
            f"{', '.join(str(t.dtype) for t in centroids.tensors())}; convert them"
        )


def check_head_dim(op: str, head_dim: int, dtype: torch.dtype | None = None) -> None:
    """Raise FastKVError unless the kernels support this head size, for attention in `dtype` if one is given."""
    exact = dtype == torch.float32
    most = MAX_COMMON_HEAD_DIM if exact or on_hip() else MAX_HEAD_DIM
    if head_dim > most or head_dim % 16:
        raise FastKVError(
            f"{op} supports head_dim up to {most}{' in float32' * exact} in multiples of 16, got {head_dim}; use "
            "backend='reference'"
        )


def check_decode(
    op: str, q: Tensor, k: Tensor | None, v: Tensor | None, state: LayerState, *same_dtype: Tensor
) -> tuple[int, ...]:
    """Query heads per KV head, rows that are stored, KV heads, slots of each as `addressed` counts them, and D; or
    FastKVError unless q [B, Hq, D], a token and the slots of the state suit the kernel, codes with the scales of their
    format."""
    (batch, num_heads, dim), exact = q.shape, state.exact
    assert exact.values is not None
    keys, values = (addressed(op, part, exact.starts) for part in (exact.keys, exact.values))
    heads, slots = keys.shape[1:3]
    groups = check_groups(op, num_heads, heads)
    check_head_dim(op, dim, q.dtype)
    check_scales(op, exact)
    if state.rows is not None:
        check_shape(op, "rows", state.rows, (batch,))
    stored = batch if state.rows is None else len(keys)
    check_shape(op, "keys", keys, (stored, heads, slots, exact.format.keys.width(dim)))
    check_shape(op, "values", values, (stored, heads, slots, exact.format.values.width(dim)))
    held = {keys.dtype, values.dtype} if exact.format.plain else {exact.dtype}
    dtypes = {q.dtype, *held, *(t.dtype for t in same_dtype)}
    if groups > MIN_ROWS or len(dtypes) > 1 or q.dtype == torch.float64:
        raise FastKVError(
            f"{op} needs one dtype below float64 and at most {MIN_ROWS} query heads per KV head, got "
            f"{', '.join(sorted(map(str, dtypes)))} and {groups}; use backend='reference'"
        )
    check_like(op, (num_heads,), sink_logits=state.sink_logits)
    check_contiguous(op, True, q=q, k=k, v=v)
    return groups, stored, heads, slots, dim


def check_scales(op: str, slots: Slots) -> None:
    """Raise FastKVError unless keys and values are plain or codes that the kernels know, with scales; and a bias, if
    there is one, has a number for each slot.
    """
    if slots.bias is not None:
        check_shape(op, "bias", slots.bias, slots.keys.shape[:-1])
    if slots.format.plain:
        return
    forms = slots.format.keys, slots.format.values
    known = all(form.bits in (4, 8) for form in forms)
    if slots.key_scales is None or slots.value_scales is None or not known:
        raise FastKVError(
            f"{op} reads codes of 8 or 4 bits with their scales, got slots={slots.format.name!r}"
            f"{' without scales' * known}; use backend='reference'"
        )
    for name, form in zip(("key", "value"), forms):
        codes, scales = getattr(slots, f"{name}s"), getattr(slots, f"{name}_scales")
        shape = codes.shape[:-1]
        if form.bits == 4:
            shape = (*shape, form.dim(codes.shape[-1]) // GROUP, 2)
        check_shape(op, f"{name}_scales", scales, shape)


def decode_outputs(q: Tensor, out: Tensor | None) -> ResultPointers:
    """Room for the results of a decode kernel: `out` if that is like q, and two log-sum-exps [B, Hq] fp32."""
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    if out is None or not out.is_contiguous() or (out.shape, out.dtype) != (q.shape, q.dtype):
        out = torch.empty_like(q)
    return ResultPointers(out, lse, torch.empty_like(lse))


def workspace(num_heads: int, state: LayerState, room: list[Tensor] | None = None) -> list[Tensor]:
    """Scratch of the split decode kernels for so many query heads over the slots of a layer, for `LayerState.scratch`:
    accs, tops and totals of every partial; tickets [B * Hkv] int32, zeroed once, and each launch leaves them zero; and,
    if attention is collected, logits [G, all slots of the batch], of both tiers in vector_decode.

    One per stream or captured graph; layers of one model may share it.
    Args: room: of `workspace_room`, to be viewed instead of new memory. Tickets have memory of their own there: what
        one batch leaves in numbers is no ticket of another.
    """
    device, pairs = state.exact.keys.device, state.batch * state.heads
    shapes, made, end = scratch_shapes(num_heads, state, state.batch, num_sms(device)), [], 0
    if room is None:
        made = [torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes]
        tickets = torch.zeros(pairs, dtype=torch.int32, device=device)
    else:
        for shape in shapes:
            made.append(room[0][end : end + prod(shape)].view(shape))
            end += aligned(shape)
        tickets = room[1][:pairs]
    return [*made[:3], tickets, *made[3:]]


def workspace_room(num_heads: int, state: LayerState, most: int, device: torch.device) -> list[tuple[int, torch.dtype]]:
    """Numbers and dtype of each tensor of the room for `workspace`, see `ops.workspace_room`."""
    batches = (scratch_shapes(num_heads, state, batch, num_sms(device)) for batch in range(1, most + 1))
    # Few sequences are split into more parts each, so that the largest batch need not take most.
    numbers = max(sum(map(aligned, shapes)) for shapes in batches)
    return [(numbers, torch.float32), (most * state.heads, torch.int32)]


def scratch_shapes(num_heads: int, state: LayerState, batch: int, sms: int) -> list[tuple[int, ...]]:
    """Of `workspace` without tickets, for a batch of so many sequences on a device of so many `sms`."""
    exact, tiers, pairs, groups = state.exact, state.tiers.values(), batch * state.heads, num_heads // state.heads
    sets = pairs * len(tiers)  # of slots that are split
    programs = max(num_programs(sets, max(slots.limit for slots in tiers), sms), decode_programs(pairs, exact, sms))
    programs = max(programs, 2)  # some kernels take 2 at least
    parts, dim = sets * (programs + 1) * groups, exact.format.keys.dim(exact.keys.shape[-1])
    logits = groups, sum(pool_of(batch, slots) for slots in tiers)
    collects = any(slots.attention is not None for slots in tiers)
    return [(parts, dim), (parts,), (parts,), *[logits] * collects]


def aligned(shape: tuple[int, ...]) -> int:
    """Numbers that a tensor takes in a room, so that loads of the next are wide, too: what was compiled for one batch
    fits every other."""
    return cdiv(prod(shape), ALIGNED) * ALIGNED


def pool_of(batch: int, slots: Slots) -> int:
    """Slots of all heads of a batch."""
    return batch * prod(slots.keys.shape[1:-1])


@functools.cache
def chip_of(device: torch.device) -> str:
    """What block sizes are chosen by: "hip" for AMD, else the compute capability ("90"; "100" for 10.3, too, which
    multiplies as 10.0 does), "" in the interpreter."""
    if on_hip() or device.type != "cuda":
        return "hip" if on_hip() else ""
    major, minor = torch.cuda.get_device_capability(device)
    return "100" if major == 10 else f"{major}{minor}"


@functools.cache
def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU, which AMD calls compute units; a fixed number for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else SMS


def slots_each(slots: Slots) -> int:
    """Slots of a head, on average where heads have unequally many."""
    return slots.limit if slots.starts is None else cdiv(slots.keys.shape[1], slots.starts.shape[1] - 1)


def decode_programs(pairs: int, slots: Slots, sms: int) -> int:
    """`num_programs` of a step over these slots; several where heads have unequally many, whatever the batch, so that
    the longest head does not decide how long it takes."""
    each = slots_each(slots)
    several = SHARED if slots.starts is not None and each >= SHARED * 64 else 1
    return max(num_programs(pairs, each, sms), several)


def num_programs(pairs: int, slots: int, sms: int) -> int:
    """Programs for one pair, a power of two; a function of static sizes and the device only.

    As many as are co-resident, but none with less than 32 slots, and none with less than 64 once every SM has one. Two
    count as three: beside two that read slots there may be one for the evicted set.
    """
    programs = 1
    while pairs * max(2 * programs, 3) <= PER_SM * sms:
        least = 64 if 2 * programs * pairs > sms else 32
        if slots < 2 * programs * least:
            break
        programs *= 2
    return programs
