"""Virtual time: a trio clock that jumps to the next event, and ``run_virtual``, which runs a program under it.

Time starts at 0 and stands still while any task can run. When none can, it jumps to whatever comes first: a
trio deadline, or the next event of an attached ``TimeSource`` (a fluid network). A source that says "now"
is woken without a jump, so that whatever happened at one instant is dealt with once, when the instant is over.

Trio shuffles the tasks that become runnable together; here it does so from a seed, after sorting them by age,
so that a run is a function of its program and its seed. That needs two private names of trio; this is the
only place that touches them, and it puts them back.

Threads, files and sockets are invisible to the clock: a program that waits for one while every task is
blocked looks stuck. Must not import anything of the emulator.
"""

from __future__ import annotations

import linecache
import math
import random
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol, TypeVar, TypeVarTuple

import trio
from trio._core import _run as trio_run_module

__all__ = ["SimulationStuck", "TimeSource", "VirtualClock", "run_virtual"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class SimulationStuck(Exception):
    """A simulation cannot, or would not, end: why, and what each task waits for.

    ``account``: what the program itself said of that; empty where it was not asked.
    """

    def __init__(self, text: str, account: str = "") -> None:
        super().__init__(text)
        self.account = account


class TimeSource(Protocol):
    """Something whose events move virtual time besides trio's deadlines."""

    def due(self) -> float:
        """Virtual time of its next event: now (or earlier) for at once, inf for none.

        Asked only when no task can run.
        """

    def wake(self) -> None:
        """Make its task runnable: its event is due."""


class VirtualClock(trio.abc.Clock):
    """Seconds from 0 that pass only when no task can run. One clock serves one run."""

    def __init__(self, horizon_s: float = math.inf) -> None:
        self._now = 0.0
        self._horizon_s = horizon_s
        self._sources: list[TimeSource] = []
        self._supervisor: Callable[[str], None] | None = None
        self._told = False

    def start_clock(self) -> None:
        """Nothing to start: time moves by jumps."""

    def current_time(self) -> float:
        return self._now

    def attach(self, source: TimeSource) -> None:
        self._sources.append(source)

    def detach(self, source: TimeSource) -> None:
        self._sources.remove(source)

    @contextmanager
    def supervised(self, on_stuck: Callable[[str], None]) -> Iterator[None]:
        """Within, call ``on_stuck`` with the reason when nothing will happen before the horizon.

        It has to make a task runnable. The second time SimulationStuck is raised in trio's run loop. Outside,
        as while trio shuts down, a run loop with no event to come waits for its sockets.
        """
        self._supervisor = on_stuck
        try:
            yield
        finally:
            self._supervisor = None

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Trio asks how long to sleep when no task can run: jump, and say not at all."""
        due = [(source.due(), source) for source in self._sources]
        at = min([deadline, *(when for when, _ in due)])
        if self._supervisor is None:
            if at == math.inf:
                return math.inf
        elif at > self._horizon_s or at == math.inf:
            self._stuck("every task waits and nothing will happen" if at == math.inf else self._beyond(at))
            return 0.0
        self._now = max(self._now, at)
        for when, source in due:
            if when <= self._now:
                source.wake()
        return 0.0

    def _beyond(self, at: float) -> str:
        return f"the next event, at {at:.6g} s, is beyond the horizon of {self._horizon_s:.6g} s"

    def _stuck(self, reason: str) -> None:
        if self._told or self._supervisor is None:
            raise SimulationStuck(f"stuck at {self._now:.6f} s of virtual time, and not to be cancelled: {reason}")
        self._told = True
        self._supervisor(reason)


def run_virtual(
    async_fn: Callable[[*Ts], Awaitable[T]],
    *args: *Ts,
    seed: int = 0,
    horizon_s: float = 1e7,
    stall_s: float = 60.0,
    account: Callable[[], str] = str,
) -> T:
    """Run ``async_fn(*args)`` in virtual time and return its result; its exceptions come out as they are.

    ``seed`` fixes the order of tasks that are runnable together. Raises SimulationStuck, naming what every
    task waits for, when all tasks are blocked with nothing to come, when the next event lies beyond
    ``horizon_s``, or when virtual time stands still for ``stall_s`` seconds of real time (seen from the main
    thread only, where signals arrive).

    ``account`` is asked when nothing can happen any more, before anything unwinds: what the program itself says of
    what it waits for, which the error carries. None by default.
    """
    clock = VirtualClock(horizon_s)
    with _deterministic_order(seed), _wall_watchdog(clock, stall_s):
        try:
            return trio.run(_supervise, clock, account, async_fn, args, clock=clock)
        except trio.TrioInternalError as error:
            if isinstance(error.__cause__, SimulationStuck):
                raise error.__cause__ from None
            raise


async def _supervise(
    clock: VirtualClock, account: Callable[[], str], async_fn: Callable[[*Ts], Awaitable[T]], args: tuple[*Ts]
) -> T:
    """Run the program beneath a scope that is cancelled when it is stuck, so that it unwinds."""
    stuck: list[SimulationStuck] = []
    with trio.CancelScope() as scope:

        def act(reason: str) -> None:
            text = f"stuck at {clock.current_time():.6f} s of virtual time: {reason}\n{_task_tree()}"
            stuck.append(SimulationStuck(text, account()))
            scope.cancel()

        with clock.supervised(act):
            return await async_fn(*args)
    raise stuck[0]


@contextmanager
def _deterministic_order(seed: int) -> Iterator[None]:
    """Make trio order tasks by age and then by a shuffle from ``seed``; restore both afterwards."""
    names: dict[str, Any] = vars(trio_run_module)
    allowed, state = names["_ALLOW_DETERMINISTIC_SCHEDULING"], names["_r"].getstate()
    names["_ALLOW_DETERMINISTIC_SCHEDULING"] = True
    names["_r"].setstate(random.Random(seed).getstate())
    try:
        yield
    finally:
        names["_ALLOW_DETERMINISTIC_SCHEDULING"] = allowed
        names["_r"].setstate(state)


@contextmanager
def _wall_watchdog(clock: VirtualClock, stall_s: float) -> Iterator[None]:
    """Interrupt the program when virtual time stood still for ``stall_s`` real seconds."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen = clock.current_time()

    def check(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        if clock.current_time() == seen:
            raise SimulationStuck(
                f"stuck at {seen:.6f} s of virtual time: it stood still for {stall_s:g} s of real time\n"
                f"{_task_tree()}"
            )
        seen = clock.current_time()

    before = signal.signal(signal.SIGALRM, check)
    signal.setitimer(signal.ITIMER_REAL, stall_s, stall_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _task_tree() -> str:
    """One line per task of the program, indented by nursery: its name, and where it waits."""
    root = trio.lowlevel.current_root_task()
    lines: list[str] = []

    def show(task: trio.lowlevel.Task, depth: int) -> None:
        lines.append(f"{'  ' * depth}{task.name}: {_waits_at(task.coro)}")
        for nursery in task.child_nurseries:
            for child in sorted(nursery.child_tasks, key=lambda t: (t.name, _waits_at(t.coro))):
                show(child, depth + 1)

    if root is not None:
        for nursery in root.child_nurseries:
            for task in sorted(nursery.child_tasks, key=lambda t: t.name):
                if task.coro.__qualname__ not in _TRIO_TASKS:
                    show(task, 0)
    return "\n".join(lines)


_TRIO_TASKS = frozenset({"Runner.init", "EntryQueue.task", "TrioToken.run_sync_soon"})


def _waits_at(coro: Any) -> str:
    """The innermost line of a suspended coroutine that is not trio's own (or its own name)."""
    place = getattr(coro, "__qualname__", "")
    while coro is not None:
        frame = getattr(coro, "cr_frame", None) or getattr(coro, "gi_frame", None)
        if frame is not None and not frame.f_globals.get("__name__", "").startswith("trio."):
            code = frame.f_code
            text = linecache.getline(code.co_filename, frame.f_lineno).strip()
            place = f"{code.co_qualname}:{frame.f_lineno}: {text}"
        coro = getattr(coro, "cr_await", None) or getattr(coro, "gi_yieldfrom", None)
    return place
