"""The block store of one storage node: Full Blocks by id, in files (``open_store``) or in memory.

Synchronous and batched: a cached read of a few blocks costs less than handing it to a thread would.

How files keep blocks. Payload lies in append-only segment files, block after block, nothing between them, so
that blocks appended together are read back with one ``preadv`` into the caller's memory. Block *n* of the
store is *slot* n: segment n // slots, byte (n % slots) x block_bytes. The index, an SQLite database, has one
row a run of slots, as a rule a batch: first slot, ids, checksums (XXH3 of each block's payload). A batch is
committed in this order: payload written, row inserted, and only then visible; a batch that fails or is cut off
by a kill leaves bytes behind the last indexed slot, which the next append overwrites and the next open cuts off.

Durability. What ``append`` acknowledged survives the death of the process at any instant. It survives the
death of the *machine* only with ``durable=True``, which waits for the disk in every append; without it, blocks
whose bytes did not reach the disk are missing (``dropped``) or fail their checksum afterwards, or the index is
found broken at opening. Either way a block is served right or not at all.

Collisions. Blocks are kept and found by their whole ids, key and check: two prefixes whose keys collide are two
blocks, and neither is ever served for the other (``emulator.kvcache``).

Must not import fabrics or roles.
"""

from __future__ import annotations

import os
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_digest

from .errors import StoreError
from .kvcache import ID_BYTES, BlockId, key_of

__all__ = ["Appended", "BlockStore", "FileStore", "MemoryStore", "open_store", "split_blocks"]

Blocks = Sequence[tuple[BlockId, memoryview]]
_Row = tuple[int, bytes, bytes]

SEGMENT_BYTES = 64 << 20
_CHECKSUM_BYTES = 8
_OPEN_SEGMENTS = 64
_RUN_BLOCKS = 128  # of one system call, below IOV_MAX
_FORMAT = 1
_SEGMENT_NAMES = "segment-" + "[0-9]" * 6 + ".kv"


class Appended(msgspec.Struct, frozen=True):
    """What became of a batch: how many blocks were stored now, and how many were there already."""

    stored: int
    known: int


def split_blocks(memory: npt.NDArray[np.uint8], block_bytes: int) -> list[memoryview]:
    """One view per block of ``memory`` (uint8, one dimension, a whole number of blocks laid end to end)."""
    if memory.dtype != np.uint8 or memory.ndim != 1 or memory.size % block_bytes or not memory.flags.c_contiguous:
        raise ValueError(f"memory of {memory.size} x {memory.dtype}: expected uint8 blocks of {block_bytes} bytes")
    view = memory.data
    return [view[at : at + block_bytes] for at in range(0, memory.size, block_bytes)]


