"""Whoever waits for a count gets it, or is told why not, once."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from emulator.errors import PeerLost
from emulator.fabric.clock import run_virtual
from emulator.fabric.counter import Counter, closed


@given(st.lists(st.integers(0, 12), max_size=8), st.integers(0, 12), st.sets(st.integers(0, 7)))
def test_a_wait_ends_with_the_count_or_the_reason(wanted: list[int], reached: int, impatient: set[int]) -> None:
    """At value v then lost: waits up to v return at their time, later ones raise, cancelled ones do neither."""
    ended: dict[int, float | str] = {}

    async def main() -> None:
        counter = Counter()

        async def wait(index: int) -> None:
            try:
                with trio.move_on_after(3.5 if index in impatient else 100) as scope:
                    await counter.wait(wanted[index])
                    ended[index] = trio.current_time()
                if scope.cancelled_caught:
                    ended[index] = "cancelled"
            except PeerLost:
                ended[index] = "lost"

        async with trio.open_nursery() as nursery:
            for index in range(len(wanted)):
                nursery.start_soon(wait, index)
            for _ in range(reached):
                await trio.sleep(1)
                counter.bump()
            await trio.sleep(1)
            counter.fail(lambda: PeerLost("gone"))
            counter.fail(closed)
        await counter.wait(reached)
        with pytest.raises(PeerLost, match="gone"):
            await counter.wait(reached + 1)

    run_virtual(main)
    for index, count in enumerate(wanted):
        end = float(count) if count <= reached else "lost"
        at = count if count <= reached else reached + 1
        assert ended[index] == ("cancelled" if index in impatient and at > 3.5 else end)
