"""The Fabric over real sockets: one node's process, its addresses, its queue pairs, its calls.

Time is the host's monotonic clock, stretched (``wallclock``). A queue pair is one TCP connection bound to the
source endpoint's address, marked with its lane's TOS byte (``sender``, ``receiver``); calls go over the
management network (``rpc``). Every connection is served by a task of the nursery that ``open_tcp_fabric``
holds, so leaving the context leaves nothing behind.

A broken connection means that its peer is gone: the other queue pairs to that node and the calls in flight to
it fail as well. The next use connects anew.

What a queue pair crosses inside the node, ``wiring`` says; ``localbus`` paces it. A copy between a node's DRAM
and a GPU over its PCIe link crosses no NIC: as a free path, it goes over the management network's addresses.

Knows nothing of topologies: addresses, rates and TOS bytes come as plain data.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from types import MappingProxyType
from typing import TypeVar

import msgspec
import trio

from ..errors import EmulatorError, PeerLost
from ..records import ExchangeRecord, PortBytes, TransferBytes
from .interface import (
    FREE_NIC,
    MAX_PAYLOAD_BYTES,
    Endpoint,
    Exchanged,
    Fabric,
    Marks,
    Method,
    Region,
    Ring,
    Segment,
    Side,
    Target,
    VirtualLane,
    WriteStream,
)
from .localbus import LocalBuses, LocalRates, Toll
from .meter import Books, PortMeter
from .receiver import MarkTable, ReceiveBuffer, Reception
from .rpc import RpcPort
from .sender import PostedStream, QueuePair
from .sockets import MakeSocket, accept, connect, listen, window_of
from .tcp_collective import SCRATCH_REGION, TcpRings
from .wallclock import Alarm, WallClock, open_alarm
from .wire import PairHello
from .wiring import Crossing, Wiring, pcie_of

__all__ = ["Addresses", "TcpFabric", "open_tcp_fabric"]

SIDES: tuple[Side, ...] = ("host", "gpu")
NO_LANE_MAP: Mapping[VirtualLane, VirtualLane] = MappingProxyType({})

Q = TypeVar("Q", bound=msgspec.Struct)
A = TypeVar("A", bound=msgspec.Struct)


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """Where everybody is: the same value for all nodes of a cluster. IPv4 addresses as text.

    ``endpoints``: the address of each NIC side. ``management``: that of each node, for calls and for its free
    endpoints. ``tos``: the TOS byte (DSCP in the upper six bits) of each lane.
    """

    endpoints: Mapping[Endpoint, str]
    management: Mapping[str, str]
    data_port: int
    rpc_port: int
    tos: Mapping[VirtualLane, int]

    def of(self, endpoint: Endpoint) -> str:
        """Where ``endpoint`` is. KeyError where the plan does not have it."""
        return self.management[endpoint.node] if endpoint.free else self.endpoints[endpoint]


class TcpFabric(Fabric):
    """See the module; made by ``open_tcp_fabric``."""

    def __init__(
        self,
        node: str,
        addresses: Addresses,
        clock: WallClock,
        alarm: Alarm,
        nursery: trio.Nursery,
        *,
        rpc_latency_s: float,
        rates: Mapping[str, float],
        local: LocalRates,
        window_s: float,
        lane_map: Mapping[VirtualLane, VirtualLane],
        make_socket: MakeSocket,
    ) -> None:
        self.node = node
        nics = {(node, endpoint.nic) for endpoint in addresses.endpoints if endpoint.node == node}
        self._wiring = Wiring(nics, () if local.dram is None else (node,), [(node, nic) for nic in local.pcie])
        self._buses = LocalBuses(node, local, clock.dilation)
        self._addresses = addresses
        self._clock = clock
        self._alarm = alarm
        self._nursery = nursery
        self._windows = {nic: window_of(rate) for nic, rate in rates.items()}
        self._make_socket = make_socket
        self._lane_map = lane_map
        self._regions: dict[str, Region] = {}
        self._marks = MarkTable()
        self._books = Books(window_s)
        self._pairs: dict[tuple[Endpoint, Endpoint, VirtualLane], QueuePair] = {}
        self._buffer = ReceiveBuffer()
        self._receptions: set[Reception] = set()
        self._past_retransmits = 0
        self._rpc = RpcPort(
            node,
            addresses.management,
            addresses.rpc_port,
            make_socket,
            rpc_latency_s,
            self.now,
            self.sleep_until,
            nursery,
            self._lose,
        )
        self._scratch = self.register(SCRATCH_REGION, MAX_PAYLOAD_BYTES)
        self._rings = TcpRings(
            node,
            self._rpc,
            self._from_scratch,
            self._books,
            self.now,
            self.sleep_until,
            rpc_latency_s,
            nursery,
        )

    def now(self) -> float:
        return self._clock.now()

    async def sleep_until(self, at_s: float) -> None:
        await self._alarm.wait_until(self._clock.monotonic(at_s))

    def register(self, name: str, size_bytes: int) -> Region:
        if name in self._regions:
            raise ValueError(f"{self.node} has a region {name!r} already")
        region = self._regions[name] = Region.allocate(name, size_bytes)
        return region

    async def write(
        self, target: Target, local: Region, segment: Segment, *, tag: str = "", after_s: float = 0.0
    ) -> None:
        if after_s > 0:
            await self.sleep(after_s)
        await trio.lowlevel.checkpoint_if_cancelled()
        stream = PostedStream(self._pair(target, self._lane(target.lane)), target, local, (segment,), tag)
        stream.release(1)
        try:
            await stream.wait_placed(1)
        except trio.Cancelled:
            await stream.aclose()
            raise
        stream.detach()

    def open_stream(
        self, target: Target, local: Region, segments: Sequence[Segment], *, tag: str = ""
    ) -> WriteStream:
        return PostedStream(self._pair(target, self._lane(target.lane)), target, local, tuple(segments), tag)

    def marks(self, tag: str) -> Marks:
        return self._marks.get(tag)

    def serve(self, method: Method[Q, A], handler: Callable[[Q], Awaitable[A]]) -> None:
        self._rpc.serve(method, handler)

    async def call(self, node: str, method: Method[Q, A], request: Q) -> A:
        return await self._rpc.call(node, method, request)

    async def collective(
        self,
        ring: Ring,
        payload: Mapping[Endpoint, int],
        *,
        ready_s: float,
        amount: int = 0,
        lane: VirtualLane = VirtualLane.MODEL,
    ) -> Exchanged:
        return await self._rings.collective(ring, payload, ready_s, amount, self._lane(lane))

    async def wait_entered(self, ring: Ring) -> None:
        await self._rings.wait_entered(ring)

    def exchanges(self) -> tuple[ExchangeRecord, ...]:
        return self._books.exchanges()

    def sent(self) -> tuple[TransferBytes, ...]:
        return self._books.sent()

    def received(self) -> tuple[TransferBytes, ...]:
        return self._books.received()

    def ports(self) -> tuple[PortBytes, ...]:
        return self._books.ports(self.now())

    def retransmits(self) -> int:
        """TCP segments sent again on this node's data connections so far, both ways."""
        live = sum(pair.retransmits() for pair in self._pairs.values())
        return self._past_retransmits + live + sum(reception.retransmits() for reception in self._receptions)

    def _lane(self, lane: VirtualLane) -> VirtualLane:
        """The lane that carries what is asked to go on ``lane``."""
        return self._lane_map.get(lane, lane)

    def _from_scratch(self, target: Target, segment: Segment) -> PostedStream:
        """A stream of an exchange, whose lane is the one that carries."""
        return PostedStream(self._pair(target, target.lane), target, self._scratch, (segment,), "")

    def _pair(self, target: Target, lane: VirtualLane) -> QueuePair:
        """The queue pair of ``target`` on the lane that carries, opened on first use."""
        key = (target.src, target.dst, lane)
        pair = self._pairs.get(key)
        if pair is None:
            if target.src.node != self.node:
                raise ValueError(f"{self.node} cannot send from {target.src}")
            try:
                source, destination = self._address_of(target.src), self._address_of(target.dst)
            except KeyError as unknown:
                raise ValueError(f"no address of {unknown.args[0]} in the address plan") from None
            open_socket = partial(
                connect,
                self._make_socket,
                source,
                (destination, self._addresses.data_port),
                self._addresses.tos[lane],
                self._windows.get(target.src.nic),
            )
            meters, toll = self._costs(self._wiring.sent(target.src, target.dst), lane)
            pair = QueuePair(
                PairHello(*key),
                open_socket,
                self._books,
                meters,
                toll,
                self._clock.now,
                self._end_pair,
                self._call_at,
            )
            self._pairs[key] = pair
            self._nursery.start_soon(pair.run)
        return pair

    def _address_of(self, endpoint: Endpoint) -> str:
        """KeyError where the plan does not have it."""
        if endpoint.node == self.node and self._wiring.is_link(endpoint.node, endpoint.nic):
            return self._addresses.management[self.node]
        return self._addresses.of(endpoint)

    def _costs(self, crossings: Sequence[Crossing], lane: VirtualLane) -> tuple[Sequence[PortMeter], Toll | None]:
        """What one side of a queue pair counts and pays for what it crosses."""
        meters = [self._books.port(crossing.nic, crossing.direction, lane) for crossing in crossings]
        return meters, self._buses.toll(crossings)

    def _receiver_costs(self, hello: PairHello) -> tuple[Sequence[PortMeter], Toll | None]:
        return self._costs(self._wiring.received(hello.src, hello.dst), hello.lane)

    def _call_at(self, at_s: float, act: Callable[[], None]) -> None:
        self._alarm.call_at(self._clock.monotonic(at_s), act)

    def _end_pair(self, pair: QueuePair, error: EmulatorError) -> None:
        hello = pair.hello
        self._past_retransmits += pair.retransmits()
        self._pairs.pop((hello.src, hello.dst, hello.lane), None)
        self._lose(hello.dst.node, error)

    def _lose(self, node: str, error: EmulatorError) -> None:
        """A connection to ``node`` broke. If that means the node is gone, fail all else that needs it."""
        if isinstance(error, PeerLost):
            self._rpc.lose(node, error)
            self._rings.lose(node, error)
            # Out of the table first, or each would bring down the next from inside.
            for pair in [self._pairs.pop(key) for key in list(self._pairs) if key[1].node == node]:
                pair.fail(error)

    async def serve_endpoints(self, listener: socket.socket, nic: str, endpoints: Collection[Endpoint]) -> None:
        """Accept the queue pairs that end in ``endpoints``, sides of ``nic`` that share an address."""
        tos, window = self._addresses.tos[VirtualLane.CONTROL], self._windows.get(nic)
        while True:
            sock = await accept(listener, tos, window)
            self._nursery.start_soon(self._receive, sock, endpoints)

    async def _receive(self, sock: socket.socket, endpoints: Collection[Endpoint]) -> None:
        reception = Reception(
            sock,
            self.node,
            endpoints,
            self._address_of,
            self._regions,
            self._marks,
            self._books,
            self._receiver_costs,
            self._clock.now,
            self.sleep_until,
            self._buffer,
        )
        self._receptions.add(reception)
        hello, error = await reception.run()
        self._receptions.discard(reception)
        self._past_retransmits += reception.retransmits()
        if hello is not None:
            self._lose(hello.src.node, error)

    async def serve_calls(self, listener: socket.socket) -> None:
        """Accept the connections over which other nodes call this one."""
        while True:
            sock = await accept(listener, 0, None)
            self._nursery.start_soon(self._answer, sock)

    async def _answer(self, sock: socket.socket) -> None:
        peer, error = await self._rpc.answer(sock)
        if peer is not None:
            self._lose(peer, error)


