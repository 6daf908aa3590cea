"""Readers: a recorded trace of one named format becomes a ``Workload``. And the project's own format.

Formats are named, never guessed. Every row is checked; the first that cannot be used is a ConfigError with
the file and the line (or the place inside a JSON object), what was expected and what was found. Nothing is
repaired silently: what is legal but noteworthy is counted in ``TraceResult.notes``.

Pure but for reading files. Must not import fabrics, roles or the topology.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from .chains import Chain, Row, chains_of, check_ids, shared_ids, trajectory_of
from .errors import ConfigError
from .workload import Stream, Trajectory, Turn, Workload, seed_of

__all__ = ["TRACE_FORMATS", "TraceResult", "native_bytes", "read_trace", "write_native"]

MOONCAKE_BLOCK = 512
"""Tokens per hash id in the published Mooncake traces."""

_MAX_BYTES = 2**30
"""Of a trace file's text: a workload is in memory as a whole, so a longer one is a mistake or a gzip bomb."""

_TOO_LONG = f"more than {_MAX_BYTES >> 20} MiB of text: expected a smaller trace; cut it into several"

_VERSION = 1
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class TraceResult(msgspec.Struct, frozen=True):
    """A workload and what its reader noticed: counts by name, only those that are not zero.

    ``out_of_order``: rows with a timestamp before an earlier row's (sorted stably). ``subagents``: nested
    agents of recorded sessions, replayed as trajectories of their own. ``zero_outputs``: requests that
    generate nothing. ``without_think_time``: rows of a recorded session without one (taken as 0).
    """

    workload: Workload
    notes: dict[str, int]


def read_trace(path: Path, trace_format: str, *, block_tokens: int | None = None) -> TraceResult:
    """Read a trace file, plain or gzip (``weka``: or a folder of session files), of one of TRACE_FORMATS.

    ``block_tokens``: tokens per hash id of a Mooncake file, where they are not the published 512.
    Raises ConfigError: unknown format, unreadable file, or a row that cannot be used.
    """
    if trace_format not in _READERS:
        raise ConfigError(f"trace format {trace_format!r}: expected one of {', '.join(_READERS)}")
    if block_tokens is not None and (block_tokens < 1 or not trace_format.startswith("mooncake")):
        raise ConfigError(f"block_tokens {block_tokens}: expected 1 or more, and only for the mooncake formats")
    try:
        result = _READERS[trace_format](path, block_tokens or MOONCAKE_BLOCK)
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply to be a trace") from None
    except OSError as error:
        raise ConfigError(f"{path}: not readable: {error.strerror or error}") from None
    if not result.workload.trajectories:
        raise ConfigError(f"{path}: no requests in it")
    return result


def native_bytes(workload: Workload) -> bytes:
    """The workload in the project's own format, JSON lines.

    The first line is ``{"emulate_trace": 1, "name": ...}``, every other one trajectory: ``id``, ``turns`` (a
    list of ``prompt_tokens``, ``output_tokens`` and, where not the default, ``think_s`` 0, ``arrival_s`` null
    and ``stream`` 0) and ``streams``, each a list of ``[tokens, seed]`` spans. ``streams`` may be left out by
    hand: then there is one, long enough, seeded by the id.
    """
    lines = [msgspec.json.encode({"emulate_trace": _VERSION, "name": workload.name})]
    for trajectory in workload.trajectories:
        row = {
            "id": trajectory.id,
            "turns": [_native_turn(turn) for turn in trajectory.turns],
            "streams": [list(zip(s.lengths, s.seeds, strict=True)) for s in trajectory.streams],
        }
        lines.append(msgspec.json.encode(row))
    return b"\n".join(lines) + b"\n"


def write_native(workload: Workload, path: Path) -> None:
    """Write ``native_bytes`` to a file; compressed where its name ends in .gz. Same workload, same bytes."""
    data = native_bytes(workload)
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"{path}: not writable: {error.strerror}") from None


# --- files, lines and values


