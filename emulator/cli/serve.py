"""`emulate replay`, `run`, `sim` and `verify`: a trace on a cluster, and what came of it.

Everything that can be refused is refused before anything is started: options, files, the run directories.
Results go to standard output, progress and notes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec

from ..config import ReplayConfig, RunConfig
from ..deployment import Deployment
from ..errors import ConfigError
from ..estimate import estimate
from ..evidence import continuing_turns, expected_tokens
from ..hosts.isolate import invoking_user
from ..hosts.state import check_cluster_name
from ..judge import Verdict, judge, judge_virtual, kernel_ports
from ..plan import cluster_spec
from ..records import Decisions, RunRecords
from ..report import FinishedRun, build_report, run_entry, setup_of
from ..rundir import claim_run_dir, read_run_dir, report_as_counted, write_run_dir
from ..tables import comparison
from ..verify import Evidence
from ..verify import verify as check
from .lifecycle import find_cluster, show_stage
from .options import Asked, cluster_options, load_decisions, load_run, load_workload, replay_options, say_notes

__all__ = ["replay", "run", "sim", "verify"]

FAILED, INVALID, BROKEN = 1, 3, 4


class _Job:
    """A workload and the runs to make of it. Building it raises for whatever can be refused beforehand."""

    def __init__(self, asked: Asked, base: RunConfig) -> None:
        self.as_json = asked.as_json
        self.workload, notes = load_workload(asked)
        self.decisions: Decisions | None = load_decisions(asked)
        replays = asked.replays()
        self.runs = [msgspec.structs.replace(base, replay=replay) for replay in replays]
        for run in self.runs:
            # Settings that a system cannot be run with.
            Deployment(run)
        self._outs = [_out_of(asked.out, replay, alone=len(replays) == 1) for replay in replays]
        if asked.out is not None and len(set(self._outs)) < len(self._outs):
            raise ConfigError(
                f"--out {asked.out}: give each --system and --path once, each has one directory there"
            )
        for out in self._outs:
            if out is not None:
                _give_away(claim_run_dir(out))
        self._served: set[str] = set()
        self._expected: dict[str, tuple[int, ...]] = {}
        self.entries: list[dict[str, Any]] = []
        say_notes(notes)

    def say_estimate(self) -> None:
        """How long it will take at the least, in wall time, and what would shorten it."""
        bounds = [estimate(run, self.workload) for run in self.runs]
        longest = max(bounds, key=lambda bound: bound.wall_s)
        _say(
            f"estimate: at least {sum(bound.wall_s for bound in bounds):.0f} s of wall time for"
            f" {len(self.runs)} x {self.workload.requests} requests; {longest.advice}"
        )

    def add(self, finished: FinishedRun) -> None:
        """Keep a run and its entry."""
        out = self._outs[len(self.entries)]
        if out is None:
            report = build_report(finished)
        else:
            report = write_run_dir(out, finished)
            _give_away(out.iterdir())
        self.entries.append(run_entry(report, finished, out))

    def finish(self) -> int:
        """Show all runs; the exit code of the worst."""
        if self.as_json:
            click.echo(json.dumps({"runs": self.entries}, allow_nan=False))
        else:
            from rich.console import Console

            # Not narrower than the table where nobody looks at it now.
            Console(width=None if sys.stdout.isatty() else 160).print(comparison(self.entries))
        return max(map(_exit_code, self.entries), default=0)

    def evidence(self, run: RunConfig, fabric: str, records: RunRecords) -> Evidence:
        """What the run is held against. The reference is computed again only for what no run served before."""
        served = {request.id for request in records.requests if request.status == "done"}
        if not self._expected or not served <= self._served:
            self._served |= served
            self._expected = expected_tokens(run, self.workload, self._served)
        return Evidence(
            setup=setup_of(run, "tcp" if fabric == "tcp" else "fluid"),
            records=records,
            expected=self._expected,
            continues=continuing_turns(self.workload),
        )


def _out_of(out: Path | None, replay: ReplayConfig, *, alone: bool) -> Path | None:
    if out is None or alone:
        return out
    return out / f"{replay.system}-{replay.path}"


def _exit_code(entry: dict[str, Any]) -> int:
    """4 for a broken invariant, else 3 for an invalid emulation, else 1 if a request was not served."""
    if entry["invariants"]["broken"]:
        return BROKEN
    if entry["verdict"] != "valid":
        return INVALID
    requests = entry["requests"]
    return FAILED if requests["done"] < requests["total"] or not requests["total"] else 0


def _give_away(made: Iterable[Path]) -> None:
    """Under sudo, what was made for a run belongs to whoever called it; what was there before does not."""
    user = invoking_user(os.environ) if os.geteuid() == 0 else None
    if user is not None:
        for path in made:
            os.chown(path, *user, follow_symlinks=False)


def _say(text: str) -> None:
    click.echo(text, err=True)


@contextmanager
def _progress(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TextColumn("requests"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield advance


def _label(run: RunConfig) -> str:
    return f"{run.replay.system} --path {run.replay.path}"


async def _replay_all(job: _Job, cluster: Any) -> None:
    """All of a job's runs on a live cluster, one after the other."""
    for run in job.runs:
        began_s = time.monotonic()
        with _progress(_label(run)) as on_progress:
            live = await cluster.replay(job.workload, run.replay, decisions=job.decisions, on_progress=on_progress)
        wall_s = time.monotonic() - began_s
        evidence = job.evidence(run, "tcp", live.records)
        kernel = kernel_ports(live.before, live.after)
        verdict: Verdict = judge(
            evidence.setup,
            live.records,
            kernel,
            cores=len(os.sched_getaffinity(0)),
            network_faults=live.network_faults,
        )
        job.add(
            FinishedRun(config=run, fabric="tcp", evidence=evidence, verdict=verdict, wall_s=wall_s, kernel=kernel)
        )


