"""Clusters come up whole, stay up, and go without a trace, however they are ended."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from emulator.hosts.state import ProcessId
from topology.namespaces import netns_fd_of_pid

from .lifecycle import Host, host_links

pytestmark = pytest.mark.root


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """A state directory of the test's own; whatever a failing test leaves is killed."""
    links = host_links()
    found = Host(tmp_path / "state")
    try:
        yield found
        assert host_links() <= links
    finally:
        for process in found.processes():
            process.send(signal.SIGKILL)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """One cluster, "shared", that tests look at and none harms."""
    host = Host(tmp_path_factory.mktemp("shared") / "state")
    try:
        host.run("up", "1p1d", "--name", "shared")
        yield host
        host.run("down", "shared")
        assert host.quiet()
    finally:
        for process in host.processes():
            process.send(signal.SIGKILL)


def _await(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    """Wait for another process to get somewhere: it tells nobody, so its files are watched."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, "the other process never got there"
        time.sleep(0.002)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("true",), 0),
        (("sh", "-c", "exit 7"), 7),
        (("sh", "-c", "kill -TERM $$"), 128 + signal.SIGTERM),
        (("sh", "-c", "kill -KILL $$"), 128 + signal.SIGKILL),
        (("no-such-program",), 127),
        (("/dev/null",), 126),
    ],
)
def test_exec_returns_the_commands_code(up: Host, command: tuple[str, ...], code: int) -> None:
    """The child's own code, 128 + n for signal n, a shell's codes for what cannot be run."""
    up.run("exec", "pe0", "--", *command, code=code)


def test_exec_stands_in_the_nodes_network(up: Host) -> None:
    """The command sees the node's links and no others; one cluster needs no name."""
    done = up.run("exec", "--cluster", "shared", "pe0", "--", "cat", "/proc/net/dev")
    names = {line.split(":")[0].strip() for line in done.stdout.splitlines()[2:]}
    assert names == {"lo", "mgmt0", "snic0", *(f"cnic{i}" for i in range(8))}


def test_exec_in_an_unknown_node_lists_the_nodes(up: Host) -> None:
    """One line, not zero."""
    done = up.run("exec", "pe7", "--", "true", code=1)
    assert "pe7" in done.stderr and "pe0, de0, st0, st1, sched, client" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_exec_passes_on_what_would_end_it(up: Host, signum: signal.Signals) -> None:
    """The command hears the signal, and its answer is the code: nothing is left running in the node."""
    script = f"trap 'exit 40' {signum.name[3:]}; echo ready; while :; do sleep 0.05; done"
    with up.start("exec", "pe0", "--", "sh", "-c", script) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signum)
        assert process.wait(10) == 40


def test_exec_passes_streams_through(up: Host) -> None:
    """Input, output and their ends are the command's own."""
    with up.start("exec", "pe0", "--", "cat", stdin=subprocess.PIPE) as process:
        out, err = process.communicate("one\ntwo\n", timeout=20)
    assert (process.returncode, out, err) == (0, "one\ntwo\n", "")


def test_a_cluster_of_another_user_is_said_to_be_one(up: Host) -> None:
    """Who may not touch a cluster is told so in one line; it is unharmed."""
    nobody = 65534
    python = _interpreter_for(nobody)
    if python is None:
        pytest.skip("no interpreter here that an ordinary user may run sees this environment")
    other = Host(_passable(up.root), user=nobody, python=python)
    before = up.cluster("shared")
    for argv in (
        ("exec", "--cluster", "shared", "pe0", "--", "true"),
        ("down", "shared"),
        ("replay", "--cluster", "shared"),
    ):
        done = other.run(*argv, code=1)
        assert "belongs to another user" in done.stderr and done.stderr.count("\n") == 1
    done = other.run("up", "1p1d", "--name", "theirs", code=1)
    assert "Permission denied" in done.stderr and done.stderr.count("\n") == 1
    assert up.cluster("shared") == before


def _passable(path: Path) -> Path:
    """The path, which other users may now walk to."""
    for folder in path.parents[:3]:
        folder.chmod(0o755)
    return path


def test_a_name_is_taken_once(up: Host) -> None:
    """The second `up` fails, names the running one's pid, and leaves it unharmed."""
    before = up.cluster("shared")
    done = up.run("up", "1p1d", "--name", "shared", code=1)
    assert f"pid {before['supervisor']}" in done.stderr
    assert up.cluster("shared") == before
    assert len(before["nodes"]) == 6


