"""Port and transfer counters, told the time by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.fabric.interface import FREE_NIC, Transfer, VirtualLane
from emulator.fabric.meter import Books
from emulator.records import ExchangeRecord
from tests.within import assert_within

messages = st.lists(
    st.tuples(st.floats(0, 100), st.floats(0, 10), st.integers(0, 1 << 20), st.booleans()), min_size=1, max_size=30
)


@given(messages)
def test_busy_is_the_union_of_what_was_outstanding(spans: list[tuple[float, float, int, bool]]) -> None:
    """Overlapping messages are busy once; dropped ones are busy but move nothing; windows sum to the bytes."""
    meter = Books(0.5).port("cnic0", "read", VirtualLane.KV)
    events = sorted(
        [(start, 0, size, kept) for start, _, size, kept in spans]
        + [(start + length, 1, size, kept) for start, length, size, kept in spans],
        key=lambda event: event[:2],
    )
    for at, kind, size, kept in events:
        if kind == 0:
            meter.begin(at)
        elif kept:
            meter.end(at, size)
        else:
            meter.drop(at)
    busy, reach = 0.0, 0.0
    for start, length, _, _ in sorted(spans):
        busy += max(0.0, start + length - max(start, reach))
        reach = max(reach, start + length)
    record = meter.record(1000.0)
    assert_within(record.busy_s, busy, absolute=1e-6, what="busy seconds")
    assert record.payload_bytes == sum(record.windows) == sum(size for _, _, size, kept in spans if kept)
    assert record.messages == sum(kept for *_, kept in spans)


def test_a_running_message_is_busy_until_now() -> None:
    """A record taken in the middle counts the time so far and no bytes."""
    meter = Books(1.0).port("snic0", "write", VirtualLane.MODEL)
    meter.begin(2.0)
    assert meter.record(5.0).busy_s == 3.0
    assert meter.record(5.0).payload_bytes == 0


def test_records_come_sorted_and_by_name() -> None:
    """Ports by NIC, direction and lane; transfers by number, source and destination, each side on its own."""
    books = Books(1.0)
    for nic, direction in (("snic0", "read"), ("cnic0", "write"), ("cnic0", "read")):
        books.port(nic, "read" if direction == "read" else "write", VirtualLane.KV)
    assert [(p.nic, p.direction) for p in books.ports(0.0)] == [
        ("cnic0", "read"),
        ("cnic0", "write"),
        ("snic0", "read"),
    ]
    for dst, size in (("b", 1), ("a", 2), ("b", 4)):
        books.count_sent(Transfer.DE_LOAD, "x", dst, size)
    books.count_received(Transfer.PE_READ, "y", "x", 8)
    assert [(t.transfer, t.dst, t.payload_bytes, t.messages) for t in books.sent()] == [
        ("DE_LOAD", "a", 2, 1),
        ("DE_LOAD", "b", 5, 2),
    ]
    assert [(t.transfer, t.src, t.payload_bytes) for t in books.received()] == [("PE_READ", "y", 8)]


def test_exchanges_are_kept_by_ring_lane_and_size() -> None:
    """One row each: how many, their time in all, at most and spread, and how late they began; sorted."""
    books = Books(1.0)
    for ring, size, took_s, late_s in (
        ("b", 2, 1.0, 0.0),
        ("a", 9, 1.0, 0.5),
        ("a", 3, 2.0, 0.25),
        ("a", 3, 4.0, 0.125),
    ):
        books.count_exchange(ring, VirtualLane.MODEL, size, took_s, late_s)
    assert books.exchanges() == (
        ExchangeRecord("a", 1, 3, 2, 6.0, 4.0, 0.25, ((2.0, 1), (4.0, 1)), ((0.125, 1), (0.25, 1))),
        ExchangeRecord("a", 1, 9, 1, 1.0, 1.0, 0.5, ((1.0, 1),), ((0.5, 1),)),
        ExchangeRecord("b", 1, 2, 1, 1.0, 1.0, 0.0, ((1.0, 1),), ((0.0, 1),)),
    )


@given(st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=30))
def test_a_spread_is_as_fine_as_it_says(times: list[float]) -> None:
    """Every time is counted once, at no less than it was and at most a thirty-second more; few values for many."""
    books = Books(1.0)
    for seconds in times:
        books.count_exchange("ring", VirtualLane.MODEL, 1, seconds, 0.0)
    (record,) = books.exchanges()
    steps = [step for step, count in record.took for _ in range(count)]
    for seconds, step in zip(sorted(times), steps, strict=True):
        assert seconds <= step <= seconds * (1 + 1 / 32)
    octaves = {math.frexp(seconds)[1] for seconds in times}
    assert len(record.took) <= 33 * len(octaves)


def test_a_free_path_has_no_port() -> None:
    """What is counted there is in no row."""
    books = Books(1.0)
    meter = books.port(FREE_NIC, "read", VirtualLane.KV)
    meter.begin(0.0)
    meter.end(1.0, 100)
    assert books.ports(2.0) == ()


@pytest.mark.parametrize("window_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_window_has_a_width(window_s: float) -> None:
    """Windows of no, negative or endless width are refused."""
    with pytest.raises(ValueError, match="window_s"):
        Books(window_s)


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 30)), max_size=12),
    st.lists(st.tuples(st.integers(0, 330), st.integers(1, 1000)), max_size=20),
)
def test_gaps_are_the_idle_times_between_collectives(
    collectives: list[tuple[int, int]], kv: list[tuple[int, int]]
) -> None:
    """Each in the class of its length, with the KV that ended in it; KV beside a collective is in none."""
    books = Books(1e-3)
    model, low = (books.port("cnic0", "write", lane) for lane in (VirtualLane.MODEL, VirtualLane.KV))
    other = books.port("cnic0", "read", VirtualLane.KV)
    # A tick is 1 us; KV ends half a tick later than anything else, so that it is on one side of each change.
    events = [(float(at), "begin", 0) for at, _ in collectives]
    events += [(float(at + length), "end", 0) for at, length in collectives]
    events += [(at + 0.5, "kv", size) for at, size in kv]
    for at, kind, size in sorted(events):
        now_s = at * 1e-6
        if kind == "begin":
            model.begin(now_s)
        elif kind == "end":
            model.end(now_s, 1)
        else:
            for meter in (low, other):
                meter.begin(now_s)
                meter.end(now_s, size)
    busy = {tick for at, length in collectives for tick in range(at, at + length)}
    first, last = (min(busy), max(busy)) if busy else (0, -1)
    found: dict[int, list[int]] = {}
    begin = first
    for tick in range(first, last + 1):
        if tick not in busy:
            continue
        if (length := tick - begin) > 0:
            row = found.setdefault(length.bit_length(), [0, 0, 0])
            row[0] += 1
            row[1] += length
            row[2] += sum(size for at, size in kv if begin <= at < tick)
        begin = tick + 1
    records = {port.lane: port for port in books.ports(1.0) if port.direction == "write"}
    gaps = records[VirtualLane.MODEL].gaps
    assert not records[VirtualLane.KV].gaps
    assert sum(gap.count for gap in gaps) == sum(count for count, _, _ in found.values())
    assert sum(gap.kv_bytes for gap in gaps) == sum(size for _, _, size in found.values())
    total_s = 1e-6 * sum(length for _, length, _ in found.values())
    assert_within(sum(gap.total_s for gap in gaps), total_s, absolute=1e-12, what="seconds of all gaps")
    for gap in gaps:
        mean_s = gap.total_s / gap.count
        assert gap.upto_s / 2 * (1 - 1e-9) <= mean_s <= gap.upto_s * (1 + 1e-9)


@given(messages)
def test_under_way_is_the_most_that_had_departed_and_was_not_over(
    spans: list[tuple[float, float, int, bool]],
) -> None:
    """At every moment that lasted, placed or not; what only changes hands within an instant is counted once."""
    meter = Books(0.5).port("cnic0", "read", VirtualLane.KV)
    changes: list[tuple[float, int, int, bool]] = []
    for start, length, size, kept in spans:
        changes += [(start, 0, size, kept), (start + length, 1, size, kept)]
    # In one instant what begins comes first, as where a queue pair's next message follows at once.
    for at, kind, size, kept in sorted(changes, key=lambda change: change[:2]):
        if kind == 0:
            meter.begin(at)
            meter.depart(at, size)
        elif kept:
            meter.end(at, size)
        else:
            meter.drop(at, size)
    moments = {at for at, *_ in changes}
    most = max(sum(size for start, length, size, _ in spans if start <= at < start + length) for at in moments)
    assert meter.record(1000.0).under_way_bytes == most


def test_what_is_outstanding_and_has_not_departed_is_not_under_way() -> None:
    """Ten messages in a queue are one under way; one that is dropped from the queue was none."""
    meter = Books(1.0).port("dram0", "write", VirtualLane.KV)
    for _ in range(10):
        meter.begin(0.0)
    meter.depart(0.0, 7)
    meter.drop(1.0)
    for at in range(2, 10):
        meter.depart(at, 7)
        meter.end(at, 7)
    meter.end(10.0, 7)
    assert meter.record(20.0).under_way_bytes == 7
