"""The realised network: what the kernel has is what was asked for, and nothing of it outlives its holder."""

from __future__ import annotations

import itertools
import os
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from tests.within import assert_within
from topology import netns, rtnl, tc
from topology.arbitration import TrafficClasses, VlArbitration, infiniband_shares, roce_shares
from topology.counters import PortCounters
from topology.errors import TopologyError
from topology.lanes import DSCP_OF_LANE, KV_LANE, MODEL_LANE, LaneName, LaneShares, Match
from topology.namespaces import inside, new_netns
from topology.netlink import CHANGE, NetlinkError, Request, RouteSocket, message
from topology.netns import Network, realise
from topology.spec import AddressPlan, ClusterSpec

pytestmark = pytest.mark.root

SPEC = ClusterSpec(name="test", pe_nodes=1, de_nodes=1, gpus_per_node=2, storage_nodes=1)
RATE = 12.5e6
WINDOW_S = 0.5
PORT = ("de0", "cnic0", "write")
HEADERS = 66
ROOT = Path(__file__).resolve().parents[2]


class Cluster:
    """Namespaces for SPEC's nodes, and networks over them."""

    def __init__(self, spec: ClusterSpec = SPEC) -> None:
        self.spec = spec
        self.plan = AddressPlan(spec)
        self.rates = {(port.node, port.nic.name): RATE for port in spec.ports()}
        self.holders = {node.name: new_netns() for node in spec.nodes}
        self.networks: list[Network] = []

    def realise(self) -> Network:
        self.networks.append(realise(self.spec, self.plan, self.rates, self.holders))
        return self.networks[-1]

    def close(self) -> None:
        for network in self.networks:
            network.close()
        for fd in self.holders.values():
            os.close(fd)

    def pair(self, src: tuple[str, str, str], dst: tuple[str, str, str], lane: int) -> tuple[socket.socket, ...]:
        """A TCP connection between two (node, NIC, side), marked with ``lane`` at the sender."""
        with inside(self.holders[dst[0]]):
            listener = socket.socket()
        with inside(self.holders[src[0]]):
            sender = socket.socket()
        with listener:
            listener.bind((self.address(dst), 0))
            listener.listen(1)
            sender.settimeout(5)
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, DSCP_OF_LANE[lane])
            sender.bind((self.address(src), 0))
            sender.connect(listener.getsockname())
            receiver, _ = listener.accept()
        receiver.settimeout(5)
        return sender, receiver

    def saturate(
        self,
        dst: tuple[str, str, str],
        sources: dict[tuple[str, str, str], int],
        parts: Sequence[float],
        windows: int,
        sample: Callable[[], None],
    ) -> None:
        """Send all that goes from each source to ``dst``, on the source's lane, and ``sample`` after every window.

        ``parts``: what of the port each source is expected to get.
        In the first window whoever begins has the port alone for a while.
        """
        pairs = [self.pair(src, dst, lane) for src, lane in sources.items()]
        chunk, due = bytes(1 << 16), time.monotonic() + WINDOW_S
        try:
            with selectors.DefaultSelector() as selector:
                for (sender, receiver), part in zip(pairs, parts, strict=True):
                    # While this process is held up the port carries what is buffered: of each lane its part.
                    size = max(1 << 14, int(part * (1 << 20)))
                    sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
                    for end, event in ((sender, selectors.EVENT_WRITE), (receiver, selectors.EVENT_READ)):
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
                        end.setblocking(False)
                        selector.register(end, event)
                while windows:
                    left = due - time.monotonic()
                    if left <= 0:
                        sample()
                        windows, due = windows - 1, time.monotonic() + WINDOW_S
                        continue
                    for key, event in selector.select(left):
                        assert isinstance(key.fileobj, socket.socket)
                        if event & selectors.EVENT_READ:
                            key.fileobj.recv(len(chunk))
                        else:
                            key.fileobj.send(chunk)
        finally:
            for end in (end for pair in pairs for end in pair):
                end.close()

    def address(self, end: tuple[str, str, str]) -> str:
        node, nic, side = end
        if nic == "mgmt0":
            return self.plan.mgmt(node)
        return self.plan.address(node, nic, "gpu" if side == "gpu" else "host")

    def carry(self, src: tuple[str, str, str], dst: tuple[str, str, str], lane: int, size: int) -> None:
        """Send ``size`` bytes and have them arrive."""
        sender, receiver = self.pair(src, dst, lane)
        with sender, receiver:
            sender.sendall(bytes(size))
            got = 0
            while got < size:
                got += len(receiver.recv(1 << 16))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    try:
        yield made
    finally:
        made.close()


