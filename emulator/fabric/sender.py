"""The posting side of a queue pair over TCP: streams of messages, one connection, completions by count.

Theory of operation. A message is *queued* when released, *begun* when the connection's outbox takes it, and
*placed* when the receiver's cumulative count reaches it. What is queued can be dropped; what is begun is sent
to its end, whoever has lost interest, because half a message would leave the connection unusable. Memory is
therefore in use from begun to placed, and closing a stream waits for that.

Where a bus inside the node is crossed (``localbus``) the outbox is given a piece at a time, as its turn comes;
a message has begun with its first piece, and what waits for a turn can be dropped.

All messages take their turn in the order of their release. A pair that broke stays broken: everything on it
fails at once, and whoever owns the pairs opens a new one on the next use.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import numpy.typing as npt
import trio

from ..errors import EmulatorError, PeerLost, ProtocolViolation, error_from_code
from ..extent import Extent, gather
from .counter import Counter, closed
from .interface import Region, Segment, Target, WriteStream
from .localbus import Gate, Toll
from .meter import Books, PortMeter
from .sockets import SILENCE_S, Buffer, Outbox, after, close, retransmits
from .wire import Feedback, PairHello, decode_feedback, encode_header, encode_hello

__all__ = ["PostedStream", "QueuePair"]

BATCH_BYTES = 64 * 1024
"""Queued messages go out together up to this size: what one call would hand to the kernel anyway."""

LONG_RUN_BYTES = 4096
"""Mean run from which sending in place costs less than copying the runs together first."""

FEEDBACK_BYTES = 4096


class _Message:
    """One released segment on its way."""

    __slots__ = ("extents", "header", "size_bytes", "stream")

    def __init__(self, stream: PostedStream, segment: Segment) -> None:
        self.stream = stream
        self.extents = segment.local
        self.size_bytes = size = segment.size_bytes
        self.header = encode_header(stream.target.transfer, stream.region, stream.tag, segment.remote, size)


class QueuePair:
    """The queue pair (src, dst, lane) as its source node holds it. ``run`` must be running in a task.

    ``meters`` are of what it crosses on its side, and ``toll`` what it pays there. ``connect`` opens its socket;
    ``on_end`` is told once, with the error, when the pair broke; ``call_at`` calls at a model time.
    """

    def __init__(
        self,
        hello: PairHello,
        connect: Callable[[], Awaitable[socket.socket]],
        books: Books,
        meters: Sequence[PortMeter],
        toll: Toll | None,
        now: Callable[[], float],
        on_end: Callable[[QueuePair, EmulatorError], None],
        call_at: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self.hello = hello
        self._connect = connect
        self._books = books
        self._meters = tuple(meters)
        self._now = now
        self._on_end = on_end
        self._call_at = call_at
        self._queue: deque[_Message] = deque()
        self._begun: deque[_Message] = deque()
        self._placed = 0
        self._streams: dict[PostedStream, None] = {}
        self._error: EmulatorError | None = None
        self._outbox = Outbox(self._refill)
        self._gate = None if toll is None else Gate(toll, now, call_at, self._outbox.push)
        self._rest: list[Buffer] = []
        self._rest_bytes = 0
        self._scope = trio.CancelScope()
        self._sock: socket.socket | None = None

    def __str__(self) -> str:
        src, dst = self.hello.src, self.hello.dst
        return f"{src.node}/{src.nic}/{src.side} -> {dst.node}/{dst.nic}/{dst.side} on {self.hello.lane.name}"

    @property
    def progress(self) -> tuple[int, int]:
        """Changes whenever the pair gets anything done: bytes handed to the kernel, messages placed."""
        return self._outbox.sent_bytes, self._placed

    def attach(self, stream: PostedStream) -> None:
        """``stream`` wants to know when the pair breaks, until ``detach``."""
        self._streams[stream] = None

    def detach(self, stream: PostedStream) -> None:
        self._streams.pop(stream, None)

    def later(self, after_s: float, not_before_s: float, act: Callable[[], None]) -> float:
        """Call ``act`` in ``after_s`` seconds, though not before a time; when that is."""
        at_s = max(self._now() + after_s, not_before_s)
        self._call_at(at_s, act)
        return at_s

    def post(self, stream: PostedStream, segments: Sequence[Segment]) -> None:
        """Queue the next segments of ``stream``, in order."""
        messages = [_Message(stream, segment) for segment in segments]
        now = self._now()
        for meter in self._meters:
            for _ in messages:
                meter.begin(now)
        self._queue.extend(messages)
        self._outbox.push()

    def drop(self, stream: PostedStream) -> None:
        """Forget what ``stream`` queued and what is not begun."""
        now = self._now()
        kept = deque(message for message in self._queue if message.stream is not stream)
        for meter in self._meters:
            for _ in range(len(self._queue) - len(kept)):
                meter.drop(now)
        self._queue = kept

    def fail(self, error: EmulatorError) -> None:
        """The pair is broken: fail all that is on it and stop. Later calls change nothing."""
        if self._error is not None:
            return
        self._error = error
        now = self._now()
        for meter in self._meters:
            for message in self._begun:
                meter.drop(now, message.size_bytes)
            for _ in self._queue:
                meter.drop(now)
        self._begun.clear()
        self._queue.clear()
        self._rest, self._rest_bytes = [], 0
        for stream in self._streams:
            stream.on_failed(error)
        self._streams.clear()
        self._scope.cancel()
        self._on_end(self, error)

    def retransmits(self) -> int:
        """Segments that TCP had to send again so far."""
        return retransmits(self._sock) if self._sock is not None and self._sock.fileno() >= 0 else 0

    async def run(self) -> None:
        """Connect and serve the pair until it breaks or is cancelled."""
        error: EmulatorError = PeerLost(f"{self}: this node's fabric is closed")
        try:
            with self._scope:
                try:
                    self._sock = await self._connect()
                except OSError as reason:
                    error = PeerLost(f"{self}: not reachable: {reason.strerror or reason}", definite=True)
                    return
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._outbox.run, self._sock, encode_hello(self.hello))
                    error = await self._read_feedback(self._sock)
                    nursery.cancel_scope.cancel()
        finally:
            self.fail(error)
            if self._sock is not None:
                close(self._sock)

    def _refill(self) -> list[Buffer]:
        buffers: list[Buffer] = []
        size = 0
        gate = self._gate
        while size < BATCH_BYTES:
            if gate is not None and self._rest:
                piece = min(self._rest_bytes, gate.piece_bytes)
                if not gate.admit(piece):
                    break
                size += piece
                buffers += self._cut(self._rest, self._rest_bytes, piece)
                continue
            if not self._queue:
                break
            message = self._queue[0]
            piece = whole = message.size_bytes
            if gate is not None:
                if whole > gate.piece_bytes:
                    piece = gate.piece_bytes
                if not gate.admit(piece):
                    break
            self._queue.popleft()
            message.stream.on_begun()
            self._begun.append(message)
            now = self._now()
            for meter in self._meters:
                meter.depart(now, whole)
            buffers.append(message.header)
            payload = _payload(message.stream.memory, message.extents, whole)
            buffers.extend(payload if piece == whole else self._cut(payload, whole, piece))
            size += piece
        return buffers

    def _cut(self, payload: list[Buffer], size_bytes: int, piece: int) -> list[Buffer]:
        """The first ``piece`` of ``payload``; the rest is kept for the next turns."""
        self._rest, self._rest_bytes = after(payload, piece), size_bytes - piece
        left = piece
        head: list[Buffer] = []
        for buffer in payload:
            head.append(memoryview(buffer)[:left])
            left -= len(head[-1])
            if not left:
                break
        return head

    async def _read_feedback(self, sock: socket.socket) -> EmulatorError:
        """Complete messages until the connection ends; why it did."""
        pending = b""
        while True:
            await trio.lowlevel.wait_readable(sock)
            try:
                data = sock.recv(FEEDBACK_BYTES)
            except BlockingIOError:
                continue
            except OSError as error:
                return PeerLost(f"{self}: {error.strerror or error}")
            if not data:
                return PeerLost(f"{self}: the peer closed the connection")
            pending += data
            try:
                while (found := decode_feedback(pending)) is not None:
                    feedback, length = found
                    pending = pending[length:]
                    if feedback.violation is not None:
                        return ProtocolViolation(f"{self}: refused by the receiver: {feedback.violation}")
                    self._complete(feedback)
            except ProtocolViolation as error:
                return error

    def _complete(self, feedback: Feedback) -> None:
        placed = feedback.placed
        count = placed - self._placed
        if not 0 <= count <= len(self._begun):
            raise ProtocolViolation(
                f"{self}: receiver counts {placed} messages,"
                f" {self._placed} to {self._placed + len(self._begun)} expected"
            )
        self._placed = placed
        now, src, dst = self._now(), self.hello.src.node, self.hello.dst.node
        for _ in range(count):
            message = self._begun.popleft()
            for meter in self._meters:
                meter.end(now, message.size_bytes)
            self._books.count_sent(message.stream.target.transfer, src, dst, message.size_bytes)
            message.stream.on_placed(feedback.at_s)


class PostedStream(WriteStream):
    """A stream on a TCP queue pair; a single write is a stream of one segment."""

    def __init__(
        self, pair: QueuePair, target: Target, local: Region, segments: Sequence[Segment], tag: str
    ) -> None:
        for segment in segments:
            for extent in segment.local:
                if extent.end > local.size_bytes:
                    raise ValueError(
                        f"extent ends at {extent.end}, region {local.name} has {local.size_bytes} bytes"
                    )
        self.target = target
        self.memory: npt.NDArray[np.uint8] = local.memory
        self._pair = pair
        self._segments = segments
        self.region, self.tag = target.region.encode(), tag.encode()
        self._released = self._posted = self._begun = 0
        self._deferred: deque[int] = deque()
        self._due_s = 0.0
        self._placed = Counter()
        self._closed = self._lost = False
        pair.attach(self)

    def release(self, upto: int, *, after_s: float = 0.0) -> None:
        if self._closed:
            raise ValueError("the stream is closed")
        if not self._released <= upto <= len(self._segments):
            raise ValueError(f"release({upto}): expected {self._released} to {len(self._segments)}")
        self._released = upto
        if after_s <= 0 and not self._deferred:
            self._post(upto)
        else:
            self._deferred.append(upto)
            self._due_s = self._pair.later(after_s, self._due_s, self._ring)

    def _ring(self) -> None:
        """What was deferred longest is due."""
        if self._deferred:
            self._post(self._deferred.popleft())

    def _post(self, upto: int) -> None:
        fresh = self._segments[self._posted : upto]
        self._posted = upto
        if fresh and not self._lost:
            self._pair.post(self, fresh)

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
        if self._posted > self._begun:
            self._pair.drop(self)
        with trio.CancelScope(shield=True):
            while self.placed < self._begun and not self._lost:
                before = self._pair.progress
                with trio.move_on_after(SILENCE_S), suppress(EmulatorError):
                    await self._placed.wait(self._begun)
                if self.placed < self._begun and self._pair.progress == before:
                    self._pair.fail(PeerLost(f"{self._pair}: nothing moved for {SILENCE_S} s"))
            self.detach()
            self._placed.fail(closed)
            await trio.lowlevel.checkpoint()

    def detach(self) -> None:
        """Nothing of the stream is on its pair, nor will be."""
        self._pair.detach(self)

    def on_begun(self) -> None:
        """The next queued message is being sent."""
        self._begun += 1

    def on_placed(self, at_s: float) -> None:
        """The next begun message is in place, since ``at_s`` as the receiver says."""
        self._placed.bump(at_s)

    def on_failed(self, error: EmulatorError) -> None:
        """The pair broke. What is not begun surely did not happen."""
        self._lost = True
        definite = error.definite or self._begun == self.placed
        self._placed.fail(partial(error_from_code, error.code, error.text, definite))


def _payload(memory: npt.NDArray[np.uint8], extents: Sequence[Extent], size_bytes: int) -> list[Buffer]:
    """The gather list of a message: in place where runs are long, else copied together; nothing for no bytes."""
    if not extents:
        return []
    if len(extents) == 1 and extents[0].contiguous:
        return [memory.data[extents[0].offset : extents[0].end]]
    if size_bytes < LONG_RUN_BYTES * sum([e.count for e in extents]):
        return [gather(memory, extents).data]
    view = memory.data
    starts = ((e.offset + run * e.stride, e.size) for e in extents for run in range(e.count))
    return [view[at : at + size] for at, size in starts]
