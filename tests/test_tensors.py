"""Laws of tensor parallelism's arithmetic: what is exchanged, and how bytes are spread over an engine's GPUs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.extent import Extent, gather, total_bytes
from emulator.tensors import ELEMENT_BYTES, cut, stripes, tensor_volume

EXTENTS = st.lists(
    st.builds(
        lambda offset, size, count, gap: Extent(offset, size, count, size + gap),
        st.integers(0, 40),
        st.integers(1, 9),
        st.integers(1, 6),
        st.integers(0, 5),
    ),
    max_size=4,
)


@given(EXTENTS, st.data())
def test_pieces_are_the_extents_in_their_order(extents: list[Extent], data: st.DataObject) -> None:
    """Wherever they are cut, the pieces one after the other gather the very bytes of the extents."""
    total = total_bytes(extents)
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=5)))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
    pieces = cut(extents, sizes)
    assert [total_bytes(piece) for piece in pieces] == sizes
    memory = np.arange(256, dtype=np.uint8)
    whole = gather(memory, extents) if extents else np.empty(0, dtype=np.uint8)
    parts = [gather(memory, piece) for piece in pieces if piece]
    assert b"".join(bytes(part) for part in parts) == bytes(whole)


@pytest.mark.parametrize("size", [9, 11])
def test_pieces_of_another_total_are_refused(size: int) -> None:
    """More or fewer bytes than there are is a mistake of the caller's."""
    with pytest.raises(ValueError, match="than the extents have"):
        cut([Extent(0, 5, 2, 8)], [size])


@given(st.lists(st.integers(0, 100), max_size=20), st.integers(1, 8))
def test_stripes_are_even_over_any_series(series: list[int], parts: int) -> None:
    """Every row is some part's, and no part ever has more than a row more than another."""
    turn, had = 0, [0] * parts
    for rows in series:
        counts, turn = stripes(rows, parts, turn)
        assert sum(counts) == rows
        had = [a + b for a, b in zip(had, counts, strict=True)]
        assert max(had) - min(had) <= 1


@given(st.integers(1, 8192), st.integers(0, 8192), st.integers(1, 8), st.integers(0, 2))
def test_a_pair_moves_all_shares_but_ones_own_twice(hidden: int, tokens: int, gpus: int, pairs: int) -> None:
    """ReduceScatter and AllGather each send (t - 1)/t of the activations, over one kind of link alone."""
    inside = tensor_volume(hidden, tokens, gpus, pairs=pairs, over="nvlink")
    across = tensor_volume(hidden, tokens, gpus, pairs=pairs, over="cnic")
    assert (inside.cnic_bytes, across.nvlink_bytes) == (0, 0)
    assert (
        inside.nvlink_bytes
        == across.cnic_bytes
        == 2 * pairs * tokens * hidden * ELEMENT_BYTES * (gpus - 1) // gpus
    )


@pytest.mark.parametrize("bad", [{"gpus": 0}, {"hidden": 0}, {"tokens": -1}, {"pairs": -1}])
def test_no_volume_of_nothing(bad: dict[str, int]) -> None:
    """Less than one GPU or element, or negative counts, are mistakes."""
    given_ = {"hidden": 8, "tokens": 8, "gpus": 2, "pairs": 1} | bad
    with pytest.raises(ValueError, match="expected none below 0"):
        tensor_volume(given_["hidden"], given_["tokens"], given_["gpus"], pairs=given_["pairs"], over="nvlink")
