"""The words between processes: framing that no split can break, and errors that keep their kind."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from emulator.errors import ConfigError, EmulatorError, ProtocolViolation, Refused
from emulator.hosts import control

EVENTS: list[control.NodeEvent] = [
    control.Ready(),
    control.Progress(3, 9),
    control.Failed("refused", "zu groß für\nHBM", True),
    control.Closed(),
]


async def _read(chunks: list[bytes]) -> list[control.NodeEvent]:
    left, right = trio.testing.memory_stream_one_way_pair()
    for chunk in chunks:
        if chunk:
            await left.send_all(chunk)
    await left.aclose()
    return [event async for event in control.Lines[control.NodeEvent](right, control.NodeEvent)]


@given(st.lists(st.sampled_from(EVENTS), max_size=8), st.lists(st.integers(0, 400), max_size=12))
def test_messages_survive_any_split(events: list[control.NodeEvent], cuts: list[int]) -> None:
    """However the bytes are cut up in transit, the same messages come out, in order."""
    data = b"".join(map(control.encode, events))
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    chunks = [data[a:b] for a, b in pairwise(edges)]
    assert trio.run(_read, chunks) == events


@pytest.mark.parametrize("line", [b"{}\n", b'{"event":"applause"}\n', b"\xff\n", b"\n", b'{"event":"progress"}\n'])
async def test_nonsense_is_a_violation(line: bytes) -> None:
    """A line that is none of the words ends the conversation with an error that shows it."""
    with pytest.raises(ProtocolViolation, match="control line"):
        await _read([line])


async def test_a_half_line_is_the_end() -> None:
    """What its sender did not finish was not said."""
    assert await _read([control.encode(control.Ready()), b'{"event":']) == [control.Ready()]


async def test_a_line_without_an_end_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is not filled by a peer that forgets its newline."""
    monkeypatch.setattr(control, "MAX_LINE_BYTES", 100)
    with pytest.raises(ProtocolViolation, match="more than 100 bytes"):
        await _read([b"x" * 101])


@pytest.mark.parametrize(
    "error", [Refused("never fits"), ConfigError("bad key"), EmulatorError("x", definite=True)]
)
def test_errors_cross_whole(error: EmulatorError) -> None:
    """Type, text and whether the act surely did not happen."""
    back = control.Failed.of(error).error()
    assert (type(back), back.text, back.definite) == (type(error), error.text, error.definite)


def test_files_come_back_or_say_why_not(tmp_path: Path) -> None:
    """Kept and read back; a full disk, a missing file and one cut short are one line with the path."""
    result = control.ReplayResult(1.0, 2.5, ())
    path = tmp_path / "result"
    control.write_file(path, result)
    assert control.read_file(path, control.ReplayResult) == result
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(EmulatorError, match="result"):
        control.read_file(path, control.ReplayResult)
    with pytest.raises(EmulatorError, match="none"):
        control.read_file(tmp_path / "none", control.ReplayResult)
    with pytest.raises(EmulatorError, match="No space left"):
        control.write_file(Path("/dev/full"), result)


async def test_bytes_follow_a_line() -> None:
    """What a line announces is taken as it is, newlines and all, and the next line is read after it."""
    left, right = trio.testing.memory_stream_one_way_pair()
    payload = b"\n\x00{}\n" * 50_000
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            left.send_all, control.encode(control.Ready()) + payload + control.encode(control.Closed())
        )
        lines = control.Lines[control.NodeEvent](right, control.NodeEvent)
        assert await anext(lines) == control.Ready()
        assert await lines.take(len(payload)) == payload
        assert await anext(lines) == control.Closed()
    await left.aclose()
    with pytest.raises(ProtocolViolation, match="0 of 1 bytes"):
        await lines.take(1)
