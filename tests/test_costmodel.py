"""Laws of the cost model and of measured tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.costmodel import HOPPER, CostModel, CostTable, load_costs, load_table, split_table
from emulator.errors import ConfigError
from emulator.models.shape import bundled_shapes, load_shape

from .within import assert_within

TOKENS = st.integers(min_value=1, max_value=8192)
CONTEXT = st.integers(min_value=0, max_value=200_000)
SHAPES = st.sampled_from(bundled_shapes())


@pytest.mark.parametrize(
    ("model", "cached", "expected", "digits"),
    [
        ("qwen32b", 16_384, 117, 0),
        ("qwen32b", 65_536, 267, 0),
        ("ds660b", 16_384, 13.1, 1),
        ("ds660b", 32_721, 23.1, 1),
        ("ds660b", 65_536, 37.6, 1),
    ],
)
def test_cache_compute_ratio_is_the_papers(model: str, cached: int, expected: float, digits: int) -> None:
    """GB per PFLOP at an append of 429 tokens rounds to the paper's figure, by bytes x context over FLOPs."""
    ratio = CostModel(load_shape(model)).cache_compute_ratio_gb_per_pflop(cached, 429)
    assert round(ratio, digits) == expected


@given(SHAPES, CONTEXT, st.integers(min_value=1, max_value=3000))
def test_flops_of_a_span_are_the_sum_over_its_tokens(model: str, cached: int, new: int) -> None:
    """Token i of a span attends to cached + i tokens, itself included; the closed form is that sum, exactly."""
    shape = load_shape(model)
    attention = shape.attention
    assert attention.span_flops(cached, new) == sum(attention.token_flops(cached + i + 1) for i in range(new))
    expected = 2 * shape.active_params * new + shape.layers * attention.span_flops(cached, new)
    assert CostModel(shape).prefill_flops(cached, new) == expected


@given(SHAPES, CONTEXT, TOKENS, TOKENS)
def test_chunks_compute_what_the_whole_does(model: str, cached: int, first: int, second: int) -> None:
    """Cutting a prefill in two changes no FLOP."""
    cost = CostModel(load_shape(model))
    chunks = cost.prefill_flops(cached, first) + cost.prefill_flops(cached + first, second)
    assert chunks == cost.prefill_flops(cached, first + second)


@given(SHAPES, st.lists(st.tuples(CONTEXT, TOKENS), min_size=1, max_size=5), TOKENS)
def test_more_work_never_takes_less_time(model: str, batch: list[tuple[int, int]], more: int) -> None:
    """Times grow with new tokens, with context and with requests; nothing takes no time."""
    cost = CostModel(load_shape(model))
    (cached, new), *rest = batch
    base = cost.prefill_layer_s(batch)
    assert 0 < base <= cost.prefill_layer_s([(cached, new + more), *rest])
    assert base <= cost.prefill_layer_s([(cached + more, new), *rest])
    assert base <= cost.prefill_layer_s([*batch, (0, more)])
    assert 0 < cost.attention_s(batch) < cost.attention_s([*batch, (0, more)])
    contexts = [cached for cached, _ in batch]
    assert 0 < cost.decode_step_s(contexts) <= cost.decode_step_s([*contexts, more])


def test_nothing_costs_nothing() -> None:
    """An empty batch takes no time, in prefill and in decode; nor does a prompt of which nothing is new."""
    cost = CostModel(load_shape("ds660b"))
    assert cost.prefill_layer_s([(640, 0)]) == 0
    assert cost.prefill_layer_s([]) == cost.attention_s([]) == cost.decode_step_s([]) == 0
    assert cost.attention_layer_s([]) == cost.decode_attention_s([]) == 0


@given(SHAPES, st.lists(st.tuples(CONTEXT, TOKENS), min_size=1, max_size=5))
def test_attention_and_rest_are_the_whole(model: str, batch: list[tuple[int, int]]) -> None:
    """A layer is its attention and its rest, a decode step too, to the bit; attention adds up over requests."""
    cost = CostModel(load_shape(model))
    new = sum(tokens for _, tokens in batch)
    assert cost.prefill_layer_s(batch) == cost.attention_layer_s(batch) + cost.rest_layer_s(new)
    contexts = [cached for cached, _ in batch]
    assert cost.decode_step_s(contexts) == cost.decode_attention_s(contexts) + cost.decode_rest_s(len(batch))
    apart = sum(cost.attention_layer_s([request]) for request in batch)
    assert_within(cost.attention_layer_s(batch), apart, rel=1e-12)
    assert_within(cost.attention_s(batch), apart * cost.shape.layers, rel=1e-12)


