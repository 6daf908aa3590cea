"""`emulate trace`: make, measure and convert workloads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import ConfigError
from .options import FORMATS, load_trace, say_notes

if TYPE_CHECKING:
    from ..workload import Workload

__all__ = ["trace"]

_FORMAT_HELP = f"What the file is: {FORMATS}. Never guessed."
_MAX_LEN_HELP = "Cut trajectories before the first context that is longer, in tokens."


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def trace() -> None:
    """Make, measure and convert traces."""


@trace.command()
@click.argument("kind", type=click.Choice(["agentic", "io-bound"]))
@click.option("--seed", type=int, default=1, show_default=True, help="Same seed, same trace.")
@click.option("--trajectories", type=int, default=32, show_default=True, help="How many agents.")
@click.option("--max-len", type=int, help="agentic: the published set, 32768, 49152 or 65536 (default) tokens.")
@click.option("--scale", type=float, help="agentic: multiply all lengths by this, at most 1 (default).")
@click.option("--turns", type=int, help="io-bound: turns of each agent (default 6).")
@click.option("--out", type=click.Path(path_type=Path), help="File to write (.gz compresses); default: stdout.")
def synth(
    kind: str,
    seed: int,
    trajectories: int,
    max_len: int | None,
    scale: float | None,
    turns: int | None,
    out: Path | None,
) -> None:
    """Make a trace in the native format: agents of the paper's shape, or agents bound by storage."""
    from ..synth import synth_agentic, synth_io_bound

    if seed < 0:
        raise ConfigError(f"--seed {seed}: expected 0 or more")
    if kind == "agentic":
        if turns is not None:
            raise ConfigError("--turns: only io-bound has a fixed number; agentic ends at --max-len")
        workload = synth_agentic(
            seed, trajectories, 65_536 if max_len is None else max_len, 1.0 if scale is None else scale
        )
    else:
        if max_len is not None or scale is not None:
            raise ConfigError("--max-len and --scale: only for agentic; io-bound has --turns")
        workload = synth_io_bound(seed, trajectories, 6 if turns is None else turns)
    _write(workload, out)


@trace.command()
@click.argument("source", metavar="TRACE")
@click.option("--trace-format", help=_FORMAT_HELP)
@click.option("--block-tokens", type=int, help="Tokens per hash id of a Mooncake file (default 512).")
@click.option("--max-len", type=int, help=_MAX_LEN_HELP)
@click.option("--model", default="ds660b", show_default=True, help="Whose KV bytes to count with.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def stats(
    source: str,
    trace_format: str | None,
    block_tokens: int | None,
    max_len: int | None,
    model: str,
    as_json: bool,
) -> None:
    """Lengths as in the paper's table, hits of an infinite cache, working set. TRACE may be a bundled sample."""
    import msgspec

    from ..models.shape import load_shape
    from ..workload import workload_stats

    shape = load_shape(model)
    workload, notes = load_trace(source, trace_format, max_len, block_tokens=block_tokens)
    measured = workload_stats(workload)
    result: dict[str, Any] = {
        "name": workload.name,
        **msgspec.to_builtins(measured),
        "model": shape.name,
        "store_bytes": measured.distinct_tokens * shape.kv_bytes_per_token,
        "notes": notes,
    }
    if as_json:
        click.echo(msgspec.json.encode(result).decode())
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("figure", "value", "meaning", title=Text(workload.name))
    for name, text in (
        ("turns", "mean turns of a trajectory"),
        ("append", "mean tokens a turn adds, over trajectories"),
        ("gen", "mean tokens a turn generates, over trajectories"),
        ("total", "mean tokens of a trajectory's last context"),
        ("context", "mean tokens of a prompt, over requests"),
    ):
        table.add_row(name, f"{result[name]:,.1f}", text)
    for name, text in (
        ("trajectories", "agents"),
        ("requests", "turns of all of them"),
        ("prompt_tokens", "of all requests"),
        ("hit_tokens", "of these, in full blocks of 64 that an infinite cache holds"),
        ("output_tokens", "of all requests"),
        ("max_total", "tokens of the longest context"),
    ):
        table.add_row(name, f"{result[name]:,}", text)
    table.add_row("hit ratio", f"{measured.hit_ratio:.1%}", "hit tokens / prompt tokens")
    table.add_row("store", f"{result['store_bytes'] / 1e9:,.1f} GB", f"distinct blocks at the end, {shape.name}")
    Console(highlight=False).print(table)
    say_notes(notes)


@trace.command()
@click.argument("source", metavar="TRACE")
@click.option("--trace-format", help=_FORMAT_HELP)
@click.option("--block-tokens", type=int, help="Tokens per hash id of a Mooncake file (default 512).")
@click.option("--max-len", type=int, help=_MAX_LEN_HELP)
@click.option("--out", type=click.Path(path_type=Path), help="File to write (.gz compresses); default: stdout.")
def convert(
    source: str, trace_format: str | None, block_tokens: int | None, max_len: int | None, out: Path | None
) -> None:
    """Write any trace in the native format: same lengths, times and token ids."""
    workload, notes = load_trace(source, trace_format, max_len, block_tokens=block_tokens)
    say_notes(notes)
    _write(workload, out)


def _write(workload: Workload, out: Path | None) -> None:
    from ..traces import native_bytes, write_native

    if out is None:
        sys.stdout.buffer.write(native_bytes(workload))
        return
    write_native(workload, out)
    click.echo(f"{out}: {len(workload.trajectories)} trajectories, {workload.requests} requests", err=True)
