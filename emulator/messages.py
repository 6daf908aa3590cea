"""The remote procedures between roles: their names, requests and replies.

Pure values; docs/protocol.md walks through one request. Token ids cross as little-endian uint32 bytes, block
ids as the concatenation of their fixed-size encodings, times as model seconds.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from .fabric.interface import Endpoint, Method, Transfer
from .records import Decision

__all__ = [
    "COMMIT",
    "COMMITTED",
    "LOAD",
    "PREFILL",
    "PROGRESS",
    "PUT",
    "READ",
    "REPLAY_BATCHES",
    "REPLAY_DECISIONS",
    "SERVE",
    "SETTLED",
    "SUBMIT",
    "Ack",
    "Assignment",
    "Batches",
    "Commit",
    "Committed",
    "Decided",
    "Load",
    "Phase",
    "Prefill",
    "Prefilled",
    "Progress",
    "Put",
    "Read",
    "Serve",
    "Served",
    "Settle",
    "Settled",
    "Submit",
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


class Settle(msgspec.Struct, frozen=True):
    """Client to the DE's node: answer when the request's last full block is committed."""

    request: str


class Settled(msgspec.Struct, frozen=True):
    settled_s: float
    persisted_tokens: int


class Prefill(msgspec.Struct, frozen=True):
    """DE's node to the PE's node: compute this request's prompt.

    On the PE path the PE reads the hit blocks itself; on the DE path they are in the DE buffer already.
    ``buffer_base`` is where the request's Full Blocks start in the DE node's ``de_buffer``.
    """

    assignment: Assignment
    prompt_tokens: int
    append: bytes
    hit_ids: bytes
    """Ids of the hit blocks (PE path; empty on the DE path)."""
    buffer_base: int


class Prefilled(msgspec.Struct, frozen=True):
    """The PE's answer when the last layer is computed; the KV may still be under way."""

    allocated_s: float
    read_s: float | None
    prefill_start_s: float
    computed_s: float
    token: int


class Load(msgspec.Struct, frozen=True):
    """PE's node to the DE's node: stream the hit KV, layer by layer, into my HBM.

    Layer l goes to byte ``slots[l % len(slots)]`` of region ``hbm{gpu}``.
    """

    request: str
    pe: str
    slots: tuple[int, ...]


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


Phase = Literal["read", "prefilled", "finished"]


class Progress(msgspec.Struct, frozen=True):
    """To the scheduler: a phase of a request is over, so its load leaves the books."""

    request: str
    phase: Phase


class Decided(msgspec.Struct, frozen=True):
    """Client to the scheduler, before the clock starts: decide as recorded."""

    decisions: tuple[Decision, ...]


class Batches(msgspec.Struct, frozen=True):
    """Client to a PE's node, before the clock starts: form these batches, (engine, requests) in order."""

    batches: tuple[tuple[str, tuple[str, ...]], ...]


SUBMIT = Method("submit", Submit, Assignment)
PROGRESS = Method("progress", Progress, Ack)
COMMITTED = Method("committed", Committed, Ack)
SERVE = Method("serve", Serve, Served)
SETTLED = Method("settled", Settle, Settled)
PREFILL = Method("prefill", Prefill, Prefilled)
LOAD = Method("load", Load, Ack)
READ = Method("read", Read, Ack)
COMMIT = Method("commit", Commit, Ack)
PUT = Method("put", Put, Ack)
REPLAY_DECISIONS = Method("replay_decisions", Decided, Ack)
REPLAY_BATCHES = Method("replay_batches", Batches, Ack)
