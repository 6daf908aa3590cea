"""The invariants of a finished run, each a named check over its records (docs/invariants.md).

Pure. A check yields one line for every fault it finds; an invariant without a fault holds. Nothing here is
estimated: bytes are compared to the byte and tokens one by one. Only links and clocks have tolerances, and
those are named constants. Must not import a role or a fabric implementation.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping

import msgspec

from . import metrics
from .balance import group_steps
from .fabric.interface import Transfer
from .records import BatchRecord, Decision, PortBytes, RequestRecord, RunRecords, TransferBytes
from .steps import COPIES, Chunk, as_steps, expected_transfers, step_payload

__all__ = ["INVARIANTS", "Evidence", "Finding", "Invariant", "tokens_equal", "verify"]

PHASE_STAMPS = (
    "arrived_s",
    "eligible_s",
    "scheduled_s",
    "allocated_s",
    "read_s",
    "prefill_start_s",
    "computed_s",
    "transferred_s",
    "first_token_s",
    "last_token_s",
)
"""A request's stamps in the order in which its phases end."""

RATE_SLACK = 0.01
"""How far above its rate a shaped link may run: the accuracy that ``scripts/bench links`` holds links to."""

CLOCK_SLACK_S = 1e-6
"""Rounding of a sum of a few stamps of up to 1e9 s, and of one token gap."""

ROUNDING = 1e-9
"""A packer adds requests' predicted times one by one, the record's prediction is of all at once."""

SHOWN = 3
"""Faults that a finding spells out; the rest are counted."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What a verification looks at.

    ``expected``: the reference's tokens of every request that arrived, by request id; there need be none of one
    that was not served. ``continues``: request id to whether its prompt begins with all of its predecessor's
    prompt and output; ids may be missing.
    """

    setup: metrics.Setup
    records: RunRecords
    expected: Mapping[str, tuple[int, ...]]
    continues: Mapping[str, bool] = {}


class Finding(msgspec.Struct, frozen=True):
    """What became of one invariant: ``detail`` is the law where it holds, and the faults where it does not."""

    number: int
    invariant: str
    ok: bool
    detail: str


class Invariant(msgspec.Struct, frozen=True):
    """A law by number and name, and the check that yields its faults."""

    number: int
    name: str
    law: str
    check: Callable[[Evidence], Iterator[str]]


def verify(evidence: Evidence) -> list[Finding]:
    """Check every invariant, in the order of their numbers."""
    findings = []
    for invariant in INVARIANTS:
        faults = list(invariant.check(evidence))
        more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        detail = "; ".join(faults[:SHOWN]) + more if faults else invariant.law
        findings.append(Finding(invariant.number, invariant.name, not faults, detail))
    return findings


def tokens_equal(evidence: Evidence) -> bool | None:
    """Whether every done request's tokens are the reference's; None when no request is done."""
    if not metrics.done(evidence.records):
        return None
    return next(_tokens_equal(evidence), None) is None


def _requests_conserved(evidence: Evidence) -> Iterator[str]:
    seen = Counter(r.id for r in evidence.records.requests)
    for name, times in seen.items():
        if times > 1:
            yield f"{name}: {times} records of one request"
    for name in sorted(evidence.expected.keys() - seen.keys()):
        yield f"{name}: arrived and left no record"
    for r in evidence.records.requests:
        if r.status == "done" and r.error is not None:
            yield f"{r.id}: done, yet with an error: {r.error}"
        if r.status != "done" and r.error is None:
            yield f"{r.id}: {r.status} without a reason"
        if r.status == "done" and (r.path is None or r.pe is None or r.de is None):
            yield f"{r.id}: done without engines and a path"


def _tokens_equal(evidence: Evidence) -> Iterator[str]:
    for r in metrics.done(evidence.records):
        expected = evidence.expected.get(r.id)
        if expected is None:
            yield f"{r.id}: the reference has no tokens of it"
        elif len(r.model_tokens) != r.output_tokens + 1 or len(expected) != r.output_tokens + 1:
            yield (
                f"{r.id}: {len(r.model_tokens)} tokens, the reference has {len(expected)},"
                f" its output needs {r.output_tokens + 1}"
            )
        elif r.model_tokens != expected:
            at = next(i for i, (got, want) in enumerate(zip(r.model_tokens, expected, strict=True)) if got != want)
            yield f"{r.id}: token {at} is {r.model_tokens[at]}, the reference has {expected[at]}"


