"""Launches in Triton's interpreter as a GPU may run them: in any order, interleaved, and checked for races.

    with simulated(order=7):
        operations.decode_step(...)

The interpreter runs the programs of a grid one after another. Here each is a thread, one of which has the turn at a
time; it may lose it before every store and atomic. Who is next is drawn from `order`, so that the same number repeats
the same run. Of the n programs with the same first index, number `order % n` waits until the others have ended, or in
every second round of n orders, comes first and waits behind its first atomic: each is the last to take a ticket once,
and each is overtaken with its ticket in hand once.

Every load and store is remembered and compared by what happened before what, as ThreadSanitizer does (FastTrack,
Flanagan and Freund 2009): programs know of each other only through atomics, and an atomic makes known what its program
did up to its last `tl.debug_barrier()`, since later stores of other threads may still be under way. `Race` says which
programs touch an element without such an order, at least one of them by a store, even if the numbers come out right;
or that one program loads what it has stored since its last barrier, perhaps by another thread.

Not simulated: threads of a program otherwise, caches, and orders in which a load moves across another load.
"""

from __future__ import annotations

import bisect
import math
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import signature

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

LOAD, STORE, ATOMIC = range(3)
HOOKED = ("masked_load", "masked_store", "atomic_rmw", "atomic_cas", "barrier")
BUILDER = interpreter.interpreter_builder


class Race(AssertionError):
    """Programs of a launch touch the same element in no order, or threads of a program may."""


class _Stopped(BaseException):
    """Ends the programs that are left when one has failed; no Exception, because the interpreter wraps those."""


@dataclass
class _Span:
    """What a program does between two of its barriers or atomics.

    Attributes:
        lane: of the clocks; the program's own, or for its atomics one of their own, since they are known at once.
        number: of its lane's spans before it.  known: how many spans of each lane happened before, [2 P].
        touched: kinds and addresses.
    """

    program: int
    lane: int
    number: int
    known: np.ndarray
    touched: list[tuple[int, np.ndarray]] = field(default_factory=list)

    def before(self, other: _Span) -> bool:
        return bool(other.known[self.lane] > self.number)


