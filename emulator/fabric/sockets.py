"""TCP sockets as the fabric wants them: their options, connecting and accepting, and the two directions.

Works on non-blocking sockets of the standard library with ``trio.lowlevel`` to wait: one scheduler turn for
each wait, none for a call that the kernel answers at once.
"""

from __future__ import annotations

import resource
import socket
import struct
from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec
import trio

from ..errors import EmulatorError

__all__ = [
    "Buffer",
    "MakeSocket",
    "Outbox",
    "Window",
    "accept",
    "after",
    "close",
    "connect",
    "listen",
    "receive",
    "receive_nowait",
    "retransmits",
    "window_of",
]

Buffer = bytes | bytearray | memoryview
MakeSocket = Callable[[int, int], socket.socket]

BACKLOG = 1024
KIB = 1024
SUPER_PACKET_BYTES = 64 * KIB
ROUND_TRIP_S = 0.5e-3
FLOOR_BYTES = 48 * KIB
IOV_MAX = 1024
TURN_BYTES = 1 << 20
"""What one turn on the run loop may hand to the kernel: well below a millisecond of copying."""

SILENCE_S = 30
"""Wall seconds without a sign from a host whose namespace went away without a word, before it counts as lost.

Far above the wait of a lane that holds 1 % of a slow, saturated port.
"""

_TOTAL_RETRANS = struct.Struct("8x24I")


class Window(msgspec.Struct, frozen=True):
    """Socket buffer bounds in bytes: what may sit in the network, and of it what may wait unsent."""

    buffer_bytes: int
    unsent_bytes: int


