"""`up`, `status`, `down` and `exec` where nothing can come up: refusals, idempotence, left-overs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from emulator.cli import main


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory of the test's own, in which nothing may appear."""
    path = tmp_path / "state"
    monkeypatch.setenv("EMULATE_STATE_DIR", str(path))
    return path


def _run(*argv: str) -> Result:
    return CliRunner().invoke(main, argv, prog_name="emulate")


def _refused(root: Path, *argv: str) -> str:
    """The one line with which a command refuses before it begins."""
    done = _run(*argv)
    assert done.exit_code == 2, (done.output, done.exception)
    assert done.stdout == "" and done.stderr.count("\n") == 1
    assert not root.exists()
    return done.stderr


UNREADABLE: dict[str, Callable[[Path], object]] = {
    "an ELF file": lambda path: path.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(64)),
    "UTF-16": lambda path: path.write_text("[cluster]\n", encoding="utf-16"),
    "Latin-1": lambda path: path.write_bytes("[cluster]\nname = 'caf\xe9'\n".encode("latin-1")),
    "NULs": lambda path: path.write_bytes(bytes(100)),
    "nothing": lambda path: path.write_bytes(b""),
    "a directory": lambda path: path.mkdir(),
    "a FIFO": os.mkfifo,
    "no file": lambda path: None,
}


@pytest.mark.parametrize("what", UNREADABLE)
@pytest.mark.parametrize("command", ["up", "run", "sim"])
def test_what_is_no_topology_is_refused_in_one_line(command: str, what: str, root: Path, tmp_path: Path) -> None:
    """Exit 2, the file's name, no traceback, nothing started."""
    path = tmp_path / "x.toml"
    UNREADABLE[what](path)
    assert "x.toml" in _refused(root, command, str(path))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[cluster]\npe_nodes = 1\nde_nodse = 1\n",
            "x.toml:3: cluster.de_nodse: unknown key; did you mean de_nodes?",
        ),
        (
            "[cluster]\npe_nodes = 1\nde_nodes = 1\n[engine]\nquota = 1\n",
            "engine.quota: unknown key; did you mean quota_s?",
        ),
        ("[cluster]\npe_nodes = 1\nde_nodes = 1\n[model]\nname = 'gpt'\n", "gpt"),
        ("[cluster]\npe_nodes = 1\nde_nodes = 1\n[scale]\nkv_bytes = 100000\n", "kv_bytes"),
        ("[cluster]\npe_nodes = 300\nde_nodes = 1\n", "address plan"),
    ],
)
def test_a_bad_key_is_named(text: str, said: str, root: Path, tmp_path: Path) -> None:
    """The file's own tables and the emulator's, and what only shows when they meet."""
    path = tmp_path / "x.toml"
    path.write_text(text)
    assert said in _refused(root, "up", str(path))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--dilation", "nan"), "--dilation nan"),
        (("--dilation", "0"), "--dilation 0"),
        (("--dilation", "-1"), "--dilation -1"),
        (("--kv-bytes", "0"), "--kv-bytes"),
        (("--model", "no-such"), "no-such"),
        (("--name", "a/b"), "a/b"),
        (("--name", "x" * 33), "--name"),
        (("--nmae", "x"), "--name"),
    ],
)
def test_bad_options_are_refused(options: tuple[str, ...], said: str, root: Path) -> None:
    """Never clamped, never after something was started."""
    assert said in _refused(root, "up", "1p1d", *options)


def test_an_unknown_preset_is_answered_with_a_suggestion(root: Path) -> None:
    """The nearest preset, and all of them."""
    assert "did you mean 1p1d?" in _refused(root, "up", "1p1")


def test_nothing_up_is_no_error() -> None:
    """`down` and `status` say so and exit 0, however often."""
    for argv in (("status",), ("down",), ("down", "--all")):
        done = _run(*argv)
        assert (done.exit_code, done.stdout) == (0, "nothing is up\n")
    assert _run("down", "ghost").stdout == "cluster ghost is not up\n"
    assert _run("status", "--json").stdout == '{"clusters": []}\n'


def test_exec_without_a_cluster_fails(root: Path) -> None:
    """Not zero, one line that says what to do."""
    done = _run("exec", "pe0", "--", "true")
    assert done.exit_code == 1 and "emulate up" in done.stderr
    assert "not up" in _run("exec", "--cluster", "ghost", "pe0", "--", "true").stderr


def test_left_overs_are_shown_and_cleared(root: Path) -> None:
    """A dead cluster's directory: status says gone, down removes it and nothing beside it."""
    (root / "dead").mkdir(parents=True)
    (root / "dead" / "state.json").write_text('{"cluster": "de')
    (root / "Decoy.d").mkdir()
    assert "dead: its supervisor is gone" in _run("status").stdout
    assert _run("down").stdout == "cluster dead is down\n"
    assert [path.name for path in root.iterdir()] == ["Decoy.d"]


def test_down_does_not_guess() -> None:
    """Two clusters and no name: refused; a name and --all together: refused."""
    root = Path(os.environ["EMULATE_STATE_DIR"])
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
    done = _run("down")
    assert done.exit_code == 2 and "a, b" in done.stderr
    assert _run("down", "a", "--all").exit_code == 2
    assert _run("down", "--all").exit_code == 0
    assert list(root.iterdir()) == []
