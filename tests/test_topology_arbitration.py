"""Tables of a real port: read, followed packet by packet, and compiled to the classes of HTB."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import chain, combinations, groupby, islice, pairwise, repeat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tests.within import assert_within
from topology.arbitration import (
    INFINIBAND_MTU_BYTES,
    LANE_KEYS,
    VL_OF_LANE,
    Entry,
    Packet,
    TrafficClasses,
    VlArbitration,
    infiniband_shares,
    lane_shares,
    roce_shares,
    saturated,
    transmit,
)
from topology.errors import TopologyError
from topology.lanes import LANES, LaneName, LaneShares

MTU = INFINIBAND_MTU_BYTES
PAPER = VlArbitration()
SETS: list[tuple[LaneName, ...]] = list(chain.from_iterable(combinations(LANES, n) for n in (1, 2, 3)))

SIZES = st.sampled_from([256, 1000, 2048, 4096])
LIMITS = st.integers(0, 12) | st.just(255)


def written(entries: Iterable[tuple[int, int]]) -> str:
    return ",".join(f"{vl}:{weight}" for vl, weight in entries)


def entries(most: int = 255, vls: Sequence[int] = (0, 1, 2, 3), min_size: int = 0) -> st.SearchStrategy[str]:
    one = st.tuples(st.sampled_from(vls), st.integers(0, most))
    return st.lists(one, min_size=min_size, max_size=4).map(written)


def tables(most: int = 255) -> st.SearchStrategy[VlArbitration]:
    return st.builds(
        VlArbitration,
        qos_high_limit=LIMITS,
        qos_vlarb_high=entries(most),
        qos_vlarb_low=entries(most),
    )


def able(of: VlArbitration) -> set[int]:
    """The VLs that may send at all."""
    return {entry.vl for entry in (*of.high, *of.low)}


def backlog(sizes: Mapping[int, int]) -> dict[int, Iterable[Packet]]:
    """Endless packets of one size a VL, all there from the beginning."""
    return {vl: repeat(Packet(size)) for vl, size in sizes.items()}


def units(size: int) -> int:
    return -(-size // 64)


@st.composite
def loads(draw: st.DrawFn) -> tuple[VlArbitration, dict[int, list[Packet]]]:
    """Tables, and for each VL that may send some packets that arrive over time."""
    made = draw(tables())
    gaps = st.lists(st.tuples(st.integers(0, 20_000), SIZES), max_size=12)
    queues: dict[int, list[Packet]] = {}
    for vl in sorted(able(made)):
        arrivals = draw(gaps)
        times = itertools.accumulate(gap for gap, _ in arrivals)
        queues[vl] = [Packet(size, at) for at, (_, size) in zip(times, arrivals, strict=True)]
    return made, queues


@given(st.lists(st.tuples(st.integers(0, 14), st.integers(0, 255)), max_size=64))
def test_tables_are_read_as_opensm_writes_them(listed: list[tuple[int, int]]) -> None:
    """Pairs vl:weight in order, a VL as often as it likes; weight 0 skips the entry; blanks do not matter."""
    kept = tuple(Entry(vl, weight) for vl, weight in listed if weight)
    assert VlArbitration(15, 0, written(listed), "").high == kept
    assert VlArbitration(15, 0, "", written(listed).replace(",", " , ").replace(":", " : ")).low == kept


def test_the_defaults_are_the_papers() -> None:
    """Four VLs, 983,040 bytes before a low packet, KV in the low table alone."""
    assert PAPER.qos_max_vls == 4
    assert PAPER.high_limit_bytes == 983_040
    assert PAPER.high == (Entry(0, 192), Entry(1, 192), Entry(3, 192))
    assert PAPER.low == (Entry(0, 192), Entry(1, 192), Entry(2, 64), Entry(3, 192))
    assert VlArbitration(qos_high_limit=255).high_limit_bytes is None


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"qos_max_vls": 0}, "lanes.qos_max_vls = 0: expected a whole number, 1 to 15"),
        ({"qos_max_vls": True}, "lanes.qos_max_vls = True: expected"),
        ({"qos_high_limit": 256}, "lanes.qos_high_limit = 256: expected a whole number, 0 to 255"),
        ({"qos_high_limit": -1}, "lanes.qos_high_limit = -1: expected"),
        ({"qos_high_limit": 1.0}, "lanes.qos_high_limit = 1.0: expected"),
        ({"qos_high_limit": 10**200}, "lanes.qos_high_limit = 1000"),
        ({"qos_vlarb_high": 5}, "lanes.qos_vlarb_high = 5: expected a string"),
        ({"qos_vlarb_high": "0:192,,1:1"}, "lanes.qos_vlarb_high: entry '': expected vl:weight"),
        ({"qos_vlarb_low": "0:192,1"}, "lanes.qos_vlarb_low: entry '1': expected vl:weight"),
        ({"qos_vlarb_low": "0:256"}, "lanes.qos_vlarb_low: entry '0:256': expected"),
        ({"qos_vlarb_low": "0:-1"}, "lanes.qos_vlarb_low: entry '0:-1': expected"),
        ({"qos_vlarb_low": "15:1", "qos_max_vls": 15}, "lanes.qos_vlarb_low: entry '15:1': expected"),
        ({"qos_vlarb_low": "\u0661:1"}, "lanes.qos_vlarb_low: entry '\\u0661:1': expected"),
        (
            {"qos_vlarb_high": "4:0"},
            "lanes.qos_vlarb_high: entry '4:0': expected a VL of 0 to 3, as qos_max_vls is 4",
        ),
        ({"qos_vlarb_high": ",".join(["0:1"] * 65)}, "lanes.qos_vlarb_high: 65 entries; expected at most 64"),
        ({"qos_vlarb_high": "9" * 500}, "(502 characters): expected vl:weight"),
    ],
)
def test_what_cannot_be_meant_is_told_by_key_and_entry(settings: dict[str, Any], told: str) -> None:
    """In one printable line; nothing is masked to the port's VLs or cut off."""
    with pytest.raises(TopologyError) as caught:
        VlArbitration(**settings)
    assert told in caught.value.text
    assert caught.value.text.isprintable()


