"""Traffic control as frozen values: the HTB qdisc, its classes and filters, and their counters.

As in ``rtnl``. A device's classes and filters are dumped device by device, the qdiscs together.
"""

from __future__ import annotations

import socket
from typing import Any, ClassVar, Self

import msgspec

from .lanes import LaneClass, Match
from .netlink import CREATE, RouteSocket, message, nest, read
from .rtnl import OnDevice

__all__ = ["ClassStats", "HtbClass", "HtbFilter", "HtbQdisc"]

_TC_ROOT = 0xFFFFFFFF
_HTB_MAJOR = 1 << 16
_HTB_VERSION = 3
_HTB_R2Q = 10
_LINKLAYER_ETHERNET = 1
_FILTER_PREF = 1
_ETH_P_IP = 0x0800
_SELECTOR_BYTES, _KEY_BYTES = 20, 16
_NS_PER_TICK = 64
"""The unit in which HTB is told a burst: ``PSCHED_SHIFT`` 6, the same in every kernel with hrtimers."""


class HtbQdisc(OnDevice, frozen=True):
    """The root HTB of a device; ``default_minor`` is the class of what no filter names."""

    KIND: ClassVar[str] = "QDISC"
    KEY: ClassVar[int] = 1
    LABEL: ClassVar[str] = "qdisc htb"
    FEATURE: ClassVar[str] = "CONFIG_NET_SCH_HTB"

    default_minor: int

    def encode(self) -> bytes:
        glob = {"version": _HTB_VERSION, "rate2quantum": _HTB_R2Q, "defcls": self.default_minor}
        fields = {"index": self.index, "handle": _HTB_MAJOR, "parent": _TC_ROOT}
        return message("RTM_NEWQDISC", CREATE, fields, TCA_KIND="htb", TCA_OPTIONS=nest(TCA_HTB_INIT=glob))

    @classmethod
    def decode(cls, found: Any) -> Self | None:
        glob = _glob(found)
        return None if glob is None else cls(found["index"], glob["defcls"])

    @classmethod
    def direct_packets(cls, route: RouteSocket) -> dict[int, int]:
        """How many packets bypassed all classes, by device."""
        dumped = [read(raw) for raw in route.dump(f"RTM_GET{cls.KIND}")]
        return {found["index"]: glob["direct_pkts"] for found in dumped if (glob := _glob(found))}


def _glob(found: Any) -> Any:
    """The settings and state of a qdisc that is our HTB, or None."""
    if found.get_attr("TCA_KIND") != "htb" or found["handle"] != _HTB_MAJOR:
        return None
    return found.get_attr("TCA_OPTIONS").get_attr("TCA_HTB_INIT")


class HtbClass(OnDevice, frozen=True):
    """An HTB class. Rates in bytes/s; bursts in the kernel's ticks of 64 ns at the respective rate."""

    KIND: ClassVar[str] = "TCLASS"
    LABEL: ClassVar[str] = "class 1:{0.minor:x}"

    minor: int
    parent: int
    rate: int
    ceil: int
    burst_ticks: int
    cburst_ticks: int
    prio: int
    quantum: int

    @classmethod
    def of(cls, index: int, plan: LaneClass) -> HtbClass:
        bursts = _ticks(plan.burst, plan.rate), _ticks(plan.cburst, plan.ceil)
        return cls(index, plan.minor, plan.parent, plan.rate, plan.ceil, *bursts, plan.prio, plan.quantum)

    def encode(self) -> bytes:
        # Rates above 32 bits go into attributes of their own. What pyroute2 calls reserved is the link layer,
        # and a class that names none would need a table of rates.
        parms = {
            "rate": min(self.rate, 0xFFFFFFFF),
            "rate___reserved": _LINKLAYER_ETHERNET,
            "ceil": min(self.ceil, 0xFFFFFFFF),
            "ceil___reserved": _LINKLAYER_ETHERNET,
            "buffer": self.burst_ticks,
            "cbuffer": self.cburst_ticks,
            "quantum": self.quantum,
            "prio": self.prio,
        }
        options = nest(TCA_HTB_PARMS=parms, TCA_HTB_RATE64=self.rate, TCA_HTB_CEIL64=self.ceil)
        fields = {"index": self.index, "handle": _HTB_MAJOR | self.minor, "parent": _HTB_MAJOR | self.parent}
        return message("RTM_NEWTCLASS", CREATE, fields, TCA_KIND="htb", TCA_OPTIONS=options)

    @classmethod
    def decode(cls, found: Any) -> Self:
        options = found.get_attr("TCA_OPTIONS")
        parms = options.get_attr("TCA_HTB_PARMS")
        return cls(
            index=found["index"],
            minor=found["handle"] & 0xFFFF,
            parent=0 if found["parent"] == _TC_ROOT else found["parent"] & 0xFFFF,
            rate=options.get_attr("TCA_HTB_RATE64") or parms["rate"],
            ceil=options.get_attr("TCA_HTB_CEIL64") or parms["ceil"],
            burst_ticks=parms["buffer"],
            cburst_ticks=parms["cbuffer"],
            prio=parms["prio"],
            quantum=parms["quantum"],
        )


