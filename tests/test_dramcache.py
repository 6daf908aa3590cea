"""The pool's directory loses no slot, shows only what is there, and keeps what is in use."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from emulator.dramcache import SAMPLE, Directory, Found, Place, Reserved
from emulator.kvcache import ID_BYTES, BlockId

from .within import assert_within

SLOTS = {"pe0": 4, "de0": 7, "de1": 0}
CHAINS = st.lists(st.integers(0, 19), max_size=6, unique=True)
NODES = st.sampled_from(sorted(SLOTS))


def _block(number: int) -> BlockId:
    return BlockId(number.to_bytes(ID_BYTES, "little"))


def _ids(numbers: list[int] | range) -> list[BlockId]:
    return [_block(number) for number in numbers]


def _keep(directory: Directory, numbers: list[int] | range, node: str) -> list[int]:
    """Keep the blocks; which of them got a slot."""
    reserved = directory.reserve(_ids(numbers), node)
    directory.commit(reserved.reservation)
    return [numbers[index] for index, _ in reserved.slots]


def _here(directory: Directory, numbers: list[int] | range) -> list[int]:
    """Which of the blocks are found, all leases released."""
    found = directory.lookup(_ids(numbers))
    directory.release(found.lease)
    return [number for number, place in zip(numbers, found.places, strict=True) if place is not None]


class DirectoryMachine(RuleBasedStateMachine):
    """Any order of calls, against a model that knows what lies in every slot."""

    leases = Bundle("leases")
    reservations = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.directory = Directory(SLOTS, seed=3)
        self.content: dict[Place, BlockId] = {}
        """What a node's memory holds: what was reserved last for a slot."""
        self.leased: dict[int, dict[BlockId, Place]] = {}
        self.pending: dict[int, dict[BlockId, Place]] = {}

    @rule(target=leases, numbers=CHAINS)
    def lookup(self, numbers: list[int]) -> Found:
        """Who finds a block finds its bytes, and nothing that is not committed."""
        found = self.directory.lookup(_ids(numbers))
        where = dict(zip(_ids(numbers), found.places, strict=True))
        held = {block: place for block, place in where.items() if place is not None}
        assert all(self.content[place] == block for block, place in held.items())
        assert held.keys().isdisjoint(block for blocks in self.pending.values() for block in blocks)
        self.leased[found.lease] = held
        return found

    @rule(found=consumes(leases))
    def release(self, found: Found) -> None:
        self.directory.release(found.lease)
        del self.leased[found.lease]
        with pytest.raises(ValueError, match="not out"):
            self.directory.release(found.lease)

    @rule(target=reservations, numbers=CHAINS, node=NODES)
    def reserve(self, numbers: list[int], node: str) -> Reserved:
        """A slot is given to one block at a time, and to none while somebody reads or fills it."""
        busy = {place for blocks in (*self.leased.values(), *self.pending.values()) for place in blocks.values()}
        reserved = self.directory.reserve(_ids(numbers), node)
        mine = {_block(numbers[index]): Place(node, slot) for index, slot in reserved.slots}
        assert len(set(mine.values())) == len(mine)
        assert busy.isdisjoint(mine.values())
        assert all(0 <= place.slot < SLOTS[node] for place in mine.values())
        self.content |= {place: block for block, place in mine.items()}
        self.pending[reserved.reservation] = mine
        return reserved

    @rule(reserved=consumes(reservations))
    def commit(self, reserved: Reserved) -> None:
        """Committed blocks are there at once."""
        self.directory.commit(reserved.reservation)
        mine = self.pending.pop(reserved.reservation)
        found = self.directory.lookup(list(mine))
        assert found.places == tuple(mine.values())
        self.directory.release(found.lease)
        with pytest.raises(ValueError, match="not out"):
            self.directory.commit(reserved.reservation)

    @invariant()
    def conserved(self) -> None:
        directory, record = self.directory, self.directory.record()
        assert directory.free + directory.used + directory.pending == directory.total == sum(SLOTS.values())
        assert directory.pending == sum(len(blocks) for blocks in self.pending.values())
        assert record.inserted - record.evicted == record.used == directory.used
        assert record.leases == len(self.leased)
        assert 0 <= record.hits <= record.looked_up

    @invariant()
    def what_is_leased_stays(self) -> None:
        for blocks in self.leased.values():
            assert all(self.content[place] == block for block, place in blocks.items())


