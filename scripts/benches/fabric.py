"""What a message costs on the TCP fabric, beside a bare Trio loop that moves the same bytes.

Two nodes, two processes, unshaped loopback. Bounds: 8,000 layer messages of 37 KB a second, 100 us of CPU a
message (both processes together), 1.5 GB/s on one queue pair. A layer message is as on the DE read path:
Layer Blocks gathered out of Full Blocks here, one contiguous layer over there.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

import msgspec
import trio

from emulator.extent import Extent
from emulator.fabric.interface import Endpoint, Method, Region, Segment, Target, Transfer, VirtualLane
from emulator.fabric.tcp import Addresses, TcpFabric, open_tcp_fabric
from emulator.fabric.wallclock import WallClock

from .figures import Figure, show

__all__ = ["main"]

NICS = 8
SIDES: tuple[Literal["host", "gpu"], ...] = ("host", "gpu")
BLOCK_BYTES = 1024
BLOCKS = 37
LAYERS = 61
MESSAGE_BYTES = BLOCK_BYTES * BLOCKS
OUTSTANDING = 8
LARGE_BYTES = 1 << 20
HEADER_BYTES = 16
RECEIVE_BYTES = 256 * 1024


class Order(msgspec.Struct):
    """What the peer process is asked: ``bare`` reads that many messages from a socket of its own."""

    bare: int = 0
    buffered: bool = False


class CpuTime(msgspec.Struct):
    """The peer's CPU seconds so far; ``port`` of the socket it listens on for a bare loop."""

    cpu_s: float
    port: int = 0


ASK: Method[Order, CpuTime] = Method("ask", Order, CpuTime)


