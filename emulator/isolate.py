"""Kernel isolation of a cluster's processes: user, PID and network namespaces, privileges, parent death.

Standard library only, because a node runs this before it has lost its privileges and the PID namespace's
init runs this very file as a script (``python -I -S isolate.py``), where nothing else can be imported.

Theory of operation. The supervisor calls ``enter_user_namespace`` (only when it is not root) and then
``open_pid_namespace``, whose init is its first child. The kernel kills all processes of a PID namespace when
its init ends, stopped ones too, and the init ends with the supervisor: at once by PR_SET_PDEATHSIG, and by end
of file on its standard input, which also covers a supervisor that died before the signal was asked for.

All of it must happen on the main thread of a process with one thread: after ``open_pid_namespace`` the kernel
refuses new threads (EINVAL), because a thread cannot live in another PID namespace than its process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Mapping

__all__ = [
    "IsolationError",
    "PidNamespace",
    "drop_privileges",
    "enter_user_namespace",
    "invoking_user",
    "open_pid_namespace",
    "unshare_network",
]

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_PR_CAPBSET_READ = 23
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_LINUX_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITIES = 64

_libc = ctypes.CDLL(None, use_errno=True)


class IsolationError(OSError):
    """The kernel refused an act of isolation; ``strerror`` is one line that says what it means."""


def _check(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise IsolationError(code, f"{what}: {os.strerror(code)}")


def _prctl(option: int, *args: int) -> int:
    padded = (*args, 0, 0, 0, 0)[:4]
    return int(_libc.prctl(option, *(ctypes.c_ulong(a) for a in padded)))


def _unshare(flags: int, what: str) -> None:
    result = _libc.unshare(flags)
    if result < 0 and ctypes.get_errno() in (errno.EPERM, errno.ENOSPC, errno.EUSERS):
        code = ctypes.get_errno()
        raise IsolationError(code, f"no new {what} namespace: {os.strerror(code)}; see `emulate doctor`")
    _check(result, f"no new {what} namespace")


def unshare_network() -> None:
    """Move this process into a new, anonymous network namespace that lives as long as somebody holds it."""
    _unshare(_CLONE_NEWNET, "network")


def enter_user_namespace() -> None:
    """Become root of a new user namespace in which the one known user is the caller."""
    uid, gid = os.geteuid(), os.getegid()
    _unshare(_CLONE_NEWUSER, "user")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        try:
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        except OSError as error:
            what = f"no user mapping (/proc/self/{name}): {error.strerror}; see `emulate doctor`"
            raise IsolationError(error.errno, what) from None


class PidNamespace:
    """A PID namespace by its init: children of the caller are born into it from now on."""

    def __init__(self, init: subprocess.Popen[bytes]) -> None:
        self._init = init

    @property
    def init_pid(self) -> int:
        """The init's pid as the caller's own PID namespace sees it."""
        return self._init.pid

    def close(self) -> None:
        """End every process of the namespace and return when all are gone. Idempotent."""
        assert self._init.stdin is not None
        self._init.stdin.close()
        self._init.kill()
        self._init.wait()


def open_pid_namespace() -> PidNamespace:
    """Unshare the PID namespace of the children to come and start its init, bound to this process's life."""
    _unshare(_CLONE_NEWPID, "PID")
    init = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={},
        cwd="/",
    )
    assert init.stdout is not None
    with init.stdout as ready:
        if ready.read(1) != b"+":
            raise IsolationError(errno.ECHILD, f"the PID namespace's init ended with {init.wait()}")
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
    return (uid, gid) if uid > 0 and gid >= 0 else None


def drop_privileges(user: tuple[int, int] | None) -> None:
    """Irrevocably become ``user`` (None: stay who we are), with no capability and no way to gain one."""
    if _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL) < 0 and ctypes.get_errno() != errno.EINVAL:
        _check(-1, "ambient capabilities")
    for capability in range(_CAPABILITIES):
        if _prctl(_PR_CAPBSET_READ, capability) == 1:
            _check(_prctl(_PR_CAPBSET_DROP, capability), f"dropping capability {capability}")
    if user is not None:
        uid, gid = user
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    header = (ctypes.c_uint32 * 2)(_LINUX_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    _check(_libc.capset(header, nothing), "dropping capabilities")
    _check(_prctl(_PR_SET_NO_NEW_PRIVS, 1), "no_new_privs")


def _be_init() -> None:
    """The init of a PID namespace: say ``+`` once bound to the parent's life, then live as long as it does."""
    _check(_prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "parent death signal")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.write(1, b"+")
    os.close(1)
    while os.read(0, 1):
        pass


if __name__ == "__main__":
    _be_init()
