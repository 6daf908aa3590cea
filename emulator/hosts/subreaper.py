"""The parent of a supervisor, run as a script: ``python -I -S subreaper.py PROGRAM ARGUMENT...``

Whoever dies without having reaped its children leaves that to the host's first process, which may be slow or,
in a container, never do it; and an init is not gone before its namespace is reaped. This process is told of
the orphans instead (PR_SET_CHILD_SUBREAPER), so that a killed supervisor's nodes vanish at once, wherever.
It ends when everything below it has. The standard library only, and no more than it needs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["main"]

_PR_SET_CHILD_SUBREAPER = 36


def main(argv: list[str]) -> int:
    """Run a program, reap it and all its orphans; its exit code, 1 if a signal ended it. SIGTERM kills it."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)
    child = os.posix_spawn(argv[0], argv, os.environ)
    signal.signal(signal.SIGTERM, lambda signum, frame: os.kill(child, signal.SIGKILL))
    # Its input and output are the child's alone: their ends tell others of the child's end.
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    code = 1
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            return code
        if pid == child:
            code = os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1
            # Its pid may be another's from now on.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
