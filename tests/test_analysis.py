"""The paper's formulas with the paper's numbers, and offered loads worked by hand."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator.analysis import (
    STORAGE_READS,
    Cluster,
    LoadReport,
    Path,
    bottleneck_free,
    offered_load,
    working_set_bytes,
)
from emulator.costmodel import CostModel
from emulator.models.shape import load_shape
from emulator.samples import load_sample
from emulator.workload import Workload

from .test_workload import agent
from .within import assert_within

ONE_BY_ONE = Cluster(pe_nodes=1, de_nodes=1, gpus=8, cnic_bps=50e9, snic_bps=50e9, storage_bps=125e9)
COSTS = CostModel(load_shape("ds660b"))

CLUSTERS = st.builds(
    lambda pe, de, gpus, cnic, snic: Cluster(
        pe_nodes=pe,
        de_nodes=de,
        gpus=gpus,
        cnic_bps=cnic * 1e9,
        snic_bps=snic * 1e9,
        storage_bps=1e15,
        dram_bps=1e15,
    ),
    st.integers(1, 48),
    st.integers(1, 96),
    st.integers(2, 16),
    st.integers(10, 100),
    st.integers(1, 100),
)


def _load(report: LoadReport, path: str, resource: str) -> float:
    return next(load.busy_s for load in report.loads[path] if load.resource == resource)


def test_the_papers_cluster_is_bottleneck_free_between_a_seventh_and_seven_halves() -> None:
    """g = 8, s = 1, M/(B s) = 10: 1/7 <= P/D <= 7/2; PE CNIC read at 2P4D is 12.5 GB/s."""
    section = bottleneck_free(msgspec.structs.replace(ONE_BY_ONE, pe_nodes=2, de_nodes=4))
    assert_within(section.ratio_low, 1 / 7, rel=1e-12)
    assert_within(section.ratio_high, 7 / 2, rel=1e-12)
    assert_within(section.loads[0].load_bps, 12.5e9, rel=1e-12)
    assert (section.basic_bps, section.dualpath_bps) == (100e9, 300e9)
    assert section.bottleneck_free


@pytest.mark.parametrize(
    ("pe", "de", "free"), [(1, 7, True), (1, 8, False), (7, 2, True), (4, 1, False), (48, 96, True)]
)
def test_bounds_and_loads_agree_on_the_papers_node(pe: int, de: int, free: bool) -> None:
    """At a bound the loads just fit; past it one resource is named that does not."""
    section = bottleneck_free(msgspec.structs.replace(ONE_BY_ONE, pe_nodes=pe, de_nodes=de))
    assert section.bottleneck_free == free
    assert (section.ratio_low - 1e-9 <= section.ratio <= section.ratio_high + 1e-9) == free


@given(CLUSTERS)
@settings(deadline=None)
def test_the_bounds_are_where_the_loads_meet_their_limits(cluster: Cluster) -> None:
    """With DRAM aside, loads fit exactly where P/D is within its bounds and a PE CNIC can read 2 B s/g."""
    section = bottleneck_free(cluster)
    margins = [abs(section.ratio - bound) for _, _, bound in section.ratio_bounds]
    if min(margins) < 1e-6:
        return
    reads_fit = 2 * cluster.s / cluster.gpus <= 1
    within = section.ratio_low < section.ratio < section.ratio_high
    assert section.bottleneck_free == (within and reads_fit)


def test_a_slower_storage_nic_widens_the_range() -> None:
    """s counts in units of a CNIC: half the rate is half an s."""
    slow = bottleneck_free(msgspec.structs.replace(ONE_BY_ONE, snic_bps=25e9))
    assert_within(slow.ratio_low, 0.5 / 7.5, rel=1e-12)
    assert slow.ratio_high > 7 / 2


def test_the_papers_working_set() -> None:
    """0.1 agents a second x 570 s x 55,958/2 tokens x 42,944 bytes = 68.5 GB (the paper says 69)."""
    assert_within(working_set_bytes(0.1, 570, 55_958, 42_944), 68.5e9, rel=0.001)


def test_offered_load_worked_by_hand() -> None:
    """Two agents of two turns on 1P1D: every resource's seconds from hits, misses and outputs."""
    workload = Workload((agent("a", (640, 64), (64, 64)), agent("b", (640, 64), (64, 64))))
    report = offered_load(workload, ONE_BY_ONE, COSTS, warm=False)
    token = 42_944
    # Turn 2's prompt of 768 = 12 blocks hits 11: the 704 tokens of turn 1's context.
    assert (report.hit_tokens, report.miss_tokens, report.output_tokens) == (1408, 1280 + 128, 256)
    assert report.read_bytes == 1408 * token
    hit, miss, out = 1408 * token / 50e9, 1408 * token / 50e9, 256 * token / 50e9
    expected = {
        "pe": {"PE CNIC read": (2 * hit + miss) / 8, "DE CNIC write": (2 * hit + 2 * miss + out) / 8},
        "de": {"PE CNIC read": miss / 8, "DE CNIC write": (hit + 2 * miss + out) / 8},
        "both": {"PE CNIC read": (hit + miss) / 8, "DE CNIC write": (1.5 * hit + 2 * miss + out) / 8},
    }
    for path, resources in expected.items():
        for resource, seconds in resources.items():
            assert_within(_load(report, path, resource), seconds, rel=1e-9, what=f"{path} {resource}")
    assert_within(_load(report, "pe", STORAGE_READS), hit, rel=1e-9)
    assert_within(_load(report, "both", STORAGE_READS), hit / 2, rel=1e-9)
    # Both turns persist what was not hit: 704 tokens, then 832 - 704.
    assert_within(_load(report, "pe", "SNIC of DE, storage writes"), 2 * 832 * token / 50e9, rel=1e-9)
    prefill_s = sum(COSTS.prefill_layer_s([shape]) * 61 for shape in ((0, 640), (704, 64)))
    decode_s = 64 * (COSTS.decode_step_s([640 + 32]) + COSTS.decode_step_s([768 + 32]))
    assert_within(report.free_s, prefill_s + decode_s, rel=1e-9)
    assert_within(report.snic_offered("pe"), hit / report.free_s, rel=1e-9)
    assert report.binding["pe"] == "slowest agent"


