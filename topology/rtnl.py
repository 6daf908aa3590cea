"""The kernel's network objects as frozen values: each encodes to a request and decodes from a dump.

Pure. What is asked for and what is read back are values of the same types, so that comparing them is ``==``.
``NEW`` and ``GET`` are a type's messages; its first ``KEY`` fields say which object it is, the others what it
is like. Layouts and numbers are those of the kernel's uapi headers (if_link.h, if_addr.h, rtnetlink.h,
neighbour.h, fib_rules.h, pkt_sched.h, pkt_cls.h). Devices go by their index, which the caller chooses.
"""

from __future__ import annotations

import socket
import struct
import sys
from typing import ClassVar

import msgspec

from .lanes import LaneClass, LaneFilter
from .netlink import Request, attribute, nested, parse_attributes, text_attribute

__all__ = [
    "Addable",
    "Address",
    "BridgePort",
    "ClassStats",
    "Forward",
    "HtbClass",
    "HtbFilter",
    "HtbQdisc",
    "Link",
    "Neighbour",
    "Route",
    "Rule",
    "Value",
    "add_bridge",
    "add_veth",
    "configure_nic",
    "configure_port",
    "delete_group",
    "raise_loopback",
]

_CREATE = 0x400 | 0x200  # NLM_F_CREATE | NLM_F_EXCL
_REPLACE = 0x400 | 0x100  # NLM_F_CREATE | NLM_F_REPLACE

_AF_BRIDGE = 7

_IFINFO = struct.Struct("=BxHiII")
_IFADDR = struct.Struct("=BBBBI")
_NDMSG = struct.Struct("=BxxxiHBB")
_RTMSG = struct.Struct("=BBBBBBBBI")
_TCMSG = struct.Struct("=BxxxiIII")
_U32 = struct.Struct("=I")
_U64 = struct.Struct("=Q")

_IFF_UP = 0x1
_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MTU, _IFLA_MASTER, _IFLA_TXQLEN, _IFLA_OPERSTATE = 1, 3, 4, 10, 13, 16
_IFLA_LINKINFO, _IFLA_AF_SPEC, _IFLA_GROUP, _IFLA_NET_NS_FD, _IFLA_EXT_MASK, _IFLA_GSO_MAX_SIZE = (
    18,
    26,
    27,
    28,
    29,
    41,
)
_IFLA_INFO_KIND, _IFLA_INFO_DATA, _IFLA_INFO_SLAVE_KIND, _IFLA_INFO_SLAVE_DATA = 1, 2, 4, 5
_VETH_INFO_PEER = 1
_IFLA_BR_STP_STATE, _IFLA_BR_MCAST_SNOOPING = 5, 23
_BRPORT = {"hairpin": 4, "learning": 8, "unicast_flood": 9, "multicast_flood": 27, "broadcast_flood": 30}
_IFLA_INET_CONF = 1
_DEVCONF_RP_FILTER, _DEVCONF_ACCEPT_LOCAL = 8, 23
_OPER_UP = 6
_SKIP_STATS = 1 << 3

_NUD_NOARP, _NUD_PERMANENT = 0x40, 0x80
_NTF_MASTER = 0x4

_RTPROT_STATIC = 4
_SCOPE_LINK = 253
_RTN_UNICAST = 1
_FR_ACT_TO_TBL = 1
_FIB_RULE_INVERT = 0x2
_FRA_SRC, _FRA_IIFNAME, _FRA_PRIORITY, _FRA_TABLE = 2, 3, 6, 15

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
_DSCP_MASK = 0xFC << 16
_FILTER_PREF = 1
_ETH_P_IP = 0x0800
_STATS_BASIC, _STATS_QUEUE = 1, 3
_BASIC = struct.Struct("=QI")
_QUEUE = struct.Struct("=IIIII")
_NS_PER_TICK = 64
"""The unit in which HTB is told a burst: ``PSCHED_SHIFT`` 6, the same in every kernel with hrtimers."""


class BridgePort(msgspec.Struct, frozen=True):
    """How a bridge treats a port. Nothing floods and nothing is learnt: the forwarding table is given."""

    hairpin: bool
    learning: bool = False
    unicast_flood: bool = False
    multicast_flood: bool = False
    broadcast_flood: bool = False


