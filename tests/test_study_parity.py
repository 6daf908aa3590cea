"""Laws of parity: equal runs agree, each kind of difference is found, and a fabric at half rate cannot pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import pytest

from emulator.config import RunConfig
from emulator.records import Decisions, RunRecords
from emulator.report import setup_of
from emulator.sim import simulate
from emulator.study.parity import ParityFinding, Tolerances, parity
from emulator.verify import Evidence
from emulator.workload import Workload

from .clusters import config, conversation
from .made_run import evidence, replace_node, replace_request

ANY_READING = Tolerances(reading=0.0)
"""The made-up run reads for less than half of its TTFT."""


def failed(findings: list[ParityFinding]) -> list[str]:
    return [f.law for f in findings if not f.ok]


def ports(made: Evidence, name: str, factor: float) -> Evidence:
    """The same run with the bytes of all ports of one node multiplied."""
    node = next(n for n in made.records.nodes if n.node == name)
    rows = tuple(msgspec.structs.replace(p, payload_bytes=round(factor * p.payload_bytes)) for p in node.ports)
    return replace_node(made, name, ports=rows)


def step(made: Evidence) -> Evidence:
    node = next(n for n in made.records.nodes if n.node == "de0")
    first = msgspec.structs.replace(node.received[0], payload_bytes=node.received[0].payload_bytes + 1)
    return replace_node(made, "de0", received=(first, *node.received[1:]))


def decision(made: Evidence) -> Evidence:
    decisions = list(next(n for n in made.records.nodes if n.node == "sched").decisions)
    decisions[3] = msgspec.structs.replace(decisions[3], de="de0/0")
    return replace_node(made, "sched", decisions=tuple(decisions))


def batch(made: Evidence) -> Evidence:
    batches = next(n for n in made.records.nodes if n.node == "pe0").batches
    return replace_node(made, "pe0", batches=batches[:-1])


def slower(made: Evidence, factor: float) -> Evidence:
    """The same run with its last token later, so that JCT is ``factor`` times as long."""
    last = made.records.requests[-1]
    assert last.last_token_s is not None
    late = made.records.t0_s + factor * (last.last_token_s - made.records.t0_s)
    return replace_request(made, last.id, last_token_s=late)


def all_on(made: Evidence, path: str) -> Evidence:
    rows = tuple(msgspec.structs.replace(r, path=path) for r in made.records.requests)
    return msgspec.structs.replace(made, records=msgspec.structs.replace(made.records, requests=rows))


@pytest.mark.parametrize("replayed", [False, True])
def test_a_run_agrees_with_itself(replayed: bool) -> None:
    """Nothing differs between a run and itself, whichever laws are asked."""
    assert failed(parity(evidence(), evidence(), replayed=replayed, tolerances=ANY_READING)) == []


@pytest.mark.parametrize(
    ("mutate", "law"),
    [
        (decision, "same decisions"),
        (batch, "same batches"),
        (step, "same step bytes"),
        (lambda made: ports(made, "st0", 1.0001), "same port bytes"),
        (lambda made: slower(made, 1.06), "JCT within 5%"),
        (lambda made: slower(made, 0.94), "JCT within 5%"),
        (lambda made: replace_request(made, "a0.0", output_tokens=71), "same work"),
        (lambda made: replace_request(made, "a0.0", status="failed"), "same work"),
    ],
)
def test_with_decisions_replayed_every_difference_counts(mutate: Callable[[Evidence], Evidence], law: str) -> None:
    """One changed decision, batch, byte, request or a JCT out of tolerance is found and named."""
    findings = parity(evidence(), mutate(evidence()), replayed=True, tolerances=ANY_READING)
    assert failed(findings) == [law]


@pytest.mark.parametrize(
    ("mutate", "law"),
    [
        (lambda made: slower(made, 1.06), "JCT within 5%"),
        (lambda made: all_on(made, "pe"), "path share within 5 points"),
        (lambda made: ports(made, "de0", 1.11), "bytes per node and direction within 10%"),
        (lambda made: ports(made, "st1", 0.0), "bytes per node and direction within 10%"),
    ],
)
def test_with_free_decisions_tolerances_are_kept(mutate: Callable[[Evidence], Evidence], law: str) -> None:
    """Runs that decide for themselves may differ within the tolerances and not beyond."""
    findings = parity(evidence(), mutate(evidence()), replayed=False, tolerances=ANY_READING)
    assert failed(findings) == [law]


def test_small_differences_of_free_runs_pass() -> None:
    """Within every tolerance there is parity, though neither bytes nor times are equal."""
    near = slower(ports(evidence(), "de0", 1.05), 1.03)
    assert failed(parity(evidence(), near, replayed=False, tolerances=ANY_READING)) == []


def test_a_run_that_hardly_reads_shows_nothing() -> None:
    """Where reading is a small part of TTFT, agreement says nothing about the network, and is not parity."""
    assert failed(parity(evidence(), evidence(), replayed=True)) == ["reading is 50% of TTFT or more"]


def test_nothing_done_is_no_parity() -> None:
    """Two runs in which nothing finished do not agree: there is nothing to compare."""
    made = evidence()
    empty = msgspec.structs.replace(made, records=msgspec.structs.replace(made.records, requests=()))
    assert "JCT within 5%" in failed(parity(empty, empty, replayed=True))
    assert "path share within 5 points" in failed(parity(empty, empty, replayed=False))


WORKLOAD = Workload(tuple(conversation(f"agent{i}", (4000, 4), (70, 4), (90, 5)) for i in range(6)))


def reading(snic_gbps: float) -> RunConfig:
    """Warm contexts behind slow storage NICs, so that reading is most of TTFT."""
    run = config(path="auto", agents=6, warm=True)
    topology: dict[str, Any] = {**run.topology, "snic_gbps": snic_gbps, "storage_gbps": None}
    return msgspec.structs.replace(run, topology=topology)


@cache
def run(snic_gbps: float, *, replay: bool = False) -> Evidence:
    decisions = _decisions(run(8.0).records) if replay else None
    config = reading(snic_gbps)
    records = simulate(config, WORKLOAD, decisions)
    return Evidence(setup=setup_of(config, "fluid"), records=records, expected={})


def _decisions(records: RunRecords) -> Decisions:
    return Decisions(
        tuple(d for node in records.nodes for d in node.decisions),
        tuple(b for node in records.nodes for b in node.batches),
    )


def test_a_replay_of_its_own_decisions_is_at_parity() -> None:
    """A run in virtual time that repeats another's decisions moves the same bytes in the same time."""
    assert failed(parity(run(8.0), run(8.0, replay=True), replayed=True)) == []


def test_a_storage_nic_at_half_rate_is_no_parity() -> None:
    """The mutant: the same decisions and the same bytes, and a JCT that gives the slow links away."""
    assert failed(parity(run(8.0), run(4.0, replay=True), replayed=True)) == ["JCT within 5%"]
