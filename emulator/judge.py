"""The verdict: did the host keep up, so that a run's times mean what they say?

Pure over samples. A run on real sockets is valid when timers were on time, exchanges began on time, the CPU had
head-room, nothing was dropped, sent again or left unshaped, the kernel counted what the processes counted, and
storage NICs that were kept busy ran at their rates. Virtual time cannot be late: its verdict is valid and says
why.

Must not import ``topology``: what the kernel counted comes in as ``KernelPort``.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import msgspec

from . import metrics
from .metrics import Setup
from .records import RequestRecord, RunRecords

__all__ = ["KernelLane", "KernelPort", "Limits", "ReadRate", "Verdict", "judge", "judge_virtual", "read_rates"]

MSS_BYTES = 1448
FRAME_BYTES = 1514
ACK_BYTES = 66
"""TCP payload and frame of a full segment at MTU 1500 with time stamps, and a bare acknowledgement."""

MESSAGE_BYTES = 256
FEEDBACK_BYTES = 160
"""What a message costs at most beside its payload: a header with its extents and a part-filled segment on its
way, a completion and an acknowledgement on the way back."""


class KernelLane(msgspec.Struct, frozen=True):
    """What one shaping class counted over the run: bytes with all headers, and packets dropped."""

    lane: str
    wire_bytes: int
    drops: int


class KernelPort(msgspec.Struct, frozen=True):
    """One direction of one NIC as the kernel counted it, end of the run less its start.

    ``direct_packets`` bypassed every class, so they were not shaped.
    """

    node: str
    nic: str
    direction: Literal["read", "write"]
    lanes: tuple[KernelLane, ...]
    direct_packets: int


class LaneCount(Protocol):
    """A class's running counters, as ``topology`` reads them off the kernel."""

    @property
    def lane(self) -> str: ...
    @property
    def sent_bytes(self) -> int: ...
    @property
    def drops(self) -> int: ...


class PortCount(Protocol):
    """A port direction's running counters, as ``topology`` reads them off the kernel."""

    @property
    def node(self) -> str: ...
    @property
    def nic(self) -> str: ...
    @property
    def direction(self) -> Literal["read", "write"]: ...
    @property
    def lanes(self) -> Sequence[LaneCount]: ...
    @property
    def direct_packets(self) -> int: ...


def kernel_ports(before: Sequence[PortCount], after: Sequence[PortCount]) -> tuple[KernelPort, ...]:
    """What the kernel counted between two readings of the same ports; ValueError where they are not the same."""
    start = {(p.node, p.nic, p.direction): p for p in before}
    ports = []
    for end in after:
        begin = start.pop((end.node, end.nic, end.direction), None)
        if begin is None:
            raise ValueError(f"{end.node} {end.nic} {end.direction}: counted at the end of the run only")
        lanes = tuple(
            KernelLane(b.lane, b.sent_bytes - a.sent_bytes, b.drops - a.drops)
            for a, b in zip(begin.lanes, end.lanes, strict=True)
        )
        direct = end.direct_packets - begin.direct_packets
        ports.append(KernelPort(end.node, end.nic, end.direction, lanes, direct))
    for node, nic, direction in start:
        raise ValueError(f"{node} {nic} {direction}: counted at the start of the run only")
    return tuple(ports)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What still counts as keeping up.

    Lateness is held against the shorter of a decode step and a prefill batch, in wall time. Layers and steps
    sleep to deadlines that are chained to one another, so a late wake-up delays a release once and does not
    add up; a median of 5 % keeps the shift below what parity promises, and at half a step in the 99th
    percentile the next deadline is still ahead. ``exchange_late_p99``: an exchange's ideal times are the
    model's however late its bytes leave, but KV beside it and what its forward sends are late by as much. A
    forward of 60 layers is a chain of 60 exchanges, so that one in a hundred is one in every other forward.
    On two cores (`emulate run 2p1d`, with and without `--ep-over cnic`) it was 4 to 9 % of a step where the
    host kept up, and 16 to 43 % beside other work or at a half and a quarter of the default dilation, where
    JCT was 1.2 to 2 times that of virtual time. It does not say how much of an exchange's duration is the
    host's. ``free_share``: of the time until an oracle's first tokens, what its free reads and transfers took
    all the same; loads into HBM, which nobody times, take as long again. Measured on two cores (`emulate run
    1p1d --system oracle`, decisions of virtual time replayed): 7 % at a dilation of 8, where JCT was 12 to
    15 % above virtual time's, and 2 % at 24, where it was 5 %. ``cpu_share``: above 85 % of all cores runnable
    tasks queue for a core for as long as they run.
    ``resent_share``: a lossless fabric loses nothing (drops are counted by the kernel, and none is allowed),
    but TCP probes a host that is late to acknowledge; above 1 % of all segments that costs goodput. ``slow``
    and ``fast``: shaped links reach their rate to 1 %; a read adds calls and file reads of a few milliseconds
    to at least ``read_wall_s`` of wire time. ``count_slack`` and ``count_slack_bytes``: segments sent again,
    and handshakes.
    """

    lateness_median: float = 0.05
    lateness_p99: float = 0.50
    free_share: float = 0.02
    exchange_late_p99: float = 0.10
    cpu_share: float = 0.85
    resent_share: float = 0.01
    resent_packets: int = 20
    slow: float = 0.90
    fast: float = 1.02
    read_wall_s: float = 0.2
    count_slack: float = 0.02
    count_slack_bytes: int = 256 << 10


class Verdict(msgspec.Struct, frozen=True):
    """``dilation``: wall seconds per model second that would do, where slowing down helps; else None."""

    verdict: Literal["valid", "invalid"]
    virtual: bool
    reasons: tuple[str, ...]
    dilation: float | None = None

    @property
    def valid(self) -> bool:
        return self.verdict == "valid"


class ReadRate(msgspec.Struct, frozen=True):
    """What a node's storage NIC achieved while hit blocks were outstanding, over the reads long enough to tell."""

    node: str
    nic: str
    payload_bytes: int
    busy_s: float
    rate_bps: float
    """What it should achieve: its own rate, or its share of the storage nodes' where that is less."""

    @property
    def share(self) -> float:
        """Achieved over configured rate."""
        return self.payload_bytes / self.busy_s / self.rate_bps if self.busy_s > 0 else math.inf