def window_of(rate: float) -> Window:
    """The bounds for a port of ``rate`` payload bytes per wall second.

    Twice the bandwidth-delay product and two super-packets: enough to fill the link, and so little that many
    flows into one port share it evenly and a message waits for its predecessors' bytes, not for a megabyte of
    queue. A super-packet is what HTB hands on at a time: a millisecond of the link, 64 KiB at most. Half of
    the bound may be unsent: the socket never runs dry between two wake-ups, and what is not in it can still
    be dropped by a cancelled writer.
    """
    super_packet = min(SUPER_PACKET_BYTES, int(rate * 1e-3))
    bound = max(FLOOR_BYTES, int(2 * rate * ROUND_TRIP_S) + 2 * super_packet)
    return Window(buffer_bytes=bound, unsent_bytes=bound // 2)


def _prepare(sock: socket.socket, tos: int, window: Window | None) -> None:
    sock.setblocking(False)
    tcp, sol = socket.IPPROTO_TCP, socket.SOL_SOCKET
    # Bounded windows lose nothing, so that only the host's default (bbr, here and there) must not rule. Reno is
    # the one algorithm that every kernel allows a process without capabilities in any namespace.
    sock.setsockopt(tcp, socket.TCP_CONGESTION, b"reno")
    sock.setsockopt(tcp, socket.TCP_NODELAY, 1)
    sock.setsockopt(tcp, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)
    sock.setsockopt(tcp, socket.TCP_KEEPIDLE, SILENCE_S // 3)
    sock.setsockopt(tcp, socket.TCP_KEEPINTVL, SILENCE_S // 6)
    sock.setsockopt(sol, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)
    if window is not None:
        # The kernel doubles the value for its own overhead.
        sock.setsockopt(sol, socket.SO_SNDBUF, window.buffer_bytes)
        sock.setsockopt(sol, socket.SO_RCVBUF, window.buffer_bytes)
        sock.setsockopt(tcp, socket.TCP_NOTSENT_LOWAT, window.unsent_bytes)


def listen(make_socket: MakeSocket, address: str, port: int, tos: int) -> socket.socket:
    """A listening socket on ``address``; OSError when it cannot be had."""
    sock = make_socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _prepare(sock, tos, None)
        sock.bind((address, port))
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


async def accept(listener: socket.socket, tos: int, window: Window | None) -> socket.socket:
    """The next connection; ``tos`` marks what we send on it."""
    while True:
        await trio.lowlevel.wait_readable(listener)
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            continue
        except OSError as error:
            files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            address = listener.getsockname()[0]
            raise EmulatorError(
                f"{address}: cannot take a connection: {error.strerror}; ulimit -n is {files}, raise it"
            ) from None
        try:
            _prepare(sock, tos, window)
        except OSError:
            sock.close()
            continue
        return sock


async def connect(
    make_socket: MakeSocket, source: str, destination: tuple[str, int], tos: int, window: Window | None
) -> socket.socket:
    """A connection from the address ``source``; OSError when nobody answers."""
    sock = make_socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        _prepare(sock, tos, window)
        sock.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
        sock.bind((source, 0))
        await trio.socket.from_stdlib_socket(sock).connect(destination)
    except BaseException:
        sock.close()
        raise
    return sock


_IP_BIND_ADDRESS_NO_PORT = 24
"""linux/in.h: choose the port at connect, so that one address can open more than 28,000 connections."""


async def receive(sock: socket.socket, buffers: Sequence[memoryview]) -> int:
    """Wait for bytes and put them into ``buffers``, in order; how many. EOFError at the end of the stream."""
    while True:
        await trio.lowlevel.wait_readable(sock)
        count = receive_nowait(sock, buffers)
        if count:
            return count


def receive_nowait(sock: socket.socket, buffers: Sequence[memoryview]) -> int:
    """Like ``receive``, but 0 when nothing is there."""
    try:
        count = sock.recvmsg_into(buffers)[0] if len(buffers) > 1 else sock.recv_into(buffers[0])
    except BlockingIOError:
        return 0
    if not count:
        raise EOFError("the peer closed the connection")
    return count


def close(sock: socket.socket) -> None:
    """Close, waking whoever waits for the socket."""
    if sock.fileno() >= 0:
        trio.lowlevel.notify_closing(sock)
        sock.close()


def retransmits(sock: socket.socket) -> int:
    """Segments of this connection that TCP sent again (TCP_INFO's tcpi_total_retrans)."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TOTAL_RETRANS.size)
    return int(_TOTAL_RETRANS.unpack(info)[-1])


class Outbox:
    """The sending direction of a connection: hands to the kernel what ``refill`` gives out, in order.

    ``push`` sends at once in the caller's task what the socket takes; the rest is left to ``run``'s task.
    ``refill`` returns the next buffers, or none; whatever it returned will be sent.
    A broken connection is noticed here but reported by whoever reads the other direction, since what the peer
    said last is still to be read there.
    """

    def __init__(self, refill: Callable[[], Sequence[Buffer]]) -> None:
        self._refill = refill
        self._sock: socket.socket | None = None
        self._buffers: Sequence[Buffer] = ()
        self._idle = False
        self._wake = trio.Event()
        self.sent_bytes = 0

    def push(self) -> None:
        """There is more to send."""
        if self._idle and not self._drain():
            self._idle = False
            self._wake.set()

    async def run(self, sock: socket.socket, opening: bytes = b"") -> NoReturn:
        """Send on ``sock`` for ever, ``opening`` first."""
        self._sock = sock
        self._buffers = (opening,) if opening else ()
        while True:
            while not self._drain():
                await trio.lowlevel.wait_writable(sock)
            self._idle = True
            self._wake = trio.Event()
            await self._wake.wait()

    def _drain(self) -> bool:
        """Send until all is sent (True), or the socket is full or the turn is over (False)."""
        assert self._sock is not None
        budget = TURN_BYTES
        while True:
            if not self._buffers:
                self._buffers = self._refill()
                if not self._buffers:
                    return True
            if budget <= 0:
                return False
            try:
                count = self._sock.sendmsg(self._buffers[:IOV_MAX])
            except BlockingIOError:
                return False
            except OSError:
                self._buffers = ()
                self._refill = tuple
                return True
            self.sent_bytes += count
            budget -= count
            self._buffers = after(self._buffers, count)


def after(buffers: Sequence[Buffer], count: int) -> list[Buffer]:
    """``buffers`` without their first ``count`` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [memoryview(buffer)[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []
