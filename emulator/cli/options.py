"""What several commands make of their arguments: one resolved configuration, every error before any act."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from ..config import ReplayConfig, RunConfig, load_config
from ..errors import ConfigError
from ..plan import run_config

if TYPE_CHECKING:
    from topology.spec import ClusterSpec

    from ..records import Decisions
    from ..workload import Workload

__all__ = ["SYSTEMS", "Asked", "cluster_options", "load_run", "load_workload", "replay_options"]

SYSTEMS = ("dualpath",)
DEFAULT_SAMPLE = "agentic"
_F = TypeVar("_F", bound=Callable[..., Any])


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a replay as given. Several systems and paths: one run for each pair of them."""

    system: tuple[str, ...]
    path: tuple[str, ...]
    trace: str
    trace_format: str | None
    agents: int | None
    aps: float | None
    max_len: int | None
    think: str
    warm: bool
    decisions: Path | None
    seed: int
    out: Path | None
    as_json: bool

    def replays(self, agents: int | None) -> list[ReplayConfig]:
        """One configuration for each run, in the order in which systems and paths were given."""
        return [
            msgspec.convert(
                {
                    "system": system,
                    "path": path,
                    "agents": agents,
                    "aps": self.aps,
                    "think": self.think,
                    "warm": self.warm,
                    "seed": self.seed,
                },
                ReplayConfig,
            )
            for system in self.system or SYSTEMS[:1]
            for path in self.path or ("auto",)
        ]


def cluster_options(command: _F) -> _F:
    """`--model`, `--kv-bytes` and `--dilation`, which override the topology file's tables."""
    for option in (
        click.option("--dilation", type=float, help="Wall seconds per model second."),
        click.option("--kv-bytes", type=click.IntRange(min=1), help="Emulated KV bytes per token and layer."),
        click.option("--model", help="A bundled model's name or a model file."),
    ):
        command = option(command)
    return command


def replay_options(command: _F) -> _F:
    """The options that say what is replayed and how; the command receives them as one ``asked``."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
        click.option("--out", type=click.Path(path_type=Path), help="Keep the run directory here."),
        click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True),
        click.option(
            "--decisions",
            type=click.Path(path_type=Path),
            help="Repeat the decisions of this run directory or file.",
        ),
        click.option("--warm", is_flag=True, help="Commit the first prompts' blocks before the clock starts."),
        click.option("--think", type=click.Choice(["zero", "trace"]), default="zero", show_default=True),
        click.option("--max-len", type=click.IntRange(min=1), help="Cut trajectories at this many tokens."),
        click.option("--aps", type=float, help="Open loop: agents per second."),
        click.option(
            "--agents",
            type=click.IntRange(min=1),
            help="Closed loop: agents at a time [default: all of the trace].",
        ),
        click.option("--trace-format", help="How to read the trace; a sample needs none."),
        click.option(
            "--trace", default=DEFAULT_SAMPLE, show_default=True, help="A bundled sample, a file, or a folder."
        ),
        click.option(
            "--path", type=click.Choice(["pe", "de", "auto"]), multiple=True, help="Which side reads; repeatable."
        ),
        click.option("--system", type=click.Choice(SYSTEMS), multiple=True, help="Which system; repeatable."),
    ):
        command = option(command)
    return command


def load_run(
    topology: str,
    *,
    model: str | None = None,
    kv_bytes: int | None = None,
    dilation: float | None = None,
) -> RunConfig:
    """The configuration of TOPOLOGY with the options that override its file.

    TopologyError or ConfigError (exit 2) name the file and key, or the option.
    """
    from topology.spec import PRESETS, load_topology

    spec: ClusterSpec = load_topology(topology)
    engine, models, scale = load_config(None if topology in PRESETS else Path(topology))
    if model is not None:
        models = msgspec.structs.replace(models, name=model)
    if kv_bytes is not None:
        scale = msgspec.structs.replace(scale, kv_bytes=kv_bytes)
    if dilation is not None:
        if not 0 < dilation < math.inf:
            raise ConfigError(f"--dilation {dilation}: expected a positive, finite number")
        scale = msgspec.structs.replace(scale, dilation=dilation)
    return run_config(spec, engine, models, scale)


def load_workload(asked: Asked) -> tuple[Workload, int | None, tuple[str, ...]]:
    """The workload to replay, its number of agents (None: open loop), and notes for the user."""
    from ..samples import SAMPLES, load_sample
    from ..traces import TRACE_FORMATS, read_trace
    from ..workload import closed_loop, cut, open_loop

    if asked.agents is not None and asked.aps is not None:
        raise click.UsageError("--agents is a closed loop and --aps an open one: give one of them")
    notes: list[str] = []
    if asked.trace in SAMPLES:
        if asked.trace_format is not None:
            raise click.UsageError(f"--trace-format is for files; {asked.trace} is a bundled sample")
        workload = load_sample(asked.trace)
    else:
        if asked.trace_format is None:
            raise click.UsageError(
                f"--trace {asked.trace} needs --trace-format, one of {', '.join(TRACE_FORMATS)}"
                f" (bundled samples: {', '.join(SAMPLES)})"
            )
        result = read_trace(Path(asked.trace), asked.trace_format)
        workload = result.workload
        notes += [f"trace: {count} {name.replace('_', ' ')}" for name, count in result.notes.items()]
    if asked.max_len is not None:
        workload, left_out = cut(workload, asked.max_len)
        if left_out:
            notes.append(
                f"trace: {left_out} trajectories start with more than {asked.max_len} tokens and are left out"
            )
    if asked.aps is not None:
        return open_loop(workload, asked.aps, asked.seed), None, tuple(notes)
    agents = asked.agents or max(1, len(workload.trajectories))
    return closed_loop(workload, agents, asked.seed, asked.max_len), agents, tuple(notes)


def load_decisions(asked: Asked) -> Decisions | None:
    """The decisions that the runs are to repeat, if any."""
    from ..report import read_decisions

    return None if asked.decisions is None else read_decisions(asked.decisions)