class Link(msgspec.Struct, frozen=True):
    """A device. ``port`` and ``master`` (the bridge's index) belong to a switch's end of a link."""

    NEW: ClassVar[int] = 16
    DELETE: ClassVar[int] = 17
    GET: ClassVar[int] = 18
    KEY: ClassVar[int] = 1

    index: int
    name: str
    mac: str
    mtu: int
    txqlen: int
    gso_max: int
    master: int = 0
    port: BridgePort | None = None
    up: bool = True

    @property
    def label(self) -> str:
        return f"link {self.name}"

    @staticmethod
    def dump_body() -> bytes:
        return _IFINFO.pack(0, 0, 0, 0, 0) + attribute(_IFLA_EXT_MASK, _U32.pack(_SKIP_STATS))

    @classmethod
    def decode(cls, body: bytes) -> Link:
        """``up`` only once the device carries: administratively up and its peer too."""
        _, _, index, flags, _ = _IFINFO.unpack_from(body)
        found = parse_attributes(body, _IFINFO.size)
        info = parse_attributes(found.get(_IFLA_LINKINFO, b""))
        port = None
        if info.get(_IFLA_INFO_SLAVE_KIND, b"").rstrip(b"\0") == b"bridge":
            data = parse_attributes(info.get(_IFLA_INFO_SLAVE_DATA, b""))
            port = BridgePort(**{name: data.get(kind, b"\0") != b"\0" for name, kind in _BRPORT.items()})
        return cls(
            index=index,
            name=found[_IFLA_IFNAME].rstrip(b"\0").decode(),
            mac=found.get(_IFLA_ADDRESS, b"").hex(":"),
            mtu=_u32(found, _IFLA_MTU),
            txqlen=_u32(found, _IFLA_TXQLEN),
            gso_max=_u32(found, _IFLA_GSO_MAX_SIZE),
            master=_u32(found, _IFLA_MASTER),
            port=port,
            up=bool(flags & _IFF_UP) and found.get(_IFLA_OPERSTATE) == bytes([_OPER_UP]),
        )


def add_bridge(index: int, name: str, mtu: int) -> Request:
    """A bridge without spanning tree and multicast snooping, so that it sends nothing of its own."""
    data = nested(
        _IFLA_INFO_DATA,
        attribute(_IFLA_BR_STP_STATE, _U32.pack(0)),
        attribute(_IFLA_BR_MCAST_SNOOPING, b"\0"),
    )
    body = (
        _IFINFO.pack(0, 0, index, _IFF_UP, _IFF_UP)
        + text_attribute(_IFLA_IFNAME, name)
        + attribute(_IFLA_MTU, _U32.pack(mtu))
        + nested(_IFLA_LINKINFO, text_attribute(_IFLA_INFO_KIND, "bridge"), data)
    )
    return Request(Link.NEW, _CREATE, body, f"bridge {name}", "CONFIG_BRIDGE")


def add_veth(port: Link, group: int, nic: Link, nic_netns_fd: int) -> Request:
    """A link: ``port`` here, as member of ``group`` and of its bridge; ``nic`` made in the other namespace."""
    peer = attribute(
        _VETH_INFO_PEER | 0x8000,
        _IFINFO.pack(0, 0, nic.index, 0, 0) + _new_link(nic) + attribute(_IFLA_NET_NS_FD, _U32.pack(nic_netns_fd)),
    )
    body = (
        _IFINFO.pack(0, 0, port.index, 0, 0)
        + _new_link(port)
        + attribute(_IFLA_MASTER, _U32.pack(port.master))
        + attribute(_IFLA_GROUP, _U32.pack(group))
        + nested(_IFLA_LINKINFO, text_attribute(_IFLA_INFO_KIND, "veth"), nested(_IFLA_INFO_DATA, peer))
    )
    return Request(Link.NEW, _CREATE, body, f"{port.name}: veth pair", "CONFIG_VETH")


def configure_port(port: Link) -> Request:
    """Bring a bridge port up with its bridge settings."""
    assert port.port is not None
    flags = [attribute(kind, bytes([getattr(port.port, name)])) for name, kind in _BRPORT.items()]
    body = _IFINFO.pack(0, 0, port.index, _IFF_UP, _IFF_UP) + nested(
        _IFLA_LINKINFO, text_attribute(_IFLA_INFO_SLAVE_KIND, "bridge"), nested(_IFLA_INFO_SLAVE_DATA, *flags)
    )
    return Request(Link.NEW, 0, body, f"{port.name}: bridge port")


