"""What a node does once it is isolated: it waits for orders and plays its role in one run after another.

Theory of operation. One task reads orders and answers events (``emulator.hosts.control``); a run is a task of its
own, a *session*, that goes through open, started, recorded, closed. Whatever ends a session early, a failed
role or a lost peer, is reported once as ``Failed`` and leaves the node idle and ready for the next run. The
end of standard input is the supervisor's death: the process ends at once, there is nothing to save.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog
import trio

from topology.lanes import DSCP_OF_LANE
from topology.spec import AddressPlan

from .. import workload
from ..config import RunConfig
from ..errors import EmulatorError, PeerLost, ProtocolViolation, leaf_errors
from ..fabric.interface import Endpoint, Fabric, Side, VirtualLane
from ..fabric.wallclock import WallClock
from ..logs import configure_logs
from ..plan import cluster_spec, emulated_rates, lane_map, local_rates, pace_of
from ..records import Decisions, HostSample
from ..shaper import open_paced
from . import control

__all__ = ["fault_of", "lateness_summary", "serve_station"]

SAMPLE_S = 0.020
"""How often timer lateness is measured: fifty samples a second cost about 0.1 % of a core."""

DATA_PORT = 4791
"""RoCE's UDP port, here TCP's: every node is alone in its namespace, so that any port would do."""
RPC_PORT = 4790

_INBOX_ORDERS = 8

if TYPE_CHECKING:
    from ..fabric.tcp import Addresses
    from ..roles.client import Client

log = structlog.get_logger()


async def serve_station(name: str) -> None:
    """Serve orders until SIGTERM (which unwinds) or the end of standard input (which ends the process)."""
    configure_logs(name)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_cancel_on_sigterm, nursery.cancel_scope)
        await _Station(name).serve(nursery)


async def _cancel_on_sigterm(scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()
            return


def fault_of(error: BaseException) -> EmulatorError:
    """The one error that explains a group: a defect of ours before a reported error before a lost peer.

    A lost peer is mostly the echo of what went wrong over there. A defect becomes an EmulatorError whose
    text names the exception; its traceback is the log's.
    """
    leaves = leaf_errors(error)
    for leaf in leaves:
        if not isinstance(leaf, EmulatorError | trio.Cancelled):
            return EmulatorError(f"{type(leaf).__name__}: {leaf}")
    reported = [leaf for leaf in leaves if isinstance(leaf, EmulatorError)]
    causes = [leaf for leaf in reported if not isinstance(leaf, PeerLost)] or reported
    return causes[0] if causes else EmulatorError("cancelled")


def lateness_summary(lateness_s: Sequence[float]) -> tuple[float, float, float]:
    """(median, p99, max) in milliseconds by linear interpolation; zeros without a sample."""
    if not lateness_s:
        return (0.0, 0.0, 0.0)
    ordered = sorted(lateness_s)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return 1e3 * (ordered[low] + (ordered[high] - ordered[low]) * (place - low))

    return (at(0.5), at(0.99), at(1.0))


class _Sampler:
    """How well this process keeps up with the wall clock, from its making on, by the timers that roles use."""

    def __init__(self, fabric: Fabric, dilation: float) -> None:
        self._fabric = fabric
        self._dilation = dilation
        self.restart()

    def restart(self) -> None:
        """Forget what was sampled until now."""
        self._lateness_s: list[float] = []
        self._began_s = time.monotonic()
        self._cpu_s = time.process_time()

    async def run(self) -> None:
        period_s = SAMPLE_S / self._dilation
        due_s = self._fabric.now()
        while True:
            # A late wake-up is one sample, not the many that were due meanwhile.
            due_s = max(due_s + period_s, self._fabric.now())
            await self._fabric.sleep_until(due_s)
            self._lateness_s.append((self._fabric.now() - due_s) * self._dilation)

    def sample(self, retransmits: int) -> HostSample:
        return HostSample(
            lateness_ms=lateness_summary(self._lateness_s),
            cpu_s=time.process_time() - self._cpu_s,
            wall_s=time.monotonic() - self._began_s,
            retransmits=retransmits,
        )


class _Station:
    """The order loop of one node; at most one session at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._orders = control.Lines[control.NodeOrder](trio.lowlevel.FdStream(os.dup(0)), control.NodeOrder)
        self._events = trio.lowlevel.FdStream(os.dup(1))
        self._speaking = trio.Lock()
        self._session: trio.MemorySendChannel[control.NodeOrder] | None = None
        self._recorded = False
        self._closing = False

    async def serve(self, nursery: trio.Nursery) -> None:
        async for order in self._orders:
            if isinstance(order, control.Links):
                await self._say(control.Ready())
            elif isinstance(order, control.Open):
                if self._session is not None:
                    raise ProtocolViolation(f"{self._name}: a run was opened inside another")
                self._session, inbox = trio.open_memory_channel[control.NodeOrder](_INBOX_ORDERS)
                self._recorded = self._closing = False
                nursery.start_soon(self._run, order, inbox)
            elif self._session is not None:
                self._closing = isinstance(order, control.Close)
                self._session.send_nowait(order)
            elif isinstance(order, control.Close):
                await self._say(control.Closed())
            # Any other order was meant for a session that has just failed, which its Failed has told already.
        os._exit(0)

    async def _say(self, event: control.NodeEvent) -> None:
        async with self._speaking:
            await self._events.send_all(control.encode(event))

    async def _run(self, order: control.Open, inbox: trio.MemoryReceiveChannel[control.NodeOrder]) -> None:
        """One session, whatever becomes of it: Failed if it did, then Closed if that was asked for."""
        fault: EmulatorError | None = None
        try:
            await self._attend(order, inbox)
        except Exception as error:
            fault = fault_of(error)
            if self._recorded and isinstance(fault, PeerLost):
                # Nodes leave a finished run one by one, and the last see the first go.
                fault = None
            else:
                log.error("run_failed", run=order.directory, code=fault.code, text=fault.text, exc_info=error)
        finally:
            self._session = None
        if fault is not None:
            await self._say(control.Failed.of(fault))
        if self._closing:
            await self._say(control.Closed())

    async def _attend(self, order: control.Open, inbox: trio.MemoryReceiveChannel[control.NodeOrder]) -> None:
        # Imported by the first run, so that an idle cluster is up sooner.
        from ..fabric.tcp import open_tcp_fabric
        from ..roles.serving import open_role

        run = order.run
        clock = WallClock(order.epoch_s, run.scale.dilation)
        async with (
            open_tcp_fabric(
                self._name,
                _addresses(run),
                clock,
                rpc_latency_s=run.engine.rpc_latency_s,
                rates={nic: rate for (node, nic), rate in emulated_rates(run).items() if node == self._name},
                local=local_rates(run, self._name),
                lane_map=lane_map(run.replay),
            ) as links,
            open_paced(links, pace_of(run, self._name)) as fabric,
            trio.open_nursery() as nursery,
        ):
            sampler = _Sampler(fabric, run.scale.dilation)
            nursery.start_soon(sampler.run)
            await self._say(control.Opened())
            if isinstance(await inbox.receive(), control.Start):
                async with open_role(run, self._name, fabric, Path(order.directory)) as role:
                    _spare_collector()
                    await self._say(control.Started())
                    async with trio.open_nursery() as work:
                        async for step in inbox:
                            if isinstance(step, control.Play):
                                work.start_soon(self._replay, role.client, step, sampler)
                            elif isinstance(step, control.Record):
                                record = msgspec.structs.replace(
                                    role.record(), host=sampler.sample(links.retransmits())
                                )
                                control.write_file(Path(step.result), record)
                                self._recorded = True
                                await self._say(control.Recorded())
                            else:
                                break
                        work.cancel_scope.cancel()
            nursery.cancel_scope.cancel()

    async def _replay(self, client: Client, order: control.Play, sampler: _Sampler) -> None:
        decisions = None if order.decisions is None else control.read_file(Path(order.decisions), Decisions)
        load = _workload(Path(order.workload))
        news, progress = trio.open_memory_channel[control.News](1)

        def say(event: control.News) -> None:
            with contextlib.suppress(trio.WouldBlock):
                news.send_nowait(event)

        async def tell() -> None:
            async for event in progress:
                await self._say(event)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(tell)
            with news:
                async with trio.open_nursery() as watching:
                    watching.start_soon(client.watch, lambda: say(control.Alive()))
                    await client.prepare(load, decisions)
                    # Warming the store computes for seconds on end, and no model time is measured meanwhile.
                    sampler.restart()
                    replayed = await client.replay(load, lambda done, total: say(control.Progress(done, total)))
                    watching.cancel_scope.cancel()
        control.write_file(Path(order.result), control.ReplayResult(*replayed))
        await self._say(control.Played())


def _spare_collector() -> None:
    """Leave all that lives as long as the process out of garbage collections, and make those rarer.

    A full one over the imported modules stops a node for 15 to 30 ms, many layers' worth.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _workload(path: Path) -> workload.Workload:
    try:
        return workload.decode(path.read_bytes())
    except OSError as error:
        raise EmulatorError(f"{path}: cannot be read: {error.strerror}") from None


def _addresses(run: RunConfig) -> Addresses:
    """The cluster's address plan as the fabric wants it."""
    from ..fabric.tcp import Addresses

    spec = cluster_spec(run)
    plan = AddressPlan(spec)
    sides: dict[str, tuple[Side, ...]] = {"cnic": ("host", "gpu"), "snic": ("host",)}
    return Addresses(
        endpoints={
            Endpoint(port.node, port.nic.name, side): plan.address(port.node, port.nic.name, side)
            for port in spec.ports()
            for side in sides[port.nic.kind]
        },
        management={node.name: plan.mgmt(node.name) for node in spec.nodes},
        data_port=DATA_PORT,
        rpc_port=RPC_PORT,
        tos={lane: DSCP_OF_LANE[lane] for lane in VirtualLane},
    )
