"""A cache of each node's own before storage: what it holds crosses no storage NIC, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator import metrics, verify
from emulator.cluster import open_cluster
from emulator.config import EngineConfig, ModelConfig, ReplayConfig, RunConfig, ScaleConfig
from emulator.deployment import Deployment
from emulator.fabric.fluid import FluidNetwork
from emulator.records import RunRecords
from emulator.report import setup_of
from emulator.roles.serving import Role
from emulator.sim import simulate
from emulator.systems import SYSTEMS
from emulator.workload import Workload
from tests.clusters import broken, config, conversation, expected_tokens
from tests.netns.lifecycle import Host, open_host
from topology.spec import ClusterSpec

from .sizes import gigabytes
from .virtual import client_of, disturbed

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


@pytest.mark.parametrize("direct", [False, True])
def test_a_de_that_reads_what_it_wrote_needs_no_storage(direct: bool) -> None:
    """One DE, reads on its side, nothing stored before: every hit is in its cache before it can be hit."""
    records = _run(4, 1000, path="de", de_direct=direct)
    assert metrics.pool_hit_ratio(records.requests) == 1
    assert _read(records) == 0


def test_a_pe_finds_what_it_read_before() -> None:
    """It has no part in writing: of each later turn's hit it has the hit of the turn before, and no more."""
    records = _run(4, 1000, path="pe", warm=True)
    turns = {(r.trajectory, r.turn): r for r in records.requests}
    for (trajectory, turn), r in turns.items():
        assert r.pool_tokens == (turns[trajectory, turn - 1].hit_tokens if turn else 0)
        assert r.pool_local_tokens == r.pool_tokens


def test_nobody_reads_another_nodes_cache() -> None:
    """Two PE nodes: what one has read helps the other nothing; no byte of a cache crosses the network."""
    alone, two = (_run(4, 1000, path="pe", warm=True, pe_nodes=nodes) for nodes in (1, 2))
    pes = {r.trajectory: set[str]() for r in two.requests}
    for r in two.requests:
        assert r.pe is not None
        pes[r.trajectory].add(r.pe.partition("/")[0])
    assert any(len(nodes) == 2 for nodes in pes.values())
    assert (metrics.pool_hit_ratio(two.requests) or 0) < (metrics.pool_hit_ratio(alone.requests) or 0)
    assert not any(row.transfer == "POOL" for node in two.nodes for row in node.sent)


def test_the_hit_ratio_falls_as_the_working_set_outgrows_the_cache() -> None:
    """More agents over the same caches: never more is found, and at last less than half as much."""
    ratios = [metrics.pool_hit_ratio(_run(agents, 40, warm=True).requests) or 0 for agents in (3, 6, 12, 24)]
    assert ratios == sorted(ratios, reverse=True)
    assert 1 > ratios[0] > 2 * ratios[-1]


def test_the_scheduler_knows_nothing_of_caches() -> None:
    """The policy is asked the same of the first requests: with caches, too, hits are queued as tokens to read."""
    first, second = (_run(6, blocks, warm=True) for blocks in (0, 1000))

    def opening(records: RunRecords) -> list[tuple[object, ...]]:
        decisions = [d for node in records.nodes for d in node.decisions]
        return [(d.request, d.pe, d.de, d.path, d.hit_blocks) for d in decisions[:6]]

    assert opening(first) == opening(second)


def test_the_same_seed_gives_the_same_records() -> None:
    """There is no chance in a cache."""
    first, again = (msgspec.json.encode(_run(6, 12, seed=5, warm=True)) for _ in range(2))
    assert first == again


@pytest.mark.parametrize("system", ["layerwise", "dualpath", "split"])
def test_real_attention_over_cached_blocks_is_exact(system: str) -> None:
    """The toy computes its tokens from KV that came from caches."""
    pytest.importorskip("torch", reason="torch, the extra `toy`, is not installed")
    toy = ModelConfig(name="toy", backend="toy")
    run = config(model=toy, engine={"prefix_cache_gb": gigabytes(30 * BLOCK)}, system=system, agents=3, warm=True)
    load = _load(3)
    records = simulate(run, load)
    assert sum(r.pool_tokens for r in records.requests) > 0
    assert broken(run, load, records) == []


