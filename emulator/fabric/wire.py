"""What the TCP fabric puts on the wire: hellos, message headers, feedback and RPC frames.

Pure framing, no I/O. Two kinds of connection exist.

A *data* connection is one queue pair. The opener sends a hello, then messages: a header (``encode_header``)
followed by its payload, nothing in between. The acceptor answers with feedback only: cumulative counts of the
messages in place and when the last of them was, or one violation, after which it closes.

An *RPC* connection joins a calling node to a called one. The opener sends a hello, then ``Call`` frames; the
acceptor sends ``Answer`` frames. A frame is a 32-bit length and that many bytes of MessagePack.

Decoders look at a buffer that holds a prefix of the byte stream. They return None while what they look for
is incomplete, and raise ProtocolViolation for bytes that no peer of ours would send. Integers are big-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from ..errors import ProtocolViolation
from ..extent import Extent, total_bytes
from .interface import Endpoint, Transfer, VirtualLane

__all__ = [
    "FRAME_PREFIX_BYTES",
    "MAX_EXTENTS",
    "MAX_FRAME_BYTES",
    "NOTICE_ID",
    "Answer",
    "Call",
    "Failure",
    "Feedback",
    "Header",
    "PairHello",
    "RpcHello",
    "decode_feedback",
    "decode_frame",
    "decode_header",
    "decode_hello",
    "encode_ack",
    "encode_frame",
    "encode_header",
    "encode_hello",
    "encode_violation",
    "frame_size",
]

MAX_EXTENTS = 65_536
"""Extents a header may carry: 2 MiB of header, a megatoken context at 16 scattered tokens an extent."""

MAX_FRAME_BYTES = 1 << 26
"""Largest RPC frame; a batched block write is some megabytes."""

FRAME_PREFIX_BYTES = 4
NOTICE_ID = -1
"""The id of a call that wants no answer."""

MAX_HELLO_BYTES = 4096
MAX_TEXT_BYTES = 65_535

_HELLO = struct.Struct("!4sI")
_HELLO_MAGIC = b"DPF1"
_FIXED = struct.Struct("!BBHHIQ")
_HEADER_MAGIC = 0xD7
_EXTENT = struct.Struct("!QQQQ")
_FEEDBACK = struct.Struct("!BQ")
_ACKNOWLEDGED = struct.Struct("!BQd")
_ACK, _VIOLATION = 1, 2
_LENGTH = struct.Struct("!I")

_TRANSFERS = {int(t): t for t in Transfer}

H = TypeVar("H", bound=msgspec.Struct)
Buffer = bytes | bytearray | memoryview


class PairHello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Opens a data connection: which queue pair it is."""

    src: Endpoint
    dst: Endpoint
    lane: VirtualLane


class RpcHello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Opens an RPC connection: who calls whom."""

    src: str
    dst: str


class Header(msgspec.Struct, frozen=True):
    """A decoded message header. ``length`` is its own size; ``payload_bytes`` follow it."""

    transfer: Transfer
    region: str
    tag: str
    extents: tuple[Extent, ...]
    payload_bytes: int
    length: int


class Feedback(msgspec.Struct, frozen=True):
    """What the acceptor of a data connection says: ``placed`` messages in all, or why it gives up.

    ``at_s``: the model time at which the last of them came into place.
    """

    placed: int = 0
    at_s: float = 0.0
    violation: str | None = None


class Call(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A request, sent at model time ``stamp_s``; ``body`` is the method's request Struct."""

    id: int
    method: str
    stamp_s: float
    body: msgspec.Raw


