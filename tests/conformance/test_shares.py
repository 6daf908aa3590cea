"""The laws of the Fabric about rates: what a port carries, and who gets how much of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest
import trio

from emulator.fabric.interface import Endpoint, VirtualLane, WriteStream

from ..within import assert_within
from .harness import NIC, RATE, SHAPED, Bed, Kind, at, data, run_law, straight

CHUNK = 25_000
EQUAL_REL = 0.45
"""How far a TCP flow may be off its equal part of a switch's port; measured: 0.04, on a busy host up to 0.4.

Of its *sender's* port no part is promised: back-pressure there divides one queue among sockets as it happens
(measured: 0.10 to 0.90 of two). What all of them get together is the port's rate.
"""
Flow = tuple[Endpoint, Endpoint, VirtualLane]

PE0_DE0: Flow = (at("pe0"), at("de0"), VirtualLane.KV)
PE1_DE0: Flow = (at("pe1"), at("de0"), VirtualLane.KV)


async def rates_of(bed: Bed, flows: Sequence[Flow], *, seconds: float, warm_s: float = 0.25) -> list[float]:
    """Bytes per second that each of ``flows`` places while all of them have more to send."""
    count = round((seconds + warm_s) * RATE / CHUNK * 1.2)
    async with AsyncExitStack() as stack:
        streams: list[WriteStream] = []
        for src, dst, lane in flows:
            stream = bed.fabrics[src.node].open_stream(
                data(src, dst, lane=lane), bed.regions[src.node], [straight(CHUNK)] * count
            )
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


def one_chunk(bed: Bed, seconds: float) -> float:
    """What counting whole chunks may be off, in bytes per second, and what a moment's jitter adds."""
    return CHUNK / seconds + RATE * bed.jitter_s / seconds


def equal_rel(bed: Bed) -> float:
    """How far a flow may be off its equal part, relative."""
    return bed.tolerance if bed.kind == "fluid" else EQUAL_REL


async def work_conserved(bed: Bed) -> None:
    """A lone flow gets the port's whole rate, on every lane."""
    for lane in (VirtualLane.KV, VirtualLane.MODEL, VirtualLane.CONTROL):
        seconds = 0.6
        (rate,) = await rates_of(bed, [(at("pe0"), at("de0"), lane)], seconds=seconds)
        assert_within(rate, RATE, rel=bed.tolerance, absolute=one_chunk(bed, seconds), what=f"{lane.name} alone")


@SHAPED
def test_a_lone_flow_gets_the_ports_rate(kind: Kind) -> None:
    """Work conservation: nothing idles while there is something to send, whatever its lane's share."""
    run_law(kind, work_conserved)


@pytest.mark.parametrize("slow", ["pe0", "de0"])
def test_work_conservation_can_fail(slow: str) -> None:
    """A network in which one port has half its rate breaks the law of work conservation."""
    with pytest.raises(AssertionError, match="KV alone"):
        run_law("fluid", work_conserved, built_rates={slow: RATE / 2})


@SHAPED
def test_a_message_takes_its_size_over_the_rate(kind: Kind) -> None:
    """On an idle port a message is in place after size/rate, exactly in virtual time."""

    async def law(bed: Bed) -> None:
        src, target = bed.fabrics["pe0"], data(at("pe0"), at("de0"))
        await src.write(target, bed.regions["pe0"], straight(CHUNK))
        for size in (37_000, 250_000, 2_000_000):
            started = src.now()
            await src.write(target, bed.regions["pe0"], straight(size))
            took = src.now() - started
            assert_within(took, size / RATE, rel=bed.tolerance, absolute=bed.jitter_s, what=f"{size} bytes")

    run_law(kind, law)


@SHAPED
def test_a_port_never_exceeds_its_rate(kind: Kind) -> None:
    """Between any two moments a port's bytes are at most its rate times the time, however many send."""
    size, count = 20_000, 100

    async def law(bed: Bed) -> None:
        moments: list[float] = []
        target = data(at("pe0"), at("de0"))

        async def send(node: str, side: str) -> None:
            source = at(node, "gpu" if side == "gpu" else "host")
            for _ in range(count):
                await bed.fabrics[node].write(data(source, at("de0")), bed.regions[node], straight(size))
                moments.append(bed.now())

        await bed.fabrics["pe0"].write(target, bed.regions["pe0"], straight(CHUNK))
        async with trio.open_nursery() as nursery:
            for node, side in (("pe0", "host"), ("pe0", "gpu"), ("pe1", "host")):
                nursery.start_soon(send, node, side)
        # Between two placings of one flow, at most one message of each other flow was begun before.
        slack = 2 * size + 2 * RATE * bed.jitter_s
        for i in range(0, len(moments), 10):
            for j in range(i + 1, len(moments)):
                allowed = RATE * (1 + bed.tolerance) * (moments[j] - moments[i]) + slack
                assert (j - i) * size <= allowed, f"{(j - i) * size} bytes in {moments[j] - moments[i]} s"
        (port,) = (p for p in bed.fabrics["pe0"].ports() if p.direction == "read")
        assert port.payload_bytes == 2 * count * size + CHUNK
        assert port.payload_bytes <= RATE * port.busy_s * (1 + bed.tolerance) + slack

    run_law(kind, law)