def _decisions_followed(evidence: Evidence) -> Iterator[str]:
    decisions = [d for node in evidence.records.nodes for d in node.decisions]
    for name, times in Counter(d.request for d in decisions).items():
        if times > 1:
            yield f"{name}: decided {times} times"
    by_request = {d.request: d for d in decisions}
    requests = {r.id: r for r in evidence.records.requests}
    block = evidence.setup.layout.block_tokens
    for name in sorted(by_request.keys() - requests.keys()):
        yield f"{name}: decided and left no record"
    for d in decisions:
        if not 0 <= d.split_blocks <= (d.hit_blocks if d.path == "split" else 0):
            yield f"{d.request}: {d.split_blocks} blocks split off a hit of {d.hit_blocks} on path {d.path}"
    for r in requests.values():
        if r.path is None:
            continue
        decided = by_request.get(r.id)
        if decided is None:
            yield f"{r.id}: served without a decision"
            continue
        served = (r.pe, r.de, r.path, r.hit_tokens, metrics.de_hit_tokens(r))
        wanted = (decided.hit_blocks * block, decided.de_blocks * block)
        if served != (decided.pe, decided.de, decided.path, *wanted):
            yield (
                f"{r.id}: served as {served}, decided as {(decided.pe, decided.de, decided.path)} with"
                f" {decided.hit_blocks} hit blocks, {decided.de_blocks} of them on the DE's side"
            )


def _whole_blocks(evidence: Evidence) -> Iterator[str]:
    block = evidence.setup.layout.block_tokens
    for r in metrics.done(evidence.records):
        if r.hit_tokens % block or not 0 <= r.hit_tokens < r.prompt_tokens:
            yield f"{r.id}: hit {r.hit_tokens} of {r.prompt_tokens} tokens, expected whole blocks and a token left"
        yield from _dram_gave(r, evidence.setup)
        filled = (r.prompt_tokens + r.output_tokens) // block * block - r.hit_tokens
        if r.persisted_tokens != filled:
            yield f"{r.id}: persisted {r.persisted_tokens} tokens, filled {filled} beyond its hit"


def _dram_gave(r: RequestRecord, setup: metrics.Setup) -> Iterator[str]:
    """What a done request says that it had from a pool, or from the caches of the nodes that read it."""
    most = r.hit_tokens if setup.system.pool or setup.prefix_cache else 0
    if r.pool_tokens % setup.layout.block_tokens or not 0 <= r.pool_local_tokens <= r.pool_tokens <= most:
        yield (
            f"{r.id}: {r.pool_tokens} tokens from a pool, {r.pool_local_tokens} of them from the reader's own"
            f" node, its hit is {r.hit_tokens}"
        )
    if setup.prefix_cache and r.pool_local_tokens != r.pool_tokens:
        yield (
            f"{r.id}: {r.pool_tokens} tokens from caches, {r.pool_local_tokens} of them from the reader's own node"
        )
    de_pool, de_hit = metrics.de_pool_tokens(r), metrics.de_hit_tokens(r)
    if (
        de_pool % setup.layout.block_tokens
        or not 0 <= de_pool <= de_hit
        or r.pool_tokens - de_pool > r.hit_tokens - de_hit
    ):
        yield (
            f"{r.id}: {de_pool} of {r.pool_tokens} tokens from DRAM on the DE's side, where {de_hit} of"
            f" {r.hit_tokens} were read"
        )


def _pools_whole(evidence: Evidence) -> Iterator[str]:
    for node in evidence.records.nodes:
        for pool in node.pools:
            if pool.free != pool.total:
                yield f"{node.node} {pool.pool}: {pool.free} free of {pool.total}"
            if not 0 <= pool.peak_used <= pool.total:
                yield f"{node.node} {pool.pool}: at most {pool.peak_used} used of {pool.total}"
        cache = node.cache
        if cache is None:
            continue
        if cache.leases or cache.pending:
            yield f"{node.node}: {cache.leases} leases of blocks in DRAM are out, {cache.pending} slots reserved"
        if cache.inserted - cache.evicted != cache.used or not 0 <= cache.used <= cache.total:
            yield (
                f"{node.node}: {cache.used} of {cache.total} slots used after {cache.inserted} blocks came in and"
                f" {cache.evicted} gave way"
            )