class Failure(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An error on its way to the caller; ``errors.error_from_code`` rebuilds it."""

    code: str
    text: str
    definite: bool


class Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The reply to call ``id``, sent at model time ``stamp_s``: a failure, or the reply Struct as ``body``."""

    id: int
    stamp_s: float
    failure: Failure | None
    body: msgspec.Raw


def encode_hello(hello: PairHello | RpcHello) -> bytes:
    """The opening bytes of a connection."""
    body = msgspec.msgpack.encode(hello)
    return _HELLO.pack(_HELLO_MAGIC, len(body)) + body


def decode_hello(buffer: Buffer, kind: type[H]) -> tuple[H, int] | None:
    """The hello at the start of ``buffer`` and its length."""
    if not _HELLO_MAGIC.startswith(bytes(buffer[:4])):
        raise ProtocolViolation(f"connection opens with {bytes(buffer[:4])!r}, expected {_HELLO_MAGIC!r}")
    if len(buffer) < _HELLO.size:
        return None
    _, size = _HELLO.unpack_from(buffer)
    if size > MAX_HELLO_BYTES:
        raise ProtocolViolation(f"hello of {size} bytes, expected at most {MAX_HELLO_BYTES}")
    end = _HELLO.size + size
    if len(buffer) < end:
        return None
    try:
        return msgspec.msgpack.decode(buffer[_HELLO.size : end], type=kind), end
    except msgspec.MsgspecError as error:
        raise ProtocolViolation(f"hello is no {kind.__name__}: {error}") from None


def encode_header(
    transfer: Transfer, region: bytes, tag: bytes, extents: Sequence[Extent], payload_bytes: int
) -> bytes:
    """The header of one message; ``region`` and ``tag`` are UTF-8, ``payload_bytes`` the extents' total.

    ValueError when a name or the list is longer than the wire allows.
    """
    if len(region) > MAX_TEXT_BYTES or len(tag) > MAX_TEXT_BYTES:
        raise ValueError(f"region and tag may have {MAX_TEXT_BYTES} bytes each, got {len(region)} and {len(tag)}")
    if len(extents) > MAX_EXTENTS:
        raise ValueError(f"a message has at most {MAX_EXTENTS} extents, got {len(extents)}")
    fixed = _FIXED.pack(_HEADER_MAGIC, transfer, len(region), len(tag), len(extents), payload_bytes)
    packed = [_EXTENT.pack(e.offset, e.size, e.count, e.stride) for e in extents]
    return b"".join((fixed, region, tag, *packed))


def decode_header(buffer: memoryview, start: int, end: int) -> Header | None:
    """The header at ``start`` of ``buffer``, of which bytes up to ``end`` are there."""
    if end - start < _FIXED.size:
        if end > start and buffer[start] != _HEADER_MAGIC:
            raise ProtocolViolation(f"message opens with byte {buffer[start]:#x}, expected {_HEADER_MAGIC:#x}")
        return None
    magic, kind, name_size, tag_size, count, payload = _FIXED.unpack_from(buffer, start)
    transfer = _TRANSFERS.get(kind)
    if magic != _HEADER_MAGIC or transfer is None:
        raise ProtocolViolation(
            f"message opens with bytes {magic:#x} {kind:#x}, expected {_HEADER_MAGIC:#x} and a transfer"
        )
    if count > MAX_EXTENTS:
        raise ProtocolViolation(f"message of {count} extents, expected at most {MAX_EXTENTS}")
    name_at = start + _FIXED.size
    tag_at = name_at + name_size
    extents_at = tag_at + tag_size
    stop = extents_at + count * _EXTENT.size
    if stop > end:
        return None
    try:
        region, tag = str(buffer[name_at:tag_at], "utf-8"), str(buffer[tag_at:extents_at], "utf-8")
        extents = tuple([Extent(*fields) for fields in _EXTENT.iter_unpack(buffer[extents_at:stop])])
    except ValueError as error:
        raise ProtocolViolation(f"message header: {error}") from None
    if total_bytes(extents) != payload:
        raise ProtocolViolation(f"payload of {payload} bytes for a scatter of {total_bytes(extents)}")
    return Header(transfer, region, tag, extents, payload, stop - start)


def encode_ack(placed: int, at_s: float) -> bytes:
    """``placed`` messages in all are in place on this connection, the last since model time ``at_s``."""
    return _ACKNOWLEDGED.pack(_ACK, placed, at_s)


def encode_violation(text: str) -> bytes:
    """Why the acceptor gives the connection up; the last thing it says."""
    body = text.encode()[:MAX_TEXT_BYTES]
    return _FEEDBACK.pack(_VIOLATION, len(body)) + body


def decode_feedback(buffer: Buffer) -> tuple[Feedback, int] | None:
    """The feedback at the start of ``buffer`` and its length."""
    if len(buffer) < _FEEDBACK.size:
        return None
    kind, value = _FEEDBACK.unpack_from(buffer)
    if kind == _ACK:
        if len(buffer) < _ACKNOWLEDGED.size:
            return None
        return Feedback(placed=value, at_s=_ACKNOWLEDGED.unpack_from(buffer)[2]), _ACKNOWLEDGED.size
    if kind != _VIOLATION or value > MAX_TEXT_BYTES:
        raise ProtocolViolation(f"feedback of kind {kind} with {value}, expected a count or a violation")
    end = _FEEDBACK.size + value
    if len(buffer) < end:
        return None
    return Feedback(violation=str(buffer[_FEEDBACK.size : end], "utf-8", "replace")), end


def encode_frame(message: Call | Answer) -> list[bytes]:
    """An RPC frame as the buffers to send."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"RPC frame of {len(body)} bytes, at most {MAX_FRAME_BYTES} are allowed")
    return [_LENGTH.pack(len(body)), body]


def frame_size(prefix: Buffer) -> int:
    """Bytes of the body that follows a frame's length ``prefix`` (4 bytes)."""
    (size,) = _LENGTH.unpack(prefix)
    if not 0 < size <= MAX_FRAME_BYTES:
        raise ProtocolViolation(f"RPC frame of {size} bytes, expected 1 to {MAX_FRAME_BYTES}")
    return int(size)


def decode_frame(body: Buffer, kind: type[H]) -> H:
    """The Call or Answer of a frame's ``body``."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolViolation(f"RPC frame is no {kind.__name__}: {error}") from None
