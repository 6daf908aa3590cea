"""The DRAM pool before storage: what it holds crosses no storage NIC, and every reader gets the right bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator import metrics
from emulator.deployment import Deployment, join_ids
from emulator.errors import ConfigError, ProtocolViolation, StoreError
from emulator.fabric.clock import run_virtual
from emulator.fabric.fluid import FluidFabric, FluidNetwork, open_fluid
from emulator.fabric.interface import Region, Transfer
from emulator.kvcache import BlockId
from emulator.plan import emulated_rates
from emulator.records import CacheRecord, RunRecords
from emulator.roles.blockio import Wanted
from emulator.roles.drampool import POOL_READ, DramPool, PoolMaster, PoolRead, PoolReader, PoolWriter
from emulator.roles.messages import PUT, Pooled, Put
from emulator.roles.storage import StorageNode
from emulator.sim import simulate
from emulator.store import MemoryStore
from emulator.workload import Workload

from .clusters import broken, config, conversation

BLOCK_GB = Deployment(config()).scale.model_bytes(Deployment(config()).layout.full_block_bytes) / 1e9
RUN = config(pe_nodes=2, gpus=3, system="mooncake", engine={"pool_gb": 200.5 * BLOCK_GB})
DEPLOYMENT = Deployment(RUN)
SIZE = DEPLOYMENT.layout.full_block_bytes
CHAIN = [BlockId(bytes([at]) * 32) for at in range(100)]


def _load(agents: int) -> Workload:
    """Three turns an agent, whose contexts come to hold 8, 11 and 13 full blocks."""
    return Workload(tuple(conversation(f"t{at}", (512, 10), (150, 40), (100, 20)) for at in range(agents)))


def _run(agents: int, blocks: float, **replay: Any) -> tuple[RunRecords, CacheRecord]:
    """A run whose two nodes keep ``blocks`` Full Blocks each; no invariant breaks."""
    # Half a block more, so that no rounding takes one away.
    run = config(system="mooncake", agents=agents, engine={"pool_gb": (blocks + 0.5) * BLOCK_GB}, **replay)
    load = _load(agents)
    records = simulate(run, load)
    assert [r.status for r in records.requests] == ["done"] * (3 * agents)
    assert broken(run, load, records) == []
    (cache,) = [node.cache for node in records.nodes if node.cache is not None]
    assert cache.total == 2 * blocks
    return records, cache


@pytest.mark.parametrize("path", ["auto", "de"])
def test_a_pool_that_holds_everything_gives_all_but_the_first_reads(path: str) -> None:
    """Warmed prompts come from storage once; all other hits come from DRAM, on whichever side they are read."""
    records, cache = _run(4, 1000, warm=True, path=path)
    for r in records.requests:
        assert r.hit_tokens > 0
        assert r.pool_tokens == (r.hit_tokens if r.turn else 0)
    assert (cache.evicted, cache.turned_away) == (0, 0)
    assert cache.hits * 64 == sum(r.pool_tokens for r in records.requests)
    assert cache.looked_up * 64 == sum(r.hit_tokens for r in records.requests)


def test_a_cold_pool_needs_no_storage_to_read_from() -> None:
    """What a DE persists is in the pool before it can be hit."""
    records, _ = _run(4, 1000)
    assert metrics.pool_hit_ratio(records.requests) == 1
    assert all(row.transfer != "PE_READ" for node in records.nodes for row in node.received)


def test_the_hit_ratio_falls_as_the_working_set_outgrows_the_pool() -> None:
    """More agents over the same pool: strictly between 0 and 1, and less each time."""
    ratios = [metrics.pool_hit_ratio(_run(agents, 20)[0].requests) for agents in (3, 6, 12)]
    found = [ratio for ratio in ratios if ratio is not None]
    assert len(found) == 3
    assert 1 > found[0] > found[1] > found[2] > 0


@pytest.mark.parametrize("blocks", [1, 5])
def test_a_pool_smaller_than_a_request_is_of_little_use_and_does_no_harm(blocks: int) -> None:
    """All are served with the right tokens, whether anything is found or not; what found no slot is counted."""
    records, cache = _run(6, blocks)
    assert cache.used == cache.total
    assert cache.turned_away > 0
    assert cache.hits * 64 == sum(r.pool_tokens for r in records.requests)


def test_the_same_seed_gives_the_same_records() -> None:
    """Chance is in what gives way alone, and seeded."""
    first, again = (msgspec.json.encode(_run(6, 12, seed=5)[0]) for _ in range(2))
    assert first == again


@settings(max_examples=12)
@given(
    rounds=st.lists(
        st.lists(st.tuples(st.integers(1, 300), st.integers(0, 80)), min_size=1, max_size=4),
        min_size=1,
        max_size=5,
    ),
    blocks=st.integers(1, 30),
    nodes=st.integers(1, 2),
    alike=st.booleans(),
)
def test_any_workload_is_served(rounds: list[list[tuple[int, int]]], blocks: int, nodes: int, alike: bool) -> None:
    """Whatever the lengths and the pool, agents with one prompt too: tokens are right and no invariant breaks."""
    agents = [conversation("t0" if alike else f"t{at}", *each) for at, each in enumerate(rounds)]
    load = Workload(tuple(msgspec.structs.replace(agent, id=f"t{at}") for at, agent in enumerate(agents)))
    size = {"pool_gb": (blocks + 0.5) * BLOCK_GB}
    run = config(system="mooncake", agents=len(rounds), pe_nodes=nodes, de_nodes=nodes, engine=size)
    assert broken(run, load, simulate(run, load)) == []


def test_a_pool_without_room_for_a_block_is_refused() -> None:
    """In one line, with the setting and the size of a block, before anything is started; others do not care."""
    with pytest.raises(ConfigError, match=r"\[engine\] pool_gb = 0.002: expected room for a block of 0.00275 GB"):
        config(system="mooncake", engine={"pool_gb": 0.002})
    assert config(system="basic", engine={"pool_gb": 0.002})


class _Cluster:
    """The pool's parts of two PE nodes and a DE, over storage that knows nothing yet."""

    def __init__(self, network: FluidNetwork) -> None:
        self.fabrics: dict[str, FluidFabric] = {m.name: network.fabric(m.name) for m in RUN.members}
        self.master = PoolMaster(DEPLOYMENT, self.fabrics[DEPLOYMENT.scheduler])
        for name in DEPLOYMENT.storage:
            StorageNode(DEPLOYMENT, self.fabrics[name], MemoryStore(SIZE))
        self.pools = {name: DramPool(DEPLOYMENT, self.fabrics[name]) for name in ("pe0", "pe1", "de0")}
        self.buffers = {name: self.fabrics[name].register("buffer", 200 * SIZE) for name in self.pools}
        self.bytes = np.random.default_rng(1).integers(0, 256, len(CHAIN) * SIZE, dtype=np.uint8)

    def reader(self, name: str) -> PoolReader:
        return PoolReader(DEPLOYMENT, self.fabrics[name], self.pools[name], self.buffers[name])

    async def store(self, first: int, count: int) -> None:
        """Have storage keep blocks of the chain."""
        for node, at, blocks in DEPLOYMENT.stripes(first, count):
            put = Put(join_ids(CHAIN[at : at + blocks]), self.bytes[at * SIZE : (at + blocks) * SIZE].tobytes())
            await self.fabrics["client"].call(node, PUT, put)

    async def keep(self, name: str, first: int, count: int) -> None:
        """Have a node keep blocks of the chain."""
        buffer, size = self.buffers[name], count * SIZE
        buffer.memory[:size] = self.bytes[first * SIZE :][:size]
        await self.pools[name].keep(CHAIN[first : first + count], buffer, [at * SIZE for at in range(count)])
        buffer.memory[:] = 0

    def holds(self, buffer: Region, base: int) -> bool:
        """Is the whole chain in the buffer, from byte ``base``?"""
        return bool(np.array_equal(buffer.memory[base : base + self.bytes.size], self.bytes))