def test_warm_stores_the_first_prompts() -> None:
    """Warm, a first prompt hits all full blocks but the one with its last token."""
    workload = Workload((agent("a", (640, 1)),))
    assert offered_load(workload, ONE_BY_ONE, COSTS, warm=False).hit_tokens == 0
    assert offered_load(workload, ONE_BY_ONE, COSTS, warm=True).hit_tokens == 576


@given(st.integers(1, 6))
@settings(deadline=None)
def test_more_agents_offer_more_until_the_gpus_bind(times: int) -> None:
    """k equal agents ask for k times the bytes; free_s is the slowest agent's until an engine's sum passes it."""
    one = offered_load(Workload((agent("a", (6400, 4), (64, 4)),)), ONE_BY_ONE, COSTS, warm=True)
    workload = Workload(tuple(agent(f"a{at}", (6400, 4), (64, 4)) for at in range(times)))
    many = offered_load(workload, ONE_BY_ONE, COSTS, warm=True)
    assert many.read_bytes == times * one.read_bytes
    assert_within(many.free_s, one.free_s, rel=1e-9)
    assert_within(many.snic_offered("pe"), times * one.snic_offered("pe"), rel=1e-9)


def test_the_share_of_time_counts_what_is_asked_at_once() -> None:
    """Equal turns end to end ask for one constant load: at or above 2 for all of the run, or for none of it."""
    rounds = [(48_000, 1), *[(1, 1)] * 2]
    for count, share in ((2, 0.0), (24, 1.0)):
        workload = Workload(tuple(agent(f"a{at}", *rounds) for at in range(count)))
        report = offered_load(workload, ONE_BY_ONE, COSTS, warm=True)
        assert (report.snic_offered("pe") >= 2) == bool(share)
        assert_within(report.twice_share["pe"], share, absolute=1e-6)


def test_the_io_bound_sample_offers_a_storage_nic_twice_what_it_carries() -> None:
    """On 1P1D, warm: at least 2 on one SNIC, for most of the run; storage reads bind on every path."""
    report = offered_load(load_sample("io-bound"), ONE_BY_ONE, COSTS, warm=True)
    assert report.snic_offered("pe") >= 2
    assert report.twice_share["pe"] > 0.5
    assert set(report.binding.values()) == {STORAGE_READS}
    assert_within(report.jct_bound_s["pe"] / report.jct_bound_s["both"], 2.0, rel=1e-9)


def test_the_agentic_sample_does_not_load_storage() -> None:
    """Decoding short contexts for half a minute: the SNIC is nearly idle, and no ratio divides by zero."""
    report = offered_load(load_sample("agentic"), ONE_BY_ONE, COSTS, warm=False)
    assert report.snic_offered("pe") < 0.1
    assert report.binding["pe"] == "slowest agent"
    paths: tuple[Path, ...] = ("pe", "de", "both")
    assert all(math.isfinite(load.offered) for path in paths for load in report.loads[path])
