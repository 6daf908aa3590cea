"""A pool of DRAM over all PE and DE nodes, in front of storage: what the ``mooncake`` system reads from.

Every node gives memory for Full Blocks (``DramPool``); a master, on the scheduler's node, keeps the directory of
what lies where (``PoolMaster``, over ``dramcache``). A reader (``PoolReader``) leases what the master finds, has
the nodes that have it send it over the compute network, reads the rest from storage, and keeps that in its own
node's memory. What a DE writes to storage it keeps, too (``PoolWriter``).

Blocks that lie in the reading node's own memory are used there, as the real system does: they are copied to where
the role expects them without crossing a NIC or taking time, and so is what is kept.

One read, in calls to the master: look up (which leases), reserve, commit, release. No block gives way while it is
read, and nobody finds one before it is there. Whoever fails ends the run, so that nothing has to be taken back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

import msgspec

from ..deployment import Deployment, join_ids, split_ids
from ..dramcache import Directory, Found, Reserved
from ..errors import ProtocolViolation
from ..extent import Extent
from ..fabric.interface import Endpoint, Fabric, Method, Region, Segment, Target, Transfer
from ..kvcache import BlockId
from ..pool import Run
from ..records import CacheRecord
from .blockio import Job, Reader, StorageReader, StorageWriter, Wanted, all_of, copy_blocks, runs_of
from .messages import Ack, Pooled
from .withdrawal import Withdrawal

__all__ = ["DramPool", "PoolMaster", "PoolReader", "PoolWriter"]

POOL = "pool"
"""The region of a node that holds its part of the pool."""

Move = tuple[int, int]
"""(slot of the pool, byte in a buffer) of one block."""


class PoolLookup(msgspec.Struct, frozen=True):
    """A reader to the master: lease what there is of these blocks."""

    block_ids: bytes


class PoolRelease(msgspec.Struct, frozen=True):
    """A reader to the master: I have read what I leased."""

    lease: int


class PoolReserve(msgspec.Struct, frozen=True):
    """A node to the master: I have these blocks; which am I to keep, and where?"""

    node: str
    block_ids: bytes


class PoolCommit(msgspec.Struct, frozen=True):
    """A node to the master: I have kept what you gave me slots for."""

    reservation: int


class PoolRead(msgspec.Struct, frozen=True):
    """A reader to a node: put the blocks in these slots into ``region`` of mine, each to its byte there."""

    slots: tuple[int, ...]
    node: str
    region: str
    offsets: tuple[int, ...]


LOOKUP = Method("pool_lookup", PoolLookup, Found)
RELEASE = Method("pool_release", PoolRelease, Ack)
RESERVE = Method("pool_reserve", PoolReserve, Reserved)
COMMIT = Method("pool_commit", PoolCommit, Ack)
POOL_READ = Method("pool_read", PoolRead, Ack)


class PoolMaster:
    """The directory's handlers. Registers them when it is made."""

    def __init__(self, deployment: Deployment, fabric: Fabric) -> None:
        nodes = (*deployment.named("pe"), *deployment.named("de"))
        slots = dict.fromkeys(nodes, deployment.pool_blocks)
        self._directory = Directory(slots, seed=deployment.config.replay.seed)
        fabric.serve(LOOKUP, self.lookup)
        fabric.serve(RELEASE, self.release)
        fabric.serve(RESERVE, self.reserve)
        fabric.serve(COMMIT, self.commit)

    def record(self) -> CacheRecord:
        """What the directory counted until now."""
        return self._directory.record()

    async def lookup(self, request: PoolLookup) -> Found:
        return self._directory.lookup(split_ids(request.block_ids))

    async def release(self, request: PoolRelease) -> Ack:
        self._directory.release(request.lease)
        return Ack()

    async def reserve(self, request: PoolReserve) -> Reserved:
        return self._directory.reserve(split_ids(request.block_ids), request.node)

    async def commit(self, request: PoolCommit) -> Ack:
        self._directory.commit(request.reservation)
        return Ack()


