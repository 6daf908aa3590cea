"""A hit read on both sides is shared by the length of their queues."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from emulator.policy import split_blocks

QUEUE = st.integers(0, 3000)


@given(st.integers(0, 40), QUEUE, QUEUE, st.sampled_from([1, 16, 64]), st.integers(0, 50))
def test_the_longer_queue_is_as_short_as_it_can_be(hit: int, pe: int, de: int, block: int, buffer: int) -> None:
    """No other share of whole blocks that the PE's buffer can hold makes the longer queue shorter."""

    def longer(on_de: int) -> int:
        return max(pe + (hit - on_de) * block, de + on_de * block)

    share = split_blocks(hit, pe, de, block_tokens=block, pe_buffer_blocks=buffer)
    allowed = [on_de for on_de in range(hit + 1) if hit - on_de <= buffer]
    assert share in allowed
    assert longer(share) == min(longer(on_de) for on_de in allowed)
    assert all(longer(on_de) > longer(share) for on_de in allowed if on_de > share)
