"""One node's process as its supervisor has it: started, spoken with, and its end accounted for.

Orders go to its standard input and events come from its standard output (``emulator.hosts.control``); its standard
error is its log. ``spawn`` and ``open_netns`` come before trio, the rest after ``adopt``.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec
import structlog
import trio

from topology.namespaces import netns_fd_of_pid

from ..errors import EmulatorError, PeerLost, ProtocolViolation
from . import control
from .node import IN_NETNS

__all__ = ["NodeProcess"]

_NETNS_S = 20.0
_EXIT_S = 0.5
_EVENTS = 64
_LAST_WORDS_BYTES = 4096

log = structlog.get_logger()


class NodeProcess:
    """One node's process: its orders, its events, and how it ended."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
        self.name = name
        self.process = process
        self.ended: str | None = None
        self._log_path = log_path
        self._sender, self._events = trio.open_memory_channel[control.NodeEvent](_EVENTS)

    @classmethod
    def spawn(cls, name: str, logs: Path, user: tuple[int, int] | None) -> NodeProcess:
        """Start the node; it will serve as ``user``. From the main thread, into the supervisor's namespaces."""
        path = logs / f"{name}.log"
        with path.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "emulator.hosts.node", name, *map(str, user or ())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                cwd="/",
                start_new_session=True,
            )
        return cls(name, process, path)

    def open_netns(self) -> int:
        """A descriptor of the node's network namespace, once it stands in it. EmulatorError if it has ended."""
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        heard = b""
        while heard != IN_NETNS:
            ready, _, _ = select.select([fd], [], [], _NETNS_S)
            chunk = os.read(fd, len(IN_NETNS) - len(heard)) if ready else b""
            if not chunk:
                raise EmulatorError(self.obituary(self.process.wait() if ready else None))
            heard += chunk
        try:
            return netns_fd_of_pid(self.process.pid)
        except FileNotFoundError:
            raise EmulatorError(self.obituary(self.process.wait())) from None

    def adopt(self) -> None:
        """Hand the pipes to trio."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self._orders = trio.lowlevel.FdStream(os.dup(self.process.stdin.fileno()))
        self._speech = trio.lowlevel.FdStream(os.dup(self.process.stdout.fileno()))
        self.process.stdin.close()
        self.process.stdout.close()

    async def pump(self, on_end: Callable[[NodeProcess], None]) -> None:
        """Pass the node's events on until it ends; then say how."""
        try:
            async for event in control.Lines[control.NodeEvent](self._speech, control.NodeEvent):
                await self._sender.send(event)
        except ProtocolViolation as error:
            log.error("node_speaks_nonsense", node=self.name, text=error.text)
            self.process.kill()
        # The end of its output comes before the end of the process by no more than its exit.
        pidfd = os.pidfd_open(self.process.pid)
        try:
            with trio.move_on_after(_EXIT_S):
                await trio.lowlevel.wait_readable(pidfd)
        finally:
            os.close(pidfd)
        self.ended = self.obituary(self.process.poll())
        self._sender.close()
        on_end(self)

    def obituary(self, code: int | None) -> str:
        """How the process ended, with the last line of its log; ``code`` as Popen gives it."""
        if code is None:
            how = "closed its output"
        elif code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        else:
            how = f"ended with code {code}"
        return f"{self.name}: the process {how}{self._last_words()}"

    def _last_words(self) -> str:
        try:
            with self._log_path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_WORDS_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return f": {lines[-1][:400]}" if lines else ""

    async def tell(self, order: control.NodeOrder) -> None:
        """Send an order; one task at a time. EmulatorError when the node has ended."""
        try:
            await self._orders.send_all(control.encode(order))
        except trio.BrokenResourceError:
            raise PeerLost(self.ended or f"{self.name}: the process is gone") from None

    async def hear(self) -> control.NodeEvent:
        """The node's next event. The error that it reports, or that it ended, is raised."""
        try:
            event = await self._events.receive()
        except trio.EndOfChannel:
            raise EmulatorError(self.ended or f"{self.name}: the process is gone") from None
        if isinstance(event, control.Failed):
            text = event.text if event.text.startswith(f"{self.name}: ") else f"{self.name}: {event.text}"
            raise msgspec.structs.replace(event, text=text).error()
        return event

    async def ask(
        self,
        order: control.NodeOrder,
        answer: type[msgspec.Struct],
        on_news: Callable[[control.News], None] | None = None,
    ) -> None:
        """Send an order and return when it is answered; ``on_news`` is told what is heard before."""
        await self.tell(order)
        while not isinstance(event := await self.hear(), answer):
            if isinstance(event, control.News) and on_news is not None:
                on_news(event)
            else:
                raise ProtocolViolation(f"{self.name}: {type(event).__name__} instead of {answer.__name__}")

    async def hear_only_faults(self) -> NoReturn:
        """Nothing is expected of this node now, so whatever it says is an error."""
        raise ProtocolViolation(f"{self.name}: {type(await self.hear()).__name__} instead of nothing")

    async def leave_run(self, faults: list[Exception]) -> None:
        """Make the node idle again; what it still has to complain about is added to ``faults``."""
        try:
            await self.tell(control.Close())
            while not self.ended:
                try:
                    if isinstance(await self.hear(), control.Closed):
                        return
                except EmulatorError as error:
                    faults.append(error)
        except PeerLost as error:
            faults.append(error)
