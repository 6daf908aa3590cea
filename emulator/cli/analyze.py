"""`emulate analyze`: what a cluster can carry, and what a trace asks of it, from formulas alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import click

from ..errors import ConfigError
from .options import DEFAULT_SAMPLE, FORMATS, load_run, load_trace, say_notes

if TYPE_CHECKING:
    from rich.console import Console

    from ..analysis import BottleneckFree, Cluster, LoadReport

__all__ = ["analyze"]

OFFERED = (
    "offered = seconds of a resource that all requests need / seconds of the run if storage and network cost"
    " nothing (the longest of: the slowest agent, PE GPUs, DE GPUs)"
)
TWICE = (
    "time offered twice = share of that run in which the SNICs that read are asked for at least 2 x their rate,"
    " each agent asking for its turn's hit bytes evenly over the turn's computation"
)


_PATHS: dict[Literal["pe", "de", "both"], str] = {"pe": "PE path", "de": "DE path", "both": "both paths"}


@click.command()
@click.argument("topology")
@click.option(
    "--trace", "source", default=DEFAULT_SAMPLE, show_default=True, help="A bundled sample, a file, or a folder."
)
@click.option("--trace-format", help=f"What the trace is: {FORMATS}.")
@click.option("--agents", type=int, help="Agents in the closed loop (default: all trajectories of the trace).")
@click.option("--max-len", type=int, help="Cut trajectories before the first context that is longer, in tokens.")
@click.option("--model", help="Bundled shape or a TOML file (default: the topology file's, or ds660b).")
@click.option("--warm/--cold", default=None, help="Only with first prompts' blocks stored, or only without.")
@click.option("--seed", type=int, default=0, show_default=True, help="Draws the first rounds of repeated agents.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def analyze(
    topology: str,
    source: str,
    trace_format: str | None,
    agents: int | None,
    max_len: int | None,
    model: str | None,
    warm: bool | None,
    seed: int,
    as_json: bool,
) -> None:
    """Is TOPOLOGY bottleneck-free, and which resource does a trace bind on it?"""
    import msgspec

    from ..analysis import bottleneck_free, offered_load
    from ..deployment import Deployment
    from ..plan import cluster_spec
    from ..workload import closed_loop

    if seed < 0:
        raise ConfigError(f"--seed {seed}: expected 0 or more")
    run = load_run(topology, model=model)
    cluster = _cluster(cluster_spec(run))
    workload, notes = load_trace(source, trace_format, max_len)
    if agents is not None:
        workload = closed_loop(workload, agents, seed, max_len)
    costs = Deployment(run).costs
    section = bottleneck_free(cluster)
    reports = [
        offered_load(workload, cluster, costs, warm=each, block_tokens=run.engine.block_tokens)
        for each in ((True, False) if warm is None else (warm,))
    ]
    if as_json:
        result: dict[str, Any] = {
            "cluster": msgspec.to_builtins(cluster),
            "model": costs.shape.name,
            "bottleneck_free": {"holds": section.bottleneck_free, **msgspec.to_builtins(section)},
            "trace": workload.name,
            "notes": notes,
            "offered_load": [
                {
                    **msgspec.to_builtins(report),
                    "snic_offered": {p: report.snic_offered(p) for p in ("pe", "de", "both")},
                }
                for report in reports
            ],
            "formulas": {"offered": OFFERED, "twice_share": TWICE},
        }
        click.echo(msgspec.json.encode(result).decode())
        return
    from rich.console import Console

    console = Console(highlight=False, width=110)
    _print_section(console, cluster, section)
    for report in reports:
        _print_load(console, f"{workload.name} on {topology}, {costs.shape.name}", report)
    say_notes(notes)


def _cluster(spec: Any) -> Cluster:
    """The plain numbers of a ``topology.spec.ClusterSpec``."""
    from ..analysis import Cluster

    bps = 1e9 / 8
    return Cluster(
        pe_nodes=spec.pe_nodes,
        de_nodes=spec.de_nodes,
        gpus=spec.gpus_per_node,
        cnic_bps=spec.cnic_gbps * bps,
        snic_bps=spec.snic_gbps * bps,
        storage_bps=spec.storage_nodes * spec.storage_link_gbps * bps,
    )


def _print_section(console: Console, cluster: Cluster, section: BottleneckFree) -> None:
    from rich.table import Table

    console.print(
        f"P = {cluster.pe_nodes}, D = {cluster.de_nodes} nodes, g = {cluster.gpus}, s = {cluster.s:g},"
        f" B = {cluster.cnic_bps / 1e9:g} GB/s, M = {cluster.dram_bps / 1e9:g} GB/s"
    )
    console.print(
        f"Tp = B s/(D g^2) = {section.pe_path_bps / 1e9:.3f} GB/s and Tc = B s/(P g^2) ="
        f" {section.de_path_bps / 1e9:.3f} GB/s for each PE-DE pair of engines"
    )
    table = Table("all storage NICs saturated", "formula", "GB/s", "of GB/s", "")
    for load in section.loads:
        fits = "carries it" if load.load_bps <= load.limit_bps * (1 + 1e-9) else "BOTTLENECK"
        table.add_row(load.resource, load.formula, f"{load.load_bps / 1e9:.2f}", f"{load.limit_bps / 1e9:g}", fits)
    console.print(table)
    for formula, _, bound in section.ratio_bounds:
        console.print(f"  {formula}: {bound:.4g}")
    console.print(
        f"P/D = {section.ratio:.3g}, bottleneck-free from {section.ratio_low:.3g} to {section.ratio_high:.3g}:"
        f" {'yes' if section.bottleneck_free else 'NO'}"
    )
    console.print(
        f"Usable storage bandwidth: one path P s B = {section.basic_bps / 1e9:g} GB/s, both (P + D) s B ="
        f" {section.dualpath_bps / 1e9:g} GB/s\n"
    )


def _print_load(console: Console, title: str, report: LoadReport) -> None:
    from rich.table import Table
    from rich.text import Text

    start = "warm: first prompts' blocks stored before the start" if report.warm else "cold: nothing stored"
    table = Table("seconds needed, and offered", *_PATHS.values(), "seconds =", title_justify="left")
    table.title = Text(f"{title} ({start})")
    for rows in zip(*(report.loads[path] for path in _PATHS), strict=True):
        cells = (f"{load.busy_s:8.3f} s {load.offered:5.2f}" for load in rows)
        table.add_row(rows[0].resource, *cells, rows[0].formula)
    table.add_section()
    table.add_row("time offered twice", *(f"{report.twice_share[path]:.0%}" for path in _PATHS), "see below")
    table.add_row("binds", *(report.binding[path] for path in _PATHS), "needs the most seconds")
    table.add_row("JCT bound", *(f"{report.jct_bound_s[path]:8.3f} s" for path in _PATHS), "what binds needs")
    console.print(table)
    console.print(
        f"One SNIC that reads is offered {report.snic_offered('pe'):.2f} x what it can carry on the PE path alone,"
        f" {report.snic_offered('both'):.2f} x on both; at least twice for {report.twice_share['pe']:.0%} and"
        f" {report.twice_share['both']:.0%} of the run."
    )
    console.print(f"{OFFERED}: {report.free_s:.3f} s")
    console.print(TWICE)
    console.print(
        f"{report.agents} agents, {report.requests} requests: {report.hit_tokens:,} hit and"
        f" {report.miss_tokens:,} missed prompt tokens, {report.output_tokens:,} generated;"
        f" {report.read_bytes / 1e9:,.1f} GB to read; cache-compute ratio {report.gb_per_pflop:.1f} GB/PFLOP"
    )
    console.print(
        f"Store at the end {report.store_bytes / 1e9:,.1f} GB; working set aps x JCT x total/2 x bytes, where"
        f" aps x JCT = agents: {report.working_set_bytes / 1e9:,.1f} GB\n"
    )
