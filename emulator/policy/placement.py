"""Placing one request after another on a group's DEs, without looking at all of them each time. Pure.

Theory of operation. An engine's *room* is how long a request may be that neither lifts it beyond the limit nor
exceeds its free HBM. Engines are kept in classes by the bits of their room, each in order of requests, then of
index. In a class above that of a request's length all have the room, so that the first will do; in its own class
the first that has is looked for, which is near the beginning unless most rooms fall short.

Where no room is left for a request, a heap by tokens serves. While requests are placed an engine's tokens only
grow, so what has changed since it was pushed is seen, and put right, when it comes to the top.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

from .interface import Load

__all__ = ["place"]


def place(engines: Sequence[Load], lengths: Sequence[int], limit: int) -> list[int]:
    """The indices of the engines that requests of ``lengths`` go to, one after the other, until one fits nowhere.

    Of the engines that a request would not lift beyond ``limit`` tokens, the one with the fewest requests; where
    it would lift all, the one with the fewest tokens. Always only of those that have HBM for the whole of it, and
    of equals the first. Lengths are positive.
    """
    n, shortest, top = len(engines), min(lengths, default=0), max(lengths, default=0).bit_length() + 1
    rooms = [min(limit - load.tokens, load.free_tokens) for load in engines]
    # A rank is load * n + index, which orders by load and then by index.
    ranks = [load.requests * n + at for at, load in enumerate(engines)]
    classes: list[list[int]] = [[] for _ in range(top + 1)]
    for rank in sorted(ranks):
        if rooms[rank % n] >= shortest:
            classes[min(rooms[rank % n].bit_length(), top)].append(rank)
    above = [classes[bits + 1 :] for bits in range(top)]
    beyond = max(ranks, default=0) + n * len(lengths) + 1
    by_tokens = _ByTokens(engines, rooms, shortest)
    answer: list[int] = []
    for length in lengths:
        bits = length.bit_length()
        rank, where = beyond, classes[bits]
        for ordered in above[bits]:
            if ordered and ordered[0] < rank:
                rank, where = ordered[0], ordered
        for able in classes[bits]:
            if able >= rank:
                break
            if rooms[able % n] >= length:
                rank, where = able, classes[bits]
                break
        if rank < beyond:
            at = rank % n
            room = rooms[at]
            del where[0 if where[0] == rank else bisect_left(where, rank)]
        else:
            found = by_tokens.first(length)
            if found is None:
                break
            at = found
            rank, room = ranks[at], rooms[at]
            if room >= shortest:
                where = classes[min(room.bit_length(), top)]
                del where[bisect_left(where, rank)]
        answer.append(at)
        rooms[at] = room = room - length
        ranks[at] = rank = rank + n
        if room >= shortest:
            bits = room.bit_length()
            insort(classes[bits if bits < top else top], rank)
    return answer


class _ByTokens:
    """Engines by tokens, then by index, while what is placed on them shrinks their rooms."""

    def __init__(self, engines: Sequence[Load], rooms: list[int], shortest: int) -> None:
        self._rooms = rooms
        self._shortest = shortest
        # With what is left of its room, these tell an engine's tokens and its free HBM.
        self._full = [load.tokens + room for load, room in zip(engines, rooms, strict=True)]
        self._spare = [load.free_tokens - room for load, room in zip(engines, rooms, strict=True)]
        self._heap = [self._rank(at) for at in range(len(engines))]
        heapify(self._heap)

    def first(self, length: int) -> int | None:
        """The engine with the fewest tokens of those with HBM for ``length``; None where there is none."""
        heap, n = self._heap, len(self._rooms)
        lacking: list[int] = []
        found = None
        while heap and found is None:
            at = heap[0] % n
            rank = self._rank(at)
            if heap[0] != rank:
                heapreplace(heap, rank)
            elif self._free(at) >= length:
                found = at
            else:
                lacking.append(heappop(heap))
        for rank in lacking:
            if self._free(rank % n) >= self._shortest:
                heappush(heap, rank)
        return found

    def _rank(self, at: int) -> int:
        return (self._full[at] - self._rooms[at]) * len(self._rooms) + at

    def _free(self, at: int) -> int:
        return self._rooms[at] + self._spare[at]
