"""Laws of the verdict: a host that kept up makes a run valid, and every way of not keeping up is named."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.judge import KernelLane, KernelPort, Verdict, judge, judge_virtual, kernel_ports, read_rates
from emulator.records import ExchangeRecord, HostSample, RequestRecord
from emulator.systems import SYSTEMS
from emulator.verify import Evidence

from .made_run import RATE_BPS, evidence, replace_node
from .within import assert_within


def kernel_of(made: Evidence) -> tuple[KernelPort, ...]:
    """Counters of a kernel that carried all payload in full frames, and an acknowledgement a segment pair."""
    payload = {(n.node, p.nic, p.direction): p.payload_bytes for n in made.records.nodes for p in n.ports}
    rows = []
    for port in made.setup.ports:
        for direction, other in (("read", "write"), ("write", "read")):
            sent = payload.get((port.node, port.nic, direction), 0)  # type: ignore[arg-type]
            back = payload.get((port.node, port.nic, other), 0)  # type: ignore[arg-type]
            wire = sent * 1514 // 1448 + back // 2896 * 66 + 2000
            rows.append(KernelPort(port.node, port.nic, direction, (KernelLane("kv", wire, 0),), 0))  # type: ignore[arg-type]
    return tuple(rows)


def verdict(made: Evidence, kernel: tuple[KernelPort, ...] | None = None, cores: int = 2) -> Verdict:
    return judge(made.setup, made.records, kernel_of(made) if kernel is None else kernel, cores=cores)


def host(made: Evidence, node: str, **changes: Any) -> Evidence:
    sample = next(n.host for n in made.records.nodes if n.node == node)
    assert sample is not None
    return replace_node(made, node, host=msgspec.structs.replace(sample, **changes))


def row_of(made: Evidence, node: str, **changes: Any) -> Evidence:
    """The same run with fields of the node's first port changed."""
    ports = next(n.ports for n in made.records.nodes if n.node == node)
    return replace_node(made, node, ports=(msgspec.structs.replace(ports[0], **changes), *ports[1:]))


def at_rate(made: Evidence, node: str, share: float) -> Evidence:
    """The same run with the reads of one node at ``share`` of the speed they have."""
    rows = []
    for r in made.records.requests:
        reader = r.pe if r.path == "pe" else r.de
        if reader is not None and reader.startswith(node):
            assert r.read_s is not None
            assert r.allocated_s is not None
            read_s = r.allocated_s + (r.read_s - r.allocated_s) / share
            rows.append(msgspec.structs.replace(r, read_s=read_s))
        else:
            rows.append(r)
    return msgspec.structs.replace(made, records=msgspec.structs.replace(made.records, requests=tuple(rows)))


def test_a_clean_run_is_valid() -> None:
    """Timers on time, a CPU with head-room, links at their rates and clean counters: valid, nothing to say."""
    assert verdict(evidence()) == Verdict("valid", False, ())


def test_virtual_time_is_valid_by_construction() -> None:
    """Virtual time cannot be late; the verdict says that this is why."""
    result = judge_virtual()
    assert result.valid
    assert result.virtual
    assert "virtual" in result.reasons[0]


@pytest.mark.parametrize(
    ("lateness_ms", "word", "dilation"),
    [
        ((25.0, 30.0, 40.0), "median", 25.0),
        ((1.0, 250.0, 900.0), "p99", 25.0),
        ((40.0, 300.0, 900.0), "median", 40.0),
    ],
)
def test_a_starved_node_makes_the_run_invalid(
    lateness_ms: tuple[float, float, float], word: str, dilation: float
) -> None:
    """Late timers are named with their node, and with the dilation at which they would be on time.

    A decode step takes 20 ms at a dilation of 10, so 5 % of it are 10 ms and half of it 100 ms.
    """
    result = verdict(host(evidence(), "pe0", lateness_ms=lateness_ms))
    assert not result.valid
    assert result.reasons[0].startswith("pe0: timers")
    assert word in result.reasons[0]
    assert result.dilation == dilation


