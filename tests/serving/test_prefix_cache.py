"""A cache of each node's own before storage: what it holds crosses no storage NIC, and nothing else changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from emulator import metrics
from emulator.config import ModelConfig, RunConfig
from emulator.deployment import Deployment
from emulator.records import RunRecords
from emulator.sim import simulate
from emulator.systems import SYSTEMS
from emulator.workload import Workload
from tests.clusters import broken, config, conversation

from .sizes import gigabytes

BLOCK = 64
CACHED = [name for name, system in SYSTEMS.items() if not system.pool]
READS = ("PE_READ", "DE_READ")


def _load(agents: int) -> Workload:
    """Three turns an agent, whose contexts come to hold 8, 11 and 13 full blocks."""
    return Workload(tuple(conversation(f"t{at}", (512, 10), (150, 40), (100, 20)) for at in range(agents)))


def _config(blocks: int, engine: Mapping[str, Any] | None = None, **replay: Any) -> RunConfig:
    """A run whose nodes keep ``blocks`` Full Blocks each."""
    size = {"prefix_cache_gb": gigabytes(blocks * BLOCK) if blocks else 0.0}
    return config(model=ModelConfig(name="toy"), engine=size | dict(engine or {}), **replay)


def _run(agents: int, blocks: int, **replay: Any) -> RunRecords:
    """A run of which every request is done and no invariant broken."""
    run, load = _config(blocks, agents=agents, **replay), _load(agents)
    assert Deployment(run).cache_blocks == blocks
    records = simulate(run, load)
    assert [r.status for r in records.requests] == ["done"] * (3 * agents)
    assert broken(run, load, records) == []
    return records


def _read(records: RunRecords) -> int:
    """Payload bytes that came from storage."""
    return sum(row.payload_bytes for node in records.nodes for row in node.received if row.transfer in READS)


def _facts(records: RunRecords) -> list[tuple[object, ...]]:
    return [(r.id, r.status, r.hit_tokens, r.persisted_tokens, r.model_tokens) for r in records.requests]


@pytest.mark.parametrize("system", CACHED)
@pytest.mark.parametrize("blocks", [1, 12, 1000])
def test_a_cache_changes_where_blocks_come_from_and_nothing_else(system: str, blocks: int) -> None:
    """Tokens, hits and what is persisted are those of a run without; storage gives what the cache did not."""
    plain, cached = (_run(6, size, system=system, warm=True) for size in (0, blocks))
    assert _facts(cached) == _facts(plain)
    given_by_cache = sum(r.pool_tokens for r in cached.requests)
    if not SYSTEMS[system].free:
        token_bytes = Deployment(_config(0)).layout.full_block_bytes // BLOCK
        assert _read(plain) - _read(cached) == given_by_cache * token_bytes
    found = metrics.prefix_caches(cached)
    assert found is not None
    assert found.total == 2 * blocks
    assert found.used <= found.total
    assert found.hits * BLOCK == given_by_cache
    assert found.looked_up * BLOCK == sum(r.hit_tokens for r in cached.requests)
    assert metrics.prefix_caches(plain) is None
