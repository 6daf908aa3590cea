"""Laws of the traffic manager: what submitting costs, and over which link each transfer goes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from emulator.config import RunConfig, ScaleConfig
from emulator.deployment import Deployment
from emulator.extent import Extent
from emulator.fabric.clock import run_virtual
from emulator.fabric.fluid import FluidFabric, open_fluid
from emulator.fabric.interface import Region, Segment, Transfer
from emulator.roles.traffic import COPIES, FREE, Doorbell, Traffic
from emulator.sim import fluid_network
from tests.clusters import config
from tests.within import assert_within

SUBMIT_S = 1e-3
"""A thousand times what it is, so that it shows beside the bytes' own time."""
SIZE = 6400
ROUNDING_S = 1e-12


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 50)), min_size=1, max_size=30),
    st.integers(1, 16),
)
def test_a_doorbell_serves_one_after_the_other(asked: list[tuple[int, int]], batch: int) -> None:
    """A ring for each ``batch`` work requests, begun or not; the next transfer's rings follow the last one's."""
    doorbell = Doorbell(1.0, batch)
    free_s = 0.0
    for at, requests in sorted(asked):
        free_s = max(free_s, at) + (requests + batch - 1) // batch
        assert doorbell.ring(at, requests) == free_s - at


class _Node:
    """pe0 of a cluster, its traffic manager, and memory at both ends of every transfer."""

    def __init__(self, run: RunConfig, fabrics: dict[str, FluidFabric]) -> None:
        self.fabric = fabrics["pe0"]
        self.traffic = Traffic(Deployment(run), self.fabric)
        self.regions: dict[str, Region] = {name: f.register("memory", SIZE) for name, f in fabrics.items()}

    async def write(self, transfer: Transfer, segment: Segment | None = None) -> None:
        """DRAM to HBM over the first engine's CNIC, as that engine asks for it."""
        here = self.regions["pe0"]
        ends = (Deployment.host("pe0/0"), Deployment.gpu("pe0/0"), "memory")
        await self.traffic.write("pe0/0", transfer, ends, here, segment or _straight(SIZE))

    def ports(self) -> set[str]:
        """The resources that carried anything."""
        return {row.nic for row in self.fabric.ports() if row.payload_bytes}


def _straight(size: int) -> Segment:
    return Segment((Extent(0, size),), (Extent(0, size),))


def _blocks(count: int) -> Segment:
    """``count`` runs, so as many work requests."""
    size = SIZE // count // 2
    return Segment((Extent(0, size, count, 2 * size),), (Extent(0, size * count),))


def _on(law: Callable[[_Node], Awaitable[None]], **options: Any) -> None:
    run = config(engine={"submit_write_s": SUBMIT_S, "submit_copy_s": 6 * SUBMIT_S}, **options)
    run = msgspec.structs.replace(run, scale=ScaleConfig(run.scale.kv_bytes, dilation=1.0))

    async def work() -> None:
        network = fluid_network(run)
        async with open_fluid(network):
            await law(_Node(run, {name: network.fabric(name) for name in ("pe0", "de0")}))

    run_virtual(work)


@pytest.mark.parametrize("transfer", sorted(COPIES))
def test_copies_go_through_the_paired_cnic_unless_cuda_makes_them(transfer: Transfer) -> None:
    """Between an engine's DRAM and its HBM: the CNIC twice, or its GPU's PCIe link alone; DRAM either way."""

    async def through_cnic(node: _Node) -> None:
        await node.write(transfer)
        assert node.ports() == {"cnic0", "dram"}

    async def by_cuda(node: _Node) -> None:
        await node.write(transfer)
        assert node.ports() == {"pcie0", "dram"}

    _on(through_cnic)
    _on(by_cuda, copies="cuda")


def test_what_is_no_copy_goes_over_the_cnic_under_cuda_too() -> None:
    """Loads and outputs cross nodes: to the GPU they cross its PCIe link as well, which is why it may be full."""

    async def law(node: _Node) -> None:
        await node.write(Transfer.DE_LOAD)
        assert node.ports() == {"cnic0", "pcie0", "dram"}

    _on(law, copies="cuda")


@pytest.mark.parametrize("transfer", sorted(FREE))
def test_an_oracles_transfers_cost_nothing(transfer: Transfer) -> None:
    """No port, no time, no doorbell: yet the bytes are there, counted as free."""

    async def law(node: _Node) -> None:
        before = node.fabric.now()
        node.regions["pe0"].memory[:] = 7
        await node.write(transfer)
        assert node.fabric.now() == before
        assert not node.ports()
        (sent,) = node.fabric.sent()
        assert (sent.transfer, sent.payload_bytes) == ("FREE", SIZE)

    _on(law, system="oracle")


@pytest.mark.parametrize(
    ("copies", "runs", "rings_s"),
    [("cnic", 1, SUBMIT_S), ("cnic", 16, SUBMIT_S), ("cnic", 17, 2 * SUBMIT_S), ("cuda", 17, 17 * 6 * SUBMIT_S)],
)
def test_a_transfer_begins_when_its_last_doorbell_has_rung(copies: str, runs: int, rings_s: float) -> None:
    """A doorbell takes sixteen RDMA writes; a CUDA copy is a call of its own for each contiguous run."""

    async def law(node: _Node) -> None:
        segment = _blocks(runs)
        await node.write(Transfer.PE_H2D, segment)
        (port,) = (p for p in node.fabric.ports() if p.nic in ("cnic0", "pcie0") and p.direction == "write")
        assert_within(node.fabric.now(), rings_s + port.busy_s, absolute=ROUNDING_S, what="when it was in place")

    _on(law, copies=copies)


def test_an_engines_transfers_share_its_doorbell_and_no_others() -> None:
    """Streams and writes of one engine are submitted in turn; another engine submits at the same time."""

    async def law(node: _Node) -> None:
        here = node.regions["pe0"]
        placed: dict[str, float] = {}

        async def stream(engine: str, name: str) -> None:
            ends = (Deployment.host(engine), Deployment.gpu(engine), "memory")
            async with node.traffic.stream(engine, Transfer.PE_H2D, ends, here, [_straight(1)] * 3) as opened:
                opened.release(3)
                await opened.wait_placed(3)
                placed[name] = node.fabric.now()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream, "pe0/0", "one")
            nursery.start_soon(stream, "pe0/0", "two")
            nursery.start_soon(stream, "pe0/1", "other")
        assert_within(placed["other"], 3 * SUBMIT_S, rel=1e-3, what="alone on its engine")
        first, second = sorted((placed["one"], placed["two"]))
        assert_within(first, 3 * SUBMIT_S, rel=1e-3, what="first of its engine")
        assert_within(second, 6 * SUBMIT_S, rel=1e-3, what="second of its engine")

    _on(law)


def test_a_stream_keeps_its_gates_and_order() -> None:
    """What is not released does not go; what is released twice is submitted once."""

    async def law(node: _Node) -> None:
        here = node.regions["pe0"]
        ends = (Deployment.host("pe0/0"), Deployment.gpu("pe0/0"), "memory")
        async with node.traffic.stream("pe0/0", Transfer.PE_H2D, ends, here, [_straight(1)] * 4) as stream:
            stream.release(1)
            stream.release(2)
            stream.release(2)
            await node.fabric.sleep(10 * SUBMIT_S)
            assert stream.placed == 2
            began = node.fabric.now()
            stream.release(4)
            await stream.wait_placed(4)
            assert_within(node.fabric.now() - began, 2 * SUBMIT_S, rel=1e-3, what="two more")

    _on(law)