def test_nodes_have_no_privileges_and_networks_of_their_own(up: Host) -> None:
    """No capability, no_new_privs, one PID namespace together, a network namespace each."""
    nodes = up.cluster("shared")["nodes"].values()
    networks, families = set(), set()
    for pid in nodes:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        assert {int(status[f"Cap{kind}"], 16) for kind in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {0}
        assert status["NoNewPrivs"].strip() == "1"
        networks.add(os.readlink(f"/proc/{pid}/ns/net"))
        families.add(os.readlink(f"/proc/{pid}/ns/pid"))
    assert len(networks) == len(nodes) and len(families) == 1
    assert not (networks | families) & {os.readlink("/proc/self/ns/net"), os.readlink("/proc/self/ns/pid")}


def test_the_killed_supervisor_takes_all_along(host: Host) -> None:
    """kill -9 of the supervisor with one node stopped: every process is gone in 2 s, and `up` works at once.

    Twenty times without a pause; no network namespace survives its node.
    """
    for _ in range(20):
        host.run("up", "1p1d")
        cluster = host.cluster("1p1d")
        processes = host.processes()
        # The supervisor and its parent, the init, six nodes.
        assert len(processes) == 9
        stopped = ProcessId.of(cluster["nodes"]["de0"])
        assert stopped is not None and stopped.send(signal.SIGSTOP)
        os.kill(cluster["supervisor"], signal.SIGKILL)
        assert not host.gone(processes, 2.0)
    assert host.cluster("1p1d")["phase"] == "gone"
    host.run("down")
    assert host.quiet()


STAGES: dict[str, Callable[[Path], bool]] = {
    "claimed": lambda path: path.exists(),
    "recorded": lambda path: (path / "state.json").exists(),
    "spawned": lambda path: (path / "logs" / "client.log").exists(),
    "networked": lambda path: "network_ready" in _text(path / "logs" / "supervisor.log"),
}


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("stage", STAGES)
def test_up_interrupted_leaves_nothing(host: Host, stage: str, signum: signal.Signals) -> None:
    """A signal at any stage of `up`: no process and no state is left. SIGINT exits 130."""
    with host.start("up", "1p1d") as process:
        _await(lambda: STAGES[stage](host.root / "1p1d") or process.poll() is not None)
        processes = host.processes()
        process.send_signal(signum)
        _, err = process.communicate(timeout=20)
    assert process.returncode == (130 if signum is signal.SIGINT else -signum), err
    assert "Traceback" not in err
    assert not host.gone(processes, 5.0)
    assert host.quiet()


def _command(process: ProcessId) -> list[str]:
    return Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")[:-1]


@pytest.mark.parametrize("stage", ["recorded", "networked"])
def test_a_supervisor_killed_on_the_way_up_is_one_line(host: Host, stage: str) -> None:
    """`up` fails with one line, nothing is left, and the next `up` works at once."""
    with host.start("up", "1p1d") as process:
        _await(lambda: STAGES[stage](host.root / "1p1d"))
        command = ["-P", "-m", "emulator.hosts.supervisor"]
        supervisor = next(p for p in host.processes() if _command(p)[1:] == command)
        processes = host.processes()
        supervisor.send(signal.SIGKILL)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 1 and err.count("\n") == 1, err
    assert not host.gone(processes, 2.0)
    assert not host.clusters()
    host.run("up", "1p1d")
    host.run("down")
    assert host.quiet()


def test_clusters_come_and_go_beside_one_another(host: Host) -> None:
    """Three up at once; each down leaves the others whole. (Three, for the time that eight take.)"""
    names = ("a", "b", "c")
    starting = [host.start("up", "1p1d", "--name", name) for name in names]
    for process in starting:
        with process:
            assert process.wait(60) == 0
    rest = {name: host.cluster(name) for name in names}
    host.run("exec", "pe0", "--", "true", code=2)
    for name in names[:2]:
        host.run("down", name)
        del rest[name]
        assert {other: host.cluster(other) for other in rest} == rest
        assert all(ProcessId.of(pid) for cluster in rest.values() for pid in cluster["nodes"].values())
    host.run("down", "--all")
    assert host.quiet()


def test_down_needs_neither_file_nor_folder_nor_state(host: Host, tmp_path: Path) -> None:
    """The topology file and its folder deleted, the state cut short: `down` works, decoys survive."""
    folder = tmp_path / "gone"
    folder.mkdir()
    (folder / "mine.toml").write_text("[cluster]\nname = 'mine'\npe_nodes = 1\nde_nodes = 1\ngpus_per_node = 1\n")
    with host.start("up", "mine.toml", cwd=folder) as process:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    (folder / "mine.toml").unlink()
    folder.rmdir()
    state = host.root / "mine" / "state.json"
    state.write_bytes(state.read_bytes()[:40])
    assert host.cluster("mine")["phase"] == "state unreadable"

    (host.root / "mine-too").mkdir()
    (host.root / "mine-too" / "state.json").write_text("{}")
    (host.root / "mine.json").write_text("{}")
    decoy = subprocess.Popen(
        ["unshare", "-n", "sh", "-c", "ip link add pe0.cnic0 type veth peer cnic0; exec sleep 99"]
    )
    try:
        host.run("down", "mine")
        assert not host.gone(host.processes(), 2.0)
        assert host.clusters() == ["mine-too", "mine.json"]
        assert decoy.poll() is None
        os.close(netns_fd_of_pid(decoy.pid))
    finally:
        decoy.kill()
        decoy.wait()


def test_a_full_disk_stops_cleanly(host: Host) -> None:
    """ENOSPC in the state directory at whatever point: a clear line or a working cluster; `down` works."""
    outcomes = set()
    for kib in (4, 12):
        host.root.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "emulate-test", host.root], check=True)
        try:
            done = host.run("up", "1p1d", code=None)
            outcomes.add(done.returncode)
            if done.returncode:
                assert done.returncode == 1 and "No space left on device" in done.stderr
                assert done.stderr.count("\n") == 1
            host.run("down")
            assert host.quiet()
        finally:
            subprocess.run(["umount", host.root], check=True)
            host.root.rmdir()
    assert 1 in outcomes