def _received_as_sent(evidence: Evidence) -> Iterator[str]:
    sent: dict[tuple[str, str, str], TransferBytes] = {}
    received: dict[tuple[str, str, str], TransferBytes] = {}
    for node in evidence.records.nodes:
        for rows, books, whose in ((node.sent, sent, "src"), (node.received, received, "dst")):
            for row in rows:
                key = (row.transfer, row.src, row.dst)
                if getattr(row, whose) != node.node:
                    yield f"{node.node}: counted {row.transfer} {row.src} to {row.dst}, which is not its own"
                if key in books:
                    yield f"{node.node}: {row.transfer} {row.src} to {row.dst} is counted twice"
                books[key] = row
    for key in sorted(sent.keys() | received.keys()):
        out, back = sent.get(key), received.get(key)
        if out != back:
            transfer, src, dst = key
            left = f"{out.payload_bytes} B in {out.messages} messages" if out else "nothing"
            right = f"{back.payload_bytes} B in {back.messages}" if back else "nothing"
            yield f"{transfer} {src} to {dst}: sent {left}, received {right}"


def _step_bytes(evidence: Evidence) -> Iterator[str]:
    # A request that failed or was cancelled on the way moved a part of its bytes that no record tells, so it
    # widens what is allowed from exactly the done requests' bytes to at most its own on top.
    decided = {d.request: d for node in evidence.records.nodes for d in node.decisions}
    chunks = _chunks(evidence.records)
    low: Counter[str] = Counter()
    high: Counter[str] = Counter()
    for r in evidence.records.requests:
        if r.status == "done":
            steps = as_steps(expected_transfers(r, chunks[r.id], evidence.setup))
            low.update(steps)
            high.update(steps)
        elif (d := decided.get(r.id)) is not None:
            high.update(_most_steps(r, d, chunks[r.id], evidence.setup))
    for key, got in step_payload(evidence.records).items():
        # Exchanges are a group's and no request's.
        if key != Transfer.COLLECTIVE.sent and not low[key] <= got <= high[key]:
            wanted = str(low[key]) if low[key] == high[key] else f"{low[key]} to {high[key]}"
            yield f"{key}: {got} B moved, the requests account for {wanted}"
    yield from _caches_gave(evidence)


def _caches_gave(evidence: Evidence) -> Iterator[str]:
    """Each node's cache was asked for exactly what requests read on that node, and gave what they say.

    As for steps, a request that was not served to its end widens what is allowed by its own hit.
    """
    if not evidence.setup.prefix_cache:
        return
    block = evidence.setup.layout.block_tokens
    asked, gave, more = Counter[str](), Counter[str](), Counter[str]()
    done = {r.id: r for r in metrics.done(evidence.records)}
    for d in (d for node in evidence.records.nodes for d in node.decisions):
        r = done.get(d.request)
        sides = ((d.pe, d.hit_blocks - d.de_blocks, False), (d.de, d.de_blocks, True))
        for engine, blocks, is_de in sides:
            name = engine.partition("/")[0]
            if r is None:
                more[name] += blocks
            else:
                asked[name] += blocks
                de_pool = metrics.de_pool_tokens(r)
                gave[name] += (de_pool if is_de else r.pool_tokens - de_pool) // block
    caches = {node.node: node.cache for node in evidence.records.nodes if node.cache is not None}
    for name in sorted(caches.keys() | asked.keys()):
        cache = caches.get(name)
        if cache is None:
            yield f"{name}: reads hits and has no record of its cache"
            continue
        for what, got, low in (("was asked for", cache.looked_up, asked), ("gave", cache.hits, gave)):
            if not low[name] <= got <= low[name] + more[name]:
                yield f"{name}: its cache {what} {got} blocks, the requests account for {low[name]}"


def _most_steps(r: RequestRecord, decision: Decision, chunks: list[Chunk], setup: metrics.Setup) -> dict[str, int]:
    """The most that a request that was not served to its end has moved: a forward of it may be unrecorded."""
    block = setup.layout.block_tokens
    hit, de_hit = decision.hit_blocks * block, decision.de_blocks * block
    at = sum(chunks[-1]) if chunks else hit
    begun = [*chunks, (at, r.prompt_tokens - at)]
    most: dict[str, int] = {}
    for pool_tokens in {0, hit if setup.system.pool else 0}:
        whole = msgspec.structs.replace(
            r, path=decision.path, hit_tokens=hit, de_hit_tokens=de_hit, pool_tokens=pool_tokens
        )
        for key, size in as_steps(expected_transfers(whole, begun, setup)).items():
            most[key] = max(most.get(key, 0), size)
    return most