@settings(max_examples=25)
@given(
    rounds=st.lists(
        st.lists(st.tuples(st.integers(1, 300), st.integers(0, 80)), min_size=1, max_size=4),
        min_size=1,
        max_size=5,
    ),
    blocks=st.integers(1, 30),
    system=st.sampled_from(CACHED),
    nodes=st.integers(1, 2),
    alike=st.booleans(),
    direct=st.booleans(),
    tight=st.booleans(),
)
def test_any_workload_is_served(
    rounds: list[list[tuple[int, int]]],
    blocks: int,
    system: str,
    nodes: int,
    alike: bool,
    direct: bool,
    tight: bool,
) -> None:
    """Whatever the lengths, caches and buffers, agents with one prompt too: tokens right, no invariant broken."""
    agents = [conversation("t0" if alike else f"t{at}", *each) for at, each in enumerate(rounds)]
    load = Workload(tuple(msgspec.structs.replace(agent, id=f"t{at}") for at, agent in enumerate(agents)))
    room = {key: gigabytes(26 * BLOCK) for key in ("pe_buffer_gb", "de_buffer_gb")} if tight else {}
    replay = {"system": system, "de_direct": direct, "warm": True, "agents": len(rounds)}
    run = _config(blocks, room, pe_nodes=nodes, de_nodes=nodes, **replay)
    assert broken(run, load, simulate(run, load)) == []


@settings(max_examples=20)
@given(
    at_s=st.floats(0, 1),
    given_up=st.lists(st.sampled_from(["t0:0", "t1:0", "t2:1", "t3:2"]), min_size=1, max_size=3, unique=True),
    system=st.sampled_from(["layerwise", "dualpath", "split"]),
)
def test_requests_given_up_at_any_moment_leave_no_pin(at_s: float, given_up: list[str], system: str) -> None:
    """A read that has begun ends, and lets go of what it found; caches' books agree with the requests'."""
    run, load = _config(20, system=system, agents=4, warm=True), _load(4)

    def give_up(network: FluidNetwork, roles: Mapping[str, Role]) -> None:
        for request in given_up:
            client_of(roles).give_up(request)

    records, left = disturbed(run, load, at_s, give_up)
    assert left == []
    assert broken(run, load, records) == []
    found = metrics.prefix_caches(records)
    assert found is not None
    assert (found.leases, found.pending) == (0, 0)


def test_what_is_cached_is_read_in_no_time() -> None:
    """Reads wait for nothing but their turn where the cache has all of them: later turns' reading ends at once."""
    for r in _run(1, 1000, path="de", warm=True).requests:
        assert r.read_s is not None and r.allocated_s is not None
        assert (r.read_s == r.allocated_s) == (r.turn > 0)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A state directory of the test's own, in which nothing is left behind."""
    with open_host(tmp_path / "state", monkeypatch) as found:
        yield found


@pytest.mark.root
def test_caches_on_links_keep_all_laws(host: Host) -> None:
    """Processes over shaped links, one after another in one cluster: each run begins with empty caches.

    Small ones, of which much gives way, and large ones: tokens and hits as in virtual time without any, what
    storage gave exactly what caches did not, and no pin left. A lone DE's large cache gives every hit.
    """
    spec = ClusterSpec(name="small", pe_nodes=1, de_nodes=1, gpus_per_node=1)
    scale, load = ScaleConfig(kv_bytes=16, dilation=1.0), _load(4)
    kinds: list[dict[str, Any]] = [{"path": "de"}, {"path": "pe", "warm": True}, {"system": "split"}, {}]
    replays = [ReplayConfig(agents=4, **kind) for kind in kinds]
    engines = [EngineConfig(prefix_cache_gb=gigabytes(blocks * BLOCK)) for blocks in (20, 1000)]

    async def replay_all(engine: EngineConfig) -> list[tuple[RunConfig, RunRecords]]:
        async with open_cluster(spec, engine=engine, model=ModelConfig(name="toy"), scale=scale) as cluster:
            runs = [msgspec.structs.replace(cluster.run, replay=replay) for replay in replays]
            with trio.fail_after(60):
                return [(run, (await cluster.replay(load, run.replay)).records) for run in runs]

    for engine in engines:
        done = trio.run(replay_all, engine)
        for run, records in done:
            evidence = verify.Evidence(
                setup=setup_of(run, "tcp"), records=records, expected=expected_tokens(run, load)
            )
            assert [f for f in verify.verify(evidence) if not f.ok] == []
            plain = simulate(msgspec.structs.replace(run, engine=EngineConfig()), load)
            assert _facts(records) == _facts(plain)
            found = metrics.prefix_caches(records)
            assert found is not None
            assert (found.leases, found.pending) == (0, 0)
            assert (found.evicted > 0) == (engine is engines[0])
        ratios = [metrics.pool_hit_ratio(records.requests) for _, records in done]
    assert ratios[0] == 1
    # Every turn's hit but what its predecessor wrote, which the PE has no part in: the same on both fabrics.
    assert ratios[1] == metrics.pool_hit_ratio(simulate(done[1][0], load).requests)
