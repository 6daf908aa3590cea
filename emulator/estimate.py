"""How long a replay will take, before it begins: a lower bound that costs nothing to compute.

Pure. Two bounds, each a part of what a real run waits for: the storage NICs must carry every hit once, and
no trajectory is faster than its own turns one after the other on an idle cluster. Queueing, batching and
transfers come on top, so a loaded run takes longer: half as long again is common.
"""

from __future__ import annotations

import msgspec

from .config import RunConfig
from .deployment import Deployment
from .plan import cluster_spec
from .workload import Trajectory, Workload

__all__ = ["Estimate", "estimate"]


class Estimate(msgspec.Struct, frozen=True):
    """Lower bounds in model seconds, the wall seconds that follow, and which bound it is."""

    storage_s: float
    serial_s: float
    dilation: float

    @property
    def wall_s(self) -> float:
        return self.dilation * max(self.storage_s, self.serial_s)

    @property
    def advice(self) -> str:
        """What would shorten it."""
        if self.serial_s > self.storage_s:
            return "the longest trajectory takes most of it: a smaller --max-len or --dilation shortens it"
        return "reading from storage takes most of it: fewer --agents or a smaller --max-len shorten it"


def estimate(run: RunConfig, workload: Workload) -> Estimate:
    """The bounds of a replay of ``workload`` as it is, arrivals included."""
    deployment = Deployment(run)
    spec = cluster_spec(run)
    snics = [port for port in spec.ports() if port.nic.kind == "snic" and port.node in _serving(run)]
    rates = [port.nic.rate_bytes_s for port in snics]
    # What is read on one side only is carried by that side's NICs alone.
    if deployment.reads in ("pe", "de"):
        rates = [port.nic.rate_bytes_s for port in snics if port.node.startswith(deployment.reads)]
    read_blocks = 0 if deployment.system.free else 1
    block_bytes = read_blocks * deployment.scale.model_bytes(deployment.layout.full_block_bytes)
    hits = [_hit_blocks(t, deployment.layout.block_tokens, run.replay.warm) for t in workload.trajectories]
    serial = [
        _serial_s(deployment, trajectory, blocks, block_bytes / max(rates))
        for trajectory, blocks in zip(workload.trajectories, hits, strict=True)
    ]
    return Estimate(
        storage_s=block_bytes * sum(map(sum, hits)) / sum(rates),
        serial_s=max(serial, default=0.0),
        dilation=run.scale.dilation,
    )


def _serving(run: RunConfig) -> set[str]:
    return {member.name for member in run.members if member.role in ("pe", "de")}


def _hit_blocks(trajectory: Trajectory, block_tokens: int, warm: bool) -> list[int]:
    """Full blocks that each turn finds committed if nothing but its own trajectory's past is shared."""
    blocks = [max(trajectory.turns[0].prompt_tokens - 1, 0) // block_tokens if warm else 0]
    for before, turn in zip(trajectory.turns, trajectory.turns[1:], strict=False):
        blocks.append(min(before.total_tokens, turn.prompt_tokens - 1) // block_tokens)
    return blocks


def _serial_s(deployment: Deployment, trajectory: Trajectory, hits: list[int], block_s: float) -> float:
    """One trajectory alone: read, prefill, decode, think, turn after turn.

    The experts of a group share its tokens evenly, and attention may be faster than the formula by what the
    hardware deviates.
    """
    costs, layers = deployment.costs, deployment.shape.layers
    fastest = 1 - deployment.config.engine.hardware_deviation
    pe_gpus, de_gpus = (
        len(engines) * costs.tensor_parallel for engines in deployment.expert_groups or (("",), ("",))
    )
    total_s = trajectory.turns[0].arrival_s or 0.0
    thinks = deployment.config.replay.think == "trace"
    for turn, blocks in zip(trajectory.turns, hits, strict=True):
        cached = deployment.hit_tokens(blocks)
        new = turn.prompt_tokens - cached
        middle = turn.prompt_tokens + turn.output_tokens // 2
        prefill_s = layers * (
            fastest * costs.attention_layer_s([(cached, new)]) + costs.rest_layer_s(new / pe_gpus)
        )
        step_s = costs.decode_attention_s([middle]) + costs.decode_rest_s(1 / de_gpus)
        total_s += blocks * block_s + prefill_s + turn.output_tokens * step_s
        total_s += turn.think_s if thinks else 0.0
    return total_s