def _ports_carry_transfers(evidence: Evidence) -> Iterator[str]:
    inside = {(p.node, p.nic) for p in evidence.setup.ports if p.kind != "nic"}
    # Beside all NICs go what is free, and CUDA's copies.
    beside = {Transfer.FREE.name, *(t.name for t in COPIES if evidence.setup.copies == "cuda")}
    for node in evidence.records.nodes:
        nics = [p for p in node.ports if (node.node, p.nic) not in inside]
        for direction, rows in (("read", node.sent), ("write", node.received)):
            ports = sum(p.payload_bytes for p in nics if p.direction == direction)
            transfers = sum(row.payload_bytes for row in rows if row.transfer not in beside)
            if ports != transfers:
                yield f"{node.node} {direction}: NICs carried {ports} B, transfers moved {transfers}"
        for p in node.ports:
            if sum(p.windows) != p.payload_bytes:
                yield f"{node.node} {p.nic} {p.direction}: windows hold {sum(p.windows)} B of {p.payload_bytes}"


def _rates_kept(evidence: Evidence) -> Iterator[str]:
    # Bytes count when their message is in place, so a stretch of time can be credited with all that was under
    # way when it began: a message of each queue pair that crosses the port. One window's worth is for links,
    # where a process may see late what has arrived.
    known = {(p.node, p.nic): p for p in evidence.setup.ports}
    for node in evidence.records.nodes:
        lanes: defaultdict[tuple[str, str], list[PortBytes]] = defaultdict(list)
        for p in node.ports:
            port = known.get((node.node, p.nic))
            lanes[p.nic, "both ways" if port is not None and port.kind == "dram" else p.direction].append(p)
        for (nic, direction), rows in sorted(lanes.items()):
            if (node.node, nic) not in known:
                yield f"{node.node} {nic}: carried bytes and is not in the topology"
                continue
            rate = known[node.node, nic].rate_bps
            window_s = max(p.window_s for p in rows)
            allowed = rate * window_s + sum(p.under_way_bytes for p in rows)
            surplus = worst = 0.0
            for window in itertools.zip_longest(*(p.windows for p in rows), fillvalue=0):
                surplus = max(0.0, surplus + sum(window) - rate * (1 + RATE_SLACK) * window_s)
                worst = max(worst, surplus)
            if worst > allowed:
                yield f"{node.node} {nic} {direction}: {worst:.0f} B above {rate:.0f} B/s, allowed {allowed:.0f}"


def _causality(evidence: Evidence) -> Iterator[str]:
    for r in evidence.records.requests:
        stamps = [(name, getattr(r, name)) for name in PHASE_STAMPS]
        needed = PHASE_STAMPS if r.output_tokens else PHASE_STAMPS[:8]
        if r.status == "done":
            for name in needed:
                if getattr(r, name) is None:
                    yield f"{r.id}: done without {name}"
            if r.persisted_tokens and r.settled_s is None:
                yield f"{r.id}: persisted {r.persisted_tokens} tokens without settled_s"
        reached = [(name, at) for name, at in stamps if at is not None]
        for (before, earlier), (after, later) in itertools.pairwise(reached):
            if later < earlier:
                yield f"{r.id}: {after} {later} before {before} {earlier}"
        if r.settled_s is not None and r.computed_s is not None and r.settled_s < r.computed_s:
            yield f"{r.id}: settled_s {r.settled_s} before computed_s {r.computed_s}"


def _turns_in_order(evidence: Evidence) -> Iterator[str]:
    for before, after in _turn_pairs(evidence.records):
        if before.last_token_s is not None and after.arrived_s < before.last_token_s:
            yield f"{after.id}: arrived at {after.arrived_s}, {before.id}'s last token at {before.last_token_s}"
        if before.settled_s is None or after.eligible_s is None:
            continue
        if after.eligible_s < before.settled_s:
            yield f"{after.id}: eligible at {after.eligible_s}, {before.id} settled at {before.settled_s}"


