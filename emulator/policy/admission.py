"""What can never be served on a cluster, however long it waits. Pure."""

from __future__ import annotations

import msgspec

from ..records import Path

__all__ = ["Limits", "refusal"]


class Limits(msgspec.Struct, frozen=True):
    """What can ever fit, in blocks or tokens, on an idle cluster."""

    pe_buffer_blocks: int
    de_buffer_blocks: int
    de_hbm_pages: int
    pe_hbm_tokens: int


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
