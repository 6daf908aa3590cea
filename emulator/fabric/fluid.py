"""The Fabric in virtual time: all nodes in one process, bytes as a fluid, every NIC direction a shared resource.

A ``FluidNetwork`` holds the nodes; ``open_fluid`` runs it under ``run_virtual``. A queue pair is a ``Pipe`` of
``flow``, which says when a message is over; ``fluid_pair`` moves its bytes in one step when it is placed: until
then its memory is in use, and whoever overwrites it too early corrupts it as over a wire. Counters attribute a
message's bytes to the moment of its placing.

Must not import ``tcp`` or anything above.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar, cast

import msgspec
import trio

from ..errors import EmulatorError, PeerLost, ProtocolViolation, error_from_code
from ..extent import Extent
from ..records import ExchangeRecord, PortBytes, TransferBytes
from .collective import Hop
from .counter import Counter, Lost
from .flow import Engine, Pipe, Port
from .fluid_collective import FluidRings
from .fluid_pair import Bulk, End, Pair, Posted, Route, Stream, gone
from .interface import (
    Endpoint,
    Exchanged,
    Fabric,
    Marks,
    Method,
    Region,
    Ring,
    Segment,
    Target,
    VirtualLane,
    WriteStream,
)
from .maxmin import LaneRule
from .meter import Books
from .wiring import DIRECTIONS, DRAM, Crossing, Wiring, pcie_of

__all__ = ["LANE_RULES", "FluidFabric", "FluidNetwork", "open_fluid"]

Q = TypeVar("Q", bound=msgspec.Struct)
A = TypeVar("A", bound=msgspec.Struct)

LANE_RULES: Mapping[VirtualLane, LaneRule] = MappingProxyType(
    {
        VirtualLane.CONTROL: LaneRule(0.005, 0),
        VirtualLane.MODEL: LaneRule(0.985, 0),
        VirtualLane.KV: LaneRule(0.010, 1),
    }
)
"""The shares of the shaped links. A lane without a rule shares CONTROL's, the default class of a port."""


