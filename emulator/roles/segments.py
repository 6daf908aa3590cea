"""Every KV transfer of the two read paths as messages: which bytes go where, and under which tag they arrive.

Pure arithmetic; the arrows' numbers are those of the paper's figures 4a and 4b. ``traffic`` sends what is
described here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..extent import Extent
from ..fabric.interface import Segment, Transfer
from ..kvcache import Layout
from ..pool import Run

__all__ = [
    "Rows",
    "buffer_rows",
    "hbm_region",
    "load_segments",
    "load_tag",
    "miss_segments",
    "miss_tag",
    "page_rows",
    "page_segment",
    "pages_segment",
    "work_requests",
]

Rows = Callable[[int, int, int], tuple[Extent, ...]]
"""Where a request's KV lies on the DE or in a buffer: (layer, first token, tokens) -> its rows, in token order."""


def buffer_rows(layout: Layout, base: int, base_token: int = 0) -> Rows:
    """Of a request whose Full Blocks, from token ``base_token`` on, lie end to end from byte ``base``."""

    def rows(layer: int, first: int, tokens: int) -> tuple[Extent, ...]:
        return layout.layer_extents(base, layer, first - base_token, tokens)

    return rows


def page_rows(layout: Layout, runs: Sequence[Run]) -> Rows:
    """Of a request whose Full Blocks are in HBM pages, in the order of the page runs (first, count)."""

    def rows(layer: int, first: int, tokens: int) -> tuple[Extent, ...]:
        extents: list[Extent] = []
        begin = 0
        for page, count in runs:
            end = begin + count * layout.block_tokens
            low, high = max(first, begin), min(first + tokens, end)
            if low < high:
                base = page * layout.full_block_bytes
                extents += layout.layer_extents(base, layer, low - begin, high - low)
            begin = end
        if first + tokens > begin:
            raise ValueError(f"tokens {first} to {first + tokens} are beyond the pages {list(runs)}")
        return tuple(extents)

    return rows


def load_segments(layout: Layout, source: Rows, first: int, tokens: int, slots: Sequence[int]) -> list[Segment]:
    """One segment a layer: ``tokens`` from ``first`` on, from ``source`` into HBM slots (pe3-4, de3-5).

    A slot has a row a token from the request's first on.
    """
    return [
        Segment(source(layer, first, tokens), (_in_slot(layout, slots, layer, first, tokens),))
        for layer in range(layout.layers)
    ]


def miss_segments(layout: Layout, target: Rows, first: int, tokens: int, slots: Sequence[int]) -> list[Segment]:
    """One segment a layer: ``tokens`` from ``first`` on, from HBM slots to the DE (pe5-7, de_miss)."""
    return [
        Segment((_in_slot(layout, slots, layer, first, tokens),), target(layer, first, tokens))
        for layer in range(layout.layers)
    ]


def _in_slot(layout: Layout, slots: Sequence[int], layer: int, first: int, tokens: int) -> Extent:
    return Extent(slots[layer % len(slots)] + first * layout.kv_bytes, tokens * layout.kv_bytes)


def pages_segment(layout: Layout, buffer_base: int, tokens: int, runs: Sequence[Run]) -> Segment:
    """A prompt's KV from the DE buffer into HBM pages (pe8-9, de6-7): whole Full Blocks, then the last one's rows.

    ``runs`` are page runs (first, count) in order, with room for at least the prompt.
    """
    size = layout.full_block_bytes
    full = layout.full_blocks(tokens)
    remote: list[Extent] = []
    left = full
    page = None
    for first, count in runs:
        take = min(left, count)
        if take:
            remote.append(Extent(first * size, take * size))
            left -= take
        if not left and take < count:
            page = first + take
            break
    local = list(layout.block_extents(buffer_base, 0, full))
    rows = tokens % layout.block_tokens
    if rows:
        if page is None:
            raise ValueError(f"{tokens} tokens do not fit the pages {list(runs)}")
        local.append(_rows(layout, buffer_base + full * size, rows))
        remote.append(_rows(layout, page * size, rows))
    return Segment(tuple(local), tuple(remote))


def page_segment(layout: Layout, page: int, slot_offset: int) -> Segment:
    """One Full Block from its HBM page into DRAM (d2h)."""
    size = layout.full_block_bytes
    return Segment((Extent(page * size, size),), (Extent(slot_offset, size),))


def _rows(layout: Layout, base: int, rows: int) -> Extent:
    """The first ``rows`` token rows of every layer of the block at byte ``base``."""
    return Extent(base, rows * layout.kv_bytes, layout.layers, layout.layer_block_bytes)


def hbm_region(gpu: int) -> str:
    """The region of an engine's HBM on its node."""
    return f"hbm{gpu}"


def load_tag(request: str, chunk: int, transfer: Transfer) -> str:
    """The tag of a stream that brings KV into PE HBM for a forward, a message a layer."""
    return f"{request}/{chunk}/{transfer.sent}"


def miss_tag(request: str) -> str:
    """The tag of the streams that take a request's computed KV to the DE buffer, a message a layer and chunk."""
    return f"{request}/miss"


def work_requests(segment: Segment) -> int:
    """RDMA writes that one message takes: one for each run that is contiguous on both sides, counted by the side

    that is cut into more runs (a work request gathers, but writes to one address). A message of no bytes
    takes one.
    """
    return max(1, *(sum(extent.count for extent in side) for side in (segment.local, segment.remote)))