@given(loads())
def test_every_packet_is_sent_once_and_in_order(load: tuple[VlArbitration, dict[int, list[Packet]]]) -> None:
    """Of each VL what arrived, none before it did, one after another over the port."""
    made, queues = load
    sent = list(transmit(made, queues))
    for vl, queue in queues.items():
        of_vl = [packet for packet in sent if packet.vl == vl]
        assert [packet.size_bytes for packet in of_vl] == [packet.size_bytes for packet in queue]
        assert all(one.begun >= packet.arrival for one, packet in zip(of_vl, queue, strict=True))
    assert all(a.begun + a.size_bytes <= b.begun for a, b in pairwise(sent))


@given(loads())
def test_the_port_is_never_idle_while_something_waits(load: tuple[VlArbitration, dict[int, list[Packet]]]) -> None:
    """Work conservation: after a packet the next begins at once, or when the first of the rest arrives."""
    made, queues = load
    left, now = {vl: list(queue) for vl, queue in queues.items()}, 0
    for packet in transmit(made, queues):
        assert packet.begun == max(now, min(queue[0].arrival for queue in left.values() if queue))
        left[packet.vl].pop(0)
        now = packet.begun + packet.size_bytes


@given(tables(), SIZES)
def test_a_lane_alone_has_the_whole_port(made: VlArbitration, size: int) -> None:
    """Whatever its weight and table, and whatever the limit: KV alone is never held back."""
    for vl in able(made):
        sent = list(islice(transmit(made, backlog({vl: size})), 50))
        assert [packet.begun for packet in sent] == [size * n for n in range(50)]
        assert saturated(made, {vl: size}) == {vl: 1}