class _Fault(msgspec.Struct, frozen=True):
    """A reason, and by what the dilation would have to grow to remove it (None: it would not help)."""

    reason: str
    stretch: float | None = None


def judge_virtual() -> Verdict:
    """The verdict of a run in virtual time."""
    return Verdict("valid", True, ("virtual time: nothing can be late",))


def judge(
    setup: Setup,
    records: RunRecords,
    kernel: Sequence[KernelPort] | None,
    *,
    cores: int,
    network_faults: Sequence[str] = (),
    limits: Limits = Limits(),  # noqa: B008 (frozen)
) -> Verdict:
    """Judge a run on real sockets.

    ``kernel`` None: nobody read the kernel's counters, which is a reason too. ``network_faults``: how the
    network differed from what was asked for when it was read back at the end.
    """
    faults = [
        *(_Fault(f"network: {fault}") for fault in network_faults),
        *_lateness(setup, records, limits),
        *_late_exchanges(setup, records, limits),
        *_free(setup, records, limits),
        *_cpu(records, cores, limits),
        *_resent(records, limits),
        *_kernel(setup, records, kernel, limits),
        *_read_rates(setup, records, limits),
    ]
    stretches = [f.stretch for f in faults if f.stretch is not None]
    return Verdict(
        verdict="invalid" if faults else "valid",
        virtual=False,
        reasons=tuple(f.reason for f in faults),
        dilation=_round_up(setup.scale.dilation * max(stretches)) if stretches else None,
    )


def _round_up(value: float) -> float:
    """To two significant digits, never down."""
    digits = 1 - math.floor(math.log10(value))
    scaled = value * 10.0**digits
    # A value that is its own two digits must not be pushed up by the last bit of the multiplication.
    whole = round(scaled) if math.isclose(scaled, round(scaled), rel_tol=1e-9) else math.ceil(scaled)
    return whole / 10.0**digits if digits >= 0 else whole * 10.0**-digits


def _step(setup: Setup, records: RunRecords) -> tuple[str, float] | None:
    """The shorter of a decode step and a prefill batch, by their medians: its name, and its wall milliseconds."""
    gaps = metrics.pooled_gaps(records.requests)
    batches = metrics.summarise(b.ended_s - b.started_s for n in records.nodes for b in n.batches)
    units = (("decode step", gaps), ("prefill batch", batches))
    walls = [(1e3 * s.p50 * setup.scale.dilation, name) for name, s in units if s is not None and s.p50 > 0]
    if not walls:
        return None
    wall_ms, name = min(walls)
    return name, wall_ms


