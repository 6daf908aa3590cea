"""How long a forward pass takes: FLOPs and bytes to model seconds, per model and GPU, or a measured table.

Pure but for reading a table. A layer of a forward takes, on one GPU::

    attention   per request max(FLOPs / achieved rate, KV bytes read / HBM bandwidth)
    + the rest  max(FLOPs of its matrix products / achieved rate, resident weight bytes / HBM bandwidth)
                + a fixed overhead

The two are apart because the GPUs of an expert-parallel group wait for each other between them; exchanging
tokens with their experts (``experts``) and that wait are not in either, nor are the collectives of a
tensor-parallel engine (``tensors``). Of such an engine of t GPUs attention takes 1/t of the time, as heads,
or the tokens of a context, and the KV that they read are spread over its GPUs. The rest is counted by GPU: of
its tokens a GPU computes the share 1/t, which is what one of t GPUs with 1/t of every matrix takes for all of
them; of a dense model's weights it reads 1/t, while resident weights beside experts are a GPU's already and
stay as they are (the attention's among them, which are a small part). What a layer costs whatever its size,
its overhead, every GPU pays whole. Peaks are data-sheet numbers. Achieved rates are not: each says below
whether somebody published it or it is assumed here.

A measured table (CSV ``cached,bsz,ms``) replaces the time of prefill forwards. It is a full grid, read by
bilinear interpolation; outside of it there is no answer, only an error. It does not tell attention from the
rest: what remains of its shortest context's times without that context's attention by the formula is the
rest, of which no context knows; all else is attention. The times are of the whole engine that was measured,
however many GPUs it has, and its collectives are charged beside them.
"""

from __future__ import annotations

import bisect
import csv
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .errors import ConfigError
from .models.shape import ModelShape

__all__ = [
    "HOPPER",
    "Batch",
    "CostModel",
    "CostTable",
    "Gpu",
    "SplitTable",
    "load_costs",
    "load_table",
    "split_table",
]

Batch = Sequence[tuple[int, int]]
"""(cached, new) tokens of each request in a prefill forward."""


@dataclass(frozen=True)
class Gpu:
    """One GPU: achieved rates in FLOP/s and bytes/s; ``nvlink_bps`` each way."""

    name: str
    gemm_fp8: float
    gemm_bf16: float
    attention_prefill: float
    attention_decode: float
    hbm_bps: float
    nvlink_bps: float

    def gemm(self, precision: str) -> float:
        return self.gemm_fp8 if precision == "fp8" else self.gemm_bf16


HOPPER = Gpu(
    name="hopper",
    # Dense peak 1,979 TFLOP/s FP8 (NVIDIA H100 SXM data sheet). ASSUMED: 30 % of it. SGLang's published prefill of
    # DeepSeek-V3 on H100s under EP32 (52,300 tokens/s a node of 8, 2,000-token prompts) is 26 % end to end.
    gemm_fp8=0.30 * 1979e12,
    # Dense peak 989 TFLOP/s BF16 (same data sheet). ASSUMED: 60 %, usual for large dense products.
    gemm_bf16=0.60 * 989e12,
    # FlashMLA's README: sparse prefill up to 640 TFLOP/s on H800. ASSUMED to hold for the indexer and for GQA too.
    attention_prefill=640e12,
    # Same: sparse decoding with FP8 KV 410 TFLOP/s on H800. ASSUMED to hold for the indexer and for GQA too.
    attention_decode=410e12,
    # Peak 3.35 TB/s (same data sheet); FlashMLA's README: 3,000 GB/s achieved where bound by memory.
    hbm_bps=3.0e12,
    # NVLink, each way: 900 GB/s in total (same data sheet). The export variant, H800, has 400 in total, so 200e9.
    nvlink_bps=450e9,
)


