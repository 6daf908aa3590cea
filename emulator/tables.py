"""Finished runs side by side, as a terminal shows them: one table of outcomes, one of causes, notes below.

The rows are `--json` entries, so what is shown is what machines read. Times are model seconds. Fits 100 columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .metrics import PHASES

__all__ = ["comparison"]

_PHASE_HEADS = ("sche-\nduling", "allo-\ncating", "\nreading", "\nprefill", "trans-\nfer", "first\ndecode")


def comparison(entries: Sequence[dict[str, Any]]) -> RenderableType:
    """Runs side by side, one a row in each table, each JCT also in multiples of the first's; notes stand below."""
    names = [_name(entry, entries) for entry in entries]
    notes = [Text(note) for entry, name in zip(entries, names, strict=True) for note in _remarks(entry, name)]
    wrong = [note for entry in entries for note in _faults(entry)]
    return Group(_outcomes(entries), "", _causes(entries, names), *notes, *wrong)


def _name(entry: dict[str, Any], entries: Sequence[dict[str, Any]]) -> str:
    """What tells a run from the others."""
    parts = [entry["system"]]
    if len({other["path"] for other in entries}) > 1:
        parts.append(entry["path"])
    if len({other["fabric"] for other in entries}) > 1:
        parts.append(f"({entry['fabric']})")
    return " ".join(parts)


def _grid() -> Table:
    return Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)


def _outcomes(entries: Sequence[dict[str, Any]]) -> Table:
    grid = _grid()
    for name in ("system", "path"):
        grid.add_column(name, no_wrap=True)
    for name in ("done", "JCT\ns", "times\nfirst", "TTFT\ns", "\np99"):
        grid.add_column(name, justify="right", no_wrap=True)
    pooled = any(entry["pool_hit_ratio"] is not None for entry in entries)
    cached = any("prefix_cache" in entry for entry in entries)
    from_dram = [f"from\n{what}\n%" for what, shown in (("pool", pooled), ("cache", cached)) if shown]
    for name in ("TPOT\nms", "pe:de\n%", "hit\n%", *from_dram, "SNIC\nmax/\navg"):
        grid.add_column(name, justify="right", no_wrap=True)
    for name in ("tokens", "verdict"):
        grid.add_column(name, no_wrap=True)
    mixed = len({entry["fabric"] for entry in entries}) > 1
    for entry in entries:
        system = f"{entry['system']} ({entry['fabric']})" if mixed else entry["system"]
        grid.add_row(system, *_cells(entry, entries[0], pooled=pooled, cached=cached))
    return grid


def _causes(entries: Sequence[dict[str, Any]], names: Sequence[str]) -> Table:
    """The parts of mean TTFT, the balance of attention, and the resource that binds."""
    grid = _grid()
    grid.add_column("parts of\nmean TTFT, s", no_wrap=True)
    for head in (*_PHASE_HEADS, "attn.\nmax/\navg"):
        grid.add_column(head, justify="right", no_wrap=True)
    grid.add_column("busiest resource\nand its mean use", no_wrap=True)
    for entry, name in zip(entries, names, strict=True):
        parts, binding = entry["ttft_breakdown_s"], entry["binding"]
        grid.add_row(
            name,
            *("-" if parts is None else _seconds(parts[phase]) for phase in PHASES),
            _cell(entry["attention_max_over_avg"], "{:.2f}"),
            "-" if binding is None else f"{binding['resource']} {binding['utilisation']:.0%}",
        )
    return grid


