"""Anonymous namespaces: make one, stand in one for a moment, find a process's.

A namespace made here has no name and no mount; it lives as long as a process, socket or file descriptor
refers to it, so that whoever dies takes it along. The standard library and ctypes only: a node's process
imports this before anything else. A namespace belongs to a *thread*: call from the main thread alone.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = [
    "CLONE_NEWNET",
    "CLONE_NEWNS",
    "CLONE_NEWPID",
    "CLONE_NEWUSER",
    "inside",
    "netns_fd_of_pid",
    "new_netns",
    "setns",
    "unshare",
]

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *args: int) -> None:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(f"{name}: namespaces are entered by the main thread only")
    if getattr(_libc, name)(*args) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """Move this thread into new namespaces of the kinds in ``flags``. OSError (EPERM without the right)."""
    _call("unshare", flags)


def setns(fd: int, kind: int = CLONE_NEWNET) -> None:
    """Move this thread into the namespace behind ``fd``, which must be of ``kind``. OSError."""
    _call("setns", fd, kind)


def netns_fd_of_pid(pid: int) -> int:
    """An open descriptor of that process's network namespace; the caller closes it. OSError."""
    return os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def new_netns() -> int:
    """Make an anonymous network namespace and leave the caller where it was; the caller closes the fd."""
    home = _own_netns()
    try:
        unshare(CLONE_NEWNET)
        try:
            return _own_netns()
        finally:
            setns(home)
    finally:
        os.close(home)


@contextmanager
def inside(fd: int) -> Iterator[None]:
    """Stand in the network namespace behind ``fd``: sockets opened and /proc/sys/net read here are its own.

    No await inside: under an event loop every other task would stand there too.
    """
    home = _own_netns()
    try:
        setns(fd)
        try:
            yield
        finally:
            setns(home)
    finally:
        os.close(home)


def _own_netns() -> int:
    """The calling *thread's* namespace; /proc/self would be the process's first thread's."""
    return os.open(Path("/proc/thread-self/ns/net"), os.O_RDONLY | os.O_CLOEXEC)
