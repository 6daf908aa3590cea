"""The collectives of a fluid network: one account of each ring for all its members.

The barrier is exact: all bytes of an exchange leave at one instant, when the last member's entry has been known
for the network's RPC latency, or at the ideal start if that is later. When the last byte is in place every member
knows at once: what they tell each other in a real cluster rides on the data.

Must not import ``tcp`` or anything above.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from .collective import Entry, Exchange, Hop, check_member, hops_of, largest
from .counter import Counter, Lost
from .flow import Engine
from .interface import Endpoint, Ring, VirtualLane
from .meter import Books

__all__ = ["FluidRings"]

Send = Callable[[Hop, VirtualLane, Callable[[], None]], None]
"""Posts a hop's bytes on a lane and says when they are in place (never, when an end is lost)."""


class _Ring:
    """A ring, its members' calls, and the exchanges that are not over."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.entered = dict.fromkeys(ring.nodes, 0)
        self.open: dict[int, _Open] = {}
        self.announced = Counter()
        self.lost: Lost | None = None


class _Open(Exchange):
    """An exchange and what its members are going to send."""

    def __init__(self, ring: Ring) -> None:
        super().__init__(ring)
        self.hops: dict[str, tuple[Hop, ...]] = {}
        self.lanes: dict[str, VirtualLane] = {}
        self.outstanding = 0
        self.late_s = 0.0


class FluidRings:
    """All rings of a network. ``books`` are its nodes'; ``send`` puts bytes on its pipes."""

    def __init__(self, engine: Engine, latency_s: float, books: Mapping[str, Books], send: Send) -> None:
        self._engine = engine
        self._latency_s = latency_s
        self._books = books
        self._send = send
        self._rings: dict[str, _Ring] = {}

    def enter(
        self,
        node: str,
        ring: Ring,
        payload: Mapping[Endpoint, int],
        ready_s: float,
        amount: int,
        lane: VirtualLane,
    ) -> Exchange:
        """``node`` enters its next exchange of ``ring``; it goes on by itself."""
        hops = hops_of(ring, node, payload)
        known = self._known(ring)
        index = known.entered[node]
        exchange = known.open.get(index)
        if exchange is None:
            exchange = known.open[index] = _Open(ring)
            self._engine.after(self._latency_s, lambda _: known.announced.bump())
        known.entered[node] = index + 1
        exchange.hops[node], exchange.lanes[node] = hops, lane
        if not exchange.enter(node, Entry(ready_s, amount, self._engine.now)):
            return exchange
        if len(ring.nodes) == 1 and not hops:
            self._settle(known, index, ready_s)
        else:
            at_s = max(self._engine.now, exchange.begins_s(self._latency_s))
            exchange.late_s = at_s - exchange.started_s
            self._engine.at(at_s, partial(self._begin, known), index)
        return exchange

    async def wait_entered(self, node: str, ring: Ring) -> None:
        """Return once another member has entered an exchange that ``node`` has not."""
        check_member(ring, node)
        known = self._known(ring)
        while True:
            wanted = known.entered[node] + 1
            await known.announced.wait(wanted)
            if known.lost is not None:
                raise known.lost()
            if known.entered[node] < wanted:
                return

    def lose(self, node: str, lost: Lost) -> None:
        """``node`` is gone, and with it every ring that it is a member of."""
        for known in self._rings.values():
            if node in known.ring.nodes and known.lost is None:
                known.lost = lost
                known.announced.fail(lost)
                for exchange in known.open.values():
                    exchange.fail(lost)
                known.open.clear()

    def _known(self, ring: Ring) -> _Ring:
        known = self._rings.get(ring.name)
        if known is None:
            known = self._rings[ring.name] = _Ring(ring)
        elif known.ring is not ring and known.ring != ring:
            raise ValueError(f"ring {ring.name} has other members or hops than before")
        if known.lost is not None:
            raise known.lost()
        return known

    def _begin(self, known: _Ring, index: int) -> None:
        """The barrier is over: send all that there is."""
        exchange = known.open.get(index)
        if exchange is None:
            return
        over = partial(self._hop_over, known, index)
        exchange.outstanding = 1 + sum(map(len, exchange.hops.values()))
        for node in known.ring.nodes:
            for hop in exchange.hops[node]:
                self._send(hop, exchange.lanes[node], over)
        over()

    def _hop_over(self, known: _Ring, index: int) -> None:
        """One of the hops, or the beginning, is over."""
        exchange = known.open.get(index)
        if exchange is None:
            return
        exchange.outstanding -= 1
        if not exchange.outstanding:
            self._settle(known, index, self._engine.now - exchange.late_s)

    def _settle(self, known: _Ring, index: int, over_s: float) -> None:
        exchange = known.open.pop(index)
        for node in known.ring.nodes:
            exchange.finish(node, over_s)
        for node in known.ring.nodes:
            size = largest(exchange.hops[node])
            took_s = over_s - exchange.started_s
            self._books[node].count_exchange(known.ring.name, exchange.lanes[node], size, took_s, exchange.late_s)
