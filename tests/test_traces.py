"""Readers: every row becomes exactly what it says, or one line that names file and line."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator.errors import ConfigError
from emulator.kvcache import block_keys
from emulator.synth import synth_agentic
from emulator.traces import TRACE_FORMATS, native_bytes, read_trace, write_native
from emulator.workload import Trajectory, Workload, cut, infinite_cache, workload_stats

from .within import assert_within

BLOCK = 64
"""Tokens per id of the Mooncake files made here."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


def _mooncake(folder: Path, rows: list[dict[str, Any]], trace_format: str = "mooncake") -> Workload:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_trace(path, trace_format, block_tokens=BLOCK).workload


def _weka(requests: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": requests, **more}


def _request(tokens: int, ids: list[int], **more: Any) -> dict[str, Any]:
    return {"t": 0.0, "type": "n", "in": tokens, "out": 5, "hash_ids": ids, "think_time": 1.5, **more}


def _refused(path: Path, trace_format: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_trace(path, trace_format)
    assert "\n" not in caught.value.text
    return caught.value.text


# --- what rows become


class _Session:
    """A made-up session with known text, told in both dialects.

    Ids are those that hashing whole prefixes gives: a block's id is new unless the same session had it.
    """

    def __init__(self, rounds: list[tuple[int, int]], name: str, first_id: int) -> None:
        self.cumulative: list[dict[str, Any]] = []
        self.delta: list[dict[str, Any]] = []
        context, next_id = 0, first_id
        full: list[int] = []
        for turn, (append, output) in enumerate(rounds):
            prompt = context + append
            while len(full) < prompt // BLOCK:
                full.append(next_id)
                next_id += 1
            partial = [next_id] if prompt % BLOCK else []
            next_id += 1
            times = {"delay": 250.0} if turn else {"timestamp": 1000.0 * first_id}
            common = {"session_id": name, "output_length": output, **times}
            ids = [*full, *partial]
            self.cumulative.append({**common, "input_length": prompt, "hash_ids": ids})
            blocks = -(-append // BLOCK)
            new = ids if turn == 0 else [next_id + at for at in range(blocks)]
            next_id += blocks
            self.delta.append({**common, "input_length": append, "hash_ids": new})
            context = prompt + output


ROUNDS = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 200)), min_size=1, max_size=5)


@given(st.lists(ROUNDS, min_size=1, max_size=3), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_session_is_the_same_in_cumulative_and_in_delta_form(
    folder: Path, sessions: list[list[tuple[int, int]]], with_ids: bool
) -> None:
    """Both dialects give equal prompts, outputs, block keys, hits and times."""
    made = [_Session(rounds, f"s{at}", at * 10_000) for at, rounds in enumerate(sessions)]
    both = []
    for trace_format in ("mooncake", "mooncake-delta"):
        rows = [row for m in made for row in (m.cumulative if trace_format == "mooncake" else m.delta)]
        if not with_ids:
            rows = [{name: value for name, value in row.items() if name != "hash_ids"} for row in rows]
        both.append(_mooncake(folder, rows, trace_format))
    whole, grown = both
    assert infinite_cache(whole) == infinite_cache(grown)
    for one, other in zip(whole.trajectories, grown.trajectories, strict=True):
        assert (one.id, one.turns) == (other.id, other.turns)
        for turn in range(len(one.turns)):
            assert np.array_equal(one.prompt(turn), other.prompt(turn))
            assert np.array_equal(one.output(turn), other.output(turn))
            assert block_keys(one.context(turn), BLOCK) == block_keys(other.context(turn), BLOCK)


def _hits_by_ids(rows: list[tuple[int, list[int]]], block: int) -> int:
    """Tokens in leading blocks that an earlier row has, straight from ids that stand for whole prefixes."""
    known: set[int] = set()
    hits = 0
    for _, ids in rows:
        count = 0
        while count < len(ids) and ids[count] in known:
            count += 1
        hits += count * block
        known.update(ids)
    return hits


def test_equal_ids_are_equal_tokens_across_requests(tmp_path: Path) -> None:
    """Two rows that share two blocks share 128 tokens and no more; a partial block's id counts too."""
    rows = [
        {"timestamp": 0, "input_length": 150, "output_length": 3, "hash_ids": [1, 2, 3]},
        {"timestamp": 5, "input_length": 192, "output_length": 3, "hash_ids": [1, 2, 4]},
        {"timestamp": 9, "input_length": 150, "output_length": 3, "hash_ids": [1, 2, 3]},
    ]
    one, two, three = _mooncake(tmp_path, rows).trajectories
    assert np.array_equal(one.prompt(0)[:128], two.prompt(0)[:128])
    assert not np.array_equal(one.prompt(0)[128:150], two.prompt(0)[128:150])
    assert np.array_equal(one.prompt(0), three.prompt(0))
    assert not np.array_equal(one.output(0), three.output(0))
    assert [t.turns[0].arrival_s for t in (one, two, three)] == [0.0, 0.005, 0.009]


def test_blocks_of_512_tokens_share_their_64_token_parts(tmp_path: Path) -> None:
    """One shared id of 512 tokens is eight hit blocks of 64."""
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [7, last]} for last in (8, 9)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    assert infinite_cache(read_trace(path, "mooncake").workload).hit_tokens == ((0,), (512,))


