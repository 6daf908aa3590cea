"""The directory of a finished run: all that `emulate verify` needs. What is written is read back exactly.

``report.json`` follows from the records and from nothing of the host; what the host adds is in ``host.json``.
``run.json`` is written last: a directory that holds it holds a whole run.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import tomli_w

from . import verify
from .config import RunConfig
from .errors import ConfigError, EmulatorError
from .fabric.interface import Transfer
from .judge import KernelPort, Verdict
from .kvcache import Layout
from .metrics import Kind, Port, Setup
from .records import (
    BatchRecord,
    CacheRecord,
    Decision,
    Decisions,
    ExchangeRecord,
    HostSample,
    NodeRecord,
    PoolRecord,
    PortBytes,
    RequestRecord,
    RunRecords,
    TransferBytes,
)
from .report import FabricName, FinishedRun, build_report, figures, make_setup
from .scale import Scale
from .verify import Evidence, Finding

__all__ = ["claim_run_dir", "read_decisions", "read_run_dir", "report_as_counted", "write_run_dir"]

FORMAT = 3
"""Version of the run directory; a reader refuses any other."""

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)


class _RunFile(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    fabric: FabricName
    t0_s: float
    ended_s: float
    layout: Layout
    scale: Scale
    groups: tuple[tuple[str, ...], ...]
    unrecorded: dict[str, tuple[int, ...]]
    """What the reference has for requests of which no record came back."""


class _NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    sent: tuple[TransferBytes, ...]
    received: tuple[TransferBytes, ...]
    exchanges: tuple[ExchangeRecord, ...]
    pools: tuple[PoolRecord, ...]
    cache: CacheRecord | None

    def __post_init__(self) -> None:
        for row in (*self.sent, *self.received):
            if row.transfer not in Transfer.__members__:
                raise ValueError(f"transfer {row.transfer!r}: expected one of {', '.join(Transfer.__members__)}")


class _PortRow(msgspec.Struct, frozen=True, kw_only=True):
    """One port: as configured (None for a NIC that the topology does not know), and its counters."""

    node: str
    nic: str
    role: Literal["pe", "de", "storage"] | None
    rate_bps: float | None
    kind: Kind
    counters: tuple[PortBytes, ...]

    def __post_init__(self) -> None:
        if self.rate_bps is not None and not 0 < self.rate_bps < math.inf:
            raise ValueError(f"rate_bps {self.rate_bps}: expected a positive, finite number")
        for counter in self.counters:
            if not 0 < counter.window_s < math.inf:
                raise ValueError(f"window_s {counter.window_s}: expected a positive, finite number")


class _DecisionRow(Decision, frozen=True, kw_only=True, tag_field="kind", tag="decision"):
    node: str


class _BatchRow(BatchRecord, frozen=True, kw_only=True, tag_field="kind", tag="batch"):
    node: str


class _RequestRow(RequestRecord, frozen=True, kw_only=True):
    expected_tokens: tuple[int, ...] | None
    continues: bool | None


class _HostFile(msgspec.Struct, frozen=True, kw_only=True):
    wall_s: float
    verdict: Verdict
    samples: dict[str, HostSample | None]
    kernel: tuple[KernelPort, ...] | None


def claim_run_dir(out: Path) -> tuple[Path, ...]:
    """Make ``out`` before a run begins; return the directories that were made, it and its parents.

    ConfigError where it cannot be made or written, or is not empty: whatever is in a run directory is the run's.
    """
    made = tuple(path for path in (out, *out.parents) if not os.path.lexists(path))
    try:
        out.mkdir(parents=True, exist_ok=True)
        found = next(out.iterdir(), None)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be made: {error.strerror}") from None
    if (out / "run.json").exists():
        raise ConfigError(f"--out {out}: holds a run already; name another directory or remove it")
    if found is not None:
        raise ConfigError(f"--out {out}: holds {found.name}; name an empty directory or a new one")
    if not os.access(out, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {out}: cannot be written; name another directory")
    return made


def write_run_dir(out: Path, run: FinishedRun) -> dict[str, Any]:
    """Write all files of ``run`` into the directory ``out``; return its report.

    EmulatorError naming the file when it cannot be written.
    """
    records, setup = run.evidence.records, run.evidence.setup
    report = build_report(run)
    recorded = {r.id for r in records.requests}
    about = _RunFile(
        format=FORMAT,
        fabric=run.fabric,
        t0_s=records.t0_s,
        ended_s=records.ended_s,
        layout=setup.layout,
        scale=setup.scale,
        groups=setup.groups,
        unrecorded={name: tokens for name, tokens in run.evidence.expected.items() if name not in recorded},
    )
    host = _HostFile(
        wall_s=run.wall_s,
        verdict=run.verdict,
        samples={n.node: n.host for n in records.nodes},
        kernel=run.kernel,
    )
    nodes = (
        _NodeRow(
            node=n.node,
            sent=n.sent,
            received=n.received,
            exchanges=n.exchanges,
            pools=n.pools,
            cache=n.cache,
        )
        for n in records.nodes
    )
    requests = (
        _RequestRow(
            **msgspec.structs.asdict(r),
            expected_tokens=run.evidence.expected.get(r.id),
            continues=run.evidence.continues.get(r.id),
        )
        for r in records.requests
    )
    files = {
        "config.toml": tomli_w.dumps(_without_none(msgspec.to_builtins(run.config))).encode(),
        "requests.jsonl": _lines(requests),
        "decisions.jsonl": _lines(_decision_rows(records)),
        "ports.jsonl": _lines(_port_rows(records, setup)),
        "nodes.jsonl": _lines(nodes),
        "report.json": json.dumps(report, indent=1, allow_nan=False, ensure_ascii=False).encode() + b"\n",
        "host.json": msgspec.json.format(msgspec.json.encode(host), indent=1) + b"\n",
        # Last: a directory with run.json in it holds a whole run.
        "run.json": msgspec.json.format(msgspec.json.encode(about), indent=1) + b"\n",
    }
    for name, data in files.items():
        try:
            with open(out / name, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise EmulatorError(f"{out / name}: cannot be written: {error.strerror}") from None
    return report


def _without_none(value: Any) -> Any:
    # TOML has no null; an absent key means the default, which is None wherever None can occur.
    if isinstance(value, dict):
        return {key: _without_none(v) for key, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, list) else value


def _lines(rows: Iterable[msgspec.Struct]) -> bytes:
    return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)


def _decision_rows(records: RunRecords) -> Iterable[msgspec.Struct]:
    for node in records.nodes:
        yield from (_DecisionRow(**msgspec.structs.asdict(d), node=node.node) for d in node.decisions)
        yield from (_BatchRow(**msgspec.structs.asdict(b), node=node.node) for b in node.batches)


def _port_rows(records: RunRecords, setup: Setup) -> Iterable[_PortRow]:
    counters: dict[tuple[str, str], list[PortBytes]] = {}
    for node in records.nodes:
        for p in node.ports:
            counters.setdefault((node.node, p.nic), []).append(p)
    for port in setup.ports:
        found = tuple(counters.pop((port.node, port.nic), ()))
        yield _PortRow(
            node=port.node, nic=port.nic, role=port.role, rate_bps=port.rate_bps, kind=port.kind, counters=found
        )
    for (name, nic), rows in counters.items():
        yield _PortRow(node=name, nic=nic, role=None, rate_bps=None, kind="nic", counters=tuple(rows))


def read_run_dir(path: Path) -> FinishedRun:
    """Read back what ``write_run_dir`` wrote. ConfigError naming the file, and the line where there is one."""
    if not path.is_dir():
        raise ConfigError(f"{path}: no such run directory")
    about = _json(path / "run.json", _RunFile)
    if about.format != FORMAT:
        raise ConfigError(f"{path / 'run.json'}: format {about.format}, this version reads {FORMAT}")
    host = _json(path / "host.json", _HostFile)
    requests = _rows(path / "requests.jsonl", _RequestRow)
    ports = _rows(path / "ports.jsonl", _PortRow)
    counters: defaultdict[str, list[PortBytes]] = defaultdict(list)
    for row in ports:
        counters[row.node] += row.counters
    widths = {counter.window_s for row in ports for counter in row.counters}
    if len(widths) > 1:
        raise ConfigError(
            f"{path / 'ports.jsonl'}: window_s {sorted(widths)}: expected one width for all counters"
        )
    if about.layout.kv_bytes != about.scale.kv_bytes:
        raise ConfigError(f"{path / 'run.json'}: kv_bytes differ between layout and scale")
    decisions: defaultdict[str, list[Decision]] = defaultdict(list)
    batches: defaultdict[str, list[BatchRecord]] = defaultdict(list)
    for row in _rows(path / "decisions.jsonl", _DecisionRow | _BatchRow):
        if isinstance(row, _DecisionRow):
            decisions[row.node].append(_base(Decision, row))
        else:
            batches[row.node].append(_base(BatchRecord, row))
    records = RunRecords(
        t0_s=about.t0_s,
        ended_s=about.ended_s,
        requests=tuple(_base(RequestRecord, row) for row in requests),
        nodes=tuple(
            NodeRecord(
                node=n.node,
                sent=n.sent,
                received=n.received,
                ports=tuple(sorted(counters[n.node], key=lambda p: (p.nic, p.direction, p.lane))),
                exchanges=n.exchanges,
                pools=n.pools,
                batches=tuple(batches[n.node]),
                decisions=tuple(decisions[n.node]),
                cache=n.cache,
                host=host.samples.get(n.node),
            )
            for n in _rows(path / "nodes.jsonl", _NodeRow)
        ),
    )
    config = _config(path / "config.toml")
    known = tuple(
        Port(p.node, p.nic, p.role, p.rate_bps, p.kind)
        for p in ports
        if p.role is not None and p.rate_bps is not None
    )
    setup = make_setup(config, about.layout, about.scale, known, about.groups)
    evidence = Evidence(
        setup=setup,
        records=records,
        expected=about.unrecorded
        | {row.id: row.expected_tokens for row in requests if row.expected_tokens is not None},
        continues={row.id: row.continues for row in requests if row.continues is not None},
    )
    return FinishedRun(
        config=config,
        fabric=about.fabric,
        evidence=evidence,
        verdict=host.verdict,
        wall_s=host.wall_s,
        kernel=host.kernel,
    )


def read_decisions(path: Path) -> Decisions:
    """The decisions of a run, from its directory or from a decisions.jsonl; ConfigError as ``read_run_dir``."""
    rows = _rows(path / "decisions.jsonl" if path.is_dir() else path, _DecisionRow | _BatchRow)
    return Decisions(
        requests=tuple(_base(Decision, row) for row in rows if isinstance(row, _DecisionRow)),
        batches=tuple(_base(BatchRecord, row) for row in rows if isinstance(row, _BatchRow)),
    )


def report_as_counted(path: Path, run: FinishedRun) -> Finding:
    """Whether the ``report.json`` in the run directory ``path`` says what the records of that ``run`` say.

    One more finding beside the invariants' own, for a run in which those hold: without sound records there is
    nothing to hold a report against. ConfigError where there is no report or it is no JSON object.
    """
    report = _json(path / "report.json", dict[str, Any])
    counted = json.loads(json.dumps(figures(run)))
    # How many invariants there are is a fact of the version that wrote the report.
    wrong = [key for key, figure in counted.items() if key != "invariants" and report.get(key, ...) != figure]
    detail = (
        f"report.json differs from the records in {', '.join(wrong)}"
        if wrong
        else "the report follows from the records"
    )
    return Finding(len(verify.INVARIANTS) + 1, "report as counted", not wrong, detail)


def _base(kind: type[S], row: msgspec.Struct) -> S:
    """The record of type ``kind`` in a row that extends it."""
    return kind(**{name: getattr(row, name) for name in kind.__struct_fields__})


def _read(path: Path) -> bytes:
    try:
        # Neither a pipe, which may never end, nor a device, which does not.
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: expected a regular file, one of a finished run")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; expected a file of a finished run") from None


def _json(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(_read(path), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _rows(path: Path, kind: Any) -> list[Any]:
    decode: Callable[[bytes], Any] = msgspec.json.Decoder(kind).decode
    rows = []
    for number, line in enumerate(_read(path).splitlines(), start=1):
        try:
            rows.append(decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path}:{number}: {error}") from None
    return rows


def _config(path: Path) -> RunConfig:
    try:
        return msgspec.convert(tomllib.loads(_read(path).decode()), RunConfig)
    except (msgspec.ValidationError, tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None
