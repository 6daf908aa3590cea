"""Rtnetlink: many messages in one system call, every one acknowledged; dumps; attributes.

A socket belongs to the namespace in which it was opened and keeps it alive. The kernel works a batch off
inside ``sendmsg``, message by message, and goes on after one that fails. Written for volume: a cluster of
56 links is some 6,000 messages to set up and 230 dumps to read back. Knows no kernel object: see ``rtnl``.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from .namespaces import inside

__all__ = [
    "CREATE",
    "REPLACE",
    "NetlinkError",
    "Request",
    "RouteSocket",
    "attribute",
    "integer",
    "nested",
    "parse_attributes",
    "text_attribute",
]

CREATE = 0x400 | 0x200
"""NLM_F_CREATE and NLM_F_EXCL: make the object, which must not be there yet."""
REPLACE = 0x400 | 0x100
"""NLM_F_CREATE and NLM_F_REPLACE: make the object, or change the one that is there."""

_NLM_F_REQUEST = 0x1
_NLM_F_ACK = 0x4
_NLM_F_DUMP = 0x300
_NLM_F_DUMP_INTR = 0x10
_NLM_F_CAPPED = 0x100
_NLM_F_ACK_TLVS = 0x200
_NLMSG_ERROR = 0x2
_NLMSG_DONE = 0x3
_NLA_F_NESTED = 0x8000
_NLA_TYPE_MASK = 0x3FFF
_SOL_NETLINK = 270
_NETLINK_CAP_ACK = 10
_NETLINK_EXT_ACK = 11
_NLMSGERR_ATTR_MSG = 1

_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_ERROR = struct.Struct("=i")

# A batch's acknowledgements wait in the receive buffer until the whole batch is worked off, about 1 KiB each
# as the kernel accounts them; its default of 208 KiB must hold them all.
_BATCH_MESSAGES = 100
_BATCH_BYTES = 64 << 10
_RECEIVE_BYTES = 128 << 10
_DUMP_ATTEMPTS = 8


class Request(msgspec.Struct, frozen=True):
    """One message to the kernel: its type and flags, its body, and what to call it in an error.

    ``feature`` is the kernel's build option without which it does not know this kind of object.
    """

    type: int
    flags: int
    body: bytes
    what: str
    feature: str = ""


class NetlinkError(OSError):
    """The kernel refused a message. ``request`` is that message, ``detail`` the kernel's own words or ''."""

    def __init__(self, code: int, request: Request, detail: str) -> None:
        super().__init__(code, os.strerror(code))
        self.code = code
        self.request = request
        self.detail = detail


