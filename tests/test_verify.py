"""Laws of the invariants: they hold on a sound run, and each fails on a run that breaks it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator import verify
from emulator.metrics import Port
from emulator.records import BatchRecord, Decision, NodeRecord, PortBytes, RequestRecord, TransferBytes
from emulator.systems import SYSTEMS, System
from emulator.verify import Evidence

from .made_run import POOLED, QUOTA_S, evidence, replace_node, replace_request

Mutation = Callable[[Evidence], Evidence]


def node(made: Evidence, name: str) -> NodeRecord:
    return next(n for n in made.records.nodes if n.node == name)


def request(made: Evidence, name: str) -> RequestRecord:
    return next(r for r in made.records.requests if r.id == name)


def row(made: Evidence, name: str, field: str, at: int, **changes: Any) -> Evidence:
    """Change one row of one table of a node."""
    rows = list(getattr(node(made, name), field))
    rows[at] = msgspec.structs.replace(rows[at], **changes)
    return replace_node(made, name, **{field: tuple(rows)})


def records(made: Evidence, **changes: Any) -> Evidence:
    return msgspec.structs.replace(made, records=msgspec.structs.replace(made.records, **changes))


def twice(made: Evidence) -> Evidence:
    return records(made, requests=(*made.records.requests, made.records.requests[0]))


def lost(made: Evidence) -> Evidence:
    return records(made, requests=made.records.requests[:-1])


def flipped_token(made: Evidence) -> Evidence:
    tokens = list(request(made, "a1.1").model_tokens)
    tokens[40] ^= 1
    return replace_request(made, "a1.1", model_tokens=tuple(tokens))


def no_reference(made: Evidence) -> Evidence:
    return msgspec.structs.replace(made, expected={k: v for k, v in made.expected.items() if k != "a0.0"})


def short_tokens(made: Evidence) -> Evidence:
    tokens = request(made, "a0.0").model_tokens[:-1]
    both = msgspec.structs.replace(made, expected={**made.expected, "a0.0": tokens})
    return replace_request(both, "a0.0", model_tokens=tokens)


def decided_twice(made: Evidence) -> Evidence:
    decisions = node(made, "sched").decisions
    return replace_node(made, "sched", decisions=(*decisions, decisions[0]))


def decided_for_nobody(made: Evidence) -> Evidence:
    ghost = Decision("ghost", "pe0/0", "de0/1", "pe", 0)
    return replace_node(made, "sched", decisions=(*node(made, "sched").decisions, ghost))


def undecided(made: Evidence) -> Evidence:
    return replace_node(made, "sched", decisions=node(made, "sched").decisions[1:])


def other_path(made: Evidence) -> Evidence:
    path = request(made, "a0.1").path
    return replace_request(made, "a0.1", path="de" if path == "pe" else "pe")


def split_off_a_whole_path(made: Evidence) -> Evidence:
    return row(made, "sched", "decisions", 4, split_blocks=1)


def split_elsewhere(made: Evidence) -> Evidence:
    """As if one more block had been read on the DE's side than was decided."""
    split = evidence(system=SYSTEMS["split"])
    r = request(split, "a0.2")
    return replace_request(split, "a0.2", de_hit_tokens=r.de_hit_tokens + 64)


def pool_without_a_pool(made: Evidence) -> Evidence:
    return replace_request(made, "a0.1", pool_tokens=64)


def pool_beyond_the_hit(made: Evidence) -> Evidence:
    pooled = evidence(system=POOLED)
    r = request(pooled, "a0.1")
    return replace_request(pooled, "a0.1", pool_tokens=r.hit_tokens + 64)


def on_cached(mutate: Mutation, system: str = "dualpath") -> Mutation:
    """The change, of a run whose nodes have caches of their own."""
    return lambda made: mutate(evidence(system=SYSTEMS[system], cached=True))


def on_cache(name: str, **changes: Any) -> Mutation:
    """A node's cache counted otherwise."""

    def change(made: Evidence) -> Evidence:
        cache = node(made, name).cache
        assert cache is not None
        return replace_node(made, name, cache=msgspec.structs.replace(cache, **changes))

    return on_cached(change)