def host_state() -> tuple[str, list[str], list[str]]:
    """Our own namespace, its links, and the host's named namespaces."""
    links = Path("/proc/self/net/dev").read_text().split("\n")[2:]
    named = sorted(os.listdir("/run/netns")) if Path("/run/netns").is_dir() else []
    return os.readlink("/proc/self/ns/net"), sorted(line.split(":")[0] for line in links), named


def links_in(fd: int) -> set[str]:
    made = RouteSocket(fd)
    try:
        return {link.name for link in rtnl.Link.dump(made)}
    finally:
        made.close()


def rules_in(fd: int) -> list[rtnl.Rule]:
    made = RouteSocket(fd)
    try:
        return list(rtnl.Rule.dump(made))
    finally:
        made.close()


Swept = dict[tuple[str, str, str, str], int]


def swept(network: Network) -> Swept:
    """Link-layer bytes so far, by (node, NIC, direction, lane)."""
    return {
        (port.node, port.nic, port.direction, lane.lane): lane.sent_bytes
        for port in network.counters()
        for lane in port.lanes
    }


def moved(network: Network, action: Callable[[], None]) -> dict[tuple[str, str, str, str], int]:
    """Link-layer bytes that ``action`` added, by (node, NIC, direction, lane); those that stayed are left out."""
    before = swept(network)
    action()
    return {key: count - before[key] for key, count in swept(network).items() if count != before[key]}


def test_the_kernel_has_what_was_asked_for(cluster: Cluster) -> None:
    """Realised, the network reads back equal, again and again, with nothing dropped and nothing unshaped."""
    network = cluster.realise()
    network.read_back()
    counters = network.counters()
    assert len(counters) == 2 * len(SPEC.ports())
    assert [c for c in counters if c.direct_packets or any(lane.drops for lane in c.lanes)] == []
    assert links_in(cluster.holders["pe0"]) == {"lo", "cnic0", "cnic1", "snic0", "mgmt0"}
    assert links_in(cluster.holders["sched"]) == {"lo", "mgmt0"}


def test_an_idle_network_is_silent(cluster: Cluster) -> None:
    """No neighbour discovery, no router solicitation, no bridge protocol: not one packet by itself."""
    network = cluster.realise()
    assert all(lane.packets == 0 for port in network.counters() for lane in port.lanes)


@pytest.mark.parametrize(("src", "dst"), [("host", "gpu"), ("gpu", "host")])
def test_a_copy_between_the_sides_of_a_cnic_pays_for_it_both_ways(cluster: Cluster, src: str, dst: str) -> None:
    """H2D and D2H leave by the CNIC and hairpin: its read and write direction both carry every byte."""
    network = cluster.realise()
    size = 200_000
    added = moved(network, lambda: cluster.carry(("pe0", "cnic1", src), ("pe0", "cnic1", dst), KV_LANE, size))
    assert {key[:2] for key in added} == {("pe0", "cnic1")}
    for direction in ("read", "write"):
        assert_within(added["pe0", "cnic1", direction, "kv"], size * 1514 / 1448, rel=0.02)
        assert added["pe0", "cnic1", direction, "ack"] < size * 0.05


