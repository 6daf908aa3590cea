"""The TCP fabric's framing: what is encoded comes back, however it is cut, and nothing else passes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.errors import ProtocolViolation
from emulator.extent import Extent, total_bytes
from emulator.fabric.interface import Endpoint, Transfer, VirtualLane
from emulator.fabric.wire import (
    FRAME_PREFIX_BYTES,
    MAX_EXTENTS,
    MAX_FRAME_BYTES,
    Answer,
    Call,
    Failure,
    Feedback,
    PairHello,
    RpcHello,
    decode_feedback,
    decode_frame,
    decode_header,
    decode_hello,
    encode_ack,
    encode_frame,
    encode_header,
    encode_hello,
    encode_violation,
    frame_size,
)


@st.composite
def extents(draw: st.DrawFn) -> Extent:
    size = draw(st.integers(1, 1 << 20))
    count = draw(st.integers(1, 1 << 16))
    gap = draw(st.integers(0, 1 << 20))
    return Extent(draw(st.integers(0, 1 << 40)), size, count, size + gap if count > 1 else 0)


names = st.text(max_size=40)
lists = st.lists(extents(), min_size=1, max_size=20)
hellos = st.builds(
    PairHello,
    st.builds(Endpoint, names, names, st.sampled_from(["host", "gpu"])),
    st.builds(Endpoint, names, names, st.sampled_from(["host", "gpu"])),
    st.sampled_from(VirtualLane),
)


def header(transfer: Transfer, region: str, tag: str, scatter: list[Extent]) -> bytes:
    return encode_header(transfer, region.encode(), tag.encode(), scatter, total_bytes(scatter))


@given(st.sampled_from(Transfer), names, names, lists, st.binary(max_size=30), st.binary(max_size=30))
def test_headers_round_trip_anywhere_in_a_buffer(
    transfer: Transfer, region: str, tag: str, scatter: list[Extent], before: bytes, after: bytes
) -> None:
    """A header decodes to what was encoded, wherever it stands and whatever follows it."""
    data = header(transfer, region, tag, scatter)
    buffer = memoryview(before + data + after)
    got = decode_header(buffer, len(before), len(buffer))
    assert got is not None
    assert (got.transfer, got.region, got.tag, list(got.extents)) == (transfer, region, tag, scatter)
    assert got.payload_bytes == total_bytes(scatter)
    assert got.length == len(data)


@given(st.sampled_from(Transfer), names, names, st.lists(extents(), min_size=1, max_size=4), st.data())
def test_a_truncated_header_is_never_taken_for_a_whole_one(
    transfer: Transfer, region: str, tag: str, scatter: list[Extent], data: st.DataObject
) -> None:
    """A proper prefix of a header decodes to nothing and is no violation, at any cut."""
    whole = memoryview(header(transfer, region, tag, scatter))
    cut = data.draw(st.integers(0, len(whole) - 1))
    assert decode_header(whole, 0, cut) is None


@given(st.binary(min_size=1, max_size=200))
def test_garbage_is_refused_or_waited_for_and_never_crashes(garbage: bytes) -> None:
    """Any bytes give a value, None or ProtocolViolation, in every decoder."""
    decoders = (
        lambda: decode_header(memoryview(garbage), 0, len(garbage)),
        lambda: decode_hello(garbage, PairHello),
        lambda: decode_hello(garbage, RpcHello),
        lambda: decode_feedback(garbage),
        lambda: decode_frame(garbage, Call),
        lambda: decode_frame(garbage, Answer),
        lambda: frame_size(garbage[:4].ljust(4, b"\0")),
    )
    for decode in decoders:
        try:
            decode()
        except ProtocolViolation as error:
            assert "\n" not in error.text


@given(st.sampled_from(Transfer), names, names, st.lists(extents(), min_size=1, max_size=3), st.data())
def test_a_corrupted_header_never_claims_more_than_its_extents(
    transfer: Transfer, region: str, tag: str, scatter: list[Extent], data: st.DataObject
) -> None:
    """With any byte changed, what still decodes is consistent: valid extents whose total is the payload."""
    raw = bytearray(header(transfer, region, tag, scatter))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        got = decode_header(memoryview(raw), 0, len(raw))
    except ProtocolViolation:
        return
    if got is not None:
        assert total_bytes(got.extents) == got.payload_bytes
        assert got.length <= len(raw)


def test_a_payload_unequal_to_its_scatter_is_a_violation() -> None:
    """Lengths must be equal: the receiver would lose its place in the stream."""
    raw = encode_header(Transfer.OTHER, b"r", b"", [Extent(0, 10)], 11)
    with pytest.raises(ProtocolViolation, match="payload of 11 bytes for a scatter of 10"):
        decode_header(memoryview(raw), 0, len(raw))


def test_overlapping_and_empty_extents_are_violations() -> None:
    """Extents that this side could not even build are refused, not crashed on."""
    good = header(Transfer.OTHER, "", "", [Extent(0, 8, 2, 8)])
    fields = len(good) - 32
    for size, stride in ((0, 8), (8, 7)):
        packed = b"".join(value.to_bytes(8, "big") for value in (0, size, 2, stride))
        raw = good[:fields] + packed
        with pytest.raises(ProtocolViolation):
            decode_header(memoryview(raw), 0, len(raw))


def test_what_the_wire_cannot_carry_is_refused_at_the_sender() -> None:
    """Too many extents, or an endless name: ValueError before anything is sent."""
    for region, scatter in (
        (b"r", [Extent(0, 1)] * (MAX_EXTENTS + 1)),
        (b"r" * 70_000, [Extent(0, 1)]),
    ):
        with pytest.raises(ValueError, match=r"extents|bytes each"):
            encode_header(Transfer.OTHER, region, b"", scatter, total_bytes(scatter))
    with pytest.raises(ValueError, match="RPC frame"):
        encode_frame(Call(1, "m", 0.0, msgspec.Raw(msgspec.msgpack.encode(bytes(MAX_FRAME_BYTES)))))


@given(hellos, st.binary(max_size=20), st.data())
def test_hellos_round_trip_at_any_cut(hello: PairHello, after: bytes, data: st.DataObject) -> None:
    """A hello comes back with its length; a prefix of it is waited for."""
    raw = encode_hello(hello)
    assert decode_hello(raw + after, PairHello) == (hello, len(raw))
    assert decode_hello(raw[: data.draw(st.integers(0, len(raw) - 1))], PairHello) is None


def test_hellos_of_the_wrong_kind_are_violations() -> None:
    """A call does not come in on the data port, nor anything that is not ours."""
    with pytest.raises(ProtocolViolation, match="no PairHello"):
        decode_hello(encode_hello(RpcHello("a", "b")), PairHello)
    with pytest.raises(ProtocolViolation, match="opens with"):
        decode_hello(b"GET / HTTP/1.1\r\n", PairHello)
    with pytest.raises(ProtocolViolation, match="hello of"):
        decode_hello(b"DPF1" + b"\xff" * 4, PairHello)


@given(
    st.lists(
        st.one_of(
            st.builds(Feedback, st.integers(0, 1 << 60), st.floats(allow_nan=False)),
            st.builds(Feedback, violation=st.text(max_size=50)),
        ),
        max_size=10,
    ),
    st.data(),
)
def test_feedback_is_read_whole_whatever_the_chunks(said: list[Feedback], data: st.DataObject) -> None:
    """A stream of counts and a violation, cut anywhere, decodes to the same sequence."""
    stream = b"".join(
        encode_ack(item.placed, item.at_s) if item.violation is None else encode_violation(item.violation)
        for item in said
    )
    got: list[Feedback] = []
    pending = b""
    at = 0
    while at < len(stream):
        step = data.draw(st.integers(1, len(stream) - at))
        pending += stream[at : at + step]
        at += step
        while (found := decode_feedback(pending)) is not None:
            got.append(found[0])
            pending = pending[found[1] :]
    assert pending == b""
    assert got == said


@given(st.integers(0, 1 << 40), names, st.floats(allow_nan=False), st.binary(max_size=100))
def test_calls_and_answers_round_trip(number: int, method: str, stamp: float, body: bytes) -> None:
    """Frames carry ids, model times, bodies and failures unchanged."""
    raw = msgspec.Raw(msgspec.msgpack.encode(body))
    failure = Failure("refused", method, True)
    for message in (
        Call(number, method, stamp, raw),
        Answer(number, stamp, None, raw),
        Answer(1, 0.0, failure, raw),
    ):
        prefix, encoded = encode_frame(message)
        assert len(prefix) == FRAME_PREFIX_BYTES
        assert frame_size(prefix) == len(encoded)
        assert decode_frame(encoded, type(message)) == message