@SHAPED
def test_lanes_share_a_contended_port_by_their_guarantees(kind: Kind) -> None:
    """At the receiver's port MODEL : KV is 99 : 1: the half per cent that nobody claims goes to MODEL.

    MODEL comes from two nodes, so that its queue stands at the port where it meets KV and not at its sender.
    """

    async def law(bed: Bed) -> None:
        seconds = 2.0
        flows: list[Flow] = [(at(node), at("de0"), VirtualLane.MODEL) for node in ("pe0", "pe1")]
        *high, low = await rates_of(bed, [*flows, PE1_DE0], seconds=seconds, warm_s=0.5)
        slack = one_chunk(bed, seconds)
        assert_within(sum(high), 0.99 * RATE, rel=bed.tolerance, absolute=2 * slack, what="MODEL")
        assert_within(low, 0.01 * RATE, rel=4 * bed.tolerance, absolute=CHUNK / seconds, what="KV")

    run_law(kind, law)


@SHAPED
def test_what_a_lane_leaves_goes_to_the_other(kind: Kind) -> None:
    """When the better lane is quiet, KV has the whole port at once, and gives it up again."""

    async def law(bed: Bed) -> None:
        pe1 = bed.fabrics["pe1"]
        size = 2_500_000
        async with bed.fabrics["pe0"].open_stream(
            data(at("pe0"), at("de0")), bed.regions["pe0"], [straight(CHUNK)] * 400
        ) as low:
            low.release(400)
            await low.wait_placed(20)
            started = pe1.now()
            target = data(at("pe1"), at("de0"), lane=VirtualLane.MODEL)
            await pe1.write(target, bed.regions["pe1"], straight(size))
            took, placed = pe1.now() - started, low.placed
            assert_within(took, size / (0.99 * RATE), rel=bed.tolerance, absolute=2 * bed.jitter_s, what="MODEL")
            await low.wait_placed(placed + 1)
            started, placed = pe1.now(), low.placed
            await low.wait_placed(placed + 50)
            took = pe1.now() - started
            assert_within(
                took, 50 * CHUNK / RATE, rel=bed.tolerance, absolute=2 * bed.jitter_s, what="KV afterwards"
            )

    run_law(kind, law)


@SHAPED
def test_an_incast_is_shared_equally(kind: Kind) -> None:
    """Queue pairs of one lane into one port get equal parts of it, and all of it together."""

    async def law(bed: Bed) -> None:
        flows: list[Flow] = [
            (at(node, side), at("de0"), VirtualLane.KV) for node in ("pe0", "pe1") for side in ("host", "gpu")
        ]
        seconds = 1.5
        rates = await rates_of(bed, flows, seconds=seconds)
        slack = one_chunk(bed, seconds)
        assert_within(sum(rates), RATE, rel=bed.tolerance, absolute=4 * slack, what="together")
        for rate in rates:
            assert_within(rate, RATE / 4, rel=equal_rel(bed), absolute=slack, what="one of four")

    run_law(kind, law)


@SHAPED
def test_a_loopback_pays_in_both_directions(kind: Kind) -> None:
    """Host to GPU of one NIC takes its read and its write direction, against traffic out and traffic in."""

    async def law(bed: Bed) -> None:
        loop: Flow = (at("pe0"), at("pe0", "gpu"), VirtualLane.KV)
        out, into = PE0_DE0, (at("pe1"), at("pe0"), VirtualLane.KV)
        seconds = 0.8
        slack = one_chunk(bed, seconds)
        (alone,) = await rates_of(bed, [loop], seconds=seconds)
        assert_within(alone, RATE, rel=bed.tolerance, absolute=slack, what="loopback alone")
        for other, name in ((out, "out"), (into, "in")):
            both = await rates_of(bed, [loop, other], seconds=seconds)
            assert_within(sum(both), RATE, rel=bed.tolerance, absolute=2 * slack, what=f"with traffic {name}")
            if name == "in" or bed.kind == "fluid":
                for rate in both:
                    assert_within(rate, RATE / 2, rel=equal_rel(bed), absolute=slack, what=f"half, {name}")
        for port in (p for p in bed.fabrics["pe0"].ports() if p.nic == NIC):
            assert port.payload_bytes > seconds * RATE

    run_law(kind, law)


@SHAPED
def test_a_flow_takes_what_others_cannot_use(kind: Kind) -> None:
    """A flow that is held back at one port leaves its part of another to those who can use it.

    Exactly max-min in the fluid. Over TCP, whose bounded windows wait in both queues, the flow through both
    ports gets less than its part (measured: 0.6 of it), and both ports are full all the same.
    """

    async def law(bed: Bed) -> None:
        flows: list[Flow] = [
            PE0_DE0,
            (at("pe0", "gpu"), at("pe1"), VirtualLane.KV),
            (at("pe0"), at("pe1", "gpu"), VirtualLane.KV),
            PE1_DE0,
        ]
        seconds = 1.2
        both, *at_pe0, at_de0 = await rates_of(bed, flows, seconds=seconds)
        slack = one_chunk(bed, seconds)
        assert_within(both + at_de0, RATE, rel=bed.tolerance, absolute=2 * slack, what="de0's port")
        assert_within(both + sum(at_pe0), RATE, rel=bed.tolerance, absolute=3 * slack, what="pe0's port")
        if bed.kind == "fluid":
            for rate in (both, *at_pe0):
                assert_within(rate, RATE / 3, rel=bed.tolerance, absolute=slack, what="one of three at pe0")

    run_law(kind, law)
