"""The decode node's batches: token times are the cost model's, whatever the process does meanwhile."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator.fabric.fluid import FluidFabric
from emulator.hardware import Hardware
from emulator.records import RunRecords
from emulator.sim import simulate
from emulator.workload import Workload

from .clusters import broken, config, conversation

ROUNDS = st.lists(st.tuples(st.integers(1, 300), st.integers(2, 90)), min_size=1, max_size=3)


def _run(load: Workload, late_s: float) -> tuple[RunRecords, list[str], set[float]]:
    """A run whose every sleep ends ``late_s`` too late: its records, what it broke, the lengths of its steps."""
    run = config(gpus=1, agents=len(load.trajectories))
    steps: set[float] = set()
    decode_attention_s = Hardware.decode_attention_s

    def told(hardware: Hardware, contexts: Sequence[int]) -> float:
        attention_s = decode_attention_s(hardware, contexts)
        steps.add(attention_s + hardware.decode_rest_s(len(contexts)))
        return attention_s

    async def sleep_until(fabric: FluidFabric, at_s: float) -> None:
        await trio.sleep_until(at_s + late_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Hardware, "decode_attention_s", told)
        patch.setattr(FluidFabric, "sleep_until", sleep_until)
        records = simulate(run, load)
    return records, broken(run, load, records), steps


@settings(max_examples=20, deadline=None)
@given(st.lists(ROUNDS, min_size=1, max_size=4), st.sampled_from([0.0, 1e-4, 3e-3, 0.05]))
def test_lateness_is_in_no_token_gap(rounds: list[list[tuple[int, int]]], late_s: float) -> None:
    """Every gap between two tokens is one step of the cost model, however late the engine wakes up."""
    load = Workload(tuple(conversation(f"t{at}", *each) for at, each in enumerate(rounds)))
    records, faults, steps = _run(load, late_s)
    assert faults == []
    for request in records.requests:
        for gap_s, _ in request.token_gaps:
            assert any(math.isclose(gap_s, step_s, rel_tol=1e-6) for step_s in steps), (request.id, gap_s)


def test_a_sequence_joins_at_the_end_of_the_step_in_which_it_arrives() -> None:
    """It waits for less than one step, and its own first token comes after a step of the larger batch."""
    short = conversation("short", (900, 5))
    later = msgspec.structs.replace(short, turns=(msgspec.structs.replace(short.turns[0], arrival_s=1.0),))
    records, _, steps = _run(Workload((conversation("long", (64, 600)), later)), 0.0)
    first, second = records.requests
    assert first.first_token_s is not None
    assert second.transferred_s is not None
    assert second.first_token_s is not None
    assert first.first_token_s < second.transferred_s
    assert min(steps) <= second.first_token_s - second.transferred_s <= 2 * max(steps)
