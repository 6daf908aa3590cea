"""Which Full Blocks one node keeps in its own DRAM, in front of storage: a private cache, by least recent use.

Pure state machine: no waiting, no clock, no bytes. The cache is a number of *slots* of one Full Block. A block
that is to be kept gets a slot (``reserve``), is not found while its bytes are copied there, and is from
``commit`` on. Whoever found blocks *pins* them until ``release``: a pinned block never gives way, so that nobody
reads another block's bytes.

Where no slot is free, the block gives way whose last use ended longest ago; being kept is a use, and so is being
found. Of blocks whose use ended at once the last of the chain goes first, since what chains share is their
beginning. Where all others are pinned or on their way in, the newcomer is turned away.

At any time free + used + pending slots are the total.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from .kvcache import BlockId
from .records import CacheRecord

__all__ = ["Held", "Kept", "PrefixCache"]


class Held(msgspec.Struct, frozen=True):
    """What ``lookup`` found: a slot or None for every block asked for. ``pin`` is to be released."""

    pin: int
    slots: tuple[int | None, ...]


class Kept(msgspec.Struct, frozen=True):
    """Slots for blocks to be kept, as (index of the block asked for, slot). To be committed."""

    reservation: int
    slots: tuple[tuple[int, int], ...]


class _Entry:
    """A block's slot; ``pending`` until its bytes are there, ``pins`` are its readers."""

    __slots__ = ("block", "pending", "pins", "slot")

    def __init__(self, block: BlockId, slot: int) -> None:
        self.block = block
        self.slot = slot
        self.pending = True
        self.pins = 0


class PrefixCache:
    """A cache of ``total`` slots. ValueError for a pin or a reservation that is not out."""

    def __init__(self, total: int) -> None:
        if total < 0:
            raise ValueError(f"a cache of {total} slots: expected 0 or more")
        self.total = total
        self._fresh = 0
        self._entries: dict[BlockId, _Entry] = {}
        self._idle: dict[BlockId, _Entry] = {}
        """The blocks that may give way, in the order in which they do."""
        self._pins: dict[int, list[_Entry]] = {}
        self._reservations: dict[int, list[_Entry]] = {}
        self._calls = self._pending = 0
        self._looked_up = self._hits = self._inserted = self._evicted = self._turned_away = 0

    def lookup(self, ids: Sequence[BlockId]) -> Held:
        """Pin those of ``ids`` that are kept, and say where they are."""
        self._calls += 1
        held: list[_Entry] = []
        slots: list[int | None] = []
        for block in ids:
            entry = self._entries.get(block)
            if entry is None or entry.pending:
                slots.append(None)
                continue
            entry.pins += 1
            self._idle.pop(block, None)
            held.append(entry)
            slots.append(entry.slot)
        self._pins[self._calls] = held
        self._looked_up += len(ids)
        self._hits += len(held)
        return Held(self._calls, tuple(slots))

    def release(self, pin: int) -> None:
        """The blocks of ``pin`` are no longer read by its holder."""
        entries = _out(self._pins, pin, "pin")
        for entry in entries:
            entry.pins -= 1
        self._used(entry for entry in entries if not entry.pins)

    def reserve(self, ids: Sequence[BlockId]) -> Kept:
        """Slots for those of ``ids`` that are not kept, in their order, as far as slots go."""
        self._calls += 1
        mine: list[_Entry] = []
        slots: list[tuple[int, int]] = []
        for index, block in enumerate(ids):
            if block in self._entries:
                continue
            slot = self._slot()
            if slot is None:
                self._turned_away += 1
                continue
            entry = self._entries[block] = _Entry(block, slot)
            mine.append(entry)
            slots.append((index, slot))
        self._reservations[self._calls] = mine
        self._pending += len(mine)
        return Kept(self._calls, tuple(slots))

    def commit(self, reservation: int) -> None:
        """The bytes are there: from now on the blocks of ``reservation`` are found."""
        entries = _out(self._reservations, reservation, "reservation")
        for entry in entries:
            entry.pending = False
        self._pending -= len(entries)
        self._inserted += len(entries)
        self._used(entries)

    def record(self) -> CacheRecord:
        """The cache's line in the run's records, in blocks."""
        return CacheRecord(
            total=self.total,
            used=len(self._entries) - self._pending,
            pending=self._pending,
            leases=len(self._pins),
            looked_up=self._looked_up,
            hits=self._hits,
            inserted=self._inserted,
            evicted=self._evicted,
            turned_away=self._turned_away,
        )

    def _used(self, entries: Iterable[_Entry]) -> None:
        """A use of ``entries``, in the order of their chain, has just ended."""
        for entry in reversed(list(entries)):
            self._idle[entry.block] = entry

    def _slot(self) -> int | None:
        """A free slot, or that of the block that gives way; None where none may."""
        if self._fresh < self.total:
            self._fresh += 1
            return self._fresh - 1
        oldest = next(iter(self._idle), None)
        if oldest is None:
            return None
        entry = self._idle.pop(oldest)
        del self._entries[oldest]
        self._evicted += 1
        return entry.slot


def _out(books: dict[int, list[_Entry]], number: int, what: str) -> list[_Entry]:
    if number not in books:
        raise ValueError(f"{what} {number} is not out: ended twice?")
    return books.pop(number)
