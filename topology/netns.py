"""Make Linux be the cluster: links, lanes and routes; read them back and compare; count; take them down.

Theory of operation. Every switch is a bridge in an anonymous namespace that only the ``Network`` holds. A
link is a veth made there, its far end born in the node's namespace. The state to reach is a list of values
(``rtnl``, ``tc``) for each namespace; ``realise`` sends them in batches, dumps what the kernel then has, and
raises unless both are equal, down to each class's rate. A NIC's *read* direction is the node's egress, its *write*
direction the switch port's egress towards the node; both carry the same HTB tree.

A CNIC has a host and a GPU address. Packets from either leave by that CNIC whatever their destination, even
another address of the same node: rules by source come before the local table, which is left to what arrives.
So a copy between the two sides of one CNIC leaves, turns round at the switch port (hairpin) and comes back.
Neighbours and forwarding tables are fixed and IPv6 is off, so nothing moves that no process sent.

Blocking, and in the main thread only, since namespaces belong to threads: call it before the event loop, or
at the start and end of a run. Nothing made here has a name outside: it dies with the descriptors.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from . import rtnl, tc
from .counters import Direction, LaneCounters, PortCounters
from .errors import TopologyError
from .lanes import CLASS_NAMES, MTU_BYTES, PortPlan, gso_max_bytes, port_plan
from .namespaces import inside, new_netns
from .netlink import NetlinkError, Request, RouteSocket
from .rtnl import KernelObject
from .spec import AddressPlan, ClusterSpec

__all__ = ["Network", "port_plans", "realise"]

_GROUP = 1
_BRIDGE_INDEX = 100
# The two ends of a link must not have one index: a veth whose peer has its own number is taken for a device
# that stands alone, and the kernel then lets up to a second pass before it starts its queue.
_PORT_INDEX = 101
_NIC_INDEX = 5001
_BRIDGE_MAX_PORTS = 1023

_TXQLEN = 10000
_MGMT_GSO_BYTES = 65536

_LOCAL_TABLE, _MAIN_TABLE, _DEFAULT_TABLE = 255, 254, 253
_NIC_TABLE = 101
_ARRIVED_PREF, _SOURCE_PREF, _LOCAL_PREF = 10, 20, 100
_KERNEL_LOCAL = rtnl.Rule(0, _LOCAL_TABLE)
_KERNEL_REST = (rtnl.Rule(32766, _MAIN_TABLE), rtnl.Rule(32767, _DEFAULT_TABLE))

_SYSCTL = Path("/proc/sys/net")

_CARRIER_DEADLINE_S = 5.0
_CARRIER_POLL_S = 0.002

_DUMPED = (rtnl.Link, rtnl.Address, rtnl.Neighbour, rtnl.Forward, rtnl.Route, rtnl.Rule, tc.HtbQdisc)
_DUMPED_BY_DEVICE = (tc.HtbClass, tc.HtbFilter)


class _Place:
    """One namespace: its socket, the devices that are ours in it, and the state they must have.

    ``devices``: what errors call each device. ``shaped``: (node, NIC, direction) of those with lanes.
    ``cables``: on a switch, the links to make: this end, the other end, and the namespace that has it.
    """

    def __init__(self, label: str, netns_fd: int) -> None:
        self.label = label
        self.fd = netns_fd
        self.socket = RouteSocket(netns_fd)
        self.devices: dict[int, str] = {}
        self.shaped: dict[int, tuple[str, str, Direction]] = {}
        self.wanted: list[KernelObject] = []
        self.cables: list[tuple[rtnl.Link, rtnl.Link, int]] = []

    def where(self, value: KernelObject) -> str:
        """How an error calls the thing that ``value`` is on: the link and its end, or the node."""
        return self.devices.get(getattr(value, "index", 0), self.label)

    def apply(self, requests: Sequence[Request]) -> None:
        try:
            self.socket.apply(requests)
        except NetlinkError as error:
            raise TopologyError(_refusal(error)) from None

    def requests(self, *kinds: type[KernelObject]) -> list[Request]:
        """What creates the wanted values of these kinds, in the order of the kinds."""
        wanted = [value for kind in kinds for value in self.wanted if isinstance(value, kind)]
        return [value.request(self.where(value)) for value in wanted]

    def read(self) -> Iterator[KernelObject]:
        """All that the kernel has here of the kinds wanted, on devices of ours or, like rules, on none."""
        kinds = {type(value) for value in self.wanted}
        dumps: list[tuple[type[KernelObject], int]] = [(kind, 0) for kind in _DUMPED if kind in kinds]
        dumps += [(kind, index) for index in self.shaped for kind in _DUMPED_BY_DEVICE]
        for kind, of in dumps:
            for value in kind.dump(self.socket, of):
                if getattr(value, "index", None) in (None, *self.devices):
                    yield value

    def compare(self) -> None:
        """TopologyError for the first difference between what is wanted and what is there."""
        wanted = {_identity(value): value for value in self.wanted}
        found: dict[tuple[Any, ...], KernelObject] = {}
        for value in self.read():
            if found.setdefault(_identity(value), value) is not value:
                raise TopologyError(f"{self.where(value)}: {value.label}: expected once, is there twice")
        for identity, value in wanted.items():
            got = found.get(identity)
            if got is None:
                raise TopologyError(f"{self.where(value)}: {value.label}: expected to be there, got nothing")
            for field in value.__struct_fields__:
                if getattr(value, field) != getattr(got, field):
                    raise TopologyError(
                        f"{self.where(value)}: {value.label}: {field}: expected {getattr(value, field)!r},"
                        f" got {getattr(got, field)!r}"
                    )
        for identity, value in found.items():
            if identity not in wanted:
                raise TopologyError(f"{self.where(value)}: {value.label}: expected not to be there")


class Network:
    """A realised network. Holds the switches, and a socket in each node's namespace, until ``close``."""

    def __init__(self, switches: dict[str, _Place], nodes: dict[str, _Place]) -> None:
        self._switches = switches
        self._nodes = nodes
        self._closed = False

    def read_back(self) -> None:
        """Dump everything from the kernel and compare it with what was asked for.

        TopologyError names the link, the object and field, what was expected and what is there.
        """
        for place in self._places():
            try:
                place.compare()
            except OSError as error:
                raise TopologyError(f"{place.label}: {_os_refusal(error)}") from None

    def counters(self) -> tuple[PortCounters, ...]:
        """Both directions of every shaped NIC, sorted by node, NIC and direction.

        A sweep of 56 links takes some 60 ms of CPU: for the start and end of a run, not for a time series.
        """
        try:
            swept = [counted for place in self._places() for counted in _sweep(place)]
        except OSError as error:
            raise TopologyError(_os_refusal(error)) from None
        return tuple(sorted(swept, key=lambda port: (port.node, port.nic, port.direction)))

    def close(self) -> None:
        """Take all links down and let go of every namespace. Idempotent; never raises for what is gone."""
        if self._closed:
            return
        self._closed = True
        _take_down(self._switches, self._nodes)

    def _places(self) -> list[_Place]:
        if self._closed:
            raise TopologyError("the network is closed")
        return [*self._switches.values(), *self._nodes.values()]


