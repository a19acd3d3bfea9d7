"""Global memory of a launch and shared memory of a program, as bytes, with what may not be done with them.

Allocations are far apart here, so that no step beyond one ends in another, and only bytes that are elements of a tensor
which the kernel was given exist, so that a step between the rows of a view is found.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

NOBODY, WARP, ABOVE = -1, 1024, 1 << 14  # threads are below 1024
Spots = list[tuple["Region", np.ndarray, np.ndarray]]  # regions, offsets into them, and which accesses go there


class Fault(Exception):
    """What a kernel must not do.

    Attributes: kind: one of bounds, alignment, uninitialised, race, barrier, pending, divergence.
        thread: the first of the program that does it.
    """

    def __init__(self, kind: str, message: str, thread: int) -> None:
        super().__init__(message)
        self.kind, self.thread = kind, thread


def refuse(kind: str, wrong: np.ndarray, who: np.ndarray, text: str) -> None:
    """Raise Fault for the first access that is wrong, [A], or a byte of it, [A, size]. Args: who: threads [A]."""
    if wrong.any():
        raise Fault(kind, text, int(who[wrong.reshape(len(who), -1).any(1).argmax()]))


def elements(about: np.ndarray, tensor: Tensor) -> np.ndarray:
    """What an array [S] says about bytes of a tensor's storage, seen as the tensor's: [..., bytes of an element]."""
    each = about.itemsize
    first = each * (tensor.data_ptr() - tensor.untyped_storage().data_ptr())
    steps = (*(each * step * tensor.itemsize for step in tensor.stride()), each)
    return np.ndarray((*tensor.shape, tensor.itemsize), about.dtype, about, first, steps)


class Region:
    """One allocation, of which tensors are views.

    Attributes: base: what a kernel takes for the address of its first byte.  data: its bytes, [S] uint8, not a copy.
        owner: number of the tensor that each byte belongs to, [S] int16, 0 for none.  names: of tensors, from number 1.
        known: which bytes have been written, [S] bool; None if all have.  stored: which this launch writes, [S] bool.
    """

    def __init__(self, tensor: Tensor, base: int, known: np.ndarray | None) -> None:
        storage = tensor.untyped_storage()
        self.base, self.names = base + storage.data_ptr() % 256, [""]
        fits = known is not None and len(known) == storage.nbytes()  # and is not of what was here before
        self.known = known if fits else None
        self.data = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        self.owner, self.stored = np.zeros(len(self.data), np.int16), np.zeros(len(self.data), bool)

    def element(self, offset: int) -> str:
        """The tensor that has this byte, or one nearby, and the distance from its first."""
        owned = np.flatnonzero(self.owner)
        number = self.owner[owned[np.abs(owned - offset).argmin()]]
        return f"{self.names[number]} + {offset - np.flatnonzero(self.owner == number)[0]} bytes"


class Global:
    """The tensors that a kernel is given."""

    def __init__(self, tensors: Mapping[str, Tensor], unwritten: Mapping[int, np.ndarray]) -> None:
        """Args: tensors: by name.  unwritten: by its address, which bytes of an allocation have been written."""
        regions: dict[int, Region] = {}
        for name, tensor in tensors.items():
            place = tensor.untyped_storage().data_ptr()
            if tensor.numel():
                region = regions.setdefault(place, Region(tensor, (len(regions) + 1) << 40, unwritten.get(place)))
                elements(region.owner, tensor)[...] = len(region.names)
                region.names.append(name)
        self.placed, self.regions = regions, list(regions.values())
        self.bases = np.array([region.base for region in self.regions], np.int64)

    def address(self, tensor: Tensor) -> int:
        """Of a tensor's first byte, aligned as it is; 0 if it has none."""
        place = tensor.untyped_storage().data_ptr()
        return self.placed[place].base + tensor.data_ptr() - place if tensor.numel() else 0

    def spots(self, addresses: np.ndarray, size: int, threads: np.ndarray) -> Spots:
        """Where accesses of `size` bytes go. Args: addresses [A] int64; threads [A].  Raises: Fault."""
        refuse("alignment", addresses % size != 0, threads, f"accesses {size} bytes at no multiple of {size}")
        which = np.searchsorted(self.bases, addresses, side="right") - 1
        found = []
        for number in np.unique(which):
            mine = np.flatnonzero(which == number)
            region = self.regions[max(number, 0)]
            offsets = addresses[mine] - region.base
            inside = (offsets >= 0) & (offsets + size <= len(region.data))
            first, last = (region.owner[np.where(inside, offsets + step, 0)] for step in (0, size - 1))
            inside &= (first == last) & (first != 0)
            nearby = region.element(int(offsets[inside.argmin()]))
            refuse("bounds", ~inside, threads[mine], f"accesses {size} bytes outside of every tensor, next to {nearby}")
            found.append((region, offsets, mine))
        return found

    def load(self, addresses: np.ndarray, size: int, threads: np.ndarray) -> tuple[np.ndarray, Spots]:
        """Bytes [A, size] and where they come from. Raises: Fault."""
        data, spots = np.empty((len(addresses), size), np.uint8), self.spots(addresses, size, threads)
        for region, offsets, mine in spots:
            places = offsets[:, None] + np.arange(size)
            if region.known is not None and not region.known[places].all():
                unknown = ~region.known[places]
                text = f"loads {region.element(int(places[unknown][0]))}, which nobody has written"
                refuse("uninitialised", unknown, threads[mine], text)
            data[mine] = region.data[places]
        return data, spots

    def store(self, addresses: np.ndarray, data: np.ndarray, threads: np.ndarray) -> Spots:
        """Write bytes [A, size]. Returns: where to.  Raises: Fault, also if threads write different bytes at once."""
        spots = self.spots(addresses, data.shape[1], threads)
        for region, offsets, mine in spots:
            places = offsets[:, None] + np.arange(data.shape[1])
            region.data[places], region.stored[places] = data[mine], True
            if region.known is not None:
                region.known[places] = True
            text = "and another thread store different numbers at the same place at once"
            refuse("race", region.data[places] != data[mine], threads[mine], text)
        return spots