def _lateness(setup: Setup, records: RunRecords, limits: Limits) -> Iterator[_Fault]:
    step = _step(setup, records)
    for node in records.nodes:
        if node.host is None:
            yield _Fault(f"{node.node}: no sample of its timers and CPU time")
        elif step is not None:
            median_ms, p99_ms, _ = node.host.lateness_ms
            yield from _late(f"{node.node}: timers", "median", median_ms, limits.lateness_median, step)
            yield from _late(f"{node.node}: timers", "p99", p99_ms, limits.lateness_p99, step)


def _late_exchanges(setup: Setup, records: RunRecords, limits: Limits) -> Iterator[_Fault]:
    step = _step(setup, records)
    if step is None:
        return
    for node in records.nodes:
        for ring in sorted({e.ring for e in node.exchanges}):
            late = metrics.summarise_runs(run for e in node.exchanges if e.ring == ring for run in e.late)
            if late is not None:
                late_ms = 1e3 * late.p99 * setup.scale.dilation
                yield from _late(
                    f"{node.node}: exchanges of {ring}", "p99", late_ms, limits.exchange_late_p99, step
                )


def _late(what: str, which: str, late_ms: float, part: float, step: tuple[str, float]) -> Iterator[_Fault]:
    """``late_ms`` of wall time against a part of a step. Lateness is the host's: a longer step has room for it."""
    name, wall_ms = step
    if not late_ms <= part * wall_ms:
        yield _Fault(
            f"{what} {late_ms:.3g} ms late ({which}), above {part:.0%} of a {name}"
            f" ({wall_ms:.3g} ms of wall time)",
            late_ms / (part * wall_ms),
        )


def _free(setup: Setup, records: RunRecords, limits: Limits) -> Iterator[_Fault]:
    """What an oracle is given costs nothing, but moving it takes this host time: its part of TTFT."""
    if not setup.system.free:
        return
    took_s, ttft_s = [], []
    for r in records.requests:
        if r.first_token_s is None:
            continue
        ttft_s.append(r.first_token_s - r.arrived_s)
        for since_s, until_s in ((r.allocated_s, r.read_s), (r.computed_s, r.transferred_s)):
            if since_s is not None and until_s is not None:
                took_s.append(until_s - since_s)
    total_s = math.fsum(ttft_s)
    share = math.fsum(took_s) / total_s if total_s > 0 else 0.0
    if not share <= limits.free_share:
        yield _Fault(
            f"what {setup.system.name} is given free took {share:.1%} of TTFT, above {limits.free_share:.0%}",
            share / limits.free_share,
        )


def _cpu(records: RunRecords, cores: int, limits: Limits) -> Iterator[_Fault]:
    hosts = [n.host for n in records.nodes if n.host is not None and n.host.wall_s > 0]
    if hosts:
        share = math.fsum(h.cpu_s / h.wall_s for h in hosts) / cores
        if not share <= limits.cpu_share:
            yield _Fault(
                f"CPU: the nodes used {share:.0%} of {cores} cores, above {limits.cpu_share:.0%}",
                share / limits.cpu_share,
            )


def _resent(records: RunRecords, limits: Limits) -> Iterator[_Fault]:
    for node in records.nodes:
        if node.host is not None:
            packets = sum(row.payload_bytes / MSS_BYTES + row.messages for row in node.sent)
            allowed = limits.resent_packets + limits.resent_share * packets
            if node.host.retransmits > allowed:
                yield _Fault(f"{node.node}: {node.host.retransmits} segments sent again, allowed {allowed:.0f}")


