"""Cluster descriptions: presets, files, validation, and the address plan."""

from __future__ import annotations

import math
import os
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.within import assert_within
from topology.arbitration import VlArbitration, infiniband_shares
from topology.errors import TopologyError
from topology.lanes import LaneShares
from topology.spec import PRESETS, AddressPlan, ClusterSpec, load_topology

GOOD = """\
[cluster]
name = "mine"
pe_nodes = 1
de_nodes = 2

[network]
snic_gbps = 100
"""

SPECS = st.builds(
    ClusterSpec,
    name=st.from_regex(r"[a-z0-9][a-z0-9_-]{0,31}", fullmatch=True),
    pe_nodes=st.integers(1, 12),
    de_nodes=st.integers(1, 12),
    gpus_per_node=st.integers(1, 24),
    cnic_gbps=st.floats(35, 3200),
    snic_gbps=st.floats(35, 3200),
    storage_nodes=st.integers(1, 4),
)


def write(folder: Path, text: str | bytes, name: str = "some.toml") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refusal(given_path: Any) -> str:
    """The one line with which it is refused."""
    with pytest.raises(TopologyError) as caught:
        load_topology(given_path)
    assert "\n" not in caught.value.text
    assert caught.value.text.isprintable()
    return caught.value.text


def test_presets_are_what_their_names_say() -> None:
    """A preset NpMd has N PE and M DE nodes of 8 CNICs and an SNIC, and storage of exactly 1.25 (P + D) s B."""
    assert set(PRESETS) >= {"1p1d", "1p2d", "2p1d", "2p4d", "1p7d", "7p2d"}
    for name in PRESETS:
        spec = load_topology(name)
        assert spec.name == name == f"{spec.pe_nodes}p{spec.de_nodes}d"
        for node in spec.nodes:
            wanted = {"pe": 9, "de": 9, "storage": 1, "scheduler": 0, "client": 0}[node.role]
            assert len(node.nics) == wanted
        offered = spec.storage_nodes * spec.storage_link_gbps
        assert offered == 1.25 * (spec.pe_nodes + spec.de_nodes) * spec.snic_gbps


def test_2p4d_has_56_shaped_links() -> None:
    """48 CNICs, 6 SNICs and 2 storage links."""
    ports = load_topology("2p4d").ports()
    assert len(ports) == 56
    assert sum(port.nic.kind == "cnic" for port in ports) == 48


@given(SPECS)
def test_a_spec_survives_the_wire(spec: ClusterSpec) -> None:
    """As JSON and as plain data a spec comes back equal, and with equal nodes."""
    assert msgspec.json.decode(msgspec.json.encode(spec), type=ClusterSpec) == spec
    assert msgspec.convert(msgspec.to_builtins(spec), ClusterSpec).nodes == spec.nodes


@given(SPECS)
def test_storage_never_binds(spec: ClusterSpec) -> None:
    """Left out, the storage rate is exactly what the rule needs; less is refused with the number needed."""
    offered = spec.storage_nodes * spec.storage_link_gbps
    needed = 1.25 * (spec.pe_nodes + spec.de_nodes) * spec.snic_gbps
    assert_within(offered, needed, rel=1e-12)
    with pytest.raises(TopologyError, match=r"network\.storage_gbps.*or more"):
        msgspec.structs.replace(spec, storage_gbps=spec.storage_link_gbps * 0.999)


@given(SPECS)
def test_engines_pair_with_compute_nics(spec: ClusterSpec) -> None:
    """Engine i of a node goes with cnic i, and rates are the model's in bytes/s."""
    for node in spec.nodes:
        cnics = [nic for nic in node.nics if nic.kind == "cnic"]
        assert [f"{node.name}/{i}" for i in range(len(cnics))] == list(node.engines)
        assert all(nic.rate_bytes_s == spec.cnic_gbps * 1e9 / 8 for nic in cnics)
        assert spec.node(node.name) == node


