"""What a cluster can carry, and what a workload asks of it: closed formulas, no run.

Pure. Two questions, both in model units:

- ``bottleneck_free``: with every storage NIC reading at its full rate, does any compute NIC or DRAM saturate
  first? (DualPath, arXiv 2602.21548, section 2; the paper's equations 1 to 9 are its loads and bounds.)
- ``offered_load``: how many seconds of each resource a workload needs, over the time that its agents would
  need if storage and network cost nothing. Above 1 the resource is the bottleneck, and 2 means that twice
  what it can carry is offered.

Must not import the topology: a cluster is given as plain numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from .costmodel import CostModel
from .workload import Workload, infinite_cache

__all__ = [
    "STORAGE_READS",
    "BottleneckFree",
    "Cluster",
    "Load",
    "LoadReport",
    "PortLoad",
    "bottleneck_free",
    "offered_load",
    "working_set_bytes",
]

Path = Literal["pe", "de", "both"]

STORAGE_READS = "SNIC, storage reads"
"""The resource whose offered load says whether a workload is bound by storage bandwidth."""

DRAM_BPS = 500e9
"""Memory bandwidth of a node, half duplex (paper, section 2)."""


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster's numbers; rates in model bytes per second. ``snics``: storage NICs a node."""

    pe_nodes: int
    de_nodes: int
    gpus: int
    cnic_bps: float
    snic_bps: float
    storage_bps: float
    snics: int = 1
    dram_bps: float = DRAM_BPS

    @property
    def s(self) -> float:
        """Storage NICs a node in units of a compute NIC's rate, so that s B is a node's storage bandwidth."""
        return self.snics * self.snic_bps / self.cnic_bps


class PortLoad(msgspec.Struct, frozen=True):
    """The load of one resource with all storage NICs saturated, and what it can carry, in bytes per second."""

    resource: str
    formula: str
    load_bps: float
    limit_bps: float


class BottleneckFree(msgspec.Struct, frozen=True):
    """The paper's section 2 for one cluster.

    ``pe_path_bps`` and ``de_path_bps``: traffic of one PE-DE pair of engines on either path.
    ``ratio_bounds``: (formula, kind, bound on P/D); ``ratio_low`` and ``ratio_high`` are the tightest.
    ``basic_bps`` and ``dualpath_bps``: storage bandwidth that prefill can use with one path, and with both.
    """

    pe_path_bps: float
    de_path_bps: float
    loads: tuple[PortLoad, ...]
    ratio: float
    ratio_bounds: tuple[tuple[str, Literal["low", "high"], float], ...]
    ratio_low: float
    ratio_high: float
    basic_bps: float
    dualpath_bps: float

    @property
    def bottleneck_free(self) -> bool:
        """No compute NIC and no DRAM saturates before the storage NICs do."""
        return all(load.load_bps <= load.limit_bps * (1 + 1e-9) for load in self.loads)


def bottleneck_free(cluster: Cluster) -> BottleneckFree:
    """Evaluate the loads and the bounds on P/D for a cluster."""
    pe, de, g, s = cluster.pe_nodes, cluster.de_nodes, cluster.gpus, cluster.s
    b, m = cluster.cnic_bps, cluster.dram_bps
    t_p, t_c = b * s / (de * g * g), b * s / (pe * g * g)
    loads = (
        PortLoad("PE CNIC read", "2 Tp D g = 2 B s/g", 2 * t_p * de * g, b),
        PortLoad("PE CNIC write", "(Tp + Tc) D g", (t_p + t_c) * de * g, b),
        PortLoad("DE CNIC read", "(Tp + 2 Tc) P g", (t_p + 2 * t_c) * pe * g, b),
        PortLoad("DE CNIC write", "(2 Tp + Tc) P g", (2 * t_p + t_c) * pe * g, b),
        PortLoad("PE DRAM", "2 s B", 2 * s * b, m),
        PortLoad("DE DRAM", "(3 + 2 P/D) s B", (3 + 2 * pe / de) * s * b, m),
    )
    bounds: tuple[tuple[str, Literal["low", "high"], float], ...] = (
        ("P/D >= s/(g - s), PE CNIC write", "low", s / (g - s) if g > s else math.inf),
        ("P/D <= (g - 2s)/s, DE CNIC read", "high", (g - 2 * s) / s),
        ("P/D <= (g - s)/(2s), DE CNIC write", "high", (g - s) / (2 * s)),
        ("P/D <= (M/(B s) - 3)/2, DE DRAM", "high", (m / (b * s) - 3) / 2),
    )
    return BottleneckFree(
        pe_path_bps=t_p,
        de_path_bps=t_c,
        loads=loads,
        ratio=pe / de,
        ratio_bounds=bounds,
        ratio_low=max(bound for _, kind, bound in bounds if kind == "low"),
        ratio_high=min(bound for _, kind, bound in bounds if kind == "high"),
        basic_bps=pe * s * b,
        dualpath_bps=(pe + de) * s * b,
    )


