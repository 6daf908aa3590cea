"""Trajectories are cuts through streams: what is shared, what arrives when, what is cut, what would hit."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator.errors import ConfigError
from emulator.workload import (
    MAX_CONTEXT,
    MAX_WAIT_S,
    VOCABULARY,
    Stream,
    Trajectory,
    Turn,
    Workload,
    block_seeds,
    closed_loop,
    cut,
    decode,
    encode,
    infinite_cache,
    open_loop,
    seed_of,
    workload_stats,
)

from .within import assert_within

SEEDS = st.integers(0, 2**64 - 1)
STREAMS = st.lists(st.tuples(st.integers(1, 200), SEEDS), min_size=1, max_size=12).map(
    lambda spans: Stream(tuple(length for length, _ in spans), tuple(seed for _, seed in spans))
)


def agent(name: str, *rounds: tuple[int, int], seed: int | None = None, think_s: float = 0.0) -> Trajectory:
    """A trajectory of (append, output) rounds on one stream."""
    turns: list[Turn] = []
    context = 0
    for append, output in rounds:
        turns.append(Turn(context + append, output, think_s, arrival_s=None if turns else 0.0))
        context = turns[-1].total_tokens
    return Trajectory(name, tuple(turns), (Stream((context,), (seed_of(name) if seed is None else seed,)),))


AGENTS = st.lists(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 150)), min_size=1, max_size=5), min_size=1, max_size=5
).map(lambda all_rounds: Workload(tuple(agent(f"a{at}", *rounds) for at, rounds in enumerate(all_rounds)), "made"))


@given(STREAMS, st.data())
@settings(deadline=None)
def test_any_cut_of_a_stream_is_that_part_of_the_whole(stream: Stream, data: st.DataObject) -> None:
    """``tokens(a, b)`` equals ``tokens(0, end)[a:b]``, as uint32 below the vocabulary."""
    whole = stream.tokens(0, len(stream))
    start = data.draw(st.integers(0, len(stream)))
    stop = data.draw(st.integers(start, len(stream)))
    part = stream.tokens(start, stop)
    assert part.dtype == np.uint32
    assert np.array_equal(part, whole[start:stop])
    assert whole.max() < VOCABULARY


@given(SEEDS, st.integers(0, 100), st.integers(0, 100), st.integers(1, 64))
@settings(deadline=None)
def test_equal_seeds_give_equal_tokens_wherever_the_span_lies(
    seed: int, before: int, other: int, length: int
) -> None:
    """A span's tokens depend on its seed and on nothing before it."""
    first = Stream((before + 1, length), (1, seed)).tokens(before + 1, before + 1 + length)
    second = Stream((other + 1, length), (2, seed)).tokens(other + 1, other + 1 + length)
    assert np.array_equal(first, second)


def test_different_seeds_give_unrelated_tokens_spread_over_the_vocabulary() -> None:
    """Tokens of neighbouring block ids agree as rarely as random ones do, and use the whole vocabulary."""
    seeds = block_seeds("session", range(1000))
    tokens = Stream((64,) * 1000, seeds).tokens(0, 64_000).astype(np.int64)
    assert len(set(seeds)) == 1000
    assert np.count_nonzero(tokens[64:] == tokens[:-64]) < 10
    assert_within(float(tokens.mean()), VOCABULARY / 2, rel=0.01, what="mean token")


def test_ids_of_two_scopes_are_different_blocks() -> None:
    """A local id means nothing outside its session; a global one is the same everywhere."""
    assert block_seeds("one", [7]) != block_seeds("two", [7])
    assert block_seeds("", [7]) == block_seeds("", [7])


@given(AGENTS)
@settings(deadline=None)
def test_a_prompt_contains_what_its_predecessors_were_given_and_generated(workload: Workload) -> None:
    """Turn i + 1's prompt begins with turn i's prompt and output."""
    for trajectory in workload.trajectories:
        for index in range(len(trajectory.turns) - 1):
            context = np.concatenate([trajectory.prompt(index), trajectory.output(index)])
            assert np.array_equal(context, trajectory.context(index))
            assert np.array_equal(trajectory.prompt(index + 1)[: len(context)], context)


@given(AGENTS)
@settings(deadline=None)
def test_a_workload_survives_encoding(workload: Workload) -> None:
    """decode(encode(w)) == w."""
    assert decode(encode(workload)) == workload


@given(st.binary(max_size=60))
@settings(deadline=None)
def test_what_is_no_workload_is_refused(data: bytes) -> None:
    """Decoding anything else is a ConfigError."""
    with pytest.raises(ConfigError, match="not an encoded workload"):
        decode(data)


