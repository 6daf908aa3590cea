"""Laws of usage: ports, engines, pools as parts of what they could do, what binds, what collectives leave."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.fabric.interface import VirtualLane
from emulator.fabric.meter import Books
from emulator.metrics import Port, summarise
from emulator.records import BatchRecord, ExchangeRecord, GapRecord, NodeRecord, PoolRecord, PortBytes, RunRecords
from emulator.scale import Scale
from emulator.usage import (
    Binding,
    CnicIdle,
    Gaps,
    binding,
    cnic_idle,
    collectives,
    pool_peaks,
    utilisation,
)

from .made_records import port, run, setup
from .within import assert_within


def test_binding_is_the_class_that_is_busiest_on_average() -> None:
    """One hot member does not make its class bind; it is named as that class's fullest."""
    ports = (
        Port("pe0", "snic0", "pe", 100.0),
        Port("pe0", "cnic0", "pe", 100.0),
        Port("pe0", "cnic1", "pe", 100.0),
    )
    node = NodeRecord(
        node="pe0",
        ports=(port("snic0", (60,) * 10), port("cnic0", (90,) * 10), port("cnic1", (10,) * 10)),
        batches=(BatchRecord("pe0/0", 0, ("a.0",), ((0, 1),), 1.0, 3.0),),
    )
    records = run(nodes=(node,))
    used = utilisation(records, setup(*ports))
    assert used is not None
    assert used["pe0", "cnic0", "write"] == 0.9
    assert used["pe0", "cnic0", "read"] == 0.0
    assert binding(records, setup(*ports)) == Binding("pe snic write", 0.6, "pe0 snic0 write", 0.6)
    busy = NodeRecord(node="pe0", batches=(BatchRecord("pe0/0", 0, ("a.0",), ((0, 1),), 1.0, 9.0),))
    figure = binding(run(nodes=(busy,)), setup(*ports))
    assert figure is not None
    assert (figure.resource, figure.utilisation) == ("pe compute", 0.8)


def test_utilisation_leaves_out_what_came_before_the_clock() -> None:
    """Bytes of the windows before t0 (warming) are not part of the run's utilisation."""
    node = NodeRecord(node="pe0", ports=(port("snic0", (100, 100, 50, 50)),))
    records = RunRecords(t0_s=2.0, ended_s=4.0, requests=(), nodes=(node,))
    used = utilisation(records, setup(Port("pe0", "snic0", "pe", 100.0)))
    assert used is not None
    assert used["pe0", "snic0", "write"] == 0.5


DRAM = Port("de0", "dram", "de", 100.0, "dram")
LINK = Port("de0", "pcie0", "de", 100.0, "pcie")


def test_dram_is_half_duplex_and_counts_where_it_was_counted() -> None:
    """Both ways of DRAM are parts of one rate, so its use is their sum; a PCIe link nobody counted has no use."""
    ports = (port("dram", (40,) * 10, direction="read"), port("dram", (50,) * 10), port("snic0", (80,) * 10))
    records, known = run(nodes=(NodeRecord(node="de0", ports=ports),)), Port("de0", "snic0", "de", 100.0)
    used = utilisation(records, setup(known, DRAM, LINK))
    assert used is not None
    assert (used["de0", "dram", "read"], used["de0", "dram", "write"]) == (0.4, 0.5)
    assert not any(nic == "pcie0" for _, nic, _ in used)
    figure = binding(records, setup(known, DRAM, LINK))
    assert figure is not None
    assert (figure.resource, figure.fullest) == ("de dram", "de0 dram")
    assert_within(figure.utilisation, 0.9, rel=1e-9)


@pytest.mark.parametrize(
    ("attention_s", "exchange_s", "name"),
    [(5.0, 1.0, "prefill attention"), (1.0, 5.0, "expert exchange"), (3.0, 3.0, "pe compute")],
)
def test_busy_engines_are_named_by_what_they_mostly_do(attention_s: float, exchange_s: float, name: str) -> None:
    """Attention or exchanges that are most of the engines' time give it their name; both engines wait for each."""
    batches = tuple(BatchRecord(f"pe0/{i}", 0, ("a.0",), ((0, 1),), 1.0, 9.0, 0, attention_s) for i in range(2))
    node = NodeRecord(
        node="pe0", batches=batches, exchanges=(ExchangeRecord("pe", 1, 100, 10, exchange_s, exchange_s / 10),)
    )
    decode = NodeRecord(node="de0", exchanges=(ExchangeRecord("de", 1, 100, 10, 99.0, 9.9),))
    figure = binding(run(nodes=(node, decode)), setup(Port("pe0", "snic0", "pe", 100.0)))
    assert figure == Binding(name, 0.8, "pe0/0", 0.8)


DOUBLED = Scale(2, 1)


def exchanges(size: int, took: Sequence[float]) -> ExchangeRecord:
    """Exchanges of ``size`` payload bytes that took so long, as a fabric's books record them."""
    books = Books(1.0)
    for seconds in took:
        books.count_exchange("pe", VirtualLane.MODEL, size, seconds, 0.0)
    (record,) = books.exchanges()
    return record


