"""Giving a request up: waits are cut short, what others do is called off, what is in flight is let end."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from emulator.errors import Withdrawn
from emulator.roles.withdrawal import Withdrawal


async def test_a_wait_is_cut_short_and_says_what_for() -> None:
    """Whoever waits is cancelled at once and raises Withdrawn with what the request was doing."""
    withdrawal = Withdrawal("a:0")
    wait = withdrawal.until_asked("waiting for memory")
    with pytest.raises(Withdrawn, match="request a:0 was given up while waiting for memory"), wait:
        withdrawal.ask()
        await trio.sleep_forever()


async def test_what_a_wait_gave_is_not_lost_with_it() -> None:
    """A wait that is over when it is cut short ends well; the step after it is the one that is refused."""
    withdrawal = Withdrawal("a:0")
    with withdrawal.until_asked("waiting for memory"):
        withdrawal.ask()
        got = "a lease"
    assert got == "a lease"
    with pytest.raises(Withdrawn, match="while waiting for memory"):
        withdrawal.begin("reading")


async def test_a_step_in_flight_is_let_end() -> None:
    """Asking does not interrupt a step that was begun; it holds up the next of any kind."""
    withdrawal = Withdrawal("a:0")
    withdrawal.begin("reading")
    withdrawal.ask()
    await trio.lowlevel.checkpoint()
    for step in (withdrawal.until_asked("x"), withdrawal.telling(lambda: None, "x")):
        with pytest.raises(Withdrawn, match="while reading"), step:
            raise AssertionError


async def test_who_carries_a_step_out_is_told_once() -> None:
    """However often it is asked for, they are told once, and only while the step lasts."""
    withdrawal, told = Withdrawal("a:0"), []
    with withdrawal.telling(lambda: told.append("then"), "decoding"):
        pass
    with withdrawal.telling(lambda: told.append("now"), "decoding"):
        withdrawal.ask()
        withdrawal.ask()
    withdrawal.ask()
    assert told == ["now"]


async def test_all_waits_of_a_request_are_cut_short_together() -> None:
    """Two tasks of one request both stop; an outer cancellation is passed on as what it is."""
    withdrawal, stopped = Withdrawal("a:0"), []

    async def wait(name: str) -> None:
        try:
            with withdrawal.until_asked(name):
                await trio.sleep_forever()
        except Withdrawn:
            stopped.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, "one")
        nursery.start_soon(wait, "two")
        await trio.testing.wait_all_tasks_blocked()
        withdrawal.ask()
    assert sorted(stopped) == ["one", "two"]

    other = Withdrawal("b:0")
    with trio.CancelScope() as scope:
        scope.cancel()
        with other.until_asked("waiting"):
            await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught
