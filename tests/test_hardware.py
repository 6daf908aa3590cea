"""Laws of what the emulated GPUs really take."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.costmodel import CostModel
from emulator.hardware import Hardware
from emulator.models.shape import bundled_shapes, load_shape

from .within import assert_within

COSTS = CostModel(load_shape("ds660b"))
SHAPES = st.sampled_from(bundled_shapes())
REQUEST = st.tuples(st.integers(0, 200_000), st.integers(1, 8192))
SEEDS = st.integers(0, 2**63 - 1)


@given(SHAPES, SEEDS, st.lists(REQUEST, max_size=5))
def test_without_deviation_it_is_the_formula(model: str, seed: int, batch: list[tuple[int, int]]) -> None:
    """To the bit, whatever the seed."""
    costs = CostModel(load_shape(model))
    assert Hardware(costs, seed, 0.0).attention_layer_s(batch) == costs.attention_layer_s(batch)


@given(SEEDS, st.floats(0, 0.5), st.lists(REQUEST, min_size=1, max_size=5))
def test_attention_deviates_within_its_bounds(seed: int, deviation: float, batch: list[tuple[int, int]]) -> None:
    """No request by more than the deviation, up or down; a batch takes the sum of its requests."""
    hardware = Hardware(COSTS, seed, deviation)
    for request in batch:
        formula = COSTS.attention_layer_s([request])
        assert_within(hardware.attention_layer_s([request]), formula, rel=deviation * (1 + 1e-9) + 1e-12)
    apart = sum(hardware.attention_layer_s([request]) for request in batch)
    assert_within(hardware.attention_layer_s(batch), apart, rel=1e-12)


@given(SEEDS, st.floats(0, 8192), st.lists(st.integers(1, 200_000), max_size=5))
def test_all_else_is_the_cost_models(seed: int, tokens: float, contexts: list[int]) -> None:
    """The rest of a prefill layer and all of decode do not deviate."""
    hardware = Hardware(COSTS, seed)
    assert hardware.rest_layer_s(tokens) == COSTS.rest_layer_s(tokens)
    assert hardware.decode_attention_s(contexts) == COSTS.decode_attention_s(contexts)
    assert hardware.decode_rest_s(tokens) == COSTS.decode_rest_s(tokens)


def _off(hardware: Hardware, cached: int, new: int) -> float:
    return hardware.attention_layer_s([(cached, new)]) / COSTS.attention_layer_s([(cached, new)]) - 1


@given(SEEDS, REQUEST, REQUEST)
def test_it_is_smooth(seed: int, one: tuple[int, int], other: tuple[int, int]) -> None:
    """Between two sizes it changes by no more than the shortest wave, of 6 doublings, would."""
    hardware = Hardware(COSTS, seed, 0.04)
    doublings = math.hypot(math.log2((1 + one[0]) / (1 + other[0])), math.log2(one[1] / other[1]))
    steepest = 0.04 * 2 * math.pi / 6
    assert_within(_off(hardware, *one), _off(hardware, *other), absolute=steepest * doublings + 1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_it_is_off_by_a_few_per_cent(seed: int) -> None:
    """No single factor mends it: over common sizes it spreads by more than the deviation."""
    hardware = Hardware(COSTS, seed, 0.04)
    off = [_off(hardware, 2**cached, 2**new) for cached in range(6, 18) for new in range(14)]
    assert max(off) - min(off) > 0.04


def test_a_seed_is_the_same_hardware_everywhere() -> None:
    """Another process with another hash seed times the same; another seed does not."""
    program = (
        "from emulator.costmodel import CostModel\n"
        "from emulator.hardware import Hardware\n"
        "from emulator.models.shape import load_shape\n"
        "print(Hardware(CostModel(load_shape('ds660b')), 5).attention_layer_s([(30000, 429)]).hex())\n"
    )
    elsewhere = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert float.fromhex(elsewhere) == Hardware(COSTS, 5).attention_layer_s([(30000, 429)])
    assert float.fromhex(elsewhere) != Hardware(COSTS, 6).attention_layer_s([(30000, 429)])


@pytest.mark.parametrize("deviation", [-0.01, 1.0, math.nan, math.inf])
def test_impossible_deviations_are_refused(deviation: float) -> None:
    """Times stay positive."""
    with pytest.raises(ValueError, match="expected 0 to 1"):
        Hardware(COSTS, 0, deviation)
