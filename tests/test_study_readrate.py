"""Laws of the measured read rate."""

from __future__ import annotations

from typing import Any

import pytest

from emulator.config import ModelConfig, RunConfig
from emulator.deployment import Deployment
from emulator.study.readrate import CONTEXT_TOKENS, REQUESTS, measure_read_rate

from .clusters import config
from .within import assert_within


def _rate(run: RunConfig) -> float:
    return Deployment(run).profile.read_tokens_per_s


@pytest.mark.parametrize("model", ["ds27b", "qwen32b"])
def test_a_node_reads_at_the_rate_of_its_storage_nic(model: str) -> None:
    """Thousands of blocks in a row: the profiled rate is reached to a per cent, and not passed."""
    run = config(gpus=8, model=ModelConfig(name=model))
    measured = measure_read_rate(run)
    assert measured.tokens == REQUESTS * CONTEXT_TOKENS == 64 * measured.blocks
    assert_within(measured.tokens_per_s, _rate(run), rel=0.01)
    assert measured.tokens_per_s <= _rate(run)


def test_what_stands_between_is_measured() -> None:
    """A slow request for blocks is not in the NIC's rate, but in what was measured."""
    slow = config(engine={"rpc_latency_s": 0.1})
    assert measure_read_rate(slow).tokens_per_s < 0.8 * _rate(slow)


def test_one_node_alone_is_measured() -> None:
    """A second node of each kind changes nothing."""
    assert measure_read_rate(config(pe_nodes=2, de_nodes=2)) == measure_read_rate(config())


@pytest.mark.parametrize(
    "engine", [{"pe_buffer_gb": 0.5}, {"de_buffer_gb": 0.5}, {"de_hbm_kv_gb": 0.5}, {"block_tokens": 3000}]
)
def test_contexts_are_cut_to_the_memory_there_is(engine: dict[str, Any]) -> None:
    """Small buffers or large blocks mean shorter contexts, which all fit at once: reading never stops."""
    run = config(engine=engine)
    measured = measure_read_rate(run)
    assert 0 < measured.tokens < REQUESTS * CONTEXT_TOKENS
    assert measured.tokens == measured.blocks * run.engine.block_tokens
    assert_within(measured.tokens_per_s, _rate(run), rel=0.1)
