"""Laws of emulator.store, for stores in files and in memory alike."""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from emulator.errors import StoreError
from emulator.kvcache import ID_BYTES, KEY_BYTES, BlockId
from emulator.store import Appended, BlockStore, FileStore, MemoryStore, open_store, split_blocks

SIZE = 48
SLOTS = 4  # blocks in a segment file of these tests


def block_id(i: int, check: int = 0) -> BlockId:
    return BlockId(i.to_bytes(KEY_BYTES, "big") + check.to_bytes(ID_BYTES - KEY_BYTES, "big"))


def payload(i: int, check: int = 0) -> memoryview:
    return memoryview(Random(f"{i}/{check}").randbytes(SIZE))


def batch(numbers: Sequence[int]) -> list[tuple[BlockId, memoryview]]:
    return [(block_id(i), payload(i)) for i in numbers]


def read(store: BlockStore, ids: Sequence[BlockId]) -> list[bytes]:
    memory = np.zeros(len(ids) * store.block_bytes, dtype=np.uint8)
    store.read_into(ids, memory)
    return [bytes(view) for view in split_blocks(memory, store.block_bytes)]


def in_files(directory: Path) -> FileStore:
    return open_store(directory, SIZE, segment_bytes=SIZE * SLOTS)


def in_memory(_: Path) -> MemoryStore:
    return MemoryStore(SIZE)


@pytest.fixture(params=[in_files, in_memory])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlockStore]:
    make: Callable[[Path], BlockStore] = request.param
    with make(tmp_path) as opened:
        yield opened


def test_what_was_appended_is_read(store: BlockStore) -> None:
    """Blocks come back byte for byte, in any order and any number of times, across segment files."""
    assert store.append(batch(range(11))) == Appended(stored=11, known=0)
    order = [3, 4, 5, 0, 10, 10, 2, 1, 7]
    assert read(store, [block_id(i) for i in order]) == [payload(i) for i in order]
    assert len(store) == 11
    assert block_id(10) in store
    assert block_id(11) not in store
    assert read(store, []) == []


def test_appending_twice_changes_nothing(store: BlockStore) -> None:
    """An append is idempotent by id, inside a batch too: the bytes that are there stay."""
    store.append(batch([1, 2]))
    again = [(block_id(i), payload(i + 100)) for i in (2, 3, 1, 3)]
    assert store.append(again) == Appended(stored=1, known=3)
    assert read(store, [block_id(1), block_id(2), block_id(3)]) == [payload(1), payload(2), payload(103)]
    assert store.append([]) == Appended(stored=0, known=0)


def test_colliding_keys_are_told_apart(store: BlockStore) -> None:
    """Blocks with the same key and different checks are different blocks: each is kept and served as itself."""
    twins = [block_id(1, check) for check in range(3)]
    assert store.append([(twins[0], payload(1))]) == Appended(stored=1, known=0)
    assert twins[1] not in store
    with pytest.raises(StoreError, match="not in the store"):
        read(store, [twins[1]])
    assert store.append([(twin, payload(1, check)) for check, twin in enumerate(twins[:2])]).stored == 1
    assert read(store, [twins[1], twins[0]]) == [payload(1, 1), payload(1)]
    assert twins[2] not in store


def test_a_missing_block_is_named(store: BlockStore) -> None:
    """The error of a read names the key that is not there."""
    store.append(batch([1]))
    with pytest.raises(StoreError, match=block_id(77)[:KEY_BYTES].hex()):
        read(store, [block_id(1), block_id(77)])


def test_retain_forgets_the_others(store: BlockStore) -> None:
    """After retain, exactly the retained blocks are there, and the others can be stored anew."""
    store.append(batch(range(12)))
    assert store.retain([block_id(2), block_id(9), block_id(99)]) == 10
    assert [i for i in range(12) if block_id(i) in store] == [2, 9]
    assert store.append([(block_id(5), payload(5, 5)), *batch([2])]) == Appended(stored=1, known=1)
    assert read(store, [block_id(9), block_id(5), block_id(2)]) == [payload(9), payload(5, 5), payload(2)]
    assert store.clear() == 3
    assert len(store) == 0


