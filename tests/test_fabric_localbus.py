"""Laws of the clocks of debt inside a node: exact rates, turns in order, nothing lost to timers."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.fabric.localbus import DEPTH_S, Gate, LocalBuses, LocalRates, Toll
from emulator.fabric.wiring import Crossing

from .within import assert_within

RATE = 1e6
READ, WRITE = Crossing("pe0", "dram", "read"), Crossing("pe0", "dram", "write")
OUT, INTO = Crossing("pe0", "pcie0", "read"), Crossing("pe0", "pcie0", "write")
NIC = Crossing("pe0", "cnic0", "read")
SIZES = st.lists(st.integers(1, 4096), min_size=1, max_size=60)


def buses(*, dilation: float = 1.0) -> LocalBuses:
    return LocalBuses("pe0", LocalRates(dram=RATE, pcie={"cnic0": RATE}), dilation)


def toll(*crossings: Crossing, of: LocalBuses | None = None) -> Toll:
    found = (of or buses()).toll(crossings)
    assert found is not None
    return found


class Timers:
    """Model time, and timers that are late."""

    def __init__(self, late_s: float) -> None:
        self.now_s = 0.0
        self._late_s = late_s
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def now(self) -> float:
        return self.now_s

    def call_at(self, at_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (at_s, next(self._order), act))

    def run(self) -> None:
        while self._due:
            at_s, _, act = heapq.heappop(self._due)
            self.now_s = max(self.now_s, at_s + self._late_s)
            act()


class Pair:
    """A queue pair that always has more to send, up to an end."""

    def __init__(self, timers: Timers, paid: Toll, sizes: list[int]) -> None:
        self.sizes = sizes
        self.went_s: list[float] = []
        self._timers = timers
        self.gate = Gate(paid, timers.now, timers.call_at, self.push)

    def push(self) -> None:
        while self.sizes and self.gate.admit(self.sizes[0]):
            self.sizes.pop(0)
            self.went_s.append(self._timers.now())


@given(SIZES, st.floats(0.0, 0.01))
def test_a_copy_keeps_the_rate_however_late_its_timers_are(sizes: list[int], late_s: float) -> None:
    """The last piece goes when the sum of all is over, or one timer's lateness after: it does not add up."""
    timers, total = Timers(late_s), sum(sizes)
    pair = Pair(timers, toll(INTO), list(sizes))
    pair.push()
    timers.run()
    assert not pair.sizes
    over_s = total / RATE
    assert over_s * (1 - 1e-9) <= pair.went_s[-1] <= over_s * (1 + 1e-9) + late_s


@given(SIZES, SIZES)
def test_two_that_have_more_take_turns(first: list[int], second: list[int]) -> None:
    """Piece by piece, whatever their sizes, until one has no more."""
    timers, of = Timers(0.0), buses()
    pairs = [Pair(timers, toll(INTO, of=of), list(sizes)) for sizes in (first, second)]
    for pair in pairs:
        pair.push()
    timers.run()
    went = [pair.went_s for pair in pairs]
    for place in range(min(len(first), len(second)) - 1):
        assert went[0][place] <= went[1][place] <= went[0][place + 1]


@given(SIZES, SIZES, st.floats(0.0, 0.003))
def test_two_together_take_what_their_sum_takes(first: list[int], second: list[int], late_s: float) -> None:
    """However late timers are, the bus is never idle while one of them has more."""
    timers, of = Timers(late_s), buses()
    pairs = [Pair(timers, toll(INTO, of=of), list(sizes)) for sizes in (first, second)]
    for pair in pairs:
        pair.push()
    timers.run()
    over_s = sum(first + second) / RATE
    end_s = max(pair.went_s[-1] for pair in pairs)
    assert over_s * (1 - 1e-9) <= end_s <= over_s * (1 + 1e-9) + late_s


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 50_000), st.floats(0, 0.02)), min_size=1, max_size=80))
def test_dram_never_passes_its_rate_both_ways_together(asked: list[tuple[bool, int, float]]) -> None:
    """Between any two turns there are at most rate x time, its depth and the last message; so with any lulls."""
    of, now_s, went = buses(), 0.0, []
    for out, size, lull_s in asked:
        now_s += lull_s
        due_s = toll(READ, NIC, of=of).turn(size, now_s) if out else toll(WRITE, NIC, of=of).turn(size, now_s)
        went.append((due_s, size))
    for begin in range(len(went)):
        total = 0
        for end in range(begin, len(went)):
            total += went[end][1]
            most = RATE * (went[end][0] - went[begin][0] + DEPTH_S) + went[end][1]
            assert total <= most * (1 + 1e-9)


