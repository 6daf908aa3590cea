"""Laws of the account of one exchange, told times by hand."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from emulator.errors import PeerLost, ProtocolViolation
from emulator.fabric.collective import Entry, Exchange, Hop, hops_of, largest
from emulator.fabric.interface import Endpoint, Exchanged, Ring

NODES = ("a", "b", "c")
RING = Ring("r", NODES, tuple((Endpoint(s, "n"), Endpoint(d, "n")) for s, d in ("ab", "bc", "ca")))
times = st.floats(0, 1e6)


@given(
    st.lists(st.builds(Entry, times, st.integers(0, 100), times), min_size=3, max_size=3),
    st.permutations([*NODES, *NODES]),
    st.lists(times, min_size=3, max_size=3),
    st.floats(0, 1),
)
def test_an_exchange_is_its_latest_members(
    entries: list[Entry], order: list[str], overs: list[float], latency_s: float
) -> None:
    """Complete with the last to enter, over with the last to be in place; latest times, summed amounts.

    In whatever order the news comes: of each member its entry first, then its end.
    """
    exchange = Exchange(RING)
    entered: list[Entry] = []
    ended = 0
    for step, node in enumerate(order):
        if node in order[:step]:
            ended += 1
            assert exchange.finish(node, overs[ended - 1]) == (ended == 3)
        else:
            entered.append(entries[len(entered)])
            assert exchange.enter(node, entered[-1]) == (len(entered) == 3)
            assert exchange.first_s == min(entry.at_s for entry in entered)
    started_s = max(entry.ready_s for entry in entries)
    begins_s = exchange.begins_s(latency_s)
    assert begins_s == max(started_s, max(entry.at_s for entry in entries) + latency_s)
    assert exchange.exchanged() == Exchanged(started_s, max(overs), sum(entry.amount for entry in entries))
    assert trio.run(exchange.wait) == exchange.exchanged()
    exchange.fail(lambda: PeerLost("too late"))
    assert trio.run(exchange.wait) == exchange.exchanged()


def test_who_is_alone_waits_for_no_news() -> None:
    """A ring of one begins when it is ready, however long news takes."""
    alone = Exchange(Ring("r", ("a",), ()))
    assert alone.enter("a", Entry(3.0, 0, 5.0))
    assert alone.begins_s(1.0) == 3.0


async def test_what_fails_tells_who_waits() -> None:
    """Both waits end with the reason, now and later; the first reason stays."""
    exchange = Exchange(RING)
    exchange.fail(lambda: PeerLost("gone"))
    exchange.fail(lambda: PeerLost("again"))
    for wait in (exchange.wait, exchange.wait_complete):
        with pytest.raises(PeerLost, match="gone"):
            await wait()


def test_what_cannot_be_is_a_violation() -> None:
    """A stranger, a second entry, an end before the entry, a second end."""
    exchange, entry = Exchange(RING), Entry(0.0, 0, 0.0)
    exchange.enter("a", entry)
    for node, error in (("z", "no member"), ("a", "twice")):
        with pytest.raises(ProtocolViolation, match=error):
            exchange.enter(node, entry)
    exchange.finish("a", 1.0)
    for node in ("a", "b", "z"):
        with pytest.raises(ProtocolViolation, match="not in"):
            exchange.finish(node, 1.0)


def test_hops_are_those_that_carry_something() -> None:
    """In the ring's order, of this node only; the largest of them is the size class, 0 of none."""
    a = Endpoint("a", "n")
    assert hops_of(RING, "a", {a: 5}) == (Hop(a, Endpoint("b", "n"), 5),)
    assert hops_of(RING, "a", {a: 0}) == hops_of(RING, "b", {}) == ()
    assert largest(hops_of(RING, "a", {a: 5})) == 5
    assert largest(()) == 0
