"""What each instruction does, for all threads of a program at once.

`compiled` turns a kernel's instructions into steps: functions of a program and of a mask [N] bool over its threads, None
where all of them execute it. A register is an array [N] of unsigned integers, or bool for a predicate, which no step
changes in place; types are views of it. What `FORMS` does not name is refused.

Numbers are IEEE, rounded to nearest: approximate functions are exact here, numbers too small to be normal are kept, and
a product and sum of float32 are rounded from float64.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .memory import Fault
from .parse import SHARED_ARRAY, Address, Immediate, Instruction, Kernel, Operand, PTXError, Register, Special, Symbol

if TYPE_CHECKING:
    from .program import Program

Mask = np.ndarray | None
Step = Callable[["Program", Mask], None]
Getter = Callable[["Program"], np.ndarray]
Putter = Callable[["Program", np.ndarray, Mask], None]

RAW = {1: np.dtype(bool), 8: np.dtype("u1"), 16: np.dtype("u2"), 32: np.dtype("u4"), 64: np.dtype("u8")}
FORMS: list[tuple[re.Pattern, Callable[..., Step]]] = []
NUMBER = r"[suf]16|[suf]32|[suf]64|bf16"


def form(pattern: str) -> Callable:
    """Say that a function makes the steps of opcodes that match; it is given the pattern's groups."""

    def register(build: Callable[..., Step]) -> Callable[..., Step]:
        FORMS.append((re.compile(pattern), build))
        return build

    return register


def width_of(kind: str) -> int:
    """Bits of a type as "s32", "bf16" or "pred"."""
    return 1 if kind == "pred" else int(re.sub(r"\D+", "", kind, count=1))