def test_a_lane_in_no_table_is_refused() -> None:
    """It would wait for ever."""
    with pytest.raises(ValueError, match="VL 2 has no weight"):
        next(transmit(VlArbitration(qos_vlarb_low="2:0"), backlog({2: MTU})))


@given(
    st.permutations([0, 1, 2, 3]),
    st.lists(st.integers(1, 255), min_size=2, max_size=4),
    st.lists(SIZES, min_size=4, max_size=4),
    st.sampled_from(["qos_vlarb_high", "qos_vlarb_low"]),
)
def test_an_entry_spends_its_weight_and_at_most_a_packet_more(
    vls: list[int], weights: list[int], sizes: list[int], key: str
) -> None:
    """Inside a table busy VLs take turns in the table's order, each for its weight to within one packet."""
    listed = list(zip(vls, weights, strict=False))
    empty: dict[str, Any] = {"qos_vlarb_high": "", "qos_vlarb_low": ""}
    made = VlArbitration(**empty | {key: written(listed)})
    of = dict(zip(range(4), sizes, strict=True))
    sent = islice(transmit(made, backlog({vl: of[vl] for vl, _ in listed})), 5000)
    turns = [(vl, len(list(packets))) for vl, packets in groupby(sent, key=lambda packet: packet.vl)][:-1]
    for (vl, count), (expected, weight) in zip(turns, itertools.cycle(listed), strict=False):
        assert vl == expected
        assert weight <= count * units(of[vl]) < weight + units(of[vl])


def test_unused_weight_is_forfeited() -> None:
    """A VL that runs dry in its turn gets its full weight next time, not what was left of the last."""
    made = VlArbitration(qos_vlarb_high="", qos_vlarb_low="0:192,1:192")
    queues = {0: [Packet(MTU), *[Packet(MTU, MTU + 1)] * 6], 1: [Packet(MTU)] * 6}
    assert [packet.vl for packet in transmit(made, queues)] == [0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0]


@given(tables(), st.lists(SIZES, min_size=4, max_size=4))
def test_the_limit_of_the_high_table_is_kept(made: VlArbitration, sizes: list[int]) -> None:
    """While both tables have a backlog: at most the limit and the rest of a packet go before a low packet,

    no less than the limit either, and never two low packets in a row. With 255 no low packet goes at all.
    """
    of = {vl: sizes[vl] for vl in able(made)}
    assume(made.high and made.low)
    limit = made.high_limit_bytes
    sent = list(islice(transmit(made, backlog(of)), 2000))
    if limit is None:
        assert {packet.table for packet in sent} == {"high"}
        return
    windows = [
        [packet.size_bytes for packet in packets]
        for table, packets in groupby(sent, key=lambda packet: packet.table)
        if table == "high"
    ]
    lows = [len(list(packets)) for table, packets in groupby(sent, key=lambda p: p.table) if table == "low"]
    assert set(lows) <= {1}
    assert all(sum(window[:-1]) < max(limit, 1) for window in windows)
    assert all(sum(window) >= limit for window in windows[:-1])


@pytest.mark.parametrize("between", [[], [Packet(MTU, 9 * MTU)] * 91], ids=["idle", "low packets"])
def test_a_pause_of_the_high_table_begins_its_count_anew(between: list[Packet]) -> None:
    """What went before does not count against it, whether the port was idle meanwhile or sent low packets."""
    made = VlArbitration(qos_high_limit=10, qos_vlarb_high="1:64", qos_vlarb_low="2:64")
    later = 100 * MTU
    queues = {1: [*[Packet(MTU)] * 9, *[Packet(MTU, later)] * 25], 2: [*between, *[Packet(MTU, later)] * 25]}
    sent = [packet for packet in transmit(made, queues) if packet.begun >= later]
    lows = [number for number, packet in enumerate(sent) if packet.vl == 2]
    assert lows[:2] == [10, 21]