def _read_bytes(path: Path) -> bytes:
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: expected a regular file")
        if path.exists() and path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path}: {_TOO_LONG}")
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable: {getattr(error, 'strerror', None) or error}") from None
    if data.startswith(b"\x1f\x8b"):
        try:
            data = _unpacked(path, data)
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError(f"{path}: broken gzip data: {error}") from None
    return data.removeprefix(b"\xef\xbb\xbf")


def _unpacked(path: Path, data: bytes) -> bytes:
    """Piece by piece, so that a gzip bomb is refused at the limit and not in memory."""
    pieces = bytearray()
    with gzip.open(io.BytesIO(data)) as packed:
        while piece := packed.read(2**20):
            pieces += piece
            if len(pieces) > _MAX_BYTES:
                raise ConfigError(f"{path}: {_TOO_LONG}")
    return bytes(pieces)


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """(where, line) of every line that is not blank, without its line end; lines count from 1."""
    for number, line in enumerate(io.BytesIO(_read_bytes(path)), 1):
        if text := line.removesuffix(b"\n").rstrip(b"\r"):
            yield f"{path}:{number}", text


def _parse(where: str, text: bytes, kind: type[_Struct]) -> _Struct:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}{_line_of(text, error)}: {_not_json(text) or error}") from None


def _line_of(text: bytes, error: Exception) -> str:
    """In an object of many lines: the line that msgspec's byte offset falls into."""
    offset = re.search(r"\(byte (\d+)\)", str(error))
    if offset is None or b"\n" not in text:
        return ""
    line = text.count(b"\n", 0, int(offset[1])) + 1
    return f":{line}"


def _not_json(text: bytes) -> str | None:
    """Say it plainly where the only fault is a number that JSON does not have."""
    strange: list[str] = []
    try:
        json.loads(text, parse_constant=strange.append)
    except ValueError:
        return None
    return f"{strange[0]} is no number that a trace may have: expected a finite one" if strange else None


def _seconds(where: str, name: str, value: float | None, per_second: float = 1.0) -> float | None:
    """A time in seconds from a field that counts ``per_second`` of a second."""
    if value is None:
        return None
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{where}: {name} {value}: expected a finite number, 0 or more")
    return value / per_second


def _result(path: Path, trajectories: Sequence[tuple[str, Trajectory]], notes: dict[str, int]) -> TraceResult:
    """The workload of (where, trajectory) pairs; ids must differ."""
    seen: dict[str, str] = {}
    for where, trajectory in trajectories:
        if trajectory.id in seen:
            raise ConfigError(f"{where}: duplicate id {trajectory.id!r}, first used at {seen[trajectory.id]}")
        seen[trajectory.id] = where
    workload = Workload(tuple(trajectory for _, trajectory in trajectories), path.name)
    zero = sum(turn.output_tokens == 0 for t in workload.trajectories for turn in t.turns)
    notes = {**notes, "zero_outputs": zero}
    return TraceResult(workload, {name: count for name, count in notes.items() if count})


# --- weka: one JSON object a session


class _WekaRow(msgspec.Struct, rename={"prompt": "in", "output": "out"}):
    """A request of a recorded session, or a nested agent (``type`` subagent) with requests of its own."""

    t: float
    type: str = "n"
    prompt: int | None = None
    output: int | None = None
    hash_ids: list[int] | None = None
    think_time: float | None = None
    requests: list[_WekaRow] | None = None


class _WekaSession(msgspec.Struct):
    id: str
    block_size: int
    hash_id_scope: str
    requests: list[_WekaRow]


def _read_weka(path: Path, _: int) -> TraceResult:
    """Sessions of coding agents: prompts cumulative, ids of 64-token blocks local to the session.

    A nested agent has a context of its own, so it is a trajectory of its own, beside its parent; the two
    share the blocks whose ids they share.
    """
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith((".json", ".json.gz")))
        if not files:
            raise ConfigError(f"{path}: no session files (*.json or *.json.gz) in this folder")
    notes = {"out_of_order": 0, "subagents": 0, "without_think_time": 0}
    made: list[tuple[str, Trajectory]] = []
    for file in files:
        session = _parse(str(file), _read_bytes(file), _WekaSession)
        if session.block_size < 1:
            raise ConfigError(f"{file}: block_size {session.block_size}: expected 1 or more")
        if session.hash_id_scope not in {"local", "global"}:
            raise ConfigError(f"{file}: hash_id_scope {session.hash_id_scope!r}: expected local or global")
        scope = session.id if session.hash_id_scope == "local" else ""
        for name, agent in _weka_agents(session.id, session.requests, f"{file}: requests"):
            notes["subagents"] += name != session.id
            rows = _weka_rows(agent, session.block_size, notes)
            if rows:
                chains = chains_of(rows, session.block_size)
                made.append((str(file), trajectory_of(name, chains, scope, "weka")))
    return _result(path, made, notes)


