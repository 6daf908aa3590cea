"""The kernel's network objects as frozen values: each encodes to a request and decodes from a dump.

Pure. What is asked for and what is read back are values of the same types, so that comparing them is ``==``.
``NEW`` and ``GET`` are a type's messages; its first ``KEY`` fields say which object it is, the others what it
is like. Layouts and numbers are those of the kernel's uapi headers (if_link.h, if_addr.h, rtnetlink.h,
neighbour.h,
fib_rules.h). Devices go by their index, which the caller chooses.
"""

from __future__ import annotations

import socket
import struct
from typing import ClassVar

import msgspec

from .netlink import CREATE, REPLACE, Request, attribute, integer, nested, parse_attributes, text_attribute

__all__ = [
    "Address",
    "BridgePort",
    "Forward",
    "Link",
    "Neighbour",
    "Route",
    "Rule",
    "add_bridge",
    "add_veth",
    "configure_nic",
    "configure_port",
    "delete_group",
    "raise_loopback",
]


_AF_BRIDGE = 7

_IFINFO = struct.Struct("=BxHiII")
_IFADDR = struct.Struct("=BBBBI")
_NDMSG = struct.Struct("=BxxxiHBB")
_RTMSG = struct.Struct("=BBBBBBBBI")
_U32 = struct.Struct("=I")

_BRIDGE, _VETH = "bridge", "veth"
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
        if info.get(_IFLA_INFO_SLAVE_KIND, b"").rstrip(b"\0") == _BRIDGE.encode():
            data = parse_attributes(info.get(_IFLA_INFO_SLAVE_DATA, b""))
            port = BridgePort(**{name: data.get(kind, b"\0") != b"\0" for name, kind in _BRPORT.items()})
        return cls(
            index=index,
            name=found[_IFLA_IFNAME].rstrip(b"\0").decode(),
            mac=found.get(_IFLA_ADDRESS, b"").hex(":"),
            mtu=integer(found, _IFLA_MTU),
            txqlen=integer(found, _IFLA_TXQLEN),
            gso_max=integer(found, _IFLA_GSO_MAX_SIZE),
            master=integer(found, _IFLA_MASTER),
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
        + nested(_IFLA_LINKINFO, text_attribute(_IFLA_INFO_KIND, _BRIDGE), data)
    )
    return Request(Link.NEW, CREATE, body, f"bridge {name}", "CONFIG_BRIDGE")


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
        + nested(_IFLA_LINKINFO, text_attribute(_IFLA_INFO_KIND, _VETH), nested(_IFLA_INFO_DATA, peer))
    )
    return Request(Link.NEW, CREATE, body, f"{port.name}: veth pair", "CONFIG_VETH")


def configure_port(port: Link) -> Request:
    """Bring a bridge port up with its bridge settings."""
    assert port.port is not None
    flags = [attribute(kind, bytes([getattr(port.port, name)])) for name, kind in _BRPORT.items()]
    body = _IFINFO.pack(0, 0, port.index, _IFF_UP, _IFF_UP) + nested(
        _IFLA_LINKINFO, text_attribute(_IFLA_INFO_SLAVE_KIND, _BRIDGE), nested(_IFLA_INFO_SLAVE_DATA, *flags)
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
        return Request(self.NEW, CREATE, body, f"{on}: {self.label}")

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
        return Request(self.NEW, REPLACE, body, f"{on}: {self.label}")

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
        return Request(self.NEW, CREATE, body, f"{on}: {self.label}")

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
        return Request(self.NEW, CREATE, body, f"{on}: {self.label}")

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
        return cls(table, socket.inet_ntoa(found[1]), prefix, integer(found, 4))


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
            0 if delete else CREATE,
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
            pref=integer(found, _FRA_PRIORITY),
            table=integer(found, _FRA_TABLE) or table,
            source=socket.inet_ntoa(source) if source else "",
            prefix=prefix,
            unless_iif=found.get(_FRA_IIFNAME, b"").rstrip(b"\0").decode(),
        )


def _mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))
