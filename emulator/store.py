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

Collisions. A block whose key is stored under another check belongs to another prefix: it is not stored, and is
reported, so that it can never be read in the place of the other (``emulator.kvcache``).

Must not import fabrics or roles.
"""

from __future__ import annotations

import os
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_digest

from .errors import StoreError
from .kvcache import ID_BYTES, KEY_BYTES, BlockId, key_of

__all__ = ["Appended", "BlockStore", "FileStore", "MemoryStore", "open_store", "split_blocks"]

Blocks = Sequence[tuple[BlockId, memoryview]]
_Run = tuple[int, bytes, bytes]

SEGMENT_BYTES = 64 << 20
_CHECKSUM_BYTES = 8
_OPEN_SEGMENTS = 64
_IOV_MAX = 1024
_CHUNK_BYTES = 256 << 10  # checksummed while still in the processor's cache
_FORMAT = 1
_SEGMENT_NAMES = "segment-" + "[0-9]" * 6 + ".kv"


class Appended(msgspec.Struct, frozen=True):
    """What became of a batch: blocks stored now, blocks that were there already, and those refused."""

    stored: int
    known: int
    collided: tuple[BlockId, ...] = ()


def split_blocks(memory: npt.NDArray[np.uint8], block_bytes: int) -> list[memoryview]:
    """One view per block of ``memory`` (uint8, one dimension, a whole number of blocks laid end to end)."""
    if memory.dtype != np.uint8 or memory.ndim != 1 or memory.size % block_bytes:
        raise ValueError(f"memory of {memory.size} x {memory.dtype}: expected uint8 blocks of {block_bytes} bytes")
    view = memory.data
    return [view[at : at + block_bytes] for at in range(0, memory.size, block_bytes)]


class BlockStore(ABC):
    """Blocks of ``block_bytes`` bytes by id. ``with``: leaving it closes it."""

    def __init__(self, block_bytes: int) -> None:
        if block_bytes < 1:
            raise ValueError(f"block_bytes = {block_bytes}: expected 1 or more")
        self.block_bytes = block_bytes
        self._keys: set[bytes] = set()
        self._closed = False

    @abstractmethod
    def __contains__(self, block: object) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    def append(self, blocks: Blocks) -> Appended:
        """Commit a batch: all its new blocks become visible together, or none does.

        A block that is there already is left as it is; one whose key is taken by another check is refused.
        Raises StoreError (definite: nothing was stored) when the bytes or the index cannot be kept.
        """
        self._check_open()
        ids = [block for block, _ in blocks]
        payloads = [payload for _, payload in blocks]
        self._check_sizes(payloads)
        keys = {block[:KEY_BYTES] for block in ids}
        collided: tuple[BlockId, ...] = ()
        if len(keys) < len(ids) or not keys.isdisjoint(self._keys):
            ids, payloads, collided = self._sift(blocks)
            keys = {block[:KEY_BYTES] for block in ids}
        if ids:
            self._keep(ids, payloads)
            self._keys |= keys
        return Appended(len(ids), len(blocks) - len(ids) - len(collided), collided)

    def _sift(self, blocks: Blocks) -> tuple[list[BlockId], list[memoryview], tuple[BlockId, ...]]:
        """The ids and payloads of the blocks that are new, each once, and the ids whose key is another's."""
        fresh: dict[bytes, tuple[BlockId, memoryview]] = {}
        collided = []
        for block, payload in blocks:
            key = key_of(block)
            if key in self._keys:
                if block not in self:
                    collided.append(block)
            elif fresh.setdefault(key, (block, payload))[0] != block:
                collided.append(block)
        return [block for block, _ in fresh.values()], [payload for _, payload in fresh.values()], tuple(collided)

    @abstractmethod
    def read(self, ids: Sequence[BlockId], out: Sequence[memoryview]) -> None:
        """Fill ``out[i]`` (writable, ``block_bytes`` long) with block ``ids[i]``, every checksum verified.

        Raises StoreError naming the block that is missing or broken; ``out`` is undefined then.
        """

    def read_into(self, ids: Sequence[BlockId], memory: npt.NDArray[np.uint8]) -> None:
        """Read blocks end to end into ``memory`` (uint8, len(ids) x block_bytes)."""
        self.read(ids, split_blocks(memory, self.block_bytes))

    def retain(self, ids: Collection[BlockId]) -> int:
        """Forget every block that is not among ``ids``; return how many were forgotten."""
        self._check_open()
        keep = set(ids)
        gone = self._forget(keep)
        self._keys = {key_of(block) for block in keep if block in self}
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
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def _keep(self, ids: Sequence[BlockId], payloads: Sequence[memoryview]) -> None:
        """Commit blocks that are new, all or none."""

    @abstractmethod
    def _forget(self, keep: set[BlockId]) -> int: ...

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the store is closed")

    def _check_out(self, ids: Sequence[BlockId], out: Sequence[memoryview]) -> None:
        self._check_open()
        if len(ids) != len(out):
            raise ValueError(f"{len(ids)} blocks to read into {len(out)} buffers")
        self._check_sizes(out)

    def _check_sizes(self, views: Sequence[memoryview]) -> None:
        sizes = [view.nbytes for view in views]
        if sizes != [self.block_bytes] * len(sizes):
            raise ValueError(f"buffers of {sorted(set(sizes))} bytes: expected blocks of {self.block_bytes} bytes")


