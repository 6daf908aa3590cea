"""`emulate doctor`: can this host emulate, and if not, which command mends it?

What the kernel can do is tried, not guessed (``emulator.hosts.probe``). A check *fails* when emulation is
impossible without mending it, and *warns* when it is possible but slower or poorer.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

import click

from ..hosts.state import state_root

__all__ = ["Check", "checks", "doctor"]

Status = Literal["ok", "warn", "fail"]

_PROC_SYS = Path("/proc/sys")
_WANTED_FILES = 1024
_USER_SWITCHES = (
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"),
    ("kernel/unprivileged_userns_clone", "0", "1"),
    ("user/max_user_namespaces", "0", "28633"),
)
"""Files below /proc/sys that forbid user namespaces, the value that does, and one that does not."""
_MODULES = {
    "CONFIG_VETH": "veth",
    "CONFIG_BRIDGE": "bridge",
    "CONFIG_NET_SCH_HTB": "sch_htb",
    "CONFIG_NET_CLS_U32": "cls_u32",
}


class Check(NamedTuple):
    """What was looked at, how it stands, and the command that mends it ('' where there is nothing to mend)."""

    name: str
    status: Status
    detail: str
    mend: str = ""


def checks() -> Iterator[Check]:
    """All checks, in the order in which they are worth reading."""
    yield _python()
    yield from _packages()
    if sys.platform != "linux":
        yield Check("kernel", "fail", f"{platform.system()}: namespaces need Linux; `emulate sim` works here")
        return
    yield Check("kernel", "ok", f"Linux {platform.release()}, {len(os.sched_getaffinity(0))} CPUs")
    yield from _trials()
    yield _bridge_filter()
    yield _cgroups()
    yield _open_files()
    yield _state_directory()


def _python() -> Check:
    return Check("python", "ok", platform.python_version())


def _packages() -> Iterator[Check]:
    for name in ("trio", "numpy", "msgspec"):
        try:
            yield Check(name, "ok", version(name))
        except PackageNotFoundError:
            yield Check(name, "fail", "not installed", "scripts/setup")
    try:
        yield Check("torch", "ok", version("torch"))
    except PackageNotFoundError:
        yield Check("torch", "warn", "not installed; only the toy model needs it", "scripts/setup")


def _trials() -> Iterator[Check]:
    from ..hosts.probe import TRIALS, run_trials

    found = run_trials()
    for trial in TRIALS:
        if trial not in found:
            yield Check(trial, "fail", "not tried, because of the one above")
            continue
        ok, detail = found[trial]
        yield Check(trial, "ok" if ok else "fail", detail, "" if ok else _mend(trial, detail))


def _mend(trial: str, detail: str) -> str:
    if trial == "user namespace":
        for path, forbids, wanted in _USER_SWITCHES:
            if _read(_PROC_SYS / path) == forbids:
                return f"sudo sysctl -w {path.replace('/', '.')}={wanted}   (or run emulate with sudo)"
        return "run emulate with sudo"
    for option in re.findall(r"CONFIG_\w+", detail):
        if option in _MODULES:
            return f"sudo modprobe {_MODULES[option]}"
    if "ermission" in detail or "not permitted" in detail:
        return "run emulate with sudo; in a container, start it with --privileged"
    return ""


def _bridge_filter() -> Check:
    value = _read(_PROC_SYS / "net/bridge/bridge-nf-call-iptables")
    if value == "1":
        return Check(
            "br_netfilter",
            "warn",
            "bridged packets pass through iptables, which costs CPU time",
            "sudo sysctl -w net.bridge.bridge-nf-call-iptables=0",
        )
    return Check("br_netfilter", "ok", "not loaded" if value is None else "off for bridged packets")


def _cgroups() -> Check:
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        return Check("cgroups", "ok", "version 2 (none is needed)")
    kind = "version 1" if root.is_dir() and any(root.iterdir()) else "none"
    return Check("cgroups", "ok", f"{kind} (none is needed)")


def _open_files() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _WANTED_FILES:
        detail = f"{soft} open files a process, {_WANTED_FILES} are good for 2P4D"
        return Check("open files", "warn", detail, f"ulimit -n {_WANTED_FILES}")
    return Check("open files", "ok", "unlimited" if soft < 0 else f"{soft} a process")


def _state_directory() -> Check:
    root = state_root()
    nearest = root
    while not nearest.exists():
        nearest = nearest.parent
    if os.access(nearest, os.W_OK | os.X_OK):
        return Check("state", "ok", f"{root}")
    return Check("state", "fail", f"{root}: cannot be written", "run emulate with sudo")


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> int:
    """Can this host emulate? What is missing, and the command that mends it. Exit code 1 if it cannot."""
    found = list(checks())
    able = all(check.status != "fail" for check in found)
    if as_json:
        click.echo(json.dumps({"able": able, "checks": [check._asdict() for check in found]}))
    else:
        for check in found:
            click.echo(f"{check.status:<5} {check.name:<18} {check.detail}")
            if check.mend:
                click.echo(f"{'':<24} mend: {check.mend}")
        click.echo("this host can emulate" if able else "this host cannot emulate; `emulate sim` needs none of it")
    return 0 if able else 1
