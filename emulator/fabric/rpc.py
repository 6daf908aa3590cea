"""Remote procedure calls over the management network, at a modelled latency each way.

One connection for each (caller, called) pair of nodes, opened on first use; concurrent calls share it and are
told apart by an id. Sender and receiver agree on model time, so a message that carries the time it was sent
at is delivered no earlier than that plus the latency, whatever the host's own network took.

A *notice* is a call that nobody answers: it is dealt with where it is read, in the order of its connection, and
at no modelled latency, which is left to who reads it.

An EmulatorError of a handler crosses as code, text and ``definite``. Any other exception is a fault of ours:
the caller is told, and then it is raised here.
"""

from __future__ import annotations

import itertools
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import structlog
import trio

from ..errors import EmulatorError, PeerLost, ProtocolViolation, error_from_code
from .interface import Method
from .sockets import Buffer, MakeSocket, Outbox, close, connect, receive
from .wire import (
    FRAME_PREFIX_BYTES,
    NOTICE_ID,
    Answer,
    Call,
    Failure,
    RpcHello,
    decode_frame,
    decode_hello,
    encode_frame,
    encode_hello,
    frame_size,
)

__all__ = ["RpcPort"]

Q = TypeVar("Q", bound=msgspec.Struct)
A = TypeVar("A", bound=msgspec.Struct)
Handler = Callable[[Any], Awaitable[msgspec.Struct]]

READ_BYTES = 64 * 1024
EMPTY = msgspec.Raw(msgspec.msgpack.encode(None))

_log = structlog.get_logger()


class _Frames:
    """Reads frames from a connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._start = self._end = 0

    async def hello(self) -> RpcHello:
        """The opening of an accepted connection."""
        while (found := decode_hello(self._buffer[: self._end], RpcHello)) is None:
            self._end += await receive(self._sock, [self._buffer[self._end :]])
        hello, self._start = found
        return hello

    async def frame(self) -> bytearray:
        """The next frame's body. EOFError when the peer closed."""
        size = frame_size(await self._take(FRAME_PREFIX_BYTES))
        return await self._take(size)

    async def _take(self, size: int) -> bytearray:
        body = bytearray(size)
        view = memoryview(body)
        held = min(size, self._end - self._start)
        view[:held] = self._buffer[self._start : self._start + held]
        self._start += held
        while held < size:
            held += await receive(self._sock, [view[held:], self._buffer])
            self._start, self._end = 0, max(0, held - size)
        return body


class _Connection:
    """Either end of a connection: an outbox of frames."""

    def __init__(self) -> None:
        self._frames: deque[Sequence[Buffer]] = deque()
        self.outbox = Outbox(self._refill)

    def send(self, frame: Sequence[Buffer]) -> None:
        self._frames.append(frame)
        self.outbox.push()

    def _refill(self) -> Sequence[Buffer]:
        return self._frames.popleft() if self._frames else ()


class _Waiting:
    """A call in flight."""

    def __init__(self) -> None:
        self.done = trio.Event()
        self.answer: Answer | None = None
        self.error: EmulatorError | None = None