@given(SPECS)
def test_addresses_are_distinct_private_and_on_their_network(spec: ClusterSpec) -> None:
    """No two sides share an address, no two NICs a MAC; the sides of a CNIC make one /31; names fit."""
    plan = AddressPlan(spec)
    addresses, macs, names = [], [], []
    for node in spec.nodes:
        mgmt = plan.mgmt(node.name)
        assert IPv4Address(mgmt) in plan.MGMT
        addresses.append(mgmt)
        macs.append(plan.mac(node.name, "mgmt0"))
        names.append(plan.port_name(node.name, "mgmt0"))
    for port in spec.ports():
        sides = [IPv4Address(plan.address(port.node, port.nic.name))]
        if port.nic.kind == "cnic":
            sides.append(IPv4Address(plan.address(port.node, port.nic.name, "gpu")))
            assert int(sides[0]) % 2 == 0
            assert int(sides[1]) == int(sides[0]) + 1
        assert all(side in plan.network(port.nic.name) and side.is_private for side in sides)
        addresses += map(str, sides)
        macs.append(plan.mac(port.node, port.nic.name))
        names.append(plan.port_name(port.node, port.nic.name))
    assert len(set(addresses)) == len(addresses)
    assert len(set(macs)) == len(macs)
    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= 15


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"pe_nodes": 200, "de_nodes": 100}, "304 nodes"),
        ({"gpus_per_node": 25}, "gpus_per_node"),
    ],
)
def test_a_cluster_beyond_the_address_plan_is_refused(fields: dict[str, Any], what: str) -> None:
    """The plan says what there is no room for; nothing wraps around."""
    spec = ClusterSpec(**{"name": "big", "pe_nodes": 1, "de_nodes": 1, **fields})
    with pytest.raises(TopologyError, match=what):
        AddressPlan(spec)


def test_unknown_nodes_and_sides_have_no_address() -> None:
    """An address is only given for what is in the cluster."""
    plan = AddressPlan(load_topology("1p1d"))
    for args in (("pe9", "cnic0"), ("pe0", "cnic8"), ("pe0", "snic0", "gpu"), ("sched", "snic0")):
        with pytest.raises(TopologyError, match="no address"):
            plan.address(*args)
    with pytest.raises(TopologyError, match="no node"):
        plan.mgmt("nobody")
    with pytest.raises(TopologyError, match="nodes: pe0, de0"):
        load_topology("1p1d").node("pe1")


@pytest.mark.parametrize(
    "name",
    ["a" * 33, "a" * 64, "a" * 255, "", "-lead", "a/b", "a b", "\u00fc", "A", "a\n", "..", "a\0", 5, None],
)
def test_names_that_are_not_safe_are_refused(name: Any) -> None:
    """A name is refused with its field, whole; never cut short."""
    with pytest.raises(TopologyError, match=r"cluster\.name"):
        ClusterSpec(name=name, pe_nodes=1, de_nodes=1)


@pytest.mark.parametrize("length", [1, 15, 16, 32])
def test_names_up_to_32_characters_are_kept(length: int) -> None:
    """Names equal in their first 15 characters stay two names."""
    assert ClusterSpec(name="a" * length, pe_nodes=1, de_nodes=1).name == "a" * length


@pytest.mark.parametrize("key", ["cnic_gbps", "snic_gbps", "storage_gbps"])
@pytest.mark.parametrize(
    "value", ["0", "-1", "nan", "inf", "-inf", "1e400", "true", '"400"', "[1]", "10" + "0" * 400]
)
def test_a_rate_that_is_none_names_its_key(tmp_path: Path, key: str, value: str) -> None:
    """Refused with file, line and key path; never clamped."""
    path = write(tmp_path, f"[cluster]\npe_nodes = 1\nde_nodes = 1\n[network]\n{key} = {value}\n")
    text = refusal(path)
    assert text.startswith(f"{path}:5: network.{key} = ")
    # What looks like a number is shown to be a string.
    assert not value.startswith('"') or "= '400':" in text


