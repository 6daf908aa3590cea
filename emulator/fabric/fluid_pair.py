"""The queue pairs of a fluid network: messages and streams that are moved, counted and told of when they are over.

A queue pair is a ``Pipe`` of ``flow``, which says when. A message's bytes are gathered and scattered in one step
when it is placed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import trio

from ..errors import PeerLost
from ..extent import gather, scatter
from .counter import Counter, Lost, closed
from .flow import Engine, Message, Pipe
from .interface import Region, Segment, Target, Transfer, WriteStream
from .meter import Books, PortMeter

__all__ = ["Bulk", "End", "Pair", "Posted", "Route", "Stream", "gone"]


class End:
    """A node as its queue pairs see it: its counters, and the streams that it has open."""

    def __init__(self, node: str, engine: Engine, books: Books) -> None:
        self.node = node
        self.engine = engine
        self.books = books
        self.streams: dict[Stream, None] = {}


class Pair:
    """A queue pair: its pipe, the nodes at its ends, and their counters of it."""

    def __init__(self, pipe: Pipe, ends: tuple[End, End], meters: tuple[PortMeter, ...]) -> None:
        self.pipe = pipe
        self.sender, self.receiver = ends
        self.meters = meters


class Route:
    """Where the messages of one write or stream go, resolved and checked once."""

    def __init__(self, pair: Pair, target: Target, local: Region, remote: Region, tag: Counter | None) -> None:
        self.pair = pair
        self.target = target
        self.local = local
        self.remote = remote
        self.tag = tag


class _Counted(Message):
    """A message of a queue pair, counted by both its ends."""

    __slots__ = ("_pair",)

    def __init__(self, pair: Pair, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self._pair = pair

    def post(self) -> None:
        now = self._pair.sender.engine.now
        for meter in self._pair.meters:
            meter.begin(now)
        self._pair.pipe.post(self)

    def begin(self) -> None:
        super().begin()
        now, size = self._pair.sender.engine.now, self.size_bytes
        for meter in self._pair.meters:
            meter.depart(now, size)

    def drop(self) -> bool:
        """Take it back; False if it has begun or is over."""
        dropped = self._pair.pipe.drop(self)
        if dropped:
            self._unmeter()
        return dropped

    def lose(self, node: str) -> None:
        self._unmeter()

    def _count(self, transfer: Transfer) -> None:
        """It is in place."""
        pair, size = self._pair, self.size_bytes
        now, sender, receiver = pair.sender.engine.now, pair.sender, pair.receiver
        for meter in pair.meters:
            meter.end(now, size)
        sender.books.count_sent(transfer, sender.node, receiver.node, size)
        receiver.books.count_received(transfer, sender.node, receiver.node, size)

    def _unmeter(self) -> None:
        now, departed_bytes = self._pair.sender.engine.now, self.size_bytes if self.begun else 0
        for meter in self._pair.meters:
            meter.drop(now, departed_bytes)


class Posted(_Counted):
    """One segment on its way; ``over`` tells its sender that it is in place (None) or lost."""

    __slots__ = ("_over", "_route", "_segment")

    def __init__(self, route: Route, segment: Segment, over: Callable[[Posted, Lost | None], None]) -> None:
        super().__init__(route.pair, segment.size_bytes)
        self._route = route
        self._segment = segment
        self._over = over

    def place(self) -> None:
        """Put the bytes in place, count them on both sides, tell both sides."""
        route = self._route
        scatter(route.remote.memory, self._segment.remote, gather(route.local.memory, self._segment.local))
        self._count(route.target.transfer)
        if route.tag is not None:
            route.tag.bump(route.pair.receiver.engine.now)
        self._over(self, None)

    def lose(self, node: str) -> None:
        self._unmeter()
        self._over(self, gone(node, definite=not self.begun))


class Bulk(_Counted):
    """What one port sends in an exchange: bytes of no content, since nobody reads them."""

    __slots__ = ("_over",)

    def __init__(self, pair: Pair, size_bytes: int, over: Callable[[], None]) -> None:
        super().__init__(pair, size_bytes)
        self._over = over

    def place(self) -> None:
        self._count(Transfer.COLLECTIVE)
        self._over()


class Stream(WriteStream):
    """Segments that are posted as they are released."""

    def __init__(self, route: Route, segments: Sequence[Segment]) -> None:
        self._route = route
        self._segments = segments
        self._released = self._posted = 0
        self._deferred: deque[int] = deque()
        self._due_s = 0.0
        self._placed = Counter()
        self._under_way: dict[Posted, None] = {}
        self._lost = False
        self._closed = False
        self._landed = trio.Event()

    def release(self, upto: int, *, after_s: float = 0.0) -> None:
        if self._closed:
            raise ValueError("release on a closed stream")
        if not self._released <= upto <= len(self._segments):
            raise ValueError(f"release({upto}): expected {self._released} to {len(self._segments)}")
        self._released = upto
        if after_s <= 0 and not self._deferred:
            self._post(upto)
        else:
            engine = self._route.pair.sender.engine
            self._deferred.append(upto)
            self._due_s = max(engine.now + after_s, self._due_s)
            engine.at(self._due_s, self._ring)

    def _ring(self, _: int) -> None:
        """What was deferred longest is due."""
        if self._deferred:
            self._post(self._deferred.popleft())

    def _post(self, upto: int) -> None:
        fresh, self._posted = self._segments[self._posted : upto], upto
        if self._lost:
            return
        for segment in fresh:
            message = Posted(self._route, segment, self._over)
            self._under_way[message] = None
            message.post()

    @property
    def peer(self) -> str:
        return self._route.pair.receiver.node

    @property
    def placed(self) -> int:
        return self._placed.value

    def placed_s(self, upto: int) -> float:
        return self._placed.reached_s(upto)

    async def wait_placed(self, upto: int) -> None:
        if not 0 <= upto <= len(self._segments):
            raise ValueError(f"wait_placed({upto}): the stream has {len(self._segments)} segments")
        await self._placed.wait(upto)

    async def aclose(self) -> None:
        self._closed = True
        self._deferred.clear()
        for message in [m for m in self._under_way if m.drop()]:
            del self._under_way[message]
        self._placed.fail(closed)
        self._route.pair.sender.streams.pop(self, None)
        with trio.CancelScope(shield=True):
            if self._under_way:
                await self._landed.wait()
            else:
                await trio.lowlevel.checkpoint()

    def peer_lost(self, lost: Lost) -> None:
        self._lost = True
        self._placed.fail(lost)

    def _over(self, message: Posted, lost: Lost | None) -> None:
        del self._under_way[message]
        if lost is None:
            self._placed.bump(self._route.pair.receiver.engine.now)
        else:
            self.peer_lost(lost)
        if self._closed and not self._under_way:
            self._landed.set()


def gone(node: str, *, definite: bool = False) -> Lost:
    return partial(PeerLost, f"node {node} is gone", definite=definite)
