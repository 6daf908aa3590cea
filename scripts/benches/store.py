"""How fast the block store is, against plain file I/O of the same bytes.

Batches of Full Blocks are written and then read in another order of batches, each batch in turn by the store
(checksums, index, commit) and by plain ``pwritev`` / ``preadv`` on one file, so that both see the same machine.
A rate is that of the batch at the lower quartile of times, because whatever else runs on the machine only adds
time; it leaves out the index's checkpoints, one in about a hundred batches. All of it stays in the page cache,
where the store's own work shows most.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random

import numpy as np

from emulator.kvcache import ID_BYTES, BlockId, Layout
from emulator.store import FileStore, open_store, split_blocks

from .figures import Figure, show

__all__ = ["main"]

LAYERS = 61
KV_BYTES = (1, 16)
BATCH = 32
TOTAL_BYTES = 128 << 20
LEAST_RATIO = 0.5


def main(argv: Sequence[str]) -> int:
    """Measure, print, and return 1 when a bound is missed."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench store", description="The block store against plain files."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--dir", type=Path, default=None, help="a directory on the disk to measure")
    options = parser.parse_args(argv)
    figures: list[Figure] = []
    for kv_bytes in KV_BYTES:
        block_bytes = Layout(LAYERS, kv_bytes).full_block_bytes
        with (
            tempfile.TemporaryDirectory(dir=options.dir) as folder,
            open_store(Path(folder), block_bytes) as store,
        ):
            file = os.open(Path(folder) / "plain", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                figures += _measure(store, file)
            finally:
                os.close(file)
    return show(figures, as_json=options.json)


def _measure(store: FileStore, file: int) -> list[Figure]:
    size = store.block_bytes
    batch_bytes = BATCH * size
    batches = TOTAL_BYTES // batch_bytes
    random = Random(size)
    payloads = split_blocks(np.frombuffer(random.randbytes(batch_bytes), dtype=np.uint8), size)
    ids = [[BlockId(random.randbytes(ID_BYTES)) for _ in range(BATCH)] for _ in range(batches)]
    named = [list(zip(batch, payloads, strict=True)) for batch in ids]
    out = np.zeros(batch_bytes, dtype=np.uint8)
    views = split_blocks(out, size)

    def store_write(i: int) -> None:
        store.append(named[i])

    def plain_write(i: int) -> None:
        if os.pwritev(file, payloads, i * batch_bytes) != batch_bytes:
            raise OSError("short write")

    def store_read(i: int) -> None:
        store.read(ids[i], views)

    def plain_read(i: int) -> None:
        if os.preadv(file, views, i * batch_bytes) != batch_bytes:
            raise OSError("short read")

    written = _in_turn(range(batches), store_write, plain_write)
    if len(store) != batches * BATCH:
        raise AssertionError(f"{len(store)} blocks stored of {batches * BATCH}")
    read = _in_turn(random.sample(range(batches), batches), store_read, plain_read)
    if out.tobytes() != b"".join(payloads):
        raise AssertionError("what was read is not what was written")
    return [*_figures(f"{size} B Full Blocks written", written), *_figures(f"{size} B Full Blocks read", read)]


def _in_turn(
    order: Iterable[int], ours: Callable[[int], None], plain: Callable[[int], None]
) -> tuple[float, float]:
    """Seconds of a batch, at the lower quartile, of the store and of the plain file."""
    times: tuple[list[float], list[float]] = ([], [])
    gc.disable()
    try:
        for i in order:
            for act, seconds in zip((ours, plain), times, strict=True):
                began = time.perf_counter()
                act(i)
                seconds.append(time.perf_counter() - began)
    finally:
        gc.enable()
    return statistics.quantiles(times[0], n=4)[0], statistics.quantiles(times[1], n=4)[0]


def _figures(name: str, seconds: tuple[float, float]) -> list[Figure]:
    ours, plain = (BATCH / each for each in seconds)
    return [
        Figure(f"{name}, store", ours, "blocks/s"),
        Figure(f"{name}, plain file", plain, "blocks/s"),
        Figure(f"{name}, store : plain", ours / plain, "", low=LEAST_RATIO),
    ]