def _weka_agents(name: str, rows: list[_WekaRow], where: str) -> Iterator[tuple[str, list[tuple[str, _WekaRow]]]]:
    """(trajectory id, its (where, row) pairs) of a session, then of the agents nested in it."""
    places = [(f"{where}[{index}]", row) for index, row in enumerate(rows)]
    yield name, [(place, row) for place, row in places if row.type != "subagent"]
    nested = ((place, row) for place, row in places if row.type == "subagent")
    for count, (place, row) in enumerate(nested):
        yield from _weka_agents(f"{name}/sub{count}", row.requests or [], f"{place}.requests")


def _weka_rows(rows: list[tuple[str, _WekaRow]], block: int, notes: dict[str, int]) -> list[Row]:
    turns: list[Row] = []
    for where, row in rows:
        if row.type not in {"n", "s"}:
            raise ConfigError(f"{where}: type {row.type!r}: expected n, s or subagent")
        if row.prompt is None or row.output is None or row.hash_ids is None:
            raise ConfigError(f"{where}: expected in, out and hash_ids")
        check_ids(where, row.hash_ids, row.prompt, block)
        start = _seconds(where, "t", row.t)
        think = _seconds(where, "think_time", row.think_time)
        notes["without_think_time"] += think is None
        turns.append(Row(row.prompt, row.output, row.hash_ids, think or 0.0, start, where))
    turns = _sorted(turns, notes)
    # Later rows follow their predecessors: their recorded times hold another system's service times.
    return [turn if index == 0 else turn._replace(arrival_s=None) for index, turn in enumerate(turns)]


def _sorted(turns: list[Row], notes: dict[str, int]) -> list[Row]:
    """By arrival, stably; those that come before an earlier row are counted."""
    latest = 0.0
    for turn in turns:
        notes["out_of_order"] += (turn.arrival_s or 0.0) < latest
        latest = max(latest, turn.arrival_s or 0.0)
    return sorted(turns, key=lambda turn: turn.arrival_s or 0.0)


# --- mooncake, cumulative and incremental: JSON lines


class _MooncakeRow(msgspec.Struct):
    """``timestamp`` and ``delay`` are milliseconds; a session's first row needs a timestamp."""

    input_length: int
    output_length: int
    timestamp: float | None = None
    hash_ids: list[int] | None = None
    session_id: str | int | None = None
    delay: float | None = None
    request_id: str | int | None = None


def _read_mooncake(path: Path, block: int) -> TraceResult:
    """Every row is a whole prompt; ids are global."""
    return _mooncake(path, block, cumulative=True)


def _read_mooncake_delta(path: Path, block: int) -> TraceResult:
    """A session's later rows hold only what is new since the predecessor's answer; ids are those of that text."""
    return _mooncake(path, block, cumulative=False)


