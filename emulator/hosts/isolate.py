"""Kernel isolation of a cluster's processes: user and PID namespaces, life bound to life, privileges.

Standard library only (and ``topology.namespaces``, which is too), because a node runs this before it has lost
its privileges.

Theory of operation. The supervisor calls ``enter_user_namespace`` (only when it is not root) and then
``open_pid_namespace``, whose init is its first child. Every later child is born into that namespace and dies
with the init, which dies with the supervisor (``emulator.hosts.pidinit`` says how). All of it happens on the main
thread of a process with one thread: from then on the kernel refuses new threads (EINVAL), because a thread
cannot live in another PID namespace than its process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from topology.namespaces import CLONE_NEWNET, CLONE_NEWPID, CLONE_NEWUSER, unshare

from . import pidinit

__all__ = [
    "IsolationError",
    "PidNamespace",
    "drop_privileges",
    "enter_user_namespace",
    "invoking_user",
    "open_pid_namespace",
]

_PR_CAPBSET_READ = 23
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_LINUX_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITIES = 64
_NO_ID = 2**32 - 1

_libc = ctypes.CDLL(None, use_errno=True)


class IsolationError(OSError):
    """The kernel refused an act of isolation; ``strerror`` is one line that says which and what to do."""


def _prctl(option: int, *args: int) -> int:
    padded = (*args, 0, 0, 0, 0)[:4]
    return int(_libc.prctl(option, *(ctypes.c_ulong(a) for a in padded)))


def _refused(what: str) -> IsolationError:
    code = ctypes.get_errno()
    return IsolationError(code, f"{what}: {os.strerror(code)}")


def _unshare(flags: int, what: str) -> None:
    if len(os.listdir("/proc/self/task")) > 1:
        raise IsolationError(errno.EINVAL, f"no new {what} namespace for a process that has threads")
    try:
        unshare(flags)
    except OSError as error:
        text = f"no new {what} namespace: {os.strerror(error.errno or 0)}; `emulate doctor` says what to change"
        raise IsolationError(error.errno, text) from None


def enter_user_namespace() -> None:
    """Become root of a new user namespace whose one known user is the caller, and of a new network namespace.

    The network namespace comes along because the caller's old one belongs to the outer user namespace: the
    kernel would let nobody return to it from another (``topology.namespaces.inside``).
    """
    uid, gid = os.geteuid(), os.getegid()
    _unshare(CLONE_NEWUSER, "user")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        path = Path("/proc/self") / name
        try:
            path.write_text(text)
        except OSError as error:
            what = f"{path}: no user mapping: {error.strerror}; `emulate doctor` says what to change"
            raise IsolationError(error.errno, what) from None
    _unshare(CLONE_NEWNET, "network")


class PidNamespace:
    """A PID namespace by its init: children of the caller are born into it from now on."""

    def __init__(self, init: subprocess.Popen[bytes]) -> None:
        self._init = init

    @property
    def init_pid(self) -> int:
        """The init's pid as the caller's own PID namespace sees it."""
        return self._init.pid

    def kill(self) -> None:
        """End every process of the namespace. Idempotent."""
        assert self._init.stdin is not None
        self._init.stdin.close()
        self._init.kill()

    def wait(self, timeout_s: float) -> None:
        """Return when all are gone, after ``kill``; subprocess.TimeoutExpired.

        The kernel lets an init go only when every process of its namespace is reaped: the caller reaps its
        own children in it first.
        """
        self._init.wait(timeout_s)


def open_pid_namespace() -> PidNamespace:
    """Unshare the PID namespace of the children to come and start its init, bound to this process's life."""
    _unshare(CLONE_NEWPID, "PID")
    init = subprocess.Popen(
        [sys.executable, "-I", "-S", pidinit.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={},
        cwd="/",
    )
    assert init.stdout is not None
    with init.stdout as ready:
        if ready.read(1) != pidinit.READY:
            raise IsolationError(errno.ECHILD, f"the PID namespace's init ended with code {init.wait()}")
    return PidNamespace(init)


def invoking_user(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """(uid, gid) that a root process gives its nodes: sudo's caller; None where nobody else invoked us.

    Real root stays uid 0, though with no capability: ``nobody`` could not read an environment that root
    keeps under its own home, and shares its uid with other daemons.
    """
    try:
        uid, gid = int(environment["SUDO_UID"]), int(environment["SUDO_GID"])
    except (KeyError, ValueError):
        return None
    # 2**32 - 1 is no id: to the kernel it means "leave it as it is".
    return (uid, gid) if 0 < uid < _NO_ID and 0 <= gid < _NO_ID else None


def drop_privileges(user: tuple[int, int] | None) -> None:
    """Irrevocably become ``user`` (None: stay who we are), with no capability and no way to gain one."""
    # EINVAL: a kernel before 4.3 has no ambient set to clear.
    if _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL) < 0 and ctypes.get_errno() != errno.EINVAL:
        raise _refused("clearing the ambient capabilities")
    for capability in range(_CAPABILITIES):
        if _prctl(_PR_CAPBSET_READ, capability) == 1 and _prctl(_PR_CAPBSET_DROP, capability) < 0:
            raise _refused(f"dropping capability {capability}")
    if user is not None:
        uid, gid = user
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    header = (ctypes.c_uint32 * 2)(_LINUX_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if _libc.capset(header, nothing) < 0:
        raise _refused("dropping the capabilities")
    if _prctl(_PR_SET_NO_NEW_PRIVS, 1) < 0:
        raise _refused("no_new_privs")