class MemoryStore(BlockStore):
    """A store without files, for virtual time."""

    def __init__(self, block_bytes: int) -> None:
        super().__init__(block_bytes)
        self._blocks: dict[BlockId, bytes] = {}

    def __contains__(self, block: object) -> bool:
        return block in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def read(self, ids: Sequence[BlockId], out: Sequence[memoryview]) -> None:
        self._check_out(ids, out)
        for block, view in zip(ids, out, strict=True):
            payload = self._blocks.get(block)
            if payload is None:
                raise StoreError(f"block {_name(block)} is not in the store ({len(self)} blocks in memory)")
            view[:] = payload

    def _keep(self, ids: Sequence[BlockId], payloads: Sequence[memoryview]) -> None:
        self._blocks.update(zip(ids, map(bytes, payloads), strict=True))

    def _forget(self, keep: set[BlockId]) -> int:
        before = len(self._blocks)
        self._blocks = {block: payload for block, payload in self._blocks.items() if block in keep}
        return before - len(self._blocks)


class _Segments:
    """Slots of ``block_bytes`` bytes in files of ``slots`` each; a bounded number of them is open."""

    def __init__(self, directory: Path, block_bytes: int, slots: int) -> None:
        self.directory = directory
        self.block_bytes = block_bytes
        self.slots = slots
        self.chunk = max(1, min(_IOV_MAX, _CHUNK_BYTES // block_bytes))
        self._open: dict[int, int] = {}

    def path(self, segment: int) -> Path:
        return self.directory / f"segment-{segment:06d}.kv"

    def runs(self, slots: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Cut ``slots`` into (index, count) of neighbours in one file, at most ``chunk`` at a time."""
        begin, total = 0, len(slots)
        while begin < total:
            first = slots[begin]
            limit = min(total - begin, self.slots - first % self.slots, self.chunk)
            count = limit
            if slots[begin : begin + limit] != list(range(first, first + limit)):
                count = 1
                while slots[begin + count] == first + count:
                    count += 1
            yield begin, count
            begin += count

    def write(self, slot: int, payloads: Sequence[memoryview]) -> None:
        """Write ``payloads`` to one run of slots. Raises OSError; what is in those slots is then undefined."""
        segment, at = divmod(slot, self.slots)
        file = self._file(segment, os.O_CREAT)
        offset, wanted = at * self.block_bytes, len(payloads) * self.block_bytes
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

    def cut(self, end: int, live: Collection[int]) -> None:
        """Give back the bytes from slot ``end`` on and the files of segments that are not ``live``."""
        for segment in self.blocks_in_files():
            if segment not in live:
                self._close(segment)
                self.path(segment).unlink()
            elif segment == end // self.slots:
                os.truncate(self.path(segment), end % self.slots * self.block_bytes)

    def close(self) -> None:
        for segment in tuple(self._open):
            self._close(segment)

    def _file(self, segment: int, flags: int = 0) -> int:
        file = self._open.pop(segment, None)
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
            self._slots: dict[BlockId, int] = {}
            self._checksums = bytearray()
            self.dropped = self._load()
        except BaseException:
            self._index.close()
            raise

    def __contains__(self, block: object) -> bool:
        return block in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def read(self, ids: Sequence[BlockId], out: Sequence[memoryview]) -> None:
        self._check_out(ids, out)
        try:
            slots = list(map(self._slots.__getitem__, ids))
        except KeyError as missing:
            raise StoreError(f"{self.directory}: block {_name(missing.args[0])} is not in the store") from None
        for begin, count in self._segments.runs(slots):
            slot, views = slots[begin], out[begin : begin + count]
            try:
                whole = self._segments.read(slot, views)
            except OSError as error:
                raise StoreError(f"{self._where(ids[begin], slot)}: not readable: {error}") from error
            got = b"".join(map(xxh3_64_digest, views))
            expected = self._checksums[slot * _CHECKSUM_BYTES : (slot + count) * _CHECKSUM_BYTES]
            if not whole or got != expected:
                bad = next(
                    (i for i in range(count) if _checksum(got, i) != _checksum(expected, i)),
                    count - 1,
                )
                raise StoreError(f"{self._where(ids[begin + bad], slot + bad)}: its bytes are not those stored")

    def close(self) -> None:
        super().close()
        self._segments.close()
        self._index.close()

    def _keep(self, ids: Sequence[BlockId], payloads: Sequence[memoryview]) -> None:
        first = self._end
        slots = list(range(first, first + len(ids)))
        checksums = b""
        try:
            for begin, count in self._segments.runs(slots):
                views = payloads[begin : begin + count]
                checksums += b"".join(map(xxh3_64_digest, views))
                self._segments.write(slots[begin], views)
            if self.durable:
                self._segments.sync(first, len(ids))
            self._index.insert((first, b"".join(ids), checksums))
        except (OSError, sqlite3.Error) as error:
            # Room for what comes next; bytes that stay behind the last slot do no harm.
            with suppress(OSError):
                self._cut()
            raise StoreError(
                f"{self.directory}: {len(ids)} blocks of {self.block_bytes} bytes not stored: {error}",
                definite=True,
            ) from error
        self._slots.update(zip(ids, slots, strict=True))
        self._checksums += checksums

    def _forget(self, keep: set[BlockId]) -> int:
        kept = {block: slot for block, slot in self._slots.items() if block in keep}
        try:
            self._index.replace(self._runs(kept))
        except sqlite3.Error as error:
            raise StoreError(f"{self.directory}: blocks not forgotten: {error}", definite=True) from error
        gone = len(self._slots) - len(kept)
        self._slots = kept
        del self._checksums[(max(kept.values(), default=-1) + 1) * _CHECKSUM_BYTES :]
        try:
            self._cut()
        except OSError as error:
            raise StoreError(f"{self.directory}: space of forgotten blocks not given back: {error}") from error
        return gone

    def _runs(self, slots: Mapping[BlockId, int]) -> Iterator[_Run]:
        """The index rows of ``slots``."""
        ordered = sorted((slot, block) for block, slot in slots.items())
        for begin, count in self._segments.runs([slot for slot, _ in ordered]):
            run = ordered[begin : begin + count]
            checksums = self._checksums[run[0][0] * _CHECKSUM_BYTES : (run[-1][0] + 1) * _CHECKSUM_BYTES]
            yield run[0][0], b"".join(block for _, block in run), bytes(checksums)

    @property
    def _end(self) -> int:
        """The slot behind the last one in use."""
        return len(self._checksums) // _CHECKSUM_BYTES

    def _load(self) -> tuple[BlockId, ...]:
        """Fill the memory of the index; what the files do not have is dropped from it and returned."""
        present = self._segments.blocks_in_files()
        rows, lost = 0, []
        for first, ids, checksums in self._index.runs():
            self._checksums += bytes(first * _CHECKSUM_BYTES - len(self._checksums)) + checksums
            for i in range(len(ids) // ID_BYTES):
                rows += 1
                block = BlockId(ids[i * ID_BYTES : (i + 1) * ID_BYTES])
                segment, at = divmod(first + i, self._segments.slots)
                if at < present.get(segment, 0):
                    self._slots[block] = first + i
                else:
                    lost.append(block)
        self._keys = {key_of(block) for block in self._slots}
        if len(self._keys) + len(lost) != rows:
            raise StoreError(f"{self._index.path}: {rows} blocks of {len(self._keys)} keys: not our index")
        if lost:
            self._index.replace(self._runs(self._slots))
            del self._checksums[(max(self._slots.values(), default=-1) + 1) * _CHECKSUM_BYTES :]
        self._cut()
        return tuple(lost)

    def _cut(self) -> None:
        self._segments.cut(self._end, {slot // self._segments.slots for slot in self._slots.values()})

    def _where(self, block: BlockId, slot: int) -> str:
        segment, at = divmod(slot, self._segments.slots)
        return f"{self._segments.path(segment)}: block {_name(block)} at byte {at * self.block_bytes}"


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
                "(slot INTEGER PRIMARY KEY, ids BLOB NOT NULL, checksums BLOB NOT NULL)"
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

    def runs(self) -> Iterator[_Run]:
        """All rows in slot order."""
        yield from self._db.execute("SELECT slot, ids, checksums FROM run ORDER BY slot")

    def insert(self, run: _Run) -> None:
        """Add a row; one statement is a transaction."""
        self._db.execute("INSERT INTO run VALUES (?, ?, ?)", run)

    def replace(self, runs: Iterable[_Run]) -> None:
        """Let ``runs`` be all the rows, in one transaction."""
        with self._transaction():
            self._db.execute("DELETE FROM run")
            self._db.executemany("INSERT INTO run VALUES (?, ?, ?)", runs)

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


def _checksum(joined: bytes | bytearray, i: int) -> bytes | bytearray:
    return joined[i * _CHECKSUM_BYTES : (i + 1) * _CHECKSUM_BYTES]


def _sync_directory(directory: Path) -> None:
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _name(block: BlockId) -> str:
    return key_of(block).hex()
