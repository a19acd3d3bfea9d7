"""One program of a launch: the registers of its threads, where each of them is, and what it does to memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from .instructions import RAW, Mask, step_of
from .memory import Fault, Shared
from .parse import Kernel, PTXError, only_stored

if TYPE_CHECKING:
    from .launch import Access, History

JUNK = 0xA5A5A5A5A5A5A5A5  # what registers hold that nothing has been written to


class Executable:
    """A kernel and the steps of its instructions, each with the number of the one that a jump leads to.

    Attributes: watch: called with the program and the mask of its threads before each instruction.
    """

    def __init__(self, kernel: Kernel) -> None:
        """Raises: PTXError for an instruction that is not known."""
        self.kernel, self.code = kernel, []
        for one in kernel.code:
            target = kernel.labels[one.operands[0].name] if one.opcode.startswith("bra") else len(kernel.code)
            self.code.append((one, step_of(kernel, one), target))
        self.feeding = only_stored(kernel)
        self.waiting = {line for lines in self.feeding.values() for line in lines}
        junk = {width: np.full(kernel.threads, JUNK & ((1 << width) - 1), raw) for width, raw in RAW.items()}
        self.registers = [junk[width] for width in kernel.widths]
        self.watch: Callable[[Program, Mask], None] | None = None


class Program:
    """One program while it runs.

    Attributes: number: among those of the launch; its place in the grid.  arguments: bits of every parameter.
        registers: [N] each.  now: the instruction that is executed.  loaded: by line, what is only stored.
    """

    def __init__(
        self, executable: Executable, number: int, place: tuple[int, ...], grid: tuple[int, ...],
        arguments: Mapping[str, int], shared: int, history: History,
    ) -> None:  # fmt: skip
        self.executable, self.kernel, self.number, self.place = executable, executable.kernel, number, place
        self.arguments, self.history, self.bytes = arguments, history, shared
        self.registers, self.everyone = list(executable.registers), np.arange(self.kernel.threads)
        names = [f"%{of}.{axis}" for of in ("ctaid", "nctaid") for axis in "xyz"]
        self.specials = dict(zip(names, (*place, *grid)))
        self.now = self.kernel.code[0]
        self.loaded: dict[int, list[Access]] = {}

    def special(self, name: str) -> np.ndarray:
        """What the hardware says to each thread, [N] uint32."""
        if name not in (*self.specials, "%tid.x"):
            raise PTXError(f"the register {name} is not known here")
        return np.full(self.kernel.threads, self.specials.get(name, self.everyone), np.uint32)

    def executing(self, mask: Mask) -> np.ndarray:
        """Numbers of the threads in a mask."""
        return self.everyone if mask is None else np.flatnonzero(mask)

    def load(self, space: str, addresses: np.ndarray, size: int, threads: np.ndarray) -> np.ndarray:
        """Bytes [A, size] from global or shared memory."""
        if space == "shared":
            return self.shared.load(self.shared.places(addresses, size, threads), threads, threads)
        data, spots = self.history.memory.load(addresses, size, threads)
        self.history.touch(self, "loads", spots, size, threads)
        return data

    def store(self, space: str, addresses: np.ndarray, data: np.ndarray, threads: np.ndarray) -> None:
        """Write bytes [A, size] to global or shared memory."""
        size = data.shape[1]
        if space == "shared":
            places = self.shared.places(addresses, size, threads)
            self.shared.may_write(places, threads)
            self.shared.write(places, data, threads)
        else:
            self.history.touch(self, "stores", self.history.memory.store(addresses, data, threads), size, threads)

    def add(self, address: int, thread: int, added: np.ndarray, order: str) -> int:
        """Add to a uint32 [1] at once, as one thread. Returns: what it was."""
        at, who = np.array([address]), np.array([thread])
        before = self.history.memory.load(at, 4, who)[0].view(np.uint32)
        spots = self.history.memory.store(at, (before[0] + added).view(np.uint8)[None], who)
        self.history.atomic(self, address, order)
        self.history.touch(self, "changes", spots, 4, who)
        return int(before[0, 0])

    def run(self) -> Iterator[bool]:
        """Execute all; before what other programs can notice, yields False, and True after an atomic.

        Threads that part ways wait for each other: those whose next instruction comes first go on.
        Raises: Fault, with where it happened.
        """
        self.shared = Shared(self.bytes)
        code, end, at = self.executable.code, len(self.executable.code), 0
        places: np.ndarray | None = None  # the next instruction of each thread, None while they are together
        while at < end:
            self.now, step, target = code[at]
            here = mask = None if places is None else places == at
            if self.now.guard is not None:
                chosen = self.registers[self.now.guard.index] != self.now.negated
                mask = chosen if here is None else here & chosen
                mask = None if mask.all() else mask
            if self.executable.watch is not None:
                self.executable.watch(self, mask)
            if step is not None and (mask is None or mask.any()):
                if self.now.opcode.startswith(("st.global", "atom")):
                    yield False
                try:
                    step(self, mask)
                except Fault as fault:
                    where = f"{self.kernel.name}: program {self.place} thread {fault.thread}"
                    raise Fault(fault.kind, f"{where} {fault}; {self.now}", fault.thread) from None
                if self.now.opcode.startswith("atom"):
                    yield True
            if mask is None and step is None:
                at, places = target, None
            elif places is None and step is not None:
                at += 1
            else:
                places = np.full(len(self.everyone), at + 1) if here is None else np.where(here, at + 1, places)
                places = places if step is not None else np.where(mask, target, places)
                at = int(places.min())
                places = None if (places == at).all() else places
