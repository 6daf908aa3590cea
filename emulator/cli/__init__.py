"""The command line. Commands live in their own modules, which are imported only when they are called.

So `emulate --help` loads neither numpy nor torch, and `sim` nothing of Linux networking. A user's mistake is
one line on standard error and an exit code; a traceback is always a defect of ours. Exit codes: 0 done,
1 failed, 2 usage, 3 emulation invalid, 4 an invariant was broken, 130 interrupted.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NamedTuple, NoReturn

import click
from click.exceptions import NoArgsIsHelpError

from ..errors import EmulatorError

__all__ = ["main"]

INTERRUPTED = 130
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


class _Lazy(NamedTuple):
    """Where a command is, and what the list of commands says about it."""

    module: str
    attribute: str
    summary: str


_COMMANDS: dict[str, _Lazy] = {
    "doctor": _Lazy("doctor", "doctor", "Can this host emulate? What is missing, and the command that mends it."),
    "up": _Lazy("lifecycle", "up", "Bring a cluster up and leave it running."),
    "status": _Lazy("lifecycle", "status", "Which clusters are up."),
    "down": _Lazy("lifecycle", "down", "Take a cluster down."),
    "exec": _Lazy("lifecycle", "exec_", "Run a command inside a node's network."),
    "replay": _Lazy("serve", "replay", "Replay a trace on a cluster that is up."),
    "run": _Lazy("serve", "run", "Bring a cluster up, replay a trace on every system, compare, take it down."),
    "sim": _Lazy("serve", "sim", "The same in virtual time, without root."),
    "trace": _Lazy("trace", "trace", "Make, measure and convert traces."),
    "analyze": _Lazy("analyze", "analyze", "What a cluster can carry, and what a trace asks of it."),
    "profile": _Lazy("profile", "profile", "What a scheduler is told in advance: alpha, beta, the attention fit."),
    "verify": _Lazy("serve", "verify", "Check every invariant on a finished run."),
}


class _Group(click.Group):
    """The group of all commands; see the module."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        lazy = _COMMANDS.get(cmd_name)
        if lazy is None:
            return None
        command: click.Command = getattr(importlib.import_module(f".{lazy.module}", __name__), lazy.attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.summary) for name, lazy in _COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-"):
            near = difflib.get_close_matches(name, _COMMANDS, 1)
            hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(_COMMANDS)}"
            raise click.UsageError(f"no command {name!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run and exit; every way of failing is one line and a code."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        _open_standard_streams()
        try:
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
            sys.stdout.flush()
        except NoArgsIsHelpError as error:
            # A group without a command: its help is the answer, as it was laid out.
            click.echo(error.format_message(), err=True)
            sys.exit(error.exit_code)
        except click.ClickException as error:
            _fail(_one_line(error), error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            _fail("interrupted", INTERRUPTED)
        except EmulatorError as error:
            _fail(error.text, error.exit_code)
        except BaseExceptionGroup as group:
            if group.subgroup(KeyboardInterrupt) is None:
                raise
            _fail("interrupted", INTERRUPTED)
        except BrokenPipeError:
            # Whoever read our output has seen enough.
            _give_up_output()
            sys.exit(1)
        except Exception as error:
            _fail_foreign(error)
        sys.exit(code if isinstance(code, int) else 0)


def _open_standard_streams() -> None:
    """Make a closed standard stream the null device: no pipe or file of ours may get its number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", closefd=False))


def _give_up_output() -> None:
    """Let what is still to be written go nowhere, so that the interpreter's flush at exit does not complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _one_line(error: click.ClickException) -> str:
    text = " ".join(error.format_message().split())
    context = getattr(error, "ctx", None)
    return f"{text} (see `{context.command_path} --help`)" if context is not None else text


def _fail(text: str, code: int) -> NoReturn:
    click.echo(f"emulate: {_escaped(text)}", err=True)
    sys.exit(code)


def _escaped(text: str) -> str:
    """One line that a terminal can show: a name, key or path of the user's may hold any character."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _fail_foreign(error: Exception) -> NoReturn:
    """A full disk and errors of ``topology`` are the user's too; anything else is a defect, with its traceback."""
    if isinstance(error, OSError) and error.errno in _FULL:
        _give_up_output()
        _fail(f"{error.filename or 'the output'} cannot be written: {error.strerror}", 1)
    from topology.errors import TopologyError

    if isinstance(error, TopologyError):
        _fail(error.text, 2)
    raise error


@click.group(
    cls=_Group,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(version("dualpath-emulator"), prog_name="emulate")
def main() -> None:
    """A DualPath cluster on this machine: real processes, real network namespaces, a real trace."""
