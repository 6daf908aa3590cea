"""What an emulated cluster is: nodes, NICs, rates in model units, lane shares; and its address plan.

Pure but for reading a TOML file. A ``ClusterSpec`` is a frozen value that crosses processes as plain data
(``msgspec.to_builtins`` and ``msgspec.convert``). Nodes are ``pe0..``, ``de0..``, ``st0..``, ``sched`` and
``client``. A PE or DE node has ``gpus_per_node`` engines ``pe0/0..``, each paired with a compute NIC
``cnic0..``, and one storage NIC ``snic0``; a storage node has ``snic0`` alone. All nodes reach the
management network, which carries no KV and is not shaped.

Invariant: the storage nodes together offer at least 1.25 (P + D) s B, so that never they but the SNICs bind.
Must not import anything of the kernel's side.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
import stat
import tomllib
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from .arbitration import LANE_KEYS, lane_shares
from .errors import TopologyError
from .lanes import LaneShares

__all__ = [
    "PRESETS",
    "AddressPlan",
    "ClusterSpec",
    "NicSpec",
    "NodeSpec",
    "Port",
    "line_of",
    "load_topology",
]

Role = Literal["pe", "de", "storage", "scheduler", "client"]
NicKind = Literal["cnic", "snic"]
Side = Literal["host", "gpu"]

_PRESET_DIR = Path(__file__).parent / "presets"
PRESETS: tuple[str, ...] = tuple(sorted(path.stem for path in _PRESET_DIR.glob("*.toml")))

STORAGE_HEADROOM = 1.25
BYTES_S_PER_GBPS = 1e9 / 8

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
_MAX_FILE_BYTES = 1 << 20
_MAX_COUNT = 4096
_LEAST_GBPS, _MOST_GBPS = 1e-9, 1e9
"""Beyond these a rate is a mistake of unit, and what is computed from it leaves the range of a double."""

_TABLES: dict[str, dict[str, str]] = {
    "cluster": {key: key for key in ("name", "pe_nodes", "de_nodes", "gpus_per_node", "storage_nodes")},
    "network": {key: key for key in ("cnic_gbps", "snic_gbps", "storage_gbps")},
    "lanes": {key: key for key in LANE_KEYS},
}
_FOREIGN_TABLES = frozenset({"engine", "model", "scale"})
_REQUIRED = ("pe_nodes", "de_nodes")


class NicSpec(msgspec.Struct, frozen=True):
    """A shaped NIC. ``rate_bytes_s`` is a model rate in each direction."""

    name: str
    kind: NicKind
    rate_bytes_s: float


class NodeSpec(msgspec.Struct, frozen=True):
    """A node: its engines (``pe0/3`` is paired with ``cnic3``) and its shaped NICs."""

    name: str
    role: Role
    engines: tuple[str, ...]
    nics: tuple[NicSpec, ...]


class Port(msgspec.Struct, frozen=True):
    """A shaped NIC of a node, which is also a port of a switch."""

    node: str
    nic: NicSpec


class ClusterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cluster in model units. ``storage_gbps`` is one storage node's link; None: what the rule needs."""

    name: str
    pe_nodes: int
    de_nodes: int
    gpus_per_node: int = 8
    cnic_gbps: float = 400.0
    snic_gbps: float = 400.0
    storage_nodes: int = 2
    storage_gbps: float | None = None
    lanes: LaneShares = LaneShares()

    def __post_init__(self) -> None:
        _check_name(self.name)
        for key in ("pe_nodes", "de_nodes", "gpus_per_node", "storage_nodes"):
            _check_count(f"cluster.{key}", getattr(self, key))
        for key in ("cnic_gbps", "snic_gbps"):
            _check_rate(f"network.{key}", getattr(self, key))
        if self.storage_gbps is None:
            # Frozen values are completed where they are built: two equal clusters must compare equal.
            msgspec.structs.force_setattr(self, "storage_gbps", self.needed_storage_gbps)
        _check_rate("network.storage_gbps", self.storage_link_gbps)
        offered, needed = (
            self.storage_link_gbps * self.storage_nodes,
            self.needed_storage_gbps * self.storage_nodes,
        )
        if offered < needed * (1 - 1e-9):
            raise TopologyError(
                f"network.storage_gbps = {self.storage_link_gbps:g}: {self.storage_nodes} storage links offer"
                f" {offered:g} Gb/s together, expected at least 1.25 (P + D) s B = {needed:g};"
                f" set storage_gbps to {self.needed_storage_gbps:g} or more"
            )

    @property
    def needed_storage_gbps(self) -> float:
        """The least rate of one storage link, Gb/s: 1.25 (P + D) s B over the storage nodes; s B is the SNIC."""
        return STORAGE_HEADROOM * (self.pe_nodes + self.de_nodes) * self.snic_gbps / self.storage_nodes

    @property
    def storage_link_gbps(self) -> float:
        """``storage_gbps``, which is set once the value is built."""
        assert self.storage_gbps is not None
        return self.storage_gbps

    @property
    def nodes(self) -> tuple[NodeSpec, ...]:
        """PE nodes, DE nodes, storage nodes, ``sched``, ``client``, in this order."""
        return _nodes(self)

    def node(self, name: str) -> NodeSpec:
        """The node called ``name``. TopologyError naming those that exist."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise TopologyError(
            f"no node {_shown(name)} in {self.name}; nodes: {', '.join(n.name for n in self.nodes)}"
        )

    def ports(self) -> tuple[Port, ...]:
        """All shaped NICs, in the order of ``nodes``."""
        return tuple(Port(node.name, nic) for node in self.nodes for nic in node.nics)


@functools.lru_cache(maxsize=64)
def _nodes(spec: ClusterSpec) -> tuple[NodeSpec, ...]:
    def serving(role: Literal["pe", "de"], count: int) -> list[NodeSpec]:
        cnic_rate = spec.cnic_gbps * BYTES_S_PER_GBPS
        nics = (
            *(NicSpec(f"cnic{i}", "cnic", cnic_rate) for i in range(spec.gpus_per_node)),
            NicSpec("snic0", "snic", spec.snic_gbps * BYTES_S_PER_GBPS),
        )
        return [
            NodeSpec(f"{role}{n}", role, tuple(f"{role}{n}/{i}" for i in range(spec.gpus_per_node)), nics)
            for n in range(count)
        ]

    storage_nic = (NicSpec("snic0", "snic", spec.storage_link_gbps * BYTES_S_PER_GBPS),)
    return (
        *serving("pe", spec.pe_nodes),
        *serving("de", spec.de_nodes),
        *(NodeSpec(f"st{n}", "storage", (), storage_nic) for n in range(spec.storage_nodes)),
        NodeSpec("sched", "scheduler", (), ()),
        NodeSpec("client", "client", (), ()),
    )


class AddressPlan:
    """Where everything is: IPv4 and MAC addresses, interface names. The same for every cluster of a shape.

    Node n (from 1, in the order of ``spec.nodes``) is 10.1.n.x on the compute network, where CNIC i has the
    even address x = 10 (i + 1) for its host side and the odd one after it for its GPU, one /31; 10.2.n.1 on
    the storage network; 10.3.n.1 on the management network. Fixed subnets do not collide: every cluster is
    alone in its namespaces. TopologyError for a cluster that does not fit.
    """

    MAX_NODES = 254
    MAX_CNICS = 24
    COMPUTE = IPv4Network("10.1.0.0/16")
    STORAGE = IPv4Network("10.2.0.0/16")
    MGMT = IPv4Network("10.3.0.0/16")

    def __init__(self, spec: ClusterSpec) -> None:
        if len(spec.nodes) > self.MAX_NODES:
            raise TopologyError(
                f"cluster: {len(spec.nodes)} nodes, the address plan has room for {self.MAX_NODES}; lower"
                " cluster.pe_nodes, cluster.de_nodes or cluster.storage_nodes"
            )
        if spec.gpus_per_node > self.MAX_CNICS:
            raise TopologyError(
                f"cluster.gpus_per_node = {spec.gpus_per_node}: the address plan has room for {self.MAX_CNICS}"
            )
        self._number = {node.name: n for n, node in enumerate(spec.nodes, 1)}
        self._nics = {(port.node, port.nic.name): port.nic.kind for port in spec.ports()}

    def network(self, nic: str) -> IPv4Network:
        """The subnet that a NIC is on: ``cnic*`` compute, ``snic*`` storage, ``mgmt0`` management."""
        if nic == "mgmt0":
            return self.MGMT
        return self.COMPUTE if nic.startswith("cnic") else self.STORAGE

    def address(self, node: str, nic: str, side: Side = "host") -> str:
        """The IPv4 address of one side of a NIC; a storage NIC has only its host side."""
        kind = self._nics.get((node, nic))
        if kind is None or side not in ("host", "gpu") or (side == "gpu" and kind == "snic"):
            raise TopologyError(f"no address for {_shown(node)} {_shown(nic)} {_shown(side)} in this cluster")
        number = self._number[node]
        if kind == "snic":
            return f"10.2.{number}.1"
        return f"10.1.{number}.{10 * (int(nic.removeprefix('cnic')) + 1) + (side == 'gpu')}"

    def mgmt(self, node: str) -> str:
        """The node's address on the management network."""
        if node not in self._number:
            raise TopologyError(f"no node {_shown(node)} in this cluster")
        return f"10.3.{self._number[node]}.1"

    def mac(self, node: str, nic: str) -> str:
        """The NIC's own MAC address: locally administered, the host address in its last four bytes."""
        address = self.mgmt(node) if nic == "mgmt0" else self.address(node, nic)
        return "02:00:" + ":".join(f"{int(part):02x}" for part in address.split("."))

    def port_name(self, node: str, nic: str) -> str:
        """The name of the switch's end of a link: at most 12 characters, of the 15 an interface may have."""
        return f"{node}.{nic}"


