"""A storage node keeps what is committed and sends exactly what is asked for."""

from __future__ import annotations

import numpy as np
import pytest
import trio

from emulator.config import READ_BLOCKS
from emulator.deployment import Deployment, join_ids
from emulator.errors import EmulatorError, ProtocolViolation, StoreError
from emulator.fabric.clock import run_virtual
from emulator.fabric.fluid import FluidNetwork, open_fluid
from emulator.fabric.interface import Transfer
from emulator.kvcache import BlockId
from emulator.plan import emulated_rates
from emulator.roles.blockio import LANDING_BLOCKS, StorageReader, StorageWriter, Wanted
from emulator.roles.messages import COMMIT, PUT, READ, Commit, Put, Read
from emulator.roles.storage import StorageNode
from emulator.store import MemoryStore

from .clusters import config

RUN = config()
DEPLOYMENT = Deployment(RUN)
SIZE = DEPLOYMENT.layout.full_block_bytes


def _network() -> FluidNetwork:
    return FluidNetwork(emulated_rates(RUN), nodes=[m.name for m in RUN.members], rpc_latency_s=1e-5)


def _ids(count: int) -> list[BlockId]:
    return [BlockId(bytes([at % 256, at // 256]) * 16) for at in range(count)]


def test_what_is_written_is_read() -> None:
    """Blocks persisted from a DE come back byte for byte to a PE, across stripes and storage nodes."""

    async def main() -> None:
        network = _network()
        async with open_fluid(network):
            for name in DEPLOYMENT.storage:
                StorageNode(DEPLOYMENT, network.fabric(name), MemoryStore(SIZE))
            count = 3 * DEPLOYMENT.config.engine.stripe_blocks + 5
            de, pe = network.fabric("de0"), network.fabric("pe0")
            source = de.register("staging", count * SIZE)
            source.memory[:] = np.random.default_rng(0).integers(0, 256, count * SIZE, dtype=np.uint8)
            writer = StorageWriter(DEPLOYMENT, de)
            await writer.write(_ids(count), 0, source, 0)
            target = pe.register("pe_buffer", (count + 2) * SIZE)
            wanted = Wanted(_ids(count), 0, "pe_buffer", SIZE, Transfer.PE_READ)
            await StorageReader(DEPLOYMENT, pe).read(wanted, sequence=0)
            assert np.array_equal(target.memory[SIZE : (count + 1) * SIZE], source.memory)
            assert not target.memory[:SIZE].any()
            assert all(pool.free == pool.total for pool in writer.pools)
            largest = DEPLOYMENT.config.engine.read_message_blocks * SIZE
            assert max(sent.payload_bytes // sent.messages for sent in network.fabric("st0").sent()) <= largest

    run_virtual(main)


def test_a_block_that_was_never_committed_is_an_error_at_the_reader() -> None:
    """The reader learns which block is missing; nothing is sent in its place."""

    async def main() -> None:
        network = _network()
        async with open_fluid(network):
            for name in DEPLOYMENT.storage:
                StorageNode(DEPLOYMENT, network.fabric(name), MemoryStore(SIZE))
            pe = network.fabric("pe0")
            pe.register("pe_buffer", 4 * SIZE)
            reader = StorageReader(DEPLOYMENT, pe)
            with pytest.raises(StoreError):
                await reader.read(Wanted(_ids(2), 0, "pe_buffer", 0, Transfer.PE_READ), sequence=0)
            assert pe.received() == ()

    run_virtual(main)


def test_a_failed_read_leaves_its_memory_alone() -> None:
    """When a read fails at one storage node, it ends once the others, too, have ceased to write for it."""

    async def main() -> None:
        network = _network()
        async with open_fluid(network):
            for name in DEPLOYMENT.storage:
                StorageNode(DEPLOYMENT, network.fabric(name), MemoryStore(SIZE))
            stripe = DEPLOYMENT.config.engine.stripe_blocks
            ids, first = _ids(2 * stripe), DEPLOYMENT.placement(0)
            pe = network.fabric("pe0")
            await pe.call(first, PUT, Put(join_ids(ids[:stripe]), b"x" * stripe * SIZE))
            buffer = pe.register("pe_buffer", 2 * stripe * SIZE)
            with pytest.raises(StoreError):
                wanted = Wanted(ids, 0, "pe_buffer", 0, Transfer.PE_READ)
                await StorageReader(DEPLOYMENT, pe).read(wanted, sequence=0)
            assert sum(row.payload_bytes for row in pe.received()) == stripe * SIZE
            buffer.memory[:] = 0
            await trio.sleep(100)
            assert not buffer.memory.any()

    run_virtual(main)


def test_the_longest_messages_there_are_fit_what_a_storage_node_holds() -> None:
    """A read of messages of the largest size allowed is served: it is cut into calls that the node can hold."""
    deployment = Deployment(config(engine={"read_message_blocks": READ_BLOCKS, "stripe_blocks": 8 * READ_BLOCKS}))
    count = 2 * READ_BLOCKS + 1

    async def main() -> None:
        network = _network()
        async with open_fluid(network):
            node = deployment.placement(0)
            StorageNode(deployment, network.fabric(node), MemoryStore(SIZE))
            pe = network.fabric("pe0")
            for at in range(count):
                await pe.call(node, PUT, Put(join_ids(_ids(count)[at : at + 1]), b"x" * SIZE))
            pe.register("pe_buffer", count * SIZE)
            wanted = Wanted(_ids(count), 0, "pe_buffer", 0, Transfer.PE_READ)
            await StorageReader(deployment, pe).read(wanted, sequence=0)
            (received,) = pe.received()
            assert (received.payload_bytes, received.messages) == (count * SIZE, 3)

    run_virtual(main)


@pytest.mark.parametrize(
    "call",
    [
        (COMMIT, Commit(join_ids(_ids(1)), "landing/nobody", 0)),
        (COMMIT, Commit(join_ids(_ids(2)), "landing/de0", (LANDING_BLOCKS - 1) * SIZE)),
        (PUT, Put(join_ids(_ids(2)), b"x" * SIZE)),
        (READ, Read(join_ids(_ids(2)), DEPLOYMENT.snic("pe0"), "pe_buffer", ((0, 1),), Transfer.PE_READ)),
    ],
)
def test_calls_that_do_not_add_up_are_violations(call: tuple[object, object]) -> None:
    """Sizes and regions are checked before anything is kept or sent."""

    async def main() -> None:
        network = _network()
        async with open_fluid(network):
            store = MemoryStore(SIZE)
            StorageNode(DEPLOYMENT, network.fabric("st0"), store)
            with pytest.raises(EmulatorError) as caught:
                await network.fabric("de0").call("st0", *call)  # type: ignore[type-var,arg-type]
            assert isinstance(caught.value, ProtocolViolation)
            assert len(store) == 0

    run_virtual(main)
