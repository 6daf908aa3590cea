"""The estimate bounds what a run takes from below, and scales as the run does."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator.estimate import estimate
from emulator.metrics import jct_s
from emulator.sim import simulate
from emulator.workload import Stream, Trajectory, Turn, Workload
from tests.clusters import config, conversation
from tests.within import assert_within

ROUNDS = st.lists(st.tuples(st.integers(1, 400), st.integers(1, 30)), min_size=1, max_size=4)


@settings(max_examples=20, deadline=None)
@given(st.lists(ROUNDS, min_size=1, max_size=4), st.booleans())
def test_no_run_is_faster_than_its_estimate(rounds: list[list[tuple[int, int]]], warm: bool) -> None:
    """The simulated job takes at least the bound, whatever the workload."""
    load = Workload(tuple(conversation(f"t{at}", *each) for at, each in enumerate(rounds)))
    run = config(agents=len(rounds), warm=warm)
    took_s = jct_s(simulate(run, load))
    bound = estimate(run, load)
    assert took_s is not None and max(bound.storage_s, bound.serial_s) <= took_s * (1 + 1e-6)


def test_wall_time_is_dilated() -> None:
    """Twice the dilation, twice the wall time; the model's bounds stay."""
    load = Workload((conversation("t", (500, 10), (64, 10)),))
    run = config(agents=1)
    slow = msgspec.structs.replace(run, scale=msgspec.structs.replace(run.scale, dilation=2 * run.scale.dilation))
    assert_within(estimate(slow, load).wall_s, 2 * estimate(run, load).wall_s, rel=1e-12, what="wall time")
    assert estimate(slow, load).serial_s == estimate(run, load).serial_s


@pytest.mark.parametrize("path", ["pe", "de"])
def test_one_path_reads_through_half_of_the_nics(path: str) -> None:
    """1P1D: forced onto one side, storage takes twice as long."""
    load = Workload(tuple(conversation(f"t{at}", (5000, 1), (64, 1)) for at in range(8)))
    both, one = (estimate(config(agents=8, path=p, warm=True), load) for p in ("auto", path))
    assert_within(one.storage_s, 2 * both.storage_s, rel=1e-12, what="storage bound")


def test_a_turn_reads_what_its_own_past_has_left() -> None:
    """A warm first prompt but its last token, then whole blocks of the context before, within the prompt."""
    run = config(agents=1)
    block_s = estimate(config(agents=1, warm=True), Workload((conversation("t", (65, 1)),))).storage_s
    assert block_s > 0
    grown, rewound = Turn(640, 64, arrival_s=0.0), Turn(129, 1)
    load = Workload((Trajectory("t", (grown, Turn(800, 1), rewound), (Stream((801,), (1,)),)),))
    for warm, blocks in ((False, 11 + 2), (True, 9 + 11 + 2)):
        bound = estimate(msgspec.structs.replace(run, replay=msgspec.structs.replace(run.replay, warm=warm)), load)
        assert_within(bound.storage_s, blocks * block_s, rel=1e-12, what="seconds of reading")


def test_advice_follows_what_binds() -> None:
    """Many long contexts: fewer agents; one long generation: a shorter trajectory."""
    reading = Workload(tuple(conversation(f"t{at}", (30000, 1)) for at in range(64)))
    assert "--agents" in estimate(config(agents=64, warm=True), reading).advice
    decoding = Workload((conversation("t", (64, 5000)),))
    assert "--dilation" in estimate(config(agents=1), decoding).advice
