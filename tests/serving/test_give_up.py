"""Requests that are given up at any moment: nothing stays behind, and nobody else notices."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator.config import ModelConfig, RunConfig
from emulator.errors import ConfigError
from emulator.fabric.fluid import FluidNetwork
from emulator.records import Decisions, RunRecords
from emulator.roles.serving import Role
from emulator.sim import simulate
from emulator.workload import Trajectory, Workload
from tests.clusters import broken, config, conversation

from .inflight import released_in_flight
from .sizes import gigabytes
from .virtual import client_of, disturbed

SYSTEMS = ("basic", "dualpath", "split", "oracle", "mooncake", "direct", "grouped")


def _late(name: str, at_s: float, *rounds: tuple[int, int]) -> Trajectory:
    base = conversation(name, *rounds)
    return msgspec.structs.replace(
        base, turns=(msgspec.structs.replace(base.turns[0], arrival_s=at_s), *base.turns[1:])
    )


LOAD = Workload(
    (
        conversation("a", (700, 70), (64, 3)),
        conversation("b", (300, 130), (136, 10)),
        _late("c", 0.001, (500, 70)),
        _late("d", 0.002, (640, 5)),
        _late("after", 60.0, (700, 70), (64, 3)),
    )
)
VICTIMS = ("a:0", "a:1", "b:0", "b:1", "c:0", "d:0")
STAMPS = (
    *("arrived_s", "scheduled_s", "allocated_s", "read_s", "prefill_start_s", "computed_s", "transferred_s"),
    *("first_token_s", "last_token_s", "settled_s"),
)


def _config(system: str, *, tight: bool, **engine: Any) -> RunConfig:
    """Small chunks, and memory for all requests at once, or for two at a time, on slow links.

    Engines of a dense model with few layers; or, grouped, engines of two nodes a side that run in step over CNICs.
    """
    if system == "grouped":
        grouped = {"batch_tokens": 300} | engine
        model = ModelConfig(name="ds27b")
        return config(gpus=2, pe_nodes=2, de_nodes=2, warm=True, model=model, engine=grouped, ep_over="cnic")
    replay: dict[str, Any] = {"de_direct": True} if system == "direct" else {"system": system}
    room = {"de_buffer_gb": 2.4, "pe_buffer_gb": 1.1, "de_hbm_kv_gb": 3.2} if tight else {"de_hbm_kv_gb": 10.0}
    memory = {name: contexts * gigabytes(700) for name, contexts in room.items()}
    run = config(gpus=1, warm=True, model=ModelConfig(name="toy"), engine=memory | engine, **replay)
    rates = {"snic_gbps": 0.0007, "cnic_gbps": 0.2} if tight else {}
    return msgspec.structs.replace(run, topology={**run.topology, **rates})


@cache
def _undisturbed(system: str, tight: bool) -> RunRecords:
    return simulate(_config(system, tight=tight), LOAD)


@cache
def _moments(system: str, tight: bool, victim: str) -> list[float]:
    """Times of the clock at which the victim goes from one phase to the next."""
    records = _undisturbed(system, tight)
    life = next(r for r in records.requests if r.id == victim)
    # The last block may be committed before the last token is out.
    return sorted(at - records.t0_s for name in STAMPS if (at := getattr(life, name)) is not None)


def _given_up(system: str, victim: str, at_s: float, *, tight: bool) -> RunRecords:
    """A run in which ``victim`` is given up at that time; whoever is none of its later turns is served."""

    def give_up(network: FluidNetwork, roles: Mapping[str, Role]) -> None:
        client_of(roles).give_up(victim)

    run = _config(system, tight=tight)
    with released_in_flight(run) as in_flight:
        records, left = disturbed(run, LOAD, at_s, give_up)
    assert in_flight == []
    assert left == []
    assert broken(run, LOAD, records) == []
    status = {request.id: request.status for request in records.requests}
    for request in records.requests:
        if request.id != victim:
            later = request.trajectory == victim[0] and request.turn > int(victim[2:])
            assert request.status == (status[victim] if later else "done"), request.error
    return records


@pytest.mark.parametrize("system", SYSTEMS)
@settings(max_examples=14)
@given(
    tight=st.booleans(),
    victim=st.sampled_from(VICTIMS),
    phase=st.integers(0, len(STAMPS) - 2),
    part=st.floats(0, 1),
)
def test_a_request_given_up_at_any_moment_leaves_nothing_behind(
    system: str, tight: bool, victim: str, phase: int, part: float
) -> None:
    """Pools and books are empty again, all others are served with the right tokens, no invariant is broken.

    No memory is given back with a message to it or from it under way.
    """
    begin_s, end_s = _moments(system, tight, victim)[phase : phase + 2]
    records = _given_up(system, victim, begin_s + part * (end_s - begin_s), tight=tight)
    request = next(r for r in records.requests if r.id == victim)
    assert request.status == "done" or (request.status == "cancelled" and "was given up" in (request.error or ""))


@pytest.mark.parametrize(
    ("system", "victim", "phase", "doing"),
    [
        ("basic", "b:0", 0, "waiting for its engines"),
        ("basic", "d:0", 1, "waiting for the DE buffer"),
        ("basic", "c:0", 1, "waiting for the PE buffer"),
        ("basic", "c:0", 2, "reading its hit"),
        ("dualpath", "d:0", 2, "reading its hit"),
        ("basic", "a:0", 4, "in prefill on pe0"),
        ("direct", "a:0", 4, "in prefill on pe0"),
        ("basic", "d:0", 5, "being copied to HBM"),
        ("basic", "a:0", 7, "decoding"),
        ("basic", "b:1", 8, "being persisted"),
        ("direct", "b:1", 8, "being persisted"),
    ],
)
def test_it_is_told_in_which_state_a_request_was_given_up(
    system: str, victim: str, phase: int, doing: str
) -> None:
    """In each state giving up takes effect, and the record says in which; what was decided stays in it."""
    begin_s, end_s = _moments(system, True, victim)[phase : phase + 2]
    records = _given_up(system, victim, (begin_s + end_s) / 2, tight=True)
    request = next(r for r in records.requests if r.id == victim)
    assert (request.status, request.error) == ("cancelled", f"request {victim} was given up while {doing}")
    assert (request.scheduled_s is None) == (doing == "waiting for its engines")


def test_decode_ends_at_the_next_step() -> None:
    """A long answer that is given up holds its batch and its HBM for no more than a step and the calls."""
    load = Workload((conversation("long", (100, 3000)),))
    run = config(gpus=1, model=ModelConfig(name="toy"))
    whole = simulate(run, load)
    first_s, last_s = whole.requests[0].first_token_s, whole.requests[0].last_token_s
    assert first_s is not None and last_s is not None
    step_s, at_s = (last_s - first_s) / 2999, first_s + (last_s - first_s) / 3

    def give_up(network: FluidNetwork, roles: Mapping[str, Role]) -> None:
        client_of(roles).give_up("long:0")

    records, left = disturbed(run, load, at_s, give_up)
    assert left == []
    assert records.requests[0].status == "cancelled"
    assert records.ended_s < at_s + 2 * step_s + 10 * run.engine.rpc_latency_s


def test_giving_up_what_is_over_changes_nothing() -> None:
    """After its last block is committed a request can only be found not to be under way."""
    found = []

    def give_up(network: FluidNetwork, roles: Mapping[str, Role]) -> None:
        found.append(client_of(roles).give_up("a:0"))

    run = _config("dualpath", tight=False)
    records, left = disturbed(run, LOAD, 30.0, give_up)
    assert (found, left) == ([False], [])
    assert {request.status for request in records.requests} == {"done"}


@settings(max_examples=8)
@given(system=st.sampled_from(SYSTEMS), tight=st.booleans(), part=st.floats(0.001, 1.2))
def test_a_timeout_gives_up_whatever_is_not_settled_in_time(system: str, tight: bool, part: float) -> None:
    """With a timeout every turn is done in time or cancelled, and its trajectory's later turns with it."""
    longest_s = max(_moments(system, tight, name)[-1] - _moments(system, tight, name)[0] for name in VICTIMS)
    timeout_s = part * longest_s
    run = _config(system, tight=tight, request_timeout_s=timeout_s)
    records, left = disturbed(run, LOAD, 0.0, lambda network, roles: None)
    assert left == []
    assert broken(run, LOAD, records) == []
    for request in records.requests:
        if request.status == "done":
            assert request.settled_s is not None
            # What it is told too late to stop, a write on its way or a forward begun, is let end.
            assert request.settled_s - request.arrived_s <= timeout_s + longest_s
        else:
            assert request.status == "cancelled" and "given up" in (request.error or "")
    if part > 1.1:
        assert {request.status for request in records.requests} == {"done"}


def test_decisions_are_not_repeated_under_a_timeout() -> None:
    """A request that is given up would leave its recorded batch incomplete: refused, with the setting's name."""
    first = _undisturbed("dualpath", False)
    decisions = Decisions(
        tuple(decision for node in first.nodes for decision in node.decisions),
        tuple(batch for node in first.nodes for batch in node.batches),
    )
    with pytest.raises(ConfigError, match=r"--decisions: request_timeout_s = 5.0"):
        simulate(_config("dualpath", tight=False, request_timeout_s=5.0), LOAD, decisions)
