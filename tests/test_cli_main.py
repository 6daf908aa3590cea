"""The command line as a whole: light to load, and every failure is one line and a code."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from emulator.cli import _escaped, main
from emulator.errors import ConfigError, EmulatorError, InvariantBroken
from topology.errors import TopologyError

LOADED = """
import sys
try:
    from emulator.cli import main
    main({argv!r}, prog_name="emulate")
except SystemExit as end:
    assert not end.code, end.code
import json
print()
print(json.dumps(sorted(name for name in sys.modules if "." not in name)))
"""


def _run(*argv: str) -> Result:
    return CliRunner().invoke(main, argv, prog_name="emulate")


def _loaded(*argv: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(argv=argv)], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("argv", [("--help",), ("--version",), ("status",), ("down",)])
def test_light_commands_load_nothing_heavy(
    argv: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Help, version and looking around load no numpy, torch, numba, trio or netlink library."""
    monkeypatch.setenv("EMULATE_STATE_DIR", str(tmp_path))
    assert not _loaded(*argv) & {"torch", "numba", "pyroute2", "numpy", "trio", "structlog"}


def test_sim_needs_no_linux_networking() -> None:
    """Virtual time loads neither the netlink library nor torch, which only the toy needs."""
    loaded = _loaded("sim", "1p1d", "--agents", "1", "--max-len", "1000")
    assert "numpy" in loaded
    assert not loaded & {"pyroute2", "torch"}


def test_every_command_is_there_and_says_what_it_does() -> None:
    """Each name in the help loads, has help of its own, and takes -h."""
    shown = _run("--help").output
    for name in main.list_commands(click.Context(main)):
        assert f"\n  {name} " in shown
        done = _run(name, "-h")
        assert done.exit_code == 0, done.output
        assert "Usage: emulate" in done.output


@pytest.mark.parametrize(
    ("given", "meant"),
    [("stauts", "did you mean status?"), ("replya", "did you mean replay?"), ("zz", "commands: ")],
)
def test_an_unknown_command_is_answered_with_a_suggestion(given: str, meant: str) -> None:
    """Exit 2, one line, the nearest name."""
    done = _run(given)
    assert done.exit_code == 2
    assert meant in done.stderr and done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (EmulatorError("went wrong"), 1, "emulate: went wrong\n"),
        (ConfigError("bad key"), 2, "emulate: bad key\n"),
        (TopologyError("bad file"), 2, "emulate: bad file\n"),
        (InvariantBroken("broken"), 4, "emulate: broken\n"),
        (KeyboardInterrupt(), 130, "emulate: interrupted\n"),
        (BaseExceptionGroup("g", [KeyboardInterrupt()]), 130, "emulate: interrupted\n"),
        (BrokenPipeError(), 1, ""),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "cannot be written: No space left on device\n"),
    ],
)
def test_errors_are_one_line_and_a_code(
    error: BaseException, code: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code says whose fault; only what is ours would show a traceback."""

    @click.command()
    def fails() -> None:
        raise error

    monkeypatch.setattr(type(main), "get_command", lambda self, ctx, name: fails)
    monkeypatch.setattr("emulator.cli._give_up_output", lambda: None)
    done = _run("status")
    assert done.exit_code == code
    # On a terminal a blank line ends the one with ^C.
    assert done.stderr.strip().count("\n") == 0
    assert done.stderr.endswith(text)


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that nobody raised on purpose comes out as it is."""

    @click.command()
    def fails() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(type(main), "get_command", lambda self, ctx, name: fails)
    assert isinstance(_run("status").exception, ZeroDivisionError)


def test_no_command_is_one_line() -> None:
    """Without a command: usage, which says where help is."""
    done = _run()
    assert done.exit_code == 2 and "--help" in done.stderr and done.stderr.count("\n") == 1


def test_a_group_without_a_command_shows_its_help() -> None:
    """On standard error, line by line as its --help, and exit 2."""
    done = _run("trace")
    assert done.exit_code == 2 and done.stdout == ""
    assert done.stderr == _run("trace", "--help").stdout


@given(st.text())
def test_whatever_an_error_quotes_it_is_one_line(text: str) -> None:
    """Control characters, line ends and what no encoding has come out escaped, all else as it is."""
    shown = _escaped(text)
    assert shown.isprintable() and len(shown.splitlines()) <= 1
    assert shown == text or not text.isprintable()


@pytest.mark.parametrize(
    "table", ["[scale]\nkv_bytes = 1000", '[model]\nname = ""', '[model]\ncosts = "a\\u0001b"']
)
def test_a_value_that_cannot_be_is_told_with_its_file(table: str, tmp_path: Path) -> None:
    """What the tables of a file make impossible together names the file, in one line."""
    path = tmp_path / "mine.toml"
    path.write_text(f"[cluster]\npe_nodes = 1\nde_nodes = 1\n{table}\n")
    done = _run("analyze", str(path))
    assert done.exit_code == 2
    assert done.stderr.startswith(f"emulate: {path}: ") and done.stderr.strip().isprintable()


@pytest.mark.parametrize(
    "argv", [("sim", "1p1d", "--trace", "a\nb"), ("analyze", "{}", "--agents", "1"), ("analyze", "a\nb.toml")]
)
def test_names_of_several_lines_are_told_in_one(argv: tuple[str, ...], tmp_path: Path) -> None:
    """A trace, a key or a file with a line end in its name."""
    path = tmp_path / "mine.toml"
    path.write_text('[cluster]\npe_nodes = 1\nde_nodes = 1\n[engine]\n"x\\ny" = 1\n')
    done = _run(*(arg.format(path) for arg in argv))
    assert done.exit_code == 2 and done.stderr.count("\n") == 1 and "\\n" in done.stderr


def _shell(script: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run a shell script in which $EMULATE is the command."""
    environment = os.environ | {
        "EMULATE": f"{sys.executable} -m emulator",
        "EMULATE_STATE_DIR": str(tmp_path / "state"),
    }
    return subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("command", ["status", "sim 1p1d --agents 1 --max-len 600", "doctor"])
def test_closed_streams_are_nobody_listening(command: str, closed: str, tmp_path: Path) -> None:
    """A command started without a standard stream does its work, and says nothing of it."""
    with_streams = _shell(f"$EMULATE {command}", tmp_path).returncode
    done = _shell(f"$EMULATE {command} {closed}", tmp_path)
    assert done.returncode == with_streams and "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["--help", "status", "sim 1p1d --agents 1 --max-len 600 --json"])
def test_output_onto_a_full_disk_is_one_line(command: str, tmp_path: Path) -> None:
    """Exit 1 and the reason, once."""
    done = _shell(f"$EMULATE {command} >/dev/full", tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("cannot be written: No space left on device")
    assert "Traceback" not in done.stderr and "ignored" not in done.stderr


def test_an_interrupt_while_loading_is_one_line() -> None:
    """Ctrl-C before the command line is even loaded: exit 130, no traceback."""
    program = (
        "import builtins, sys\n"
        "load = builtins.__import__\n"
        "def interrupted(name, *rest):\n"
        "    if name == 'click':\n"
        "        raise KeyboardInterrupt\n"
        "    return load(name, *rest)\n"
        "builtins.__import__ = interrupted\n"
        "from emulator.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "emulate: interrupted\n")


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """Output into a closed pipe: no traceback, no complaint at exit."""
    command = [sys.executable, "-c", "from emulator.cli import main; main()", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
