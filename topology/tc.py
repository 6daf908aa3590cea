"""Traffic control as frozen values: the HTB qdisc, its classes and filters, and their counters.

Pure; the rest of ``rtnl``'s rules hold here too. Layouts and numbers are those of rtnetlink.h, pkt_sched.h,
pkt_cls.h and gen_stats.h. A device's classes and filters are dumped device by device, the qdiscs together.
"""

from __future__ import annotations

import socket
import struct
from typing import ClassVar

import msgspec

from .lanes import LaneClass, LaneFilter, Match
from .netlink import CREATE, Request, attribute, integer, nested, parse_attributes, text_attribute

__all__ = ["ClassStats", "HtbClass", "HtbFilter", "HtbQdisc"]

_TCMSG = struct.Struct("=BxxxiIII")
_U32 = struct.Struct("=I")
_U64 = struct.Struct("=Q")

_TCA_KIND, _TCA_OPTIONS, _TCA_STATS2 = 1, 2, 7
_TC_ROOT = 0xFFFFFFFF
_HTB_MAJOR = 1 << 16
_HTB_VERSION = 3
_HTB_R2Q = 10
_HTB_PARMS, _HTB_INIT, _HTB_RATE64, _HTB_CEIL64 = 1, 2, 6, 7
_HTB_GLOB = struct.Struct("=IIIII")
_RATESPEC = struct.Struct("=BBHhHI")
_HTB_TAIL = struct.Struct("=IIIII")
_ETHERNET = 1
_U32_CLASSID, _U32_SEL = 1, 5
_U32_TERMINAL = 1
_SELECTOR = struct.Struct("=BBBxHHhhI")
_KEY_WORDS = struct.Struct(">II")
_KEY_OFFSETS = struct.Struct("=ii")
_FILTER_PREF = 1
_ETH_P_IP = 0x0800
_STATS_BASIC, _STATS_QUEUE = 1, 3
_BASIC = struct.Struct("=QI")
_QUEUE = struct.Struct("=IIIII")
_NS_PER_TICK = 64
"""The unit in which HTB is told a burst: ``PSCHED_SHIFT`` 6, the same in every kernel with hrtimers."""


class HtbQdisc(msgspec.Struct, frozen=True):
    """The root HTB of a device; ``default_minor`` is the class of what no filter names."""

    NEW: ClassVar[int] = 36
    GET: ClassVar[int] = 38
    KEY: ClassVar[int] = 1
    KIND: ClassVar[str] = "htb"

    index: int
    default_minor: int

    @property
    def label(self) -> str:
        return "qdisc htb"

    def request(self, on: str) -> Request:
        glob = _HTB_GLOB.pack(_HTB_VERSION, _HTB_R2Q, self.default_minor, 0, 0)
        body = _TCMSG.pack(0, self.index, _HTB_MAJOR, _TC_ROOT, 0) + text_attribute(_TCA_KIND, self.KIND)
        return Request(
            self.NEW,
            CREATE,
            body + nested(_TCA_OPTIONS, attribute(_HTB_INIT, glob)),
            f"{on}: {self.label}",
            "CONFIG_NET_SCH_HTB",
        )

    @staticmethod
    def dump_body() -> bytes:
        return _TCMSG.pack(0, 0, 0, 0, 0)

    @classmethod
    def decode(cls, body: bytes) -> HtbQdisc | None:
        """None for another kind of qdisc."""
        found = cls._glob(body)
        return None if found is None else cls(found[0], found[1])

    @classmethod
    def direct_packets(cls, body: bytes) -> tuple[int, int] | None:
        """(device, how many packets bypassed all classes); None for another kind of qdisc."""
        found = cls._glob(body)
        return None if found is None else (found[0], found[2])

    @staticmethod
    def _glob(body: bytes) -> tuple[int, int, int] | None:
        _, index, handle, _, _ = _TCMSG.unpack_from(body)
        found = parse_attributes(body, _TCMSG.size)
        if found[_TCA_KIND].rstrip(b"\0") != b"htb" or handle != _HTB_MAJOR:
            return None
        _, _, default, _, direct = _HTB_GLOB.unpack_from(parse_attributes(found[_TCA_OPTIONS])[_HTB_INIT])
        return index, default, direct


class ClassStats(msgspec.Struct, frozen=True):
    """What a class has sent, and what waits or was lost.

    Bytes are link-layer bytes; a super-packet counts as its segments.
    """

    sent_bytes: int
    packets: int
    drops: int
    backlog_bytes: int

    @classmethod
    def decode(cls, body: bytes) -> tuple[int, ClassStats]:
        """(the class's minor number, its counters)"""
        _, _, handle, _, _ = _TCMSG.unpack_from(body)
        stats = parse_attributes(parse_attributes(body, _TCMSG.size)[_TCA_STATS2])
        sent, packets = _BASIC.unpack_from(stats[_STATS_BASIC])
        _, backlog, drops, _, _ = _QUEUE.unpack_from(stats[_STATS_QUEUE])
        return handle & 0xFFFF, cls(sent, packets, drops, backlog)