@given(SHAPES, st.floats(0, 8192), st.floats(0, 8192))
def test_a_share_of_a_token_has_a_rest(model: str, some: float, more: float) -> None:
    """Without tokens the rest is weights and overhead; it never falls with the tokens, whole or not."""
    shape = load_shape(model)
    cost = CostModel(shape)
    weights_s = shape.weight_bytes_per_gpu / HOPPER.hbm_bps / shape.layers
    assert_within(cost.rest_layer_s(0), weights_s + shape.prefill_layer_overhead_us * 1e-6, rel=1e-12)
    assert_within(
        cost.decode_rest_s(0) / shape.layers, weights_s + shape.decode_layer_overhead_us * 1e-6, rel=1e-12
    )
    assert cost.rest_layer_s(some) <= cost.rest_layer_s(some + more)
    assert cost.decode_rest_s(some) <= cost.decode_rest_s(some + more)


def test_small_forwards_are_bound_by_weights_and_large_ones_by_flops() -> None:
    """max(FLOPs / rate, weights / bandwidth): one token costs the weights, a full batch its FLOPs."""
    shape = load_shape("ds660b")
    cost = CostModel(shape)
    overhead = shape.layers * shape.prefill_layer_overhead_us * 1e-6
    small = shape.layers * cost.prefill_layer_s([(0, 1)]) - cost.attention_s([(0, 1)]) - overhead
    assert_within(small, shape.weight_bytes_per_gpu / HOPPER.hbm_bps, rel=1e-9)
    large = shape.layers * cost.prefill_layer_s([(0, 8192)]) - cost.attention_s([(0, 8192)]) - overhead
    assert_within(large, 2 * shape.active_params * 8192 / HOPPER.gemm_fp8, rel=1e-9)


@pytest.mark.parametrize(("model", "tpot_s"), [("ds660b", 0.0308), ("ds27b", 0.0107)])
def test_decode_of_a_lightly_loaded_engine_is_the_papers(model: str, tpot_s: float) -> None:
    """The time between tokens at the lowest arrival rate of the paper's figure 10."""
    assert_within(CostModel(load_shape(model)).decode_step_s([32_768]), tpot_s, rel=0.02)


def test_attention_is_bound_by_flops_or_by_reading_kv() -> None:
    """The larger of the two, worked by hand: DS 660B decodes by FLOPs, Qwen 32B reads its whole context."""
    sparse, dense = CostModel(load_shape("ds660b")), CostModel(load_shape("qwen32b"))
    context = 10_000
    flops = 2 * 128 * (576 + 512) * 2048 + 2 * 64 * 128 * context
    step = 61 * (flops / 410e12 + 280e-6) + 41.25e9 / 3e12
    assert_within(sparse.decode_step_s([context]), step, rel=1e-12, what="a step bound by FLOPs")
    step = 64 * (context * 4096 / 3e12 + 30e-6) + 64.1e9 / 3e12
    assert_within(dense.decode_step_s([context]), step, rel=1e-12, what="a step bound by KV bytes")
    assert_within(dense.attention_s([(context - 1, 1)]), 64 * context * 4096 / 3e12, rel=1e-12)
    flops = 64 * 4 * 40 * 128 * sum(range(context + 1, context + 4097))
    assert_within(dense.attention_s([(context, 4096)]), flops / 640e12, rel=1e-12)


def _table(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "costs.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


GRID = "cached,bsz,ms\n0,1,10\n0,101,20\n1000,1,30\n1000,101,80\n"


def test_table_replaces_prefill_times(tmp_path: Path) -> None:
    """A measured table gives a forward's time at its points exactly, and bilinearly between them."""
    shape = load_shape("ds27b")
    cost = load_costs(shape, _table(tmp_path, GRID))
    for cached, new, ms in ((0, 1, 10), (1000, 101, 80), (500, 1, 20), (0, 51, 15), (500, 51, 35)):
        assert_within(shape.layers * cost.prefill_layer_s([(cached, new)]), ms / 1000, rel=1e-12)
    assert cost.decode_step_s([5]) == load_costs(shape).decode_step_s([5])


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 25)), min_size=1, max_size=4))
def test_a_table_knows_its_attention_by_the_context(batch: list[tuple[int, int]]) -> None:
    """What no context changes is the rest, once a forward; at the shortest context attention is the formula's."""
    formula = load_costs(load_shape("ds27b"))
    layers = formula.shape.layers
    times = ((0.010, 0.020), (0.030, 0.080))
    measured = CostTable("t", (0, 1000), (1, 101), times)
    cost = replace(formula, table=split_table(measured, lambda *request: formula.attention_s([request])))
    new = sum(tokens for _, tokens in batch)
    attention = [measured.forward_s(*request) - layers * cost.rest_layer_s(request[1]) for request in batch]
    assert_within(layers * cost.attention_layer_s(batch), sum(attention), rel=1e-9)
    assert_within(layers * cost.prefill_layer_s(batch), sum(attention) + layers * cost.rest_layer_s(new), rel=1e-9)
    for tokens in measured.new:
        assert_within(layers * cost.attention_layer_s([(0, tokens)]), formula.attention_s([(0, tokens)]), rel=1e-9)
    assert cost.rest_layer_s(0) == cost.rest_layer_s(0.5) == cost.rest_layer_s(1) < cost.rest_layer_s(1.5)
    assert cost.attention_s(batch) == formula.attention_s(batch)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("0,1,5\n90000,1,0.1\n", r"costs\.csv: cached=90000, bsz=1: 0\.1 ms, but attention alone takes"),
        ("0,8192,100\n", r"costs\.csv: cached=0, bsz=8192: 100 ms, but attention alone takes \d+ ms"),
        ("0,1,5\n9,1,4.9\n", r"costs\.csv: cached=9, bsz=1: 4\.9 ms, but bsz=1 takes 5 ms besides attention"),
    ],
)
def test_times_that_leave_no_attention_are_refused(tmp_path: Path, text: str, error: str) -> None:
    """A row quicker than attention can be, or than a shorter context's, names itself when it is loaded."""
    with pytest.raises(ConfigError, match=error) as caught:
        load_costs(load_shape("ds660b"), _table(tmp_path, "cached,bsz,ms\n" + text))
    assert "\n" not in caught.value.text


