"""What the emulated GPUs really take: the cost model's times, off by a few per cent that no formula knows.

Pure. A scheduler that predicted with the very formula that is slept would always be right, and nothing would show
what its errors cost. So attention of a request takes ::

    formula x (1 + deviation x w(log2(1 + cached), log2(new))),      -1 <= w <= 1

where w is the mean of a few plane waves of seeded directions, lengths and phases: smooth, the same for the same
seed in every process, and known to nobody but this module. Everything else takes what the cost model says.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from .costmodel import Batch, CostModel

__all__ = ["Hardware"]

_WAVES = 3
_OCTAVES = (6.0, 24.0)
"""Shortest and longest wave, in doublings of a token count: kernels change with sizes, not from token to token."""


@dataclass(frozen=True)
class Hardware:
    """Times of one engine's passes as they happen, in model seconds. ``deviation`` 0 is the formula, to the
    bit."""

    costs: CostModel
    seed: int
    deviation: float = 0.04

    def __post_init__(self) -> None:
        if not 0 <= self.deviation < 1:
            raise ValueError(f"deviation {self.deviation}: expected 0 to 1")

    def attention_layer_s(self, batch: Batch) -> float:
        """Seconds of one layer's attention of a prefill forward over ``batch``; ConfigError outside of a table."""
        return sum(
            self.costs.attention_layer_s([(cached, new)]) * (1 + self.deviation * self._off(cached, new))
            for cached, new in batch
        )

    def rest_layer_s(self, tokens: float) -> float:
        """Seconds of everything else of one layer; see ``CostModel.rest_layer_s``."""
        return self.costs.rest_layer_s(tokens)

    def decode_attention_s(self, contexts: Sequence[int]) -> float:
        """Seconds of attention in all layers of a decode step."""
        return self.costs.decode_attention_s(contexts)

    def decode_rest_s(self, tokens: float) -> float:
        """Seconds of everything else in all layers of a decode step; see ``CostModel.decode_rest_s``."""
        return self.costs.decode_rest_s(tokens)

    def _off(self, cached: int, new: int) -> float:
        u, v = math.log2(1 + cached), math.log2(new)
        return sum(math.sin(a * u + b * v + phase) for a, b, phase in self._waves) / _WAVES

    @cached_property
    def _waves(self) -> tuple[tuple[float, float, float], ...]:
        """(angle per doubling of cached, of new, phase) of each wave."""
        waves = []
        for index in range(_WAVES):
            digest = hashlib.blake2b(f"hardware {self.seed} {index}".encode(), digest_size=24).digest()
            length, direction, phase = (int.from_bytes(digest[at : at + 8]) / 2**64 for at in (0, 8, 16))
            shortest, longest = _OCTAVES
            angle = 2 * math.pi / (shortest * (longest / shortest) ** length)
            turn = 2 * math.pi * direction
            waves.append((angle * math.cos(turn), angle * math.sin(turn), 2 * math.pi * phase))
        return tuple(waves)
