"""How fast the block store is, against plain file I/O of the same bytes.

Batches of Full Blocks are written and then read in another order of batches, each batch in turn by the store
(checksums, index, commit) and by plain ``pwritev`` / ``preadv`` on one file, so that both see the same machine.
A rate is that of the batch at the lower quartile of times in the best of a few rounds, because whatever else
runs on the machine only adds time; it leaves out the index's checkpoints, one in about a hundred batches. All
of it stays in the page cache, where the store's own work shows most.
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
ROUNDS = 3
ROUND_BYTES = 64 << 20
LEAST_RATIO = 0.5

Seconds = tuple[float, float]
"""Of the store, of the plain file."""


def main(argv: Sequence[str]) -> int:
    """Measure, print, and return 1 when a bound is missed."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench store", description="The block store against plain files."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--batch", type=int, default=BATCH, help=f"blocks a batch (default {BATCH})")
    parser.add_argument("--dir", type=Path, default=None, help="a directory on the disk to measure")
    options = parser.parse_args(argv)
    figures: list[Figure] = []
    for kv_bytes in KV_BYTES:
        block_bytes = Layout(LAYERS, kv_bytes).full_block_bytes
        rounds = [_round(block_bytes, options.batch, options.dir) for _ in range(ROUNDS)]
        best = np.array(rounds).min(axis=0)
        for what, (ours, plain) in zip(("written", "read"), options.batch / best, strict=True):
            name = f"{block_bytes} B Full Blocks {what}"
            figures += [
                Figure(f"{name}, store", float(ours), "blocks/s"),
                Figure(f"{name}, plain file", float(plain), "blocks/s"),
                Figure(f"{name}, store : plain", float(ours / plain), "", low=LEAST_RATIO),
            ]
    return show(figures, as_json=options.json)


def _round(block_bytes: int, batch_blocks: int, directory: Path | None) -> tuple[Seconds, Seconds]:
    """Seconds of a batch, written and read, on fresh files."""
    with tempfile.TemporaryDirectory(dir=directory) as folder, open_store(Path(folder), block_bytes) as store:
        file = os.open(Path(folder) / "plain", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            return _measure(store, file, batch_blocks)
        finally:
            os.close(file)


def _measure(store: FileStore, file: int, batch_blocks: int) -> tuple[Seconds, Seconds]:
    size = store.block_bytes
    batch_bytes = batch_blocks * size
    batches = ROUND_BYTES // batch_bytes
    random = Random(size)
    payloads = split_blocks(np.frombuffer(random.randbytes(batch_bytes), dtype=np.uint8), size)
    joined = [random.randbytes(batch_blocks * ID_BYTES) for _ in range(batches)]
    out = np.zeros(batch_bytes, dtype=np.uint8)
    views = split_blocks(out, size)

    def ids_of(i: int) -> list[BlockId]:
        """Made just before they are used, as by a storage node that has just decoded a call."""
        return [BlockId(joined[i][at : at + ID_BYTES]) for at in range(0, batch_blocks * ID_BYTES, ID_BYTES)]

    def store_write(i: int) -> float:
        batch = list(zip(ids_of(i), payloads, strict=True))
        began = time.perf_counter()
        store.append(batch)
        return time.perf_counter() - began

    def plain_write(i: int) -> float:
        began = time.perf_counter()
        done = os.pwritev(file, payloads, i * batch_bytes)
        seconds = time.perf_counter() - began
        if done != batch_bytes:
            raise OSError("short write")
        return seconds

    def store_read(i: int) -> float:
        batch = ids_of(i)
        began = time.perf_counter()
        store.read(batch, views)
        return time.perf_counter() - began

    def plain_read(i: int) -> float:
        began = time.perf_counter()
        done = os.preadv(file, views, i * batch_bytes)
        seconds = time.perf_counter() - began
        if done != batch_bytes:
            raise OSError("short read")
        return seconds

    written = _in_turn(range(batches), store_write, plain_write)
    if len(store) != batches * batch_blocks:
        raise AssertionError(f"{len(store)} blocks stored of {batches * batch_blocks}")
    read = _in_turn(random.sample(range(batches), batches), store_read, plain_read)
    if out.tobytes() != b"".join(payloads):
        raise AssertionError("what was read is not what was written")
    return written, read


def _in_turn(order: Iterable[int], ours: Callable[[int], float], plain: Callable[[int], float]) -> Seconds:
    """Seconds of a batch, at the lower quartile, of the store and of the plain file."""
    gc.disable()
    try:
        pairs = [(ours(i), plain(i)) for i in order]
    finally:
        gc.enable()
    at_ours, at_plain = (statistics.quantiles(seconds, n=4)[0] for seconds in zip(*pairs, strict=True))
    return at_ours, at_plain
