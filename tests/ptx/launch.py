"""The programs of a launch, interleaved in an order that is drawn, and what happened before what among them.

Programs know of each other only through atomics. One that releases makes known what its program did before its last
barrier, since other threads' later stores may still be under way; one that acquires learns what was released there, and
after its next barrier so do its program's other threads. Two accesses to a byte, at least one of them a store, that are
in no such order are a race, even if the numbers came out right.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from torch import Tensor

from .memory import Fault, Global, Region, Spots
from .parse import Instruction
from .program import Executable, Program


@dataclass
class Access:
    """Memory that one instruction of one program touched: `size` bytes at offsets [A] of a region, by threads [A].

    Attributes: did: "loads", "stores" or "changes" (an atomic).  epoch, number: how many barriers, and atomics, of its
        program came before.  known: how many epochs [P], and atomics [P], of each program did, [2 P].
    """

    program: Program
    did: str
    epoch: int
    number: int
    known: np.ndarray
    region: Region
    offsets: np.ndarray
    size: int
    threads: np.ndarray
    instruction: Instruction

    def before(self, other: Access) -> bool:
        """Whether it came before an access of another program, for certain."""
        epochs, atomics = np.split(other.known, 2)
        known, mine = (atomics, self.number) if self.did == "changes" else (epochs, self.epoch)
        return bool(known[self.program.number] > mine)


class History:
    """What the programs of one launch did to global memory, and what each knows of the others."""

    def __init__(self, memory: Global, programs: int) -> None:
        self.memory, self.programs = memory, programs
        self.epochs, self.atomics = np.zeros(programs, np.int64), np.zeros(programs, np.int64)
        self.known = [np.zeros(2 * programs, np.int64) for _ in range(programs)]
        self.learnt = list(self.known)  # what holds after the next barrier
        self.released: dict[int, np.ndarray] = {}
        self.accesses: list[Access] = []

    def touch(self, program: Program, did: str, spots: Spots, size: int, threads: np.ndarray) -> None:
        """Note an access; a load of what is only stored counts when it is, for the threads that store it."""
        one, now, executable = program.number, program.now, program.executable
        time = int(self.epochs[one]), int(self.atomics[one]) - 1, self.known[one]
        accesses = [Access(program, did, *time, *spot, size, threads[mine], now) for *spot, mine in spots]
        if now.line in executable.waiting:
            program.loaded[now.line] = accesses
            return
        self.accesses += accesses
        for load in [one for line in executable.feeding.get(now.line, ()) for one in program.loaded.get(line, ())]:
            stored = np.isin(load.threads, threads)
            self.accesses.append(replace(load, offsets=load.offsets[stored], threads=load.threads[stored]))

    def barrier(self, program: int) -> None:
        """All threads of the program have arrived."""
        self.epochs[program] += 1
        self.known[program] = self.learnt[program]

    def atomic(self, program: Program, address: int, order: str) -> None:
        """An atomic of one thread of the program; order: as PTX calls it."""
        one = program.number
        self.atomics[one] += 1
        before = self.released.get(address, np.zeros(2 * self.programs, np.int64))
        if order in ("acquire", "acq_rel"):
            self.learnt[one] = np.maximum(self.learnt[one], before)
        if order in ("release", "acq_rel"):
            mine = self.known[one].copy()
            mine[one], mine[self.programs + one] = self.epochs[one], self.atomics[one]
            self.released[address] = np.maximum(before, mine)


def check_region(region: Region, accesses: list[Access]) -> None:
    """All pairs of accesses to a unit of bytes that was stored: neighbours first, then those two apart."""
    unit = min(access.size for access in accesses)
    columns = []
    for number, access in enumerate(accesses):
        places = (access.offsets[:, None] + np.arange(0, access.size, unit)).reshape(-1)
        threads = access.threads.repeat(access.size // unit)[region.stored[places]]
        places, first = np.unique(places[region.stored[places]], return_index=True)
        several = len(threads) > len(places)  # who touches the same element at once is everybody
        columns.append((places, np.full(len(places), number), np.where(several, -1, threads[first])))
    place, index, thread = map(np.concatenate, zip(*columns))
    order = np.argsort(place, kind="stable")
    place, index, thread = place[order], index[order], thread[order]
    loads = np.array([access.did == "loads" for access in accesses])
    programs = np.array([access.program.number for access in accesses])
    for apart in range(1, len(accesses)):
        pairs = np.flatnonzero(place[apart:] == place[:-apart])
        if not len(pairs):
            return
        one, other = index[pairs], index[pairs + apart]
        alone = (programs[one] == programs[other]) & (thread[pairs] == thread[pairs + apart]) & (thread[pairs] >= 0)
        pairs = pairs[~alone & ~(loads[one] & loads[other])]
        keys, where = np.unique(index[pairs] * len(accesses) + index[pairs + apart], return_index=True)
        for key, at in zip(keys.tolist(), where.tolist()):
            check_pair(accesses[key // len(accesses)], accesses[key % len(accesses)], int(place[pairs[at]]))


def check_pair(one: Access, other: Access, place: int) -> None:
    """Raise Fault unless two accesses of several threads are in an order, or both atomics."""
    together = one.program is other.program
    fine = one.epoch != other.epoch if together else one.before(other) or other.before(one)
    if fine or one.did == other.did == "changes":
        return
    said = f"{one.program.kernel.name}: {one.region.element(place)} is touched in no order"
    for access, which in ((one, 0), (other, -1)):
        thread = access.threads[(access.offsets <= place) & (place < access.offsets + access.size)][which]
        said += f"; program {access.program.place} thread {thread} {access.did}, {access.instruction}"
    raise Fault("race", said, int(one.threads[0]))


def execute(
    executable: Executable, grid: tuple[int, ...], arguments: Mapping[str, int | Tensor], tensors: Mapping[str, Tensor],
    shared: int, order: int, unwritten: Mapping[int, np.ndarray] | None = None,
) -> None:  # fmt: skip
    """Run a launch.

    Of the n programs with the same first index, number `order % n` waits until the others have ended or, in every
    second n orders, comes first and waits behind its first atomic. Who is next otherwise is drawn from `order`.

    Args: arguments: tensors, and bits of other parameters.  tensors: what may be touched, by names for reports.
        shared: bytes.  unwritten: see `Global`.  Raises: Fault.
    """
    places = [place[::-1] for place in product(*(range(size) for size in grid[::-1]))]
    memory = Global(tensors, unwritten or {})
    given = {name: memory.address(one) if isinstance(one, Tensor) else one for name, one in arguments.items()}
    history = History(memory, len(places))
    source = random.Random(order)
    restless = source.choice((0.0, 0.25, 1.0))  # how often a turn ends that might
    rounds, number = divmod(order, len(places) // grid[0])
    special = 0 if rounds % 2 else 2  # ranks: lower ones come first
    ranks = [special if number == index // grid[0] else 1 for index in range(len(places))]
    awake = {i: Program(executable, i, place, grid, given, shared, history).run() for i, place in enumerate(places)}
    current: int | None = None
    while awake:
        if current is None or ranks[current] == 2 or source.random() < restless:
            least = min(ranks[one] for one in awake)
            current = source.choice([one for one in awake if ranks[one] == least])
        after_atomic = next(awake[current], None)
        if after_atomic and ranks[current] == 0:
            ranks[current] = 2
        elif after_atomic is None:
            del awake[current]
            current = None
    for region in memory.regions:
        if region.stored.any():
            check_region(region, [access for access in history.accesses if access.region is region])
