"""The kernel's network objects as frozen values: each encodes to a request and decodes from a dump.

What is asked for and what is read back are values of the same types, so that comparing them is ``==``. Names
and numbers are those of the kernel's uapi headers. Devices go by their index, which the caller chooses.

Hundreds of devices have the same things, and pyroute2 takes its time for every message. So a thing on a device
is encoded once, for whichever device, and decoded once; the rest are copies with another index.
"""

from __future__ import annotations

import socket
from abc import ABCMeta, abstractmethod
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, ClassVar, Self

import msgspec

from .netlink import (
    CHANGE,
    CREATE,
    REPLACE,
    Request,
    RouteSocket,
    bare,
    index_of,
    message,
    nest,
    read,
    with_index,
)

__all__ = [
    "Address",
    "BridgePort",
    "Forward",
    "KernelObject",
    "Link",
    "Neighbour",
    "OnDevice",
    "Route",
    "Rule",
    "add_bridge",
    "add_veth",
    "delete_group",
    "raise_loopback",
]

_AF_BRIDGE = 7
_IFF_UP = 0x1
_NUD_NOARP, _NUD_PERMANENT = 0x40, 0x80
_NTF_MASTER = 0x4
_RTPROT_STATIC = 4
_SCOPE_LINK = 253
_RTN_UNICAST = 1
_FR_ACT_TO_TBL = 1
_FIB_RULE_INVERT = 0x2


class _AbstractStruct(msgspec.StructMeta, ABCMeta):
    """Of structs that have abstract methods."""


class KernelObject(msgspec.Struct, frozen=True, metaclass=_AbstractStruct):
    """What all kinds have in common. ``KIND`` as in RTM_GET<KIND>; ``FAMILY`` of addresses, where it matters.

    The first ``KEY`` fields say which object it is, the others what it is like; ``LABEL`` makes a name of them.
    """

    KIND: ClassVar[str]
    FAMILY: ClassVar[int] = 0
    KEY: ClassVar[int] = 2
    LABEL: ClassVar[str]
    FEATURE: ClassVar[str] = ""

    @property
    def label(self) -> str:
        return self.LABEL.format(self)

    def request(self, on: str) -> Request:
        """What makes the kernel have it. ``on`` is where, for errors."""
        return Request(self.encode(), f"{on}: {self.label}", self.FEATURE)

    @classmethod
    def dump(cls, route: RouteSocket, index: int = 0) -> Iterator[Self]:
        """All there are in the socket's namespace, or of one device."""
        for raw in route.dump(f"RTM_GET{cls.KIND}", cls.FAMILY, index):
            value = cls.of_message(raw)
            if value is not None:
                yield value

    @classmethod
    def of_message(cls, raw: bytes) -> Self | None:
        """What a message says, or None when it is of no kind that we make."""
        return cls.decode(read(raw))

    @abstractmethod
    def encode(self) -> bytes:
        """The message of ``request``."""

    @classmethod
    @abstractmethod
    def decode(cls, found: Any) -> Self | None:
        """``of_message`` for a message that has been read."""


class OnDevice(KernelObject, frozen=True):
    """What a device has, or the device itself."""

    index: int

    def request(self, on: str) -> Request:
        made = with_index(_encoded(msgspec.structs.replace(self, index=0)), self.index)
        return Request(made, f"{on}: {self.label}", self.FEATURE)

    @classmethod
    def of_message(cls, raw: bytes) -> Self | None:
        value: Self | None = _decoded(cls, bare(with_index(raw, 0)))
        return None if value is None else msgspec.structs.replace(value, index=index_of(raw))


@lru_cache(8192)
def _encoded(value: OnDevice) -> bytes:
    return value.encode()


@lru_cache(8192)
def _decoded(kind: type[OnDevice], raw: bytes) -> Any:
    return kind.decode(read(raw))


class BridgePort(msgspec.Struct, frozen=True):
    """How a bridge treats a port. Nothing floods and nothing is learnt: the forwarding table is given."""

    hairpin: bool
    learning: bool = False
    unicast_flood: bool = False
    multicast_flood: bool = False
    broadcast_flood: bool = False


_BRPORT = {
    "hairpin": "IFLA_BRPORT_MODE",
    "learning": "IFLA_BRPORT_LEARNING",
    "unicast_flood": "IFLA_BRPORT_UNICAST_FLOOD",
    "multicast_flood": "IFLA_BRPORT_MCAST_FLOOD",
    "broadcast_flood": "IFLA_BRPORT_BCAST_FLOOD",
}


