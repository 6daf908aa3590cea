"""A cluster in virtual time to which something is done at a given moment, and what is left of it afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import trio

from emulator.config import RunConfig
from emulator.errors import EmulatorError, reported
from emulator.fabric.clock import run_virtual
from emulator.fabric.fluid import FluidNetwork
from emulator.records import RunRecords
from emulator.roles.client import Client
from emulator.roles.serving import Role
from emulator.sim import open_roles
from emulator.workload import Workload

__all__ = ["Act", "client_of", "disturbed", "left_over"]

Act = Callable[[FluidNetwork, Mapping[str, Role]], None]

SETTLE_S = 5.0
"""Model seconds after the last request in which every report has come to the scheduler."""


def client_of(roles: Mapping[str, Role]) -> Client:
    return roles["client"].client


def disturbed(config: RunConfig, load: Workload, at_s: float, act: Act) -> tuple[RunRecords, list[str]]:
    """Replay ``load``, doing ``act`` at ``at_s`` of the clock: the records, and what is left over.

    Raises the one error with which the run ended.
    """

    undilated = msgspec.structs.replace(config, scale=msgspec.structs.replace(config.scale, dilation=1.0))

    async def main() -> tuple[RunRecords, list[str]]:
        async with open_roles(undilated) as (network, roles), trio.open_nursery() as nursery:
            client = client_of(roles)
            await client.prepare(load)
            began_s = trio.current_time()

            async def do() -> None:
                await trio.sleep_until(began_s + at_s)
                act(network, roles)

            nursery.start_soon(do)
            t0_s, ended_s, requests = await client.replay(load)
            await trio.sleep(SETTLE_S)
            nursery.cancel_scope.cancel()
            nodes = tuple(role.record() for role in roles.values())
            left = left_over(roles)
        return RunRecords(t0_s=t0_s, ended_s=ended_s, requests=requests, nodes=nodes), left

    try:
        return run_virtual(main, seed=config.replay.seed, horizon_s=1e5)
    except BaseExceptionGroup as group:
        error = reported(group)
        if error is None:
            raise
        raise error from group


def left_over(roles: Mapping[str, Role]) -> list[str]:
    """What idle roles still hold: requests, memory, entries of the scheduler's books. Nothing, it should be."""
    left = []
    for node, role in roles.items():
        left += [f"{node}: {request} is {doing}" for request, doing in role.waiting().items()]
        left += [f"{node}: {name} {value}" for name, value in role.booked().items()]
        record = role.record()
        left += [f"{node}: {p.pool} {p.free} of {p.total}" for p in record.pools if p.free != p.total]
    return left


def failure(config: RunConfig, load: Workload, at_s: float, act: Act) -> EmulatorError | None:
    """The error with which a disturbed run ends; None where it comes to a good end."""
    try:
        disturbed(config, load, at_s, act)
    except EmulatorError as error:
        return error
    return None
