"""How evenly a run's load lay: storage NICs in windows of time, attention inside expert-parallel groups.

Pure. Max/Avg is 1 where load is even, and at most the number of members. A figure over an empty set is None.
Must not import a role, a fabric implementation or ``report``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from .metrics import Setup, summarise, windows_since
from .records import BatchRecord, RunRecords

__all__ = ["AttentionBalance", "Balance", "attention_balance", "group_steps", "predictor_error", "snic_balance"]

BALANCE_WINDOW_S = 10.0
"""Longest window of the storage-NIC balance; figure 13's own window is not printed, 10 s gives its values."""

BALANCE_WINDOWS = 20
"""A run shorter than 20 such windows is cut into 20, so that the balance is not that of two or three sums."""

HIGH_LOAD = 0.5
"""Load is high in a window, or step, whose sum over all members is at least this part of the fullest one's."""


class Balance(msgspec.Struct, frozen=True):
    """Storage-NIC Max/Avg: the mean over ``windows`` windows of ``window_s`` in which load was high."""

    max_over_avg: float
    window_s: float
    windows: int


class AttentionBalance(msgspec.Struct, frozen=True):
    """Attention Max/Avg: mean and 95th percentile over ``steps`` steps of high load, of ``of`` steps in all."""

    max_over_avg: float
    p95: float
    steps: int
    of: int


def snic_balance(records: RunRecords, setup: Setup) -> Balance | None:
    """Max/Avg over the storage NICs of all PE and DE nodes, in their write direction (what they read).

    The counters' own windows are joined into windows of at most ``BALANCE_WINDOW_S`` that cut the run into
    at least ``BALANCE_WINDOWS``, as far as the counters' windows are fine enough. Of these count the ones in
    which load is high, and the figure is the mean of their Max/Avg. None when nothing was read.
    """
    serving = {(p.node, p.nic) for p in setup.ports if p.role != "storage" and p.nic.startswith("snic")}
    series: dict[tuple[str, str], list[int]] = {key: [] for key in sorted(serving)}
    width_s: float | None = None
    for node in records.nodes:
        for port in node.ports:
            if port.direction != "write" or (node.node, port.nic) not in serving:
                continue
            if width_s is not None and port.window_s != width_s:
                raise ValueError(f"{node.node} {port.nic}: windows of {port.window_s} s beside {width_s} s")
            width_s = port.window_s
            row = series[node.node, port.nic]
            row.extend([0] * (len(port.windows) - len(row)))
            for i, payload in enumerate(port.windows):
                row[i] += payload
    if width_s is None:
        return None
    elapsed = records.ended_s - records.t0_s
    joined = max(1, int(min(BALANCE_WINDOW_S, elapsed / BALANCE_WINDOWS) / width_s))
    rows = [windows_since(row, width_s, records.t0_s) for row in series.values()]
    count = max(map(len, rows), default=0)
    sums = [[sum(row[i : i + joined]) for row in rows] for i in range(0, count, joined)]
    fullest = max(map(sum, sums), default=0)
    if fullest == 0:
        return None
    high = [_max_over_avg(window) for window in sums if sum(window) >= HIGH_LOAD * fullest]
    return Balance(math.fsum(high) / len(high), joined * width_s, len(high))


def group_steps(
    records: RunRecords, groups: Sequence[Sequence[str]]
) -> Iterator[tuple[Sequence[str], Mapping[int, list[BatchRecord]]]]:
    """Each group of more than one engine, and its batches by the group's step."""
    engines: defaultdict[str, list[BatchRecord]] = defaultdict(list)
    for node in records.nodes:
        for batch in node.batches:
            engines[batch.engine].append(batch)
    for group in groups:
        if len(group) > 1:
            steps: defaultdict[int, list[BatchRecord]] = defaultdict(list)
            for engine in group:
                for batch in engines[engine]:
                    steps[batch.step].append(batch)
            yield group, dict(sorted(steps.items()))


def attention_balance(records: RunRecords, setup: Setup) -> AttentionBalance | None:
    """Max/Avg of the attention times of one group step, over the engines of the group (the paper's figure 14).

    Load is high in a step whose attention over all engines is at least ``HIGH_LOAD`` of the fullest step's and in
    which every engine of the group has a batch: where one has none there was not enough work to be balanced.
    None without such a step, or without groups.
    """
    high, total = [], 0
    for group, steps in group_steps(records, setup.groups):
        total += len(steps)
        fullest_s = max((math.fsum(b.attention_s for b in batches) for batches in steps.values()), default=0.0)
        for batches in steps.values():
            attention = [b.attention_s for b in batches]
            if {b.engine for b in batches} == set(group) and math.fsum(attention) >= HIGH_LOAD * fullest_s > 0:
                high.append(_max_over_avg(attention))
    figures = summarise(high)
    return None if figures is None else AttentionBalance(figures.mean, figures.p95, figures.count, total)


def predictor_error(records: RunRecords) -> float | None:
    """Mean of |predicted - real| / real attention time over all batches; None without any."""
    errors = [
        abs(b.predicted_s - b.attention_s) / b.attention_s
        for node in records.nodes
        for b in node.batches
        if b.attention_s > 0
    ]
    return math.fsum(errors) / len(errors) if errors else None


def _max_over_avg(loads: Sequence[float]) -> float:
    return max(loads) * len(loads) / math.fsum(loads)