def test_with_head_room_nobody_waits() -> None:
    """Messages of eight NICs at once, four fifths of DRAM's rate: each may go when it asks, no timer is set."""
    timers, of, size = Timers(0.0), buses(), 400
    gates = [Gate(toll(READ, NIC, of=of), timers.now, timers.call_at, lambda: None) for _ in range(8)]
    for _ in range(100):
        assert all(gate.admit(size) for gate in gates)
        timers.now_s += 8 * size / RATE / 0.8


def test_what_goes_on_begins_with_its_turn_and_what_ends_here_ends_with_it() -> None:
    """A NIC takes bytes from the turn's beginning on; a copy's are there at the slower bus's end."""
    through = toll(OUT, Crossing("pe0", "cnic0", "read"))
    assert [through.turn(1000, 5.0), through.turn(1000, 5.0)] == [5.0, 5.001]
    copy = toll(READ, INTO)
    assert_within(copy.turn(1000, 5.0), 5.001, rel=1e-12, what="a copy")
    slow = LocalBuses("pe0", LocalRates(dram=RATE / 10, pcie={"cnic0": RATE}), 1.0)
    assert_within(toll(READ, INTO, of=slow).turn(1000, 5.0), 5.010 - DEPTH_S, rel=1e-12, what="slow DRAM")


def test_a_turn_of_the_dropped_is_the_next_ones() -> None:
    """Who gives up a message that waits for its turn leaves the turn to the next one of his pair."""
    timers, of = Timers(0.0), buses()
    pair = Pair(timers, toll(INTO, of=of), [4000])
    pair.push()
    pair.sizes = [3000, 1000]
    timers.run()
    assert pair.went_s == [0.004, 0.004]


def test_directions_of_a_link_are_apart_and_of_dram_are_not() -> None:
    """Into a GPU and out of it take nothing from each other; a node's other resources cost nothing here."""
    of = buses()
    assert toll(INTO, NIC, of=of).turn(4096, 1.0) == toll(OUT, NIC, of=of).turn(4096, 1.0) == 1.0
    toll(READ, NIC, of=of).turn(100_000, 1.0)
    assert_within(toll(WRITE, NIC, of=of).turn(1, 1.0), 1.1 - DEPTH_S, rel=1e-12, what="behind a read")
    assert of.toll([NIC]) is None and of.toll([]) is None


@pytest.mark.parametrize(
    ("dilation", "rate", "link", "dram"),
    [
        (1, 10e6, 10_000, 4096),
        (4, 20e6, 5000, 4096),
        (8, 710e6, 65_536, 22_187),
        (1, 1e9, 65_536, 65_536),
        (1, 1, 4096, 4096),
    ],
)
def test_a_piece_is_a_moment_of_the_bus(dilation: float, rate: float, link: int, dram: int) -> None:
    """A millisecond of a link, a quarter of one of DRAM, of wall time and within bounds; of both, the smaller."""
    of = LocalBuses("pe0", LocalRates(dram=rate, pcie={"cnic0": rate}), dilation)
    assert [toll(*way, of=of).piece_bytes for way in [(INTO,), (READ, NIC), (READ, INTO)]] == [link, dram, dram]


def test_a_large_message_keeps_nobody_waiting() -> None:
    """Beside eight NICs that have more and more to read, each at a tenth of DRAM, a small write may go at once."""
    rate, dilation = 710e6, 8.0
    timers, of = Timers(0.0), LocalBuses("pe0", LocalRates(dram=rate), dilation)
    gates = [Gate(toll(READ, NIC, of=of), timers.now, timers.call_at, lambda: None) for _ in range(8)]
    writes = toll(WRITE, NIC, of=of)
    for _ in range(100):
        for gate in gates:
            assert gate.admit(gate.piece_bytes)
        assert writes.turn(4000, timers.now()) == timers.now()
        timers.now_s += 10 * gates[0].piece_bytes / rate
