"""A whole cluster in virtual time: every role in one nursery over the fluid fabric. No root, no network.

The roles are the very ones that run in namespaces; times are the model's own, so there is no dilation here.
Deterministic: the same configuration, workload and seed give the same records.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack

import msgspec

from .config import RunConfig
from .errors import reported
from .fabric.clock import run_virtual
from .fabric.fluid import FluidNetwork, open_fluid
from .plan import emulated_rates
from .records import Decisions, RunRecords
from .serving import open_role
from .workload import Workload

__all__ = ["simulate"]


def simulate(
    config: RunConfig,
    workload: Workload,
    decisions: Decisions | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> RunRecords:
    """Replay ``workload`` in virtual time. Raises EmulatorError where a role does."""
    virtual = msgspec.structs.replace(config, scale=msgspec.structs.replace(config.scale, dilation=1.0))
    try:
        return run_virtual(_simulate, virtual, workload, decisions, on_progress, seed=config.replay.seed)
    except BaseExceptionGroup as group:
        error = reported(group)
        if error is None:
            raise
        raise error from group


async def _simulate(
    config: RunConfig,
    workload: Workload,
    decisions: Decisions | None,
    on_progress: Callable[[int, int], None] | None,
) -> RunRecords:
    # Without dilation an emulated rate is payload bytes per model second, which is what the fluid wants.
    network = FluidNetwork(
        emulated_rates(config),
        nodes=[member.name for member in config.members],
        rpc_latency_s=config.engine.rpc_latency_s,
    )
    async with open_fluid(network), AsyncExitStack() as stack:
        roles = {
            member.name: await stack.enter_async_context(
                open_role(config, member.name, network.fabric(member.name))
            )
            for member in config.members
        }
        client = next(roles[member.name].client for member in config.members if member.role == "client")
        await client.prepare(workload, decisions)
        t0_s, ended_s, requests = await client.replay(workload, on_progress)
        nodes = tuple(role.record() for role in roles.values())
    return RunRecords(t0_s=t0_s, ended_s=ended_s, requests=requests, nodes=nodes)
