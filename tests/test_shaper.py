"""Laws of KV paced by software: its budgets, and that a paced fabric is a fabric still."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from emulator.errors import PeerLost
from emulator.fabric.interface import Fabric, Ring, Segment, Target, VirtualLane, WriteStream
from emulator.shaper import Budget, Pace, PacedFabric, open_paced
from tests.conformance.harness import ANY, NIC, RATE, RPC_LATENCY_S, Bed, Kind, at, data, run_law, straight
from tests.within import assert_within

TICK_S = 0.010
SHARE = 0.01
PACE = Pace({NIC: RATE}, SHARE, TICK_S)
LINE = int(RATE * TICK_S)
"""What the line carries in a tick."""


class _Loop:
    """The loop itself, tick after tick, over exchanges known beforehand."""

    def __init__(self, rate: float, exchanges: Sequence[tuple[float, float]]) -> None:
        self._rate = rate
        self._exchanges = exchanges
        self._tick = 0
        self._left = rate

    def take(self, size: int, now_s: float) -> bool:
        while self._tick + 1 <= now_s:
            self._tick += 1
            busy = any(began < self._tick <= ended for began, ended in self._exchanges)
            self._left = min(self._left, 0.0) + self._rate * (SHARE if busy else 1.0)
        if self._left <= 0:
            return False
        self._left -= size
        return True


moments = st.integers(0, 400).map(lambda tenths: tenths / 8)


@given(
    st.lists(st.tuples(moments, moments, st.integers(1, 80)), max_size=5),
    st.lists(st.tuples(moments, st.integers(1, 5000)), max_size=40),
)
def test_a_budget_is_what_a_loop_would_have_handed_out(
    entered: list[tuple[float, float, int]], messages: list[tuple[float, int]]
) -> None:
    """However seldom it is asked: line rate in idle ticks, the share in others; waste lost, debts paid.

    An exchange is entered, is in progress from when it is ready, and ends; given up before, it never was.
    """
    exchanges = [(now, max(now, ready), max(now, ready) + length / 8) for now, ready, length in entered]
    loop = _Loop(1000, [(ready, end) for _, ready, end in exchanges])
    budget = Budget(1000, SHARE, 1.0, 0.0)
    # At one instant what begins or ends comes after the look of the tick but before messages.
    events: list[tuple[float, int, int, int]] = sorted(
        [(now, 0, index, 0) for index, (now, _, _) in enumerate(exchanges)]
        + [(end, 1, index, 0) for index, (_, _, end) in enumerate(exchanges)]
        + [(now, 2, index, size) for index, (now, size) in enumerate(messages)]
    )
    for now, kind, index, size in events:
        if kind == 0:
            budget.begin(index, exchanges[index][1], now)
        elif kind == 1:
            budget.end(index, now)
        else:
            assert budget.take(size, now) == loop.take(size, now)


@given(st.integers(1, 400), st.floats(1e-5, 0.1), st.booleans())
def test_a_backlog_gets_the_rate_it_may_have(size_kb: int, tick_s: float, beside: bool) -> None:
    """Over a thousand ticks: the line's bytes, or KV's share of them, but for the last message."""
    budget = Budget(RATE, SHARE, tick_s, 0.0)
    if beside:
        budget.begin("exchange", 0.0, 0.0)
    went, now = 0, 0.0
    for _ in range(1000):
        now = budget.next_s(now)
        while budget.take(1000 * size_kb, now):
            went += 1000 * size_kb
    allowed = 1000 * RATE * tick_s * (SHARE if beside else 1)
    # The tick in which all began is not among the thousand, but what it left is spent in it.
    assert_within(went, allowed, rel=1e-9, absolute=1000 * size_kb + RATE * tick_s, what="bytes that went")


@pytest.mark.parametrize(
    "given_pace",
    [({NIC: 0.0}, 0.01, 1.0), ({NIC: 1.0}, 0.0, 1.0), ({NIC: 1.0}, 1.1, 1.0), ({NIC: 1.0}, 0.01, 0.0)],
)
def test_a_pace_that_cannot_be_is_refused(given_pace: tuple[dict[str, float], float, float]) -> None:
    """Rates and ticks are positive, a share is a part of the whole."""
    with pytest.raises(ValueError, match="expected"):
        Pace(*given_pace)


@ANY
def test_messages_of_a_cnic_go_in_the_order_of_their_release(kind: Kind) -> None:
    """Streams and writes alike, each whole, and every byte where it belongs."""

    async def law(bed: Bed) -> None:
        inner = bed.fabrics["pe0"]
        order: list[str] = []
        asked = trio.Event()
        async with open_paced(inner, PACE) as fabric:
            target = data(at("pe0"), at("de0", "gpu"))
            first = fabric.open_stream(target, bed.regions["pe0"], _pieces(3, at_byte=0))
            second = fabric.open_stream(target, bed.regions["pe0"], _pieces(3, at_byte=3 * LINE))

            async def follow(name: str, stream_placed: int) -> None:
                await (first if name == "first" else second).wait_placed(stream_placed)
                order.append(f"{name} {stream_placed}")

            async def write() -> None:
                asked.set()
                await fabric.write(target, bed.regions["pe0"], straight(LINE, local=6 * LINE, remote=6 * LINE))
                order.append("write")

            async with first, second, trio.open_nursery() as nursery:
                for upto in (1, 2, 3):
                    nursery.start_soon(follow, "first", upto)
                    nursery.start_soon(follow, "second", upto)
                first.release(1)
                second.release(2)
                first.release(2)
                nursery.start_soon(write)
                # Asking does not yield before the message is in its queue.
                await asked.wait()
                first.release(3)
                second.release(3)
        assert order == ["first 1", "second 1", "second 2", "first 2", "write", "first 3", "second 3"]
        size = 7 * LINE
        assert bytes(bed.regions["de0"].memory[:size]) == bytes(bed.regions["pe0"].memory[:size])

    run_law(kind, law)


@ANY
def test_closing_drops_what_waits_and_nothing_else(kind: Kind) -> None:
    """What had no budget yet never arrives, who waits for it is told, and those behind it go on."""

    async def law(bed: Bed) -> None:
        async with open_paced(bed.fabrics["pe0"], PACE) as fabric:
            told = False

            async def wait() -> None:
                nonlocal told
                with pytest.raises(trio.ClosedResourceError):
                    await dropped.wait_placed(20)
                told = True

            async with _stream(fabric, bed, 20) as dropped, _stream(fabric, bed, 2) as behind:
                dropped.release(20)
                behind.release(2)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(wait)
                    await dropped.wait_placed(1)
                    await dropped.aclose()
                await behind.wait_placed(2)
                with pytest.raises(ValueError, match="closed"):
                    dropped.release(20)
            assert told
            (sent,) = fabric.sent()
            assert 3 <= sent.messages < 20
            before = sent.messages
            await fabric.sleep(4 * TICK_S)
            (sent,) = fabric.sent()
            assert sent.messages == before

    run_law(kind, law)


@ANY
def test_a_write_that_waits_may_be_given_up(kind: Kind) -> None:
    """Cancelled before its turn, or before it was asked for, it never arrives; the next one does."""

    async def law(bed: Bed) -> None:
        async with open_paced(bed.fabrics["pe0"], PACE) as fabric:
            memory, target = bed.regions["pe0"], data(at("pe0"), at("de0", "gpu"))
            await fabric.write(target, memory, straight(10 * LINE))
            with trio.move_on_after(0) as scope:
                await fabric.write(target, memory, straight(1))
            assert scope.cancelled_caught
            with trio.CancelScope() as scope:
                scope.cancel()
                await fabric.write(target, memory, straight(2))
            assert scope.cancelled_caught
            await fabric.write(target, memory, straight(3))
            (sent,) = fabric.sent()
            assert (sent.messages, sent.payload_bytes) == (2, 10 * LINE + 3)

    run_law(kind, law)


@ANY
def test_a_dead_peer_ends_what_waits_for_it(kind: Kind) -> None:
    """PeerLost, though the message had no budget yet; what goes to others is not disturbed."""

    async def law(bed: Bed) -> None:
        async with open_paced(bed.fabrics["pe0"], PACE) as fabric:
            async with _stream(fabric, bed, 20) as stream:
                stream.release(20)
                await stream.wait_placed(1)
                bed.kill("de0")
                with pytest.raises(PeerLost):
                    await stream.wait_placed(20)
            await fabric.write(data(at("pe0"), at("pe1")), bed.regions["pe0"], straight(100))

    run_law(kind, law)


@ANY
def test_a_release_is_checked_as_by_any_stream(kind: Kind) -> None:
    """Never backwards, never beyond the last segment, whatever still waits."""

    async def law(bed: Bed) -> None:
        async with open_paced(bed.fabrics["pe0"], PACE) as fabric, _stream(fabric, bed, 3) as stream:
            stream.release(2)
            for upto in (1, 4):
                with pytest.raises(ValueError, match="expected 2 to 3"):
                    stream.release(upto)
            assert stream.placed == 0

    run_law(kind, law)


@ANY
def test_only_kv_out_of_paced_nics_is_paced(kind: Kind) -> None:
    """Model traffic passes beside a queue of KV, and so does a fabric that has no pace."""

    async def law(bed: Bed) -> None:
        inner = bed.fabrics["pe0"]
        async with open_paced(inner, None) as fabric:
            assert fabric is inner
        async with open_paced(inner, msgspec.structs.replace(PACE, rates={})) as fabric:
            assert fabric is inner
        async with open_paced(inner, PACE) as fabric, _stream(fabric, bed, 10) as stream:
            assert isinstance(fabric, PacedFabric)
            stream.release(10)
            model = data(at("pe0"), at("pe1"), lane=VirtualLane.MODEL)
            await fabric.write(model, bed.regions["pe0"], straight(100))
            assert stream.placed < 10

    run_law(kind, law)


def test_a_backlog_saturates_the_line() -> None:
    """Alone, KV loses nothing to its pacing: the time of all bytes is theirs over the rate."""

    async def law(bed: Bed) -> None:
        async with open_paced(bed.fabrics["pe0"], PACE) as fabric, _stream(fabric, bed, 50) as stream:
            began = fabric.now()
            stream.release(50)
            await stream.wait_placed(50)
            assert_within(fabric.now() - began, 50 * TICK_S, rel=1e-6, what="time of 50 ticks' bytes")

    run_law("fluid", law)


@pytest.mark.parametrize(("size", "seen"), [(LINE // 10, False), (40 * LINE, True)])
def test_an_exchange_is_seen_if_a_tick_falls_into_it(size: int, seen: bool) -> None:
    """KV has its share from the next tick on; what is shorter than a tick, and between two, costs it nothing.

    And KV keeps half of the port, for as long as the loop does not look: there are no lanes.
    """
    lane_map = {VirtualLane.MODEL: VirtualLane.KV}

    async def law(bed: Bed) -> None:
        nodes = ("pe0", "de0")
        ring = Ring("ring", nodes, ((at("pe0", "gpu"), at("de0", "gpu")),))
        async with open_paced(bed.fabrics["pe0"], PACE) as fabric, _stream(fabric, bed, 400) as stream:
            stream.release(400)
            entered_s = 4.2 * TICK_S
            await fabric.sleep_until(entered_s - RPC_LATENCY_S)
            before = 0
            async with trio.open_nursery() as nursery:
                peer = bed.fabrics["de0"]
                nursery.start_soon(lambda: peer.collective(ring, {}, ready_s=entered_s))
                exchanged = await fabric.collective(ring, {at("pe0", "gpu"): size}, ready_s=entered_s)
                before = stream.placed
            took_s = exchanged.over_s - exchanged.started_s
            alone_s = size / RATE
            if seen:
                # At line rate, but for what KV had in its queue when the exchange was seen: one tick's bytes.
                assert alone_s < took_s < alone_s * (1 + 2 * SHARE) + 2 * TICK_S
                assert before <= 7
            else:
                assert_within(took_s, 2 * alone_s, rel=1e-6, what="time of an exchange beside KV")
                await fabric.sleep_until(20 * TICK_S)
                assert stream.placed >= 19

    run_law("fluid", law, lane_map=lane_map)


def _pieces(count: int, *, at_byte: int) -> list[Segment]:
    return [straight(LINE, local=at_byte + i * LINE, remote=at_byte + i * LINE) for i in range(count)]


def _stream(fabric: Fabric, bed: Bed, count: int) -> WriteStream:
    """A stream of ``count`` messages of a tick's bytes each, from pe0 to de0."""
    target: Target = data(at("pe0"), at("de0", "gpu"))
    return fabric.open_stream(target, bed.regions["pe0"], [straight(LINE)] * count)
