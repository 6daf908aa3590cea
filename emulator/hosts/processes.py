"""Acting on the processes of a recorded cluster: end it, or enter one of its nodes.

A process is signalled or entered only after the kernel has shown it to be the recorded one. Light on purpose:
`emulate down` and `emulate exec` load no trio and no numpy.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from topology.namespaces import CLONE_NEWNET, CLONE_NEWPID, CLONE_NEWUSER, setns

from ..errors import EmulatorError
from .state import ClusterDir, ClusterState, ProcessId

__all__ = ["clear_up", "run_in_node", "take_down"]

_GRACE_S = 3.0
_KILL_S = 3.0
_POLL_S = 0.01
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP)
_NOT_YOURS = "cluster {} belongs to another user"


def take_down(directory: ClusterDir) -> bool:
    """End a cluster and remove its directory; False when there was nothing. Blocks until all is gone.

    A process is signalled only through a pidfd that is proven to be the recorded one. EmulatorError when it
    belongs to somebody else or will not end.
    """
    state = directory.read()
    supervisor = directory.supervisor()
    if supervisor is not None:
        _end(supervisor, directory.name)
        processes = [p for p in (state.init, *state.nodes.values()) if p] if state else []
        deadline_s = time.monotonic() + _KILL_S
        while any(process.alive for process in processes):
            if time.monotonic() > deadline_s:
                raise EmulatorError(f"cluster {directory.name}: processes are left after its supervisor ended")
            time.sleep(_POLL_S)
    there = directory.exists
    if not clear_up(directory):
        raise EmulatorError(f"cluster {directory.name} is being brought up by another process")
    return there or supervisor is not None


def clear_up(directory: ClusterDir) -> bool:
    """Remove what a dead supervisor left; False while the name is another's, who is left alone."""
    if not directory.exists:
        return True
    claim = directory.claim()
    if claim is not None:
        claim.release()
    return claim is not None


def _end(supervisor: ProcessId, name: str) -> None:
    with supervisor.hold() as pidfd:
        if pidfd is None:
            return
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        for signum, patience_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _KILL_S)):
            try:
                signal.pidfd_send_signal(pidfd, signum)
            except ProcessLookupError:
                return
            except PermissionError:
                raise EmulatorError(f"{_NOT_YOURS.format(name)} (pid {supervisor.pid})") from None
            if poll.poll(1e3 * patience_s):
                return
    raise EmulatorError(f"cluster {name}: its supervisor (pid {supervisor.pid}) does not end")


def run_in_node(state: ClusterState, node: str, command: Sequence[str]) -> int:
    """Run a command in a node's network namespace and return its exit code, 128 + n for signal n.

    It runs as the caller, in the cluster's PID namespace, so that it ends with the cluster. As in a shell,
    127 means that the program was not found and 126 that it could not be run. The calling process is left
    in the node's namespaces: it is good for nothing else afterwards.
    """
    process = state.nodes.get(node)
    if process is None:
        raise EmulatorError(f"no node {node!r} in cluster {state.cluster}; nodes: {', '.join(state.nodes)}")
    kinds = {"user": CLONE_NEWUSER} if os.geteuid() != 0 else {}
    kinds |= {"pid": CLONE_NEWPID, "net": CLONE_NEWNET}
    with contextlib.ExitStack() as stack:
        opened = []
        for name, kind in kinds.items():
            try:
                fd = os.open(f"/proc/{process.pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                break
            except PermissionError:
                raise EmulatorError(_NOT_YOURS.format(state.cluster)) from None
            stack.callback(os.close, fd)
            opened.append((fd, kind))
        # Asked after opening, so that the descriptors are this very process's and no successor's.
        if len(opened) < len(kinds) or not process.alive:
            raise EmulatorError(f"{node}: the node has ended")
        try:
            for fd, kind in opened:
                setns(fd, kind)
        except PermissionError:
            raise EmulatorError(_NOT_YOURS.format(state.cluster)) from None
    try:
        code = _call(command)
    except FileNotFoundError:
        print(f"emulate: {command[0]}: not found", file=sys.stderr)
        return 127
    except OSError as error:
        print(f"emulate: {command[0]}: {error.strerror}", file=sys.stderr)
        return 126
    return 128 - code if code < 0 else code


def _call(command: Sequence[str]) -> int:
    """Run a command and return its code. What would end this process by itself is passed on to the command."""
    received: list[int] = []
    for signum in _PASSED_ON:
        signal.signal(signum, lambda number, frame: received.append(number))
    # A handler, unlike SIG_IGN, is not inherited: the terminal's Ctrl-C reaches the command alone.
    signal.signal(signal.SIGINT, lambda signum, frame: None)
    with subprocess.Popen(command) as process:

        def pass_on(signum: int, frame: FrameType | None) -> None:
            process.send_signal(signum)

        for signum in _PASSED_ON:
            signal.signal(signum, pass_on)
        # Those that came while the command was being started.
        for number in received:
            process.send_signal(number)
        return process.wait()
