"""How a real port divides itself between lanes, and the shares of HTB classes that come nearest to it.

Pure. InfiniBand: ``VlArbitration`` is what opensm's configuration says, ``transmit`` a reference arbiter that
follows it packet by packet, ``saturated`` the shares to which that arbiter settles, in closed form. RoCE:
``TrafficClasses``, whose weights are shares as they stand. ``infiniband_shares`` and ``roce_shares`` compile
either to ``LaneShares``; ``lane_shares`` reads a topology file's table. docs/lanes.md says where HTB and the
arbiter agree and where they cannot.

The arbiter (InfiniBand Architecture Specification, volume 1, section 7.6.9). Two tables of entries (VL, weight)
are each gone round in turn. An entry may send while any of its weight, in units of 64 bytes, is left, so its last
packet may overshoot; what is left when its VL has nothing to send is forfeited. The high table goes first, until
``qos_high_limit`` x 4096 bytes went from it: then, or when it has nothing to send, the count begins anew and the
low table may send one packet.

A guarantee is what a lane gets while *every* lane has a backlog, the least it ever gets. Lanes with a weight in
the high table borrow before those without.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import msgspec

from .errors import TopologyError
from .lanes import CONTROL_LANE, KV_LANE, LANES, MODEL_LANE, Borrowing, LaneName, LaneShares

__all__ = [
    "INFINIBAND_MTU_BYTES",
    "LANE_KEYS",
    "VL_OF_LANE",
    "Entry",
    "Packet",
    "Sent",
    "TrafficClasses",
    "VlArbitration",
    "infiniband_shares",
    "lane_shares",
    "roce_shares",
    "saturated",
    "transmit",
]

INFINIBAND_MTU_BYTES = 4096
"""The packets of a saturated lane: transfers are large, so nearly all of theirs are full."""

VL_OF_LANE: Mapping[LaneName, int] = MappingProxyType({"high": MODEL_LANE, "kv": KV_LANE, "control": CONTROL_LANE})

Table = Literal["high", "low"]

_UNIT_BYTES = 64
_LIMIT_UNIT_BYTES = 4096
_UNLIMITED = 255
_MAX_WEIGHT = 255
_MAX_ENTRIES = 64
"""What a port's table may hold at the most; many hold 8."""
_MAX_DATA_VLS = 15
_MAX_CLASS_WEIGHT = 100
_MIN_QUANTUM_BYTES = Borrowing(0).quantum_bytes


class Entry(NamedTuple):
    """One entry of a table. ``weight`` in units of 64 bytes; 0 skips it."""

    vl: int
    weight: int


class VlArbitration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """opensm's settings of a port's arbitration, by its names; the defaults are the paper's (section 4).

    Tables are ``"vl:weight,vl:weight,..."``, where a VL may occur several times and in both. TopologyError, in one
    line that begins with ``lanes.`` and the key, for what cannot be meant.
    """

    qos_max_vls: int = 4
    qos_high_limit: int = 240
    qos_vlarb_high: str = "0:192,1:192,2:0,3:192"
    qos_vlarb_low: str = "0:192,1:192,2:64,3:192"

    def __post_init__(self) -> None:
        _whole("qos_max_vls", self.qos_max_vls, 1, _MAX_DATA_VLS)
        _whole("qos_high_limit", self.qos_high_limit, 0, _UNLIMITED)
        for key in ("qos_vlarb_high", "qos_vlarb_low"):
            for entry in _parsed(key, getattr(self, key)):
                if entry.vl >= self.qos_max_vls:
                    raise TopologyError(
                        f"lanes.{key}: entry '{entry.vl}:{entry.weight}': expected a VL of 0 to"
                        f" {self.qos_max_vls - 1}, as qos_max_vls is {self.qos_max_vls}"
                    )

    @property
    def high(self) -> tuple[Entry, ...]:
        """The entries of the high table that are not skipped."""
        return tuple(entry for entry in _parsed("qos_vlarb_high", self.qos_vlarb_high) if entry.weight)

    @property
    def low(self) -> tuple[Entry, ...]:
        """The entries of the low table that are not skipped."""
        return tuple(entry for entry in _parsed("qos_vlarb_low", self.qos_vlarb_low) if entry.weight)

    @property
    def high_limit_bytes(self) -> int | None:
        """How much the high table may send before the low one has its turn; None: any amount. 0: one packet."""
        return None if self.qos_high_limit == _UNLIMITED else self.qos_high_limit * _LIMIT_UNIT_BYTES