def from_the_other_side(made: Evidence) -> Evidence:
    """What the PE's cache gave is said to be the DE's."""
    r = request(made, "a0.2")
    return replace_request(made, "a0.2", pool_tokens=r.hit_tokens, pool_de_tokens=r.hit_tokens)


def given_remotely(made: Evidence) -> Evidence:
    return replace_request(made, "a0.2", pool_local_tokens=0)


def free_on_a_port(made: Evidence) -> Evidence:
    """What is free is counted as if a NIC had carried it."""
    free = evidence(system=SYSTEMS["oracle"])
    at = next(i for i, t in enumerate(node(free, "st0").sent) if t.transfer == "FREE")
    return row(free, "st0", "sent", at, transfer="PE_READ")


def of_other_layers(made: Evidence) -> Evidence:
    """A run that loaded the hit again for each chunk, said to keep it in HBM."""
    return msgspec.structs.replace(made, setup=msgspec.structs.replace(made.setup, system=SYSTEMS["basic"]))


def beside(made: Evidence, **changes: Any) -> Evidence:
    """The other engine of the group runs along in step 3, on nobody's behalf."""
    batches = node(made, "pe0").batches
    other = msgspec.structs.replace(batches[3], engine="pe0/1", index=0, requests=(), shape=(), **changes)
    return replace_node(made, "pe0", batches=(*batches, other))


def ends_late(made: Evidence) -> Evidence:
    return beside(made, ended_s=node(made, "pe0").batches[3].ended_s + 0.01)


def step_too_early(made: Evidence) -> Evidence:
    return beside(made, started_s=node(made, "pe0").batches[2].started_s)


def collective(made: Evidence) -> Evidence:
    stray, pe = TransferBytes("COLLECTIVE", "pe0", "pe0", 4096, 1), node(made, "pe0")
    return replace_node(made, "pe0", sent=(*pe.sent, stray), received=(*pe.received, stray))


def double_rate(made: Evidence) -> Evidence:
    """The topology says half of what the links carry when busy: 70 busy windows show it."""
    port = node(made, "pe0").ports[0]
    windows = (30_000,) * 70
    return row(made, "pe0", "ports", 0, windows=windows, payload_bytes=sum(windows), nic=port.nic)


def unknown_port(made: Evidence) -> Evidence:
    return row(made, "pe0", "ports", 0, nic="cnic7")


def stray_transfer(made: Evidence) -> Evidence:
    return row(made, "pe0", "sent", 0, src="pe1")


def counted_twice(made: Evidence) -> Evidence:
    sent = node(made, "pe0").sent
    return replace_node(made, "pe0", sent=(*sent, sent[0]))


def more_on_both_sides(made: Evidence) -> Evidence:
    """One byte more on both sides' books and ports: only the sum over requests can tell."""
    at = next(i for i, t in enumerate(node(made, "de0").sent) if t.transfer == "PERSIST" and t.dst == "st0")
    t = node(made, "de0").sent[at]
    back = next(i for i, u in enumerate(node(made, "st0").received) if u.transfer == "PERSIST")
    more = row(made, "de0", "sent", at, payload_bytes=t.payload_bytes + 1)
    return row(more, "st0", "received", back, payload_bytes=t.payload_bytes + 1)


def hit_less(made: Evidence) -> Evidence:
    r = request(made, "a0.2")
    return replace_request(made, "a0.2", hit_tokens=r.hit_tokens - 64)


def batch_numbers(made: Evidence) -> Evidence:
    return row(made, "pe0", "batches", 1, index=7)


def batch_backwards(made: Evidence) -> Evidence:
    return row(made, "pe0", "batches", 1, started_s=0.1, ended_s=0.05)


def chunk_missing(made: Evidence) -> Evidence:
    batches = list(node(made, "pe0").batches)
    batches[1] = msgspec.structs.replace(batches[1], requests=(), shape=())
    return replace_node(made, "pe0", batches=tuple(batches))


