"""Model quantities to emulated quantities and back.

Pure. Bytes shrink by ``shrink`` (model KV bytes per token and layer over emulated ones), seconds stretch by
``dilation``, rates fall by both; counts (layers, tokens, blocks, GPUs) stay. Fabrics and stores see
*payload* bytes (what is really moved and kept) and model seconds; every number a user reads is model bytes.
"""

from __future__ import annotations

from fractions import Fraction

import msgspec

__all__ = ["Scale"]


class Scale(msgspec.Struct, frozen=True):
    """How a run is scaled. ``dilation`` is wall seconds per model second; 1 in virtual time."""

    model_kv_bytes: int
    kv_bytes: int
    dilation: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.kv_bytes <= self.model_kv_bytes:
            raise ValueError(f"kv_bytes {self.kv_bytes}: expected 1 to {self.model_kv_bytes}, the model's own")
        if not 0 < self.dilation < float("inf"):
            raise ValueError(f"dilation {self.dilation}: expected a positive, finite number")

    @property
    def shrink(self) -> Fraction:
        """Model bytes per payload byte, exact."""
        return Fraction(self.model_kv_bytes, self.kv_bytes)

    def model_bytes(self, payload_bytes: int) -> int:
        """Model bytes of a payload made of whole KV entries; exact, or ValueError where it is not."""
        exact = payload_bytes * self.shrink
        if exact.denominator != 1:
            raise ValueError(f"{payload_bytes} payload bytes are no whole number of KV entries")
        return int(exact)

    def payload_bytes(self, model_bytes: int) -> int:
        """Whole payload bytes that stand for at most ``model_bytes``."""
        return int(model_bytes / self.shrink)

    def payload_rate(self, rate_bps: float) -> float:
        """Payload bytes per *model* second for a model rate in bytes/s."""
        return rate_bps / float(self.shrink)

    def emulated_rate(self, rate_bps: float) -> float:
        """Payload bytes per *wall* second for a model rate in bytes/s: what the kernel is given."""
        return self.payload_rate(rate_bps) / self.dilation
