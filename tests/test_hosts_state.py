"""Recorded state: what may be believed, who holds a name, and that nothing else is ever touched."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.errors import ConfigError, EmulatorError
from emulator.hosts.processes import take_down
from emulator.hosts.state import (
    ClusterDir,
    ClusterState,
    ProcessId,
    boot_id,
    check_cluster_name,
    cluster_dirs,
    state_root,
)


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is none of ours."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def _state(supervisor: ProcessId, **changed: str) -> ClusterState:
    values = {"cluster": "c", "boot": boot_id(), "phase": "ready", "topology": "1p1d"} | changed
    return msgspec.convert(values | {"supervisor": msgspec.to_builtins(supervisor)}, ClusterState)


def _own() -> ProcessId:
    own = ProcessId.of(os.getpid())
    assert own is not None
    return own


def test_a_process_is_its_pid_and_its_start() -> None:
    """Alive is this very process; another start time, no such pid, pid 0 and a zombie are not."""
    own = _own()
    assert own.alive
    assert not ProcessId(own.pid, own.start_ticks + 1).alive
    assert not ProcessId(0, 0).alive
    assert not ProcessId(2**22 + 1, 1).alive
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert ProcessId.of(child.pid) is None
    child.wait()


def test_signals_reach_only_the_very_process(bystander: subprocess.Popen[bytes]) -> None:
    """A recycled pid is left alone; the process itself is not."""
    real = ProcessId.of(bystander.pid)
    assert real is not None
    assert not ProcessId(real.pid, real.start_ticks - 1).send(signal.SIGKILL)
    assert bystander.poll() is None
    assert real.send(signal.SIGKILL)
    assert bystander.wait() == -signal.SIGKILL
    assert not real.send(signal.SIGKILL)


def test_state_is_believed_only_whole_fresh_and_alive(tmp_path: Path) -> None:
    """Written and read back; of another cluster or boot, of a recycled pid, cut or no JSON: as if absent."""
    directory = ClusterDir(tmp_path, "c")
    claim = directory.claim()
    assert claim is not None
    good = _state(_own())
    claim.write(good)
    assert directory.read() == good
    for bad in (
        _state(_own(), boot="11111111-2222-3333-4444-555555555555"),
        _state(_own(), cluster="other"),
        _state(ProcessId(os.getpid(), 1)),
    ):
        claim.write(bad)
        assert directory.read() is None
    claim.write(good)
    path = directory.path / "state.json"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert directory.read() is None
    path.write_bytes(b"\xff\xfe\x00")
    assert directory.read() is None
    claim.release()


@given(st.binary(max_size=200))
def test_no_content_of_a_state_file_is_an_error(content: bytes) -> None:
    """Any bytes at all are a state or no state."""
    with tempfile.TemporaryDirectory() as root:
        directory = ClusterDir(Path(root), "c")
        directory.path.mkdir()
        (directory.path / "state.json").write_bytes(content)
        assert directory.read() is None


def test_a_name_has_one_holder(tmp_path: Path) -> None:
    """Held until released; release removes the directory; then anyone may hold it. Left-overs are cleared."""
    directory = ClusterDir(tmp_path / "root", "c")
    first = directory.claim()
    assert first is not None
    (directory.path / "logs").mkdir()
    assert directory.claim() is None
    first.release()
    first.release()
    assert not directory.exists
    directory.path.mkdir()
    (directory.path / "left").mkdir()
    (directory.path / "left" / "over").write_text("")
    second = directory.claim()
    assert second is not None
    second.clear()
    assert list(directory.path.iterdir()) == []
    second.release()


def test_the_control_socket_tells_who_listens(tmp_path: Path) -> None:
    """With the state cut short the kernel still says who runs the cluster, however long the path is."""
    root = tmp_path / ("long" * 40)
    directory = ClusterDir(root, "c")
    claim = directory.claim()
    assert claim is not None
    assert directory.supervisor() is None
    with claim.listen():
        (directory.path / "state.json").write_text('{"cluster": "c", "sup')
        assert directory.supervisor() == _own()
        assert (directory.path / "control.sock").stat().st_mode & 0o777 == 0o600
    assert directory.supervisor() is None
    claim.release()


def test_state_that_cannot_be_kept_is_an_error_that_says_so(tmp_path: Path) -> None:
    """One line with the file and the reason."""
    directory = ClusterDir(tmp_path, "c")
    claim = directory.claim()
    assert claim is not None
    (directory.path / "state.new").symlink_to("/dev/full")
    with pytest.raises(EmulatorError, match=r"state\.json: .*No space left on device"):
        claim.write(_state(_own()))
    claim.release()


@pytest.mark.parametrize("place", ["a-file", "a-file/below", "x" * 300, "/proc/nowhere"])
def test_a_place_that_cannot_keep_state_is_one_line(tmp_path: Path, place: str) -> None:
    """Whatever is asked of it: the path, the reason, and how to name another place."""
    (tmp_path / "a-file").touch()
    root = tmp_path / place
    with pytest.raises(EmulatorError, match="EMULATE_STATE_DIR") as caught:
        ClusterDir(root, "c").claim()
    assert "\n" not in caught.value.text and str(root) in caught.value.text
    if root.name != "nowhere":
        with pytest.raises(EmulatorError, match="EMULATE_STATE_DIR"):
            cluster_dirs(root)


@pytest.mark.parametrize("name", ["", "-x", "a/b", "..", ".x", "A", "a b", "ü", "x" * 33, "x" * 255, "a\n", "a\0"])
def test_a_cluster_name_is_a_directory_name(name: str) -> None:
    """Refused with a hint, never changed."""
    with pytest.raises(ConfigError, match="--name"):
        check_cluster_name(name)


def test_only_directories_with_proper_names_are_clusters(tmp_path: Path) -> None:
    """Files, links and other names in the state directory are somebody else's."""
    (tmp_path / "b").mkdir()
    (tmp_path / "a").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "No Cluster").mkdir()
    assert [d.name for d in cluster_dirs(tmp_path)] == ["a", "b"]
    assert cluster_dirs(tmp_path / "none") == []


def test_down_kills_nobody_on_the_word_of_a_file(tmp_path: Path, bystander: subprocess.Popen[bytes]) -> None:
    """A state that names a live process with another start time, or of another boot: removed, none harmed."""
    real = ProcessId.of(bystander.pid)
    assert real is not None
    for state in (
        _state(ProcessId(real.pid, real.start_ticks + 7)),
        _state(real, boot="11111111-2222-3333-4444-555555555555"),
    ):
        directory = ClusterDir(tmp_path, "c")
        directory.path.mkdir()
        (directory.path / "state.json").write_bytes(msgspec.json.encode(state))
        assert take_down(directory)
        assert not directory.exists
        assert bystander.poll() is None
    assert not take_down(ClusterDir(tmp_path, "c"))


def test_down_leaves_what_links_point_to(tmp_path: Path) -> None:
    """A link inside a cluster's directory is removed, its target is not."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("")
    directory = ClusterDir(tmp_path / "root", "c")
    directory.path.mkdir(parents=True)
    (directory.path / "runs").symlink_to(outside)
    assert take_down(directory)
    assert (outside / "precious").exists()


def test_the_state_directory_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """$EMULATE_STATE_DIR before all; a user without a runtime directory still gets one of their own."""
    monkeypatch.setenv("EMULATE_STATE_DIR", str(tmp_path))
    assert state_root() == tmp_path
    monkeypatch.delenv("EMULATE_STATE_DIR")
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert state_root() == tmp_path / "emulate"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert state_root() == Path("/tmp/emulate-4321")
