"""The remote procedures between roles: their names, requests and replies.

Pure values; docs/protocol.md walks through one request. Token ids cross as little-endian uint32 bytes, block
ids as the concatenation of their fixed-size encodings, times as model seconds.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ..fabric.interface import Endpoint, Method, Transfer
from ..pool import Run
from ..records import Decision

__all__ = [
    "CANCEL",
    "COMMIT",
    "COMMITTED",
    "FETCH",
    "HIT_READY",
    "INQUIRE",
    "LOAD",
    "PREFILL",
    "PUT",
    "READ",
    "REPLAY_BATCHES",
    "REPLAY_DECISIONS",
    "SERVE",
    "SETTLED",
    "SUBMIT",
    "WAKE",
    "Ack",
    "Assignment",
    "Batches",
    "Cancel",
    "Cancelled",
    "Commit",
    "Committed",
    "Decided",
    "Fetch",
    "HitReady",
    "Inquiry",
    "Load",
    "Phase",
    "PlannedBatch",
    "Pooled",
    "Prefill",
    "Prefilled",
    "Put",
    "Read",
    "Serve",
    "Served",
    "Settle",
    "Settled",
    "Standing",
    "Submit",
    "Wake",
]


class Ack(msgspec.Struct, frozen=True):
    """Nothing but that it is done."""


class Submit(msgspec.Struct, frozen=True):
    """Client to scheduler: a request's size and the ids of its prompt's full blocks."""

    request: str
    prompt_tokens: int
    output_tokens: int
    block_ids: bytes


class Assignment(msgspec.Struct, frozen=True):
    """The scheduler's decision. ``sequence`` is the global order in which buffers are reserved."""

    decision: Decision
    sequence: int
    scheduled_s: float


class Serve(msgspec.Struct, frozen=True):
    """Client to the DE's node: serve this request. ``append`` are the prompt's tokens after the hit."""

    assignment: Assignment
    prompt_tokens: int
    append: bytes
    output: bytes
    block_ids: bytes
    """Ids of all full blocks of prompt and output together."""


class Pooled(msgspec.Struct, frozen=True):
    """Hit blocks that DRAM gave, a pool's or a cache; ``local`` of them lay in the reading node's own."""

    blocks: int = 0
    local: int = 0

    def __add__(self, other: Pooled) -> Pooled:
        return Pooled(self.blocks + other.blocks, self.local + other.local)


class Served(msgspec.Struct, frozen=True):
    """The DE's answer once the last token is out."""

    allocated_s: float
    read_s: float
    prefill_start_s: float
    computed_s: float
    transferred_s: float
    first_token_s: float | None
    last_token_s: float | None
    token_gaps: tuple[tuple[float, int], ...]
    model_tokens: tuple[int, ...]
    pooled: Pooled = Pooled()
    """What DRAM gave on both sides together, and ``de_pooled`` of it on the DE's."""
    de_pooled: Pooled = Pooled()


class Settle(msgspec.Struct, frozen=True):
    """Client to the DE's node: answer when the request's last full block is committed."""

    request: str


class Settled(msgspec.Struct, frozen=True):
    settled_s: float
    persisted_tokens: int


class Cancel(msgspec.Struct, frozen=True):
    """Give this request up: client to whom it waits for, DE's node to the PE's node.

    What it was asked for is answered with Withdrawn, once nothing of it is under way over there.
    """

    request: str


class Cancelled(msgspec.Struct, frozen=True):
    """Whether the request was ``found``: it may be over, or this may have overtaken it."""

    found: bool


class Prefill(msgspec.Struct, frozen=True):
    """DE's node to the PE's node: compute this request's prompt.

    ``hit_ids`` are the hit blocks that the PE reads itself; those before them are in the DE buffer already.
    ``buffer_base`` is where the request's Full Blocks start in the DE node's ``de_buffer``; where there are
    ``pages``, the KV goes to these page runs (first, count) of the DE's HBM instead.
    """

    assignment: Assignment
    prompt_tokens: int
    append: bytes
    hit_ids: bytes
    buffer_base: int
    pages: tuple[Run, ...] = ()


