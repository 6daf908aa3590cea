"""Traffic control: a request, read like a dump, is the value it was made from."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.test_topology_rtnl import assert_survives
from tests.within import assert_within
from topology.lanes import LaneShares, Match, port_plan
from topology.tc import HtbClass, HtbFilter, HtbQdisc

U32 = st.integers(0, 2**32 - 1)
INDEX = st.integers(1, 2**31 - 1)
MINOR = st.integers(1, 0xFFFF)
RATE = st.integers(1, 2**63 - 1)
MASK = st.sampled_from([0xFC << 24, 0xFF << 24, 0xFFFF << 16, 2**32 - 1])
OFFSET = st.integers(0, 15).map(lambda word: 4 * word + 1)
MATCHES = st.dictionaries(OFFSET, st.tuples(MASK, U32), min_size=1, max_size=4).map(
    lambda found: tuple(Match(at, mask, value & mask) for at, (mask, value) in sorted(found.items()))
)


@given(st.builds(HtbQdisc, INDEX, MINOR))
def test_qdiscs(value: HtbQdisc) -> None:
    """Device and default class."""
    assert_survives(value)


@given(st.builds(HtbClass, INDEX, MINOR, MINOR, RATE, RATE, U32, U32, st.integers(0, 7), U32))
def test_classes(value: HtbClass) -> None:
    """Every number, rates beyond 32 bits too."""
    assert_survives(value)


@given(st.builds(HtbFilter, INDEX, MATCHES, MINOR))
def test_filters(value: HtbFilter) -> None:
    """All conditions in order, and the class."""
    assert_survives(value)


@given(st.floats(min_value=1e6, max_value=4e11))
def test_bursts_become_time_at_the_class_rate(rate: float) -> None:
    """The kernel is told how long the burst lasts, in ticks of 64 ns."""
    for plan in port_plan(rate, LaneShares()).classes:
        made = HtbClass.of(1, plan)
        assert_within(made.burst_ticks * 64e-9 * plan.rate, plan.burst, absolute=plan.rate * 32e-9)
        assert_within(made.cburst_ticks * 64e-9 * plan.ceil, plan.cburst, absolute=plan.ceil * 32e-9)
        assert made.burst_ticks < 2**32
