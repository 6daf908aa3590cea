"""Anonymous namespaces: made without moving the maker, entered for a moment, gone with their last holder."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from topology.namespaces import CLONE_NEWNET, inside, netns_fd_of_pid, new_netns, setns, unshare

pytestmark = pytest.mark.root


def here() -> str:
    return os.readlink("/proc/thread-self/ns/net")


def of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


def test_making_one_does_not_move_the_maker() -> None:
    """Each is new, and the caller stays at home."""
    home = here()
    made = [new_netns() for _ in range(3)]
    try:
        assert here() == home
        assert len({home, *map(of, made)}) == 4
    finally:
        for fd in made:
            os.close(fd)


def test_inside_is_left_whatever_happens() -> None:
    """Sockets and /proc/sys/net are the namespace's own inside; an exception still leads home."""
    home, fds = here(), len(os.listdir("/proc/self/fd"))
    fd = new_netns()
    try:
        with pytest.raises(KeyError), inside(fd):
            assert here() == of(fd)
            assert [name for _, name in socket.if_nameindex()] == ["lo"]
            assert os.listdir("/proc/sys/net/ipv4/conf").count("lo") == 1
            assert "cnic0" not in Path("/proc/thread-self/net/dev").read_text()
            raise KeyError
        assert here() == home
    finally:
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == fds


def test_a_process_namespace_is_found_by_its_pid() -> None:
    """And one that is not there is an error of the operating system."""
    fd = netns_fd_of_pid(os.getpid())
    try:
        assert of(fd) == os.readlink("/proc/self/ns/net")
    finally:
        os.close(fd)
    with pytest.raises(FileNotFoundError):
        netns_fd_of_pid(2**22 + 1)


def test_what_is_no_namespace_is_refused() -> None:
    """By the kernel, named by the call."""
    with open("/dev/null", "rb") as file, pytest.raises(OSError, match="setns"):
        setns(file.fileno())


def test_other_threads_are_refused() -> None:
    """A namespace belongs to a thread, so only the main one may move."""
    caught: list[str] = []

    def act() -> None:
        for attempt in (lambda: unshare(CLONE_NEWNET), new_netns):
            try:
                attempt()
            except RuntimeError as error:
                caught.append(str(error))

    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    assert len(caught) == 2
    assert all("main thread" in text for text in caught)
