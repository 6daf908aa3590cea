"""The TCP fabric on loopback addresses: what only real sockets can get wrong.

What both fabrics must hold is in tests/conformance.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Literal

import msgspec
import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from emulator.errors import EmulatorError, PeerLost, ProtocolViolation, Refused
from emulator.extent import Extent, gather, total_bytes
from emulator.fabric import sender
from emulator.fabric.interface import Endpoint, Method, Segment, Target, Transfer, VirtualLane
from emulator.fabric.sockets import MakeSocket, window_of
from emulator.fabric.tcp import Addresses, TcpFabric, open_tcp_fabric
from emulator.fabric.wallclock import WallClock, open_alarm
from emulator.fabric.wire import PairHello, decode_hello, encode_ack, encode_header, encode_hello
from tests.within import assert_within

SIDES: tuple[Literal["host", "gpu"], ...] = ("host", "gpu")
NODES = ("a", "b")
A, B = Endpoint("a", "cnic0"), Endpoint("b", "cnic0")
TOS = {lane: 0x20 * (lane + 1) for lane in VirtualLane}
TO_B = Target(A, B, "sink", Transfer.DE_LOAD)


class Note(msgspec.Struct):
    text: str = ""
    data: bytes = b""


ECHO: Method[Note, Note] = Method("echo", Note, Note)
FAIL: Method[Note, Note] = Method("fail", Note, Note)


def plan() -> Addresses:
    """Addresses in a random corner of the loopback network, so that test runs stay apart."""
    base = f"127.{random.randrange(1, 255)}.{random.randrange(1, 255)}"
    endpoints = {
        Endpoint(node, "cnic0", side): f"{base}.{10 * i + j}"
        for i, node in enumerate(NODES, 1)
        for j, side in enumerate(SIDES)
    }
    management = {node: f"{base}.{10 * i + 5}" for i, node in enumerate(NODES, 1)}
    return Addresses(endpoints=endpoints, management=management, data_port=7001, rpc_port=7002, tos=TOS)


class Cluster:
    """Fabrics of several nodes in this process, each of which can be shut."""

    def __init__(self, nursery: trio.Nursery, addresses: Addresses) -> None:
        self._nursery = nursery
        self.addresses = addresses
        self.clock = WallClock(time.monotonic())
        self._scopes: dict[str, trio.CancelScope] = {}
        self._closed: dict[str, trio.Event] = {}

    async def open(
        self,
        node: str,
        *,
        latency_s: float = 0.0,
        make_socket: MakeSocket = socket.socket,
        rate: float | None = None,
    ) -> TcpFabric:
        """Start a node."""
        scope, closed = trio.CancelScope(), trio.Event()
        self._scopes[node], self._closed[node] = scope, closed
        rates = {} if rate is None else {"cnic0": rate}

        async def host(task_status: trio.TaskStatus[TcpFabric]) -> None:
            with scope:
                async with open_tcp_fabric(
                    node,
                    self.addresses,
                    self.clock,
                    latency_s,
                    rates=rates,
                    window_s=0.05,
                    make_socket=make_socket,
                ) as fabric:
                    task_status.started(fabric)
                    await trio.sleep_forever()
            closed.set()

        fabric: TcpFabric = await self._nursery.start(host)
        return fabric

    async def close(self, node: str) -> None:
        """Shut a node: its sockets close as they would when its process died."""
        self._scopes[node].cancel()
        await self._closed[node].wait()


@asynccontextmanager
async def open_cluster() -> AsyncIterator[Cluster]:
    with trio.fail_after(15):
        async with trio.open_nursery() as nursery:
            yield Cluster(nursery, plan())
            nursery.cancel_scope.cancel()


def fill(memory: np.typing.NDArray[np.uint8], seed: int = 0) -> None:
    memory[:] = np.random.default_rng(seed).integers(0, 256, memory.size, dtype=np.uint8)


def whole(size: int) -> Segment:
    return Segment((Extent(0, size),), (Extent(0, size),))


async def silent_peer(addresses: Addresses) -> socket.socket:
    """Something that listens where node b would and does nothing by itself."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    listener.bind((addresses.endpoints[B], addresses.data_port))
    listener.listen()
    listener.setblocking(False)
    return listener


async def accepted(listener: socket.socket) -> trio.socket.SocketType:
    wrapped = trio.socket.from_stdlib_socket(listener)
    sock, _ = await wrapped.accept()
    return sock


