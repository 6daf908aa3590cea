"""The Fabric in virtual time: bytes as a fluid, every NIC direction a resource shared by max-min.

One ``FluidNetwork`` holds all nodes of a cluster in one process. A queue pair is an in-order pipe with one
message in flight; all that have something to send share their ports as ``maxmin`` says. Rates change only
when a QP begins or ceases to have messages, and then only in the connected component that it touches.

Theory of operation. An engine task (``open_fluid``) is a ``TimeSource`` of the ``VirtualClock``. While any
task can run, posts only note which QPs changed. When none can, the instant is over: the engine settles the
rates of what changed, and each active QP has a *predicted* finish time on a heap; time jumps to the first of
them. A message ends at its prediction, never by remaining bytes reaching 0. Then its bytes are gathered and
scattered at once: its memory is in use until it is placed, and whoever overwrites it too early corrupts it
here as over a wire. The next message of the QP follows at the same rate.

Order is a function of program and seed: ties on the heap break by posting order, nothing iterates a set.

Must not import ``tcp`` or anything above.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal, TypeVar, cast

import msgspec
import numpy as np
import trio

from ..errors import EmulatorError, PeerLost, ProtocolViolation, error_from_code
from ..extent import gather, scatter
from ..records import PortBytes, TransferBytes
from .clock import VirtualClock
from .interface import (
    Endpoint,
    Fabric,
    Marks,
    Method,
    Region,
    Segment,
    Target,
    Transfer,
    VirtualLane,
    WriteStream,
)
from .maxmin import Flow, LaneRule, allocate

__all__ = ["LANE_RULES", "FluidFabric", "FluidNetwork", "open_fluid"]

Q = TypeVar("Q", bound=msgspec.Struct)
A = TypeVar("A", bound=msgspec.Struct)
Lost = Callable[[], Exception]
Direction = Literal["read", "write"]
_DIRECTIONS: tuple[Direction, Direction] = ("read", "write")

LANE_RULES: Mapping[VirtualLane, LaneRule] = {
    VirtualLane.CONTROL: LaneRule(0.005, 0),
    VirtualLane.MODEL: LaneRule(0.985, 0),
    VirtualLane.KV: LaneRule(0.010, 1),
}
"""The shares of the shaped links. A lane without a rule shares CONTROL's, the default class of a port."""


class FluidNetwork:
    """The nodes of a cluster and the ports that join them.

    ``ports``: payload bytes per model second of each (node, nic), in each direction. ``nodes``: every node's
    name, those without ports (scheduler, client) too. ``rpc_latency_s``: each way of a call.
    ``message_latency_s``: from a message's last byte leaving to its being placed; 0 by default, as on a
    switch whose propagation is far below a layer's transfer time. ``window_s``: width of the port counters'
    windows.
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
    ) -> None:
        for (node, nic), rate in ports.items():
            if not 0 < rate < math.inf:
                raise ValueError(f"port {node}/{nic}: rate {rate}: expected positive and finite")
            if node not in nodes:
                raise ValueError(f"port {node}/{nic}: no node {node}")
        if (
            not 0 < window_s < math.inf
            or not 0 <= rpc_latency_s < math.inf
            or not 0 <= message_latency_s < math.inf
        ):
            raise ValueError(
                "window_s: expected positive; rpc_latency_s, message_latency_s: 0 or more; all finite"
            )
        self._shares = shares
        self._rules: dict[int, LaneRule] = {int(lane): rule for lane, rule in shares.items()}
        self._rpc_latency_s = rpc_latency_s
        self._message_latency_s = message_latency_s
        self._engine = _Engine(self._rules)
        self._ports: dict[tuple[str, str, Direction], _Port] = {
            (node, nic, direction): _Port(rate, window_s)
            for (node, nic), rate in ports.items()
            for direction in _DIRECTIONS
        }
        self._pairs: dict[tuple[Endpoint, Endpoint, VirtualLane], _Pair] = {}
        self._fabrics = {node: FluidFabric(self, node) for node in nodes}

    def fabric(self, node: str) -> FluidFabric:
        """The node's view of the network. KeyError for an unknown node."""
        return self._fabrics[node]

    def kill(self, node: str) -> None:
        """The node is gone: whatever involves it ends in PeerLost, its handlers are cancelled."""
        dead = self._fabrics[node]
        if dead._lost:
            return
        dead._lost = True
        for pair in list(self._pairs.values()):
            if dead in pair.ends:
                pair.fail(_gone(node))
        for fabric in self._fabrics.values():
            fabric._peer_lost(node)

    def _pair(self, target: Target) -> _Pair:
        key = (target.src, target.dst, target.lane)
        pair = self._pairs.get(key)
        if pair is None:
            crossed = tuple(
                self._port(endpoint, direction)
                for endpoint, direction in zip((target.src, target.dst), _DIRECTIONS, strict=True)
            )
            lane = int(target.lane) if target.lane in self._shares else int(VirtualLane.CONTROL)
            ends = self._fabrics[target.src.node], self._fabrics[target.dst.node]
            pair = _Pair(self._engine, ends, target, ports=crossed, lane=lane, latency_s=self._message_latency_s)
            self._pairs[key] = pair
        return pair

    def _port(self, endpoint: Endpoint, direction: Direction) -> _Port:
        try:
            return self._ports[endpoint.node, endpoint.nic, direction]
        except KeyError:
            raise ProtocolViolation(f"no port {endpoint.node}/{endpoint.nic} in this network") from None


