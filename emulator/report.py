"""A finished run in figures, as plain data: the report, and the entry of `--json`.

The report is a function of what was asked for and what was counted: no wall clock and no path is in it, so the
same seed in virtual time gives the same bytes. Bytes are model bytes, times model seconds.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import msgspec

from . import balance, metrics, steps, usage, verify
from .config import RunConfig
from .deployment import Deployment
from .fabric.interface import VirtualLane
from .judge import KernelPort, Verdict
from .kvcache import Layout
from .metrics import Port, Setup
from .plan import cluster_spec
from .records import RequestRecord, RunRecords
from .scale import Scale
from .systems import SYSTEMS
from .verify import Evidence

__all__ = ["FabricName", "FinishedRun", "build_report", "figures", "make_setup", "run_entry", "setup_of"]

KEPT = ("NIC : NIC : DRAM rates", "cache-compute ratio", "quotas and batch limits", "alpha and beta")
NOT_KEPT = ("latency per message", "CPU and interrupt cost per message")
"""Which ratios a scale model keeps, and which it does not."""

FabricName = Literal["tcp", "fluid"]


class FinishedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run, done: what was asked for, what was counted, and what the host says to it.

    ``wall_s``: how long it took. ``kernel``: the links' counters over the run, None in virtual time.
    """

    config: RunConfig
    fabric: FabricName
    evidence: Evidence
    verdict: Verdict
    wall_s: float
    kernel: tuple[KernelPort, ...] | None = None


def setup_of(config: RunConfig, fabric: FabricName) -> Setup:
    """What the figures of a run with ``config`` depend on; in virtual time nothing is dilated."""
    deployment = Deployment(config)
    scale = deployment.scale if fabric == "tcp" else msgspec.structs.replace(deployment.scale, dilation=1.0)
    roles = {member.name: member.role for member in config.members}
    ports = []
    for shaped in cluster_spec(config).ports():
        role = roles[shaped.node]
        # Spelt out, because mypy narrows a literal by == and not by `in`.
        assert role == "pe" or role == "de" or role == "storage", f"{shaped.node}: a NIC"  # noqa: PLR1714
        ports.append(Port(shaped.node, shaped.nic.name, role, scale.payload_rate(shaped.nic.rate_bytes_s)))
    for member in config.members:
        if member.role == "pe" or member.role == "de":  # noqa: PLR1714
            dram, pcie = (
                scale.payload_rate(gbps * 1e9 / 8) for gbps in (config.engine.dram_gbps, config.engine.pcie_gbps)
            )
            ports.append(Port(member.name, "dram", member.role, dram, "dram"))
            ports += [Port(member.name, f"pcie{gpu}", member.role, pcie, "pcie") for gpu in range(member.engines)]
    return make_setup(config, deployment.layout, scale, tuple(ports), deployment.expert_groups)


def make_setup(
    config: RunConfig, layout: Layout, scale: Scale, ports: tuple[Port, ...], groups: tuple[tuple[str, ...], ...]
) -> Setup:
    """The setup of a run with ``config`` whose layout, scale, ports and groups of engines are known."""
    replay = config.replay
    return Setup(
        layout=layout,
        scale=scale,
        ports=ports,
        system=SYSTEMS[replay.system],
        de_direct=replay.de_direct,
        prefix_cache=config.engine.prefix_cache_gb > 0,
        ep_over=replay.ep_over,
        copies=replay.copies,
        quota_s=config.engine.quota_s,
        groups=groups,
    )


def build_report(run: FinishedRun) -> dict[str, Any]:
    """The report as plain data: the keys of the `--json` entry, less what only the host knows, and more.

    A figure over an empty set is None. Bytes are model bytes.
    """
    replay = run.config.replay
    return figures(run) | {
        "config": {
            "topology": run.config.topology.get("name"),
            "model": Deployment(run.config).shape.name,
            "backend": run.config.model.backend,
            # The user's own policy is a file, of which the report knows the name and not the place.
            "policy": Path(replay.policy).name or SYSTEMS[replay.system].policy,
            "qos": replay.qos,
            "copies": replay.copies,
            "ep_over": replay.ep_over,
            "de_direct": replay.de_direct,
            "agents": replay.agents,
            "aps": replay.aps,
            "think": replay.think,
            "warm": replay.warm,
            "seed": replay.seed,
        },
    }


