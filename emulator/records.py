"""What a run leaves behind, before anything is computed from it: the raw records of every process.

Pure values. All times are model seconds since the run's epoch, absent (None) where the phase was not
reached; all bytes are payload bytes. ``metrics``, ``verify`` and ``judge`` are functions of these.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = [
    "BatchRecord",
    "CacheRecord",
    "Decision",
    "Decisions",
    "ExchangeRecord",
    "GapRecord",
    "HostSample",
    "NodeRecord",
    "PoolRecord",
    "PortBytes",
    "RequestRecord",
    "RunRecords",
    "TransferBytes",
]

Path = Literal["pe", "de", "split"]
Status = Literal["done", "failed", "cancelled"]


class TransferBytes(msgspec.Struct, frozen=True):
    """Payload bytes and messages of one (transfer, source node, destination node), as one side counted it."""

    transfer: str
    src: str
    dst: str
    payload_bytes: int
    messages: int


class GapRecord(msgspec.Struct, frozen=True):
    """Times between two collectives of a port direction in which none was outstanding: those of one length.

    ``upto_s``: a power of two microseconds, which they are shorter than, and not shorter than half of it.
    ``total_s``: of all of them. ``kv_bytes``: KV that came into place in them, each message whole where it ended.
    """

    upto_s: float
    count: int
    total_s: float
    kv_bytes: int


class PortBytes(msgspec.Struct, frozen=True):
    """One direction of one NIC on one lane, as this node's process counted it.

    ``direction`` is ``read`` (bytes leave the node's memory through the NIC) or ``write`` (bytes enter it).
    ``busy_s`` is the model time during which at least one message was outstanding on it. ``windows`` are
    payload bytes per window of ``window_s``; a message counts whole in the window in which it is over.
    ``under_way_bytes``: the most payload, at any moment, of messages whose first byte was free to go and which
    were not over. ``gaps``: those of the lane of collectives, by length.
    """

    nic: str
    direction: Literal["read", "write"]
    lane: int
    payload_bytes: int
    messages: int
    busy_s: float
    window_s: float
    windows: tuple[int, ...]
    under_way_bytes: int
    gaps: tuple[GapRecord, ...] = ()


class ExchangeRecord(msgspec.Struct, frozen=True):
    """Exchanges of one ring on one lane, all of one size: the largest payload of this node's ports.

    ``total_s`` and ``max_s`` are of the times from an exchange's ideal start to its ideal end, and ``took`` is
    how these are spread: (seconds, how many), each time rounded up by at most a thirty-second. ``late_s`` is the
    longest by which this node's bytes left behind the ideal start, and ``late`` how that is spread.
    """

    ring: str
    lane: int
    payload_bytes: int
    count: int
    total_s: float
    max_s: float
    late_s: float = 0.0
    took: tuple[tuple[float, int], ...] = ()
    late: tuple[tuple[float, int], ...] = ()


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request (one turn of a trajectory), in the order of its phases.

    arrived: the predecessor's last token plus think time, or the open-loop arrival. eligible: the
    predecessor's last block is committed. scheduled: engines and path are chosen. allocated: its buffers are
    reserved. read: all hit blocks are in the buffer. computed: the last layer is computed (first chunk's
    start is prefill_start). transferred: the whole prompt's KV is in DE HBM. first_token: the end of the
    first decode step. last_token: the end of the last. settled: the last full block is committed.
    """

    id: str
    trajectory: str
    turn: int
    status: Status
    error: str | None = None
    path: Path | None = None
    pe: str | None = None
    de: str | None = None
    prompt_tokens: int
    hit_tokens: int = 0
    de_hit_tokens: int = 0
    """The part of the hit that was read on the DE side."""
    pool_tokens: int = 0
    """The part of the hit that DRAM gave, a pool's or a node's cache, and not storage."""
    pool_local_tokens: int = 0
    """The part of ``pool_tokens`` that lay in the reading node's own DRAM, and crossed no NIC."""
    pool_de_tokens: int = 0
    """The part of ``pool_tokens`` that was read on the DE side."""
    output_tokens: int
    persisted_tokens: int = 0
    arrived_s: float
    eligible_s: float | None = None
    scheduled_s: float | None = None
    allocated_s: float | None = None
    read_s: float | None = None
    prefill_start_s: float | None = None
    computed_s: float | None = None
    transferred_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    settled_s: float | None = None
    token_gaps: tuple[tuple[float, int], ...] = ()
    """Gaps between consecutive visible tokens as (seconds, how many in a row); output_tokens - 1 in all."""
    model_tokens: tuple[int, ...] = ()
    """The model's own tokens: after the prompt, then after each forced output; output_tokens + 1 in all."""


class Decision(msgspec.Struct, frozen=True):
    """One scheduling decision, as exported to decisions.jsonl and replayed from it.

    On the ``split`` path the DE reads the first ``split_blocks`` of the hit and the PE the others.
    """

    request: str
    pe: str
    de: str
    path: Path
    hit_blocks: int
    split_blocks: int = 0

    @property
    def de_blocks(self) -> int:
        """Hit blocks that are read on the DE side: the leading ones."""
        return {"pe": 0, "de": self.hit_blocks, "split": self.split_blocks}[self.path]


class BatchRecord(msgspec.Struct, frozen=True):
    """One prefill forward of an engine: which requests, (cached, new) tokens of each, and its times.

    ``step``: the forward of the engine's expert-parallel group that it was part of; engines without a group count
    their own. ``attention_s``: this engine's attention in all layers, as the hardware took it; ``predicted_s``: as
    the packer predicted it.
    """

    engine: str
    index: int
    requests: tuple[str, ...]
    shape: tuple[tuple[int, int], ...]
    started_s: float
    ended_s: float
    step: int = 0
    attention_s: float = 0.0
    predicted_s: float = 0.0


class Decisions(msgspec.Struct, frozen=True):
    """What another run decided and this one is to repeat: engines and paths, and the composition of batches."""

    requests: tuple[Decision, ...]
    batches: tuple[BatchRecord, ...]


class PoolRecord(msgspec.Struct, frozen=True):
    """A pool after the run: conservation means free == total once everything is settled."""

    pool: str
    total: int
    free: int
    peak_used: int


class CacheRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the directory of the DRAM pool counted, or a node's own cache, in Full Blocks.

    After a run no ``leases`` are out.

    ``total`` slots hold ``used`` blocks and are reserved for ``pending`` ones. Of ``looked_up`` blocks ``hits``
    were found. ``inserted`` came in, ``evicted`` gave way to them, ``turned_away`` found no slot.
    """

    total: int
    used: int
    pending: int
    leases: int
    looked_up: int
    hits: int
    inserted: int
    evicted: int
    turned_away: int


class HostSample(msgspec.Struct, frozen=True):
    """How well this process kept up with the wall clock (absent in virtual time).

    ``lateness_ms`` are (median, p99, max) of timer lateness in wall milliseconds, sampled all through the
    run; ``cpu_s`` is the process's CPU time and ``wall_s`` the time it was measured over; ``retransmits``
    are the TCP retransmissions of its queue pairs.
    """

    lateness_ms: tuple[float, float, float]
    cpu_s: float
    wall_s: float
    retransmits: int


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one node's process counted."""

    node: str
    sent: tuple[TransferBytes, ...] = ()
    received: tuple[TransferBytes, ...] = ()
    ports: tuple[PortBytes, ...] = ()
    exchanges: tuple[ExchangeRecord, ...] = ()
    pools: tuple[PoolRecord, ...] = ()
    batches: tuple[BatchRecord, ...] = ()
    decisions: tuple[Decision, ...] = ()
    cache: CacheRecord | None = None
    host: HostSample | None = None


class RunRecords(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run. ``t0_s`` is the model time at which the clock of JCT started (after warming)."""

    t0_s: float
    ended_s: float
    requests: tuple[RequestRecord, ...]
    nodes: tuple[NodeRecord, ...]
