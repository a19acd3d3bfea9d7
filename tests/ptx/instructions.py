"""What each instruction does, for all threads of a program at once.

`step_of` turns an instruction into a step, a function of a program and of a mask [N] bool over its threads, None where
all of them execute it. A register is an array [N] of unsigned integers, or bool for a predicate, which no
step changes in place; types are views of it. What neither `FUNCTIONS` nor `FORMS` names is refused.

Numbers are IEEE, rounded to nearest: approximate functions are exact here, numbers too small to be normal are kept, and
a product and sum of float32 are rounded from float64.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .memory import Fault
from .parse import SHARED_ARRAY, Address, Immediate, Instruction, Kernel, Operand, PTXError, Register, Symbol

if TYPE_CHECKING:
    from .program import Program

Array = np.ndarray
Mask = Array | None
Step = Callable[["Program", Mask], None]
RAW = {1: np.dtype(bool), 8: np.dtype("u1"), 16: np.dtype("u2"), 32: np.dtype("u4"), 64: np.dtype("u8")}
LANE = np.arange(32)


def width_of(kind: str) -> int:
    """Bits of a type as "s32", "bf16" or "pred"."""
    return 1 if kind == "pred" else int(kind.lstrip("bsuf"))


def dtype_of(kind: str) -> np.dtype:
    """What a type is computed in; bf16 in float32."""
    if kind[0] in "sf":
        return np.dtype(f"{'i' if kind[0] == 's' else 'f'}{width_of(kind) // 8}")
    return np.dtype("f4") if kind == "bf16" else RAW[width_of(kind)]


def from_bf16(bits: Array) -> Array:
    """float32 of the bits of bf16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(numbers: Array) -> Array:
    """Bits of bf16, uint16, of float32, rounded to nearest even."""
    bits = numbers.astype(np.float32).view(np.uint32)
    return np.where(np.isnan(numbers), 0x7FFF, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


HALVES: dict[str, tuple[Callable[[Array], Array], ...]] = {  # numbers of bits, and the bits of numbers
    "bf16": (from_bf16, to_bf16), "f16": (lambda x: x.view(np.float16), lambda x: x.astype(np.float16).view(np.uint16)),
}  # fmt: skip


def reader(operand: Operand, kind: str) -> Callable[[Program], Array]:
    """Reads an operand as a type, [N]."""
    raw, dtype = RAW[width_of(kind)], dtype_of(kind)
    if kind == "bf16":
        bits = reader(operand, "b16")
        return lambda program: from_bf16(bits(program))
    if isinstance(operand, Register):
        index = operand.index
        if operand.width != width_of(kind):
            return lambda program: program.registers[index].astype(raw).view(dtype)
        return lambda program: program.registers[index].view(dtype)
    if isinstance(operand, Symbol) and operand.name.startswith("%"):
        name = operand.name
        return lambda program: program.special(name).astype(raw).view(dtype)
    if isinstance(operand, Address) and isinstance(operand.base, Symbol):
        name = operand.base.name
        return lambda program: reader(Immediate(program.arguments[name]), kind)(program)
    if isinstance(operand, Immediate):
        constant = np.array([operand.bits & ((1 << width_of(kind)) - 1)], raw).view(dtype)
    elif operand == Symbol(SHARED_ARRAY):
        constant = np.zeros(1, dtype)  # shared memory begins at 0
    else:
        raise PTXError(f"{operand} cannot be read")
    return lambda program: constant.repeat(program.kernel.threads)


def writer(operand: Operand, kind: str) -> Callable[[Program, Array, Mask], None]:
    """Writes a register: what is narrower than it is extended as its type says."""
    if operand == Symbol("_"):
        return lambda program, value, mask: None
    assert isinstance(operand, Register), operand
    index, raw, dtype = operand.index, RAW[operand.width], dtype_of(kind)
    extended = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{operand.width // 8 or 1}")
    same = operand.width == width_of(kind)

    def write(program: Program, value: Array, mask: Mask) -> None:
        value = to_bf16(value) if kind == "bf16" else value.astype(dtype, copy=False)
        value = value.view(raw) if same else value.astype(extended).view(raw)
        program.registers[index] = value if mask is None else np.where(mask, value, program.registers[index])

    return write


def addresses(operand: Operand) -> Callable[[Program, Array], Array]:
    """Where some threads access memory, [A] int64."""
    base = reader(operand.base, f"b{operand.base.width if isinstance(operand.base, Register) else 32}")
    return lambda program, threads: base(program)[threads].astype(np.int64) + operand.offset


def several(operand: Operand) -> list[Operand]:
    """The operands in braces, or the only one."""
    return operand if isinstance(operand, list) else [operand]


def step_of(kernel: Kernel, ins: Instruction) -> Step | None:
    """What an instruction does; None if it moves threads. Raises: PTXError for one that is not known."""
    if ins.opcode in ("bra", "bra.uni", "ret"):
        return None
    for pattern, build in FORMS.items():
        if found := re.fullmatch(pattern, ins.opcode):
            return build(ins, *found.groups())
    raise PTXError(f"{kernel.name} has an instruction that is not executed here: {ins}")


def _function(ins: Instruction, kinds: list[str], to: str, function: Callable[..., Any]) -> Step:
    """Of operands of these types, numbers of one; with several operands for its results, a list of them."""
    reads = [reader(*one) for one in zip((one for operand in ins.operands[1:] for one in several(operand)), kinds)]
    writes = [writer(one, to) for one in several(ins.operands[0])]

    def step(program: Program, mask: Mask) -> None:
        if ".sync" in ins.opcode:
            whole_warps(program, mask)
        results = function(*[read(program) for read in reads])
        for write, result in zip(writes, results if len(writes) > 1 else [results]):
            write(program, result, mask)

    return step


def wide(sign: str, width: str) -> tuple[list[str], str, Callable[..., Array]]:
    """All bits of a product; with a third number added."""
    to = f"{sign}{2 * int(width)}"
    return [sign + width] * 2 + [to], to, lambda x, y, more=0: x.astype(dtype_of(to)) * y.astype(dtype_of(to)) + more


def shifted(name: str, kind: str) -> Callable[[Array, Array], Array]:
    """By a number of bits, also by more than there are."""
    shift, most = {"shl": np.left_shift, "shr": np.right_shift}[name], width_of(kind) - 1
    return lambda x, by: np.where((by > most) & (kind[0] != "s"), 0, shift(x, np.minimum(by, most).astype(x.dtype)))


def compared(name: str) -> Callable[[Array, Array], Array]:
    """Of floating-point numbers one may be NaN: false, unless the name ends with u."""

    def compare(x: Array, y: Array) -> Array:
        result = COMPARED[name[:2]](x, y)
        unordered = (x != x) | (y != y)
        return unordered if name == "nan" else result & ~unordered if name[2:] != "u" else result | unordered

    return compare


def whole_numbers(to: str) -> Callable[[Array], Array]:
    """Integers of floating-point numbers, towards zero: the nearest that there is, 0 for NaN."""
    limits = np.iinfo(dtype_of(to))
    return lambda x: np.clip(np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0), limits.min, limits.max)


def field(x: Array, first: Array, count: Array) -> Array:
    """`count` bits from number `first` on; as those of a signed integer if x is one."""
    left = (64 - count).astype(np.int64).clip(0, 63)
    bits = (x.astype(np.int64) >> first) << left
    whole = bits >> left if x.dtype.kind == "i" else (bits.view(np.uint64) >> left.view(np.uint64)).view(np.int64)
    return np.where(count == 0, 0, whole).astype(f"u{x.dtype.itemsize}")


def inserted(x: Array, into: Array, first: Array, count: Array) -> Array:
    """`into`, with `count` bits of x from number `first` on."""
    bits = ((np.uint64(1) << count.astype(np.uint64)) - np.uint64(1)) << first.astype(np.uint64)
    moved = x.astype(np.uint64) << first.astype(np.uint64)
    return ((into & ~bits) | (moved & bits)).astype(np.uint32)


def permuted(low: Array, high: Array, selector: Array) -> Array:
    """Of eight bytes those that the hexadecimal digits of the selector name; from 8 on, their signs."""
    which = selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)
    picked = np.take_along_axis(np.stack([low, high], 1).view(np.uint8), (which & 7).astype(np.intp), 1)
    return np.where(which & 8, (picked.view(np.int8) >> 7).view(np.uint8), picked).view(np.uint32)[:, 0]