class BlockStore(ABC):
    """Blocks of ``block_bytes`` bytes by id. ``with``: leaving it closes it.

    What is kept where, and which ids are there, is common to all stores: block *n* to be stored has slot *n*.
    """

    def __init__(self, block_bytes: int) -> None:
        if block_bytes < 1:
            raise ValueError(f"block_bytes = {block_bytes}: expected 1 or more")
        self.block_bytes = block_bytes
        self._slots: dict[BlockId, int] = {}
        self._ids = bytearray()
        """The ids of slots 0 .. end - 1, end to end; stale where a block was forgotten."""
        self._closed = False

    def __contains__(self, block: object) -> bool:
        return block in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def append(self, blocks: Blocks) -> Appended:
        """Commit a batch: all its new blocks become visible together, or none does.

        A block that is there already is left as it is. Raises StoreError (definite: nothing was stored) when the
        bytes or the index cannot be kept, ValueError for an id or a payload of another size.
        """
        self._check_open()
        fresh = dict(blocks)
        if not self._slots.keys().isdisjoint(fresh):
            fresh = {block: payload for block, payload in fresh.items() if block not in self._slots}
        if fresh:
            payloads = list(fresh.values())
            self._check_sizes(payloads)
            ids, end = b"".join(fresh), self._end
            if len(ids) != len(fresh) * ID_BYTES:
                raise ValueError(
                    f"block ids of {len(ids)} bytes for {len(fresh)} blocks: expected {ID_BYTES} each"
                )
            self._keep(ids, payloads)
            self._ids += ids
            self._slots.update(zip(fresh, range(end, end + len(fresh)), strict=True))
        return Appended(len(fresh), len(blocks) - len(fresh))

    def read(self, ids: Sequence[BlockId], out: Sequence[memoryview]) -> None:
        """Fill ``out[i]`` (writable, ``block_bytes`` long) with block ``ids[i]``, every checksum verified.

        Raises StoreError naming the block that is missing or broken; ``out`` is undefined then.
        """
        self._check_open()
        if len(ids) != len(out):
            raise ValueError(f"{len(ids)} blocks to read into {len(out)} buffers")
        begin = 0
        while begin < len(ids):
            slot, count = self._run(ids, begin)
            self._fetch(slot, out[begin : begin + count])
            begin += count

    def read_into(self, ids: Sequence[BlockId], memory: npt.NDArray[np.uint8]) -> None:
        """Read blocks end to end into ``memory`` (uint8, len(ids) x block_bytes)."""
        self.read(ids, split_blocks(memory, self.block_bytes))

    def retain(self, ids: Collection[BlockId]) -> int:
        """Forget every block that is not among ``ids``; return how many were forgotten.

        Raises StoreError (definite: nothing was forgotten) when the index cannot be changed.
        """
        self._check_open()
        kept = {block: self._slots[block] for block in ids if block in self._slots}
        gone = len(self) - len(kept)
        self._forget(sorted(kept.values()))
        self._slots = kept
        del self._ids[(max(kept.values(), default=-1) + 1) * ID_BYTES :]
        return gone

    def clear(self) -> int:
        """Forget every block; return how many there were."""
        return self.retain(())

    def close(self) -> None:
        """Release what the store holds open; any later use is a ValueError. Idempotent."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def _keep(self, ids: bytes, payloads: Sequence[memoryview]) -> None:
        """Commit blocks (their joined ids, their bytes) to the slots from ``_end`` on, all or none."""

    @abstractmethod
    def _fetch(self, slot: int, out: Sequence[memoryview]) -> None:
        """Fill ``out`` from one run of slots that are in use. ValueError for buffers of another size."""

    @abstractmethod
    def _forget(self, kept: Sequence[int]) -> None:
        """Drop all slots but those in ``kept`` (ascending) for good."""

    @abstractmethod
    def _reach(self, slot: int) -> int:
        """How many slots from ``slot`` on can be fetched at once."""

    @property
    def _end(self) -> int:
        """The slot behind the last one in use."""
        return len(self._ids) // ID_BYTES

    def _joined_ids(self, slot: int, count: int) -> bytearray:
        return self._ids[slot * ID_BYTES : (slot + count) * ID_BYTES]

    def _id(self, slot: int) -> BlockId:
        return BlockId(bytes(self._joined_ids(slot, 1)))

    def _run(self, ids: Sequence[BlockId], begin: int) -> tuple[int, int]:
        """Where ``ids[begin:]`` begins to lie: (slot, how many of them lie there one after the other)."""
        slot = self._slots.get(ids[begin])
        if slot is not None:
            limit = min(len(ids) - begin, self._reach(slot))
            nothing_stale = len(self._slots) == self._end
            if nothing_stale and self._joined_ids(slot, limit) == b"".join(ids[begin : begin + limit]):
                return slot, limit
            count = 1
            while count < limit and self._slots.get(ids[begin + count]) == slot + count:
                count += 1
            return slot, count
        raise StoreError(f"{self}: block {_name(ids[begin])} is not in the store ({len(self)} blocks are)")

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the store is closed")

    def _check_sizes(self, views: Sequence[memoryview]) -> None:
        sizes = [view.nbytes for view in views]
        if sizes != [self.block_bytes] * len(sizes):
            raise ValueError(f"buffers of {sorted(set(sizes))} bytes: expected blocks of {self.block_bytes} bytes")


class MemoryStore(BlockStore):
    """A store without files, for virtual time."""

    def __init__(self, block_bytes: int) -> None:
        super().__init__(block_bytes)
        self._payloads: dict[int, bytes] = {}

    def __str__(self) -> str:
        return "the store in memory"

    def _keep(self, ids: bytes, payloads: Sequence[memoryview]) -> None:
        self._payloads.update(enumerate(map(bytes, payloads), self._end))

    def _fetch(self, slot: int, out: Sequence[memoryview]) -> None:
        self._check_sizes(out)
        for at, view in enumerate(out, slot):
            view[:] = self._payloads[at]

    def _forget(self, kept: Sequence[int]) -> None:
        self._payloads = {slot: self._payloads[slot] for slot in kept}

    def _reach(self, slot: int) -> int:
        return _RUN_BLOCKS


class _Segments:
    """Slots of ``block_bytes`` bytes in files of ``slots`` each; a bounded number of them is open."""

    def __init__(self, directory: Path, block_bytes: int, slots: int) -> None:
        self.directory = directory
        self.block_bytes = block_bytes
        self.slots = slots
        self._open: dict[int, int] = {}

    def path(self, segment: int) -> Path:
        return self.directory / f"segment-{segment:06d}.kv"

    def reach(self, slot: int) -> int:
        """How many slots from ``slot`` on lie in one file and fit one system call."""
        return min(self.slots - slot % self.slots, _RUN_BLOCKS)

    def write(self, slot: int, payloads: Sequence[memoryview]) -> None:
        """Write ``payloads`` to the slots from ``slot`` on. Raises OSError; what is in them is then undefined."""
        done = 0
        while done < len(payloads):
            part = payloads[done : done + self.reach(slot + done)]
            segment, at = divmod(slot + done, self.slots)
            self._write_run(self._file(segment, os.O_CREAT), part, at * self.block_bytes)
            done += len(part)

    def _write_run(self, file: int, payloads: Sequence[memoryview], offset: int) -> None:
        wanted = len(payloads) * self.block_bytes
        done = os.pwritev(file, payloads, offset)
        while done < wanted:
            block, skip = divmod(done, self.block_bytes)
            done += os.pwritev(file, [payloads[block][skip:], *payloads[block + 1 :]], offset + done)

    def sync(self, first: int, count: int) -> None:
        """Wait until what was just written to ``count`` slots from ``first`` on is on the disk. Raises OSError."""
        for segment in range(first // self.slots, (first + count - 1) // self.slots + 1):
            os.fdatasync(self._file(segment))
            if segment * self.slots >= first:
                _sync_directory(self.directory)

    def read(self, slot: int, out: Sequence[memoryview]) -> bool:
        """Fill ``out`` from one run of slots; False when the file ends before. Raises OSError."""
        segment, at = divmod(slot, self.slots)
        file = self._file(segment)
        offset, wanted = at * self.block_bytes, len(out) * self.block_bytes
        got = os.preadv(file, out, offset)
        while got < wanted:
            block, skip = divmod(got, self.block_bytes)
            more = os.preadv(file, [out[block][skip:], *out[block + 1 :]], offset + got)
            if not more:
                return False
            got += more
        return True

    def blocks_in_files(self) -> dict[int, int]:
        """Whole blocks in each segment file that exists."""
        sizes = {int(path.stem[8:]): path.stat().st_size for path in self.directory.glob(_SEGMENT_NAMES)}
        return {segment: size // self.block_bytes for segment, size in sizes.items()}

    def cut(self, kept: Iterable[int]) -> None:
        """Give back what no slot in ``kept`` needs: whole files, and the bytes behind the last slot."""
        ends: dict[int, int] = {}
        for slot in kept:
            segment, at = divmod(slot, self.slots)
            ends[segment] = max(ends.get(segment, 0), at + 1)
        for segment in self.blocks_in_files():
            if segment not in ends:
                self._close(segment)
                self.path(segment).unlink()
            elif segment == max(ends):
                os.truncate(self.path(segment), ends[segment] * self.block_bytes)

    def close(self) -> None:
        for segment in tuple(self._open):
            self._close(segment)

    def _file(self, segment: int, flags: int = 0) -> int:
        file = self._open.get(segment)
        if file is None:
            file = os.open(self.path(segment), os.O_RDWR | os.O_CLOEXEC | flags, 0o644)
            if len(self._open) == _OPEN_SEGMENTS:
                self._close(next(iter(self._open)))
            self._open[segment] = file
        return file

    def _close(self, segment: int) -> None:
        file = self._open.pop(segment, None)
        if file is not None:
            os.close(file)


class FileStore(BlockStore):
    """A store in files; made by ``open_store``. One process at a time.

    ``dropped``: blocks that the index knew at opening but whose bytes the files did not have.
    """

    def __init__(self, directory: Path, block_bytes: int, segment_bytes: int, durable: bool) -> None:
        super().__init__(block_bytes)
        self.directory = directory
        self.durable = durable
        self._index = _Index(directory / "index.sqlite", durable)
        try:
            slots = self._index.prepare(block_bytes, max(1, segment_bytes // block_bytes))
            self._segments = _Segments(directory, block_bytes, slots)
            self._checksums = bytearray()
            self.dropped = self._load()
        except BaseException:
            self._index.close()
            raise

    def __str__(self) -> str:
        return str(self.directory)

    def close(self) -> None:
        super().close()
        self._segments.close()
        self._index.close()

    def _keep(self, ids: bytes, payloads: Sequence[memoryview]) -> None:
        first, count = self._end, len(payloads)
        checksums = b"".join(map(xxh3_64_digest, payloads))
        try:
            self._segments.write(first, payloads)
            if self.durable:
                self._segments.sync(first, count)
            self._index.insert((first, ids, checksums))
        except (OSError, sqlite3.Error) as error:
            # Room for what comes next; bytes that stay behind the last slot do no harm.
            with suppress(OSError):
                self._segments.cut(self._slots.values())
            raise StoreError(
                f"{self}: {count} blocks of {self.block_bytes} bytes not stored: {error}", definite=True
            ) from error
        self._checksums += checksums

    def _fetch(self, slot: int, out: Sequence[memoryview]) -> None:
        try:
            whole = self._segments.read(slot, out)
        except OSError as error:
            raise StoreError(f"{self._where(slot)}: not readable: {error}") from error
        got = b"".join(map(xxh3_64_digest, out))
        expected = self._joined_checksums(slot, len(out))
        if not whole or got != expected:
            self._check_sizes(out)
            pairs = zip(_pieces(got, _CHECKSUM_BYTES), _pieces(expected, _CHECKSUM_BYTES), strict=True)
            bad = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(out) - 1)
            raise StoreError(f"{self._where(slot + bad)}: its bytes are not those stored")

    def _forget(self, kept: Sequence[int]) -> None:
        try:
            self._index.replace(self._rows(kept))
        except sqlite3.Error as error:
            raise StoreError(f"{self}: blocks not forgotten: {error}", definite=True) from error
        del self._checksums[(kept[-1] + 1 if kept else 0) * _CHECKSUM_BYTES :]
        # What cannot be given back now is given back at the next opening.
        with suppress(OSError):
            self._segments.cut(kept)

    def _reach(self, slot: int) -> int:
        return self._segments.reach(slot)

    def _rows(self, slots: Sequence[int]) -> Iterator[_Row]:
        """The index rows of ``slots`` (ascending): one a run of neighbours."""
        for _, group in groupby(enumerate(slots), key=lambda pair: pair[1] - pair[0]):
            run = [slot for _, slot in group]
            first, count = run[0], len(run)
            yield first, bytes(self._joined_ids(first, count)), bytes(self._joined_checksums(first, count))

    def _load(self) -> tuple[BlockId, ...]:
        """Fill the memory of the index; what the files do not have is dropped from it and returned."""
        present = self._segments.blocks_in_files()
        lost, rows = [], 0
        for first, ids, checksums in self._index.rows():
            gap = first - self._end
            if gap < 0 or len(ids) // ID_BYTES != len(checksums) // _CHECKSUM_BYTES:
                raise StoreError(f"{self._index.path}: row {first} of the index is broken")
            self._ids += bytes(gap * ID_BYTES) + ids
            self._checksums += bytes(gap * _CHECKSUM_BYTES) + checksums
            for slot in range(first, self._end):
                rows += 1
                segment, at = divmod(slot, self._segments.slots)
                if at < present.get(segment, 0):
                    self._slots[self._id(slot)] = slot
                else:
                    lost.append(self._id(slot))
        if len(self._slots) + len(lost) != rows:
            raise StoreError(
                f"{self._index.path}: {rows} blocks with {len(self._slots) + len(lost)} ids: not our index"
            )
        slots = sorted(self._slots.values())
        if lost:
            self._index.replace(self._rows(slots))
            end = slots[-1] + 1 if slots else 0
            del self._ids[end * ID_BYTES :], self._checksums[end * _CHECKSUM_BYTES :]
        self._segments.cut(slots)
        return tuple(lost)

    def _joined_checksums(self, slot: int, count: int) -> bytearray:
        return self._checksums[slot * _CHECKSUM_BYTES : (slot + count) * _CHECKSUM_BYTES]

    def _where(self, slot: int) -> str:
        segment, at = divmod(slot, self._segments.slots)
        return f"{self._segments.path(segment)}: block {_name(self._id(slot))} at byte {at * self.block_bytes}"


class _Index:
    """Runs of slots with their ids and checksums, in SQLite: write-ahead mode, locked for this process alone.

    A row a run, in slot order, so that a batch dirties one page or two, as many blocks as it may have.
    """

    def __init__(self, path: Path, durable: bool) -> None:
        self.path = path
        self._db = sqlite3.connect(path, timeout=0, isolation_level=None)
        try:
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode = WAL")
            # A checkpoint happens inside an append: small ones stall the run loop 0.3 ms, the default 1000 1.6 ms.
            self._db.execute("PRAGMA wal_autocheckpoint = 200")
            self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'OFF'}")
        except sqlite3.Error:
            self._db.close()
            raise

    def prepare(self, block_bytes: int, slots: int) -> int:
        """Make the tables of a new store; return the slots per segment of this one. StoreError on a mismatch."""
        with self._transaction():
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS store (format INTEGER, block_bytes INTEGER, segment_slots INTEGER)"
            )
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS run "
                "(slot INTEGER PRIMARY KEY, ids BLOB NOT NULL, checksums BLOB NOT NULL) STRICT"
            )
            row = self._db.execute("SELECT format, block_bytes, segment_slots FROM store").fetchone()
            if row is None:
                row = (_FORMAT, block_bytes, slots)
                self._db.execute("INSERT INTO store VALUES (?, ?, ?)", row)
        if row[:2] != (_FORMAT, block_bytes):
            raise StoreError(
                f"{self.path}: a store of format {row[0]} with blocks of {row[1]} bytes: "
                f"expected format {_FORMAT} and {block_bytes} bytes; use another directory or remove this one"
            )
        return int(row[2])

    def rows(self) -> Iterator[_Row]:
        """(first slot, joined ids, joined checksums) of every run, in slot order."""
        yield from self._db.execute("SELECT slot, ids, checksums FROM run ORDER BY slot")

    def insert(self, row: _Row) -> None:
        """Add a row; one statement is a transaction."""
        self._db.execute("INSERT INTO run VALUES (?, ?, ?)", row)

    def replace(self, rows: Iterable[_Row]) -> None:
        """Let ``rows`` be all there are, in one transaction."""
        with self._transaction():
            self._db.execute("DELETE FROM run")
            self._db.executemany("INSERT INTO run VALUES (?, ?, ?)", rows)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise


def open_store(
    directory: Path, block_bytes: int, *, segment_bytes: int = SEGMENT_BYTES, durable: bool = False
) -> FileStore:
    """Open the store in ``directory``, making both when they are not there. ``with`` closes it.

    ``segment_bytes``: the size at which a *new* store begins its next file. ``durable``: see the module.
    Raises StoreError when the directory cannot be used, is open elsewhere, or holds blocks of another size.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return FileStore(directory, block_bytes, segment_bytes, durable)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
            raise StoreError(f"{directory}: the store is open in another process", definite=True) from None
        raise StoreError(f"{directory}: the store cannot be opened: {error}", definite=True) from error
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"{directory}: the store cannot be opened: {error}", definite=True) from error


def _pieces(joined: bytes | bytearray, size: int) -> list[bytes | bytearray]:
    return [joined[at : at + size] for at in range(0, len(joined), size)]


def _sync_directory(directory: Path) -> None:
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _name(block: BlockId) -> str:
    return key_of(block).hex()