class _Caller(_Connection):
    """The calling end. ``run`` must be running in a task."""

    def __init__(self, peer: str) -> None:
        super().__init__()
        self.peer = peer
        self.error: EmulatorError | None = None
        self._scope = trio.CancelScope()
        self._ids = itertools.count()
        self._waiting: dict[int, _Waiting] = {}

    async def call(self, method: str, stamp_s: float, body: bytes) -> Answer:
        """Send a call and wait for its answer."""
        if self.error is not None:
            raise error_from_code(self.error.code, self.error.text, True)
        number, waiting = next(self._ids), _Waiting()
        frame = encode_frame(Call(number, method, stamp_s, msgspec.Raw(body)))
        self._waiting[number] = waiting
        try:
            self.send(frame)
            await waiting.done.wait()
        finally:
            self._waiting.pop(number, None)
        if waiting.answer is not None:
            return waiting.answer
        assert waiting.error is not None
        raise error_from_code(waiting.error.code, waiting.error.text, waiting.error.definite)

    def tell(self, name: str, stamp_s: float, body: bytes) -> None:
        """Send a notice, in vain if the connection is broken."""
        if self.error is None:
            self.send(encode_frame(Call(NOTICE_ID, name, stamp_s, msgspec.Raw(body))))

    def fail(self, error: EmulatorError) -> None:
        """The connection broke, or is given up: so are all calls on it, and it is closed."""
        if self.error is None:
            self.error = error
            self._scope.cancel()
            for waiting in self._waiting.values():
                waiting.error = error
                waiting.done.set()
            self._waiting.clear()

    async def run(self, open_socket: Callable[[], Awaitable[socket.socket]], hello: RpcHello) -> None:
        """Connect and serve the connection to its end."""
        error: EmulatorError = PeerLost(f"call to {self.peer}: this node's fabric is closed")
        sock: socket.socket | None = None
        try:
            with self._scope:
                try:
                    sock = await open_socket()
                except OSError as reason:
                    error = PeerLost(f"{self.peer}: not reachable: {reason.strerror or reason}", definite=True)
                    return
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.outbox.run, sock, encode_hello(hello))
                    error = await self._read(sock)
                    nursery.cancel_scope.cancel()
        finally:
            self.fail(error)
            if sock is not None:
                close(sock)

    async def _read(self, sock: socket.socket) -> EmulatorError:
        frames = _Frames(sock)
        try:
            while True:
                answer = decode_frame(await frames.frame(), Answer)
                waiting = self._waiting.pop(answer.id, None)
                if waiting is not None:
                    waiting.answer = answer
                    waiting.done.set()
        except ProtocolViolation as error:
            return ProtocolViolation(f"answer from {self.peer}: {error.text}")
        except (OSError, EOFError) as error:
            return PeerLost(f"call to {self.peer}: {error}")


