"""A user's policy from a Python file, held to the interface: what it does wrong is told with its file and line.

The file defines ``make_policy(setup)``, which returns an object with the methods of ``Policy``. Only here are
answers checked: a name that was not offered, an answer that is too long, an exception, or no answer in time is a
``PolicyError``. What is wrong before the first question is a ``ConfigError``.

Theory of operation. In the main thread an answer's time is limited by an interval timer, whose signal also ends a
blocking call; the handler and the timer that were there before come back afterwards. No other thread is sent
signals, so there the question is put in a thread of its own, which is left behind when it is late, with an
exception on its way. A single call into C that never looks at signals cannot be ended in either way.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from pathlib import Path
from textwrap import shorten
from types import CodeType, FrameType, MappingProxyType, ModuleType
from typing import Any, TypeVar, cast, get_args

from ..errors import ConfigError, EmulatorError, PolicyError
from .interface import Load, Policy, PolicySetup, Queued, Side

__all__ = ["ANSWER_LIMIT_S", "load_policy"]

T = TypeVar("T")

ANSWER_LIMIT_S = 5.0
"""Seconds of wall time after which a policy counts as not answering."""

GRACE_S, ATTEMPTS = 0.05, 10
"""How long a late policy may take to come to its end before it is told again, and how often another thread is."""

SHOWN = 4
"""Names of what was offered that a message lists."""

METHODS = ("assign_prefill", "route_decode", "assign_decode", "choose_path")

Method = Callable[..., Any]
TraceFunction = Callable[[FrameType, str, Any], Any]


def load_policy(path: Path, setup: PolicySetup, *, limit_s: float = ANSWER_LIMIT_S) -> Policy:
    """The policy that ``make_policy(setup)`` of the file at ``path`` returns, checked at each question.

    ``limit_s`` bounds each answer, and the loading. ConfigError where the file cannot be used.
    """
    file = _File(path, limit_s)
    code = _compiled(path)
    module = ModuleType(f"policy:{path}")
    module.__file__ = str(path)
    # Dataclasses, among others, look their module up by name.
    sys.modules[module.__name__] = module
    file.run("on loading", 1, ConfigError, lambda: exec(code, module.__dict__))
    make = getattr(module, "make_policy", None)
    if not callable(make):
        raise ConfigError(f"{path}: it defines no make_policy(setup); docs/policies.md shows how to write one")

    def methods() -> dict[str, Method]:
        policy = make(setup)
        found = {name: getattr(policy, name, None) for name in METHODS}
        missing = [name for name, method in found.items() if not callable(method)]
        if missing:
            raise _Unfit(f"returned a {type(policy).__name__}, which has no {', '.join(missing)}")
        return {name: method for name, method in found.items() if method is not None}

    line = file.line_of(make, 1)
    return _Checked(file, file.run("make_policy", line, ConfigError, methods), line)


def _compiled(path: Path) -> CodeType:
    """The code of the file. Compiled here, as importing would leave a cache beside the user's file."""
    try:
        if not path.is_file():
            found = "is not a regular file" if path.exists() else "does not exist"
            raise ConfigError(f"{path}: {found}; a policy is a Python file that defines make_policy(setup)")
        return compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno or 1}: not valid Python: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{path}:1: not valid Python: {_told(error)}") from error


class _Checked:
    """A user's policy, asked within a time limit and about copies, whose answers are checked."""

    def __init__(self, file: _File, methods: Mapping[str, Method], made_at: int) -> None:
        self._file = file
        self._methods = methods
        self._made_at = made_at

    def assign_prefill(self, queue: Sequence[Queued], engines: Sequence[Load]) -> Sequence[str]:
        return self._assign("assign_prefill", queue, engines)

    def route_decode(self, queue: Sequence[Queued], groups: Mapping[str, int]) -> Sequence[str]:
        asked = (tuple(queue), MappingProxyType(dict(groups)))

        def check(answer: object) -> Sequence[str]:
            names = _names(answer, queue, "group", groups)
            if len(names) < len(queue):
                raise _Unfit(f"answered for {len(names)} of {len(queue)} requests; every one needs a group")
            return names

        return self._ask("route_decode", asked, check)

    def assign_decode(self, queue: Sequence[Queued], engines: Sequence[Load]) -> Sequence[str]:
        return self._assign("assign_decode", queue, engines)

    def choose_path(self, request: Queued, pe_read_queue: int, de_read_queue: int) -> Side:
        def check(answer: object) -> Side:
            for side in get_args(Side):
                if isinstance(answer, str) and answer == side:
                    return cast(Side, side)
            raise _Unfit(f"answered {_shown(answer)} for request {request.request!r}; a path is 'pe' or 'de'")

        return self._ask("choose_path", (request, pe_read_queue, de_read_queue), check)

    def _assign(self, method: str, queue: Sequence[Queued], engines: Sequence[Load]) -> Sequence[str]:
        offered = dict.fromkeys(load.engine for load in engines)
        return self._ask(
            method, (tuple(queue), tuple(engines)), lambda answer: _names(answer, queue, "engine", offered)
        )

    def _ask(self, method: str, asked: tuple[object, ...], check: Callable[[object], T]) -> T:
        function = self._methods[method]
        line = self._file.line_of(function, self._made_at)
        return self._file.run(method, line, PolicyError, lambda: check(function(*asked)))


