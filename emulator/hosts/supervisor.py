"""A cluster's supervisor: ``python -m emulator.hosts.supervisor``, the parent and the life of all its processes.

Its standard input is its lifeline: the first line says what to bring up (``control.UpRequest``), a line
``detach`` says that it may outlive whoever started it, and the end of file before that means to take all
down. It reports on standard output (``control.Reply``) until it is detached. Afterwards its control socket
is the only door.

Theory of operation. Everything that must come from a process with one thread comes before trio: the claim on
the name, the namespaces, the node processes, the links. Whatever ends this process, the PID namespace's init
ends all of them. A node that dies ends the cluster, because its network namespace died with it; a role that
fails ends only the run.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn

import msgspec
import structlog
import trio

from topology.errors import TopologyError
from topology.netns import port_plans, realise
from topology.spec import AddressPlan

from ..config import RunConfig
from ..errors import ConfigError, EmulatorError, ProtocolViolation
from ..logs import configure_logs
from ..plan import cluster_spec, emulated_rates, model_file
from ..records import NodeRecord, RunRecords
from . import control, isolate
from .nodeprocess import NodeProcess
from .state import Claim, ClusterDir, ClusterState, ProcessId, boot_id
from .station import fault_of

__all__ = ["DETACH", "main"]

DETACH = b"detach\n"

_CLAIM_S = 3.0
"""How long a name that is just going away, or just coming up, is waited for."""
_READY_S = 120.0
"""Nine nodes that all import torch on two cores were measured at 24 s."""
_CLOSE_S = 10.0
_EXIT_S = 0.5
_STOPS = (signal.SIGTERM, signal.SIGINT)
_CLAIM_POLL_S = 0.02

log = structlog.get_logger()


class _Stop(BaseException):
    """Take all down, in good order: a signal, or the end of the lifeline."""


def main() -> None:
    """Bring one cluster up, keep it, take it down. Exit code 0 if it was asked to end."""
    for signum in _STOPS:
        signal.signal(signum, _stop)
    terminal = os.dup(2)
    try:
        with ExitStack() as stack:
            request = msgspec.json.decode(_first_line(), type=control.UpRequest)
            supervisor = _Supervisor(request, stack)
            supervisor.prepare()
            # Held back until trio listens for them: an exception out of a handler would break its run loop.
            signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
            try:
                trio.run(supervisor.serve, terminal)
            finally:
                _ignore_stops()
    except _Stop:
        return
    except (EmulatorError, TopologyError, OSError) as error:
        _report(control.Failed.of(_as_error(error)))
        raise SystemExit(1) from None
    except Exception as error:
        # Ours, not the user's; the log is gone with the cluster, so the trace goes to whoever started it.
        with suppress(OSError):
            os.write(terminal, traceback.format_exc().encode())
        _report(control.Failed(EmulatorError.code, f"the supervisor failed: {type(error).__name__}: {error}"))
        raise SystemExit(1) from None


def _stop(signum: int, frame: FrameType | None) -> None:
    _ignore_stops()
    raise _Stop


def _ignore_stops() -> None:
    """Once it is ending, a second signal must not cut the ending short."""
    for signum in _STOPS:
        signal.signal(signum, signal.SIG_IGN)


def _as_error(error: Exception) -> EmulatorError:
    if isinstance(error, EmulatorError):
        return error
    if isinstance(error, OSError):
        # The host's doing, such as a full disk. Isolation names what was refused itself.
        reason = error.strerror or str(error)
        return EmulatorError(reason if error.filename is None else f"{error.filename}: {reason}")
    return EmulatorError(str(error) or type(error).__name__)


def _first_line() -> bytes:
    line = bytearray()
    while not line.endswith(b"\n"):
        chunk = os.read(0, 1 << 16)
        if not chunk:
            raise _Stop
        line += chunk
    return bytes(line)


def _report(event: control.Reply) -> None:
    try:
        os.write(1, control.encode(event))
    except BrokenPipeError:
        raise _Stop from None


class _Supervisor:
    """One cluster, from the claim on its name to the last process."""

    def __init__(self, request: control.UpRequest, stack: ExitStack) -> None:
        self._request = request
        self._run = request.run
        self._stack = stack
        self._began_s = time.monotonic()
        self._user = isolate.invoking_user(os.environ) if os.geteuid() == 0 else None
        self._nodes: dict[str, NodeProcess] = {}
        self._runs = 0
        self._busy = False
        self._broken: str | None = None
        self._ending = False
        self._leaving = trio.CancelScope()

    def prepare(self) -> None:
        """All that must come before trio. Everything taken is given back by the exit stack."""
        spec, rates = cluster_spec(self._run), emulated_rates(self._run)
        try:
            port_plans(spec, rates)
        except TopologyError as error:
            # The user's rates, not the kernel.
            raise ConfigError(error.text) from None
        directory = ClusterDir(Path(self._request.root), self._request.cluster)
        claim = self._claim = _claim(directory)
        self._stack.callback(claim.release)
        claim.clear()
        for part in (directory.logs, directory.runs):
            part.mkdir()
        # The log is the supervisor's standard error from here on, so that a traceback ends up there too.
        with (directory.logs / "supervisor.log").open("ab") as file:
            os.dup2(file.fileno(), 2)
        configure_logs("supervisor")
        self._listener = claim.listen()
        self._stack.callback(self._listener.close)
        self._keep_state("starting")
        self._run = _with_own_files(self._run, directory.path)

        if os.geteuid() != 0:
            isolate.enter_user_namespace()
        self._init = isolate.open_pid_namespace()
        self._stack.callback(self._end_nodes)
        _report(control.Stage("starting the nodes"))
        for member in self._run.members:
            self._nodes[member.name] = NodeProcess.spawn(member.name, directory.logs, self._user)
        with ExitStack() as opened:
            holders = {}
            for node in self._nodes.values():
                holders[node.name] = node.open_netns()
                opened.callback(os.close, holders[node.name])
            _report(control.Stage("making the network"))
            before_s = time.monotonic()
            self._network = realise(spec, AddressPlan(spec), rates, holders)
        self._stack.callback(self._network.close)
        self._network_s = time.monotonic() - before_s
        log.info("network_ready", seconds=round(self._network_s, 3))

    def _keep_state(self, phase: Literal["starting", "ready"]) -> None:
        identities = {name: ProcessId.of(node.process.pid) for name, node in self._nodes.items()}
        supervisor = ProcessId.of(os.getpid())
        assert supervisor is not None
        self._claim.write(
            ClusterState(
                cluster=self._request.cluster,
                boot=boot_id(),
                phase=phase,
                topology=self._request.title,
                supervisor=supervisor,
                init=ProcessId.of(self._init.init_pid) if self._nodes else None,
                nodes={name: identity for name, identity in identities.items() if identity},
            )
        )

    def _end_nodes(self) -> None:
        """Nothing of a node's is worth a farewell: what it acknowledged is on disk."""
        self._init.kill()
        for node in self._nodes.values():
            node.process.wait()
        try:
            self._init.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            # A command of `emulate exec` whose own parent is stopped: dead, but not reaped.
            log.warning("processes_not_reaped")

    async def serve(self, terminal: int) -> None:
        """Wait for the nodes, say so, then answer the control socket until told to end.

        ``terminal``: a descriptor of the standard error of whoever started us, held until detached.
        """
        try:
            async with trio.open_nursery() as nursery:
                self._scope = nursery.cancel_scope
                nursery.start_soon(self._watch_signals)
                nursery.start_soon(self._watch_lifeline, terminal)
                await self._open_for_business(nursery)
        except BaseExceptionGroup as group:
            # Nobody reads our reports any more: whoever started us is gone.
            if group.subgroup(_Stop) is None:
                _raise_fault(group)
        if self._broken is not None:
            raise EmulatorError(self._broken)

    async def _open_for_business(self, nursery: trio.Nursery) -> None:
        for node in self._nodes.values():
            node.adopt()
            nursery.start_soon(node.pump, self._on_node_end)
        _report(control.Stage("waiting for the nodes"))
        with trio.move_on_after(_READY_S) as patience:
            await self._each(lambda node: node.ask(control.Links(), control.Ready))
        if patience.cancelled_caught:
            raise EmulatorError(f"the nodes were not ready within {_READY_S:g} s")
        self._keep_state("ready")
        total_s = time.monotonic() - self._began_s
        _report(control.Up(os.getpid(), tuple(self._nodes), self._network_s, total_s))
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(self._listener))
        nursery.start_soon(partial(trio.serve_listeners, self._attend, [listener]))

    async def _each(self, act: Callable[[NodeProcess], Awaitable[None]]) -> None:
        """Do ``act`` with all nodes at once; the errors come as one, the cause before its echoes."""
        try:
            async with trio.open_nursery() as nursery:
                for node in self._nodes.values():
                    nursery.start_soon(act, node)
        except BaseExceptionGroup as group:
            _raise_fault(group)

    async def _ask_each(
        self, order: Callable[[NodeProcess], control.NodeOrder], answer: type[msgspec.Struct]
    ) -> None:
        """Have all nodes obey; who does not answer in time is named."""
        patience_s = self._run.engine.stall_s
        silent = dict.fromkeys(self._nodes)

        async def ask(node: NodeProcess) -> None:
            await node.ask(order(node), answer)
            del silent[node.name]

        with trio.move_on_after(patience_s) as patience:
            await self._each(ask)
        if patience.cancelled_caught:
            raise EmulatorError(f"{', '.join(silent)}: no answer for {patience_s:g} s (stall_s); is it stopped?")

    def _end(self) -> None:
        """Stop serving; nobody waits any more for nodes to leave a run, since they are about to be ended."""
        self._ending = True
        self._leaving.cancel()
        self._scope.cancel()

    def _on_node_end(self, node: NodeProcess) -> None:
        """A node's network namespace is gone with it, and so is the cluster, once a run has heard of it."""
        log.error("node_ended", node=node.name, text=node.ended)
        self._broken = node.ended
        if not self._busy:
            self._end()

    async def _watch_signals(self) -> None:
        with trio.open_signal_receiver(*_STOPS) as signals:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
            async for signum in signals:
                log.info("stopping", signal=signal.Signals(signum).name)
                self._end()

    async def _watch_lifeline(self, terminal: int) -> None:
        stream = trio.lowlevel.FdStream(os.dup(0))
        heard = b""
        while chunk := await stream.receive_some(len(DETACH)):
            heard += chunk
            if heard == DETACH:
                await stream.aclose()
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, 0)
                os.dup2(null, 1)
                os.dup2(null, terminal)
                os.close(null)
                return
        log.info("stopping", lifeline="ended")
        self._end()

    async def _attend(self, stream: trio.SocketStream) -> None:
        """One client of the control socket. What goes wrong with it is its own affair."""
        with ExitStack() as owned:
            try:
                requests = control.Lines[control.Request](stream, control.Request)
                async for request in requests:
                    try:
                        reply = await self._answer(request, stream, requests, owned)
                    except EmulatorError as error:
                        reply = control.Failed.of(error)
                    except OSError as error:
                        reply = control.Failed(EmulatorError.code, f"{error.filename}: {error.strerror}")
                    await stream.send_all(control.encode(reply))
            except (trio.BrokenResourceError, ProtocolViolation) as error:
                log.warning("client_lost", text=str(error))
        if self._broken is not None:
            self._end()

    async def _answer(
        self,
        request: control.Request,
        stream: trio.SocketStream,
        requests: control.Lines[control.Request],
        owned: ExitStack,
    ) -> control.Reply:
        match request:
            case control.Describe():
                return control.Description(self._request.cluster, self._request.title, self._run)
            case control.Replay():
                if self._busy:
                    await requests.take(request.workload_bytes + request.decisions_bytes)
                    raise EmulatorError(f"cluster {self._request.cluster} is busy with another replay")
                self._busy = True
                try:
                    return await self._replay_for(request, stream, requests, owned)
                finally:
                    self._busy = False

    async def _replay_for(
        self,
        request: control.Replay,
        stream: trio.SocketStream,
        requests: control.Lines[control.Request],
        owned: ExitStack,
    ) -> control.Reply:
        """Replay while the client listens; a client that hangs up, or says anything, cancels it."""
        load = await requests.take(request.workload_bytes)
        choices = await requests.take(request.decisions_bytes)
        self._runs += 1
        directory = self._claim.directory.runs / str(self._runs)
        directory.mkdir()
        owned.callback(shutil.rmtree, directory, ignore_errors=True)
        control.write_file(directory / "workload", load)
        if choices:
            control.write_file(directory / "decisions", choices)
        if self._user is not None:
            for path in (directory, *directory.iterdir()):
                os.chown(path, *self._user)
        news, progress = trio.open_memory_channel[control.Progress](1)

        def on_progress(event: control.Progress) -> None:
            # The next one will say more; a slow client must not hold up the run.
            with suppress(trio.WouldBlock):
                news.send_nowait(event)

        async def tell() -> None:
            with suppress(trio.BrokenResourceError):
                async for event in progress:
                    await stream.send_all(control.encode(event))

        async def heed(scope: trio.CancelScope) -> None:
            with suppress(trio.BrokenResourceError, ProtocolViolation):
                async for _ in requests:
                    break
            scope.cancel()

        outcome: control.LiveRun | EmulatorError = EmulatorError("the replay was cancelled")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tell)
            nursery.start_soon(heed, nursery.cancel_scope)
            outcome = await self._replay(request, directory, on_progress)
            nursery.cancel_scope.cancel()
        if isinstance(outcome, EmulatorError):
            raise outcome
        path = directory / "result"
        control.write_file(path, outcome)
        return control.Completed(str(path))

    async def _replay(
        self, request: control.Replay, directory: Path, on_progress: Callable[[control.Progress], None]
    ) -> control.LiveRun | EmulatorError:
        """One run on idle nodes, which are idle again afterwards, or the cluster is broken."""
        faults: list[Exception] = []
        live: control.LiveRun | None = None
        try:
            live = await self._conduct(request, directory, on_progress)
        except Exception as error:
            faults.append(error)
        finally:
            close_s = min(_CLOSE_S, self._run.engine.stall_s)
            with trio.move_on_after(close_s, shield=True) as self._leaving:
                if not self._ending:
                    await self._each(lambda node: node.leave_run(faults))
            if self._leaving.cancelled_caught and not self._ending:
                self._broken = self._broken or f"the nodes did not leave the run within {close_s:g} s"
        if self._broken is not None:
            faults.append(EmulatorError(self._broken))
        if live is None or faults:
            fault = fault_of(BaseExceptionGroup("run", faults))
            log.error("run_failed", run=directory.name, code=fault.code, text=fault.text)
            return fault
        return live

    async def _conduct(
        self, request: control.Replay, directory: Path, on_progress: Callable[[control.Progress], None]
    ) -> control.LiveRun:
        run = msgspec.structs.replace(self._run, replay=request.replay)
        result = directory / "replay"
        client = next(self._nodes[member.name] for member in run.members if member.role == "client")

        def own(node: NodeProcess, part: str) -> str:
            return str(directory / f"{node.name}.{part}")

        epoch_s = time.monotonic()
        await self._ask_each(lambda node: control.Open(run, epoch_s, own(node, "files")), control.Opened)
        await self._ask_each(lambda node: control.Start(), control.Started)
        before = self._network.counters()
        async with trio.open_nursery() as nursery:
            for node in self._nodes.values():
                if node is not client:
                    nursery.start_soon(node.hear_only_faults)
            decisions = str(directory / "decisions") if request.decisions_bytes else None
            order = control.Play(str(directory / "workload"), decisions, str(result))
            await self._hear_replay(client, order, on_progress)
            nursery.cancel_scope.cancel()
        await self._ask_each(lambda node: control.Record(own(node, "record")), control.Recorded)
        after = self._network.counters()
        played = control.read_file(result, control.ReplayResult)
        return control.LiveRun(
            records=RunRecords(
                t0_s=played.t0_s,
                ended_s=played.ended_s,
                requests=played.requests,
                nodes=tuple(
                    control.read_file(Path(own(node, "record")), NodeRecord) for node in self._nodes.values()
                ),
            ),
            before=before,
            after=after,
            network_faults=self._network_faults(),
        )

    async def _hear_replay(
        self, client: NodeProcess, order: control.Play, on_progress: Callable[[control.Progress], None]
    ) -> None:
        """Have the client replay. It watches over all others, and is itself to be heard of now and then."""
        silence_s = 2 * self._run.engine.stall_s

        def on_news(event: control.News) -> None:
            patience.deadline = trio.current_time() + silence_s
            if isinstance(event, control.Progress):
                on_progress(event)

        with trio.move_on_after(silence_s) as patience:
            await client.ask(order, control.Played, on_news)
        if patience.cancelled_caught:
            raise EmulatorError(f"{client.name}: no answer for {silence_s:g} s (twice stall_s); is it stopped?")

    def _network_faults(self) -> tuple[str, ...]:
        """How the network differs from what was asked for. A link that is not as promised voids a run."""
        try:
            self._network.read_back()
        except TopologyError as error:
            return (error.text,)
        return ()