class ClassStats(msgspec.Struct, frozen=True):
    """What a class has sent, and what waits or was lost.

    Bytes are link-layer bytes; a super-packet counts as its segments.
    """

    sent_bytes: int
    packets: int
    drops: int
    backlog_bytes: int

    @classmethod
    def dump(cls, route: RouteSocket, index: int) -> dict[int, ClassStats]:
        """Those of a device's classes, by the class's minor number."""
        swept = {}
        for found in map(read, route.dump(f"RTM_GET{HtbClass.KIND}", index=index)):
            stats = found.get_attr("TCA_STATS2")
            sent, queue = stats.get_attr("TCA_STATS_BASIC"), stats.get_attr("TCA_STATS_QUEUE")
            swept[found["handle"] & 0xFFFF] = cls(sent["bytes"], sent["packets"], queue["drops"], queue["backlog"])
        return swept


class HtbFilter(OnDevice, frozen=True):
    """A u32 filter: IPv4 packets that meet all ``matches`` belong to class ``minor``."""

    KIND: ClassVar[str] = "TFILTER"
    FEATURE: ClassVar[str] = "CONFIG_NET_CLS_U32"

    matches: tuple[Match, ...]
    minor: int

    @property
    def label(self) -> str:
        return "filter u32 " + " ".join(f"{m.value:08x}/{m.mask:08x} at {m.offset}" for m in self.matches)

    def encode(self) -> bytes:
        keys = [f"{match.value:#010x}/{match.mask:#010x}+{match.offset}" for match in self.matches]
        options = nest(TCA_U32_CLASSID=_HTB_MAJOR | self.minor, TCA_U32_SEL={"keys": keys})
        info = (_FILTER_PREF << 16) | socket.htons(_ETH_P_IP)
        fields = {"index": self.index, "parent": _HTB_MAJOR, "info": info}
        return message("RTM_NEWTFILTER", CREATE, fields, TCA_KIND="u32", TCA_OPTIONS=options)

    @classmethod
    def decode(cls, found: Any) -> Self | None:
        """Not the hash tables that hold the filters."""
        options = found.get_attr("TCA_OPTIONS") if found.get_attr("TCA_KIND") == "u32" else None
        selector = options and options.get_attr("TCA_U32_SEL")
        classid = options and options.get_attr("TCA_U32_CLASSID")
        if not selector or not classid:
            return None
        matches = []
        for number in range(selector["nkeys"]):
            # pyroute2 itself looks for the keys four bytes early.
            at = selector.offset + _SELECTOR_BYTES + number * _KEY_BYTES
            key = selector.u32_key(data=selector.data, offset=at)
            key.decode()
            matches.append(Match(key["key_off"], key["key_mask"], key["key_val"]))
        return cls(found["index"], tuple(matches), classid & 0xFFFF)


def _ticks(size: int, rate: int) -> int:
    return round(size * 1_000_000_000 / (rate * _NS_PER_TICK))