def figures(run: FinishedRun) -> dict[str, Any]:
    """All of the report that is counted: it needs neither the model's file nor the topology's."""
    records, setup = run.evidence.records, run.evidence.setup
    rows = metrics.done(records)
    status = [r.status for r in records.requests]
    findings = verify.verify(run.evidence)
    return {
        "system": run.config.replay.system,
        "path": run.config.replay.path,
        "fabric": run.fabric,
        "jct_s": metrics.jct_s(records),
        "requests": {
            "total": len(status),
            "done": status.count("done"),
            "failed": status.count("failed"),
            "cancelled": status.count("cancelled"),
        },
        "tokens_equal": verify.tokens_equal(run.evidence),
        "verdict": run.verdict.verdict,
        **_latencies(rows),
        "agent_jct_s": _plain(metrics.agent_jct_s(records)),
        "slo": _plain(metrics.SLO()),
        "goodput": _plain(metrics.goodput(records)),
        "path_share": metrics.path_share(rows, by="requests"),
        "path_share_tokens": metrics.path_share(rows, by="tokens"),
        "tokens": _plain(metrics.tokens(rows)),
        "hit_ratio": metrics.hit_ratio(rows),
        "pool_hit_ratio": metrics.pool_hit_ratio(rows) if setup.system.pool else None,
        "dram_pool": _plain(metrics.dram_pool(records)) if setup.system.pool else None,
        **_prefix_cache(records, setup),
        "steps_bytes": steps.steps_model_bytes(records, setup.scale),
        "scale": {
            "shrink": _number(setup.scale.shrink),
            "dilation": setup.scale.dilation,
            "kept": list(KEPT),
            "not_kept": list(NOT_KEPT),
        },
        **_resources(records, setup),
        "invariants": {
            "checked": len(findings),
            "broken": [
                {"number": f.number, "invariant": f.invariant, "detail": f.detail} for f in findings if not f.ok
            ],
        },
        "errors": sorted({r.error for r in records.requests if r.error is not None}),
    }


def _prefix_cache(records: RunRecords, setup: Setup) -> dict[str, Any]:
    """What the nodes' own caches gave, of hits and in blocks; no key where there are none."""
    if not setup.prefix_cache:
        return {}
    rows, token_bytes = metrics.done(records), setup.scale.shrink * setup.token_bytes
    caches = metrics.prefix_caches(records)
    return {
        "prefix_cache": {
            "hit_ratio": metrics.pool_hit_ratio(rows),
            "wanted_bytes": round(sum(r.hit_tokens for r in rows) * token_bytes),
            "cached_bytes": round(sum(r.pool_tokens for r in rows) * token_bytes),
            "blocks": _plain(caches),
        }
    }


def _latencies(rows: tuple[RequestRecord, ...]) -> dict[str, Any]:
    return {
        "ttft_s": _plain(metrics.latency(rows, metrics.ttft_s)),
        "ttft_breakdown_s": metrics.mean_breakdown(rows),
        "reading_share": metrics.reading_share(rows),
        "tpot_s": _plain(metrics.latency(rows, metrics.tpot_s)),
        "ttst_s": _plain(metrics.latency(rows, metrics.ttst_s)),
        "itl_s": _plain(metrics.pooled_gaps(rows)),
        "itl_max_s": _plain(metrics.latency(rows, metrics.itl_max_s)),
        "e2e_s": _plain(metrics.latency(rows, metrics.e2e_s)),
    }


def _resources(records: RunRecords, setup: Setup) -> dict[str, Any]:
    """How evenly load lay, what carried it, and what bound."""
    snics, attention = balance.snic_balance(records, setup), balance.attention_balance(records, setup)
    used = usage.utilisation(records, setup)
    return {
        "snic_max_over_avg": None if snics is None else snics.max_over_avg,
        "snic_balance": _plain(snics),
        "attention_max_over_avg": None if attention is None else attention.max_over_avg,
        "attention_balance": _plain(attention),
        "predictor_error": balance.predictor_error(records),
        "binding": _plain(usage.binding(records, setup)),
        "utilisation": None
        if used is None
        else {f"{node} {nic} {direction}": share for (node, nic, direction), share in used.items()},
        "pool_peaks": dict(usage.pool_peaks(records, setup)),
        "cnic_idle": _plain(usage.cnic_idle(records, setup)),
        "collectives": [
            {
                "ring": row.ring,
                "lane": VirtualLane(row.lane).name,
                "upto_model_bytes": row.upto_bytes,
                "model_bytes": round(row.model_bytes),
                "count": row.count,
                "mean_s": row.mean_s,
                "p95_s": row.p95_s,
                "max_s": row.max_s,
            }
            for row in usage.collectives(records, setup.scale)
        ],
    }


def run_entry(report: dict[str, Any], run: FinishedRun, out: Path | None) -> dict[str, Any]:
    """The entry of one run in `--json`: the report, and what only the host knows."""
    return report | {
        "verdict_reasons": list(run.verdict.reasons),
        "dilation_that_would_do": run.verdict.dilation,
        "wall_s": run.wall_s,
        "out": None if out is None else str(out),
    }


def _plain(value: msgspec.Struct | None) -> dict[str, Any] | None:
    return None if value is None else msgspec.to_builtins(value)


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)
