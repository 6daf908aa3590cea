"""Laws of the allocation: feasible, efficient, fair inside a lane, shares between lanes, ports without lanes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.fabric.maxmin import Flow, LaneRule, allocate, max_min
from topology.lanes import Borrowing, LaneName, LaneShares

from .within import assert_within

CONTROL, MODEL, KV = 0, 1, 2
RULES = {CONTROL: LaneRule(0.005, 0), MODEL: LaneRule(0.985, 0), KV: LaneRule(0.010, 1)}
EPSILON = 1e-9
Network = tuple[list[Flow], list[float], list[int]]
"""Flows, capacities, and which of the ports know no lanes."""


@st.composite
def networks(draw: st.DrawFn, lanes: Sequence[int] = (CONTROL, MODEL, KV)) -> Network:
    """Up to 24 flows, each over one to three of up to 8 ports, some of them equally fast, some without lanes.

    A flow may cross a port without lanes twice.
    """
    capacity = draw(st.lists(st.sampled_from([1.0, 2.5, 10.0]) | st.floats(0.1, 100), min_size=1, max_size=8))
    count = len(capacity)
    laneless = draw(st.just([]) | st.lists(st.integers(0, count - 1), max_size=count, unique=True))
    ports = st.lists(st.integers(0, count - 1), min_size=1, max_size=3, unique=True)
    twice = st.lists(st.sampled_from(laneless), max_size=1) if laneless else st.just([])
    paths = st.builds(lambda once, again: (*once, *(p for p in again if p in once)), ports, twice)
    return draw(st.lists(st.builds(Flow, paths, st.sampled_from(lanes)), max_size=24)), capacity, laneless


def loads(flows: Sequence[Flow], rates: Sequence[float], ports: int) -> list[float]:
    """What each port carries."""
    return [
        sum(rate * flow.ports.count(port) for flow, rate in zip(flows, rates, strict=True))
        for port in range(ports)
    ]


def full_ports(flows: Sequence[Flow], rates: Sequence[float], capacity: Sequence[float]) -> set[int]:
    return {
        port
        for port, load in enumerate(loads(flows, rates, len(capacity)))
        if load >= capacity[port] * (1 - EPSILON)
    }


@given(networks())
def test_no_port_carries_more_than_its_capacity(network: Network) -> None:
    """Feasibility, and no negative rate."""
    flows, capacity, laneless = network
    rates = allocate(flows, capacity, RULES, laneless)
    assert all(rate >= 0 for rate in rates)
    for load, limit in zip(loads(flows, rates, len(capacity)), capacity, strict=True):
        assert load <= limit * (1 + EPSILON)


@given(networks())
def test_every_flow_has_a_full_port(network: Network) -> None:
    """Work conservation: nobody could get more without somebody getting less."""
    flows, capacity, laneless = network
    full = full_ports(flows, allocate(flows, capacity, RULES, laneless), capacity)
    assert all(full.intersection(flow.ports) for flow in flows)


@given(networks(lanes=[KV]))
def test_a_flow_is_among_the_largest_at_a_full_port(network: Network) -> None:
    """The bottleneck property, which characterises max-min fairness, inside one lane."""
    flows, capacity, laneless = network
    rates = allocate(flows, capacity, RULES, laneless)
    full = full_ports(flows, rates, capacity)
    for flow, rate in zip(flows, rates, strict=True):
        assert any(
            all(other <= rate * (1 + EPSILON) for f, other in zip(flows, rates, strict=True) if port in f.ports)
            for port in full.intersection(flow.ports)
        )


@given(networks(), st.randoms(use_true_random=False))
def test_the_order_of_flows_does_not_matter(network: Network, random: object) -> None:
    """Permutation invariance."""
    flows, capacity, laneless = network
    order = list(range(len(flows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    rates = allocate(flows, capacity, RULES, laneless)
    permuted = allocate([flows[i] for i in order], capacity, RULES, laneless)
    for position, original in enumerate(order):
        assert_within(permuted[position], rates[original], rel=EPSILON, absolute=EPSILON, what="rate")


@given(networks(), st.sampled_from([0.125, 3.0, 1e9]))
def test_rates_scale_with_capacities(network: Network, factor: float) -> None:
    """The unit of a rate does not matter."""
    flows, capacity, laneless = network
    rates = allocate(flows, capacity, RULES, laneless)
    scaled = allocate(flows, [limit * factor for limit in capacity], RULES, laneless)
    for rate, larger in zip(rates, scaled, strict=True):
        assert_within(larger, rate * factor, rel=1e-6, absolute=EPSILON * factor, what="scaled rate")


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.floats(1, 1e12))
def test_a_contended_port_is_shared_by_guarantee(model: int, kv: int, control: int, rate: float) -> None:
    """Under full contention lanes get 98.5 : 1 : 0.5, however many flows each has, and flows equal parts."""
    counts = {MODEL: model, KV: kv, CONTROL: control}
    flows = [Flow((0,), lane) for lane, count in counts.items() for _ in range(count)]
    for flow, got in zip(flows, allocate(flows, [rate], RULES), strict=True):
        assert_within(got, rate * RULES[flow.lane].guarantee / counts[flow.lane], rel=1e-9, what="share")


@pytest.mark.parametrize("lane", [CONTROL, MODEL, KV])
def test_a_lane_alone_gets_all(lane: int) -> None:
    """A guarantee is no limit."""
    assert allocate([Flow((0, 1), lane)], [8.0, 9.0], RULES) == [8.0]


@pytest.mark.parametrize(
    ("lanes", "shares"),
    [((MODEL, KV), (0.99, 0.01)), ((CONTROL, KV), (0.99, 0.01)), ((MODEL, CONTROL), (0.990, 0.010))],
)
def test_what_an_absent_lane_leaves_goes_to_the_better_ones(lanes: Sequence[int], shares: Sequence[float]) -> None:
    """Idle guarantees are lent by priority, and among equals by weight."""
    for got, share in zip(allocate([Flow((0,), lane) for lane in lanes], [1.0], RULES), shares, strict=True):
        assert_within(got, share, rel=1e-12, what="share")


BORROWING = st.builds(Borrowing, st.integers(0, 2), st.integers(65_536, 1 << 20))


@given(
    st.tuples(*[st.floats(0.01, 0.33)] * 3),
    st.tuples(*[BORROWING] * 3),
    st.sets(st.sampled_from(["high", "kv", "control"]), min_size=1),
    st.integers(1, 4),
)
def test_idle_capacity_is_lent_as_the_kernel_does(
    shares: tuple[float, float, float],
    borrowing: tuple[Borrowing, Borrowing, Borrowing],
    busy: set[LaneName],
    flows_each: int,
) -> None:
    """At one port each lane gets what HTB's rule says of the very settings, for any of them that are busy."""
    names: dict[LaneName, int] = {"high": MODEL, "kv": KV, "control": CONTROL}
    settings_of = LaneShares(*shares, *borrowing)
    rules = {
        lane: LaneRule(settings_of.share(name), (how := settings_of.borrowing(name)).prio, how.quantum_bytes)
        for name, lane in names.items()
    }
    flows = [Flow((0,), names[name]) for name in sorted(busy) for _ in range(flows_each)]
    got = dict.fromkeys(names.values(), 0.0)
    for flow, rate in zip(flows, allocate(flows, [1.0], rules), strict=True):
        got[flow.lane] += rate
    for name, share in settings_of.among(busy).items():
        assert_within(got[names[name]], share, rel=1e-9, what=name)


