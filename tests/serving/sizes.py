"""Memory in tokens: settings that give a buffer room for so many tokens of KV, exactly."""

from __future__ import annotations

from emulator.models.shape import load_shape

__all__ = ["gigabytes"]


def gigabytes(tokens: int) -> float:
    """Model gigabytes that hold all layers' KV of ``tokens`` tokens of the toy's shape."""
    shape = load_shape("toy")
    # A byte more: the setting is converted back by truncation.
    return (tokens * shape.layers * shape.kv_bytes + 1) / 1e9
