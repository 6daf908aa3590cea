"""Scheduling decisions are functions of what is known, with deterministic ties."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from emulator.policy import BatchItem, EngineLoad, Limits, choose_engine, choose_path, pack_batch, refusal

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


def _attention(shape: Sequence[tuple[int, int]]) -> float:
    return sum(new * (cached + new) for cached, new in shape) * 1e-3


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=8),
    st.floats(0.001, 2.0),
    st.integers(1, 60),
    st.integers(1, 200),
)
def test_a_batch_is_the_longest_prefix_within_the_limits(
    rows: list[tuple[int, int]], quota_s: float, batch_tokens: int, hbm_tokens: int
) -> None:
    """All within the limits, or the head alone; one more would break a limit; HBM is never exceeded."""
    items = [BatchItem(f"r{at}", cached, new) for at, (cached, new) in enumerate(rows)]

    def within(count: int) -> bool:
        shape = rows[:count]
        fits = sum(cached + new for cached, new in shape) <= hbm_tokens
        alone = count == 1
        return fits and (alone or (sum(new for _, new in shape) <= batch_tokens and _attention(shape) <= quota_s))

    count = pack_batch(
        items, attention_s=_attention, quota_s=quota_s, batch_tokens=batch_tokens, hbm_tokens=hbm_tokens
    )
    assert all(within(n) for n in range(1, count + 1))
    assert count == len(items) or not within(count + 1)


def test_each_refusal_names_its_setting() -> None:
    """What can never fit is told which capacity it exceeds; what fits is not refused."""
    limits = Limits(pe_buffer_blocks=10, de_buffer_blocks=20, de_hbm_pages=30, pe_hbm_tokens=1000)

    def ask(prompt: int, output: int, hit: int, path: str) -> str | None:
        return refusal(
            limits,
            prompt_tokens=prompt,
            output_tokens=output,
            hit_blocks=hit,
            path="pe" if path == "pe" else "de",
            block_tokens=64,
        )

    assert ask(640, 1, 10, "pe") is None
    assert "pe_buffer_gb" in (ask(800, 1, 11, "pe") or "")
    assert ask(800, 1, 11, "de") is None
    assert "pe_hbm_kv_gb" in (ask(1001, 1, 0, "de") or "")
    assert "de_buffer_gb" in (ask(64 * 20 + 1, 1, 0, "de") or "")
    assert "de_hbm_kv_gb" in (ask(640, 64 * 20 + 1, 0, "de") or "")