def realise(
    spec: ClusterSpec,
    plan: AddressPlan,
    rates: Mapping[tuple[str, str], float],
    holders: Mapping[str, int],
) -> Network:
    """Build the network of ``spec``, read it back, and return it.

    ``rates``: emulated payload bytes per wall second of every shaped (node, NIC). ``holders``: a descriptor
    of every node's network namespace, which need stay open only during this call. All that can be refused
    without the kernel is refused first. TopologyError, with everything undone, when the kernel refuses or
    does something else.
    """
    ports = port_plans(spec, rates)
    missing = [node.name for node in spec.nodes if node.name not in holders]
    if missing:
        raise TopologyError(f"{missing[0]}: no network namespace was given for this node")
    switches: dict[str, _Place] = {}
    nodes: dict[str, _Place] = {}
    try:
        for name in ("compute", "storage", "mgmt"):
            fd = new_netns()
            try:
                switches[name] = _Place(f"{name} switch", fd)
            except BaseException:
                os.close(fd)
                raise
        for node in spec.nodes:
            nodes[node.name] = _Place(node.name, holders[node.name])
        _plan_links(spec, plan, ports, switches, nodes)
        _plan_routes(spec, plan, nodes)
        _build(switches, nodes)
        _await_carrier([*switches.values(), *nodes.values()])
        network = Network(switches, nodes)
        network.read_back()
        return network
    except BaseException as error:
        _take_down(switches, nodes)
        if isinstance(error, OSError):
            raise TopologyError(_os_refusal(error)) from None
        raise