@dataclass(frozen=True)
class CostTable:
    """Measured seconds of a prefill forward: ``seconds[i][j]`` at ``cached[i]`` and ``new[j]`` tokens."""

    source: str
    cached: tuple[int, ...]
    new: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def covers(self, cached: float, new: float) -> bool:
        """Is the point inside the measured grid?"""
        return self.cached[0] <= cached <= self.cached[-1] and self.new[0] <= new <= self.new[-1]

    def forward_s(self, cached: float, new: float) -> float:
        """Seconds at (cached, new) by bilinear interpolation; ConfigError outside of the grid."""
        if not self.covers(cached, new):
            raise ConfigError(
                f"{self.source}: no time for cached={cached:.0f}, bsz={new:.0f}: measured are cached "
                f"{self.cached[0]} to {self.cached[-1]}, bsz {self.new[0]} to {self.new[-1]}; add rows for it"
            )
        i, u = _cell(self.cached, cached)
        j, v = _cell(self.new, new)
        low = self.seconds[i][j] * (1 - v) + self.seconds[i][min(j + 1, len(self.new) - 1)] * v
        above = self.seconds[min(i + 1, len(self.cached) - 1)]
        high = above[j] * (1 - v) + above[min(j + 1, len(self.new) - 1)] * v
        return low * (1 - u) + high * u


def _cell(axis: tuple[int, ...], at: float) -> tuple[int, float]:
    """Index of the grid line at or below ``at``, and how far ``at`` is towards the next one (0 to 1)."""
    i = max(bisect.bisect_right(axis, at) - 1, 0)
    if i == len(axis) - 1:
        return i, 0.0
    return i, (at - axis[i]) / (axis[i + 1] - axis[i])


@dataclass(frozen=True)
class SplitTable:
    """A measured table's forwards in two: ``attention``, and the ``rest``, whose rows are all the same."""

    attention: CostTable
    rest: CostTable

    def attention_s(self, cached: int, new: int) -> float:
        """Seconds of one request's attention, all layers; ConfigError outside of the table."""
        return self.attention.forward_s(cached, new)

    def rest_s(self, tokens: float) -> float:
        """Seconds of the rest, all layers; ConfigError beyond the table.

        Below one token, one token's: a forward reads its weights for whatever share of a token this GPU has.
        """
        return self.rest.forward_s(self.rest.cached[0], max(tokens, 1.0))


def split_table(table: CostTable, formula: Callable[[int, int], float]) -> SplitTable:
    """Attention and rest of a measured table; ``formula``: seconds of attention at (cached, new).

    ConfigError names a row that takes less time than its attention by the formula alone, or no more than what a
    shorter context's time has besides attention.
    """
    first = table.cached[0]
    for cached, row in zip(table.cached, table.seconds, strict=True):
        for new, seconds in zip(table.new, row, strict=True):
            least = formula(cached, new)
            if seconds < least:
                raise ConfigError(
                    f"{table.source}: cached={cached}, bsz={new}: {seconds * 1e3:g} ms, but attention alone takes"
                    f" {least * 1e3:.3g} ms by its FLOPs and bytes; expected the ms of a whole forward"
                )
    rest = tuple(seconds - formula(first, new) for new, seconds in zip(table.new, table.seconds[0], strict=True))
    attention = tuple(tuple(s - r for s, r in zip(row, rest, strict=True)) for row in table.seconds)
    for cached, row in zip(table.cached, attention, strict=True):
        for new, seconds, other in zip(table.new, row, rest, strict=True):
            if seconds <= 0:
                raise ConfigError(
                    f"{table.source}: cached={cached}, bsz={new}: {(seconds + other) * 1e3:g} ms, but bsz={new}"
                    f" takes {other * 1e3:.3g} ms besides attention at cached={first}; expected more than that"
                )
    return SplitTable(replace(table, seconds=attention), replace(table, seconds=tuple(rest for _ in table.cached)))