TestDirectory = DirectoryMachine.TestCase


def test_the_same_calls_have_the_same_answers() -> None:
    """A seed decides what gives way; another seed decides otherwise."""

    def survivors(seed: int) -> list[int]:
        directory = Directory({"n": 50}, seed=seed)
        for start in range(0, 400, 10):
            _keep(directory, range(start, start + 10), "n")
        return _here(directory, range(400))

    assert survivors(1) == survivors(1)
    assert survivors(1) != survivors(2)


def test_a_small_pool_evicts_exactly_the_least_recently_used() -> None:
    """With no more blocks than are drawn, the oldest use decides; a lookup is a use."""
    directory = Directory({"n": SAMPLE})
    for number in range(SAMPLE):
        _keep(directory, [number], "n")
    _here(directory, [0])
    _keep(directory, [100], "n")
    assert _here(directory, range(SAMPLE)) == [0, *range(2, SAMPLE)]


def test_old_blocks_give_way_before_new_ones() -> None:
    """Of 1,000 blocks of two ages, 9 in 10 that give way to 100 others are old: 1 - 2^-5 of them, expected."""
    directory = Directory({"n": 1000}, seed=0)
    _keep(directory, range(500), "n")
    _keep(directory, range(500, 1000), "n")
    _keep(directory, range(1000, 1100), "n")
    gone = set(range(1000)) - set(_here(directory, range(1000)))
    assert len(gone) == 100
    assert sum(number < 500 for number in gone) >= 90


def test_what_fits_stays() -> None:
    """Nothing gives way while there is a free slot, and a block is kept once, wherever it was kept first."""
    directory = Directory({"a": 10, "b": 10})
    assert _keep(directory, range(10), "a") == list(range(10))
    assert _keep(directory, range(5, 15), "b") == list(range(10, 15))
    assert _here(directory, range(20)) == list(range(15))
    assert directory.record().evicted == 0


def test_nothing_is_kept_where_all_is_in_use() -> None:
    """A pool of leased and pending blocks turns newcomers away, and takes them again afterwards."""
    directory = Directory({"n": 2})
    _keep(directory, [0], "n")
    lease = directory.lookup(_ids([0])).lease
    pending = directory.reserve(_ids([1]), "n").reservation
    assert _keep(directory, [2, 3], "n") == []
    assert directory.record().turned_away == 2
    directory.release(lease)
    directory.commit(pending)
    assert _keep(directory, [2, 3], "n") == [2, 3]


@pytest.mark.parametrize("slots", [40, 400])
def test_the_hit_ratio_is_the_share_that_fits_and_falls_as_the_set_grows(slots: int) -> None:
    """Chains in an independent, uniform order: of a set W times the pool 1 / W is found, whatever gives way."""
    chain = 8
    ratios = []
    for times in (1, 2, 4, 8):
        directory = Directory({"n": slots}, seed=times)
        chains = slots * times // chain
        chance = np.random.default_rng(7)
        steady = 10 * chains
        warm = directory.record()
        for turn in range(steady + 4000):
            if turn == steady:
                warm = directory.record()
            first = int(chance.integers(chains)) * chain
            blocks = range(first, first + chain)
            found = directory.lookup(_ids(blocks))
            _keep(directory, blocks, "n")
            directory.release(found.lease)
        record = directory.record()
        ratios.append((record.hits - warm.hits) / (record.looked_up - warm.looked_up))
        assert_within(ratios[-1], 1 / times, absolute=0.02, what="hit ratio")
    assert ratios == sorted(set(ratios), reverse=True)
    assert ratios[0] == 1


def test_unknown_nodes_and_negative_pools_are_refused() -> None:
    """Mistakes of ours are told with the node's name."""
    with pytest.raises(ValueError, match="de9: no such node"):
        Directory(SLOTS).reserve([], "de9")
    with pytest.raises(ValueError, match="n: a pool of -1 slots"):
        Directory({"n": -1})