def dtype_of(kind: str) -> np.dtype:
    """What a type is computed in; bf16 in float32."""
    width = width_of(kind)
    if kind[0] in "sf":
        return np.dtype(f"{'i' if kind[0] == 's' else 'f'}{width // 8}")
    return np.dtype("f4") if kind == "bf16" else RAW[width]


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """float32 of the bits of bf16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(numbers: np.ndarray) -> np.ndarray:
    """Bits of bf16, uint16, of float32, rounded to nearest even."""
    bits = numbers.astype(np.float32).view(np.uint32)
    return np.where(np.isnan(numbers), 0x7FFF, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


class Access:
    """How the instructions of one kernel read and write registers."""

    def __init__(self, kernel: Kernel) -> None:
        self.threads = kernel.threads

    def get(self, operand: Operand, kind: str) -> Getter:
        """Reads an operand as a type, [N]."""
        width, dtype = width_of(kind), dtype_of(kind)
        if kind == "bf16":
            bits = self.get(operand, "b16")
            return lambda program: from_bf16(bits(program))
        if isinstance(operand, Register):
            index, raw = operand.index, RAW[width]
            if operand.width != width:
                return lambda program: program.registers[index].astype(raw).view(dtype)
            return lambda program: program.registers[index].view(dtype)
        if isinstance(operand, Special):
            name = operand.name
            return lambda program: program.special(name).astype(RAW[width]).view(dtype)
        if isinstance(operand, Immediate):
            constant = np.full(self.threads, operand.bits & ((1 << width) - 1), RAW[width]).view(dtype)
        elif isinstance(operand, Symbol) and operand.name == SHARED_ARRAY:
            constant = np.zeros(self.threads, dtype)  # shared memory begins at 0
        else:
            raise PTXError(f"{operand} cannot be read")
        return lambda program: constant

    def put(self, operand: Operand, kind: str) -> Putter:
        """Writes a register: what is narrower than it is extended as its type says."""
        if operand == Special("_") or operand == Symbol("_"):
            return lambda program, value, mask: None
        assert isinstance(operand, Register), operand
        index, raw, dtype = operand.index, RAW[operand.width], dtype_of(kind)
        extended = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{operand.width // 8 or 1}")
        same = operand.width == width_of(kind)

        def write(program: Program, value: np.ndarray, mask: Mask) -> None:
            if kind == "bf16":
                value = to_bf16(value)
            value = value.astype(dtype, copy=False) if kind != "bf16" else value
            value = value.view(raw) if same else value.astype(extended).view(raw)
            program.registers[index] = value if mask is None else np.where(mask, value, program.registers[index])

        return write

    def addresses(self, operand: Operand, lanes: bool = True) -> Callable[[Program, np.ndarray], np.ndarray]:
        """Where some threads access memory, [A] int64."""
        assert isinstance(operand, Address), operand
        width = operand.base.width if isinstance(operand.base, Register) else 32
        base, offset = self.get(operand.base, f"b{width}"), operand.offset
        return lambda program, threads: base(program)[threads].astype(np.int64) + offset


def compiled(kernel: Kernel) -> list[Step | None]:
    """A step for each instruction; None for those that move threads. Raises: PTXError for one that is not known."""
    access, steps = Access(kernel), []
    for instruction in kernel.code:
        if instruction.opcode in ("bra", "bra.uni", "ret"):
            steps.append(None)
            continue
        for pattern, build in FORMS:
            found = pattern.fullmatch(instruction.opcode)
            if found:
                steps.append(build(access, instruction, *found.groups()))
                break
        else:
            raise PTXError(f"{kernel.name} has an instruction that is not executed here: {instruction}")
    return steps


def _mapped(access: Access, ins: Instruction, kinds: list[str], to: str, function: Callable[..., np.ndarray]) -> Step:
    """The step of an instruction that is a function of its operands, which have these types."""
    gets = [access.get(one, kind) for one, kind in zip(ins.operands[1:], kinds)]
    put = access.put(ins.operands[0], to)
    if len(gets) == 1:
        one = gets[0]
        return lambda program, mask: put(program, function(one(program)), mask)
    if len(gets) == 2:
        one, two = gets
        return lambda program, mask: put(program, function(one(program), two(program)), mask)
    return lambda program, mask: put(program, function(*(get(program) for get in gets)), mask)


BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.fmin, "max": np.fmax}
LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@form(rf"(add|sub|min|max)(?:\.rn)?(?:\.ftz)?\.({NUMBER})")
@form(rf"(mul)(?:\.lo|\.rn)?(?:\.ftz)?\.({NUMBER})")
def _arithmetic(access: Access, ins: Instruction, name: str, kind: str) -> Step:
    return _mapped(access, ins, [kind, kind], kind, BINARY[name])


@form(r"(and|or|xor)\.(b16|b32|b64|pred)")
def _logic(access: Access, ins: Instruction, name: str, kind: str) -> Step:
    return _mapped(access, ins, [kind, kind], kind, LOGIC[name])


UNARY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "not": np.bitwise_not, "abs": np.abs, "neg": np.negative, "ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x), "rcp": lambda x: 1 / x,
}  # fmt: skip


@form(r"(not)\.(b16|b32|b64|pred)")
@form(r"(abs|neg)(?:\.ftz)?\.([sf]32|[sf]64|s16)")
@form(r"(ex2|lg2|sqrt|rsqrt|rcp)\.(?:approx|rn)(?:\.ftz)?\.(f32|f64)")
def _unary(access: Access, ins: Instruction, name: str, kind: str) -> Step:
    return _mapped(access, ins, [kind], kind, UNARY[name])


@form(r"(mul|mad)\.(wide|hi)\.([su])(16|32)")
def _wide(access: Access, ins: Instruction, name: str, part: str, sign: str, width: str) -> Step:
    narrow, wide = f"{sign}{width}", f"{sign}{2 * int(width)}"
    to = dtype_of(wide)

    def product(x: np.ndarray, y: np.ndarray, *added: np.ndarray) -> np.ndarray:
        whole = x.astype(to) * y.astype(to)
        whole = whole if part == "wide" else (whole >> to.type(int(width))).astype(x.dtype)
        return whole + added[0] if added else whole

    result = wide if part == "wide" else narrow
    return _mapped(access, ins, [narrow, narrow, result][: 2 + (name == "mad")], result, product)


@form(r"mad\.lo\.([su]16|[su]32|[su]64)")
def _mad(access: Access, ins: Instruction, kind: str) -> Step:
    return _mapped(access, ins, [kind] * 3, kind, lambda x, y, z: x * y + z)


@form(r"fma\.rn(?:\.ftz)?\.(f32)")
def _fma(access: Access, ins: Instruction, kind: str) -> Step:
    return _mapped(access, ins, [kind] * 3, kind, lambda x, y, z: (x.astype(np.float64) * y + z).astype(np.float32))


@form(r"div\.(?:full|rn|approx)(?:\.ftz)?\.(f32|f64)")
def _quotient(access: Access, ins: Instruction, kind: str) -> Step:
    return _mapped(access, ins, [kind, kind], kind, np.divide)


@form(r"(div|rem)\.([su]32|[su]64)")
def _division(access: Access, ins: Instruction, name: str, kind: str) -> Step:
    def divided(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        rest = np.fmod(x, y)  # has the sign of x
        return rest if name == "rem" else (x - rest) // y

    return _mapped(access, ins, [kind, kind], kind, divided)


@form(r"(shl|shr)\.([bsu])(16|32|64)")
def _shift(access: Access, ins: Instruction, name: str, sign: str, width: str) -> Step:
    kind, most = f"{sign if sign == 's' else 'u'}{width}", int(width) - 1

    def shifted(x: np.ndarray, by: np.ndarray) -> np.ndarray:
        near = np.minimum(by, most).astype(x.dtype)
        result = x << near if name == "shl" else x >> near
        return result if sign == "s" else np.where(by > most, x.dtype.type(0), result)

    return _mapped(access, ins, [kind, "u32"], kind, shifted)


COMPARED = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


@form(r"setp\.(eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan)(?:\.(and|or|xor))?(?:\.ftz)?\.([bsuf](?:16|32|64)|bf16)")
def _setp(access: Access, ins: Instruction, name: str, joined: str | None, kind: str) -> Step:
    floating = kind[0] == "f" or kind == "bf16"
    plain = COMPARED.get(name[:2])

    def compare(x: np.ndarray, y: np.ndarray, *other: np.ndarray) -> np.ndarray:
        if not floating:
            result = plain(x, y)
        else:
            unordered = np.isnan(x) | np.isnan(y)
            if name in ("num", "nan"):
                result = unordered == (name == "nan")
            else:
                result = plain(x, y) | unordered if name.endswith("u") else plain(x, y) & ~unordered
        return LOGIC[joined](result, other[0]) if joined else result

    return _mapped(access, ins, [kind, kind, "pred"][: 2 + bool(joined)], "pred", compare)


@form(r"selp\.([bsuf](?:16|32|64))")
def _selp(access: Access, ins: Instruction, kind: str) -> Step:
    bits = f"b{width_of(kind)}"
    return _mapped(access, ins, [bits, bits, "pred"], bits, lambda x, y, chosen: np.where(chosen, x, y))


@form(r"mov\.([bsuf](?:16|32|64)|pred)")
def _mov(access: Access, ins: Instruction, kind: str) -> Step:
    to, source = ins.operands
    kind = kind if kind == "pred" else f"b{width_of(kind)}"
    if isinstance(to, tuple):  # one register into several
        width = width_of(kind) // len(to)
        get, puts = access.get(source, kind), [access.put(one, f"b{width}") for one in to]
        narrow = RAW[width]

        def split(program: Program, mask: Mask) -> None:
            parts = np.ascontiguousarray(get(program)).view(narrow).reshape(-1, len(puts))
            for number, put in enumerate(puts):
                put(program, parts[:, number].copy(), mask)

        return split
    if isinstance(source, tuple):  # several into one
        gets = [access.get(one, f"b{width_of(kind) // len(source)}") for one in source]
        put, wide = access.put(to, kind), RAW[width_of(kind)]
        return lambda program, mask: put(
            program, np.stack([get(program) for get in gets], 1).view(wide).reshape(-1), mask
        )
    return _mapped(access, ins, [kind], kind, lambda x: x)


@form(rf"cvt(?:\.(rn|rzi|rni))?(?:\.ftz)?\.({NUMBER}|[su]8)\.({NUMBER}|[su]8)")
def _cvt(access: Access, ins: Instruction, rounded: str | None, to: str, kind: str) -> Step:
    if to[0] in "su" and "f" in kind:
        limits, nearest = np.iinfo(dtype_of(to)), np.rint if rounded == "rni" else np.trunc

        def integer(x: np.ndarray) -> np.ndarray:
            whole = np.nan_to_num(nearest(x.astype(np.float64)), nan=0.0)
            inside = np.clip(whole, float(limits.min), float(np.nextafter(limits.max, 0)) if limits.bits == 64 else limits.max)
            return inside.astype(dtype_of(to))

        return _mapped(access, ins, [kind], to, integer)
    return _mapped(access, ins, [kind], to, lambda x: x.astype(dtype_of(to)))


@form(r"cvt\.rn\.(bf16|f16)x2\.f32")
def _cvt_pair(access: Access, ins: Instruction, kind: str) -> Step:
    def bits(x: np.ndarray) -> np.ndarray:
        return to_bf16(x) if kind == "bf16" else x.astype(np.float16).view(np.uint16)

    return _mapped(access, ins, ["f32", "f32"], "b32",
                   lambda high, low: bits(high).astype(np.uint32) << 16 | bits(low))  # fmt: skip


@form(r"bfe\.([su])32")
def _bfe(access: Access, ins: Instruction, sign: str) -> Step:
    def field(x: np.ndarray, first: np.ndarray, count: np.ndarray) -> np.ndarray:
        left = 64 - count.astype(np.int64)
        bits = x.astype(np.int64) >> np.minimum(first, 63) << np.minimum(left, 63)
        whole = bits.view(np.int64 if sign == "s" else np.uint64) >> np.minimum(left, 63).astype(bits.dtype if sign == "s" else np.uint64)
        return np.where(count == 0, 0, whole).astype(np.uint32)

    return _mapped(access, ins, [f"{sign}32", "u32", "u32"], "b32", field)


@form(r"prmt\.b32")
def _prmt(access: Access, ins: Instruction) -> Step:
    def chosen(low: np.ndarray, high: np.ndarray, selector: np.ndarray) -> np.ndarray:
        source = np.stack([low, high], 1).view(np.uint8)
        which = selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)
        picked = np.take_along_axis(source, (which & 7).astype(np.intp), 1)
        signs = (picked.view(np.int8) >> 7).view(np.uint8)
        return np.where(which & 8, signs, picked).view(np.uint32)[:, 0]

    return _mapped(access, ins, ["b32"] * 3, "b32", chosen)


@form(r"popc\.b(32|64)")
def _popc(access: Access, ins: Instruction, width: str) -> Step:
    return _mapped(access, ins, [f"b{width}"], "u32", lambda x: np.bitwise_count(x).astype(np.uint32))


@form(r"ld\.param\.([bsuf]\d+)")
def _ld_param(access: Access, ins: Instruction, kind: str) -> Step:
    put, address = access.put(ins.operands[0], kind), ins.operands[1]
    assert isinstance(address, Address) and isinstance(address.base, Symbol)
    name, mask_bits, raw, dtype = address.base.name, (1 << width_of(kind)) - 1, RAW[width_of(kind)], dtype_of(kind)
    return lambda program, mask: put(
        program, np.full(access.threads, program.arguments[name] & mask_bits, raw).view(dtype), mask
    )


def _several(operand: Operand) -> tuple[Operand, ...]:
    return operand if isinstance(operand, tuple) else (operand,)


@form(r"ld\.(global|shared)(?:\.c[agsv])?(?:\.v([24]))?\.([bsuf](?:8|16|32|64))")
def _ld(access: Access, ins: Instruction, space: str, count: str | None, kind: str) -> Step:
    """Each thread's numbers, one after another."""
    puts = [access.put(one, kind) for one in _several(ins.operands[0])]
    address, raw, each = access.addresses(ins.operands[1]), RAW[width_of(kind)], width_of(kind) // 8
    size, dtype = each * len(puts), dtype_of(kind)

    def load(program: Program, mask: Mask) -> None:
        threads = program.executing(mask)
        places = address(program, threads)
        if space == "global":
            data = program.load_global(places, size, threads)
        else:
            data = program.shared.load(program.shared.places(places, size, threads), threads, threads)
        parts = data.view(raw)
        for number, put in enumerate(puts):
            value = np.zeros(access.threads, raw)
            value[threads] = parts[:, number]
            put(program, value.view(dtype), mask)

    return load