async def read_exactly(sock: trio.socket.SocketType, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = await sock.recv(min(1 << 16, size - len(data)))
        assert chunk
        data += chunk
    return bytes(data)


@pytest.mark.parametrize("remote", ["contiguous", "strided"])
@pytest.mark.parametrize("local", ["contiguous", "strided", "long runs", "many"])
async def test_every_shape_of_message_arrives_bit_exact(local: str, remote: str) -> None:
    """Gather lists that are copied or sent in place, scatters in place or through scratch, large and small."""
    shapes = {
        "contiguous": (Extent(3, 600_000),),
        "strided": (Extent(5, 100, 6000, 130),),
        "long runs": (Extent(1, 6000, 50, 7001), Extent(700_000, 300_000)),
        "many": tuple(Extent(60 * i, 40) for i in range(15_000)),
    }
    there = {
        "contiguous": (Extent(7, 600_000),),
        "strided": (Extent(0, 1000, 300, 1100), Extent(400_000, 300_000)),
    }
    async with open_cluster() as cluster:
        a, b = [await cluster.open(node) for node in NODES]
        source, sink = a.register("source", 1_100_000), b.register("sink", 1_100_000)
        fill(source.memory)
        await a.write(TO_B, source, Segment(shapes[local], there[remote]))
        assert (gather(sink.memory, there[remote]) == gather(source.memory, shapes[local])).all()
        assert int((sink.memory != 0).sum()) <= total_bytes(there[remote])


async def test_a_header_larger_than_the_receive_buffer_is_read() -> None:
    """20,000 scattered tokens need a header of 640 KB; small messages before and after it are unharmed."""
    async with open_cluster() as cluster:
        a, b = [await cluster.open(node) for node in NODES]
        source, sink = a.register("source", 100_000), b.register("sink", 100_000)
        fill(source.memory)
        scattered = tuple(Extent(99_995 - 5 * i, 1) for i in range(20_000))
        small = Segment((Extent(0, 1),), (Extent(1, 1),))
        async with a.open_stream(TO_B, source, [small, Segment((Extent(0, 20_000),), scattered), small]) as stream:
            stream.release(3)
            await stream.wait_placed(3)
        assert (sink.memory[99_995::-5][:20_000] == source.memory[:20_000]).all()


async def test_both_sides_count_the_same_and_a_loopback_pays_twice() -> None:
    """Books of sender and receiver agree to the byte; host to GPU on one NIC counts in both its directions."""
    async with open_cluster() as cluster:
        a, b = [await cluster.open(node) for node in NODES]
        source, _, gpu = a.register("source", 9000), b.register("sink", 9000), a.register("hbm", 9000)
        async with trio.open_nursery() as nursery:
            for size in (1, 10, 5000, 9000):
                nursery.start_soon(a.write, TO_B, source, whole(size))
        loop = Target(A, Endpoint("a", "cnic0", "gpu"), "hbm", Transfer.PE_H2D, VirtualLane.MODEL)
        fill(source.memory)
        await a.write(loop, source, whole(9000))
        assert (gpu.memory == source.memory).all()
        there = [row for row in a.sent() if row.dst == "b"]
        assert there == list(b.received())
        assert (there[0].transfer, there[0].payload_bytes, there[0].messages) == ("DE_LOAD", 14_011, 4)
        ports = {(p.direction, p.lane): p for p in a.ports()}
        assert ports["read", VirtualLane.KV].payload_bytes == 14_011
        assert (
            ports["read", VirtualLane.MODEL].payload_bytes
            == ports["write", VirtualLane.MODEL].payload_bytes
            == 9000
        )
        for port in (*a.ports(), *b.ports()):
            assert sum(port.windows) == port.payload_bytes
            assert 0 < port.busy_s <= a.now()
        assert a.retransmits() == b.retransmits() == 0


@pytest.mark.parametrize("size", [10, 4 << 20])
@pytest.mark.parametrize(("region", "words"), [("nowhere", "no region"), ("sink", "extent ends at")])
async def test_a_write_that_does_not_fit_is_refused_before_a_byte_is_placed(
    region: str, words: str, size: int
) -> None:
    """The sender's writes fail with the receiver's words; memory is untouched; the next use connects anew."""
    async with open_cluster() as cluster:
        a, b = [await cluster.open(node) for node in NODES]
        source, sink = a.register("source", size), b.register("sink", 100)
        fill(source.memory)
        beyond = Segment((Extent(0, size),), (Extent(95, size),))
        with pytest.raises(ProtocolViolation, match=words):
            await a.write(msgspec.structs.replace(TO_B, region=region), source, beyond)
        assert not sink.memory.any()
        assert b.received() == a.sent() == ()
        await a.write(TO_B, source, whole(10))
        assert (sink.memory[:10] == source.memory[:10]).all()


async def test_what_the_sender_can_see_it_refuses_itself() -> None:
    """A gather beyond its region, a foreign source, an unknown endpoint: ValueError, nothing is opened."""
    async with open_cluster() as cluster:
        a = await cluster.open("a")
        source = a.register("source", 100)
        with pytest.raises(ValueError, match="extent ends at 101"):
            await a.write(TO_B, source, whole(101))
        with pytest.raises(ValueError, match="cannot send from"):
            await a.write(msgspec.structs.replace(TO_B, src=B), source, whole(1))
        with pytest.raises(ValueError, match="no address of"):
            await a.write(msgspec.structs.replace(TO_B, dst=Endpoint("c", "cnic0")), source, whole(1))
        with pytest.raises(ValueError, match="has a region"):
            a.register("source", 1)


async def test_strangers_on_the_data_port_are_turned_away() -> None:
    """Garbage, a hello for somebody else and one from the wrong address end that connection and nothing else."""
    async with open_cluster() as cluster:
        a, b = [await cluster.open(node) for node in NODES]
        source, sink = a.register("source", 100), b.register("sink", 100)
        where = (cluster.addresses.endpoints[B], cluster.addresses.data_port)
        for opening in (
            b"GET / HTTP/1.1\r\n\r\n",
            encode_hello(PairHello(A, A, VirtualLane.KV)),
            encode_hello(PairHello(A, B, VirtualLane.KV)),
            encode_hello(PairHello(Endpoint("x", "y"), B, VirtualLane.KV)),
        ):
            stream = await trio.open_tcp_stream(*where)
            async with stream:
                await stream.send_all(
                    opening + encode_header(Transfer.OTHER, b"sink", b"", [Extent(0, 1)], 1) + b"!"
                )
                said = b"".join([chunk async for chunk in stream])
                assert said, "the receiver says why"
        assert not sink.memory.any()
        await a.write(TO_B, source, whole(100))
        assert len(b.received()) == 1


async def test_a_bad_count_from_the_receiver_is_a_violation() -> None:
    """A receiver that counts messages nobody sent fails the writer."""
    async with open_cluster() as cluster:
        a = await cluster.open("a")
        source = a.register("source", 10)
        with await silent_peer(cluster.addresses) as listener:
            async with trio.open_nursery() as nursery:

                async def answer() -> None:
                    with await accepted(listener) as sock:
                        await sock.send(encode_ack(2, 0.0))
                        await sock.recv(1)

                nursery.start_soon(answer)
                with pytest.raises(ProtocolViolation, match="counts 2 messages"):
                    await a.write(TO_B, source, whole(10))
                nursery.cancel_scope.cancel()


async def test_a_cancelled_write_is_dropped_if_queued_and_finished_if_begun() -> None:
    """Behind a stuck message, a cancelled write returns at once and never goes; the stuck one finishes."""
    size = 4 << 20
    async with open_cluster() as cluster:
        a = await cluster.open("a", rate=100e6)
        source = a.register("source", size)
        fill(source.memory)
        begun, over = trio.CancelScope(), trio.Event()

        async def large() -> None:
            with begun:
                await a.write(TO_B, source, whole(size))
            over.set()

        with await silent_peer(cluster.addresses) as listener:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(large)
                with await accepted(listener) as sock:
                    hello = await sock.recv(4096, socket.MSG_PEEK)
                    found = decode_hello(hello, PairHello)
                    assert found is not None
                    await read_exactly(sock, found[1])
                    queued = trio.CancelScope()
                    with queued:
                        async with trio.open_nursery() as inner:
                            inner.start_soon(a.write, TO_B, source, whole(1000))
                            await wait_all_tasks_blocked()
                            queued.cancel()
                    assert queued.cancelled_caught
                    begun.cancel()
                    await wait_all_tasks_blocked()
                    assert not over.is_set()
                    head = encode_header(Transfer.DE_LOAD, b"sink", b"", [Extent(0, size)], size)
                    got = await read_exactly(sock, len(head) + size)
                    assert got == head + source.memory.tobytes()
                    assert not over.is_set()
                    await sock.send(encode_ack(1, 0.0))
                    await over.wait()
                    assert [row.messages for row in a.sent()] == [1]
                    await cluster.close("a")
                    assert await sock.recv(1) == b""


async def test_closing_a_stream_on_a_silent_peer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """When nothing moves for the allowed silence, closing gives the connection up and returns."""
    monkeypatch.setattr(sender, "SILENCE_S", 0.05)
    async with open_cluster() as cluster:
        a = await cluster.open("a")
        source = a.register("source", 1000)
        with await silent_peer(cluster.addresses):
            async with a.open_stream(TO_B, source, [whole(1000)] * 3) as stream:
                stream.release(1)
                await wait_all_tasks_blocked()
            with pytest.raises(PeerLost, match="nothing moved"):
                await stream.wait_placed(1)
            with pytest.raises(ValueError, match="closed"):
                stream.release(2)


async def test_when_a_peer_dies_everything_that_needs_it_ends() -> None:
    """Writes, streams, marks and calls that wait for a dead node raise PeerLost; none hangs."""
    async with open_cluster() as cluster:
        a, b = [await cluster.open(node) for node in NODES]
        source = a.register("source", 100)
        home, other = a.register("home", 100), b.register("other", 100)
        b.register("sink", 100)
        await b.write(Target(B, A, "home", Transfer.OTHER), other, whole(100), tag="t")
        async with a.open_stream(TO_B, source, [whole(100)] * 3) as stream:
            stream.release(1)
            await stream.wait_placed(1)
            b.serve(ECHO, _never)
            ended: list[str] = []

            async def lost(name: str, act: Callable[[], object]) -> None:
                with pytest.raises(PeerLost):
                    await act()  # type: ignore[misc]
                ended.append(name)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(lost, "marks", lambda: a.marks("t").wait(2))
                nursery.start_soon(lost, "stream", lambda: stream.wait_placed(2))
                nursery.start_soon(lost, "call", lambda: a.call("b", ECHO, Note()))
                await wait_all_tasks_blocked()
                await cluster.close("b")
            assert sorted(ended) == ["call", "marks", "stream"]
        assert a.marks("t").arrived == 1
        with pytest.raises(PeerLost) as caught:
            await a.write(TO_B, source, whole(1))
        assert caught.value.definite
        with pytest.raises(PeerLost) as caught:
            await a.call("b", ECHO, Note())
        assert caught.value.definite
        assert (home.memory == other.memory).all()


async def test_a_given_up_connection_of_calls_is_closed_and_is_no_later_ones_affair() -> None:
    """When a peer counts as lost, calls to it start on one new connection, whose life is its own."""
    made: list[socket.socket] = []

    def make_socket(family: int, kind: int) -> socket.socket:
        made.append(socket.socket(family, kind))
        return made[-1]

    async with open_cluster() as cluster:
        a, b = await cluster.open("a", make_socket=make_socket), await cluster.open("b")
        b.serve(ECHO, _same)
        await a.call("b", ECHO, Note("before"))
        with trio.socket.socket() as broken:
            await broken.bind((cluster.addresses.endpoints[B], 0))
            await broken.connect((cluster.addresses.endpoints[A], cluster.addresses.data_port))
            await broken.send(encode_hello(PairHello(B, A, VirtualLane.KV)))
            broken.shutdown(socket.SHUT_WR)
            assert await broken.recv(1) == b""
        for text in ("after", "again"):
            assert (await a.call("b", ECHO, Note(text))).text == text
        await wait_all_tasks_blocked()
        there = (cluster.addresses.management["b"], cluster.addresses.rpc_port)
        connected = [sock for sock in made if sock.fileno() >= 0 and _peer(sock) == there]
        assert len(connected) == 1


def _peer(sock: socket.socket) -> tuple[str, int] | None:
    try:
        host, port = sock.getpeername()
    except OSError:
        return None
    return host, port


async def test_sockets_are_marked_bounded_and_closed() -> None:
    """Each lane's TOS on what carries its bytes, CONTROL's on acks; reno; buffers of the rate; none left open."""
    made: dict[str, list[socket.socket]] = {node: [] for node in NODES}

    def maker(node: str) -> MakeSocket:
        def make(family: int, kind: int) -> socket.socket:
            sock = socket.socket(family, kind)
            made[node].append(sock)
            return sock

        return make

    async with open_cluster() as cluster:
        a, b = [await cluster.open(node, make_socket=maker(node), rate=50e6) for node in NODES]
        source = a.register("source", 100)
        b.register("sink", 100)
        listening = len(made["a"])
        for lane in VirtualLane:
            await a.write(msgspec.structs.replace(TO_B, lane=lane), source, whole(100))
        pairs = made["a"][listening:]
        assert [sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) for sock in pairs] == [
            TOS[x] for x in VirtualLane
        ]
        bound = window_of(50e6)
        for sock in pairs:
            assert sock.getsockname()[0] == cluster.addresses.endpoints[A]
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"reno"
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * bound.buffer_bytes
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == bound.unsent_bytes
        await cluster.close("a")
        assert all(sock.fileno() == -1 for sock in made["a"])


