"""Laws of the figures that are computed from a run's records."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator import metrics
from emulator.fabric.interface import Transfer
from emulator.kvcache import Layout
from emulator.records import BatchRecord, NodeRecord, PortBytes, RequestRecord, RunRecords, TransferBytes
from emulator.scale import Scale

from .within import assert_within

STAMPS = (
    "arrived_s",
    "eligible_s",
    "scheduled_s",
    "allocated_s",
    "read_s",
    "prefill_start_s",
    "computed_s",
    "transferred_s",
    "first_token_s",
    "last_token_s",
)

times = st.floats(0.0, 1e4, allow_nan=False)
runs = st.lists(st.tuples(st.floats(0.0, 1e3, allow_nan=False), st.integers(0, 50)), max_size=12)


def request(stamps: tuple[float, ...] = tuple(range(10)), /, **changes: object) -> RequestRecord:
    values: dict[str, object] = {
        "id": "a.0",
        "trajectory": "a",
        "turn": 0,
        "status": "done",
        "path": "pe",
        "prompt_tokens": 200,
        "hit_tokens": 128,
        "output_tokens": 3,
        **dict(zip(STAMPS, map(float, stamps), strict=True)),
        **changes,
    }
    return RequestRecord(**values)  # type: ignore[arg-type]


def run(*requests: RequestRecord, nodes: tuple[NodeRecord, ...] = (), ended_s: float = 10.0) -> RunRecords:
    return RunRecords(t0_s=0.0, ended_s=ended_s, requests=requests, nodes=nodes)


def port(nic: str, windows: tuple[int, ...], window_s: float = 1.0, direction: str = "write") -> PortBytes:
    return PortBytes(
        nic=nic,
        direction=direction,  # type: ignore[arg-type]
        lane=2,
        payload_bytes=sum(windows),
        messages=len(windows),
        busy_s=len(windows) * window_s,
        window_s=window_s,
        windows=windows,
    )


def setup(*ports: metrics.Port) -> metrics.Setup:
    return metrics.Setup(layout=Layout(2, 4), scale=Scale(model_kv_bytes=704, kv_bytes=4), ports=ports)


@given(runs)
def test_run_length_summary_is_that_of_the_values_written_out(pairs: list[tuple[float, int]]) -> None:
    """A summary of (value, count) equals numpy's linear percentiles over every value repeated count times."""
    written = np.repeat([v for v, _ in pairs], [n for _, n in pairs]) if pairs else np.empty(0)
    summary = metrics.summarise_runs(pairs)
    if written.size == 0:
        assert summary is None
        return
    assert summary is not None
    assert summary.count == written.size
    assert summary.max == written.max()
    assert_within(summary.mean, float(written.mean()), rel=1e-9, absolute=1e-12, what="mean")
    for q in (50, 90, 95, 99):
        expected = float(np.percentile(written, q, method="linear"))
        assert_within(getattr(summary, f"p{q}"), expected, rel=1e-9, absolute=1e-12, what=f"p{q}")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_summary_refuses_what_is_no_number(value: float) -> None:
    """A value that is not finite is an error, not a figure."""
    with pytest.raises(ValueError, match="finite"):
        metrics.summarise([1.0, value])


@given(st.lists(times, min_size=10, max_size=10).map(sorted))
def test_breakdown_sums_to_ttft(stamps: list[float]) -> None:
    """The six parts of TTFT are not negative, come in the report's order, and sum to TTFT."""
    r = request(tuple(stamps))
    parts, ttft = metrics.breakdown(r), metrics.ttft_s(r)
    assert parts is not None
    assert ttft is not None
    assert tuple(parts) == metrics.PHASES
    assert min(parts.values()) >= 0
    assert_within(sum(parts.values()), ttft, absolute=1e-9, what="sum of the breakdown")


def test_each_wait_belongs_to_its_phase() -> None:
    """Waiting for the predecessor's blocks and for buffers is allocating, for a batch prefill."""
    r = request((0, 1, 3, 7, 15, 31, 63, 127, 255, 511))
    assert metrics.breakdown(r) == {
        "scheduling": 2.0,
        "allocating": 1.0 + 4.0,
        "reading": 8.0,
        "prefill": 48.0,
        "transfer": 64.0,
        "first_decode": 128.0,
    }
    assert metrics.reading_share([r]) == 8 / 255


@pytest.mark.parametrize("missing", STAMPS[1:5] + STAMPS[6:9])
def test_an_unfinished_request_has_no_breakdown(missing: str) -> None:
    """Without any one of the stamps there is no breakdown, rather than one with a hole."""
    assert metrics.breakdown(request(**{missing: None})) is None


def test_tpot_is_the_pace_after_the_first_token() -> None:
    """TPOT is (E2E - TTFT) / (tokens - 1), TTST the first gap, the worst pause the longest gap."""
    r = request(output_tokens=5, last_token_s=10.0, token_gaps=((0.25, 3), (1.25, 1)))
    assert metrics.tpot_s(r) == 0.5
    assert metrics.ttst_s(r) == 0.25
    assert metrics.itl_max_s(r) == 1.25
    assert metrics.e2e_s(r) == 10.0


