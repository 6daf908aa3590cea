"""What becomes of a collective beside KV: with lanes, without, paced by software, and beside CUDA's copies.

Two PE nodes of two GPUs. Each GPU's CNIC is saturated in both directions by its engine's H2D copies (DRAM to HBM
through the NIC), which are layers of a hit of 32K tokens; meanwhile the PE group exchanges a given number of bytes
a port. Under CUDA's copies it is the GPU's PCIe link that these saturate, in one direction.

In virtual time sizes are model bytes, so that an exchange takes as long as on the real cluster, from a third of a
microsecond on. On links (needs root) they are payload bytes, each of which stands for hundreds of model bytes.

`scripts/bench isolation [--json]` measures both, `--virtual` the first alone.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from types import MappingProxyType

import msgspec
import trio

from emulator.config import EngineConfig, ModelConfig, ReplayConfig, RunConfig, ScaleConfig
from emulator.deployment import Deployment, engine_gpu
from emulator.extent import Extent
from emulator.fabric.clock import run_virtual
from emulator.fabric.fluid import open_fluid
from emulator.fabric.interface import Endpoint, Fabric, Region, Ring, Segment, Side, Transfer, VirtualLane
from emulator.fabric.tcp import Addresses, open_tcp_fabric
from emulator.fabric.wallclock import WallClock
from emulator.metrics import Summary, summarise
from emulator.plan import emulated_rates, lane_map, local_rates, pace_of, run_config
from emulator.roles.segments import hbm_region
from emulator.roles.traffic import Traffic
from emulator.shaper import open_paced
from emulator.sim import fluid_network
from topology.lanes import DSCP_OF_LANE
from topology.namespaces import inside, new_netns
from topology.netns import realise
from topology.spec import AddressPlan, ClusterSpec

from .commands import need_root
from .figures import Figure, show

__all__ = ["main"]

KIB = 1024
VIRTUAL_SIZES = tuple(16 * KIB * 4**step for step in range(8))
LINK_SIZES = tuple(16 * KIB * 4**step for step in range(5))
ROUNDS = 3
VIRTUAL_REPEATS, LINK_REPEATS = 20, 7
"""Exchanges in a round, alone and beside KV each."""
VIRTUAL_KV_BYTES, LINK_KV_BYTES = 64, 1
HIT_TOKENS = 32 * 1024
OUTSTANDING = 8
"""KV messages of an engine that it has asked for and that are not in place."""
REST_S = 2e-3
"""Least model time between two exchanges: an idle link comes to rest, a loop that paces wakes twice."""
LEAD_S = 2e-3
"""Model time from entering an exchange to its start, so that late wake-ups of a process are not in it."""
LASTING = 256 * KIB
BOUND = 1.1
SPEC = ClusterSpec(name="isolation", pe_nodes=2, de_nodes=1, gpus_per_node=2)
MODES = MappingProxyType(
    {
        "lanes": ReplayConfig(),
        "qos off": ReplayConfig(qos="off"),
        "qos software": ReplayConfig(qos="software"),
        "copy cuda": ReplayConfig(copies="cuda"),
    }
)
"""What is measured."""
NODES = ("pe0", "pe1")

Taken = Mapping[int, Sequence[float]]
"""Model seconds of every exchange, by the size that a port sent."""
Beside = tuple[Taken, Taken]
"""Of exchanges alone, and beside KV."""


def main(argv: Sequence[str]) -> int:
    """Measure; 1 when lanes do not keep a collective within its bound, 2 without root."""
    if "--virtual" not in argv:
        need_root("isolation")
    figures: list[Figure] = []
    for name, replay in MODES.items():
        figures += _figures(f"virtual time, {name}", _virtual(replay), _size, bounded=name == "lanes")
    if "--virtual" not in argv:
        # The links are in question, not how busy the host is: this process goes before what else runs here.
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        with _links() as links:
            for name, replay in MODES.items():
                taken = links.measure(replay)
                figures += _figures(f"links, {name}", taken, _payload_size, bounded=name == "lanes")
    return show(figures, as_json="--json" in argv)


def _figures(title: str, taken: Beside, size_of: Callable[[int], str], *, bounded: bool) -> Iterator[Figure]:
    alone, beside = taken
    for size in alone:
        name = f"{title}: {size_of(size)}"
        base, loaded = _summary(alone[size]), _summary(beside[size])
        yield Figure(f"{name} alone", 1e3 * base.p50, "ms")
        high = BOUND if bounded and size >= LASTING else float("inf")
        yield Figure(f"{name} beside KV", loaded.p50 / base.p50, "x alone", high=high)
        yield Figure(f"{name} beside KV, p99", loaded.p99 / base.p50, "x alone")


def _summary(seconds: Sequence[float]) -> Summary:
    found = summarise(seconds)
    assert found is not None
    return found


def _size(size: int) -> str:
    return f"{size // KIB} KB" if size < KIB * KIB else f"{size // KIB // KIB} MB"


def _payload_size(size: int) -> str:
    run = _run(ReplayConfig(), LINK_KV_BYTES, 1.0)
    return f"{_size(size)} payload ({float(size * Deployment(run).scale.shrink) / 1e6:.0f} MB)"


def _run(replay: ReplayConfig, kv_bytes: int, dilation: float) -> RunConfig:
    return run_config(SPEC, EngineConfig(), ModelConfig(), ScaleConfig(kv_bytes, dilation), replay)


class _Group:
    """The PE group over a fabric: its exchanges, and what its engines copy meanwhile."""

    def __init__(self, run: RunConfig, fabrics: Mapping[str, Fabric]) -> None:
        self._deployment = deployment = Deployment(run)
        self._fabrics = fabrics
        ((_, group),) = deployment.groups(NODES[0])
        assert group.ring is not None
        self._ring: Ring = group.ring
        self._size = HIT_TOKENS * deployment.layout.kv_bytes
        self._sources: dict[str, Region] = {}
        for node, fabric in fabrics.items():
            self._sources[node] = fabric.register("buffer", self._size)
            for engine in deployment.engines_of(node):
                fabric.register(hbm_region(engine_gpu(engine)), self._size)
        self._random = random.Random(7)

    async def measure(self, payloads: Mapping[int, int], repeats: int) -> Beside:
        """Exchanges of every size, ``payloads`` of which are sent a port: alone and beside KV.

        In turn, so that whatever disturbs the host for a while disturbs both.
        """
        alone: dict[int, list[float]] = {size: [] for size in payloads}
        beside: dict[int, list[float]] = {size: [] for size in payloads}
        for size, payload in payloads.items():
            for _ in range(ROUNDS):
                alone[size] += await self._exchanges(payload, repeats)
                async with self._copying():
                    beside[size] += await self._exchanges(payload, repeats)
        return alone, beside

    @asynccontextmanager
    async def _copying(self) -> AsyncIterator[None]:
        """KV saturates the CNICs for the length of a block."""
        async with trio.open_nursery() as nursery:
            for node in NODES:
                traffic = Traffic(self._deployment, self._fabrics[node])
                for engine in self._deployment.engines_of(node):
                    nursery.start_soon(self._copy, traffic, engine, self._sources[node])
            await self._fabrics[NODES[0]].sleep(5 * REST_S)
            yield
            nursery.cancel_scope.cancel()

    async def _copy(self, traffic: Traffic, engine: str, source: Region) -> None:
        """Layers from the engine's DRAM to its HBM without end."""
        ends = (self._deployment.host(engine), self._deployment.gpu(engine), hbm_region(engine_gpu(engine)))
        whole = (Extent(0, self._size),)
        segments = [Segment(whole, whole)] * 1000
        while True:
            async with traffic.stream(engine, Transfer.PE_H2D, ends, source, segments) as stream:
                for index in range(len(segments)):
                    stream.release(index + 1)
                    await stream.wait_placed(max(0, index + 1 - OUTSTANDING))

    async def _exchanges(self, payload: int, repeats: int) -> list[float]:
        """How long each of some exchanges took; they begin at any moment of a tick."""
        taken: list[float] = []
        for _ in range(repeats):
            await self._fabrics[NODES[0]].sleep(REST_S * (1 + self._random.random()))
            ready_s = self._fabrics[NODES[0]].now() + LEAD_S
            async with trio.open_nursery() as nursery:
                for node in NODES[1:]:
                    nursery.start_soon(self._exchange, node, payload, ready_s)
                taken.append(await self._exchange(NODES[0], payload, ready_s))
        return taken

    async def _exchange(self, node: str, payload: int, ready_s: float) -> float:
        ports = {src: payload for src, _ in self._ring.hops if src.node == node}
        exchanged = await self._fabrics[node].collective(self._ring, ports, ready_s=ready_s)
        return exchanged.over_s - exchanged.started_s