async def test_errors_of_a_handler_reach_the_caller_as_they_are() -> None:
    """Type, text and ``definite`` survive; unknown methods and unreadable requests are violations."""
    async with open_cluster() as cluster:
        a, b = [await cluster.open(node) for node in NODES]

        async def refuse(note: Note) -> Note:
            raise Refused(f"no room for {note.text}")

        b.serve(FAIL, refuse)
        with pytest.raises(Refused, match="no room for r7") as refused:
            await a.call("b", FAIL, Note("r7"))
        assert refused.value.definite
        with pytest.raises(ProtocolViolation, match="does not serve 'echo'"):
            await a.call("b", ECHO, Note())
        odd: Method[Odd, Note] = Method("fail", Odd, Note)
        with pytest.raises(ProtocolViolation, match="no Note"):
            await a.call("b", odd, Odd(text=5))
        with pytest.raises(ValueError, match="serves fail already"):
            b.serve(FAIL, refuse)


class Odd(msgspec.Struct):
    text: int


async def test_large_and_many_calls_share_a_connection() -> None:
    """Calls are told apart however late each answer is; a 2 MB block crosses both ways; own node included."""
    async with open_cluster() as cluster:
        a, b = [await cluster.open(node) for node in NODES]
        gates = [trio.Event() for _ in range(20)]

        async def echo(note: Note) -> Note:
            if note.text:
                await gates[int(note.text)].wait()
            return note

        for fabric in (a, b):
            fabric.serve(ECHO, echo)
        answers: list[str] = []

        async def ask(index: int) -> None:
            answers.append((await a.call("b", ECHO, Note(str(index)))).text)

        async with trio.open_nursery() as nursery:
            for index in range(20):
                nursery.start_soon(ask, index)
            block = bytes(range(256)) * 8192
            assert (await a.call("b", ECHO, Note(data=block))).data == block
            assert (await b.call("b", ECHO, Note(data=b"own"))).data == b"own"
            assert answers == []
            for gate in reversed(gates):
                gate.set()
        assert sorted(map(int, answers)) == list(range(20))