def port_plans(spec: ClusterSpec, rates: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], PortPlan]:
    """The HTB tree of every shaped NIC, (node, NIC) -> plan. Pure.

    TopologyError for all about rates and sizes that can be refused before anything is made.
    """
    plans: dict[tuple[str, str], PortPlan] = {}
    per_switch = {"cnic": 0, "snic": 0}
    for port in spec.ports():
        key = (port.node, port.nic.name)
        if key not in rates:
            raise TopologyError(f"{_port(*key)}: no emulated rate was given for this NIC")
        try:
            plans[key] = port_plan(rates[key], spec.lanes)
        except TopologyError as error:
            rate = "storage" if spec.node(port.node).role == "storage" else port.nic.kind
            raise TopologyError(f"network.{rate}_gbps ({_port(*key)}): {error.text}") from None
        per_switch[port.nic.kind] += 1
    for kind, count in {**per_switch, "mgmt": len(spec.nodes)}.items():
        if count > _BRIDGE_MAX_PORTS:
            raise TopologyError(
                f"cluster: {count} {kind} links, a switch of Linux has {_BRIDGE_MAX_PORTS} ports; use a smaller"
                " cluster or virtual time"
            )
    return plans


def _plan_links(
    spec: ClusterSpec,
    plan: AddressPlan,
    ports: Mapping[tuple[str, str], PortPlan],
    switches: Mapping[str, _Place],
    nodes: Mapping[str, _Place],
) -> None:
    """Every link's two ends, addresses, neighbours and lanes."""
    members: dict[str, list[tuple[str, str]]] = {"compute": [], "storage": [], "mgmt": []}
    for member in spec.nodes:
        for shaped_nic in member.nics:
            members["compute" if shaped_nic.kind == "cnic" else "storage"].append((member.name, shaped_nic.name))
        members["mgmt"].append((member.name, "mgmt0"))
    for network, links in members.items():
        # One size for a whole network: a super-packet larger than its next hop takes is cut up *behind* the
        # queue there, and would pass in one go.
        shaped = [ports[key].payload_bytes_s for key in links if key in ports]
        gso = min(map(gso_max_bytes, shaped), default=_MGMT_GSO_BYTES)
        everybody = [
            (address, plan.mac(node, nic)) for node, nic in links for address in _addresses(plan, node, nic)
        ]
        switch = switches[network]
        for number, (node, nic) in enumerate(links):
            place = nodes[node]
            mac = plan.mac(node, nic)
            inner, outer = _NIC_INDEX + len(place.devices), _PORT_INDEX + number
            place.devices[inner] = f"{_port(node, nic)} (node end)"
            switch.devices[outer] = f"{_port(node, nic)} (switch end)"
            bridge_port = rtnl.BridgePort(hairpin=nic.startswith("cnic"))
            port_name = plan.port_name(node, nic)
            outer_end = rtnl.Link(
                outer, port_name, _port_mac(mac), MTU_BYTES, _TXQLEN, gso, _BRIDGE_INDEX, bridge_port
            )
            inner_end = rtnl.Link(inner, nic, mac, MTU_BYTES, _TXQLEN, gso)
            switch.cables.append((outer_end, inner_end, place.fd))
            switch.wanted += [outer_end, rtnl.Forward(outer, mac)]
            place.wanted.append(inner_end)
            subnet = plan.network(nic)
            own = _addresses(plan, node, nic)
            place.wanted += [rtnl.Address(inner, address, subnet.prefixlen) for address in own]
            # A CNIC is its own neighbour too: its two sides meet at the switch. Other NICs never are.
            place.wanted += [
                rtnl.Neighbour(inner, address, other)
                for address, other in everybody
                if bridge_port.hairpin or address not in own
            ]
            if (node, nic) in ports:
                place.shaped[inner] = (node, nic, "read")
                place.wanted += _lanes(inner, ports[node, nic])
                switch.shaped[outer] = (node, nic, "write")
                switch.wanted += _lanes(outer, ports[node, nic])


