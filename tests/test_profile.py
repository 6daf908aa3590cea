"""Laws of profiling."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.costmodel import CostModel, CostTable, load_costs, split_table
from emulator.errors import ConfigError
from emulator.hardware import Hardware
from emulator.models.shape import bundled_shapes, load_shape
from emulator.profile import CACHED, NEW, Profile, profile

from .within import assert_within

SNIC = 50e9


def _profile(model: str, deviation: float = 0.04, **changes: float) -> Profile:
    costs = CostModel(load_shape(model))
    return profile(costs, Hardware(costs, 0, deviation), snic_model_bps=SNIC, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", bundled_shapes())
def test_alpha_is_what_the_storage_nic_reads(model: str) -> None:
    """Tokens of 3 s at the NIC's rate, by the model's bytes a token; proportional to the seconds."""
    found = _profile(model)
    assert found.alpha_tokens == int(3 * SNIC / load_shape(model).kv_bytes_per_token)
    assert_within(_profile(model, alpha_s=6.0).alpha_tokens, 2 * found.alpha_tokens, absolute=1)


@given(
    st.sampled_from(bundled_shapes()),
    st.integers(0, 2**31),
    st.floats(0.001, 1.0),
    st.integers(1, 20_000),
    st.integers(0, 100_000),
    st.integers(1, 5000),
)
def test_beta_is_of_the_fullest_forward(
    model: str, seed: int, quota_s: float, batch_tokens: int, cached: int, append: int
) -> None:
    """As many requests as fit quota and tokens, not one more; whole prompts of that forward in 5 s."""
    costs = CostModel(load_shape(model))
    hardware = Hardware(costs, seed)
    found = profile(
        costs,
        hardware,
        snic_model_bps=SNIC,
        quota_s=quota_s,
        batch_tokens=batch_tokens,
        cached=cached,
        append=append,
    )
    batch = [(found.cached, found.append)] * found.requests
    layers = costs.shape.layers
    assert (found.cached, found.append) == (cached, min(append, batch_tokens))

    def fits(requests: int) -> bool:
        attention_s = layers * hardware.attention_layer_s(batch[:1]) * requests
        return attention_s <= quota_s * (1 + 1e-9) and requests * found.append <= batch_tokens

    assert found.requests == 1 or fits(found.requests)
    assert not fits(found.requests + 1)
    layer_s = hardware.attention_layer_s(batch) + hardware.rest_layer_s(found.requests * found.append)
    expected = 5 * found.requests * (found.cached + found.append) / (layers * layer_s)
    assert_within(found.beta_tokens, expected, rel=1e-9, absolute=1)


def test_the_papers_models_fill_differently() -> None:
    """Rounds of 429 on 32 K: DS 660B's forward is full by its attention, DS 27B's by its tokens."""
    large, small = _profile("ds660b"), _profile("ds27b")
    assert large.requests * 429 < 8192 - 429
    assert small.requests == 8192 // 429


@pytest.mark.parametrize("model", bundled_shapes())
def test_the_fit_is_as_wrong_as_the_hardware_is_strange(model: str) -> None:
    """Nothing to learn beyond the formula: no error. A deviation of 4 %: an error, and a smaller one."""
    plain = _profile(model, 0.0).predictor
    assert_within(plain.max_error, 0, absolute=1e-9)
    found = _profile(model)
    assert 0.001 < found.predictor.mean_error < 0.04 < 0.001 + 2 * 0.04
    assert found.predictor.mean_error < found.predictor.max_error < 2 * 0.04
    assert found.points == len(CACHED) * len(NEW)
    assert found.held_out == (len(CACHED) - 1) * (len(NEW) - 1)


def _measured(cached: tuple[int, ...], new: tuple[int, ...]) -> CostModel:
    """DS 27B with a table that the formula itself filled in."""
    formula = CostModel(load_shape("ds27b"))
    times = tuple(tuple(formula.shape.layers * formula.prefill_layer_s([(c, n)]) for n in new) for c in cached)
    table = CostTable("costs.csv", cached, new, times)
    return replace(formula, table=split_table(table, lambda *request: formula.attention_s([request])))


def test_a_measured_table_is_profiled_where_it_was_measured() -> None:
    """Inside of it alone, at its longest context where the usual one is beyond; the answer says so."""
    costs = _measured((0, 100, 1000, 10_000), (1, 64, 512, 4096, 8192))
    found = profile(costs, Hardware(costs, 0), snic_model_bps=SNIC)
    assert (found.cached, found.append) == (10_000, 429)
    full = _measured((0, 2048, 8192, 32_768, 131_072), (1, 64, 512, 4096, 8192))
    assert profile(full, Hardware(full, 0), snic_model_bps=SNIC).cached == 32_768


def test_a_table_too_small_to_profile_is_refused(tmp_path: Path) -> None:
    """One line with the table's name: no bsz for the forward, or too few rows to fit attention from."""
    for rows, error in (
        ("0,1,5\n0,100,6\n10,1,5\n10,100,7\n", r"costs\.csv: no time for cached=10, bsz=429"),
        ("0,1,5\n0,8192,5000\n", r"costs\.csv: too few rows to profile attention from"),
    ):
        path = tmp_path / "costs.csv"
        path.write_text("cached,bsz,ms\n" + rows)
        costs = load_costs(load_shape("ds27b"), path)
        with pytest.raises(ConfigError, match=error) as caught:
            profile(costs, Hardware(costs, 0), snic_model_bps=SNIC)
        assert "\n" not in caught.value.text