class FluidNetwork:
    """The nodes of a cluster and the ports that join them.

    ``ports``: payload bytes per model second of each (node, nic), in each direction. ``nodes``: every node's
    name, those without ports (scheduler, client) too. ``rpc_latency_s``: each way of a call.
    ``message_latency_s``: from a message's last byte leaving to its being placed; 0 by default, since what a
    switch adds is far below a layer's transfer time. ``window_s``: width of the port counters' windows.
    ``lane_map``: the lane that carries what is asked to go on another; counters name the lane that carried.
    ``dram``, ``pcie``: rates of nodes' DRAM and of the PCIe links of (node, NIC), where they count (``wiring``).
    """

    def __init__(
        self,
        ports: Mapping[tuple[str, str], float],
        *,
        nodes: Sequence[str],
        shares: Mapping[VirtualLane, LaneRule] = LANE_RULES,
        rpc_latency_s: float,
        message_latency_s: float = 0.0,
        window_s: float = 0.1,
        lane_map: Mapping[VirtualLane, VirtualLane] = MappingProxyType({}),
        dram: Mapping[str, float] = MappingProxyType({}),
        pcie: Mapping[tuple[str, str], float] = MappingProxyType({}),
    ) -> None:
        for name, latency_s in (("rpc_latency_s", rpc_latency_s), ("message_latency_s", message_latency_s)):
            if not 0 <= latency_s < math.inf:
                raise ValueError(f"{name} {latency_s}: expected 0 or more, and finite")
        self.engine = Engine({int(lane): rule for lane, rule in shares.items()})
        self.rpc_latency_s = rpc_latency_s
        self._message_latency_s = message_latency_s
        self._shares = shares
        self._lane_map = lane_map
        self._wiring = Wiring(ports, dram, pcie)
        self._ports = _ports(nodes, ports, dram, pcie)
        self._pairs: dict[tuple[Endpoint, Endpoint, VirtualLane], Pair] = {}
        books = {node: Books(window_s) for node in nodes}
        self.rings = FluidRings(self.engine, rpc_latency_s, books, self._send)
        self._fabrics = {node: FluidFabric(self, node, books[node]) for node in nodes}
        self._nursery: trio.Nursery | None = None

    def fabric(self, node: str) -> FluidFabric:
        """The node's view of the network. ProtocolViolation for an unknown node."""
        try:
            return self._fabrics[node]
        except KeyError:
            raise ProtocolViolation(f"no node {node!r} in this network") from None

    def kill(self, node: str) -> None:
        """The node is gone: whatever involves it ends in PeerLost, its handlers are cancelled."""
        dead = self.fabric(node)
        if dead.lost:
            return
        dead.lost = True
        for pair in list(self._pairs.values()):
            if dead.end in (pair.sender, pair.receiver):
                pair.pipe.lose(node)
        self.rings.lose(node, gone(node))
        for fabric in self._fabrics.values():
            fabric.on_lost(node)

    def serve_in(self, nursery: trio.Nursery) -> None:
        """Run the nodes' handlers in ``nursery``."""
        self._nursery = nursery

    def spawn(self, async_fn: Callable[[], Awaitable[None]], name: str) -> None:
        """Run a handler in a task of its own."""
        if self._nursery is None:
            raise RuntimeError("the network is not open: use open_fluid")
        self._nursery.start_soon(async_fn, name=name)

    def lane(self, lane: VirtualLane) -> VirtualLane:
        """The lane that carries what is asked to go on ``lane``."""
        return self._lane_map.get(lane, lane)

    def pair(self, src: Endpoint, dst: Endpoint, lane: VirtualLane) -> Pair:
        """The queue pair on the lane that carries, made on first use.

        ProtocolViolation for a port that is not there.
        """
        key = (src, dst, lane)
        pair = self._pairs.get(key)
        if pair is None:
            crossed = self._wiring.crossed(src, dst)
            ports = tuple(self._ports[crossing] for crossing in crossed)
            meters = tuple(self._fabrics[c.node].end.books.port(c.nic, c.direction, lane) for c in crossed)
            shared = lane if lane in self._shares else VirtualLane.CONTROL
            pipe = Pipe(self.engine, ports, int(shared), self._message_latency_s if ports else 0.0)
            ends = self._fabrics[src.node].end, self._fabrics[dst.node].end
            pair = self._pairs[key] = Pair(pipe, ends, meters)
        return pair

    def _send(self, hop: Hop, lane: VirtualLane, over: Callable[[], None]) -> None:
        Bulk(self.pair(hop.src, hop.dst, lane), hop.size_bytes, over).post()


def _ports(
    nodes: Sequence[str],
    nics: Mapping[tuple[str, str], float],
    dram: Mapping[str, float],
    pcie: Mapping[tuple[str, str], float],
) -> dict[Crossing, Port]:
    """A port for each direction of a NIC and of a PCIe link, one for both of DRAM. ValueError for a bad one."""

    def port(node: str, nic: str, rate: float, *, laned: bool) -> Port:
        if not 0 < rate < math.inf:
            raise ValueError(f"port {node}/{nic}: rate {rate}: expected a positive, finite number")
        if node not in nodes:
            raise ValueError(f"port {node}/{nic}: no node {node}")
        return Port(rate, laned=laned)

    found: dict[Crossing, Port] = {}
    for direction in DIRECTIONS:
        for (node, nic), rate in nics.items():
            found[Crossing(node, nic, direction)] = port(node, nic, rate, laned=True)
        for (node, nic), rate in pcie.items():
            found[Crossing(node, pcie_of(nic), direction)] = port(node, pcie_of(nic), rate, laned=False)
    for node, rate in dram.items():
        both = port(node, DRAM, rate, laned=False)
        found |= {Crossing(node, DRAM, direction): both for direction in DIRECTIONS}
    return found


@asynccontextmanager
async def open_fluid(network: FluidNetwork) -> AsyncIterator[FluidNetwork]:
    """Run the network until the block is left, under ``run_virtual`` (else RuntimeError).

    An exception of a handler that is no EmulatorError cancels the block and comes out of it. However the block
    ends, time goes on until all that its tasks had begun to send is in place, since they wait for that.
    """
    stop = trio.CancelScope(shield=True)

    async def run_engine(*, task_status: trio.TaskStatus[None]) -> None:
        with stop:
            await network.engine.run(task_status=task_status)

    async with trio.open_nursery() as engine:
        await engine.start(run_engine)
        try:
            async with trio.open_nursery() as handlers:
                network.serve_in(handlers)
                try:
                    yield network
                finally:
                    handlers.cancel_scope.cancel()
        finally:
            stop.cancel()


