"""A pass takes the head of the queue up to its quota of attention time, and cuts what overflows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.policy import Packable, pack

CONSTANT_S = 0.25
"""What even an empty pass is predicted to take, a power of two so that the sums below are exact."""


class Attention:
    """A predictor that counts how often it is asked: additive but for a constant, growing, exact."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, shape: Sequence[tuple[int, int]]) -> float:
        self.calls += 1
        return CONSTANT_S + sum(new * (cached + new) for cached, new in shape) / 1024


ROWS = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 40), st.integers(0, 60)), max_size=8)
QUOTAS = st.integers(0, 8000).map(lambda steps: steps / 1024)


def items(rows: Sequence[tuple[int, int, int]]) -> list[Packable]:
    return [Packable(f"r{at}", *row) for at, row in enumerate(rows)]


def packed(rows: Sequence[tuple[int, int, int]], quota_s: float, batch: int, hbm: int) -> tuple[int, ...]:
    return pack(items(rows), attention_s=Attention(), quota_s=quota_s, batch_tokens=batch, hbm_tokens=hbm)


@given(ROWS, QUOTAS, st.integers(1, 90), st.integers(0, 200))
def test_as_much_is_taken_as_fits(
    rows: list[tuple[int, int, int]], quota_s: float, batch_tokens: int, hbm_tokens: int
) -> None:
    """Within quota, tokens and HBM, but for the head's one token; one token more of the next would break one."""
    taken = packed(rows, quota_s, batch_tokens, hbm_tokens)

    def within(news: Sequence[int]) -> bool:
        shape = [(cached, new) for (cached, _, _), new in zip(rows, news, strict=False)]
        return (
            (Attention()(shape) <= quota_s or news == (1,))
            and sum(news) <= batch_tokens
            and sum(row[2] for row in rows[: len(news)]) <= hbm_tokens
        )

    assert not taken or within(taken)
    assert all(1 <= new <= row[1] for new, row in zip(taken, rows, strict=False))
    if taken and taken[-1] < rows[len(taken) - 1][1]:
        assert not within((*taken[:-1], taken[-1] + 1))
    elif len(taken) < len(rows):
        assert not within((*taken, 1))


@given(ROWS, QUOTAS, st.integers(1, 90), st.integers(0, 200))
def test_only_the_last_is_cut(
    rows: list[tuple[int, int, int]], quota_s: float, batch_tokens: int, hbm_tokens: int
) -> None:
    """All before it are taken whole: nobody is skipped, and nobody behind a cut one gets in."""
    taken = packed(rows, quota_s, batch_tokens, hbm_tokens)
    assert all(new == row[1] for new, row in zip(taken[:-1], rows, strict=False))


@given(ROWS, QUOTAS, st.integers(1, 90), st.integers(0, 200))
def test_the_head_goes_on(
    rows: list[tuple[int, int, int]], quota_s: float, batch_tokens: int, hbm_tokens: int
) -> None:
    """It gets a token or more exactly where its HBM fits, however small the quota."""
    taken = packed(rows, quota_s, batch_tokens, hbm_tokens)
    assert bool(taken) == bool(rows and rows[0][2] <= hbm_tokens)


@pytest.mark.parametrize("new", [1, 7, 32])
def test_the_quota_is_inclusive(new: int) -> None:
    """Attention of just the quota fits, for a whole request and for a chunk of it; a moment less does not."""
    quota_s = Attention()([(5, 3), (4, new)])
    for asked in (new, 40):
        rows = [(5, 3, 0), (4, asked, 0)]
        assert packed(rows, quota_s, 99, 0) == (3, new)
        assert packed(rows, quota_s - 1 / 1024, 99, 0) == ((3, new - 1) if new > 1 else (3,))


@given(ROWS, st.integers(1, 90), st.integers(0, 200))
def test_chunks_of_a_request_add_up_to_it(rows: list[tuple[int, int, int]], batch_tokens: int, quota: int) -> None:
    """Pass after pass, each on what the ones before it computed, every request is taken whole, in order."""
    left = items(rows)
    done = dict.fromkeys((item.request for item in left), 0)
    finished: list[str] = []
    for _ in range(sum(row[1] for row in rows)):
        taken = pack(left, attention_s=Attention(), quota_s=quota / 8, batch_tokens=batch_tokens, hbm_tokens=999)
        rest = []
        for item, new in zip(left, taken, strict=False):
            done[item.request] += new
            if new < item.new:
                rest.append(Packable(item.request, item.cached + new, item.new - new, 0))
            else:
                finished.append(item.request)
        left = [*rest, *left[len(taken) :]]
    assert not left
    assert finished == [f"r{at}" for at in range(len(rows))]
    assert list(done.values()) == [row[1] for row in rows]


@pytest.mark.parametrize("new", [1, 1000, 10**6])
def test_the_predictor_is_asked_seldom(new: int) -> None:
    """Once a request, and as often as the long one's tokens have bits."""
    attention = Attention()
    rows = [(10, 1, 0)] * 50 + [(0, new, 0)]
    pack(items(rows), attention_s=attention, quota_s=40.0, batch_tokens=10**7, hbm_tokens=0)
    assert attention.calls <= len(rows) + new.bit_length() + 2
