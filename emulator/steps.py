"""Bytes per step: what the arrows of the paper's figure 4 moved, and what the requests needed them to move.

Pure. Payload bytes unless a name says ``model``. The account of a request is per ``Transfer``; the report's keys
(``STEPS``) show each transfer under what its sender and what its receiver counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from .fabric.interface import Transfer
from .metrics import Setup, de_hit_tokens, de_pool_tokens
from .records import RequestRecord, RunRecords
from .scale import Scale

__all__ = ["COPIES", "STEPS", "Chunk", "as_steps", "expected_transfers", "step_payload", "steps_model_bytes"]

Chunk = tuple[int, int]
"""(cached, new) tokens of one forward of a request, as its batch records them."""

STEPS = tuple(dict.fromkeys(key for t in Transfer if t is not Transfer.OTHER for key in (t.sent, *t.received)))
"""The step keys of the report: pe1..pe9, de1..de7, and the others by name, in the order of their transfers."""


COPIES = frozenset({Transfer.PE_H2D, Transfer.PE_DE_H2D, Transfer.DE_H2D, Transfer.D2H})
"""Between an engine's DRAM and its HBM: on no NIC where copies are CUDA's."""


def step_payload(records: RunRecords) -> dict[str, int]:
    """Payload bytes per key of ``STEPS``: sent keys from what senders counted, received ones from receivers.

    A transfer with one key for both sides (``de_miss``, ``persist`` ...) shows what was received.
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


def as_steps(transfers: Mapping[Transfer, int]) -> dict[str, int]:
    """Bytes per transfer under every step key that shows them."""
    return {key: size for transfer, size in transfers.items() for key in (transfer.sent, *transfer.received)}


def expected_transfers(request: RequestRecord, chunks: Sequence[Chunk], setup: Setup) -> dict[Transfer, int]:
    """Payload bytes that a done request moves, by its path, its token counts and its forwards.

    Layerwise, HBM keeps nothing between two forwards, so each loads the whole hit again, and what the ones before
    it computed (``RELOAD``). Straight into decode HBM (``de_direct``) only what the DE itself has read is copied
    there at the end, and the prompt's new blocks leave it with the generated ones. Where moving is free, all of it
    but the writes to storage is one transfer's.
    """
    layout = setup.layout
    block = layout.block_tokens
    prompt, hit, de_hit = request.prompt_tokens, request.hit_tokens, de_hit_tokens(request)
    pe_hit = hit - de_hit
    de_pool = de_pool_tokens(request)
    loads = len(chunks) if setup.system.layerwise else 1
    reload = sum(cached - hit for cached, _ in chunks[1:]) if setup.system.layerwise else 0
    filled = layout.full_blocks(prompt + request.output_tokens) * block
    from_hbm = filled - (hit if setup.de_direct else layout.full_blocks(prompt) * block)
    moved = {
        Transfer.PE_READ: pe_hit - (request.pool_tokens - de_pool),
        Transfer.POOL: request.pool_tokens - request.pool_local_tokens,
        Transfer.PE_H2D: pe_hit * loads,
        Transfer.DE_READ: de_hit - de_pool,
        Transfer.DE_LOAD: de_hit * loads,
        Transfer.RELOAD: reload,
        Transfer.DE_MISS if request.path == "de" else Transfer.PE_OUT: prompt - de_hit,
        Transfer.PE_DE_H2D if request.path == "pe" else Transfer.DE_H2D: de_hit if setup.de_direct else prompt,
        Transfer.D2H: from_hbm,
    }
    if setup.system.free:
        moved = {Transfer.FREE: sum(moved.values())}
    moved[Transfer.PERSIST] = filled - hit
    return {transfer: tokens * setup.token_bytes for transfer, tokens in moved.items()}
