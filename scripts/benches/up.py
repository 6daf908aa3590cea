"""`emulate up 2p4d`: how long until the network stands, all is ready, all is gone; and what is left."""

from __future__ import annotations

import json
import os
import secrets
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from .commands import Host, emulate, need_root
from .figures import Figure, show

__all__ = ["main"]

ROUNDS = 3
SETTLE_S = 2.0


def main(argv: Sequence[str]) -> int:
    """Three times up and down, then once up and kill -9 of the supervisor with a node stopped."""
    need_root("up")
    before = Host()
    network, ready, down = [], [], []
    for _ in range(ROUNDS):
        name = _name()
        began_s = time.monotonic()
        up = _up(name)
        ready.append(time.monotonic() - began_s)
        network.append(up["network_s"])
        began_s = time.monotonic()
        if emulate("down", name).returncode:
            raise SystemExit(f"emulate down {name}: failed")
        down.append(time.monotonic() - began_s)
    left = _left(before)
    name = _name()
    _up(name)
    status = json.loads(emulate("status", "--json").stdout)
    cluster = next(each for each in status["clusters"] if each["cluster"] == name)
    os.kill(cluster["nodes"]["pe0"], signal.SIGSTOP)
    began_s = time.monotonic()
    os.kill(cluster["supervisor"], signal.SIGKILL)
    gone_s = _until(lambda: not before.left_by(Host()), began_s)
    killed = before.left_by(Host())
    emulate("down", name)
    for line in (*left, *killed):
        print(f"left behind: {line}", file=sys.stderr)
    return show(
        [
            Figure("2p4d: network realised and read back, median", statistics.median(network), "s", high=1.5),
            Figure("2p4d: everything ready, command included", statistics.median(ready), "s", high=10),
            Figure("2p4d: down, command included", statistics.median(down), "s", high=2),
            Figure("links, namespaces, processes left by down", len(left), "", high=0),
            Figure("all gone after kill -9, a node stopped", gone_s, "s", high=SETTLE_S),
            Figure("links, namespaces, processes left by kill -9", len(killed), "", high=0),
        ],
        as_json="--json" in argv,
    )


def _name() -> str:
    return f"bench-{secrets.token_hex(4)}"


def _up(name: str) -> dict[str, float]:
    done = emulate("up", "2p4d", "--name", name, "--json")
    if done.returncode:
        raise SystemExit(f"emulate up 2p4d: exit code {done.returncode}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _left(before: Host) -> list[str]:
    """What is left once the kernel, which frees namespaces in the background, has had its time."""
    _until(lambda: not before.left_by(Host()), time.monotonic())
    return before.left_by(Host())


def _until(holds: Callable[[], bool], began_s: float) -> float:
    """Seconds since ``began_s`` at which ``holds``; infinity when it does not within twice the bound."""
    while time.monotonic() - began_s < 2 * SETTLE_S:
        if holds():
            return time.monotonic() - began_s
        time.sleep(0.02)
    return float("inf")
