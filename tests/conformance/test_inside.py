"""The laws of what binds inside a node: DRAM, one rate for both directions, and PCIe links without lanes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

import numpy as np
import pytest
import trio

from emulator.errors import ProtocolViolation
from emulator.extent import Extent, gather
from emulator.fabric.interface import Endpoint, Segment, Side, Target, Transfer, VirtualLane, WriteStream
from emulator.fabric.localbus import LocalRates

from ..within import assert_within
from .harness import ANY, NIC, RATE, REGION_BYTES, SHAPED, Bed, Kind, at, data, run_law, straight
from .test_collectives import TWO, together

HALF = REGION_BYTES // 2
CHUNK = 25_000
LINK = RATE
"""Of a PCIe link: no more than a port has, so that whoever shares it feels it."""
PCIE = {"pe0": LocalRates(pcie={NIC: LINK}), "pe1": LocalRates(pcie={NIC: LINK})}
DRAM = 1.2 * RATE
Counted = dict[tuple[str, str], tuple[int, int]]


def copied(node: str, *, into: Side = "gpu") -> Target:
    """A copy over the PCIe link of the node's GPU."""
    ends = [Endpoint(node, "pcie0", side) for side in ("host", "gpu")]
    src, dst = ends if into == "gpu" else reversed(ends)
    return Target(src, dst, "memory", Transfer.OTHER)


def counted(bed: Bed, node: str) -> Counted:
    """(payload bytes, messages) of each row of a node, lanes together."""
    rows: Counted = {}
    for port in bed.fabrics[node].ports():
        size, messages = rows.get((port.nic, port.direction), (0, 0))
        rows[port.nic, port.direction] = size + port.payload_bytes, messages + port.messages
    return rows


async def rates_of(
    bed: Bed, targets: Sequence[Target], *, seconds: float = 0.6, warm_s: float = 0.3
) -> list[float]:
    """Bytes per second that each of ``targets`` places while all of them have more to send."""
    count = round((seconds + warm_s) * 2 * RATE / CHUNK)
    async with AsyncExitStack() as stack:
        streams: list[WriteStream] = []
        for target in targets:
            node = target.src.node
            stream = bed.fabrics[node].open_stream(target, bed.regions[node], [straight(CHUNK)] * count)
            streams.append(await stack.enter_async_context(stream))
        for stream in streams:
            stream.release(count)
        clock = bed.fabrics["pe0"]
        await clock.sleep(warm_s)
        started, before = clock.now(), [stream.placed for stream in streams]
        await clock.sleep(seconds)
        took, after = clock.now() - started, [stream.placed for stream in streams]
        assert all(placed < count for placed in after), "a flow ran dry: the law needs more to send"
    return [(b - a) * CHUNK / took for a, b in zip(before, after, strict=True)]


def slack(bed: Bed, seconds: float = 0.6) -> float:
    """What counting whole chunks may be off, in bytes per second, and what a moment's jitter adds."""
    return (CHUNK + RATE * bed.jitter_s) / seconds


@ANY
def test_a_copy_moves_its_bytes_over_its_link_and_no_nic(kind: Kind) -> None:
    """Gathered, scattered, marked and in order, both ways; counted by the link and by DRAM, each once."""
    local = (Extent(100, 640, 30, 7000), Extent(500_000, 999))
    remote = (Extent(HALF + 3, 110, 180, 400), Extent(HALF + 200_000, 399))

    async def law(bed: Bed) -> None:
        fabric, region = bed.fabrics["pe0"], bed.regions["pe0"]
        payload = gather(region.memory, local).copy()
        await fabric.write(copied("pe0"), region, Segment(local, remote), tag="copy")
        assert np.array_equal(gather(region.memory, remote), payload)
        assert fabric.marks("copy").arrived == 1
        segments = [straight(50_000, local=place, remote=HALF + 100_000 * place) for place in range(10)]
        async with fabric.open_stream(copied("pe0", into="host"), region, segments) as out:
            out.release(10)
            await out.wait_placed(10)
        for place in range(10):
            begin = HALF + 100_000 * place
            assert np.array_equal(region.memory[begin : begin + 50_000], region.memory[place : place + 50_000])
        into, out_of = (payload.size, 1), (500_000, 10)
        assert counted(bed, "pe0") == {
            ("dram", "read"): into,
            ("pcie0", "write"): into,
            ("dram", "write"): out_of,
            ("pcie0", "read"): out_of,
        }
        for rows in (fabric.sent(), fabric.received()):
            assert [(row.payload_bytes, row.messages) for row in rows] == [(payload.size + 500_000, 11)]

    run_law(kind, law, local={"pe0": LocalRates(dram=10 * RATE, pcie={NIC: 4 * RATE})})


