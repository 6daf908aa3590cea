"""`emulate profile`: what the scheduler of a cluster is told in advance, and how right it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .options import load_run

if TYPE_CHECKING:
    from rich.console import Console

    from ..deployment import Deployment
    from ..study.readrate import ReadRate

__all__ = ["profile"]

CONTEXTS = (0, 8_192, 32_768, 65_536, 131_072)
"""Cached tokens for which the largest chunk is shown."""


@click.command()
@click.argument("topology")
@click.option("--model", help="Bundled shape or a TOML file (default: the topology file's, or ds660b).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def profile(topology: str, model: str | None, as_json: bool) -> None:
    """Profile TOPOLOGY: alpha and beta, the fit of attention times, chunks under the quota, expert traffic."""
    from ..deployment import Deployment
    from ..study.readrate import measure_read_rate

    run = load_run(topology, model=model)
    deployment = Deployment(run)
    result = _result(deployment, measure_read_rate(run))
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(result).decode())
        return
    from rich.console import Console

    _print(Console(highlight=False, width=110), topology, result)


def _result(deployment: Deployment, measured: ReadRate) -> dict[str, Any]:
    engine, found = deployment.config.engine, deployment.profile
    fit = found.predictor
    return {
        "cluster": deployment.config.topology["name"],
        "model": deployment.shape.name,
        "gpu": deployment.costs.gpu.name,
        "hardware": {"seed": engine.hardware_seed, "deviation": engine.hardware_deviation},
        "alpha": {
            "tokens": found.alpha_tokens,
            "seconds": engine.alpha_s,
            "tokens_per_s": found.read_tokens_per_s,
            "bytes_per_s": found.read_tokens_per_s * deployment.shape.kv_bytes_per_token,
            "measured": {
                "tokens_per_s": measured.tokens_per_s,
                "difference": measured.tokens_per_s / found.read_tokens_per_s - 1,
                "blocks": measured.blocks,
                "seconds": measured.seconds,
            },
        },
        "beta": {
            "tokens": found.beta_tokens,
            "seconds": engine.beta_s,
            "tokens_per_s": found.gpu_tokens_per_s,
            "requests": found.requests,
            "cached": found.cached,
            "append": found.append,
        },
        "fit": {
            "fixed_s": fit.fixed_s,
            "flop_factor": fit.flop_factor,
            "byte_factor": fit.byte_factor,
            "points": found.points,
            "held_out": found.held_out,
            "mean_error": fit.mean_error,
            "max_error": fit.max_error,
        },
        "quota_s": engine.quota_s,
        "batch_tokens": engine.batch_tokens,
        "chunks": _chunks(deployment),
        "experts": _experts(deployment),
    }


def _chunks(deployment: Deployment) -> list[dict[str, Any]]:
    """The largest chunk of a long prompt that a forward takes, as the packer itself cuts it."""
    from ..policy.packing import Packable, pack

    engine, predictor, layers = deployment.config.engine, deployment.profile.predictor, deployment.layout.layers
    table = deployment.costs.table
    chunks = []
    for cached in CONTEXTS:
        (new,) = pack(
            [Packable("", cached, engine.batch_tokens, 0)],
            attention_s=predictor.attention_s,
            quota_s=engine.quota_s,
            batch_tokens=engine.batch_tokens,
            hbm_tokens=0,
        )
        if table is None or table.attention.covers(cached, new):
            taken_s = layers * deployment.hardware.attention_layer_s([(cached, new)])
            predicted_s = predictor.attention_s([(cached, new)])
            chunks.append({"cached": cached, "new": new, "predicted_s": predicted_s, "taken_s": taken_s})
    return chunks


def _experts(deployment: Deployment) -> list[dict[str, Any]]:
    """Bytes that a GPU of each side's group sends for a token in a layer; none for a dense model."""
    from ..experts import layer_volume

    experts = deployment.shape.experts
    if experts is None:
        return []
    rows = []
    for role in ("pe", "de"):
        ((_, group),) = deployment.groups(deployment.named(role)[0])
        shape = {"nodes": group.nodes, "gpus": group.gpus}
        volume = layer_volume(experts, 1, **shape, over="nvlink")
        stress = layer_volume(experts, 1, **shape, over="cnic")
        rows.append(
            {
                "role": role,
                **shape,
                "nvlink_bytes": volume.nvlink_bytes,
                "cnic_bytes": volume.cnic_bytes,
                "cnic_bytes_over_cnic": stress.cnic_bytes,
            }
        )
    return rows


def _print(console: Console, topology: str, result: dict[str, Any]) -> None:
    from rich.table import Table

    alpha, beta, fit, hardware = result["alpha"], result["beta"], result["fit"], result["hardware"]
    measured = alpha["measured"]
    console.print(
        f"{topology}, {result['model']} on {result['gpu']}; attention of the emulated GPUs lies up to"
        f" {hardware['deviation']:.0%} off the formula (hardware seed {hardware['seed']})\n"
    )
    console.print(
        f"alpha = {alpha['tokens']:,} tokens: a PE node reads {alpha['tokens_per_s']:,.0f} tokens/s through its"
        f" storage NICs ({alpha['bytes_per_s'] / 1e9:.4g} GB/s), for {alpha['seconds']:g} s"
    )
    console.print(
        f"  in virtual time: {measured['blocks']:,} blocks in {measured['seconds'] * 1e3:,.1f} ms are"
        f" {measured['tokens_per_s']:,.0f} tokens/s, {measured['difference']:+.2%} beside that rate"
    )
    console.print(
        f"beta = {beta['tokens']:,} tokens: a GPU processes {beta['tokens_per_s']:,.0f} tokens/s, for"
        f" {beta['seconds']:g} s"
    )
    console.print(
        f"  in forwards of {beta['requests']} requests of {beta['append']:,} new tokens behind {beta['cached']:,};"
        " exchanges with other GPUs are not in it\n"
    )
    console.print(
        f"attention = {fit['fixed_s'] * 1e3:.3f} ms + sum over requests of max({fit['flop_factor']:.4f} x seconds"
        f" by FLOPs, {fit['byte_factor']:.4f} x seconds by KV bytes)"
    )
    console.print(
        f"  fitted to {fit['points']} points; on {fit['held_out']} held out it is off by {fit['mean_error']:.1%}"
        f" on average and {fit['max_error']:.1%} at most\n"
    )
    console.print(
        f"Largest chunk of one prompt: {result['quota_s'] * 1e3:g} ms of predicted attention,"
        f" {result['batch_tokens']:,} new tokens"
    )
    table = Table()
    for heading in ("cached", "new tokens", "predicted ms", "taken ms"):
        table.add_column(heading, justify="right")
    for chunk in result["chunks"]:
        times = (f"{chunk[key] * 1e3:.2f}" for key in ("predicted_s", "taken_s"))
        table.add_row(f"{chunk['cached']:,}", f"{chunk['new']:,}", *times)
    console.print(table)
    if not result["experts"]:
        console.print("A dense model: its GPUs exchange no tokens.")
        return
    console.print("Expert traffic: bytes that a GPU sends per token and layer, to experts and back")
    table = Table()
    for heading in ("group", "nodes", "GPUs", "NVLink", "CNIC", "CNIC with --ep-over cnic"):
        table.add_column(heading, justify="right")
    for row in result["experts"]:
        counts = (f"{value:,}" for key, value in row.items() if key != "role")
        table.add_row(row["role"], *counts)
    console.print(table)
