"""Where a second read path has nothing to gain, and what a DRAM pool gains where it fits and where it does not.

In virtual time on 1P1D. ``scripts/bench regimes [--json]``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from emulator.synth import synth_io_bound

from .commands import runs
from .figures import Figure, show
from .workloads import SEEDS, median, preset_with, said, saved

__all__ = ["main"]

SLOWER = 1.03
"""How much slower than Basic DualPath may be where it cannot gain."""

POOL_GB = 20.0
"""What each of the two nodes gives to a small pool; an agent's context is 1.4 GB and more."""

SETS = (28, 32, 48)
"""Agents whose contexts together exceed both nodes' pool, by more and more."""


def main(argv: Sequence[str]) -> int:
    """Run every regime, print every figure; 1 where a bound is missed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures = [*_nothing_to_gain(folder), *_small_pools(folder)]
    return show(figures, as_json="--json" in argv)


def _nothing_to_gain(folder: Path) -> Iterator[Figure]:
    few = ("--trace", "io-bound", "--warm", "--agents", "4")
    # Nothing is in storage: all is computed.
    single = saved(synth_io_bound(1, 32, 1, first_prompt=(2_000, 4_000)), folder)
    # A turn computes thousands of tokens for the 8K and more that it reads.
    appends = (
        *saved(synth_io_bound(1, 24, 3, first_prompt=(8_000, 9_000), append=(3_000, 5_000)), folder),
        "--warm",
    )
    # A few agents for many turns, of which only the first is read from storage.
    fits = (*saved(synth_io_bound(1, 6, 8, gen=(2, 8)), folder), "--warm")
    for regime, asked in (
        ("4 agents", few),
        ("single turns", single),
        ("long appends", appends),
        ("a pool that fits", fits),
    ):
        systems = ("basic", "dualpath", "mooncake") if asked is fits else ("basic", "dualpath")
        found: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
        for seed in SEEDS:
            chosen = [word for system in systems for word in ("--system", system)]
            entries, _ = runs("sim", "1p1d", *asked, *chosen, "--seed", str(seed))
            for entry in entries:
                found[entry["system"]].append(said(entry))
        jct = {system: median(entries) for system, entries in found.items()}
        for system in systems:
            yield Figure(f"{regime}, {system}: JCT, median", jct[system], "s")
        yield Figure(f"{regime}: dualpath to basic", jct["dualpath"] / jct["basic"], "x", high=SLOWER)
        if "mooncake" in jct:
            # Without bounds: here a pool may win.
            for other in ("basic", "dualpath"):
                yield Figure(f"{regime}: mooncake to {other}", jct["mooncake"] / jct[other], "x")
            yield Figure(f"{regime}: hits from the pool", median(found["mooncake"], "pool_hit_ratio"), "")


def _small_pools(folder: Path) -> Iterator[Figure]:
    topology = preset_with("1p1d", f"[engine]\npool_gb = {POOL_GB}\n", folder)
    before = 1.0
    for agents in SETS:
        asked = (*saved(synth_io_bound(1, agents, 4, gen=(2, 8)), folder), "--warm")
        (entry,), _ = runs("sim", topology, *asked, "--system", "mooncake")
        ratio = said(entry)["pool_hit_ratio"]
        # Strictly between 0 and what the smaller set had.
        name = f"pool of {2 * POOL_GB:.0f} GB, {agents} agents: hits from the pool"
        yield Figure(name, ratio, "", 1e-6, before - 1e-6)
        before = ratio