def test_a_transfer_counts_at_its_two_ports_and_lane_only(cluster: Cluster) -> None:
    """Bytes leave by the sender's read direction and enter by the receiver's write; only ACKs come back."""
    network = cluster.realise()
    size = 200_000
    ends = ("pe0", "cnic0", "gpu"), ("de0", "cnic1", "host")
    added = moved(network, lambda: cluster.carry(*ends, MODEL_LANE, size))
    lanes = {key: count for key, count in added.items() if key[3] == "high"}
    assert set(lanes) == {("pe0", "cnic0", "read", "high"), ("de0", "cnic1", "write", "high")}
    assert len(set(lanes.values())) == 1
    acks = {key[:3] for key in added if key[3] == "ack"}
    assert acks >= {("pe0", "cnic0", "write"), ("de0", "cnic1", "read")}
    # The answer to the handshake is neither bare nor on the sender's lane.
    handshake = {key[:3]: count for key, count in added.items() if key[3] == "control"}
    assert handshake == {("pe0", "cnic0", "write"): 74, ("de0", "cnic1", "read"): 74}


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (("pe0", "cnic0", "host"), ("pe0", "cnic1", "gpu")),
        (("st0", "snic0", "host"), ("pe0", "snic0", "host")),
        (("de0", "snic0", "host"), ("st0", "snic0", "host")),
        (("de0", "cnic1", "host"), ("pe0", "cnic0", "gpu")),
    ],
)
def test_every_arrow_leaves_by_one_nic_and_enters_by_another(
    cluster: Cluster, src: tuple[str, str, str], dst: tuple[str, str, str]
) -> None:
    """Also between two CNICs of one node: the local table never short-cuts the switch."""
    network = cluster.realise()
    added = moved(network, lambda: cluster.carry(src, dst, KV_LANE, 100_000))
    assert {key[:3] for key in added if key[3] == "kv"} == {(*src[:2], "read"), (*dst[:2], "write")}


def test_management_reaches_everybody_and_touches_no_nic(cluster: Cluster) -> None:
    """RPCs between any two nodes, and to oneself, move nothing over CNICs and SNICs."""
    network = cluster.realise()

    def calls() -> None:
        for src in ("client", "pe0", "sched"):
            for dst in ("sched", "st0", "pe0"):
                cluster.carry((src, "mgmt0", "host"), (dst, "mgmt0", "host"), 0, 1000)

    assert moved(network, calls) == {}


def change(fd: int, request: Request) -> None:
    """Do something behind the network's back."""
    made = RouteSocket(fd)
    try:
        made.apply([request])
    finally:
        made.close()


def cnic0_class(cluster: Cluster) -> tc.HtbClass:
    """The KV class of pe0's cnic0, as the kernel has it."""
    made = RouteSocket(cluster.holders["pe0"])
    try:
        index = next(link.index for link in rtnl.Link.dump(made) if link.name == "cnic0")
        return next(found for found in tc.HtbClass.dump(made, index) if found.minor == 0x20)
    finally:
        made.close()


def test_a_rate_changed_behind_our_back_is_noticed(cluster: Cluster) -> None:
    """Reading back names the link, the class, the field, what was expected and what is there."""
    network = cluster.realise()
    kv = cnic0_class(cluster)
    raw = msgspec.structs.replace(kv, rate=kv.rate + 1).encode()
    change(cluster.holders["pe0"], Request(raw[:6] + CHANGE.to_bytes(2, sys.byteorder) + raw[8:], "pe0"))
    with pytest.raises(TopologyError) as caught:
        network.read_back()
    for word in ("pe0.cnic0 (node end)", "class 1:20", "rate", f"expected {kv.rate}", f"got {kv.rate + 1}"):
        assert word in caught.value.text


def test_any_other_change_is_noticed(cluster: Cluster) -> None:
    """A filter too many, a link brought down, a rule put in: each is a difference."""
    network = cluster.realise()
    index = cnic0_class(cluster).index
    change(cluster.holders["pe0"], tc.HtbFilter(index, (Match(1, 0xFC << 24, 0x68 << 24),), 0x10).request("pe0"))
    with pytest.raises(TopologyError, match=r"pe0\.cnic0 .*filter u32 68000000/.* at 1: expected not to be there"):
        network.read_back()
    change(
        cluster.holders["sched"], Request(message("RTM_DELLINK", CHANGE, {}, IFLA_IFNAME="mgmt0"), "delete mgmt0")
    )
    with pytest.raises(
        TopologyError, match=r"sched\.mgmt0 \(switch end\): link sched\.mgmt0: expected to be there"
    ):
        network.read_back()


def test_closing_leaves_the_nodes_as_they_were(cluster: Cluster) -> None:
    """After close the namespaces have their loopback and the kernel's rules, and can be used at once again."""
    before = {name: rules_in(fd) for name, fd in cluster.holders.items()}
    for _ in range(3):
        network = cluster.realise()
        network.close()
        network.close()
        assert all(links_in(fd) == {"lo"} for fd in cluster.holders.values())
        assert {name: rules_in(fd) for name, fd in cluster.holders.items()} == before
    with pytest.raises(TopologyError, match="closed"):
        network.counters()


