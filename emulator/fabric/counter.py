"""A count that only grows, and the tasks that wait for it to reach a value: segments placed, marks made."""

from __future__ import annotations

from collections.abc import Callable

import trio

__all__ = ["Counter", "Lost", "closed"]

Lost = Callable[[], Exception]
"""Makes the error that a waiting task is to raise: one of its own for each."""


class Counter:
    """Starts at 0. Once it has failed, it is not waited for any more; what it has reached stays reached."""

    def __init__(self) -> None:
        self.value = 0
        self._reached_s: list[float] = []
        self._lost: Lost | None = None
        self._waiting: dict[trio.lowlevel.Task, int] = {}

    def bump(self, at_s: float = 0.0) -> None:
        """One more, at model time ``at_s``."""
        self.value += 1
        self._reached_s.append(at_s)
        for task in [task for task, count in self._waiting.items() if count <= self.value]:
            del self._waiting[task]
            trio.lowlevel.reschedule(task)

    def reached_s(self, count: int) -> float:
        """When it reached ``count``, which it has, as ``bump`` was told; 0 for a count of 0."""
        return self._reached_s[count - 1] if count else 0.0

    def fail(self, lost: Lost) -> None:
        """It is not sure to grow any more: who waits, now or later, is told why. The first reason stays."""
        if self._lost is None:
            self._lost = lost
            waiting, self._waiting = self._waiting, {}
            for task in waiting:
                trio.lowlevel.reschedule(task)

    async def wait(self, count: int) -> None:
        """Return once the value is ``count`` or more; raises what ``fail`` was given where it is not."""
        if count <= self.value or self._lost is not None:
            await trio.lowlevel.checkpoint()
        else:
            task = trio.lowlevel.current_task()
            self._waiting[task] = count

            def abort(raise_cancel: object) -> trio.lowlevel.Abort:
                del self._waiting[task]
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(abort)
        if count > self.value:
            assert self._lost is not None
            raise self._lost()


def closed() -> Exception:
    """What is lost with a stream that was closed."""
    return trio.ClosedResourceError("the stream was closed before")
