"""Rtnetlink: many messages in one system call, every one acknowledged; dumps.

What a message looks like is pyroute2's business, and this is the only module that imports it: ``message`` and
``read`` put its message classes to work, by the names of types, fields and attributes. Sending is done here,
since a cluster of 56 links is some 6,000 messages: the kernel works a batch off inside ``sendmsg``, message by
message, and goes on after one that fails.

A socket belongs to the namespace in which it was opened and keeps it alive. Knows no kernel object: see ``rtnl``.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from pyroute2 import netlink as library
from pyroute2.netlink.rtnl import RTM_NAMES
from pyroute2.netlink.rtnl.marshal import MarshalRtnl

from .namespaces import inside

__all__ = [
    "CHANGE",
    "CREATE",
    "REPLACE",
    "NetlinkError",
    "Request",
    "RouteSocket",
    "bare",
    "index_of",
    "message",
    "nest",
    "read",
    "with_index",
]

CHANGE: int = library.NLM_F_REQUEST | library.NLM_F_ACK
"""Change or delete an object that is there."""
CREATE: int = CHANGE | library.NLM_F_CREATE | library.NLM_F_EXCL
"""Make an object, which must not be there yet."""
REPLACE: int = CHANGE | library.NLM_F_CREATE | library.NLM_F_REPLACE
"""Make an object, or change the one that is there."""

_HEADER = struct.Struct("=IHHII")
_NUMBER = struct.Struct("=I")
_ERROR = struct.Struct("=i")
_SEQUENCE_AT = 8
_INDEX_AT = 20
"""Where every message about something on a device has the device's index: after the header and one word."""

# A batch's acknowledgements wait in the receive buffer until the whole batch is worked off, about 1 KiB each
# as the kernel accounts them; its default of 208 KiB must hold them all.
_BATCH_MESSAGES = 100
_BATCH_BYTES = 64 << 10
_RECEIVE_BYTES = 128 << 10
_DUMP_ATTEMPTS = 8


class Request(msgspec.Struct, frozen=True):
    """One message to the kernel, and what to call it in an error.

    ``feature`` is the kernel's build option without which it does not know this kind of object.
    """

    message: bytes
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
            self._socket.setsockopt(library.SOL_NETLINK, library.NETLINK_EXT_ACK, 1)
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
            size += len(request.message)
            if len(batch) == _BATCH_MESSAGES or size >= _BATCH_BYTES:
                self._apply_batch(batch)
                batch, size = [], 0
        if batch:
            self._apply_batch(batch)

    def dump(self, kind: str, family: int = 0, index: int = 0) -> list[bytes]:
        """The messages that a dump yields: of type ``kind``, of an address family and a device, or 0 for all.

        Repeated when the kernel says that something changed under it; OSError if that never ends.
        """
        flags = library.NLM_F_REQUEST | library.NLM_F_DUMP
        request = Request(with_index(message(kind, flags, {"family": family}), index), f"dump {kind}")
        for _ in range(_DUMP_ATTEMPTS):
            found = self._dump_once(request)
            if found is not None:
                return found
        raise OSError(f"netlink dump {kind} was interrupted {_DUMP_ATTEMPTS} times")

    def _apply_batch(self, batch: Sequence[Request]) -> None:
        first = self._sequence + 1
        self._send(batch)
        failed: NetlinkError | None = None
        awaited = set(range(first, self._sequence + 1))
        while awaited:
            for kind, _, sequence, raw in self._receive():
                if kind != library.NLMSG_ERROR or sequence not in awaited:
                    continue
                awaited.remove(sequence)
                failed = failed or _failure(raw, batch[sequence - first])
        if failed is not None:
            raise failed

    def _dump_once(self, request: Request) -> list[bytes] | None:
        self._send([request])
        found: list[bytes] = []
        interrupted = False
        while True:
            for kind, flags, sequence, raw in self._receive():
                if sequence != self._sequence:
                    continue
                interrupted = interrupted or bool(flags & library.NLM_F_DUMP_INTR)
                if kind == library.NLMSG_DONE:
                    return None if interrupted else found
                if kind == library.NLMSG_ERROR:
                    raise _failure(raw, request) or OSError(f"{request.what}: acknowledged, not answered")
                found.append(raw)

    def _send(self, requests: Sequence[Request]) -> None:
        out = bytearray()
        for request in requests:
            self._sequence += 1
            out += _patched(request.message, _SEQUENCE_AT, self._sequence)
        self._socket.send(out)

    def _receive(self) -> Iterator[tuple[int, int, int, bytes]]:
        data = self._socket.recv(_RECEIVE_BYTES)
        at = 0
        while at + _HEADER.size <= len(data):
            length, kind, flags, sequence, _ = _HEADER.unpack_from(data, at)
            yield kind, flags, sequence, data[at : at + length]
            at += (length + 3) & ~3


def message(kind: str, flags: int, fields: Mapping[str, int], **attributes: object) -> bytes:
    """A message as pyroute2 writes it, for instance ``RTM_NEWLINK``. The order of attributes can matter."""
    number = RTM_NAMES[kind]
    made = MarshalRtnl.msg_map[number]()
    made.update(fields, header={"type": number, "flags": flags}, **nest(**attributes))
    made.encode()
    return bytes(made.data)


def nest(**attributes: object) -> dict[str, Any]:
    """The value of an attribute that holds attributes."""
    return {"attrs": list(attributes.items())}


def read(raw: bytes) -> Any:
    """A message from the kernel as pyroute2 reads it: fields by ``[]``, attributes by ``get_attr``, else None."""
    made = MarshalRtnl.msg_map[_HEADER.unpack_from(raw)[1]](raw)
    made.decode()
    return made


def with_index(raw: bytes, index: int) -> bytes:
    """The same message about another device. For messages about something on a device only."""
    return _patched(raw, _INDEX_AT, index)


def index_of(raw: bytes) -> int:
    """The device that such a message is about."""
    return int(_NUMBER.unpack_from(raw, _INDEX_AT)[0])


def bare(raw: bytes) -> bytes:
    """A message without sequence number and port, which tell apart what says the same."""
    return raw[:_SEQUENCE_AT] + bytes(8) + raw[_HEADER.size :]


def _patched(raw: bytes, at: int, number: int) -> bytes:
    return raw[:at] + _NUMBER.pack(number) + raw[at + _NUMBER.size :]


def _failure(raw: bytes, request: Request) -> NetlinkError | None:
    """What an acknowledgement of ``request`` complains of, if anything."""
    (code,) = _ERROR.unpack_from(raw, _HEADER.size)
    if not code:
        return None
    error = library.nlmsgerr(raw)
    error.decode()
    return NetlinkError(-code, request, error.get_attr("NLMSGERR_ATTR_MSG") or "")
