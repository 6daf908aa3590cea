"""Do the links and virtual time agree? One run on links, repeated in virtual time with its decisions."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from emulator.rundir import read_run_dir
from emulator.study.parity import ParityFinding, Tolerances, parity
from topology.spec import PRESETS, load_topology

from .commands import need_root, runs
from .figures import Figure, show

__all__ = ["main"]

TOLERANCES = Tolerances(jct=0.10)
ASKED = ("--trace", "io-bound", "--warm")


def main(argv: Sequence[str]) -> int:
    """Bytes equal and JCT within a tenth; the same report twice; and a storage NIC at half rate must not pass.

    Storage NICs of 200 Gb/s, half of the preset's, so that reading is most of TTFT on both paths.
    """
    need_root("parity")
    with tempfile.TemporaryDirectory() as folder:
        live, first, second, slow = (Path(folder) / name for name in ("live", "first", "second", "slow"))
        cluster, mutant_of_it = (str(_with_snics(Path(folder), gbps)) for gbps in (200, 100))
        (entry,), _ = runs("run", cluster, *ASKED, "--out", str(live))
        (twin,), _ = runs("sim", cluster, *ASKED, "--decisions", str(live), "--out", str(first))
        runs("sim", cluster, *ASKED, "--decisions", str(live), "--out", str(second))
        runs("sim", mutant_of_it, *ASKED, "--decisions", str(live), "--out", str(slow))
        same = (first / "report.json").read_bytes() == (second / "report.json").read_bytes()
        findings = _compare(live, first)
        mutant = _compare(live, slow)
    for finding in findings:
        print(f"{'ok    ' if finding.ok else 'FAILED'} {finding.law}: {finding.detail}", file=sys.stderr)
    failed = [finding.law for finding in mutant if not finding.ok]
    print(f"half-rate storage NICs fail: {', '.join(failed) or 'nothing'}", file=sys.stderr)
    return show(
        [
            Figure("JCT on links", entry["jct_s"], "s"),
            Figure("JCT in virtual time, decisions replayed", twin["jct_s"] / entry["jct_s"], "x", 0.9, 1.1),
            Figure("reading's part of TTFT, on links", entry["reading_share"], "", low=0.5),
            Figure("laws of parity broken", sum(not finding.ok for finding in findings), "", high=0),
            Figure("runs whose tokens differ", sum(not run["tokens_equal"] for run in (entry, twin)), "", high=0),
            Figure(
                "runs with a broken invariant",
                sum(bool(r["invariants"]["broken"]) for r in (entry, twin)),
                "",
                high=0,
            ),
            Figure("reports of two equal runs that differ", not same, "", high=0),
            Figure("laws broken by half-rate storage NICs", len(failed), "", low=1),
        ],
        as_json="--json" in argv,
    )


def _compare(first: Path, second: Path) -> list[ParityFinding]:
    evidence = [read_run_dir(path).evidence for path in (first, second)]
    return parity(evidence[0], evidence[1], replayed=True, tolerances=TOLERANCES)


def _with_snics(folder: Path, gbps: int) -> Path:
    """1p1d with storage NICs of another rate, as a topology file."""
    assert "1p1d" in PRESETS
    spec = load_topology("1p1d")
    path = folder / f"snic{gbps}.toml"
    path.write_text(
        f"[cluster]\nname = '1p1d'\npe_nodes = {spec.pe_nodes}\nde_nodes = {spec.de_nodes}\n"
        f"gpus_per_node = {spec.gpus_per_node}\nstorage_nodes = {spec.storage_nodes}\n"
        f"[network]\ncnic_gbps = {spec.cnic_gbps}\nsnic_gbps = {gbps}\n"
        f"storage_gbps = {spec.storage_link_gbps}\n"
    )
    return path