@given(st.floats(0.01, 1000.0))
def test_the_dilation_that_would_do_does(late_ms: float) -> None:
    """At the advised dilation the same lateness passes; there is no advice where it passed already."""
    made = host(evidence(1, 1), "de0", lateness_ms=(late_ms, late_ms, late_ms))
    result = verdict(made)
    assert result.valid == (result.dilation is None)
    if result.dilation is not None:
        scale = msgspec.structs.replace(made.setup.scale, dilation=result.dilation)
        slower = msgspec.structs.replace(made, setup=msgspec.structs.replace(made.setup, scale=scale))
        assert verdict(slower).valid


def exchanging(made: Evidence, node: str, *late: tuple[float, int]) -> Evidence:
    """The same run with exchanges of the node's that began late, as (seconds of wall time, how many)."""
    rows = tuple((seconds / made.setup.scale.dilation, count) for seconds, count in late)
    count = sum(count for _, count in late)
    longest_s = max(seconds for seconds, _ in rows)
    record = ExchangeRecord("pe", 1, 4096, count, 0.01 * count, 0.02, longest_s, late=rows)
    return replace_node(made, node, exchanges=(record,))


def test_exchanges_that_begin_late_make_the_run_invalid() -> None:
    """One in fifty a quarter of a decode step late is a fault of its node's, with a dilation; one in 200 is none.

    A decode step takes 20 ms at a dilation of 10, so a tenth of it is 20 ms.
    """
    assert verdict(exchanging(evidence(), "pe0", (0.001, 199), (0.05, 1))).valid
    assert verdict(exchanging(evidence(), "pe0", (0.02, 200))).valid
    result = verdict(exchanging(evidence(), "pe0", (0.001, 196), (0.05, 4)))
    assert result.reasons == (
        "pe0: exchanges of pe 50 ms late (p99), above 10% of a decode step (200 ms of wall time)",
    )
    assert result.dilation == 25.0


@given(st.floats(1e-4, 10.0), st.integers(1, 300))
def test_late_exchanges_are_on_time_at_the_dilation_that_would_do(late_s: float, count: int) -> None:
    """The host is late by the same wall time then, which is a smaller part of a step."""
    made = evidence(1, 1)
    result = verdict(exchanging(made, "de0", (late_s, count)))
    assert result.valid == (late_s <= 0.02)
    if result.dilation is not None:
        scale = msgspec.structs.replace(made.setup.scale, dilation=result.dilation)
        slower = msgspec.structs.replace(made, setup=msgspec.structs.replace(made.setup, scale=scale))
        assert verdict(exchanging(slower, "de0", (late_s, count))).valid


@pytest.mark.parametrize("name", ["oracle", "dualpath"])
@pytest.mark.parametrize("share", [0.019, 0.06])
def test_what_is_free_must_take_next_to_no_time(name: str, share: float) -> None:
    """Where reads are free, taking more than a fiftieth of TTFT is the host's fault; elsewhere they take time."""
    made = evidence()
    rows = []
    for r in made.records.requests:
        assert r.first_token_s is not None
        assert r.computed_s is not None
        took_s = share * (r.first_token_s - r.arrived_s)
        rows.append(msgspec.structs.replace(r, read_s=r.allocated_s, transferred_s=r.computed_s + took_s))
    records = msgspec.structs.replace(made.records, requests=tuple(rows))
    setup = msgspec.structs.replace(made.setup, system=SYSTEMS[name])
    result = judge(setup, records, kernel_of(made), cores=2)
    found = [reason for reason in result.reasons if "free" in reason]
    assert bool(found) == (name == "oracle" and share > 0.02)
    if found:
        assert f"took {share:.1%} of TTFT" in found[0]
        assert result.dilation is not None
        assert result.dilation > setup.scale.dilation


def test_a_cpu_without_head_room_is_invalid() -> None:
    """Six nodes that used 95 % of two cores: invalid, with the dilation that brings them to the limit."""
    made = evidence()
    for n in made.records.nodes:
        made = host(made, n.node, cpu_s=0.95 * 2 / 6 * 400)
    result = verdict(made)
    assert [r for r in result.reasons if "CPU" in r and "95%" in r]
    assert result.dilation == 12.0
    assert verdict(made, cores=4).valid


@pytest.mark.parametrize(("share", "found"), [(0.5, "48.5%"), (2.0, "194.0%")])
@pytest.mark.parametrize("node", ["pe0", "de0"])
def test_a_port_at_the_wrong_rate_is_named(node: str, share: float, found: str) -> None:
    """A storage NIC at half or double its rate is named with its direction; slowing down is no remedy."""
    result = verdict(at_rate(evidence(), node, share))
    assert not result.valid
    assert len(result.reasons) == 1
    assert f"{node} snic0 write: {found}" in result.reasons[0]
    assert result.dilation is None


def test_a_slow_storage_is_no_fault_of_the_readers_link() -> None:
    """Where all storage nodes together offer less than the readers take, a reader is held to its share."""
    made = evidence()
    slow = tuple(
        msgspec.structs.replace(p, rate_bps=RATE_BPS / 2) if p.role == "storage" else p for p in made.setup.ports
    )
    setup = msgspec.structs.replace(made.setup, ports=slow)
    rates = {rate.node: rate for rate in read_rates(setup, at_rate(made, "pe0", 0.5).records)}
    assert rates["pe0"].rate_bps == RATE_BPS / 2
    assert_within(rates["pe0"].share, 0.97, rel=1e-9)


def test_reads_too_short_to_tell_are_not_judged() -> None:
    """A read that needs less wire time than a call and a file read take says nothing about the link."""
    made = evidence()
    fast = msgspec.structs.replace(made.setup, scale=msgspec.structs.replace(made.setup.scale, dilation=0.1))
    assert read_rates(fast, made.records) == ()
    assert len(read_rates(made.setup, made.records)) == 2


def test_overlapping_reads_share_their_time() -> None:
    """Two reads at once keep the link busy once: bytes add up, seconds do not."""
    made = evidence()
    one = next(r for r in made.records.requests if r.hit_tokens)
    assert one.allocated_s is not None
    assert one.read_s is not None
    both = tuple(msgspec.structs.replace(one, id=i, read_s=2 * one.read_s - one.allocated_s) for i in "ab")
    rates = read_rates(made.setup, msgspec.structs.replace(made.records, requests=both))
    assert [r.payload_bytes for r in rates] == [2 * one.hit_tokens * 12]
    assert_within(rates[0].share, 0.97, rel=1e-9)


def test_where_a_cache_gave_some_nothing_can_be_told() -> None:
    """A stretch with such a read in it is left out, as a whole; others are judged as ever."""
    made = evidence()
    reads = [r for r in made.records.requests if r.hit_tokens and r.path == "pe"]
    first, last = reads[0], reads[-1]
    assert first.allocated_s is not None and first.read_s is not None
    cached = msgspec.structs.replace(first, id="cached", pool_tokens=64, allocated_s=first.read_s - 0.01)

    def payload(*rows: RequestRecord) -> list[int]:
        records = msgspec.structs.replace(made.records, requests=rows)
        return [rate.payload_bytes for rate in read_rates(made.setup, records)]

    assert payload(first, last) == [(first.hit_tokens + last.hit_tokens) * 12]
    assert payload(first, cached, last) == [last.hit_tokens * 12]
    assert payload(cached) == []


def test_resent_segments_beyond_a_few_are_invalid() -> None:
    """The fabric is lossless: a few spurious timeouts pass, a steady loss does not."""
    assert verdict(host(evidence(), "pe0", retransmits=20)).valid
    result = verdict(host(evidence(), "pe0", retransmits=500))
    assert result.reasons == ("pe0: 500 segments sent again, allowed 21",)


