"""Replays on a live cluster: the records of all processes, and no failure that harms the next run."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing

from emulator.cluster import open_cluster
from emulator.config import ReplayConfig, RunConfig, ScaleConfig
from emulator.errors import EmulatorError
from emulator.hosts.control import LiveRun
from emulator.hosts.state import ProcessId
from emulator.records import Decision, Decisions
from emulator.sim import simulate
from emulator.steps import step_payload
from emulator.workload import Workload
from tests.clusters import conversation
from topology.spec import ClusterSpec

from .lifecycle import LONG, Host, open_host, sending

pytestmark = pytest.mark.root

SPEC = ClusterSpec(name="small", pe_nodes=1, de_nodes=1, gpus_per_node=1)
LOAD = Workload((conversation("a", (700, 3), (100, 2)), conversation("b", (300, 2), (64, 1))))
SCALE = ScaleConfig(kv_bytes=1, dilation=1.0)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A state directory of the test's own, in which nothing is left behind."""
    with open_host(tmp_path / "state", monkeypatch) as found:
        yield found


def _check(live: LiveRun) -> None:
    records = live.records
    assert [r.status for r in records.requests] == ["done"] * 4
    assert live.network_faults == ()
    assert {n.node for n in records.nodes} == {"pe0", "de0", "st0", "st1", "sched", "client"}
    assert all(n.host is not None and n.host.cpu_s > 0 for n in records.nodes)
    moved = sum(
        lane.sent_bytes - before.lane(lane.lane).sent_bytes
        for before, after in zip(live.before, live.after, strict=True)
        for lane in after.lanes
    )
    assert moved > sum(t.payload_bytes for n in records.nodes for t in n.sent)


def test_a_cluster_replays_again_and_again(host: Host) -> None:
    """Each replay stands for itself: all done, kernel counters, and the bytes per step of the simulation."""
    replays = [ReplayConfig(path="pe", agents=2, warm=True), ReplayConfig(path="de", agents=2, warm=True)]
    seen: list[tuple[int, int]] = []

    def on_progress(done: int, total: int) -> None:
        seen.append((done, total))

    async def replay_all() -> tuple[RunConfig, list[LiveRun]]:
        async with open_cluster(SPEC, scale=SCALE) as cluster:
            return cluster.run, [await cluster.replay(LOAD, r, on_progress=on_progress) for r in replays]

    run, lives = trio.run(replay_all)
    assert seen and all(0 < done <= total == 4 for done, total in seen)
    for replay, live in zip(replays, lives, strict=True):
        _check(live)
        config = msgspec.structs.replace(run, replay=replay)
        assert step_payload(live.records) == step_payload(simulate(config, LOAD))


async def test_a_failed_run_leaves_the_cluster_ready(host: Host) -> None:
    """Decisions that cannot be followed fail the run with the node's own words; the next run is whole."""
    replay = ReplayConfig(agents=2)
    impossible = Decisions((Decision("a:0", "pe9/0", "de0/0", "pe", 0),), ())
    async with open_cluster(SPEC, scale=SCALE) as cluster:
        with trio.fail_after(30), pytest.raises(EmulatorError):
            await cluster.replay(LOAD, replay, decisions=impossible)
        _check(await cluster.replay(LOAD, replay))


async def test_a_cancelled_run_leaves_the_cluster_ready(host: Host) -> None:
    """Hanging up in the middle withdraws the run; another is refused meanwhile, and served afterwards."""
    async with open_cluster(SPEC, scale=SCALE) as cluster:
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:

                def first_progress(done: int, total: int) -> None:
                    nursery.cancel_scope.cancel()

                nursery.start_soon(
                    lambda: cluster.replay(LONG, ReplayConfig(agents=1), on_progress=first_progress)
                )
                await trio.testing.wait_all_tasks_blocked(0.05)
                with pytest.raises(EmulatorError, match="busy"):
                    await cluster.replay(LOAD, ReplayConfig(agents=2))
        with trio.fail_after(60):
            while True:
                try:
                    live = await cluster.replay(LOAD, ReplayConfig(agents=2))
                    break
                except EmulatorError as error:
                    # The nodes are still leaving the withdrawn run.
                    assert "busy" in error.text
                    await trio.sleep(0.05)
        _check(live)


async def test_a_dead_node_fails_the_run_and_ends_the_cluster(host: Host) -> None:
    """SIGKILL of a node in the middle: an error that names it, no hang, nothing left."""
    with trio.fail_after(60):
        async with open_cluster(SPEC, scale=SCALE) as cluster:
            node = host.pid(cluster.name, "de0")

            with pytest.raises(EmulatorError, match=r"de0.*SIGKILL"):
                await cluster.replay(LONG, ReplayConfig(agents=1), on_progress=sending(node, signal.SIGKILL))


def test_run_compares_the_paths_and_cleans_up(host: Host, tmp_path: Path) -> None:
    """`emulate run` with two paths: one object, all done, equal tokens; both run directories verify."""
    (tmp_path / "small.toml").write_text(
        "[cluster]\npe_nodes = 1\nde_nodes = 1\ngpus_per_node = 1\n[scale]\nkv_bytes = 1\ndilation = 0.5\n"
    )
    arguments = ("--agents", "2", "--max-len", "900", "--warm", "--path", "pe", "--path", "de")
    done = host.run(
        "run", str(tmp_path / "small.toml"), *arguments, "--out", str(tmp_path / "out"), "--json", code=None
    )
    # Whether the machine kept up is not this test's subject: 3 says that it did not.
    assert done.returncode in (0, 3), done.stderr
    assert "estimate" in done.stderr
    runs = json.loads(done.stdout)["runs"]
    assert [run["path"] for run in runs] == ["pe", "de"]
    for run in runs:
        assert run["tokens_equal"] is True and run["fabric"] == "tcp"
        assert run["requests"]["done"] == run["requests"]["total"] > 2
        host.run("verify", run["out"])
    assert runs[0]["path_share"]["pe"] == 1 and runs[1]["path_share"]["de"] == 1


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_run_interrupted_takes_its_cluster_along(host: Host, signum: signal.Signals) -> None:
    """A signal in the middle of a replay: the cluster goes with the command that made it. SIGINT exits 130."""
    with host.start("run", "1p1d", "--name", "mine", "--agents", "2") as process:
        while not (host.root / "mine" / "runs" / "1").exists():
            assert process.poll() is None
            time.sleep(0.002)
        process.send_signal(signum)
        _, err = process.communicate(timeout=30)
    assert process.returncode == (130 if signum is signal.SIGINT else -signum), err
    assert "Traceback" not in err
    assert not host.gone(host.processes() - {ProcessId.of(os.getpid())}, 5.0)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_client_leaves_the_cluster_ready(host: Host, signum: signal.Signals) -> None:
    """`emulate replay` ended in the middle, however rudely: its run is withdrawn, the next one is whole."""
    host.run("up", "1p1d", "--dilation", "0.5")
    with host.start("replay", "--agents", "2") as process:
        while not (host.root / "1p1d" / "runs" / "1").exists():
            assert process.poll() is None
            time.sleep(0.002)
        process.send_signal(signum)
        process.communicate(timeout=30)
    while (host.root / "1p1d" / "runs" / "1").exists():
        time.sleep(0.002)
    done = host.run("replay", "--agents", "1", "--max-len", "500", "--json", code=None)
    assert done.returncode in (0, 3), done.stderr
    assert json.loads(done.stdout)["runs"][0]["tokens_equal"] is True
    host.run("down")
