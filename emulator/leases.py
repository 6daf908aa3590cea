"""Waiting for memory: a pool whose reservations queue up in one global order.

The pools themselves (``emulator.pool``) are pure state machines that answer now or not at all. Here a request
that does not fit waits, and nobody behind it in the order overtakes it, so that a large request cannot starve.

Why this cannot deadlock: a request reserves DE buffer, then PE buffer, then PE HBM, then DE pages, and each
holder can finish with what it holds and what comes later in that list.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

import trio

__all__ = ["LeaseQueue"]

L = TypeVar("L")


class LeaseQueue(Generic[L]):
    """Reservations of a pool in ascending ``order``; within one order, first come first served.

    ``try_reserve`` returns a lease or None, ``release`` gives one back.
    """

    def __init__(self, try_reserve: Callable[[int], L | None], release: Callable[[L], None]) -> None:
        self._try_reserve = try_reserve
        self._release = release
        self._waiting: list[tuple[int, int, int, trio.Event]] = []
        self._granted: dict[int, L] = {}
        self._ticket = 0

    async def reserve(self, amount: int, order: int = 0) -> L:
        """A lease of ``amount``, as soon as everybody earlier in the order has theirs. Always checkpoints."""
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

    def release(self, lease: L) -> None:
        """Give a lease back and let the next in order have what they wait for."""
        self._release(lease)
        self._grant()

    @asynccontextmanager
    async def hold(self, amount: int, order: int = 0) -> AsyncIterator[L]:
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
            lease = self._try_reserve(amount)
            if lease is None:
                return
            heapq.heappop(self._waiting)
            self._granted[ticket] = lease
            event.set()
