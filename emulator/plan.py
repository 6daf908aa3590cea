"""From a cluster description to what its parts are given: members for roles, addresses and rates for the network.

Pure but for reading the user's files. The only place besides the supervisor where ``topology``'s values meet
``emulator``'s.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from topology.spec import AddressPlan, ClusterSpec

from .config import EngineConfig, Member, ModelConfig, ReplayConfig, RunConfig, ScaleConfig
from .deployment import Deployment
from .errors import ConfigError
from .fabric.interface import VirtualLane
from .fabric.localbus import LocalRates
from .shaper import Pace

__all__ = [
    "cluster_spec",
    "emulated_rates",
    "lane_map",
    "local_rates",
    "members_of",
    "model_file",
    "pace_of",
    "run_config",
]


def members_of(spec: ClusterSpec) -> tuple[Member, ...]:
    """The cluster's nodes as roles know them."""
    return tuple(
        Member(
            node.name,
            node.role,
            len(node.engines),
            sum(nic.rate_bytes_s for nic in node.nics if nic.kind == "snic"),
        )
        for node in spec.nodes
    )


def run_config(
    spec: ClusterSpec,
    engine: EngineConfig,
    model: ModelConfig,
    scale: ScaleConfig,
    replay: ReplayConfig | None = None,
) -> RunConfig:
    """The configuration of a run on ``spec``; a model or cost file is named by its absolute path from here on.

    Raises ConfigError for a model, scale or cost table that cannot be, TopologyError for a cluster that the
    address plan has no room for: before anything is started.
    """
    AddressPlan(spec)
    run = RunConfig(
        topology=msgspec.to_builtins(spec),
        members=members_of(spec),
        engine=engine,
        model=_absolute(model),
        scale=scale,
        replay=replay or ReplayConfig(),
    )
    deployment = Deployment(run)
    # Reads the model's cost table, which is the user's file.
    assert deployment.costs
    return run


def model_file(model: ModelConfig) -> Path | None:
    """The user's own file that describes the model; None for a bundled shape."""
    return Path(model.name) if "/" in model.name or model.name.endswith(".toml") else None


def _absolute(model: ModelConfig) -> ModelConfig:
    """Other processes stand in other directories."""
    own = model_file(model)
    try:
        return msgspec.structs.replace(
            model,
            name=model.name if own is None else os.path.abspath(own),
            costs=os.path.abspath(model.costs) if model.costs else "",
        )
    except FileNotFoundError:
        named = " and ".join(str(given) for given in (own, model.costs) if given)
        raise ConfigError(
            f"model {named}: there is no working directory any more; give an absolute path"
        ) from None


def cluster_spec(run: RunConfig) -> ClusterSpec:
    """The cluster description inside a run's configuration."""
    return msgspec.convert(run.topology, ClusterSpec)


def emulated_rates(run: RunConfig) -> dict[tuple[str, str], float]:
    """(node, NIC) -> payload bytes per wall second, each direction: what the kernel is to give every port."""
    scale = Deployment(run).scale
    return {
        (port.node, port.nic.name): scale.emulated_rate(port.nic.rate_bytes_s)
        for port in cluster_spec(run).ports()
    }


def local_rates(run: RunConfig, node: str) -> LocalRates:
    """What binds inside ``node``: the DRAM of one that serves, its GPUs' PCIe links where CUDA copies use them.

    A GPU's PCIe link is faster than its CNIC and carries nothing else, so that it is left out unless copies go
    over it. Rates are payload bytes per model second, whatever the dilation.
    """
    (member,) = (member for member in run.members if member.name == node)
    if member.role not in ("pe", "de"):
        return LocalRates()
    scale, engine = Deployment(run).scale, run.engine
    links = member.engines if run.replay.copies == "cuda" else 0
    pcie = scale.payload_rate(engine.pcie_gbps * 1e9 / 8)
    return LocalRates(scale.payload_rate(engine.dram_gbps * 1e9 / 8), {f"cnic{gpu}": pcie for gpu in range(links)})


def lane_map(replay: ReplayConfig) -> dict[VirtualLane, VirtualLane]:
    """Which lane really carries what is asked to go on another: without lanes everything shares that of KV."""
    return {} if replay.qos == "lanes" else {VirtualLane.MODEL: VirtualLane.KV}


def pace_of(run: RunConfig, node: str) -> Pace | None:
    """How ``node`` paces its KV where software is to keep it out of the way of collectives; else None."""
    if run.replay.qos != "software":
        return None
    rates = {
        nic: rate * run.scale.dilation
        for (owner, nic), rate in emulated_rates(run).items()
        if owner == node and nic.startswith("cnic")
    }
    return Pace(rates, cluster_spec(run).lanes.kv, run.engine.shaper_tick_s)