@pytest.mark.parametrize("output", [0, 1])
def test_no_pace_without_a_second_token(output: int) -> None:
    """With an output of 0 or 1 tokens TPOT, TTST and gaps are absent, and nothing divides by zero."""
    r = request(output_tokens=output)
    assert metrics.tpot_s(r) is None
    assert metrics.ttst_s(r) is None
    assert metrics.itl_max_s(r) is None
    assert metrics.pooled_gaps([r]) is None


def test_gaps_are_pooled_over_requests() -> None:
    """Every gap of every request counts once, so a long generation outweighs a short one."""
    few, many = request(token_gaps=((4.0, 1),)), request(token_gaps=((1.0, 3),))
    summary = metrics.pooled_gaps([few, many])
    assert summary is not None
    assert (summary.count, summary.mean, summary.max) == (4, 7 / 4, 4.0)


def test_nothing_done_has_no_figures() -> None:
    """A run without a completion gives None for every figure, never 0 and never an exception."""
    lost = request(status="failed", error="peer lost", path=None, **dict.fromkeys(STAMPS[1:], None))
    for records in (run(), run(lost)):
        rows = metrics.done(records)
        assert metrics.jct_s(records) is None
        assert metrics.agent_jct_s(records) is None
        assert metrics.goodput(records) is None
        assert metrics.hit_ratio(rows) is None
        assert metrics.mean_breakdown(rows) is None
        assert metrics.reading_share(rows) is None
        assert metrics.latency(rows, metrics.ttft_s) is None
        assert metrics.path_share(rows, by="requests") == {"pe": None, "de": None}
        assert metrics.snic_balance(records, setup()) is None
        assert metrics.binding(records, setup()) is None


def test_jct_runs_from_the_clocks_start_to_the_last_token() -> None:
    """JCT starts at t0, not at the epoch, and ends with the last token of a request that finished."""
    failed = request(status="failed", last_token_s=99.0)
    records = RunRecords(t0_s=2.0, ended_s=12.0, requests=(request(), failed), nodes=())
    assert metrics.jct_s(records) == 7.0


def test_an_agent_is_done_when_all_its_turns_are() -> None:
    """An agent's JCT spans all its turns; an agent with a failed turn has none."""
    whole = [request(id=f"a.{i}", turn=i, arrived_s=i * 10.0, last_token_s=i * 10.0 + 9) for i in range(2)]
    broken = [request(id="b.0", trajectory="b"), request(id="b.1", trajectory="b", turn=1, status="failed")]
    summary = metrics.agent_jct_s(run(*whole, *broken))
    assert summary is not None
    assert (summary.count, summary.max) == (1, 19.0)


def test_goodput_counts_what_meets_every_limit() -> None:
    """At the limit is within it, above either limit is not, and one token has no pace to miss."""
    slo = metrics.SLO(ttft_s=8.0, tpot_s=0.5)
    at, slow, single = request(), request(last_token_s=9.1), request(output_tokens=1, last_token_s=8.0)
    late = request(first_token_s=8.5, last_token_s=8.6)
    figure = metrics.goodput(run(at, slow, late, single), slo)
    assert figure is not None
    assert figure.share == 2 / 4
    assert_within(figure.rate_rps, 2 / 9.1, rel=1e-9)
    unserved = metrics.goodput(run(at, request(status="failed", error="refused")), slo)
    assert unserved is not None and unserved.share == 1 / 2


def test_ratios_weigh_tokens() -> None:
    """The hit ratio is over tokens; the path share is over requests or over the tokens read."""
    rows = [request(), request(hit_tokens=64, path="de"), request(hit_tokens=0, path="de")]
    assert metrics.hit_ratio(rows) == 192 / 600
    assert metrics.path_share(rows, by="requests") == {"pe": 1 / 3, "de": 2 / 3}
    assert metrics.path_share(rows, by="tokens") == {"pe": 2 / 3, "de": 1 / 3}
    counts = metrics.tokens(rows)
    assert counts == metrics.Tokens(prompt=600, hit=192, miss=408, output=9, persisted=0)


def test_steps_keep_both_sides_counts_apart() -> None:
    """A sent key shows what the sender counted, a received one what the receiver counted, in model bytes."""
    sent = tuple(TransferBytes(t.name, "a", "b", 8 * t, 1) for t in Transfer)
    received = tuple(TransferBytes(t.name, "a", "b", 8 * t + 4, 1) for t in Transfer)
    records = run(nodes=(NodeRecord(node="a", sent=sent), NodeRecord(node="b", received=received)))
    steps = metrics.steps_model_bytes(records, Scale(model_kv_bytes=704, kv_bytes=4))
    assert tuple(steps) == metrics.STEPS
    assert len(steps) == 9 + 7 + 3
    for t in Transfer:
        if t is Transfer.OTHER:
            continue
        if t.sent not in t.received:
            assert steps[t.sent] == 8 * t * 176
        assert {steps[key] for key in t.received} == {(8 * t + 4) * 176}


