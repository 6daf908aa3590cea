"""One node's process: ``python -m emulator.hosts.node NAME [UID GID]``, started by the supervisor.

It moves into an anonymous network namespace of its own, says so, gives up every privilege, and waits for its
links, which the supervisor makes from outside. Only then it imports what can be attacked or is slow, so that
ten nodes' imports do not compete with the making of the network. Standard library only above ``main``.
"""

from __future__ import annotations

import os
import select
import sys

from topology.namespaces import CLONE_NEWNET, unshare

from .isolate import drop_privileges

__all__ = ["IN_NETNS", "main"]

IN_NETNS = b"netns\n"
"""What a node says before anything else: its network namespace is there to be given links."""


def main(argv: list[str]) -> None:
    """Isolate, announce, drop, wait for links, then serve orders on standard input until its end."""
    name, *user = argv
    unshare(CLONE_NEWNET)
    os.write(1, IN_NETNS)
    drop_privileges((int(user[0]), int(user[1])) if user else None)
    # The first order says that the links are there; the end of the input says that nobody is.
    select.select([0], [], [])

    try:
        import trio

        from .station import serve_station
    except (ImportError, PermissionError) as error:
        if not user:
            raise
        # Under sudo, root's own Python may be closed to the caller. The last line of the log is what `up` says.
        sys.exit(
            f"uid {user[0]}, who called sudo, cannot load the emulator from {sys.prefix} ({error});"
            " let that user read it, and the Python it is made from, or run emulate as root without sudo"
        )

    trio.run(serve_station, name)


if __name__ == "__main__":
    main(sys.argv[1:])
