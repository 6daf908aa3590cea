"""Waiting for memory keeps one order and loses nothing."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator.errors import EmulatorError
from emulator.fabric.clock import run_virtual
from emulator.pool import BufferPool, Lease
from emulator.roles.leases import LeaseQueue


def _queue(total: int) -> tuple[BufferPool, LeaseQueue]:
    pool = BufferPool("test", total)
    return pool, LeaseQueue(pool)


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


async def test_what_the_pool_cannot_give_at_all_is_an_error_at_once() -> None:
    """Nobody waits for more than the whole pool, and those behind are not held up by it."""
    pool, queue = _queue(4)
    with pytest.raises(EmulatorError, match="test: 5 wanted at once, the whole pool has 4"):
        await queue.reserve(5, order=1)
    async with queue.hold(4, order=2):
        assert pool.free == 0
    assert (pool.free, queue.waiting) == (4, 0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 8), st.integers(0, 5), st.integers(0, 3), st.integers(0, 6)),
        min_size=1,
        max_size=12,
    )
)
def test_cancellation_at_any_moment_leaks_nothing(asks: list[tuple[int, int, int, int]]) -> None:
    """Whether one waits, is just granted or holds when it is cancelled: the pool ends whole, others are served."""
    pool, queue = _queue(8)
    ended = []

    async def main() -> None:
        async def ask(amount: int, order: int, hold: int, patience: int) -> None:
            with trio.move_on_after(patience):
                async with queue.hold(amount, order):
                    await trio.sleep(hold)
            ended.append(amount)

        async with trio.open_nursery() as nursery:
            for each in asks:
                nursery.start_soon(ask, *each)

    run_virtual(main)
    assert len(ended) == len(asks)
    assert (pool.free, pool.leases, queue.waiting) == (8, 0, 0)