def kernel_with(made: Evidence, **changes: Any) -> tuple[KernelPort, ...]:
    first, *rest = kernel_of(made)
    return (msgspec.structs.replace(first, **changes), *rest)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lanes": (KernelLane("kv", 30_000, 3),)}, "pe0 cnic0 read: 3 packets dropped on lane kv"),
        ({"direct_packets": 2}, "pe0 cnic0 read: 2 packets passed unshaped"),
        ({"lanes": (KernelLane("kv", 100, 0),)}, "the kernel carried 100 B"),
        ({"lanes": (KernelLane("kv", 3_000_000, 0),)}, "the kernel carried 3000000 B"),
        ({"nic": "cnic7"}, "pe0 cnic0 read: no counters from the kernel"),
    ],
)
def test_kernel_counters_must_be_clean_and_agree(changes: dict[str, Any], reason: str) -> None:
    """Drops, unshaped packets, and bytes that the processes did not count, or counted alone, are named."""
    made = evidence()
    result = verdict(made, kernel_with(made, **changes))
    assert not result.valid
    assert any(reason in r for r in result.reasons)


def test_small_messages_cost_their_headers_and_completions() -> None:
    """A kernel that carried 200 bytes more a message, there and back, carried nothing that is not ours."""
    made = evidence()
    small = row_of(made, "pe0", messages=20_000)
    lanes = (KernelLane("kv", 20_000 * 200, 0),)
    clean = tuple(
        msgspec.structs.replace(k, lanes=lanes) if (k.node, k.nic, k.direction) == ("pe0", "cnic0", "read") else k
        for k in kernel_of(small)
    )
    assert verdict(small, clean).valid
    assert not verdict(made, clean).valid


def test_what_nobody_measured_is_not_valid() -> None:
    """Without kernel counters, or without a node's own sample, a run cannot be called valid."""
    made = evidence()
    unread = judge(made.setup, made.records, None, cores=2)
    assert unread.reasons == ("kernel: nobody read the links' counters",)
    silent = verdict(replace_node(made, "st1", host=None))
    assert silent.reasons == ("st1: no sample of its timers and CPU time",)


def test_one_second_of_lateness_is_not_excused_by_idle_nodes() -> None:
    """Every node is judged by itself: one late node among idle ones is enough."""
    late = HostSample((30.0, 40.0, 50.0), 1.0, 400.0, 0)
    assert not verdict(replace_node(evidence(), "st0", host=late)).valid


class Lane(msgspec.Struct):
    lane: str
    sent_bytes: int
    drops: int


class Reading(msgspec.Struct):
    node: str
    nic: str
    direction: Literal["read", "write"]
    lanes: tuple[Lane, ...]
    direct_packets: int


def test_a_run_owns_what_the_kernel_counted_meanwhile() -> None:
    """Counters run on from one run to the next; a run's own are the end less the start."""
    before = Reading("pe0", "snic0", "write", (Lane("high", 5, 0), Lane("kv", 100, 2)), 1)
    after = Reading("pe0", "snic0", "write", (Lane("high", 5, 0), Lane("kv", 400, 3)), 1)
    lanes = (KernelLane("high", 0, 0), KernelLane("kv", 300, 1))
    assert kernel_ports([before], [after]) == (KernelPort("pe0", "snic0", "write", lanes, 0),)


@pytest.mark.parametrize("which", ["start", "end"])
def test_a_port_read_once_has_no_count(which: str) -> None:
    """A port missing from one of the two readings is a fault, not a count of zero."""
    reading = [Reading("pe0", "snic0", "write", (), 0)]
    with pytest.raises(ValueError, match=f"{which} of the run only"):
        kernel_ports(reading if which == "start" else [], reading if which == "end" else [])


def test_a_network_that_changed_is_invalid() -> None:
    """A link that was no longer as asked for at the end voids the run."""
    made = evidence()
    result = judge(made.setup, made.records, kernel_of(made), cores=2, network_faults=("pe0 snic0: rate 1",))
    assert result.reasons == ("network: pe0 snic0: rate 1",)