def test_a_forgotten_block_is_not_read_behind_its_neighbour(store: BlockStore) -> None:
    """A run of blocks read at once ends where one was forgotten, stored anew elsewhere or not."""
    store.append(batch(range(3)))
    store.retain([block_id(0), block_id(2)])
    with pytest.raises(StoreError, match=block_id(1)[:KEY_BYTES].hex()):
        read(store, [block_id(i) for i in range(3)])
    store.append([(block_id(1), payload(1, 1))])
    assert read(store, [block_id(i) for i in range(3)]) == [payload(0), payload(1, 1), payload(2)]


def test_wrong_sizes_are_the_callers_fault(store: BlockStore) -> None:
    """A payload or a buffer of another size than a block is refused before anything happens."""
    store.append(batch([1]))
    with pytest.raises(ValueError, match=r"buffers of \[47, 48\] bytes: expected blocks of 48"):
        store.append([*batch([2]), (block_id(3), payload(3)[:-1])])
    assert block_id(2) not in store
    with pytest.raises(ValueError, match=r"buffers of \[47\] bytes"):
        store.read([block_id(1)], [memoryview(bytearray(47))])
    with pytest.raises(ValueError, match="1 blocks to read into 2"):
        store.read_into([block_id(1)], np.zeros(2 * SIZE, dtype=np.uint8))
    for memory in (np.zeros(SIZE + 1, dtype=np.uint8), np.zeros(2 * SIZE, dtype=np.uint8)[::2]):
        with pytest.raises(ValueError, match="blocks of 48 bytes"):
            store.read_into([block_id(1)], memory)
    with pytest.raises(ValueError, match="expected 32 each"):
        store.append([(BlockId(b"short"), payload(1))])
    with pytest.raises(ValueError, match="block_bytes = 0"):
        MemoryStore(0)


def test_a_closed_store_is_not_used(store: BlockStore) -> None:
    """Closing is idempotent, and whatever comes after it is the caller's fault and harms no block."""
    store.append(batch([1]))
    store.close()
    store.close()
    for use in (
        lambda: store.append(batch([2])),
        lambda: store.retain([]),
        lambda: store.read([block_id(1)], [memoryview(bytearray(SIZE))]),
    ):
        with pytest.raises(ValueError, match="closed"):
            use()