def test_the_host_is_untouched(cluster: Cluster) -> None:
    """The host's links and namespaces are the same before, during and after."""
    before = host_state()
    network = cluster.realise()
    assert host_state() == before
    network.close()
    assert host_state() == before


@pytest.mark.parametrize(
    ("kind", "feature"),
    [
        (b"htb", "CONFIG_NET_SCH_HTB"),
        (b"u32", "CONFIG_NET_CLS_U32"),
        (b"veth", "CONFIG_VETH"),
        (b"bridge", "CONFIG_BRIDGE"),
    ],
)
def test_a_missing_kernel_feature_is_named_and_all_is_undone(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, kind: bytes, feature: str
) -> None:
    """Asked for a kind that no kernel has, it refuses as one without the module would."""
    original = netns._Place.apply

    def unknown(place: netns._Place, requests: list[Request]) -> None:
        changed = [request.message.replace(kind + b"\0", b"?" * len(kind) + b"\0") for request in requests]
        original(place, [Request(raw, r.what, r.feature) for raw, r in zip(changed, requests, strict=True)])

    before = host_state(), {name: rules_in(fd) for name, fd in cluster.holders.items()}
    monkeypatch.setattr(netns._Place, "apply", unknown)
    with pytest.raises(TopologyError, match=f"kernel feature missing: {feature}"):
        cluster.realise()
    assert all(links_in(fd) == {"lo"} for fd in cluster.holders.values())
    assert (host_state(), {name: rules_in(fd) for name, fd in cluster.holders.items()}) == before
    monkeypatch.undo()
    cluster.realise()


