"""Isolation: lives bound to lives, privileges given up for good."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading

import pytest

from emulator.hosts.isolate import (
    IsolationError,
    enter_user_namespace,
    invoking_user,
    open_pid_namespace,
)
from emulator.hosts.state import ProcessId

SUPERVISE = """
import subprocess, sys, signal
from emulator.hosts.isolate import open_pid_namespace
namespace = open_pid_namespace()
child = subprocess.Popen(["sleep", "600"])
child.send_signal(signal.SIGSTOP)
print(namespace.init_pid, child.pid, flush=True)
sys.stdin.read()
namespace.kill()
child.wait()
namespace.wait(5)
"""

DROP = """
import os
from emulator.hosts.isolate import drop_privileges
drop_privileges({user})
print(open("/proc/self/status").read())
try:
    os.chroot("/")
except PermissionError:
    print("refused")
"""


def _ended(process: ProcessId, within_s: float = 2.0) -> bool:
    """Whether the process is gone within that time; waited for on a pidfd, not by sleeping."""
    with process.hold() as pidfd:
        if pidfd is None:
            return True
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(1e3 * within_s))


@pytest.mark.parametrize(
    ("environment", "user"),
    [
        ({}, None),
        ({"SUDO_UID": "1000", "SUDO_GID": "100"}, (1000, 100)),
        ({"SUDO_UID": "0", "SUDO_GID": "0"}, None),
        ({"SUDO_UID": "1000"}, None),
        ({"SUDO_UID": "someone", "SUDO_GID": "100"}, None),
        ({"SUDO_UID": "-1", "SUDO_GID": "100"}, None),
        ({"SUDO_UID": "4294967295", "SUDO_GID": "100"}, None),
        ({"SUDO_UID": "99999999999", "SUDO_GID": "100"}, None),
        ({"SUDO_UID": "1000", "SUDO_GID": "4294967295"}, None),
    ],
)
def test_nodes_belong_to_whoever_called_sudo(environment: dict[str, str], user: tuple[int, int] | None) -> None:
    """Only a whole, sensible pair of sudo's variables names another user; root's own sudo does not."""
    assert invoking_user(environment) == user


@pytest.mark.root
@pytest.mark.parametrize("user", [None, (1234, 1235)])
def test_dropped_privileges_are_gone_for_good(user: tuple[int, int] | None) -> None:
    """No capability in any set, no way to gain one, no group of root's; even as uid 0."""
    done = subprocess.run(
        [sys.executable, "-c", DROP.format(user=user)], capture_output=True, text=True, check=True
    )
    status = dict(line.split(":", 1) for line in done.stdout.splitlines() if ":" in line)
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[name], 16) == 0, name
    assert status["NoNewPrivs"].strip() == "1"
    uid, gid = user or (0, 0)
    assert status["Uid"].split() == [str(uid)] * 4
    assert status["Gid"].split() == [str(gid)] * 4
    assert user is None or status["Groups"].split() == []
    assert done.stdout.endswith("refused\n")


@pytest.mark.root
@pytest.mark.parametrize("how", ["killed", "asked"])
def test_a_namespace_dies_with_its_maker(how: str) -> None:
    """SIGKILL of the maker, or its own closing, ends every process in it, a stopped one too."""
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as maker:
        try:
            assert maker.stdout is not None and maker.stdin is not None
            processes = [ProcessId.of(int(pid)) for pid in maker.stdout.readline().split()]
            if how == "killed":
                maker.kill()
            else:
                maker.stdin.close()
            assert [p is not None and _ended(p) for p in processes] == [True, True]
            assert maker.wait(5) == (-signal.SIGKILL if how == "killed" else 0)
        finally:
            maker.kill()


def test_a_process_with_threads_is_not_isolated() -> None:
    """The kernel would refuse it, or refuse the next thread: an error that says so, and nothing is changed."""
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait)
    thread.start()
    try:
        before = os.readlink("/proc/self/ns/user"), os.readlink("/proc/self/ns/pid_for_children")
        for act in (enter_user_namespace, open_pid_namespace):
            with pytest.raises(IsolationError, match="threads"):
                act()
        assert (os.readlink("/proc/self/ns/user"), os.readlink("/proc/self/ns/pid_for_children")) == before
    finally:
        go_on.set()
        thread.join()


@pytest.mark.root
def test_a_node_whose_user_cannot_load_it_says_who_and_what() -> None:
    """One line, the user and the place; a node that is nobody else's shows its traceback."""
    program = "import sys\nfrom emulator.hosts.node import main\nsys.path[:] = []\nmain(sys.argv[1:])"
    said = []
    for user in (("65534", "65534"), ()):
        argv = [sys.executable, "-c", program, "pe0", *user]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        said.append(done.stderr)
    assert "uid 65534" in said[0] and sys.prefix in said[0] and said[0].count("\n") == 1
    assert said[1].startswith("Traceback")
