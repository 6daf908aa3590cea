"""A node's side of the distributed storage: reading hit blocks into DRAM, writing new blocks to where they stay.

Roles decide when; here is decided which storage node is asked for what, in how many messages, and in which order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import trio

from ..config import READ_BLOCKS
from ..deployment import Deployment, join_ids
from ..errors import EmulatorError
from ..extent import Extent
from ..fabric.interface import Fabric, Region, Segment, Target, Transfer
from ..kvcache import BlockId
from ..pool import BufferPool, PagePool, Run
from .leases import LeaseQueue
from .messages import COMMIT, READ, Commit, Pooled, Read
from .withdrawal import Withdrawal

__all__ = [
    "LANDING_BLOCKS",
    "READS_IN_FLIGHT",
    "Job",
    "Reader",
    "StorageReader",
    "StorageWriter",
    "Wanted",
    "all_of",
    "copy_blocks",
    "landing_region",
    "runs_of",
]

LANDING_BLOCKS = 64
"""Full Blocks of one DE node that a storage node can have received and not yet committed."""

COPY_BYTES = 1 << 20
"""What is copied inside a node before other tasks may run."""

Job = Callable[[], Awaitable[None]]

READS_IN_FLIGHT = 4
"""Requests whose blocks a node asks for at once: enough to keep its SNIC busy between two requests."""


def landing_region(de_node: str) -> str:
    """The region of a storage node into which ``de_node`` writes blocks to keep."""
    return f"landing/{de_node}"


class Wanted(msgspec.Struct, frozen=True):
    """Blocks to be brought into a DRAM buffer: ``ids``, end to end in ``region`` from byte ``base`` on.

    The first of them is block ``first`` of its chain, which says where all are kept. ``transfer``: what their
    bytes count as.
    """

    ids: Sequence[BlockId]
    first: int
    region: str
    base: int
    transfer: Transfer


class Reader(ABC):
    """What brings a hit into a node's DRAM buffer."""

    @abstractmethod
    async def read(self, wanted: Wanted, *, sequence: int, withdrawal: Withdrawal | None = None) -> Pooled:
        """Bring all that is ``wanted``, in the turn of ``sequence``; what of it came from a DRAM pool.

        Raises what failed first, once nobody writes into the region any more: the caller may then give the memory
        to somebody else. Withdrawn where ``withdrawal`` is asked before the read begins.
        """


class StorageReader(Reader):
    """A node's read queue: Full Blocks from all storage nodes into a DRAM buffer, in few large messages (1-2).

    Requests are read in the scheduler's sequence, ``READS_IN_FLIGHT`` of them at a time; within one request all
    storage nodes send at once.
    """

    def __init__(self, deployment: Deployment, fabric: Fabric) -> None:
        self._deployment = deployment
        self._fabric = fabric
        slots = PagePool(f"{fabric.node}.reads", READS_IN_FLIGHT)
        self._slots = LeaseQueue(slots)

    async def read(self, wanted: Wanted, *, sequence: int, withdrawal: Withdrawal | None = None) -> Pooled:
        async with self.turn(sequence, withdrawal):
            await self.fetch(wanted, [(0, len(wanted.ids))])
        return Pooled()

    @asynccontextmanager
    async def turn(self, sequence: int, withdrawal: Withdrawal | None = None) -> AsyncIterator[None]:
        """One of the node's places for requests that read, for the length of a block."""
        withdrawal = withdrawal or Withdrawal("")
        with withdrawal.until_asked("waiting for its turn to read"):
            slot = await self._slots.reserve(1, sequence)
        try:
            withdrawal.begin("reading its hit")
            yield
        finally:
            self._slots.release(slot)

    async def fetch(self, wanted: Wanted, parts: Sequence[Run]) -> None:
        """Like ``read``, in a turn of the caller's, of what is ``wanted`` only the ``parts`` (first, count)."""
        size = self._deployment.layout.full_block_bytes
        message = self._deployment.config.engine.read_message_blocks
        destination = self._deployment.reader_endpoint(self._fabric.node)
        transfer = Transfer.FREE if destination.nic == "free" else wanted.transfer
        runs: dict[str, list[Run]] = defaultdict(list)
        for part, length in parts:
            for node, stripe, count in self._deployment.stripes(wanted.first + part, length):
                first, end = stripe - wanted.first, stripe - wanted.first + count
                runs[node] += [(at, min(message, end - at)) for at in range(first, end, message)]
        failures: list[EmulatorError] = []
        async with trio.open_nursery() as nursery:
            for node in sorted(runs):
                reads = [
                    Read(
                        join_ids([block for first, count in part for block in wanted.ids[first : first + count]]),
                        destination,
                        wanted.region,
                        tuple((wanted.base + first * size, count) for first, count in part),
                        transfer,
                    )
                    for part in _at_most(runs[node], READ_BLOCKS)
                ]
                nursery.start_soon(self._read_from, node, reads, failures)
        if failures:
            raise failures[0]

    async def _read_from(self, node: str, reads: Sequence[Read], failures: list[EmulatorError]) -> None:
        try:
            for read in reads:
                await self._fabric.call(node, READ, read)
        except EmulatorError as error:
            failures.append(error)


