"""Laws of the figures that are computed from a run's records."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator import balance, metrics, usage
from emulator.kvcache import Layout
from emulator.records import RunRecords
from emulator.scale import Scale

from .made_records import STAMPS, request, run, setup
from .within import assert_within

times = st.floats(0.0, 1e4, allow_nan=False)
runs = st.lists(st.tuples(st.floats(0.0, 1e3, allow_nan=False), st.integers(0, 50)), max_size=12)


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
        assert metrics.pool_hit_ratio(rows) is None
        assert balance.snic_balance(records, setup()) is None
        assert balance.attention_balance(records, setup()) is None
        assert usage.binding(records, setup()) is None
        assert usage.collectives(records, setup().scale) == ()


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


def test_a_split_hit_is_read_on_both_sides() -> None:
    """A split request is of neither path; its tokens count on the side that read them."""
    rows = [request(path="split", de_hit_tokens=64, pool_tokens=64), request(path="de")]
    assert metrics.path_share(rows, by="requests") == {"pe": 0, "de": 1 / 2, "split": 1 / 2}
    assert metrics.path_share(rows, by="tokens") == {"pe": 64 / 256, "de": 192 / 256}
    assert metrics.pool_hit_ratio(rows) == 64 / 256


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_a_port_has_a_positive_rate(rate: float) -> None:
    """A port that carries nothing, or everything, has no utilisation and is refused."""
    with pytest.raises(ValueError, match="rate"):
        metrics.Port("pe0", "snic0", "pe", rate)


def test_layout_and_scale_agree() -> None:
    """A layout of other bytes than the scale's would make every step figure wrong, and is refused."""
    with pytest.raises(ValueError, match="layout of 8 bytes, scale of 4"):
        metrics.Setup(layout=Layout(2, 8), scale=Scale(model_kv_bytes=704, kv_bytes=4), ports=())
