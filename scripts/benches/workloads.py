"""What benchmarks of runs share: traces and topologies of their own as files, medians over seeds, progress."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from emulator.traces import write_native
from emulator.workload import Workload

__all__ = ["SEEDS", "median", "preset_with", "said", "saved"]

PRESET_FILES = Path(__file__).resolve().parents[2] / "topology" / "presets"

SEEDS = (0, 1, 2)


def saved(workload: Workload, folder: Path) -> tuple[str, ...]:
    """Write ``workload`` into ``folder``; the options with which a command replays it."""
    path = folder / f"{workload.name}-{len(workload.trajectories)}.jsonl"
    write_native(workload, path)
    return ("--trace", str(path), "--trace-format", "native")


def median(entries: Iterable[dict[str, Any]], key: str = "jct_s") -> float:
    """The median of one figure over runs that differ in their seed alone."""
    return float(statistics.median(entry[key] for entry in entries))


def said(entry: dict[str, Any]) -> dict[str, Any]:
    """``entry``, after a line of progress about it on standard error."""
    config, requests = entry["config"], entry["requests"]
    what = (
        f"{config['topology']} {entry['system']} --path {entry['path']} seed {config['seed']}, {entry['fabric']}"
    )
    done = f"{requests['done']} of {requests['total']} requests"
    print(f"{what}: JCT {entry['jct_s']:.3f} s, {done}, wall {entry['wall_s']:.0f} s", file=sys.stderr, flush=True)
    return entry


def preset_with(name: str, tables: str, folder: Path) -> str:
    """A new copy in ``folder`` of the preset ``name`` with ``tables`` of the emulator's added; the file to run."""
    preset = (PRESET_FILES / f"{name}.toml").read_text()
    with NamedTemporaryFile("w", prefix=f"{name}-", suffix=".toml", dir=folder, delete=False) as file:
        file.write(preset + tables)
    return file.name