@given(AGENTS, st.integers(1, 1200))
@settings(deadline=None)
def test_cutting_keeps_exactly_the_turns_before_the_first_too_long(workload: Workload, max_len: int) -> None:
    """Every kept context fits; the next one does not; what starts too long is left out and counted."""
    short, left_out = cut(workload, max_len)
    kept = {trajectory.id: trajectory for trajectory in short.trajectories}
    assert left_out == len(workload.trajectories) - len(kept)
    for trajectory in workload.trajectories:
        fitting = list(itertools.takewhile(lambda turn: turn.total_tokens <= max_len, trajectory.turns))
        assert list(kept[trajectory.id].turns if trajectory.id in kept else ()) == fitting


@given(AGENTS, st.integers(1, 12), st.integers(0, 3))
@settings(deadline=None)
def test_a_closed_loop_starts_as_many_agents_as_asked_at_once(workload: Workload, agents: int, seed: int) -> None:
    """First turns arrive at 0, later ones follow; repeats come behind a round of their own and share no block."""
    loop = closed_loop(workload, agents, seed)
    assert loop == closed_loop(workload, agents, seed)
    assert len(loop.trajectories) == agents
    originals = len(workload.trajectories)
    for index, trajectory in enumerate(loop.trajectories):
        assert [turn.arrival_s for turn in trajectory.turns] == [0.0] + [None] * (len(trajectory.turns) - 1)
        like = workload.trajectories[index % originals]
        if index < originals:
            assert trajectory.id == like.id
            continue
        first, *rest = trajectory.turns
        assert [turn.prompt_tokens - first.total_tokens for turn in rest] == [t.prompt_tokens for t in like.turns]
        both = Workload((like, trajectory))
        assert infinite_cache(both, 4).hit_tokens[1][0] == 0
        last = len(rest)
        assert np.array_equal(trajectory.context(last)[first.total_tokens :], like.context(last - 1))


@given(
    st.lists(st.sampled_from(["a", "a~1", "a~1~", "a~2", "~1", ""]), unique=True, min_size=1), st.integers(1, 30)
)
def test_repeats_have_names_that_no_trajectory_has(names: list[str], agents: int) -> None:
    """Whatever the trajectories of a trace are called, a closed loop of any size has distinct ids."""
    looped = closed_loop(Workload(tuple(agent(name, (3, 1)) for name in names)), agents)
    assert len({trajectory.id for trajectory in looped.trajectories}) == agents


def test_repeats_are_cut_at_max_len_again() -> None:
    """The round before a repeat must not push its contexts past MaxLen."""
    loop = closed_loop(Workload((agent("a", (100, 10), (50, 10), (30, 10)),)), 4, max_len=210)
    assert max(turn.total_tokens for t in loop.trajectories for turn in t.turns) <= 210
    assert len(loop.trajectories[0].turns) == 3


def test_an_open_loop_is_a_poisson_process() -> None:
    """Starts rise from 0; gaps have the asked mean and an exponential's spread; the seed decides."""
    workload = Workload(tuple(agent(f"a{at}", (1, 1)) for at in range(4000)))
    starts = [t.turns[0].arrival_s for t in open_loop(workload, 0.5, seed=1).trajectories]
    gaps = np.diff(np.array(starts, dtype=float), prepend=0.0)
    assert gaps.min() >= 0
    assert_within(float(gaps.mean()), 2.0, rel=0.05, what="mean gap")
    assert_within(float(gaps.std()), 2.0, rel=0.1, what="spread of gaps")
    assert starts != [t.turns[0].arrival_s for t in open_loop(workload, 0.5, seed=2).trajectories]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 12), st.integers(1, 40))
