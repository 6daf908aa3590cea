"""The accepting side of a queue pair over TCP: bytes go straight into registered regions, counts go back.

One task per connection, one buffer for all of them. Headers and small messages arrive in the buffer, many at a
time; the rest of a message that is not complete there is received in place, together with whatever follows it,
in one call. So nothing but the beginning of a header is ever left over, and no task holds the buffer while it
waits. Before it waits, it says how many messages are in place: one count for all that the last call brought.

Where a bus inside the node is crossed (``localbus``) a payload is taken a piece at a time, as its turn comes; what
is not taken fills the socket, and so holds back the sender.

No byte of a payload is placed before its whole header is checked against this node's regions. A violation is
told to the sender, logged here, and ends the connection.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import structlog
import trio

from ..errors import EmulatorError, PeerLost, ProtocolViolation, error_from_code
from ..extent import scatter
from .counter import Counter
from .interface import Endpoint, Marks, Region
from .localbus import Toll
from .meter import Books, PortMeter
from .sockets import close, receive_nowait, retransmits
from .wire import (
    Header,
    PairHello,
    decode_header,
    decode_hello,
    encode_ack,
    encode_violation,
)

__all__ = ["MarkTable", "ReceiveBuffer", "Reception"]

RECEIVE_BYTES = 256 * 1024
LAST_WORD_S = 1.0
LOWAT_BYTES = 4096
"""Fewer missing bytes than these are waited for as they come."""

_log = structlog.get_logger()


class TagMarks(Counter, Marks):
    """How many messages of one tag are in place, and who waits for more."""

    def __init__(self, table: MarkTable, tag: str) -> None:
        super().__init__()
        self._table = table
        self._tag = tag
        self.senders: set[object] = set()

    @property
    def arrived(self) -> int:
        return self.value

    def arrived_s(self, count: int) -> float:
        return self.reached_s(count)

    def forget(self) -> None:
        self._table.forget(self._tag)


class MarkTable:
    """The marks of a node by tag."""

    def __init__(self) -> None:
        self._tags: dict[str, TagMarks] = {}

    def get(self, tag: str) -> TagMarks:
        """The marks of ``tag``, made on first mention."""
        marks = self._tags.get(tag)
        if marks is None:
            marks = self._tags[tag] = TagMarks(self, tag)
        return marks

    def forget(self, tag: str) -> None:
        self._tags.pop(tag, None)

    def lose(self, sender: object, error: EmulatorError) -> None:
        """Fail the marks of every tag that ``sender`` has sent."""
        for marks in list(self._tags.values()):
            if sender in marks.senders:
                marks.fail(partial(error_from_code, error.code, error.text, error.definite))


class ReceiveBuffer:
    """What all connections of a node receive into. Nobody's bytes are in it while its task waits."""

    def __init__(self) -> None:
        self.array = np.empty(RECEIVE_BYTES, dtype=np.uint8)
        self.view = self.array.data

    def hold(self, size: int) -> None:
        """Make it at least ``size`` bytes large; a header can be larger than what is usual."""
        if self.view.nbytes < size:
            self.array = np.empty(2 * size, dtype=np.uint8)
            self.view = self.array.data


