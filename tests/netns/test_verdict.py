"""A run on links judges itself: a node kept from its CPU, or a port at another rate, makes it invalid."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import trio

from emulator.cluster import Cluster, open_cluster
from emulator.config import ReplayConfig, ScaleConfig
from emulator.hosts.control import LiveRun
from emulator.judge import Verdict, judge, kernel_ports
from emulator.report import setup_of
from emulator.workload import Workload
from tests.clusters import conversation
from topology import rtnl, tc
from topology.namespaces import netns_fd_of_pid
from topology.netlink import CHANGE, Request, RouteSocket
from topology.spec import ClusterSpec

from .lifecycle import Host, open_host

pytestmark = pytest.mark.root

SPEC = ClusterSpec(name="judged", pe_nodes=1, de_nodes=1, gpus_per_node=1)
LOAD = Workload((conversation("a", *[(200, 16)] * 6), conversation("b", *[(150, 16)] * 6)))
REPLAY = ReplayConfig(agents=2)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A state directory of the test's own, in which nothing is left behind."""
    with open_host(tmp_path / "state", monkeypatch) as found:
        yield found


def _judged(cluster: Cluster, live: LiveRun) -> Verdict:
    config = msgspec.structs.replace(cluster.run, replay=REPLAY)
    return judge(
        setup_of(config, "tcp"),
        live.records,
        kernel_ports(live.before, live.after),
        cores=len(os.sched_getaffinity(0)),
        network_faults=live.network_faults,
    )


async def test_a_node_kept_from_its_cpu_makes_the_run_invalid(host: Host) -> None:
    """Stopped for 60 of every 120 ms, the PE's timers are late: named, with a dilation that would do."""
    async with open_cluster(SPEC, scale=ScaleConfig(dilation=2.0)) as cluster, trio.open_nursery() as nursery:
        pid = host.pid(cluster.name, "pe0")

        async def starve() -> None:
            try:
                while True:
                    os.kill(pid, signal.SIGSTOP)
                    await trio.sleep(0.06)
                    os.kill(pid, signal.SIGCONT)
                    await trio.sleep(0.06)
            finally:
                os.kill(pid, signal.SIGCONT)

        nursery.start_soon(starve)
        live = await cluster.replay(LOAD, REPLAY)
        nursery.cancel_scope.cancel()
        verdict = _judged(cluster, live)
    assert {request.status for request in live.records.requests} == {"done"}
    assert verdict.verdict == "invalid"
    assert any(reason.startswith("pe0: timers") for reason in verdict.reasons), verdict.reasons
    assert verdict.dilation is not None and verdict.dilation > 2.0


async def test_a_port_at_the_wrong_rate_makes_the_run_invalid(host: Host) -> None:
    """A storage NIC at half rate behind the cluster's back while a run is on: link and rate are named."""
    async with open_cluster(SPEC, scale=ScaleConfig(dilation=2.0)) as cluster:
        pid = host.pid(cluster.name, "pe0")
        slowed = False

        def slow_down(done: int, total: int) -> None:
            nonlocal slowed
            if not slowed:
                slowed = True
                _halve(pid, "snic0")

        live = await cluster.replay(LOAD, REPLAY, on_progress=slow_down)
        verdict = _judged(cluster, live)
    assert slowed and verdict.verdict == "invalid"
    assert any("network" in reason and "pe0.snic0" in reason and "rate" in reason for reason in verdict.reasons)


def _halve(pid: int, nic: str) -> None:
    """Give the KV class of a node's NIC half its rate and ceiling."""
    fd = netns_fd_of_pid(pid)
    with contextlib.closing(RouteSocket(fd)) as route:
        os.close(fd)
        index = next(link.index for link in rtnl.Link.dump(route) if link.name == nic)
        kv = next(found for found in tc.HtbClass.dump(route, index) if found.minor == 0x20)
        raw = msgspec.structs.replace(kv, rate=kv.rate // 2, ceil=kv.ceil // 2).encode()
        flagged = raw[:6] + CHANGE.to_bytes(2, sys.byteorder) + raw[8:]
        route.apply([Request(flagged, f"{nic} at half rate")])
