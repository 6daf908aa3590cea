"""Waiting for memory keeps one order and loses nothing."""

from __future__ import annotations

import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator.fabric.clock import run_virtual
from emulator.leases import LeaseQueue
from emulator.pool import BufferPool, Lease


def _queue(total: int) -> tuple[BufferPool, LeaseQueue[Lease]]:
    pool = BufferPool("test", total)
    return pool, LeaseQueue(pool.try_reserve, pool.release)


async def test_small_requests_do_not_overtake_a_large_one() -> None:
    """Nobody is served before an earlier one in the order, even where it would fit."""
    _, queue = _queue(10)
    first = await queue.reserve(6)
    served: list[str] = []

    async def ask(name: str, amount: int, order: int) -> None:
        async with queue.hold(amount, order):
            served.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, "small", 1, 2)
        nursery.start_soon(ask, "large", 8, 1)
        await trio.testing.wait_all_tasks_blocked()
        assert served in ([], ["small"])
        queue.release(first)
    assert sorted(served) == ["large", "small"]


async def test_a_cancelled_waiter_unblocks_those_behind_it() -> None:
    """The head's cancellation lets the next have what fits."""
    pool, queue = _queue(4)
    first = await queue.reserve(3)
    got: list[Lease] = []

    async def take() -> None:
        got.append(await queue.reserve(1, order=2))

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            nursery.start_soon(take)
            async with trio.open_nursery() as inner:
                inner.start_soon(queue.reserve, 4, 1)
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
    queue.release(first)
    for lease in got:
        queue.release(lease)
    assert (pool.free, queue.waiting, len(got)) == (4, 0, 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=12))
def test_everyone_is_served_and_all_comes_back(asks: list[tuple[int, int, int]]) -> None:
    """Whatever the sizes, orders and holding times, all are served and the pool ends whole."""
    pool, queue = _queue(8)
    served = []

    async def main() -> None:
        async def ask(amount: int, order: int, hold: int) -> None:
            async with queue.hold(amount, order):
                served.append(amount)
                await trio.sleep(hold)

        async with trio.open_nursery() as nursery:
            for each in asks:
                nursery.start_soon(ask, *each)

    run_virtual(main)
    assert len(served) == len(asks)
    assert (pool.free, pool.leases, queue.waiting) == (8, 0, 0)