class StoreMachine(RuleBasedStateMachine):
    """Stores in files (closed and opened at any time) and in memory beside a plain dict."""

    blocks = st.lists(st.tuples(st.integers(0, 15), st.integers(0, 1)), max_size=10)

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.file = in_files(Path(self.folder.name))
        self.memory = MemoryStore(SIZE)
        self.model: dict[BlockId, memoryview] = {}

    @rule(numbers=blocks)
    def append(self, numbers: list[tuple[int, int]]) -> None:
        """Both stores keep the same blocks and report the same."""
        new = [(block_id(i, check), payload(i, check)) for i, check in numbers]
        result = self.file.append(new)
        assert result == self.memory.append(new)
        before = len(self.model)
        for block, data in new:
            self.model.setdefault(block, data)
        assert result == Appended(len(self.model) - before, len(new) - len(self.model) + before)

    @rule(numbers=blocks)
    def retain(self, numbers: list[tuple[int, int]]) -> None:
        keep = {block_id(i, check) for i, check in numbers}
        left = {block: data for block, data in self.model.items() if block in keep}
        assert self.file.retain(keep) == self.memory.retain(keep) == len(self.model) - len(left)
        self.model = left

    @rule()
    def reopen(self) -> None:
        """A restart changes nothing."""
        self.file.close()
        self.file = in_files(Path(self.folder.name))
        assert self.file.dropped == ()

    @precondition(lambda self: self.model)
    @rule(random=st.randoms(use_true_random=False))
    def read(self, random: Random) -> None:
        order = random.choices(sorted(self.model), k=10)
        for store in (self.file, self.memory):
            assert read(store, order) == [self.model[block] for block in order]

    @invariant()
    def same_blocks(self) -> None:
        assert len(self.file) == len(self.memory) == len(self.model)
        assert all(block in self.file and block in self.memory for block in self.model)

    @invariant()
    def no_bytes_behind_the_last_block(self) -> None:
        """A segment file exists only for a block in it, and ends with a block."""
        slots = self.file._slots.values()
        files = {int(path.stem[8:]): path.stat().st_size for path in Path(self.folder.name).glob("*.kv")}
        assert set(files) == {slot // SLOTS for slot in slots}
        if files:
            assert files[max(files)] == (max(slots) % SLOTS + 1) * SIZE

    def teardown(self) -> None:
        self.file.close()
        self.folder.cleanup()


StoreMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
TestStores = StoreMachine.TestCase


@pytest.mark.parametrize("durable", [False, True])
def test_blocks_survive_a_restart(tmp_path: Path, durable: bool) -> None:
    """What was committed is there after closing and opening, under either policy, and can be extended."""
    folder = tmp_path / "new" / "store"
    for upto in (5, 10, 15):
        with open_store(folder, SIZE, segment_bytes=SIZE * SLOTS, durable=durable) as store:
            assert store.append(batch(range(upto))) == Appended(stored=5, known=upto - 5)
    with open_store(folder, SIZE) as store:
        assert read(store, [block_id(i) for i in range(15)]) == [payload(i) for i in range(15)]
    assert sorted(path.stat().st_size for path in folder.glob("*.kv")) == [3 * SIZE, *[4 * SIZE] * 3]


def test_durable_waits_for_the_disk_before_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``durable`` the payload is on the disk before the batch is visible; without it nothing waits."""
    synced: list[int] = []
    real = os.fdatasync

    def fdatasync(file: int) -> None:
        synced.append(len(durable))
        real(file)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with open_store(tmp_path / "fast", SIZE) as store:
        store.append(batch(range(3)))
    assert synced == []
    with open_store(tmp_path / "durable", SIZE, segment_bytes=SIZE * SLOTS, durable=True) as durable:
        durable.append(batch(range(3)))
        durable.append(batch(range(3, 6)))
    assert synced == [0, 3, 3]


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    """Any flipped bit of a stored block makes its read an error that names file, key and byte; others are fine."""
    with in_files(tmp_path) as store:
        store.append(batch(range(6)))
    random = Random(0)
    for _ in range(40):
        path = tmp_path / f"segment-{random.randrange(2):06d}.kv"
        data = bytearray(path.read_bytes())
        bit = random.randrange(len(data) * 8)
        data[bit // 8] ^= 1 << bit % 8
        clean = path.read_bytes()
        path.write_bytes(data)
        hurt = int(path.stem[8:]) * SLOTS + bit // 8 // SIZE
        with in_files(tmp_path) as store:
            with pytest.raises(StoreError) as error:
                read(store, [block_id(i) for i in range(6)])
            for part in (str(path), block_id(hurt)[:KEY_BYTES].hex(), f"byte {hurt % SLOTS * SIZE}:"):
                assert part in str(error.value)
            others = [i for i in range(6) if i != hurt]
            assert read(store, [block_id(i) for i in others]) == [payload(i) for i in others]
        path.write_bytes(clean)


def test_swapped_blocks_are_found(tmp_path: Path) -> None:
    """A block read from another's place is an error."""
    with in_files(tmp_path) as store:
        store.append(batch([0, 1]))
        path = tmp_path / "segment-000000.kv"
        data = path.read_bytes()
        path.write_bytes(data[SIZE:] + data[:SIZE])
        with pytest.raises(StoreError, match="not those stored"):
            read(store, [block_id(0)])


def test_a_file_cut_short_while_open_is_found(tmp_path: Path) -> None:
    """Bytes that vanish under an open store are an error that names the block, never zeros."""
    with in_files(tmp_path) as store:
        store.append(batch([0, 1, 2]))
        os.truncate(tmp_path / "segment-000000.kv", 2 * SIZE + 1)
        assert read(store, [block_id(0), block_id(1)]) == [payload(0), payload(1)]
        with pytest.raises(StoreError, match=block_id(2)[:KEY_BYTES].hex()):
            read(store, [block_id(i) for i in range(3)])
        (tmp_path / "segment-000000.kv").unlink()
        store._segments.close()
        with pytest.raises(StoreError, match="not readable"):
            read(store, [block_id(0)])


def test_rows_without_bytes_are_dropped_and_recorded(tmp_path: Path) -> None:
    """Where the files lost bytes, opening drops those blocks, says which, and keeps the rest."""
    with in_files(tmp_path) as store:
        store.append(batch(range(10)))
    (tmp_path / "segment-000001.kv").unlink()
    os.truncate(tmp_path / "segment-000002.kv", SIZE + 5)
    with in_files(tmp_path) as store:
        assert store.dropped == tuple(block_id(i) for i in (4, 5, 6, 7, 9))
        assert len(store) == 5
        assert store.append(batch(range(10))) == Appended(stored=5, known=5)
        assert read(store, [block_id(i) for i in range(10)]) == [payload(i) for i in range(10)]
    with in_files(tmp_path) as store:
        assert store.dropped == ()
        assert read(store, [block_id(i) for i in range(10)]) == [payload(i) for i in range(10)]


def test_bytes_without_rows_are_cut_off(tmp_path: Path) -> None:
    """What was written and never committed is gone after opening, whole files included; other files stay."""
    with in_files(tmp_path) as store:
        store.append(batch(range(2)))
    (tmp_path / "segment-decoy.kv").write_bytes(b"not ours")
    with (tmp_path / "segment-000000.kv").open("ab") as file:
        file.write(bytes(SIZE + 7))
    (tmp_path / "segment-000001.kv").write_bytes(bytes(SIZE))
    with in_files(tmp_path) as store:
        assert len(store) == 2
    names = {path.name: path.stat().st_size for path in tmp_path.glob("*.kv")}
    assert names == {"segment-000000.kv": 2 * SIZE, "segment-decoy.kv": 8}


def test_more_segments_than_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of open files is bounded, whatever the number of segments."""
    monkeypatch.setattr("emulator.store._OPEN_SEGMENTS", 3)
    before = len(os.listdir("/proc/self/fd"))
    with open_store(tmp_path, SIZE, segment_bytes=1) as store:
        opened = len(os.listdir("/proc/self/fd"))
        store.append(batch(range(20)))
        for _ in range(2):
            assert read(store, [block_id(i) for i in range(20)]) == [payload(i) for i in range(20)]
        assert len(os.listdir("/proc/self/fd")) <= opened + 3
    assert len(os.listdir("/proc/self/fd")) == before


def test_system_calls_may_do_less_than_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short reads and writes are continued, wherever they stop."""
    pwritev, preadv, random = os.pwritev, os.preadv, Random(1)

    def some(buffers: Sequence[memoryview | bytes]) -> list[memoryview]:
        left = random.randint(1, 2 * SIZE)
        out: list[memoryview] = []
        for data in buffers:
            if left:
                out.append(memoryview(data)[:left])
                left -= len(out[-1])
        return out

    monkeypatch.setattr(os, "pwritev", lambda file, buffers, at: pwritev(file, some(buffers), at))
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: preadv(file, some(buffers), at))
    with in_files(tmp_path) as store:
        store.append(batch(range(10)))
        assert read(store, [block_id(i) for i in range(10)]) == [payload(i) for i in range(10)]