def test_what_one_of_three_equals_leaves_the_other_two_share_by_weight() -> None:
    """CONTROL is stopped at a tenth elsewhere: MODEL and KV, of weights 3 and 1, get the rest above guarantees."""
    rules = {CONTROL: LaneRule(0.3, 0, 4), MODEL: LaneRule(0.2, 0, 3), KV: LaneRule(0.1, 0, 1)}
    flows = [Flow((0, 1), CONTROL), Flow((0,), MODEL), Flow((0,), KV)]
    control, model, kv = allocate(flows, [1.0, 0.1], rules)
    assert_within(control, 0.1, rel=1e-9)
    assert_within(model, 0.2 + 0.6 * 3 / 4, rel=1e-9)
    assert_within(kv, 0.1 + 0.6 / 4, rel=1e-9)


def test_what_a_better_lane_cannot_use_goes_to_kv() -> None:
    """MODEL is held to 0.3 by another port: KV gets the other 0.7."""
    model, kv = allocate([Flow((0, 1), MODEL), Flow((0,), KV)], [1.0, 0.3], RULES)
    assert_within(model, 0.3, rel=1e-12)
    assert_within(kv, 0.7, rel=1e-12)


def test_kv_keeps_its_guarantee_where_others_of_its_lane_share_elsewhere() -> None:
    """KV's one flow at a contended port has ten rivals at another port, and needs no more than its part there."""
    flows = [Flow((0, 1), KV), Flow((0,), MODEL), *(Flow((1,), KV) for _ in range(9))]
    kv, model, *rest = allocate(flows, [1.0, 1.0], RULES)
    assert_within(kv, 0.01, rel=1e-9)
    assert_within(model, 0.99, rel=1e-9)
    for rate in rest:
        assert_within(rate, 0.99 / 9, rel=1e-9)


