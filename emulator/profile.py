"""Profiling in advance: what a node reads and a GPU processes in the scheduler's seconds, and the attention fit.

Pure. The paper's scheduler compares queues in tokens with alpha and beta, which it calls profiled; this is how.
Compute times are the emulated hardware's, so the fit meets what no formula knows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from .costmodel import CostModel
from .errors import ConfigError
from .hardware import Hardware
from .predictor import Point, Predictor, fit

__all__ = ["CACHED", "NEW", "Profile", "profile"]

CACHED = (0, 512, 2048, 8192, 32768, 131072)
"""Cached tokens of the profiled requests."""

NEW = (1, 4, 16, 64, 256, 1024, 4096, 8192)
"""New tokens of the profiled requests."""


@dataclass(frozen=True)
class Profile:
    """What the scheduler of one deployment is told. Tokens are of whole prompts, cached ones included.

    ``alpha_tokens``: a node reads them in alpha_s. ``beta_tokens``: an engine processes them in beta_s, in
    forwards of ``requests`` requests of ``cached`` and ``append`` tokens each. ``points`` were timed for the
    fit.
    """

    alpha_tokens: int
    beta_tokens: int
    read_tokens_per_s: float
    gpu_tokens_per_s: float
    predictor: Predictor
    requests: int
    cached: int
    append: int
    points: int
    held_out: int


def profile(
    costs: CostModel,
    hardware: Hardware,
    *,
    snic_model_bps: float,
    alpha_s: float = 3.0,
    beta_s: float = 5.0,
    quota_s: float = 0.300,
    batch_tokens: int = 8192,
    cached: int = 32768,
    append: int = 429,
) -> Profile:
    """Profile an engine, and a node with storage NICs of ``snic_model_bps`` model bytes per second in all.

    beta is of forwards with as many requests of ``append`` new tokens behind ``cached`` (the paper's mean round at
    64K) as fit ``quota_s`` of attention and ``batch_tokens`` new tokens, at least one; what their exchanges with
    other GPUs take is not in it. Where a measured table ends before ``cached``, its longest context is taken, and
    where ``batch_tokens`` is less than ``append``, a chunk of that: the answer says which. ConfigError where a
    table covers too little to profile from.
    """
    measured = costs.table.attention if costs.table is not None else None
    if measured is not None:
        cached = min(cached, measured.cached[-1])
    append = min(append, batch_tokens)
    layers = costs.shape.layers
    attention_s = layers * hardware.attention_layer_s([(cached, append)])
    requests = max(1, min(int(quota_s / attention_s), batch_tokens // append))
    forward_s = requests * attention_s + layers * hardware.rest_layer_s(requests * append / costs.tensor_parallel)
    gpu_tokens_per_s = requests * (cached + append) / forward_s
    read_tokens_per_s = snic_model_bps / costs.shape.kv_bytes_per_token
    cached_axis = CACHED if measured is None else _within(CACHED, measured.cached)
    new_axis = NEW if measured is None else _within(NEW, measured.new)
    points = [_timed(hardware, layers, *size) for size in product(cached_axis, new_axis)]
    held_out = [_timed(hardware, layers, *size) for size in product(_between(cached_axis), _between(new_axis))]
    try:
        predictor = fit(points, held_out, costs)
    except ValueError as error:
        assert measured is not None, error
        raise ConfigError(f"{measured.source}: too few rows to profile attention from: {error}") from None
    return Profile(
        alpha_tokens=int(alpha_s * read_tokens_per_s),
        beta_tokens=int(beta_s * gpu_tokens_per_s),
        read_tokens_per_s=read_tokens_per_s,
        gpu_tokens_per_s=gpu_tokens_per_s,
        predictor=predictor,
        requests=requests,
        cached=cached,
        append=append,
        points=len(points),
        held_out=len(held_out),
    )


def _timed(hardware: Hardware, layers: int, cached: int, new: int) -> Point:
    return cached, new, layers * hardware.attention_layer_s([(cached, new)])


def _within(sizes: Sequence[int], measured: Sequence[int]) -> tuple[int, ...]:
    """The sizes inside of what was measured, and its ends."""
    low, high = measured[0], measured[-1]
    return tuple(sorted({low, high, *(size for size in sizes if low < size < high)}))


def _between(axis: Sequence[int]) -> tuple[int, ...]:
    """The geometric mean of each two neighbours, where a whole number lies between them."""
    means = (math.isqrt((low + 1) * high) for low, high in pairwise(axis))
    return tuple(mean for (low, high), mean in zip(pairwise(axis), means, strict=True) if low < mean < high)
