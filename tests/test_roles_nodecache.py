"""A node's own cache of blocks: every byte is in its place, and nothing that is being read gives way."""

from __future__ import annotations

import numpy as np
import pytest
import trio

from emulator.deployment import Deployment, join_ids
from emulator.errors import ProtocolViolation, StoreError
from emulator.fabric.clock import run_virtual
from emulator.fabric.fluid import FluidFabric, FluidNetwork, open_fluid
from emulator.fabric.interface import Transfer
from emulator.kvcache import BlockId
from emulator.plan import emulated_rates
from emulator.roles.blockio import Wanted
from emulator.roles.messages import PUT, Pooled, Put
from emulator.roles.nodecache import CachedReader, CachingWriter, NodeCache, open_cache
from emulator.roles.storage import StorageNode
from emulator.store import MemoryStore

from .clusters import config

BLOCK_GB = Deployment(config()).scale.model_bytes(Deployment(config()).layout.full_block_bytes) / 1e9
SLOTS = 60
RUN = config(engine={"prefix_cache_gb": (SLOTS + 0.5) * BLOCK_GB})
DEPLOYMENT = Deployment(RUN)
SIZE = DEPLOYMENT.layout.full_block_bytes
CHAIN = [BlockId(bytes([at]) * 32) for at in range(100)]
BYTES = np.arange(100 * SIZE, dtype=np.uint64).view(np.uint8)[: 100 * SIZE].copy()


class _Node:
    """A node with a cache of 60 blocks and a buffer of 100, over storage that knows nothing yet."""

    def __init__(self, network: FluidNetwork, name: str = "de0") -> None:
        fabrics: dict[str, FluidFabric] = {m.name: network.fabric(m.name) for m in RUN.members}
        for storage in DEPLOYMENT.storage:
            StorageNode(DEPLOYMENT, fabrics[storage], MemoryStore(SIZE))
        self.fabric = fabrics[name]
        self._client = fabrics["client"]
        self.buffer = self.fabric.register("buffer", 100 * SIZE)
        self.cache = NodeCache(DEPLOYMENT, self.fabric)
        self.reader = CachedReader(DEPLOYMENT, self.fabric, self.cache, self.buffer)

    async def store(self, first: int, end: int) -> None:
        """Put blocks of the chain into storage."""
        for at in range(first, end):
            data = BYTES[at * SIZE : (at + 1) * SIZE].tobytes()
            await self._client.call(DEPLOYMENT.placement(at), PUT, Put(join_ids(CHAIN[at : at + 1]), data))

    async def read(self, first: int, end: int) -> Pooled:
        """Read blocks of the chain to the buffer's beginning, which is empty before; they must all be right."""
        self.buffer.memory[:] = 0
        wanted = Wanted(CHAIN[first:end], first, "buffer", 0, Transfer.DE_READ)
        pooled = await self.reader.read(wanted, sequence=0)
        size = (end - first) * SIZE
        assert np.array_equal(self.buffer.memory[:size], BYTES[first * SIZE : end * SIZE])
        return pooled

    def received(self) -> int:
        """Blocks that came from storage until now."""
        return sum(row.payload_bytes for row in self.fabric.received()) // SIZE


def _network() -> FluidNetwork:
    return FluidNetwork(emulated_rates(RUN), nodes=[m.name for m in RUN.members], rpc_latency_s=1e-5)


def test_what_was_read_once_is_not_read_again() -> None:
    """A hit is put together of what is kept and the rest, which is kept from then on; the oldest gives way."""

    async def main() -> None:
        network = _network()
        async with open_fluid(network):
            node = _Node(network)
            await node.store(0, 100)
            assert await node.read(0, 40) == Pooled()
            assert await node.read(20, 60) == Pooled(20, 20)
            began_s = trio.current_time()
            assert await node.read(0, 60) == Pooled(60, 60)
            assert trio.current_time() == began_s
            assert node.received() == 60
            assert await node.read(50, 90) == Pooled(10, 10)
            record = node.cache.record()
            assert (record.used, record.evicted, record.leases, record.pending) == (SLOTS, 30, 0, 0)
            # Of what was used at once the end of the chain gave way.
            assert await node.read(0, 60) == Pooled(30, 30)

    run_virtual(main)


def test_what_is_persisted_is_stored_and_kept() -> None:
    """A CachingWriter's blocks are in storage and in its node's DRAM, though the source is written over."""

    async def main() -> None:
        network = _network()
        async with open_fluid(network):
            node = _Node(network)
            source = node.fabric.register("source", 100 * SIZE)
            source.memory[:] = BYTES
            await CachingWriter(DEPLOYMENT, node.fabric, node.cache).write(CHAIN[:30], 0, source, 0)
            source.memory[:] = 0
            assert await node.read(0, 30) == Pooled(30, 30)
            sent = sum(row.payload_bytes for row in node.fabric.sent() if row.transfer == "PERSIST")
            assert sent == 30 * SIZE

    run_virtual(main)


def test_reads_at_once_and_writes_between_see_their_own_bytes() -> None:
    """Readers of overlapping chains that together outgrow the cache: nobody's blocks give way under a copy."""

    async def main() -> None:
        network = _network()
        async with open_fluid(network):
            node = _Node(network)
            await node.store(0, 100)
            places = node.fabric.register("places", 6 * 40 * SIZE)
            reader = CachedReader(DEPLOYMENT, node.fabric, node.cache, places)

            async def again_and_again(at: int) -> None:
                base = 40 * at * SIZE
                for turn in range(8):
                    first = (17 * at + 23 * turn) % 60
                    wanted = Wanted(CHAIN[first : first + 40], first, "places", base, Transfer.DE_READ)
                    await reader.read(wanted, sequence=at)
                    got = places.memory[base : base + 40 * SIZE]
                    assert np.array_equal(got, BYTES[first * SIZE : (first + 40) * SIZE])
                    got[:] = 0

            async with trio.open_nursery() as nursery:
                for at in range(6):
                    nursery.start_soon(again_and_again, at)
            record = node.cache.record()
            assert (record.leases, record.pending) == (0, 0)
            assert record.evicted > 0
            assert 0 < record.hits < record.looked_up == 6 * 8 * 40
            assert node.received() == record.looked_up - record.hits

    run_virtual(main)


def test_a_failed_read_lets_go_of_what_it_found() -> None:
    """Where storage has lost a block the read fails with that; what was found may give way afterwards."""

    async def main() -> None:
        network = _network()
        async with open_fluid(network):
            node = _Node(network)
            await node.store(0, 20)
            await node.read(0, 20)
            with pytest.raises(StoreError):
                await node.read(0, 21)
            record = node.cache.record()
            assert (record.used, record.leases, record.pending) == (20, 0, 0)

    run_virtual(main)


def test_a_read_into_another_region_is_a_violation() -> None:
    """What a cache copies goes where its reader's role expects it, and nowhere else."""

    async def main() -> None:
        network = _network()
        async with open_fluid(network):
            node = _Node(network)
            with pytest.raises(ProtocolViolation, match="a read into other by the reader of buffer"):
                await node.reader.read(Wanted(CHAIN, 0, "other", 0, Transfer.DE_READ), sequence=0)

    run_virtual(main)


def test_without_the_setting_there_is_no_cache() -> None:
    """No memory is registered and none is asked."""

    async def main() -> None:
        network = _network()
        async with open_fluid(network):
            assert open_cache(Deployment(config()), network.fabric("pe0")) is None
            found = open_cache(DEPLOYMENT, network.fabric("pe0"))
            assert found is not None
            assert found.record().total == SLOTS

    run_virtual(main)