def configure_nic(nic: Link, on: str, *, accept_local: bool) -> Request:
    """Bring a node's NIC up; ``accept_local`` lets in what the node itself sent."""
    inet = nested(
        socket.AF_INET,
        nested(
            _IFLA_INET_CONF,
            attribute(_DEVCONF_RP_FILTER, _U32.pack(0)),
            attribute(_DEVCONF_ACCEPT_LOCAL, _U32.pack(accept_local)),
        ),
    )
    body = _IFINFO.pack(0, 0, nic.index, _IFF_UP, _IFF_UP) + nested(_IFLA_AF_SPEC, inet)
    return Request(Link.NEW, 0, body, f"{on}: {nic.label}")


def raise_loopback(on: str) -> Request:
    """Bring ``lo`` up, which is device 1 of every namespace."""
    return Request(Link.NEW, 0, _IFINFO.pack(0, 0, 1, _IFF_UP, _IFF_UP), f"{on}: link lo")


def delete_group(group: int) -> Request:
    """All links of a group at once, and so their other ends; ENODEV if there are none."""
    body = _IFINFO.pack(0, 0, 0, 0, 0) + attribute(_IFLA_GROUP, _U32.pack(group))
    return Request(Link.DELETE, 0, body, f"links of group {group}")


def _new_link(link: Link) -> bytes:
    return (
        text_attribute(_IFLA_IFNAME, link.name)
        + attribute(_IFLA_ADDRESS, _mac(link.mac))
        + attribute(_IFLA_MTU, _U32.pack(link.mtu))
        + attribute(_IFLA_TXQLEN, _U32.pack(link.txqlen))
        + attribute(_IFLA_GSO_MAX_SIZE, _U32.pack(link.gso_max))
    )


class Address(msgspec.Struct, frozen=True):
    """An IPv4 address of a device and the length of its subnet's prefix."""

    NEW: ClassVar[int] = 20
    GET: ClassVar[int] = 22
    KEY: ClassVar[int] = 2

    index: int
    ip: str
    prefix: int

    @property
    def label(self) -> str:
        return f"address {self.ip}"

    def request(self, on: str) -> Request:
        raw = socket.inet_aton(self.ip)
        body = _IFADDR.pack(socket.AF_INET, self.prefix, 0, 0, self.index) + attribute(1, raw) + attribute(2, raw)
        return Request(self.NEW, _CREATE, body, f"{on}: {self.label}")

    @staticmethod
    def dump_body() -> bytes:
        return _IFADDR.pack(socket.AF_INET, 0, 0, 0, 0)

    @classmethod
    def decode(cls, body: bytes) -> Address:
        _, prefix, _, _, index = _IFADDR.unpack_from(body)
        return cls(index, socket.inet_ntoa(parse_attributes(body, _IFADDR.size)[2]), prefix)


class Neighbour(msgspec.Struct, frozen=True):
    """A permanent neighbour: ``ip`` is behind ``mac`` on this device. It never ages and nobody asks."""

    NEW: ClassVar[int] = 28
    GET: ClassVar[int] = 30
    KEY: ClassVar[int] = 2

    index: int
    ip: str
    mac: str

    @property
    def label(self) -> str:
        return f"neighbour {self.ip}"

    def request(self, on: str) -> Request:
        body = (
            _NDMSG.pack(socket.AF_INET, self.index, _NUD_PERMANENT, 0, 0)
            + attribute(1, socket.inet_aton(self.ip))
            + attribute(2, _mac(self.mac))
        )
        return Request(self.NEW, _REPLACE, body, f"{on}: {self.label}")

    @staticmethod
    def dump_body() -> bytes:
        return _NDMSG.pack(socket.AF_INET, 0, 0, 0, 0)

    @classmethod
    def decode(cls, body: bytes) -> Neighbour | None:
        """None for an entry that is not permanent."""
        family, index, state, _, _ = _NDMSG.unpack_from(body)
        if family != socket.AF_INET or state != _NUD_PERMANENT:
            return None
        found = parse_attributes(body, _NDMSG.size)
        return cls(index, socket.inet_ntoa(found[1]), found[2].hex(":"))