class TrafficClasses(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A RoCE port's traffic classes under enhanced transmission selection (IEEE 802.1Q, clause 37).

    A class that has a backlog gets its weight over the weights of all that have one. Weights are whole, 1 to 100,
    as per cents of a port are given.
    """

    high_weight: int
    kv_weight: int
    control_weight: int

    def __post_init__(self) -> None:
        for key in self.__struct_fields__:
            _whole(key, getattr(self, key), 1, _MAX_CLASS_WEIGHT)

    def weight(self, lane: LaneName) -> int:
        """The weight of the lane's class."""
        weight: int = getattr(self, f"{lane}_weight")
        return weight


class Packet(NamedTuple):
    """Something to send. Time is counted in bytes: one passes the port in a unit of it."""

    size_bytes: int
    arrival: int = 0


class Sent(NamedTuple):
    """A packet that was sent, ``begun`` when, by which table's leave."""

    vl: int
    size_bytes: int
    begun: int
    table: Table


def transmit(tables: VlArbitration, queues: Mapping[int, Iterable[Packet]]) -> Iterator[Sent]:
    """What a port sends of ``queues``, in order: each VL's packets in order of arrival, finite or endless.

    A packet on its way is never interrupted. ValueError for a VL that neither table lets send.
    """
    wheels: dict[Table, _Wheel] = {"high": _Wheel(tables.high), "low": _Wheel(tables.low)}
    for vl in queues:
        if not any(vl in wheel.vls for wheel in wheels.values()):
            raise ValueError(f"VL {vl} has no weight in either table: it would never send")
    arriving = {vl: iter(queue) for vl, queue in queues.items()}
    heads: dict[int, Packet] = {}
    limit, by_high, now = tables.high_limit_bytes, 0, 0
    while True:
        for vl in [vl for vl in arriving if vl not in heads]:
            head = next(arriving[vl], None)
            if head is None:
                del arriving[vl]
            else:
                heads[vl] = head
        if not heads:
            return
        first = min(head.arrival for head in heads.values())
        if first > now:
            now, by_high = first, 0
        waiting = {vl for vl, head in heads.items() if head.arrival <= now}
        expired = limit is not None and by_high >= max(limit, 1)
        order: tuple[Table, Table] = ("low", "high") if expired else ("high", "low")
        if expired or not waiting & wheels["high"].vls:
            by_high = 0
        table = next(table for table in order if waiting & wheels[table].vls)
        vl = wheels[table].turn(waiting)
        size = heads.pop(vl).size_bytes
        wheels[table].charge(size)
        if table == "high":
            by_high += size
        yield Sent(vl, size, now, table)
        now += size


class _Wheel:
    """One table being gone round: at which entry it stands, and how much of that entry's weight is left."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.vls = {entry.vl for entry in entries}
        self._entries = entries
        self._at = 0
        self._left = entries[0].weight if entries else 0

    def turn(self, waiting: set[int]) -> int:
        """The VL that sends next; ``waiting`` has at least one of ours."""
        while self._left <= 0 or self._entries[self._at].vl not in waiting:
            self._at = (self._at + 1) % len(self._entries)
            self._left = self._entries[self._at].weight
        return self._entries[self._at].vl

    def charge(self, size_bytes: int) -> None:
        """The entry has sent this much."""
        self._left -= _units(size_bytes)


def saturated(tables: VlArbitration, packet_bytes: Mapping[int, int]) -> dict[int, Fraction]:
    """The long-run share of each VL of ``packet_bytes`` while all of them have a backlog of packets of that size.

    With packets of m bytes an entry of weight w sends n = ceil(w / ceil(m/64)) in its turn, which is n m bytes. So
    v's part of what a table sends, h_v or l_v, is the n m of its entries over those of all whose VL is busy. One
    packet of the low table, of l bytes on average, follows W bytes of the high one on average:

        share_v = (W h_v + l l_v) / (W + l)

    With one size in the high table W = m max(1, ceil(4096 qos_high_limit / m)); with several, where a window ends
    depends on where it began, and W is the mean over the windows until one begins where another did. A table that
    has nothing to send leaves all to the other, and qos_high_limit 255 leaves all to the high one. Derived
    from the rules at the top; exact.
    """
    high, low = (_round_of(table, packet_bytes) for table in (tables.high, tables.low))
    if not high or not low or tables.high_limit_bytes is None:
        only = _parts(high or low)
        return {vl: only.get(vl, Fraction(0)) for vl in packet_bytes}
    window = _mean_window([size for _, size in high], tables.high_limit_bytes)
    packet = Fraction(sum(size for _, size in low), len(low))
    of_high, of_low = _parts(high), _parts(low)
    return {
        vl: (window * of_high.get(vl, 0) + packet * of_low.get(vl, 0)) / (window + packet) for vl in packet_bytes
    }


def _round_of(entries: Sequence[Entry], packet_bytes: Mapping[int, int]) -> list[tuple[int, int]]:
    """The packets (VL, bytes) that a table sends going round once, while all VLs of ``packet_bytes`` are busy."""
    return [
        (entry.vl, size)
        for entry in entries
        if (size := packet_bytes.get(entry.vl))
        for _ in range(-(-entry.weight // _units(size)))
    ]


def _parts(packets: Sequence[tuple[int, int]]) -> dict[int, Fraction]:
    """Each VL's part of the bytes of ``packets``."""
    bytes_of: dict[int, int] = {}
    for vl, size in packets:
        bytes_of[vl] = bytes_of.get(vl, 0) + size
    return {vl: Fraction(sent, sum(bytes_of.values())) for vl, sent in bytes_of.items()}


def _mean_window(sizes: Sequence[int], limit_bytes: int) -> Fraction:
    """The mean bytes of a window: packets of ``sizes``, over and over, until they are ``limit_bytes`` or more."""
    ends = list(itertools.accumulate(sizes))
    begun_at: dict[int, int] = {}
    lengths: list[int] = []
    at = 0
    while at not in begun_at:
        begun_at[at] = len(lengths)
        before = ends[at - 1] if at else 0
        rounds, rest = divmod(before + max(limit_bytes, 1), ends[-1])
        # Where a window ends with a round, its last packet is the round's last and the next begins a new one.
        last = bisect_left(ends, rest) if rest else -1
        lengths.append(rounds * ends[-1] + (ends[last] if rest else 0) - before)
        at = (last + 1) % len(ends)
    cycle = lengths[begun_at[at] :]
    return Fraction(sum(cycle), len(cycle))


def infiniband_shares(tables: VlArbitration) -> LaneShares:
    """The shares that a port with ``tables`` guarantees, packets of the MTU on every lane.

    Lanes that borrow alike do so in proportion to what their table lets them send in a round. TopologyError where
    a lane is guaranteed nothing, which HTB cannot do.
    """
    packets = dict.fromkeys(VL_OF_LANE.values(), INFINIBAND_MTU_BYTES)
    shares = saturated(tables, packets)
    for lane, vl in VL_OF_LANE.items():
        if not shares[vl]:
            raise TopologyError(_starved(tables, lane))
    high, low = (_parts(_round_of(table, packets)) for table in (tables.high, tables.low))
    return _compiled(
        {lane: shares[vl] for lane, vl in VL_OF_LANE.items()},
        {lane: int(vl not in high) for lane, vl in VL_OF_LANE.items()},
        {lane: high[vl] if vl in high else low[vl] for lane, vl in VL_OF_LANE.items()},
    )


def _starved(tables: VlArbitration, lane: LaneName) -> str:
    vl = VL_OF_LANE[lane]
    if vl in {entry.vl for entry in tables.low}:
        return (
            f"lanes.qos_high_limit = {tables.qos_high_limit}: lane {lane} (VL {vl}) gets nothing beside busy high"
            " lanes, and HTB guarantees every class something; expected 0 to 254"
        )
    return (
        f"lanes.qos_vlarb_low: lane {lane} (VL {vl}) has no weight in either table; expected an entry"
        f" {vl}:weight with a weight of 1 to {_MAX_WEIGHT}"
    )


def roce_shares(classes: TrafficClasses) -> LaneShares:
    """Shares in proportion to the weights, and borrowing too: exactly what the classes get, whoever is idle."""
    total = sum(map(classes.weight, LANES))
    shares = {lane: Fraction(classes.weight(lane), total) for lane in LANES}
    return _compiled(shares, dict.fromkeys(LANES, 0), shares)


def _compiled(
    shares: Mapping[LaneName, Fraction], prios: Mapping[LaneName, int], weights: Mapping[LaneName, Fraction]
) -> LaneShares:
    """LaneShares whose lanes of one priority borrow in proportion to ``weights``."""

    def borrowing(lane: LaneName) -> Borrowing:
        least = min(weights[other] for other in LANES if prios[other] == prios[lane])
        return Borrowing(prios[lane], round(_MIN_QUANTUM_BYTES * weights[lane] / least))

    return LaneShares(
        high=float(shares["high"]),
        kv=float(shares["kv"]),
        control=float(shares["control"]),
        high_borrowing=borrowing("high"),
        kv_borrowing=borrowing("kv"),
        control_borrowing=borrowing("control"),
    )


_PROFILES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"infiniband": VlArbitration.__struct_fields__, "roce": TrafficClasses.__struct_fields__}
)
LANE_KEYS: tuple[str, ...] = ("profile", *LANES, *_PROFILES["infiniband"], *_PROFILES["roce"])
"""Every key that a topology file's ``[lanes]`` may have; not all of them at once."""


