"""Counting what moves: bytes per transfer and bytes, busy time and windows per port, exchanges, in model time.

Pure: every method is told the time. Sender and receiver each keep books of their own, so that a run can hold
one against the other.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal

from ..records import ExchangeRecord, GapRecord, PortBytes, TransferBytes
from .interface import FREE_NIC, Transfer, VirtualLane

__all__ = ["Books", "PortMeter"]

Direction = Literal["read", "write"]


US = 1e-6

STEPS = 32
"""Into how many steps each octave of times is divided where their spread is kept."""


class _Gaps:
    """One direction of a NIC: the times between two collectives, and the KV placed in them.

    No collective is outstanding then. What is before the first one, or after the last, is between none.
    """

    __slots__ = ("_kv_bytes", "_rows", "_since_s")

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._kv_bytes = 0
        self._rows: dict[int, tuple[int, float, int]] = {}

    def open(self, now_s: float) -> None:
        """No collective is outstanding any more."""
        self._since_s, self._kv_bytes = now_s, 0

    def close(self, now_s: float) -> None:
        """One is again, or for the first time."""
        if self._since_s is not None and (length_s := now_s - self._since_s) > 0:
            power = math.frexp(length_s / US)[1]
            count, total_s, kv_bytes = self._rows.get(power, (0, 0.0, 0))
            self._rows[power] = (count + 1, total_s + length_s, kv_bytes + self._kv_bytes)
        self._since_s = None

    def place(self, payload_bytes: int) -> None:
        """A message of KV is in place."""
        self._kv_bytes += payload_bytes

    def record(self) -> tuple[GapRecord, ...]:
        """Shortest first."""
        return tuple(GapRecord(math.ldexp(US, power), *self._rows[power]) for power in sorted(self._rows))


class PortMeter:
    """One direction of a NIC on one lane. Busy while at least one message is outstanding.

    A message is outstanding from ``begin`` on, *under way* from ``depart`` on, when its first byte may go, and
    neither after ``end`` or ``drop``.
    """

    __slots__ = (
        "_busy_s",
        "_changed_s",
        "_gaps",
        "_is_kv",
        "_is_model",
        "_messages",
        "_most_under_way_bytes",
        "_outstanding",
        "_payload_bytes",
        "_since_s",
        "_under_way_bytes",
        "_window_s",
        "_windows",
        "key",
    )

    def __init__(
        self, nic: str, direction: Direction, lane: VirtualLane, window_s: float, gaps: _Gaps | None = None
    ) -> None:
        self.key = (nic, direction, lane)
        # Looking a lane up in its enumeration costs more than counting a message.
        self._is_kv, self._is_model = lane is VirtualLane.KV, lane is VirtualLane.MODEL
        self._gaps = _Gaps() if gaps is None else gaps
        self._window_s = window_s
        self._windows: list[int] = []
        self._payload_bytes = self._messages = self._outstanding = 0
        self._under_way_bytes = self._most_under_way_bytes = 0
        self._busy_s = self._since_s = self._changed_s = 0.0

    def begin(self, now_s: float) -> None:
        """A message is outstanding from now on."""
        if not self._outstanding:
            self._since_s = now_s
            if self._is_model:
                self._gaps.close(now_s)
        self._outstanding += 1

    def depart(self, now_s: float, payload_bytes: int) -> None:
        """From now on bytes of a message that is outstanding may go."""
        self._carry(now_s, payload_bytes)

    def end(self, now_s: float, payload_bytes: int) -> None:
        """A message is in place; its bytes count in the window of this moment."""
        self.drop(now_s, payload_bytes)
        self._payload_bytes += payload_bytes
        self._messages += 1
        if self._is_kv:
            self._gaps.place(payload_bytes)
        index = int(now_s // self._window_s)
        windows = self._windows
        if index >= len(windows):
            windows.extend([0] * (index + 1 - len(windows)))
        windows[index] += payload_bytes

    def drop(self, now_s: float, departed_bytes: int = 0) -> None:
        """A message is no longer outstanding and never came into place; its bytes where it was under way."""
        self._carry(now_s, -departed_bytes)
        self._outstanding -= 1
        if not self._outstanding:
            self._busy_s += now_s - self._since_s
            if self._is_model:
                self._gaps.open(now_s)

    def _carry(self, now_s: float, change_bytes: int) -> None:
        # What lasted no time does not count: in the instant in which a message ends, the next one has begun.
        if now_s > self._changed_s:
            self._most_under_way_bytes = max(self._most_under_way_bytes, self._under_way_bytes)
            self._changed_s = now_s
        self._under_way_bytes += change_bytes

    def record(self, now_s: float) -> PortBytes:
        """The counters as of now."""
        nic, direction, lane = self.key
        running = now_s - self._since_s if self._outstanding else 0.0
        return PortBytes(
            nic=nic,
            direction=direction,
            lane=int(lane),
            payload_bytes=self._payload_bytes,
            messages=self._messages,
            busy_s=self._busy_s + running,
            window_s=self._window_s,
            windows=tuple(self._windows),
            under_way_bytes=max(self._most_under_way_bytes, self._under_way_bytes),
            gaps=self._gaps.record() if lane is VirtualLane.MODEL else (),
        )


class _Spread:
    """Times, each counted at the next of ``STEPS`` steps of its octave, and the longest as it is."""

    __slots__ = ("_counts", "max_s", "total_s")

    def __init__(self) -> None:
        self.total_s = self.max_s = 0.0
        self._counts: Counter[float] = Counter()

    def add(self, seconds: float) -> None:
        self.total_s += seconds
        self.max_s = max(self.max_s, seconds)
        mantissa, power = math.frexp(seconds)
        self._counts[math.ldexp(math.ceil(mantissa * 2 * STEPS) / (2 * STEPS), power)] += 1

    @property
    def count(self) -> int:
        return self._counts.total()

    def rows(self) -> tuple[tuple[float, int], ...]:
        """(seconds, how many), shortest first."""
        return tuple(sorted(self._counts.items()))


class Books:
    """All counters of one node: what it sent, what it received, its ports."""

    def __init__(self, window_s: float) -> None:
        if not 0 < window_s < float("inf"):
            raise ValueError(f"window_s {window_s}: expected a positive, finite number")
        self._window_s = window_s
        self._ports: dict[tuple[str, Direction, VirtualLane], PortMeter] = {}
        self._gaps: dict[tuple[str, Direction], _Gaps] = {}
        self._sent: dict[tuple[Transfer, str, str], list[int]] = {}
        self._received: dict[tuple[Transfer, str, str], list[int]] = {}
        self._exchanges: dict[tuple[str, VirtualLane, int], tuple[_Spread, _Spread]] = {}

    def port(self, nic: str, direction: Direction, lane: VirtualLane) -> PortMeter:
        """The meter of one direction and lane, made on first use. A free path has no port: nobody reads its."""
        if nic == FREE_NIC:
            return PortMeter(nic, direction, lane, self._window_s)
        key = (nic, direction, lane)
        meter = self._ports.get(key)
        if meter is None:
            gaps = self._gaps.setdefault((nic, direction), _Gaps())
            meter = self._ports[key] = PortMeter(nic, direction, lane, self._window_s, gaps)
        return meter

    def count_sent(self, transfer: Transfer, src: str, dst: str, payload_bytes: int) -> None:
        """A message of this node is complete."""
        row = self._sent.setdefault((transfer, src, dst), [0, 0])
        row[0] += payload_bytes
        row[1] += 1

    def count_received(self, transfer: Transfer, src: str, dst: str, payload_bytes: int) -> None:
        """A message is in place on this node."""
        row = self._received.setdefault((transfer, src, dst), [0, 0])
        row[0] += payload_bytes
        row[1] += 1

    def count_exchange(
        self, ring: str, lane: VirtualLane, payload_bytes: int, took_s: float, late_s: float
    ) -> None:
        """An exchange of ``ring`` is over, in which no port of this node sent more than ``payload_bytes``."""
        key = (ring, lane, payload_bytes)
        took, late = self._exchanges.setdefault(key, (_Spread(), _Spread()))
        took.add(took_s)
        late.add(late_s)

    def exchanges(self) -> tuple[ExchangeRecord, ...]:
        """Sorted by ring, lane, size."""
        return tuple(
            ExchangeRecord(
                ring,
                int(lane),
                size,
                count=took.count,
                total_s=took.total_s,
                max_s=took.max_s,
                late_s=late.max_s,
                took=took.rows(),
                late=late.rows(),
            )
            for (ring, lane, size), (took, late) in sorted(self._exchanges.items(), key=lambda item: item[0])
        )

    def sent(self) -> tuple[TransferBytes, ...]:
        """Sorted by transfer, source, destination."""
        return _transfers(self._sent)

    def received(self) -> tuple[TransferBytes, ...]:
        """Sorted by transfer, source, destination."""
        return _transfers(self._received)

    def ports(self, now_s: float) -> tuple[PortBytes, ...]:
        """Sorted by NIC, direction, lane."""
        return tuple(self._ports[key].record(now_s) for key in sorted(self._ports))


def _transfers(rows: dict[tuple[Transfer, str, str], list[int]]) -> tuple[TransferBytes, ...]:
    return tuple(TransferBytes(key[0].name, key[1], key[2], *rows[key]) for key in sorted(rows))
