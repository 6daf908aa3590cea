"""The laws of the Fabric's collectives: bytes, barrier, order, times, death, cancellation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import trio

from emulator.errors import PeerLost
from emulator.fabric.interface import (
    MAX_PAYLOAD_BYTES,
    Endpoint,
    Exchanged,
    Ring,
    Transfer,
    VirtualLane,
)
from topology.lanes import SEGMENT_PAYLOAD, SEGMENT_WIRE

from ..within import assert_within
from .harness import ANY, NODES, RATE, RPC_LATENCY_S, SHAPED, Bed, Kind, at, data, run_law, straight

KIB = 1024


def ring_of(nodes: Sequence[str], name: str = "ring") -> Ring:
    """Both sides of every node's NIC, each to the same side of the next node."""
    following = dict(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
    hops = [(at(node, side), at(following[node], side)) for side in ("gpu", "host") for node in nodes]
    return Ring(name, tuple(nodes), tuple(hops))


THREE, TWO = ring_of(NODES), ring_of(("pe0", "pe1"), "pair")


async def together(
    bed: Bed,
    ring: Ring,
    payload: Mapping[str, Mapping[Endpoint, int]],
    *,
    ready_s: Mapping[str, float],
    enter_s: Mapping[str, float] | None = None,
    amount: int = 0,
) -> dict[str, Exchanged]:
    """One exchange of all members: each enters at its time with its payload."""
    results: dict[str, Exchanged] = {}

    async def member(node: str) -> None:
        fabric = bed.fabrics[node]
        await fabric.sleep_until((enter_s or {}).get(node, 0.0))
        results[node] = await fabric.collective(
            ring, payload.get(node, {}), ready_s=ready_s.get(node, 0.0), amount=amount
        )

    async with trio.open_nursery() as nursery:
        for node in ring.nodes:
            nursery.start_soon(member, node)
    return results


@ANY
def test_an_exchange_moves_every_ports_bytes(kind: Kind) -> None:
    """Each port sends what it was given to its successor and no other; both sides count it, on the high lane.

    The last to be ready decides when it starts, the amounts are summed, and all members are told the same.
    """

    async def law(bed: Bed) -> None:
        payload = {
            "pe0": {at("pe0", "gpu"): 100_000, at("pe0"): 7},
            "pe1": {at("pe1", "gpu"): 1, at("pe1"): 0},
        }
        amounts = {"pe0": 3, "pe1": 4, "de0": 5}
        ready = {node: bed.now() + 0.1 * index for index, node in enumerate(NODES, 1)}
        results: dict[str, Exchanged] = {}

        async def member(node: str) -> None:
            results[node] = await bed.fabrics[node].collective(
                THREE, payload.get(node, {}), ready_s=ready[node], amount=amounts[node]
            )

        async with trio.open_nursery() as nursery:
            for node in NODES:
                nursery.start_soon(member, node)
        assert len(set(results.values())) == 1
        (result,) = set(results.values())
        assert (result.started_s, result.total) == (ready["de0"], 12)
        assert result.over_s > result.started_s
        counted = {
            side: {(t.transfer, t.src, t.dst): (t.payload_bytes, t.messages) for f in fabrics for t in f}
            for side, fabrics in (
                ("sent", [fabric.sent() for fabric in bed.fabrics.values()]),
                ("received", [fabric.received() for fabric in bed.fabrics.values()]),
            )
        }
        expected = {("COLLECTIVE", "pe0", "pe1"): (100_007, 2), ("COLLECTIVE", "pe1", "de0"): (1, 1)}
        assert counted == {"sent": expected, "received": expected}
        ports = {(n, p.direction, p.lane): p.payload_bytes for n, f in bed.fabrics.items() for p in f.ports()}
        model = VirtualLane.MODEL
        moved = {key: size for key, size in ports.items() if size}
        assert moved == {
            ("pe0", "read", model): 100_007,
            ("pe1", "write", model): 100_007,
            ("pe1", "read", model): 1,
            ("de0", "write", model): 1,
        }
        for node, largest in (("pe0", 100_000), ("pe1", 1), ("de0", 0)):
            (record,) = bed.fabrics[node].exchanges()
            assert (record.ring, record.lane, record.payload_bytes, record.count) == ("ring", model, largest, 1)
            assert record.total_s == record.max_s == result.over_s - result.started_s

    run_law(kind, law)


@ANY
def test_nobody_starts_before_the_last_enters(kind: Kind) -> None:
    """Until the last member is there nothing moves, however ready the others are; nor before all are ready."""

    async def law(bed: Bed) -> None:
        payload = {node: {at(node, "gpu"): 1000} for node in NODES}
        late, ready = bed.now() + 0.2, bed.now() + 0.4
        seen: list[float] = []

        async def watch() -> None:
            while bed.now() < ready - 0.005:
                assert not any(fabric.received() for fabric in bed.fabrics.values())
                seen.append(bed.now())
                await bed.fabrics["pe0"].sleep(0.01)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            results = await together(bed, THREE, payload, ready_s={"pe1": ready}, enter_s={"de0": late})
        assert seen[-1] > late
        assert {result.started_s for result in results.values()} == {ready}
        # Now the last one comes when all are ready for long.
        late = bed.now() + 0.2
        async with trio.open_nursery() as nursery:
            ready = late
            before = {node: fabric.received() for node, fabric in bed.fabrics.items()}

            async def hold() -> None:
                while bed.now() < late - 0.005:
                    assert {node: fabric.received() for node, fabric in bed.fabrics.items()} == before
                    await bed.fabrics["pe0"].sleep(0.01)

            nursery.start_soon(hold)
            results = await together(bed, THREE, payload, ready_s={}, enter_s={"de0": late})
        assert bed.now() >= late + RPC_LATENCY_S - 1e-9
        assert {result.started_s for result in results.values()} == {0.0}

    run_law(kind, law)


@ANY
def test_exchanges_are_numbered_by_each_members_calls(kind: Kind) -> None:
    """The n-th calls of all members meet, whatever else a member does and however far another is."""

    async def law(bed: Bed) -> None:
        totals: dict[str, list[int]] = {node: [] for node in NODES}
        overs: dict[str, list[float]] = {node: [] for node in NODES}

        async def member(node: str, place: int) -> None:
            fabric, over_s = bed.fabrics[node], bed.now()
            for n in range(1, 6):
                await fabric.sleep(0.003 * ((n * place) % 3))
                payload = {at(node, "gpu"): 100 * n + place} if n % 2 else {}
                result = await fabric.collective(THREE, payload, ready_s=over_s, amount=10**place * n)
                over_s = result.over_s
                totals[node].append(result.total)
                overs[node].append(over_s)

        async with trio.open_nursery() as nursery:
            for place, node in enumerate(NODES):
                nursery.start_soon(member, node, place)
        for node in NODES:
            assert totals[node] == [111 * n for n in range(1, 6)]
            assert overs[node] == sorted(overs["pe0"])

    run_law(kind, law)


@ANY
def test_an_idle_member_learns_that_it_is_wanted(kind: Kind) -> None:
    """Waiting ends when another member enters what this one has not; it may be given up at no cost."""

    async def law(bed: Bed) -> None:
        idle, busy = bed.fabrics["pe1"], bed.fabrics["pe0"]
        with trio.move_on_after(0.05) as scope:
            await idle.wait_entered(TWO)
        assert scope.cancelled_caught
        for _ in range(3):
            woken = trio.Event()

            async def wake(woken: trio.Event = woken) -> None:
                await idle.wait_entered(TWO)
                woken.set()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(wake)
                await busy.sleep(0.02)
                assert not woken.is_set()
                entered_s = busy.now()
                nursery.start_soon(lambda: busy.collective(TWO, {at("pe0"): 10}, ready_s=0.0))
                await woken.wait()
                assert idle.now() >= entered_s + RPC_LATENCY_S - 1e-9
                await idle.wait_entered(TWO)
                await idle.collective(TWO, {}, ready_s=0.0)
        with trio.move_on_after(0.05) as scope:
            await idle.wait_entered(TWO)
        assert scope.cancelled_caught

    run_law(kind, law)


@ANY
def test_a_dead_member_ends_its_rings(kind: Kind) -> None:
    """PeerLost comes out of an exchange, of a wait for one, and of the next call; other rings go on."""

    async def law(bed: Bed) -> None:
        ended: list[str] = []

        async def exchange() -> None:
            with pytest.raises(PeerLost):
                await bed.fabrics["pe0"].collective(THREE, {at("pe0"): 10}, ready_s=0.0)
            ended.append("exchange")

        async def wait() -> None:
            other = ring_of(NODES, "idle")
            with pytest.raises(PeerLost):
                await bed.fabrics["pe1"].wait_entered(other)
            with pytest.raises(PeerLost):
                await bed.fabrics["pe1"].collective(other, {}, ready_s=0.0)
            ended.append("wait")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(exchange)
            nursery.start_soon(wait)
            await bed.fabrics["pe0"].sleep(0.1)
            bed.kill("de0")
        assert sorted(ended) == ["exchange", "wait"]
        with pytest.raises(PeerLost):
            await bed.fabrics["pe0"].collective(THREE, {}, ready_s=0.0)
        await together(bed, TWO, {"pe0": {at("pe0"): 10}}, ready_s={})

    run_law(kind, law)


@ANY
def test_a_member_that_gives_up_has_entered_all_the_same(kind: Kind) -> None:
    """A cancelled call leaves its exchange to the others, with its bytes; the next call is the next exchange."""

    async def law(bed: Bed) -> None:
        impatient, others = bed.fabrics["pe0"], ("pe1", "de0")
        totals: dict[str, list[int]] = {node: [] for node in NODES}

        async def member(node: str, rounds: Sequence[int]) -> None:
            await bed.fabrics[node].sleep(0.1)
            for n in rounds:
                result = await bed.fabrics[node].collective(THREE, {}, ready_s=0.0, amount=n)
                totals[node].append(result.total)

        async with trio.open_nursery() as nursery:
            for node in others:
                nursery.start_soon(member, node, (1, 2))
            with trio.move_on_after(0.03):
                await impatient.collective(THREE, {at("pe0"): 12_345}, ready_s=0.0, amount=10)
            await member("pe0", (20,))
        assert totals == {"pe0": [24], "pe1": [12, 24], "de0": [12, 24]}
        (received,) = bed.fabrics["pe1"].received()
        assert received.payload_bytes == 12_345
        # The call that never was is none: cancelled before it entered.
        with trio.CancelScope() as scope:
            scope.cancel()
            await impatient.collective(THREE, {}, ready_s=0.0)
        results = await together(bed, THREE, {}, ready_s={}, amount=1)
        assert {result.total for result in results.values()} == {3}

    run_law(kind, law)


@ANY
def test_a_ring_of_one_that_sends_nothing_is_over_when_it_is_ready(kind: Kind) -> None:
    """No barrier and no bytes: at once, at its own time. With bytes they go from port to port of the node."""

    async def law(bed: Bed) -> None:
        fabric, alone = bed.fabrics["pe0"], Ring("alone", ("pe0",), ((at("pe0"), at("pe0", "gpu")),))
        before, ready = fabric.now(), fabric.now() + 100.0
        result = await fabric.collective(alone, {}, ready_s=ready, amount=7)
        assert result == Exchanged(ready, ready, 7)
        assert fabric.now() - before <= bed.jitter_s
        ready = fabric.now()
        result = await fabric.collective(alone, {at("pe0"): 1000}, ready_s=ready, amount=7)
        assert (result.started_s, result.total) == (ready, 7)
        assert result.over_s > ready
        (sent,) = fabric.sent()
        assert (sent.transfer, sent.payload_bytes) == (Transfer.COLLECTIVE.name, 1000)

    run_law(kind, law)


@ANY
def test_what_a_ring_does_not_have_is_refused(kind: Kind) -> None:
    """Ports of others, sizes that cannot be, a stranger, another ring of that name: each before anything moves."""

    async def law(bed: Bed) -> None:
        fabric = bed.fabrics["pe0"]
        for payload in ({at("pe1"): 1}, {at("pe0"): -1}, {at("pe0"): MAX_PAYLOAD_BYTES + 1}):
            with pytest.raises(ValueError, match="ring pair"):
                await fabric.collective(TWO, payload, ready_s=0.0)
        with pytest.raises(ValueError, match="no member of ring pair"):
            await bed.fabrics["de0"].collective(TWO, {}, ready_s=0.0)
        with pytest.raises(ValueError, match="no member of ring pair"):
            await bed.fabrics["de0"].wait_entered(TWO)
        await together(bed, TWO, {}, ready_s={})
        with pytest.raises(ValueError, match="other members or hops"):
            await fabric.collective(ring_of(("pe0", "de0"), "pair"), {}, ready_s=0.0)

    run_law(kind, law)


@SHAPED
def test_an_exchange_takes_its_slowest_ports_time(kind: Kind) -> None:
    """From the ideal start on, the largest payload over the rate; a late entry delays the end, not this time."""

    async def law(bed: Bed) -> None:
        size = 256 * KIB
        payload = {"pe0": {at("pe0", "gpu"): size}, "pe1": {at("pe1", "gpu"): size // 4}}
        for late_s in (0.0, 0.1):
            taken = []
            for _ in range(4):
                ready = bed.now() + 2 * RPC_LATENCY_S
                entered = {"pe1": ready + late_s} if late_s else {}
                results = await together(
                    bed, TWO, payload, ready_s={"pe0": ready, "pe1": ready - 0.01}, enter_s=entered
                )
                assert results["pe0"].started_s == ready
                taken.append(results["pe0"].over_s - ready)
                earliest_s = ready + (late_s + RPC_LATENCY_S if late_s else 0.0) + taken[-1]
                assert bed.now() >= earliest_s - bed.tolerance * size / RATE
            # Whatever else the host does delays an exchange, and hastens none.
            slack_s = 0.1 * bed.jitter_s
            assert_within(min(taken), size / RATE, rel=bed.tolerance, absolute=slack_s, what=f"{late_s} s late")
            for node in TWO.nodes:
                latest_s = max(record.late_s for record in bed.fabrics[node].exchanges())
                expected_s = late_s + RPC_LATENCY_S if late_s else 0.0
                assert_within(latest_s, expected_s, absolute=2 * bed.jitter_s, what=f"how late {node} was")

    run_law(kind, law)


@SHAPED
def test_lateness_does_not_add_up(kind: Kind) -> None:
    """A forward of thirty layers, computing and exchanging in turn, takes in ideal time what its parts take.

    Each exchange really begins late here, because news takes longer than a layer computes. If that were in the
    ideal time it would be half a second more; what may be in it is the receiver's waking up (measured: a
    millisecond on a busy host, and a twentieth less than size/rate for the burst of a shaped link).
    """

    async def law(bed: Bed) -> None:
        layers, compute_s, size = 30, 0.004, 128 * KIB
        payload = {node: {at(node, "gpu"): size} for node in TWO.nodes}
        await together(bed, TWO, payload, ready_s={})
        ends: dict[str, float] = {}
        started_s = bed.now() + 0.1

        async def member(node: str) -> None:
            end_s = started_s
            for _ in range(layers):
                end_s = (await bed.fabrics[node].collective(TWO, payload[node], ready_s=end_s + compute_s)).over_s
            ends[node] = end_s

        async with trio.open_nursery() as nursery:
            for node in TWO.nodes:
                nursery.start_soon(member, node)
        assert ends["pe0"] == ends["pe1"]
        ideal = layers * (compute_s + size / RATE)
        slack_s = layers * 0.1 * bed.jitter_s
        assert_within(ends["pe0"] - started_s, ideal, rel=bed.tolerance, absolute=slack_s, what="thirty layers")
        late_s = max(record.late_s for record in bed.fabrics["pe0"].exchanges())
        assert late_s > (layers - 1) * (RPC_LATENCY_S - compute_s - size / RATE * (1 + bed.tolerance))

    run_law(kind, law)


@SHAPED
def test_kv_does_not_delay_an_exchange(kind: Kind) -> None:
    """With KV queued at every port that it uses, an exchange of 256 KiB takes at most 1.1 times as long as alone.

    Its bytes are on the high lane, the kernel's own counters say.
    """

    async def law(bed: Bed) -> None:
        size, rounds = 256 * KIB, 8
        payload = {node: {at(node, "gpu"): size} for node in TWO.nodes}

        async def quickest() -> float:
            """Of several: whatever else the host does delays some, and what lanes do not hold back delays all."""
            taken = []
            for _ in range(rounds):
                ready = bed.now() + 2 * RPC_LATENCY_S
                results = await together(bed, TWO, payload, ready_s=dict.fromkeys(TWO.nodes, ready))
                taken.append(results["pe0"].over_s - results["pe0"].started_s)
            return min(taken)

        kernel = bed.kernel_bytes
        before = kernel("high", "pe0", "read") if kernel is not None else 0
        alone = await quickest()
        if kernel is not None:
            wire = (kernel("high", "pe0", "read") - before) * SEGMENT_PAYLOAD / SEGMENT_WIRE
            assert_within(wire, rounds * size, rel=0.02, what="bytes on the high lane")
        async with trio.open_nursery() as nursery:

            async def backlog(src: str, dst: str) -> None:
                here, target = bed.regions[src], data(at(src), at(dst))
                async with bed.fabrics[src].open_stream(target, here, [straight(50_000)] * 1000) as kv:
                    kv.release(1000)
                    await kv.wait_placed(1000)

            for src, dst in (("pe0", "pe1"), ("pe1", "pe0"), ("de0", "pe0"), ("de0", "pe1")):
                nursery.start_soon(backlog, src, dst)
            await bed.fabrics["pe0"].sleep(0.2)
            loaded = await quickest()
            nursery.cancel_scope.cancel()
        assert loaded <= 1.1 * alone, f"{loaded:.6f} s with KV, {alone:.6f} s alone"

    run_law(kind, law)


@SHAPED
def test_without_lanes_kv_delays_an_exchange(kind: Kind) -> None:
    """With MODEL mapped onto KV's lane the same exchange takes its fair part of the port: about twice as long."""

    async def law(bed: Bed) -> None:
        size = 256 * KIB
        payload = {node: {at(node, "gpu"): size} for node in TWO.nodes}
        async with trio.open_nursery() as nursery:

            async def backlog() -> None:
                here, target = bed.regions["pe0"], data(at("pe0"), at("pe1"))
                async with bed.fabrics["pe0"].open_stream(target, here, [straight(50_000)] * 1000) as kv:
                    kv.release(1000)
                    await kv.wait_placed(1000)

            nursery.start_soon(backlog)
            await bed.fabrics["pe0"].sleep(0.2)
            ready = bed.now() + 2 * RPC_LATENCY_S
            results = await together(bed, TWO, payload, ready_s=dict.fromkeys(TWO.nodes, ready))
            nursery.cancel_scope.cancel()
        took = results["pe0"].over_s - ready
        assert took > 1.5 * size / RATE
        if bed.kind == "fluid":
            assert_within(took, 2 * size / RATE, rel=bed.tolerance, what="half the port")
        for fabric in bed.fabrics.values():
            assert {port.lane for port in fabric.ports()} <= {VirtualLane.KV}
        assert {record.lane for record in bed.fabrics["pe0"].exchanges()} == {VirtualLane.KV}

    run_law(kind, law, lane_map={VirtualLane.MODEL: VirtualLane.KV})


@pytest.mark.parametrize(
    ("nodes", "hops", "error"),
    [
        ((), (), "one or more"),
        (("a", "a"), (), "each once"),
        (("pe0",), ((at("pe0"), at("pe1")),), "no port of a member"),
        (("pe0",), ((at("pe0"), Endpoint("pe0", "free")),), "no port of a member"),
        (("pe0",), ((at("pe0"), at("pe0")), (at("pe0"), at("pe0", "gpu"))), "two successors"),
        (("pe0",), ((at("pe0"), at("pe0")), (at("pe0", "gpu"), at("pe0"))), "two predecessors"),
    ],
)
def test_a_ring_is_checked_where_it_is_built(
    nodes: tuple[str, ...], hops: tuple[tuple[Endpoint, Endpoint], ...], error: str
) -> None:
    """Members and hops that cannot be are refused by name."""
    with pytest.raises(ValueError, match=error):
        Ring("wrong", nodes, hops)