class Shared:
    """Shared memory of one program.

    Of every byte it is known which thread has written it and which, lowest and highest, have read it since the last
    barrier. These are in no order with what others do. A barrier of a warp makes its threads one, WARP + its number.
    """

    def __init__(self, size: int) -> None:
        self.data = np.zeros(size, np.uint8)
        self.known, self.pending = np.zeros(size, bool), np.zeros(size, bool)  # pending: a copy is to write it
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
        refuse("alignment", addresses % size != 0, threads, f"accesses shared memory at no multiple of {size}")
        text = f"accesses {size} bytes beyond its {len(self.data)} bytes of shared memory"
        refuse("bounds", (addresses < 0) | (addresses + size > len(self.data)), threads, text)
        return addresses[:, None] + np.arange(size)

    def load(self, places: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Bytes [A, size]. Args: low, high: the first and the last thread that reads each, [A].  Raises: Fault."""
        refuse("pending", self.pending[places], low, "reads what a cp.async writes before its wait")
        refuse("uninitialised", ~self.known[places], low, "reads shared memory that nobody has written")
        self.in_order(self.writer[places], self.writer[places], low, high, "reads shared memory that {} wrote")
        np.minimum.at(self.lowest, places, low[:, None].astype(np.int16))
        np.maximum.at(self.highest, places, high[:, None].astype(np.int16))
        return self.data[places]

    def in_order(self, first: np.ndarray, last: np.ndarray, low: np.ndarray, high: np.ndarray, text: str) -> None:
        """Raise Fault if threads from `first` to `last` [A, size] are others than those from low to high [A]."""
        if not (last >= 0).any():
            return
        low, high = low[:, None], high[:, None]
        wrong = (last >= 0) & ((first != low) | (last != high))
        wrong &= (first != last) | (low // 32 != high // 32) | (last != WARP + low // 32)
        if wrong.any():
            other = int(np.where(first == low, last, first)[wrong][0])
            name = f"thread {other}" if other < WARP else f"warp {other - WARP}"
            refuse("race", wrong, low[:, 0], text.format(name) + " without a barrier in between")

    def may_write(self, places: np.ndarray, who: np.ndarray) -> None:
        """Raise Fault if others have read or written these bytes since the last barrier, or a copy is to. who: [A]."""
        refuse("pending", self.pending[places], who, "writes what a cp.async writes before its wait")
        self.in_order(self.writer[places], self.writer[places], who, who, "writes shared memory that {} wrote")
        self.in_order(self.lowest[places], self.highest[places], who, who, "writes shared memory that {} read")

    def write(self, places: np.ndarray, data: np.ndarray, who: np.ndarray) -> None:
        """Write bytes [A, size] that may be written. Raises: Fault if threads write different bytes at once."""
        self.data[places], self.known[places], self.writer[places] = data, True, who[:, None]
        text = "and another thread write different bytes of shared memory at once"
        refuse("race", self.data[places] != data, who, text)

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