def test_a_kv_packet_waits_for_four_windows_at_the_most() -> None:
    """A busy VL 1 spends the weight of its own low entry first, three packets in three windows.

    Four windows are 79 us at 400 Gb/s.
    """
    window = 983_040 + MTU
    arrivals = [100 + n * (5 * window + 1001) for n in range(40)]
    late = {1: repeat(Packet(MTU)), 2: [Packet(MTU, arrival) for arrival in arrivals]}
    sent = islice(transmit(PAPER, late), 241 * 5 * 42)
    waited = [
        packet.begun - arrived for packet, arrived in zip((p for p in sent if p.vl == 2), arrivals, strict=True)
    ]
    assert 3 * window < max(waited) <= 4 * window + MTU


def test_the_papers_figure() -> None:
    """Under full backlog the low table has one 4 KiB packet a window, 0.42 %; KV has a quarter of it beside VL 1.

    For VL 1 is in the low table too, with three times the weight.
    """
    sent = list(islice(transmit(PAPER, backlog({1: MTU, 2: MTU})), 241 * 400))
    by_table = Counter(packet.table for packet in sent)
    assert_within(by_table["low"] / by_table["high"], 0.0042, absolute=5e-5)
    assert by_table["low"] == 400
    assert sum(packet.vl == 2 for packet in sent) == 100
    assert saturated(PAPER, {1: MTU, 2: MTU})[2] == Fraction(100, len(sent))


