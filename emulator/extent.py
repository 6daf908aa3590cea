"""Extents: strided slices of a byte array, the unit of a gather or scatter list.

Pure. An extent stands for ``count`` runs of ``size`` bytes, ``stride`` bytes apart: the Layer Blocks of one
layer inside Full Blocks laid end to end are one extent. A list of extents is read and written in order.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = ["Extent", "gather", "scatter", "total_bytes"]

Bytes = npt.NDArray[np.uint8]


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """``count`` runs of ``size`` bytes from ``offset`` on, ``stride`` bytes from one's start to the next's."""

    offset: int
    size: int
    count: int = 1
    stride: int = 0

    def __post_init__(self) -> None:
        if self.offset < 0 or self.size <= 0 or self.count <= 0:
            raise ValueError(f"extent {self.offset}+{self.size}x{self.count}: offset >= 0, size and count > 0")
        if self.count > 1 and self.stride < self.size:
            raise ValueError(f"extent stride {self.stride} is below its size {self.size}: runs would overlap")

    @property
    def total(self) -> int:
        """Bytes the extent covers, gaps excluded."""
        return self.size * self.count

    @property
    def end(self) -> int:
        """First byte after the last run."""
        return self.offset + (self.count - 1) * self.stride + self.size

    @property
    def contiguous(self) -> bool:
        return self.count == 1 or self.stride == self.size


def total_bytes(extents: Sequence[Extent]) -> int:
    """Payload bytes of a list of extents."""
    return sum([e.size * e.count for e in extents])


def _window(memory: Bytes, e: Extent) -> Bytes:
    if e.end > memory.size:
        raise IndexError(f"extent ends at {e.end}, memory has {memory.size} bytes")
    if e.contiguous:
        row: Bytes = memory[e.offset : e.offset + e.total].reshape(1, e.total)
        return row
    # The constructor does what as_strided does in a tenth of the time: this is every layer message's path.
    runs: Bytes = np.ndarray((e.count, e.size), np.uint8, memory, e.offset, (e.stride, 1))
    return runs


def gather(memory: Bytes, extents: Sequence[Extent]) -> Bytes:
    """The bytes of ``extents`` of ``memory`` (uint8, one dimension), in order, as one contiguous array.

    A single contiguous extent comes back as a view of ``memory``, not a copy.
    """
    if len(extents) == 1:
        return np.ascontiguousarray(_window(memory, extents[0])).reshape(-1)
    out = np.empty(total_bytes(extents), dtype=np.uint8)
    at = 0
    for e in extents:
        out[at : at + e.total].reshape(-1, e.total if e.contiguous else e.size)[:] = _window(memory, e)
        at += e.total
    return out


def scatter(memory: Bytes, extents: Sequence[Extent], data: Bytes) -> None:
    """Write ``data`` (uint8, ``total_bytes(extents)`` long) into ``extents`` of ``memory``, in order."""
    if data.size != total_bytes(extents):
        raise ValueError(f"{data.size} bytes for extents of {total_bytes(extents)}")
    at = 0
    for e in extents:
        part = data[at : at + e.total]
        _window(memory, e)[:] = part.reshape(-1, e.total if e.contiguous else e.size)
        at += e.total
