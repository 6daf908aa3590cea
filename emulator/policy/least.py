"""The least loaded engine, and the shorter read queue. Pure. Loads are counted in tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from .dualpath import shorter_queue
from .interface import Side

__all__ = ["EngineLoad", "choose_engine", "choose_path"]


class EngineLoad(msgspec.Struct, frozen=True):
    """An engine's unfinished requests (seq_e) and their total tokens (tok_e)."""

    engine: str
    requests: int
    tokens: int


def choose_engine(loads: Sequence[EngineLoad]) -> str:
    """The engine with the fewest unfinished tokens, then the fewest requests, then the first listed."""
    return min(enumerate(loads), key=lambda item: (item[1].tokens, item[1].requests, item[0]))[1].engine


def choose_path(read_queues: Mapping[Side, int], request: str, seed: int) -> Side:
    """The side whose node has the shorter disk read queue in tokens; a tie by a seeded hash of the request."""
    return shorter_queue(request, read_queues["pe"], read_queues["de"], seed)
