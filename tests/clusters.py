"""Small clusters and workloads for tests of whole runs in virtual time."""

from __future__ import annotations

from typing import Any

from emulator import verify
from emulator.config import EngineConfig, ModelConfig, ReplayConfig, RunConfig, ScaleConfig
from emulator.deployment import Deployment
from emulator.models.reference import reference_tokens
from emulator.plan import run_config
from emulator.records import RunRecords
from emulator.report import setup_of
from emulator.workload import Stream, Trajectory, Turn, Workload, request_id, seed_of
from topology.spec import ClusterSpec

__all__ = ["broken", "config", "conversation", "expected_tokens"]


def conversation(name: str, *rounds: tuple[int, int]) -> Trajectory:
    """A trajectory whose turn i appends and generates ``rounds[i]`` tokens."""
    turns, context = [], 0
    for index, (append, gen) in enumerate(rounds):
        turns.append(Turn(context + append, gen, arrival_s=None if index else 0.0))
        context += append + gen
    return Trajectory(name, tuple(turns), (Stream((context,), (seed_of(name),)),))


def config(
    *,
    pe_nodes: int = 1,
    de_nodes: int = 1,
    gpus: int = 2,
    engine: dict[str, Any] | None = None,
    model: ModelConfig | None = None,
    **replay: Any,
) -> RunConfig:
    """A run on a small cluster with the shape of DS 660B at one byte a token and layer."""
    spec = ClusterSpec(name="small", pe_nodes=pe_nodes, de_nodes=de_nodes, gpus_per_node=gpus)
    kind = model or ModelConfig()
    kv_bytes = 16 if kind.backend == "toy" else 1
    return run_config(
        spec,
        EngineConfig(**(engine or {})),
        kind,
        ScaleConfig(kv_bytes=kv_bytes),
        ReplayConfig(**replay),
    )


def expected_tokens(config: RunConfig, workload: Workload) -> dict[str, tuple[int, ...]]:
    """What a single process computes for every request."""
    return reference_tokens(
        Deployment(config).load_backend(),
        (
            (request_id(trajectory, turn), trajectory.id, trajectory.prompt(turn), trajectory.output(turn))
            for trajectory in workload.trajectories
            for turn in range(len(trajectory.turns))
        ),
    )


def broken(config: RunConfig, workload: Workload, records: RunRecords) -> list[str]:
    """The invariants that a run in virtual time breaks, as text; none for a good run."""
    evidence = verify.Evidence(
        setup=setup_of(config, "fluid"),
        records=records,
        expected=expected_tokens(config, workload),
    )
    return [f"{f.invariant}: {f.detail}" for f in verify.verify(evidence) if not f.ok]
