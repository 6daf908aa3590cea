"""A group's leader: the first engine of a node pulls work for all engines of the node.

It asks the scheduler when there may be something to have: when a phase of one of its requests is over, and when
the scheduler says that work is waiting; never more often than once a period. A leader that polled on in vain would
get nothing else, only later.
"""

from __future__ import annotations

import trio

from .deployment import Deployment
from .fabric.interface import Fabric
from .messages import FETCH, WAKE, Ack, Fetch, Phase, Wake

__all__ = ["Leader"]


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
