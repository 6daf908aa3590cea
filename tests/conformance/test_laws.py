"""The laws of the Fabric that say nothing of rates: order, bytes, completion, gates, counters, death, calls."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import trio

from emulator.errors import PeerLost, ProtocolViolation, StoreError
from emulator.extent import Extent, gather
from emulator.fabric.interface import Method, Segment, Transfer, VirtualLane

from ..within import assert_within
from .harness import ANY, NODES, REGION_BYTES, RPC_LATENCY_S, Bed, Kind, at, data, run_law, straight

FREE = REGION_BYTES // 2
"""Offset of the second half of every region, which holds zeros."""
MIB = 1 << 20
ROUNDING_S = 1e-12


class Ask(msgspec.Struct, frozen=True):
    text: str


class Told(msgspec.Struct, frozen=True):
    text: str
    by: str


ECHO = Method("echo", Ask, Told)


@ANY
def test_messages_of_a_queue_pair_come_in_order(kind: Kind) -> None:
    """When k messages of a stream are in place, they are the first k of it."""
    count, size = 50, 40_000

    async def law(bed: Bed) -> None:
        src, dst = bed.fabrics["pe0"], bed.fabrics["de0"]
        there = bed.regions["de0"].memory[FREE:]
        # Each message also writes one cell that all share, so that its last writer can be seen.
        segments = [
            Segment(
                (Extent(i * size, size), Extent(i, 1)),
                (Extent(FREE + 1 + i * size, size), Extent(FREE, 1)),
            )
            for i in range(count)
        ]
        here = bed.regions["pe0"].memory
        here[:count] = np.arange(1, count + 1)
        marks = dst.marks("ordered")
        async with src.open_stream(data(at("pe0"), at("de0")), bed.regions["pe0"], segments, tag="ordered") as s:
            s.release(count)
            for k in range(1, count + 1):
                await marks.wait(k)
                arrived = marks.arrived
                assert there[0] == here[arrived - 1]
                assert np.array_equal(there[1 : 1 + arrived * size], here[: arrived * size])
            await s.wait_placed(count)
        marks.forget()

    run_law(kind, law)


@ANY
def test_both_sides_know_since_when(kind: Kind) -> None:
    """Sender and receiver agree on when each message was in place, in order, however late they ask."""

    async def law(bed: Bed) -> None:
        src, dst = bed.fabrics["pe0"], bed.fabrics["de0"]
        segments = [straight(40_000, remote=FREE) for _ in range(5)]
        marks = dst.marks("since")
        began_s = src.now()
        async with src.open_stream(data(at("pe0"), at("de0")), bed.regions["pe0"], segments, tag="since") as s:
            s.release(5)
            await s.wait_placed(5)
            await marks.wait(5)
            ended_s = src.now()
            await src.sleep(0.05)
            times = [marks.arrived_s(count) for count in range(1, 6)]
            assert times == sorted(times)
            assert began_s < times[0] and times[-1] <= ended_s
            for count, at_s in enumerate(times, 1):
                # Acknowledgements are cumulative: of several at once the last one's time is told.
                assert at_s <= s.placed_s(count) <= times[-1]
        marks.forget()

    run_law(kind, law)


@ANY
def test_a_later_message_never_overtakes(kind: Kind) -> None:
    """Of one queue pair, a small message posted behind a large one is in place after it, whoever posts."""

    async def law(bed: Bed) -> None:
        src, here, target = bed.fabrics["pe0"], bed.regions["pe0"], data(at("pe0"), at("de0"))
        async with src.open_stream(target, here, [straight(8 * MIB, remote=FREE)]) as large:

            async def small() -> None:
                await src.write(target, here, straight(10, remote=FREE + 9 * MIB))
                assert large.placed == 1

            async with trio.open_nursery() as nursery:
                large.release(1)
                for _ in range(3):
                    nursery.start_soon(small)

    run_law(kind, law)


@ANY
def test_gather_and_scatter_are_exact(kind: Kind) -> None:
    """The remote extents hold the bytes of the local ones in order, and no other byte changes."""
    local = (Extent(100, 64, 30, 700), Extent(50_000, 999), Extent(7, 1), Extent(90_000, 5, 100, 5))
    remote = (Extent(FREE + 3, 11, 200, 40), Extent(FREE + 20_000, 1220))

    async def law(bed: Bed) -> None:
        there = bed.regions["de0"].memory
        before = there.copy()
        payload = gather(bed.regions["pe0"].memory, local).copy()
        target = data(at("pe0"), at("de0", "gpu"))
        await bed.fabrics["pe0"].write(target, bed.regions["pe0"], Segment(local, remote))
        assert np.array_equal(gather(there, remote), payload)
        changed = np.flatnonzero(there != before)
        inside = np.zeros(there.size, dtype=bool)
        for extent in remote:
            for run in range(extent.count):
                inside[extent.offset + run * extent.stride :][: extent.size] = True
        assert inside[changed].all()

    run_law(kind, law)


@ANY
def test_a_write_completes_only_when_placed(kind: Kind) -> None:
    """When a write returns its last byte is there, the receiver has counted it and its mark is made."""

    async def law(bed: Bed) -> None:
        src, dst = bed.fabrics["pe0"], bed.fabrics["de0"]
        here, there = bed.regions["pe0"], bed.regions["de0"].memory
        marks = dst.marks("write")
        for i in range(20):
            size = 3 * 10**5 + i
            await src.write(data(at("pe0"), at("de0")), here, straight(size, local=i, remote=FREE), tag="write")
            assert np.array_equal(there[FREE : FREE + size], here.memory[i : i + size])
            assert marks.arrived == i + 1
            assert sum(t.messages for t in dst.received()) == i + 1
            assert sum(t.messages for t in src.sent()) == i + 1

    run_law(kind, law)


@ANY
def test_a_gate_holds_what_is_not_released(kind: Kind) -> None:
    """Only released segments move; a gate opens once, in order, and not beyond the last."""

    async def law(bed: Bed) -> None:
        src, there = bed.fabrics["pe0"], bed.regions["de0"].memory[FREE:]
        marks = bed.fabrics["de0"].marks("gated")
        segments = [straight(1000, local=1000 * i, remote=FREE + 1000 * i) for i in range(5)]
        target = data(at("pe0"), at("de0"))
        async with src.open_stream(target, bed.regions["pe0"], segments, tag="gated") as stream:
            for released in (0, 2, 2, 5):
                stream.release(released)
                await stream.wait_placed(released)
                await src.sleep(0.05)
                assert stream.placed == marks.arrived == released
                assert there[: 1000 * released].all()
                assert not there[1000 * released :].any()
            with pytest.raises(ValueError, match=r"release\(6\)"):
                stream.release(6)
            with pytest.raises(ValueError, match=r"release\(4\)"):
                stream.release(4)

    run_law(kind, law)


@ANY
def test_streams_of_one_pair_do_not_hold_each_other(kind: Kind) -> None:
    """A stream that waits at its gate lets later messages of the same queue pair pass."""

    async def law(bed: Bed) -> None:
        src, here, target = bed.fabrics["pe0"], bed.regions["pe0"], data(at("pe0"), at("de0"))
        async with src.open_stream(target, here, [straight(10), straight(10)]) as held:
            held.release(1)
            await held.wait_placed(1)
            async with src.open_stream(target, here, [straight(10)]) as free:
                free.release(1)
                await free.wait_placed(1)
            await src.write(target, here, straight(10))
            held.release(2)
            await held.wait_placed(2)

    run_law(kind, law)


@ANY
def test_closing_a_stream_drops_what_has_not_begun(kind: Kind) -> None:
    """After a stream is closed nothing of it moves any more, and the queue pair goes on."""

    async def law(bed: Bed) -> None:
        src, here, there = bed.fabrics["pe0"], bed.regions["pe0"], bed.regions["de0"].memory
        target = data(at("pe0"), at("de0"))
        size = MIB
        segments = [straight(size, local=size * i, remote=FREE + size * i) for i in range(16)]
        async with src.open_stream(target, here, segments, tag="closed") as stream:
            stream.release(12)
            await stream.wait_placed(2)
        placed = stream.placed
        assert 2 <= placed < 12 or bed.kind == "tcp"
        # Whatever was to come would come before this one.
        await src.write(target, here, straight(1, remote=FREE + 17 * size))
        assert stream.placed == bed.fabrics["de0"].marks("closed").arrived == placed
        assert there[FREE : FREE + placed * size].all()
        assert not there[FREE + placed * size : FREE + 16 * size].any()
        with pytest.raises(ValueError, match="closed"):
            stream.release(13)

    run_law(kind, law)


@ANY
def test_closing_a_stream_tells_who_waits_for_it(kind: Kind) -> None:
    """Whoever waits for segments of a closed stream that never went is told so, then and later."""

    async def law(bed: Bed) -> None:
        src, here = bed.fabrics["pe0"], bed.regions["pe0"]
        segments = [straight(1, local=i, remote=FREE + i) for i in range(3)]
        stream = src.open_stream(data(at("pe0"), at("de0")), here, segments)
        stream.release(1)
        told = []

        async def wait() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await stream.wait_placed(2)
            told.append(True)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await stream.wait_placed(1)
            await stream.aclose()
        await wait()
        await stream.wait_placed(1)
        assert len(told) == 2

    run_law(kind, law)


@ANY
def test_a_cancelled_write_leaves_no_memory_in_use(kind: Kind) -> None:
    """When a cancelled write returns, its bytes are all in place or will never be; the pair stays usable."""
    size = 4 * MIB

    async def law(bed: Bed) -> None:
        src, here, there = bed.fabrics["pe0"], bed.regions["pe0"], bed.regions["de0"].memory
        target = data(at("pe0"), at("de0"))
        scopes = [trio.CancelScope() for _ in range(4)]

        async def write(i: int) -> None:
            with scopes[i]:
                await src.write(target, here, straight(size, local=i * size, remote=FREE + i * size), tag="cut")
            # Reuse at once: none of this may be seen over there.
            here.memory[i * size : (i + 1) * size] = 255

        async with trio.open_nursery() as nursery:
            for i in range(4):
                nursery.start_soon(write, i)
            await src.sleep(1e-3)
            for scope in scopes:
                scope.cancel()
        await src.write(target, here, straight(1, local=4 * size, remote=FREE + 4 * size))
        whole = [bool(there[FREE + i * size :][:size].all()) for i in range(4)]
        untouched = [not there[FREE + i * size :][:size].any() for i in range(4)]
        assert [not done for done in whole] == untouched
        assert bed.fabrics["de0"].marks("cut").arrived == sum(whole)
        assert not (there == 255).any()
        assert there[FREE + 4 * size] == here.memory[4 * size]

    run_law(kind, law)


@ANY
def test_a_cancelled_close_still_waits(kind: Kind) -> None:
    """A stream closed by a cancelled task is out of flight when the task goes on."""
    size = 8 * MIB

    async def law(bed: Bed) -> None:
        src, here, there = bed.fabrics["pe0"], bed.regions["pe0"], bed.regions["de0"].memory
        segments = [straight(size, remote=FREE), straight(size, remote=FREE + size)]
        with trio.CancelScope() as scope:
            async with src.open_stream(data(at("pe0"), at("de0")), here, segments) as stream:
                stream.release(2)
                await src.sleep(1e-3)
                scope.cancel()
        placed = stream.placed
        here.memory[: 2 * size] = 255
        await src.write(data(at("pe0"), at("de0")), here, straight(1, local=2 * size, remote=FREE + 2 * size))
        assert stream.placed == placed
        assert there[FREE : FREE + placed * size].all()
        assert not there[FREE + placed * size : FREE + 2 * size].any()
        assert not (there == 255).any()

    run_law(kind, law)


@ANY
def test_bytes_are_conserved(kind: Kind) -> None:
    """What a node counts as sent, its peer counts as received; ports, windows and transfers add up alike."""

    async def law(bed: Bed) -> None:
        rng = np.random.default_rng(3)
        rows: list[tuple[str, str, Transfer, VirtualLane, int]] = []
        lanes = (VirtualLane.KV, VirtualLane.MODEL, VirtualLane.CONTROL)
        for i in range(60):
            src, dst = rng.choice(NODES), rng.choice(NODES)
            rows.append((str(src), str(dst), Transfer(i % 11 + 1), lanes[i % 3], int(rng.integers(1, 60_000))))

        async def write(row: tuple[str, str, Transfer, VirtualLane, int]) -> None:
            src, dst, transfer, lane, size = row
            target = data(at(src), at(dst, "gpu"), lane=lane, transfer=transfer)
            await bed.fabrics[src].write(target, bed.regions[src], straight(size, remote=FREE))

        async with trio.open_nursery() as nursery:
            for row in rows:
                nursery.start_soon(write, row)

        sent = sorted(t for fabric in bed.fabrics.values() for t in map(msgspec.structs.astuple, fabric.sent()))
        received = sorted(
            t for fabric in bed.fabrics.values() for t in map(msgspec.structs.astuple, fabric.received())
        )
        assert sent == received
        assert sum(t[4] for t in sent) == len(rows)
        for node, fabric in bed.fabrics.items():
            ports = fabric.ports()
            assert list(ports) == sorted(ports, key=lambda p: (p.nic, p.direction, p.lane))
            for port in ports:
                ours = [r for r in rows if r[0 if port.direction == "read" else 1] == node and r[3] == port.lane]
                assert (port.payload_bytes, port.messages) == (sum(r[4] for r in ours), len(ours))
                assert sum(port.windows) == port.payload_bytes
                assert 0 < port.busy_s <= fabric.now()

    run_law(kind, law)


@ANY
def test_a_tag_counts_messages_from_everywhere(kind: Kind) -> None:
    """Marks count all messages of their tag, of writes and of streams, and no other's."""

    async def law(bed: Bed) -> None:
        dst = bed.fabrics["de0"]
        marks, others = dst.marks("shared"), dst.marks("other")

        async def stream(node: str) -> None:
            src = bed.fabrics[node]
            segments = [straight(1000), straight(70_000), straight(1)]
            target = data(at(node), at("de0"))
            async with src.open_stream(target, bed.regions[node], segments, tag="shared") as opened:
                opened.release(3)
                await opened.wait_placed(3)

        async def write(node: str) -> None:
            target = data(at(node, "gpu"), at("de0"))
            await bed.fabrics[node].write(target, bed.regions[node], straight(5), tag="shared")
            await bed.fabrics[node].write(target, bed.regions[node], straight(5))

        async with trio.open_nursery() as nursery:
            for node in ("pe0", "pe1"):
                nursery.start_soon(stream, node)
                nursery.start_soon(write, node)
            await marks.wait(8)
        assert (marks.arrived, others.arrived) == (8, 0)
        marks.forget()
        await write("pe0")
        assert sum(t.messages for t in dst.received()) == 12

    run_law(kind, law)


