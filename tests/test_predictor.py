"""Laws of the attention predictor and of its fit."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.costmodel import CostModel
from emulator.hardware import Hardware
from emulator.models.shape import bundled_shapes, load_shape
from emulator.predictor import Predictor, fit

from .within import assert_within

COSTS = CostModel(load_shape("qwen32b"))
FACTOR = st.floats(0.5, 2.0)
REQUEST = st.tuples(st.integers(0, 200_000), st.integers(1, 8192))

BY_FLOPS = [(cached, new) for cached in (0, 1000, 30_000) for new in (1024, 4096)]
BY_BYTES = [(cached, new) for cached in (5000, 30_000, 100_000) for new in (1, 4)]
"""Far from where the bound changes, so that no factor in 0.5 to 2 moves a request to the other one."""


@given(st.floats(0, 0.1), FACTOR, FACTOR)
def test_what_the_model_can_say_is_found(fixed_s: float, flop_factor: float, byte_factor: float) -> None:
    """Times that are of the predictor's form give back their coefficients, without error."""
    true = Predictor(COSTS, fixed_s, flop_factor, byte_factor)
    points = [(*request, true.attention_s([request])) for request in BY_FLOPS + BY_BYTES]
    found = fit(points, [(2000, 2048, true.attention_s([(2000, 2048)]))], COSTS)
    assert_within(found.fixed_s, fixed_s, absolute=1e-9)
    assert_within(found.flop_factor, flop_factor, rel=1e-6)
    assert_within(found.byte_factor, byte_factor, rel=1e-6)
    assert_within(found.max_error, 0, absolute=1e-6)


@given(
    st.sampled_from(bundled_shapes()),
    st.floats(0, 0.1),
    FACTOR,
    FACTOR,
    st.lists(REQUEST, max_size=4),
    REQUEST,
    st.integers(1, 4000),
)
def test_predictions_add_up_and_grow(
    model: str,
    fixed_s: float,
    flop_factor: float,
    byte_factor: float,
    batch: list[tuple[int, int]],
    request_: tuple[int, int],
    more: int,
) -> None:
    """The fixed part counts once a batch; each request adds its own, and more the more tokens it has."""
    predictor = Predictor(CostModel(load_shape(model)), fixed_s, flop_factor, byte_factor)
    assert predictor.attention_s([]) == fixed_s
    own_s = predictor.attention_s([request_]) - fixed_s
    assert_within(
        predictor.attention_s([*batch, request_]), predictor.attention_s(batch) + own_s, rel=1e-9, absolute=1e-12
    )
    cached, new = request_
    assert predictor.attention_s([*batch, request_]) < predictor.attention_s([*batch, (cached, new + more)])
    assert predictor.attention_s([*batch, request_]) < predictor.attention_s([*batch, (cached + more, new)])


@given(st.integers(0, 2**63 - 1), st.floats(0, 0.2), st.sampled_from(bundled_shapes()))
def test_errors_are_those_of_points_not_seen(seed: int, deviation: float, model: str) -> None:
    """Mean and largest relative error over the held-out points, worked out again; no coefficient is negative."""
    costs = CostModel(load_shape(model))
    hardware = Hardware(costs, seed, deviation)

    def timed(cached: int, new: int) -> tuple[int, int, float]:
        return cached, new, costs.shape.layers * hardware.attention_layer_s([(cached, new)])

    held_out = [timed(cached, new) for cached in (700, 20_000) for new in (2, 90, 3000)]
    found = fit([timed(*request) for request in BY_FLOPS + BY_BYTES], held_out, costs)
    errors = [abs(found.attention_s([(c, n)]) / seconds - 1) for c, n, seconds in held_out]
    assert_within(found.mean_error, sum(errors) / len(errors), absolute=1e-12)
    assert_within(found.max_error, max(errors), absolute=1e-12)
    assert min(found.fixed_s, found.flop_factor, found.byte_factor) >= 0


def test_no_coefficient_becomes_negative() -> None:
    """Where the best fixed part would lie below zero there is none: an empty batch takes no less than no time."""
    points = [(c, n, COSTS.attention_s([(c, n)]) - 1e-5) for c, n in BY_FLOPS]
    found = fit(points, points[:1], COSTS)
    assert found.fixed_s == 0
    assert 0.5 < found.flop_factor < 1


def test_a_bound_that_was_not_profiled_keeps_the_theory() -> None:
    """Without a point bound by bytes there is nothing to learn of them."""
    points = [(c, n, 1.1 * COSTS.attention_s([(c, n)])) for c, n in BY_FLOPS]
    found = fit(points, points[:1], COSTS)
    assert found.byte_factor == 1.0
    assert_within(found.flop_factor, 1.1, rel=1e-9)


GOOD = [(0, 1024, 0.1), (0, 2048, 0.2), (5, 1024, 0.1), (9, 1, 0.2)]


@pytest.mark.parametrize(
    ("points", "held_out", "error"),
    [
        (GOOD[:3], GOOD[:1], "3 points and 1 held out: expected 4 and 1"),
        (GOOD, [], "4 points and 0 held out"),
        ([*GOOD, (7, 8, 0.0)], GOOD[:1], "cached=7, new=8: 0.0 s: expected a positive time"),
        (GOOD, [(7, 8, -1.0)], "cached=7, new=8: -1.0 s"),
        ([*GOOD, (7, 8, math.nan)], GOOD[:1], "cached=7, new=8: nan s"),
        (GOOD, [(7, 8, math.inf)], "cached=7, new=8: inf s"),
    ],
)
def test_points_that_say_nothing_are_refused(
    points: list[tuple[int, int, float]], held_out: list[tuple[int, int, float]], error: str
) -> None:
    """Too few to be wrong about, or times that no pass can take."""
    with pytest.raises(ValueError, match=error):
        fit(points, held_out, COSTS)