class _History:
    """What the programs of one launch load and store, and what each knows of the others."""

    def __init__(self, programs: int) -> None:
        self.programs = programs
        self.numbers = np.zeros(2 * programs, np.int64)
        self.known = [np.zeros(2 * programs, np.int64) for _ in range(programs)]
        self.released: dict[int, np.ndarray] = {}
        self.own: list[list[np.ndarray]] = [[] for _ in range(programs)]  # stores since the last barrier
        self.unsafe: list[tuple[int, int]] = []  # program, address that it loads too early after its own store
        self.spans: list[_Span] = []
        self.now = [self.opened(program, program) for program in range(programs)]

    def opened(self, program: int, lane: int) -> _Span:
        self.spans.append(_Span(program, lane, int(self.numbers[lane]), self.known[program]))
        return self.spans[-1]

    def touch(self, program: int, kind: int, addresses: np.ndarray) -> None:
        self.now[program].touched.append((kind, addresses))
        if kind == STORE:
            self.own[program].append(addresses)
        elif self.own[program]:
            early = addresses[np.isin(addresses, np.concatenate(self.own[program]))]
            self.unsafe += [(program, int(address)) for address in early[:1]]

    def barrier(self, program: int) -> None:
        self.own[program].clear()
        self.numbers[program] += 1
        self.now[program] = self.opened(program, program)

    def atomic(self, program: int, addresses: np.ndarray, acquires: bool, releases: bool) -> None:
        lane = self.programs + program
        self.opened(program, lane).touched.append((ATOMIC, addresses))
        self.numbers[lane] += 1
        nothing = np.zeros_like(self.numbers)
        for address in addresses.tolist():
            before = self.released.get(address, nothing)
            if acquires:
                self.known[program] = np.maximum(self.known[program], before)
            if releases:
                mine = self.known[program].copy()
                mine[[program, lane]] = self.numbers[[program, lane]]
                self.released[address] = np.maximum(before, mine)
        self.now[program] = self.opened(program, program)

    def race(self) -> tuple[int, _Span, int, _Span, int] | None:
        """An address and two accesses to it, (span, kind) each, in no order; None if there are none."""
        parts = []
        for index, span in enumerate(self.spans):
            for kind in {kind for kind, _ in span.touched}:
                address = np.unique(np.concatenate([a for k, a in span.touched if k == kind]))
                parts.append((address, np.full(len(address), 3 * index + kind)))
        if not parts:
            return None
        address, access = (np.concatenate(column) for column in zip(*parts))
        order = np.argsort(address, kind="stable")
        address, access = address[order], access[order]
        program = np.array([span.program for span in self.spans])[access // 3]
        first = np.flatnonzero(np.diff(address, prepend=address[0] ^ 1))
        shared = np.minimum.reduceat(program, first) != np.maximum.reduceat(program, first)
        shared &= np.maximum.reduceat(access % 3, first) > LOAD
        ends = np.append(first[1:], len(address))
        sound = set()
        for start, end in zip(first[shared].tolist(), ends[shared].tolist()):
            group = tuple(access[start:end].tolist())
            if group in sound:
                continue
            sound.add(group)
            for at, one in enumerate(group):
                for other in group[at + 1 :]:
                    a, b = self.spans[one // 3], self.spans[other // 3]
                    kinds = {one % 3, other % 3}
                    alike = kinds == {LOAD} or kinds == {ATOMIC}
                    if not (a.program == b.program or alike or a.before(b) or b.before(a)):
                        return int(address[start]), a, one % 3, b, other % 3
        return None


class _Launch:
    """One launch: its programs as threads of which one has the turn, in the order that a number stands for."""

    def __init__(self, name: str, order: int, places: list[tuple[int, int, int]], arguments: dict) -> None:
        self.name, self.places = name, places
        self.bases = sorted(
            (int(value.handle.data[0]), max(value.dtype.element_ty.primitive_bitwidth // 8, 1), name)
            for name, value in _members(arguments)
            if getattr(value, "dtype", None) is not None and value.dtype.is_ptr()
        )
        self.random = random.Random(order)
        self.restless = self.random.choice((0.0, 0.25, 1.0))  # how often a turn ends that might
        groups: dict[int, list[int]] = {}
        for program, (x, _, _) in enumerate(places):
            groups.setdefault(x, []).append(program)
        self.late, self.early = set(), set()  # wait until the others have ended; come first, until their first atomic
        for group in groups.values():
            rounds, number = divmod(order, len(group))
            (self.early if rounds % 2 else self.late).add(group[number])
        self.awake = list(range(len(places)))
        self.turns = [threading.Semaphore(0) for _ in places]
        self.history = _History(len(places))
        self.current = 0
        self.stopped = False

    def run(self, call: Callable[[], None]) -> None:
        """Run `call` as every program. Raises what a program raises, and Race."""
        with ThreadPoolExecutor(len(self.places)) as pool:
            programs = [pool.submit(self.program, index, call) for index in self.awake]
            self.turns[self.drawn()].release()
        errors = [one.exception() for one in programs]
        for error in errors:
            if error is not None and not isinstance(error, _Stopped):
                raise error

    def program(self, index: int, call: Callable[[], None]) -> None:
        ended = False
        try:
            self.await_turn(index)
            call()
            ended = True
        finally:
            self.stopped |= not ended
            self.awake.remove(index)
            if self.awake:
                self.turns[self.drawn()].release()

    def drawn(self) -> int:
        """Whose turn is next."""
        ready = [one for one in self.awake if one in self.early] or [one for one in self.awake if one not in self.late]
        return self.random.choice(ready or self.awake)

    def await_turn(self, index: int) -> None:
        self.turns[index].acquire()
        if self.stopped:
            raise _Stopped
        self.current = index
        BUILDER.set_grid_idx(*self.places[index])

    def suspend(self) -> None:
        """The program that has the turn may lose it here."""
        if self.current in self.late or self.random.random() < self.restless:
            index, following = self.current, self.drawn()
            if following != index:
                self.turns[following].release()
                self.await_turn(index)

    def overtake(self) -> None:
        """The program that has the turn has taken a ticket; if it came first, the others now overtake it."""
        if self.current in self.early:
            self.early.remove(self.current)
            self.late.add(self.current)

    def check(self) -> None:
        """Raise Race if there was one."""
        for program, address in self.history.unsafe:
            raise Race(
                f"{self.name}: program {self.places[program]} loads {self.element(address)}, which it has stored "
                "without a barrier in between"
            )
        found = self.history.race()
        if found is not None:
            address, one, kind, other, its_kind = found
            says = ("loads", "stores", "changes")
            raise Race(
                f"{self.name}: program {self.places[one.program]} {says[kind]} and program "
                f"{self.places[other.program]} {says[its_kind]} {self.element(address)} in no order"
            )

    def element(self, address: int) -> str:
        at = bisect.bisect_right(self.bases, (address, math.inf)) - 1
        base, size, name = self.bases[at]
        return f"{name}[{(address - base) // size}]"


class _Simulation:
    """What stands in for parts of the interpreter while launches are simulated."""

    def __init__(self, order: int) -> None:
        self.order = order
        self.launch: _Launch | None = None
        self.stock = {name: getattr(BUILDER, f"create_{name}") for name in HOOKED}

    def touch(self, kind: int, pointers: interpreter.TensorHandle, mask: interpreter.TensorHandle) -> None:
        self.launch.history.touch(self.launch.current, kind, _addresses(pointers, mask))

    def masked_load(self, pointers, mask, *rest):
        self.touch(LOAD, pointers, mask)
        return self.stock["masked_load"](pointers, mask, *rest)

    def masked_store(self, pointers, value, mask, *rest):
        self.launch.suspend()
        self.touch(STORE, pointers, mask)
        return self.stock["masked_store"](pointers, value, mask, *rest)

    def atomic_rmw(self, operation, pointers, value, mask, sem, scope):
        self.ticket(_addresses(pointers, mask), sem, scope)
        return self.stock["atomic_rmw"](operation, pointers, value, mask, sem, scope)

    def atomic_cas(self, pointers, compared, value, sem, scope):
        self.ticket(pointers.data.astype(np.int64).ravel(), sem, scope)
        return self.stock["atomic_cas"](pointers, compared, value, sem, scope)

    def ticket(self, addresses: np.ndarray, sem, scope) -> None:
        self.launch.suspend()
        shared = scope.name != "CTA"
        acquires, releases = (shared and one in sem.name for one in ("ACQUIRE", "RELEASE"))
        self.launch.history.atomic(self.launch.current, addresses, acquires, releases)
        self.launch.overtake()

    def barrier(self):
        self.launch.history.barrier(self.launch.current)


def _members(arguments: dict) -> Iterator[tuple[str, object]]:
    """Arguments and, of tuples of them, members by their names."""
    for name, value in arguments.items():
        yield from value._asdict().items() if hasattr(value, "_asdict") else [(name, value)]


def _addresses(pointers: interpreter.TensorHandle, mask: interpreter.TensorHandle) -> np.ndarray:
    """Of the elements that are loaded or stored, int64 in one dimension. A mask may hold integers."""
    addresses, inside = np.broadcast_arrays(pointers.data, mask.data)
    return addresses.astype(np.int64).ravel()[inside.astype(bool).ravel()]


class _Gathered:
    """Looks like a kernel to the interpreter, which calls it for every program; the last call runs them all."""

    def __init__(self, fn: Callable, simulation: _Simulation) -> None:
        self.fn, self.simulation = fn, simulation
        self.__name__, self.__globals__, self.__signature__ = fn.__name__, fn.__globals__, signature(fn)
        self.places: list[tuple[int, int, int]] = []

    def __call__(self, **arguments) -> None:
        self.places.append(BUILDER.grid_idx)
        if len(self.places) == math.prod(BUILDER.grid_dim):
            launch = _Launch(self.__name__, self.simulation.order, self.places, arguments)
            self.simulation.launch = launch
            launch.run(partial(self.fn, **arguments))


class _Executor(interpreter.GridExecutor):
    """Triton's own, for a kernel that is `_Gathered`."""

    def __init__(self, simulation: _Simulation, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.simulation = simulation

    def __call__(self, *args, **kwargs):
        self.simulation.launch = None
        self.fn = _Gathered(self.fn, self.simulation)
        super().__call__(*args, **kwargs)
        if self.simulation.launch is not None:
            self.simulation.launch.check()


@contextmanager
def simulated(order: int) -> Iterator[None]:
    """Launches of kernels run their programs in the order that this number stands for; triton is as before afterwards.

    Raises: Race, at the end of a launch in which there was one.
    """
    simulation = _Simulation(order)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "GridExecutor", partial(_Executor, simulation))
        for name in HOOKED:
            patch.setitem(vars(BUILDER), f"create_{name}", getattr(simulation, name))
        yield


def poison(tensors: list[Tensor], seed: int) -> None:
    """Fill tensors with what nobody may rely on: NaN, infinity, the largest number, or any bits."""
    source = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        kind = source.randrange(4)
        if kind == 3:
            bits = tensor.view(torch.uint8)
            bits.random_(0, 256, generator=generator)
        else:
            tensor.fill_((math.nan, math.inf, torch.finfo(tensor.dtype).max)[kind])