def _mooncake(path: Path, block: int, *, cumulative: bool) -> TraceResult:
    notes = {"out_of_order": 0}
    sessions: dict[str | int, list[Row]] = {}
    spelt: dict[str, str | int] = {}
    request_ids: dict[str | int, str] = {}
    latest_s = 0.0
    for number, (where, text) in enumerate(_lines(path)):
        row = _parse(where, text, _MooncakeRow)
        if row.request_id is not None:
            first = request_ids.setdefault(row.request_id, where)
            if first != where:
                raise ConfigError(f"{where}: duplicate request_id {row.request_id!r}, first used at {first}")
        lengths = (row.input_length, row.output_length)
        if min(lengths) < 0:
            raise ConfigError(f"{where}: input_length, output_length {lengths}: expected 0 or more")
        if row.hash_ids is not None:
            check_ids(where, row.hash_ids, row.input_length, block)
        arrival_s = _seconds(where, "timestamp", row.timestamp, 1000.0)
        delay_s = _seconds(where, "delay", row.delay, 1000.0)
        before = sessions.setdefault(number if row.session_id is None else str(row.session_id), [])
        if row.session_id is not None and spelt.setdefault(str(row.session_id), row.session_id) != row.session_id:
            raise ConfigError(
                f"{where}: session_id {row.session_id!r}: an earlier row has"
                f" {spelt[str(row.session_id)]!r}; expected all numbers or all strings"
            )
        if arrival_s is None and not before:
            raise ConfigError(f"{where}: no timestamp, and no earlier row of its session: expected one of them")
        notes["out_of_order"] += arrival_s is not None and arrival_s < latest_s
        latest_s = max(latest_s, arrival_s or 0.0)
        before.append(Row(*lengths, row.hash_ids or (), delay_s or 0.0, arrival_s, where))
    return _result(path, _mooncake_sessions(sessions, block, cumulative), notes)


def _mooncake_sessions(
    sessions: dict[str | int, list[Row]], block: int, cumulative: bool
) -> list[tuple[str, Trajectory]]:
    """Order rows and sessions by time, chain the rows, and find which ids several chains share."""
    ordered = {session: _in_session_order(rows) for session, rows in sessions.items()}
    origin_s = min((rows[0].arrival_s or 0.0 for rows in ordered.values()), default=0.0)
    chained: list[tuple[str | int, list[Chain]]] = []
    for session, rows in sorted(ordered.items(), key=lambda item: item[1][0].arrival_s or 0.0):
        timed = [
            row if row.arrival_s is None else row._replace(arrival_s=row.arrival_s - origin_s) for row in rows
        ]
        chains = chains_of(timed, block) if cumulative else [Chain(_accumulated(timed), block)]
        chained.append((session, chains))
    shared = shared_ids(chain for _, chains in chained for chain in chains)
    return [
        (
            chains[0].rows[0].where,
            trajectory_of(session if isinstance(session, str) else f"row{session}", chains, "", "session", shared),
        )
        for session, chains in chained
    ]


def _in_session_order(rows: list[Row]) -> list[Row]:
    """By timestamp, stably; a row without one stays behind its predecessor."""
    times: list[float] = []
    for row in rows:
        times.append(times[-1] if row.arrival_s is None else row.arrival_s)
    return [rows[index] for index in sorted(range(len(rows)), key=times.__getitem__)]


def _accumulated(rows: Sequence[Row]) -> list[Row]:
    """Whole prompts from increments; ids of later increments name text that is not aligned to blocks."""
    whole = [rows[0]]
    for row in rows[1:]:
        context = whole[-1].prompt + whole[-1].output
        whole.append(row._replace(prompt=context + row.prompt, ids=()))
    return whole


# --- azure: CSV, one request a row, no prefixes