@ANY
def test_a_dead_peer_is_told_to_everyone_who_waits(kind: Kind) -> None:
    """When a node dies, writes to it, streams, marks it feeds and calls to it end in PeerLost; others go on."""

    async def law(bed: Bed) -> None:
        pe, other = bed.fabrics["pe0"], bed.fabrics["pe1"]
        here = bed.regions["pe0"]
        ended: list[str] = []
        met = trio.Event()

        async def hang(_: Ask) -> Told:
            met.set()
            await trio.sleep_forever()
            raise AssertionError

        bed.fabrics["de0"].serve(ECHO, hang)

        async def stream() -> None:
            target = data(at("pe0"), at("de0"))
            async with pe.open_stream(target, here, [straight(10), straight(10)]) as opened:
                opened.release(1)
                with pytest.raises(PeerLost):
                    await opened.wait_placed(2)
            ended.append("stream")

        async def marks() -> None:
            with pytest.raises(PeerLost):
                await other.marks("from de0").wait(2)
            ended.append("marks")

        async def call() -> None:
            with pytest.raises(PeerLost):
                await pe.call("de0", ECHO, Ask(""))
            ended.append("call")

        async def writes() -> None:
            with pytest.raises(PeerLost):
                while True:
                    await pe.write(data(at("pe0", "gpu"), at("de0")), here, straight(8 * MIB, remote=FREE))
            ended.append("writes")

        async with trio.open_nursery() as nursery:
            for task in (stream, marks, call, writes):
                nursery.start_soon(task)
            de0 = bed.fabrics["de0"]
            await de0.write(data(at("de0"), at("pe1")), bed.regions["de0"], straight(9), tag="from de0")
            await met.wait()
            await pe.sleep(0.05)
            bed.kill("de0")
        assert sorted(ended) == ["call", "marks", "stream", "writes"]
        with pytest.raises(PeerLost):
            await pe.write(data(at("pe0"), at("de0")), here, straight(10))
        with pytest.raises(PeerLost):
            await pe.call("de0", ECHO, Ask(""))
        await pe.write(data(at("pe0"), at("pe1")), here, straight(10, remote=FREE))

    run_law(kind, law)


