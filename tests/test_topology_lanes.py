"""The lane plan of a port: shares, compensation, and rates exact or refused."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.within import assert_within
from topology.errors import TopologyError
from topology.lanes import (
    CLASS_NAMES,
    DSCP_OF_LANE,
    LANES,
    RATE_TOLERANCE,
    SEGMENT_PAYLOAD,
    SEGMENT_WIRE,
    Borrowing,
    LaneName,
    LaneShares,
    gso_max_bytes,
    port_plan,
)

RATES = st.floats(min_value=2e6, max_value=4e11)
SHARES = st.tuples(*[st.floats(min_value=0.005, max_value=1)] * 3).map(
    lambda t: LaneShares(*(share / (sum(t) * 1.001) for share in t))
)


@given(RATES, SHARES)
def test_children_never_exceed_their_parent(rate: float, shares: LaneShares) -> None:
    """The guaranteed rates of the lanes sum to at most the port's, to the byte."""
    parent, *lanes, ack = port_plan(rate, shares).classes
    assert sum(lane.rate for lane in lanes) <= parent.rate
    assert {lane.ceil for lane in lanes} == {parent.rate}
    assert {lane.parent for lane in lanes} == {parent.minor} != {ack.parent}


@given(RATES, SHARES)
def test_full_segments_carry_the_configured_payload(rate: float, shares: LaneShares) -> None:
    """What the classes let through, less the headers of full segments, is the payload rate and its shares."""
    parent, high, kv, control, _ = port_plan(rate, shares).classes
    for got, share in ((parent, 1.0), (high, shares.high), (kv, shares.kv), (control, shares.control)):
        payload = got.rate * SEGMENT_PAYLOAD / SEGMENT_WIRE
        assert_within(payload, rate * share, rel=RATE_TOLERANCE, what=f"class {got.minor:x}")


@given(RATES)
def test_bursts_cover_a_late_timer_and_a_segment(rate: float) -> None:
    """A class may send at once what accrues in 125 us, and never less than a few segments."""
    for lane in port_plan(rate, LaneShares()).classes:
        assert lane.burst >= max(2 * SEGMENT_WIRE, math.floor(lane.rate * 125e-6))
        assert lane.cburst >= max(2 * SEGMENT_WIRE, math.floor(lane.ceil * 125e-6))
        assert lane.quantum >= 65536


def test_every_packet_has_a_class() -> None:
    """Filters and the default name leaf classes, each once; KV borrows after the others."""
    plan = port_plan(5e7, LaneShares())
    leaves = {lane.minor: lane for lane in plan.classes[1:]}
    assert set(leaves) == set(CLASS_NAMES)
    assert {f.minor for f in plan.filters} | {plan.default_minor} == set(leaves)
    by_name = {CLASS_NAMES[minor]: lane for minor, lane in leaves.items()}
    assert by_name["kv"].prio > by_name["high"].prio == by_name["control"].prio


@example(2, 0, 52, 6)
@given(st.sampled_from(sorted(DSCP_OF_LANE)), st.integers(0, 3), st.integers(20, 65535), st.integers(0, 255))
def test_filters_sort_by_code_point_but_for_bare_acknowledgements(
    lane: int, ecn: int, length: int, protocol: int
) -> None:
    """A packet's class follows from its lane's code point, unless it is TCP and nothing but headers."""
    header = struct.pack(">BBHIBBHII", 0x45, DSCP_OF_LANE[lane] | ecn, length, 0, 64, protocol, 0, 0, 0)
    plan = port_plan(5e7, LaneShares())
    fitting = (
        one.minor
        for one in plan.filters
        if all(struct.unpack_from(">I", header, m.offset)[0] & m.mask == m.value for m in one.matches)
    )
    expected = "ack" if (protocol, length) == (6, 52) else {1: "high", 2: "kv"}.get(lane, "control")
    assert CLASS_NAMES[next(fitting, plan.default_minor)] == expected


@pytest.mark.parametrize(
    ("busy", "expected"),
    [
        (("high", "kv", "control"), (0.985, 0.010, 0.005)),
        (("high", "kv"), (0.990, 0.010, None)),
        (("kv", "control"), (None, 0.010, 0.990)),
        (("high", "control"), (0.990, None, 0.010)),
        (("kv",), (None, 1.0, None)),
    ],
)
def test_what_is_left_idle_is_borrowed_by_priority(
    busy: tuple[LaneName, ...], expected: tuple[float | None, ...]
) -> None:
    """Every busy lane has its guarantee; the rest goes to the best priority, between equals by their quanta."""
    got = LaneShares().among(busy)
    assert set(got) == set(busy)
    for lane, share in zip(LANES, expected, strict=True):
        if share is not None:
            assert_within(got[lane], share, absolute=1e-12, what=lane)