@pytest.mark.parametrize("key", ["pe_nodes", "de_nodes", "gpus_per_node", "storage_nodes"])
@pytest.mark.parametrize("value", ["0", "-1", "1.0", "true", '"1"', "99999999999999999999"])
def test_a_count_that_is_none_names_its_key(tmp_path: Path, key: str, value: str) -> None:
    """Counts are whole numbers from 1."""
    lines = {"pe_nodes": "1", "de_nodes": "1"} | {key: value}
    path = write(tmp_path, "[cluster]\n" + "".join(f"{k} = {v}\n" for k, v in lines.items()))
    text = refusal(path)
    assert f"cluster.{key} = " in text
    assert text.startswith(f"{path}:")


@given(st.floats(min_value=8e-9, max_value=3200))
def test_any_positive_rate_is_kept_exactly(rate: float) -> None:
    """From 8 bit/s to 3,200 Gb/s a spec keeps the number it was given."""
    spec = ClusterSpec(name="x", pe_nodes=1, de_nodes=1, cnic_gbps=rate)
    assert spec.node("pe0").nics[0].rate_bytes_s == rate * (1e9 / 8)


def test_a_file_is_read_with_its_defaults(tmp_path: Path) -> None:
    """What is left out is 8 GPUs, 400 Gb/s, two storage nodes that do not bind; the name falls to the file's."""
    spec = load_topology(write(tmp_path, GOOD))
    assert (spec.name, spec.pe_nodes, spec.de_nodes, spec.gpus_per_node) == ("mine", 1, 2, 8)
    assert (spec.cnic_gbps, spec.snic_gbps, spec.storage_link_gbps) == (400, 100, 187.5)
    nameless = write(tmp_path, GOOD.replace('name = "mine"\n', ""), "other.toml")
    assert load_topology(nameless).name == "other"


def test_lanes_are_shares_or_a_profile(tmp_path: Path) -> None:
    """A file chooses between fixed shares, which are the default, and those compiled from a port's settings."""
    assert load_topology(write(tmp_path, GOOD)).lanes == LaneShares()
    compiled = load_topology(write(tmp_path, GOOD + '[lanes]\nprofile = "infiniband"\nqos_high_limit = 9\n'))
    assert compiled.lanes == infiniband_shares(VlArbitration(qos_high_limit=9)) != LaneShares()
    assert msgspec.json.decode(msgspec.json.encode(compiled), type=ClusterSpec) == compiled


