"""Laws of the report and of the setup that it depends on."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from emulator import report, verify
from emulator.config import EngineConfig, ModelConfig, ReplayConfig, ScaleConfig
from emulator.plan import run_config
from emulator.records import CacheRecord, ExchangeRecord
from topology.spec import load_topology

from .made_run import POOLED, evidence, finished, nothing_done, replace_node, replace_request, shown
from .within import assert_within

ENTRY_KEYS = {
    *("system", "path", "fabric", "jct_s", "ttft_s", "tpot_s", "e2e_s", "requests", "tokens_equal", "verdict"),
    *("path_share", "hit_ratio", "snic_max_over_avg", "steps_bytes", "scale", "wall_s", "out"),
    *("ttft_breakdown_s", "binding", "attention_max_over_avg", "predictor_error", "pool_hit_ratio"),
    *("collectives", "cnic_idle", "pool_peaks", "dram_pool"),
}


def test_the_entry_has_every_promised_key() -> None:
    """The `--json` entry has the documented keys, each figure with its six summary values."""
    run = finished()
    entry = report.run_entry(report.build_report(run), run, Path("runs/one"))
    assert set(entry) >= ENTRY_KEYS
    for key in ("ttft_s", "tpot_s", "e2e_s"):
        assert list(entry[key]) == ["mean", "p50", "p90", "p95", "p99", "max", "count"]
    assert entry["requests"] == {"total": 9, "done": 9, "failed": 0, "cancelled": 0}
    assert entry["tokens_equal"] is True
    assert entry["scale"]["shrink"] == 176
    assert entry["path_share"] == {"pe": 4 / 9, "de": 5 / 9}
    assert entry["invariants"] == {"checked": len(verify.INVARIANTS), "broken": []}
    assert_within(sum(entry["ttft_breakdown_s"].values()), entry["ttft_s"]["mean"], rel=1e-9)
    json.dumps(entry, allow_nan=False)


def test_nothing_done_reports_nulls() -> None:
    """Without a completion every figure is null, none is 0, and the report still holds what was asked for."""
    entry = report.build_report(nothing_done())
    for key in ("jct_s", "ttft_s", "tpot_s", "e2e_s", "tokens_equal", "hit_ratio", "snic_max_over_avg", "itl_s"):
        assert entry[key] is None
    assert entry["path_share"] == {"pe": None, "de": None}
    assert entry["requests"] == {"total": 9, "done": 0, "failed": 9, "cancelled": 0}
    assert entry["errors"] == ["refused: never fits"]
    text = shown(entry)
    assert "0/9" in text
    assert "refused: never fits" in text


def test_a_broken_run_says_what_is_broken() -> None:
    """A token that differs is in the report and in the table, not only in an exit code."""
    run = finished(evidence=replace_request(evidence(), "a0.0", model_tokens=(1,) * 71))
    entry = report.build_report(run)
    assert entry["tokens_equal"] is False
    assert [b["invariant"] for b in entry["invariants"]["broken"]] == ["tokens equal"]
    text = shown(entry)
    assert "DIFFER" in text
    assert "invariant 2 (tokens equal): a0.0" in text


def test_a_setup_follows_from_the_configuration() -> None:
    """Every shaped NIC with its role, at its model rate in payload bytes; virtual time is not dilated."""
    spec = load_topology("1p1d")
    config = run_config(spec, EngineConfig(), ModelConfig(), ScaleConfig(kv_bytes=2, dilation=7.0), ReplayConfig())
    live, virtual = report.setup_of(config, "tcp"), report.setup_of(config, "fluid")
    assert live.ports == virtual.ports
    assert (live.scale.dilation, virtual.scale.dilation) == (7.0, 1.0)
    assert len([p for p in live.ports if p.kind == "nic"]) == len(spec.ports())
    assert {(p.node, p.kind) for p in live.ports if p.kind != "nic"} == {
        (node, kind) for node in ("pe0", "de0") for kind in ("dram", "pcie")
    }
    snic = next(p for p in live.ports if (p.node, p.nic) == ("pe0", "snic0"))
    assert snic.role == "pe"
    assert_within(snic.rate_bps * float(live.scale.shrink), spec.snic_gbps * 1e9 / 8, rel=1e-9)


def test_a_setup_knows_the_systems_switches() -> None:
    """What verification needs of the configuration is in the setup: system, options, quota."""
    spec = load_topology("1p1d")
    replay = ReplayConfig(system="basic", de_direct=True, ep_over="cnic", copies="cuda")
    config = run_config(spec, EngineConfig(quota_s=0.2), ModelConfig(), ScaleConfig(), replay)
    setup = report.setup_of(config, "fluid")
    assert (setup.system.layerwise, setup.de_direct, setup.quota_s) == (False, True, 0.2)
    assert (setup.ep_over, setup.copies) == ("cnic", "cuda")


def test_figures_of_resources_are_in_model_bytes() -> None:
    """A ring's exchanges are told in bytes of the cluster that is emulated, their lane by its name."""
    made = replace_node(
        evidence(), "pe0", exchanges=(ExchangeRecord("pe", 1, 4096, 10, 0.1, 0.02, took=((0.01, 10),)),)
    )
    entry = report.build_report(finished(evidence=made))
    assert entry["collectives"] == [
        {
            "ring": "pe",
            "lane": "MODEL",
            "upto_model_bytes": 1 << 20,
            "model_bytes": 176 * 4096,
            "count": 10,
            "mean_s": 0.01,
            "p95_s": 0.01,
            "max_s": 0.02,
        }
    ]
    assert_within(entry["predictor_error"], 0.02, rel=1e-9)
    assert entry["pool_peaks"] == {"de buffer": 0.3, "pe buffer": 0.3}