def lane_shares(table: Mapping[str, Any]) -> LaneShares:
    """The shares that a topology file's ``[lanes]`` asks for, whose keys are all of ``LANE_KEYS``.

    Either shares as they are (``high``, ``kv``, ``control``), or a ``profile`` and its settings. TopologyError, in
    one line that begins with the key's path, for a mixture and for every wrong value.
    """
    if "profile" not in table:
        for key in table:
            for profile, keys in _PROFILES.items():
                if key in keys:
                    raise TopologyError(
                        f'lanes.{key}: belongs to a profile; expected profile = "{profile}" beside it'
                    )
        return LaneShares(**table)
    profile = table["profile"]
    if not isinstance(profile, str) or profile not in _PROFILES:
        expected = " or ".join(f'"{name}"' for name in _PROFILES)
        raise TopologyError(f"lanes.profile = {_shown(profile)}: expected {expected}")
    settings = {key: value for key, value in table.items() if key != "profile"}
    for key in settings:
        if key not in _PROFILES[profile]:
            raise TopologyError(
                f'lanes.{key}: does not go with profile = "{profile}"; expected {", ".join(_PROFILES[profile])}'
            )
    if profile == "infiniband":
        return infiniband_shares(VlArbitration(**settings))
    for key in _PROFILES[profile]:
        if key not in settings:
            raise TopologyError(f"lanes.{key} is missing; expected a whole number, 1 to {_MAX_CLASS_WEIGHT}")
    return roce_shares(TrafficClasses(**settings))