def _plan_routes(spec: ClusterSpec, plan: AddressPlan, nodes: Mapping[str, _Place]) -> None:
    """A table for each CNIC, chosen by the source address; the local table only for what has arrived."""
    for node in spec.nodes:
        cnics = [nic.name for nic in node.nics if nic.kind == "cnic"]
        if not cnics:
            continue
        place = nodes[node.name]
        index_of = {value.name: value.index for value in place.wanted if isinstance(value, rtnl.Link)}
        place.wanted.append(rtnl.Rule(_ARRIVED_PREF, _LOCAL_TABLE, unless_iif="lo"))
        for number, nic in enumerate(cnics):
            subnet = plan.network(nic)
            table = _NIC_TABLE + number
            host = plan.address(node.name, nic, "host")
            place.wanted += [
                rtnl.Route(table, str(subnet.network_address), subnet.prefixlen, index_of[nic]),
                rtnl.Rule(_SOURCE_PREF + number, table, source=host, prefix=31),
            ]
        place.wanted += [rtnl.Rule(_LOCAL_PREF, _LOCAL_TABLE), *_KERNEL_REST]


def _build(switches: Mapping[str, _Place], nodes: Mapping[str, _Place]) -> None:
    """Send everything. Nodes' ends come up first, so that a port carries as soon as it is up."""
    for place in (*switches.values(), *nodes.values()):
        _set_sysctls(place)
    for name, switch in switches.items():
        switch.apply(
            [
                rtnl.add_bridge(_BRIDGE_INDEX, name, MTU_BYTES),
                *(rtnl.add_veth(port, _GROUP, nic, netns_fd) for port, nic, netns_fd in switch.cables),
            ]
        )
    for place in nodes.values():
        place.apply(
            [
                rtnl.raise_loopback(place.label),
                *place.requests(rtnl.Link, rtnl.Address, rtnl.Neighbour, rtnl.Route),
                *place.requests(tc.HtbQdisc, tc.HtbClass, tc.HtbFilter),
                *_rule_requests(place),
            ]
        )
    for switch in switches.values():
        switch.apply(switch.requests(rtnl.Link, rtnl.Forward, tc.HtbQdisc, tc.HtbClass, tc.HtbFilter))


def _rule_requests(place: _Place, *, undo: bool = False) -> list[Request]:
    """Put our rules in place of the kernel's local rule, or that back in place of ours."""
    rules = [value for value in place.wanted if isinstance(value, rtnl.Rule) and value not in _KERNEL_REST]
    if not rules:
        return []
    away, back = _KERNEL_LOCAL.removal(place.label), _KERNEL_LOCAL.request(place.label)
    if undo:
        # Away first: it may never have gone, and the kernel would keep two of it.
        return [away, back, *(rule.removal(place.label) for rule in rules)]
    return [*(rule.request(place.label) for rule in rules), away]


def _set_sysctls(place: _Place) -> None:
    """IPv6 off; no packet refused for its source, which may be the node itself. NICs to come inherit it."""
    wanted = {
        "ipv6/conf/all/disable_ipv6": "1",
        "ipv6/conf/default/disable_ipv6": "1",
        "ipv4/conf/all/rp_filter": "0",
        "ipv4/conf/default/rp_filter": "0",
        "ipv4/conf/all/accept_local": "1",
    }
    with inside(place.fd):
        for name, value in wanted.items():
            path = _SYSCTL / name
            try:
                if path.read_text().strip() != value:
                    path.write_text(value)
            except FileNotFoundError:
                if not name.startswith("ipv6/"):
                    raise
            except OSError as error:
                raise TopologyError(
                    f"{place.label}: {path}: cannot be set to {value}: {error.strerror}; is /proc/sys writable?"
                ) from None


