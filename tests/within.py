"""The one place for tolerances."""

from __future__ import annotations

__all__ = ["assert_within"]


def assert_within(
    got: float, expected: float, *, rel: float = 0.0, absolute: float = 0.0, what: str = "value"
) -> None:
    """``got`` differs from ``expected`` by at most ``rel`` of it plus ``absolute``; else say by how much."""
    allowed = abs(expected) * rel + absolute
    assert abs(got - expected) <= allowed, f"{what}: got {got!r}, expected {expected!r} +- {allowed!r}"
