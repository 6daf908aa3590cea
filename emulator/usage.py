"""What a run used of its resources, and which of them bound it: ports, engines, exchanges, pools.

Pure. Model seconds and payload bytes; a figure over an empty set is None. Must not import a role, a fabric
implementation or ``report``.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction

import msgspec

from .fabric.interface import VirtualLane
from .metrics import Direction, Setup, summarise_runs, windows_since
from .records import ExchangeRecord, GapRecord, NodeRecord, RunRecords
from .scale import Scale

__all__ = [
    "Binding",
    "CnicIdle",
    "Exchanges",
    "Gaps",
    "binding",
    "cnic_idle",
    "collectives",
    "pool_peaks",
    "utilisation",
]

COMPUTE = "pe compute"
DOMINANT = 0.5
"""The part of the prefill engines' time above which attention, or the exchanges, are named instead of it."""


class Binding(msgspec.Struct, frozen=True):
    """The resource class with the highest mean utilisation, and its fullest member."""

    resource: str
    utilisation: float
    fullest: str
    fullest_utilisation: float


class Exchanges(msgspec.Struct, frozen=True):
    """The collectives of one ring and lane that are of about one size, and how long one takes.

    ``upto_bytes``: a power of two model bytes a port, which they are not larger than, and larger than half of it;
    0 for barriers, which carry nothing. ``model_bytes``: what one carries a port, on average. Every member sees
    each of them, but may send more than another does: ``count`` is that of the member with the most of this size.
    Times are over what all members saw; ``p95_s`` is at most a thirty-second too long, as finely as they are kept.
    """

    ring: str
    lane: int
    upto_bytes: int
    model_bytes: float
    count: int
    mean_s: float
    p95_s: float | None
    max_s: float


class Gaps(msgspec.Struct, frozen=True):
    """Times between two collectives of a port: the ``count`` of them that are half of ``upto_s`` or longer.

    ``time``: their part of the run, as a mean over ports. ``kv``: KV as a part of the bytes that fit into them.
    """

    upto_s: float
    count: int
    time: float
    kv: float


class CnicIdle(msgspec.Struct, frozen=True):
    """What collectives leave of the CNICs that carry them, as means over ``ports`` port directions.

    ``idle``: the part of the run in which no collective's message was outstanding. ``kv_of_left``: of the bytes
    that the ports could have carried beside the collectives', how many were KV. ``gaps``: the idle times between
    two collectives, by length. A message of KV counts whole in the gap in which it ends, and in none where it ends
    beside a collective; one that a collective cuts in two mostly ends in the gap after it, since beside the
    collective it hardly moves, so that short gaps have some of their neighbours' KV.
    """

    idle: float
    kv_of_left: float
    ports: int
    gaps: tuple[Gaps, ...] = ()


def utilisation(records: RunRecords, setup: Setup) -> dict[tuple[str, str, Direction], float] | None:
    """Payload carried over what the port could carry, per (node, nic, direction), over all lanes.

    Both directions of DRAM are parts of the one rate that they share. PCIe links and DRAM are here where they were
    counted. Time runs from the window that holds t0 to the end of the run; None when no time passed.
    """
    elapsed = records.ended_s - records.t0_s
    if elapsed <= 0:
        return None
    nodes = {n.node: n for n in records.nodes}
    counted = {(n.node, row.nic) for n in records.nodes for row in n.ports}
    directions: tuple[Direction, Direction] = ("read", "write")
    return {
        (p.node, p.nic, d): _port_bytes(nodes[p.node], p.nic, d, records.t0_s) / (p.rate_bps * elapsed)
        for p in setup.ports
        if p.node in nodes and (p.kind == "nic" or (p.node, p.nic) in counted)
        for d in directions
    }


def binding(records: RunRecords, setup: Setup) -> Binding | None:
    """What limits the run: of every class of ports, and of the prefill engines, the one busiest on average.

    A class is a role, a kind of port and a direction (``pe snic write``), or DRAM as a whole. An engine's
    utilisation is the part of the time in which it has a batch, waits for KV inside a batch included. Where
    the engines bind and most of that time is attention, or waiting for an exchange of the group, the class is
    named ``prefill attention``, ``expert exchange`` or ``tensor exchange``. Memory's *size* is not among the
    classes: a buffer is full when what empties it is slow, so that it would hide what binds; what requests
    wait for it is ``allocating``, how full it was ``pool_peaks``.
    """
    ports = utilisation(records, setup)
    if ports is None:
        return None
    known = {(p.node, p.nic): p for p in setup.ports}
    members: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for (node, nic, direction), used in ports.items():
        port = known[node, nic]
        way = "" if port.kind == "dram" else f" {direction}"
        row = members[f"{port.role} {nic.rstrip('0123456789')}{way}"]
        row[f"{node} {nic}{way}"] = row.get(f"{node} {nic}{way}", 0.0) + used
    elapsed = records.ended_s - records.t0_s
    for node_record in records.nodes:
        for batch in node_record.batches:
            engines = members[COMPUTE]
            busy = max(0.0, batch.ended_s - max(batch.started_s, records.t0_s))
            engines[batch.engine] = engines.get(batch.engine, 0.0) + busy / elapsed
    if not members:
        return None

    def mean(resource: str) -> float:
        return math.fsum(members[resource].values()) / len(members[resource])

    # Name breaks ties, so that the same records always give the same report.
    resource = min(members, key=lambda name: (-mean(name), name))
    fullest = min(members[resource], key=lambda name: (-members[resource][name], name))
    name = _dominant(records) if resource == COMPUTE else resource
    return Binding(name, mean(resource), fullest, members[resource][fullest])