def _await_carrier(places: Sequence[_Place]) -> None:
    """Return once every link carries: the kernel starts a link's queue a moment after its two ends are up."""
    deadline = time.monotonic() + _CARRIER_DEADLINE_S
    for place in places:
        while True:
            links = rtnl.Link.dump(place.socket)
            down = [link for link in links if link.index in place.devices and not link.up]
            if not down:
                break
            if time.monotonic() > deadline:
                raise TopologyError(f"{place.where(down[0])}: expected to carry, is still down")
            time.sleep(_CARRIER_POLL_S)


def _sweep(place: _Place) -> Iterator[PortCounters]:
    """The counters of every shaped device in one namespace."""
    if not place.shaped:
        return
    direct = tc.HtbQdisc.direct_packets(place.socket)
    for index, (node, nic, direction) in place.shaped.items():
        stats = tc.ClassStats.dump(place.socket, index)
        if index not in direct or not CLASS_NAMES.keys() <= stats.keys():
            raise TopologyError(f"{place.devices[index]}: its qdisc or classes are gone")
        lanes = tuple(
            LaneCounters(name, *msgspec.structs.astuple(stats[minor])) for minor, name in CLASS_NAMES.items()
        )
        yield PortCounters(node, nic, direction, lanes, direct[index])


def _take_down(switches: Mapping[str, _Place], nodes: Mapping[str, _Place]) -> None:
    """Undo all of it as far as it got. Every step is tried whatever the others met."""
    for switch in switches.values():
        with suppress(OSError):
            switch.socket.apply([rtnl.delete_group(_GROUP)])
        switch.socket.close()
        os.close(switch.fd)
    for place in nodes.values():
        with suppress(OSError):
            place.socket.apply(_rule_requests(place, undo=True))
        place.socket.close()


def _lanes(index: int, plan: PortPlan) -> list[KernelObject]:
    return [
        tc.HtbQdisc(index, plan.default_minor),
        *(tc.HtbClass.of(index, lane) for lane in plan.classes),
        *(tc.HtbFilter(index, lane.matches, lane.minor) for lane in plan.filters),
    ]


def _addresses(plan: AddressPlan, node: str, nic: str) -> tuple[str, ...]:
    if nic == "mgmt0":
        return (plan.mgmt(node),)
    if nic.startswith("cnic"):
        return plan.address(node, nic, "host"), plan.address(node, nic, "gpu")
    return (plan.address(node, nic),)


def _port(node: str, nic: str) -> str:
    return f"{node}.{nic}"


def _port_mac(mac: str) -> str:
    """The switch's end of the link to ``mac``: also locally administered, and another."""
    return "06" + mac[2:]


def _identity(value: KernelObject) -> tuple[Any, ...]:
    return (type(value), *msgspec.structs.astuple(value)[: value.KEY])


def _os_refusal(error: OSError) -> str:
    """One line for an error of the operating system, of netlink's or of any other call."""
    if isinstance(error, NetlinkError):
        return _refusal(error)
    reason = f"{error.strerror or error}"
    if error.errno == errno.EPERM:
        return f"{reason}: networks need root, or a user namespace of one's own"
    return reason


def _refusal(error: NetlinkError) -> str:
    """One line for what the kernel refused, naming the build option where that is what is missing."""
    request, words = error.request, f" ({error.detail})" if error.detail else ""
    reason = f"{error.strerror} [{errno.errorcode.get(error.code, error.code)}]{words}"
    if request.feature and error.code in (errno.ENOENT, errno.EOPNOTSUPP, errno.EAFNOSUPPORT):
        return f"{request.what}: kernel feature missing: {request.feature}: {reason}"
    if error.code == errno.EPERM:
        return f"{request.what}: {reason}: networks need root, or a user namespace of one's own"
    return f"{request.what}: the kernel refuses: {reason}"