class Reception:
    """One accepted data connection.

    ``endpoints`` of ``node`` are those at whose address it came; ``address_of`` gives an endpoint's address, so
    that a hello can be held against where the connection comes from. ``costs`` says what a queue pair crosses on
    this side: its meters, and what it pays.
    """

    def __init__(
        self,
        sock: socket.socket,
        node: str,
        endpoints: Collection[Endpoint],
        address_of: Callable[[Endpoint], str],
        regions: Mapping[str, Region],
        marks: MarkTable,
        books: Books,
        costs: Callable[[PairHello], tuple[Sequence[PortMeter], Toll | None]],
        now: Callable[[], float],
        sleep_until: Callable[[float], Awaitable[None]],
        buffer: ReceiveBuffer,
    ) -> None:
        self._sock = sock
        self._buffer = buffer
        self._node = node
        self._endpoints = endpoints
        self._address_of = address_of
        self._regions = regions
        self._marks = marks
        self._books = books
        self._costs = costs
        self._now = now
        self._sleep_until = sleep_until
        self._toll: Toll | None = None
        self._piece_bytes = RECEIVE_BYTES
        self._scratch = np.empty(0, dtype=np.uint8)
        self._start = self._end = 0
        self._placed = self._told = 0
        self._placed_s = 0.0
        self._lowat = 1

    def retransmits(self) -> int:
        """Segments that TCP had to send again so far."""
        return retransmits(self._sock) if self._sock.fileno() >= 0 else 0

    async def run(self) -> tuple[PairHello | None, EmulatorError]:
        """Serve the connection to its end: whose it was, None if it never said, and why it ended."""
        hello: PairHello | None = None
        error: EmulatorError = PeerLost(f"{self._node}: this node's fabric is closed")
        try:
            hello = await self._hello()
            await self._serve(hello)
        except ProtocolViolation as violation:
            error = violation
            peer = hello.src.node if hello is not None else None
            _log.error("protocol_violation", node=self._node, peer=peer, reason=violation.text)
            await self._say_last(encode_violation(violation.text))
        except (OSError, EOFError) as reason:
            error = PeerLost(f"{hello.src.node if hello is not None else 'a peer'}: {reason}")
        finally:
            self._marks.lose(self, error)
            close(self._sock)
        return hello, error

    async def _hello(self) -> PairHello:
        while (found := decode_hello(self._buffer.view[: self._end], PairHello)) is None:
            await self._more()
        hello, self._start = found
        if hello.dst not in self._endpoints:
            raise ProtocolViolation(f"hello for {hello.dst} came to {', '.join(map(str, self._endpoints))}")
        peer = self._sock.getpeername()[0]
        try:
            expected = self._address_of(hello.src)
        except KeyError:
            raise ProtocolViolation(f"hello from {hello.src}, which the address plan does not have") from None
        if peer != expected:
            raise ProtocolViolation(f"hello from {hello.src} came from {peer}, expected {expected}")
        return hello

    async def _serve(self, hello: PairHello) -> NoReturn:
        src, dst = hello.src.node, hello.dst.node
        meters, self._toll = self._costs(hello)
        if self._toll is not None:
            self._piece_bytes = self._toll.piece_bytes
        while True:
            header = await self._header()
            region = self._checked(header)
            now, size = self._now(), header.payload_bytes
            for meter in meters:
                meter.begin(now)
                meter.depart(now, size)
            try:
                await self._place(header, region.memory, now)
            except BaseException:
                now = self._now()
                for meter in meters:
                    meter.drop(now, size)
                raise
            self._placed_s = now = self._now()
            for meter in meters:
                meter.end(now, size)
            self._books.count_received(header.transfer, src, dst, size)
            self._placed += 1
            if header.tag:
                marks = self._marks.get(header.tag)
                marks.senders.add(self)
                marks.bump(self._placed_s)

    async def _header(self) -> Header:
        while (header := decode_header(self._buffer.view, self._start, self._end)) is None:
            await self._more()
        self._start += header.length
        return header

    async def _more(self) -> None:
        """Receive behind what is left over."""
        left = self._left_over()
        await self._readable()
        self._put_back(left)
        free = self._buffer.view[self._end : self._end + self._piece_bytes]
        self._end += receive_nowait(self._sock, [free])

    async def _pause(self, due_s: float) -> None:
        """Leave the rest in the socket until ``due_s``."""
        left = self._left_over()
        await self._tell()
        await self._sleep_until(due_s)
        self._put_back(left)

    def _left_over(self) -> bytes:
        """What others may overwrite while this task waits."""
        return bytes(self._buffer.view[self._start : self._end])

    def _put_back(self, left: bytes) -> None:
        """Begin the buffer with ``left``, and have room behind it."""
        self._buffer.hold(len(left) + 1)
        self._start, self._end = 0, len(left)
        self._buffer.view[: len(left)] = left

    def _checked(self, header: Header) -> Region:
        """The region that the header names, if all of the scatter lies in it."""
        region = self._regions.get(header.region)
        if region is None:
            raise ProtocolViolation(f"no region {header.region!r} on {self._node}")
        for extent in header.extents:
            if extent.end > region.size_bytes:
                raise ProtocolViolation(
                    f"extent ends at {extent.end}, region {region.name!r} of {self._node}"
                    f" has {region.size_bytes} bytes"
                )
        return region

    async def _place(self, header: Header, memory: npt.NDArray[np.uint8], now_s: float) -> None:
        """Bring the payload to where the header says, no faster than it may."""
        size = header.payload_bytes
        if not size:
            return
        first = header.extents[0]
        in_place = len(header.extents) == 1 and first.contiguous
        held, paid, toll = self._end - self._start, size, self._toll
        if toll is not None:
            # What came with the header is here already, so that it is paid at once.
            paid = min(size, max(held, self._piece_bytes))
            due_s = toll.turn(paid, now_s)
            if due_s > now_s:
                await self._pause(due_s)
        if held >= size:
            payload = self._buffer.array[self._start : self._start + size]
            self._start += size
            if in_place:
                memory[first.offset : first.end] = payload
            else:
                scatter(memory, header.extents, payload)
            return
        if in_place:
            destination = memory.data[first.offset : first.end]
        else:
            if self._scratch.size < size:
                self._scratch = np.empty(size, dtype=np.uint8)
            destination = self._scratch.data[:size]
        destination[:held] = self._buffer.view[self._start : self._end]
        self._start = self._end = 0
        while held < size:
            if held == paid:
                assert toll is not None
                piece, now_s = min(size - paid, self._piece_bytes), self._now()
                paid += piece
                due_s = toll.turn(piece, now_s)
                if due_s > now_s:
                    await self._pause(due_s)
            behind = [self._buffer.view[: self._piece_bytes]] if paid == size else []
            self._wake_at(paid - held)
            await self._readable()
            held += receive_nowait(self._sock, [destination[held:paid], *behind])
        self._wake_at(1)
        self._end = held - size
        if not in_place:
            scatter(memory, header.extents, self._scratch[:size])

    def _wake_at(self, missing: int) -> None:
        """Let the kernel wake us when ``missing`` bytes are there, not at each of a slow link's packets.

        The kernel bounds it by half of the receive buffer, and wakes us too when the window is closing.
        """
        lowat = missing if missing >= LOWAT_BYTES else 1
        if lowat != self._lowat:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, lowat)
            self._lowat = lowat

    async def _readable(self) -> None:
        await self._tell()
        await trio.lowlevel.wait_readable(self._sock)

    async def _tell(self) -> None:
        """Say how many messages are in place, if that is news."""
        if self._told < self._placed:
            await self._say(encode_ack(self._placed, self._placed_s))
            self._told = self._placed

    async def _say(self, data: bytes) -> None:
        while data:
            try:
                data = data[self._sock.send(data) :]
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._sock)

    async def _say_last(self, data: bytes) -> None:
        """Tell a peer that may be gone or deaf."""
        with trio.move_on_after(LAST_WORD_S), contextlib.suppress(OSError):
            await self._say(data)
