"""Figures with their bounds: how every benchmark prints and judges what it measured."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Figure", "show"]


@dataclass(frozen=True)
class Figure:
    """One measured value. ``low`` and ``high`` are inclusive bounds; without either it is only printed."""

    name: str
    value: float
    unit: str
    low: float = -math.inf
    high: float = math.inf

    @property
    def holds(self) -> bool:
        return self.low <= self.value <= self.high

    @property
    def bound(self) -> str:
        """The bound as words, empty for a figure that has none."""
        if self.low > -math.inf and self.high < math.inf:
            return f"{self.low:g} to {self.high:g}"
        if self.low > -math.inf:
            return f">= {self.low:g}"
        return f"<= {self.high:g}" if self.high < math.inf else ""


def show(figures: Sequence[Figure], *, as_json: bool = False) -> int:
    """Print all figures; return 1 when any misses its bound, else 0."""
    if as_json:
        rows = [
            {"name": f.name, "value": f.value, "unit": f.unit, "bound": f.bound, "holds": f.holds} for f in figures
        ]
        print(json.dumps(rows, indent=1))
    else:
        width = max((len(f.name) for f in figures), default=0)
        for f in figures:
            verdict = "" if not f.bound else ("ok" if f.holds else "MISSED")
            print(f"{f.name:<{width}}  {f.value:>12.5g} {f.unit:<10} {f.bound:<18} {verdict}")
    missed = [f.name for f in figures if not f.holds]
    if missed:
        print(f"bounds missed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0