def chunk_twice(made: Evidence) -> Evidence:
    return row(made, "pe0", "batches", 1, shape=node(made, "pe0").batches[0].shape)


def on_request(name: str, **changes: Any) -> Mutation:
    return lambda made: replace_request(made, name, **changes)


def on_row(name: str, field: str, at: int, **changes: Any) -> Mutation:
    return lambda made: row(made, name, field, at, **changes)


MUTATIONS: list[tuple[str, str, Mutation]] = [
    ("requests conserved", "2 records", twice),
    ("requests conserved", "left no record", lost),
    ("requests conserved", "with an error", on_request("a0.0", error="odd")),
    ("requests conserved", "without a reason", on_request("a0.0", status="failed")),
    ("requests conserved", "without engines", on_request("a0.0", de=None)),
    ("tokens equal", "token 40", flipped_token),
    ("tokens equal", "has no tokens", no_reference),
    ("tokens equal", "needs 71", short_tokens),
    ("decisions followed", "decided 2 times", decided_twice),
    ("decisions followed", "ghost", decided_for_nobody),
    ("decisions followed", "without a decision", undecided),
    ("decisions followed", "decided as", other_path),
    ("decisions followed", "1 blocks split off", split_off_a_whole_path),
    ("decisions followed", "on the DE's side", split_elsewhere),
    ("whole blocks", "from a pool", pool_without_a_pool),
    ("whole blocks", "from a pool", pool_beyond_the_hit),
    ("whole blocks", "from caches, 0 of them", on_cached(given_remotely)),
    ("whole blocks", "from DRAM on the DE's side", on_cached(from_the_other_side, "split")),
    ("pools whole", "1 leases of blocks in DRAM are out", on_cache("pe0", leases=1)),
    ("pools whole", "2 slots reserved", on_cache("de0", pending=2)),
    ("pools whole", "5 of 9 slots used after 7 blocks came in and 1 gave way", on_cache("pe0", evicted=1)),
    ("pools whole", "5 of 4 slots used", on_cache("pe0", total=4)),
    ("step bytes", "pe0: its cache gave 99 blocks", on_cache("pe0", hits=99)),
    ("step bytes", "de0: its cache was asked for 0 blocks", on_cache("de0", looked_up=0)),
    ("step bytes", "no record of its cache", on_cached(lambda m: replace_node(m, "de0", cache=None))),
    ("whole blocks", "expected whole blocks", on_request("a0.1", hit_tokens=100)),
    ("whole blocks", "a token left", on_request("a0.0", hit_tokens=192, prompt_tokens=192)),
    ("whole blocks", "persisted 0", on_request("a0.0", persisted_tokens=0)),
    ("pools whole", "39 free of 40", on_row("pe0", "pools", 0, free=39)),
    ("pools whole", "41 used", on_row("pe0", "pools", 0, peak_used=41)),
    ("received as sent", "sent", on_row("pe0", "received", 0, payload_bytes=1)),
    ("received as sent", "messages", on_row("pe0", "received", 0, messages=1)),
    ("received as sent", "nothing", lambda m: replace_node(m, "st0", received=())),
    ("received as sent", "not its own", stray_transfer),
    ("received as sent", "counted twice", counted_twice),
    ("step bytes", "persist: ", more_on_both_sides),
    ("step bytes", "requests account for", on_request("a0.0", output_tokens=71 + 64)),
    ("step bytes", "pe3: ", of_other_layers),
    ("ports carry transfers", "NICs carried", free_on_a_port),
    ("ports carry transfers", "NICs carried", on_row("pe0", "ports", 0, payload_bytes=1)),
    ("ports carry transfers", "windows hold", on_row("pe0", "ports", 0, windows=(1,))),
    ("rates kept", "above 20000 B/s", double_rate),
    ("rates kept", "not in the topology", unknown_port),
    ("causality", "read_s", on_request("a0.0", allocated_s=100.0)),
    ("causality", "done without first_token_s", on_request("a0.0", first_token_s=None)),
    ("causality", "first_token_s", on_request("a0.0", transferred_s=3.2)),
    ("causality", "without settled_s", on_request("a0.0", settled_s=None)),
    ("causality", "before computed_s", on_request("a0.0", settled_s=1.1)),
    ("turns in order", "arrived at", on_request("a0.1", arrived_s=1.0)),
    ("turns in order", "eligible at", on_request("a0.1", eligible_s=1.0)),
    ("written is read", "had written", hit_less),
    ("breakdown is TTFT", "reading takes", on_request("a0.0", allocated_s=100.0)),
    ("breakdown is TTFT", "without a breakdown", on_request("a0.0", read_s=None)),
    ("breakdown is TTFT", "sums to", on_request("a0.0", eligible_s=float("nan"))),
    ("gaps fill decode", "68 gaps", on_request("a0.0", token_gaps=((0.02, 68),))),
    ("gaps fill decode", "gaps sum", on_request("a0.0", token_gaps=((0.03, 69),))),
    ("clocks", "run lasts", lambda m: records(m, t0_s=-1.0)),
    ("clocks", "outside the run", lambda m: records(m, ended_s=20.0)),
    ("clocks", "go back", on_request("a0.0", token_gaps=((-0.02, 69),))),
    ("clocks", "batches numbered", batch_numbers),
    ("clocks", "batch 1 lasts", batch_backwards),
    ("clocks", "starts before", on_row("pe0", "batches", 1, started_s=0.1)),
    ("batches cover", "end at token", chunk_missing),
    ("batches cover", "expected 110 cached", chunk_twice),
    ("batches cover", "assigned to", on_request("a0.0", pe="pe0/1")),
    ("batches cover", "left no record", on_row("pe0", "batches", 0, requests=("ghost",))),
    ("batches cover", "shapes", on_row("pe0", "batches", 0, shape=())),
    ("batches cover", "is read at", on_row("pe0", "batches", 0, started_s=1.15)),
    ("quota kept", "the quota is 0.3 s", on_row("pe0", "batches", 0, predicted_s=1.001 * QUOTA_S)),
    ("steps together", "2 batches in step 0", on_row("pe0", "batches", 1, step=0)),
    ("steps together", "step 3: pe0/0 ends it", ends_late),
    ("steps together", "step 3: pe0/1 begins it", step_too_early),
    ("collectives at home", "4096 B of collectives", collective),
]

