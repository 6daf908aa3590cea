"""DualPath decides as section 3 of the paper says, sentence by sentence, and the same each time."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from random import Random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from emulator.policy import Load, Policy, PolicySetup, Queued, make_policy

TOKENS = st.integers(1, 60)
LARGE = st.integers(0, 400)


def policy(alpha: int = 20, beta: int = 100, z: float = 1.05, seed: int = 0) -> Policy:
    return make_policy("dualpath", PolicySetup((), (), alpha, beta, z, seed))


def queue_of(rows: Sequence[tuple[int, int]]) -> list[Queued]:
    return [Queued(f"r{at}", at, prompt, output, 0) for at, (prompt, output) in enumerate(rows)]


QUEUES = st.lists(st.tuples(TOKENS, st.integers(0, 9)), max_size=25).map(queue_of)


@st.composite
def groups_of_engines(draw: st.DrawFn, free: st.SearchStrategy[int] = LARGE) -> list[Load]:
    """The engines of a group, whose load, read queue and HBM take few values so that ties are common."""
    few = st.integers(0, 4).map(lambda at: at * 30)
    rows = draw(st.lists(st.tuples(st.integers(0, 3), few, st.integers(0, 40), free), min_size=1, max_size=9))
    return [Load(f"n{at % 2}/{at}", f"n{at % 2}", *row) for at, row in enumerate(rows)]


class Growing:
    """An engine while requests are added to it, for the plain references below."""

    def __init__(self, load: Load) -> None:
        self.name = load.engine
        self.requests, self.tokens = load.requests, load.tokens
        self.read_queue, self.free = load.read_queue, load.free_tokens

    def add(self, tokens: int) -> None:
        self.requests += 1
        self.tokens += tokens
        self.free -= tokens


def fetched_by_pe(queue: Sequence[Queued], loads: Sequence[Load], alpha: int, beta: int) -> list[str]:
    """The PE side as it is written: three classes, anew for every request."""
    engines = [Growing(load) for load in loads]
    answer = []
    for request in queue:
        second = [e for e in engines if e.read_queue <= alpha and e.tokens <= beta]
        third = [e for e in engines if e.read_queue > alpha and e.tokens <= beta]
        if not second and not third:
            break
        chosen = min(second or third, key=lambda e: e.tokens)
        chosen.add(request.prompt_tokens)
        answer.append(chosen.name)
    return answer


def fetched_by_de(queue: Sequence[Queued], loads: Sequence[Load], z: Fraction) -> list[str]:
    """Phase 2 of the DE side as it is written: all engines looked at for every request."""
    engines = [Growing(load) for load in loads]
    room = sum(e.free for e in engines)
    fitting = [at for at in range(len(queue) + 1) if sum(r.tokens for r in queue[:at]) <= room]
    prefix = queue[: max(fitting, default=0)]
    limit = z * (sum(r.tokens for r in prefix) + sum(e.tokens for e in engines)) / len(engines)
    answer = []
    for request in prefix:
        able = [e for e in engines if e.free >= request.tokens]
        within = [e for e in able if e.tokens + request.tokens <= limit]
        if not able:
            break
        chosen = min(within, key=lambda e: e.requests) if within else min(able, key=lambda e: e.tokens)
        chosen.add(request.tokens)
        answer.append(chosen.name)
    return answer


@given(QUEUES, groups_of_engines(), st.integers(0, 40), st.integers(0, 200))
def test_a_pe_group_takes_as_the_paper_says(
    queue: list[Queued], engines: list[Load], alpha: int, beta: int
) -> None:
    """Equal to the three classes written out, ties going to the engine listed first."""
    assert list(policy(alpha=alpha, beta=beta).assign_prefill(queue, engines)) == fetched_by_pe(
        queue, engines, alpha, beta
    )


@given(QUEUES, groups_of_engines())
def test_an_overloaded_pe_receives_nothing(queue: list[Queued], engines: list[Load]) -> None:
    """Every engine was at most at beta when it was given a request, and passes beta by one request at most."""
    tokens = {load.engine: load.tokens for load in engines}
    answer = policy(beta=100).assign_prefill(queue, engines)
    for request, engine in zip(queue, answer, strict=False):
        assert tokens[engine] <= 100
        tokens[engine] += request.prompt_tokens
    if len(answer) < len(queue):
        assert all(total > 100 for total in tokens.values())


@given(QUEUES, groups_of_engines())
def test_short_read_queues_come_first(queue: list[Queued], engines: list[Load]) -> None:
    """While one below alpha and beta is left, no engine beyond alpha gets a request."""
    tokens = {load.engine: load.tokens for load in engines}
    long = {load.engine for load in engines if load.read_queue > 20}
    for request, engine in zip(queue, policy(alpha=20).assign_prefill(queue, engines), strict=False):
        if engine in long:
            assert all(total > 100 for name, total in tokens.items() if name not in long)
        tokens[engine] += request.prompt_tokens


def test_the_constants_are_inclusive() -> None:
    """Exactly alpha is a short queue, exactly beta is no overload; one more of either is not."""
    one = queue_of([(5, 0)])
    at = [Load("a", "n", 0, 0, 21, 0), Load("b", "n", 0, 100, 20, 0)]
    assert list(policy().assign_prefill(one, at)) == ["b"]
    assert list(policy().assign_prefill(one, at[:1])) == ["a"]
    assert list(policy().assign_prefill(one, [Load("b", "n", 0, 101, 0, 0)])) == []


@given(QUEUES, st.lists(LARGE, min_size=1, max_size=6))
def test_the_whole_queue_drains_to_the_least_loaded_groups(queue: list[Queued], loads: list[int]) -> None:
    """Each request goes to a group with the least tokens, those just sent there included; of equals the first."""
    groups = {f"g{at}": tokens for at, tokens in enumerate(loads)}
    answer = policy().route_decode(queue, groups)
    assert len(answer) == len(queue)
    for request, group in zip(queue, answer, strict=True):
        assert group == min(groups, key=groups.__getitem__)
        groups[group] += request.tokens


@given(QUEUES, groups_of_engines(), st.sampled_from([1.05, 1.0, 1.5, 0.5, 3.0]))
def test_a_de_group_takes_as_the_paper_says(queue: list[Queued], engines: list[Load], z: float) -> None:
    """Equal to phase 2 written out in exact fractions."""
    assert list(policy(z=z).assign_decode(queue, engines)) == fetched_by_de(queue, engines, Fraction(str(z)))


@settings(phases=(Phase.explicit, Phase.generate))  # A smaller example would be the one above.
@given(st.randoms(use_true_random=False), st.integers(1, 60), st.integers(1, 300), st.sampled_from([1, 40, 4000]))
def test_a_large_group_takes_alike(random: Random, engines: int, requests: int, spread: int) -> None:
    """Also where many requests are placed on many engines, of lengths alike or far apart, HBM scarce or not."""
    draw = random.randrange
    queue = queue_of([(draw(100, 101 + spread), draw(0, 9)) for _ in range(requests)])
    scarce = draw(1, 4) * 100 * (1 + requests // engines)
    loads = [Load(f"d/{at}", "d", draw(0, 5), draw(0, 900), 0, draw(0, 2 * scarce)) for at in range(engines)]
    assert list(policy().assign_decode(queue, loads)) == fetched_by_de(queue, loads, Fraction("1.05"))


@given(QUEUES, groups_of_engines(st.integers(0, 150)))
def test_hbm_is_never_promised_twice(queue: list[Queued], engines: list[Load]) -> None:
    """What an engine is given fits its free HBM whole."""
    free = {load.engine: load.free_tokens for load in engines}
    for request, engine in zip(queue, policy().assign_decode(queue, engines), strict=False):
        free[engine] -= request.tokens
        assert free[engine] >= 0


@given(QUEUES, groups_of_engines(st.integers(0, 150)))
def test_the_head_is_never_skipped(queue: list[Queued], engines: list[Load]) -> None:
    """Where an answer ends, the next request has no engine with the HBM, or there is none."""
    free = {load.engine: load.free_tokens for load in engines}
    answer = policy().assign_decode(queue, engines)
    for request, engine in zip(queue, answer, strict=False):
        free[engine] -= request.tokens
    if len(answer) < len(queue):
        assert max(free.values()) < queue[len(answer)].tokens


@pytest.mark.parametrize(("z", "twentieths"), [(1.05, 21), (1.15, 23)])
def test_z_is_exact(z: float, twentieths: int) -> None:
    """An engine that a request lifts to just Z is within it, though 1.15 x 100 is below 115 in floats."""
    one = queue_of([(3, 0)])
    for mean in range(20, 4000, 20):
        most = mean * twentieths // 20 - 3
        for busy, chosen in ((most, "busy"), (most + 1, "calm")):
            calm = Load("calm", "d", 1, 2 * mean - 3 - busy, 0, 9999)
            engines = [Load("busy", "d", 0, busy, 0, 9999), calm]
            assert list(policy(z=z).assign_decode(one, engines)) == [chosen], mean


@given(LARGE, LARGE, st.text(max_size=8), st.integers(0, 9))
def test_the_shorter_read_queue_is_read_on(pe: int, de: int, request: str, seed: int) -> None:
    """The shorter queue wins, and a tie has the same winner each time."""
    queued = Queued(request, 0, 10, 1, 5)
    path = policy(seed=seed).choose_path(queued, pe, de)
    assert path == policy(seed=seed).choose_path(queued, pe, de)
    if pe != de:
        assert path == ("pe" if pe < de else "de")


@pytest.mark.parametrize("seed", range(3))
def test_ties_go_to_both_sides(seed: int) -> None:
    """With both queues empty neither side gets all reads, and another seed draws otherwise."""
    paths = [policy(seed=seed).choose_path(request, 0, 0) for request in queue_of([(1, 1)] * 1000)]
    assert 400 < paths.count("pe") < 600
    assert paths != [policy(seed=seed + 1).choose_path(request, 0, 0) for request in queue_of([(1, 1)] * 1000)]


@given(QUEUES)
def test_nobody_to_ask_for(queue: list[Queued]) -> None:
    """A group without engines takes nothing, and no queue gets no answer."""
    assert list(policy().assign_prefill(queue, [])) == []
    assert list(policy().assign_decode(queue, [])) == []
    assert list(policy().route_decode([], {"g": 0})) == []
