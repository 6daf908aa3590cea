"""A whole cluster in virtual time: every role in one nursery over the fluid fabric. No root, no network.

The roles are the very ones that run in namespaces; times are the model's own, so there is no dilation here.
Deterministic: the same configuration, workload and seed give the same records.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from topology.lanes import LaneName, LaneShares

from .config import RunConfig
from .deployment import Deployment
from .errors import ConfigError, EmulatorError, reported
from .fabric.clock import SimulationStuck, run_virtual
from .fabric.fluid import FluidNetwork, open_fluid
from .fabric.interface import VirtualLane
from .fabric.maxmin import LaneRule
from .fabric.wiring import DRAM, pcie_of
from .plan import cluster_spec, emulated_rates, lane_map, local_rates, pace_of
from .records import Decisions, RunRecords
from .roles.serving import Role, open_role
from .shaper import open_paced
from .watch import waiting_line
from .workload import Workload

__all__ = ["fluid_network", "lane_rules", "open_roles", "simulate"]

HORIZON_S = 1e7
"""Model seconds after which a simulation counts as one that does not end: four months."""


def simulate(
    config: RunConfig,
    workload: Workload,
    decisions: Decisions | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> RunRecords:
    """Replay ``workload`` in virtual time.

    EmulatorError where a role raises one, or where nothing can ever happen any more: then it says which requests
    wait, and for what. ConfigError where a link is so slow that the run would not end before the horizon of
    virtual time.
    """
    virtual = msgspec.structs.replace(config, scale=msgspec.structs.replace(config.scale, dilation=1.0))
    _check_horizon(virtual, workload)
    roles: dict[str, Role] = {}

    def account() -> str:
        # The PEs come last: what a request does there is more than that its DE waits for it.
        waiting: dict[str, str] = {}
        for role in ("scheduler", "de", "pe"):
            for member in config.members:
                if member.role == role and member.name in roles:
                    waiting.update(roles[member.name].waiting())
        return waiting_line(waiting)

    try:
        return run_virtual(
            _simulate,
            virtual,
            workload,
            decisions,
            on_progress,
            roles,
            seed=config.replay.seed,
            horizon_s=HORIZON_S,
            account=account,
        )
    except SimulationStuck as stuck:
        if not stuck.account:
            raise
        raise EmulatorError(f"the run cannot go on: {stuck.account}") from stuck
    except BaseExceptionGroup as group:
        error = reported(group)
        if error is None:
            raise
        raise error from group


def _check_horizon(config: RunConfig, workload: Workload) -> None:
    """Could the slowest link, or DRAM, carry every request's whole context, one after the other, in time?

    ``config`` is not dilated.
    """
    deployment = Deployment(config)
    rates = dict(emulated_rates(config))
    for member in config.members:
        local = local_rates(config, member.name)
        rates |= {(member.name, pcie_of(nic)): rate for nic, rate in local.pcie.items()}
        if local.dram is not None:
            rates[member.name, DRAM] = local.dram
    (node, nic), rate = min(rates.items(), key=lambda port: port[1])
    token_bytes = deployment.layout.layers * deployment.layout.kv_bytes
    tokens = sum(turn.total_tokens for trajectory in workload.trajectories for turn in trajectory.turns)
    needed_s = tokens * token_bytes / rate
    if needed_s > HORIZON_S:
        raise ConfigError(
            f"{node} {nic}: at its rate this workload's contexts take {needed_s:.3g} s of model time, and virtual"
            f" time ends at {HORIZON_S:.0e} s; give it a higher rate"
        )


def fluid_network(config: RunConfig) -> FluidNetwork:
    """The cluster's network in virtual time: every NIC as shaped, and what binds inside nodes.

    ``config`` is not dilated, so that an emulated rate is payload bytes per model second.
    """
    local = {member.name: local_rates(config, member.name) for member in config.members}
    return FluidNetwork(
        emulated_rates(config),
        nodes=[member.name for member in config.members],
        shares=lane_rules(cluster_spec(config).lanes),
        rpc_latency_s=config.engine.rpc_latency_s,
        lane_map=lane_map(config.replay),
        dram={node: rates.dram for node, rates in local.items() if rates.dram is not None},
        pcie={(node, nic): rate for node, rates in local.items() for nic, rate in rates.pcie.items()},
    )


def lane_rules(shares: LaneShares) -> dict[VirtualLane, LaneRule]:
    """The shares of the shaped links as the fluid fabric takes them."""
    names: dict[VirtualLane, LaneName] = {
        VirtualLane.MODEL: "high",
        VirtualLane.KV: "kv",
        VirtualLane.CONTROL: "control",
    }
    return {
        lane: LaneRule(shares.share(name), (how := shares.borrowing(name)).prio, how.quantum_bytes)
        for lane, name in names.items()
    }


@asynccontextmanager
async def open_roles(config: RunConfig) -> AsyncIterator[tuple[FluidNetwork, Mapping[str, Role]]]:
    """All roles of a cluster by node, and the network that joins them. ``config`` is not dilated."""
    network = fluid_network(config)
    async with open_fluid(network), AsyncExitStack() as stack:
        roles = {}
        for name in (member.name for member in config.members):
            fabric = await stack.enter_async_context(open_paced(network.fabric(name), pace_of(config, name)))
            roles[name] = await stack.enter_async_context(open_role(config, name, fabric))
        yield network, roles


async def _simulate(
    config: RunConfig,
    workload: Workload,
    decisions: Decisions | None,
    on_progress: Callable[[int, int], None] | None,
    opened: dict[str, Role],
) -> RunRecords:
    async with open_roles(config) as (_, roles):
        opened.update(roles)
        client = next(roles[member.name].client for member in config.members if member.role == "client")
        await client.prepare(workload, decisions)
        t0_s, ended_s, requests = await client.replay(workload, on_progress)
        nodes = tuple(role.record() for role in roles.values())
    return RunRecords(t0_s=t0_s, ended_s=ended_s, requests=requests, nodes=nodes)
