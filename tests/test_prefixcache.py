"""A node's cache keeps what was used last, never gives away what is being read, and loses no slot."""

from __future__ import annotations

from collections import Counter, OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from emulator.kvcache import ID_BYTES, BlockId
from emulator.prefixcache import Held, Kept, PrefixCache

TOTAL = 6
CHAINS = st.lists(st.integers(0, 14), max_size=8, unique=True)


def _block(number: int) -> BlockId:
    return BlockId(number.to_bytes(ID_BYTES, "little"))


def _ids(numbers: list[int] | range) -> list[BlockId]:
    return [_block(number) for number in numbers]


def _keep(cache: PrefixCache, numbers: list[int] | range) -> list[int]:
    """Keep the blocks; which of them got a slot."""
    kept = cache.reserve(_ids(numbers))
    cache.commit(kept.reservation)
    return [numbers[index] for index, _ in kept.slots]


def _use(cache: PrefixCache, numbers: list[int] | range) -> list[int]:
    """Which of the blocks are found, and no longer pinned."""
    held = cache.lookup(_ids(numbers))
    cache.release(held.pin)
    return [number for number, slot in zip(numbers, held.slots, strict=True) if slot is not None]


class CacheMachine(RuleBasedStateMachine):
    """Any order of calls, against a model: blocks in the order of their last use, and what lies in every slot."""

    pins = Bundle("pins")
    reservations = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(TOTAL)
        self.order: OrderedDict[int, None] = OrderedDict()
        """Committed blocks, the one whose use ended longest ago first."""
        self.content: dict[int, int] = {}
        """What a node's memory holds: the block that was reserved last for a slot."""
        self.pinned: dict[int, list[int]] = {}
        self.pending: dict[int, list[int]] = {}

    def _readers(self) -> Counter[int]:
        return Counter(number for held in self.pinned.values() for number in held)

    def _touch(self, numbers: list[int]) -> None:
        for number in reversed(numbers):
            self.order[number] = None
            self.order.move_to_end(number)

    @rule(target=pins, numbers=CHAINS)
    def lookup(self, numbers: list[int]) -> Held:
        """Who finds a block finds its bytes; exactly the committed ones are found."""
        held = self.cache.lookup(_ids(numbers))
        found = {number: slot for number, slot in zip(numbers, held.slots, strict=True) if slot is not None}
        assert list(found) == [number for number in numbers if number in self.order]
        assert all(self.content[slot] == number for number, slot in found.items())
        self.pinned[held.pin] = list(found)
        return held

    @rule(held=consumes(pins))
    def release(self, held: Held) -> None:
        """The end of a block's last reading is its use."""
        self.cache.release(held.pin)
        numbers = self.pinned.pop(held.pin)
        readers = self._readers()
        self._touch([number for number in numbers if not readers[number]])
        with pytest.raises(ValueError, match="not out"):
            self.cache.release(held.pin)

    @rule(target=reservations, numbers=CHAINS)
    def reserve(self, numbers: list[int]) -> Kept:
        """Newcomers take free slots, then those of the least recently used that nobody reads; others go away."""
        readers, coming = self._readers(), [number for each in self.pending.values() for number in each]
        expected: list[int] = []
        for number in numbers:
            if number in self.order or number in coming or number in expected:
                continue
            if len(self.order) + len(coming) + len(expected) == TOTAL:
                oldest = next((other for other in self.order if not readers[other]), None)
                if oldest is None:
                    continue
                del self.order[oldest]
            expected.append(number)
        kept = self.cache.reserve(_ids(numbers))
        assert [numbers[index] for index, _ in kept.slots] == expected
        busy = {slot for slot, number in self.content.items() if readers[number] or number in coming}
        slots = {slot: numbers[index] for index, slot in kept.slots}
        assert len(slots) == len(kept.slots)
        assert busy.isdisjoint(slots)
        assert all(0 <= slot < TOTAL for slot in slots)
        self.content |= slots
        self.pending[kept.reservation] = expected
        return kept

    @rule(kept=consumes(reservations))
    def commit(self, kept: Kept) -> None:
        """Committed blocks are there at once, and used."""
        self.cache.commit(kept.reservation)
        self._touch(self.pending.pop(kept.reservation))
        with pytest.raises(ValueError, match="not out"):
            self.cache.commit(kept.reservation)

    @invariant()
    def conserved(self) -> None:
        record = self.cache.record()
        assert record.total == TOTAL
        assert record.used == len(self.order)
        assert record.pending == sum(map(len, self.pending.values()))
        assert record.used + record.pending <= TOTAL
        assert record.leases == len(self.pinned)
        assert record.inserted - record.evicted == record.used
        assert 0 <= record.hits <= record.looked_up

    @invariant()
    def what_is_read_stays(self) -> None:
        lies = set(self.content.values())
        assert all(number in self.order and number in lies for number in self._readers())


TestCache = CacheMachine.TestCase


@given(st.lists(st.integers(0, 19), max_size=60), st.integers(1, 8))
def test_one_block_at_a_time_it_is_plain_lru(uses: list[int], total: int) -> None:
    """Each use looks and keeps: the blocks found are those among the last ``total`` different ones."""
    cache = PrefixCache(total)
    recent: list[int] = []
    for number in uses:
        assert _use(cache, [number]) == [number] * (number in recent)
        _keep(cache, [number])
        recent = [*(other for other in recent if other != number), number][-total:]


def test_of_a_chain_its_end_gives_way_first() -> None:
    """What was used at once goes from its last block on: the beginning is what other chains share."""
    cache = PrefixCache(6)
    _keep(cache, range(6))
    _keep(cache, [10, 11])
    assert _use(cache, range(6)) == [0, 1, 2, 3]


def test_a_chain_beyond_the_cache_keeps_its_beginning() -> None:
    """What does not fit beside its own chain's blocks is turned away, and counted; none at all fit in nothing."""
    cache = PrefixCache(3)
    assert _keep(cache, range(5)) == [0, 1, 2]
    assert cache.record().turned_away == 2
    assert _keep(PrefixCache(0), range(5)) == []


def test_nothing_is_kept_where_all_is_being_read() -> None:
    """A cache of pinned blocks turns newcomers away, and takes them again afterwards."""
    cache = PrefixCache(2)
    _keep(cache, [0, 1])
    first, second = cache.lookup(_ids([0, 1])), cache.lookup(_ids([1]))
    assert _keep(cache, [2]) == []
    cache.release(first.pin)
    assert _keep(cache, [2, 3]) == [2]
    assert _use(cache, [1]) == [1]
    cache.release(second.pin)
    assert _keep(cache, [3]) == [3]


def test_a_negative_size_is_refused() -> None:
    """A mistake of ours, told with the size."""
    with pytest.raises(ValueError, match="a cache of -1 slots"):
        PrefixCache(-1)
