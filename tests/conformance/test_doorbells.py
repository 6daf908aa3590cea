"""The laws of releases that fall due later: not before, in order, dropped with their stream."""

from __future__ import annotations

import pytest
import trio

from emulator.errors import PeerLost

from ..within import assert_within
from .harness import ANY, REGION_BYTES, Bed, Kind, at, data, run_law, straight

FREE = REGION_BYTES // 2
ROUNDING_S = 1e-12


@ANY
def test_nothing_goes_before_it_is_due(kind: Kind) -> None:
    """A deferred segment is not there before its time and soon after; a deferred write as well."""

    async def law(bed: Bed) -> None:
        src, here = bed.fabrics["pe0"], bed.regions["pe0"]
        target = data(at("pe0"), at("de0"))
        await src.write(target, here, straight(1))
        marks = bed.fabrics["de0"].marks("due")
        async with src.open_stream(target, here, [straight(10)] * 3, tag="due") as stream:
            for upto, after_s in ((1, 0.1), (2, 0.0), (3, 0.05)):
                released_s = src.now()
                stream.release(upto, after_s=after_s)
                await stream.wait_placed(upto)
                assert marks.arrived == upto
                assert src.now() - released_s + ROUNDING_S >= after_s
                assert_within(src.now(), released_s + after_s, absolute=bed.jitter_s + 1e-6, what="when it is due")
        posted_s = src.now()
        await src.write(target, here, straight(10), after_s=0.1)
        assert src.now() - posted_s + ROUNDING_S >= 0.1

    run_law(kind, law)


@ANY
def test_deferred_segments_keep_the_order_of_their_stream(kind: Kind) -> None:
    """A later release never overtakes an earlier one, though it were due before, or at once."""

    async def law(bed: Bed) -> None:
        src, here = bed.fabrics["pe0"], bed.regions["pe0"]
        segments = [straight(1, local=place, remote=FREE) for place in range(6)]
        here.memory[:6] = range(1, 7)
        there = bed.regions["de0"].memory
        async with src.open_stream(data(at("pe0"), at("de0")), here, segments) as stream:
            began_s = src.now()
            stream.release(2, after_s=0.1)
            stream.release(3)
            stream.release(5, after_s=0.02)
            await src.sleep(0.05)
            assert stream.placed == 0
            for upto in range(1, 6):
                await stream.wait_placed(upto)
                assert src.now() - began_s + ROUNDING_S >= 0.1
            assert there[FREE] == 5
            stream.release(6)
            await stream.wait_placed(6)
            assert there[FREE] == 6
            with pytest.raises(ValueError, match=r"release\(5\)"):
                stream.release(5, after_s=1.0)

    run_law(kind, law)


@ANY
def test_what_is_not_due_holds_nobody(kind: Kind) -> None:
    """Other messages of the queue pair pass what is deferred, and go before it where they are posted before."""

    async def law(bed: Bed) -> None:
        src, here, target = bed.fabrics["pe0"], bed.regions["pe0"], data(at("pe0"), at("de0"))
        async with src.open_stream(target, here, [straight(10)]) as stream:
            stream.release(1, after_s=0.2)
            await src.write(target, here, straight(10))
            assert stream.placed == 0
            order: list[str] = []

            async def write(name: str, after_s: float) -> None:
                await src.write(target, here, straight(10), after_s=after_s)
                order.append(name)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(write, "last", 0.1)
                nursery.start_soon(write, "second", 0.05)
                nursery.start_soon(write, "first", 0.0)
            assert order == ["first", "second", "last"]
            await stream.wait_placed(1)

    run_law(kind, law)


@ANY
def test_what_is_not_due_is_dropped_with_its_stream(kind: Kind) -> None:
    """Closing a stream, or cancelling a write, before the time leaves nothing to come."""

    async def law(bed: Bed) -> None:
        src, here, target = bed.fabrics["pe0"], bed.regions["pe0"], data(at("pe0"), at("de0"))
        async with src.open_stream(target, here, [straight(10)] * 2) as stream:
            stream.release(1)
            await stream.wait_placed(1)
            stream.release(2, after_s=0.1)
        with trio.move_on_after(0.02) as scope:
            await src.write(target, here, straight(10), after_s=0.1)
        assert scope.cancelled_caught
        await src.sleep(0.2)
        await src.write(target, here, straight(10))
        assert stream.placed == 1
        assert sum(t.messages for t in bed.fabrics["de0"].received()) == 2

    run_law(kind, law)


@ANY
def test_a_peer_that_dies_before_the_time_is_told(kind: Kind) -> None:
    """Who waits for what is deferred gets PeerLost, and what falls due afterwards goes nowhere."""

    async def law(bed: Bed) -> None:
        src, here, target = bed.fabrics["pe0"], bed.regions["pe0"], data(at("pe0"), at("de0"))
        async with src.open_stream(target, here, [straight(10)] * 2) as stream:
            stream.release(1)
            await stream.wait_placed(1)
            stream.release(2, after_s=0.1)
            bed.kill("de0")
            with pytest.raises(PeerLost):
                await stream.wait_placed(2)
            await src.sleep(0.2)
            assert stream.placed == 1
        with pytest.raises(PeerLost):
            await src.write(target, here, straight(10), after_s=0.01)

    run_law(kind, law)