def test_tables_of_others_are_ignored(tmp_path: Path) -> None:
    """`engine`, `model` and `scale` are for whoever runs on the network."""
    text = GOOD + "[engine]\nanything = 1\n[model]\nname = 'x'\n[scale]\ndilation = 2\n"
    assert load_topology(write(tmp_path, text)) == load_topology(write(tmp_path, GOOD))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD.replace("snic_gbps", "snic_gpbs"), ":7: network.snic_gpbs: unknown key; did you mean snic_gbps?"),
        ("cnic_gbps = 1\n" + GOOD, ":1: cnic_gbps: unknown key or table; it belongs in [network]"),
        (GOOD + "pe_nodes = 2\n", ":8: network.pe_nodes: unknown key; it belongs in [cluster]"),
        (GOOD.replace("[network]", "[netwrk]"), ":6: netwrk: unknown key or table; did you mean network?"),
        (GOOD + "[cluster.deep]\n", ":8: cluster.deep: unknown key"),
        ("network = 3\n[cluster]\npe_nodes=1\nde_nodes=1\n", ":1: network: expected a table [network]"),
        ("[[network]]\n[cluster]\npe_nodes=1\nde_nodes=1\n", ":1: network: expected a table [network]"),
        ("[cluster]\npe_nodes = 1\n", ": cluster.de_nodes is missing"),
        ("", ": no [cluster] table"),
        ("[network]\n", ": no [cluster] table"),
        ("[cluster]\npe_nodes = \n", ": not TOML: Invalid value (at line 2"),
        ("[cluster]\npe_nodes = 1\npe_nodes = 2\n", ": not TOML: Cannot overwrite a value (at line 3"),
        (GOOD + "[lanes]\nhigh = 0.99\nkv = 0.02\n", ": lanes: high + kv + control"),
        (GOOD + "[lanes]\nhigh = 2\n", ":9: lanes.high = 2: expected a share"),
        (GOOD + "[lanes]\nhigh_borrowing = 2\n", ":9: lanes.high_borrowing: unknown key; did you mean high"),
        (GOOD + "[lanes]\nkv = 0.1\nqos_high_limit = 9\n", ":10: lanes.qos_high_limit: belongs to a profile"),
        (GOOD + "qos_high_limit = 9\n", ":8: network.qos_high_limit: unknown key; it belongs in [lanes]"),
        (
            GOOD + '[lanes]\nprofile = "infiniband"\nqos_vlarb_low = "2:64,1:x"\n',
            ":10: lanes.qos_vlarb_low: entry '1:x': expected vl:weight",
        ),
        (GOOD + '[lanes]\nprofile = "roce"\n', ": lanes.high_weight is missing; expected a whole number"),
        (
            GOOD.replace("de_nodes = 2", "de_nodes = 2\ngpus_per_node = 25"),
            ":5: cluster.gpus_per_node = 25: the address",
        ),
        (GOOD.replace("de_nodes = 2", "de_nodes = 300"), ":1: cluster: 305 nodes"),
        (GOOD + "storage_gbps = 1\n", ":8: network.storage_gbps = 1: 2 storage links offer 2 Gb/s together"),
    ],
)
def test_a_mistake_is_told_with_its_place(tmp_path: Path, text: str, expected: str) -> None:
    """File, line, key path, and what was likely meant."""
    path = write(tmp_path, text)
    assert expected in refusal(path)
    assert refusal(path).startswith(str(path))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"\x7fELF\x02\x01\x01\0\0\0\0\0" + bytes(range(256)), "not UTF-8"),
        (GOOD.encode("utf-16"), "not UTF-8"),
        ('# caf\u00e9\n[cluster]\nname = "\u00e9"\n'.encode("latin-1"), "not UTF-8"),
        (GOOD.encode() + b"\0\0", "NUL"),
        (b"[cluster]\n" + b"#" * (1 << 20), "larger than"),
        (b"x = " + b"[" * 5000, "not TOML"),
    ],
    ids=["elf", "utf-16", "latin-1", "nul", "huge", "deep"],
)
def test_a_file_of_another_kind_is_refused_in_one_line(tmp_path: Path, content: bytes, what: str) -> None:
    """Whatever the bytes are, the answer is one line that names the file."""
    path = write(tmp_path, content)
    assert what in refusal(path)
    assert refusal(path).startswith(str(path))


def test_a_byte_order_mark_and_crlf_are_no_obstacle(tmp_path: Path) -> None:
    """Editors of other systems write both."""
    assert load_topology(write(tmp_path, b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())).name == "mine"


def test_what_is_no_file_is_refused_without_blocking(tmp_path: Path) -> None:
    """A directory, a FIFO that nobody writes to, a device, a dangling link, a name too long, a NUL."""
    fifo = tmp_path / "fifo.toml"
    os.mkfifo(fifo)
    assert "no regular file" in refusal(fifo)
    assert "is a directory" in refusal(f"{tmp_path}/")
    assert "no regular file" in refusal("/dev/zero")
    dangling = tmp_path / "dangling.toml"
    dangling.symlink_to(tmp_path / "nowhere")
    assert "No such file" in refusal(dangling)
    assert "cannot be opened" in refusal("/" + "x" * 5000)
    assert "not a path" in refusal("a/\0")
    assert "neither a preset nor a file" in refusal("a\0")


def test_an_unknown_preset_lists_the_presets() -> None:
    """With the nearest first; control characters are never echoed to the terminal."""
    text = refusal("2p4dd")
    assert "did you mean 2p4d?" in text
    assert all(name in text for name in PRESETS)
    assert "presets" in refusal("\x1b[31m\n")
    assert "presets" in refusal("")


def test_specs_made_in_code_are_checked_like_files() -> None:
    """The value itself refuses; a file only adds the place."""
    with pytest.raises(TopologyError, match=r"network\.cnic_gbps = nan"):
        ClusterSpec(name="x", pe_nodes=1, de_nodes=1, cnic_gbps=math.nan)
    with pytest.raises(TopologyError, match=r"cluster\.pe_nodes = True"):
        ClusterSpec(name="x", pe_nodes=True, de_nodes=1)