@pytest.mark.parametrize("step", [0, 1, 3, 5, 8, 10])
def test_interrupted_anywhere_nothing_is_left(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """An interrupt between any two batches undoes what was done."""
    original = netns._Place.apply
    left = [step]

    def interrupted(place: netns._Place, requests: list[Request]) -> None:
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        original(place, requests)

    fds = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(netns._Place, "apply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cluster.realise()
    assert all(links_in(fd) == {"lo"} for fd in cluster.holders.values())
    assert len(os.listdir("/proc/self/fd")) == fds


@pytest.mark.parametrize(
    ("rate", "what"), [(1.0, "emulated rate"), (float("nan"), "positive, finite"), (0.0, "positive, finite")]
)
def test_what_cannot_be_shaped_is_refused_before_anything_is_made(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, rate: float, what: str
) -> None:
    """The key's path and the link are named, and the kernel was never asked."""

    def never() -> int:
        raise AssertionError("a namespace was made")

    monkeypatch.setattr(netns, "new_netns", never)
    cluster.rates["de0", "cnic1"] = rate
    with pytest.raises(TopologyError, match=rf"network\.cnic_gbps \(de0\.cnic1\): .*{what}"):
        cluster.realise()
    del cluster.rates["de0", "cnic1"]
    with pytest.raises(TopologyError, match=r"de0\.cnic1: no emulated rate"):
        cluster.realise()


def test_more_links_than_a_switch_has_ports_are_refused() -> None:
    """Before any kernel change, with the numbers."""
    spec = ClusterSpec(name="large", pe_nodes=64, de_nodes=64)
    rates = {(port.node, port.nic.name): RATE for port in spec.ports()}
    with pytest.raises(TopologyError, match="1024 cnic links"):
        realise(spec, AddressPlan(spec), rates, {})


@pytest.mark.parametrize("rate", [250e3, 6.25e6, 50e6, 250e6, 5e9, 5e10, 4e11])
def test_rates_reach_the_kernel_exactly(cluster: Cluster, rate: float) -> None:
    """From 2 Mb/s to 3,200 Gb/s, beyond 32 bits of bytes too, what was asked reads back."""
    cluster.rates = dict.fromkeys(cluster.rates, rate)
    cluster.realise()
    kv = cnic0_class(cluster)
    assert kv.ceil == round(rate * 1514 / 1448)


@pytest.mark.parametrize(
    "lanes",
    [infiniband_shares(VlArbitration(qos_high_limit=9)), roce_shares(TrafficClasses(60, 30, 10))],
    ids=["infiniband", "roce"],
)
def test_a_compiled_profile_is_what_the_kernel_does(lanes: LaneShares) -> None:
    """Realised it reads back equal, and two lanes that meet share the port as HTB's rule says.

    KV's part is 1.4 % in the one profile, a third in the other; control, the third lane, is idle.
    """
    cluster = Cluster(msgspec.structs.replace(SPEC, lanes=lanes))
    try:
        network = cluster.realise()
        kv = cnic0_class(cluster)
        assert (kv.prio, kv.quantum) == (lanes.kv_borrowing.prio, lanes.kv_borrowing.quantum_bytes)
        sources = {("pe0", "cnic0", "host"): MODEL_LANE, ("pe0", "cnic1", "host"): KV_LANE}
        samples: list[Swept] = []
        expected = lanes.among(("high", "kv"))
        parts = [expected["high"], expected["kv"]]
        cluster.saturate(("de0", "cnic0", "host"), sources, parts, 6, lambda: samples.append(swept(network)))
        shares: dict[LaneName, list[float]] = {"high": [], "kv": []}
        for before, after in itertools.pairwise(samples):
            sent = {lane: after[(*PORT, lane)] - before[(*PORT, lane)] for lane in shares}
            for lane, got in shares.items():
                got.append(sent[lane] / sum(sent.values()))
        for lane, share in expected.items():
            assert_within(statistics.median(shares[lane]), share, rel=0.05, what=lane)
    finally:
        cluster.close()


def test_a_batch_names_the_message_that_failed() -> None:
    """Of many messages in one call the error belongs to the first that was refused; the others were done."""
    fd = new_netns()
    route = RouteSocket(fd)
    try:
        wanted = [rtnl.Address(1, f"127.0.1.{n}", 32) for n in range(1, 250)]
        requests = [address.request("here") for address in wanted]
        twice = [*requests[:100], requests[5], *requests[100:199]]
        with pytest.raises(NetlinkError) as caught:
            route.apply(twice)
        assert caught.value.request.what == "here: address 127.0.1.6"
        assert caught.value.code == 17
        assert set(wanted[:100]) <= set(rtnl.Address.dump(route))
    finally:
        route.close()
        os.close(fd)


def test_everything_vanishes_with_its_holder() -> None:
    """Killed with a network realised, a process leaves no link and no namespace."""
    script = (
        "import os, sys, signal\n"
        "from tests.netns.test_netns import Cluster\n"
        "network = Cluster().realise()\n"
        "print('ready', flush=True)\n"
        "signal.pause()\n"
    )
    before = host_state()
    child = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"ready\n"
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert host_state() == before


def test_it_works_in_a_user_namespace_without_root() -> None:
    """An ordinary user with a user namespace of its own realises the network and reads it back."""
    # Imports come first: the interpreter may be where that user cannot read. Dumpable again, it may map itself.
    script = (
        "import ctypes, os\n"
        "from pathlib import Path\n"
        "from tests.netns.test_netns import KV_LANE, Cluster\n"
        "from topology.namespaces import CLONE_NEWNET, CLONE_NEWUSER, unshare\n"
        "os.setgroups([])\n"
        "os.setresgid(65534, 65534, 65534)\n"
        "os.setresuid(65534, 65534, 65534)\n"
        "ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)\n"
        "unshare(CLONE_NEWUSER | CLONE_NEWNET)\n"
        "Path('/proc/self/setgroups').write_text('deny')\n"
        "Path('/proc/self/uid_map').write_text('0 65534 1')\n"
        "Path('/proc/self/gid_map').write_text('0 65534 1')\n"
        "cluster = Cluster()\n"
        "cluster.realise()\n"
        "cluster.carry(('pe0', 'cnic0', 'host'), ('pe0', 'cnic0', 'gpu'), KV_LANE, 100000)\n"
        "print('carried')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "carried\n", done.stderr


def test_2p4d_is_realised_within_its_budget() -> None:
    """56 shaped links and ten management links, read back, in at most 1.5 s."""
    spec = ClusterSpec(name="whole", pe_nodes=2, de_nodes=4)
    cluster = Cluster(spec)
    try:
        started = time.perf_counter()
        network = cluster.realise()
        took = time.perf_counter() - started
        assert took <= 1.5
        counters: tuple[PortCounters, ...] = network.counters()
        assert len(counters) == 112
    finally:
        cluster.close()
