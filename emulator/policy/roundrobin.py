"""Round robin: engines and read paths in turn, whatever their load. The paper's "DualPath loading" alone.

Pure. Everything follows from a request's place in the order of arrivals, so that no question's order, group or
load changes an answer: request n is for PE n mod P and for DE n mod D of P and D engines.

The path alternates from request to request too. With even P or D that alone would have every request of an engine
read on the same side for ever. So the alternation flips with each period, lcm(P, D) requests, after which engines
come in the same pairs again: in two periods each pair reads once on each side, and no prefix of the requests is
more than two ahead on one of them. (An odd period flips it by itself.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm

import msgspec

from .interface import Load, PolicySetup, Queued, Side, group_of

__all__ = ["RoundRobin"]


class RoundRobin(msgspec.Struct, frozen=True):
    """Equal numbers of requests for everybody."""

    setup: PolicySetup

    def assign_prefill(self, queue: Sequence[Queued], engines: Sequence[Load]) -> list[str]:
        """Until it is the turn of a PE of another group."""
        return _until_other(queue, self.setup.pe_engines, engines)

    def route_decode(self, queue: Sequence[Queued], groups: Mapping[str, int]) -> list[str]:
        """The group of the DE whose turn it is."""
        return [group_of(_turn(request, self.setup.de_engines)) for request in queue]

    def assign_decode(self, queue: Sequence[Queued], engines: Sequence[Load]) -> list[str]:
        """Until it is the turn of a DE of another group, which it never is in a queue routed as above."""
        return _until_other(queue, self.setup.de_engines, engines)

    def choose_path(self, request: Queued, pe_read_queue: int, de_read_queue: int) -> Side:
        """Each side in turn, shifted by one with each period of the engines."""
        period, place = divmod(request.sequence, lcm(len(self.setup.pe_engines), len(self.setup.de_engines)))
        return "de" if (period + place) % 2 else "pe"


def _turn(request: Queued, engines: Sequence[str]) -> str:
    return engines[request.sequence % len(engines)]


def _until_other(queue: Sequence[Queued], everybody: Sequence[str], offered: Sequence[Load]) -> list[str]:
    names = {load.engine for load in offered}
    answer: list[str] = []
    for request in queue:
        engine = _turn(request, everybody)
        if engine not in names:
            break
        answer.append(engine)
    return answer