async def test_a_call_takes_the_modelled_latency_both_ways() -> None:
    """Never less than two latencies, and the handler never starts before the first is over."""
    latency_s = 0.02
    async with open_cluster() as cluster:
        a, b = [await cluster.open(node, latency_s=latency_s) for node in NODES]
        began: list[float] = []

        async def echo(note: Note) -> Note:
            began.append(b.now())
            return note

        b.serve(ECHO, echo)
        start = a.now()
        await a.call("b", ECHO, Note())
        assert began[0] - start >= latency_s
        assert a.now() - began[0] >= latency_s


async def test_a_cancelled_call_leaves_the_connection_in_order() -> None:
    """Giving up on one call does not disturb the next, and its late answer goes nowhere."""
    async with open_cluster() as cluster:
        a, b = [await cluster.open(node) for node in NODES]
        gate = trio.Event()

        async def echo(note: Note) -> Note:
            await gate.wait()
            return note

        b.serve(ECHO, echo)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(a.call, "b", ECHO, Note("first", bytes(1 << 20)))
                await wait_all_tasks_blocked(0.01)
                scope.cancel()
        gate.set()
        assert (await a.call("b", ECHO, Note("second"))).text == "second"


async def test_a_fault_in_a_handler_tells_the_caller_and_then_ends_the_run() -> None:
    """An exception that is no EmulatorError is ours: it comes out of the serving node's fabric."""
    with pytest.raises(BaseExceptionGroup) as raised:
        async with open_cluster() as cluster:
            a, b = [await cluster.open(node) for node in NODES]

            async def broken(note: Note) -> Note:
                raise ZeroDivisionError("our bug")

            b.serve(FAIL, broken)
            with trio.CancelScope(shield=True), pytest.raises(EmulatorError, match="ZeroDivisionError: our bug"):
                await a.call("b", FAIL, Note())
    assert raised.group_contains(ZeroDivisionError, match="our bug")


