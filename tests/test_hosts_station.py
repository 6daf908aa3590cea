"""A node's own judgement: which error explains a failure, and how late its timers were."""

from __future__ import annotations

import random

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from emulator.errors import EmulatorError, PeerLost, StoreError
from emulator.hosts.station import fault_of, lateness_summary
from tests.within import assert_within

LOST, FULL, BUG = PeerLost("de0 is gone"), StoreError("no space"), ZeroDivisionError("by zero")


def _nested(errors: list[Exception], seed: int) -> BaseException:
    """The errors in some order, in groups within groups."""
    order = errors[:]
    random.Random(seed).shuffle(order)
    group: Exception = ExceptionGroup("inner", order[:1])
    for error in order[1:]:
        group = ExceptionGroup("outer", [error, group])
    return group


@given(st.lists(st.sampled_from([LOST, FULL, BUG]), min_size=1, max_size=5), st.integers(0, 99))
def test_the_cause_comes_before_its_echoes(errors: list[Exception], seed: int) -> None:
    """A defect of ours before an error reported on purpose before a lost peer, however they are nested."""
    fault = fault_of(_nested(errors, seed))
    if BUG in errors:
        assert fault.text == "ZeroDivisionError: by zero"
    elif FULL in errors:
        assert fault is FULL
    else:
        assert fault is LOST


def test_a_single_error_explains_itself() -> None:
    """With no group around it; a mere cancellation is called that."""
    assert fault_of(FULL) is FULL
    assert isinstance(fault_of(KeyError("x")), EmulatorError)
    assert fault_of(BaseExceptionGroup("g", [trio.Cancelled._create()])).text == "cancelled"


def test_lateness_of_nothing_is_zero() -> None:
    """No sample, no lateness; one sample is all three figures."""
    assert lateness_summary([]) == (0.0, 0.0, 0.0)
    assert lateness_summary([0.002]) == (2.0, 2.0, 2.0)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=50))
def test_lateness_is_ordered_and_bounded(samples: list[float]) -> None:
    """median <= p99 <= max, the max exact, in milliseconds."""
    median, p99, worst = lateness_summary(samples)
    assert (
        min(samples) * 1e3 <= median * (1 + 1e-12) and median <= p99 * (1 + 1e-12) and p99 <= worst * (1 + 1e-12)
    )
    assert_within(worst, 1e3 * max(samples), rel=1e-12, what="worst lateness")


@pytest.mark.parametrize(("count", "median", "p99"), [(101, 50.0, 99.0), (100, 49.5, 98.01)])
def test_lateness_is_interpolated(count: int, median: float, p99: float) -> None:
    """Linear between the two nearest ranks."""
    found = lateness_summary([k / 1e3 for k in range(count)])
    assert_within(found[0], median, rel=1e-9, what="median")
    assert_within(found[1], p99, rel=1e-9, what="p99")