def test_a_fork_hits_its_parents_blocks(tmp_path: Path) -> None:
    """A session that goes on from another one's generated blocks shares them, since its ids say so."""
    rows = [
        {"session_id": "a", "timestamp": 0, "input_length": 64, "output_length": 64, "hash_ids": [1]},
        {"session_id": "a", "delay": 0, "input_length": 192, "output_length": 1, "hash_ids": [1, 2, 3]},
        {"session_id": "b", "timestamp": 9, "input_length": 192, "output_length": 1, "hash_ids": [1, 2, 4]},
    ]
    parent, fork = _mooncake(tmp_path, rows).trajectories
    assert np.array_equal(parent.prompt(1)[:128], fork.prompt(0)[:128])
    assert np.array_equal(parent.output(0), fork.prompt(0)[64:128])


def test_a_rewound_session_shares_what_its_ids_share(tmp_path: Path) -> None:
    """A row whose full blocks do not continue its predecessor's starts anew after their common blocks."""
    path = tmp_path / "s.json"
    ids = [[1, 2, 3], [1, 2, 9, 10], [1, 2, 9, 10, 11]]
    path.write_text(
        json.dumps(_weka([_request(64 * len(each), each, t=float(at)) for at, each in enumerate(ids)]))
    )
    session = read_trace(path, "weka").workload.trajectories[0]
    assert [turn.stream for turn in session.turns] == [0, 1, 1]
    assert np.array_equal(session.prompt(0)[:128], session.prompt(1)[:128])
    assert not np.array_equal(session.prompt(0)[128:192], session.prompt(1)[128:192])
    assert np.array_equal(session.output(1), session.prompt(2)[256:261])


def test_nested_agents_are_trajectories_that_share_their_parents_scope(tmp_path: Path) -> None:
    """A subagent keeps its own order, shares blocks by id with its parent, and is counted."""
    path = tmp_path / "s.json"
    nested = {"t": 1.0, "type": "subagent", "requests": [_request(128, [1, 8], t=1.0)]}
    path.write_text(json.dumps(_weka([_request(128, [1, 2]), nested, _request(192, [1, 2, 3], t=2.0)])))
    result = read_trace(path, "weka")
    parent, child = result.workload.trajectories
    assert (parent.id, child.id, len(parent.turns), len(child.turns)) == ("s", "s/sub0", 2, 1)
    assert np.array_equal(parent.prompt(0)[:64], child.prompt(0)[:64])
    assert result.notes == {"subagents": 1}


def test_local_ids_of_two_sessions_are_different_text(tmp_path: Path) -> None:
    """Files of a folder share nothing where their ids are local, everything where they are global."""
    for scope, shared in (("local", False), ("global", True)):
        for name in ("a", "b"):
            (tmp_path / f"{name}.json").write_text(
                json.dumps(_weka([_request(64, [1])], id=name, hash_id_scope=scope))
            )
        one, two = read_trace(tmp_path, "weka").workload.trajectories
        assert np.array_equal(one.prompt(0), two.prompt(0)) == shared


