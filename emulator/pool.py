"""Pools: HBM pages and DRAM buffers, reserved and released; what is reserved plus what is free is the total.

Pure state machines: nothing waits here. A pool hands out ``Lease`` values and takes each back exactly once.
``PagePool`` may answer with several runs; ``BufferPool`` answers with one contiguous range or not at all.

Whoever waits for a pool must queue in one fixed order, and let nobody overtake the head. Then
fragmentation cannot starve a request that fits the pool at all: leases ahead of the head are finite in number,
each is released in the end, and free neighbours merge at once, so at the latest with the pool empty the head
finds one run of the whole size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort

import msgspec

from .records import PoolRecord

__all__ = ["BufferPool", "Lease", "PagePool", "Pool", "PoolExhausted", "Run"]

Run = tuple[int, int]


class PoolExhausted(Exception):
    """Not enough is free now; a release may help."""


class Lease(msgspec.Struct, frozen=True):
    """What was reserved: disjoint ``runs`` of (first, count) in the pool's unit. ``serial`` makes it unique."""

    pool: str
    serial: int
    runs: tuple[Run, ...]

    @property
    def size(self) -> int:
        """Pages or bytes in all."""
        return sum(count for _, count in self.runs)

    @property
    def offset(self) -> int:
        """Where a lease of one run begins; 0 for an empty lease. Raises ValueError for a scattered one."""
        if len(self.runs) > 1:
            raise ValueError(f"{self.pool}: lease {self.serial} is scattered over {len(self.runs)} runs")
        return self.runs[0][0] if self.runs else 0


class _FreeRuns:
    """Disjoint free runs, sorted by their start and never adjacent (neighbours merge)."""

    def __init__(self, total: int) -> None:
        self.runs: list[Run] = [(0, total)] if total else []

    def take(self, first: int, count: int) -> None:
        """Cut ``count`` from the beginning of the free run that starts at ``first``."""
        at = bisect_left(self.runs, (first, 0))
        start, length = self.runs.pop(at)
        if length > count:
            self.runs.insert(at, (start + count, length - count))

    def give(self, first: int, count: int) -> None:
        """Add a run that is not free, merging it with its neighbours."""
        at = bisect_left(self.runs, (first, 0))
        if at < len(self.runs) and self.runs[at][0] == first + count:
            count += self.runs.pop(at)[1]
        if at and sum(self.runs[at - 1]) == first:
            before, length = self.runs.pop(at - 1)
            first, count = before, length + count
        insort(self.runs, (first, count))


class Pool(ABC):
    """``total`` units, some reserved. Deterministic: the same calls give the same leases."""

    def __init__(self, name: str, total: int) -> None:
        if total < 0:
            raise ValueError(f"{name}: a pool of {total}: expected 0 or more")
        self.name = name
        self.total = total
        self.free = total
        self.peak_used = 0
        self._free = _FreeRuns(total)
        self._held: dict[int, Lease] = {}
        self._serial = 0

    @property
    def used(self) -> int:
        return self.total - self.free

    @property
    def leases(self) -> int:
        """How many leases are out."""
        return len(self._held)

    def can_ever_fit(self, count: int) -> bool:
        """Would ``count`` fit if nothing else were reserved?"""
        return 0 <= count <= self.total

    def try_reserve(self, count: int) -> Lease | None:
        """A lease of ``count`` units (0: an empty lease), or None when they cannot be had now."""
        if count < 0:
            raise ValueError(f"{self.name}: reserve {count}: expected 0 or more")
        runs = self._choose(count) if count else ()
        if runs is None:
            return None
        for first, size in runs:
            self._free.take(first, size)
        lease = Lease(self.name, self._serial, runs)
        self._serial += 1
        self._held[lease.serial] = lease
        self.free -= count
        self.peak_used = max(self.peak_used, self.used)
        return lease

    def reserve(self, count: int) -> Lease:
        """Like ``try_reserve``; raises PoolExhausted instead of answering None."""
        lease = self.try_reserve(count)
        if lease is None:
            raise PoolExhausted(f"{self.name}: {count} wanted, {self.free} of {self.total} free")
        return lease

    def release(self, lease: Lease) -> None:
        """Take ``lease`` back. Raises ValueError for one that is not out: released before, or another pool's."""
        if self._held.get(lease.serial) != lease:
            raise ValueError(f"{self.name}: lease {lease.serial} of {lease.pool} is not out: released twice?")
        del self._held[lease.serial]
        for first, size in lease.runs:
            self._free.give(first, size)
        self.free += lease.size

    def record(self) -> PoolRecord:
        """The pool's line in the run's records."""
        return PoolRecord(self.name, self.total, self.free, self.peak_used)

    @abstractmethod
    def _choose(self, count: int) -> tuple[Run, ...] | None:
        """Runs of ``count`` > 0 units in all, each at the beginning of a free run; None when there are none."""


class PagePool(Pool):
    """``total`` pages; a lease has as few runs as the free pages allow.

    Best fit: the shortest free run that holds the rest, else the longest and go on. Ties go to the lowest page.
    """

    def _choose(self, count: int) -> tuple[Run, ...] | None:
        if count > self.free:
            return None
        by_length = sorted(self._free.runs, key=lambda run: (run[1], -run[0]))
        chosen: list[Run] = []
        while by_length[-1][1] < count:
            first, length = by_length.pop()
            chosen.append((first, length))
            count -= length
        first = min((length, first) for first, length in by_length if length >= count)[1]
        return (*chosen, (first, count))


class BufferPool(Pool):
    """``total`` contiguous bytes; a lease is one range, the first that fits (lowest address)."""

    def _choose(self, count: int) -> tuple[Run, ...] | None:
        for first, length in self._free.runs:
            if length >= count:
                return ((first, count),)
        return None
