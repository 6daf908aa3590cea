"""The paper's scheduling algorithm (section 3 there: both sides, and the read path).

Pure: the same question gets the same answer, and what the paper leaves to chance falls to the engine listed first.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from heapq import heapify, heapreplace
from itertools import accumulate
from math import floor

import msgspec

from .interface import Load, PolicySetup, Queued, Side
from .placement import place

__all__ = ["DualPath"]


class DualPath(msgspec.Struct, frozen=True):
    """Storage reads, compute and HBM balanced at once, by tokens."""

    setup: PolicySetup

    def assign_prefill(self, queue: Sequence[Queued], engines: Sequence[Load]) -> list[str]:
        """Each request to the least loaded PE whose node can soon read, else to the least loaded of the others.

        An engine with more than beta tokens gets nothing (C1). Those whose node has at most alpha tokens to read
        (C2) come before those with a longer queue (C3). The test comes before the request is added, so that one
        request may pass beta.
        """
        n, alpha, beta = len(engines), self.setup.alpha_tokens, self.setup.beta_tokens
        # tokens * n + index: the order of loads, and the engine listed first among equals.
        ranks = [load.tokens * n + at for at, load in enumerate(engines)]
        ready = [rank for rank, load in zip(ranks, engines, strict=True) if load.read_queue <= alpha]
        behind = [rank for rank, load in zip(ranks, engines, strict=True) if load.read_queue > alpha]
        names = [load.engine for load in engines]
        limit = (beta + 1) * n
        answer: list[str] = []
        heapify(ready)
        heapify(behind)
        for request in queue:
            heap = ready if ready and ready[0] < limit else behind
            if not heap or heap[0] >= limit:
                break
            rank = heap[0]
            answer.append(names[rank % n])
            heapreplace(heap, rank + request.prompt_tokens * n)
        return answer

    def route_decode(self, queue: Sequence[Queued], groups: Mapping[str, int]) -> list[str]:
        """Each request to the group with the fewest tokens, those that it has just been given included."""
        n, names = len(groups), list(groups)
        ranks = [tokens * n + at for at, tokens in enumerate(groups.values())]
        answer: list[str] = []
        heapify(ranks)
        for request in queue:
            rank = ranks[0]
            answer.append(names[rank % n])
            heapreplace(ranks, rank + (request.prompt_tokens + request.output_tokens) * n)
        return answer

    def assign_decode(self, queue: Sequence[Queued], engines: Sequence[Load]) -> list[str]:
        """The leading requests that the group's free HBM can hold, each to a DE with HBM for the whole of it.

        Of those that it would not lift beyond Z, the DE with the fewest requests; where it would lift all of them,
        the one with the fewest tokens. Where none has the HBM, it waits, and all behind it.
        """
        lengths = _fitting(queue, sum(load.free_tokens for load in engines))
        total = sum(lengths) + sum(load.tokens for load in engines)
        # Z is the decimal that it is written as, so that no engine passes its limit by a rounding error.
        limit = floor(Fraction(str(self.setup.z)) * total / max(len(engines), 1))
        return [engines[at].engine for at in place(engines, lengths, limit)]

    def choose_path(self, request: Queued, pe_read_queue: int, de_read_queue: int) -> Side:
        """The side whose node has the shorter read queue; a tie by a seeded hash of the request.

        A tie that always went to the PE would send every read of a lightly loaded cluster there.
        """
        if pe_read_queue != de_read_queue:
            return "pe" if pe_read_queue < de_read_queue else "de"
        digest = hashlib.blake2b(f"{self.setup.seed}:{request.request}".encode(), digest_size=1).digest()
        return "pe" if digest[0] & 1 else "de"


def _fitting(queue: Sequence[Queued], free_tokens: int) -> list[int]:
    """The lengths of the longest prefix of ``queue`` that fits."""
    lengths = [request.prompt_tokens + request.output_tokens for request in queue]
    return lengths[: bisect_right(list(accumulate(lengths)), free_tokens)]