def _dominant(records: RunRecords) -> str:
    """What the prefill engines' time mostly is."""
    busy = attention = exchange = tensors = 0.0
    for node in records.nodes:
        engines = {batch.engine for batch in node.batches}
        busy += math.fsum(b.ended_s - b.started_s for b in node.batches)
        attention += math.fsum(b.attention_s for b in node.batches)
        # All engines of a node wait for each exchange of their group; one engine waits for those of its own GPUs.
        exchange += len(engines) * math.fsum(e.total_s for e in node.exchanges if e.ring not in engines)
        tensors += math.fsum(e.total_s for e in node.exchanges if e.ring in engines)
    parts = {"prefill attention": attention, "expert exchange": exchange, "tensor exchange": tensors}
    largest = max(parts, key=lambda name: parts[name])
    return largest if parts[largest] > DOMINANT * busy else COMPUTE


def collectives(records: RunRecords, scale: Scale) -> tuple[Exchanges, ...]:
    """Every ring's exchanges by lane and power of two of model bytes a port, over all nodes that took part.

    ``p95_s`` is None where records do not say how times are spread.
    """
    rows: defaultdict[tuple[str, int, int], list[tuple[str, ExchangeRecord]]] = defaultdict(list)
    for node in records.nodes:
        for e in node.exchanges:
            if e.count:
                rows[e.ring, e.lane, _upto(e.payload_bytes * scale.shrink)].append((node.node, e))
    return tuple(_exchanges(*key, rows[key], scale) for key in sorted(rows))


def _upto(size: Fraction) -> int:
    """The least power of two that is not below ``size`` bytes; 0 for none at all."""
    return 1 << (math.ceil(size) - 1).bit_length() if size else 0


def _exchanges(
    ring: str, lane: int, upto_bytes: int, found: Sequence[tuple[str, ExchangeRecord]], scale: Scale
) -> Exchanges:
    seen: Counter[str] = Counter()
    for node, e in found:
        seen[node] += e.count
    total = seen.total()
    took = summarise_runs(run for _, e in found for run in e.took)
    longest_s = max(e.max_s for _, e in found)
    return Exchanges(
        ring,
        lane,
        upto_bytes,
        model_bytes=float(sum(e.count * e.payload_bytes for _, e in found) * scale.shrink / total),
        count=max(seen.values()),
        mean_s=math.fsum(e.total_s for _, e in found) / total,
        # What was rounded up may have gone past the longest.
        p95_s=None if took is None else min(took.p95, longest_s),
        max_s=longest_s,
    )


def cnic_idle(records: RunRecords, setup: Setup) -> CnicIdle | None:
    """How idle collectives leave the CNICs; None where none carries any on the lane that is theirs alone."""
    elapsed = records.ended_s - records.t0_s
    rates = {(p.node, p.nic): p.rate_bps for p in setup.ports if p.nic.startswith("cnic")}
    idle: list[float] = []
    left, used = 0.0, 0
    gaps: defaultdict[float, list[tuple[GapRecord, float]]] = defaultdict(list)
    for node in records.nodes:
        for model in node.ports:
            rate = rates.get((node.node, model.nic))
            if model.lane != VirtualLane.MODEL or not model.payload_bytes or rate is None:
                continue
            idle.append(1 - model.busy_s / elapsed)
            for gap in model.gaps:
                gaps[gap.upto_s].append((gap, rate))
            left += rate * elapsed - model.payload_bytes
            used += sum(
                p.payload_bytes
                for p in node.ports
                if (p.nic, p.direction, p.lane) == (model.nic, model.direction, VirtualLane.KV)
            )
    if not idle or left <= 0:
        return None
    return CnicIdle(
        idle=math.fsum(idle) / len(idle),
        kv_of_left=used / left,
        ports=len(idle),
        gaps=tuple(
            Gaps(
                upto_s,
                count=sum(gap.count for gap, _ in rows),
                time=math.fsum(gap.total_s for gap, _ in rows) / (elapsed * len(idle)),
                kv=sum(gap.kv_bytes for gap, _ in rows) / math.fsum(rate * gap.total_s for gap, rate in rows),
            )
            for upto_s, rows in sorted(gaps.items())
        ),
    )


def pool_peaks(records: RunRecords, setup: Setup) -> Mapping[str, float]:
    """The most that was ever used of a pool, as a part of it, by class: the fullest of all nodes or engines."""
    roles = {p.node: p.role for p in setup.ports}
    peaks: dict[str, float] = {}
    for node in records.nodes:
        for pool in node.pools:
            kind = pool.pool.rpartition(".")[2]
            role = roles.get(node.node)
            name = kind if role is None or kind.startswith(f"{role}_") else f"{role} {kind}"
            if pool.total:
                peaks[name] = max(peaks.get(name, 0.0), pool.peak_used / pool.total)
    return dict(sorted(peaks.items()))


def _port_bytes(node: NodeRecord, nic: str, direction: str, t0_s: float) -> int:
    return sum(
        sum(windows_since(p.windows, p.window_s, t0_s))
        for p in node.ports
        if p.nic == nic and p.direction == direction
    )
