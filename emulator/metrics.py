"""What a run's records say of its requests: latencies and their parts, token counts, ratios.

Pure. Times are model seconds. An empty set has no figure: its summary is None, never 0. How load lay is in
``balance``, what resources carried in ``usage``, bytes per step in ``steps``; all of them are given a ``Setup``.
Must not import a role, a fabric implementation or ``report``.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from .config import EngineConfig
from .kvcache import Layout
from .records import CacheRecord, RequestRecord, RunRecords
from .scale import Scale
from .systems import SYSTEMS, System

__all__ = [
    "PHASES",
    "SLO",
    "Direction",
    "Goodput",
    "Kind",
    "Port",
    "Setup",
    "Summary",
    "Tokens",
    "agent_jct_s",
    "breakdown",
    "de_hit_tokens",
    "de_pool_tokens",
    "done",
    "dram_pool",
    "e2e_s",
    "goodput",
    "hit_ratio",
    "itl_max_s",
    "jct_s",
    "latency",
    "mean_breakdown",
    "path_share",
    "pool_hit_ratio",
    "pooled_gaps",
    "prefix_caches",
    "reading_share",
    "summarise",
    "summarise_runs",
    "tokens",
    "tpot_s",
    "ttft_s",
    "ttst_s",
    "windows_since",
]

Role = Literal["pe", "de", "storage"]
Direction = Literal["read", "write"]
Kind = Literal["nic", "pcie", "dram"]

PHASES = ("scheduling", "allocating", "reading", "prefill", "transfer", "first_decode")
"""The parts of TTFT, in the order in which the report lists them."""


class Port(msgspec.Struct, frozen=True):
    """A NIC, a GPU's PCIe link or a node's DRAM as configured: ``rate_bps`` payload bytes per model second.

    In each direction, but for DRAM, which is half duplex: both directions share its rate.
    """

    node: str
    nic: str
    role: Role
    rate_bps: float
    kind: Kind = "nic"

    def __post_init__(self) -> None:
        if not 0 < self.rate_bps < math.inf:
            raise ValueError(f"{self.node} {self.nic}: rate {self.rate_bps}: expected a positive, finite number")


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What was fixed before the run began and its figures depend on.

    ``ports`` are all CNICs and SNICs, and the PCIe links and DRAM that a fabric may count beside them.
    ``groups``: engines that synchronise with one another in every layer, each group as its engines' names.
    ``de_direct``, ``ep_over``, ``copies``: the options of the replay. ``prefix_cache``: each node has a cache in
    front of storage. ``quota_s``: attention time of a batch.
    """

    layout: Layout
    scale: Scale
    ports: tuple[Port, ...]
    system: System = SYSTEMS["dualpath"]
    de_direct: bool = False
    prefix_cache: bool = False
    ep_over: Literal["nvlink", "cnic"] = "nvlink"
    copies: Literal["cnic", "cuda"] = "cnic"
    quota_s: float = EngineConfig().quota_s
    groups: tuple[tuple[str, ...], ...] = ()

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


def pool_hit_ratio(requests: Iterable[RequestRecord]) -> float | None:
    """The part of the hit tokens that DRAM gave, a pool or caches, and not storage; None without a hit."""
    rows = list(requests)
    hit = sum(r.hit_tokens for r in rows)
    return sum(r.pool_tokens for r in rows) / hit if hit else None


def dram_pool(records: RunRecords) -> CacheRecord | None:
    """What the directory of the DRAM pool counted, in Full Blocks, all reads included; None without a pool."""
    return next((node.cache for node in records.nodes if node.cache is not None), None)


def prefix_caches(records: RunRecords) -> CacheRecord | None:
    """What the nodes' own caches counted in all, in Full Blocks; None where no node has one."""
    caches = [node.cache for node in records.nodes if node.cache is not None]
    if not caches:
        return None
    fields = CacheRecord.__struct_fields__
    return CacheRecord(**{name: sum(getattr(cache, name) for cache in caches) for name in fields})


def de_hit_tokens(r: RequestRecord) -> int:
    """Hit tokens that were read on the DE side."""
    return {"pe": 0, "de": r.hit_tokens}.get(r.path or "pe", r.de_hit_tokens)


def de_pool_tokens(r: RequestRecord) -> int:
    """Hit tokens that were read on the DE side and that DRAM gave."""
    return {"pe": 0, "de": r.pool_tokens}.get(r.path or "pe", r.pool_de_tokens)


def path_share(requests: Iterable[RequestRecord], *, by: Literal["requests", "tokens"]) -> dict[str, float | None]:
    """What part of the requests took each path, or of their hit tokens was read on each side; None without any.

    Requests that were read on both sides are of neither path: they have a key of their own where there are any.
    """
    rows = [r for r in requests if r.path is not None]
    if by == "requests":
        weights = Counter(str(r.path) for r in rows)
    else:
        weights = Counter(pe=sum(r.hit_tokens - de_hit_tokens(r) for r in rows), de=sum(map(de_hit_tokens, rows)))
    total = weights.total()
    paths = ("pe", "de", "split") if weights["split"] else ("pe", "de")
    return {path: weights[path] / total if total else None for path in paths}


def windows_since(windows: Sequence[int], window_s: float, t0_s: float) -> Sequence[int]:
    """The windows from the one that holds ``t0_s`` on."""
    return windows[int(t0_s // window_s) :]


def latency(requests: Iterable[RequestRecord], of: Callable[[RequestRecord], float | None]) -> Summary | None:
    """Summary of one latency function over the requests that have it."""
    return summarise(value for value in map(of, requests) if value is not None)