@given(
    SHARES, st.permutations([Borrowing(0), Borrowing(0, 3 * 65536), Borrowing(5)]), st.sets(st.sampled_from(LANES))
)
def test_borrowing_wastes_nothing_and_takes_no_guarantee(
    shares: LaneShares, borrowing: list[Borrowing], busy: set[LaneName]
) -> None:
    """Whoever is busy, together they have the whole port and each at least its share; classes carry the order."""
    high, kv, control = borrowing
    made = msgspec.structs.replace(shares, high_borrowing=high, kv_borrowing=kv, control_borrowing=control)
    if busy:
        got = made.among(busy)
        assert_within(math.fsum(got.values()), 1, absolute=1e-12)
        assert all(got[lane] >= made.share(lane) for lane in busy)
    for lane in port_plan(5e7, made).classes[1:4]:
        wanted = made.borrowing(next(name for name in LANES if name == CLASS_NAMES[lane.minor]))
        assert (lane.prio, lane.quantum) == (wanted.prio, wanted.quantum_bytes)


@pytest.mark.parametrize(
    ("prio", "quantum", "what"),
    [(-1, 65536, "prio"), (8, 65536, "prio"), (True, 65536, "prio"), (0, 65535, "quantum"), (0, 2**31, "quantum")],
)
def test_borrowing_is_validated_where_it_is_built(prio: Any, quantum: Any, what: str) -> None:
    """HTB has eight priorities; a quantum is a super-packet at least, and 31 bits at most."""
    with pytest.raises(TopologyError, match=f"borrowing {what}"):
        Borrowing(prio, quantum)


def test_lanes_are_told_apart_by_code_point() -> None:
    """Four lanes, four code points, none with bits of congestion notification."""
    assert len(set(DSCP_OF_LANE.values())) == 4
    assert all(tos & 0x03 == 0 for tos in DSCP_OF_LANE.values())
    assert DSCP_OF_LANE[0] == 0


@pytest.mark.parametrize("rate", [0, -1.0, math.nan, math.inf, -math.inf, True, "5e7", None])
def test_a_rate_that_is_none_is_refused(rate: Any) -> None:
    """Anything but a positive, finite number is refused, never made into one."""
    with pytest.raises(TopologyError, match="expected a positive, finite number"):
        port_plan(rate, LaneShares())


@pytest.mark.parametrize("rate", [1e-300, 1.0, 1000.0, 1e30, 1e308])
def test_a_rate_that_whole_bytes_cannot_express_is_refused(rate: float) -> None:
    """Too slow for a lane in whole bytes per second, or beyond 63 bits: refused, not clamped."""
    with pytest.raises(TopologyError, match="emulated rate"):
        port_plan(rate, LaneShares())


@given(st.floats(min_value=1e-12, max_value=1e18))
def test_a_rate_is_exact_or_refused(rate: float) -> None:
    """No rate is ever changed by more than the tolerance without an error."""
    try:
        plan = port_plan(rate, LaneShares())
    except TopologyError:
        return
    for lane, share in zip(plan.classes, (1.0, 0.985, 0.010, 0.005, 1.0), strict=True):
        assert_within(lane.rate * SEGMENT_PAYLOAD / SEGMENT_WIRE, rate * share, rel=RATE_TOLERANCE)


@pytest.mark.parametrize(
    ("shares", "what"),
    [
        ((0.99, 0.01, 0.01), "overshoot"),
        ((0.0, 0.01, 0.005), "lanes.high"),
        ((0.985, -0.01, 0.005), "lanes.kv"),
        ((0.985, 0.01, math.nan), "lanes.control"),
        ((1.0, 0.01, 0.005), "lanes.high"),
        ((True, 0.01, 0.005), "lanes.high"),
        (("0.9", 0.01, 0.005), "lanes.high"),
    ],
)
def test_shares_are_validated_where_they_are_built(shares: tuple[Any, Any, Any], what: str) -> None:
    """A share is between 0 and 1 and their sum at most 1: HTB itself would not object."""
    with pytest.raises(TopologyError, match=what):
        LaneShares(*shares)


@given(RATES, RATES)
def test_faster_links_have_larger_super_packets(one: float, other: float) -> None:
    """The super-packet grows with the rate, within what the kernel takes."""
    slow, fast = sorted((one, other))
    assert 2 * SEGMENT_WIRE <= gso_max_bytes(slow) <= gso_max_bytes(fast) <= 65536
    assert gso_max_bytes(125e6) <= 8192