@pytest.mark.parametrize("rate", ["1e-9", "1e-300", "1e15", "1e300"])
def test_a_rate_that_the_kernel_cannot_have_is_the_files_fault(host: Host, tmp_path: Path, rate: str) -> None:
    """Exit 2 and one line that names the key; nothing is made, not even a directory."""
    path = tmp_path / "x.toml"
    path.write_text(f"[cluster]\npe_nodes = 1\nde_nodes = 1\ngpus_per_node = 1\n[network]\nsnic_gbps = {rate}\n")
    done = host.run("up", str(path), code=2)
    assert "network.snic_gbps" in done.stderr and done.stderr.count("\n") == 1
    assert not host.root.exists() and not host.processes()


@pytest.mark.parametrize("command", [("up", "1p1d"), ("run", "1p1d", "--agents", "1")])
def test_a_place_for_state_that_is_none_is_one_line(tmp_path: Path, command: tuple[str, ...]) -> None:
    """Read-only, a file, below a file: `up` and `run` fail with the path and the reason, and start nothing."""
    (tmp_path / "file").touch()
    frozen = tmp_path / "frozen"
    frozen.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "emulate-test", frozen], check=True)
    try:
        for root in (frozen, frozen / "a" / "b", tmp_path / "file", tmp_path / "file" / "below"):
            host = Host(root)
            done = host.run(*command, code=1)
            last = done.stderr.splitlines()[-1]
            assert last.startswith("emulate: ") and str(root) in last and "EMULATE_STATE_DIR" in last
            assert not host.processes()
    finally:
        subprocess.run(["umount", frozen], check=True)


def test_a_cluster_needs_no_standard_streams(host: Host) -> None:
    """`up`, `exec` and `down` from where all three are closed, as a daemon's may be: they do their work."""
    for command, code in (("up 1p1d", 0), ("exec pe0 -- cat", 0), ("exec pe0 -- false", 1), ("down", 0)):
        script = f'exec "$0" -m emulator {command} <&- >&- 2>&-'
        environment = os.environ | {"EMULATE_STATE_DIR": str(host.root)}
        done = subprocess.run(["sh", "-c", script, sys.executable], env=environment, check=False, timeout=60)
        assert done.returncode == code, command
    assert host.quiet()


def test_the_largest_preset_is_quick(host: Host) -> None:
    """2P4D: everything ready in 10 s, down in 2 s."""
    assert host.json("up", "2p4d")["total_s"] <= 10
    before_s = time.monotonic()
    host.run("down")
    assert time.monotonic() - before_s <= 2.0
    assert host.quiet()


def test_an_idle_node_lives_on(up: Host) -> None:
    """No node's life hangs on the thread that started it: trio gives an idle thread 10 s, these live for 30."""
    nodes = up.cluster("shared")["nodes"].values()
    ticks_s = os.sysconf("SC_CLK_TCK")

    def age_s() -> float:
        youngest = max(process.start_ticks for pid in nodes if (process := ProcessId.of(pid)))
        return time.clock_gettime(time.CLOCK_BOOTTIME) - youngest / ticks_s

    _await(lambda: age_s() > 30.0, within_s=40.0)
    assert all(ProcessId.of(pid) for pid in nodes)


def _interpreter_for(user: int) -> str | None:
    """This environment's interpreter, or the system's of the same version, if ``user`` can import with it."""
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        try:
            subprocess.run(
                [python, "-c", "import emulator.hosts.supervisor"],
                user=user,
                group=user,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                cwd="/",
                check=True,
                capture_output=True,
            )
        except (OSError, subprocess.CalledProcessError):
            continue
        return python
    return None


def test_without_root_a_user_namespace_does() -> None:
    """As an ordinary user: up, exec in a node, down; no capability outside, none in the nodes."""
    nobody = 65534
    python = _interpreter_for(nobody)
    if python is None:
        pytest.skip("no interpreter here that an ordinary user may run sees this environment")
    folder = Path(tempfile.mkdtemp(prefix="emulate-test-"))
    os.chown(folder, nobody, nobody)
    host = Host(folder / "state", user=nobody, python=python)
    try:
        host.run("up", "1p1d")
        pid = host.cluster("1p1d")["nodes"]["pe0"]
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        assert int(status["CapEff"], 16) == 0 and status["Uid"].split() == [str(nobody)] * 4
        done = host.run("exec", "pe0", "--", "cat", "/proc/net/dev")
        assert "cnic7:" in done.stdout
        host.run("down")
        assert host.quiet()
    finally:
        for process in host.processes():
            process.send(signal.SIGKILL)
        shutil.rmtree(folder)