class RpcPort:
    """The calls of one node, both ways.

    ``nursery`` holds a task for each connection and each call being answered; ``on_lost`` is told of a called
    node whose connection broke.
    """

    def __init__(
        self,
        node: str,
        addresses: Mapping[str, str],
        port: int,
        make_socket: MakeSocket,
        latency_s: float,
        now: Callable[[], float],
        sleep_until: Callable[[float], Awaitable[None]],
        nursery: trio.Nursery,
        on_lost: Callable[[str, EmulatorError], None],
    ) -> None:
        self._node = node
        self._addresses = addresses
        self._port = port
        self._make_socket = make_socket
        self._latency_s = latency_s
        self._now = now
        self._sleep_until = sleep_until
        self._nursery = nursery
        self._on_lost = on_lost
        self._handlers: dict[str, tuple[type[msgspec.Struct], Handler]] = {}
        self._heeded: dict[str, tuple[type[msgspec.Struct], Callable[[str, Any], None]]] = {}
        self._callers: dict[str, _Caller] = {}

    def serve(self, method: Method[Q, A], handler: Callable[[Q], Awaitable[A]]) -> None:
        """Answer ``method`` with ``handler`` from now on."""
        if method.name in self._handlers:
            raise ValueError(f"{self._node} serves {method.name} already")
        self._handlers[method.name] = (method.request, handler)

    def heed(self, name: str, kind: type[Q], act: Callable[[str, Q], None]) -> None:
        """Hand every notice ``name`` to ``act``, with the node that it is from."""
        self._heeded[name] = (kind, act)

    def tell(self, node: str, name: str, notice: msgspec.Struct) -> None:
        """Send a notice. Nobody says whether it arrived; when ``node`` is gone, ``on_lost`` is told."""
        self._caller(node).tell(name, self._now(), msgspec.msgpack.encode(notice))

    def reach(self, node: str) -> None:
        """Connect to ``node`` if this is not done, so that ``on_lost`` is told when it is gone."""
        self._caller(node)

    async def call(self, node: str, method: Method[Q, A], request: Q) -> A:
        """The reply of ``node``, or the error it answered with. PeerLost when it is gone."""
        await trio.lowlevel.checkpoint_if_cancelled()
        answer = await self._caller(node).call(method.name, self._now(), msgspec.msgpack.encode(request))
        await self._sleep_until(answer.stamp_s + self._latency_s)
        if answer.failure is not None:
            raise error_from_code(answer.failure.code, answer.failure.text, answer.failure.definite)
        try:
            return msgspec.msgpack.decode(answer.body, type=method.reply)
        except msgspec.MsgspecError as error:
            raise ProtocolViolation(
                f"{node} answered {method.name} with no {method.reply.__name__}: {error}"
            ) from None

    def lose(self, node: str, error: EmulatorError) -> None:
        """``node`` is gone: fail what is in flight to it."""
        caller = self._callers.pop(node, None)
        if caller is not None:
            caller.fail(error)

    async def answer(self, sock: socket.socket) -> tuple[str | None, EmulatorError]:
        """Serve an accepted connection to its end: whose it was, and why it ended.

        The calls that it brought run on; their answers go nowhere then.
        """
        connection, frames = _Connection(), _Frames(sock)
        peer: str | None = None
        error: EmulatorError = PeerLost(f"{self._node}: this node's fabric is closed")
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(connection.outbox.run, sock)
                try:
                    hello = await frames.hello()
                    if hello.dst != self._node:
                        raise ProtocolViolation(f"call for {hello.dst} came to {self._node}")
                    peer = hello.src
                    while True:
                        call = decode_frame(await frames.frame(), Call)
                        if call.id == NOTICE_ID:
                            self._heed(call, peer)
                        else:
                            self._nursery.start_soon(self._handle, call, connection, peer)
                except ProtocolViolation as violation:
                    error = violation
                    _log.error("protocol_violation", node=self._node, peer=peer, reason=violation.text)
                except (OSError, EOFError) as reason:
                    error = PeerLost(f"{peer or 'a peer'}: {reason}")
                nursery.cancel_scope.cancel()
        finally:
            close(sock)
        return peer, error

    def _heed(self, call: Call, peer: str) -> None:
        heeded = self._heeded.get(call.method)
        if heeded is None:
            raise ProtocolViolation(f"{self._node} does not heed {call.method!r}")
        kind, act = heeded
        try:
            notice = msgspec.msgpack.decode(call.body, type=kind)
        except msgspec.MsgspecError as error:
            raise ProtocolViolation(f"{call.method}: no {kind.__name__}: {error}") from None
        act(peer, notice)

    async def _handle(self, call: Call, connection: _Connection, peer: str) -> None:
        """Answer one call in a task of its own, once the modelled latency is over."""
        await self._sleep_until(call.stamp_s + self._latency_s)
        try:
            reply = await self._reply(call)
            frame = self._frame(call, None, msgspec.Raw(msgspec.msgpack.encode(reply)))
        except EmulatorError as error:
            frame = self._frame(call, Failure(error.code, error.text, error.definite), EMPTY)
        except Exception as error:
            text = f"{self._node}: {call.method} failed: {type(error).__name__}: {error}"
            connection.send(self._frame(call, Failure(EmulatorError.code, text, False), EMPTY))
            _log.error("rpc_handler_failed", node=self._node, method=call.method, peer=peer, reason=repr(error))
            raise
        connection.send(frame)

    async def _reply(self, call: Call) -> msgspec.Struct:
        served = self._handlers.get(call.method)
        if served is None:
            raise ProtocolViolation(f"{self._node} does not serve {call.method!r}", definite=True)
        kind, handler = served
        try:
            request = msgspec.msgpack.decode(call.body, type=kind)
        except msgspec.MsgspecError as error:
            raise ProtocolViolation(f"{call.method}: no {kind.__name__}: {error}", definite=True) from None
        return await handler(request)

    def _frame(self, call: Call, failure: Failure | None, body: msgspec.Raw) -> list[bytes]:
        return encode_frame(Answer(call.id, self._now(), failure, body))

    def _caller(self, node: str) -> _Caller:
        caller = self._callers.get(node)
        if caller is None:
            if node not in self._addresses:
                raise ValueError(f"no management address of {node!r} in the address plan")
            caller = self._callers[node] = _Caller(node)
            self._nursery.start_soon(self._run, caller)
        return caller

    async def _run(self, caller: _Caller) -> None:
        source, destination = self._addresses[self._node], (self._addresses[caller.peer], self._port)

        async def open_socket() -> socket.socket:
            return await connect(self._make_socket, source, destination, 0, None)

        await caller.run(open_socket, RpcHello(self._node, caller.peer))
        # One that ``lose`` has given up is told of already, and the peer's new connections are not its affair.
        if self._callers.get(caller.peer) is caller and caller.error is not None:
            del self._callers[caller.peer]
            self._on_lost(caller.peer, caller.error)
