"""Resources inside a node that no kernel shapes: its DRAM, and a PCIe link per GPU, as clocks of debt.

Which message crosses which of them is ``wiring``'s rule, as in the fluid fabric; here is when its bytes may go.
A ``Bus`` is free from some moment on; whoever asks for bytes is given the next turn, which moves that moment by
size/rate, whatever a timer does with it: the mean rate is exact. Turns are taken first come, first served, and a
queue pair has asked for one at a time, of a *piece* at most. So those that always have more share a bus piece by
piece, equally and without priority, and who is held up elsewhere leaves what he does not take to the others.

A piece is a fraction of a millisecond of the bus, so that a large message does not keep the small ones of all
other NICs waiting for what its own NIC takes long to carry. DRAM lets turns begin early, by the pieces of all
queue pairs that may ask for one at once: with head-room nobody ever waits for it or sets a timer. A PCIe link is
hardly faster than its NIC: a piece there is what a shaped link hands on at a time, and none is early.

Pure but for the calls that it is given. Rates are payload bytes per model second, times are model seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from .wiring import DIRECTIONS, DRAM, Crossing, pcie_of

__all__ = ["Gate", "LocalBuses", "LocalRates", "Toll"]

DRAM_PIECE_S = 0.25e-3
DEPTH_S = 32 * DRAM_PIECE_S
"""Wall seconds by which DRAM may be behind before anybody waits: a piece each of nine NICs, both directions, some
on two lanes. Assumed."""

PCIE_PIECE_S = 1e-3
LEAST_PIECE_BYTES, MOST_PIECE_BYTES = 4096, 64 * 1024


class LocalRates(msgspec.Struct, frozen=True):
    """Payload bytes per model second of a node's DRAM, both ways together, and of the PCIe link of each NIC's GPU,
    each way; None, or a NIC that is not there, for what does not count. ValueError for a rate that is none.
    """

    dram: float | None = None
    pcie: Mapping[str, float] = MappingProxyType({})

    def __post_init__(self) -> None:
        rates = dict(self.pcie) if self.dram is None else {DRAM: self.dram, **self.pcie}
        for name, rate in rates.items():
            if not 0 < rate < math.inf:
                raise ValueError(f"local rate of {name}: {rate}: expected a positive, finite number")


class _Bus:
    """One resource: when its next turn begins, if somebody asks by then."""

    __slots__ = ("depth_s", "free_s", "piece_bytes", "s_per_byte")

    def __init__(self, rate: float, depth_s: float, piece_bytes: int) -> None:
        self.s_per_byte = 1 / rate
        self.depth_s = depth_s
        self.piece_bytes = piece_bytes
        self.free_s = 0.0


class Toll:
    """What one queue pair has to pay on its side before bytes may go: a turn on each of some buses.

    Bytes that go on through a NIC may go when their turn begins: they trickle through both at once. Those of a
    copy that ends here are there when it is over.
    """

    __slots__ = ("_buses", "_ends_here", "piece_bytes")

    def __init__(self, buses: Sequence[_Bus], *, ends_here: bool) -> None:
        self._buses = tuple(buses)
        self._ends_here = ends_here
        self.piece_bytes = min(bus.piece_bytes for bus in buses)

    def turn(self, size_bytes: int, asked_s: float) -> float:
        """Take a turn for ``size_bytes``, at most a piece, asked for at ``asked_s``: when they may go."""
        due_s = asked_s
        for bus in self._buses:
            # No calls in here: it is run for every message.
            start_s = bus.free_s if bus.free_s > asked_s else asked_s
            bus.free_s = end_s = start_s + size_bytes * bus.s_per_byte
            may_s = (end_s if self._ends_here else start_s) - bus.depth_s
            due_s = may_s if may_s > due_s else due_s
        return due_s


class Gate:
    """The sender's side of a toll: says whether a piece may go now, and else calls ``wake`` when it may.

    A turn that was taken and not used, because its message was dropped, is the next message's.
    """

    def __init__(
        self,
        toll: Toll,
        now: Callable[[], float],
        call_at: Callable[[float, Callable[[], None]], None],
        wake: Callable[[], None],
    ) -> None:
        self.piece_bytes = toll.piece_bytes
        self._toll = toll
        self._now = now
        self._call_at = call_at
        self._wake = wake
        self._paid_bytes = 0
        self._due_s = 0.0
        self._waiting = self._called = False

    def admit(self, size_bytes: int) -> bool:
        """May the next ``size_bytes``, at most a piece, go now? If so they are paid for."""
        if self._waiting:
            return False
        missing = size_bytes - self._paid_bytes
        if missing > 0:
            now_s = self._now()
            # Called when a turn was due and asked again at once: however late the call came, nothing but the bus
            # held the pair up, and the turn follows the last one.
            self._due_s = self._toll.turn(missing, self._due_s if self._called else now_s)
            self._paid_bytes = size_bytes
            if self._due_s > now_s:
                self._waiting = True
                self._call_at(self._due_s, self._ring)
                return False
        self._paid_bytes -= size_bytes
        return True

    def _ring(self) -> None:
        self._waiting, self._called = False, True
        self._wake()
        self._called = False


class LocalBuses:
    """The buses of one node. ``dilation``: wall seconds per model second."""

    def __init__(self, node: str, rates: LocalRates, dilation: float) -> None:
        self._buses: dict[Crossing, _Bus] = {}
        if rates.dram is not None:
            piece = _piece_bytes(rates.dram / dilation * DRAM_PIECE_S)
            both = _Bus(rates.dram, DEPTH_S / dilation, piece)
            self._buses |= {Crossing(node, DRAM, direction): both for direction in DIRECTIONS}
        for nic, rate in rates.pcie.items():
            piece = _piece_bytes(rate / dilation * PCIE_PIECE_S)
            for direction in DIRECTIONS:
                self._buses[Crossing(node, pcie_of(nic), direction)] = _Bus(rate, 0.0, piece)

    def toll(self, crossings: Sequence[Crossing]) -> Toll | None:
        """What ``crossings``, one side of a queue pair, cost; None where none of them is a bus."""
        buses = [self._buses[crossing] for crossing in crossings if crossing in self._buses]
        return Toll(buses, ends_here=len(buses) == len(crossings)) if buses else None


def _piece_bytes(size_bytes: float) -> int:
    return min(MOST_PIECE_BYTES, max(LEAST_PIECE_BYTES, int(size_bytes)))
