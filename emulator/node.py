"""One node's process: ``python -m emulator.node NAME [UID GID]``, started by the supervisor.

It moves into an anonymous network namespace of its own, says so, gives up every privilege, and only then
imports what can be attacked or is slow: nothing of it needs a privilege, since the supervisor makes the links
from outside while the imports run. Standard library only above ``main``.
"""

from __future__ import annotations

import os
import sys

from topology.namespaces import CLONE_NEWNET, unshare

from .isolate import drop_privileges

__all__ = ["IN_NETNS", "main"]

IN_NETNS = b"netns\n"
"""What a node says before anything else: its network namespace is there to be given links."""


def main(argv: list[str]) -> None:
    """Isolate, announce, drop, then serve orders on standard input until its end."""
    name, *user = argv
    unshare(CLONE_NEWNET)
    os.write(1, IN_NETNS)
    drop_privileges((int(user[0]), int(user[1])) if user else None)

    import trio

    from .station import serve_station

    trio.run(serve_station, name)


if __name__ == "__main__":
    main(sys.argv[1:])