@pytest.mark.parametrize("fault", ["payload", "index"])
def test_a_failed_append_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """When the disk fills up in the payload or in the index: a definite StoreError, none of the batch visible,

    all earlier blocks intact, and the next append works.
    """
    pwritev = os.pwritev

    def full(file: int, buffers: Sequence[bytes], offset: int) -> int:
        if offset:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwritev(file, buffers[:1], offset)

    with in_files(tmp_path) as store:
        store.append(batch(range(3)))
        with monkeypatch.context() as patch:
            if fault == "payload":
                patch.setattr(os, "pwritev", full)
            else:
                pages = store._index._db.execute("PRAGMA page_count").fetchone()[0]
                store._index._db.execute(f"PRAGMA max_page_count = {pages}")
            more = batch(range(3, 500))
            with pytest.raises(StoreError, match=r"497 blocks of 48 bytes not stored: .*(space|full)") as error:
                store.append(more)
            assert error.value.definite
        assert len(store) == 3
        assert not any(block in store for block, _ in more)
        assert sum(path.stat().st_size for path in tmp_path.glob("*.kv")) == 3 * SIZE
        store._index._db.execute("PRAGMA max_page_count = 100000")
        store.append(batch(range(2, 6)))
    with in_files(tmp_path) as store:
        assert read(store, [block_id(i) for i in range(6)]) == [payload(i) for i in range(6)]


FILL = """
import sys
from pathlib import Path
from emulator.errors import StoreError
from emulator.store import open_store
from tests.test_store import batch, block_id, payload, read
acknowledged = 0
ballast = Path(sys.argv[1]) / "ballast"
ballast.write_bytes(bytes(100_000))
with open_store(Path(sys.argv[1]), 48) as store:
    try:
        while acknowledged < 10**6:
            store.append(batch(range(acknowledged, acknowledged + 50)))
            acknowledged += 50
    except StoreError as error:
        assert "No space left" in str(error) or "full" in str(error), error
    else:
        raise SystemExit("the disk never filled up")
    assert read(store, [block_id(i) for i in range(acknowledged)]) == [payload(i) for i in range(acknowledged)]
with open_store(Path(sys.argv[1]), 48) as store:
    assert len(store) == acknowledged > 0
    assert read(store, [block_id(i) for i in range(acknowledged)]) == [payload(i) for i in range(acknowledged)]
    ballast.unlink()
    assert store.append(batch(range(acknowledged, acknowledged + 50))).stored == 50
"""