class Link(OnDevice, frozen=True):
    """A device. ``port`` and ``master`` (the bridge's index) belong to a switch's end of a link.

    Requested, one that is there already comes up with its bridge settings.
    """

    KIND: ClassVar[str] = "LINK"
    KEY: ClassVar[int] = 1
    LABEL: ClassVar[str] = "link {0.name}"

    name: str
    mac: str
    mtu: int
    txqlen: int
    gso_max: int
    master: int = 0
    port: BridgePort | None = None
    up: bool = True

    def encode(self) -> bytes:
        info = {}
        if self.port is not None:
            settings = {name: getattr(self.port, field) for field, name in _BRPORT.items()}
            info["IFLA_LINKINFO"] = nest(IFLA_INFO_SLAVE_KIND="bridge", IFLA_INFO_SLAVE_DATA=nest(**settings))
        return message("RTM_NEWLINK", CHANGE, _up(self.index), **info)

    @classmethod
    def decode(cls, found: Any) -> Self:
        """``up`` only once the device carries: administratively up and its peer too."""
        info = found.get_attr("IFLA_LINKINFO")
        port = None
        if info is not None and info.get_attr("IFLA_INFO_SLAVE_KIND") == "bridge":
            data = info.get_attr("IFLA_INFO_SLAVE_DATA")
            port = BridgePort(**{field: bool(data.get_attr(name)) for field, name in _BRPORT.items()})
        return cls(
            index=found["index"],
            name=found.get_attr("IFLA_IFNAME"),
            mac=found.get_attr("IFLA_ADDRESS") or "",
            mtu=found.get_attr("IFLA_MTU"),
            txqlen=found.get_attr("IFLA_TXQLEN"),
            gso_max=found.get_attr("IFLA_GSO_MAX_SIZE"),
            master=found.get_attr("IFLA_MASTER") or 0,
            port=port,
            up=bool(found["flags"] & _IFF_UP) and found.get_attr("IFLA_OPERSTATE") == "UP",
        )


def add_bridge(index: int, name: str, mtu: int) -> Request:
    """A bridge without spanning tree and multicast snooping, so that it sends nothing of its own."""
    data = nest(IFLA_BR_STP_STATE=0, IFLA_BR_MCAST_SNOOPING=0)
    info = nest(IFLA_INFO_KIND="bridge", IFLA_INFO_DATA=data)
    made = message("RTM_NEWLINK", CREATE, _up(index), IFLA_IFNAME=name, IFLA_MTU=mtu, IFLA_LINKINFO=info)
    return Request(made, f"bridge {name}", "CONFIG_BRIDGE")


def add_veth(port: Link, group: int, nic: Link, nic_netns_fd: int) -> Request:
    """A link: ``port`` here, as member of ``group`` and of its bridge; ``nic`` made in the other namespace."""
    peer = {"index": nic.index, **nest(**_new_link(nic), IFLA_NET_NS_FD=nic_netns_fd)}
    made = message(
        "RTM_NEWLINK",
        CREATE,
        {"index": port.index},
        **_new_link(port),
        IFLA_MASTER=port.master,
        IFLA_GROUP=group,
        IFLA_LINKINFO=nest(IFLA_INFO_KIND="veth", IFLA_INFO_DATA=nest(VETH_INFO_PEER=peer)),
    )
    return Request(made, f"{port.name}: veth pair", "CONFIG_VETH")


def raise_loopback(on: str) -> Request:
    """Bring ``lo`` up, which is device 1 of every namespace."""
    return Request(message("RTM_NEWLINK", CHANGE, _up(1)), f"{on}: link lo")


def delete_group(group: int) -> Request:
    """All links of a group at once, and so their other ends; ENODEV if there are none."""
    return Request(message("RTM_DELLINK", CHANGE, {}, IFLA_GROUP=group), f"links of group {group}")


def _up(index: int) -> dict[str, int]:
    return {"index": index, "flags": _IFF_UP, "change": _IFF_UP}


def _new_link(link: Link) -> dict[str, object]:
    return {
        "IFLA_IFNAME": link.name,
        "IFLA_ADDRESS": link.mac,
        "IFLA_MTU": link.mtu,
        "IFLA_TXQLEN": link.txqlen,
        "IFLA_GSO_MAX_SIZE": link.gso_max,
    }


class Address(OnDevice, frozen=True):
    """An IPv4 address of a device and the length of its subnet's prefix."""

    KIND: ClassVar[str] = "ADDR"
    FAMILY: ClassVar[int] = socket.AF_INET
    LABEL: ClassVar[str] = "address {0.ip}"

    ip: str
    prefix: int

    def encode(self) -> bytes:
        fields = {"family": self.FAMILY, "prefixlen": self.prefix, "index": self.index}
        return message("RTM_NEWADDR", CREATE, fields, IFA_LOCAL=self.ip, IFA_ADDRESS=self.ip)

    @classmethod
    def decode(cls, found: Any) -> Self:
        return cls(found["index"], found.get_attr("IFA_LOCAL"), found["prefixlen"])


