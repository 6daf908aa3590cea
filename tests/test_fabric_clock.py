"""Laws of virtual time: it jumps, it is deterministic, and it says why it stopped."""

from __future__ import annotations

import itertools
import math
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from trio._core import _run as trio_run_module

from emulator.fabric.clock import SimulationStuck, VirtualClock, run_virtual

ROOT = Path(__file__).parents[1]


async def sleepers(count: int, seconds: float) -> tuple[list[int], float]:
    """The order in which ``count`` tasks wake that sleep equally long, and the time after it."""
    order: list[int] = []

    async def sleeper(i: int) -> None:
        await trio.sleep(seconds)
        order.append(i)

    async with trio.open_nursery() as nursery:
        for i in range(count):
            nursery.start_soon(sleeper, i)
    return order, trio.current_time()


def _output_of(code: str) -> str:
    """What a Python process of its own prints that runs ``code`` in the checkout."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True, cwd=ROOT
    )
    return done.stdout


def test_time_starts_at_zero_and_jumps() -> None:
    """A day passes at once, and exactly."""
    started = time.monotonic()
    order, now = run_virtual(sleepers, 3, 86_400.0)
    assert sorted(order) == [0, 1, 2]
    assert now == 86_400.0
    assert time.monotonic() - started < 5


def test_the_seed_fixes_the_order_of_equal_times() -> None:
    """Same seed, same order; other seeds, other orders; all of it under the program's own names."""
    orders = [tuple(run_virtual(sleepers, 8, 1.0, seed=seed)[0]) for seed in range(10)]
    assert orders == [tuple(run_virtual(sleepers, 8, 1.0, seed=seed)[0]) for seed in range(10)]
    assert len(set(orders)) > 5


def test_the_order_is_the_same_in_another_process() -> None:
    """No address and no hash of this process is in the order."""
    code = (
        "from tests.test_fabric_clock import sleepers\n"
        "from emulator.fabric.clock import run_virtual\n"
        "print(*run_virtual(sleepers, 20, 1.0, seed=5)[0])"
    )
    printed = {_output_of(code) for _ in range(2)}
    assert printed == {" ".join(map(str, run_virtual(sleepers, 20, 1.0, seed=5)[0])) + "\n"}