def _network() -> FluidNetwork:
    return FluidNetwork(emulated_rates(RUN), nodes=[m.name for m in RUN.members], rpc_latency_s=1e-5)


def test_a_hit_is_put_together_from_everywhere() -> None:
    """Parts in other nodes' DRAM, the reader's own and storage: every byte is in its place, and kept after."""

    async def main() -> None:
        network = _network()
        async with open_fluid(network):
            cluster = _Cluster(network)
            await cluster.store(0, 100)
            await cluster.keep("de0", 10, 30)
            await cluster.keep("pe1", 35, 15)
            await cluster.keep("pe0", 60, 20)
            reader, buffer = cluster.reader("pe0"), cluster.buffers["pe0"]
            pooled = await reader.read(Wanted(CHAIN, 0, "buffer", 7 * SIZE, Transfer.PE_READ), sequence=0)
            assert cluster.holds(buffer, 7 * SIZE)
            assert pooled == Pooled(60, 20)
            received = {
                (row.transfer, row.src): row.payload_bytes // SIZE for row in cluster.fabrics["pe0"].received()
            }
            assert received.pop(("POOL", "de0")) == 30
            assert received.pop(("POOL", "pe1")) == 10
            assert {transfer for transfer, _ in received} == {"PE_READ"}
            assert sum(received.values()) == 40
            again = cluster.buffers["pe1"]
            wanted = Wanted(CHAIN, 0, "buffer", 0, Transfer.PE_READ)
            assert await cluster.reader("pe1").read(wanted, sequence=0) == Pooled(100, 10)
            assert cluster.holds(again, 0)
            record = cluster.master.record()
            assert (record.used, record.pending, record.leases) == (100, 0, 0)

    run_virtual(main)


