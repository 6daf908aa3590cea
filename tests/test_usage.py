"""Laws of usage: ports, engines, pools as parts of what they could do, what binds, what collectives leave."""

from __future__ import annotations

import msgspec
import pytest

from emulator.fabric.interface import VirtualLane
from emulator.metrics import Port
from emulator.records import BatchRecord, ExchangeRecord, GapRecord, NodeRecord, PoolRecord, PortBytes, RunRecords
from emulator.usage import (
    Binding,
    CnicIdle,
    Exchanges,
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


def test_exchanges_are_summed_over_the_members_of_a_ring() -> None:
    """All members see every exchange: it counts once, its mean is over what they saw, the longest is anybody's."""
    nodes = (
        NodeRecord(node="pe0", exchanges=(ExchangeRecord("pe", 1, 4096, 10, 0.1, 0.02),)),
        NodeRecord(
            node="pe1",
            exchanges=(ExchangeRecord("pe", 1, 4096, 10, 0.3, 0.09), ExchangeRecord("pe", 1, 8192, 0, 0.0, 0.0)),
        ),
    )
    (row,) = collectives(run(nodes=nodes))
    assert msgspec.structs.replace(row, mean_s=0.0) == Exchanges("pe", 1, 4096, 10, 0.0, 0.09)
    assert_within(row.mean_s, 0.02, rel=1e-9)


CNIC = Port("pe0", "cnic0", "pe", 100.0)


def lane(which: VirtualLane, payload: int, busy_s: float, direction: str = "read") -> PortBytes:
    return PortBytes("cnic0", direction, which, payload, 1, busy_s, 1.0, (payload,))  # type: ignore[arg-type]


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
