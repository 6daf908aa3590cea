"""One exchange of a ring as its members keep account of it: who has entered, whose bytes are in place, when.

Both fabrics keep these; how bytes move and how news travels is theirs. All times are model seconds, and ideal
where they say so: an exchange that began late by ``d`` counts as over ``d`` before it was.

Must not import ``tcp``, ``fluid`` or anything above.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import trio

from ..errors import ProtocolViolation
from .counter import Lost
from .interface import MAX_PAYLOAD_BYTES, Endpoint, Exchanged, Ring

__all__ = ["Entry", "Exchange", "Hop", "check_member", "hops_of", "largest"]


class Entry(msgspec.Struct, frozen=True):
    """A member's entry into an exchange: what it says of itself, and the time at which it said it."""

    ready_s: float
    amount: int
    at_s: float


class Hop(msgspec.Struct, frozen=True):
    """What one port sends in an exchange. ``size_bytes`` is not 0."""

    src: Endpoint
    dst: Endpoint
    size_bytes: int


def check_member(ring: Ring, node: str) -> None:
    """ValueError where ``node`` is no member of ``ring``."""
    if node not in ring.nodes:
        raise ValueError(f"{node} is no member of ring {ring.name}")


def hops_of(ring: Ring, node: str, payload: Mapping[Endpoint, int]) -> tuple[Hop, ...]:
    """What ``node`` sends. ValueError where it is no member, or ``payload`` is not of its ports in ``ring``."""
    check_member(ring, node)
    successors = {src: dst for src, dst in ring.hops if src.node == node}
    for src, size in payload.items():
        if src not in successors:
            raise ValueError(f"ring {ring.name}: {src} is no source port of {node}")
        if not 0 <= size <= MAX_PAYLOAD_BYTES:
            raise ValueError(f"ring {ring.name}: {size} bytes of {src}: expected 0 to {MAX_PAYLOAD_BYTES}")
    return tuple(Hop(src, dst, payload[src]) for src, dst in successors.items() if payload.get(src))


class Exchange:
    """One exchange of ``ring``. It is settled when it is over or will never be."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._entries: dict[str, Entry] = {}
        self._over_s: dict[str, float] = {}
        self._lost: Lost | None = None
        self._settled = trio.Event()
        self._complete = trio.Event()

    def enter(self, node: str, entry: Entry) -> bool:
        """``node`` is here; whether all are now. ProtocolViolation for a stranger, or for one who is here."""
        if node not in self._ring.nodes:
            raise ProtocolViolation(f"{node} enters ring {self._ring.name} and is no member of it")
        if node in self._entries:
            raise ProtocolViolation(f"{node} enters the same exchange of ring {self._ring.name} twice")
        self._entries[node] = entry
        if len(self._entries) < len(self._ring.nodes):
            return False
        self._complete.set()
        return True

    @property
    def first_s(self) -> float:
        """When the first member entered."""
        return min(entry.at_s for entry in self._entries.values())

    @property
    def started_s(self) -> float:
        """The ideal start, once all have entered."""
        return max(entry.ready_s for entry in self._entries.values())

    def begins_s(self, latency_s: float) -> float:
        """When bytes may leave, once all have entered and if the news of an entry takes ``latency_s``."""
        if len(self._ring.nodes) == 1:
            return self.started_s
        return max(self.started_s, latency_s + max(entry.at_s for entry in self._entries.values()))

    def finish(self, node: str, over_s: float) -> bool:
        """All that ``node`` sends is in place, ideally at ``over_s``; whether the exchange is over now.

        The news of it may be faster than that of another's entry. ProtocolViolation where ``node`` itself has
        not entered, or has ended.
        """
        if node not in self._entries or node in self._over_s:
            raise ProtocolViolation(f"{node} ends an exchange of ring {self._ring.name} that it is not in")
        self._over_s[node] = over_s
        if len(self._over_s) < len(self._ring.nodes):
            return False
        self._settled.set()
        return True

    def exchanged(self) -> Exchanged:
        """What became of it, once it is over."""
        total = sum(entry.amount for entry in self._entries.values())
        return Exchanged(self.started_s, max(self._over_s.values()), total)

    def fail(self, lost: Lost) -> None:
        """It will never be over, if it is not yet: who waits is told why."""
        if not self._settled.is_set():
            self._lost = lost
            self._complete.set()
            self._settled.set()

    async def wait_complete(self) -> None:
        """Return once all members have entered."""
        await self._complete.wait()
        if self._lost is not None:
            raise self._lost()

    async def wait(self) -> Exchanged:
        """Return once it is over."""
        await self._settled.wait()
        if self._lost is not None:
            raise self._lost()
        return self.exchanged()


def largest(hops: Sequence[Hop]) -> int:
    """The size class of an exchange at the node that sends ``hops``."""
    return max((hop.size_bytes for hop in hops), default=0)
