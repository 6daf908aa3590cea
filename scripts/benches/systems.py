"""What each of a system's switches is worth: the paper's ablation on 1P1D, and its scheduling on 2P4D.

``scripts/bench systems [--fabric sim|links] [--seeds N] [--json]``. By default in virtual time. On links
(root) every run on 1P1D is held against virtual time; 2P4D is left out.

Which requests share a batch hangs on milliseconds, in virtual time too: one run there is one draw of many. So
links are held against the median of several, whose fetch periods differ by a hundredth, and their spread is shown.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from emulator.rundir import read_run_dir
from emulator.study.parity import parity
from emulator.synth import synth_io_bound
from emulator.systems import SYSTEMS

from .commands import need_root, runs
from .figures import Figure, show
from .workloads import SEEDS, median, preset_with, said, saved

__all__ = ["main"]

ABLATION = ("basic", "layerwise", "dualpath-rr", "dualpath", "oracle")
IO_BOUND = ("--trace", "io-bound", "--warm", "--agents", "48")
HBM_BOUND = ("--trace", "hbm-bound", "--warm")
DILATION = "8"
FREE_DILATION = "32"
"""An oracle's free moves take this host time: the slower the model's clock, the less of it."""

DRAWS = ("", "[engine]\nfetch_period_s = 0.0099\n", "[engine]\nfetch_period_s = 0.0101\n")
"""What is added to the topology for the draws of a run in virtual time."""

Entries = dict[str, list[dict[str, Any]]]
"""Runs by system, a run a seed."""


def main(argv: Sequence[str]) -> int:
    """Run everything, print every figure; 1 where a bound is missed."""
    parser = argparse.ArgumentParser(prog="scripts/bench systems")
    parser.add_argument("--fabric", choices=("sim", "links"), default="sim")
    parser.add_argument("--seeds", type=int, choices=range(1, 10), default=len(SEEDS), metavar="N")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    seeds = range(options.seeds)
    if options.fabric == "links":
        need_root("systems")
    figures: list[Figure] = []
    made: list[Entries] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for asked, systems, judged in ((IO_BOUND, ABLATION, _ablation), (HBM_BOUND, ABLATION[:2], _hbm)):
            draws = DRAWS if options.fabric == "links" else DRAWS[:1]
            found = _every("sim", [preset_with("1p1d", each, folder) for each in draws], systems, asked, seeds)
            made.append(found)
            if options.fabric == "links":
                live = {
                    system: _every("run", ["1p1d"], (system,), (*asked, "--dilation", dilation), seeds)[system]
                    for system in systems
                    for dilation in (FREE_DILATION if SYSTEMS[system].free else DILATION,)
                }
                made.append(live)
                figures += [*judged(live), *_agreement(asked[1], live, found)]
            else:
                figures += judged(found)
        if options.fabric == "links":
            figures += _replayed(folder)
        else:
            few = _every("sim", ["2p4d"], ABLATION[2:4], _many_agents(folder), seeds[:1])
            full = _every("sim", ["2p4d"], ("dualpath",), _full_quota(folder), seeds[:1])
            made += [few, full]
            figures += [*_scheduling(few), _attention(full)]
    entries = [entry for each in made for of_system in each.values() for entry in of_system]
    figures += [
        Figure(
            "requests not done", sum(e["requests"]["total"] - e["requests"]["done"] for e in entries), "", high=0
        ),
        Figure("runs whose tokens differ", sum(not e["tokens_equal"] for e in entries), "", high=0),
        Figure("runs with a broken invariant", sum(bool(e["invariants"]["broken"]) for e in entries), "", high=0),
        Figure("runs that are not valid", sum(e["verdict"] != "valid" for e in entries), "", high=0),
    ]
    return show(figures, as_json=options.json)


def _every(
    command: str,
    topologies: Sequence[str],
    systems: Sequence[str],
    asked: Sequence[str],
    seeds: Sequence[int],
) -> Entries:
    """A run of every system on every topology with every seed."""
    chosen = [word for system in systems for word in ("--system", system)]
    found: Entries = {system: [] for system in systems}
    for topology, seed in product(topologies, seeds):
        entries, _ = runs(command, topology, *asked, *chosen, "--seed", str(seed))
        for entry in entries:
            found[entry["system"]].append(said(entry))
    return found


def _ablation(found: Entries) -> list[Figure]:
    jct = {system: median(entries) for system, entries in found.items()}
    others = min(jct[system] for system in ABLATION[:4])
    return [
        *(Figure(f"io-bound, {system}: JCT, median", jct[system], "s") for system in ABLATION),
        *(
            Figure(f"io-bound, {system}: reading's part of TTFT", median(found[system], "reading_share"), "")
            for system in ABLATION[:4]
        ),
        Figure("io-bound: layerwise to dualpath-rr", jct["layerwise"] / jct["dualpath-rr"], "x", low=1.3),
        Figure("io-bound: dualpath to dualpath-rr", jct["dualpath"] / jct["dualpath-rr"], "x", high=1.02),
        Figure("io-bound: basic to dualpath", jct["basic"] / jct["dualpath"], "x", low=1.5),
        Figure("io-bound: oracle to the fastest other", jct["oracle"] / others, "x", high=0.999),
    ]


def _hbm(found: Entries) -> list[Figure]:
    jct = {system: median(entries) for system, entries in found.items()}
    return [
        *(Figure(f"hbm-bound, {system}: JCT, median", jct[system], "s") for system in found),
        Figure("hbm-bound: basic to layerwise", jct["basic"] / jct["layerwise"], "x", low=1.03),
    ]


def _many_agents(folder: Path) -> tuple[str, ...]:
    """More of the io-bound sample's agents: enough for six storage NICs."""
    return (*saved(synth_io_bound(1, 128, 3, gen=(2, 8)), folder), "--warm")