@dataclass(frozen=True)
class CostModel:
    """Times of one engine's forward passes, in model seconds. ``tensor_parallel``: its GPUs."""

    shape: ModelShape
    gpu: Gpu = HOPPER
    table: SplitTable | None = None
    tensor_parallel: int = 1

    def prefill_flops(self, cached: int, new: int) -> int:
        """FLOPs of prefilling ``new`` tokens after ``cached``, all layers."""
        shape = self.shape
        return 2 * shape.active_params * new + shape.layers * shape.attention.span_flops(cached, new)

    def attention_bounds_s(self, cached: int, new: int) -> tuple[float, float]:
        """Seconds of a request's attention in one layer of a prefill by its FLOPs, and by the KV bytes it reads.

        By the formula, even where a table was measured. Attention takes the longer of the two.
        """
        shape, gpu = self.shape, self.gpu
        flops_s = shape.attention.span_flops(cached, new) / gpu.attention_prefill
        bytes_s = (cached + new) * shape.kv_bytes / gpu.hbm_bps
        return flops_s / self.tensor_parallel, bytes_s / self.tensor_parallel

    def attention_s(self, batch: Batch) -> float:
        """Seconds of attention in all layers of a prefill forward, by the formula even with a measured table."""
        return self.shape.layers * sum(max(self.attention_bounds_s(*request)) for request in batch)

    def attention_layer_s(self, batch: Batch) -> float:
        """Seconds of one layer's attention of a prefill forward. ConfigError outside of a table."""
        if self.table is None:
            return sum(max(self.attention_bounds_s(*request)) for request in batch)
        return sum(self.table.attention_s(*request) / self.shape.layers for request in batch)

    def rest_layer_s(self, tokens: float) -> float:
        """Seconds of everything else of one layer of a prefill forward: products or weights, and the overhead.

        ``tokens``: new tokens that this GPU computes. Under expert parallelism that is the group's mean, which may
        be no whole number, and 0, where only weights and overhead remain. ConfigError beyond a table.
        """
        shape = self.shape
        if self.table is not None:
            return self.table.rest_s(tokens * self.tensor_parallel) / shape.layers
        return self._linear_s(tokens) / shape.layers + shape.prefill_layer_overhead_us * 1e-6

    def prefill_layer_s(self, batch: Batch) -> float:
        """Seconds of one layer of a prefill forward over ``batch``; 0 where nothing is new.

        With a table, a request alone costs what was measured. ConfigError outside of it.
        """
        new = sum(n for _, n in batch)
        if new == 0:
            return 0.0
        return self.attention_layer_s(batch) + self.rest_layer_s(new / self.tensor_parallel)

    def decode_attention_s(self, contexts: Sequence[int]) -> float:
        """Seconds of attention in all layers of a decode step, one token for each of ``contexts``."""
        shape, gpu = self.shape, self.gpu
        attention = shape.attention
        layer = 0.0
        for context in contexts:
            bytes_s = attention.token_bytes(context, shape.kv_bytes) / gpu.hbm_bps
            layer += max(attention.token_flops(context) / gpu.attention_decode, bytes_s)
        return shape.layers * layer / self.tensor_parallel

    def decode_rest_s(self, tokens: float) -> float:
        """Seconds of everything else in all layers of a decode step of ``tokens`` tokens (as in ``rest_layer_s``).

        Every step reads all resident weights: other GPUs' tokens reach this one's experts too.
        """
        shape = self.shape
        return self._linear_s(tokens) + shape.layers * shape.decode_layer_overhead_us * 1e-6

    def decode_step_s(self, contexts: Sequence[int]) -> float:
        """Seconds of one decode step, all layers, one token for each of ``contexts``; 0 for none."""
        if not contexts:
            return 0.0
        return self.decode_attention_s(contexts) + self.decode_rest_s(len(contexts) / self.tensor_parallel)

    def cache_compute_ratio_gb_per_pflop(self, cached: int, append: int) -> float:
        """GB of KV that a turn reads per PFLOP that it computes (the paper's table 1).

        As the paper counts: every one of the ``append`` tokens attends to ``cached`` tokens, not to more.
        """
        shape = self.shape
        flops = append * (2 * shape.active_params + shape.layers * shape.attention.token_flops(cached))
        return (shape.kv_bytes_per_token * cached / 1e9) / (flops / 1e15)

    def check_covers(self, max_cached: int, max_new: int) -> None:
        """ConfigError now, rather than in the run, if a table misses a forward within these limits."""
        if self.table is not None:
            for cached, new in ((0, 1), (max_cached, max_new)):
                self.table.attention_s(cached, new)

    def _linear_s(self, tokens: float) -> float:
        shape, gpu = self.shape, self.gpu
        products_s = 2 * shape.active_params * tokens / gpu.gemm(shape.compute)
        parts = self.tensor_parallel if shape.experts is None else 1
        return max(products_s, shape.weight_bytes_per_gpu / parts / gpu.hbm_bps)


