"""The storage node: answers batched reads over its SNIC and commits the blocks that land in its memory.

A read is one stream: its blocks go out in the order asked, in messages of whole Full Blocks, so that a reader's
queue is first in, first out on its queue pair. A block is visible only once its batch is committed to the
``BlockStore``; the caller learns of it by the reply.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..config import READ_BLOCKS
from ..deployment import Deployment, split_ids
from ..errors import ProtocolViolation
from ..extent import Extent
from ..fabric.interface import Fabric, Region, Segment, Target
from ..kvcache import BlockId
from ..pool import BufferPool
from ..records import PoolRecord
from ..store import BlockStore
from .blockio import LANDING_BLOCKS, landing_region
from .leases import LeaseQueue
from .messages import COMMIT, PUT, READ, Ack, Commit, Put, Read

__all__ = ["StorageNode"]

READS_AT_ONCE = 8
"""Reads of full size that a storage node has in memory at once; further ones wait their turn."""


class StorageNode:
    """One storage node's role. Registers its regions and handlers when it is made."""

    def __init__(self, deployment: Deployment, fabric: Fabric, store: BlockStore) -> None:
        self._deployment = deployment
        self._fabric = fabric
        self._store = store
        size = deployment.layout.full_block_bytes
        self._outbox = fabric.register("outbox", READS_AT_ONCE * READ_BLOCKS * size)
        self._pool = BufferPool(f"{fabric.node}.outbox", self._outbox.size_bytes)
        self._space = LeaseQueue(self._pool)
        self._landing: dict[str, Region] = {}
        for node in deployment.named("de"):
            name = landing_region(node)
            self._landing[name] = fabric.register(name, LANDING_BLOCKS * size)
        fabric.serve(READ, self.read)
        fabric.serve(COMMIT, self.commit)
        fabric.serve(PUT, self.put)

    def pools(self) -> Iterator[PoolRecord]:
        yield self._pool.record()

    async def read(self, request: Read) -> Ack:
        """Send the blocks asked for into the reader's region; reply when the last is in place."""
        ids = split_ids(request.block_ids)
        if sum(count for _, count in request.runs) != len(ids):
            raise ProtocolViolation(f"{self._fabric.node}: a read of {len(ids)} blocks with runs {request.runs}")
        size = self._deployment.layout.full_block_bytes
        # Who reads for free names no NIC, and its blocks leave through none.
        source = self._deployment.reader_endpoint(self._fabric.node)
        target = Target(source, request.dst, request.region, request.transfer)
        async with self._space.hold(len(ids) * size) as lease:
            begin = lease.offset
            self._store.read_into(ids, self._outbox.memory[begin : begin + len(ids) * size])
            segments = []
            for offset, count in request.runs:
                segments.append(Segment((Extent(begin, count * size),), (Extent(offset, count * size),)))
                begin += count * size
            async with self._fabric.open_stream(target, self._outbox, segments) as stream:
                stream.release(len(segments))
                await stream.wait_placed(len(segments))
        return Ack()

    async def commit(self, request: Commit) -> Ack:
        """Append the blocks that were written into a landing region."""
        region = self._landing.get(request.region)
        if region is None:
            raise ProtocolViolation(f"{self._fabric.node}: a commit from unknown region {request.region!r}")
        ids = split_ids(request.block_ids)
        size = self._deployment.layout.full_block_bytes
        end = request.offset + len(ids) * size
        if end > region.size_bytes:
            raise ProtocolViolation(
                f"{self._fabric.node}: a commit up to {end} of {region.size_bytes} bytes landed"
            )
        self._append(ids, region.memory.data[request.offset : end])
        return Ack()

    async def put(self, request: Put) -> Ack:
        """Keep blocks that come with the call: how the store is warmed before the clock starts."""
        self._append(split_ids(request.block_ids), memoryview(request.data))
        return Ack()

    def _append(self, ids: list[BlockId], data: memoryview) -> None:
        size = self._deployment.layout.full_block_bytes
        if len(data) != len(ids) * size:
            raise ProtocolViolation(f"{self._fabric.node}: {len(data)} bytes for {len(ids)} blocks of {size}")
        self._store.append([(block, data[at * size : (at + 1) * size]) for at, block in enumerate(ids)])