def test_trio_still_has_what_determinism_needs_and_gets_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two private names of trio exist, are used during a run, and are restored after it, failed or not."""
    assert isinstance(trio_run_module._r, random.Random)
    # raising=True: the name must be there. Hypothesis, where it is loaded, has set it already.
    monkeypatch.setattr(trio_run_module, "_ALLOW_DETERMINISTIC_SCHEDULING", False, raising=True)
    state = trio_run_module._r.getstate()
    seen: list[bool] = []

    async def look(fail: bool) -> None:
        seen.append(trio_run_module._ALLOW_DETERMINISTIC_SCHEDULING)
        await trio.lowlevel.checkpoint()
        if fail:
            raise KeyError("ours")

    run_virtual(look, False)
    with pytest.raises(KeyError, match="ours"):
        run_virtual(look, True)
    assert seen == [True, True]
    assert trio_run_module._ALLOW_DETERMINISTIC_SCHEDULING is False
    assert trio_run_module._r.getstate() == state


async def nobody_comes() -> None:
    async def decode_step(gate: trio.Event) -> None:
        await gate.wait()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(decode_step, trio.Event(), name="decode de0/3")
        nursery.start_soon(trio.sleep_forever, name="scheduler")


def test_a_program_in_which_everybody_waits_is_stuck() -> None:
    """The error names every task and the line of ours at which it waits."""
    with pytest.raises(SimulationStuck, match="nothing will happen") as caught:
        run_virtual(nobody_comes)
    text = str(caught.value)
    assert "decode de0/3: nobody_comes.<locals>.decode_step" in text
    assert "await gate.wait()" in text
    assert "scheduler: " in text


def test_what_lies_beyond_the_horizon_is_not_waited_for() -> None:
    """A program that would go on for ever in virtual time is stopped, and is told where."""
    ticks = 0

    async def ticker() -> None:
        nonlocal ticks
        while True:
            await trio.sleep(1)
            ticks += 1

    with pytest.raises(SimulationStuck, match="beyond the horizon of 100 s"):
        run_virtual(ticker, horizon_s=100)
    assert ticks == 100


def test_a_stuck_program_unwinds() -> None:
    """Its cleanup runs, and may still take virtual time."""
    cleaned: list[float] = []

    async def tidy() -> None:
        try:
            await trio.sleep_forever()
        finally:
            with trio.move_on_after(5, shield=True):
                await trio.sleep_forever()
            cleaned.append(trio.current_time())

    with pytest.raises(SimulationStuck):
        run_virtual(tidy)
    assert cleaned == [5.0]


async def shielded() -> None:
    with trio.CancelScope(shield=True):
        await trio.sleep_forever()


def test_a_program_that_cannot_be_cancelled_ends_too() -> None:
    """One that is stuck behind a shield is torn down as it is. In a process of its own, since trio complains."""
    code = (
        "from tests.test_fabric_clock import *\n"
        "try:\n"
        "    run_virtual(shielded)\n"
        "except SimulationStuck as error:\n"
        "    print(error)"
    )
    assert "not to be cancelled: every task waits" in _output_of(code)


async def livelock() -> None:
    while True:
        await trio.lowlevel.checkpoint()


async def busy() -> None:
    while True:
        math.sqrt(2)


@pytest.mark.parametrize("program", [livelock, busy])
def test_time_that_stands_still_is_noticed(program: Callable[[], object]) -> None:
    """A loop that never lets time pass, with or without checkpoints, ends after ``stall_s`` of real time.

    In a process of its own: the interrupt falls wherever the loop is, which can be inside trio.
    """
    code = (
        "from tests.test_fabric_clock import *\n"
        "try:\n"
        f"    run_virtual({program.__name__}, stall_s=0.2)\n"
        "except SimulationStuck as error:\n"
        "    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True, cwd=ROOT
    )
    assert "stood still for 0.2 s" in done.stdout
    assert program.__name__ in done.stdout or "_supervise" in done.stdout


def test_a_program_that_goes_on_is_not_interrupted() -> None:
    """Real time alone is no reason to stop, and the alarm is off afterwards."""

    async def slow() -> None:
        until = time.monotonic() + 1.2
        for _ in itertools.takewhile(lambda _: time.monotonic() < until, itertools.count()):
            await trio.sleep(1e-3)

    run_virtual(slow, stall_s=0.5)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_time_source_moves_time_and_an_instant_ends_before_it() -> None:
    """A source is asked only when no task can run, and woken at its own time, before later deadlines."""
    log: list[tuple[str, float]] = []

    class Source:
        def __init__(self) -> None:
            self.at = math.inf
            self.event = trio.Event()

        def due(self) -> float:
            return self.at

        def wake(self) -> None:
            self.at = math.inf
            self.event.set()

    async def program() -> None:
        clock = trio.lowlevel.current_clock()
        assert isinstance(clock, VirtualClock)
        source = Source()
        clock.attach(source)

        async def sleeper() -> None:
            await trio.sleep(3)
            log.append(("deadline", trio.current_time()))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(sleeper)
            source.at = 0.0
            for _ in range(3):
                await trio.lowlevel.checkpoint()
            assert source.at == 0.0, "woken while a task could run"
            await source.event.wait()
            log.append(("source", trio.current_time()))
            source.at, source.event = 2.0, trio.Event()
            await source.event.wait()
            log.append(("source", trio.current_time()))
        clock.detach(source)

    run_virtual(program)
    assert log == [("source", 0.0), ("source", 2.0), ("deadline", 3.0)]
