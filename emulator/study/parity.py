"""Do two runs of the same work agree: the sockets with the fluid model, or a run with its repetition?

Pure. Choices feed back on timing, so runs that decide for themselves part ways after the first close call and
are held to tolerances; a run that replayed another's decisions must move the same bytes, to the byte, through
every step and every port. Parity means something only where the network matters, so it asks that reading
takes half of TTFT at least; and it must be able to fail: one fabric's storage NIC at half rate breaks it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence

import msgspec

from .. import metrics
from ..records import PortBytes, RunRecords
from ..steps import step_payload
from ..verify import Evidence

__all__ = ["ParityFinding", "Tolerances", "parity"]

SHOWN = 3
"""Differences that a finding spells out; the rest are counted."""


class Tolerances(msgspec.Struct, frozen=True, kw_only=True):
    """How far the second run may be from the first.

    ``jct`` and ``node_bytes`` are parts of the first run's value, ``path_share`` is in shares of 1.
    ``reading``: the least part of TTFT that reading must take in both runs.
    """

    jct: float = 0.05
    path_share: float = 0.05
    node_bytes: float = 0.10
    reading: float = 0.50


class ParityFinding(msgspec.Struct, frozen=True):
    """What became of one law of parity, and the values or differences that decided it."""

    law: str
    ok: bool
    detail: str


def parity(
    first: Evidence,
    second: Evidence,
    *,
    replayed: bool,
    tolerances: Tolerances = Tolerances(),  # noqa: B008 (frozen)
) -> list[ParityFinding]:
    """Hold ``second`` against ``first``. ``replayed``: the second run repeated the first one's decisions."""
    findings = [
        _same("same work", first, second, _work),
        _reading(first, second, tolerances.reading),
        _jct(first, second, tolerances.jct),
    ]
    if replayed:
        return [
            *findings,
            _same("same decisions", first, second, _decisions),
            _same("same batches", first, second, _batches),
            _same("same step bytes", first, second, lambda e: step_payload(e.records)),
            _same("same port bytes", first, second, _ports),
        ]
    return [
        *findings,
        _path_share(first, second, tolerances.path_share),
        _nodes(first, second, tolerances.node_bytes),
    ]


def _same(
    law: str, first: Evidence, second: Evidence, of: Callable[[Evidence], Mapping[str, Hashable]]
) -> ParityFinding:
    left, right = of(first), of(second)
    different = [key for key in sorted(left.keys() | right.keys()) if left.get(key) != right.get(key)]
    if not different:
        return ParityFinding(law, True, f"{len(left)} equal")
    return ParityFinding(law, False, _few([f"{key}: {left.get(key)} and {right.get(key)}" for key in different]))


def _few(differences: Sequence[str]) -> str:
    more = [f"{len(differences) - SHOWN} more"] if len(differences) > SHOWN else []
    return "; ".join([*differences[:SHOWN], *more])


def _work(evidence: Evidence) -> dict[str, Hashable]:
    """What was asked for, and that it was done; payload bytes compare only at one scale."""
    rows = {r.id: (r.status, r.prompt_tokens, r.output_tokens) for r in evidence.records.requests}
    layout = evidence.setup.layout
    return {"layout": msgspec.structs.astuple(layout), "requests": len(rows), **rows}


def _decisions(evidence: Evidence) -> dict[str, Hashable]:
    return {
        d.request: (d.pe, d.de, d.path, d.hit_blocks) for node in evidence.records.nodes for d in node.decisions
    }


def _batches(evidence: Evidence) -> dict[str, Hashable]:
    return {
        f"{b.engine} batch {b.index}": (b.requests, b.shape)
        for node in evidence.records.nodes
        for b in node.batches
    }


def _ports(evidence: Evidence) -> dict[str, Hashable]:
    # A port that was mentioned and carried nothing equals one that was not mentioned.
    return {
        f"{node.node} {p.nic} {p.direction} lane {p.lane}": p.payload_bytes
        for node in evidence.records.nodes
        for p in node.ports
        if p.payload_bytes
    }


def _is_nic(port: PortBytes) -> bool:
    """DRAM and PCIe links count again what a NIC carried."""
    return port.nic.startswith(("cnic", "snic"))


def _jct(first: Evidence, second: Evidence, tolerance: float) -> ParityFinding:
    law = f"JCT within {tolerance:.0%}"
    left, right = metrics.jct_s(first.records), metrics.jct_s(second.records)
    if left is None or right is None or left <= 0:
        return ParityFinding(law, False, f"JCT {left} and {right}: no run to compare")
    return ParityFinding(
        law, abs(right - left) <= tolerance * left, f"{left:.6g} and {right:.6g} s, {right / left - 1:+.2%}"
    )


def _reading(first: Evidence, second: Evidence, least: float) -> ParityFinding:
    shares = [metrics.reading_share(metrics.done(e.records)) for e in (first, second)]
    shown = " and ".join("none" if s is None else f"{s:.1%}" for s in shares)
    ok = all(s is not None and s >= least for s in shares)
    return ParityFinding(f"reading is {least:.0%} of TTFT or more", ok, shown)


def _path_share(first: Evidence, second: Evidence, tolerance: float) -> ParityFinding:
    law = f"path share within {100 * tolerance:g} points"
    left, right = (metrics.path_share(metrics.done(e.records), by="requests")["pe"] for e in (first, second))
    if left is None or right is None:
        return ParityFinding(law, False, f"PE path {left} and {right}: no run to compare")
    return ParityFinding(law, abs(right - left) <= tolerance, f"PE path {left:.1%} and {right:.1%}")


def _nodes(first: Evidence, second: Evidence, tolerance: float) -> ParityFinding:
    left, right = _node_bytes(first.records), _node_bytes(second.records)
    far = [
        key for key in sorted(left.keys() | right.keys()) if abs(right[key] - left[key]) > tolerance * left[key]
    ]
    detail = _few([f"{key}: {left[key]} and {right[key]} B" for key in far]) if far else f"{len(left)} within"
    return ParityFinding(f"bytes per node and direction within {tolerance:.0%}", not far, detail)


def _node_bytes(records: RunRecords) -> Counter[str]:
    """Payload bytes of all NICs of a node, by direction."""
    total: Counter[str] = Counter()
    for node in records.nodes:
        for p in filter(_is_nic, node.ports):
            total[f"{node.node} {p.direction}"] += p.payload_bytes
    return total