@ANY
def test_what_a_nic_carries_is_counted_by_the_memory_behind_it(kind: Kind) -> None:
    """A host side by DRAM, a GPU's by its link; host to host inside one node by DRAM in both directions."""

    async def law(bed: Bed) -> None:
        region = bed.regions["pe0"]
        for src, dst, size in (
            (at("pe0"), at("pe1", "gpu"), 1000),
            (at("pe0", "gpu"), at("pe1"), 200),
            (at("pe0"), at("pe0"), 30),
            (at("pe0"), at("de0"), 4),
        ):
            await bed.fabrics["pe0"].write(data(src, dst), region, straight(size, remote=HALF))
        assert counted(bed, "pe0") == {
            ("cnic0", "read"): (1234, 4),
            ("cnic0", "write"): (30, 1),
            ("dram", "read"): (1034, 3),
            ("dram", "write"): (30, 1),
            ("pcie0", "read"): (200, 1),
        }
        assert counted(bed, "pe1") == {("cnic0", "write"): (1200, 2), ("pcie0", "write"): (1000, 1)}
        assert counted(bed, "de0") == {("cnic0", "write"): (4, 1)}

    run_law(kind, law, local={"pe0": LocalRates(RATE, {NIC: RATE}), "pe1": LocalRates(pcie={NIC: RATE})})


@ANY
def test_a_copy_takes_its_size_over_the_links_rate(kind: Kind) -> None:
    """Alone on a link of a known rate, whatever timers do; the two directions know nothing of each other."""

    async def law(bed: Bed) -> None:
        fabric, region, size = bed.fabrics["pe0"], bed.regions["pe0"], 2_000_000
        await fabric.write(copied("pe0"), region, straight(1, remote=HALF))
        for into in (("gpu",), ("host",), ("gpu", "host")):
            began_s = fabric.now()
            async with trio.open_nursery() as nursery:
                for side in into:
                    target = copied("pe0", into="gpu" if side == "gpu" else "host")
                    nursery.start_soon(fabric.write, target, region, straight(size, remote=HALF))
            took_s = fabric.now() - began_s
            assert_within(took_s, size / LINK, rel=bed.tolerance, absolute=bed.jitter_s, what=f"into {into}")

    run_law(kind, law, local=PCIE)


@ANY
def test_copies_of_one_link_share_it_and_never_pass_it(kind: Kind) -> None:
    """Two queue pairs into one GPU, on lanes of unlike rank, get half each; together the link's rate, exactly."""

    async def law(bed: Bed) -> None:
        low, high = copied("pe0"), copied("pe0")
        high = Target(high.src, high.dst, high.region, high.transfer, VirtualLane.MODEL)
        rates = await rates_of(bed, [low, high])
        assert_within(sum(rates), LINK, rel=bed.tolerance, absolute=slack(bed), what="the link")
        for rate in rates:
            assert_within(rate, LINK / 2, rel=2 * bed.tolerance, absolute=slack(bed), what="a copy")

    run_law(kind, law, local=PCIE)


@SHAPED
def test_a_copy_and_an_exchange_share_a_link_without_priority(kind: Kind) -> None:
    """Beside a copy into the same GPU an exchange takes twice as long, high lane or not: PCIe has no lanes.

    What leaves a GPU is not in the way of what enters it. Its other half is the copy's.
    """

    async def law(bed: Bed) -> None:
        size = 500_000

        async def quickest() -> float:
            """Of several: whatever else the host does delays some."""
            taken = []
            for _ in range(4):
                ready_s = bed.now() + 0.1
                payload = {"pe1": {at("pe1", "gpu"): size}}
                results = await together(bed, TWO, payload, ready_s=dict.fromkeys(TWO.nodes, ready_s))
                taken.append(results["pe0"].over_s - ready_s)
            return min(taken)

        async def backlog(into: Side) -> None:
            region = bed.regions["pe0"]
            async with bed.fabrics["pe0"].open_stream(
                copied("pe0", into=into), region, [straight(CHUNK, remote=HALF)] * 2000
            ) as copies:
                copies.release(2000)
                await copies.wait_placed(2000)

        sides: tuple[tuple[Side, int], ...] = (("gpu", 2), ("host", 1))
        for into, times in sides:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(backlog, into)
                await bed.fabrics["pe0"].sleep(0.1)
                took_s = await quickest()
                nursery.cancel_scope.cancel()
            expected_s = times * size / RATE
            # A turn or two, and what a shaped link's burst saves.
            slack_s = 0.0 if bed.kind == "fluid" else 0.3 * bed.jitter_s
            assert_within(took_s, expected_s, rel=bed.tolerance, absolute=slack_s, what=f"copy into {into}")

    run_law(kind, law, local=PCIE)