class Neighbour(OnDevice, frozen=True):
    """A permanent neighbour: ``ip`` is behind ``mac`` on this device. It never ages and nobody asks."""

    KIND: ClassVar[str] = "NEIGH"
    FAMILY: ClassVar[int] = socket.AF_INET
    LABEL: ClassVar[str] = "neighbour {0.ip}"

    ip: str
    mac: str

    def encode(self) -> bytes:
        fields = {"family": self.FAMILY, "ifindex": self.index, "state": _NUD_PERMANENT}
        return message("RTM_NEWNEIGH", REPLACE, fields, NDA_DST=self.ip, NDA_LLADDR=self.mac)

    @classmethod
    def decode(cls, found: Any) -> Self | None:
        if found["family"] != cls.FAMILY or found["state"] != _NUD_PERMANENT:
            return None
        return cls(found["ifindex"], found.get_attr("NDA_DST"), found.get_attr("NDA_LLADDR"))


class Forward(OnDevice, frozen=True):
    """A fixed entry of a bridge's forwarding table: frames to ``mac`` leave by this port."""

    KIND: ClassVar[str] = "NEIGH"
    FAMILY: ClassVar[int] = _AF_BRIDGE
    LABEL: ClassVar[str] = "forwarding entry {0.mac}"

    mac: str

    def encode(self) -> bytes:
        fields = {"family": self.FAMILY, "ifindex": self.index, "state": _NUD_NOARP, "flags": _NTF_MASTER}
        return message("RTM_NEWNEIGH", CREATE, fields, NDA_LLADDR=self.mac)

    @classmethod
    def decode(cls, found: Any) -> Self | None:
        """Not the entries that the bridge makes for its ports' own addresses."""
        return cls(found["ifindex"], found.get_attr("NDA_LLADDR")) if found["state"] == _NUD_NOARP else None


class Route(KernelObject, frozen=True):
    """A route of a table: ``subnet``/``prefix`` is on the device's link."""

    KIND: ClassVar[str] = "ROUTE"
    FAMILY: ClassVar[int] = socket.AF_INET
    LABEL: ClassVar[str] = "route to {0.subnet} of table {0.table}"

    table: int
    subnet: str
    prefix: int
    index: int

    def encode(self) -> bytes:
        fields = {
            "family": self.FAMILY,
            "dst_len": self.prefix,
            "table": self.table,
            "proto": _RTPROT_STATIC,
            "scope": _SCOPE_LINK,
            "type": _RTN_UNICAST,
        }
        return message("RTM_NEWROUTE", CREATE, fields, RTA_DST=self.subnet, RTA_OIF=self.index)

    @classmethod
    def decode(cls, found: Any) -> Self | None:
        """Not the routes that the kernel makes itself."""
        if found["proto"] != _RTPROT_STATIC:
            return None
        subnet = found.get_attr("RTA_DST") or "0.0.0.0"
        return cls(found["table"], subnet, found["dst_len"], found.get_attr("RTA_OIF") or 0)


class Rule(KernelObject, frozen=True):
    """A routing rule: packets ``source``/``prefix``, or not arriving on ``unless_iif``, use ``table``."""

    KIND: ClassVar[str] = "RULE"
    FAMILY: ClassVar[int] = socket.AF_INET
    KEY: ClassVar[int] = 1
    LABEL: ClassVar[str] = "rule {0.pref}"
    FEATURE: ClassVar[str] = "CONFIG_IP_MULTIPLE_TABLES"

    pref: int
    table: int
    source: str = ""
    prefix: int = 0
    unless_iif: str = ""

    def encode(self) -> bytes:
        return self._message("RTM_NEWRULE", CREATE)

    def removal(self, on: str) -> Request:
        """What takes it away again."""
        return Request(self._message("RTM_DELRULE", CHANGE), f"{on}: {self.label}", self.FEATURE)

    def _message(self, kind: str, flags: int) -> bytes:
        fields = {
            "family": self.FAMILY,
            "src_len": self.prefix,
            "table": self.table,
            "action": _FR_ACT_TO_TBL,
            "flags": _FIB_RULE_INVERT if self.unless_iif else 0,
        }
        condition = {"FRA_SRC": self.source, "FRA_IIFNAME": self.unless_iif}
        given = {name: value for name, value in condition.items() if value}
        return message(kind, flags, fields, FRA_PRIORITY=self.pref, FRA_TABLE=self.table, **given)

    @classmethod
    def decode(cls, found: Any) -> Self:
        return cls(
            pref=found.get_attr("FRA_PRIORITY") or 0,
            table=found.get_attr("FRA_TABLE") or found["table"],
            source=found.get_attr("FRA_SRC") or "",
            prefix=found["src_len"],
            unless_iif=found.get_attr("FRA_IIFNAME") or "",
        )
