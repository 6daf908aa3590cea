"""Several queue pairs as one: a stream in parts, the marks of its tags, and how a segment is cut for them.

The GPUs of a tensor-parallel engine have a NIC each. A segment goes in as many parts as there are GPUs, each
over its own queue pair, and is in place when all of its parts are. Parts of different segments may overtake
one another, as queue pairs keep no order among themselves; so each has a tag of its own, and the first n
messages are there when the first n of every tag are. A part of no rows is sent all the same, since it is
counted there.
"""

from __future__ import annotations

from collections.abc import Sequence

import trio

from ..fabric.interface import Marks, Segment, WriteStream
from ..tensors import cut, stripes

__all__ = ["StripedMarks", "StripedStream", "Striper", "part_tag"]


def part_tag(tag: str, part: int) -> str:
    """The tag of one part of what is sent under ``tag``; none of none."""
    return f"{tag}/{part}" if tag else ""


class Striper:
    """Cuts segments by whole rows of ``row_bytes`` into ``parts``, which get equally many rows in the long run."""

    def __init__(self, parts: int, row_bytes: int) -> None:
        self._parts = parts
        self._row_bytes = row_bytes
        self._turn = 0

    def split(self, segment: Segment) -> list[Segment]:
        """The parts of ``segment``, in its order; one is empty where there are not enough rows."""
        rows, rest = divmod(segment.size_bytes, self._row_bytes)
        if rest:
            raise ValueError(f"a segment of {segment.size_bytes} bytes: expected whole rows of {self._row_bytes}")
        counts, self._turn = stripes(rows, self._parts, self._turn)
        sizes = [count * self._row_bytes for count in counts]
        pieces = zip(cut(segment.local, sizes), cut(segment.remote, sizes), strict=True)
        return [Segment(local, remote) for local, remote in pieces]


class StripedStream(WriteStream):
    """A stream whose segments are in place when they are on all of ``parts``."""

    def __init__(self, parts: Sequence[WriteStream]) -> None:
        self._parts = parts

    def release(self, upto: int, *, after_s: float = 0.0) -> None:
        for part in self._parts:
            part.release(upto, after_s=after_s)

    @property
    def placed(self) -> int:
        return min(part.placed for part in self._parts)

    def placed_s(self, upto: int) -> float:
        return max(part.placed_s(upto) for part in self._parts)

    async def wait_placed(self, upto: int) -> None:
        for part in self._parts:
            await part.wait_placed(upto)

    async def aclose(self) -> None:
        # At once: what is queued on one part is dropped while another's bytes are still on their way.
        async with trio.open_nursery() as nursery:
            for part in self._parts:
                nursery.start_soon(part.aclose)


class StripedMarks(Marks):
    """The receiver's view of a striped tag; ``parts`` are those of its parts' tags."""

    def __init__(self, parts: Sequence[Marks]) -> None:
        self._parts = parts

    @property
    def arrived(self) -> int:
        return min(part.arrived for part in self._parts)

    def arrived_s(self, count: int) -> float:
        return max(part.arrived_s(count) for part in self._parts)

    async def wait(self, count: int) -> None:
        for part in self._parts:
            await part.wait(count)

    def forget(self) -> None:
        for part in self._parts:
            part.forget()
