"""One node's role, whichever it is: made from a run's configuration over a fabric, and asked for its record.

The same code runs in a node's process and, for virtual time, with all other roles in one nursery.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import trio

from ..config import RunConfig
from ..deployment import Deployment
from ..errors import EmulatorError
from ..fabric.interface import Fabric
from ..policy import Policy, make_policy
from ..policy.plugin import load_policy
from ..records import CacheRecord, NodeRecord
from ..store import MemoryStore, open_store
from .client import Client
from .decode import DecodeNode
from .drampool import PoolMaster
from .messages import INQUIRE, Inquiry, Standing
from .prefill import PrefillNode
from .scheduler import Scheduler
from .storage import StorageNode

__all__ = ["Role", "open_role"]

Part = PrefillNode | DecodeNode | StorageNode | Scheduler | Client


class Role:
    """A node's running role."""

    def __init__(self, fabric: Fabric, part: Part, pool: PoolMaster | None = None) -> None:
        self._fabric = fabric
        self._part = part
        self._pool = pool

    @property
    def client(self) -> Client:
        """The role as the client, which alone replays workloads."""
        if not isinstance(self._part, Client):
            raise EmulatorError(f"{self._fabric.node}: only the client replays a workload")
        return self._part

    def waiting(self) -> dict[str, str]:
        """Requests that this node has to do with, by name, and what each is doing here."""
        part = self._part
        return dict(part.waiting()) if isinstance(part, PrefillNode | DecodeNode | Scheduler) else {}

    async def standing(self, request: Inquiry) -> Standing:
        """How far this node is: whatever it does, it sends, receives or steps."""
        rows = (*self._fabric.sent(), *self._fabric.received())
        steps = sum(row.messages for row in rows)
        if isinstance(self._part, DecodeNode):
            steps += self._part.steps
        return Standing(steps, self.waiting())

    def booked(self) -> dict[str, int]:
        """What the scheduler has on its books; nothing once all requests are over, and on other nodes."""
        return self._part.booked() if isinstance(self._part, Scheduler) else {}

    def record(self) -> NodeRecord:
        """What this node counted until now."""
        part = self._part
        return NodeRecord(
            node=self._fabric.node,
            sent=self._fabric.sent(),
            received=self._fabric.received(),
            ports=self._fabric.ports(),
            exchanges=self._fabric.exchanges(),
            pools=tuple(part.pools()) if isinstance(part, PrefillNode | DecodeNode | StorageNode) else (),
            batches=tuple(part.batches()) if isinstance(part, PrefillNode) else (),
            decisions=part.decisions() if isinstance(part, Scheduler) else (),
            cache=self._cache(),
        )

    def _cache(self) -> CacheRecord | None:
        """What the pool's directory counted on the scheduler's node, or a node's own cache on that node."""
        if self._pool is not None:
            return self._pool.record()
        return self._part.cache() if isinstance(self._part, PrefillNode | DecodeNode) else None


def _policy(deployment: Deployment) -> Policy:
    """The policy that the replay asks for: its own file's, one by name, or its system's."""
    name = deployment.config.replay.policy or deployment.system.policy
    if name.endswith(".py"):
        return load_policy(Path(name), deployment.policy_setup)
    return make_policy(name, deployment.policy_setup)


@asynccontextmanager
async def open_role(
    config: RunConfig, node: str, fabric: Fabric, directory: Path | None = None
) -> AsyncIterator[Role]:
    """Play ``node``'s role for the length of a block.

    ``directory``: where a storage node keeps its files; None keeps blocks in memory.
    """
    deployment = Deployment(config)
    member = next((m for m in config.members if m.name == node), None)
    if member is None:
        raise EmulatorError(f"{node}: no such node in this topology")
    with ExitStack() as stack:
        async with trio.open_nursery() as tasks:
            part: Part
            pool: PoolMaster | None = None
            match member.role:
                case "pe":
                    part = PrefillNode(deployment, fabric, deployment.load_backend(), tasks)
                case "de":
                    part = DecodeNode(deployment, fabric, deployment.load_backend(), tasks)
                case "storage":
                    size = deployment.layout.full_block_bytes
                    store = (
                        MemoryStore(size)
                        if directory is None
                        else stack.enter_context(open_store(directory, size))
                    )
                    part = StorageNode(deployment, fabric, store)
                case "scheduler":
                    part = Scheduler(deployment, fabric, _policy(deployment), tasks)
                    pool = PoolMaster(deployment, fabric) if deployment.system.pool else None
                case "client":
                    part = Client(deployment, fabric, deployment.load_backend())
            role = Role(fabric, part, pool)
            fabric.serve(INQUIRE, role.standing)
            yield role
            tasks.cancel_scope.cancel()
