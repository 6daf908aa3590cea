"""Prefill to decode nodes: which clusters are equal (the paper's figure 8), and which ports its Eq. 9 saturates.

In virtual time. ``scripts/bench ratios [--json]``.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from emulator.analysis import Cluster, bottleneck_free
from emulator.rundir import read_run_dir
from emulator.synth import synth_io_bound
from emulator.verify import Evidence
from topology.spec import load_topology

from .commands import runs
from .figures import Figure, show
from .workloads import preset_with, said, saved

__all__ = ["main"]

EQUAL = (
    (("basic", "1p1d"), ("basic", "1p2d")),
    (("dualpath", "1p1d"), ("basic", "2p1d")),
    (("dualpath", "2p1d"), ("dualpath", "1p2d")),
)
"""Pairs of a system and a topology that read with equally many storage NICs: one, two, three."""

BOUNDS = (("1p7d", 128, 16_000), ("7p2d", 240, 10_000))
"""Topologies at either end of Eq. 9, and what fills them: agents, and tokens of their contexts."""

BUFFERS = "[engine]\npe_buffer_gb = 320\nde_buffer_gb = 640\nde_hbm_kv_gb = 60\n"
"""Memory enough for that many: the paper gives 320 GB of DRAM a node to this model."""

ARRIVALS = "150"
"""Agents a second. All at one moment would all be fetched by the first PE node that asks."""

MIDDLE = (0.4, 0.8)
"""Of a run, as parts of its length: all storage NICs read, and everything that they feed has begun."""

SATURATED, CLEARLY_BELOW = 0.95, 0.75
"""Parts of a port's rate."""


def main(argv: Sequence[str]) -> int:
    """Run every cluster, print every figure; 1 where a bound is missed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures = [*_equivalences(folder)]
        for topology, agents, context in BOUNDS:
            figures += _saturation(folder, topology, agents, context)
    return show(figures, as_json="--json" in argv)


def _equivalences(folder: Path) -> Iterator[Figure]:
    asked = (*saved(synth_io_bound(1, 64, 6, gen=(2, 8)), folder), "--warm")
    jct: dict[tuple[str, str], float] = {}
    for one in sorted({one for pair in EQUAL for one in pair}):
        system, topology = one
        (entry,), _ = runs("sim", topology, *asked, "--system", system)
        jct[one] = said(entry)["jct_s"]
        yield Figure(f"{system} on {topology}: JCT", jct[one], "s")
    for first, second in EQUAL:
        yield Figure(f"{' on '.join(first)} to {' on '.join(second)}", jct[first] / jct[second], "x", 0.9, 1.1)


def _saturation(folder: Path, topology: str, agents: int, context: int) -> Iterator[Figure]:
    """How full NICs and DRAM are while load is high; with a dense model, whose engines wait for nobody."""
    path = preset_with(topology, BUFFERS, folder)
    spread = (context - context // 20, context + context // 20)
    asked = (*saved(synth_io_bound(1, agents, 3, first_prompt=spread, gen=(2, 8)), folder), "--warm")
    out = folder / topology
    (entry,), _ = runs("sim", path, *asked, "--model", "qwen32b", "--aps", ARRIVALS, "--out", str(out))
    said(entry)
    formula = _by_formula(topology)
    for resource, part in _in_the_middle(read_run_dir(out).evidence).items():
        name = f"{topology}: {resource}, of its rate"
        if resource not in formula:
            yield Figure(name, part, "")
            continue
        bounds = (SATURATED, 1.01) if formula[resource] > 1 - 1e-6 else (0.0, CLEARLY_BELOW)
        yield Figure(f"{name} (by formula {formula[resource]:.2f})", part, "", *bounds)


def _by_formula(topology: str) -> dict[str, float]:
    """By the equations: what each resource carries when all storage NICs read at their rate, of its rate."""
    spec = load_topology(topology)
    bps = 1e9 / 8
    cluster = Cluster(
        pe_nodes=spec.pe_nodes,
        de_nodes=spec.de_nodes,
        gpus=spec.gpus_per_node,
        cnic_bps=spec.cnic_gbps * bps,
        snic_bps=spec.snic_gbps * bps,
        storage_bps=spec.storage_nodes * spec.storage_link_gbps * bps,
    )
    return {load.resource: load.load_bps / load.limit_bps for load in bottleneck_free(cluster).loads}


def _in_the_middle(evidence: Evidence) -> dict[str, float]:
    """What each class of ports of PE and DE nodes carries in the middle half of the run, of its rate."""
    records, setup = evidence.records, evidence.setup
    elapsed_s = records.ended_s - records.t0_s
    begin_s, end_s = (records.t0_s + part * elapsed_s for part in MIDDLE)
    ports = {(p.node, p.nic): p for p in setup.ports if p.role != "storage"}
    carried: defaultdict[str, float] = defaultdict(float)
    able: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
    for node in records.nodes:
        for row in node.ports:
            port = ports.get((node.node, row.nic))
            if port is None:
                continue
            way = "" if port.kind == "dram" else f" {row.direction}"
            name = f"{port.role} {row.nic.rstrip('0123456789')}".upper() + way
            windows = slice(int(begin_s / row.window_s), int(end_s / row.window_s))
            seconds = (windows.stop - windows.start) * row.window_s
            carried[name] += sum(row.windows[windows]) / (port.rate_bps * seconds)
            able[name].add((node.node, row.nic))
    return {name: carried[name] / len(able[name]) for name in sorted(carried)}