def test_think_time_and_delay_are_seconds_before_the_next_turn(tmp_path: Path) -> None:
    """weka's think_time is in seconds, Mooncake's delay in milliseconds."""
    path = tmp_path / "s.json"
    path.write_text(json.dumps(_weka([_request(64, [1]), _request(128, [1, 2], t=3.0)])))
    turns = read_trace(path, "weka").workload.trajectories[0].turns
    assert [(turn.think_s, turn.arrival_s) for turn in turns] == [(1.5, 0.0), (1.5, None)]
    rows = _Session([(10, 1), (10, 1)], "s", 0).cumulative
    assert [turn.think_s for turn in _mooncake(tmp_path, rows).trajectories[0].turns] == [0.0, 0.25]


def _timed(trace_format: str, rows: list[tuple[int, int]]) -> str:
    """A trace of (second, prompt tokens) rows."""
    if trace_format == "azure":
        lines = [f"2024-05-10 00:00:{second:02},{tokens},1" for second, tokens in rows]
        return "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines])
    if trace_format == "weka":
        return json.dumps(_weka([_request(tokens, [], t=second) for second, tokens in rows]))
    moon = [{"timestamp": 1000 * second, "input_length": tokens, "output_length": 1} for second, tokens in rows]
    return "\n".join(map(json.dumps, moon))


@pytest.mark.parametrize("trace_format", ["mooncake", "mooncake-delta", "azure", "weka"])
@given(order=st.permutations(range(6)))
@settings(max_examples=30, deadline=None)
def test_rows_out_of_order_are_sorted_stably_and_counted(
    folder: Path, trace_format: str, order: list[int]
) -> None:
    """Equal timestamps keep the file's order; every row that comes after a later one is counted."""
    times = [0, 10, 10, 20, 20, 30]
    path = folder / f"shuffled.{trace_format}"
    path.write_text(_timed(trace_format, [(times[at], at + 1) for at in order]))
    result = read_trace(path, trace_format)
    arrived = [turn.prompt_tokens - 1 for t in result.workload.trajectories for turn in t.turns]
    assert arrived == sorted(order, key=times.__getitem__)
    late = sum(times[at] < max(times[before] for before in order[: place + 1]) for place, at in enumerate(order))
    assert result.notes.get("out_of_order", 0) == late


@pytest.mark.parametrize("trace_format", ["mooncake", "mooncake-delta", "azure"])
def test_a_replay_starts_with_the_first_row(tmp_path: Path, trace_format: str) -> None:
    """Whatever the time of day: arrivals are seconds after the earliest."""
    path = tmp_path / "late"
    path.write_text(_timed(trace_format, [(50, 1), (57, 2), (59, 3)]))
    trajectories = read_trace(path, trace_format).workload.trajectories
    assert [t.turns[0].arrival_s for t in trajectories] == [0.0, 7.0, 9.0]


def test_a_shorter_prompt_without_ids_continues_nothing(tmp_path: Path) -> None:
    """Where no id tells what is shared, a prompt that shrinks is another text; one that grows is the same."""
    path = tmp_path / "s.json"
    path.write_text(json.dumps(_weka([_request(60, []), _request(63, []), _request(50, [])])))
    (trajectory,) = read_trace(path, "weka").workload.trajectories
    grown, shrunk = trajectory.prompt(1), trajectory.prompt(2)
    assert np.array_equal(grown[:60], trajectory.prompt(0))
    assert not np.array_equal(grown[:50], shrunk)


def test_azure_rows_arrive_relative_to_the_earliest(tmp_path: Path) -> None:
    """Seven fractional digits, CRLF, no final newline; columns by name; nothing is shared."""
    path = tmp_path / "trace.csv"
    path.write_bytes(
        b"GeneratedTokens,TIMESTAMP,ContextTokens\r\n0,2023-11-16 18:17:03.9799600,64\r\n"
        b"8,2023-11-16 18:17:04.0319600,64"
    )
    result = read_trace(path, "azure")
    one, two = result.workload.trajectories
    assert one.turns[0].arrival_s == 0.0
    assert_within(two.turns[0].arrival_s or 0.0, 0.052, absolute=1e-6, what="second arrival")
    assert (one.turns[0].output_tokens, two.turns[0].output_tokens) == (0, 8)
    assert result.notes == {"zero_outputs": 1}
    assert infinite_cache(result.workload).hit_tokens == ((0,), (0,))