def _read_azure(path: Path, _: int) -> TraceResult:
    """``TIMESTAMP,ContextTokens,GeneratedTokens`` by header name; no row shares anything with another."""
    columns: dict[str, int] = {}
    rows: list[tuple[datetime, float, int, int, str]] = []
    width = 0
    for where, text in _lines(path):
        try:
            fields = next(csv.reader([text.decode()], strict=True))
        except (UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(f"{where}: not a line of CSV in UTF-8: {error}") from None
        if not columns:
            columns = {name: index for index, name in enumerate(fields)}
            width = len(fields)
            missing = [name for name in ("TIMESTAMP", "ContextTokens", "GeneratedTokens") if name not in columns]
            if missing or len(columns) != width:
                problem = f"no column {missing[0]}" if missing else "a column twice"
                raise ConfigError(
                    f"{where}: {problem}: expected the header TIMESTAMP,ContextTokens,GeneratedTokens"
                )
            continue
        if len(fields) != width:
            raise ConfigError(f"{where}: {len(fields)} fields: expected {width} as in the header")
        second, fraction_s = _timestamp(where, fields[columns["TIMESTAMP"]])
        context = _count(where, "ContextTokens", fields[columns["ContextTokens"]])
        generated = _count(where, "GeneratedTokens", fields[columns["GeneratedTokens"]])
        rows.append((second, fraction_s, context, generated, where))
    notes = {"out_of_order": 0}
    origin = min((row[0] for row in rows), default=datetime.min)
    turns = [
        Row(context, generated, (), 0.0, (second - origin) / timedelta(seconds=1) + fraction_s, where)
        for second, fraction_s, context, generated, where in rows
    ]
    first_s = min((turn.arrival_s or 0.0 for turn in turns), default=0.0)
    made = []
    for index, turn in enumerate(_sorted(turns, notes)):
        timed = turn._replace(arrival_s=(turn.arrival_s or 0.0) - first_s)
        made.append((turn.where, trajectory_of(f"row{index}", [Chain([timed], 1)], "", "azure")))
    return _result(path, made, notes)


def _timestamp(where: str, text: str) -> tuple[datetime, float]:
    """``YYYY-MM-DD HH:MM:SS`` and the fraction of a second, which has more digits than datetime keeps."""
    whole, _, fraction = text.partition(".")
    try:
        if fraction and not (fraction.isascii() and fraction.isdigit()):
            raise ValueError
        return datetime.strptime(whole, "%Y-%m-%d %H:%M:%S"), float(f"0.{fraction or 0}")
    except ValueError:
        raise ConfigError(f"{where}: TIMESTAMP {text!r}: expected YYYY-MM-DD HH:MM:SS.fraction") from None


def _count(where: str, name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ConfigError(f"{where}: {name} {text!r}: expected a whole number of tokens, 0 or more")
    return int(text)


# --- native: JSON lines of our own


class _NativeHead(msgspec.Struct, forbid_unknown_fields=True):
    emulate_trace: int
    name: str = ""


class _NativeRow(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    turns: list[Turn]
    streams: list[list[tuple[int, int]]] | None = None


def _native_turn(turn: Turn) -> dict[str, Any]:
    row: dict[str, Any] = {"prompt_tokens": turn.prompt_tokens, "output_tokens": turn.output_tokens}
    if turn.think_s:
        row["think_s"] = turn.think_s
    if turn.arrival_s is not None:
        row["arrival_s"] = turn.arrival_s
    if turn.stream:
        row["stream"] = turn.stream
    return row


def _read_native(path: Path, _: int) -> TraceResult:
    """What ``native_bytes`` writes."""
    lines = _lines(path)
    where, text = next(lines, (f"{path}:1", b""))
    if not text:
        raise ConfigError(f'{path}: empty: expected {{"emulate_trace": {_VERSION}}} in its first line')
    head = _parse(where, text, _NativeHead)
    if head.emulate_trace != _VERSION:
        raise ConfigError(f"{where}: emulate_trace {head.emulate_trace}: expected version {_VERSION}")
    made = []
    for where, text in lines:
        row = _parse(where, text, _NativeRow)
        try:
            made.append((where, _native_trajectory(row)))
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
    result = _result(path, made, {})
    return msgspec.structs.replace(result, workload=msgspec.structs.replace(result.workload, name=head.name))


def _native_trajectory(row: _NativeRow) -> Trajectory:
    streams = row.streams
    if streams is None:
        longest = max((turn.total_tokens for turn in row.turns), default=1)
        streams = [[(longest, seed_of("native", row.id))]]
    return Trajectory(
        row.id,
        tuple(row.turns),
        tuple(Stream(tuple(span[0] for span in spans), tuple(span[1] for span in spans)) for spans in streams),
    )


_READERS: dict[str, Callable[[Path, int], TraceResult]] = {
    "weka": _read_weka,
    "mooncake": _read_mooncake,
    "mooncake-delta": _read_mooncake_delta,
    "azure": _read_azure,
    "native": _read_native,
}

TRACE_FORMATS = tuple(_READERS)
"""The names that ``read_trace`` knows."""
