"""Laws of emulator.extent."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.extent import Extent, gather, scatter, total_bytes

MEMORY = 200


@st.composite
def extents(draw: st.DrawFn) -> Extent:
    """An extent that lies inside MEMORY bytes."""
    size = draw(st.integers(1, 20))
    count = draw(st.integers(1, 5))
    stride = draw(st.integers(size, 40)) if count > 1 else draw(st.integers(0, 40))
    span = (count - 1) * stride + size
    return Extent(draw(st.integers(0, MEMORY - span)), size, count, stride)


def positions(e: Extent) -> list[int]:
    """The bytes of an extent one by one, by definition."""
    return [e.offset + run * e.stride + i for run in range(e.count) for i in range(e.size)]


def noise(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


@given(extents())
def test_an_extent_is_its_runs(e: Extent) -> None:
    """total, end and contiguous say what the definition, byte by byte, says."""
    at = positions(e)
    assert e.total == len(at) == len(set(at))
    assert e.end == max(at) + 1
    assert e.contiguous == (at == list(range(at[0], at[0] + len(at))))


@given(st.lists(extents(), max_size=4))
def test_gather_takes_the_bytes_in_order(parts: list[Extent]) -> None:
    """A gather is the concatenation of all runs in order, and leaves the memory alone."""
    memory = noise(MEMORY)
    before = memory.copy()
    out = gather(memory, parts)
    assert out.tolist() == [memory[i] for e in parts for i in positions(e)]
    assert out.size == total_bytes(parts)
    assert out.flags.c_contiguous
    assert (memory == before).all()


@given(st.lists(extents(), max_size=4))
def test_scatter_writes_its_bytes_and_no_other(parts: list[Extent]) -> None:
    """A scatter is a run of byte assignments in order (a later one wins where runs meet); the rest stays."""
    data = noise(total_bytes(parts))
    expected = np.zeros(MEMORY, dtype=np.uint8)
    for i, byte in zip((i for e in parts for i in positions(e)), data, strict=True):
        expected[i] = byte
    memory = np.zeros(MEMORY, dtype=np.uint8)
    scatter(memory, parts, data)
    assert (memory == expected).all()


@given(extents())
def test_scatter_then_gather_is_identity(e: Extent) -> None:
    """What is written through an extent is read through it."""
    data = noise(e.total)
    memory = np.zeros(MEMORY, dtype=np.uint8)
    scatter(memory, [e], data)
    assert (gather(memory, [e]) == data).all()


@given(extents())
def test_one_contiguous_extent_is_no_copy(e: Extent) -> None:
    """Only a single contiguous extent shares memory: nothing is copied on the common path."""
    memory = noise(MEMORY)
    assert np.shares_memory(gather(memory, [e]), memory) == e.contiguous
    assert not np.shares_memory(gather(memory, [e, e]), memory)


def test_a_read_only_memory_can_be_gathered() -> None:
    """Gathering needs no right to write."""
    memory = noise(MEMORY)
    memory.flags.writeable = False
    assert gather(memory, [Extent(3, 2, 3, 5)]).tolist() == [memory[i] for i in (3, 4, 8, 9, 13, 14)]


@given(extents())
def test_extents_cross_processes(e: Extent) -> None:
    """An extent decoded from its encoding is the same value."""
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(e), type=Extent) == e


@pytest.mark.parametrize("fields", [(-1, 1), (0, 0), (0, -1), (0, 1, 0), (0, 1, -2, 4)])
def test_an_extent_of_nothing_is_refused(fields: tuple[int, ...]) -> None:
    """Offsets are not negative, sizes and counts are positive."""
    with pytest.raises(ValueError, match="offset >= 0, size and count > 0"):
        Extent(*fields)


def test_overlapping_runs_are_refused() -> None:
    """Runs of one extent never overlap, so that a scatter's result does not depend on its order."""
    with pytest.raises(ValueError, match="stride 3 is below its size 4"):
        Extent(0, 4, 2, 3)


@given(extents(), st.integers(1, MEMORY))
def test_leaving_the_memory_is_an_error(e: Extent, missing: int) -> None:
    """An extent that ends behind the memory is an error that touches nothing, contiguous or not."""
    memory = np.zeros(max(0, e.end - missing), dtype=np.uint8)
    with pytest.raises(IndexError, match=f"ends at {e.end}, memory has {memory.size}"):
        gather(memory, [e])
    with pytest.raises(IndexError):
        scatter(memory, [e], np.ones(e.total, dtype=np.uint8))
    assert not memory.any()


def test_data_of_another_size_is_refused() -> None:
    """A scatter's data is exactly as long as its extents."""
    memory = np.zeros(10, dtype=np.uint8)
    for size in (3, 5):
        with pytest.raises(ValueError, match=f"{size} bytes for extents of 4"):
            scatter(memory, [Extent(0, 2, 2, 4)], noise(size))
    assert not memory.any()