async def test_an_address_in_use_is_one_clear_error() -> None:
    """Two fabrics of one node cannot listen at once; the second says where and leaves the first unharmed."""
    async with open_cluster() as cluster:
        a = await cluster.open("a")
        a.serve(ECHO, _same)
        with pytest.raises(EmulatorError, match=r"a: cannot listen on .*:7001"):
            async with open_tcp_fabric("a", cluster.addresses, cluster.clock, 0.0):
                pass
        assert (await a.call("a", ECHO, Note("still"))).text == "still"


async def _same(note: Note) -> Note:
    return note


async def _never(note: Note) -> Note:
    await trio.sleep_forever()
    raise AssertionError


async def test_waking_is_never_early_and_never_forgotten() -> None:
    """``wait_until`` returns at its instant or later, in whatever order the waiters came; a past one at once."""
    with open_alarm() as alarm:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(alarm.run)
            base = time.monotonic()
            woken: list[float] = []

            async def wait(after_s: float) -> None:
                await alarm.wait_until(base + after_s)
                assert time.monotonic() >= base + after_s
                woken.append(after_s)

            async with trio.open_nursery() as waiters:
                for after_s in (0.003, 0.001, 0.0025, -1.0, 0.002):
                    waiters.start_soon(wait, after_s)
                with trio.move_on_after(0.0005):
                    await alarm.wait_until(base + 3600)
            assert sorted(woken) == [-1.0, 0.001, 0.002, 0.0025, 0.003]
            nursery.cancel_scope.cancel()