@asynccontextmanager
async def open_tcp_fabric(
    node: str,
    addresses: Addresses,
    clock: WallClock,
    rpc_latency_s: float,
    *,
    rates: Mapping[str, float] | None = None,
    local: LocalRates = LocalRates(),  # noqa: B008 (frozen)
    window_s: float = 1.0,
    lane_map: Mapping[VirtualLane, VirtualLane] = NO_LANE_MAP,
    make_socket: MakeSocket = socket.socket,
) -> AsyncIterator[TcpFabric]:
    """The fabric of ``node``, listening on all its addresses from the first moment on.

    ``rates``: payload bytes per *wall* second of this node's NICs by name, from which the socket buffers
    follow; a NIC without one is not shaped, and its sockets grow as the kernel sees fit. ``local``: the rates of
    this node's DRAM and PCIe links, where they count. ``rpc_latency_s`` and ``window_s`` (of the port counters)
    are model seconds. ``lane_map``: the lane that carries what is asked
    to go on another, for all nodes alike; counters name the lane that carried. ``make_socket`` makes every socket;
    a harness that hosts several nodes hands in one that works in the node's namespace.

    Raises EmulatorError when an address cannot be listened on. Errors of the body and of handlers come out in
    an exception group, as from any nursery.
    """
    if clock.now() < 0:
        raise ValueError("the clock's epoch is in the future; counters need model times from 0 on")
    with ExitStack() as stack:

        def listener(address: str, port: int, tos: int) -> socket.socket:
            try:
                return stack.enter_context(listen(make_socket, address, port, tos))
            except OSError as error:
                raise EmulatorError(f"{node}: cannot listen on {address}:{port}: {error.strerror}") from None

        control = addresses.tos[VirtualLane.CONTROL]
        own = [(endpoint, ip) for endpoint, ip in addresses.endpoints.items() if endpoint.node == node]
        listeners: list[tuple[str, list[Endpoint], socket.socket]] = [
            (endpoint.nic, [endpoint], listener(ip, addresses.data_port, control)) for endpoint, ip in own
        ]
        inside = [Endpoint(node, nic, side) for nic in (FREE_NIC, *map(pcie_of, local.pcie)) for side in SIDES]
        listeners.append((FREE_NIC, inside, listener(addresses.management[node], addresses.data_port, 0)))
        calls = listener(addresses.management[node], addresses.rpc_port, 0)
        alarm = stack.enter_context(open_alarm())
        async with trio.open_nursery() as nursery:
            fabric = TcpFabric(
                node,
                addresses,
                clock,
                alarm,
                nursery,
                rpc_latency_s=rpc_latency_s,
                rates=rates or {},
                local=local,
                window_s=window_s,
                lane_map=lane_map,
                make_socket=make_socket,
            )
            nursery.start_soon(alarm.run)
            for nic, endpoints, sock in listeners:
                nursery.start_soon(fabric.serve_endpoints, sock, nic, endpoints)
            nursery.start_soon(fabric.serve_calls, calls)
            try:
                yield fabric
            finally:
                nursery.cancel_scope.cancel()