def test_binding_is_the_class_that_is_busiest_on_average() -> None:
    """One hot member does not make its class bind; it is named as that class's fullest."""
    ports = (
        metrics.Port("pe0", "snic0", "pe", 100.0),
        metrics.Port("pe0", "cnic0", "pe", 100.0),
        metrics.Port("pe0", "cnic1", "pe", 100.0),
    )
    node = NodeRecord(
        node="pe0",
        ports=(port("snic0", (60,) * 10), port("cnic0", (90,) * 10), port("cnic1", (10,) * 10)),
        batches=(BatchRecord("pe0/0", 0, ("a.0",), ((0, 1),), 1.0, 3.0),),
    )
    records = run(nodes=(node,))
    used = metrics.utilisation(records, setup(*ports))
    assert used is not None
    assert used["pe0", "cnic0", "write"] == 0.9
    assert used["pe0", "cnic0", "read"] == 0.0
    assert metrics.binding(records, setup(*ports)) == metrics.Binding("pe snic write", 0.6, "pe0 snic0 write", 0.6)
    busy = NodeRecord(node="pe0", batches=(BatchRecord("pe0/0", 0, ("a.0",), ((0, 1),), 1.0, 9.0),))
    figure = metrics.binding(run(nodes=(busy,)), setup(*ports))
    assert figure is not None
    assert (figure.resource, figure.utilisation) == ("pe compute", 0.8)


def test_utilisation_leaves_out_what_came_before_the_clock() -> None:
    """Bytes of the windows before t0 (warming) are not part of the run's utilisation."""
    node = NodeRecord(node="pe0", ports=(port("snic0", (100, 100, 50, 50)),))
    records = RunRecords(t0_s=2.0, ended_s=4.0, requests=(), nodes=(node,))
    used = metrics.utilisation(records, setup(metrics.Port("pe0", "snic0", "pe", 100.0)))
    assert used is not None
    assert used["pe0", "snic0", "write"] == 0.5


SNICS = (
    metrics.Port("pe0", "snic0", "pe", 100.0),
    metrics.Port("de0", "snic0", "de", 100.0),
    metrics.Port("st0", "snic0", "storage", 500.0),
)


def test_balance_is_over_the_serving_nodes_and_high_load() -> None:
    """Idle windows and the storage nodes' own NICs do not count; an even split is 1, one side alone is 2."""
    nodes = (
        NodeRecord(node="pe0", ports=(port("snic0", (100, 100, 1, 0)),)),
        NodeRecord(node="de0", ports=(port("snic0", (100, 0, 0)),)),
        NodeRecord(node="st0", ports=(port("snic0", (900, 900, 900, 900)),)),
    )
    assert metrics.snic_balance(run(nodes=nodes), setup(*SNICS)) == metrics.Balance(1.5, 1.0, 2)
    assert metrics.snic_balance(run(nodes=nodes[:1]), setup(*SNICS)) == metrics.Balance(2.0, 1.0, 2)


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), min_size=1, max_size=60))
@settings(max_examples=50)
def test_balance_lies_between_one_and_the_number_of_nics(loads: list[tuple[int, int]]) -> None:
    """Max/Avg over n NICs is between 1 and n, whatever the load."""
    nodes = tuple(
        NodeRecord(node=name, ports=(port("snic0", tuple(pair[i] for pair in loads), 0.5),))
        for i, name in enumerate(("pe0", "de0"))
    )
    figure = metrics.snic_balance(run(nodes=nodes, ended_s=len(loads) / 2), setup(*SNICS))
    assert (figure is None) == (sum(map(sum, loads)) == 0)
    assert figure is None or 1.0 <= figure.max_over_avg <= 2.0


def test_windows_of_unequal_width_cannot_be_joined() -> None:
    """Counters with different windows are a fault of the run, not something to average over."""
    nodes = (
        NodeRecord(node="pe0", ports=(port("snic0", (1,)),)),
        NodeRecord(node="de0", ports=(port("snic0", (1,), 0.5),)),
    )
    with pytest.raises(ValueError, match="windows"):
        metrics.snic_balance(run(nodes=nodes), setup(*SNICS))


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_a_port_has_a_positive_rate(rate: float) -> None:
    """A port that carries nothing, or everything, has no utilisation and is refused."""
    with pytest.raises(ValueError, match="rate"):
        metrics.Port("pe0", "snic0", "pe", rate)


def test_layout_and_scale_agree() -> None:
    """A layout of other bytes than the scale's would make every step figure wrong, and is refused."""
    with pytest.raises(ValueError, match="layout of 8 bytes, scale of 4"):
        metrics.Setup(layout=Layout(2, 8), scale=Scale(model_kv_bytes=704, kv_bytes=4), ports=())