@given(st.integers(0, 1000), st.integers(1, 101))
def test_interpolation_stays_between_its_corners(cached: int, new: int) -> None:
    """Bilinear interpolation never leaves the range of the measured times."""
    table = CostTable("t", (0, 300, 1000), (1, 64, 101), ((1.0, 2.0, 3.0), (2.0, 5.0, 6.0), (4.0, 7.0, 9.0)))
    assert 1.0 <= table.forward_s(cached, new) <= 9.0


def test_outside_of_the_table_is_an_error(tmp_path: Path) -> None:
    """No time is made up: the error names the table, the point and what was measured; and it can come early."""
    cost = load_costs(load_shape("ds27b"), _table(tmp_path, GRID))
    cost.check_covers(1000, 101)
    for batch in ([(1001, 1)], [(0, 102)], [(0, 60), (0, 60)]):
        with pytest.raises(ConfigError, match=r"costs\.csv: no time for .* measured are cached 0 to 1000, bsz 1"):
            cost.prefill_layer_s(batch)
    with pytest.raises(ConfigError, match="cached=2000, bsz=8192"):
        cost.check_covers(2000, 8192)
    load_costs(load_shape("ds27b")).check_covers(10**9, 10**9)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", r"costs\.csv:1: header '': expected cached,bsz,ms"),
        ("cached,ms,bsz\n0,1,1\n", r"costs\.csv:1: header 'cached,ms,bsz'"),
        ("cached,bsz,ms\n", r"costs\.csv: no rows"),
        ("cached,bsz,ms\n0,1,5\n\n0,2\n", r"costs\.csv:4: 2 cells"),
        ("cached,bsz,ms\n-1,1,5\n", r"costs\.csv:2: cached '-1': expected an integer of 0 or more"),
        ("cached,bsz,ms\n0,0,5\n", r"costs\.csv:2: bsz '0': expected an integer of 1 or more"),
        ("cached,bsz,ms\n0,1.5,5\n", r"costs\.csv:2: bsz '1\.5'"),
        ("cached,bsz,ms\n0,1,nan\n", r"costs\.csv:2: ms 'nan': expected a positive"),
        ("cached,bsz,ms\n0,1,inf\n", r"costs\.csv:2: ms 'inf'"),
        (f"cached,bsz,ms\n{'9' * 5000},1,1\n", r"costs\.csv:2: cached '9+': expected an integer"),
        ("cached,bsz,ms\n0,1,1e308\n", r"costs\.csv:2: ms '1e308': expected a positive number, at most"),
        ("cached,bsz,ms\n0,1,0\n", r"costs\.csv:2: ms '0'"),
        ("cached,bsz,ms\n0,1,fast\n", r"costs\.csv:2: ms 'fast'"),
        ("cached,bsz,ms\n0,1,5\n0,1,6\n", r"costs\.csv:3: cached=0, bsz=1 was given before"),
        ("cached,bsz,ms\n0,1,5\n8,2,6\n", r"full grid, but cached=0, bsz=2 is missing"),
        (b"\x7fELF\x02\x01\xff\xfe", r"costs\.csv: not readable as CSV"),
    ],
)
def test_malformed_tables_are_refused(tmp_path: Path, text: str | bytes, error: str) -> None:
    """Each fault of a table names the file, the line and what was expected."""
    with pytest.raises(ConfigError, match=error) as caught:
        load_table(_table(tmp_path, text))
    assert "\n" not in caught.value.text


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """A missing table and a directory are user errors."""
    with pytest.raises(ConfigError, match="no such cost table"):
        load_table(tmp_path / "none.csv")
    with pytest.raises(ConfigError, match="expected a CSV file"):
        load_table(tmp_path)


def test_table_may_have_a_bom_and_crlf(tmp_path: Path) -> None:
    """A spreadsheet's export is read as it is; a single measured point is a table of one."""
    table = load_table(_table(tmp_path, "\ufeffcached,bsz,ms\r\n0,1,5\r\n"))
    assert (table.cached, table.new, table.seconds) == ((0,), (1,), ((0.005,),))