@ANY
def test_a_call_costs_its_latency_each_way(kind: Kind) -> None:
    """A reply comes no earlier than two latencies and the handler's own time; calls do not queue."""
    work_s = 0.05

    async def law(bed: Bed) -> None:
        async def echo(ask: Ask) -> Told:
            await bed.fabrics["de0"].sleep(work_s)
            return Told(ask.text, "de0")

        async def own(ask: Ask) -> Told:
            return Told(ask.text, "pe0")

        bed.fabrics["de0"].serve(ECHO, echo)
        bed.fabrics["pe0"].serve(ECHO, own)
        started = bed.now()
        replies: list[Told] = []

        async def call(i: int) -> None:
            replies.append(await bed.fabrics["pe0"].call("de0", ECHO, Ask(str(i))))

        async with trio.open_nursery() as nursery:
            for i in range(10):
                nursery.start_soon(call, i)
        took = bed.now() - started + ROUNDING_S
        assert took >= 2 * RPC_LATENCY_S + work_s
        assert_within(took, 2 * RPC_LATENCY_S + work_s, absolute=4 * bed.jitter_s, what="ten calls at once")
        assert sorted(reply.text for reply in replies) == sorted(str(i) for i in range(10))
        started = bed.now()
        assert (await bed.fabrics["pe0"].call("pe0", ECHO, Ask("me"))).by == "pe0"
        assert bed.now() - started + ROUNDING_S >= 2 * RPC_LATENCY_S

    run_law(kind, law)