def test_pool_reads_use_every_cnic_and_no_snic() -> None:
    """A read of many blocks is spread evenly over the compute NICs of both nodes."""

    async def main() -> None:
        network = _network()
        async with open_fluid(network):
            cluster = _Cluster(network)
            await cluster.keep("de0", 0, 90)
            reader = cluster.reader("pe0")
            await reader.read(Wanted(CHAIN[:90], 0, "buffer", 0, Transfer.PE_READ), sequence=0)
            for node, direction in (("de0", "read"), ("pe0", "write")):
                ports = [p for p in cluster.fabrics[node].ports() if p.payload_bytes]
                assert {(p.nic, p.direction, p.payload_bytes) for p in ports} == {
                    (f"cnic{at}", direction, 30 * SIZE) for at in range(3)
                }

    run_virtual(main)


def test_what_is_persisted_is_stored_and_kept() -> None:
    """A PoolWriter's blocks are in storage and in its node's DRAM; a second copy is not kept."""

    async def main() -> None:
        network = _network()
        async with open_fluid(network):
            cluster = _Cluster(network)
            await cluster.keep("pe1", 0, 5)
            source = cluster.buffers["de0"]
            source.memory[: cluster.bytes.size] = cluster.bytes
            writer = PoolWriter(DEPLOYMENT, cluster.fabrics["de0"], cluster.pools["de0"])
            await writer.write(CHAIN, 0, source, 0)
            source.memory[:] = 0
            assert cluster.master.record().inserted == 100
            pooled = await cluster.reader("de0").read(Wanted(CHAIN, 0, "buffer", 0, Transfer.DE_READ), sequence=0)
            assert pooled == Pooled(100, 95)
            assert cluster.holds(source, 0)
            sent = sum(row.payload_bytes for row in cluster.fabrics["de0"].sent() if row.transfer == "PERSIST")
            assert sent == 100 * SIZE

    run_virtual(main)


def test_a_failed_read_leaves_its_memory_alone() -> None:
    """Where storage has lost a block, the read ends only when the pool's nodes, too, write no more for it."""

    async def main() -> None:
        network = _network()
        async with open_fluid(network):
            cluster = _Cluster(network)
            await cluster.keep("de0", 0, 99)
            reader, buffer = cluster.reader("pe0"), cluster.buffers["pe0"]
            with pytest.raises(StoreError):
                await reader.read(Wanted(CHAIN, 0, "buffer", 0, Transfer.PE_READ), sequence=0)
            assert sum(row.payload_bytes for row in cluster.fabrics["pe0"].received()) == 99 * SIZE
            buffer.memory[:] = 0
            await trio.sleep(100)
            assert not buffer.memory.any()

    run_virtual(main)


@pytest.mark.parametrize(("slots", "offsets"), [((200,), (0,)), ((-1,), (0,)), ((0, 1), (0,))])
def test_reads_that_do_not_add_up_are_violations(slots: tuple[int, ...], offsets: tuple[int, ...]) -> None:
    """Slots and places are checked before anything is sent."""

    async def main() -> None:
        network = _network()
        async with open_fluid(network):
            cluster = _Cluster(network)
            with pytest.raises(ProtocolViolation, match="slots"):
                await cluster.fabrics["pe0"].call("de0", POOL_READ, PoolRead(slots, "pe0", "buffer", offsets))
            assert cluster.fabrics["de0"].sent() == ()
            with pytest.raises(ProtocolViolation, match="a read into other"):
                await cluster.reader("pe0").read(Wanted(CHAIN, 0, "other", 0, Transfer.PE_READ), sequence=0)

    run_virtual(main)