def packets_a_round(listed: Sequence[Entry], busy: Mapping[int, int]) -> int:
    return sum(-(-entry.weight // units(busy[entry.vl])) for entry in listed if entry.vl in busy)


@given(tables(most=64), st.lists(st.sampled_from([1000, 1900, 2048, 4096]), min_size=4, max_size=4))
@example(PAPER, [MTU] * 4)
@example(VlArbitration(4, 1, "0:64,1:32,3:16", "2:1"), [4096, 1900, 2048, 1000])
def test_saturated_shares_are_the_arbiters_to_the_byte(made: VlArbitration, sizes: list[int]) -> None:
    """From a state to its return the arbiter sends exactly the shares, whatever the packets' sizes."""
    busy = {vl: sizes[vl] for vl in able(made)}
    assume(busy)
    rounds = {"high": packets_a_round(made.high, busy), "low": packets_a_round(made.low, busy)}
    alone = not all(rounds.values()) or made.high_limit_bytes is None
    counts: Counter[str] = Counter()
    sent: Counter[int] = Counter()
    seen: dict[tuple[int, ...], Counter[int]] = {}
    for packet in transmit(made, backlog(busy)):
        counts[packet.table] += 1
        sent[packet.vl] += packet.size_bytes
        # After a low packet a window begins, and all there is to know is how far round each table is.
        if alone or packet.table == "low":
            state = tuple(counts[table] % max(1, size) for table, size in rounds.items())
            if state in seen:
                between = Counter({vl: sent[vl] - seen[state][vl] for vl in busy})
                assert saturated(made, busy) == {vl: Fraction(between[vl], between.total()) for vl in busy}
                return
            seen[state] = sent.copy()


def settled(made: VlArbitration, busy: Sequence[LaneName]) -> dict[LaneName, Fraction]:
    """What the arbiter comes to, by lane."""
    shares = saturated(made, {VL_OF_LANE[lane]: MTU for lane in busy})
    return {lane: shares[VL_OF_LANE[lane]] for lane in busy}


@given(tables())
@example(PAPER)
def test_guarantees_are_the_saturated_shares(made: VlArbitration) -> None:
    """With every lane busy HTB gives what the arbiter does, which is the least; nothing at all is refused."""
    assume(able(made) >= {0, 1, 2})
    expected = settled(made, LANES)
    if not all(expected.values()):
        with pytest.raises(TopologyError, match=r"^lanes\.qos_high_limit = 255: lane \w+ \(VL \d\) gets nothing"):
            infiniband_shares(made)
        return
    shares = infiniband_shares(made)
    for lane, got in shares.among(LANES).items():
        assert_within(got, float(expected[lane]), absolute=1e-12, what=lane)
    assert all(got >= expected[lane] for busy in SETS for lane, got in settled(made, busy).items())


@given(entries(vls=(0, 1, 2), min_size=3), st.sampled_from(["qos_vlarb_high", "qos_vlarb_low"]), LIMITS)
def test_with_one_table_htb_agrees_whoever_is_idle(listed: str, key: str, limit: int) -> None:
    """All lanes in one table, the other empty: what a lane leaves goes to the others by their weights, in both."""
    empty: dict[str, Any] = {"qos_vlarb_high": "", "qos_vlarb_low": ""}
    made = VlArbitration(qos_high_limit=limit, **empty | {key: listed})
    assume(able(made) == {0, 1, 2})
    shares = infiniband_shares(made)
    for busy in SETS:
        for lane, got in shares.among(busy).items():
            # A quantum is a whole number of bytes, 65,536 or more.
            assert_within(got, float(settled(made, busy)[lane]), rel=1 / 65_536, what=f"{lane} of {busy}")


@given(
    st.integers(0, 254),
    st.lists(st.integers(1, 255), min_size=2, max_size=2),
    st.lists(st.integers(0, 255), min_size=2, max_size=2),
    st.integers(1, 255),
)
@example(240, [192, 192], [192, 192], 64)
def test_with_kv_below_htb_is_off_by_the_low_tables_part(
    limit: int, high: list[int], low: list[int], kv: int
) -> None:
    """Where high and control are in the high table and KV is not, as in the paper, HTB and the arbiter part by at

    most one packet a window of the port, whoever is idle.
    """
    made = VlArbitration(
        qos_high_limit=limit,
        qos_vlarb_high=written(zip((0, 1), high, strict=True)),
        qos_vlarb_low=written([*zip((0, 1), low, strict=True), (2, kv)]),
    )
    shares = infiniband_shares(made)
    assert [shares.borrowing(lane).prio for lane in LANES] == [0, 1, 0]
    for busy in SETS:
        for lane, got in shares.among(busy).items():
            expected = settled(made, busy)[lane]
            assert_within(got, float(expected), absolute=1 / (max(limit, 1) + 1) + 1e-4, what=f"{lane} of {busy}")


def test_the_papers_tables_compiled() -> None:
    """KV is guaranteed one packet in 1,687, the others the rest in halves; KV borrows last."""
    shares = infiniband_shares(PAPER)
    assert (shares.high, shares.kv, shares.control) == (843 / 1687, 1 / 1687, 843 / 1687)
    assert [shares.borrowing(lane).prio for lane in LANES] == [0, 1, 0]
    assert {shares.borrowing(lane).quantum_bytes for lane in LANES} == {65536}
    assert_within(shares.among(("high", "kv"))["high"], 0.9994, absolute=5e-5)
    assert_within(float(settled(PAPER, ("high", "kv"))["high"]), 0.9990, absolute=5e-5)


def documented() -> list[tuple[str, ...]]:
    """The rows of docs/lanes.md that set the arbiter's shares beside HTB's."""
    text = (Path(__file__).resolve().parents[1] / "docs" / "lanes.md").read_text(encoding="utf-8")
    table = text.split("| limit |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [tuple(cell.strip(" `") for cell in row.strip("|").split("|")) for row in table]


@pytest.mark.parametrize("row", documented())
def test_the_documented_figures_are_computed(row: tuple[str, ...]) -> None:
    """Every row of docs/lanes.md is what the functions give for its tables and busy lanes."""
    limit, high, low, busy, arbiter, htb = row
    made = VlArbitration(qos_high_limit=int(limit), qos_vlarb_high=high, qos_vlarb_low=low)
    lanes = [lane for lane in LANES if lane in busy.split()]
    assert " ".join(lanes) == busy
    shares = settled(made, lanes)
    assert " ".join(f"{100 * float(shares[lane]):.3f}" for lane in lanes) == arbiter
    assert " ".join(f"{100 * share:.3f}" for share in infiniband_shares(made).among(lanes).values()) == htb


WEIGHTS = st.integers(1, 100)


@given(WEIGHTS, WEIGHTS, WEIGHTS)
def test_traffic_classes_get_their_weights_whoever_is_idle(high: int, kv: int, control: int) -> None:
    """A busy class has its weight over those of all busy ones."""
    weights: dict[LaneName, int] = {"high": high, "kv": kv, "control": control}
    shares = roce_shares(TrafficClasses(high, kv, control))
    for busy in SETS:
        for lane, got in shares.among(busy).items():
            assert_within(got, weights[lane] / sum(weights[other] for other in busy), rel=1 / 65_536, what=lane)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({}, LaneShares()),
        ({"high": 0.9, "kv": 0.06, "control": 0.04}, LaneShares(0.9, 0.06, 0.04)),
        ({"profile": "infiniband"}, infiniband_shares(PAPER)),
        (
            {"profile": "infiniband", "qos_high_limit": 10, "qos_vlarb_low": "2:64"},
            infiniband_shares(VlArbitration(qos_high_limit=10, qos_vlarb_low="2:64")),
        ),
        (
            {"profile": "roce", "high_weight": 60, "kv_weight": 30, "control_weight": 10},
            roce_shares(TrafficClasses(60, 30, 10)),
        ),
    ],
)
def test_a_table_of_a_file_chooses(table: dict[str, Any], expected: LaneShares) -> None:
    """Shares as they stand, or those of a profile; opensm's defaults are the paper's."""
    assert set(table) <= set(LANE_KEYS)
    assert lane_shares(table) == expected


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"profile": "ib"}, 'lanes.profile = \'ib\': expected "infiniband" or "roce"'),
        ({"profile": ["roce"]}, "lanes.profile = ['roce']: expected"),
        ({"profile": "infiniband", "high": 0.9}, 'lanes.high: does not go with profile = "infiniband"'),
        ({"profile": "infiniband", "kv_weight": 1}, 'lanes.kv_weight: does not go with profile = "infiniband"'),
        ({"profile": "roce", "qos_high_limit": 1}, 'lanes.qos_high_limit: does not go with profile = "roce"'),
        (
            {"high": 0.9, "qos_high_limit": 1},
            'lanes.qos_high_limit: belongs to a profile; expected profile = "infin',
        ),
        ({"kv_weight": 3}, 'lanes.kv_weight: belongs to a profile; expected profile = "roce"'),
        ({"profile": "roce", "high_weight": 9, "kv_weight": 1}, "lanes.control_weight is missing; expected"),
        (
            {"profile": "roce", "high_weight": 0, "kv_weight": 1, "control_weight": 1},
            "lanes.high_weight = 0: expected a whole number, 1 to 100",
        ),
        (
            {"profile": "roce", "high_weight": 98.5, "kv_weight": 1, "control_weight": 1},
            "lanes.high_weight = 98.5: expected a whole number, 1 to 100",
        ),
        (
            {"profile": "infiniband", "qos_vlarb_low": "0:1,1:1"},
            "lanes.qos_vlarb_low: lane kv (VL 2) has no weight in either table; expected an entry 2:weight",
        ),
        (
            {"profile": "infiniband", "qos_max_vls": 2},
            "lanes.qos_vlarb_high: entry '2:0': expected a VL of 0 to 1, as qos_max_vls is 2",
        ),
        ({"high": 2}, "lanes.high = 2: expected a share"),
    ],
)
def test_a_mixture_is_refused(table: dict[str, Any], told: str) -> None:
    """Shares and a profile, or the settings of two profiles, in one line that names the key."""
    with pytest.raises(TopologyError) as caught:
        lane_shares(table)
    assert caught.value.text.startswith(told)
    assert caught.value.text.isprintable()
