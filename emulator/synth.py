"""Workloads made from a seed, for when there is no trace: the paper's agents, and two extremes.

Pure: the same arguments give the same workload. Nothing here is a recording; what is imitated, and how well,
is said at each function and held by tests.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from .errors import ConfigError
from .workload import MAX_REQUESTS, Stream, Trajectory, Turn, Workload, seed_of

__all__ = ["AGENTIC_SETS", "AgenticSet", "synth_agentic", "synth_hbm_bound", "synth_io_bound"]

FIRST_PROMPT = 4_000
"""Mean tokens of a first prompt: task and tools (the study of the paper's numbers, lesson 1)."""

FIRST_SIGMA = 0.3
ROUND_SIGMA = 0.8
"""Spread of first prompts between trajectories, and of round sizes inside one. Nobody published either."""


class AgenticSet(msgspec.Struct, frozen=True):
    """One of the paper's three sets of trajectories: its published means, and what reproduces them.

    ``turns`` to ``context``: the published means (tokens). ``round_append`` and ``round_gen``: mean tokens of
    a round after the first over trajectories, ``sigma``: spread of the log of a trajectory's round size,
    ``early``: the share of trajectories that stop before MaxLen. These four are fitted so that 20,000
    synthetic trajectories have the published means (all within 2 %); sigma and early come out where the
    study of the paper's numbers puts them (0.6 to 0.7, about a quarter).
    """

    turns: float
    append: float
    gen: float
    total: float
    context: float
    round_append: float
    round_gen: float
    sigma: float
    early: float


AGENTIC_SETS: dict[int, AgenticSet] = {
    32_768: AgenticSet(60, 608, 148, 28_639, 17_183, 471.6, 148.1, 0.617, 0.253),
    49_152: AgenticSet(106, 474, 172, 42_607, 25_120, 383.5, 172.0, 0.639, 0.267),
    65_536: AgenticSet(157, 429, 176, 55_958, 32_721, 358.1, 175.7, 0.684, 0.299),
}
"""By MaxLen in tokens."""


def synth_agentic(seed: int, trajectories: int, max_len: int = 65_536, scale: float = 1.0) -> Workload:
    """Agents of the paper's set for ``max_len``, every length (MaxLen too) multiplied by ``scale``.

    A trajectory has a round size of its own, lognormal over trajectories, so that small rounds make many
    turns; its rounds spread around that size. It ends where the next round would pass MaxLen, or, for a
    share of the trajectories, at a random earlier length.
    Raises ConfigError for a ``max_len`` that is none of the published sets, or bad counts and scales.
    """
    _counts(trajectories, 1)
    if max_len not in AGENTIC_SETS:
        raise ConfigError(f"max_len {max_len}: expected one of the published sets, {list(AGENTIC_SETS)}")
    if not 0 < scale <= 1:
        raise ConfigError(f"scale {scale}: expected more than 0 and at most 1")
    like = AGENTIC_SETS[max_len]
    _counts(trajectories, math.ceil(like.turns))
    limit = int(max_len * scale)
    rng = np.random.default_rng([seed, max_len])
    made = []
    for index in range(trajectories):
        size = scale * _lognormal(rng, like.sigma)
        first = scale * FIRST_PROMPT * _lognormal(rng, FIRST_SIGMA)
        end = limit if rng.random() >= like.early else rng.uniform(first, max(first, limit))
        made.append(
            _trajectory(rng, f"agent{index}", seed, first, (size * like.round_append, size * like.round_gen), end)
        )
    return Workload(tuple(made), f"agentic-{max_len}-x{scale:g}-seed{seed}")


def synth_io_bound(
    seed: int,
    trajectories: int,
    turns: int,
    *,
    first_prompt: tuple[int, int] = (32_768, 34_816),
    append: tuple[int, int] = (64, 200),
    gen: tuple[int, int] = (4, 16),
) -> Workload:
    """Agents that read much and compute little: long contexts from the first prompt on, short rounds.

    Lengths are uniform over the given ranges, both ends included. Meant for a warm store (first prompts'
    blocks committed before the clock starts), so that all but about one append of every context is read.
    Raises ConfigError for counts below one and for empty ranges.
    """
    _counts(trajectories, turns)
    _ranges(first_prompt=first_prompt, append=append, gen=gen)
    rng = np.random.default_rng([seed, 0x10B])
    made = []
    for index in range(trajectories):
        context, rounds = 0, []
        for turn in range(turns):
            prompt = context + _uniform(rng, append if turn else first_prompt)
            rounds.append(_round(turn, prompt, _uniform(rng, gen)))
            context = rounds[-1].total_tokens
        made.append(_of_rounds(f"agent{index}", seed, rounds))
    return Workload(tuple(made), f"io-bound-seed{seed}")


def synth_hbm_bound(
    seed: int,
    trajectories: int,
    turns: int,
    *,
    first_prompt: tuple[int, int] = (76_000, 80_000),
    append: tuple[int, int] = (64, 200),
    long_append: tuple[int, int] = (1_500, 2_500),
    long_share: float = 0.25,
    gen: tuple[int, int] = (2, 8),
) -> Workload:
    """Agents whose contexts are so long that few fit a GPU whole, most appends short and some a whole file.

    All GPUs of an expert-parallel group step together, so that a forward with a long append holds up all; what
    has been read for the others meanwhile waits for the next forward, and can only join it where HBM has room.
    Lengths are uniform over the given ranges, both ends included; of the turns after the first, ``long_share``
    take ``long_append``. Meant for a warm store. Raises ConfigError for counts below one, for empty ranges, and
    for a share beyond 0 to 1.
    """
    _counts(trajectories, turns)
    _ranges(first_prompt=first_prompt, append=append, long_append=long_append, gen=gen)
    if not 0 <= long_share <= 1:
        raise ConfigError(f"long_share {long_share}: expected 0 to 1")
    rng = np.random.default_rng([seed, 0x4B])
    made = []
    for index in range(trajectories):
        context, rounds = 0, []
        for turn in range(turns):
            span = first_prompt
            if turn:
                span = long_append if rng.random() < long_share else append
            rounds.append(_round(turn, context + _uniform(rng, span), _uniform(rng, gen)))
            context = rounds[-1].total_tokens
        made.append(_of_rounds(f"agent{index}", seed, rounds))
    return Workload(tuple(made), f"hbm-bound-seed{seed}")


def _round(turn: int, prompt_tokens: int, output_tokens: int) -> Turn:
    try:
        return Turn(prompt_tokens, output_tokens, arrival_s=None if turn else 0.0)
    except ValueError as error:
        raise ConfigError(f"turns: of turn {turn + 1}, {error}; expected fewer or shorter ones") from None


def _ranges(**ranges: tuple[int, int]) -> None:
    for name, (low, high) in ranges.items():
        if not 1 <= low <= high:
            raise ConfigError(f"{name} {low} to {high}: expected 1 <= low <= high")


def _uniform(rng: np.random.Generator, span: tuple[int, int]) -> int:
    return int(rng.integers(*span, endpoint=True))


def _counts(trajectories: int, turns: int) -> None:
    for name, value in (("trajectories", trajectories), ("turns", turns)):
        if value < 1:
            raise ConfigError(f"{name} {value}: expected 1 or more")
    if trajectories * turns > MAX_REQUESTS:
        raise ConfigError(
            f"trajectories {trajectories}: of {turns} turns each, {trajectories * turns} requests: expected at"
            f" most {MAX_REQUESTS}"
        )


def _lognormal(rng: np.random.Generator, sigma: float) -> float:
    """A lognormal factor of mean 1."""
    return math.exp(sigma * rng.standard_normal() - sigma * sigma / 2)


def _trajectory(
    rng: np.random.Generator, name: str, seed: int, first: float, round_size: tuple[float, float], end: float
) -> Trajectory:
    append, gen = round_size
    rounds: list[Turn] = []
    context = 0
    while True:
        new = first if not rounds else append * _lognormal(rng, ROUND_SIGMA)
        prompt = context + max(1, round(new))
        turn = Turn(prompt, max(1, round(gen * _lognormal(rng, ROUND_SIGMA))), arrival_s=None if rounds else 0.0)
        if rounds and turn.total_tokens > end:
            return _of_rounds(name, seed, rounds)
        rounds.append(turn)
        context = turn.total_tokens


def _of_rounds(name: str, seed: int, rounds: list[Turn]) -> Trajectory:
    """All rounds cut from one stream of the trajectory's own."""
    stream = Stream((rounds[-1].total_tokens,), (seed_of("synth", name, seed),))
    return Trajectory(name, tuple(rounds), (stream,))