def test_a_loop_of_too_many_requests_is_refused_before_any_is_made(
    turns: list[int], agents: int, limit: int
) -> None:
    """Exactly the loops beyond the limit are refused."""
    load = Workload(tuple(agent(f"a{at}", *[(3, 1)] * count) for at, count in enumerate(turns)))
    whole = closed_loop(load, agents).requests
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("emulator.workload.MAX_REQUESTS", limit)
        if whole <= limit:
            assert closed_loop(load, agents).requests == whole
        else:
            with pytest.raises(ConfigError, match=f"agents {agents}: {whole} requests.* at most {limit}"):
                closed_loop(load, agents)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda w: closed_loop(w, 0), "agents 0"),
        (lambda w: closed_loop(w, 10**9), "agents 1000000000: 1999999999 requests"),
        (lambda w: open_loop(w, 0.0), "aps 0.0"),
        (lambda w: open_loop(w, float("nan")), "aps nan"),
        (lambda w: open_loop(w, float("inf")), "aps inf"),
        (lambda w: open_loop(w, 1e-9), "aps 1e-09: the last of 1 agents"),
        (lambda w: open_loop(w, 5e-324), "aps 5e-324: the last of 1 agents"),
        (lambda w: closed_loop(Workload((agent("b", (MAX_CONTEXT - 1, 1)),)), 2), "agents 2: trajectory b~1"),
        (lambda w: cut(w, 0), "max_len 0"),
        (lambda w: closed_loop(msgspec.structs.replace(w, trajectories=()), 1), "no trajectories"),
        (lambda w: workload_stats(Workload(())), "no trajectories"),
        (lambda w: closed_loop(cut(w, 64)[0], 2, max_len=64), "starts with 65 tokens"),
    ],
)
def test_impossible_arrivals_are_refused(act: Any, said: str) -> None:
    """A mistake is one line that names the value."""
    with pytest.raises(ConfigError, match=said):
        act(Workload((agent("a", (60, 1)),)))


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Turn(0, 1),
        lambda: Turn(1, -1),
        lambda: Turn(MAX_CONTEXT, 1),
        lambda: Turn(1, 1, think_s=-1.0),
        lambda: Turn(1, 1, think_s=float("nan")),
        lambda: Turn(1, 1, arrival_s=float("inf")),
        lambda: Turn(1, 1, think_s=1.1 * MAX_WAIT_S),
        lambda: Turn(1, 1, arrival_s=1e300),
        lambda: agent("a", (1, 1), (1, 1), (1, 1), think_s=0.4 * MAX_WAIT_S),
        lambda: Stream((0,), (1,)),
        lambda: Stream((1,), ()),
        lambda: Stream((1,), (2**64,)),
        lambda: Stream((10**30,), (1,)),
        lambda: Stream((2**62, 2**62, 2**62), (1, 2, 3)),
        lambda: Trajectory("a", (), (Stream((1,), (1,)),)),
        lambda: Trajectory("a", (Turn(2, 0),), (Stream((1,), (1,)),)),
        lambda: Trajectory("a", (Turn(1, 0, stream=1),), (Stream((1,), (1,)),)),
        lambda: Workload((agent("a", (1, 1)), agent("a", (2, 1)))),
    ],
)
def test_values_are_checked_where_they_are_built(bad: Any) -> None:
    """No trajectory exists that could not be replayed."""
    with pytest.raises(ValueError, match=r"."):
        bad()


def _brute_force(workload: Workload, block: int, warm: bool) -> tuple[list[list[int]], int]:
    """Hits by comparing whole prefixes, which is what blocks with chained keys stand for."""
    known: set[bytes] = set()
    hits: list[list[int]] = [[] for _ in workload.trajectories]

    def add(tokens: Any) -> None:
        known.update(tokens[: (at + 1) * block].tobytes() for at in range(len(tokens) // block))

    if warm:
        for trajectory in workload.trajectories:
            add(trajectory.prompt(0))
    for turn in range(max(len(t.turns) for t in workload.trajectories)):
        for index, trajectory in enumerate(workload.trajectories):
            if turn < len(trajectory.turns):
                prompt = trajectory.prompt(turn)
                full = (len(prompt) - 1) // block
                hit = 0
                while hit < full and prompt[: (hit + 1) * block].tobytes() in known:
                    hit += 1
                hits[index].append(hit * block)
                add(trajectory.context(turn))
    return hits, len(known) * block


@given(AGENTS, st.booleans(), st.sampled_from([1, 16, 64]))
@settings(deadline=None)
def test_an_infinite_cache_hits_what_comparing_whole_prefixes_says(
    workload: Workload, warm: bool, block: int
) -> None:
    """Marks and bisection find the same hits and the same distinct blocks as brute force, shared prefixes too."""
    twin = msgspec.structs.replace(workload.trajectories[0], id="twin")
    workload = Workload((*workload.trajectories, twin))
    cache = infinite_cache(workload, block, warm)
    hits, distinct = _brute_force(workload, block, warm)
    assert [list(each) for each in cache.hit_tokens] == hits
    assert cache.distinct_tokens == distinct


def test_statistics_of_a_workload_worked_by_hand() -> None:
    """Means over trajectories of means over turns; context over requests; hits in whole blocks."""
    workload = Workload((agent("a", (100, 28), (72, 56)), agent("b", (64, 0))))
    stats = workload_stats(workload)
    assert (stats.trajectories, stats.requests, stats.turns) == (2, 3, 1.5)
    assert stats.append == ((100 + 72) / 2 + 64) / 2
    assert stats.gen == ((28 + 56) / 2 + 0) / 2
    assert stats.total == (256 + 64) / 2
    assert stats.context == (100 + 200 + 64) / 3
    assert (stats.hit_tokens, stats.distinct_tokens, stats.max_total) == (128, 256 + 64, 256)
    assert stats.hit_ratio == 128 / 364