# --- bytes on disk


def _small(trace_format: str) -> bytes:
    """A small valid file of each format."""
    if trace_format == "weka":
        return json.dumps(_weka([_request(130, [1, 2]), _request(200, [1, 2, 3], t=2.0)])).encode()
    if trace_format == "azure":
        return b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,48,10\n2023-11-16 18:17:04,31,8\n"
    if trace_format == "native":
        return native_bytes(synth_agentic(1, 2, 32_768, 1 / 64))
    rows = [
        {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2], "session_id": "a"},
        {"delay": 5, "input_length": 1300, "output_length": 5, "hash_ids": [1, 3, 4], "session_id": "a"},
        {"timestamp": 7.5, "input_length": 30, "output_length": 0, "request_id": 4},
    ]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.mark.parametrize("trace_format", TRACE_FORMATS)
def test_line_ends_marks_and_compression_change_nothing(tmp_path: Path, trace_format: str) -> None:
    """CRLF, a byte order mark, no final newline, blank lines at the end and gzip give the same workload."""
    data = _small(trace_format)
    path = tmp_path / "trace"
    variants = (
        data,
        data.replace(b"\n", b"\r\n"),
        b"\xef\xbb\xbf" + data,
        data.rstrip(b"\n"),
        data + b"\n\r\n",
        gzip.compress(data),
    )
    read = []
    for variant in variants:
        path.write_bytes(variant)
        read.append(read_trace(path, trace_format))
    assert all(result == read[0] for result in read)


def test_native_files_give_back_the_workload(tmp_path: Path) -> None:
    """write_native then read_trace is the identity, compressed or not, and the bytes are the same each time."""
    workload = synth_agentic(4, 3, 32_768, 1 / 16)
    for name in ("a.jsonl", "a.jsonl.gz"):
        write_native(workload, tmp_path / name)
        first = (tmp_path / name).read_bytes()
        write_native(workload, tmp_path / name)
        assert (tmp_path / name).read_bytes() == first
        assert read_trace(tmp_path / name, "native").workload == workload


def test_a_native_trajectory_can_be_written_by_hand(tmp_path: Path) -> None:
    """Without streams the turns are cuts of one stream of the trajectory's own."""
    path = tmp_path / "hand.jsonl"
    path.write_text(
        '{"emulate_trace": 1}\n{"id": "a", "turns": [{"prompt_tokens": 100, "output_tokens": 10},'
        ' {"prompt_tokens": 130, "output_tokens": 1, "think_s": 2.5}]}\n'
    )
    (trajectory,) = read_trace(path, "native").workload.trajectories
    assert np.array_equal(trajectory.prompt(1)[:110], trajectory.context(0))


# --- what is refused

_ROW = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}'


