"""A group's leader: the first engine of a node pulls work for all engines of the node.

It asks the scheduler when there may be something to have: when a phase of one of its requests is over, and when
the scheduler says that work is waiting; never more often than once a period. A leader that polled on in vain would
get nothing else, only later.
"""

from __future__ import annotations

from collections.abc import Iterable

import trio

from ..deployment import Deployment
from ..fabric.interface import Fabric
from .messages import FETCH, WAKE, Ack, Fetch, Phase, Wake

__all__ = ["Leader", "Reports"]


class Leader:
    """The leader of one PE or DE node. ``serve`` must be running in a task."""

    def __init__(self, deployment: Deployment, fabric: Fabric) -> None:
        self._scheduler = deployment.scheduler
        self._period_s = deployment.config.engine.fetch_period_s
        self._fabric = fabric
        self._over: list[tuple[str, Phase]] = []
        self._due = trio.Event()
        fabric.serve(WAKE, self.wake)

    def report(self, request: str, phase: Phase) -> None:
        """A phase of ``request`` is over: its load leaves the books with the next fetch."""
        self._over.append((request, phase))
        self._due.set()

    async def wake(self, request: Wake) -> Ack:
        """There is work waiting."""
        self._due.set()
        return Ack()

    async def serve(self) -> None:
        """Fetch whenever it is due; never returns."""
        while True:
            await self._due.wait()
            self._due = trio.Event()
            over, self._over = tuple(self._over), []
            asked_s = self._fabric.now()
            await self._fabric.call(self._scheduler, FETCH, Fetch(self._fabric.node, over))
            await self._fabric.sleep_until(asked_s + self._period_s)


class Reports:
    """What a node owes the scheduler for one request: a report of each of these phases, once, whatever happens."""

    def __init__(self, leader: Leader, request: str, phases: Iterable[Phase]) -> None:
        self._leader = leader
        self._request = request
        self._owed = list(phases)

    def over(self, phase: Phase) -> None:
        """The phase is over."""
        self._owed.remove(phase)
        self._leader.report(self._request, phase)

    def leave(self, *phases: Phase) -> None:
        """Somebody else owes these from now on."""
        for phase in phases:
            self._owed.remove(phase)

    def all_over(self) -> None:
        """The request is given up: none of its phases is ahead any more."""
        for phase in list(self._owed):
            self.over(phase)