async def test_what_is_called_later_is_called_in_order() -> None:
    """``call_at`` calls at its instant or later, earlier instants first, those of one instant as asked."""
    with open_alarm() as alarm:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(alarm.run)
            base = time.monotonic()
            called: list[tuple[float, int]] = []
            done = trio.Event()

            def note(after_s: float, number: int) -> None:
                assert time.monotonic() >= base + after_s
                called.append((after_s, number))

            for number, after_s in enumerate((0.02, 0.01, 0.02, -1.0, 0.01, 0.02)):
                alarm.call_at(base + after_s, partial(note, after_s, number))
            alarm.call_at(base + 0.03, done.set)
            await done.wait()
            assert called == [(-1.0, 3), (0.01, 1), (0.01, 4), (0.02, 0), (0.02, 2), (0.02, 5)]
            nursery.cancel_scope.cancel()


async def test_what_is_deferred_needs_no_task() -> None:
    """A thousand deferred messages are a thousand entries of one timer."""
    async with open_cluster() as cluster:
        a, b = await cluster.open("a"), await cluster.open("b")
        source = a.register("source", 1000)
        b.register("sink", 1000)
        await a.write(TO_B, source, whole(1))
        tasks = trio.lowlevel.current_statistics().tasks_living
        async with a.open_stream(TO_B, source, [whole(1)] * 1000) as stream:
            for upto in range(1, 1001):
                stream.release(upto, after_s=0.01)
            await trio.lowlevel.checkpoint()
            assert trio.lowlevel.current_statistics().tasks_living == tasks
            await stream.wait_placed(1000)


def test_model_time_is_stretched_wall_time() -> None:
    """``monotonic`` and ``now`` are each other's inverse; a dilation that is no positive number is refused."""
    clock = WallClock(time.monotonic() - 20, 10.0)
    assert_within(clock.now(), 2.0, absolute=0.5, what="model seconds")
    assert_within(clock.monotonic(3.0), clock.epoch_monotonic_s + 30, absolute=1e-6)
    for dilation in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="dilation"):
            WallClock(0.0, dilation)


def test_socket_bounds_follow_the_rate() -> None:
    """Buffers grow with the rate, hold more than a round trip of it, and stay below 4 ms of a fast port."""
    rates = [6.25e6, 50e6, 125e6, 250e6]
    bounds = [window_of(rate) for rate in rates]
    assert [b.buffer_bytes for b in bounds] == sorted(b.buffer_bytes for b in bounds)
    for rate, bound in zip(rates, bounds, strict=True):
        assert bound.buffer_bytes >= rate * 0.5e-3
        assert 0 < bound.unsent_bytes < bound.buffer_bytes
    assert bounds[-1].buffer_bytes < rates[-1] * 4e-3