def working_set_bytes(aps: float, jct_s: float, total_tokens: float, token_bytes: int) -> float:
    """KV bytes that live agents need kept: aps x jct x total/2 x bytes (paper, section 7).

    By Little's law aps x jct is the number of agents at work, so a closed loop of n agents has aps x jct = n.
    """
    return aps * jct_s * total_tokens / 2 * token_bytes


class Load(msgspec.Struct, frozen=True):
    """One resource under one read path: ``busy_s`` seconds that it needs, ``offered`` = busy_s / free_s."""

    resource: str
    formula: str
    busy_s: float
    offered: float


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """A workload's closed loop on a cluster; sums are model bytes and tokens over all requests.

    ``free_s``: the run's length if storage and network cost nothing: the longest of the slowest agent's
    computation, the prefill time of all requests over all PE GPUs and the decode time over all DE GPUs.
    ``loads``: by read path (``pe``: all reads on PE nodes, ``de``, ``both``: evenly over all storage NICs).
    ``twice_share``: by path, the share of ``free_s`` during which the storage NICs that read are offered at
    least twice their rate, when each agent asks for the hit bytes of its current turn evenly over the time
    that the turn's computation takes. ``binding``: by path, the resource that needs the most seconds, and
    ``jct_bound_s`` how many: a run is hardly shorter (only prefills batched together may shave their own part).
    ``gb_per_pflop``: KV gigabytes read per 10^15 FLOPs of prefill. ``store_bytes``: what a store that evicts
    nothing holds at the end. ``working_set_bytes``: as the function, for as many agents as there are.
    """

    warm: bool
    agents: int
    requests: int
    hit_tokens: int
    miss_tokens: int
    output_tokens: int
    read_bytes: int
    free_s: float
    loads: dict[str, tuple[Load, ...]]
    twice_share: dict[str, float]
    binding: dict[str, str]
    jct_bound_s: dict[str, float]
    gb_per_pflop: float
    store_bytes: int
    working_set_bytes: float

    def snic_offered(self, path: Path) -> float:
        """What one reading storage NIC is offered, in units of its rate."""
        return next(load.offered for load in self.loads[path] if load.resource == STORAGE_READS)


class _Turn(msgspec.Struct, frozen=True):
    """One request: hit and missed prompt tokens, outputs, and GPU seconds of its prefill and its decode."""

    hit: int
    miss: int
    output: int
    persisted: int
    prefill_s: float
    decode_s: float

    @property
    def compute_s(self) -> float:
        return self.prefill_s + self.decode_s


def offered_load(
    workload: Workload, cluster: Cluster, costs: CostModel, *, warm: bool, block_tokens: int = 64
) -> LoadReport:
    """Weigh a closed loop (all trajectories at once, no think time) against a cluster's resources.

    ``warm``: the first prompts' blocks are in the store before the start. Hits are an infinite cache's. A
    prefill is costed alone, a decode step in the batch that it has when all agents decode at once. Raises
    ConfigError where a measured cost table does not cover the workload.
    """
    cache = infinite_cache(workload, block_tokens, warm)
    engines = cluster.gpus // costs.tensor_parallel
    engines_are = "g" if costs.tensor_parallel == 1 else f"g/{costs.tensor_parallel}"
    batch = math.ceil(len(workload.trajectories) / (cluster.de_nodes * engines))
    rest_s = costs.decode_rest_s(batch / costs.tensor_parallel)
    agents: list[list[_Turn]] = []
    for trajectory, hits in zip(workload.trajectories, cache.hit_tokens, strict=True):
        agents.append([])
        for turn, hit in zip(trajectory.turns, hits, strict=True):
            miss = turn.prompt_tokens - hit
            # Contexts grow by a token a step; the middle one's step stands for all.
            middle = turn.prompt_tokens + turn.output_tokens // 2
            agents[-1].append(
                _Turn(
                    hit=hit,
                    miss=miss,
                    output=turn.output_tokens,
                    persisted=turn.total_tokens // block_tokens * block_tokens - hit,
                    prefill_s=costs.prefill_layer_s([(hit, miss)]) * costs.shape.layers,
                    decode_s=(batch * costs.decode_attention_s([middle]) + rest_s) * turn.output_tokens,
                )
            )
    turns = [turn for each in agents for turn in each]
    token_bytes = costs.shape.kv_bytes_per_token
    slowest_s = max((math.fsum(turn.compute_s for turn in each) for each in agents), default=0.0)
    pe_s = math.fsum(turn.prefill_s for turn in turns) / (cluster.pe_nodes * engines)
    # A decode step serves its whole batch, so a request owns a part of it.
    de_s = math.fsum(turn.decode_s / batch for turn in turns) / (cluster.de_nodes * engines)
    free_s = max(slowest_s, pe_s, de_s)
    compute = (
        ("slowest agent", "sum of its turns' prefill and decode seconds", slowest_s),
        ("PE GPUs", f"prefill seconds of all requests / (P {engines_are})", pe_s),
        ("DE GPUs", f"decode seconds of all requests / (D {engines_are})", de_s),
    )
    paths: tuple[Path, ...] = ("pe", "de", "both")
    loads: dict[str, tuple[Load, ...]] = {}
    for path in paths:
        needed = [*compute, *_network(turns, cluster, token_bytes, path)]
        loads[path] = tuple(Load(*row, row[2] / free_s if free_s else 0.0) for row in needed)
    hit_tokens = sum(turn.hit for turn in turns)
    flops = sum(costs.prefill_flops(turn.hit, turn.miss) for turn in turns)
    mean_total = math.fsum(t.turns[-1].total_tokens for t in workload.trajectories) / max(1, len(agents))
    binding = {path: max(loads[path], key=lambda load: load.busy_s) for path in paths}
    return LoadReport(
        warm=warm,
        agents=len(agents),
        requests=len(turns),
        hit_tokens=hit_tokens,
        miss_tokens=sum(turn.miss for turn in turns),
        output_tokens=sum(turn.output for turn in turns),
        read_bytes=hit_tokens * token_bytes,
        free_s=free_s,
        loads=loads,
        twice_share={
            path: _share_at_least(2.0, agents, token_bytes / _read_bps(cluster, path), free_s) for path in paths
        },
        binding={path: load.resource for path, load in binding.items()},
        jct_bound_s={path: load.busy_s for path, load in binding.items()},
        gb_per_pflop=(hit_tokens * token_bytes / 1e9) / (flops / 1e15) if flops else 0.0,
        store_bytes=cache.distinct_tokens * token_bytes,
        working_set_bytes=working_set_bytes(len(agents), 1.0, mean_total, token_bytes),
    )