def _kernel(
    setup: Setup, records: RunRecords, kernel: Sequence[KernelPort] | None, limits: Limits
) -> Iterator[_Fault]:
    if kernel is None:
        yield _Fault("kernel: nobody read the links' counters")
        return
    payload: Counter[tuple[str, str, str]] = Counter()
    messages: Counter[tuple[str, str, str]] = Counter()
    for node in records.nodes:
        for p in node.ports:
            payload[node.node, p.nic, p.direction] += p.payload_bytes
            messages[node.node, p.nic, p.direction] += p.messages
    counted = {(k.node, k.nic, k.direction) for k in kernel}
    for port in (port for port in setup.ports if port.kind == "nic"):
        for direction in ("read", "write"):
            if (port.node, port.nic, direction) not in counted:
                yield _Fault(f"{port.node} {port.nic} {direction}: no counters from the kernel")
    for k in kernel:
        name = f"{k.node} {k.nic} {k.direction}"
        for lane in k.lanes:
            if lane.drops:
                yield _Fault(f"{name}: {lane.drops} packets dropped on lane {lane.lane}")
        if k.direct_packets:
            yield _Fault(f"{name}: {k.direct_packets} packets passed unshaped")
        here = (k.node, k.nic, k.direction)
        there = (k.node, k.nic, "write" if k.direction == "read" else "read")
        sent = payload[here]
        wire = sum(lane.wire_bytes for lane in k.lanes)
        # At most a frame a segment, and an acknowledgement for every segment that went the other way.
        segments = (sent * FRAME_BYTES + payload[there] * ACK_BYTES) / MSS_BYTES
        most = segments * (1 + limits.count_slack) + limits.count_slack_bytes
        most += MESSAGE_BYTES * messages[here] + FEEDBACK_BYTES * messages[there]
        if not sent <= wire <= most:
            yield _Fault(
                f"{name}: the kernel carried {wire} B, the processes' {sent} B of payload need up to {most:.0f}"
            )


def read_rates(setup: Setup, records: RunRecords, limits: Limits = Limits()) -> tuple[ReadRate, ...]:  # noqa: B008
    """What the storage NICs of PE and DE nodes achieved while they had reads outstanding.

    These are the only port directions whose rate a run can tell: from a request's ``allocated_s`` to its
    ``read_s`` all its hit blocks are asked for at once, and the storage nodes together offer more than all
    readers take, so nothing but the NIC's own write direction may hold them up. A CNIC waits for compute,
    for credits and for its peers' ports. Overlapping reads of a node are one stretch; a stretch counts when
    its bytes need ``read_wall_s`` of wall time or more at the configured rate.

    Nothing can be told where reads are free, where a pool gives a part of them over other NICs, or where a
    request is read on two sides, of which one waits for the other; nor of a stretch in which a node's own cache
    gave some: what is left of a read may be so little that its calls take as long.
    """
    if setup.system.free or setup.system.pool or any(r.path == "split" for r in records.requests):
        return ()
    serving = {p.node: p for p in setup.ports if p.role != "storage" and p.nic.startswith("snic")}
    offered = math.fsum(p.rate_bps for p in setup.ports if p.role == "storage")
    reads: defaultdict[str, list[RequestRecord]] = defaultdict(list)
    for r in metrics.done(records):
        engine = r.pe if r.path == "pe" else r.de
        if engine is not None and r.hit_tokens:
            reads[engine.partition("/")[0]].append(r)
    rates = []
    for node in sorted(reads):
        rate = min(serving[node].rate_bps, offered / len(serving))
        total, busy_s = 0, 0.0
        for payload, seconds in _stretches(reads[node], setup.token_bytes):
            if payload / rate * setup.scale.dilation >= limits.read_wall_s:
                total += payload
                busy_s += seconds
        if total:
            rates.append(ReadRate(node, serving[node].nic, total, busy_s, rate))
    return tuple(rates)


def _stretches(reads: Sequence[RequestRecord], token_bytes: int) -> Iterator[tuple[int, float]]:
    """(payload bytes, seconds) of every stretch of time in which at least one of ``reads`` is outstanding.

    Those are left out in which not all came from storage.
    """
    spans = sorted(
        (r.allocated_s, r.read_s, r.hit_tokens * token_bytes, not r.pool_tokens)
        for r in reads
        if r.allocated_s is not None and r.read_s is not None
    )
    payload, begin, end, whole = 0, 0.0, -math.inf, True
    for start, stop, size, stored in spans:
        if start > end:
            if payload and whole:
                yield payload, end - begin
            payload, begin, end, whole = 0, start, stop, True
        payload, end, whole = payload + size, max(end, stop), whole and stored
    if payload and whole:
        yield payload, end - begin


def _read_rates(setup: Setup, records: RunRecords, limits: Limits) -> Iterator[_Fault]:
    for rate in read_rates(setup, records, limits):
        if not limits.slow <= rate.share <= limits.fast:
            yield _Fault(
                f"{rate.node} {rate.nic} write: {rate.share:.1%} of its rate over {rate.busy_s:.3g} s of reading,"
                f" expected {limits.slow:.0%} to {limits.fast:.0%}"
            )