@form(r"st\.(global|shared)(?:\.v([24]))?\.([bsuf](?:8|16|32|64))")
def _st(access: Access, ins: Instruction, space: str, count: str | None, kind: str) -> Step:
    bits, each = f"b{width_of(kind)}", width_of(kind) // 8
    gets, address = [access.get(one, bits) for one in _several(ins.operands[1])], access.addresses(ins.operands[0])

    def store(program: Program, mask: Mask) -> None:
        threads = program.executing(mask)
        data = np.stack([get(program)[threads] for get in gets], 1).view(np.uint8)
        places = address(program, threads)
        if space == "global":
            program.store_global(places, data, threads)
        else:
            program.shared.store(program.shared.places(places, each * len(gets), threads), data, threads)

    return store


@form(r"cp\.async\.c[ag]\.shared\.global")
def _copy(access: Access, ins: Instruction) -> Step:
    """The third operand says how many bytes are written, the fourth how many are read: the rest becomes 0."""
    to, source, size, *rest = ins.operands
    assert isinstance(size, Immediate)
    target, origin, count = access.addresses(to), access.addresses(source), size.bits
    given = access.get(rest[0], "u32") if rest else access.get(size, "u32")

    def copy(program: Program, mask: Mask) -> None:
        threads = program.executing(mask)
        read = given(program)[threads]
        full = read == count
        if not (full | (read == 0)).all():
            raise PTXError(f"an asynchronous copy of a part of its bytes is not executed here: {ins}")
        data = np.zeros((len(threads), count), np.uint8)
        if full.any():
            data[full] = program.load_global(origin(program, threads)[full], count, threads[full])
        program.shared.copy(program.shared.places(target(program, threads), count, threads), data, threads)

    return copy


