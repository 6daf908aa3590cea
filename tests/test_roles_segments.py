"""Segments move exactly the bytes that a transfer is about, checked against plain arrays."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator.extent import gather, scatter
from emulator.fabric.interface import Segment
from emulator.kvcache import Layout
from emulator.pool import PagePool
from emulator.roles.segments import (
    buffer_rows,
    load_segments,
    miss_segments,
    page_rows,
    page_segment,
    pages_segment,
)

LAYOUTS = st.builds(Layout, st.integers(1, 4), st.integers(1, 3), st.integers(1, 5))
Memory = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


def _blocks(layout: Layout, tokens: int, seed: int) -> tuple[Memory, Memory]:
    """Random KV [layer, token, byte] of a context, and the same as Full Blocks end to end."""
    kv = np.random.default_rng(seed).integers(
        1, 256, (layout.layers, layout.blocks(tokens) * layout.block_tokens, layout.kv_bytes), dtype=np.uint8
    )
    full = kv.reshape(layout.layers, -1, layout.block_tokens, layout.kv_bytes).swapaxes(0, 1)
    return kv[:, :tokens], np.ascontiguousarray(full).reshape(-1)


def _move(segment: Segment, source: Memory, target: Memory) -> None:
    scatter(target, segment.remote, gather(source, segment.local))


@settings(deadline=None)
@given(LAYOUTS, st.integers(1, 30), st.integers(0, 7))
def test_a_load_brings_each_layer_of_the_hit(layout: Layout, tokens: int, base: int) -> None:
    """After segment l the slot holds layer l's rows of the hit, in token order."""
    kv, full = _blocks(layout, tokens, 1)
    buffer = np.concatenate([np.zeros(base, np.uint8), full])
    slots = (3, 3 + tokens * layout.kv_bytes)
    hbm = np.zeros(slots[1] + tokens * layout.kv_bytes, np.uint8)
    for layer, segment in enumerate(load_segments(layout, buffer_rows(layout, base), 0, tokens, slots)):
        _move(segment, buffer, hbm)
        at = slots[layer % 2]
        assert np.array_equal(hbm[at : at + tokens * layout.kv_bytes], kv[layer].reshape(-1))


@settings(deadline=None)
@given(LAYOUTS, st.integers(1, 30), st.data())
def test_the_miss_completes_the_buffer(layout: Layout, tokens: int, data: st.DataObject) -> None:
    """What the PE sends for tokens from ``first`` on lands where Full Blocks have it, and nothing else changes."""
    first = data.draw(st.integers(0, tokens - 1))
    kv, full = _blocks(layout, tokens, 2)
    slots = (0, tokens * layout.kv_bytes)
    hbm = np.zeros(2 * tokens * layout.kv_bytes, np.uint8)
    buffer = np.zeros_like(full)
    for layer, segment in enumerate(miss_segments(layout, buffer_rows(layout, 0), first, tokens - first, slots)):
        at = slots[layer % 2]
        hbm[at : at + tokens * layout.kv_bytes] = kv[layer].reshape(-1)
        _move(segment, hbm, buffer)
    blocks = buffer.reshape(-1, layout.layers, layout.block_tokens, layout.kv_bytes)
    got = blocks.swapaxes(0, 1).reshape(layout.layers, -1, layout.kv_bytes)
    assert np.array_equal(got[:, first:tokens], kv[:, first:])
    assert not got[:, :first].any()
    assert not got[:, tokens:].any()


@settings(deadline=None)
@given(LAYOUTS, st.integers(1, 30), st.integers(0, 10), st.data())
def test_a_prompt_fills_its_pages(layout: Layout, tokens: int, output: int, data: st.DataObject) -> None:
    """However its pages are scattered, block b of the prompt is in the b-th of them, its rows exact."""
    most = 30 + 10 + 5 * 3
    pool = PagePool("hbm", most)
    holes = [pool.reserve(count) for count in data.draw(st.lists(st.integers(1, 3), max_size=5))]
    for lease in holes[::2]:
        pool.release(lease)
    wanted = layout.blocks(tokens + output)
    lease = pool.reserve(wanted)
    kv, full = _blocks(layout, tokens, 3)
    hbm = np.zeros(most * layout.full_block_bytes, np.uint8)
    segment = pages_segment(layout, 0, tokens, lease.runs)
    assert segment.size_bytes == tokens * layout.layers * layout.kv_bytes
    _move(segment, full, hbm)
    pages = [page for begin, count in lease.runs for page in range(begin, begin + count)]
    got = hbm.reshape(most, layout.layers, layout.block_tokens, layout.kv_bytes)[pages].swapaxes(0, 1)
    assert np.array_equal(got.reshape(layout.layers, -1, layout.kv_bytes)[:, :tokens], kv)
    back = np.zeros(layout.full_block_bytes, np.uint8)
    _move(page_segment(layout, pages[0], 0), hbm, back)
    assert np.array_equal(back, hbm[pages[0] * layout.full_block_bytes :][: layout.full_block_bytes])


@settings(deadline=None)
@given(LAYOUTS, st.integers(1, 30), st.data())
def test_rows_of_pages_are_those_of_the_buffer(layout: Layout, tokens: int, data: st.DataObject) -> None:
    """KV sent straight to scattered pages is, read back row by row, what a buffer would have held."""
    blocks = layout.blocks(tokens)
    order = data.draw(st.permutations(range(blocks)))
    runs = [(page, 1) for page in order]
    first = data.draw(st.integers(0, tokens - 1))
    kv, full = _blocks(layout, tokens, 4)
    slots = (0, tokens * layout.kv_bytes)
    hbm = np.zeros(blocks * layout.full_block_bytes, np.uint8)
    back = np.zeros(2 * tokens * layout.kv_bytes, np.uint8)
    out = miss_segments(layout, page_rows(layout, runs), first, tokens - first, slots)
    load = load_segments(layout, page_rows(layout, runs), first, tokens - first, slots)
    for layer in range(layout.layers):
        slot = np.zeros(2 * tokens * layout.kv_bytes, np.uint8)
        at = slots[layer % 2]
        slot[at : at + tokens * layout.kv_bytes] = kv[layer].reshape(-1)
        _move(out[layer], slot, hbm)
        _move(load[layer], hbm, back)
        assert np.array_equal(
            back[at + first * layout.kv_bytes : at + tokens * layout.kv_bytes], kv[layer, first:].reshape(-1)
        )
    for block, page in enumerate(order):
        size = layout.full_block_bytes
        rows = hbm[page * size : (page + 1) * size].reshape(layout.layers, layout.block_tokens, -1)
        expected = full[block * size : (block + 1) * size].reshape(layout.layers, layout.block_tokens, -1)
        begin, end = (
            max(first - block * layout.block_tokens, 0),
            min(tokens - block * layout.block_tokens, layout.block_tokens),
        )
        if begin < end:
            assert np.array_equal(rows[:, begin:end], expected[:, begin:end])