class DramPool:
    """One node's part of the pool. Registers its memory and its handler when it is made."""

    def __init__(self, deployment: Deployment, fabric: Fabric) -> None:
        self._deployment = deployment
        self._fabric = fabric
        self._size = deployment.layout.full_block_bytes
        self._region = fabric.register(POOL, deployment.pool_blocks * self._size)
        fabric.serve(POOL_READ, self.send)

    async def send(self, request: PoolRead) -> Ack:
        """Stream the blocks asked for into the reader's region, over all NICs; reply when they are in place."""
        slots = self._region.size_bytes // self._size
        if len(request.slots) != len(request.offsets) or not all(0 <= slot < slots for slot in request.slots):
            raise ProtocolViolation(
                f"{self._fabric.node}: slots {request.slots} of a pool of {slots} to be read into"
                f" {len(request.offsets)} places"
            )
        rails = self._rails(request.node)
        moves = list(zip(request.slots, request.offsets, strict=True))
        await all_of(
            partial(self._stream, Target(*ends, request.region, Transfer.POOL), moves[rail :: len(rails)])
            for rail, ends in enumerate(rails[: len(moves)])
        )
        return Ack()

    async def keep(self, ids: Sequence[BlockId], region: Region, offsets: Sequence[int]) -> None:
        """Keep those of blocks ``ids``, at ``offsets`` of ``region``, that nobody keeps yet, as far as they fit.

        When this returns ``region`` is not read any more.
        """
        master = self._deployment.scheduler
        mine = PoolReserve(self._fabric.node, join_ids(ids))
        reserved = await self._fabric.call(master, RESERVE, mine)
        kept = [(offsets[index], slot * self._size) for index, slot in reserved.slots]
        await copy_blocks(region, self._region, kept, self._size)
        await self._fabric.call(master, COMMIT, PoolCommit(reserved.reservation))

    async def take(self, moves: Sequence[Move], region: Region) -> None:
        """Copy blocks of this node's part into ``region``."""
        taken = [(slot * self._size, offset) for slot, offset in moves]
        await copy_blocks(self._region, region, taken, self._size)

    async def _stream(self, target: Target, moves: Sequence[Move]) -> None:
        most = self._deployment.config.engine.read_message_blocks
        segments = [self._segment(moves[at : at + most]) for at in range(0, len(moves), most)]
        async with self._fabric.open_stream(target, self._region, segments) as stream:
            stream.release(len(segments))
            await stream.wait_placed(len(segments))

    def _segment(self, moves: Sequence[Move]) -> Segment:
        local = _extents((slot * self._size for slot, _ in moves), self._size)
        return Segment(local, _extents((offset for _, offset in moves), self._size))

    def _rails(self, reader: str) -> list[tuple[Endpoint, Endpoint]]:
        """NICs of this node and of ``reader`` in pairs, so that each of the node with more has its turn."""
        here, there = (
            [self._deployment.host(gpu) for gpu in self._deployment.node_gpus(node)]
            for node in (self._fabric.node, reader)
        )
        return [(here[at % len(here)], there[at % len(there)]) for at in range(max(len(here), len(there)))]


class PoolReader(Reader):
    """A node's reader with the pool before storage; it reads into ``buffer`` alone."""

    def __init__(self, deployment: Deployment, fabric: Fabric, pool: DramPool, buffer: Region) -> None:
        self._deployment = deployment
        self._fabric = fabric
        self._pool = pool
        self._buffer = buffer
        self._storage = StorageReader(deployment, fabric)

    async def read(self, wanted: Wanted, *, sequence: int, withdrawal: Withdrawal | None = None) -> Pooled:
        """Like ``StorageReader.read``; says what came from the pool. ProtocolViolation for another region."""
        if wanted.region != self._buffer.name:
            raise ProtocolViolation(
                f"{self._fabric.node}: a read into {wanted.region} by the reader of {self._buffer.name}"
            )
        async with self._storage.turn(sequence, withdrawal):
            return await self._read(wanted)

    async def _read(self, wanted: Wanted) -> Pooled:
        size, node, ids = self._deployment.layout.full_block_bytes, self._fabric.node, wanted.ids
        found = await self._fabric.call(self._deployment.scheduler, LOOKUP, PoolLookup(join_ids(ids)))
        moves: dict[str, list[Move]] = defaultdict(list)
        missing: list[int] = []
        for index, place in enumerate(found.places):
            if place is None:
                missing.append(index)
            else:
                moves[place.node].append((place.slot, wanted.base + index * size))
        own = moves.pop(node, [])
        reads: list[Job] = [partial(self._read_from, *of_node) for of_node in moves.items()]
        if missing:
            reads.append(partial(self._storage.fetch, wanted, list(runs_of(missing))))
        await all_of([partial(self._pool.take, own, self._buffer), *reads])
        if missing:
            offsets = [wanted.base + index * size for index in missing]
            await self._pool.keep([ids[index] for index in missing], self._buffer, offsets)
        await self._fabric.call(self._deployment.scheduler, RELEASE, PoolRelease(found.lease))
        return Pooled(len(ids) - len(missing), len(own))

    async def _read_from(self, node: str, moves: Sequence[Move]) -> None:
        slots, offsets = zip(*moves, strict=True)
        await self._fabric.call(node, POOL_READ, PoolRead(slots, self._fabric.node, self._buffer.name, offsets))


class PoolWriter(StorageWriter):
    """A DE node's writes: to storage, and into its part of the pool."""

    def __init__(self, deployment: Deployment, fabric: Fabric, pool: DramPool) -> None:
        super().__init__(deployment, fabric)
        self._size = deployment.layout.full_block_bytes
        self._pool = pool

    async def write(self, ids: Sequence[BlockId], first_index: int, region: Region, base: int) -> None:
        """Returns when all are committed to storage, and those that found room are in the pool."""
        await super().write(ids, first_index, region, base)
        await self._pool.keep(ids, region, [base + at * self._size for at in range(len(ids))])


def _extents(offsets: Iterable[int], size: int) -> tuple[Extent, ...]:
    """Blocks of ``size`` bytes at ``offsets``, in order; neighbours are one extent."""
    runs: list[Run] = []
    for offset in offsets:
        if runs and sum(runs[-1]) == offset:
            runs[-1] = runs[-1][0], runs[-1][1] + size
        else:
            runs.append((offset, size))
    return tuple(Extent(offset, count) for offset, count in runs)