@form(r"cp\.async\.(commit_group|wait_group)")
def _group(access: Access, ins: Instruction, name: str) -> Step:
    left = ins.operands[0].bits if name == "wait_group" else 0  # type: ignore[union-attr]

    def end(program: Program, mask: Mask) -> None:
        if mask is not None:
            raise Fault("divergence", "only some threads end or await a group of copies", int(np.argmin(mask)))
        if name == "commit_group":
            program.shared.commit()
        else:
            program.shared.wait(left)

    return end


@form(r"bar\.sync")
def _barrier(access: Access, ins: Instruction) -> Step:
    if ins.operands != (Immediate(0),):
        raise PTXError(f"only barrier 0 of all threads is executed here, not {ins}")

    def barrier(program: Program, mask: Mask) -> None:
        if mask is not None:
            raise Fault("barrier", "does not reach a barrier that others wait at", int(np.argmin(mask)))
        program.barrier()

    return barrier


def whole_warps(program: Program, mask: Mask) -> np.ndarray:
    """The warps that execute an instruction that a warp executes together. Raises: Fault if a part of one does."""
    if mask is None:
        return np.arange(program.kernel.threads // 32)
    warps = mask.reshape(-1, 32)
    parts = warps.any(1) & ~warps.all(1)
    if parts.any():
        first = int(parts.argmax())
        raise Fault("divergence", "does not execute what others of its warp do", 32 * first + int(warps[first].argmin()))
    return np.flatnonzero(warps.all(1))


@form(r"bar\.warp\.sync")
def _warp_barrier(access: Access, ins: Instruction) -> Step:
    return lambda program, mask: program.shared.warp_barrier(whole_warps(program, mask))


LANE = np.arange(32)


@form(r"shfl\.sync\.(bfly|up|down|idx)\.b32")
def _shfl(access: Access, ins: Instruction, mode: str) -> Step:
    """From another lane; one's own number where that is none of the warp's."""
    get, by, put = access.get(ins.operands[1], "b32"), access.get(ins.operands[2], "s32"), access.put(ins.operands[0], "b32")
    if ins.operands[3] != Immediate(0 if mode == "up" else 31):
        raise PTXError(f"a shuffle within parts of a warp is not executed here: {ins}")

    def shuffle(program: Program, mask: Mask) -> None:
        whole_warps(program, mask)
        x, distance = get(program).reshape(-1, 32), by(program).reshape(-1, 32)
        other = {"bfly": LANE ^ distance, "up": LANE - distance, "down": LANE + distance, "idx": distance & 31}[mode]
        other = np.where((other >= 0) & (other < 32), other, LANE)
        put(program, np.take_along_axis(x, other, 1).reshape(-1), mask)

    return shuffle


REDUCED = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}


