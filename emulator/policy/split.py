"""One hit read on both sides at once: what the paper leaves to future work, with shares by queue length. Pure."""

from __future__ import annotations

__all__ = ["split_blocks"]


def split_blocks(
    hit_blocks: int, pe_read_queue: int, de_read_queue: int, *, block_tokens: int, pe_buffer_blocks: int
) -> int:
    """How many blocks of a hit, the first ones, are read on the DE side; the PE reads the others.

    Queues are in tokens. The shares make the longer of both queues, each with its share, as short as whole blocks
    allow; of two ways to do so, the one with more on the DE. The PE reads no more than its buffer can ever hold.
    """
    level = (pe_read_queue - de_read_queue + (hit_blocks + 1) * block_tokens) // (2 * block_tokens)
    return max(min(level, hit_blocks), 0, hit_blocks - pe_buffer_blocks)