class Measured(msgspec.Struct):
    """One run of ``messages`` messages."""

    messages: int
    wall_s: float
    cpu_s: float

    @property
    def per_second(self) -> float:
        return self.messages / self.wall_s

    @property
    def cpu_us(self) -> float:
        """CPU microseconds a message, both processes together."""
        return self.cpu_s / self.messages * 1e6


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 1 when a bound is missed."""
    parser = argparse.ArgumentParser(prog="scripts/bench fabric", description=__doc__)
    parser.add_argument("--messages", type=int, default=24_000, help="layer messages a run")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.peer is not None:
        addresses, clock = msgspec.json.decode(args.peer, type=tuple[str, WallClock])
        trio.run(_serve, _plan(addresses), clock)
        return 0
    return show(trio.run(_measure, args.messages), as_json=args.json)


def _plan(base: str) -> Addresses:
    endpoints = {
        Endpoint(node, f"cnic{nic}", side): f"{base}.{node_at * 100 + nic * 2 + side_at + 1}"
        for node_at, node in enumerate(("a", "b"))
        for nic in range(NICS)
        for side_at, side in enumerate(SIDES)
    }
    management = {"a": f"{base}.201", "b": f"{base}.202"}
    tos = dict.fromkeys(VirtualLane, 0)
    return Addresses(endpoints=endpoints, management=management, data_port=7001, rpc_port=7002, tos=tos)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def _serve(addresses: Addresses, clock: WallClock) -> None:
    """Node b: takes what comes until standard input ends."""
    async with open_tcp_fabric("b", addresses, clock, 0.0) as fabric, trio.open_nursery() as nursery:
        for nic in range(NICS):
            fabric.register(f"hbm{nic}", max(LARGE_BYTES, 16 * MESSAGE_BYTES))

        async def ask(order: Order) -> CpuTime:
            if not order.bare:
                return CpuTime(_cpu_s())
            listener = trio.socket.socket()
            await listener.bind(("127.0.0.1", 0))
            listener.listen()
            nursery.start_soon(_read_bare, listener, order)
            return CpuTime(_cpu_s(), listener.getsockname()[1])

        fabric.serve(ASK, ask)
        print("ready", flush=True)
        await trio.lowlevel.wait_readable(sys.stdin)
        nursery.cancel_scope.cancel()


async def _measure(messages: int) -> list[Figure]:
    base = f"127.{random.randrange(1, 255)}.{random.randrange(1, 255)}"
    clock = WallClock(time.monotonic())
    order = msgspec.json.encode((base, clock)).decode()
    command = [sys.executable, "-m", "scripts.benches.fabric", "--peer", order]
    async with open_tcp_fabric("a", _plan(base), clock, 0.0) as fabric:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as peer:  # noqa: ASYNC220
            try:
                assert peer.stdout is not None
                await trio.lowlevel.wait_readable(peer.stdout)
                return await _figures(fabric, messages)
            finally:
                assert peer.stdin is not None
                peer.stdin.close()
    raise AssertionError


async def _figures(fabric: TcpFabric, messages: int) -> list[Figure]:
    local = fabric.register("de_buffer", BLOCKS * LAYERS * BLOCK_BYTES)
    large = fabric.register("large", LARGE_BYTES)
    await _layers(fabric, local, messages // 10)
    layers = await _layers(fabric, local, messages)
    bulk = await _bulk(fabric, large, 3000)
    exact = await _bare(fabric, messages, buffered=False)
    buffered = await _bare(fabric, messages, buffered=True)
    return [
        Figure("layer messages of 37 KB", layers.per_second, "1/s", low=8000),
        Figure("CPU a layer message, both sides", layers.cpu_us, "us", high=100),
        Figure("bare Trio loop, exact reads", exact.cpu_us, "us"),
        Figure("bare Trio loop, 256 KiB buffer", buffered.cpu_us, "us"),
        Figure("ratio to the bare loop, exact reads", layers.cpu_us / exact.cpu_us, ""),
        Figure("ratio to the bare loop, 256 KiB buffer", layers.cpu_us / buffered.cpu_us, ""),
        Figure("one queue pair, 1 MiB messages", bulk.per_second * LARGE_BYTES / 1e9, "GB/s", low=1.5),
        Figure("CPU a 1 MiB message, both sides", bulk.cpu_us, "us"),
    ]


async def _timed(fabric: TcpFabric, messages: int, work: Callable[[], Awaitable[None]]) -> Measured:
    peer = await fabric.call("b", ASK, Order())
    cpu_s, began = _cpu_s(), time.perf_counter()
    await work()
    wall_s = time.perf_counter() - began
    after = await fabric.call("b", ASK, Order())
    return Measured(messages, wall_s, _cpu_s() - cpu_s + after.cpu_s - peer.cpu_s)


async def _layers(fabric: TcpFabric, local: Region, messages: int) -> Measured:
    """A layerwise stream on each CNIC, a few layers ahead of what is in place."""
    each = messages // NICS
    stride = LAYERS * BLOCK_BYTES
    segments = [
        Segment(
            (Extent(layer % LAYERS * BLOCK_BYTES, BLOCK_BYTES, BLOCKS, stride),),
            (Extent(layer % 16 * MESSAGE_BYTES, MESSAGE_BYTES),),
        )
        for layer in range(each)
    ]

    async def stream(nic: int) -> None:
        target = Target(
            Endpoint("a", f"cnic{nic}"), Endpoint("b", f"cnic{nic}", "gpu"), f"hbm{nic}", Transfer.DE_LOAD
        )
        async with fabric.open_stream(target, local, segments, tag=f"layers/{nic}") as out:
            for layer in range(each):
                out.release(layer + 1)
                await out.wait_placed(max(0, layer + 1 - OUTSTANDING))
            await out.wait_placed(each)

    async def work() -> None:
        async with trio.open_nursery() as nursery:
            for nic in range(NICS):
                nursery.start_soon(stream, nic)

    return await _timed(fabric, each * NICS, work)


async def _bulk(fabric: TcpFabric, local: Region, messages: int) -> Measured:
    """One queue pair, two large messages outstanding."""
    target = Target(Endpoint("a", "cnic0"), Endpoint("b", "cnic0", "gpu"), "hbm0", Transfer.PE_READ)
    whole = (Extent(0, LARGE_BYTES),)

    async def work() -> None:
        async with fabric.open_stream(target, local, [Segment(whole, whole)] * messages) as out:
            for index in range(messages):
                out.release(index + 1)
                await out.wait_placed(max(0, index - 1))
            await out.wait_placed(messages)

    return await _timed(fabric, messages, work)


async def _bare(fabric: TcpFabric, messages: int, *, buffered: bool) -> Measured:
    """The same bytes over one Trio socket: no gather, no checks, no completions; one byte back at the end."""

    async def work() -> None:
        port = (await fabric.call("b", ASK, Order(bare=messages, buffered=buffered))).port
        with trio.socket.socket() as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
            await sock.connect(("127.0.0.1", port))
            header, payload = bytes(HEADER_BYTES), memoryview(bytes(MESSAGE_BYTES))
            for _ in range(messages):
                sent = await sock.sendmsg([header, payload])
                while sent < HEADER_BYTES + MESSAGE_BYTES:
                    sent += await sock.send(payload[sent - HEADER_BYTES :])
            await sock.recv(1)

    return await _timed(fabric, messages, work)


async def _read_bare(listener: trio.socket.SocketType, order: Order) -> None:
    with listener:
        sock, _ = await listener.accept()
    size = HEADER_BYTES + MESSAGE_BYTES
    buffer = memoryview(bytearray(RECEIVE_BYTES))
    with sock:
        if order.buffered:
            left = order.bare * size
            while left:
                left -= await sock.recv_into(buffer)
        else:
            for _ in range(order.bare):
                for part in (buffer[:HEADER_BYTES], buffer[:MESSAGE_BYTES]):
                    got = 0
                    while got < len(part):
                        got += await sock.recv_into(part[got:])
        await sock.send(b"k")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