class Forward(msgspec.Struct, frozen=True):
    """A fixed entry of a bridge's forwarding table: frames to ``mac`` leave by this port."""

    NEW: ClassVar[int] = 28
    GET: ClassVar[int] = 30
    KEY: ClassVar[int] = 2

    index: int
    mac: str

    @property
    def label(self) -> str:
        return f"forwarding entry {self.mac}"

    def request(self, on: str) -> Request:
        body = _NDMSG.pack(_AF_BRIDGE, self.index, _NUD_NOARP, _NTF_MASTER, 0) + attribute(2, _mac(self.mac))
        return Request(self.NEW, _CREATE, body, f"{on}: {self.label}")

    @staticmethod
    def dump_body() -> bytes:
        return _IFINFO.pack(_AF_BRIDGE, 0, 0, 0, 0)

    @classmethod
    def decode(cls, body: bytes) -> Forward | None:
        """None for the entries that the bridge makes for its ports' own addresses."""
        _, index, state, _, _ = _NDMSG.unpack_from(body)
        if state != _NUD_NOARP:
            return None
        return cls(index, parse_attributes(body, _NDMSG.size)[2].hex(":"))


class Route(msgspec.Struct, frozen=True):
    """A route of a table: ``subnet``/``prefix`` is on the device's link."""

    NEW: ClassVar[int] = 24
    GET: ClassVar[int] = 26
    KEY: ClassVar[int] = 2

    table: int
    subnet: str
    prefix: int
    index: int

    @property
    def label(self) -> str:
        return f"route to {self.subnet} of table {self.table}"

    def request(self, on: str) -> Request:
        body = (
            _RTMSG.pack(
                socket.AF_INET, self.prefix, 0, 0, self.table, _RTPROT_STATIC, _SCOPE_LINK, _RTN_UNICAST, 0
            )
            + attribute(1, socket.inet_aton(self.subnet))
            + attribute(4, _U32.pack(self.index))
        )
        return Request(self.NEW, _CREATE, body, f"{on}: {self.label}")

    @staticmethod
    def dump_body() -> bytes:
        return _RTMSG.pack(socket.AF_INET, 0, 0, 0, 0, 0, 0, 0, 0)

    @classmethod
    def decode(cls, body: bytes) -> Route | None:
        """None for the routes that the kernel makes itself."""
        _, prefix, _, _, table, protocol, _, _, _ = _RTMSG.unpack_from(body)
        if protocol != _RTPROT_STATIC:
            return None
        found = parse_attributes(body, _RTMSG.size)
        return cls(table, socket.inet_ntoa(found[1]), prefix, _u32(found, 4))


class Rule(msgspec.Struct, frozen=True):
    """A routing rule: packets ``source``/``prefix``, or not arriving on ``unless_iif``, use ``table``."""

    NEW: ClassVar[int] = 32
    DELETE: ClassVar[int] = 33
    GET: ClassVar[int] = 34
    KEY: ClassVar[int] = 1

    pref: int
    table: int
    source: str = ""
    prefix: int = 0
    unless_iif: str = ""

    @property
    def label(self) -> str:
        return f"rule {self.pref}"

    def request(self, on: str, *, delete: bool = False) -> Request:
        flags = _FIB_RULE_INVERT if self.unless_iif else 0
        body = _RTMSG.pack(socket.AF_INET, 0, self.prefix, 0, self.table, 0, 0, _FR_ACT_TO_TBL, flags)
        body += attribute(_FRA_PRIORITY, _U32.pack(self.pref)) + attribute(_FRA_TABLE, _U32.pack(self.table))
        if self.source:
            body += attribute(_FRA_SRC, socket.inet_aton(self.source))
        if self.unless_iif:
            body += text_attribute(_FRA_IIFNAME, self.unless_iif)
        return Request(
            self.DELETE if delete else self.NEW,
            0 if delete else _CREATE,
            body,
            f"{on}: {self.label}",
            "CONFIG_IP_MULTIPLE_TABLES",
        )

    @staticmethod
    def dump_body() -> bytes:
        return _RTMSG.pack(socket.AF_INET, 0, 0, 0, 0, 0, 0, 0, 0)

    @classmethod
    def decode(cls, body: bytes) -> Rule:
        _, _, prefix, _, table, _, _, _, _ = _RTMSG.unpack_from(body)
        found = parse_attributes(body, _RTMSG.size)
        source = found.get(_FRA_SRC)
        return cls(
            pref=_u32(found, _FRA_PRIORITY),
            table=_u32(found, _FRA_TABLE) or table,
            source=socket.inet_ntoa(source) if source else "",
            prefix=prefix,
            unless_iif=found.get(_FRA_IIFNAME, b"").rstrip(b"\0").decode(),
        )


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
            _CREATE,
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
        return Request(self.NEW, _CREATE, body + options, f"{on}: {self.label}")

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
            rate=_u64(options, _HTB_RATE64) or rate,
            ceil=_u64(options, _HTB_CEIL64) or ceil,
            burst_ticks=burst,
            cburst_ticks=cburst,
            prio=prio,
            quantum=quantum,
        )


