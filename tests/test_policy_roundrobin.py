"""Round robin takes engines and paths in turn, whatever their load."""

from __future__ import annotations

from collections import Counter
from math import lcm

from hypothesis import given
from hypothesis import strategies as st

from emulator.policy import Load, Policy, PolicySetup, Queued, make_policy

COUNTS = st.integers(1, 24)


def names(role: str, engines: int, to_a_node: int = 8) -> tuple[str, ...]:
    return tuple(f"{role}{at // to_a_node}/{at % to_a_node}" for at in range(engines))


def policy(pes: int, des: int) -> Policy:
    return make_policy("round-robin", PolicySetup(names("pe", pes), names("de", des), 0, 0))


def queue(start: int, count: int) -> list[Queued]:
    return [Queued(f"r{n}", n, 10, 1, 5) for n in range(start, start + count)]


def loads(engines: tuple[str, ...], tokens: int = 0) -> list[Load]:
    return [Load(name, name.partition("/")[0], 1, tokens, tokens, 0) for name in engines]


@given(COUNTS, COUNTS, st.integers(0, 99), st.integers(0, 60), st.integers(0, 10**9))
def test_each_request_goes_where_its_turn_is(pes: int, des: int, start: int, count: int, tokens: int) -> None:
    """Request n to PE n mod P and DE n mod D, from any start, under any load, without regard to HBM."""
    asked, rr = queue(start, count), policy(pes, des)
    everyone = names("pe", pes), names("de", des)
    assert rr.assign_prefill(asked, loads(everyone[0], tokens)) == [everyone[0][r.sequence % pes] for r in asked]
    assert rr.assign_decode(asked, loads(everyone[1], tokens)) == [everyone[1][r.sequence % des] for r in asked]


@given(COUNTS, COUNTS, st.integers(0, 99), st.integers(0, 60))
def test_groups_fetch_in_their_turn(pes: int, des: int, start: int, count: int) -> None:
    """A PE group takes the leading requests that are its engines', then stops; groups together take everything."""
    asked, rr, everyone = queue(start, count), policy(pes, des), names("pe", pes)
    left = asked
    while left:
        whose = everyone[left[0].sequence % pes].partition("/")[0]
        other = [load for load in loads(everyone) if load.node != whose]
        assert rr.assign_prefill(left, other) == []
        taken = rr.assign_prefill(left, [load for load in loads(everyone) if load.node == whose])
        assert taken
        assert {engine.partition("/")[0] for engine in taken} == {whose}
        left = left[len(taken) :]


@given(COUNTS, COUNTS, st.integers(0, 99), st.integers(0, 60))
def test_a_routed_request_is_taken_by_its_group(pes: int, des: int, start: int, count: int) -> None:
    """Every request is routed to the group of its engine, which takes all that was routed to it."""
    asked, rr, everyone = queue(start, count), policy(pes, des), names("de", des)
    groups = {engine.partition("/")[0]: 0 for engine in everyone}
    routed = rr.route_decode(asked, groups)
    assert set(routed) <= set(groups)
    for group in groups:
        own = [request for request, to in zip(asked, routed, strict=True) if to == group]
        taken = rr.assign_decode(own, [load for load in loads(everyone) if load.node == group])
        assert taken == [everyone[request.sequence % des] for request in own]


@given(COUNTS, COUNTS, st.integers(0, 99))
def test_every_pair_of_engines_reads_on_both_sides(pes: int, des: int, start: int) -> None:
    """In any two periods in a row each pair that meets reads once on each side, whatever the queues."""
    rr, period = policy(pes, des), lcm(pes, des)
    seen = Counter((r.sequence % pes, r.sequence % des, rr.choose_path(r, 0, 9)) for r in queue(start, 2 * period))
    assert set(seen.values()) == {1}
    assert len(seen) == 2 * period


@given(COUNTS, COUNTS)
def test_paths_alternate(pes: int, des: int) -> None:
    """No stretch of requests, from the first on, has more than two more on one side than on the other."""
    rr, ahead = policy(pes, des), 0
    for request in queue(0, 700):
        ahead += 1 if rr.choose_path(request, 9, 0) == "pe" else -1
        assert abs(ahead) <= 2
