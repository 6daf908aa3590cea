"""The walkthrough stays true: its commands run as they are written, with the exit codes that it tells."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from emulator.cli import main

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "walkthrough.md").read_text(encoding="utf-8")
PRESETS = "topology/presets"


def _commands() -> Iterator[tuple[str, int]]:
    """The commands in order, each with its exit code."""
    for line in re.findall(r"^    (\S.*)$", TEXT, re.MULTILINE):
        command, _, note = line.partition("  # ")
        yield command, int(note.removeprefix("exit code ")) if note else 0


def test_commands_without_root_do_what_they_say(tmp_path: Path) -> None:
    """In an empty folder beside the presets, every command but `doctor` ends with the exit code told."""
    (tmp_path / PRESETS).parent.mkdir()
    (tmp_path / PRESETS).symlink_to(ROOT / PRESETS)
    (tmp_path / "emulate").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m emulator "$@"\n', encoding="utf-8")
    (tmp_path / "emulate").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "120",
    }
    seen: dict[str, str] = {}
    for command, code in _commands():
        if command.startswith("sudo") or command == "emulate doctor":
            continue
        done = subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, (command, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        seen[command] = done.stdout + done.stderr
    jct = {out: _jct(text) for command, text in seen.items() for out in re.findall("runs/([a-z]+)$", command)}
    first, half = jct["first"], jct["half"]
    assert first["auto"] < min(first["pe"], first["de"]), "the third line beats the other two"
    assert half["pe"] / half["auto"] > first["pe"] / first["auto"], "a second path is worth more on slow storage"
    for file in re.findall(r"^\| `([a-z]+\.[a-z]+)` \|", TEXT, re.MULTILINE):
        assert (tmp_path / "runs" / "first" / "dualpath-auto" / file).is_file()


def _jct(table: str) -> dict[str, float]:
    """The JCT of each path in a table of runs."""
    return {path: float(jct) for path, jct in re.findall(r"^dualpath (\w+) +\d+ +([\d.]+)", table, re.MULTILINE)}


@pytest.mark.parametrize("command", [command for command, _ in _commands() if command.startswith("sudo ")])
def test_commands_with_root_are_commands(command: str) -> None:
    """Their options and arguments exist; tests/netns runs their like."""
    _, emulate, name, *rest = command.split()
    assert emulate == "emulate"
    done = CliRunner().invoke(main, [name, "--help", *rest])
    assert done.exit_code == 0, done.output
    assert f" {name} " in done.output.splitlines()[0]


def test_links_lead_somewhere() -> None:
    """Every document that the walkthrough names is there."""
    for link in re.findall(r"\]\(([^)]+)\)", TEXT):
        assert (ROOT / "docs" / link).is_file()