PRIVATE_TMPFS = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 1 << 18
for failed in (
    libc.unshare(CLONE_NEWNS),
    libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None),
    libc.mount(b"tmpfs", sys.argv[1].encode(), b"tmpfs", 0, b"size=600k"),
):
    if failed:
        raise OSError(ctypes.get_errno(), "no private tmpfs")
"""


def run(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[1]
    return subprocess.run(
        [sys.executable, "-c", code, *args], cwd=root, text=True, capture_output=True, timeout=60, check=False
    )


@pytest.mark.root
def test_a_full_disk_loses_nothing_acknowledged(tmp_path: Path) -> None:
    """On a file system that really fills up: an error, every acknowledged block intact, also after opening anew

    while it is still full; with room again, appending works again.
    """
    done = run(PRIVATE_TMPFS + FILL, str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


APPEND_FOREVER = """
import sys
from pathlib import Path
from emulator.store import open_store
from tests.test_store import batch
with open_store(Path(sys.argv[1]), 48, segment_bytes=48 * 100) as store:
    at = len(store)
    while True:
        store.append(batch(range(at, at + 7)))
        at += 7
        print(at, flush=True)
"""


def test_a_kill_loses_nothing_acknowledged(tmp_path: Path) -> None:
    """SIGKILL in the midst of appending, again and again: every acknowledged block is there and right, batches

    are there whole or not at all, and the next process goes on from there.
    """
    root, random = Path(__file__).resolve().parents[1], Random(2)
    for _ in range(5):
        command = [sys.executable, "-c", APPEND_FOREVER, str(tmp_path)]
        with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            acknowledged = [int(child.stdout.readline()) for _ in range(random.randint(1, 300))]
            child.send_signal(signal.SIGKILL)
            acknowledged += [int(line) for line in child.stdout.read().split("\n")[:-1]]
        assert child.returncode == -signal.SIGKILL
        with open_store(tmp_path, SIZE) as store:
            assert store.dropped == ()
            assert len(store) in (acknowledged[-1], acknowledged[-1] + 7)
            assert read(store, [block_id(i) for i in range(len(store))]) == [payload(i) for i in range(len(store))]


def test_a_store_is_open_once(tmp_path: Path) -> None:
    """A second opening fails, says so, and leaves the first unharmed."""
    with in_files(tmp_path) as store:
        store.append(batch([1]))
        with pytest.raises(StoreError, match="open in another process"):
            in_files(tmp_path)
        store.append(batch([2]))
        assert read(store, [block_id(1), block_id(2)]) == [payload(1), payload(2)]
    in_files(tmp_path).close()


def test_a_directory_that_cannot_be_a_store_is_refused(tmp_path: Path) -> None:
    """One line that names the path: a file in the way, no database, blocks of another size, foreign rows."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file: the store cannot be opened"):
        in_files(tmp_path / "file")
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "index.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match="junk: the store cannot be opened"):
        in_files(tmp_path / "junk")
    in_files(tmp_path / "other").close()
    with pytest.raises(StoreError, match=r"blocks of 48 bytes: expected format 1 and 64 bytes"):
        open_store(tmp_path / "other", 64)
    with in_files(tmp_path / "twice") as store:
        store.append(batch([1, 2]))
    with sqlite3.connect(tmp_path / "twice" / "index.sqlite") as database:
        database.execute("UPDATE run SET ids = CAST(substr(ids, 1, 32) || substr(ids, 1, 32) AS BLOB)")
    database.close()
    with pytest.raises(StoreError, match="2 blocks with 1 ids"):
        in_files(tmp_path / "twice")
    with sqlite3.connect(tmp_path / "twice" / "index.sqlite") as database:
        database.execute("UPDATE run SET checksums = x'00'")
    database.close()
    with pytest.raises(StoreError, match="row 0 of the index is broken"):
        in_files(tmp_path / "twice")