def _names(answer: object, queue: Sequence[Queued], kind: str, offered: Collection[str]) -> tuple[str, ...]:
    """An answer as names of what was offered, at most one a request."""
    if not isinstance(answer, Sequence) or isinstance(answer, str | bytes):
        raise _Unfit(f"answered {_shown(answer)}; expected a list with the {kind} of each request")
    names = tuple(islice(answer, len(queue) + 1))
    if len(names) > len(queue):
        raise _Unfit(f"answered for more than the {len(queue)} requests it was asked about")
    for name, request in zip(names, queue, strict=False):
        if not isinstance(name, str) or name not in offered:
            listed = ", ".join([*islice(offered, SHOWN), *(["..."] if len(offered) > SHOWN else [])])
            raise _Unfit(f"gave request {request.request!r} the {kind} {_shown(name)}; offered were {listed}")
    return names


class _Unfit(Exception):
    """An answer that nothing can be done with; its text says why."""


class _Late(BaseException):
    """Time is up. Not an Exception, so that a policy's own ``except Exception`` does not end it.

    ``stack`` is where the policy was then: (file, line) of each frame, the innermost first.
    """

    def __init__(self, frame: FrameType | None = None) -> None:
        super().__init__()
        self.stack = [] if frame is None else [(f.f_code.co_filename, n) for f, n in traceback.walk_stack(frame)]


class _File:
    """Runs what a user's file defines, and knows its lines."""

    def __init__(self, path: Path, limit_s: float) -> None:
        self._name = str(path)
        self._limit_s = limit_s

    def run(self, what: str, line: int, error: type[EmulatorError], call: Callable[[], T]) -> T:
        """The result of ``call``; whatever it raises becomes an ``error``.

        The error names the innermost line of the file that was being executed, or ``line`` where none was.
        """
        run = _alarmed if threading.current_thread() is threading.main_thread() else _apart
        try:
            return run(call, self._limit_s)
        except KeyboardInterrupt:
            raise
        except _Unfit as unfit:
            raise error(f"{self._name}:{line}: {what}: {unfit}") from None
        except _Late as late:
            at = next((n for name, n in late.stack if name == self._name), line)
            raise error(f"{self._name}:{at}: {what}: no answer within {self._limit_s:g} s; it was here") from None
        except BaseException as raised:
            through = traceback.walk_tb(raised.__traceback__)
            at = [line, *(n for frame, n in through if frame.f_code.co_filename == self._name)][-1]
            raise error(f"{self._name}:{at}: {what}: {_told(raised)}") from raised

    def line_of(self, function: Method, otherwise: int) -> int:
        """The line on which a function is defined, if that is in this file."""
        code = getattr(function, "__code__", None)
        return code.co_firstlineno if code is not None and code.co_filename == self._name else otherwise


def _alarmed(call: Callable[[], T], limit_s: float) -> T:
    """The result of ``call`` in the main thread; _Late out of it, wherever it is, after ``limit_s``."""
    late: _Late | None = None

    def alarm(_signum: int, frame: FrameType | None) -> None:
        nonlocal late
        if late is None:
            late = _Late(frame)
        elif frame is None or frame.f_code.co_filename == __file__:
            return
        else:
            _raise_at_next_line(frame, late)
        raise late

    handler, tracer = signal.getsignal(signal.SIGALRM), sys.gettrace()
    delay_s, interval_s = signal.getitimer(signal.ITIMER_REAL)
    began_s = time.monotonic()
    signal.signal(signal.SIGALRM, alarm)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, limit_s, GRACE_S)
            return call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.settrace(tracer)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
        if delay_s:
            left_s = delay_s - (time.monotonic() - began_s)
            signal.setitimer(signal.ITIMER_REAL, max(left_s, 1e-6), interval_s)
        if late is not None:
            # Whatever came of it on its way out: an exception of a lock that it left, or even an answer.
            raise late


def _raise_at_next_line(frame: FrameType, error: BaseException) -> None:
    """Have ``error`` raised at the next line of ``frame`` or of a caller, be it the first one of a handler.

    Code that goes on after every exception catches what is raised inside its ``try``, but not this.
    """

    def trace(_frame: FrameType, event: str, _arg: object) -> TraceFunction:
        if event == "line":
            raise error
        return trace

    for at, _ in traceback.walk_stack(frame):
        if at.f_code.co_filename == __file__:
            break
        at.f_trace = trace
    sys.settrace(trace)


def _apart(call: Callable[[], T], limit_s: float) -> T:
    """The result of ``call`` in a thread of its own; _Late after ``limit_s``, whether or not that has ended."""
    results: list[T] = []
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=serve, name="policy", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        assert thread.ident is not None
        late = _Late(sys._current_frames().get(thread.ident))
        for _ in range(ATTEMPTS):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Late))
            thread.join(GRACE_S)
            if not thread.is_alive():
                break
        raise late
    if errors:
        raise errors[0]
    return results[0]


def _told(error: BaseException) -> str:
    """An exception in one line, like the last one of its traceback."""
    return shorten(" ".join(traceback.format_exception_only(error)), 300, placeholder=" ...")


def _shown(value: object) -> str:
    """What a policy answered, in a few words; a name in quotes, of anything else its type."""
    return shorten(repr(value), 60, placeholder="...") if isinstance(value, str) else f"a {type(value).__name__}"