def _full_quota(folder: Path) -> tuple[str, ...]:
    """As many agents, and appends as long, as fill every PE's quota of attention for most of the run."""
    return (*saved(synth_io_bound(1, 192, 3, append=(700, 1_000), gen=(2, 8)), folder), "--warm")


def _scheduling(found: Entries) -> list[Figure]:
    turn, chosen = (found[system][0] for system in ABLATION[2:4])
    return [
        *(Figure(f"2p4d, {e['system']}: JCT", e["jct_s"], "s") for e in (turn, chosen)),
        Figure("2p4d: dualpath to dualpath-rr", chosen["jct_s"] / turn["jct_s"], "x", high=0.999),
        Figure("2p4d, dualpath-rr: storage NICs, Max/Avg", turn["snic_max_over_avg"], ""),
        Figure(
            "2p4d, dualpath: storage NICs, Max/Avg",
            chosen["snic_max_over_avg"],
            "",
            high=turn["snic_max_over_avg"] - 0.01,
        ),
    ]


def _attention(found: Entries) -> Figure:
    (entry,) = found["dualpath"]
    return Figure(
        "2p4d, dualpath: attention, Max/Avg at high load", entry["attention_max_over_avg"], "", high=1.10
    )


def _agreement(sample: str, live: Entries, virtual: Entries) -> Iterator[Figure]:
    """JCT on links over that in virtual time, each system's median, and how far apart virtual time's draws are."""
    for system in live:
        what, jct = f"{sample}, {system}: JCT", [entry["jct_s"] for entry in virtual[system]]
        yield Figure(f"{what} in sim, longest to shortest draw", max(jct) / min(jct), "x")
        yield Figure(f"{what}, links to sim", median(live[system]) / median(virtual[system]), "x", 0.95, 1.05)


def _replayed(folder: Path) -> list[Figure]:
    """One run on links, and its decisions again in virtual time."""
    first, second = folder / "links", folder / "again"
    runs("run", "1p1d", *IO_BOUND, "--dilation", DILATION, "--out", str(first))
    runs("sim", "1p1d", *IO_BOUND, "--decisions", str(first), "--out", str(second))
    left, right = (read_run_dir(path).evidence for path in (first, second))
    findings = parity(left, right, replayed=True)
    for finding in findings:
        print(f"{'ok    ' if finding.ok else 'FAILED'} {finding.law}: {finding.detail}", file=sys.stderr)
    return [Figure("decisions replayed: laws of parity broken", sum(not f.ok for f in findings), "", high=0)]
