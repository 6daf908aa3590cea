"""The same failures on a real cluster in namespaces: shaped links, one process a node."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from emulator import verify
from emulator.cluster import Cluster, open_cluster
from emulator.config import EngineConfig, ModelConfig, ReplayConfig, ScaleConfig
from emulator.errors import EmulatorError
from emulator.hosts.control import LiveRun
from emulator.records import RunRecords
from emulator.report import setup_of
from emulator.sim import simulate
from emulator.workload import Workload
from tests.clusters import conversation, expected_tokens
from tests.netns.lifecycle import LONG, Host, open_host, sending
from topology.spec import ClusterSpec

from .sizes import gigabytes

pytestmark = pytest.mark.root

SPEC = ClusterSpec(name="small", pe_nodes=1, de_nodes=1, gpus_per_node=1)
SCALE = ScaleConfig(kv_bytes=16, dilation=1.0)
TOY = ModelConfig(name="toy")
BLOCK = 64


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A state directory of the test's own, in which nothing is left behind."""
    with open_host(tmp_path / "state", monkeypatch) as found:
        yield found


def _faults(cluster: Cluster, replay: ReplayConfig, load: Workload, live: LiveRun) -> list[str]:
    config = msgspec.structs.replace(cluster.run, replay=replay)
    evidence = verify.Evidence(
        setup=setup_of(config, "tcp"), records=live.records, expected=expected_tokens(config, load)
    )
    return [f"{f.invariant}: {f.detail}" for f in verify.verify(evidence) if not f.ok]


def _facts(records: RunRecords) -> list[tuple[object, ...]]:
    return [(r.id, r.status, r.hit_tokens, r.persisted_tokens, r.model_tokens) for r in records.requests]


def test_memory_that_is_just_enough_and_chunks_change_nothing_but_time(host: Host) -> None:
    """Tight buffers and small chunks on links: hits and tokens as in virtual time with neither; no pool leaks.

    A request that can never fit is refused; all others complete, whichever side reads, and wherever KV lands.
    """
    engine = EngineConfig(
        de_buffer_gb=gigabytes(6 * BLOCK),
        pe_buffer_gb=gigabytes(4 * BLOCK),
        de_hbm_kv_gb=gigabytes(9 * BLOCK),
        batch_tokens=50,
    )
    load = Workload(
        (
            conversation("big", (500, 20), (10, 1)),
            *(conversation(f"small{at}", (200 + at, 70), (64, 3)) for at in range(4)),
        )
    )
    kinds: list[dict[str, Any]] = [{"path": "pe"}, {"path": "de"}, {"system": "split"}, {"de_direct": True}]
    replays = [ReplayConfig(warm=True, agents=5, **kind) for kind in kinds]

    async def replay_all() -> tuple[Cluster, list[LiveRun]]:
        async with open_cluster(SPEC, engine=engine, model=TOY, scale=SCALE) as cluster:
            with trio.fail_after(60):
                return cluster, [await cluster.replay(load, replay) for replay in replays]

    cluster, lives = trio.run(replay_all)
    whole = msgspec.structs.replace(engine, batch_tokens=1 << 20)
    for replay, live in zip(replays, lives, strict=True):
        assert _faults(cluster, replay, load, live) == []
        assert [r.status for r in live.records.requests] == ["failed", "cancelled", *["done"] * 8]
        run = msgspec.structs.replace(cluster.run, engine=whole, replay=replay)
        assert _facts(live.records) == _facts(simulate(run, load))


async def test_requests_given_up_on_links_leave_nothing_behind(host: Host) -> None:
    """A timeout that some turns meet: others are cancelled in whatever state, tokens are right, pools whole."""
    spec = msgspec.structs.replace(SPEC, snic_gbps=0.02, cnic_gbps=2.0)
    engine = EngineConfig(
        de_buffer_gb=gigabytes(24 * BLOCK),
        pe_buffer_gb=gigabytes(12 * BLOCK),
        de_hbm_kv_gb=gigabytes(36 * BLOCK),
        batch_tokens=200,
        request_timeout_s=0.25,
    )
    load = Workload(tuple(conversation(f"t{at}", (700, 20 + 30 * at), (70, 10)) for at in range(10)))
    async with open_cluster(spec, engine=engine, model=TOY, scale=SCALE) as cluster:
        for kind in ({"path": "pe"}, {"path": "auto"}, {"de_direct": True}):
            replay = ReplayConfig(warm=True, agents=10, **kind)
            with trio.fail_after(60):
                live = await cluster.replay(load, replay)
            assert _faults(cluster, replay, load, live) == []
            status = [r.status for r in live.records.requests]
            assert set(status) <= {"done", "cancelled"}
            assert "cancelled" in status


async def test_a_killed_process_ends_the_run_with_its_name(host: Host) -> None:
    """SIGKILL of a PE or a storage node in the middle: one line that names it, within seconds."""

    async def kill(node: str) -> None:
        async with open_cluster(SPEC, model=TOY, scale=SCALE) as cluster:
            pid = host.pid(cluster.name, node)

            with pytest.raises(EmulatorError, match=rf"{node}.*SIGKILL") as caught:
                await cluster.replay(LONG, ReplayConfig(agents=1), on_progress=sending(pid, signal.SIGKILL))
            assert "\n" not in caught.value.text

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill, "pe0")
            nursery.start_soon(kill, "st1")


async def test_a_stopped_process_ends_the_run_with_its_name(host: Host) -> None:
    """SIGSTOP before a replay or in it: after ``stall_s`` one line that names the node, and no hang.

    Three clusters at once, since most of it is waiting.
    """

    async def stop(node: str, *, before: bool) -> None:
        async with open_cluster(SPEC, engine=EngineConfig(stall_s=4.0), model=TOY, scale=SCALE) as cluster:
            pid = host.pid(cluster.name, node)

            if before:
                os.kill(pid, signal.SIGSTOP)
            with pytest.raises(EmulatorError, match=rf"{node}: no answer for \d+ s \(.*stall_s\)"):
                await cluster.replay(LONG, ReplayConfig(agents=1), on_progress=sending(pid, signal.SIGSTOP))

    with trio.fail_after(90):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(stop, "pe0", before=True))
            nursery.start_soon(partial(stop, "de0", before=False))
            nursery.start_soon(partial(stop, "client", before=False))
