"""Virtual lanes of a port as HTB classes: shares and one payload rate in, whole kernel numbers out.

Pure. A port direction is one HTB tree: a parent at the full rate, below it a class for the high lane (model
communication), one for KV and one for control, which also takes whatever no filter names. Each is
guaranteed its share and may use all that the others leave, in the order of their borrowing: by default KV
after the other two. ``arbitration`` derives both from the settings of a real fabric. Beside the tree stands a
class for TCP's bare acknowledgements: they are an artefact of the emulation, up to 2 % of the opposite
direction's bytes, and must not cost a port that is busy both ways any of its payload rate.

Rates. HTB charges a packet with its link-layer length, and a GSO super-packet with the headers of each of
its segments (``qdisc_pkt_len_init``), so a full segment of ``SEGMENT_PAYLOAD`` bytes costs ``SEGMENT_WIRE``.
The parent's rate is the payload rate times that ratio. Class rates are whole bytes per second; a rate whose
lanes cannot be expressed so within ``RATE_TOLERANCE`` is refused, never rounded further.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Literal

import msgspec

from .errors import TopologyError

__all__ = [
    "CLASS_NAMES",
    "DSCP_OF_LANE",
    "LANES",
    "MTU_BYTES",
    "RATE_TOLERANCE",
    "SEGMENT_PAYLOAD",
    "SEGMENT_WIRE",
    "Borrowing",
    "LaneClass",
    "LaneFilter",
    "LaneName",
    "LaneShares",
    "Match",
    "PortPlan",
    "gso_max_bytes",
    "port_plan",
]

MTU_BYTES = 1500
SEGMENT_PAYLOAD = 1448
"""MTU less IPv4 (20) and TCP with timestamps (32)."""
SEGMENT_WIRE = 1514
"""MTU and the Ethernet header, which is what a qdisc counts."""
RATE_TOLERANCE = 1e-3

LaneName = Literal["high", "kv", "control"]
LANES: tuple[LaneName, ...] = ("high", "kv", "control")

CONTROL_LANE, MODEL_LANE, KV_LANE, SPARE_LANE = range(4)

DSCP_OF_LANE: Mapping[int, int] = MappingProxyType(
    {CONTROL_LANE: 0x00, MODEL_LANE: 0xB8, KV_LANE: 0x28, SPARE_LANE: 0x48}
)
"""IP_TOS byte (code point << 2) of virtual lanes 0 to 3: default, EF, AF11, AF21. Spare has no class yet."""

ROOT_MINOR, HIGH_MINOR, KV_MINOR, CONTROL_MINOR, ACK_MINOR = 0x1, 0x10, 0x20, 0x30, 0x40
CLASS_NAMES: Mapping[int, str] = MappingProxyType(
    {HIGH_MINOR: "high", KV_MINOR: "kv", CONTROL_MINOR: "control", ACK_MINOR: "ack"}
)
"""The leaf classes by minor number, the lanes named as their shares are."""

_PARENT_OF_ALL = 0
_MIN_BURST_BYTES = 3072
"""Two full segments: more would let a single message arrive noticeably early on a slow link."""
_BURST_S = 125e-6
"""How late a timer of the kernel may be without costing the link any of its rate."""
_MIN_QUANTUM_BYTES = 65536
"""At least the largest super-packet, or classes of one priority share their surplus in wrong proportions."""
_MAX_QUANTUM_BYTES = 2**31 - 1
_MAX_PRIO = 7
_MAX_RATE = 2**63 - 1


class Borrowing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a lane takes what others leave: the lowest ``prio`` (0 to 7) first, equals ``quantum_bytes`` in turn."""

    prio: int
    quantum_bytes: int = _MIN_QUANTUM_BYTES

    def __post_init__(self) -> None:
        for name, least, most in (
            ("prio", 0, _MAX_PRIO),
            ("quantum_bytes", _MIN_QUANTUM_BYTES, _MAX_QUANTUM_BYTES),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise TopologyError(f"borrowing {name} = {value!r}: expected a whole number, {least} to {most}")


class LaneShares(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Guaranteed shares of a port, and how each lane borrows.

    Children above their parent overshoot the link silently, hence shares sum to at most 1.
    """

    high: float = 0.985
    kv: float = 0.010
    control: float = 0.005
    high_borrowing: Borrowing = Borrowing(0)
    kv_borrowing: Borrowing = Borrowing(1)
    control_borrowing: Borrowing = Borrowing(0)

    def __post_init__(self) -> None:
        for name in LANES:
            value = self.share(name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
                raise TopologyError(f"lanes.{name} = {value!r}: expected a share between 0 and 1")
        total = math.fsum(map(self.share, LANES))
        if total > 1 + 1e-12:
            raise TopologyError(
                f"lanes: high + kv + control = {total:.6g}: expected at most 1, or the classes overshoot the link"
            )

    def share(self, lane: LaneName) -> float:
        """The lane's guaranteed share of the port, 0 to 1."""
        share: float = getattr(self, lane)
        return share

    def borrowing(self, lane: LaneName) -> Borrowing:
        """How the lane takes what others leave."""
        borrowing: Borrowing = getattr(self, f"{lane}_borrowing")
        return borrowing

    def among(self, busy: Collection[LaneName]) -> dict[LaneName, float]:
        """What each lane of ``busy``, at least one, gets in the long run while exactly these have a backlog.

        HTB's rule: everybody its guarantee, and all that is left to the busy lanes of the best priority, by
        their quanta. The sum is 1.
        """
        got = {lane: self.share(lane) for lane in LANES if lane in busy}
        best = min(self.borrowing(lane).prio for lane in got)
        quanta = {lane: b.quantum_bytes for lane in got if (b := self.borrowing(lane)).prio == best}
        left, turn = 1 - math.fsum(got.values()), sum(quanta.values())
        for lane, quantum in quanta.items():
            got[lane] += left * quantum / turn
        return got


class LaneClass(msgspec.Struct, frozen=True):
    """One HTB class. Rates in bytes/s, bursts and quantum in bytes; ``parent`` 0 is the qdisc itself."""

    minor: int
    parent: int
    rate: int
    ceil: int
    burst: int
    cburst: int
    prio: int
    quantum: int


class Match(msgspec.Struct, frozen=True):
    """A condition on a packet: its 32-bit word at ``offset`` of the IPv4 header, under ``mask``, is ``value``.

    The word begins with the first byte that matters, wherever that is.
    """

    offset: int
    mask: int
    value: int


class LaneFilter(msgspec.Struct, frozen=True):
    """Packets that meet all conditions belong to class ``minor``; the first filter that fits decides."""

    matches: tuple[Match, ...]
    minor: int


_BARE_ACK = (Match(2, 0xFFFF << 16, (MTU_BYTES - SEGMENT_PAYLOAD) << 16), Match(9, 0xFF << 24, 6 << 24))
"""As long as its headers, and TCP by its protocol number: nothing but an acknowledgement, or a FIN."""


class PortPlan(msgspec.Struct, frozen=True):
    """One port direction: its classes, parents first, its filters in order, and where unnamed packets go."""

    payload_bytes_s: float
    classes: tuple[LaneClass, ...]
    filters: tuple[LaneFilter, ...]
    default_minor: int


def port_plan(payload_bytes_s: float, shares: LaneShares) -> PortPlan:
    """The HTB tree that lets full TCP segments carry ``payload_bytes_s``. TopologyError if it cannot."""
    if (
        isinstance(payload_bytes_s, bool)
        or not isinstance(payload_bytes_s, int | float)
        or not 0 < payload_bytes_s < math.inf
    ):
        raise TopologyError(f"emulated rate {payload_bytes_s!r}: expected a positive, finite number of bytes/s")
    wire = Fraction(payload_bytes_s) * Fraction(SEGMENT_WIRE, SEGMENT_PAYLOAD)
    full = _whole(wire, round(wire), payload_bytes_s)
    burst = _burst(full)

    # Lanes round down, so that together they never exceed their parent.
    def leaf(minor: int, lane: LaneName) -> LaneClass:
        exact = wire * Fraction(shares.share(lane))
        rate = _whole(exact, math.floor(exact), payload_bytes_s)
        borrowing = shares.borrowing(lane)
        return LaneClass(
            minor, ROOT_MINOR, rate, full, _burst(rate), burst, borrowing.prio, borrowing.quantum_bytes
        )

    leaves = [leaf(HIGH_MINOR, "high"), leaf(KV_MINOR, "kv"), leaf(CONTROL_MINOR, "control")]
    return PortPlan(
        payload_bytes_s=float(payload_bytes_s),
        classes=(
            LaneClass(ROOT_MINOR, _PARENT_OF_ALL, full, full, burst, burst, 0, _MIN_QUANTUM_BYTES),
            *leaves,
            LaneClass(ACK_MINOR, _PARENT_OF_ALL, full, full, burst, burst, 0, _MIN_QUANTUM_BYTES),
        ),
        filters=(
            LaneFilter(_BARE_ACK, ACK_MINOR),
            LaneFilter((_code_point(MODEL_LANE),), HIGH_MINOR),
            LaneFilter((_code_point(KV_LANE),), KV_MINOR),
        ),
        default_minor=CONTROL_MINOR,
    )


def gso_max_bytes(payload_bytes_s: float) -> int:
    """The largest super-packet for a link of this payload rate, in bytes.

    HTB lets a super-packet go whole, so on a slow link large ones make a single message arrive too early.
    """
    for limit, size in ((12.5e6, 4096), (125e6, 8192), (500e6, 32768)):
        if payload_bytes_s <= limit:
            return size
    return 65536


def _code_point(lane: int) -> Match:
    """TOS is the second byte of an IPv4 header."""
    return Match(1, 0xFC << 24, DSCP_OF_LANE[lane] << 24)


def _whole(rate: Fraction, whole: int, payload_bytes_s: float) -> int:
    """``whole`` bytes/s in place of ``rate``, if that is near enough."""
    if whole > _MAX_RATE:
        raise TopologyError(f"emulated rate {payload_bytes_s:.6g} bytes/s: above what the kernel can express")
    if abs(whole - rate) > rate * Fraction(RATE_TOLERANCE):
        raise TopologyError(
            f"emulated rate {payload_bytes_s:.6g} bytes/s: a lane would get {float(rate):.3g} bytes/s, which HTB's"
            f" whole bytes per second miss by more than {RATE_TOLERANCE:.1%}; use a faster link or less dilation"
        )
    return whole


def _burst(rate: int) -> int:
    """Bytes that may go late at once: what accrues while a timer of the kernel is late."""
    return max(_MIN_BURST_BYTES, round(rate * _BURST_S))