WHOLE = [
    *((system, de_direct, False) for system in (*SYSTEMS.values(), POOLED) for de_direct in (False, True)),
    *((system, direct, True) for system in SYSTEMS.values() if not system.pool for direct in (False, True)),
]
"""Every system, with decode KV by way of the buffer and straight into HBM; with caches where it may have them."""


@given(st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=16, deadline=None)
def test_a_sound_run_breaks_nothing(agents: int, turns: int) -> None:
    """On a run whose every byte, token and stamp is right, every invariant holds."""
    findings = verify.verify(evidence(agents, turns))
    assert [f for f in findings if not f.ok] == []
    assert [f.number for f in findings] == list(range(1, len(verify.INVARIANTS) + 1))


@pytest.mark.parametrize(("system", "de_direct", "cached"), WHOLE)
def test_every_system_has_its_own_account(system: System, de_direct: bool, cached: bool) -> None:
    """Whatever a system loads again, splits, pools or gets free: its account holds for its own runs only."""
    made = evidence(system=system, de_direct=de_direct, cached=cached)
    assert [f for f in verify.verify(made) if not f.ok] == []
    free = msgspec.structs.replace(system, free=not system.free)
    resident = msgspec.structs.replace(system, layerwise=not system.layerwise)
    for changes in ({"system": free}, {"system": resident}, {"de_direct": not de_direct}):
        other = msgspec.structs.replace(made, setup=msgspec.structs.replace(made.setup, **changes))
        assert not next(f for f in verify.verify(other) if f.invariant == "step bytes").ok, changes


