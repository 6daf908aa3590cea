"""What a scheduler believes of attention times: the formula through a fit to profiled points.

Pure. A request is bound by the FLOPs of its attention or by the KV bytes that it reads, and hardware reaches the
two theoretical times to different degrees. The prediction for a batch is ::

    fixed + sum over its requests of max(a x seconds by FLOPs, b x seconds by bytes)

which grows with every token, as cutting a request to a quota needs. The coefficients, none negative, make the sum
of squared *relative* errors least: a chunk of ten milliseconds matters as much as one of a hundred.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .costmodel import Batch, CostModel

__all__ = ["LEAST_POINTS", "Point", "Predictor", "fit"]

Point = tuple[int, int, float]
"""(cached, new) tokens of a request, and the seconds that its attention took in all layers."""

LEAST_POINTS = 4
"""Of three coefficients: with fewer there would be nothing that they could fail to fit."""


@dataclass(frozen=True)
class Predictor:
    """Attention times, all layers, in model seconds.

    ``flop_factor`` and ``byte_factor``: seconds per theoretical second. ``mean_error`` and ``max_error``:
    |predicted - taken| / taken over points that the fit had not seen.
    """

    costs: CostModel
    fixed_s: float
    flop_factor: float
    byte_factor: float
    mean_error: float = math.nan
    max_error: float = math.nan

    def attention_s(self, batch: Batch) -> float:
        """Predicted seconds of attention in all layers of a prefill forward; the fixed part for an empty batch."""
        layer_s = 0.0
        for cached, new in batch:
            flops_s, bytes_s = self.costs.attention_bounds_s(cached, new)
            layer_s += max(self.flop_factor * flops_s, self.byte_factor * bytes_s)
        return self.fixed_s + self.costs.shape.layers * layer_s


def fit(points: Sequence[Point], held_out: Sequence[Point], costs: CostModel) -> Predictor:
    """The predictor that fits ``points`` best, with its errors on ``held_out``.

    A bound that none of the points is bound by keeps the theory's factor 1. ValueError for too few points (at
    least ``LEAST_POINTS``, and one held out) and for a time that is not positive and finite.
    """
    if len(points) < LEAST_POINTS or not held_out:
        raise ValueError(
            f"{len(points)} points and {len(held_out)} held out: expected {LEAST_POINTS} and 1 at the least"
        )
    for cached, new, seconds in (*points, *held_out):
        if not 0 < seconds < math.inf:
            raise ValueError(f"cached={cached}, new={new}: {seconds} s: expected a positive time")
    rows = np.array([_features(costs, cached, new) for cached, new, _ in points])
    taken = np.array([seconds for *_, seconds in points])
    coefficients = _least_squares(rows / taken[:, None])
    seen = np.count_nonzero(rows, axis=0)
    fixed_s, flop_factor, byte_factor = (float(c) if s else 1.0 for c, s in zip(coefficients, seen, strict=True))
    unjudged = Predictor(costs, fixed_s, flop_factor, byte_factor)
    errors = [abs(unjudged.attention_s([(c, n)]) - seconds) / seconds for c, n, seconds in held_out]
    return Predictor(costs, fixed_s, flop_factor, byte_factor, math.fsum(errors) / len(errors), max(errors))


def _features(costs: CostModel, cached: int, new: int) -> tuple[float, float, float]:
    """What the coefficients multiply: 1, and the theoretical seconds of whichever binds, of all layers."""
    flops_s, bytes_s = (costs.shape.layers * bound for bound in costs.attention_bounds_s(cached, new))
    return (1.0, flops_s, 0.0) if flops_s >= bytes_s else (1.0, 0.0, bytes_s)


def _least_squares(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Coefficients, none negative, with which the rows come nearest to 1: negative ones are left out in turn."""
    coefficients = np.zeros(rows.shape[1])
    kept = np.flatnonzero(np.count_nonzero(rows, axis=0))
    while True:
        solution = np.linalg.lstsq(rows[:, kept], np.ones(len(rows)), rcond=None)[0]
        if (solution >= 0).all():
            coefficients[kept] = solution
            return coefficients
        kept = np.delete(kept, solution.argmin())
