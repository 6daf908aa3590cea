"""`emulate up`, `status`, `down`, `exec`: clusters that stay up between commands."""

from __future__ import annotations

import json
import signal
import sys
from typing import TYPE_CHECKING

import click

from ..errors import ConfigError, EmulatorError
from ..hosts.state import ClusterDir, ClusterState, check_cluster_name, cluster_dirs, state_root

if TYPE_CHECKING:
    from ..config import RunConfig

__all__ = ["down", "exec_", "find_cluster", "show_stage", "status", "up"]


def find_cluster(name: str | None) -> ClusterDir:
    """The directory of the named cluster, or of the only one there is. EmulatorError otherwise."""
    if name is not None:
        return ClusterDir(state_root(), name)
    found = [directory for directory in cluster_dirs(state_root()) if directory.supervisor() is not None]
    if not found:
        raise EmulatorError("no cluster is up; `emulate up TOPOLOGY` starts one")
    if len(found) > 1:
        raise ConfigError(f"{len(found)} clusters are up, name one: {', '.join(d.name for d in found)}")
    return found[0]


@click.command()
@click.argument("topology")
@click.option("--name", help="What to call the cluster; the topology's own name otherwise.")
@click.option("--model", help="A bundled model's name or a model file.")
@click.option("--kv-bytes", type=click.IntRange(min=1), help="Emulated KV bytes per token and layer.")
@click.option("--dilation", type=float, help="Wall seconds per model second.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def up(
    topology: str,
    name: str | None,
    model: str | None,
    kv_bytes: int | None,
    dilation: float | None,
    as_json: bool,
) -> None:
    """Bring TOPOLOGY (a preset's name or a TOML file) up and leave it running."""
    import trio

    from ..cluster import start_cluster
    from .options import load_run

    run = load_run(topology, model=model, kv_bytes=kv_bytes, dilation=dilation)
    name = check_cluster_name(name or run.topology["name"])
    started = trio.run(start_cluster, name, topology, run, show_stage)
    # It is up: who interrupts from now on comes too late, and must not be told otherwise.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    if as_json:
        facts = {"cluster": name, "supervisor": started.supervisor, "nodes": list(started.nodes)}
        seconds = {"network_s": round(started.network_s, 3), "total_s": round(started.total_s, 3)}
        click.echo(json.dumps(facts | seconds))
        return
    click.echo(f"cluster {name} is up: {_summary(run)}")
    click.echo(f"  network in {started.network_s:.2f} s, everything in {started.total_s:.2f} s")
    click.echo(f"  supervisor pid {started.supervisor}; state and logs in {state_root() / name}")


def show_stage(text: str) -> None:
    """Tell somebody who is watching what is being done."""
    if sys.stderr.isatty():
        click.echo(f"{text} ...", err=True)


def _summary(run: RunConfig) -> str:
    counts: dict[str, int] = {}
    for member in run.members:
        counts[member.role] = counts.get(member.role, 0) + 1
    labels = {"pe": "PE", "de": "DE", "storage": "storage", "scheduler": "scheduler", "client": "client"}
    return ", ".join(f"{count} {labels[role]}" for role, count in counts.items())


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def status(as_json: bool) -> None:
    """Which clusters are up, and whose directories are left over."""
    rows = [_row(directory) for directory in cluster_dirs(state_root())]
    if as_json:
        click.echo(json.dumps({"clusters": rows}))
        return
    if not rows:
        click.echo("nothing is up")
    for row in rows:
        if row["phase"] == "gone":
            click.echo(f"{row['cluster']}: its supervisor is gone; `emulate down {row['cluster']}` clears up")
            continue
        nodes = row["nodes"]
        listed = ", ".join(f"{node} {pid}" for node, pid in nodes.items()) if isinstance(nodes, dict) else ""
        click.echo(f"{row['cluster']}: {row['phase']}, topology {row['topology']}, pid {row['supervisor']}")
        if listed:
            click.echo(f"  {listed}")


def _row(directory: ClusterDir) -> dict[str, object]:
    state = directory.read()
    if state is not None:
        nodes = {name: process.pid for name, process in state.nodes.items() if process.alive}
        return {
            "cluster": directory.name,
            "phase": state.phase,
            "topology": state.topology,
            "supervisor": state.supervisor.pid,
            "nodes": nodes,
        }
    supervisor = directory.supervisor()
    return {
        "cluster": directory.name,
        "phase": "gone" if supervisor is None else "state unreadable",
        "topology": None,
        "supervisor": None if supervisor is None else supervisor.pid,
        "nodes": {},
    }


@click.command()
@click.argument("name", required=False)
@click.option("--all", "everything", is_flag=True, help="Take every cluster of this state directory down.")
def down(name: str | None, everything: bool) -> None:
    """Take the cluster NAME down (the only one, if NAME is left out). Nothing to do is no error."""
    from ..hosts.processes import take_down

    if name is not None and everything:
        raise click.UsageError("give either NAME or --all")
    found = [ClusterDir(state_root(), name)] if name is not None else cluster_dirs(state_root())
    if len(found) > 1 and not everything:
        raise ConfigError(
            f"{len(found)} clusters are there, name one or use --all: {', '.join(d.name for d in found)}"
        )
    if not found:
        click.echo("nothing is up")
    for directory in found:
        done = take_down(directory)
        click.echo(f"cluster {directory.name} is down" if done else f"cluster {directory.name} is not up")


@click.command("exec", context_settings={"ignore_unknown_options": True})
@click.option("--cluster", help="The cluster's name; may be left out while one is up.")
@click.argument("node")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_(cluster: str | None, node: str, command: tuple[str, ...]) -> int:
    """Run COMMAND inside NODE's network and return its exit code (128 + n if signal n ended it).

    Put -- before the command: emulate exec pe0 -- ip -br addr
    """
    from ..hosts.processes import run_in_node

    return run_in_node(_state_of(find_cluster(cluster)), node, command)


def _state_of(directory: ClusterDir) -> ClusterState:
    state = directory.read()
    if state is None or state.phase != "ready":
        raise EmulatorError(f"cluster {directory.name} is not up; `emulate status` lists those that are")
    return state