@pytest.mark.parametrize(("invariant", "fault", "mutate"), MUTATIONS)
def test_a_broken_run_is_found_out(invariant: str, fault: str, mutate: Mutation) -> None:
    """For every way to break an invariant, its check says so and names the fault."""
    finding = next(f for f in verify.verify(mutate(evidence())) if f.invariant == invariant)
    assert not finding.ok
    assert fault in finding.detail


def test_every_invariant_can_fail() -> None:
    """No invariant is without a run that breaks it."""
    assert {name for name, _, _ in MUTATIONS} == {i.name for i in verify.INVARIANTS}


def test_a_failed_request_loosens_step_bytes_by_its_own_bytes_only() -> None:
    """What a failed request had moved is unknown, up to all of its bytes; others' bytes stay exact."""
    failed = replace_request(
        evidence(), "a0.2", status="failed", error="peer lost", path=None, hit_tokens=0, persisted_tokens=0
    )
    assert next(f for f in verify.verify(failed) if f.invariant == "step bytes").ok
    refused = replace_node(failed, "sched", decisions=())
    assert not next(f for f in verify.verify(refused) if f.invariant == "step bytes").ok


def test_a_failed_request_loosens_what_caches_gave_by_its_own_hit_only() -> None:
    """Whether it had read and what it had found is unknown; all others' part stays exact."""
    failed = replace_request(
        evidence(cached=True), "a0.2", status="failed", error="lost", path=None, hit_tokens=0, persisted_tokens=0
    )
    assert next(f for f in verify.verify(failed) if f.invariant == "step bytes").ok
    asked = node(failed, "pe0").cache
    assert asked is not None
    for more in (-99, 1):
        changed = msgspec.structs.replace(asked, looked_up=asked.looked_up + more)
        wrong = replace_node(failed, "pe0", cache=changed)
        assert not next(f for f in verify.verify(wrong) if f.invariant == "step bytes").ok


def test_one_token_may_take_more_than_the_quota() -> None:
    """A quota below a head's first token does not stop its engine: that token alone is no fault, two are."""
    made = evidence()
    for shape, ok in ((((64, 1),), True), (((64, 2),), False), (((64, 1), (0, 1)), False)):
        batch = BatchRecord("pe0/1", 0, ("a", "b")[: len(shape)], shape, 0.0, 1.0, predicted_s=9.0)
        over = replace_node(made, "pe0", batches=(*node(made, "pe0").batches, batch))
        assert next(f for f in verify.verify(over) if f.invariant == "quota kept").ok is ok


def inside(made: Evidence, name: str, kind: str, rate_bps: float) -> Evidence:
    """DRAM or a PCIe link of de0 is known and has counted 1,000 B a second each way for 100 s."""
    port = Port("de0", name, "de", rate_bps, kind)  # type: ignore[arg-type]
    rows = tuple(
        PortBytes(name, way, 2, 100_000, 100, 100.0, 1.0, (1_000,) * 100, 10) for way in ("read", "write")
    )
    wider = replace_node(made, "de0", ports=(*node(made, "de0").ports, *rows))
    return msgspec.structs.replace(
        wider, setup=msgspec.structs.replace(made.setup, ports=(*made.setup.ports, port))
    )


@pytest.mark.parametrize(
    ("kind", "rate_bps", "ok"), [("dram", 2_000, True), ("dram", 1_500, False), ("pcie", 1_500, True)]
)
def test_what_is_inside_a_node_has_a_rate_and_is_no_nic(kind: str, rate_bps: float, ok: bool) -> None:
    """DRAM's two ways share its rate, PCIe's do not; neither adds to what NICs carried."""
    broken = [f.invariant for f in verify.verify(inside(evidence(), f"{kind}0", kind, rate_bps)) if not f.ok]
    assert broken == ([] if ok else ["rates kept"])