def load_costs(shape: ModelShape, table: Path | None = None, tensor_parallel: int = 1) -> CostModel:
    """The cost model of ``shape`` on Hopper, its prefill times replaced by a measured table if there is one."""
    formula = CostModel(shape, tensor_parallel=tensor_parallel)
    if table is None:
        return formula
    return replace(formula, table=split_table(load_table(table), lambda *request: formula.attention_s([request])))


HEADER = ("cached", "bsz", "ms")

_MOST_DIGITS = 9
"""Of a count of tokens."""

_MOST_MS = 3.6e6
"""An hour. No measured forward takes longer."""


def load_table(path: Path) -> CostTable:
    """Read a CSV ``cached,bsz,ms``: milliseconds of a prefill forward of ``bsz`` new tokens behind ``cached``.

    The rows, in any order, are a full grid. Raises ConfigError with file, line and what was expected.
    """
    try:
        if not path.is_file():
            what = "expected a CSV file, not this" if path.exists() else "no such cost table"
            raise ConfigError(f"{path}: {what}")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as CSV: {error}") from None
    rows = csv.reader(io.StringIO(text))
    points: dict[tuple[int, int], float] = {}
    try:
        header = next(rows, [])
        if tuple(cell.strip() for cell in header) != HEADER:
            raise ConfigError(f"{path}:1: header {','.join(header)!r}: expected cached,bsz,ms")
        for row in rows:
            if not row:
                continue
            cached, new, seconds = _point(f"{path}:{rows.line_num}", row)
            if (cached, new) in points:
                raise ConfigError(f"{path}:{rows.line_num}: cached={cached}, bsz={new} was given before")
            points[cached, new] = seconds
    except csv.Error as error:
        raise ConfigError(f"{path}:{rows.line_num}: not CSV: {error}") from None
    if not points:
        raise ConfigError(f"{path}: no rows after the header")
    cached_axis = tuple(sorted({cached for cached, _ in points}))
    new_axis = tuple(sorted({new for _, new in points}))
    for cached in cached_axis:
        for new in new_axis:
            if (cached, new) not in points:
                raise ConfigError(f"{path}: expected a full grid, but cached={cached}, bsz={new} is missing")
    grid = tuple(tuple(points[cached, new] for new in new_axis) for cached in cached_axis)
    return CostTable(str(path), cached_axis, new_axis, grid)


def _point(where: str, row: list[str]) -> tuple[int, int, float]:
    if len(row) != len(HEADER):
        raise ConfigError(f"{where}: {len(row)} cells: expected cached,bsz,ms")
    counts = []
    for name, cell, least in (("cached", row[0], 0), ("bsz", row[1], 1)):
        text = cell.strip()
        if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS) or int(text) < least:
            raise ConfigError(
                f"{where}: {name} {cell[:40]!r}: expected an integer of {least} or more, below 10^{_MOST_DIGITS}"
            )
        counts.append(int(text))
    try:
        ms = float(row[2])
    except ValueError:
        ms = math.nan
    if not 0 < ms <= _MOST_MS:
        raise ConfigError(f"{where}: ms {row[2]!r}: expected a positive number, at most {_MOST_MS:.0f}")
    return counts[0], counts[1], ms / 1000