def _parsed(key: str, text: object) -> tuple[Entry, ...]:
    """The entries of a table, skipped ones too. TopologyError naming the key and the entry."""
    if not isinstance(text, str):
        raise TopologyError(f'lanes.{key} = {_shown(text)}: expected a string, "vl:weight,vl:weight,..."')
    entries = []
    for part in text.split(",") if text.strip() else ():
        match = re.fullmatch(r"\s*([0-9]{1,4})\s*:\s*([0-9]{1,4})\s*", part, re.ASCII)
        if match is None or int(match[1]) >= _MAX_DATA_VLS or int(match[2]) > _MAX_WEIGHT:
            raise TopologyError(
                f"lanes.{key}: entry {_shown(part)}: expected vl:weight, a VL of 0 to {_MAX_DATA_VLS - 1} and a"
                f" weight of 0 to {_MAX_WEIGHT}"
            )
        entries.append(Entry(int(match[1]), int(match[2])))
    if len(entries) > _MAX_ENTRIES:
        raise TopologyError(f"lanes.{key}: {len(entries)} entries; expected at most {_MAX_ENTRIES}")
    return tuple(entries)


def _whole(key: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise TopologyError(f"lanes.{key} = {_shown(value)}: expected a whole number, {least} to {most}")


def _units(size_bytes: int) -> int:
    """A packet's cost: its size in units of 64 bytes, rounded up."""
    return -(-size_bytes // _UNIT_BYTES)


def _shown(value: object) -> str:
    """A value for an error's one line."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
