"""The command line as a process, in a state directory of a test's own, and what of it is left on the host."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from emulator.hosts.state import ProcessId
from emulator.workload import Workload
from tests.clusters import conversation

__all__ = ["LONG", "Host", "host_links", "open_host", "sending"]

LONG = Workload((conversation("long", *[(64, 20)] * 60),))
"""What takes so long that there is a middle of it."""

EMULATE = "from emulator.cli import main; main(prog_name='emulate')"


def host_links() -> set[str]:
    """Names of the network links where the test itself stands."""
    return set(os.listdir("/sys/class/net"))


class Host:
    """Runs `emulate` with ``root`` as its state directory, and finds its processes by their environment."""

    def __init__(self, root: Path, *, user: int | None = None, python: str = sys.executable) -> None:
        self.root = root
        self._user = user
        self._python = python
        self._environment = os.environ | {"EMULATE_STATE_DIR": str(root)}
        if python != sys.executable:
            self._environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))

    def start(self, *args: str, cwd: Path | None = None, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
        """Start a command; the caller waits for it."""
        return subprocess.Popen(
            [self._python, "-c", EMULATE, *args],
            env=self._environment,
            cwd=cwd,
            user=self._user,
            group=self._user,
            text=True,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *args: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; ``code`` is what it must return (None: anything), never with a traceback."""
        with self.start(*args) as process:
            out, err = process.communicate(timeout=120)
        assert "Traceback" not in err, err
        assert code is None or process.returncode == code, (args, process.returncode, out, err)
        return subprocess.CompletedProcess(args, process.returncode, out, err)

    def json(self, *args: str) -> Any:
        """The object that a command prints with --json."""
        return json.loads(self.run(*args, "--json").stdout)

    def cluster(self, name: str) -> dict[str, Any]:
        """What `status` says of a cluster."""
        found: dict[str, Any] = next(c for c in self.json("status")["clusters"] if c["cluster"] == name)
        return found

    def processes(self) -> set[ProcessId]:
        """All live processes that were started, at whatever remove, by this host's commands."""
        mark = f"EMULATE_STATE_DIR={self.root}".encode()
        namespaces = set()
        found = set()
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                namespace = os.readlink(f"/proc/{pid}/ns/pid")
            except OSError:
                continue
            if mark in environment and (process := ProcessId.of(pid)):
                found.add(process)
                namespaces.add(namespace)
        # An init has no environment; it is found by the namespace that it shares with the nodes.
        namespaces.discard(os.readlink("/proc/self/ns/pid"))
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            try:
                namespace = os.readlink(f"/proc/{pid}/ns/pid")
            except OSError:
                continue
            if namespace in namespaces and (process := ProcessId.of(pid)):
                found.add(process)
        return found

    def gone(self, processes: set[ProcessId], within_s: float) -> set[ProcessId]:
        """Which of ``processes`` are still there after that time."""
        deadline_s = time.monotonic() + within_s
        left = set()
        for process in processes:
            with process.hold() as pidfd:
                if pidfd is None:
                    continue
                poll = select.poll()
                poll.register(pidfd, select.POLLIN)
                if not poll.poll(max(0.0, 1e3 * (deadline_s - time.monotonic()))):
                    left.add(process)
        return left

    def quiet(self, within_s: float = 3.0) -> bool:
        """Whether every process of ours ends within that time, and no directory of a cluster is left."""
        return not self.gone(self.processes(), within_s) and not self.clusters()

    def clusters(self) -> list[str]:
        """Names of what is in the state directory."""
        return sorted(os.listdir(self.root)) if self.root.exists() else []

    def pid(self, cluster: str, node: str) -> int:
        """The process of a node."""
        found: int = self.cluster(cluster)["nodes"][node]
        return found


@contextmanager
def open_host(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """``root`` as the state directory of this process, too; asserts that nothing is left behind."""
    found = Host(root)
    monkeypatch.setenv("EMULATE_STATE_DIR", str(root))
    own = ProcessId.of(os.getpid())
    try:
        yield found
        assert not found.gone(found.processes() - {own}, 3.0)
        assert found.clusters() == []
    finally:
        for process in found.processes() - {own}:
            process.send(signal.SIGKILL)


def sending(pid: int, signum: signal.Signals) -> Callable[[int, int], None]:
    """What to call on a replay's progress to have a process get a signal once the first request is done."""

    def on_progress(done: int, total: int) -> None:
        if done == 1:
            os.kill(pid, signum)

    return on_progress
