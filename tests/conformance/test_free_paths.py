"""The laws of free endpoints: bytes and order as anywhere, no port, and nothing taken from those who pay."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import trio

from emulator.extent import Extent, gather
from emulator.fabric.interface import FREE_NIC, Endpoint, Segment, Side, Target, Transfer, VirtualLane

from ..within import assert_within
from .harness import ANY, RATE, REGION_BYTES, SHAPED, Bed, Kind, at, data, run_law, straight

HALF = REGION_BYTES // 2
MIB = 1 << 20


def free(src: str, dst: str, *, sides: tuple[Side, Side] = ("host", "host")) -> Target:
    """A free path between two nodes, or from one to itself."""
    ends = Endpoint(src, FREE_NIC, sides[0]), Endpoint(dst, FREE_NIC, sides[1])
    return Target(*ends, "memory", Transfer.FREE)


@ANY
def test_free_bytes_are_moved_in_order_and_counted(kind: Kind) -> None:
    """Gathered, scattered, in the order of their queue pair, marked, counted as FREE by both sides; on no port."""
    local = (Extent(100, 64, 30, 700), Extent(50_000, 999))
    remote = (Extent(HALF + 3, 11, 200, 40), Extent(HALF + 20_000, 719))

    async def law(bed: Bed) -> None:
        src, here, there = bed.fabrics["pe0"], bed.regions["pe0"], bed.regions["de0"].memory
        payload = gather(here.memory, local).copy()
        await src.write(free("pe0", "de0", sides=("gpu", "host")), here, Segment(local, remote))
        assert np.array_equal(gather(there, remote), payload)
        here.memory[:20] = range(1, 21)
        segments = [straight(1, local=place, remote=HALF) for place in range(20)]
        marks = bed.fabrics["de0"].marks("free")
        async with src.open_stream(free("pe0", "de0"), here, segments, tag="free") as stream:
            stream.release(20)
            for upto in range(1, 21):
                await marks.wait(upto)
                assert there[HALF] == marks.arrived >= upto
            await stream.wait_placed(20)
        await src.write(free("pe0", "pe0", sides=("host", "gpu")), here, straight(5, remote=HALF))
        assert np.array_equal(here.memory[HALF : HALF + 5], here.memory[:5])
        expected = [("FREE", "pe0", "de0", payload.size + 20, 21), ("FREE", "pe0", "pe0", 5, 1)]
        assert [msgspec.structs.astuple(row) for row in src.sent()] == expected
        assert [msgspec.structs.astuple(row) for row in bed.fabrics["de0"].received()] == expected[:1]
        assert not any(fabric.ports() for fabric in bed.fabrics.values())

    run_law(kind, law)


@SHAPED
def test_a_free_path_takes_nothing_from_those_who_pay(kind: Kind) -> None:
    """While megabytes go for free between two nodes, a flow between them gets its port's whole rate.

    What is free does not wait for the port either: in virtual time it takes none at all.
    """

    async def law(bed: Bed) -> None:
        src, here, size, count = bed.fabrics["pe0"], bed.regions["pe0"], 25_000, 300
        async with src.open_stream(data(at("pe0"), at("de0")), here, [straight(size)] * count) as paid:
            paid.release(count)
            await paid.wait_placed(50)
            began_s, before = src.now(), paid.placed
            taken = []
            for _ in range(10):
                posted_s = src.now()
                await src.write(free("pe0", "de0"), here, straight(MIB, remote=HALF))
                taken.append(src.now() - posted_s)
                await src.sleep(0.02)
            rate = (paid.placed - before) * size / (src.now() - began_s)
            assert paid.placed < count
            await paid.wait_placed(count)
        slack = (size + RATE * bed.jitter_s) / 0.2
        assert_within(rate, RATE, rel=bed.tolerance, absolute=slack, what="the flow that pays")
        assert sorted(taken)[5] <= (0.0 if bed.kind == "fluid" else 0.25 * MIB / RATE)

    run_law(kind, law)


@ANY
def test_a_free_write_may_be_cancelled(kind: Kind) -> None:
    """As any: what has not begun never goes, and the pair goes on."""

    async def law(bed: Bed) -> None:
        src, here, there = bed.fabrics["pe0"], bed.regions["pe0"], bed.regions["de0"].memory
        with trio.CancelScope() as scope:
            scope.cancel()
            await src.write(free("pe0", "de0"), here, straight(10, remote=HALF))
        await src.write(free("pe0", "de0"), here, straight(10, remote=HALF + 10))
        assert not there[HALF : HALF + 10].any()
        assert there[HALF + 10 : HALF + 20].all()

    run_law(kind, law)


@ANY
def test_a_lane_that_is_mapped_is_carried_and_counted_by_the_other(kind: Kind) -> None:
    """What is asked to go on MODEL and on CONTROL goes on KV, in one queue pair and one row."""

    async def law(bed: Bed) -> None:
        src, here = bed.fabrics["pe0"], bed.regions["pe0"]
        for lane in (VirtualLane.MODEL, VirtualLane.KV, VirtualLane.CONTROL):
            await src.write(data(at("pe0"), at("de0"), lane=lane), here, straight(100))
        for node, direction in (("pe0", "read"), ("de0", "write")):
            (port,) = bed.fabrics[node].ports()
            assert (port.direction, port.lane, port.payload_bytes) == (direction, VirtualLane.KV, 300)

    run_law(kind, law, lane_map={VirtualLane.MODEL: VirtualLane.KV, VirtualLane.CONTROL: VirtualLane.KV})


@ANY
def test_lanes_may_be_swapped(kind: Kind) -> None:
    """A map is applied once: what goes on a lane that another is mapped onto may itself be mapped elsewhere."""

    async def law(bed: Bed) -> None:
        src, here = bed.fabrics["pe0"], bed.regions["pe0"]
        for lane, size in ((VirtualLane.MODEL, 10), (VirtualLane.KV, 300)):
            await src.write(data(at("pe0"), at("de0"), lane=lane), here, straight(size))
        sizes = {port.lane: port.payload_bytes for port in bed.fabrics["de0"].ports()}
        assert sizes == {VirtualLane.KV: 10, VirtualLane.MODEL: 300}

    run_law(kind, law, lane_map={VirtualLane.MODEL: VirtualLane.KV, VirtualLane.KV: VirtualLane.MODEL})


@pytest.mark.parametrize(
    ("src", "dst", "transfer"),
    [
        (Endpoint("pe0", FREE_NIC), at("de0"), Transfer.FREE),
        (at("pe0"), Endpoint("de0", FREE_NIC), Transfer.FREE),
        (at("pe0"), at("de0"), Transfer.FREE),
        (Endpoint("pe0", FREE_NIC), Endpoint("de0", FREE_NIC), Transfer.PE_READ),
    ],
)
def test_a_path_is_free_at_both_ends_or_at_none(src: Endpoint, dst: Endpoint, transfer: Transfer) -> None:
    """Half a free path, a free path under another name, and FREE over a port are refused where they are built."""
    with pytest.raises(ValueError, match="a free path joins two free ends"):
        Target(src, dst, "memory", transfer)