class HtbFilter(msgspec.Struct, frozen=True):
    """A u32 filter: IPv4 packets with the code point of ``tos`` belong to class ``minor``."""

    NEW: ClassVar[int] = 44
    GET: ClassVar[int] = 46
    KEY: ClassVar[int] = 2

    index: int
    tos: int
    minor: int

    @property
    def label(self) -> str:
        return f"filter u32 tos 0x{self.tos:02x}"

    @classmethod
    def of(cls, index: int, plan: LaneFilter) -> HtbFilter:
        return cls(index, plan.tos, plan.minor)

    def request(self, on: str) -> Request:
        # The first word of an IPv4 header holds version, TOS and length; tc numbers its fields big-endian.
        selector = struct.pack("=BBBxHHhh", _U32_TERMINAL, 0, 1, 0, 0, 0, 0) + struct.pack(
            ">III", 0, _DSCP_MASK, (self.tos & 0xFC) << 16
        )
        selector += struct.pack("=ii", 0, 0)
        info = (_FILTER_PREF << 16) | socket.htons(_ETH_P_IP)
        body = _TCMSG.pack(0, self.index, 0, _HTB_MAJOR, info) + text_attribute(_TCA_KIND, "u32")
        options = nested(
            _TCA_OPTIONS,
            attribute(_U32_CLASSID, _U32.pack(_HTB_MAJOR | self.minor)),
            attribute(_U32_SEL, selector),
        )
        return Request(self.NEW, _CREATE, body + options, f"{on}: {self.label}", "CONFIG_NET_CLS_U32")

    @staticmethod
    def dump_body(index: int) -> bytes:
        return _TCMSG.pack(0, index, 0, _HTB_MAJOR, 0)

    @classmethod
    def decode(cls, body: bytes) -> HtbFilter | None:
        """None for the hash tables that hold the filters; tos -1 for a filter that does not look at it."""
        _, index, _, _, _ = _TCMSG.unpack_from(body)
        options = parse_attributes(parse_attributes(body, _TCMSG.size).get(_TCA_OPTIONS, b""))
        if _U32_SEL not in options or _U32_CLASSID not in options:
            return None
        mask, value = struct.unpack_from(">II", options[_U32_SEL], 16)
        tos = (value >> 16) & 0xFF if mask == _DSCP_MASK else -1
        return cls(index, tos, _u32(options, _U32_CLASSID) & 0xFFFF)


Addable = Address | Neighbour | Forward | Route | Rule | HtbQdisc | HtbClass | HtbFilter
"""What one request of its own creates."""
Value = Link | Addable


def _ratespec(rate: int) -> bytes:
    """``struct tc_ratespec``; rates above 32 bits go into attributes of their own."""
    return _RATESPEC.pack(0, _ETHERNET, 0, 0, 0, min(rate, 0xFFFFFFFF))


def _ticks(size: int, rate: int) -> int:
    return round(size * 1_000_000_000 / (rate * _NS_PER_TICK))


def _mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def _u32(found: dict[int, bytes], kind: int) -> int:
    return int.from_bytes(found.get(kind, b""), sys.byteorder)


def _u64(found: dict[int, bytes], kind: int) -> int:
    return int.from_bytes(found.get(kind, b"")[:8], sys.byteorder)
