"""Every scheduling decision, as pure functions of what the scheduler or an engine knows at that moment.

Pure: no clock, no awaits, no randomness but a seeded hash. Ties break by engine index, so the same inputs
always give the same answer. Loads are counted in tokens (paper, section 3).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import msgspec

from .records import Path

__all__ = ["BatchItem", "EngineLoad", "Limits", "choose_engine", "choose_path", "pack_batch", "refusal"]


class EngineLoad(msgspec.Struct, frozen=True):
    """An engine's unfinished requests (seq_e) and their total tokens (tok_e)."""

    engine: str
    requests: int
    tokens: int


class Limits(msgspec.Struct, frozen=True):
    """What can ever fit, in blocks or tokens, on an idle cluster."""

    pe_buffer_blocks: int
    de_buffer_blocks: int
    de_hbm_pages: int
    pe_hbm_tokens: int


class BatchItem(msgspec.Struct, frozen=True):
    """A request ready for prefill: what the packer needs to know of it."""

    request: str
    cached: int
    new: int


def choose_engine(loads: Sequence[EngineLoad]) -> str:
    """The engine with the fewest unfinished tokens, then the fewest requests, then the first listed."""
    return min(enumerate(loads), key=lambda item: (item[1].tokens, item[1].requests, item[0]))[1].engine


def choose_path(read_queues: Mapping[Path, int], request: str, seed: int) -> Path:
    """The side whose node has the shorter disk read queue in tokens; a tie by a seeded hash of the request.

    A tie that always went to the PE would send every read of a lightly loaded cluster there.
    """
    if read_queues["pe"] != read_queues["de"]:
        return "pe" if read_queues["pe"] < read_queues["de"] else "de"
    digest = hashlib.blake2b(f"{seed}:{request}".encode(), digest_size=1).digest()
    return "pe" if digest[0] & 1 else "de"


def refusal(
    limits: Limits,
    *,
    prompt_tokens: int,
    output_tokens: int,
    hit_blocks: int,
    path: Path,
    block_tokens: int,
) -> str | None:
    """Why a request can never be served on this cluster; None if it can."""
    prompt_blocks = -(-prompt_tokens // block_tokens)
    pages = -(-(prompt_tokens + output_tokens) // block_tokens)
    if prompt_blocks > limits.de_buffer_blocks:
        return (
            f"its prompt of {prompt_blocks} blocks exceeds a DE buffer of {limits.de_buffer_blocks} (de_buffer_gb)"
        )
    if path == "pe" and hit_blocks > limits.pe_buffer_blocks:
        return f"its hit of {hit_blocks} blocks exceeds the PE buffer of {limits.pe_buffer_blocks} (pe_buffer_gb)"
    if pages > limits.de_hbm_pages:
        return f"its {pages} pages exceed a DE's HBM of {limits.de_hbm_pages} (de_hbm_kv_gb)"
    if prompt_tokens > limits.pe_hbm_tokens:
        return f"its prompt of {prompt_tokens} tokens exceeds a PE's HBM of {limits.pe_hbm_tokens} (pe_hbm_kv_gb)"
    return None


def pack_batch(
    ready: Sequence[BatchItem],
    *,
    attention_s: Callable[[Sequence[tuple[int, int]]], float],
    quota_s: float,
    batch_tokens: int,
    hbm_tokens: int,
) -> int:
    """How many requests from the head of ``ready`` form the next forward pass (FIFO, no request is skipped).

    The predicted attention time of all stays within ``quota_s`` (paper: 300 ms), their new tokens within
    ``batch_tokens``, their contexts within ``hbm_tokens``. The head is taken alone when it breaks the first two
    by itself; 0 only where the head's context alone is longer than ``hbm_tokens``, which admission refuses.
    """
    shape: list[tuple[int, int]] = []
    new = context = 0
    for item in ready:
        new += item.new
        context += item.cached + item.new
        shape.append((item.cached, item.new))
        if context > hbm_tokens:
            return len(shape) - 1
        if len(shape) > 1 and (new > batch_tokens or attention_s(shape) > quota_s):
            return len(shape) - 1
    return len(shape)