class RouteSocket:
    """A blocking rtnetlink socket inside the namespace behind ``netns_fd``. Main thread only."""

    def __init__(self, netns_fd: int) -> None:
        with inside(netns_fd):
            self._socket = socket.socket(
                socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE
            )
        self._sequence = 0
        try:
            self._socket.bind((0, 0))
            for option in (_NETLINK_CAP_ACK, _NETLINK_EXT_ACK):
                self._socket.setsockopt(_SOL_NETLINK, option, 1)
        except OSError:
            self._socket.close()
            raise

    def close(self) -> None:
        self._socket.close()

    def apply(self, requests: Iterable[Request]) -> None:
        """Send all in order. NetlinkError names the first that failed; those sent with it were tried too."""
        batch: list[Request] = []
        size = 0
        for request in requests:
            batch.append(request)
            size += len(request.body)
            if len(batch) == _BATCH_MESSAGES or size >= _BATCH_BYTES:
                self._apply_batch(batch)
                batch, size = [], 0
        if batch:
            self._apply_batch(batch)

    def dump(self, kind: int, body: bytes) -> list[bytes]:
        """The bodies of all objects that a dump request of type ``kind`` yields.

        Repeated when the kernel says that something changed under it; OSError if that never ends.
        """
        for _ in range(_DUMP_ATTEMPTS):
            bodies = self._dump_once(kind, body)
            if bodies is not None:
                return bodies
        raise OSError(f"netlink dump of type {kind} was interrupted {_DUMP_ATTEMPTS} times")

    def _apply_batch(self, batch: Sequence[Request]) -> None:
        first = self._sequence + 1
        out = bytearray()
        for request in batch:
            self._sequence += 1
            out += _message(
                request.type, request.flags | _NLM_F_REQUEST | _NLM_F_ACK, self._sequence, request.body
            )
        self._socket.send(out)
        failed: NetlinkError | None = None
        awaited = set(range(first, self._sequence + 1))
        while awaited:
            for kind, flags, sequence, body in self._receive():
                if kind != _NLMSG_ERROR or sequence not in awaited:
                    continue
                awaited.remove(sequence)
                (code,) = _ERROR.unpack_from(body)
                if code and failed is None:
                    failed = NetlinkError(-code, batch[sequence - first], _detail(flags, body))
        if failed is not None:
            raise failed

    def _dump_once(self, kind: int, body: bytes) -> list[bytes] | None:
        self._sequence += 1
        self._socket.send(_message(kind, _NLM_F_REQUEST | _NLM_F_DUMP, self._sequence, body))
        bodies: list[bytes] = []
        interrupted = False
        while True:
            for got, flags, sequence, payload in self._receive():
                if sequence != self._sequence:
                    continue
                interrupted = interrupted or bool(flags & _NLM_F_DUMP_INTR)
                if got == _NLMSG_ERROR:
                    (code,) = _ERROR.unpack_from(payload)
                    raise NetlinkError(-code, Request(kind, _NLM_F_DUMP, body, "dump"), _detail(flags, payload))
                if got == _NLMSG_DONE:
                    return None if interrupted else bodies
                bodies.append(payload)

    def _receive(self) -> Iterator[tuple[int, int, int, bytes]]:
        data = self._socket.recv(_RECEIVE_BYTES)
        at = 0
        while at + _HEADER.size <= len(data):
            length, kind, flags, sequence, _ = _HEADER.unpack_from(data, at)
            yield kind, flags, sequence, data[at + _HEADER.size : at + length]
            at += _aligned(length)


def attribute(kind: int, value: bytes) -> bytes:
    """One attribute, padded to four bytes."""
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + bytes(-len(value) % 4)


def text_attribute(kind: int, value: str) -> bytes:
    """A NUL-terminated string attribute."""
    return attribute(kind, value.encode() + b"\0")


def nested(kind: int, *attributes: bytes) -> bytes:
    """An attribute that holds attributes."""
    return attribute(kind | _NLA_F_NESTED, b"".join(attributes))


def parse_attributes(data: bytes, at: int = 0) -> dict[int, bytes]:
    """The attributes in ``data`` from offset ``at``, by type; of repeated ones the last."""
    found: dict[int, bytes] = {}
    end = len(data)
    while at + _ATTRIBUTE.size <= end:
        length, kind = _ATTRIBUTE.unpack_from(data, at)
        if length < _ATTRIBUTE.size:
            break
        found[kind & _NLA_TYPE_MASK] = data[at + _ATTRIBUTE.size : at + length]
        at += _aligned(length)
    return found


def integer(found: Mapping[int, bytes], kind: int) -> int:
    """An unsigned attribute of any width, 0 where it is absent."""
    return int.from_bytes(found.get(kind, b""), sys.byteorder)


def _message(kind: int, flags: int, sequence: int, body: bytes) -> bytes:
    return _HEADER.pack(_HEADER.size + len(body), kind, flags, sequence, 0) + body + bytes(-len(body) % 4)


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def _detail(flags: int, body: bytes) -> str:
    """The kernel's own words about an error, if it gave any."""
    if not flags & _NLM_F_ACK_TLVS:
        return ""
    inner = _HEADER.size
    if not flags & _NLM_F_CAPPED:
        inner = _aligned(int.from_bytes(body[4:8], sys.byteorder))
    text = parse_attributes(body, _ERROR.size + inner).get(_NLMSGERR_ATTR_MSG, b"")
    return text.rstrip(b"\0").decode("utf-8", "replace")