async def copy_blocks(source: Region, target: Region, moves: Sequence[tuple[int, int]], size: int) -> None:
    """Copy blocks of ``size`` bytes inside a node, each from a byte of ``source`` to one of ``target``."""
    for at, (begin, to) in enumerate(moves):
        target.memory[to : to + size] = source.memory[begin : begin + size]
        if at % max(1, COPY_BYTES // size) == 0:
            await trio.lowlevel.checkpoint()


async def all_of(jobs: Iterable[Job]) -> None:
    """Run ``jobs`` at once. Raises their first EmulatorError when all are over: memory is in use until then."""
    failures: list[EmulatorError] = []

    async def attempt(job: Job) -> None:
        try:
            await job()
        except EmulatorError as error:
            failures.append(error)

    async with trio.open_nursery() as nursery:
        for job in jobs:
            nursery.start_soon(attempt, job)
    if failures:
        raise failures[0]


def runs_of(indexes: Sequence[int]) -> Iterator[Run]:
    """Ascending ``indexes`` as runs of (first, count)."""
    first = end = indexes[0]
    for index in indexes:
        if index != end:
            yield first, end - first
            first = index
        end = index + 1
    yield first, end - first


def _at_most(runs: Sequence[Run], blocks: int) -> list[list[Run]]:
    """Cut ``runs``, none of them longer, into parts of at most ``blocks`` blocks."""
    parts: list[list[Run]] = []
    room = 0
    for run in runs:
        if run[1] > room:
            parts.append([])
            room = blocks
        parts[-1].append(run)
        room -= run[1]
    return parts


class StorageWriter:
    """A DE node's writes: complete Full Blocks from its DRAM to the storage nodes that keep them (persist)."""

    def __init__(self, deployment: Deployment, fabric: Fabric) -> None:
        self._deployment = deployment
        self._fabric = fabric
        size = deployment.layout.full_block_bytes
        pools = {
            node: BufferPool(f"{fabric.node}.{node}.landing", LANDING_BLOCKS * size) for node in deployment.storage
        }
        self.pools = tuple(pools.values())
        self._landing: dict[str, LeaseQueue] = {node: LeaseQueue(pool) for node, pool in pools.items()}

    async def write(self, ids: Sequence[BlockId], first_index: int, region: Region, base: int) -> None:
        """Keep blocks ``ids``, which lie end to end in ``region`` from byte ``base``.

        The first of them is block ``first_index`` of its chain. Returns when all are committed.
        """
        size = self._deployment.layout.full_block_bytes
        for node, first, count in self._deployment.stripes(first_index, len(ids)):
            for at in range(first, first + count, LANDING_BLOCKS):
                blocks = min(LANDING_BLOCKS, first + count - at)
                skip = at - first_index
                async with self._landing[node].hold(blocks * size) as lease:
                    target = Target(
                        self._deployment.snic(self._fabric.node),
                        self._deployment.snic(node),
                        landing_region(self._fabric.node),
                        Transfer.PERSIST,
                    )
                    local = (Extent(base + skip * size, blocks * size),)
                    remote = (Extent(lease.offset, blocks * size),)
                    await self._fabric.write(target, region, Segment(local, remote))
                    kept = join_ids(ids[skip : skip + blocks])
                    await self._fabric.call(node, COMMIT, Commit(kept, target.region, lease.offset))