def _with_own_files(run: RunConfig, directory: Path) -> RunConfig:
    """The run with its model and cost files copied: users edit and delete theirs while the cluster is up."""
    model = run.model
    if (own := model_file(model)) is not None:
        model = msgspec.structs.replace(model, name=_handed_over(str(own), directory / "model.toml"))
    if model.costs:
        model = msgspec.structs.replace(model, costs=_handed_over(model.costs, directory / "costs.csv"))
    return msgspec.structs.replace(run, model=model)


def _handed_over(source: str, target: Path) -> str:
    """A copy of the user's file that the nodes, who may be another user, will be able to read."""
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise EmulatorError(f"{source}: cannot be handed to the nodes: {error.strerror}") from None
    return str(target)


def _raise_fault(group: BaseExceptionGroup[BaseException]) -> NoReturn:
    """Raise the group's cause if it is one of ours; anything else stays the group it is."""
    faults, rest = group.split(EmulatorError)
    if rest is not None or faults is None:
        raise group
    raise fault_of(faults) from None


def _claim(directory: ClusterDir) -> Claim:
    """The claim on a cluster's name, which another supervisor may be about to give up."""
    deadline_s = time.monotonic() + _CLAIM_S
    while (claim := directory.claim()) is None:
        state = directory.read()
        if (state is not None and state.phase == "ready") or time.monotonic() > deadline_s:
            holder = directory.supervisor()
            who = f" (supervisor pid {holder.pid})" if holder else ""
            raise EmulatorError(
                f"cluster {directory.name} is already up{who}; "
                f"`emulate down {directory.name}` ends it, --name starts another beside it"
            )
        time.sleep(_CLAIM_POLL_S)
    return claim


if __name__ == "__main__":
    main()