def test_a_flow_held_back_elsewhere_leaves_its_part_to_the_others() -> None:
    """The textbook's parking lot: two links, one flow over both."""
    assert max_min([(0, 1), (0,), (1,)], [10.0, 4.0]) == [2.0, 8.0, 2.0]


@pytest.mark.parametrize(("model", "kv"), [(1, 1), (3, 1), (1, 4)])
def test_where_there_are_no_lanes_all_flows_are_alike(model: int, kv: int) -> None:
    """A port without lanes is shared equally by the flows, whatever their lanes and theirs elsewhere."""
    flows = [*(Flow((0, 1 + i), MODEL) for i in range(model)), *(Flow((0, 1 + model + i), KV) for i in range(kv))]
    for rate in allocate(flows, [1.0] * (1 + model + kv), RULES, [0]):
        assert_within(rate, 1 / (model + kv), rel=1e-9, what="equal part")


def test_a_copy_shares_a_link_with_an_exchange_that_is_preferred_elsewhere() -> None:
    """It has nine KV flows beneath it at the NIC (0); of its PCIe link (1) it and a copy get half each."""
    flows = [Flow((0, 1), MODEL), Flow((1,), KV), *(Flow((0,), KV) for _ in range(9))]
    exchange, copy, *others = allocate(flows, [1.0, 1.0], RULES, [1])
    assert_within(exchange, 0.5, rel=1e-9)
    assert_within(copy, 0.5, rel=1e-9)
    for rate in others:
        assert_within(rate, 0.5 / 9, rel=1e-9)


def test_what_lanes_hold_back_is_free_where_there_are_none() -> None:
    """KV that gets a hundredth of a contended NIC (0) leaves the rest of a link without lanes (1) to the other."""
    flows = [Flow((0, 1), KV), Flow((0,), MODEL), Flow((1,), MODEL)]
    kv, model, other = allocate(flows, [1.0, 1.0], RULES, [1])
    assert_within(kv, 0.01, rel=1e-9)
    assert_within(model, 0.99, rel=1e-9)
    assert_within(other, 0.99, rel=1e-9)


def test_a_port_that_is_crossed_twice_gives_half() -> None:
    """Alone a flow gets half of such a port; beside one that crosses it once both get a third."""
    assert allocate([Flow((0, 0), KV)], [1.0], RULES, [0]) == [0.5]
    for lane in (KV, MODEL):
        for rate in allocate([Flow((0, 0), KV), Flow((0,), lane)], [1.0], RULES, [0]):
            assert_within(rate, 1 / 3, rel=1e-9)


def test_nobody_sends() -> None:
    """No flows, no rates."""
    assert allocate([], [1.0], RULES) == []


def test_a_guarantee_is_a_share() -> None:
    """A rule outside 0 to 1, or without weight, is refused where it is built."""
    with pytest.raises(ValueError, match="guarantee"):
        LaneRule(1.5, 0)
    with pytest.raises(ValueError, match="weight"):
        LaneRule(0.5, 0, 0)
