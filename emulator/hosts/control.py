"""The words between the command line, a cluster's supervisor and its nodes: JSON objects, one a line.

A node obeys ``NodeOrder`` on its standard input and answers ``NodeEvent`` on its standard output; a supervisor
obeys ``Request`` on its control socket and answers ``Reply`` there. Both inputs are lifelines as well: their
end of file means that the other side is gone. No KV byte and no role's message ever goes this way. Records,
which are large, are files that these words name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import trio

from topology.counters import PortCounters

from ..config import ReplayConfig, RunConfig
from ..errors import EmulatorError, ProtocolViolation, error_from_code
from ..records import RequestRecord, RunRecords

__all__ = [
    "Close",
    "Closed",
    "Completed",
    "Describe",
    "Description",
    "Failed",
    "Lines",
    "Links",
    "LiveRun",
    "NodeEvent",
    "NodeOrder",
    "Open",
    "Opened",
    "Play",
    "Played",
    "Progress",
    "Ready",
    "Record",
    "Recorded",
    "Replay",
    "ReplayResult",
    "Reply",
    "Request",
    "Stage",
    "Start",
    "Started",
    "Up",
    "UpRequest",
    "encode",
    "read_file",
    "write_file",
]

T = TypeVar("T")

MAX_LINE_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 16


class _Order(msgspec.Struct, frozen=True, tag_field="do", tag=str.lower):
    pass


class _Event(msgspec.Struct, frozen=True, tag_field="event", tag=str.lower):
    pass


class Links(_Order, frozen=True):
    """The node's links are up."""


class Open(_Order, frozen=True):
    """Begin a run: open the fabric, with times counted from ``epoch_s`` of CLOCK_MONOTONIC."""

    run: RunConfig
    epoch_s: float
    directory: str


class Start(_Order, frozen=True):
    """Every node's fabric is open: take up your role."""


class Play(_Order, frozen=True):
    """To the client: replay the workload file; write what came of it to ``result``."""

    workload: str
    decisions: str | None
    result: str


class Record(_Order, frozen=True):
    """Write what you counted to ``result``; the run's work is over."""

    result: str


class Close(_Order, frozen=True):
    """Leave the run, finished or not."""


NodeOrder = Links | Open | Start | Play | Record | Close


class Ready(_Event, frozen=True):
    """The node is up and idle."""


class Opened(_Event, frozen=True):
    """The node's fabric listens."""


class Started(_Event, frozen=True):
    """The node's role is ready to serve."""


class Progress(_Event, frozen=True):
    """Requests settled so far, of all."""

    done: int
    total: int


class Alive(_Event, frozen=True):
    """The client's replay goes on, whether or not a request has ended."""


class Played(_Event, frozen=True):
    """The replay is over and its result written."""


class Recorded(_Event, frozen=True):
    """The node's record is written."""


class Closed(_Event, frozen=True):
    """The node is idle again."""


class Failed(_Event, frozen=True):
    """An error, as it crosses processes."""

    code: str
    text: str
    definite: bool = False

    @classmethod
    def of(cls, error: EmulatorError) -> Failed:
        return cls(error.code, error.text, error.definite)

    def error(self) -> EmulatorError:
        return error_from_code(self.code, self.text, self.definite)


News = Progress | Alive
NodeEvent = Ready | Opened | Started | Progress | Alive | Played | Recorded | Closed | Failed


class ReplayResult(msgspec.Struct, frozen=True):
    """File of the client's node when a replay is over: the clock's start, its end, every request."""

    t0_s: float
    ended_s: float
    requests: tuple[RequestRecord, ...]


class LiveRun(msgspec.Struct, frozen=True):
    """File of the supervisor when a run is over: the processes' records and the kernel's own account.

    ``before`` and ``after`` are the kernel's counters at the run's start and end; ``network_faults`` are the
    ways in which the network differed from what was asked for when it was read back at the end.
    """

    records: RunRecords
    before: tuple[PortCounters, ...]
    after: tuple[PortCounters, ...]
    network_faults: tuple[str, ...]


def write_file(path: Path, value: msgspec.Struct | bytes) -> None:
    """Keep a value as msgpack, or bytes as they are. EmulatorError with the path and reason where that fails."""
    try:
        path.write_bytes(value if isinstance(value, bytes) else msgspec.msgpack.encode(value))
    except OSError as error:
        raise EmulatorError(f"{path}: cannot be written: {error.strerror}") from None


def read_file(path: Path, kind: type[T]) -> T:
    """The value that ``write_file`` kept."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise EmulatorError(f"{path}: cannot be read: {error}") from None


class UpRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The first line a new supervisor reads: all it needs to bring a cluster up, files already read."""

    cluster: str
    root: str
    title: str
    run: RunConfig


class Stage(_Event, frozen=True):
    """What the supervisor is doing now."""

    text: str


class Up(_Event, frozen=True):
    """Every node said ready. Seconds since the supervisor began."""

    supervisor: int
    nodes: tuple[str, ...]
    network_s: float
    total_s: float


class Describe(_Order, frozen=True):
    """Ask for the cluster's configuration."""


class Description(_Event, frozen=True):
    """The cluster's own name, the topology's as the user gave it, and what every run on it starts from."""

    cluster: str
    title: str
    run: RunConfig


class Replay(_Order, frozen=True):
    """Replay a workload (msgpack, see ``emulator.workload``), with or without recorded decisions (msgpack).

    The two follow the line as they are, this many bytes long; 0: no decisions.
    """

    replay: ReplayConfig
    workload_bytes: int
    decisions_bytes: int = 0


class Completed(_Event, frozen=True):
    """The run is over; ``result`` is a msgpack file of ``LiveRun`` that goes away with this connection."""

    result: str


Request = Describe | Replay
Reply = Stage | Up | Description | Progress | Completed | Failed


def encode(message: msgspec.Struct) -> bytes:
    """One line."""
    return msgspec.json.encode(message) + b"\n"


class Lines(Generic[T]):
    """The messages of a byte stream, in order; ends with the stream. ``kind`` is one of the unions above.

    ProtocolViolation on a line that is none of them or has no end in 16 MiB.
    """

    def __init__(self, stream: trio.abc.ReceiveStream, kind: object) -> None:
        self._stream = stream
        self._decoder = msgspec.json.Decoder(kind)
        self._buffer = bytearray()

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def take(self, count: int) -> bytes:
        """The next ``count`` bytes, which are no line. ProtocolViolation if the stream ends before."""
        while len(self._buffer) < count:
            chunk = await self._stream.receive_some(_CHUNK_BYTES)
            if not chunk:
                raise ProtocolViolation(f"the stream ended after {len(self._buffer)} of {count} bytes")
            self._buffer += chunk
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken

    async def __anext__(self) -> T:
        seen = 0
        while (end := self._buffer.find(b"\n", seen)) < 0:
            seen = len(self._buffer)
            if seen > MAX_LINE_BYTES:
                raise ProtocolViolation(f"a control line of more than {MAX_LINE_BYTES} bytes")
            chunk = await self._stream.receive_some(_CHUNK_BYTES)
            if not chunk:
                raise StopAsyncIteration
            self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            message: T = self._decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ProtocolViolation(f"control line {line[:80]!r}: {error}") from None
        return message