@pytest.mark.parametrize(
    ("trace_format", "text", "said"),
    [
        ("mooncake", '{"input_length": 5, "output_length": 5}', ":2: no timestamp, and no earlier row"),
        ("mooncake", '{"delay": 3, "session_id": 1, "input_length": 5, "output_length": 5}', ":2: no timestamp"),
        ("mooncake", '{"timestamp": NaN, "input_length": 5, "output_length": 5}', ":2: NaN"),
        ("mooncake", '{"timestamp": Infinity, "input_length": 5, "output_length": 5}', ":2: Infinity"),
        ("mooncake", '{"timestamp": 1e400, "input_length": 5, "output_length": 5}', ":2: "),
        ("mooncake", '{"timestamp": -1, "input_length": 5, "output_length": 5}', ":2: timestamp -1"),
        ("mooncake", '{"timestamp": 0, "input_length": -5, "output_length": 5}', ":2: input_length"),
        ("mooncake", '{"timestamp": 0, "input_length": 5, "output_length": -5}', ":2: input_length"),
        ("mooncake", '{"timestamp": 0, "input_length": 0, "output_length": 5}', ":2: prompt_tokens = 0"),
        ("mooncake", '{"timestamp": 0, "input_length": 5.5, "output_length": 5}', ":2: .*input_length"),
        ("mooncake", '{"timestamp": 0, "input_length": true, "output_length": 5}', ":2: .*input_length"),
        ("mooncake", '{"timestamp": 0, "input_length": 99999999999, "output_length": 5}', ":2: a context of"),
        ("mooncake", '{"timestamp": 0, "output_length": 5}', ":2: .*input_length"),
        ("mooncake", _ROW.replace("[1, 2]", "[1, 2, 3]"), ":2: 3 hash_ids for 600 tokens: expected 1 or 2 blocks"),
        ("mooncake", _ROW.replace("[1, 2]", "[]"), ":2: 0 hash_ids for 600 tokens"),
        (
            "mooncake",
            _ROW.replace("600", "1024").replace("[1, 2]", "[1]"),
            ":2: 1 hash_ids for 1024 tokens: expected 2 blocks",
        ),
        (
            "mooncake",
            _ROW.replace("600", "1024").replace("[1, 2]", "[1, 2, 3]"),
            ":2: 3 hash_ids for 1024 tokens: expected 2 blocks",
        ),
        ("mooncake", _ROW.replace("[1, 2]", "[1, -2]"), ":2: hash id -2"),
        ("mooncake", _ROW[:-1], ":2: "),
        ("mooncake", "[]", ":2: "),
        ("mooncake", "\x00", ":2: "),
        ("mooncake-delta", '{"input_length": 5, "output_length": 5}', ":2: no timestamp"),
        ("mooncake-delta", _ROW.replace("[1, 2]", "[]"), ":2: 0 hash_ids"),
    ],
)
def test_a_bad_mooncake_row_is_named_by_file_and_line(
    tmp_path: Path, trace_format: str, text: str, said: str
) -> None:
    """The second line is bad: the message says so, and what was expected."""
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{_ROW}\n{text}\n")
    with pytest.raises(ConfigError, match=rf"trace\.jsonl{said}"):
        read_trace(path, trace_format)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("2023-11-16 18:17:03.9799600,NaN,8", ":2: ContextTokens 'NaN'"),
        ("2023-11-16 18:17:03.9799600,-4,8", ":2: ContextTokens '-4'"),
        ("2023-11-16 18:17:03.9799600,0,8", ":2: prompt_tokens = 0"),
        ("2023-11-16 18:17:03.9799600,4,8.5", ":2: GeneratedTokens '8.5'"),
        ("2023-11-16 18:17:03.9799600,4", ":2: 2 fields: expected 3"),
        ("2023-11-16 18:17:03.97x,4,8", ":2: TIMESTAMP"),
        (",4,8", ":2: TIMESTAMP ''"),
        ("2023-13-16 18:17:03,4,8", ":2: TIMESTAMP"),
        ('"2023,4,8', ":2: not a line of CSV"),
    ],
)
def test_a_bad_azure_row_is_named_by_file_and_line(tmp_path: Path, text: str, said: str) -> None:
    """A missing timestamp, a number that is none, a missing field."""
    path = tmp_path / "trace.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{text}\n")
    assert said in _refused(path, "azure")


@pytest.mark.parametrize(
    "header", ["TIMESTAMP,ContextTokens", "a,b,c", "TIMESTAMP,ContextTokens,GeneratedTokens,TIMESTAMP"]
)
def test_azure_needs_its_header(tmp_path: Path, header: str) -> None:
    """Columns are found by name; a missing or doubled one is refused."""
    path = tmp_path / "trace.csv"
    path.write_text(f"{header}\n1,2,3\n")
    assert "trace.csv:1: " in _refused(path, "azure")