@pytest.mark.parametrize(("surplus", "ok"), [(0, True), (1, False)])
def test_a_stretch_is_credited_with_what_was_under_way_and_no_byte_more(surplus: int, ok: bool) -> None:
    """70 windows at full rate, and in the first one on top: a window's worth, and the bytes under way each way."""
    made, rate_bps, under_way = evidence(), 2_000, (300, 50)
    made = inside(made, "dram0", "dram", rate_bps)
    de = node(made, "de0")
    least = rate_bps // 2 * (1 + verify.RATE_SLACK)
    rows = [
        msgspec.structs.replace(
            p,
            windows=(int(least) + rate_bps // 2 + more + surplus * (p.direction == "read"),) + (int(least),) * 70,
            under_way_bytes=more,
        )
        for p, more in zip(de.ports[-2:], under_way, strict=True)
    ]
    rows = [msgspec.structs.replace(p, payload_bytes=sum(p.windows)) for p in rows]
    credited = replace_node(made, "de0", ports=(*de.ports[:-2], *rows))
    assert [f.invariant for f in verify.verify(credited) if not f.ok] == ([] if ok else ["rates kept"])


def test_cudas_copies_cross_no_nic() -> None:
    """Copies between an engine's DRAM and HBM are on NICs, or on none where they are CUDA's."""
    made = evidence()
    cuda = msgspec.structs.replace(made, setup=msgspec.structs.replace(made.setup, copies="cuda"))
    assert [f.invariant for f in verify.verify(cuda) if not f.ok] == ["ports carry transfers"]
    copies = sum(t.payload_bytes for t in node(made, "de0").sent if t.transfer in ("PE_DE_H2D", "DE_H2D", "D2H"))
    for way in ("read", "write"):
        at, port = next(
            (i, p) for i, p in enumerate(node(cuda, "de0").ports) if (p.nic, p.direction) == ("cnic1", way)
        )
        left = port.payload_bytes - copies
        cuda = row(cuda, "de0", "ports", at, payload_bytes=left, windows=(left,))
    finding = next(f for f in verify.verify(cuda) if f.invariant == "ports carry transfers")
    assert "de0" not in finding.detail and "pe0 read" in finding.detail


def test_groups_that_span_nodes_and_a_stress_may_use_cnics() -> None:
    """Collectives are at home on CNICs where their group lives on several nodes, or where that was asked for."""
    made = collective(evidence())
    for changes in ({"ep_over": "cnic"}, {"groups": (("pe0/0", "pe1/0"),)}):
        other = msgspec.structs.replace(made, setup=msgspec.structs.replace(made.setup, **changes))
        # The made-up ports know nothing of it.
        assert [f.invariant for f in verify.verify(other) if not f.ok] == ["ports carry transfers"]


def test_a_failed_request_of_a_pool_may_have_read_on_either_side() -> None:
    """How much of an unfinished request's hit the pool gave is unknown; that it gave it is not a fault."""
    failed = replace_request(
        evidence(system=POOLED), "a0.1", status="failed", error="lost", path=None, hit_tokens=0, persisted_tokens=0
    )
    assert next(f for f in verify.verify(failed) if f.invariant == "step bytes").ok


def test_tokens_equal_has_no_answer_without_tokens() -> None:
    """Tokens are equal, or not, or nothing was done and there is no answer."""
    made = evidence()
    assert verify.tokens_equal(made) is True
    assert verify.tokens_equal(flipped_token(made)) is False
    assert verify.tokens_equal(records(made, requests=())) is None


def test_many_faults_are_counted_not_listed() -> None:
    """A finding spells out a few faults and counts the rest."""
    made = evidence()
    for r in made.records.requests:
        made = replace_request(made, r.id, model_tokens=())
    finding = next(f for f in verify.verify(made) if f.invariant == "tokens equal")
    assert finding.detail.endswith("and 6 more")


def test_the_document_lists_what_is_checked() -> None:
    """docs/invariants.md has every invariant under its number and name, with the function that checks it."""
    page = (Path(__file__).resolve().parents[1] / "docs" / "invariants.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| (\d+) \| ([^|]+) \| .* \| `(\w+)` \|$", page, re.MULTILINE)
    assert listed == [(str(i.number), i.name, i.check.__name__) for i in verify.INVARIANTS]
