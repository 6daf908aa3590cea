"""What several commands make of their arguments: one resolved configuration, every error before any act."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from ..config import ReplayConfig, RunConfig
from ..errors import ConfigError
from ..systems import SYSTEMS

if TYPE_CHECKING:
    from topology.spec import ClusterSpec

    from ..records import Decisions
    from ..workload import Workload

__all__ = [
    "DEFAULT_SAMPLE",
    "FORMATS",
    "Asked",
    "cluster_options",
    "load_run",
    "load_trace",
    "load_workload",
    "replay_options",
    "say_notes",
]

DEFAULT_SAMPLE = "agentic"
FORMATS = "weka, mooncake, mooncake-delta, azure or native"
_F = TypeVar("_F", bound=Callable[..., Any])


_NOTES = {"left_out": "trajectories left out, because they start beyond --max-len"}


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a replay as given. Several systems and paths: one run for each pair of them."""

    system: tuple[str, ...]
    path: tuple[str, ...]
    policy: str | None
    qos: str
    copies: str
    ep_over: str
    de_direct: bool
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

    def replays(self) -> list[ReplayConfig]:
        """One configuration for each run, in the order in which systems and paths were given."""
        return [
            msgspec.convert(
                {
                    "system": system,
                    "path": path,
                    "policy": _policy(self.policy),
                    "qos": self.qos,
                    "copies": self.copies,
                    "ep_over": self.ep_over,
                    "de_direct": self.de_direct,
                    "agents": self.agents,
                    "aps": self.aps,
                    "think": self.think,
                    "warm": self.warm,
                    "seed": self.seed,
                },
                ReplayConfig,
            )
            for system in self.system or tuple(SYSTEMS)[:1]
            for path in self.path or ("auto",)
        ]


def _policy(given: str | None) -> str:
    """A policy's name, or the absolute path of its file: other processes stand in other directories."""
    if given is None:
        return ""
    if "/" in given or given.endswith(".py"):
        path = Path(given)
        if path.suffix != ".py" or not path.is_file():
            raise ConfigError(
                f"--policy {given}: no such Python file; expected one that defines make_policy(setup)"
            )
        return str(path.absolute())
    from ..policy import POLICIES

    if given not in POLICIES:
        raise ConfigError(f"--policy {given}: expected {', '.join(POLICIES)}, or a Python file (my_policy.py)")
    return given


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
        click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True),
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
            help="Closed loop: this many agents, all at once [default: the trace's own arrivals].",
        ),
        click.option("--trace-format", help=f"What the trace is: {FORMATS}; a sample needs none."),
        click.option(
            "--trace", default=DEFAULT_SAMPLE, show_default=True, help="A bundled sample, a file, or a folder."
        ),
        click.option(
            "--path", type=click.Choice(["pe", "de", "auto"]), multiple=True, help="Which side reads; repeatable."
        ),
        click.option(
            "--de-direct", is_flag=True, help="Decode KV goes straight into DE HBM, not through the DE buffer."
        ),
        click.option(
            "--ep-over",
            type=click.Choice(["nvlink", "cnic"]),
            default="nvlink",
            show_default=True,
            help="What carries expert traffic inside a node.",
        ),
        click.option(
            "--copy",
            "copies",
            type=click.Choice(["cnic", "cuda"]),
            default="cnic",
            show_default=True,
            help="What copies between DRAM and HBM: the paired CNIC, or CUDA over a PCIe link without priorities.",
        ),
        click.option(
            "--qos",
            type=click.Choice(["lanes", "off", "software"]),
            default="lanes",
            show_default=True,
            help="What keeps KV traffic out of the way of collectives.",
        ),
        click.option("--policy", help="A policy by name, or a Python file with one [default: the system's]."),
        click.option(
            "--system", type=click.Choice(tuple(SYSTEMS)), multiple=True, help="Which system; repeatable."
        ),
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

    from ..plan import run_config
    from ..settings import load_config

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
    try:
        return run_config(spec, engine, models, scale)
    except ConfigError as error:
        if topology in PRESETS or model is not None or kv_bytes is not None:
            raise
        raise ConfigError(f"{topology}: {error.text}") from None


def load_trace(
    trace: str, trace_format: str | None, max_len: int | None = None, *, block_tokens: int | None = None
) -> tuple[Workload, dict[str, int]]:
    """The workload of ``--trace`` and ``--trace-format``, cut at ``--max-len``, and what was noteworthy.

    A bundled sample's name needs no format. Notes are the reader's, and ``left_out``: trajectories whose first
    context is longer than ``max_len``. Raises ConfigError.
    """
    from ..samples import SAMPLES, load_sample
    from ..traces import read_trace
    from ..workload import cut

    notes: dict[str, int] = {}
    if trace in SAMPLES and trace_format is None:
        if block_tokens is not None:
            raise ConfigError(
                f"block_tokens {block_tokens}: only for the mooncake formats; {trace} is a bundled sample"
            )
        workload = load_sample(trace)
    elif trace in SAMPLES and not Path(trace).exists():
        raise ConfigError(f"--trace-format is for files; {trace} is a bundled sample and needs none")
    elif trace_format is None:
        raise ConfigError(
            f"trace {trace}: expected --trace-format with it ({FORMATS}),"
            f" or the name of a bundled sample: {', '.join(SAMPLES)}"
        )
    else:
        result = read_trace(Path(trace), trace_format, block_tokens=block_tokens)
        workload, notes = result.workload, dict(result.notes)
    if max_len is not None:
        workload, left_out = cut(workload, max_len)
        if not workload.trajectories:
            raise ConfigError(f"--max-len {max_len}: every trajectory of {workload.name} starts longer than that")
        if left_out:
            notes["left_out"] = left_out
    return workload, notes


def load_workload(asked: Asked) -> tuple[Workload, dict[str, int]]:
    """The workload to replay, and what was noteworthy about its trace.

    ``--agents`` makes it a closed loop, ``--aps`` an open one; without either it keeps the trace's arrivals.
    """
    from ..workload import closed_loop, open_loop

    if asked.agents is not None and asked.aps is not None:
        raise click.UsageError("--agents is a closed loop and --aps an open one: give one of them")
    workload, notes = load_trace(asked.trace, asked.trace_format, asked.max_len)
    if asked.agents is not None:
        workload = closed_loop(workload, asked.agents, asked.seed, asked.max_len)
    elif asked.aps is not None:
        workload = open_loop(workload, asked.aps, asked.seed)
    return workload, notes


def say_notes(notes: dict[str, int]) -> None:
    """Tell on standard error what was noteworthy about a trace."""
    for name, count in notes.items():
        text = _NOTES.get(name, name.replace("_", " "))
        click.echo(f"trace: {count} {text}", err=True)


def load_decisions(asked: Asked) -> Decisions | None:
    """The decisions that the runs are to repeat, if any."""
    from ..rundir import read_decisions

    if asked.decisions is not None and asked.policy is not None:
        raise click.UsageError("--decisions repeats what was decided, so no --policy is asked: give one of them")
    return None if asked.decisions is None else read_decisions(asked.decisions)
