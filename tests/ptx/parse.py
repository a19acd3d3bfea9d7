"""PTX text into instructions: registers by number, immediates as bits, places in the Python source.

Reads what Triton writes for one kernel: a single entry without functions, with all registers declared before the code
and shared memory in one array. Anything else is refused.
"""

from __future__ import annotations

import re
from collections import namedtuple
from typing import NamedTuple

SHARED_ARRAY = "global_smem"


class PTXError(Exception):
    """PTX that is not understood, in one sentence."""


Register = namedtuple("Register", "index width")  # number of a register; its bits, 1 for a predicate
Immediate = namedtuple("Immediate", "bits")  # of a constant, negative if it was written so
Symbol = namedtuple("Symbol", "name")  # a label, parameter, shared array or, with %, a register that the hardware sets
Address = namedtuple("Address", "base offset")  # in bytes
Operand = Register | Immediate | Symbol | Address | list


class Instruction(NamedTuple):
    """One instruction; threads execute it for which the guard, a predicate, is true or, if `negated`, is not.

    Attributes: opcode: with all that stands after its dots.  operands: lists for those in braces.  text: as written.
        line: of the PTX, from 1.  source: the places in Python files, innermost first, if Triton notes them.
    """

    opcode: str
    operands: list[Operand]
    guard: Register | None
    negated: bool
    text: str
    line: int
    source: str

    def __str__(self) -> str:
        return f"{self.source + ', ' if self.source else ''}line {self.line} of the PTX, {self.text!r}"


class Kernel(NamedTuple):
    """An entry: names of parameters, threads of a program, bits of every register, and what number labels stand for."""

    name: str
    params: list[str]
    threads: int
    widths: list[int]
    code: list[Instruction]
    labels: dict[str, int]


def parse(text: str) -> Kernel:
    """The only kernel in a PTX file. Raises: PTXError for what is not understood."""
    entries = list(re.finditer(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{", text))
    if len(entries) != 1:
        raise PTXError(f"one entry is executed at a time, and this PTX has {len(entries)}")
    entry = entries[0]
    threads = re.search(r"\.(?:req|max)ntid\s+(\d+)", entry[3])
    if threads is None or int(threads[1]) % 32:
        raise PTXError(f"{entry[1]} does not say how many warps it has (.reqntid)")
    reader = _Reader()
    for number, line in enumerate(text[entry.end() :].split("\n"), text.count("\n", 0, entry.end()) + 1):
        if line.startswith("}"):
            break
        reader.read(line, number)
    params = [one.split()[-1] for one in entry[2].split(",") if one.strip()]
    return Kernel(entry[1], params, int(threads[1]), reader.widths, reader.code, reader.labels)


class _Reader:
    """Reads the body line by line."""

    def __init__(self) -> None:
        self.families: dict[str, tuple[int, int, int]] = {}  # prefix: first index, how many, width
        self.widths: list[int] = []
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.source = self.pending = ""

    def read(self, line: str, number: int) -> None:
        text, _, comment = line.partition("//")
        text = " ".join(text.split())
        if text.startswith(".loc "):
            self.source = re.sub(r"(:\d+):\d+", r"\1", comment.strip())
        elif label := re.fullmatch(r"([$\w]+):", text):
            self.labels[label[1]] = len(self.code)
        else:
            *whole, self.pending = (self.pending + " " + text).split(";")
            for statement in filter(None, map(str.strip, whole)):
                self.statement(statement, number)

    def statement(self, text: str, number: int) -> None:
        text = text.lstrip("{} ")  # a block has registers of its own, whose names may come again
        if not text:
            return
        if registers := re.fullmatch(r"\.reg \.(?:pred|[bsuf](\d+)) %([a-z]+)<(\d+)>", text):
            width = int(registers[1] or 1)
            self.families[registers[2]] = (len(self.widths), int(registers[3]), width)
            self.widths += [width] * int(registers[3])
        elif re.match(r"[.{}]", text) and not text.startswith(".pragma"):
            raise PTXError(f"line {number} of the PTX is not understood: {text!r}")
        elif not text.startswith(".pragma"):
            guard, opcode, tail = re.fullmatch(r"(?:@(!?%\w+) )?(\S+) ?(.*)", text).groups()  # type: ignore[union-attr]
            predicate = self.operand(guard.lstrip("!")) if guard else None
            assert predicate is None or isinstance(predicate, Register)
            operands = [self.operand(part) for part in _parts(tail)]
            negated = bool(guard) and guard[0] == "!"
            self.code.append(Instruction(opcode, operands, predicate, negated, text, number, self.source))

    def operand(self, text: str) -> Operand:
        if text.startswith("{"):
            return [self.operand(part) for part in _parts(text[1:-1])]
        if text.startswith("["):
            base, offset = re.fullmatch(r"\[\s*(.+?)\s*(?:\+\s*(-?\d+))?\s*\]", text).groups()  # type: ignore[union-attr]
            return Address(self.operand(base), int(offset or 0))
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
            return Immediate(int(text.rstrip("U"), 0))
        if re.fullmatch(r"0[fFdD][0-9a-fA-F]+", text):
            return Immediate(int(text[2:], 16))
        register = re.fullmatch(r"%([a-z]+)(\d+)", text)
        if register and register[1] in self.families:
            first, count, width = self.families[register[1]]
            if int(register[2]) < count:
                return Register(first + int(register[2]), width)
        elif re.fullmatch(r"%?[\w$.]+", text):
            return Symbol(text)
        raise PTXError(f"the operand {text!r} is not understood")


def _parts(text: str) -> list[str]:
    """What commas outside braces and brackets separate."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text) if part.strip()]


def registers(operand: Operand | list[Operand] | None) -> set[Register]:
    """Those that an operand, or one of several, names."""
    if isinstance(operand, list):
        return {register for one in operand for register in registers(one)}
    operand = operand.base if isinstance(operand, Address) else operand
    return {operand} if isinstance(operand, Register) else set()


MOVES = re.compile(r"(ld|st|cp|atom|bar|shfl|redux|ldmatrix|mma|bra|ret)\b")  # what does more than compute a register


def only_stored(kernel: Kernel) -> dict[int, set[int]]:
    """Loads of global memory whose numbers nothing depends on but what is stored there, by the lines of those stores.

    All threads load a number that a program has once, and one of them stores what becomes of it: to the others it is
    as if they had not loaded it.
    """
    uses: dict[Register, list[Instruction]] = {}
    for one in kernel.code:
        for register in registers([*one.operands[not one.opcode.startswith("st") :], one.guard]):
            uses.setdefault(register, []).append(one)
    found: dict[int, set[int]] = {}
    for load in [one for one in kernel.code if one.opcode.startswith("ld.global")]:
        reached = list(registers(load.operands[0]))
        for register in reached:  # which grows
            computing = [use for use in uses.get(register, []) if not MOVES.match(use.opcode)]
            reached += {target for use in computing for target in registers(use.operands[0])}.difference(reached)
        used = [(use, register) for register in reached for use in uses.get(register, [])]
        stored = [use.opcode.startswith("st.global") and it not in registers(use.operands[0]) for use, it in used]
        if all(it != use.guard and (ok or not MOVES.match(use.opcode)) for (use, it), ok in zip(used, stored)):
            for store in {use.line for (use, _), ok in zip(used, stored) if ok}:
                found.setdefault(store, set()).add(load.line)
    return found
