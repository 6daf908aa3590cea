"""Which Full Blocks lie in the DRAM of which node: the directory of a pool that stands before storage.

Pure state machine: no waiting, no clock, no bytes. Every node gives a number of *slots* of one Full Block. A block
that is to be kept gets a slot of the node that has its bytes (``reserve``), is invisible while they are copied,
and is found by everybody from ``commit`` on. Whoever found blocks holds a *lease* on them until ``release``: their
slots are not given to other blocks meanwhile, so that a reader never sees another block's bytes.

Where a node has no free slot, the least recently used of a few blocks drawn by chance gives way (``SAMPLE``; the
approximation of LRU that Redis made known): one that was found or kept longest ago, by the order of calls. Nobody
gives way who is leased or not yet committed; where there is no one else, the newcomer is turned away.

At any time free + used + pending slots are the total, of each node and in all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from .kvcache import BlockId
from .records import CacheRecord

__all__ = ["SAMPLE", "Directory", "Found", "Place", "Reserved"]

SAMPLE = 5
"""Blocks that are drawn for one to give way, as many as Redis draws; where there are no more, it is exact LRU."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """One slot of the pool."""

    node: str
    slot: int


class Found(msgspec.Struct, frozen=True):
    """What ``lookup`` found: a place or None for every block asked for. ``lease`` is to be released."""

    lease: int
    places: tuple[Place | None, ...]


class Reserved(msgspec.Struct, frozen=True):
    """Slots for blocks to be kept, as (index of the block asked for, slot). To be committed."""

    reservation: int
    slots: tuple[tuple[int, int], ...]


class _Entry:
    """A block's slot. ``at`` is its index in its node's ``settled``, None while it may not give way."""

    __slots__ = ("at", "block", "leases", "pending", "place", "used")

    def __init__(self, block: BlockId, place: Place) -> None:
        self.block = block
        self.place = place
        self.pending = True
        self.leases = 0
        self.used = 0
        self.at: int | None = None


class _Node:
    """One node's slots: those never used, and the blocks that may give way."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._fresh = 0
        self.settled: list[_Entry] = []

    @property
    def free(self) -> int:
        return self.total - self._fresh

    def take(self) -> int | None:
        """A free slot; None where there is none."""
        if self._fresh == self.total:
            return None
        self._fresh += 1
        return self._fresh - 1

    def settle(self, entry: _Entry) -> None:
        """``entry`` may give way from now on."""
        entry.at = len(self.settled)
        self.settled.append(entry)

    def unsettle(self, entry: _Entry) -> None:
        """``entry`` may not give way any more."""
        assert entry.at is not None
        last = self.settled.pop()
        if last is not entry:
            self.settled[entry.at] = last
            last.at = entry.at
        entry.at = None


class Directory:
    """``slots``: how many Full Blocks each node can keep. The same calls and ``seed`` have the same answers.

    ValueError for a lease or a reservation that is not out, and for an unknown node.
    """

    def __init__(self, slots: Mapping[str, int], *, seed: int = 0) -> None:
        for node, count in slots.items():
            if count < 0:
                raise ValueError(f"{node}: a pool of {count} slots: expected 0 or more")
        self._nodes = {node: _Node(count) for node, count in slots.items()}
        self._chance = np.random.default_rng(seed)
        self._entries: dict[BlockId, _Entry] = {}
        self._leases: dict[int, list[_Entry]] = {}
        self._reservations: dict[int, list[_Entry]] = {}
        self._pending = 0
        self._calls = 0
        self._looked_up = self._hits = self._inserted = self._evicted = self._turned_away = 0

    def lookup(self, ids: Sequence[BlockId]) -> Found:
        """Lease those of ``ids`` that are kept, and say where they are. They count as used now."""
        self._calls += 1
        held: list[_Entry] = []
        places: list[Place | None] = []
        for block in ids:
            entry = self._entries.get(block)
            if entry is None or entry.pending:
                places.append(None)
                continue
            entry.used = self._calls
            entry.leases += 1
            if entry.at is not None:
                self._nodes[entry.place.node].unsettle(entry)
            held.append(entry)
            places.append(entry.place)
        self._leases[self._calls] = held
        self._looked_up += len(ids)
        self._hits += len(held)
        return Found(self._calls, tuple(places))

    def release(self, lease: int) -> None:
        """The blocks of ``lease`` are no longer read by its holder."""
        for entry in self._out(self._leases, lease, "lease"):
            entry.leases -= 1
            if not entry.leases:
                self._nodes[entry.place.node].settle(entry)

    def reserve(self, ids: Sequence[BlockId], node: str) -> Reserved:
        """Slots of ``node`` for those of ``ids`` that are kept nowhere, in their order, as far as slots go."""
        if node not in self._nodes:
            raise ValueError(f"{node}: no such node in the pool")
        self._calls += 1
        mine: list[_Entry] = []
        slots: list[tuple[int, int]] = []
        for index, block in enumerate(ids):
            if block in self._entries:
                continue
            slot = self._slot(self._nodes[node])
            if slot is None:
                self._turned_away += 1
                continue
            entry = self._entries[block] = _Entry(block, Place(node, slot))
            mine.append(entry)
            slots.append((index, slot))
        self._reservations[self._calls] = mine
        self._pending += len(mine)
        return Reserved(self._calls, tuple(slots))

    def commit(self, reservation: int) -> None:
        """The bytes are there: from now on everybody finds the blocks of ``reservation``."""
        self._calls += 1
        entries = self._out(self._reservations, reservation, "reservation")
        for entry in entries:
            entry.pending = False
            entry.used = self._calls
            self._nodes[entry.place.node].settle(entry)
        self._pending -= len(entries)
        self._inserted += len(entries)

    @property
    def total(self) -> int:
        """Slots in all."""
        return sum(node.total for node in self._nodes.values())

    @property
    def free(self) -> int:
        """Slots without a block."""
        return sum(node.free for node in self._nodes.values())

    @property
    def pending(self) -> int:
        """Slots of blocks that are not committed yet."""
        return self._pending

    @property
    def used(self) -> int:
        """Slots of committed blocks."""
        return len(self._entries) - self._pending

    def record(self) -> CacheRecord:
        """The pool's line in the run's records, in blocks."""
        return CacheRecord(
            total=self.total,
            used=self.used,
            pending=self.pending,
            leases=len(self._leases),
            looked_up=self._looked_up,
            hits=self._hits,
            inserted=self._inserted,
            evicted=self._evicted,
            turned_away=self._turned_away,
        )

    def _slot(self, node: _Node) -> int | None:
        """A free slot of ``node``, or that of a block that gives way."""
        slot = node.take()
        if slot is not None or not node.settled:
            return slot
        oldest = min(self._drawn(node.settled), key=lambda entry: entry.used)
        node.unsettle(oldest)
        del self._entries[oldest.block]
        self._evicted += 1
        return oldest.place.slot

    def _drawn(self, settled: Sequence[_Entry]) -> Iterator[_Entry]:
        if len(settled) <= SAMPLE:
            return iter(settled)
        return (settled[at] for at in self._chance.integers(len(settled), size=SAMPLE))

    @staticmethod
    def _out(books: dict[int, list[_Entry]], number: int, what: str) -> list[_Entry]:
        if number not in books:
            raise ValueError(f"{what} {number} is not out: ended twice?")
        return books.pop(number)
