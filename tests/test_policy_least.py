"""The least loaded engine is chosen, and the shorter queue, with deterministic ties."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from emulator.policy import EngineLoad, choose_engine, choose_path

LOADS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=9).map(
    lambda rows: [EngineLoad(f"pe0/{at}", requests, tokens) for at, (requests, tokens) in enumerate(rows)]
)


@given(LOADS)
def test_the_engine_with_the_fewest_tokens_is_chosen(loads: list[EngineLoad]) -> None:
    """No engine has fewer tokens; among equals none has fewer requests; then the first."""
    chosen = next(load for load in loads if load.engine == choose_engine(loads))
    key = (chosen.tokens, chosen.requests)
    assert key == min((load.tokens, load.requests) for load in loads)
    assert all((load.tokens, load.requests) != key for load in loads[: loads.index(chosen)])


@given(st.integers(0, 100), st.integers(0, 100), st.text(max_size=8), st.integers(0, 9))
def test_the_shorter_read_queue_is_read_on(pe: int, de: int, request: str, seed: int) -> None:
    """The shorter queue wins; the answer is the same each time."""
    path = choose_path({"pe": pe, "de": de}, request, seed)
    assert path == choose_path({"pe": pe, "de": de}, request, seed)
    if pe != de:
        assert path == ("pe" if pe < de else "de")


def test_ties_go_to_both_sides() -> None:
    """With both queues empty neither side gets all reads."""
    paths = [choose_path({"pe": 0, "de": 0}, f"r{at}", 0) for at in range(1000)]
    assert 400 < paths.count("pe") < 600
