"""The collectives of a node on the TCP fabric: what it tells the other members, and what it hears of them.

Theory of operation. Entering an exchange and having one's bytes in place are *notices*: one-way messages over
the management network to every other member, in order, dealt with where they are read. An exchange runs in a
task of its own from its entry on, so that it outlives a caller who gives up: the others wait for its bytes.

Processes wake up late, each by an amount of its own, so that times are kept apart from delays: a member says
how long its slowest port took, from the moment at which *it* began to send until the receiver had the last byte,
added to the common ideal start; the exchange is over at the latest of these. A port of a ring is used by one hop
only, so that a late member's hop takes as long as it would have taken in time. What remains of the host's own
times is the receiver's waking up, once.

A lost member ends its rings for good: nobody knows which of its exchanges were the last.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec
import trio

from ..errors import EmulatorError, ProtocolViolation, error_from_code
from ..extent import Extent
from .collective import Entry, Exchange, Hop, check_member, hops_of, largest
from .counter import Counter, Lost
from .interface import Endpoint, Exchanged, Ring, Segment, Target, Transfer, VirtualLane
from .meter import Books
from .rpc import RpcPort
from .sender import PostedStream

__all__ = ["SCRATCH_REGION", "TcpRings"]

SCRATCH_REGION = "fabric.scratch"
"""Where the bytes of all exchanges come from and go to; a fabric registers it."""

ENTERED = "fabric.entered"
IN_PLACE = "fabric.in_place"


class Entered(msgspec.Struct, frozen=True, array_like=True):
    """The sender has entered exchange ``index`` of ``ring``."""

    ring: str
    index: int
    ready_s: float
    amount: int
    at_s: float


class InPlace(msgspec.Struct, frozen=True, array_like=True):
    """All that the sender sends in exchange ``index`` of ``ring`` is in place, ideally at ``over_s``."""

    ring: str
    index: int
    over_s: float


class _Seat:
    """This node's membership of a ring: how often it and others entered, and what is not over.

    ``calls``: the last exchange that each other member entered. ``announced``: how many any of them did.
    """

    def __init__(self, ring: Ring, node: str) -> None:
        self.ring = ring
        self.others = tuple(other for other in ring.nodes if other != node)
        self.entered = 0
        self.announced = Counter()
        self.open: dict[int, _Open] = {}
        self.calls: dict[str, int] = {}
        self.lost: Lost | None = None


class _Open(Exchange):
    """An exchange, and what this node sends in it."""

    hops: tuple[Hop, ...] = ()
    lane = VirtualLane.MODEL
    late_s = 0.0


OpenStream = Callable[[Target, Segment], PostedStream]


class TcpRings:
    """All rings of one node. ``nursery`` holds a task for each exchange; ``open_stream`` posts from scratch."""

    def __init__(
        self,
        node: str,
        rpc: RpcPort,
        open_stream: OpenStream,
        books: Books,
        now: Callable[[], float],
        sleep_until: Callable[[float], Awaitable[None]],
        latency_s: float,
        nursery: trio.Nursery,
    ) -> None:
        self._node = node
        self._rpc = rpc
        self._open_stream = open_stream
        self._books = books
        self._now = now
        self._sleep_until = sleep_until
        self._latency_s = latency_s
        self._nursery = nursery
        self._seats: dict[str, _Seat] = {}
        self._early: dict[str, list[tuple[str, Entered]]] = {}
        rpc.heed(ENTERED, Entered, self._on_entered)
        rpc.heed(IN_PLACE, InPlace, self._on_in_place)

    async def collective(
        self,
        ring: Ring,
        payload: Mapping[Endpoint, int],
        ready_s: float,
        amount: int,
        lane: VirtualLane,
    ) -> Exchanged:
        """This node's next exchange of ``ring``."""
        await trio.lowlevel.checkpoint_if_cancelled()
        hops = hops_of(ring, self._node, payload)
        seat = self._seat(ring)
        index = seat.entered
        seat.entered += 1
        exchange = self._exchange(seat, index)
        exchange.hops, exchange.lane = hops, lane
        entry = Entry(ready_s, amount, self._now())
        exchange.enter(self._node, entry)
        if not seat.others and not hops:
            self._finish(seat, index, self._node, ready_s)
        else:
            self._tell(seat, ENTERED, Entered(ring.name, index, entry.ready_s, entry.amount, entry.at_s))
            self._nursery.start_soon(self._run, seat, index, exchange)
        return await exchange.wait()

    async def wait_entered(self, ring: Ring) -> None:
        """Return once another member has entered an exchange that this node has not, and that news is due."""
        seat = self._seat(ring)
        while True:
            wanted = seat.entered + 1
            await seat.announced.wait(wanted)
            if seat.lost is not None:
                raise seat.lost()
            if seat.entered < wanted:
                await self._sleep_until(seat.open[wanted - 1].first_s + self._latency_s)
            if seat.entered < wanted:
                return

    def lose(self, node: str, error: EmulatorError) -> None:
        """``node`` is gone, and with it every ring that it is a member of."""
        for seat in self._seats.values():
            if node in seat.ring.nodes:
                self._lose_seat(seat, error)

    def _seat(self, ring: Ring) -> _Seat:
        seat = self._seats.get(ring.name)
        if seat is None:
            check_member(ring, self._node)
            seat = self._seats[ring.name] = _Seat(ring, self._node)
            # A member that never says anything is noticed by the end of its connection.
            for other in seat.others:
                self._rpc.reach(other)
            for peer, notice in self._early.pop(ring.name, ()):
                self._on_entered(peer, notice)
        elif seat.ring is not ring and seat.ring != ring:
            raise ValueError(f"ring {ring.name} has other members or hops than before")
        if seat.lost is not None:
            raise seat.lost()
        return seat

    @staticmethod
    def _exchange(seat: _Seat, index: int) -> _Open:
        exchange = seat.open.get(index)
        if exchange is None:
            exchange = seat.open[index] = _Open(seat.ring)
        return exchange

    def _tell(self, seat: _Seat, name: str, notice: msgspec.Struct) -> None:
        for other in seat.others:
            self._rpc.tell(other, name, notice)

    async def _run(self, seat: _Seat, index: int, exchange: _Open) -> None:
        """One exchange from this node's entry to the moment when its own bytes are in place."""
        try:
            # Opened before the barrier, so that the first exchange does not wait for connections.
            streams = [self._open(hop, exchange.lane) for hop in exchange.hops]
            try:
                await exchange.wait_complete()
                await self._sleep_until(exchange.begins_s(self._latency_s))
                exchange.late_s = self._now() - exchange.started_s
                over_s = exchange.started_s + await self._send(streams)
            finally:
                for stream in streams:
                    stream.detach()
        except EmulatorError as error:
            self._lose_seat(seat, error)
            return
        if seat.lost is None:
            self._tell(seat, IN_PLACE, InPlace(seat.ring.name, index, over_s))
            self._finish(seat, index, self._node, over_s)

    def _open(self, hop: Hop, lane: VirtualLane) -> PostedStream:
        whole = (Extent(0, hop.size_bytes),)
        target = Target(hop.src, hop.dst, SCRATCH_REGION, Transfer.COLLECTIVE, lane)
        return self._open_stream(target, Segment(whole, whole))

    async def _send(self, streams: Sequence[PostedStream]) -> float:
        """Send on all ports at once; how long the slowest took."""
        began_s = self._now()
        for stream in streams:
            stream.release(1)
        for stream in streams:
            await stream.wait_placed(1)
        return max((stream.placed_s(stream.placed) - began_s for stream in streams), default=0.0)

    def _on_entered(self, peer: str, notice: Entered) -> None:
        seat = self._seats.get(notice.ring)
        if seat is None:
            self._early.setdefault(notice.ring, []).append((peer, notice))
            return
        if seat.lost is not None:
            return
        with self._ending(seat):
            if notice.index != seat.calls.get(peer, -1) + 1:
                raise ProtocolViolation(f"{peer} enters exchange {notice.index} of ring {notice.ring} out of turn")
            seat.calls[peer] = notice.index
            self._exchange(seat, notice.index).enter(peer, Entry(notice.ready_s, notice.amount, notice.at_s))
        while seat.announced.value <= notice.index:
            seat.announced.bump()

    def _on_in_place(self, peer: str, notice: InPlace) -> None:
        seat = self._seats.get(notice.ring)
        if seat is None:
            raise ProtocolViolation(f"{peer} ends an exchange of ring {notice.ring}, which has none")
        if seat.lost is not None:
            return
        with self._ending(seat):
            if notice.index not in seat.open:
                raise ProtocolViolation(f"{peer} ends exchange {notice.index} of ring {notice.ring} out of turn")
            self._finish(seat, notice.index, peer, notice.over_s)

    @contextmanager
    def _ending(self, seat: _Seat) -> Iterator[None]:
        """A notice that cannot be ends the ring as well as the connection that brought it."""
        try:
            yield
        except ProtocolViolation as violation:
            self._lose_seat(seat, violation)
            raise

    def _finish(self, seat: _Seat, index: int, node: str, over_s: float) -> None:
        exchange = seat.open[index]
        if exchange.finish(node, over_s):
            del seat.open[index]
            result = exchange.exchanged()
            took_s = result.over_s - result.started_s
            size = largest(exchange.hops)
            self._books.count_exchange(seat.ring.name, exchange.lane, size, took_s, exchange.late_s)

    def _lose_seat(self, seat: _Seat, error: EmulatorError) -> None:
        if seat.lost is not None:
            return
        seat.lost = lost = partial(error_from_code, error.code, error.text, error.definite)
        seat.announced.fail(lost)
        for exchange in seat.open.values():
            exchange.fail(lost)
        seat.open.clear()