def test_exchanges_are_summed_over_the_members_of_a_ring() -> None:
    """All members see every exchange: it counts once, its mean is over what they saw, the longest is anybody's.

    Sizes within one power of two of model bytes are one row.
    """
    nodes = (
        NodeRecord(node="pe0", exchanges=(exchanges(1_500, [0.01] * 4), exchanges(2_000, [0.03] * 4))),
        NodeRecord(
            node="pe1",
            exchanges=(
                exchanges(1_500, [0.02] * 4),
                exchanges(2_000, [0.01, 0.01, 0.02, 0.12]),
                ExchangeRecord("pe", 1, 8192, 0, 0.0, 0.0),
            ),
        ),
    )
    (row,) = collectives(run(nodes=nodes), DOUBLED)
    assert (row.ring, row.lane, row.upto_bytes, row.count, row.max_s) == ("pe", 1, 4096, 8, 0.12)
    assert row.model_bytes == 3_500
    assert_within(row.mean_s, 0.025, rel=1e-9)


@given(
    st.lists(st.tuples(st.integers(0, 1 << 40), st.floats(0, 1e3, allow_subnormal=False)), min_size=1, max_size=40)
)
def test_every_exchange_is_in_the_row_of_its_size(done: list[tuple[int, float]]) -> None:
    """Rows part all exchanges by powers of two; counts, bytes and times are kept, the 95th percentile nearly."""
    sizes = {size for size, _ in done}
    records = [exchanges(size, [took for other, took in done if other == size]) for size in sorted(sizes)]
    rows = collectives(run(nodes=(NodeRecord(node="pe0", exchanges=tuple(records)),)), DOUBLED)
    assert len({row.upto_bytes for row in rows}) == len(rows)
    for row in rows:
        assert row.upto_bytes == 0 or row.upto_bytes.bit_count() == 1
        mine = [(2 * size, took) for size, took in done if row.upto_bytes // 2 < 2 * size <= row.upto_bytes]
        mine = mine or [(0, took) for size, took in done if not size]
        assert row.count == len(mine)
        assert_within(row.model_bytes * row.count, sum(size for size, _ in mine), rel=1e-9)
        assert_within(row.mean_s * row.count, sum(took for _, took in mine), rel=1e-9, absolute=1e-300)
        assert row.max_s == max(took for _, took in mine)
        exact = summarise(took for _, took in mine)
        assert exact is not None and row.p95_s is not None
        assert exact.p95 * (1 - 1e-9) <= row.p95_s <= min(exact.max, exact.p95 * (1 + 1 / 32) + 1e-300)
    assert sum(row.count for row in rows) == len(done)


CNIC = Port("pe0", "cnic0", "pe", 100.0)


def lane(which: VirtualLane, payload: int, busy_s: float, direction: str = "read") -> PortBytes:
    return PortBytes("cnic0", direction, which, payload, 1, busy_s, 1.0, (payload,), payload)  # type: ignore[arg-type]


def test_kv_uses_what_collectives_leave() -> None:
    """Of 1,000 bytes that a port could carry the collectives took 200, in 3 of 10 s; KV took 400 of the rest."""
    ports = (
        lane(VirtualLane.MODEL, 200, 3.0),
        lane(VirtualLane.KV, 400, 9.0),
        lane(VirtualLane.KV, 999, 9.0, "write"),
    )
    figure = cnic_idle(run(nodes=(NodeRecord(node="pe0", ports=ports),)), setup(CNIC))
    assert figure == CnicIdle(idle=0.7, kv_of_left=0.5, ports=1)


def test_gaps_are_joined_by_length_over_all_ports() -> None:
    """Counts add up; time is a mean over ports, KV a part of what fits into the gaps of all."""
    one = msgspec.structs.replace(
        lane(VirtualLane.MODEL, 200, 3.0), gaps=(GapRecord(0.5, 4, 1.0, 60), GapRecord(2.0, 1, 1.0, 0))
    )
    other = msgspec.structs.replace(
        lane(VirtualLane.MODEL, 200, 3.0, "write"), gaps=(GapRecord(2.0, 2, 3.0, 120),)
    )
    figure = cnic_idle(run(nodes=(NodeRecord(node="pe0", ports=(one, other)),)), setup(CNIC))
    assert figure is not None
    assert figure.gaps == (Gaps(0.5, 4, 0.05, 0.6), Gaps(2.0, 3, 0.2, 0.3))


def test_without_a_lane_of_their_own_collectives_have_no_gaps() -> None:
    """Where everything shares one lane, or nothing is exchanged, no figure is better than a wrong one."""
    only = (lane(VirtualLane.KV, 400, 9.0), lane(VirtualLane.MODEL, 0, 0.0))
    assert cnic_idle(run(nodes=(NodeRecord(node="pe0", ports=only),)), setup(CNIC)) is None


def test_a_peak_is_the_fullest_of_its_class() -> None:
    """Pools of one kind on one kind of node are a class, whoever was fullest; a pool of nothing has no peak."""
    nodes = (
        NodeRecord(
            node="pe0",
            pools=(
                PoolRecord("pe0.pe_buffer", 10, 10, 5),
                PoolRecord("pe0/0.hbm", 10, 10, 2),
                PoolRecord("pe0/1.hbm", 10, 10, 9),
                PoolRecord("pe0/2.hbm", 0, 0, 0),
            ),
        ),
        NodeRecord(node="de0", pools=(PoolRecord("de0/0.hbm", 4, 4, 4),)),
    )
    figure = pool_peaks(run(nodes=nodes), setup(CNIC, Port("de0", "cnic0", "de", 1.0)))
    assert figure == {"de hbm": 1.0, "pe hbm": 0.9, "pe_buffer": 0.5}