def _virtual(replay: ReplayConfig) -> Beside:
    run = _run(replay, VIRTUAL_KV_BYTES, 1.0)
    scale = Deployment(run).scale

    async def work() -> Beside:
        network = fluid_network(run)
        async with open_fluid(network), AsyncExitStack() as stack:
            fabrics = {
                node: await stack.enter_async_context(open_paced(network.fabric(node), pace_of(run, node)))
                for node in NODES
            }
            payloads = {size: scale.payload_bytes(size) for size in VIRTUAL_SIZES}
            return await _Group(run, fabrics).measure(payloads, VIRTUAL_REPEATS)

    return run_virtual(work)


class _Links:
    """The cluster's links between namespaces of this process."""

    def __init__(self, stack: ExitStack) -> None:
        self._run = _run(ReplayConfig(), LINK_KV_BYTES, ScaleConfig().dilation)
        self._plan = AddressPlan(SPEC)
        self._fds: dict[str, int] = {}
        for node in SPEC.nodes:
            self._fds[node.name] = fd = new_netns()
            stack.callback(os.close, fd)
        stack.callback(realise(SPEC, self._plan, emulated_rates(self._run), self._fds).close)
        self._ports = iter(range(7001, 7100))

    def measure(self, replay: ReplayConfig) -> Beside:
        return trio.run(self._measure, msgspec.structs.replace(self._run, replay=replay))

    async def _measure(self, run: RunConfig) -> Beside:
        addresses = self._addresses()
        clock = WallClock(time.monotonic(), run.scale.dilation)
        async with AsyncExitStack() as stack:
            fabrics = {
                node: await stack.enter_async_context(self._fabric(run, node, addresses, clock)) for node in NODES
            }
            return await _Group(run, fabrics).measure({size: size for size in LINK_SIZES}, LINK_REPEATS)

    @asynccontextmanager
    async def _fabric(
        self, run: RunConfig, node: str, addresses: Addresses, clock: WallClock
    ) -> AsyncIterator[Fabric]:
        async with (
            open_tcp_fabric(
                node,
                addresses,
                clock,
                run.engine.rpc_latency_s,
                rates={nic: rate for (owner, nic), rate in emulated_rates(run).items() if owner == node},
                local=local_rates(run, node),
                lane_map=lane_map(run.replay),
                make_socket=partial(self._socket, node),
            ) as links,
            open_paced(links, pace_of(run, node)) as fabric,
        ):
            yield fabric

    def _addresses(self) -> Addresses:
        """Ports that no earlier measurement used: its connections may not be forgotten yet."""
        sides: tuple[Side, Side] = ("host", "gpu")
        nics = [
            nic for port in SPEC.ports() if port.node == NODES[0] and (nic := port.nic.name).startswith("cnic")
        ]
        return Addresses(
            endpoints={
                Endpoint(node, nic, side): self._plan.address(node, nic, side)
                for node in NODES
                for nic in nics
                for side in sides
            },
            management={node: self._plan.mgmt(node) for node in NODES},
            data_port=next(self._ports),
            rpc_port=next(self._ports),
            tos={lane: DSCP_OF_LANE[lane] for lane in VirtualLane},
        )

    def _socket(self, node: str, family: int, kind: int) -> socket.socket:
        with inside(self._fds[node]):
            return socket.socket(family, kind)


@contextmanager
def _links() -> Iterator[_Links]:
    with ExitStack() as stack:
        yield _Links(stack)
