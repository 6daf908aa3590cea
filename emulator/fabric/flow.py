"""Queue pairs as pipes of fluid: when each message ends, in virtual time.

Ports have a rate, pipes cross ports and carry messages one after the other. All pipes that have something to
send share their ports as ``maxmin`` says. Knows sizes and times, and nothing of bytes, nodes or counters.

Theory of operation. The ``Engine`` is a ``TimeSource`` of the ``VirtualClock``. While any task can run, posts
only note which pipes changed. When none can, the instant is over: the engine settles the rates of every pipe
that shares a port, however indirectly, with one that changed, and each busy pipe's first message has a
*predicted* end on a heap. Time jumps to the first of them. A message ends at its prediction, never by its
remaining bytes reaching 0: below one ulp of the time no time passes, and they might never. The next message
of a pipe follows at the same rate, and a pipe that ran dry and was fed again within one instant has not
changed, so that writers one after the other cost no new rates.

Order is a function of program and seed: ties on the heap break by order of posting, nothing iterates a set.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping

import trio

from .clock import VirtualClock
from .maxmin import Flow, LaneRule, allocate

__all__ = ["Engine", "Message", "Pipe", "Port"]


class Message(ABC):
    """Something of ``size_bytes`` to send. ``begun``: it is, or was, the first of its pipe."""

    __slots__ = ("begun", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.begun = False

    def begin(self) -> None:
        """It is the first of its pipe from now on."""
        self.begun = True

    @abstractmethod
    def place(self) -> None:
        """Its last byte has arrived."""

    @abstractmethod
    def lose(self, node: str) -> None:
        """It will never arrive, because ``node`` is gone."""


class Port:
    """A resource that pipes share, as one direction of a NIC: its rate in bytes/s, and those sending through it.

    On one that is not ``laned`` all lanes are one.
    """

    def __init__(self, rate: float, *, laned: bool = True) -> None:
        self.rate = rate
        self.laned = laned
        self.busy: dict[Pipe, None] = {}


class Engine:
    """Pending events of one network, and its rates, which are settled when an instant is over.

    ``rules``: the lanes of every laned port. ``run`` must be running in a task; nothing is posted before.
    """

    def __init__(self, rules: Mapping[int, LaneRule]) -> None:
        self._rules = rules
        self._clock: VirtualClock | None = None
        self._task: trio.lowlevel.Task | None = None
        self._events: list[tuple[float, int, Callable[[int], None], int]] = []
        self._order = 0
        self._changed: dict[Pipe, None] = {}

    @property
    def now(self) -> float:
        if self._clock is None:
            raise RuntimeError("the network is not open: use open_fluid")
        return self._clock.current_time()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve the clock of this run until cancelled. RuntimeError where time is not virtual."""
        clock = trio.lowlevel.current_clock()
        if not isinstance(clock, VirtualClock):
            raise RuntimeError("a fluid network lives in virtual time only: use run_virtual")
        self._clock = clock
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

    def due(self) -> float:
        if self._changed:
            return self.now
        return self._events[0][0] if self._events else math.inf

    def wake(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    def after(self, delay_s: float, act: Callable[[int], None], argument: int = 0) -> None:
        """Call ``act(argument)`` when ``delay_s`` have passed."""
        self.at(self.now + delay_s, act, argument)

    def at(self, at_s: float, act: Callable[[int], None], argument: int = 0) -> None:
        """Call ``act(argument)`` at a time that has not passed; those of one instant in the order of asking."""
        self._order += 1
        heapq.heappush(self._events, (at_s, self._order, act, argument))

    def changed(self, pipe: Pipe) -> None:
        """The pipe ran dry or was fed: settle the rates when the instant is over."""
        self._changed[pipe] = None

    def _abort(self, raise_cancel: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED

    def _fire(self) -> bool:
        """Do all that is due; whether anything was. Tasks woken by it run before rates are settled."""
        now, events, fired = self.now, self._events, False
        while events and events[0][0] <= now:
            _, _, act, argument = heapq.heappop(events)
            act(argument)
            fired = True
        return fired

    def _settle(self) -> None:
        """New rates for the connected component of all pipes that began or ceased to be busy."""
        now = self.now
        waiting = [port for pipe in self._changed if pipe.settle() for port in pipe.ports]
        self._changed.clear()
        ports: dict[Port, int] = {}
        pipes: dict[Pipe, None] = {}
        while waiting:
            port = waiting.pop()
            if port not in ports:
                ports[port] = len(ports)
                for pipe in port.busy:
                    if pipe not in pipes:
                        pipes[pipe] = None
                        waiting.extend(pipe.ports)
        flows = [Flow(tuple(ports[port] for port in pipe.ports), pipe.lane) for pipe in pipes]
        laneless = [index for port, index in ports.items() if not port.laned]
        rates = allocate(flows, [port.rate for port in ports], self._rules, laneless)
        for pipe, rate in zip(pipes, rates, strict=True):
            pipe.set_rate(rate, now)


class Pipe:
    """A queue pair: messages in order, the first in flight, each placed ``latency_s`` after its last byte left.

    One that crosses no port is infinitely fast: its messages are over in the instant in which they are posted.
    A port that is crossed twice gives it half.
    """

    def __init__(self, engine: Engine, ports: tuple[Port, ...], lane: int, latency_s: float) -> None:
        self.ports = ports
        self.lane = lane
        self._engine = engine
        self._latency_s = latency_s
        self._queue: deque[Message] = deque()
        self._landing: deque[Message] = deque()
        self._settled_busy = False
        self._rate = 0.0
        self._remaining = 0.0
        self._since = 0.0
        self._prediction = 0

    def post(self, message: Message) -> None:
        """Send ``message`` after all that was posted before."""
        self._queue.append(message)
        if len(self._queue) == 1:
            if self.ports:
                for port in self.ports:
                    port.busy[self] = None
                self._engine.changed(self)
            self._begin()

    def drop(self, message: Message) -> bool:
        """Take back a message that has not begun; False if it has, or is over."""
        if message.begun or message not in self._queue:
            return False
        self._queue.remove(message)
        return True

    def lose(self, node: str) -> None:
        """End all that is posted: ``node``, one of its ends, is gone."""
        lost = [*self._landing, *self._queue]
        self._landing.clear()
        if self._queue:
            self._queue.clear()
            self._run_dry()
        for message in lost:
            message.lose(node)

    def settle(self) -> bool:
        """Whether the pipe began or ceased to be busy since it was asked last."""
        busy = bool(self._queue)
        changed, self._settled_busy = busy != self._settled_busy, busy
        if not busy:
            self._rate = 0.0
        return changed

    def set_rate(self, rate: float, now: float) -> None:
        """Go on at ``rate`` bytes/s."""
        if rate != self._rate:
            self._remaining = max(0.0, self._remaining - self._rate * (now - self._since))
            self._since = now
            self._rate = rate
            self._predict()

    def _begin(self) -> None:
        message = self._queue[0]
        message.begin()
        self._remaining = float(message.size_bytes)
        self._since = self._engine.now
        self._predict()

    def _predict(self) -> None:
        """Expect the end of the first message, and no longer what was expected before."""
        self._prediction += 1
        if self._remaining <= 0 or not self.ports:
            self._engine.after(0.0, self._finish, self._prediction)
        elif self._rate > 0:
            self._engine.after(self._remaining / self._rate, self._finish, self._prediction)

    def _finish(self, prediction: int) -> None:
        """The first message's last byte has left, if this prediction still holds."""
        if prediction != self._prediction:
            return
        message = self._queue.popleft()
        if self._queue:
            self._begin()
        else:
            self._run_dry()
        if self._latency_s:
            self._landing.append(message)
            self._engine.after(self._latency_s, self._land)
        else:
            message.place()

    def _land(self, _: int) -> None:
        if self._landing:
            self._landing.popleft().place()

    def _run_dry(self) -> None:
        self._prediction += 1
        if self.ports:
            for port in self.ports:
                port.busy.pop(self, None)
            self._engine.changed(self)