def test_the_pools_directory_is_in_the_report() -> None:
    """What the master counted, whichever node it is on; null in a run without a pool."""
    cache = CacheRecord(
        total=9, used=4, pending=0, leases=0, looked_up=20, hits=5, inserted=6, evicted=2, turned_away=1
    )
    made = replace_node(evidence(system=POOLED), "sched", cache=cache)
    assert report.build_report(finished(evidence=made))["dram_pool"] == msgspec.to_builtins(cache)
    assert report.build_report(finished())["dram_pool"] is None


def test_what_caches_gave_is_in_the_report_of_a_run_that_has_them() -> None:
    """Hit tokens, bytes and the blocks of all nodes; no key at all in a run without."""
    made = evidence(cached=True)
    entry = report.build_report(finished(evidence=made))
    found = entry["prefix_cache"]
    hit, cached = (sum(getattr(r, name) for r in made.records.requests) for name in ("hit_tokens", "pool_tokens"))
    assert 0 < cached < hit
    assert_within(found["hit_ratio"], cached / hit, rel=1e-9)
    assert (found["wanted_bytes"], found["cached_bytes"]) == (hit * 3 * 704, cached * 3 * 704)
    assert (found["blocks"]["looked_up"], found["blocks"]["hits"]) == (hit // 64, cached // 64)
    assert (found["blocks"]["total"], found["blocks"]["evicted"]) == (18, 4)
    assert (entry["dram_pool"], entry["pool_hit_ratio"]) == (None, None)
    assert "prefix_cache" not in report.build_report(finished())


def test_a_policy_of_the_users_own_is_named_without_its_place() -> None:
    """The report is the same wherever the policy's file lies; without one it names the system's."""
    named = [
        report.build_report(finished(config=msgspec.structs.replace(finished().config, replay=replay)))["config"]
        for replay in (ReplayConfig(), ReplayConfig(policy="/somewhere/of/mine/greedy.py"))
    ]
    assert [config["policy"] for config in named] == ["dualpath", "greedy.py"]
