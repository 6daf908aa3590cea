"""The prefill node's layer slots: no layer is overwritten before it has left, however slow the NICs are."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator.config import EngineConfig, ModelConfig, ReplayConfig, RunConfig, ScaleConfig
from emulator.deployment import LAYER_SLOTS, Deployment
from emulator.plan import run_config
from emulator.records import RunRecords
from emulator.sim import simulate
from emulator.workload import Workload
from topology.spec import ClusterSpec

from .clusters import broken, config, conversation

LOAD = Workload((conversation("a", (400, 3), (130, 2)), conversation("b", (300, 70), (64, 1))))


def _slow(cnic_gbps: float, path: str, **engine: float) -> RunConfig:
    """One GPU a node behind a compute NIC of this rate: below about 1 Gb/s it takes longer than the layers do."""
    spec = ClusterSpec(name="slow", pe_nodes=1, de_nodes=1, gpus_per_node=1, cnic_gbps=cnic_gbps)
    replay = ReplayConfig(path=path, warm=True)  # type: ignore[arg-type]
    return run_config(spec, EngineConfig(**engine), ModelConfig(), ScaleConfig(kv_bytes=1), replay)  # type: ignore[arg-type]


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([0.05, 0.3, 1.0, 5.0, 400.0]), st.sampled_from(["pe", "de"]))
def test_slots_are_reused_only_when_they_are_free(cnic_gbps: float, path: str) -> None:
    """Tokens stay the reference's where loads and outputs are slower than compute, faster, or alike."""
    run = _slow(cnic_gbps, path)
    assert broken(run, LOAD, simulate(run, LOAD)) == []


def test_a_slow_nic_holds_the_forward_pass_up() -> None:
    """Layers wait for their KV and for their slots: the pass is longer than its compute, by what the NIC takes."""

    def seconds(records: RunRecords) -> float:
        return sum(batch.ended_s - batch.started_s for node in records.nodes for batch in node.batches)

    fast, slow = (seconds(simulate(_slow(rate, "pe"), LOAD)) for rate in (400.0, 0.3))
    assert slow > 2 * fast


@pytest.mark.parametrize("path", ["pe", "de"])
def test_hbm_for_one_request_is_enough_for_all(path: str) -> None:
    """With HBM for the longest context alone, batches wait for the KV of those before them to be out."""
    run = config(gpus=1, path=path, warm=True)
    deployment = Deployment(run)
    longest = max(turn.prompt_tokens for trajectory in LOAD.trajectories for turn in trajectory.turns)
    hbm_gb = LAYER_SLOTS * (longest + 1) * deployment.shape.kv_bytes / 1e9
    tight = msgspec.structs.replace(run, engine=msgspec.structs.replace(run.engine, pe_hbm_kv_gb=hbm_gb))
    assert longest <= Deployment(tight).limits.pe_hbm_tokens <= longest + 1
    records = simulate(tight, LOAD)
    assert {request.status for request in records.requests} == {"done"}
    assert broken(tight, LOAD, records) == []
