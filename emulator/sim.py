"""A whole cluster in virtual time: every role in one nursery over the fluid fabric. No root, no network.

The roles are the very ones that run in namespaces; times are the model's own, so there is no dilation here.
Deterministic: the same configuration, workload and seed give the same records.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack

import msgspec

from .config import RunConfig
from .deployment import Deployment
from .errors import ConfigError, reported
from .fabric.clock import run_virtual
from .fabric.fluid import FluidNetwork, open_fluid
from .plan import emulated_rates
from .records import Decisions, RunRecords
from .serving import open_role
from .workload import Workload

__all__ = ["simulate"]

HORIZON_S = 1e7
"""Model seconds after which a simulation counts as one that does not end: four months."""


def simulate(
    config: RunConfig,
    workload: Workload,
    decisions: Decisions | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> RunRecords:
    """Replay ``workload`` in virtual time. Raises EmulatorError where a role does.

    ConfigError where a link is so slow that the run would not end before the horizon of virtual time.
    """
    _check_horizon(config, workload)
    virtual = msgspec.structs.replace(config, scale=msgspec.structs.replace(config.scale, dilation=1.0))
    try:
        return run_virtual(
            _simulate,
            virtual,
            workload,
            decisions,
            on_progress,
            seed=config.replay.seed,
            horizon_s=HORIZON_S,
        )
    except BaseExceptionGroup as group:
        error = reported(group)
        if error is None:
            raise
        raise error from group


def _check_horizon(config: RunConfig, workload: Workload) -> None:
    """Could the slowest link carry every request's whole context, one after the other, in time?"""
    deployment = Deployment(config)
    (node, nic), rate = min(emulated_rates(config).items(), key=lambda port: port[1])
    token_bytes = deployment.layout.layers * deployment.layout.kv_bytes
    tokens = sum(turn.total_tokens for trajectory in workload.trajectories for turn in trajectory.turns)
    needed_s = tokens * token_bytes / (rate * config.scale.dilation)
    if needed_s > HORIZON_S:
        raise ConfigError(
            f"{node} {nic}: at its rate this workload's contexts take {needed_s:.3g} s of model time, and virtual"
            f" time ends at {HORIZON_S:.0e} s; give the link a higher rate"
        )


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