def looked_up(x: Array, y: Array, z: Array, table: Array) -> Array:
    """Bits of a table, by the bits of three numbers."""
    index = sum((one[:, None] >> LANE & 1) << place for one, place in ((x, 2), (y, 1), (z, 0)))
    return ((table[:, None] >> index & 1) << LANE).sum(1, dtype=np.uint32)


def fused_halves(kind: str) -> Callable[..., Array]:
    """Products and sums of both halves of 32 bits, in float64."""
    numbers, bits = HALVES[kind]

    def fused(*given: Array) -> Array:
        x, y, z = (numbers(np.ascontiguousarray(one).view(np.uint16)).astype(np.float64) for one in given)
        return bits(x * y + z).view(np.uint32)

    return fused


def shuffled(mode: str) -> Callable[[Array, Array, Array], Array]:
    """From another lane; one's own number where that is none of the warp's."""

    def shuffle(x: Array, by: Array, bound: Array) -> Array:
        if bound[0] != (0 if mode == "up" else 31):
            raise PTXError("a shuffle within parts of a warp is not executed here")
        by = by.reshape(-1, 32)
        lanes = {"bfly": LANE ^ by, "up": LANE - by, "idx": by}[mode]
        lanes = np.where((lanes >= 0) & (lanes < 32), lanes, LANE)
        return np.take_along_axis(x.reshape(-1, 32), lanes, 1).reshape(-1)

    return shuffle