class _Tag(Counter, Marks):
    """The marks of one tag at one node, and the nodes that send to it."""

    def __init__(self, forget: Callable[[_Tag], None]) -> None:
        super().__init__()
        self.senders: dict[str, None] = {}
        self._forget = forget

    @property
    def arrived(self) -> int:
        return self.value

    def arrived_s(self, count: int) -> float:
        return self.reached_s(count)

    def forget(self) -> None:
        self._forget(self)


class _Call:
    """A request and its reply, by reference; the caller waits as ``task`` until ``complete``."""

    def __init__(self, caller: FluidFabric, callee: FluidFabric, method: str, request: object) -> None:
        self.caller = caller
        self.callee = callee
        self.method = method
        self.request = request
        self.reply: object = None
        self.lost: Lost | None = None
        self._task = trio.lowlevel.current_task()

    def complete(self, reply: object, lost: Lost | None) -> None:
        """The reply, or what to raise, is here. Nobody waits for it if the caller gave up or is told already."""
        if self.caller.calls.pop(self, False):
            self.reply, self.lost = reply, lost
            trio.lowlevel.reschedule(self._task)


class FluidFabric(Fabric):
    """One node of a ``FluidNetwork``."""

    def __init__(self, network: FluidNetwork, node: str, books: Books) -> None:
        self.node = node
        self.lost = False
        self.end = End(node, network.engine, books)
        self.calls: dict[_Call, bool] = {}
        self._network = network
        self._regions: dict[str, Region] = {}
        self._tags: dict[str, _Tag] = {}
        self._handlers: dict[str, Callable[[Any], Awaitable[Any]]] = {}
        self._serving: dict[trio.CancelScope, None] = {}

    def now(self) -> float:
        return trio.current_time()

    async def sleep_until(self, at_s: float) -> None:
        await trio.sleep_until(at_s)

    def register(self, name: str, size_bytes: int) -> Region:
        if name in self._regions:
            raise ValueError(f"{self.node} has a region {name!r} already")
        region = self._regions[name] = Region.allocate(name, size_bytes)
        return region

    async def write(
        self, target: Target, local: Region, segment: Segment, *, tag: str = "", after_s: float = 0.0
    ) -> None:
        if after_s > 0:
            await trio.sleep(after_s)
        await trio.lowlevel.checkpoint_if_cancelled()
        task = trio.lowlevel.current_task()
        failed: Lost | None = None

        def over(_: Posted, lost: Lost | None) -> None:
            nonlocal failed
            failed = lost
            trio.lowlevel.reschedule(task)

        def abort(raise_cancel: object) -> trio.lowlevel.Abort:
            return trio.lowlevel.Abort.SUCCEEDED if message.drop() else trio.lowlevel.Abort.FAILED

        message = Posted(self._route(target, local, (segment,), tag), segment, over)
        message.post()
        await trio.lowlevel.wait_task_rescheduled(abort)
        if failed is not None:
            raise failed()

    def open_stream(
        self, target: Target, local: Region, segments: Sequence[Segment], *, tag: str = ""
    ) -> WriteStream:
        stream = Stream(self._route(target, local, segments, tag), segments)
        self.end.streams[stream] = None
        return stream

    def marks(self, tag: str) -> Marks:
        return self._tag(tag)

    def serve(self, method: Method[Q, A], handler: Callable[[Q], Awaitable[A]]) -> None:
        if method.name in self._handlers:
            raise ValueError(f"{self.node} serves {method.name!r} already")
        self._handlers[method.name] = handler

    async def call(self, node: str, method: Method[Q, A], request: Q) -> A:
        await trio.lowlevel.checkpoint_if_cancelled()
        call = _Call(self, self._peer(node), method.name, request)
        self.calls[call] = True
        self._network.engine.after(self._network.rpc_latency_s, lambda _: call.callee.answer(call))

        def abort(raise_cancel: object) -> trio.lowlevel.Abort:
            del self.calls[call]
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
        if call.lost is not None:
            raise call.lost()
        return cast(A, call.reply)

    async def collective(
        self,
        ring: Ring,
        payload: Mapping[Endpoint, int],
        *,
        ready_s: float,
        amount: int = 0,
        lane: VirtualLane = VirtualLane.MODEL,
    ) -> Exchanged:
        await trio.lowlevel.checkpoint_if_cancelled()
        carried = self._network.lane(lane)
        return await self._network.rings.enter(self.node, ring, payload, ready_s, amount, carried).wait()

    async def wait_entered(self, ring: Ring) -> None:
        await self._network.rings.wait_entered(self.node, ring)

    def exchanges(self) -> tuple[ExchangeRecord, ...]:
        return self.end.books.exchanges()

    def sent(self) -> tuple[TransferBytes, ...]:
        return self.end.books.sent()

    def received(self) -> tuple[TransferBytes, ...]:
        return self.end.books.received()

    def ports(self) -> tuple[PortBytes, ...]:
        return self.end.books.ports(self.now())

    def _route(self, target: Target, local: Region, segments: Sequence[Segment], tag: str) -> Route:
        """Resolve and check a target. PeerLost for a dead node, ProtocolViolation for what is not there."""
        if target.src.node != self.node:
            raise ProtocolViolation(f"{self.node} cannot send from {target.src.node}")
        peer = self._peer(target.dst.node)
        remote = peer._regions.get(target.region)
        if remote is None:
            raise ProtocolViolation(f"{peer.node} has no region {target.region!r}")
        for segment in segments:
            if _end(segment.local) > local.size_bytes:
                raise ValueError(
                    f"gather ends at {_end(segment.local)}, region {local.name!r} has {local.size_bytes} bytes"
                )
            if _end(segment.remote) > remote.size_bytes:
                raise ProtocolViolation(
                    f"scatter ends at {_end(segment.remote)}, region {remote.name!r} of {peer.node} has"
                    f" {remote.size_bytes} bytes"
                )
        mark = None
        if tag:
            mark = peer._tag(tag)
            mark.senders[self.node] = None
        return Route(
            self._network.pair(target.src, target.dst, self._network.lane(target.lane)),
            target,
            local,
            remote,
            mark,
        )

    def _peer(self, node: str) -> FluidFabric:
        peer = self._network.fabric(node)
        for end in (self, peer):
            if end.lost:
                raise PeerLost(f"node {end.node} is gone", definite=True)
        return peer

    def _tag(self, tag: str) -> _Tag:
        found = self._tags.get(tag)
        if found is None:

            def forget(mark: _Tag) -> None:
                if self._tags.get(tag) is mark:
                    del self._tags[tag]

            found = self._tags[tag] = _Tag(forget)
        return found

    def answer(self, call: _Call) -> None:
        """A request has arrived: handle it in a task of its own."""
        if not self.lost:
            self._network.spawn(partial(self._handle, call), f"{self.node} serves {call.method}")

    async def _handle(self, call: _Call) -> None:
        if self.lost:
            return
        reply, lost = None, None
        handler = self._handlers.get(call.method)
        scope = trio.CancelScope()
        self._serving[scope] = None
        try:
            with scope:
                if handler is None:
                    raise ProtocolViolation(f"{self.node} does not serve {call.method!r}")
                reply = await handler(call.request)
        except EmulatorError as error:
            lost = partial(error_from_code, error.code, error.text, error.definite)
        finally:
            del self._serving[scope]
        if not self.lost:
            self._network.engine.after(self._network.rpc_latency_s, lambda _: call.complete(reply, lost))

    def on_lost(self, node: str) -> None:
        """``node`` (maybe this one) is gone: end what waits for it."""
        lost = gone(node)
        here = node == self.node
        for scope in list(self._serving) if here else ():
            scope.cancel()
        for tag in list(self._tags.values()):
            if here or node in tag.senders:
                tag.fail(lost)
        for stream in list(self.end.streams):
            if here or stream.peer == node:
                stream.peer_lost(lost)
        for call in list(self.calls):
            if here or call.callee.node == node:
                call.complete(None, lost)


def _end(extents: Sequence[Extent]) -> int:
    return max((extent.end for extent in extents), default=0)