@pytest.mark.parametrize(
    ("session", "said"),
    [
        (_weka([_request(130, [1])]), "requests[0]: 1 hash_ids for 130 tokens: expected 2 or 3 blocks of 64"),
        (_weka([_request(64, [1]), _request(-1, [])]), "requests[1]: "),
        (_weka([_request(64, [1], t=-1.0)]), "requests[0]: t -1.0"),
        (_weka([_request(64, [1], think_time=-1.0)]), "requests[0]: think_time -1.0"),
        (_weka([_request(64, [1], type="x")]), "requests[0]: type 'x'"),
        (_weka([{"t": 0, "type": "n", "in": 5}]), "requests[0]: expected in, out and hash_ids"),
        (_weka([{"type": "n", "in": 5, "out": 1, "hash_ids": []}]), "`t`"),
        (
            _weka([{"t": 0, "type": "subagent", "requests": [_request(64, [])]}]),
            "requests[0].requests[0]: 0 hash_ids",
        ),
        (_weka([_request(64, [1])], block_size=0), "block_size 0"),
        (_weka([_request(64, [1])], hash_id_scope="planet"), "hash_id_scope 'planet'"),
        (_weka([]), "no requests"),
    ],
)
def test_a_bad_session_is_named_by_file_and_request(tmp_path: Path, session: dict[str, Any], said: str) -> None:
    """JSON objects have no lines to speak of: the place inside is named."""
    path = tmp_path / "session.json"
    path.write_text(json.dumps(session))
    text = _refused(path, "weka")
    assert "session.json" in text
    assert said in text


def test_broken_json_of_many_lines_is_named_by_its_line(tmp_path: Path) -> None:
    """The line of the first byte that cannot be parsed."""
    path = tmp_path / "session.json"
    lines = json.dumps(_weka([_request(64, [1])]), indent=1).splitlines()
    lines[4] = "  ?"
    path.write_text("\n".join(lines))
    assert "session.json:5: " in _refused(path, "weka")
    path.write_text(json.dumps(_weka([_request(64, [1], t=float("nan"))]), indent=1))
    assert "NaN" in _refused(path, "weka")


def test_duplicate_ids_name_both_places(tmp_path: Path) -> None:
    """Two sessions, requests or trajectories with one id, however spelt: the second is named, and the first."""
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(_weka([_request(64, [1])])))
    text = _refused(tmp_path, "weka")
    assert "b.json: duplicate id 's'" in text
    assert "a.json" in text
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 5, "request_id": "r"}\n' * 2)
    assert "trace.jsonl:2: duplicate request_id 'r', first used at" in _refused(path, "mooncake")
    row = '{"timestamp": 0, "input_length": 5, "output_length": 5, "session_id": %s}\n'
    path.write_text(row % 1 + row % 1 + row % '"1"')
    assert "trace.jsonl:3: session_id '1': an earlier row has 1" in _refused(path, "mooncake")
    line = '{"id": "a", "turns": [{"prompt_tokens": 1, "output_tokens": 1}]}\n'
    path.write_text(f'{{"emulate_trace": 1}}\n{line * 2}')
    assert "trace.jsonl:3: duplicate id 'a'" in _refused(path, "native")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"id": "a", "turns": []}', ":1: "),
        ('{"emulate_trace": 2}', ":1: emulate_trace 2"),
        ('{"emulate_trace": 1}\n{"id": "a", "turns": []}', ":2: trajectory a: no turns"),
        ('{"emulate_trace": 1}\n{"id": "a", "turns": [{"prompt_tokens": 0, "output_tokens": 1}]}', ":2: "),
        ('{"emulate_trace": 1}\n{"id": "a", "turn": []}', ":2: "),
        (
            '{"emulate_trace": 1}\n{"id": "a", "turns": [{"prompt_tokens": 9, "output_tokens": 1, "thnk_s": 9}]}',
            "thnk_s",
        ),
        (
            '{"emulate_trace": 1}\n{"id": "a", "turns": [{"prompt_tokens": 9, "output_tokens": 1}],'
            ' "streams": [[[9, 1]]]}',
            ":2: ",
        ),
        ('{"emulate_trace": 1}', "no requests"),
    ],
)
def test_a_bad_native_line_is_named(tmp_path: Path, text: str, said: str) -> None:
    """Our own format is checked like any other."""
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    assert said in _refused(path, "native")