def _read_bps(cluster: Cluster, path: Path) -> float:
    """What the storage NICs that read carry together."""
    nodes = {"pe": cluster.pe_nodes, "de": cluster.de_nodes, "both": cluster.pe_nodes + cluster.de_nodes}
    return nodes[path] * cluster.snics * cluster.snic_bps


def _network(
    turns: Sequence[_Turn], cluster: Cluster, token_bytes: int, path: Path
) -> list[tuple[str, str, float]]:
    """(resource, formula, seconds) of storage and NICs; bytes as the arrows of the paper's figure 4 move them.

    H2D and D2H are loopbacks: they pass their NIC in both directions.
    """
    hit = sum(turn.hit for turn in turns) * token_bytes
    miss = sum(turn.miss for turn in turns) * token_bytes
    generated = sum(turn.output for turn in turns) * token_bytes
    persisted = sum(turn.persisted for turn in turns) * token_bytes
    on_pe = {"pe": 1.0, "de": 0.0, "both": cluster.pe_nodes / (cluster.pe_nodes + cluster.de_nodes)}[path]
    pe_hit, de_hit = hit * on_pe, hit * (1 - on_pe)
    pe_cnics = cluster.pe_nodes * cluster.gpus * cluster.cnic_bps
    de_cnics = cluster.de_nodes * cluster.gpus * cluster.cnic_bps
    return [
        (
            STORAGE_READS,
            "hit bytes / (SNICs that read x their rate)",
            hit / _read_bps(cluster, path),
        ),
        (
            "SNIC of DE, storage writes",
            "persisted bytes / (D x SNICs x their rate)",
            persisted / _read_bps(cluster, "de"),
        ),
        ("storage links", "hit bytes / their rate", hit / cluster.storage_bps),
        (
            "PE CNIC read",
            "(PE-path hits twice + misses) / (P g B)",
            (2 * pe_hit + miss) / pe_cnics,
        ),
        ("PE CNIC write", "hits / (P g B)", hit / pe_cnics),
        (
            "DE CNIC read",
            "(DE-path hits twice + PE-path hits + misses + generated) / (D g B)",
            (2 * de_hit + pe_hit + miss + generated) / de_cnics,
        ),
        (
            "DE CNIC write",
            "(PE-path hits twice + DE-path hits + misses twice + generated) / (D g B)",
            (2 * pe_hit + de_hit + 2 * miss + generated) / de_cnics,
        ),
    ]


def _share_at_least(times: float, agents: Sequence[Sequence[_Turn]], token_s: float, free_s: float) -> float:
    """The share of ``free_s`` during which agents together ask for ``times`` what the readers carry.

    ``token_s``: seconds that the readers together need for one token. Turns lie end to end, stretched so that
    the slowest agent ends at ``free_s``.
    """
    slowest_s = max((math.fsum(turn.compute_s for turn in each) for each in agents), default=0.0)
    if slowest_s <= 0:
        return 0.0
    stretch = free_s / slowest_s
    changes: list[tuple[float, float]] = []
    for each in agents:
        at_s = 0.0
        for turn in each:
            length_s = turn.compute_s * stretch
            demand = turn.hit * token_s / length_s
            changes += [(at_s, demand), (at_s + length_s, -demand)]
            at_s += length_s
    changes.sort()
    asked, before_s, enough_s = 0.0, 0.0, 0.0
    for at_s, change in changes:
        # The sum of floats that cancel may miss a level by an ulp or so.
        if asked >= times * (1 - 1e-9):
            enough_s += at_s - before_s
        asked, before_s = asked + change, at_s
    return enough_s / free_s
