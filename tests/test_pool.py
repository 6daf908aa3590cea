"""Laws of emulator.pool."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, StateMachineMeta, consumes, invariant, rule

from emulator.pool import BufferPool, Lease, PagePool, Pool, PoolExhausted

TOTAL = 40


def units(lease: Lease) -> set[int]:
    return {unit for first, count in lease.runs for unit in range(first, first + count)}


class AbstractMachine(StateMachineMeta, ABCMeta):
    """Of machines that have abstract methods."""


class PoolMachine(RuleBasedStateMachine, metaclass=AbstractMachine):
    """A pool beside the plain set of free units; subclasses say which pool and what it may refuse."""

    leases = Bundle("leases")
    pool: Pool

    def __init__(self) -> None:
        super().__init__()
        self.free = set(range(TOTAL))
        self.peak = 0
        self.returned: list[Lease] = []

    @abstractmethod
    def fits(self, count: int) -> bool:
        """Whether the pool can give a lease of ``count`` now."""

    @rule(target=leases, count=st.integers(0, TOTAL + 2))
    def reserve(self, count: int) -> Lease | None:
        """A lease is of the size asked for, disjoint from all others, and refused only when it cannot be had."""
        fits = self.fits(count)
        lease = self.pool.try_reserve(count)
        assert (lease is not None) == fits
        if lease is None:
            with pytest.raises(PoolExhausted, match=str(count)):
                self.pool.reserve(count)
            return None
        assert lease.size == count == len(units(lease))
        assert units(lease) <= self.free
        self.check_shape(lease)
        self.free -= units(lease)
        self.peak = max(self.peak, TOTAL - len(self.free))
        return lease

    @abstractmethod
    def check_shape(self, lease: Lease) -> None:
        """Assert what the pool says of where a lease lies."""

    @rule(lease=consumes(leases))
    def release(self, lease: Lease | None) -> None:
        if lease is None:
            return
        self.pool.release(lease)
        self.free |= units(lease)
        self.returned.append(lease)

    @rule(data=st.data())
    def release_again(self, data: st.DataObject) -> None:
        """A lease comes back once: the second time raises and changes nothing."""
        if not self.returned:
            return
        with pytest.raises(ValueError, match="released twice"):
            self.pool.release(data.draw(st.sampled_from(self.returned)))

    @invariant()
    def conserved(self) -> None:
        """Free plus reserved is the total, and the peak is the most that was ever reserved."""
        assert self.pool.free == len(self.free)
        assert self.pool.used + self.pool.free == self.pool.total == TOTAL
        assert self.pool.peak_used == self.peak
        assert self.pool.record().free == self.pool.free

    def longest_run(self) -> int:
        return max(self.run_lengths(), default=0)

    def run_lengths(self) -> list[int]:
        lengths: list[int] = []
        for unit in sorted(self.free):
            if unit - 1 in self.free:
                lengths[-1] += 1
            else:
                lengths.append(1)
        return sorted(lengths, reverse=True)


class PagePoolMachine(PoolMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool("hbm", TOTAL)

    def fits(self, count: int) -> bool:
        return count <= len(self.free)

    def check_shape(self, lease: Lease) -> None:
        """No set of free runs smaller than the lease's number of runs could have held it."""
        needed, left = 0, lease.size
        for length in self.run_lengths():
            if left <= 0:
                break
            needed, left = needed + 1, left - length
        assert len(lease.runs) == needed


class BufferPoolMachine(PoolMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BufferPool("de_buffer", TOTAL)

    def fits(self, count: int) -> bool:
        return count <= self.longest_run()

    def check_shape(self, lease: Lease) -> None:
        """One range, at the lowest address at which it fits."""
        if not lease.size:
            assert (lease.runs, lease.offset) == ((), 0)
            return
        fitting = (at for at in range(TOTAL) if set(range(at, at + lease.size)) <= self.free)
        assert lease.runs == ((next(fitting), lease.size),)
        assert lease.offset == lease.runs[0][0]


for machine in (PagePoolMachine, BufferPoolMachine):
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPagePool = PagePoolMachine.TestCase
TestBufferPool = BufferPoolMachine.TestCase


@pytest.mark.parametrize("kind", [PagePool, BufferPool])
def test_another_pools_lease_is_refused(kind: type[Pool]) -> None:
    """A pool takes back only what it gave, even when the serial numbers agree."""
    ours, theirs = kind("ours", 4), kind("theirs", 4)
    ours.reserve(2)
    with pytest.raises(ValueError, match="theirs"):
        ours.release(theirs.reserve(2))
    assert (ours.free, ours.leases) == (2, 1)


@pytest.mark.parametrize("kind", [PagePool, BufferPool])
def test_what_can_never_fit_is_known_beforehand(kind: type[Pool]) -> None:
    """can_ever_fit is about the pool, not about what is reserved now; negative sizes are the caller's fault."""
    pool = kind("pool", 4)
    pool.reserve(4)
    assert pool.can_ever_fit(4)
    assert not pool.can_ever_fit(5)
    with pytest.raises(ValueError, match="-1"):
        pool.try_reserve(-1)
    with pytest.raises(ValueError, match="-1"):
        kind("pool", -1)


def test_a_scattered_lease_has_no_offset() -> None:
    """Whoever needs one range and holds several is told so."""
    pool = PagePool("hbm", 3)
    held = [pool.reserve(1) for _ in range(3)]
    pool.release(held[0])
    pool.release(held[2])
    lease = pool.reserve(2)
    assert lease.runs == ((0, 1), (2, 1))
    with pytest.raises(ValueError, match="scattered"):
        _ = lease.offset


@given(st.lists(st.integers(1, TOTAL), min_size=1, max_size=60), st.randoms(use_true_random=False))
def test_first_in_first_out_waiting_never_starves(sizes: list[int], order: Random) -> None:
    """With a FIFO queue in front and leases released in any order, everything that fits the pool is served."""
    pool = BufferPool("pe_buffer", TOTAL)
    waiting, held = list(sizes), []
    while waiting:
        lease = pool.try_reserve(waiting[0])
        if lease is not None:
            held.append(lease)
            waiting.pop(0)
            continue
        assert held, "nothing is reserved and yet the head does not fit"
        pool.release(held.pop(order.randrange(len(held))))
    for lease in held:
        pool.release(lease)
    assert pool.free == TOTAL
    assert pool.try_reserve(TOTAL) is not None


@given(st.lists(st.integers(1, 10), max_size=30))
def test_the_same_calls_give_the_same_leases(sizes: list[int]) -> None:
    """Pools are deterministic, so that a run in virtual time is."""

    def play() -> list[Lease | None]:
        pool = PagePool("hbm", TOTAL)
        got = []
        for i, size in enumerate(sizes):
            got.append(pool.try_reserve(size))
            held = got[i // 2]
            if i % 2 and held is not None:
                pool.release(held)
                got[i // 2] = None
        return got

    assert play() == play()
