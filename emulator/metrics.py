"""What a run's records say in figures: latencies, balance, bytes per step, the binding resource.

Pure. Times are model seconds; bytes are payload bytes unless a name says ``model``. An empty set has no
figure: its summary is None, never 0. Must not import a role, a fabric implementation or ``report``.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from .fabric.interface import Transfer
from .kvcache import Layout
from .records import NodeRecord, RequestRecord, RunRecords
from .scale import Scale

__all__ = [
    "PHASES",
    "SLO",
    "STEPS",
    "Balance",
    "Binding",
    "Goodput",
    "Port",
    "Setup",
    "Summary",
    "Tokens",
    "agent_jct_s",
    "binding",
    "breakdown",
    "done",
    "e2e_s",
    "goodput",
    "hit_ratio",
    "itl_max_s",
    "jct_s",
    "latency",
    "mean_breakdown",
    "path_share",
    "pooled_gaps",
    "reading_share",
    "snic_balance",
    "step_payload",
    "steps_model_bytes",
    "summarise",
    "summarise_runs",
    "tokens",
    "tpot_s",
    "ttft_s",
    "ttst_s",
    "utilisation",
]

Role = Literal["pe", "de", "storage"]
Direction = Literal["read", "write"]

PHASES = ("scheduling", "allocating", "reading", "prefill", "transfer", "first_decode")
"""The parts of TTFT, in the order in which the report lists them."""

STEPS = tuple(dict.fromkeys(key for t in Transfer if t is not Transfer.OTHER for key in (t.sent, *t.received)))
"""The step keys of the report: pe1..pe9, de1..de7, de_miss, d2h, persist, in the order of their transfers."""

BALANCE_WINDOW_S = 10.0
"""Longest window of the storage-NIC balance; figure 13's own window is not printed, 10 s gives its values."""

BALANCE_WINDOWS = 20
"""A run shorter than 20 such windows is cut into 20, so that the balance is not that of two or three sums."""

HIGH_LOAD = 0.5
"""Load is high in a window whose bytes over all storage NICs are at least this part of the fullest window's."""


class Port(msgspec.Struct, frozen=True):
    """One NIC as configured: ``rate_bps`` payload bytes per model second, in each direction."""

    node: str
    nic: str
    role: Role
    rate_bps: float

    def __post_init__(self) -> None:
        if not 0 < self.rate_bps < math.inf:
            raise ValueError(f"{self.node} {self.nic}: rate {self.rate_bps}: expected a positive, finite number")


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What was fixed before the run began and its figures depend on; ``ports`` are all CNICs and SNICs."""

    layout: Layout
    scale: Scale
    ports: tuple[Port, ...]

    def __post_init__(self) -> None:
        if self.layout.kv_bytes != self.scale.kv_bytes:
            raise ValueError(f"layout of {self.layout.kv_bytes} bytes, scale of {self.scale.kv_bytes}")

    @property
    def token_bytes(self) -> int:
        """Payload bytes of one token's KV over all layers."""
        return self.layout.layers * self.layout.kv_bytes