@ANY
def test_a_handlers_error_reaches_the_caller(kind: Kind) -> None:
    """An EmulatorError crosses with its type, text and certainty; an unknown method is a violation."""

    async def law(bed: Bed) -> None:
        async def refuse(ask: Ask) -> Told:
            raise StoreError(f"no room for {ask.text}", definite=True)

        bed.fabrics["de0"].serve(ECHO, refuse)
        with pytest.raises(StoreError, match="no room for us") as caught:
            await bed.fabrics["pe0"].call("de0", ECHO, Ask("us"))
        assert type(caught.value) is StoreError
        assert caught.value.definite
        with pytest.raises(ProtocolViolation, match="echo"):
            await bed.fabrics["pe0"].call("pe1", ECHO, Ask("us"))

    run_law(kind, law)


@ANY
def test_a_message_of_no_bytes_keeps_its_place(kind: Kind) -> None:
    """It is placed after what was posted before it, marks its tag and is counted; it places nothing."""

    async def law(bed: Bed) -> None:
        src, dst, here = bed.fabrics["pe0"], bed.fabrics["de0"], bed.regions["pe0"]
        marks = dst.marks("empty")
        segments = [straight(MIB, remote=FREE), Segment((), ()), straight(100, remote=FREE + MIB)]
        async with src.open_stream(data(at("pe0"), at("de0")), here, segments, tag="empty") as stream:
            stream.release(3)
            await marks.wait(2)
            assert np.array_equal(bed.regions["de0"].memory[FREE : FREE + MIB], here.memory[:MIB])
            await stream.wait_placed(3)
            await marks.wait(3)
            assert marks.arrived_s(1) <= marks.arrived_s(2) <= marks.arrived_s(3)
        for rows in (src.sent(), dst.received()):
            assert [(row.payload_bytes, row.messages) for row in rows] == [(MIB + 100, 3)]
        marks.forget()

    run_law(kind, law)


@ANY
def test_nobody_writes_outside_a_region(kind: Kind) -> None:
    """A scatter beyond the remote region, or into none, is a violation and places nothing."""

    async def law(bed: Bed) -> None:
        src, here, there = bed.fabrics["pe0"], bed.regions["pe0"], bed.regions["de0"].memory
        before = there.copy()
        target = data(at("pe0"), at("de0"))
        with pytest.raises(ProtocolViolation):
            await src.write(target, here, straight(100, remote=REGION_BYTES - 99))
        with pytest.raises(ProtocolViolation):
            await src.write(msgspec.structs.replace(target, region="nowhere"), here, straight(100))
        with pytest.raises(ValueError, match="region"):
            await src.write(target, here, straight(100, local=REGION_BYTES - 99))
        assert np.array_equal(there, before)
        await src.write(target, here, straight(100, remote=FREE))

    run_law(kind, law)
