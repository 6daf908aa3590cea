"""A live cluster from outside: start one, connect to one that is up, replay on it, take it down.

The Python face of the emulator::

    async with open_cluster(load_topology("1p1d")) as cluster:
        live = await cluster.replay(workload, ReplayConfig(agents=8))

``open_cluster`` is bound to its block and to this process: whatever ends either ends the cluster.
``start_cluster`` leaves it running, as `emulate up` does, for ``connect_cluster`` and ``processes.take_down``.
Nothing here touches the network or a node; that is the supervisor's alone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import trio

from topology.spec import ClusterSpec

from .config import EngineConfig, ModelConfig, ReplayConfig, RunConfig, ScaleConfig
from .errors import EmulatorError
from .hosts import control, subreaper
from .hosts.processes import clear_up
from .hosts.state import ClusterDir, state_root
from .plan import run_config
from .records import Decisions
from .workload import Workload, encode

__all__ = ["Cluster", "connect_cluster", "open_cluster", "start_cluster"]

_GRACE_S = 3.0

_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Numeric libraries start a thread per core when imported; a process with threads cannot be isolated."""


class Cluster:
    """A cluster that is up. ``run`` is the configuration that every replay on it starts from."""

    def __init__(self, directory: ClusterDir, description: control.Description) -> None:
        self._directory = directory
        self.name = description.cluster
        self.title = description.title
        self.run: RunConfig = description.run

    async def replay(
        self,
        workload: Workload,
        replay: ReplayConfig,
        *,
        decisions: Decisions | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> control.LiveRun:
        """Replay ``workload`` and return what every process counted. Cancelling it cancels the run.

        EmulatorError with the failing node's text when a role or a node failed, or the cluster is busy.
        """
        load = encode(workload)
        choices = b"" if decisions is None else msgspec.msgpack.encode(decisions)
        order = control.Replay(replay, len(load), len(choices))
        async with _asking(self._directory, order, load + choices) as replies:
            async for reply in replies:
                if isinstance(reply, control.Progress):
                    if on_progress is not None:
                        on_progress(reply.done, reply.total)
                elif isinstance(reply, control.Completed):
                    return control.read_file(Path(reply.result), control.LiveRun)
                elif isinstance(reply, control.Failed):
                    raise reply.error()
        raise EmulatorError(f"cluster {self.name} went down during the replay")


@asynccontextmanager
async def open_cluster(
    spec: ClusterSpec,
    *,
    engine: EngineConfig | None = None,
    model: ModelConfig | None = None,
    scale: ScaleConfig | None = None,
    name: str | None = None,
    on_stage: Callable[[str], None] | None = None,
) -> AsyncIterator[Cluster]:
    """A cluster of one's own for the length of a block.

    ConfigError or TopologyError before anything is started; EmulatorError when it does not come up.
    """
    run = run_config(spec, engine or EngineConfig(), model or ModelConfig(), scale or ScaleConfig())
    directory = ClusterDir(state_root(), name or f"run-{secrets.token_hex(4)}")
    async with _supervised(directory, spec.name, run, on_stage), connect_cluster(directory) as cluster:
        yield cluster


async def start_cluster(
    name: str, title: str, run: RunConfig, on_stage: Callable[[str], None] | None = None
) -> control.Up:
    """Bring a cluster up that outlives this process; if this is cancelled or killed before, it goes down."""
    async with _supervised(ClusterDir(state_root(), name), title, run, on_stage) as supervisor:
        await supervisor.detach()
        return supervisor.up


@asynccontextmanager
async def connect_cluster(directory: ClusterDir) -> AsyncIterator[Cluster]:
    """The running cluster of a state directory. EmulatorError when it is not up."""
    async with _asking(directory, control.Describe()) as replies:
        async for reply in replies:
            if isinstance(reply, control.Description):
                yield Cluster(directory, reply)
                return
    raise EmulatorError(f"cluster {directory.name} is not up")


@asynccontextmanager
async def _asking(
    directory: ClusterDir, order: control.Request, payload: bytes = b""
) -> AsyncIterator[control.Lines[control.Reply]]:
    """Ask a running supervisor something; hanging up withdraws it."""
    try:
        sock = directory.connect()
    except PermissionError:
        raise EmulatorError(f"cluster {directory.name} belongs to another user") from None
    except OSError:
        raise EmulatorError(f"cluster {directory.name} is not up; `emulate status` lists those that are") from None
    async with trio.SocketStream(trio.socket.from_stdlib_socket(sock)) as stream:
        await stream.send_all(control.encode(order) + payload)
        yield control.Lines[control.Reply](stream, control.Reply)


class _Supervised:
    """A supervisor that this process started, and its lifeline."""

    def __init__(self, up: control.Up, lifeline: trio.lowlevel.FdStream) -> None:
        self.up = up
        self.detached = False
        self._lifeline = lifeline

    async def detach(self) -> None:
        await self._lifeline.send_all(b"detach\n")
        self.detached = True


@asynccontextmanager
async def _supervised(
    directory: ClusterDir, title: str, run: RunConfig, on_stage: Callable[[str], None] | None
) -> AsyncIterator[_Supervised]:
    """Start a supervisor and wait until its cluster is up; end it with the block, unless it was detached."""
    process = _spawn_supervisor()
    assert process.stdin is not None and process.stdout is not None
    lifeline = trio.lowlevel.FdStream(os.dup(process.stdin.fileno()))
    reports = trio.lowlevel.FdStream(os.dup(process.stdout.fileno()))
    process.stdin.close()
    process.stdout.close()
    detached = False
    try:
        request = control.UpRequest(cluster=directory.name, root=str(directory.path.parent), title=title, run=run)
        with contextlib.suppress(trio.BrokenResourceError):
            await lifeline.send_all(control.encode(request))
        up = await _until_up(control.Lines[control.Reply](reports, control.Reply), on_stage)
        supervised = _Supervised(up, lifeline)
        yield supervised
        detached = supervised.detached
    finally:
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(lifeline)
            await trio.aclose_forcefully(reports)
            if not detached:
                await _ended(process)
                clear_up(directory)


def _spawn_supervisor() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", subreaper.__file__, sys.executable, "-P", "-m", "emulator.hosts.supervisor"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd="/",
        # Ctrl-C is for whoever started it, who then ends it in good order.
        start_new_session=True,
        env=os.environ | _ONE_THREAD,
    )


async def _until_up(reports: control.Lines[control.Reply], on_stage: Callable[[str], None] | None) -> control.Up:
    async for report in reports:
        if isinstance(report, control.Stage) and on_stage is not None:
            on_stage(report.text)
        elif isinstance(report, control.Failed):
            raise report.error()
        elif isinstance(report, control.Up):
            return report
    raise EmulatorError("the supervisor ended before the cluster was up")


async def _ended(process: subprocess.Popen[bytes]) -> None:
    """Return when the supervisor and all below it are gone: by themselves, or by force after a while."""
    pidfd = os.pidfd_open(process.pid)
    try:
        with trio.move_on_after(_GRACE_S):
            await trio.lowlevel.wait_readable(pidfd)
        if process.poll() is None:
            process.terminate()
            with trio.move_on_after(_GRACE_S):
                await trio.lowlevel.wait_readable(pidfd)
    finally:
        os.close(pidfd)
    process.poll()