def load_topology(name_or_path: str | os.PathLike[str]) -> ClusterSpec:
    """A preset by its name, or a TOML file by its path.

    Reads ``[cluster]``, ``[network]`` and ``[lanes]``; ``[engine]``, ``[model]`` and ``[scale]`` are for others.
    Every TopologyError is one line that names the file and, for a key, its path and line.
    """
    given = os.fspath(name_or_path)
    if given in PRESETS:
        return _read(_PRESET_DIR / f"{given}.toml", given)
    looks_like_path = "/" in given or given.endswith(".toml")
    if not looks_like_path and not _exists(given):
        near = difflib.get_close_matches(given, PRESETS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise TopologyError(f"{_shown(given)}: neither a preset nor a file{hint} (presets: {', '.join(PRESETS)})")
    return _read(Path(given), given)


def _read(path: Path, given: str) -> ClusterSpec:
    shown = _shown(given)
    text = _text_of(path, shown)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TopologyError(f"{shown}: not TOML: {_shown(str(error))}") from None
    except (RecursionError, ValueError) as error:
        raise TopologyError(f"{shown}: not TOML that can be read: {_shown(str(error))}") from None
    source = _Source(shown, text)
    fields: dict[str, Any] = {}
    lanes: dict[str, Any] = {}
    for table, content in data.items():
        if table in _FOREIGN_TABLES:
            continue
        if table not in _TABLES:
            raise TopologyError(source.unknown((), table))
        if not isinstance(content, dict):
            raise TopologyError(f"{source.at((), table)}: {table}: expected a table [{table}]")
        for key, value in content.items():
            if key not in _TABLES[table]:
                raise TopologyError(source.unknown((table,), key))
            (lanes if table == "lanes" else fields)[key] = value
    if "cluster" not in data:
        raise TopologyError(f"{shown}: no [cluster] table; expected [cluster] with pe_nodes and de_nodes")
    for key in _REQUIRED:
        if key not in fields:
            raise TopologyError(f"{shown}: cluster.{key} is missing; expected a number of nodes")
    if "storage_gbps" in fields:
        # None stands for "left out" in the value's own terms only; a file has no null.
        try:
            _check_rate("network.storage_gbps", fields["storage_gbps"])
        except TopologyError as error:
            raise TopologyError(source.located(error.text)) from None
    fields.setdefault("name", path.stem)
    try:
        spec = ClusterSpec(**fields, lanes=lane_shares(lanes))
        AddressPlan(spec)
        return spec
    except TopologyError as error:
        raise TopologyError(source.located(error.text)) from None


def _text_of(path: Path, shown: str) -> str:
    """The file's text. Opened without blocking, and only if it is a regular file: a FIFO would never end."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a path"
        raise TopologyError(f"{shown}: cannot be opened: {reason}") from None
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            kind = "a directory" if stat.S_ISDIR(mode) else "no regular file"
            raise TopologyError(f"{shown}: is {kind}; expected a TOML file")
        with open(fd, "rb", closefd=False) as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise TopologyError(f"{shown}: cannot be read: {error.strerror}") from None
    finally:
        os.close(fd)
    if len(raw) > _MAX_FILE_BYTES:
        raise TopologyError(f"{shown}: larger than {_MAX_FILE_BYTES} bytes; expected a TOML file")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TopologyError(f"{shown}: not UTF-8 at byte {error.start}; expected a TOML file") from None
    if "\0" in text:
        raise TopologyError(f"{shown}: has a NUL at byte {raw.index(0)}; expected a TOML file")
    return text


class _Source(NamedTuple):
    """A file's name and text, to say where in it a key is."""

    shown: str
    text: str

    def at(self, table: tuple[str, ...], key: str) -> str:
        """``file:line`` of a key, or the file alone where the key cannot be found by its looks."""
        number = line_of(self.text, table, key)
        return f"{self.shown}:{number}" if number else self.shown

    def located(self, text: str) -> str:
        """Put the place before an error that begins with a key's path."""
        match = re.match(r"(\w+)(?:\.(\w+))?", text)
        if match is None:
            return f"{self.shown}: {text}"
        table, key = match.group(1), match.group(2)
        return f"{self.at((table,), key) if key else self.at((), table)}: {text}"

    def unknown(self, table: tuple[str, ...], key: str) -> str:
        """The error for a key that nobody knows, with the likeliest that was meant."""
        homes = [f"[{name}]" for name, keys in _TABLES.items() if key in keys and (name,) != table]
        known = list(_TABLES[table[0]]) if table else [*_TABLES, *sorted(_FOREIGN_TABLES)]
        near = difflib.get_close_matches(key, known, 1)
        if homes:
            hint = f"it belongs in {homes[0]}"
        elif near:
            hint = f"did you mean {near[0]}?"
        else:
            hint = f"known here: {', '.join(known)}"
        what = "key" if table else "key or table"
        return f"{self.at(table, key)}: {_shown('.'.join((*table, key)))}: unknown {what}; {hint}"


def line_of(text: str, table: tuple[str, ...], key: str) -> int | None:
    """The line on which ``key`` of ``table`` stands, for the plain ways of writing TOML."""
    quoted = rf"""(?:"{re.escape(key)}"|'{re.escape(key)}'|{re.escape(key)})"""
    dotted = re.escape(".".join((*table, key)))
    here: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[+\s*([^\]]*?)\s*\]", line)
        if header:
            here = tuple(part.strip().strip("\"'") for part in header.group(1).split("."))
            if here[: len(table) + 1] == (*table, key):
                return number
        elif (here == table and re.match(rf"\s*{quoted}\s*[=.]", line)) or (
            not here and re.match(rf"\s*{dotted}\s*[=.]", line)
        ):
            return number
    return None


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise TopologyError(
            f"cluster.name = {_value(name)}: expected 1 to 32 of a-z, 0-9, _ and -, the first a letter or digit"
        )


def _check_count(path: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_COUNT:
        raise TopologyError(f"{path} = {_value(value)}: expected a whole number from 1 to {_MAX_COUNT}")


def _check_rate(path: str, value: object) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool)
    if ok:
        try:
            ok = _LEAST_GBPS <= float(value) <= _MOST_GBPS  # type: ignore[arg-type]
        except OverflowError:
            ok = False
    if not ok:
        raise TopologyError(f"{path} = {_value(value)}: expected {_LEAST_GBPS:g} to {_MOST_GBPS:g} Gb/s")


def _exists(given: str) -> bool:
    try:
        return os.path.lexists(given)
    except ValueError:
        return False


def _value(value: object) -> str:
    """A value for an error's one line, a string in quotes: "400" is not the number 400."""
    return _shown(ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value))


def _shown(value: object) -> str:
    """A value for an error's one line: short, and nothing in it that a terminal would act on."""
    text = value if isinstance(value, str) else repr(value)
    if not text or not text.isprintable():
        text = ascii(text)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