def multiplied(kind: str) -> Callable[..., list[Array]]:
    """D = A B + C of A [16, 16], B [16, 8] and C [16, 8] in each warp, summed in float64."""
    group, lane = LANE // 4, 2 * (LANE % 4)

    def multiply(*given: Array) -> list[Array]:
        numbers = HALVES[kind][0](np.stack(given[:6]).view(np.uint16)).astype(np.float64)
        numbers = numbers.reshape(6, -1, 32, 2)  # register, warp, lane, low and high half
        a, b = np.empty((numbers.shape[1], 16, 16)), np.empty((numbers.shape[1], 16, 8))
        for half in range(2):
            for part in range(4):
                a[:, group + 8 * (part % 2), lane + 8 * (part // 2) + half] = numbers[part, :, :, half]
            for part in range(2):
                b[:, lane + 8 * part + half, group] = numbers[4 + part, :, :, half]
        d = a @ b
        return [d[:, group + 8 * (i // 2), lane + i % 2].reshape(-1) + given[6 + i] for i in range(4)]

    return multiply


COMPARED = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
            "ge": np.greater_equal, "nu": lambda x, y: x == x, "na": np.equal}  # fmt: skip
LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.bitwise_not}
BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.fmin, "max": np.fmax, "div": np.divide}
UNARY = {"abs": np.abs, "neg": np.negative, "ex2": np.exp2, "sqrt": np.sqrt}
INTEGER, FLOATING, BITS = "[su]16|[su]32|[su]64", "f16|f32|f64|bf16", "[bsuf](?:16|32|64)"
NUMBERS = f"{INTEGER}|{FLOATING}|[su]8"
# What groups of an opcode's pattern match makes the types of the operands, that of the results, and the function.
FUNCTIONS: dict[str, Callable[..., tuple[list[str], str, Callable]]] = {
    rf"(add|sub|min|max)\.({INTEGER})": lambda name, kind: ([kind] * 2, kind, BINARY[name]),
    rf"(add|sub|mul|min|max|div)(?:\.rn|\.full)?\.({FLOATING})": lambda name, kind: ([kind] * 2, kind, BINARY[name]),
    rf"mul\.lo\.({INTEGER})": lambda kind: ([kind] * 2, kind, np.multiply),
    rf"mad\.lo\.({INTEGER})": lambda kind: ([kind] * 3, kind, lambda x, y, z: x * y + z),
    r"(?:mul|mad)\.wide\.([su])(16|32)": wide,
    r"mul\.hi\.([su](?:16|32|64))": lambda kind: (
        [kind] * 2, kind, lambda x, y: x.astype(object) * y.astype(object) >> width_of(kind),
    ),
    r"div\.([su]32|[su]64)": lambda kind: ([kind] * 2, kind, lambda x, y: (x - np.fmod(x, y)) // y),
    r"fma\.rn(?:\.ftz)?\.f32": lambda: (["f32"] * 3, "f32", lambda x, y, z: x.astype(np.float64) * y + z),
    r"fma\.rn\.(bf16|f16)x2": lambda kind: (["b32"] * 3, "b32", fused_halves(kind)),
    r"(and|or|xor|not)\.(b16|b32|b64|pred)": lambda name, kind: ([kind] * 2, kind, LOGIC[name]),
    r"(abs|neg|ex2|sqrt)(?:\.approx)?(?:\.ftz)?\.(f32|s32)": lambda name, kind: ([kind], kind, UNARY[name]),
    r"(shl|shr)\.([bsu](?:16|32|64))": lambda name, kind: ([kind, "u32"], kind, shifted(name, kind)),
    rf"setp\.((?:eq|ne|lt|le|gt|ge)u?|num|nan)\.({BITS})": lambda name, kind: ([kind] * 2, "pred", compared(name)),
    rf"selp\.({BITS})": lambda kind: ([kind] * 2 + ["pred"], kind, lambda x, y, chosen: np.where(chosen, x, y)),
    r"ld\.param\.([bsuf]\d+)": lambda kind: ([kind], kind, lambda x: x),
    rf"cvt\.rzi\.(s16|s32)\.({FLOATING})": lambda to, kind: ([kind], to, whole_numbers(to)),
    rf"cvt(?:\.rn)?(?:\.ftz)?\.({NUMBERS})\.({NUMBERS})": lambda to, kind: ([kind], to, lambda x: x),
    r"cvt\.rn\.(bf16|f16)x2\.f32": lambda kind: (
        ["f32"] * 2, "b32", lambda *x: np.stack([HALVES[kind][1](one) for one in x[::-1]], 1).view(np.uint32)[:, 0],
    ),
    r"bfe\.([su](?:32|64))": lambda kind: ([kind, "u32", "u32"], f"b{kind[1:]}", field),
    r"bfi\.b32": lambda: (["b32", "b32", "u32", "u32"], "b32", inserted),
    r"lop3\.b32": lambda: (["b32"] * 4, "b32", looked_up),
    r"prmt\.b32": lambda: (["b32"] * 3, "b32", permuted),
    r"popc\.(b32|b64)": lambda kind: ([kind], "u32", np.bitwise_count),
    r"shfl\.sync\.(bfly|up|idx)\.b32": lambda mode: (["b32", "s32", "s32"], "b32", shuffled(mode)),
    r"redux\.sync\.(add|min|max)\.([su]32)": lambda name, kind: (
        [kind], kind, lambda x: BINARY[name].reduce(x.reshape(-1, 32), axis=1, dtype=x.dtype).repeat(32),
    ),
    r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.(?:bf16|f16)\.f32": lambda kind: (
        ["b32"] * 6 + ["f32"] * 4, "f32", multiplied(kind),
    ),
}  # fmt: skip


def _mov(ins: Instruction, kind: str) -> Step:
    """Also the parts of a register into several, or of several into one."""
    width, sources, targets = width_of(kind), *(len(several(operand)) for operand in ins.operands[1::-1])
    if sources == targets:
        return _function(ins, [kind], kind, lambda x: x)
    parts, kinds = RAW[width // targets], [f"b{width // sources}"] * sources
    return _function(ins, kinds, f"b{width // targets}", lambda *x: np.squeeze(np.stack(x, 1).view(parts).T.copy()))


def _ld(ins: Instruction, space: str, kind: str) -> Step:
    """Each thread's numbers, one after another."""
    puts = [writer(one, kind) for one in several(ins.operands[0])]
    address, raw, size = addresses(ins.operands[1]), RAW[width_of(kind)], width_of(kind) // 8 * len(puts)

    def load(program: Program, mask: Mask) -> None:
        threads = program.executing(mask)
        data = program.load(space, address(program, threads), size, threads).view(raw)
        for number, put in enumerate(puts):
            value = np.zeros(program.kernel.threads, raw)
            value[threads] = data[:, number]
            put(program, value.view(dtype_of(kind)), mask)

    return load


def _st(ins: Instruction, space: str, kind: str) -> Step:
    gets = [reader(one, f"b{width_of(kind)}") for one in several(ins.operands[1])]
    address = addresses(ins.operands[0])

    def store(program: Program, mask: Mask) -> None:
        threads = program.executing(mask)
        data = np.stack([get(program)[threads] for get in gets], 1).view(np.uint8)
        program.store(space, address(program, threads), data, threads)

    return store


def _copy(ins: Instruction) -> Step:
    """The third operand says how many bytes are written, the fourth how many are read: the rest becomes 0."""
    to, source, size = ins.operands[:3]
    assert isinstance(size, Immediate)
    target, origin, count, given = addresses(to), addresses(source), size.bits, reader(ins.operands[-1], "u32")

    def copy(program: Program, mask: Mask) -> None:
        threads = program.executing(mask)
        read = given(program)[threads]
        full = read == count
        if not (full | (read == 0)).all():
            raise PTXError(f"an asynchronous copy of a part of its bytes is not executed here: {ins}")
        data = np.zeros((len(threads), count), np.uint8)
        if full.any():
            data[full] = program.load("global", origin(program, threads)[full], count, threads[full])
        program.shared.copy(program.shared.places(target(program, threads), count, threads), data, threads)

    return copy


def _together(ins: Instruction, name: str) -> Step:
    """Barriers, and the ends of groups of copies."""
    count = ins.operands[0].bits if ins.operands and isinstance(ins.operands[0], Immediate) else 0
    if name == "bar.sync" and count:
        raise PTXError(f"only barrier 0 of all threads is executed here, not {ins}")

    def step(program: Program, mask: Mask) -> None:
        if name == "bar.warp.sync":
            program.shared.warp_barrier(whole_warps(program, mask))
        elif mask is not None:
            raise Fault("barrier", "does not reach a barrier or wait that others reach", int(np.argmin(mask)))
        elif name == "bar.sync":
            program.shared.barrier()
            program.history.barrier(program.number)
        else:
            program.shared.wait(count) if name.endswith("wait_group") else program.shared.commit()

    return step


def whole_warps(program: Program, mask: Mask) -> Array:
    """The warps that execute an instruction that a warp executes together. Raises: Fault if a part of one does."""
    warps = np.ones((program.kernel.threads // 32, 32), bool) if mask is None else mask.reshape(-1, 32)
    absent = np.flatnonzero(warps.any(1)[:, None] & ~warps)
    if len(absent):
        raise Fault("divergence", "does not execute what others of its warp do", int(absent[0]))
    return np.flatnonzero(warps.all(1))


def _ldmatrix(ins: Instruction, trans: str | None) -> Step:
    """Matrix i of 8 rows of 16 bytes, whose addresses lanes 8 i to 8 i + 7 give, is dealt to all lanes."""
    puts = [writer(one, "b32") for one in several(ins.operands[0])]
    address, row, column = addresses(ins.operands[1]), LANE // 4, 2 * (LANE % 4)

    def load(program: Program, mask: Mask) -> None:
        warps = whole_warps(program, mask)
        threads = (32 * warps[:, None] + np.arange(8 * len(puts))).reshape(-1)
        first = 32 * (threads // 32)
        places = program.shared.places(address(program, threads), 16, threads)
        data = program.shared.load(places, first, first + 31).view(np.uint16).reshape(len(warps), len(puts), 8, 8)
        data = data.swapaxes(2, 3) if trans else data
        for number, put in enumerate(puts):
            value = np.zeros((program.kernel.threads // 32, 32, 2), np.uint16)
            value[warps] = np.stack([data[:, number, row, column], data[:, number, row, column + 1]], -1)
            put(program, value.view(np.uint32).reshape(-1), mask)

    return load


def _atom(ins: Instruction, order: str) -> Step:
    put, address, get = writer(ins.operands[0], "u32"), addresses(ins.operands[1]), reader(ins.operands[2], "u32")

    def add(program: Program, mask: Mask) -> None:
        threads = program.executing(mask)
        before, added = np.zeros(program.kernel.threads, np.uint32), get(program)
        for thread, place in zip(threads.tolist(), address(program, threads).tolist()):
            before[thread] = program.add(place, thread, added[thread : thread + 1], order)
        put(program, before, mask)

    return add


FORMS: dict[str, Callable[..., Step]] = {
    **{pattern: lambda ins, *groups, of=of: _function(ins, *of(*groups)) for pattern, of in FUNCTIONS.items()},
    rf"mov\.({BITS}|pred)": _mov,
    r"ld\.(global|shared)(?:::cta)?(?:\.c[agsv])?(?:\.v[24])?\.([bsuf](?:8|16|32|64))": _ld,
    r"st\.(global|shared)(?:::cta)?(?:\.v[24])?\.([bsuf](?:8|16|32|64))": _st,
    r"cp\.async\.c[ag]\.shared\.global": _copy,
    r"(bar\.sync|bar\.warp\.sync|cp\.async\.commit_group|cp\.async\.wait_group)": _together,
    r"ldmatrix\.sync\.aligned\.m8n8\.x[124](\.trans)?\.shared\.b16": _ldmatrix,
    r"atom\.global\.gpu\.(acq_rel|acquire|release|relaxed)\.add\.u32": _atom,
}