@asynccontextmanager
async def open_fluid(network: FluidNetwork) -> AsyncIterator[FluidNetwork]:
    """Run the network's engine, and the handlers that its nodes serve, until the block is left.

    Needs ``run_virtual``. An exception of a handler that is no EmulatorError comes out here.
    """
    clock = trio.lowlevel.current_clock()
    if not isinstance(clock, VirtualClock):
        raise RuntimeError("a fluid network runs in virtual time only: use run_virtual")
    async with trio.open_nursery() as nursery:
        await nursery.start(network._engine.run, clock, nursery)
        try:
            yield network
        finally:
            nursery.cancel_scope.cancel()


class _Engine:
    """Virtual time's agent of one network: pending events, and rates that are settled when an instant ends."""

    def __init__(self, rules: Mapping[int, LaneRule]) -> None:
        self._rules = rules
        self._clock: VirtualClock | None = None
        self._nursery: trio.Nursery | None = None
        self._task: trio.lowlevel.Task | None = None
        self._events: list[tuple[float, int, Callable[[], None] | None, _Pair | None, int]] = []
        self._posted = 0
        self._changed: dict[_Pair, None] = {}

    @property
    def now(self) -> float:
        assert self._clock is not None, "the network is not open"
        return self._clock.current_time()

    async def run(self, clock: VirtualClock, nursery: trio.Nursery, task_status: trio.TaskStatus[None]) -> None:
        """Wait until the clock says that something is due, deal with it, and so on."""
        self._clock, self._nursery = clock, nursery
        clock.attach(self)
        try:
            task_status.started()
            while True:
                self._task = trio.lowlevel.current_task()
                await trio.lowlevel.wait_task_rescheduled(self._abort)
                if not self._fire():
                    self._settle()
        finally:
            clock.detach(self)

    def _abort(self, raise_cancel: Callable[[], None]) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED

    def due(self) -> float:
        if self._changed:
            return self.now
        return self._events[0][0] if self._events else math.inf

    def wake(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    def spawn(self, async_fn: Callable[[], Awaitable[None]], name: str) -> None:
        assert self._nursery is not None, "the network is not open"
        self._nursery.start_soon(async_fn, name=name)

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """Call ``act`` when ``delay_s`` have passed."""
        self._posted += 1
        heapq.heappush(self._events, (self.now + delay_s, self._posted, act, None, 0))

    def finish_at(self, at_s: float, pair: _Pair) -> None:
        """The pair's first message ends then, unless its rate changes before."""
        self._posted += 1
        heapq.heappush(self._events, (at_s, self._posted, None, pair, pair.prediction))

    def changed(self, pair: _Pair) -> None:
        """The pair began or ceased to have something to send: rates are settled when the instant is over."""
        self._changed[pair] = None

    def _fire(self) -> bool:
        """Do all that is due; True if anything was."""
        now, events, fired = self.now, self._events, False
        while events and events[0][0] <= now:
            _, _, act, pair, prediction = heapq.heappop(events)
            if act is not None:
                act()
            elif pair is None or prediction != pair.prediction:
                continue
            else:
                pair.finish()
            fired = True
        return fired

    def _settle(self) -> None:
        """New rates for everything that shares ports, however indirectly, with a pair that changed."""
        now = self.now
        ports: dict[_Port, int] = {}
        waiting = [port for pair in self._changed for port in pair.ports]
        self._changed.clear()
        flows: dict[_Pair, None] = {}
        while waiting:
            port = waiting.pop()
            if port in ports:
                continue
            ports[port] = len(ports)
            for pair in port.active:
                if pair not in flows:
                    flows[pair] = None
                    waiting.extend(pair.ports)
        rates = allocate(
            [Flow(tuple(ports[port] for port in pair.ports), pair.lane) for pair in flows],
            [port.rate for port in ports],
            self._rules,
        )
        for pair, rate in zip(flows, rates, strict=True):
            pair.set_rate(rate, now)


class _Port:
    """One direction of one NIC: its rate, the pairs that are sending on it, and its counters by lane."""

    def __init__(self, rate: float, window_s: float) -> None:
        self.rate = rate
        self.window_s = window_s
        self.active: dict[_Pair, None] = {}
        self.counts: dict[VirtualLane, _PortCount] = {}

    def count(self, lane: VirtualLane) -> _PortCount:
        found = self.counts.get(lane)
        if found is None:
            found = self.counts[lane] = _PortCount(self.window_s)
        return found


class _PortCount:
    """Counters of one lane of one port direction."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self.payload_bytes = 0
        self.messages = 0
        self.windows: list[float] = []
        self._users = 0
        self._busy_since = 0.0
        self._busy_s = 0.0

    def begin(self, now: float) -> None:
        if not self._users:
            self._busy_since = now
        self._users += 1

    def end(self, now: float) -> None:
        self._users -= 1
        if not self._users:
            self._busy_s += now - self._busy_since

    def busy_s(self, now: float) -> float:
        return self._busy_s + (now - self._busy_since if self._users else 0.0)

    def flowed(self, since: float, until: float, moved: float) -> None:
        """``moved`` bytes passed evenly from ``since`` to ``until``: divide them among the windows."""
        width = self.window_s
        first, last = int(since / width), int(until / width)
        if len(self.windows) <= last:
            self.windows.extend([0.0] * (last + 1 - len(self.windows)))
        if first == last or until <= since:
            self.windows[last] += moved
            return
        per_s = moved / (until - since)
        self.windows[first] += per_s * ((first + 1) * width - since)
        for window in range(first + 1, last):
            self.windows[window] += per_s * width
        self.windows[last] += per_s * (until - last * width)

    def whole_windows(self) -> tuple[int, ...]:
        """The windows as whole bytes whose sum is the whole bytes of the sum."""
        out, passed, told = [], 0.0, 0
        for moved in self.windows:
            passed += moved
            out.append(round(passed) - told)
            told = round(passed)
        return tuple(out)


class _Message:
    """One segment on its way; ``done`` tells the sender that it is in place, or lost.

    ``begun``: it is, or was, its pair's first, so that its memory is in use until it is over.
    """

    __slots__ = ("begun", "done", "route", "segment")

    def __init__(self, route: _Route, segment: Segment, done: Callable[[_Message, Lost | None], None]) -> None:
        self.route = route
        self.segment = segment
        self.done = done
        self.begun = False


class _Route:
    """Where messages of one write or stream go, resolved and checked once."""

    __slots__ = ("local", "pair", "remote", "tag", "transfer")

    def __init__(self, pair: _Pair, transfer: Transfer, local: Region, remote: Region, tag: _Tag | None) -> None:
        self.pair = pair
        self.transfer = transfer
        self.local = local
        self.remote = remote
        self.tag = tag


class _Pair:
    """A queue pair: messages in order, the first of them in flight at ``rate`` since ``since``."""

    def __init__(
        self,
        engine: _Engine,
        ends: tuple[FluidFabric, FluidFabric],
        target: Target,
        *,
        ports: tuple[_Port, ...],
        lane: int,
        latency_s: float,
    ) -> None:
        self.ends = ends
        self.ports = ports
        self.lane = lane
        self.prediction = 0
        """Which of the predicted finish times holds: the others on the heap are void."""
        self._engine = engine
        self._counts = tuple(port.count(target.lane) for port in ports)
        self._latency_s = latency_s
        self._queue: deque[_Message] = deque()
        self._landing: deque[_Message] = deque()
        self._remaining = 0.0
        self._rate = 0.0
        self._since = 0.0

    def post(self, message: _Message) -> None:
        self._queue.append(message)
        if len(self._queue) == 1:
            now = self._engine.now
            for port in self.ports:
                port.active[self] = None
            for count in self._counts:
                count.begin(now)
            self._rate = 0.0
            self._engine.changed(self)
            self._begin(now)

    def drop(self, message: _Message) -> bool:
        """Take back a message that has not begun; False if it has, or is over."""
        if message.begun or message not in self._queue:
            return False
        self._queue.remove(message)
        return True

    def set_rate(self, rate: float, now: float) -> None:
        """Go on at ``rate``; what has flowed so far is counted."""
        if rate != self._rate:
            self._flow(now, self._rate * (now - self._since))
            self._rate = rate
            self._predict(now)

    def finish(self) -> None:
        """The first message's last byte has left: land it, and begin the next."""
        now = self._engine.now
        self._flow(now, self._remaining)
        message = self._queue.popleft()
        if self._queue:
            self._begin(now)
        else:
            self._cease(now)
        if self._latency_s:
            self._landing.append(message)
            self._engine.after(self._latency_s, self._land_first)
        else:
            self._land(message)

    def fail(self, lost: Lost) -> None:
        """End everything that is posted: the peer is gone."""
        over = [*self._landing, *self._queue]
        self._landing.clear()
        if self._queue:
            self._queue.clear()
            self._cease(self._engine.now)
        for message in over:
            message.done(message, lost)

    def _begin(self, now: float) -> None:
        message = self._queue[0]
        message.begun = True
        self._remaining = float(message.segment.size_bytes)
        self._since = now
        self._predict(now)

    def _predict(self, now: float) -> None:
        self.prediction += 1
        if self._remaining <= 0:
            self._engine.finish_at(now, self)
        elif self._rate > 0:
            self._engine.finish_at(now + self._remaining / self._rate, self)

    def _flow(self, now: float, moved: float) -> None:
        moved = min(moved, self._remaining)
        if moved > 0:
            for count in self._counts:
                count.flowed(self._since, now, moved)
        self._remaining -= moved
        self._since = now

    def _cease(self, now: float) -> None:
        self.prediction += 1
        self._rate = 0.0
        for port in self.ports:
            del port.active[self]
        for count in self._counts:
            count.end(now)
        self._engine.changed(self)

    def _land_first(self) -> None:
        if self._landing:
            self._land(self._landing.popleft())

    def _land(self, message: _Message) -> None:
        """Put the bytes in place, count them on both sides, tell both sides."""
        route, segment = message.route, message.segment
        size = segment.size_bytes
        if size:
            scatter(route.remote.memory, segment.remote, gather(route.local.memory, segment.local))
        for count in self._counts:
            count.payload_bytes += size
            count.messages += 1
        sender, receiver = self.ends
        for counted in (sender._sent, receiver._received):
            total = counted.setdefault((route.transfer.name, sender.node, receiver.node), [0, 0])
            total[0] += size
            total[1] += 1
        if route.tag is not None:
            route.tag.bump()
        message.done(message, None)


class _Counter:
    """A count that only grows, and those who wait for it to reach a value."""

    def __init__(self) -> None:
        self.value = 0
        self._lost: Lost | None = None
        self._waiting: dict[trio.lowlevel.Task, int] = {}

    def bump(self) -> None:
        self.value += 1
        for task in [task for task, count in self._waiting.items() if count <= self.value]:
            del self._waiting[task]
            trio.lowlevel.reschedule(task)

    def fail(self, lost: Lost) -> None:
        """It will not grow any more: who waits for more is told why."""
        if self._lost is None:
            self._lost = lost
            waiting, self._waiting = self._waiting, {}
            for task in waiting:
                trio.lowlevel.reschedule(task)

    async def wait(self, count: int) -> None:
        if count <= self.value or self._lost is not None:
            await trio.lowlevel.checkpoint()
        else:
            task = trio.lowlevel.current_task()
            self._waiting[task] = count

            def abort(raise_cancel: object) -> trio.lowlevel.Abort:
                del self._waiting[task]
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(abort)
        if count > self.value:
            assert self._lost is not None
            raise self._lost()


class _Tag(_Counter, Marks):
    """The marks of one tag at one node, and the nodes that send to it."""

    def __init__(self, forget: Callable[[_Tag], None]) -> None:
        super().__init__()
        self.senders: dict[str, None] = {}
        self._forget = forget

    @property
    def arrived(self) -> int:
        return self.value

    def forget(self) -> None:
        self._forget(self)


class _Stream(WriteStream):
    """Segments that are posted as they are released."""

    def __init__(self, route: _Route, segments: Sequence[Segment]) -> None:
        self._route = route
        self._segments = segments
        self._released = 0
        self._placed = _Counter()
        self._under_way: dict[_Message, None] = {}
        self._lost = False
        self._closed = False
        self._landed = trio.Event()

    def release(self, upto: int) -> None:
        if upto > len(self._segments):
            raise ValueError(f"release({upto}) of a stream of {len(self._segments)} segments")
        if self._closed:
            raise trio.ClosedResourceError("release on a closed stream")
        if self._lost:
            return
        for segment in self._segments[self._released : upto]:
            message = _Message(self._route, segment, self._over)
            self._under_way[message] = None
            self._route.pair.post(message)
        self._released = max(self._released, upto)

    @property
    def peer(self) -> str:
        return self._route.pair.ends[1].node

    @property
    def placed(self) -> int:
        return self._placed.value

    async def wait_placed(self, upto: int) -> None:
        if upto > len(self._segments):
            raise ValueError(f"wait_placed({upto}) of a stream of {len(self._segments)} segments")
        await self._placed.wait(upto)

    async def aclose(self) -> None:
        self._closed = True
        for message in [m for m in self._under_way if self._route.pair.drop(m)]:
            del self._under_way[message]
        self._placed.fail(_closed)
        self._route.pair.ends[0]._streams.pop(self, None)
        with trio.CancelScope(shield=True):
            if self._under_way:
                await self._landed.wait()
            else:
                await trio.lowlevel.checkpoint()

    def peer_lost(self, lost: Lost) -> None:
        self._lost = True
        self._placed.fail(lost)

    def _over(self, message: _Message, lost: Lost | None) -> None:
        del self._under_way[message]
        if lost is None:
            self._placed.bump()
        else:
            self.peer_lost(lost)
        if self._closed and not self._under_way:
            self._landed.set()


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
        if self.caller._calls.pop(self, False):
            self.reply, self.lost = reply, lost
            trio.lowlevel.reschedule(self._task)


class FluidFabric(Fabric):
    """One node of a ``FluidNetwork``."""

    def __init__(self, network: FluidNetwork, node: str) -> None:
        self.node = node
        self._network = network
        self._engine = network._engine
        self._lost = False
        self._regions: dict[str, Region] = {}
        self._tags: dict[str, _Tag] = {}
        self._streams: dict[_Stream, None] = {}
        self._handlers: dict[str, Callable[[Any], Awaitable[Any]]] = {}
        self._serving: dict[trio.CancelScope, None] = {}
        self._calls: dict[_Call, bool] = {}
        self._sent: dict[tuple[str, str, str], list[int]] = {}
        self._received: dict[tuple[str, str, str], list[int]] = {}

    def now(self) -> float:
        return trio.current_time()

    async def sleep_until(self, at_s: float) -> None:
        await trio.sleep_until(at_s)

    def register(self, name: str, size_bytes: int) -> Region:
        if name in self._regions:
            raise ValueError(f"{self.node} has a region {name!r} already")
        region = self._regions[name] = Region(name, np.zeros(size_bytes, dtype=np.uint8))
        return region

    async def write(self, target: Target, local: Region, segment: Segment, *, tag: str = "") -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        route = self._route(target, local, (segment,), tag)
        task = trio.lowlevel.current_task()
        failed: Lost | None = None

        def done(message: _Message, lost: Lost | None) -> None:
            nonlocal failed
            failed = lost
            trio.lowlevel.reschedule(task)

        def abort(raise_cancel: object) -> trio.lowlevel.Abort:
            return trio.lowlevel.Abort.SUCCEEDED if route.pair.drop(message) else trio.lowlevel.Abort.FAILED

        message = _Message(route, segment, done)
        route.pair.post(message)
        await trio.lowlevel.wait_task_rescheduled(abort)
        if failed is not None:
            raise failed()

    def open_stream(
        self, target: Target, local: Region, segments: Sequence[Segment], *, tag: str = ""
    ) -> WriteStream:
        stream = _Stream(self._route(target, local, segments, tag), segments)
        self._streams[stream] = None
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
        self._calls[call] = True
        self._engine.after(self._network._rpc_latency_s, partial(call.callee._answer, call))

        def abort(raise_cancel: object) -> trio.lowlevel.Abort:
            del self._calls[call]
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
        if call.lost is not None:
            raise call.lost()
        return cast(A, call.reply)

    def sent(self) -> tuple[TransferBytes, ...]:
        return _tally(self._sent)

    def received(self) -> tuple[TransferBytes, ...]:
        return _tally(self._received)

    def ports(self) -> tuple[PortBytes, ...]:
        """Sorted by NIC, direction and lane. Windows hold what is in flight up to its last change of rate."""
        now = self._engine.now
        return tuple(
            PortBytes(
                nic=nic,
                direction=direction,
                lane=int(lane),
                payload_bytes=count.payload_bytes,
                messages=count.messages,
                busy_s=count.busy_s(now),
                window_s=count.window_s,
                windows=count.whole_windows(),
            )
            for (node, nic, direction), port in sorted(self._network._ports.items(), key=lambda item: item[0])
            if node == self.node
            for lane, count in sorted(port.counts.items())
        )

    def _route(self, target: Target, local: Region, segments: Sequence[Segment], tag: str) -> _Route:
        """Resolve and check a target. PeerLost for a dead node, ProtocolViolation for what is not there."""
        if target.src.node != self.node:
            raise ProtocolViolation(f"{self.node} cannot send from {target.src.node}")
        peer = self._peer(target.dst.node)
        remote = peer._regions.get(target.region)
        if remote is None:
            raise ProtocolViolation(f"{peer.node} has no region {target.region!r}")
        for segment in segments:
            for extents, region in ((segment.local, local), (segment.remote, remote)):
                for extent in extents:
                    if extent.end > region.size_bytes:
                        raise ProtocolViolation(
                            f"extent ends at {extent.end}, region {region.name!r} has {region.size_bytes} bytes"
                        )
        mark = None
        if tag:
            mark = peer._tag(tag)
            mark.senders[self.node] = None
        return _Route(self._network._pair(target), target.transfer, local, remote, mark)

    def _peer(self, node: str) -> FluidFabric:
        peer = self._network._fabrics.get(node)
        if peer is None:
            raise ProtocolViolation(f"no node {node!r} in this network")
        for end in (self, peer):
            if end._lost:
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

    def _answer(self, call: _Call) -> None:
        """A request has arrived: handle it in a task of its own."""
        if not self._lost:
            self._engine.spawn(partial(self._handle, call), f"{self.node} serves {call.method}")

    async def _handle(self, call: _Call) -> None:
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
        if not self._lost:
            self._engine.after(self._network._rpc_latency_s, partial(call.complete, reply, lost))

    def _peer_lost(self, node: str) -> None:
        """``node`` (maybe this one) is gone: end what waits for it."""
        lost = _gone(node)
        here = node == self.node
        for scope in list(self._serving) if here else ():
            scope.cancel()
        for tag in list(self._tags.values()):
            if here or node in tag.senders:
                tag.fail(lost)
        for stream in list(self._streams):
            if here or stream.peer == node:
                stream.peer_lost(lost)
        for call in list(self._calls):
            if here or call.callee.node == node:
                call.complete(None, lost)


def _gone(node: str) -> Lost:
    return partial(PeerLost, f"node {node} is gone")


def _closed() -> Exception:
    return trio.ClosedResourceError("the stream was closed before")


def _tally(counts: Mapping[tuple[str, str, str], list[int]]) -> tuple[TransferBytes, ...]:
    return tuple(TransferBytes(*key, *counted) for key, counted in sorted(counts.items()))
