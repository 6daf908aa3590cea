"""A node's own cache of Full Blocks in its DRAM, in front of storage: ``[engine] prefix_cache_gb``.

Which blocks it keeps is decided by ``prefixcache``; here are their bytes. A PE keeps what it read, a DE what it
read and what it wrote (``CachingWriter``), each for itself: nobody else knows of it, the scheduler neither. A
reader (``CachedReader``) copies what is kept to where the role expects it, reads the rest from storage, and keeps
that.

A copy inside a node crosses no NIC and takes no model time, as in ``drampool``: a real engine would use the block
where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..deployment import Deployment
from ..errors import ProtocolViolation
from ..fabric.interface import Fabric, Region
from ..kvcache import BlockId
from ..prefixcache import Held, PrefixCache
from ..records import CacheRecord
from .blockio import Job, Reader, StorageReader, StorageWriter, Wanted, all_of, copy_blocks, runs_of
from .messages import Pooled
from .withdrawal import Withdrawal

__all__ = ["CachedReader", "CachingWriter", "NodeCache", "open_cache"]

PREFIX_CACHE = "prefix_cache"
"""The region of a node that holds its cache."""


class NodeCache:
    """One node's cache. Registers its memory when it is made."""

    def __init__(self, deployment: Deployment, fabric: Fabric) -> None:
        self.size = deployment.layout.full_block_bytes
        self._blocks = PrefixCache(deployment.cache_blocks)
        self._region = fabric.register(PREFIX_CACHE, deployment.cache_blocks * self.size)

    def record(self) -> CacheRecord:
        """What the cache counted until now."""
        return self._blocks.record()

    def find(self, ids: Sequence[BlockId]) -> Held:
        """Which of ``ids`` are here; they stay until ``release``."""
        return self._blocks.lookup(ids)

    def release(self, held: Held) -> None:
        self._blocks.release(held.pin)

    async def take(self, moves: Sequence[tuple[int, int]], region: Region) -> None:
        """Copy blocks that were found, each from its slot to a byte of ``region``."""
        await copy_blocks(self._region, region, [(slot * self.size, to) for slot, to in moves], self.size)

    async def keep(self, ids: Sequence[BlockId], region: Region, offsets: Sequence[int]) -> None:
        """Keep those of blocks ``ids``, at ``offsets`` of ``region``, that are not here yet, as far as they fit.

        When this returns ``region`` is not read any more.
        """
        kept = self._blocks.reserve(ids)
        moves = [(offsets[index], slot * self.size) for index, slot in kept.slots]
        await copy_blocks(region, self._region, moves, self.size)
        self._blocks.commit(kept.reservation)


def open_cache(deployment: Deployment, fabric: Fabric) -> NodeCache | None:
    """The node's cache; None where the run has none."""
    return NodeCache(deployment, fabric) if deployment.cache_blocks else None


class CachedReader(Reader):
    """A node's reader with its cache before storage; it reads into ``buffer`` alone."""

    def __init__(self, deployment: Deployment, fabric: Fabric, cache: NodeCache, buffer: Region) -> None:
        self._node = fabric.node
        self._cache = cache
        self._buffer = buffer
        self._storage = StorageReader(deployment, fabric)

    async def read(self, wanted: Wanted, *, sequence: int, withdrawal: Withdrawal | None = None) -> Pooled:
        """Like ``StorageReader.read``; says what the cache gave. ProtocolViolation for another region."""
        if wanted.region != self._buffer.name:
            raise ProtocolViolation(
                f"{self._node}: a read into {wanted.region} by the reader of {self._buffer.name}"
            )
        async with self._storage.turn(sequence, withdrawal):
            held = self._cache.find(wanted.ids)
            try:
                return await self._read(wanted, held)
            finally:
                self._cache.release(held)

    async def _read(self, wanted: Wanted, held: Held) -> Pooled:
        places = [wanted.base + index * self._cache.size for index in range(len(wanted.ids))]
        here = [(slot, at) for slot, at in zip(held.slots, places, strict=True) if slot is not None]
        missing = [index for index, slot in enumerate(held.slots) if slot is None]
        jobs: list[Job] = [partial(self._cache.take, here, self._buffer)]
        if missing:
            jobs.append(partial(self._storage.fetch, wanted, list(runs_of(missing))))
        await all_of(jobs)
        await self._cache.keep([wanted.ids[at] for at in missing], self._buffer, [places[at] for at in missing])
        return Pooled(len(here), len(here))


class CachingWriter(StorageWriter):
    """A DE node's writes: to storage, and into its cache."""

    def __init__(self, deployment: Deployment, fabric: Fabric, cache: NodeCache) -> None:
        super().__init__(deployment, fabric)
        self._cache = cache

    async def write(self, ids: Sequence[BlockId], first_index: int, region: Region, base: int) -> None:
        """Returns when all are committed to storage, and those that found room are in the cache."""
        await super().write(ids, first_index, region, base)
        await self._cache.keep(ids, region, [base + at * self._cache.size for at in range(len(ids))])