def _cells(entry: dict[str, Any], first: dict[str, Any], *, pooled: bool, cached: bool) -> list[str | Text]:
    jct, base = entry["jct_s"], first["jct_s"]
    ttft, tpot = entry["ttft_s"], entry["tpot_s"]
    # Requests that are read on both sides are of neither path; their tokens are.
    share = entry["path_share_tokens" if "split" in entry["path_share"] else "path_share"]
    done, total = entry["requests"]["done"], entry["requests"]["total"]
    equal = {True: Text("equal", "green"), False: Text("DIFFER", "bold red"), None: Text("-")}
    valid = entry["verdict"] == "valid"
    return [
        entry["path"],
        str(total) if done == total else f"{done}/{total}",
        _cell(jct, "{:.2f}" if jct is not None and jct < 100 else "{:.1f}"),
        _cell(jct / base if jct is not None and base else None, "{:.3f}"),
        _cell(ttft and ttft["mean"], "{:.3f}"),
        _cell(ttft and ttft["p99"], "{:.3f}"),
        _cell(tpot and 1e3 * tpot["p50"], "{:.1f}"),
        "-" if share["pe"] is None else f"{100 * share['pe']:.0f}:{100 * share['de']:.0f}",
        _per_cent(entry["hit_ratio"]),
        *((_per_cent(entry["pool_hit_ratio"]),) if pooled else ()),
        *((_per_cent(entry.get("prefix_cache", {}).get("hit_ratio")),) if cached else ()),
        _cell(entry["snic_max_over_avg"], "{:.2f}"),
        equal[entry["tokens_equal"]],
        Text(entry["verdict"], "green" if valid else "bold red"),
    ]


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 100 else f"{value:.1f}"


def _per_cent(ratio: float | None) -> str:
    return _cell(None if ratio is None else 100 * ratio, "{:.1f}")


def _cell(value: float | None, shape: str) -> str:
    return "-" if value is None else shape.format(value)


def _remarks(entry: dict[str, Any], name: str) -> Iterator[str]:
    """What else a run has figures of: prediction, the pool, collectives and the gaps between them."""
    if entry["predictor_error"] is not None:
        yield f"{name}: attention times are predicted to {entry['predictor_error']:.1%}"
    caches = entry.get("prefix_cache", {}).get("blocks")
    for kept, blocks in (("the DRAM pool has", entry["dram_pool"]), ("prefix caches have", caches)):
        if blocks is not None:
            yield (
                f"{name}: {kept} {blocks['used']} blocks in {blocks['total']} places;"
                f" {blocks['evicted']} gave way, {blocks['turned_away']} found no place"
            )
    idle = entry["cnic_idle"]
    if idle is not None:
        yield (
            f"{name}: CNICs are {idle['idle']:.1%} of the time without a collective;"
            f" KV took {idle['kv_of_left']:.1%} of what those left"
        )
    if idle is not None and idle["gaps"]:
        yield f"{name}: {_gaps(idle['gaps'])}"
    rings: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in entry["collectives"]:
        if row["model_bytes"]:
            rings[row["ring"], row["lane"]].append(row)
    for (ring, lane), rows in rings.items():
        count = sum(row["count"] for row in rows)
        mean_kb = sum(row["count"] * row["model_bytes"] for row in rows) / count / 1e3
        mean_ms = 1e3 * sum(row["count"] * row["mean_s"] for row in rows) / count
        max_ms = 1e3 * max(row["max_s"] for row in rows)
        yield (
            f"{name}: {count} exchanges of {ring} on lane {lane}, {mean_kb:.0f} KB a port on average:"
            f" mean {mean_ms:.3f} ms, longest {max_ms:.3f} ms"
        )


def _gaps(rows: Sequence[dict[str, Any]]) -> str:
    """How long idle times between two collectives are, by their part of all such time, and what KV fills."""
    time = sum(row["time"] for row in rows)
    upto_ms = []
    for part in (0.5, 0.9):
        below = 0.0
        for row in rows:
            below += row["time"]
            if below >= part * time:
                upto_ms.append(1e3 * row["upto_s"])
                break
    kv = sum(row["kv"] * row["time"] for row in rows) / time
    return (
        f"between two collectives CNICs idle {time:.1%} of the time, half of that in gaps below"
        f" {upto_ms[0]:.2g} ms, nine tenths below {upto_ms[1]:.2g} ms; KV fills {kv:.1%} of it"
    )


def _faults(entry: dict[str, Any]) -> list[Text]:
    name = f"{entry['system']} --path {entry['path']}"
    notes = [Text(f"{name}: {error}", "red") for error in entry["errors"]]
    if entry["verdict"] == "invalid":
        notes += [Text(f"{name}: invalid: {reason}", "red") for reason in entry.get("verdict_reasons", ())]
        dilation = entry.get("dilation_that_would_do")
        if dilation is not None:
            notes.append(Text(f"{name}: a dilation of {dilation:g} would do", "red"))
    for broken in entry["invariants"]["broken"]:
        notes.append(
            Text(f"{name}: invariant {broken['number']} ({broken['invariant']}): {broken['detail']}", "red")
        )
    return notes
