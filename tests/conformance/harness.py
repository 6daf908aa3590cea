"""Three nodes to run a law on: over the fluid fabric, over TCP on the loopback, over TCP on shaped links.

``pe0``, ``pe1`` and ``de0`` have one compute NIC each. A law is ``async def law(bed)``; ``run_law`` gives it a
bed of the kind asked for and lets its assertion errors out as they are.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import trio

from emulator.extent import Extent
from emulator.fabric.clock import run_virtual
from emulator.fabric.fluid import FluidNetwork, open_fluid
from emulator.fabric.interface import (
    Endpoint,
    Fabric,
    Region,
    Segment,
    Side,
    Target,
    Transfer,
    VirtualLane,
)
from emulator.fabric.localbus import LocalRates
from emulator.fabric.tcp import Addresses, TcpFabric, open_tcp_fabric
from emulator.fabric.wallclock import WallClock
from topology.counters import Direction
from topology.lanes import DSCP_OF_LANE, LaneName
from topology.namespaces import inside, new_netns
from topology.netns import realise
from topology.spec import AddressPlan, ClusterSpec

__all__ = [
    "ANY",
    "NIC",
    "NODES",
    "RATE",
    "REGION_BYTES",
    "RPC_LATENCY_S",
    "SHAPED",
    "Bed",
    "Kind",
    "at",
    "data",
    "run_law",
    "straight",
]

Kind = Literal["fluid", "tcp", "shaped"]
LaneMap = Mapping[VirtualLane, VirtualLane]
Inside = Mapping[str, LocalRates]

ANY = pytest.mark.parametrize("kind", ["fluid", "tcp"])
"""For laws that say nothing of rates."""
SHAPED = pytest.mark.parametrize("kind", ["fluid", pytest.param("shaped", marks=pytest.mark.root)])
"""For laws about rates."""

NODES = ("pe0", "pe1", "de0")
NIC = "cnic0"
RATE = 12.5e6
"""Payload bytes per second of every port, where ports are shaped: 100 Mb/s."""
RPC_LATENCY_S = 0.020
REGION_BYTES = 48 << 20
LIMIT_S = 20.0
SHAPED_ATTEMPTS = 4


class Bed(msgspec.Struct, frozen=True):
    """What a law gets. ``tolerance``: how far a rate may be off, relative; ``jitter_s``: how far a moment.

    ``kernel_bytes`` of a (lane class's name, node, direction): what the kernel counted, None where it does not.
    """

    kind: Kind
    fabrics: Mapping[str, Fabric]
    regions: Mapping[str, Region]
    kill: Callable[[str], None]
    tolerance: float
    jitter_s: float
    kernel_bytes: Callable[[LaneName, str, Direction], int] | None = None

    def now(self) -> float:
        return self.fabrics["pe0"].now()


def at(node: str, side: Side = "host") -> Endpoint:
    """One side of the node's NIC."""
    return Endpoint(node, NIC, side)


def straight(size: int, *, local: int = 0, remote: int = 0) -> Segment:
    """``size`` bytes from offset ``local`` to offset ``remote``."""
    return Segment((Extent(local, size),), (Extent(remote, size),))


def data(
    src: Endpoint,
    dst: Endpoint,
    *,
    lane: VirtualLane = VirtualLane.KV,
    transfer: Transfer = Transfer.OTHER,
) -> Target:
    """A target in the region that every node has."""
    return Target(src, dst, "memory", transfer, lane)


def run_law(
    kind: Kind,
    law: Callable[[Bed], Awaitable[None]],
    *,
    built_rates: Mapping[str, float] | None = None,
    lane_map: LaneMap | None = None,
    local: Inside | None = None,
) -> None:
    """Run ``law`` on a bed. ``built_rates`` makes a mutant: what nodes' ports really get (fluid only).

    ``local``: what binds inside nodes, by node.

    On shaped links a law has a few attempts, each on a network of its own: whatever else the host computes
    can disturb a measurement, but does not mend a wrong network.
    """
    if kind == "fluid":
        run_virtual(_judge, _open_fluid(built_rates or {}, lane_map or {}, local or {}), law)
    elif kind == "tcp":
        trio.run(_judge, _open_tcp(lane_map or {}, local or {}), law)
    else:
        for attempt in range(1, SHAPED_ATTEMPTS + 1):
            try:
                with _Namespaces() as namespaces:
                    trio.run(_judge, _open_tcp(lane_map or {}, local or {}, namespaces), law)
                return
            except AssertionError:
                if attempt == SHAPED_ATTEMPTS:
                    raise


async def _judge(opened: AbstractAsyncContextManager[Bed], law: Callable[[Bed], Awaitable[None]]) -> None:
    failure: Exception | None = None
    async with opened as bed:
        try:
            with trio.fail_after(LIMIT_S):
                await law(bed)
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure


def _registered(fabrics: Mapping[str, Fabric]) -> dict[str, Region]:
    """A region of random bytes on each node, the same in every run."""
    regions = {node: fabric.register("memory", REGION_BYTES) for node, fabric in fabrics.items()}
    pattern: npt.NDArray[np.uint8] = np.random.default_rng(7).integers(1, 200, 1 << 16, dtype=np.uint8)
    for shift, region in enumerate(regions.values()):
        region.memory.reshape(-1, pattern.size)[: REGION_BYTES // 2 // pattern.size] = np.roll(pattern, shift)
    return regions


@asynccontextmanager
async def _open_fluid(built_rates: Mapping[str, float], lane_map: LaneMap, local: Inside) -> AsyncIterator[Bed]:
    ports = {(node, NIC): built_rates.get(node, RATE) for node in NODES}
    network = FluidNetwork(
        ports,
        nodes=NODES,
        rpc_latency_s=RPC_LATENCY_S,
        lane_map=lane_map,
        dram={node: rates.dram for node, rates in local.items() if rates.dram is not None},
        pcie={(node, nic): rate for node, rates in local.items() for nic, rate in rates.pcie.items()},
    )
    async with open_fluid(network):
        fabrics = {node: network.fabric(node) for node in NODES}
        yield Bed("fluid", fabrics, _registered(fabrics), network.kill, tolerance=1e-6, jitter_s=1e-9)


@asynccontextmanager
async def _open_tcp(lane_map: LaneMap, local: Inside, namespaces: _Namespaces | None = None) -> AsyncIterator[Bed]:
    """Each node's fabric lives in a task of its own, so that it can die alone."""
    clock = WallClock(time.monotonic())
    addresses = _loopback_addresses() if namespaces is None else namespaces.addresses
    fabrics: dict[str, TcpFabric] = {}
    scopes: dict[str, trio.CancelScope] = {}

    async def live(node: str, task_status: trio.TaskStatus[None]) -> None:
        make_socket = socket.socket if namespaces is None else namespaces.socket_maker(node)
        rates = {} if namespaces is None else {NIC: RATE}
        with trio.CancelScope() as scopes[node]:
            async with open_tcp_fabric(
                node,
                addresses,
                clock,
                RPC_LATENCY_S,
                rates=rates,
                local=local.get(node, LocalRates()),
                lane_map=lane_map,
                make_socket=make_socket,
            ) as fabrics[node]:
                task_status.started()
                await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        for node in NODES:
            await nursery.start(live, node)
        yield Bed(
            "tcp" if namespaces is None else "shaped",
            fabrics,
            _registered(fabrics),
            lambda node: scopes[node].cancel(),
            tolerance=0.05,
            jitter_s=0.1 if namespaces is None else 0.015,
            kernel_bytes=None if namespaces is None else namespaces.kernel_bytes,
        )
        nursery.cancel_scope.cancel()


_SUBNETS = itertools.count(1)


def _loopback_addresses() -> Addresses:
    """Addresses of 127/8 that only this process uses, and ports that are free on the first of them."""
    net = f"127.{os.getpid() % 250 + 1}.{next(_SUBNETS) % 250 + 1}"
    hosts = iter(range(1, 255))
    endpoints = {Endpoint(node, NIC, side): f"{net}.{next(hosts)}" for node in NODES for side in _SIDES}
    management = {node: f"{net}.{next(hosts)}" for node in NODES}
    with socket.socket() as first, socket.socket() as second:
        first.bind((f"{net}.1", 0))
        second.bind((f"{net}.1", 0))
        data_port, rpc_port = first.getsockname()[1], second.getsockname()[1]
    return Addresses(endpoints=endpoints, management=management, data_port=data_port, rpc_port=rpc_port, tos=_TOS)


_SIDES: tuple[Side, Side] = ("host", "gpu")
_TOS = {lane: DSCP_OF_LANE[int(lane)] for lane in VirtualLane}


class _Namespaces(ExitStack):
    """Shaped links between namespaces of this process; all gone when it closes."""

    def __init__(self) -> None:
        super().__init__()
        spec = ClusterSpec(name="law", pe_nodes=2, de_nodes=1, gpus_per_node=1)
        plan = AddressPlan(spec)
        self._fds: dict[str, int] = {}
        with ExitStack() as undo:
            for node in spec.nodes:
                self._fds[node.name] = fd = new_netns()
                undo.callback(os.close, fd)
            rates = {(port.node, port.nic.name): RATE for port in spec.ports()}
            self._network = realise(spec, plan, rates, self._fds)
            undo.callback(self._network.close)
            self.push(undo.pop_all())
        self.addresses = Addresses(
            endpoints={Endpoint(n, NIC, side): plan.address(n, NIC, side) for n in NODES for side in _SIDES},
            management={node: plan.mgmt(node) for node in NODES},
            data_port=7001,
            rpc_port=7002,
            tos=_TOS,
        )

    def kernel_bytes(self, lane: LaneName, node: str, direction: Direction) -> int:
        """Link-layer bytes that the kernel sent on a lane of a node's port so far."""
        (port,) = (p for p in self._network.counters() if (p.node, p.nic, p.direction) == (node, NIC, direction))
        return port.lane(lane).sent_bytes

    def socket_maker(self, node: str) -> Callable[[int, int], socket.socket]:
        """Makes sockets in the node's namespace, where they stay."""

        def make(family: int, kind: int) -> socket.socket:
            with inside(self._fds[node]):
                return socket.socket(family, kind)

        return make
