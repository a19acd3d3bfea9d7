"""Global memory of a launch and shared memory of a program, as bytes, with what may not be done with them.

Addresses are those of the host: a tensor's bytes lie where torch has put them. Only bytes that are elements of a tensor
the kernel was given exist, so that a step into the next tensor, or between the rows of a view, is found.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

NOBODY, WARP, ABOVE = -1, 1024, 1 << 14  # threads are below 1024


class Fault(Exception):
    """What a kernel must not do.

    Attributes:
        kind: one of bounds, alignment, uninitialised, race, barrier, pending, divergence, order.
        thread: of the program, the first that does it; None if it is none in particular.
    """

    def __init__(self, kind: str, message: str, thread: int | None = None) -> None:
        super().__init__(message)
        self.kind, self.thread = kind, thread


def elements(about: np.ndarray, tensor: Tensor) -> np.ndarray:
    """What an array [S] says about the bytes of a tensor's storage, seen as the tensor's: [..., bytes of an element]."""
    each = about.itemsize
    first = each * (tensor.data_ptr() - tensor.untyped_storage().data_ptr())
    steps = (*(each * step * tensor.itemsize for step in tensor.stride()), each)
    return np.ndarray((*tensor.shape, tensor.itemsize), about.dtype, about, first, steps)


class Region:
    """One allocation, of which tensors are views.

    Attributes:
        base: address of its first byte.  data: its bytes, [S] uint8, not a copy.  owner: which tensor each byte is an
        element of, [S] int16, 0 for none.  names: of tensors, from number 1.  known: which bytes have been written,
        [S] bool; None if all have.  stored: which bytes this launch writes, [S] bool.
    """

    def __init__(self, tensor: Tensor, known: np.ndarray | None) -> None:
        storage = tensor.untyped_storage()
        self.base, self.known = storage.data_ptr(), known
        self.data = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        self.owner = np.zeros(len(self.data), np.int16)
        self.stored = np.zeros(len(self.data), bool)
        self.names: list[str] = [""]

    def add(self, name: str, tensor: Tensor) -> None:
        self.names.append(name)
        elements(self.owner, tensor)[...] = len(self.names) - 1

    def element(self, offset: int) -> str:
        """The name of the tensor that has this byte, or had it been longer, would, and the distance from its start."""
        number = int(self.owner[offset]) if 0 <= offset < len(self.owner) else 0
        if not number:
            owned = np.flatnonzero(self.owner)
            number = int(self.owner[owned[np.abs(owned - offset).argmin()]]) if len(owned) else 0
        first = int(np.flatnonzero(self.owner == number)[0]) if number else 0
        return f"{self.names[number] or 'a tensor'} + {offset - first} bytes"


class Global:
    """The tensors that a kernel is given."""

    def __init__(self, tensors: Mapping[str, Tensor], unwritten: Mapping[int, np.ndarray]) -> None:
        """Args: tensors: by parameter.  unwritten: which bytes of an allocation have been written, by its address,
        where not all have."""
        regions: dict[int, Region] = {}
        for name, tensor in tensors.items():
            base = tensor.untyped_storage().data_ptr()
            if tensor.numel():
                if base not in regions:
                    regions[base] = Region(tensor, unwritten.get(base))
                regions[base].add(name, tensor)
        self.regions = [regions[base] for base in sorted(regions)]
        self.bases = np.array([region.base for region in self.regions], np.int64)

    def spots(self, addresses: np.ndarray, size: int, threads: np.ndarray) -> list[tuple[Region, np.ndarray, np.ndarray]]:
        """Where accesses of `size` bytes go: regions, offsets into them, and which of the accesses those are.

        Args: addresses [A] int64; threads [A]: who makes them.  Raises: Fault for bounds or alignment.
        """
        odd = addresses % size != 0
        if odd.any():
            first = int(odd.argmax())
            raise Fault("alignment", f"{size} bytes at an address that is no multiple of {size}", int(threads[first]))
        which = np.searchsorted(self.bases, addresses, side="right") - 1
        found = []
        for number in np.unique(which):
            mine = np.flatnonzero(which == number)
            region = self.regions[max(number, 0)]
            offsets = addresses[mine] - region.base
            inside = (offsets >= 0) & (offsets + size <= len(region.data))
            if inside.all():
                owner = region.owner[offsets]
                inside = (owner != 0) & (owner == region.owner[offsets + size - 1])
            if not inside.all():
                wrong = int(inside.argmin())
                raise Fault("bounds", f"{size} bytes outside of every tensor, next to {region.element(int(offsets[wrong]))}",
                            int(threads[mine[wrong]]))  # fmt: skip
            found.append((region, offsets, mine))
        return found

    def load(self, addresses: np.ndarray, size: int, threads: np.ndarray) -> tuple[np.ndarray, list]:
        """Bytes [A, size] and where they come from. Raises: Fault."""
        data, spots = np.empty((len(addresses), size), np.uint8), self.spots(addresses, size, threads)
        for region, offsets, mine in spots:
            places = offsets[:, None] + np.arange(size)
            if region.known is not None and not region.known[places].all():
                wrong = int(region.known[places].all(1).argmin())
                what = region.element(int(offsets[wrong]))
                raise Fault("uninitialised", f"loads {what}, which nobody has written", int(threads[mine[wrong]]))
            data[mine] = region.data[places]
        return data, spots

    def store(self, addresses: np.ndarray, data: np.ndarray, threads: np.ndarray) -> list:
        """Write bytes [A, size]. Returns: where to.  Raises: Fault, also if threads write different bytes at once."""
        spots = self.spots(addresses, data.shape[1], threads)
        for region, offsets, mine in spots:
            places = offsets[:, None] + np.arange(data.shape[1])
            region.data[places] = data[mine]
            region.stored[places] = True
            if region.known is not None:
                region.known[places] = True
            lost = (region.data[places] != data[mine]).any(1)
            if lost.any():
                what = region.element(int(offsets[lost.argmax()]))
                raise Fault("race", f"threads store different numbers in {what} at once", int(threads[mine[lost.argmax()]]))
        return spots


class Shared:
    """Shared memory of one program.

    Of every byte it is known which thread has written it and which threads, lowest and highest, have read it since the
    last barrier: these are in no order with what other threads do. A barrier of a warp turns its threads into the warp,
    WARP + its number, with which no thread of it is in conflict.
    """

    def __init__(self, size: int) -> None:
        self.data = np.zeros(size, np.uint8)
        self.known = np.zeros(size, bool)
        self.pending = np.zeros(size, bool)  # an asynchronous copy is to write it
        self.writer, self.lowest, self.highest = (np.empty(size, np.int16) for _ in range(3))
        self.copies: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # of the group that is being collected
        self.groups: list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = []
        self.barrier()

    def barrier(self) -> None:
        """All threads have arrived."""
        self.writer.fill(NOBODY)
        self.lowest.fill(ABOVE)
        self.highest.fill(NOBODY)

    def warp_barrier(self, warps: np.ndarray) -> None:
        """All threads of each of these warps have."""
        inside = np.isin(self.writer // 32, warps)
        self.writer[inside] = WARP + self.writer[inside] // 32
        low, high = (np.where(who < WARP, who // 32, who - WARP) for who in (self.lowest, self.highest))
        inside = (low == high) & np.isin(low, warps)
        self.lowest[inside] = self.highest[inside] = WARP + low[inside]

    def places(self, addresses: np.ndarray, size: int, threads: np.ndarray) -> np.ndarray:
        """Bytes [A, size] of accesses. Raises: Fault for bounds or alignment."""
        if (addresses % size).any():
            first = int((addresses % size != 0).argmax())
            raise Fault("alignment", f"{size} bytes at {addresses[first]} in shared memory", int(threads[first]))
        outside = (addresses < 0) | (addresses + size > len(self.data))
        if outside.any():
            first = int(outside.argmax())
            where = f"{size} bytes at {addresses[first]} of {len(self.data)} bytes of shared memory"
            raise Fault("bounds", where, int(threads[first]))
        return addresses[:, None] + np.arange(size)

    def load(self, places: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Bytes [A, size]. Args: low, high: the first and the last thread that reads each, [A].  Raises: Fault."""
        _refuse("pending", self.pending[places], low, "reads what a cp.async writes before its wait")
        _refuse("uninitialised", ~self.known[places], low, "reads shared memory that nobody has written")
        self.in_order(self.writer[places], self.writer[places], low, high, "reads shared memory that {} wrote")
        np.minimum.at(self.lowest, places, low[:, None].astype(np.int16))
        np.maximum.at(self.highest, places, high[:, None].astype(np.int16))
        return self.data[places]

    def in_order(self, first: np.ndarray, last: np.ndarray, low: np.ndarray, high: np.ndarray, text: str) -> None:
        """Raise Fault if threads between `first` and `last` [A, size] are others than those between low and high [A]."""
        if not (last >= 0).any():
            return
        low, high = low[:, None], high[:, None]
        wrong = (last >= 0) & ((first != low) | (last != high))
        wrong &= (first != last) | (low // 32 != high // 32) | (last != WARP + low // 32)
        if wrong.any():
            other = int(np.where(first == low, last, first)[wrong][0])
            name = f"thread {other}" if other < WARP else f"warp {other - WARP}"
            _refuse("race", wrong, low[:, 0], text.format(name) + " without a barrier in between")

    def store(self, places: np.ndarray, data: np.ndarray, who: np.ndarray) -> None:
        """Write bytes [A, size]. Args: who: threads [A].  Raises: Fault."""
        self.may_write(places, who)
        self.write(places, data, who)

    def may_write(self, places: np.ndarray, who: np.ndarray) -> None:
        """Raise Fault if others have read or written these bytes since the last barrier, or a copy is to."""
        _refuse("pending", self.pending[places], who, "writes what a cp.async writes before its wait")
        self.in_order(self.writer[places], self.writer[places], who, who, "writes shared memory that {} wrote")
        self.in_order(self.lowest[places], self.highest[places], who, who, "writes shared memory that {} read")

    def write(self, places: np.ndarray, data: np.ndarray, who: np.ndarray) -> None:
        """Write bytes [A, size] that may be written. Raises: Fault if threads write different bytes at once."""
        self.data[places], self.known[places], self.writer[places] = data, True, who[:, None]
        _refuse("race", self.data[places] != data, who, "and another thread write different bytes of shared memory at once")

    def copy(self, places: np.ndarray, data: np.ndarray, who: np.ndarray) -> None:
        """Begin to write bytes [A, size], of the group that is collected. Raises: Fault."""
        self.may_write(places, who)
        self.pending[places] = True
        self.copies.append((places, data, who))

    def commit(self) -> None:
        """Close the group."""
        self.groups.append(self.copies)
        self.copies = []

    def wait(self, left: int) -> None:
        """End the copies of all groups but the last `left`."""
        while len(self.groups) > left:
            for places, data, who in self.groups.pop(0):
                self.pending[places] = False
                self.write(places, data, who)


def _refuse(kind: str, wrong: np.ndarray, who: np.ndarray, text: str) -> None:
    """Raise Fault for the first access of which any byte is wrong, [A, size]; who [A]."""
    if wrong.any():
        raise Fault(kind, text, int(who[wrong.any(1).argmax()]))