class HtbClass(msgspec.Struct, frozen=True):
    """An HTB class. Rates in bytes/s; bursts in the kernel's ticks of 64 ns at the respective rate."""

    NEW: ClassVar[int] = 40
    GET: ClassVar[int] = 42
    KEY: ClassVar[int] = 2

    index: int
    minor: int
    parent: int
    rate: int
    ceil: int
    burst_ticks: int
    cburst_ticks: int
    prio: int
    quantum: int

    @property
    def label(self) -> str:
        return f"class 1:{self.minor:x}"

    @classmethod
    def of(cls, index: int, plan: LaneClass) -> HtbClass:
        return cls(
            index=index,
            minor=plan.minor,
            parent=plan.parent,
            rate=plan.rate,
            ceil=plan.ceil,
            burst_ticks=_ticks(plan.burst, plan.rate),
            cburst_ticks=_ticks(plan.cburst, plan.ceil),
            prio=plan.prio,
            quantum=plan.quantum,
        )

    def request(self, on: str) -> Request:
        parms = (
            _ratespec(self.rate)
            + _ratespec(self.ceil)
            + _HTB_TAIL.pack(self.burst_ticks, self.cburst_ticks, self.quantum, 0, self.prio)
        )
        parent = _HTB_MAJOR | self.parent
        body = _TCMSG.pack(0, self.index, _HTB_MAJOR | self.minor, parent, 0) + text_attribute(_TCA_KIND, "htb")
        options = nested(
            _TCA_OPTIONS,
            attribute(_HTB_PARMS, parms),
            attribute(_HTB_RATE64, _U64.pack(self.rate)),
            attribute(_HTB_CEIL64, _U64.pack(self.ceil)),
        )
        return Request(self.NEW, CREATE, body + options, f"{on}: {self.label}")

    @staticmethod
    def dump_body(index: int) -> bytes:
        return _TCMSG.pack(0, index, 0, 0, 0)

    @classmethod
    def decode(cls, body: bytes) -> HtbClass:
        _, index, handle, parent, _ = _TCMSG.unpack_from(body)
        found = parse_attributes(body, _TCMSG.size)
        options = parse_attributes(found[_TCA_OPTIONS])
        parms = options[_HTB_PARMS]
        rate = _RATESPEC.unpack_from(parms)[5]
        ceil = _RATESPEC.unpack_from(parms, _RATESPEC.size)[5]
        burst, cburst, quantum, _, prio = _HTB_TAIL.unpack_from(parms, 2 * _RATESPEC.size)
        return cls(
            index=index,
            minor=handle & 0xFFFF,
            parent=0 if parent == _TC_ROOT else parent & 0xFFFF,
            rate=integer(options, _HTB_RATE64) or rate,
            ceil=integer(options, _HTB_CEIL64) or ceil,
            burst_ticks=burst,
            cburst_ticks=cburst,
            prio=prio,
            quantum=quantum,
        )


class HtbFilter(msgspec.Struct, frozen=True):
    """A u32 filter: IPv4 packets that meet all ``matches`` belong to class ``minor``."""

    NEW: ClassVar[int] = 44
    GET: ClassVar[int] = 46
    KEY: ClassVar[int] = 2
    KIND: ClassVar[str] = "u32"

    index: int
    matches: tuple[Match, ...]
    minor: int

    @classmethod
    def of(cls, index: int, plan: LaneFilter) -> HtbFilter:
        return cls(index, plan.matches, plan.minor)

    @property
    def label(self) -> str:
        return "filter u32 " + " ".join(f"{m.value:08x}/{m.mask:08x} at {m.offset}" for m in self.matches)

    def request(self, on: str) -> Request:
        selector = _SELECTOR.pack(_U32_TERMINAL, 0, len(self.matches), 0, 0, 0, 0, 0)
        for match in self.matches:
            selector += _KEY_WORDS.pack(match.mask, match.value) + _KEY_OFFSETS.pack(match.offset, 0)
        info = (_FILTER_PREF << 16) | socket.htons(_ETH_P_IP)
        body = _TCMSG.pack(0, self.index, 0, _HTB_MAJOR, info) + text_attribute(_TCA_KIND, self.KIND)
        options = nested(
            _TCA_OPTIONS,
            attribute(_U32_CLASSID, _U32.pack(_HTB_MAJOR | self.minor)),
            attribute(_U32_SEL, selector),
        )
        return Request(self.NEW, CREATE, body + options, f"{on}: {self.label}", "CONFIG_NET_CLS_U32")

    @staticmethod
    def dump_body(index: int) -> bytes:
        return _TCMSG.pack(0, index, 0, _HTB_MAJOR, 0)

    @classmethod
    def decode(cls, body: bytes) -> HtbFilter | None:
        """None for the hash tables that hold the filters."""
        _, index, _, _, _ = _TCMSG.unpack_from(body)
        options = parse_attributes(parse_attributes(body, _TCMSG.size).get(_TCA_OPTIONS, b""))
        selector = options.get(_U32_SEL)
        if selector is None or _U32_CLASSID not in options:
            return None
        matches = []
        for number in range(_SELECTOR.unpack_from(selector)[2]):
            at = _SELECTOR.size + number * (_KEY_WORDS.size + _KEY_OFFSETS.size)
            mask, value = _KEY_WORDS.unpack_from(selector, at)
            offset, _ = _KEY_OFFSETS.unpack_from(selector, at + _KEY_WORDS.size)
            matches.append(Match(offset, mask, value))
        return cls(index, tuple(matches), integer(options, _U32_CLASSID) & 0xFFFF)


def _ratespec(rate: int) -> bytes:
    """``struct tc_ratespec``; rates above 32 bits go into attributes of their own."""
    return _RATESPEC.pack(0, _ETHERNET, 0, 0, 0, min(rate, 0xFFFFFFFF))


def _ticks(size: int, rate: int) -> int:
    return round(size * 1_000_000_000 / (rate * _NS_PER_TICK))