class Prefilled(msgspec.Struct, frozen=True):
    """The PE's answer when the last layer is computed; the KV may still be under way.

    ``messages`` is how many the DE receives of it in all: one a layer and chunk.
    """

    allocated_s: float
    read_s: float | None
    prefill_start_s: float
    computed_s: float
    token: int
    messages: int
    pooled: Pooled = Pooled()


class Load(msgspec.Struct, frozen=True):
    """PE's node to the DE's node: stream ``tokens`` from ``first`` on, layer by layer, into my HBM.

    Layer l goes to byte ``slots[l % len(slots)]`` of region ``hbm{gpu}``, where token 0 of the request would be.
    ``chunk`` is which forward of the request it is for: 0, 1 ...; ``transfer`` tells hit from computed KV.
    """

    request: str
    pe: str
    slots: tuple[int, ...]
    chunk: int
    first: int
    tokens: int
    transfer: Transfer


class HitReady(msgspec.Struct, frozen=True):
    """PE's node to the DE's node: answer when your part of a split request's hit is in your buffer."""

    request: str


class Read(msgspec.Struct, frozen=True):
    """A node's storage reader to a storage node: put these blocks into my buffer.

    ``runs`` are (offset in the region, blocks), in the order of ``block_ids``.
    """

    block_ids: bytes
    dst: Endpoint
    region: str
    runs: tuple[tuple[int, int], ...]
    transfer: Transfer


class Commit(msgspec.Struct, frozen=True):
    """A DE's node to a storage node: the blocks in your landing region are complete; keep them."""

    block_ids: bytes
    region: str
    offset: int


class Put(msgspec.Struct, frozen=True):
    """Client to a storage node, before the clock starts: keep these blocks."""

    block_ids: bytes
    data: bytes


class Committed(msgspec.Struct, frozen=True):
    """To the scheduler: the first ``len(block_ids)`` blocks of this chain are committed."""

    block_ids: bytes


Phase = Literal["read_pe", "read_de", "prefilled", "finished"]


class Fetch(msgspec.Struct, frozen=True):
    """A group's leader to the scheduler: have you work for my engines? These phases are over since I last asked.

    The phases are the group's report: what the scheduler assigned less what is reported over is each engine's
    seq_e and tok_e and its node's read_q.
    """

    node: str
    over: tuple[tuple[str, Phase], ...]


class Wake(msgspec.Struct, frozen=True):
    """Scheduler to a group's leader: there is work waiting that you may fetch."""


class Inquiry(msgspec.Struct, frozen=True):
    """Client to any node: how far are you?"""


class Standing(msgspec.Struct, frozen=True):
    """``steps`` changes whenever anything gets done here; ``waiting`` are requests and what each is doing here."""

    steps: int
    waiting: dict[str, str]


class Decided(msgspec.Struct, frozen=True):
    """Client to the scheduler, before the clock starts: decide as recorded."""

    decisions: tuple[Decision, ...]


class PlannedBatch(msgspec.Struct, frozen=True):
    """One forward as another run formed it: requests of ``engine`` and how many new tokens of each."""

    engine: str
    step: int
    requests: tuple[str, ...]
    new: tuple[int, ...]


class Batches(msgspec.Struct, frozen=True):
    """Client to a PE's node, before the clock starts: form these batches, in order."""

    batches: tuple[PlannedBatch, ...]


SUBMIT = Method("submit", Submit, Assignment)
FETCH = Method("fetch", Fetch, Ack)
WAKE = Method("wake", Wake, Ack)
COMMITTED = Method("committed", Committed, Ack)
SERVE = Method("serve", Serve, Served)
SETTLED = Method("settled", Settle, Settled)
CANCEL = Method("cancel", Cancel, Cancelled)
PREFILL = Method("prefill", Prefill, Prefilled)
LOAD = Method("load", Load, Ack)
HIT_READY = Method("hit_ready", HitReady, Ack)
READ = Method("read", Read, Ack)
INQUIRE = Method("inquire", Inquiry, Standing)
COMMIT = Method("commit", Commit, Ack)
PUT = Method("put", Put, Ack)
REPLAY_DECISIONS = Method("replay_decisions", Decided, Ack)
REPLAY_BATCHES = Method("replay_batches", Batches, Ack)
