"""Waiting for memory: a pool whose reservations queue up in one global order.

The pools themselves (``emulator.pool``) are pure state machines that answer now or not at all. Here a request
that does not fit waits, and nobody behind it in the order overtakes it, so that a large request cannot starve.

Why this cannot deadlock: a request reserves DE buffer, then PE buffer, then PE HBM, then DE pages, and each
holder can finish with what it holds and what comes later in that list.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from ..errors import EmulatorError
from ..pool import Lease, Pool

__all__ = ["LeaseQueue"]


class LeaseQueue:
    """Reservations of ``pool`` in ascending ``order``; within one order, first come first served."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._waiting: list[tuple[int, int, int, trio.Event]] = []
        self._granted: dict[int, Lease] = {}
        self._ticket = 0

    async def reserve(self, amount: int, order: int = 0) -> Lease:
        """A lease of ``amount``, as soon as everybody earlier in the order has theirs. Always checkpoints.

        EmulatorError for what the whole pool could not give: waiting for it would hold up everybody, for ever.
        """
        if not self._pool.can_ever_fit(amount):
            raise EmulatorError(
                f"{self._pool.name}: {amount} wanted at once, the whole pool has {self._pool.total}"
            )
        self._ticket += 1
        ticket = self._ticket
        event = trio.Event()
        heapq.heappush(self._waiting, (order, ticket, amount, event))
        self._grant()
        try:
            await event.wait()
        except BaseException:
            if ticket in self._granted:
                self.release(self._granted.pop(ticket))
            else:
                self._waiting = [w for w in self._waiting if w[1] != ticket]
                heapq.heapify(self._waiting)
                self._grant()
            raise
        return self._granted.pop(ticket)

    def reserve_nowait(self, amount: int) -> Lease | None:
        """A lease of ``amount`` if nobody waits and it can be had now."""
        return None if self._waiting else self._pool.try_reserve(amount)

    def release(self, lease: Lease) -> None:
        """Give a lease back and let the next in order have what they wait for."""
        self._pool.release(lease)
        self._grant()

    @asynccontextmanager
    async def hold(self, amount: int, order: int = 0) -> AsyncIterator[Lease]:
        """A lease for the length of a block."""
        lease = await self.reserve(amount, order)
        try:
            yield lease
        finally:
            self.release(lease)

    @property
    def waiting(self) -> int:
        """How many reservations wait."""
        return len(self._waiting)

    def _grant(self) -> None:
        while self._waiting:
            _, ticket, amount, event = self._waiting[0]
            lease = self._pool.try_reserve(amount)
            if lease is None:
                return
            heapq.heappop(self._waiting)
            self._granted[ticket] = lease
            event.set()