@SHAPED
@pytest.mark.parametrize("dram", [DRAM, 3 * RATE])
def test_reading_and_writing_dram_together_never_pass_its_rate(kind: Kind, dram: float) -> None:
    """Half duplex: what leaves a node's DRAM and what enters it share one rate; with head-room the NICs bind."""

    async def law(bed: Bed) -> None:
        out, into = data(at("pe0"), at("de0")), data(at("pe1"), at("pe0"))
        rates = await rates_of(bed, [out, into])
        expected = min(dram, 2 * RATE)
        assert_within(sum(rates), expected, rel=bed.tolerance, absolute=2 * slack(bed), what="both ways")
        for rate in rates:
            assert_within(rate, expected / 2, rel=2 * bed.tolerance, absolute=2 * slack(bed), what="one way")
        # A GPU's side is not DRAM: beside it the other has the whole port.
        past = await rates_of(bed, [data(at("pe0", "gpu"), at("de0")), into])
        for rate in past:
            assert_within(rate, min(RATE, dram), rel=bed.tolerance, absolute=2 * slack(bed), what="past DRAM")

    run_law(kind, law, local={"pe0": LocalRates(dram=dram)})


@ANY
def test_a_cancelled_copy_leaves_no_memory_in_use_and_the_link_to_others(kind: Kind) -> None:
    """What has begun ends before the cancelled call returns; what has not, never goes, and is counted by nobody.

    The link's next is a whole rate's: what was given up has not been paid for.
    """

    async def law(bed: Bed) -> None:
        fabric, region = bed.fabrics["pe0"], bed.regions["pe0"]
        size = 1_000_000
        # Nothing else is on the way, so that the first byte of each is where a message begins.
        region.memory[: 2 * size] = 7
        region.memory[HALF:] = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fabric.write, copied("pe0"), region, straight(size, remote=HALF))
            await fabric.sleep(0.02)
            nursery.start_soon(fabric.write, copied("pe0"), region, straight(size, remote=HALF + 2 * size))
            await fabric.sleep(0.02)
            nursery.cancel_scope.cancel()
        assert region.memory[HALF : HALF + size].all()
        before = region.memory[HALF:].copy()
        assert not before[size:].any()
        began_s = fabric.now()
        await fabric.write(copied("pe0"), region, straight(size, remote=HALF + 4 * size))
        took_s = fabric.now() - began_s
        assert_within(took_s, size / LINK, rel=bed.tolerance, absolute=bed.jitter_s, what="the next copy")
        assert np.array_equal(region.memory[HALF : HALF + 3 * size], before[: 3 * size])
        assert counted(bed, "pe0") == {("pcie0", "write"): (2 * size, 2)}

    run_law(kind, law, local=PCIE)


@ANY
def test_a_link_joins_the_two_sides_of_one_gpu(kind: Kind) -> None:
    """A copy between anything else is refused before a byte moves."""

    async def law(bed: Bed) -> None:
        for target in (
            Target(Endpoint("pe0", "pcie0"), Endpoint("pe0", "pcie0"), "memory", Transfer.OTHER),
            Target(Endpoint("pe0", "pcie0"), at("pe0", "gpu"), "memory", Transfer.OTHER),
        ):
            with pytest.raises(ProtocolViolation, match="a PCIe link joins"):
                await bed.fabrics["pe0"].write(target, bed.regions["pe0"], straight(1))
        assert not any(fabric.ports() for fabric in bed.fabrics.values())

    run_law(kind, law, local=PCIE)