class Summary(msgspec.Struct, frozen=True):
    """A distribution: mean, percentiles by linear interpolation between the two nearest ranks, and count."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    count: int


class SLO(msgspec.Struct, frozen=True):
    """Limits that a request meets when it is at or below both (the paper's evaluation: 4 s and 50 ms)."""

    ttft_s: float = 4.0
    tpot_s: float = 0.050


class Goodput(msgspec.Struct, frozen=True):
    """Requests that met the SLO: per second of JCT, and as a part of all requests that arrived."""

    rate_rps: float
    share: float


class Tokens(msgspec.Struct, frozen=True):
    """Token counts over the done requests; ``miss`` is what was computed, prompt less hit."""

    prompt: int
    hit: int
    miss: int
    output: int
    persisted: int


class Balance(msgspec.Struct, frozen=True):
    """Storage-NIC Max/Avg: the mean over ``windows`` windows of ``window_s`` in which load was high."""

    max_over_avg: float
    window_s: float
    windows: int


class Binding(msgspec.Struct, frozen=True):
    """The resource class with the highest mean utilisation, and its fullest member."""

    resource: str
    utilisation: float
    fullest: str
    fullest_utilisation: float


def summarise(values: Iterable[float]) -> Summary | None:
    """Summary of plain values; None when there are none."""
    return summarise_runs((value, 1) for value in values)


def summarise_runs(runs: Iterable[tuple[float, int]]) -> Summary | None:
    """Summary of run-length data, (value, how often), as if it were written out in full; None when empty.

    The percentile q of n sorted values interpolates linearly at rank q (n - 1).
    """
    weights: Counter[float] = Counter()
    for value, count in runs:
        if count < 0 or not math.isfinite(value):
            raise ValueError(f"{value!r} x {count}: expected a finite value and a count of 0 or more")
        weights[value] += count
    ordered = sorted((value, count) for value, count in weights.items() if count)
    if not ordered:
        return None
    upto = list(itertools.accumulate(count for _, count in ordered))
    total = upto[-1]

    def at(rank: int) -> float:
        return ordered[bisect.bisect_right(upto, rank)][0]

    def percentile(q: float) -> float:
        place = q * (total - 1)
        low = math.floor(place)
        below, above = at(low), at(min(low + 1, total - 1))
        return below + (above - below) * (place - low)

    return Summary(
        mean=math.fsum(value * count for value, count in ordered) / total,
        p50=percentile(0.50),
        p90=percentile(0.90),
        p95=percentile(0.95),
        p99=percentile(0.99),
        max=ordered[-1][0],
        count=total,
    )


def done(records: RunRecords) -> tuple[RequestRecord, ...]:
    """The requests that finished: latencies and ratios are over these."""
    return tuple(r for r in records.requests if r.status == "done")


def ttft_s(r: RequestRecord) -> float | None:
    """Arrival to the first visible token, transfers and the first decode step included."""
    return None if r.first_token_s is None else r.first_token_s - r.arrived_s


def ttst_s(r: RequestRecord) -> float | None:
    """First visible token to the second; None for fewer than two tokens."""
    return next((gap for gap, count in r.token_gaps if count), None)


def e2e_s(r: RequestRecord) -> float | None:
    """Arrival to the last visible token."""
    return None if r.last_token_s is None else r.last_token_s - r.arrived_s


def tpot_s(r: RequestRecord) -> float | None:
    """(E2E - TTFT) / (tokens - 1); None for fewer than two tokens."""
    if r.output_tokens < 2 or r.first_token_s is None or r.last_token_s is None:
        return None
    return (r.last_token_s - r.first_token_s) / (r.output_tokens - 1)


def itl_max_s(r: RequestRecord) -> float | None:
    """The longest pause between two consecutive tokens that this request's reader saw; None without gaps."""
    return max((gap for gap, count in r.token_gaps if count), default=None)


def pooled_gaps(requests: Iterable[RequestRecord]) -> Summary | None:
    """Inter-token latency with the gaps of all requests in one pool, each gap counted once."""
    return summarise_runs(run for r in requests for run in r.token_gaps)


def breakdown(r: RequestRecord) -> dict[str, float] | None:
    """TTFT in parts (keys ``PHASES``), which sum to it; None when a phase was not reached.

    ``allocating`` is what a request waits for its predecessor's blocks and for its buffers, on both sides of
    ``scheduling``; ``prefill`` includes the wait for a batch.
    """
    eligible, scheduled, allocated, read = r.eligible_s, r.scheduled_s, r.allocated_s, r.read_s
    computed, transferred, first = r.computed_s, r.transferred_s, r.first_token_s
    if eligible is None or scheduled is None or allocated is None or read is None:
        return None
    if computed is None or transferred is None or first is None:
        return None
    return {
        "scheduling": scheduled - eligible,
        "allocating": (eligible - r.arrived_s) + (allocated - scheduled),
        "reading": read - allocated,
        "prefill": computed - read,
        "transfer": transferred - computed,
        "first_decode": first - transferred,
    }


def mean_breakdown(requests: Iterable[RequestRecord]) -> dict[str, float] | None:
    """The mean of each part of TTFT over the requests that have all of them; None when none has."""
    parts = [b for b in map(breakdown, requests) if b is not None]
    if not parts:
        return None
    return {phase: math.fsum(b[phase] for b in parts) / len(parts) for phase in PHASES}


def reading_share(requests: Iterable[RequestRecord]) -> float | None:
    """Reading as a part of TTFT, both summed over the requests; None without TTFT."""
    mean = mean_breakdown(requests)
    total = math.fsum(mean.values()) if mean else 0.0
    return mean["reading"] / total if mean and total > 0 else None


def jct_s(records: RunRecords) -> float | None:
    """Start of the clock to the last token of the last request that finished; None when none did."""
    last = max((r.last_token_s for r in done(records) if r.last_token_s is not None), default=None)
    return None if last is None else last - records.t0_s


def agent_jct_s(records: RunRecords) -> Summary | None:
    """An agent's first arrival to its last token, over the trajectories whose every turn is done."""
    turns: defaultdict[str, list[RequestRecord]] = defaultdict(list)
    for r in records.requests:
        turns[r.trajectory].append(r)
    spans: list[float] = []
    for rows in turns.values():
        ends = [r.last_token_s for r in rows if r.status == "done" and r.last_token_s is not None]
        if len(ends) == len(rows):
            spans.append(max(ends) - min(r.arrived_s for r in rows))
    return summarise(spans)


def goodput(records: RunRecords, slo: SLO = SLO()) -> Goodput | None:  # noqa: B008 (frozen)
    """How much was served within the SLO; a request of one token has no TPOT to miss. None without JCT."""
    jct = jct_s(records)
    if jct is None or jct <= 0:
        return None
    met = 0
    for r in done(records):
        first, pace = ttft_s(r), tpot_s(r)
        met += first is not None and first <= slo.ttft_s and (pace is None or pace <= slo.tpot_s)
    return Goodput(rate_rps=met / jct, share=met / len(records.requests))


def tokens(requests: Iterable[RequestRecord]) -> Tokens:
    """Token counts over ``requests``."""
    rows = list(requests)
    prompt, hit = sum(r.prompt_tokens for r in rows), sum(r.hit_tokens for r in rows)
    return Tokens(
        prompt=prompt,
        hit=hit,
        miss=prompt - hit,
        output=sum(r.output_tokens for r in rows),
        persisted=sum(r.persisted_tokens for r in rows),
    )


def hit_ratio(requests: Iterable[RequestRecord]) -> float | None:
    """Hit tokens over prompt tokens; None without a prompt."""
    counts = tokens(requests)
    return counts.hit / counts.prompt if counts.prompt else None


def path_share(requests: Iterable[RequestRecord], *, by: Literal["requests", "tokens"]) -> dict[str, float | None]:
    """What part of the requests, or of their hit tokens, was read on each path; None without any."""

    def weight(r: RequestRecord) -> int:
        return 1 if by == "requests" else r.hit_tokens

    rows = [r for r in requests if r.path is not None]
    total = sum(map(weight, rows))
    return {p: sum(weight(r) for r in rows if r.path == p) / total if total else None for p in ("pe", "de")}


def step_payload(records: RunRecords) -> dict[str, int]:
    """Payload bytes per key of ``STEPS``: sent keys from what senders counted, received ones from receivers.

    ``de_miss``, ``d2h`` and ``persist`` have one key for both sides and show what was received.
    """
    total: Counter[str] = Counter()
    for node in records.nodes:
        for row in node.sent:
            transfer = Transfer[row.transfer]
            if transfer.sent not in transfer.received:
                total[transfer.sent] += row.payload_bytes
        for row in node.received:
            for key in Transfer[row.transfer].received:
                total[key] += row.payload_bytes
    return {key: total[key] for key in STEPS}


def steps_model_bytes(records: RunRecords, scale: Scale) -> dict[str, int]:
    """``step_payload`` in model bytes (rounded, which moves nothing as long as whole KV entries moved)."""
    return {key: round(payload * scale.shrink) for key, payload in step_payload(records).items()}


def _since(windows: Sequence[int], window_s: float, t0_s: float) -> Sequence[int]:
    return windows[int(t0_s // window_s) :]


def _port_bytes(node: NodeRecord, nic: str, direction: str, t0_s: float) -> int:
    return sum(
        sum(_since(p.windows, p.window_s, t0_s)) for p in node.ports if p.nic == nic and p.direction == direction
    )


def utilisation(records: RunRecords, setup: Setup) -> dict[tuple[str, str, Direction], float] | None:
    """Payload carried over what the port could carry, per (node, nic, direction), over all lanes.

    Time runs from the window that holds t0 to the end of the run; None when no time passed.
    """
    elapsed = records.ended_s - records.t0_s
    if elapsed <= 0:
        return None
    nodes = {n.node: n for n in records.nodes}
    directions: tuple[Direction, Direction] = ("read", "write")
    return {
        (p.node, p.nic, d): _port_bytes(nodes[p.node], p.nic, d, records.t0_s) / (p.rate_bps * elapsed)
        for p in setup.ports
        if p.node in nodes
        for d in directions
    }


def binding(records: RunRecords, setup: Setup) -> Binding | None:
    """What limits the run: of every class of ports, and of the prefill engines, the one busiest on average.

    A class is a role, a kind of NIC and a direction (``pe snic write``). An engine's utilisation is the part
    of the time in which it has a batch, waits for KV inside a batch included.
    """
    ports = utilisation(records, setup)
    if ports is None:
        return None
    roles = {(p.node, p.nic): p.role for p in setup.ports}
    members: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for (node, nic, direction), used in ports.items():
        kind = nic.rstrip("0123456789")
        members[f"{roles[node, nic]} {kind} {direction}"][f"{node} {nic} {direction}"] = used
    elapsed = records.ended_s - records.t0_s
    for node_record in records.nodes:
        for batch in node_record.batches:
            engines = members["pe compute"]
            busy = max(0.0, batch.ended_s - max(batch.started_s, records.t0_s))
            engines[batch.engine] = engines.get(batch.engine, 0.0) + busy / elapsed
    if not members:
        return None

    def mean(resource: str) -> float:
        return math.fsum(members[resource].values()) / len(members[resource])

    # Name breaks ties, so that the same records always give the same report.
    resource = min(members, key=lambda name: (-mean(name), name))
    fullest = min(members[resource], key=lambda name: (-members[resource][name], name))
    return Binding(resource, mean(resource), fullest, members[resource][fullest])


def snic_balance(records: RunRecords, setup: Setup) -> Balance | None:
    """Max/Avg over the storage NICs of all PE and DE nodes, in their write direction (what they read).

    The counters' own windows are joined into windows of at most ``BALANCE_WINDOW_S`` that cut the run into
    at least ``BALANCE_WINDOWS``, as far as the counters' windows are fine enough. Of these count the ones in
    which load is high, and the figure is the mean of their Max/Avg. None when nothing was read.
    """
    serving = {(p.node, p.nic) for p in setup.ports if p.role != "storage" and p.nic.startswith("snic")}
    series: dict[tuple[str, str], list[int]] = {key: [] for key in sorted(serving)}
    width_s: float | None = None
    for node in records.nodes:
        for port in node.ports:
            if port.direction != "write" or (node.node, port.nic) not in serving:
                continue
            if width_s is not None and port.window_s != width_s:
                raise ValueError(f"{node.node} {port.nic}: windows of {port.window_s} s beside {width_s} s")
            width_s = port.window_s
            row = series[node.node, port.nic]
            row.extend([0] * (len(port.windows) - len(row)))
            for i, payload in enumerate(port.windows):
                row[i] += payload
    if width_s is None:
        return None
    elapsed = records.ended_s - records.t0_s
    joined = max(1, int(min(BALANCE_WINDOW_S, elapsed / BALANCE_WINDOWS) / width_s))
    rows = [_since(row, width_s, records.t0_s) for row in series.values()]
    count = max(map(len, rows), default=0)
    sums = [[sum(row[i : i + joined]) for row in rows] for i in range(0, count, joined)]
    fullest = max(map(sum, sums), default=0)
    if fullest == 0:
        return None
    high = [max(w) * len(w) / sum(w) for w in sums if sum(w) >= HIGH_LOAD * fullest]
    return Balance(math.fsum(high) / len(high), joined * width_s, len(high))


def latency(requests: Iterable[RequestRecord], of: Callable[[RequestRecord], float | None]) -> Summary | None:
    """Summary of one latency function over the requests that have it."""
    return summarise(value for value in map(of, requests) if value is not None)
