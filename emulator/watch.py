"""Is a run getting anywhere? On real links nobody else can tell a node that is stopped, or that waits for ever.

In virtual time the clock knows when nothing can happen any more. Elsewhere the client asks every node how far it
is, a few times while its patience lasts. Where requests are under way and all of them say the same for so long, or
one of them says nothing, the run ends with an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

import trio

from .deployment import Deployment
from .errors import EmulatorError
from .fabric.interface import Fabric
from .roles.messages import INQUIRE, Inquiry, Standing

__all__ = ["waiting_line", "watch"]

SHOWN = 8
"""Requests that a message lists."""

ROUNDS = 4
"""How often all are asked while the patience lasts."""


def waiting_line(waiting: Mapping[str, str]) -> str:
    """Requests and what each is doing, as one line."""
    shown = [f"{request} is {doing}" for request, doing in list(waiting.items())[:SHOWN]]
    more = len(waiting) - len(shown)
    return "; ".join([*shown, f"and {more} more requests wait"] if more else shown)


async def watch(
    deployment: Deployment, fabric: Fabric, under_way: Callable[[], bool], on_round: Callable[[], None]
) -> NoReturn:
    """Raise EmulatorError once nothing has got anywhere for the patience of the configuration.

    ``under_way``: whether there is any request at the moment. Times where there is none do not count.
    ``on_round``: told whenever all nodes have answered.
    """
    wall_s = deployment.config.engine.stall_s
    patience_s = wall_s / deployment.config.scale.dilation
    seen: list[int] = []
    since_s = fabric.now()
    while True:
        await fabric.sleep(patience_s / ROUNDS)
        standings = await _ask_all(deployment, fabric, patience_s, wall_s)
        on_round()
        steps = [standing.steps for standing in standings]
        if steps != seen or not under_way():
            seen, since_s = steps, fabric.now()
        elif fabric.now() - since_s >= patience_s:
            waiting: dict[str, str] = {}
            for standing in standings:
                waiting.update(standing.waiting)
            raise EmulatorError(f"no progress for {wall_s:g} s (stall_s): {waiting_line(waiting)}")


async def _ask_all(deployment: Deployment, fabric: Fabric, patience_s: float, wall_s: float) -> list[Standing]:
    """Every node's standing, PEs last: what a request does there is more than that its DE waits for it."""
    nodes = [node for role in ("storage", "scheduler", "de", "pe") for node in deployment.named(role)]
    heard: dict[str, Standing] = {}

    async def ask(node: str) -> None:
        heard[node] = await fabric.call(node, INQUIRE, Inquiry())
        if len(heard) == len(nodes):
            asking.cancel_scope.cancel()

    async with trio.open_nursery() as asking:
        for node in nodes:
            asking.start_soon(ask, node)
        await fabric.sleep(patience_s)
        asking.cancel_scope.cancel()
    silent = [node for node in nodes if node not in heard]
    if silent:
        raise EmulatorError(f"{', '.join(silent)}: no answer for {wall_s:g} s (stall_s); is it stopped?")
    return [heard[node] for node in nodes]
