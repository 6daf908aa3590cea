"""KV paced by software, as an engine without lanes would have to: what ``--qos software`` puts over a fabric.

A loop in the engine wakes once a tick. It looks whether an exchange is in progress on a CNIC of its node, and
hands out that CNIC's KV bytes for the tick: what the line carries in it if none is, KV's share of that if one is.
Messages go whole, first come first served in each CNIC. Budget that a tick leaves is lost; what the last message
of a tick took too much is paid by the next ones.

What it sees is what an engine sees: its own node's exchanges, from when the engine enters them (or is ready, if
that is later) until they are over, the wait for other members included. It does not see an exchange that begins
and ends between two ticks; what it let go before it looked cannot be called back; and it does not know of
exchanges on the node that it sends to.

``Budget`` is pure. ``PacedFabric`` obeys the laws of ``Fabric``; all but KV that leaves a CNIC passes as it is.
Must not import a fabric's implementation or a role.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager

import msgspec
import trio

from .fabric.forwarding import ForwardingFabric, ForwardingStream
from .fabric.interface import (
    Endpoint,
    Exchanged,
    Fabric,
    Region,
    Ring,
    Segment,
    Target,
    VirtualLane,
    WriteStream,
)

__all__ = ["Budget", "Pace", "PacedFabric", "open_paced"]


class Pace(msgspec.Struct, frozen=True):
    """``rates``: payload bytes per model second of each of a node's CNICs. ``share``: KV's beside an exchange.

    ValueError for a rate or a tick that is not positive, or a share that is none.
    """

    rates: Mapping[str, float]
    share: float
    tick_s: float

    def __post_init__(self) -> None:
        for name, value in (("tick_s", self.tick_s), *self.rates.items()):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} {value}: expected a positive, finite number")
        if not 0 < self.share <= 1:
            raise ValueError(f"share {self.share}: expected more than 0, at most 1")


class Budget:
    """The bytes that may still leave one CNIC in the current tick, as a loop that runs each tick would have it.

    Computed when somebody asks: between two changes of what is in progress all ticks are alike. Ticks are at
    multiples of ``tick_s``; what happens exactly at one is after the loop has looked. Times never go back.
    """

    def __init__(self, rate: float, share: float, tick_s: float, now_s: float) -> None:
        self._tick_s = tick_s
        self._line = rate * tick_s
        self._beside = share * self._line
        self._tick = self._tick_at(now_s)
        self._left = self._line
        self._began: dict[object, float] = {}

    def begin(self, exchange: object, at_s: float, now_s: float) -> None:
        """``exchange`` is in progress from ``at_s`` on, which may be later than now."""
        self._advance(now_s)
        self._began[exchange] = at_s

    def end(self, exchange: object, now_s: float) -> None:
        """``exchange`` is over, or given up."""
        self._advance(now_s)
        del self._began[exchange]

    def take(self, size_bytes: int, now_s: float) -> bool:
        """May a message of ``size_bytes`` go now? If so it is paid for."""
        self._advance(now_s)
        if self._left <= 0:
            return False
        self._left -= size_bytes
        return True

    def next_s(self, now_s: float) -> float:
        """When the loop wakes next."""
        return (self._tick_at(now_s) + 1) * self._tick_s

    def _advance(self, now_s: float) -> None:
        """Hand out the budgets of all ticks up to now."""
        tick = self._tick_at(now_s)
        idle = tick - self._tick
        if self._began:
            idle = max(0, min(tick, self._tick_at(min(self._began.values()))) - self._tick)
        self._grant(idle, self._line)
        self._grant(tick - self._tick - idle, self._beside)
        self._tick = tick

    def _grant(self, ticks: int, budget: float) -> None:
        """Each tick leaves no more than ``budget``, so many together no more either."""
        if ticks:
            self._left = min(budget, self._left + ticks * budget)

    def _tick_at(self, at_s: float) -> int:
        """The last tick at ``at_s``. A tick's own time, as ``next_s`` gives it, belongs to it, however rounded."""
        tick = int(at_s // self._tick_s)
        while (tick + 1) * self._tick_s <= at_s:
            tick += 1
        return tick


class _Turn(msgspec.Struct, frozen=True):
    """A message that waits for budget: the first ``upto`` of its stream may go then, not before ``due_s``."""

    stream: _Paced
    upto: int
    size_bytes: int
    due_s: float


class _Queue:
    """The messages of one CNIC that wait, first come first served."""

    def __init__(self, budget: Budget, now: Callable[[], float], on_wait: Callable[[], None]) -> None:
        self.budget = budget
        self._now = now
        self._on_wait = on_wait
        self._turns: deque[_Turn] = deque()

    def add(self, turns: Iterable[_Turn]) -> None:
        self._turns.extend(turns)
        if self.pump():
            self._on_wait()

    def pump(self) -> bool:
        """Let go what the budget allows; does anything still wait?"""
        while self._turns and self.budget.take(self._turns[0].size_bytes, self._now()):
            turn = self._turns.popleft()
            turn.stream.go(turn.upto, turn.due_s)
        return bool(self._turns)

    def drop(self, stream: _Paced) -> None:
        """Forget what waits of ``stream``."""
        self._turns = deque(turn for turn in self._turns if turn.stream is not stream)


class _Paced(ForwardingStream):
    """A stream whose segments, once released, wait for their turn and for budget."""

    def __init__(
        self, stream: WriteStream, segments: Sequence[Segment], queue: _Queue, now: Callable[[], float]
    ) -> None:
        super().__init__(stream)
        self._sizes = [segment.size_bytes for segment in segments]
        self._queue = queue
        self._now = now
        self._released = 0
        self._due_s = 0.0
        self._closed = False

    def release(self, upto: int, *, after_s: float = 0.0) -> None:
        if self._closed:
            raise ValueError("release on a closed stream")
        if not self._released <= upto <= len(self._sizes):
            raise ValueError(f"release({upto}): expected {self._released} to {len(self._sizes)}")
        fresh, self._released = range(self._released, upto), upto
        self._due_s = max(self._due_s, self._now() + after_s)
        self._queue.add(_Turn(self, index + 1, self._sizes[index], self._due_s) for index in fresh)

    def go(self, upto: int, due_s: float) -> None:
        """It is the turn of the first ``upto`` segments."""
        self._inner.release(upto, after_s=max(0.0, due_s - self._now()))

    async def aclose(self) -> None:
        self._closed = True
        self._queue.drop(self)
        await super().aclose()


class PacedFabric(ForwardingFabric):
    """``inner`` with KV out of its CNICs paced. ``run`` must be running in a task; see ``open_paced``."""

    def __init__(self, inner: Fabric, pace: Pace) -> None:
        super().__init__(inner)
        self._queues = {
            nic: _Queue(Budget(rate, pace.share, pace.tick_s, inner.now()), inner.now, self._wait)
            for nic, rate in pace.rates.items()
        }
        self._waiting = trio.Event()

    async def run(self) -> None:
        """Wake each tick while anything waits; never returns."""
        while True:
            await self._waiting.wait()
            now_s = self.now()
            await self.sleep_until(min(queue.budget.next_s(now_s) for queue in self._queues.values()))
            waiting = [queue.pump() for queue in self._queues.values()]
            if not any(waiting):
                self._waiting = trio.Event()

    def _wait(self) -> None:
        self._waiting.set()

    def _queue(self, target: Target) -> _Queue | None:
        return self._queues.get(target.src.nic) if target.lane is VirtualLane.KV else None

    def open_stream(
        self, target: Target, local: Region, segments: Sequence[Segment], *, tag: str = ""
    ) -> WriteStream:
        stream = super().open_stream(target, local, segments, tag=tag)
        queue = self._queue(target)
        return stream if queue is None else _Paced(stream, segments, queue, self.now)

    async def write(
        self, target: Target, local: Region, segment: Segment, *, tag: str = "", after_s: float = 0.0
    ) -> None:
        if self._queue(target) is None:
            await super().write(target, local, segment, tag=tag, after_s=after_s)
            return
        await trio.lowlevel.checkpoint_if_cancelled()
        async with self.open_stream(target, local, (segment,), tag=tag) as stream:
            stream.release(1, after_s=after_s)
            await stream.wait_placed(1)

    async def collective(
        self,
        ring: Ring,
        payload: Mapping[Endpoint, int],
        *,
        ready_s: float,
        amount: int = 0,
        lane: VirtualLane = VirtualLane.MODEL,
    ) -> Exchanged:
        with self._exchanging(ring, payload, ready_s):
            return await super().collective(ring, payload, ready_s=ready_s, amount=amount, lane=lane)

    @contextmanager
    def _exchanging(self, ring: Ring, payload: Mapping[Endpoint, int], ready_s: float) -> Iterator[None]:
        """An exchange of bytes is in progress on this node's ports of ``ring``, from ``ready_s`` on."""
        ends = (
            {end.nic for hop in ring.hops for end in hop if end.node == self.node} if any(payload.values()) else ()
        )
        budgets = [self._queues[nic].budget for nic in sorted(ends) if nic in self._queues]
        exchange = object()
        for budget in budgets:
            budget.begin(exchange, ready_s, self.now())
        try:
            yield
        finally:
            for budget in budgets:
                budget.end(exchange, self.now())


@asynccontextmanager
async def open_paced(inner: Fabric, pace: Pace | None) -> AsyncIterator[Fabric]:
    """``inner`` paced for the length of a block; as it is where there is no ``pace``, or no CNIC to be paced."""
    if pace is None or not pace.rates:
        yield inner
        return
    fabric = PacedFabric(inner, pace)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fabric.run)
        yield fabric
        nursery.cancel_scope.cancel()