@click.command()
@click.option("--cluster", help="The cluster's name; may be left out while one is up.")
@replay_options
def replay(cluster: str | None, **options: Any) -> int:
    """Replay a trace on a cluster that is up."""
    import trio

    from ..cluster import connect_cluster

    asked = Asked(**options)
    directory = find_cluster(cluster)

    async def work() -> _Job:
        async with connect_cluster(directory) as live:
            job = _Job(asked, live.run)
            job.say_estimate()
            await _replay_all(job, live)
            return job

    return trio.run(work).finish()


@click.command()
@click.argument("topology")
@cluster_options
@replay_options
@click.option("--name", help="What to call the cluster while it is up.")
def run(
    topology: str,
    model: str | None,
    kv_bytes: int | None,
    dilation: float | None,
    name: str | None,
    **options: Any,
) -> int:
    """Bring TOPOLOGY up, replay a trace with every system and path given, compare, take it down."""
    import trio

    from ..cluster import open_cluster

    if name is not None:
        check_cluster_name(name)
    base = load_run(topology, model=model, kv_bytes=kv_bytes, dilation=dilation)
    job = _Job(Asked(**options), base)
    job.say_estimate()

    async def work() -> None:
        async with open_cluster(
            cluster_spec(base),
            engine=base.engine,
            model=base.model,
            scale=base.scale,
            name=name,
            on_stage=show_stage,
        ) as live:
            await _replay_all(job, live)

    trio.run(work)
    return job.finish()


@click.command()
@click.argument("topology")
@cluster_options
@replay_options
def sim(topology: str, model: str | None, kv_bytes: int | None, dilation: float | None, **options: Any) -> int:
    """The same in virtual time: one process, no root, the same tokens, the same report every time."""
    from ..sim import simulate

    if dilation is not None:
        raise click.UsageError("--dilation has no meaning in virtual time")
    job = _Job(Asked(**options), load_run(topology, model=model, kv_bytes=kv_bytes))
    for config in job.runs:
        began_s = time.monotonic()
        with _progress(_label(config)) as on_progress:
            records = simulate(config, job.workload, job.decisions, on_progress)
        wall_s = time.monotonic() - began_s
        evidence = job.evidence(config, "fluid", records)
        job.add(
            FinishedRun(config=config, fabric="fluid", evidence=evidence, verdict=judge_virtual(), wall_s=wall_s)
        )
    return job.finish()


@click.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify(run_dir: Path, as_json: bool) -> int:
    """Check every invariant again on the finished run in the directory RUN, and its report against its records."""
    finished = read_run_dir(run_dir)
    findings = check(finished.evidence)
    if all(finding.ok for finding in findings):
        findings.append(report_as_counted(run_dir, finished))
    broken = [finding for finding in findings if not finding.ok]
    if as_json:
        click.echo(json.dumps({"ok": not broken, "findings": msgspec.to_builtins(findings)}))
    else:
        for finding in findings:
            mark = "ok    " if finding.ok else "BROKEN"
            click.echo(f"{finding.number:>3} {mark} {finding.invariant}: {finding.detail}")
        click.echo(f"{len(findings) - len(broken)} of {len(findings)} invariants hold")
    return BROKEN if broken else 0
