"""Tensor parallelism: what the GPUs of one engine exchange, and how an engine's KV is spread over them.

Pure; model bytes in volumes, payload bytes in stripes.

Collectives. Where a layer's matrices are cut over t GPUs, their partial sums are added up and what each GPU
goes on with is gathered again: a ReduceScatter and an AllGather, once after attention and once after the FFN
(Megatron-LM's all-reduces, in two halves as with sequence parallelism). In each, a GPU of a ring sends and
receives ::

    (t - 1)/t x tokens x hidden x bytes of an element

Where experts stand in the FFN's place, tokens reach them by expert parallelism (``experts``), and the pair after
attention is the only one. The two pairs of a layer are charged as one exchange between attention and FFN, as
dispatch and combine are.

KV. A token's KV in a layer is one row, and each of an engine's GPUs holds, sends and receives 1/t of the
rows. That is exact, in bytes, for heads that are cut over the GPUs (t up to the number of KV heads, 8 for
Qwen2.5-32B) and for contexts that are (context parallelism). Plain tensor parallelism over MLA, which has a
single latent head, keeps a copy of all KV on every GPU instead: t times the bytes through every CNIC, and no
more HBM. That is not modelled: it is why engines of such models attend data-parallel or cut the context, and
a baseline that did it would be beaten for a reason that has nothing to do with storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from .experts import Volume
from .extent import Extent

__all__ = ["ELEMENT_BYTES", "cut", "stripes", "tensor_volume"]

ELEMENT_BYTES = 2
"""Of an activation on its way: BF16, which engines reduce in whatever the precision of their matrix products."""


def tensor_volume(hidden: int, tokens: int, gpus: int, *, pairs: int, over: Literal["nvlink", "cnic"]) -> Volume:
    """Model bytes that one GPU of an engine of ``gpus`` GPUs sends in a layer of ``pairs`` collective pairs.

    ``tokens`` tokens of ``hidden`` elements are reduced and gathered in each. ``over``: which of the GPU's links
    carries them. ValueError for negative tokens or pairs, and for less than one GPU or element.
    """
    if gpus < 1 or hidden < 1 or tokens < 0 or pairs < 0:
        raise ValueError(
            f"{tokens} tokens of {hidden} elements over {gpus} GPUs, {pairs} pairs: expected none below 0, and"
            " GPUs and elements"
        )
    sent = 2 * pairs * tokens * hidden * ELEMENT_BYTES * (gpus - 1) // gpus
    return Volume(nvlink_bytes=sent, cnic_bytes=0) if over == "nvlink" else Volume(nvlink_bytes=0, cnic_bytes=sent)


def stripes(rows: int, parts: int, turn: int) -> tuple[list[int], int]:
    """How many of ``rows`` rows each of ``parts`` parts gets, and the turn of whatever is cut up next.

    Equally many, and one more for those whose turn it is, ``turn`` first: over any series of pieces no part gets
    more than a row more than another. ValueError for no parts or negative rows.
    """
    if parts < 1 or rows < 0:
        raise ValueError(f"{rows} rows in {parts} parts: expected 0 or more, in 1 or more")
    each, left = divmod(rows, parts)
    return [each + ((part - turn) % parts < left) for part in range(parts)], (turn + left) % parts


def cut(extents: Iterable[Extent], sizes: Sequence[int]) -> list[tuple[Extent, ...]]:
    """``extents`` in consecutive pieces of ``sizes`` bytes; an empty piece for a size of 0.

    ValueError unless the sizes add up to the extents' total.
    """
    pieces: list[tuple[Extent, ...]] = []
    todo = iter(extents)
    extent, at = next(todo, None), 0
    for size in sizes:
        piece: list[Extent] = []
        left = size
        while left:
            if extent is None:
                raise ValueError(f"pieces of {list(sizes)} bytes are more than the extents have")
            take = min(left, extent.total - at)
            piece += _slice(extent, at, at + take)
            left -= take
            at += take
            if at == extent.total:
                extent, at = next(todo, None), 0
        pieces.append(tuple(piece))
    if extent is not None:
        raise ValueError(f"pieces of {list(sizes)} bytes are less than the extents have")
    return pieces


def _slice(extent: Extent, begin: int, end: int) -> Iterator[Extent]:
    """Bytes ``begin`` to ``end`` - 1 of an extent: the rest of a run, whole runs, the beginning of one."""
    if extent.contiguous:
        yield Extent(extent.offset + begin, end - begin)
        return
    first, head = divmod(begin, extent.size)
    last, tail = divmod(end, extent.size)
    start = extent.offset + first * extent.stride
    if first == last:
        yield Extent(start + head, tail - head)
        return
    if head:
        yield Extent(start + head, extent.size - head)
        first, start = first + 1, start + extent.stride
    if last > first:
        yield Extent(start, extent.size, last - first, extent.stride)
    if tail:
        yield Extent(extent.offset + last * extent.stride, tail)
