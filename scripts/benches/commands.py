"""What the benchmarks of whole commands share: run `emulate`, read its JSON, and look at the host around it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["Host", "emulate", "need_root", "runs"]

BOUND_S = 900


def need_root(name: str) -> None:
    """Leave with one line where a benchmark cannot work."""
    if os.geteuid() != 0:
        raise SystemExit(f"scripts/bench {name}: makes network namespaces: run it with sudo")


def emulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `emulate` with our interpreter; its notes and progress go where ours go."""
    command = [sys.executable, "-m", "emulator", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=BOUND_S)


def runs(*arguments: str) -> tuple[list[dict[str, Any]], int]:
    """The entries of a command that replays, and its exit code."""
    done = emulate(*arguments, "--json")
    if not done.stdout.strip():
        raise SystemExit(f"emulate {' '.join(arguments)}: no result, exit code {done.returncode}")
    return json.loads(done.stdout)["runs"], done.returncode


class Host:
    """The links, network namespaces and processes that this host has now, for a comparison."""

    def __init__(self) -> None:
        self.links = frozenset(
            line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()
        )
        self.processes = frozenset(_processes())
        self.namespaces = frozenset(_namespaces())

    def left_by(self, after: Host) -> list[str]:
        """What ``after`` has and this has not."""
        return [
            *sorted(after.links - self.links),
            *(f"process {pid}" for pid in sorted(after.processes - self.processes)),
            *(f"namespace {inode}" for inode in sorted(after.namespaces - self.namespaces)),
        ]


def _processes() -> list[int]:
    """Processes of the emulator: nodes, supervisors and what holds them."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if any(word in command for word in (b"emulator.hosts.", b"pidinit")):
                found.append(int(entry.name))
    return found


def _namespaces() -> list[int]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found.add((entry / "ns" / "net").stat().st_ino)
            except OSError:
                continue
    return sorted(found)
