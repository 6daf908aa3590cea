"""How a prefill engine forms its next forward pass: first in, first out, up to a quota of attention time.

Pure. All GPUs of an expert-parallel group wait for each other before each layer's FFN, so what packing bounds is
the predicted *time* of attention, not the number of requests (paper: 300 ms, section 3). A request that would pass
the quota is cut, and later passes prefill its rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

__all__ = ["Packable", "pack"]

Shape = Sequence[tuple[int, int]]
"""(cached, new) tokens of each request of a pass."""


class Packable(msgspec.Struct, frozen=True):
    """A request ready for prefill: ``new`` tokens to compute on ``cached`` ones.

    ``hbm_tokens`` is the HBM that taking any of it needs now; 0 if it is resident already.
    """

    request: str
    cached: int
    new: int
    hbm_tokens: int


def pack(
    ready: Sequence[Packable],
    *,
    attention_s: Callable[[Shape], float],
    quota_s: float,
    batch_tokens: int,
    hbm_tokens: int,
) -> tuple[int, ...]:
    """How many new tokens of each leading request the next pass takes; those after the answer's end wait.

    Nobody is skipped. The request with which the predicted attention time would pass ``quota_s``, or the new
    tokens ``batch_tokens``, is cut to the most that fits and is the last. One of which not even a token fits, or
    whose ``hbm_tokens`` exceed what is left of that, ends the pass before it. The head gets a token at least
    where its HBM fits: with a quota below the time of its first token it would stop the engine for ever.

    ``attention_s`` grows with the tokens and adds up over requests, except that its value of an empty pass counts
    once. It is called once a request, and about log2(new) times more for the one that is cut.
    """
    taken: list[int] = []
    empty_s = attention_s(())
    for item in ready:
        if item.hbm_tokens > hbm_tokens:
            break
        new, time_s = _largest_chunk(item.cached, min(item.new, batch_tokens), attention_s, quota_s)
        if not new and taken:
            break
        taken.append(max(new, 1))
        if new < item.new:
            break
        quota_s -= time_s - empty_s
        batch_tokens -= new
        hbm_tokens -= item.hbm_tokens
    return tuple(taken)


def _largest_chunk(
    cached: int, most: int, attention_s: Callable[[Shape], float], room_s: float
) -> tuple[int, float]:
    """The most new tokens, up to ``most``, whose attention takes at most ``room_s``, and what it takes."""
    fits, fits_s, beyond = 0, 0.0, most + 1
    chunk = most
    while fits < chunk:
        time_s = attention_s([(cached, chunk)])
        if time_s <= room_s:
            fits, fits_s = chunk, time_s
        else:
            beyond = chunk
        chunk = (fits + beyond) // 2
    return fits, fits_s
