"""Count what the programs of a decode step do: instructions, waits and barriers. Needs no GPU.

    python -m perf.counts                                            a table
    python -m perf.counts --label before --out perf/results/counts/kernels.json
                                                                     also kept as JSON, under that name

Of 1,040 slots of a head (a budget of 1,024 and what arrives between evictions), head_dim 128, 4 query heads, bf16, in
16 programs, it counts until a program takes its ticket, in PTX of sm_80 that is executed (docs/ptx.md):

    instructions  that a warp comes to
    waits         for memory, one after the other: a number is used, or a copy waited for, that was asked for after the
                  previous wait ended
    barriers      of all threads

and of the program that takes longest where one of four heads has 4 in 7 of the slots;

and in machine code of sm_90 what the loop over slots takes to issue, beside what its bytes take from memory:

    issue         instructions of the loop for 32 slots: cycles, as each of four schedulers has one warp of the program
    memory        cycles for the bytes of 32 slots on an H200: 19.2 per SM and cycle (4.8 TB/s, 132 SMs, 1.9 GHz)
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # read when triton is imported

import torch

from perf.aot import compile_variant, dumped
from perf.engine import parser_of
from perf.tables import table
from perf.variants import SPARE, TOKENS, layer, recorded
from tests import test_kernels_codes as codes
from tests import test_kernels_decode as decode
from tests.ptx.driver import Driver
from tests.ptx.harness import executed
from tests.ptx.parse import Address, Operand, Register
from tests.ptx.program import Program
from tests.states import deal, slab_of, splits

SLOTS, PROGRAMS, CENTROIDS, PER_CYCLE = TOKENS + SPARE, 16, 63, 19.2
FORMS = ("model", "int8", "fp8", "int4", "k8v4")
COLUMNS = ("instructions", "waits", "barriers", "issue", "memory")
HEADING = "# Kernels, counted\n\nWritten by `python -m perf.counts`, which says what is counted; do not edit."
Table = dict[str, dict[str, int]]


class Count:
    """What a program has done so far. `arriving`: when the numbers in registers do, counted in waits; `copies`: the
    same of groups of copies, `started`: of the one that is open."""

    def __init__(self) -> None:
        self.instructions = self.waits = self.barriers = self.started = 0
        self.arriving: dict[int, int] = {}
        self.copies: list[int] = []
        self.done = False

    def numbers(self) -> dict[str, int]:
        return {"instructions": self.instructions, "waits": self.waits, "barriers": self.barriers}

    def note(self, program: Program, mask: Any) -> None:
        """Before an instruction, of which nothing is done where the mask is of no thread."""
        one, op = program.now, program.now.opcode
        self.done = self.done or op.startswith("atom")
        self.instructions += not self.done
        if self.done or (mask is not None and not mask.any()):
            return
        stores = op.startswith(("st.", "cp.async", "bar")) or not one.operands
        read = list(registers(one.operands if stores else one.operands[1:]))
        self.waits = max([self.waits, *(self.arriving.get(index, 0) for index in read)])
        for index in () if stores else registers(one.operands[:1]):
            self.arriving[index] = self.waits + 1 if op.startswith("ld.global") else 0
        if op.startswith("cp.async.wait_group"):
            left = one.operands[0].bits  # type: ignore[union-attr]
            self.waits = max([self.waits, *self.copies[: len(self.copies) - left]])
        elif op.startswith("cp.async.commit_group"):
            self.copies, self.started = [*self.copies, self.started], 0
        elif op.startswith("cp.async"):
            self.started = self.waits + 1
        self.barriers += op == "bar.sync"


def registers(operands: Sequence[Operand]) -> Iterator[int]:
    """Numbers of the registers in operands, those of addresses too."""
    for one in operands:
        if isinstance(one, list):
            yield from registers(one)
        elif isinstance(one, Register):
            yield one.index
        elif isinstance(one, Address):
            yield from registers([one.base])


class Counting(Driver):
    """A driver that counts what each program of a launch does: `counts`, by its place in the grid."""

    counts: dict[tuple[int, ...], Count]

    def load(self, name: str, ptx: bytes, shared: int, device: int) -> tuple:
        """An executable that is watched."""
        made = super().load(name, ptx, shared, device)
        made[1].watch = lambda program, mask: self.counts.setdefault(program.place, Count()).note(program, mask)
        return made


def executed_counts() -> Table:
    """Of a program for slots of each format, and of that for the evicted tokens."""
    found: Table = {}
    with executed(Counting()) as driver, splits(PROGRAMS):
        for name in (*FORMS, "moments", "centroids"):
            parts = CENTROIDS if name == "centroids" else None
            sizes = 1, 1, 4, 128, SLOTS, torch.bfloat16, (SLOTS - 1,), (5000,)
            case = decode.Case.make(*sizes, parts=parts, means=torch.bfloat16)
            driver.counts = {}
            plain = name in ("model", "moments", "centroids")
            (case if plain else codes.coded(case, name)).kernel(order=None if name in FORMS else 1)
            found[name] = driver.counts[min(driver.counts) if name in FORMS else max(driver.counts)].numbers()
        driver.counts = {}
        with splits(4):
            ragged().kernel(order=None)
        found["longest head"] = max(driver.counts.values(), key=lambda one: one.instructions).numbers()
    return found


def ragged() -> decode.Case:
    """A step of four heads of which one has 4 in 7 of the slots; in four programs a head."""
    lengths = (SLOTS, SLOTS // 4, SLOTS // 4, SLOTS // 4)
    case = decode.Case.make(1, 4, 4, 128, max(lengths), torch.bfloat16, lengths, (0,))
    exact = case.state.exact
    starts, size = deal([list(lengths)])
    for name in ("keys", "values", "positions"):
        setattr(exact, name, slab_of(getattr(exact, name), starts, size))
    exact.starts, exact.limit = starts, max(lengths)
    return case


def loop_counts() -> Table:
    """Cycles of the loop over slots of each format."""
    found: Table = {}
    for form in FORMS:
        (variant,) = recorded("90", f"decode dim=128 splits={PROGRAMS} correction=none slots={form}")
        exact = layer(128, slots=form)[0].exact
        slot = sum(rows[0, 0, 0].nbytes for name, rows in exact.moving().items() if name in exact.PAIRS)
        text = dumped(compile_variant(variant).asm["cubin"])
        code = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]+)(?:[^;]*0x([0-9a-f]+))?[^;]*;", text)
        first = {int(place, 16): index for index, (place, *_) in enumerate(code)}  # of addresses
        jumps = [(first[int(to, 16)], index) for index, (_, name, to) in enumerate(code) if name == "BRA" and to]
        loops = [[name for _, name, _ in code[start : end + 1]] for start, end in jumps if start < end]
        loop = max(loops, key=lambda names: sum(name.startswith("HMMA") for name in names))
        issue, memory = 32 * len(loop) / variant.constant("TILE").BLOCK_N, 32 * slot / PER_CYCLE
        found[form] = {"issue": round(issue), "memory": round(memory)}
    return found


def markdown(kept: dict[str, Table]) -> str:
    """A line for each program, a column for each number of each label."""
    names = [(label, name) for name in COLUMNS for label in kept]
    programs = next(iter(kept.values()))
    lines = [[one, *(kept[label].get(one, {}).get(name, "") for label, name in names)] for one in programs]
    header = ["program", *(f"{name} {label}".strip() for label, name in names)]
    return table(header, lines, [" --- ", *[" ---: "] * len(names)]).rstrip()


def main(arguments: Sequence[str] | None = None) -> None:
    """Count, print, and keep if a file is named."""
    parser = parser_of("perf.counts", __doc__)
    parser.add_argument("--label", default="", help="what to call the numbers of this source")
    parser.add_argument("--out", type=Path, help="JSON file to keep them in, beside those of other labels")
    options = parser.parse_args(arguments)
    kept: dict[str, Table] = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    loops = loop_counts()
    kept[options.label] = {one: {**counts, **loops.get(one, {})} for one, counts in executed_counts().items()}
    if options.out:
        options.out.write_text(json.dumps(kept, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(f"{HEADING}\n\n{markdown(kept)}\n")
    print(markdown(kept))


if __name__ == "__main__":
    main()