def _written_is_read(evidence: Evidence) -> Iterator[str]:
    block = evidence.setup.layout.block_tokens
    for before, after in _turn_pairs(evidence.records):
        if not evidence.continues.get(after.id) or before.status != "done" or after.path is None:
            continue
        written = (before.prompt_tokens + before.output_tokens) // block * block
        usable = min(written, (after.prompt_tokens - 1) // block * block)
        if after.hit_tokens < usable:
            yield f"{after.id}: hit {after.hit_tokens} tokens, {before.id} had written {usable} of its prompt"


def _breakdown_is_ttft(evidence: Evidence) -> Iterator[str]:
    for r in metrics.done(evidence.records):
        parts, ttft = metrics.breakdown(r), metrics.ttft_s(r)
        if ttft is None:
            continue
        if parts is None:
            yield f"{r.id}: TTFT {ttft} s without a breakdown"
            continue
        for phase, seconds in parts.items():
            if seconds < 0:
                yield f"{r.id}: {phase} takes {seconds} s"
        total = math.fsum(parts.values())
        if not abs(total - ttft) <= CLOCK_SLACK_S:
            yield f"{r.id}: the breakdown sums to {total} s, TTFT is {ttft} s"


def _gaps_fill_decode(evidence: Evidence) -> Iterator[str]:
    for r in metrics.done(evidence.records):
        gaps = sum(count for _, count in r.token_gaps)
        if gaps != max(0, r.output_tokens - 1):
            yield f"{r.id}: {gaps} gaps between {r.output_tokens} tokens"
        if r.first_token_s is None or r.last_token_s is None:
            continue
        total = math.fsum(seconds * count for seconds, count in r.token_gaps)
        span = r.last_token_s - r.first_token_s
        if not abs(total - span) <= CLOCK_SLACK_S * (gaps + 1):
            yield f"{r.id}: gaps sum to {total} s, first to last token takes {span} s"


def _clocks(evidence: Evidence) -> Iterator[str]:
    records = evidence.records
    if not (math.isfinite(records.ended_s) and 0 <= records.t0_s <= records.ended_s):
        yield f"the run lasts from {records.t0_s} to {records.ended_s} s"
    for r in records.requests:
        for name in (*PHASE_STAMPS, "settled_s"):
            at = getattr(r, name)
            if at is not None and not 0 <= at <= records.ended_s:
                yield f"{r.id}: {name} {at} is outside the run, 0 to {records.ended_s} s"
        for seconds, count in r.token_gaps:
            if not seconds >= 0 or count < 1:
                yield f"{r.id}: {count} token gaps of {seconds} s go back in time"
    for engine, batches in _batches(records).items():
        if [b.index for b in batches] != list(range(len(batches))):
            yield f"{engine}: batches numbered other than 0 to {len(batches) - 1}"
        for b in batches:
            if not 0 <= b.started_s <= b.ended_s <= records.ended_s:
                yield f"{engine}: batch {b.index} lasts from {b.started_s} to {b.ended_s} s"
        for b, c in itertools.pairwise(batches):
            if c.started_s < b.started_s:
                yield f"{engine}: batch {c.index} starts before batch {b.index}"


def _batches_cover(evidence: Evidence) -> Iterator[str]:
    requests = {r.id: r for r in evidence.records.requests}
    parts: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for engine, batches in _batches(evidence.records).items():
        for b in batches:
            if len(b.requests) != len(b.shape):
                yield f"{engine}: batch {b.index} of {len(b.requests)} requests has {len(b.shape)} shapes"
            for name, part in zip(b.requests, b.shape, strict=False):
                parts[name].append(part)
                r = requests.get(name)
                if r is None:
                    yield f"{engine}: batch {b.index} computes {name}, which left no record"
                elif r.pe != engine:
                    yield f"{name}: computed on {engine}, assigned to {r.pe}"
                elif r.read_s is not None and b.started_s < r.read_s:
                    yield f"{name}: batch starts at {b.started_s}, its hit is read at {r.read_s}"
    for r in metrics.done(evidence.records):
        at = r.hit_tokens
        for cached, new in parts[r.id]:
            if cached != at or new < 1:
                yield f"{r.id}: a batch computes {new} tokens on {cached} cached, expected {at} cached"
            at = cached + new
        if at != r.prompt_tokens:
            yield f"{r.id}: batches end at token {at} of {r.prompt_tokens}"


def _quota_kept(evidence: Evidence) -> Iterator[str]:
    quota_s = evidence.setup.quota_s
    for engine, batches in _batches(evidence.records).items():
        for b in batches:
            # A head of which not even a token fits gets that one token.
            if b.predicted_s > quota_s * (1 + ROUNDING) and [new for _, new in b.shape] != [1]:
                yield (
                    f"{engine}: batch {b.index} of {sum(new for _, new in b.shape)} tokens, {b.predicted_s} s of"
                    f" attention predicted, the quota is {quota_s} s"
                )


def _steps_together(evidence: Evidence) -> Iterator[str]:
    for _, steps in group_steps(evidence.records, evidence.setup.groups):
        before_s = -math.inf
        for step, batches in steps.items():
            for engine, times in sorted(Counter(b.engine for b in batches).items()):
                if times > 1:
                    yield f"{engine}: {times} batches in step {step} of its group"
            first, last = min(batches, key=lambda b: b.ended_s), max(batches, key=lambda b: b.ended_s)
            if last.ended_s - first.ended_s > CLOCK_SLACK_S:
                yield f"step {step}: {first.engine} ends it at {first.ended_s}, {last.engine} at {last.ended_s} s"
            early = min(batches, key=lambda b: b.started_s)
            if early.started_s < before_s - CLOCK_SLACK_S:
                yield (
                    f"step {step}: {early.engine} begins it at {early.started_s} s, the step before ends at"
                    f" {before_s} s"
                )
            before_s = last.ended_s


def _collectives_at_home(evidence: Evidence) -> Iterator[str]:
    if evidence.setup.ep_over == "cnic":
        return
    spread = set()
    for group in evidence.setup.groups:
        nodes = {engine.partition("/")[0] for engine in group}
        spread |= nodes if len(nodes) > 1 else set()
    for node in evidence.records.nodes:
        moved = sum(row.payload_bytes for row in node.sent if row.transfer == Transfer.COLLECTIVE.name)
        if moved and node.node not in spread:
            yield f"{node.node}: {moved} B of collectives on its CNICs, its engines' groups do not leave the node"


def _chunks(records: RunRecords) -> defaultdict[str, list[Chunk]]:
    """What each forward computed of each request, in the order of its engine's batches."""
    found: defaultdict[str, list[Chunk]] = defaultdict(list)
    for batches in _batches(records).values():
        for b in batches:
            for name, part in zip(b.requests, b.shape, strict=False):
                found[name].append(part)
    return found


def _batches(records: RunRecords) -> dict[str, list[BatchRecord]]:
    """An engine's batches in the order of their numbers."""
    engines: defaultdict[str, list[BatchRecord]] = defaultdict(list)
    for node in records.nodes:
        for batch in node.batches:
            engines[batch.engine].append(batch)
    return {engine: sorted(engines[engine], key=lambda b: b.index) for engine in sorted(engines)}


def _turn_pairs(records: RunRecords) -> Iterator[tuple[RequestRecord, RequestRecord]]:
    """Consecutive turns of one trajectory."""
    ordered = sorted(records.requests, key=lambda r: (r.trajectory, r.turn))
    for before, after in itertools.pairwise(ordered):
        if before.trajectory == after.trajectory and before.turn + 1 == after.turn:
            yield before, after


INVARIANTS = tuple(
    Invariant(number, name, law, check)
    for number, (name, law, check) in enumerate(
        (
            (
                "requests conserved",
                "every request that arrived has one record: done, failed or cancelled",
                _requests_conserved,
            ),
            ("tokens equal", "every done request's tokens are the reference's", _tokens_equal),
            (
                "decisions followed",
                "every request was served once, as the scheduler decided",
                _decisions_followed,
            ),
            (
                "whole blocks",
                "hits are whole blocks, and what was filled beyond them is persisted",
                _whole_blocks,
            ),
            ("pools whole", "every pool is free again", _pools_whole),
            ("received as sent", "each side counted the same bytes and messages", _received_as_sent),
            ("step bytes", "every step moved what the requests of its path need", _step_bytes),
            ("ports carry transfers", "NICs carried exactly what transfers moved", _ports_carry_transfers),
            ("rates kept", "no port direction ran above its rate", _rates_kept),
            ("causality", "every phase ended after the one before it", _causality),
            ("turns in order", "a turn came after its predecessor's tokens and blocks", _turns_in_order),
            (
                "written is read",
                "a turn that continues its predecessor hit all blocks that one wrote",
                _written_is_read,
            ),
            ("breakdown is TTFT", "the parts of TTFT sum to it", _breakdown_is_ttft),
            ("gaps fill decode", "token gaps fill the time from first to last token", _gaps_fill_decode),
            ("clocks", "all times lie inside the run and go forward", _clocks),
            (
                "batches cover",
                "batches compute every prompt token after the hit exactly once, after the hit is read",
                _batches_cover,
            ),
            (
                "quota kept",
                "no batch of more than a token is predicted to take more attention than the quota",
                _quota_kept,
            ),
            (
                "steps together",
                "the engines of a group ended each step together and began none before the one before had ended",
                _steps_together,
            ),
            (
                "collectives at home",
                "no CNIC carried the exchanges of a group that lives on one node",
                _collectives_at_home,
            ),
        ),
        start=1,
    )
)
"""All invariants, by number."""