@form(r"redux\.sync\.(add|min|max|and|or)\.([bsu]32)")
def _redux(access: Access, ins: Instruction, name: str, kind: str) -> Step:
    get, put, reduce = access.get(ins.operands[1], kind), access.put(ins.operands[0], kind), REDUCED[name].reduce

    def redux(program: Program, mask: Mask) -> None:
        whole_warps(program, mask)
        x = get(program)
        put(program, np.repeat(reduce(x.reshape(-1, 32), axis=1, dtype=x.dtype), 32), mask)

    return redux


@form(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16")
def _ldmatrix(access: Access, ins: Instruction, count: str, trans: str | None) -> Step:
    """Matrix i of 8 rows of 16 bytes, whose addresses lanes 8 i to 8 i + 7 give, is dealt to all lanes."""
    puts = [access.put(one, "b32") for one in _several(ins.operands[0])]
    address = access.addresses(ins.operands[1])
    row, pair = LANE // 4, 2 * (LANE % 4)

    def load(program: Program, mask: Mask) -> None:
        warps = whole_warps(program, mask)
        threads = (32 * warps[:, None] + np.arange(8 * len(puts))).reshape(-1)
        first = 32 * (threads // 32)
        places = program.shared.places(address(program, threads), 16, threads)
        data = program.shared.load(places, first, first + 31).view(np.uint16).reshape(len(warps), len(puts), 8, 8)
        data = data.swapaxes(2, 3) if trans else data
        for number, put in enumerate(puts):
            value = np.zeros((access.threads // 32, 32, 2), np.uint16)
            value[warps] = np.stack([data[:, number, row, pair], data[:, number, row, pair + 1]], -1)
            put(program, value.view(np.uint32).reshape(-1), mask)

    return load


@form(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.(?:bf16|f16)\.f32")
def _mma(access: Access, ins: Instruction, kind: str) -> Step:
    """D = A B + C of A [16, 16], B [16, 8] and C [16, 8] in each warp, summed in float64."""
    to, a, b, c = map(_several, ins.operands)
    gets_a, gets_b = ([access.get(one, "b32") for one in part] for part in (a, b))
    gets_c, puts = [access.get(one, "f32") for one in c], [access.put(one, "f32") for one in to]
    group, lane = LANE // 4, 2 * (LANE % 4)

    def numbers(program: Program, gets: list[Getter]) -> np.ndarray:  # [register, warp, lane, low and high]
        halves = np.stack([get(program) for get in gets]).view(np.uint16)
        halves = from_bf16(halves) if kind == "bf16" else halves.view(np.float16)
        return halves.reshape(len(gets), -1, 32, 2).astype(np.float64)

    def product(program: Program, mask: Mask) -> None:
        whole_warps(program, mask)
        left, right = numbers(program, gets_a), numbers(program, gets_b)
        warps = left.shape[1]
        one, two = np.empty((warps, 16, 16)), np.empty((warps, 16, 8))
        for half in range(2):
            for number in range(4):
                one[:, group + 8 * (number % 2), lane + 8 * (number // 2) + half] = left[number, :, :, half]
            for number in range(2):
                two[:, lane + 8 * number + half, group] = right[number, :, :, half]
        result = one @ two
        for number, (get, put) in enumerate(zip(gets_c, puts)):
            share = result[:, group + 8 * (number // 2), lane + number % 2].reshape(-1)
            put(program, (share + get(program)).astype(np.float32), mask)

    return product


@form(r"atom\.global\.gpu\.(acq_rel|acquire|release|relaxed)\.add\.u32")
def _atom(access: Access, ins: Instruction, order: str) -> Step:
    put, address = access.put(ins.operands[0], "u32"), access.addresses(ins.operands[1])
    get = access.get(ins.operands[2], "u32")

    def add(program: Program, mask: Mask) -> None:
        threads = program.executing(mask)
        before, added = np.zeros(access.threads, np.uint32), get(program)
        for thread, place in zip(threads.tolist(), address(program, threads).tolist()):
            before[thread] = program.add_global(place, thread, added[thread : thread + 1], order)
        put(program, before, mask)

    return add
