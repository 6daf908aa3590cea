"""Laws of the tables in which runs stand side by side."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from emulator import report
from emulator.judge import Verdict
from emulator.metrics import PHASES

from .made_run import evidence, finished, shown


def test_the_table_compares_with_the_first_run() -> None:
    """The first row's JCT is 1; another's is its multiple; an invalid run shows its reason and the remedy."""
    run = finished()
    first = report.run_entry(report.build_report(run), run, None)
    bad = msgspec.structs.replace(run, verdict=Verdict("invalid", False, ("pe0: timers late",), 25.0))
    slow = report.run_entry(report.build_report(bad), bad, None) | {"path": "pe", "jct_s": 2 * first["jct_s"]}
    text = shown(first, slow)
    assert "1.000" in text
    assert "2.000" in text
    assert "dualpath --path pe: invalid: pe0: timers late" in text
    assert "a dilation of 25 would do" in text
    assert "(tcp)" not in text


def entry_of(**changes: Any) -> dict[str, Any]:
    """An entry of a made-up run with every figure that a run can have."""
    return report.build_report(finished(evidence=evidence(37, 3))) | changes


GAPS = [
    {"upto_s": 0.001024, "count": 70, "time": 0.1, "kv": 0.5},
    {"upto_s": 0.004096, "count": 20, "time": 0.25, "kv": 0.2},
    {"upto_s": 0.065536, "count": 1, "time": 0.05, "kv": 0.0},
]
FULL = {
    "predictor_error": 0.0123,
    "pool_hit_ratio": 0.456,
    "dram_pool": {"total": 90, "used": 80, "evicted": 7, "turned_away": 3},
    "attention_max_over_avg": 1.06,
    "cnic_idle": {"idle": 0.834, "kv_of_left": 0.312, "ports": 16, "gaps": GAPS},
    "collectives": [
        {"ring": "pe", "lane": "MODEL", "model_bytes": size, "count": 4, "mean_s": size / 1e9, "max_s": size / 1e8}
        for size in (0, 4_000, 12_000)
    ],
    "binding": {
        "resource": "storage snic write",
        "utilisation": 0.987,
        "fullest": "st0 snic0 write",
        "fullest_utilisation": 0.99,
    },
}


def test_the_tables_fit_a_terminal() -> None:
    """A hundred columns cut nothing off and wrap no row, whatever there is to be told of a run."""
    slow = dict.fromkeys(PHASES, 12345.67)
    one = entry_of(**FULL, system="dualpath-rr", ttft_breakdown_s=slow)
    text = shown(one, one | {"verdict": "invalid", "fabric": "fluid", "path": "pe"}, width=100)
    assert "…" not in text
    assert sum(line.count("12345.7") == len(PHASES) for line in text.splitlines()) == 2


def test_systems_stand_side_by_side_with_what_binds_them() -> None:
    """A row a system: the parts of its TTFT, its balance of attention, and its busiest resource."""
    slow = {phase: 0.25 * place for place, phase in enumerate(PHASES)}
    text = shown(entry_of(), entry_of(**FULL, system="basic", ttft_breakdown_s=slow))
    row = next(line for line in text.splitlines() if line.startswith("basic") and "storage" in line)
    assert row.split() == [
        *("basic", "0.000", "0.250", "0.500", "0.750", "1.000", "1.250", "1.06"),
        *("storage", "snic", "write", "99%"),
    ]


def test_what_else_was_measured_is_told_below() -> None:
    """Prediction, pool, gaps and exchanges of a run have a line each, and a run without them has none."""
    text = shown(entry_of(**FULL))
    assert "dualpath: attention times are predicted to 1.2%" in text
    assert "dualpath: the DRAM pool has 80 blocks in 90 places; 7 gave way, 3 found no place" in text
    assert "CNICs are 83.4% of the time without a collective; KV took 31.2% of what those left" in text
    assert (
        "between two collectives CNICs idle 40.0% of the time, half of that in gaps below 4.1 ms, nine tenths"
        " below 66 ms; KV fills 25.0% of it"
    ) in text
    # Barriers carry nothing and are not in the range.
    assert "8 exchanges of pe on lane MODEL, 8 KB a port on average: mean 0.008 ms, longest 0.120 ms" in text
    bare = shown(entry_of(predictor_error=None))
    assert not any(word in bare for word in ("predicted", "pool", "CNICs", "exchanges"))


def test_a_pools_part_of_the_hit_stands_beside_the_hit() -> None:
    """A column of its own where any run has a pool, empty for those without; no column where none has."""
    pooled, plain = entry_of(**FULL, hit_ratio=0.875), entry_of(hit_ratio=0.5)
    both = [line.split() for line in shown(pooled, plain).splitlines() if "valid" in line]
    assert both[0][both[0].index("87.5") + 1] == "45.6"
    assert both[1][both[1].index("50.0") + 1] == "-"
    assert "from" not in shown(plain)


def test_a_caches_part_of_the_hit_stands_beside_the_hit() -> None:
    """As a pool's does, under a name of its own; what gave way is in a line below."""
    blocks = {"total": 90, "used": 80, "evicted": 7, "turned_away": 3}
    cached = entry_of(hit_ratio=0.875, prefix_cache={"hit_ratio": 0.456, "blocks": blocks})
    plain = entry_of(hit_ratio=0.5)
    text = shown(cached, plain)
    both = [line.split() for line in text.splitlines() if "valid" in line]
    assert both[0][both[0].index("87.5") + 1] == "45.6"
    assert both[1][both[1].index("50.0") + 1] == "-"
    assert "cache" in text and "cache" not in shown(plain)
    assert "caches have 80 blocks in 90 places; 7 gave way, 3 found no place" in text


@pytest.mark.parametrize(("split", "cell"), [({}, "40:60"), ({"split": 1.0}, "25:75")])
def test_where_requests_are_split_their_tokens_are_shared_out(split: dict[str, float], cell: str) -> None:
    """The share of the sides is of requests, and of tokens where a request is on both."""
    entry = entry_of(path_share={"pe": 0.4, "de": 0.6} | split, path_share_tokens={"pe": 0.25, "de": 0.75})
    assert cell in shown(entry)


def test_the_table_tells_fabrics_apart_where_they_differ() -> None:
    """Runs on sockets and in virtual time side by side are marked as such."""
    run = finished()
    entry = report.build_report(run)
    text = shown(entry, entry | {"fabric": "fluid"})
    assert "dualpath (tcp)" in text
    assert "dualpath (fluid)" in text
