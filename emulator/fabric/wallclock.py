"""Model time on a real host: one stretched monotonic clock for all processes, and wake-ups that keep to it.

``WallClock`` is a value that every process of a run is given. ``Alarm`` exists because Trio hands its
timeouts to epoll in whole milliseconds, rounded up: 0.7 ms late at the median, which is far more than a layer
of a decode step. A timerfd wakes within some tens of microseconds.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import msgspec
import trio

__all__ = ["Alarm", "WallClock", "open_alarm"]


class WallClock(msgspec.Struct, frozen=True):
    """Model seconds since ``epoch_monotonic_s`` (CLOCK_MONOTONIC, the same in all processes of a host).

    ``dilation`` is wall seconds per model second.
    """

    epoch_monotonic_s: float
    dilation: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.dilation < float("inf"):
            raise ValueError(f"dilation {self.dilation}: expected a positive, finite number")

    def now(self) -> float:
        """Model seconds since the epoch."""
        return (time.monotonic() - self.epoch_monotonic_s) / self.dilation

    def monotonic(self, at_s: float) -> float:
        """The CLOCK_MONOTONIC reading at model time ``at_s``."""
        return self.epoch_monotonic_s + at_s * self.dilation


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("it_interval", _Timespec), ("it_value", _Timespec))


_TFD_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_TFD_TIMER_ABSTIME = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"timerfd: {os.strerror(number)}")
    return result


class Alarm:
    """Wakes tasks and calls functions at monotonic instants.

    ``run`` must be running in a task; made by ``open_alarm``.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    async def wait_until(self, monotonic_s: float) -> None:
        """Return at CLOCK_MONOTONIC ``monotonic_s``, or at once (a checkpoint) if that is past."""
        if monotonic_s <= time.monotonic():
            await trio.lowlevel.checkpoint()
            return
        event = trio.Event()
        entry = self._push(monotonic_s, event.set)
        try:
            await event.wait()
        except trio.Cancelled:
            # Never long: what is due later than a role's next step is a time-out, and those are Trio's. Not
            # there any more when it fell due between the cancellation and this task's turn.
            if entry in self._due:
                self._due.remove(entry)
                heapq.heapify(self._due)
            raise

    def call_at(self, monotonic_s: float, act: Callable[[], None]) -> None:
        """Call ``act`` at CLOCK_MONOTONIC ``monotonic_s``, soon if that is past; those of one instant in order."""
        self._push(monotonic_s, act)

    async def run(self) -> NoReturn:
        """Serve them for ever."""
        while True:
            await trio.lowlevel.wait_readable(self._fd)
            # Nothing to read when an earlier waiter set the timer anew after it went off.
            with suppress(BlockingIOError):
                os.read(self._fd, 8)
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
            if self._due:
                self._arm()

    def _push(self, monotonic_s: float, act: Callable[[], None]) -> tuple[float, int, Callable[[], None]]:
        entry = (monotonic_s, next(self._order), act)
        heapq.heappush(self._due, entry)
        if self._due[0] is entry:
            self._arm()
        return entry

    def _arm(self) -> None:
        nanoseconds = int(self._due[0][0] * 1e9) + 1
        at = _Timespec(nanoseconds // 1_000_000_000, nanoseconds % 1_000_000_000)
        spec = _Itimerspec(_Timespec(0, 0), at)
        _checked(_libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None))


@contextmanager
def open_alarm() -> Iterator[Alarm]:
    """An alarm on a timerfd of its own, closed on leaving."""
    fd = _checked(_libc.timerfd_create(time.CLOCK_MONOTONIC, _TFD_FLAGS))
    try:
        yield Alarm(fd)
    finally:
        os.close(fd)
