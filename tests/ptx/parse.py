"""PTX text into instructions: registers by number, immediates as bits, places in the Python source.

Reads what Triton writes for one kernel: a single entry without functions, with all registers declared before the code
and shared memory in one array. Anything else is refused.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

SHARED_ARRAY = "global_smem"


class PTXError(Exception):
    """PTX that is not understood, in one sentence."""


@dataclass(frozen=True)
class Register:
    """Number `index` of the kernel's registers, of so many bits; 1 for a predicate."""

    index: int
    width: int


@dataclass(frozen=True)
class Immediate:
    """Bits of a constant, negative if it was written so."""

    bits: int


@dataclass(frozen=True)
class Special:
    """A register that the hardware sets, as "tid.x"."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """A label, a parameter or the array in shared memory."""

    name: str


@dataclass(frozen=True)
class Address:
    """[base + offset] in bytes."""

    base: Operand
    offset: int


Operand = Register | Immediate | Special | Symbol | Address | tuple


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        opcode: with all that stands after its dots.  guard: the predicate under which threads execute it, None for
        all.  negated: whether those do for which it is false.  text: as written.  line: of the PTX, from 1.
        source: the places in Python files, innermost first, as Triton notes them; "" if it does not.
    """

    opcode: str
    operands: tuple[Operand, ...]
    guard: Register | None
    negated: bool
    text: str
    line: int
    source: str

    def __str__(self) -> str:
        return f"{self.source + ', ' if self.source else ''}line {self.line} of the PTX, {self.text!r}"


@dataclass(frozen=True)
class Kernel:
    """An entry.

    Attributes:
        params: names and bits of its parameters.  threads: of a program.  widths: bits of every register.
        labels: the number of the instruction that follows each.
    """

    name: str
    params: tuple[tuple[str, int], ...]
    threads: int
    widths: tuple[int, ...]
    code: tuple[Instruction, ...]
    labels: dict[str, int]


def parse(text: str) -> Kernel:
    """The only kernel in a PTX file. Raises: PTXError for what is not understood."""
    entries = re.findall(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{", text)
    if len(entries) != 1:
        raise PTXError(f"one entry is executed at a time, and this PTX has {len(entries)}")
    name, params, header = entries[0]
    threads = re.search(r"\.(?:req|max)ntid\s+(\d+)", header)
    if threads is None or int(threads[1]) % 32:
        raise PTXError(f"{name} does not say how many warps it has (.reqntid)")
    reader = _Reader()
    start = re.search(r"\.entry[^{]*\{", text)
    assert start is not None
    begin = text.count("\n", 0, start.end()) + 1
    for number, line in enumerate(text[start.end() :].split("\n"), begin):
        if line.startswith("}"):
            break
        reader.read(line, number)
    sizes = re.findall(r"\.param\s+\.[a-z]+(\d+)\s[^,]*?([\w$]+)\s*(?:,|$)", params)
    named = tuple((one, int(width)) for width, one in sizes)
    return Kernel(name, named, int(threads[1]), tuple(reader.widths), tuple(reader.code), reader.labels)


class _Reader:
    """Reads the body line by line."""

    def __init__(self) -> None:
        self.registers: dict[str, Register] = {}
        self.families: dict[str, tuple[int, int, int]] = {}  # prefix: first index, how many, width
        self.widths: list[int] = []
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.source = ""
        self.pending = ""

    def read(self, line: str, number: int) -> None:
        text, _, comment = line.partition("//")
        text = " ".join(text.split())
        if text.startswith(".loc"):
            self.source = re.sub(r"(:\d+):\d+", r"\1", comment.strip())
            return
        label = re.match(r"([$\w]+):$", text)
        if label:
            self.labels[label[1]] = len(self.code)
            return
        *whole, self.pending = (self.pending + " " + text).split(";")
        for statement in whole:
            self.statement(statement.strip(), number)

    def statement(self, text: str, number: int) -> None:
        if text.startswith(".reg"):
            self.declare(text)
        elif text.startswith(".pragma"):
            pass  # a hint
        elif text.startswith((".", "{", "}")):
            raise PTXError(f"line {number} of the PTX is not understood: {text!r}")
        elif text:
            self.code.append(self.instruction(text, number))

    def declare(self, text: str) -> None:
        found = re.fullmatch(r"\.reg \.(pred|[bsuf]\d+) %([a-z]+)<(\d+)>", text)
        if found is None:
            raise PTXError(f"registers are declared by prefix and number, not as in {text!r}")
        width = 1 if found[1] == "pred" else int(found[1][1:])
        self.families[found[2]] = (len(self.widths), int(found[3]), width)
        self.widths += [width] * int(found[3])

    def instruction(self, text: str, number: int) -> Instruction:
        guard, rest, negated = None, text, False
        if text.startswith("@"):
            predicate, rest = text[1:].split(None, 1)
            negated = predicate.startswith("!")
            operand = self.operand(predicate.lstrip("!"))
            assert isinstance(operand, Register)
            guard = operand
        opcode, _, tail = rest.partition(" ")
        operands = tuple(self.operand(part) for part in _parts(tail))
        return Instruction(opcode, operands, guard, negated, text, number, self.source)

    def operand(self, text: str) -> Operand:
        if text.startswith("{"):
            return tuple(self.operand(part) for part in _parts(text[1:-1]))
        if text.startswith("["):
            base, offset = re.fullmatch(r"\[\s*(.+?)\s*(?:\+\s*(-?\d+))?\s*\]", text).groups()  # type: ignore[union-attr]
            return Address(self.operand(base), int(offset or 0))
        if text.startswith("%"):
            return self.register(text[1:])
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
            return Immediate(int(text.rstrip("U"), 0))
        if re.fullmatch(r"0[fFdD][0-9a-fA-F]+", text):
            return Immediate(int(text[2:], 16))
        if re.fullmatch(r"[\w$]+", text):
            return Symbol(text)
        raise PTXError(f"the operand {text!r} is not understood")

    def register(self, name: str) -> Register | Special:
        found = re.fullmatch(r"([a-z]+)(\d+)", name)
        if found is None or found[1] not in self.families:
            return Special(name)
        if name not in self.registers:
            first, count, width = self.families[found[1]]
            if int(found[2]) >= count:
                raise PTXError(f"the register %{name} is not declared")
            self.registers[name] = Register(first + int(found[2]), width)
        return self.registers[name]


def _parts(text: str) -> list[str]:
    """What commas outside braces and brackets separate."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text) if part.strip()]


def bits_of(value: float, width: int) -> int:
    """The bits of a number that is passed as a floating-point parameter."""
    return int.from_bytes(struct.pack({16: "<e", 32: "<f", 64: "<d"}[width], value), "little")