@pytest.mark.parametrize("trace_format", TRACE_FORMATS)
@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.mkdir(),
        os.mkfifo,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(64)),
        lambda path: path.write_bytes("{}".encode("utf-16")),
        lambda path: path.write_bytes('{"id": "é"}'.encode("latin-1")),
        lambda path: path.write_bytes(bytes(100)),
        lambda path: path.write_bytes(gzip.compress(b"{}" * 100)[:-12]),
        lambda path: path.write_bytes(b"\x1f\x8b\x08nonsense"),
        lambda path: path.write_bytes(b"[" * 100_000),
        lambda path: path.symlink_to(path),
        lambda path: None,
    ],
    ids=[
        "dir",
        "fifo",
        "empty",
        "elf",
        "utf16",
        "latin1",
        "nuls",
        "cut-gzip",
        "bad-gzip",
        "nested",
        "loop",
        "missing",
    ],
)
def test_what_is_no_trace_is_one_line(tmp_path: Path, trace_format: str, make: Callable[[Path], None]) -> None:
    """Any other file, and none, names the path and never raises anything but ConfigError."""
    path = tmp_path / "strange"
    make(path)
    assert "strange" in _refused(path, trace_format)


def test_a_gzip_bomb_is_refused_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text beyond the limit, packed or plain, is one line; up to it, all of it is read."""
    monkeypatch.setattr("emulator.traces._MAX_BYTES", 5_000_000)
    for name, pack in (("bomb.gz", gzip.compress), ("plain", bytes)):
        (tmp_path / name).write_bytes(pack(b"\n" * 5_000_001))
        assert f"{name}: more than" in _refused(tmp_path / name, "mooncake")
        (tmp_path / name).write_bytes(pack(b"\n" * 5_000_000))
        assert f"{name}: no requests in it" in _refused(tmp_path / name, "mooncake")


_MOON: dict[str, Any] = {"timestamp": 0, "input_length": 9, "output_length": 1}
_CALL: dict[str, Any] = {"t": 0, "in": 9, "out": 1, "hash_ids": []}
_TURN: dict[str, Any] = {"prompt_tokens": 9, "output_tokens": 1}


def _native(**turn: Any) -> str:
    return '{"emulate_trace":1}\n' + json.dumps({"id": "a", "turns": [_TURN | turn]})


def _session(*calls: dict[str, Any]) -> str:
    return json.dumps({"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": calls})


@pytest.mark.parametrize(
    ("trace_format", "text"),
    [
        ("native", _native(arrival_s=1e13)),
        ("native", _native(think_s=1e300)),
        ("mooncake", json.dumps(_MOON) + "\n" + json.dumps(_MOON | {"timestamp": 1e17})),
        ("mooncake", json.dumps(_MOON | {"delay": 1e300})),
        ("mooncake-delta", json.dumps(_MOON | {"delay": 1e10})),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n0001-01-01 00:00:00,9,1\n9999-12-31 23:59:59,9,1"),
        ("weka", _session(_CALL | {"t": 1e300})),
        ("weka", _session(*[_CALL | {"think_time": 4e5}] * 3)),
    ],
)
def test_no_trace_waits_longer_than_a_replay_can(tmp_path: Path, trace_format: str, text: str) -> None:
    """A time that no recording has, alone or summed up over a session, is refused where it is read."""
    path = tmp_path / "waits"
    path.write_text(text)
    said = _refused(path, trace_format)
    assert "waits:" in said and "expected" in said and "1000000" in said


def test_formats_are_named_never_guessed(tmp_path: Path) -> None:
    """An unknown name lists the known ones; the block size is for Mooncake files only."""
    with pytest.raises(ConfigError, match="expected one of weka, mooncake, mooncake-delta, azure, native"):
        read_trace(tmp_path, "json")
    with pytest.raises(ConfigError, match="only for the mooncake formats"):
        read_trace(tmp_path, "weka", block_tokens=16)


_WORDS = st.sampled_from(
    [
        b"-",
        b"NaN",
        b"null",
        b"[]",
        b"{}",
        b'"',
        b",",
        b"1e999",
        b"9" * 25,
        b"\x00",
        b"\xff",
        b"\n",
        b"true",
        b"0.5",
        b"x",
    ]
)


@pytest.mark.parametrize("trace_format", TRACE_FORMATS)
@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_a_mutated_file_is_a_workload_or_one_clear_line(
    folder: Path, trace_format: str, data: st.DataObject
) -> None:
    """Whatever is put in, cut out or repeated: a workload whose tokens can be made, or a ConfigError."""
    content = bytearray(_small(trace_format))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        end = min(len(content), at + data.draw(st.integers(0, 12)))
        content[at:end] = data.draw(st.one_of(_WORDS, st.binary(max_size=3), st.just(bytes(content[at:end]) * 2)))
    path = folder / f"mutated-{trace_format}"
    path.write_bytes(content)
    try:
        workload = read_trace(path, trace_format).workload
    except ConfigError as error:
        assert str(path) in error.text
        assert "\n" not in error.text
        return
    for trajectory in workload.trajectories:
        for turn in range(len(trajectory.turns)):
            assert len(trajectory.context(turn)) == trajectory.turns[turn].total_tokens


# --- the public traces


def _contexts(workload: Workload, sample: int) -> Iterator[tuple[Trajectory, int]]:
    chosen = random.Random(1).sample(workload.trajectories, min(sample, len(workload.trajectories)))
    for trajectory in chosen:
        for turn in range(len(trajectory.turns)):
            yield trajectory, turn


@pytest.mark.shared
def test_the_weka_sessions(shared: Path) -> None:
    """48 sessions; at MaxLen 65,536 30 of them with 409 requests; hits as their own ids say, and more:

    ids alone know nothing of the generated text of a partial block.
    """
    result = read_trace(shared / "traces/weka", "weka")
    assert len(result.workload.trajectories) == 48
    short, left_out = cut(result.workload, 65_536)
    assert (short.requests, left_out) == (409, 18)
    by_ids = 0
    for file in sorted((shared / "traces/weka").glob("*.json")):
        rows = [(r["in"], r["hash_ids"]) for r in json.loads(file.read_text())["requests"]]
        by_ids += _hits_by_ids(rows, 64)
    stats = workload_stats(result.workload)
    assert stats.hit_tokens >= by_ids
    assert_within(stats.hit_tokens, by_ids, rel=0.02, what="hit tokens")
    for trajectory, turn in _contexts(short, 5):
        assert len(trajectory.prompt(turn)) == trajectory.turns[turn].prompt_tokens


@pytest.mark.shared
def test_the_mooncake_trace(shared: Path) -> None:
    """12,031 requests; block hits of 36.6 % as published with it, and as its own ids say."""
    path = shared / "traces/mooncake/conversation_trace.jsonl"
    workload = read_trace(path, "mooncake").workload
    assert len(workload.trajectories) == workload.requests == 12_031
    assert len({t.turns[0].arrival_s for t in workload.trajectories}) == 1_180
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    pairs = [(row["input_length"], row["hash_ids"]) for row in rows]
    blocks = sum(len(ids) for _, ids in pairs)
    assert_within(_hits_by_ids(pairs, 512) / 512 / blocks, 0.366, absolute=0.001, what="block hit rate")
    small = Workload(workload.trajectories[:2000])
    assert_within(
        workload_stats(small).hit_tokens, _hits_by_ids(pairs[:2000], 512), rel=0.01, what="hit tokens of 2,000"
    )


@pytest.mark.shared
def test_the_azure_trace(shared: Path) -> None:
    """8,819 rows with CRLF and no final newline; single requests that share nothing."""
    result = read_trace(shared / "traces/azure/AzureLLMInferenceTrace_code.csv", "azure")
    assert result.workload.requests == len(result.workload.trajectories) == 8_819
    arrivals = [t.turns[0].arrival_s or 0.0 for t in result.workload.trajectories]
    assert arrivals == sorted(arrivals)
    assert workload_stats(Workload(result.workload.trajectories[:500])).hit_tokens == 0
