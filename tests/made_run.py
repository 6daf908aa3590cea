"""A made-up run in which every invariant holds, for the tests of what is computed from records.

Its requests follow a system's read paths on one PE and one DE node, one at a time, in two forwards each, message
by message; nothing in it comes from the formulas under test.
"""

from __future__ import annotations

import io
from collections import Counter
from typing import Any

import msgspec
from rich.console import Console

from emulator.config import EngineConfig, Member, ReplayConfig, RunConfig
from emulator.judge import KernelLane, KernelPort, Verdict, judge_virtual
from emulator.kvcache import Layout
from emulator.metrics import Port, Setup
from emulator.records import (
    BatchRecord,
    CacheRecord,
    Decision,
    HostSample,
    NodeRecord,
    PoolRecord,
    PortBytes,
    RequestRecord,
    RunRecords,
    TransferBytes,
)
from emulator.report import FinishedRun
from emulator.scale import Scale
from emulator.systems import SYSTEMS, System
from emulator.tables import comparison
from emulator.verify import Evidence

__all__ = [
    "POOLED",
    "QUOTA_S",
    "RATE_BPS",
    "evidence",
    "finished",
    "made_config",
    "nothing_done",
    "replace_node",
    "replace_request",
    "shown",
]

LAYOUT = Layout(layers=3, kv_bytes=4)
TOKEN = 3 * 4
BLOCK = 64 * TOKEN
RATE_BPS = 20_000.0
READ_SHARE = 0.97
"""What part of a storage NIC's rate a read gets."""
WINDOW_S = 1.0
QUOTA_S = 0.3
ATTENTION_S = 0.2
POOLED = System("pooled", "dualpath behind a DRAM pool", pool=True)
ROLES = {"pe0": "pe", "de0": "de", "st0": "storage", "st1": "storage", "sched": "scheduler", "client": "client"}


def made_config() -> RunConfig:
    """The configuration that the made-up run belongs to."""
    members = tuple(
        Member(name, role, 2 if role in ("pe", "de") else 0)  # type: ignore[arg-type]
        for name, role in ROLES.items()
    )
    topology = {
        "name": "made",
        "nodes": {"pe": 1, "de": 1},
        "links": [{"nic": "cnic", "gbps": 0.5}, {"nic": "snic"}],
    }
    return RunConfig(
        topology=topology, members=members, engine=EngineConfig(quota_s=QUOTA_S), replay=ReplayConfig(agents=2)
    )


class _Ledger:
    """Both sides' books, and the ports' counters."""

    def __init__(self) -> None:
        self.sent: Counter[tuple[str, str, str]] = Counter()
        self.received: Counter[tuple[str, str, str]] = Counter()
        self.messages: Counter[tuple[str, str, str]] = Counter()
        self.ports: dict[tuple[str, str, str], list[int]] = {}

    def move(self, transfer: str, src: str, dst: str, payload: int, at_s: float) -> None:
        """One message between "node nic" and "node nic", in place at ``at_s``; what is free takes no NIC."""
        if not payload:
            return
        (src_node, src_nic), (dst_node, dst_nic) = src.split(), dst.split()
        key = (transfer, src_node, dst_node)
        self.sent[key] += payload
        self.received[key] += payload
        self.messages[key] += 1
        if transfer == "FREE":
            return
        for port in ((src_node, src_nic, "read"), (dst_node, dst_nic, "write")):
            windows = self.ports.setdefault(port, [])
            index = int(at_s // WINDOW_S)
            windows.extend([0] * (index + 1 - len(windows)))
            windows[index] += payload

    def node(self, name: str) -> dict[str, object]:
        def rows(book: Counter[tuple[str, str, str]], end: int) -> tuple[TransferBytes, ...]:
            return tuple(TransferBytes(*k, book[k], self.messages[k]) for k in sorted(book) if k[end] == name)

        ports = tuple(
            PortBytes(nic, direction, 2, sum(w), sum(1 for b in w if b), float(len(w)), WINDOW_S, tuple(w), max(w))  # type: ignore[arg-type]
            for (node, nic, direction), w in sorted(self.ports.items())
            if node == name
        )
        return {"sent": rows(self.sent, 1), "received": rows(self.received, 2), "ports": ports}


def evidence(
    agents: int = 3,
    turns: int = 3,
    *,
    hosts: bool = True,
    system: System = SYSTEMS["dualpath"],
    de_direct: bool = False,
    cached: bool = False,
) -> Evidence:
    """A run of ``agents`` x ``turns`` requests, alternately on the paths of ``system``; consistent throughout.

    Every turn's prompt is its predecessor's prompt and output and 100 tokens more. A pool gives every other block
    that a PE reads; where nodes are ``cached``, the caches of both sides every other block that their node reads.
    ``hosts``: with samples of the wall clock, as on real sockets.
    """
    ledger = _Ledger()
    requests: list[RequestRecord] = []
    decisions: list[Decision] = []
    batches: list[BatchRecord] = []
    continues: dict[str, bool] = {}
    asked: Counter[str] = Counter()
    gave: Counter[str] = Counter()
    now = 1.0
    for turn in range(turns):
        for agent in range(agents):
            prompt, output = 150 + 170 * turn + agent, 70
            written = (prompt - 100) // 64 * 64 if turn else 0
            hit = min(written, (prompt - 1) // 64 * 64)
            paths = {"pe": ("pe",), "de": ("de",), "auto": ("de", "pe"), "split": ("split",)}[system.reads]
            path = paths[(turn + agent) % len(paths)]
            de_blocks = {"pe": 0, "de": hit // 64, "split": hit // 128}[path]
            pool_blocks = (hit // 64 - de_blocks) // 2 if system.pool or cached else 0
            de_cached = de_blocks // 2 if cached else 0
            asked.update(pe0=hit // 64 - de_blocks, de0=de_blocks)
            gave.update(pe0=pool_blocks, de0=de_cached)
            name = f"a{agent}.{turn}"
            first_batch, last_batch = prompt - hit - 40, 40
            at = now
            read_s = 0.2 + hit * TOKEN / RATE_BPS / READ_SHARE
            steps = (0.0, 0.05, 0.1, 0.2, read_s, 1.0, 1.6, 2.0, 2.1, 3.48)
            stamps = [at + s for s in steps]
            split = de_blocks if path == "split" else 0
            decisions.append(Decision(name, "pe0/0", "de0/1", path, hit // 64, split))  # type: ignore[arg-type]
            chunks = ((hit, first_batch), (hit + first_batch, last_batch))
            dram = (de_cached, pool_blocks, "" if cached else "POOL")
            _traffic(ledger, system, de_direct, path, de_blocks, dram, prompt, output, chunks, stamps)
            for start, end, chunk in ((1.0, 1.3, chunks[0]), (1.3, 1.6, chunks[1])):
                index = len(batches)
                batches.append(
                    BatchRecord(
                        "pe0/0",
                        index,
                        (name,),
                        (chunk,),
                        at + start,
                        at + end,
                        index,
                        ATTENTION_S,
                        1.02 * ATTENTION_S,
                    )
                )
            requests.append(
                RequestRecord(
                    id=name,
                    trajectory=f"a{agent}",
                    turn=turn,
                    status="done",
                    path=path,  # type: ignore[arg-type]
                    pe="pe0/0",
                    de="de0/1",
                    prompt_tokens=prompt,
                    hit_tokens=hit,
                    de_hit_tokens=64 * de_blocks,
                    pool_tokens=64 * (pool_blocks + de_cached),
                    pool_local_tokens=64 * (pool_blocks + de_cached) if cached else 0,
                    pool_de_tokens=64 * de_cached,
                    output_tokens=output,
                    persisted_tokens=(prompt + output) // 64 * 64 - hit,
                    arrived_s=stamps[0],
                    eligible_s=stamps[1],
                    scheduled_s=stamps[2],
                    allocated_s=stamps[3],
                    read_s=stamps[4],
                    prefill_start_s=stamps[5],
                    computed_s=stamps[6],
                    transferred_s=stamps[7],
                    first_token_s=stamps[8],
                    last_token_s=stamps[9],
                    settled_s=at + 3.6,
                    token_gaps=((0.02, 69),),
                    model_tokens=tuple((7 * i + 31 * turn + agent) % 1000 for i in range(output + 1)),
                )
            )
            continues[name] = turn > 0
            now += 4.0
    nodes = tuple(
        NodeRecord(
            node=name,
            **ledger.node(name),  # type: ignore[arg-type]
            pools=(PoolRecord(f"{name}.buffer", 40, 40, 12),) if role in ("pe", "de") else (),
            batches=tuple(batches) if role == "pe" else (),
            decisions=tuple(decisions) if role == "scheduler" else (),
            cache=CacheRecord(
                total=9,
                used=5,
                pending=0,
                leases=0,
                looked_up=asked[name],
                hits=gave[name],
                inserted=7,
                evicted=2,
                turned_away=1,
            )
            if cached and role in ("pe", "de")
            else None,
            host=HostSample((0.05, 0.3, 2.0), 10.0, 400.0, 0) if hosts else None,
        )
        for name, role in ROLES.items()
    )
    nics = {"pe": ("cnic0", "cnic1", "snic0"), "de": ("cnic0", "cnic1", "snic0"), "storage": ("snic0",)}
    ports = tuple(
        Port(name, nic, role, RATE_BPS * (1.25 if role == "storage" else 1.0))  # type: ignore[arg-type]
        for name, role in ROLES.items()
        for nic in nics.get(role, ())
    )
    return Evidence(
        setup=Setup(
            layout=LAYOUT,
            scale=Scale(model_kv_bytes=704, kv_bytes=4, dilation=10.0),
            ports=ports,
            system=system,
            de_direct=de_direct,
            prefix_cache=cached,
            quota_s=QUOTA_S,
            groups=(("pe0/0", "pe0/1"),),
        ),
        records=RunRecords(t0_s=0.5, ended_s=now + 1.0, requests=tuple(requests), nodes=nodes),
        expected={r.id: r.model_tokens for r in requests},
        continues=continues,
    )


def _traffic(
    ledger: _Ledger,
    system: System,
    de_direct: bool,
    path: str,
    de_blocks: int,
    dram: tuple[int, int, str],
    prompt: int,
    output: int,
    chunks: tuple[tuple[int, int], ...],
    stamps: list[float],
) -> None:
    """Every arrow of the paper's figure 4 for one request, layer by layer where it is layerwise.

    ``dram``: blocks that DRAM gives on the DE's side and on the PE's, and the transfer that brings the latter.
    """
    de_cached, pool_blocks, brings = dram
    _, _, _, _, read, _, computed, transferred, _, last = stamps
    pe, de = "pe0 cnic0", "de0 cnic1"
    hit = chunks[0][0]
    row = TOKEN // 3

    def move(transfer: str, src: str, dst: str, payload: int, at_s: float) -> None:
        ledger.move("FREE" if system.free else transfer, src, dst, payload, at_s)

    for block in range(hit // 64):
        if block < de_cached:
            continue
        if block < de_blocks:
            move("DE_READ", f"st{block % 2} snic0", "de0 snic0", BLOCK, read)
        elif block < de_blocks + pool_blocks:
            if brings:
                move(brings, "de0 cnic0", "pe0 cnic1", BLOCK, read)
        else:
            move("PE_READ", f"st{block % 2} snic0", "pe0 snic0", BLOCK, read)
    for index, (cached, new) in enumerate(chunks):
        for _layer in range(3):
            if system.layerwise or not index:
                move("DE_LOAD", de, pe, 64 * de_blocks * row, computed)
                move("PE_H2D", pe, pe, (hit - 64 * de_blocks) * row, computed)
            if system.layerwise and index:
                move("RELOAD", de, pe, (cached - hit) * row, computed)
            out = new if index else hit - 64 * de_blocks + new
            move("DE_MISS" if path == "de" else "PE_OUT", pe, de, out * row, computed)
    copied = 64 * de_blocks if de_direct else prompt
    move("PE_DE_H2D" if path == "pe" else "DE_H2D", de, de, copied * TOKEN, transferred)
    for block in range(hit // 64, (prompt + output) // 64):
        if de_direct or (block + 1) * 64 > prompt:
            move("D2H", de, de, BLOCK, last)
        ledger.move("PERSIST", "de0 snic0", f"st{block % 2} snic0", BLOCK, last)


def replace_request(made: Evidence, name: str, **changes: object) -> Evidence:
    """The same run with fields of one request changed."""
    rows = tuple(msgspec.structs.replace(r, **changes) if r.id == name else r for r in made.records.requests)
    return msgspec.structs.replace(made, records=msgspec.structs.replace(made.records, requests=rows))


def replace_node(made: Evidence, name: str, **changes: object) -> Evidence:
    """The same run with fields of one node's record changed."""
    nodes = tuple(msgspec.structs.replace(n, **changes) if n.node == name else n for n in made.records.nodes)
    return msgspec.structs.replace(made, records=msgspec.structs.replace(made.records, nodes=nodes))


def finished(**changes: Any) -> FinishedRun:
    values: dict[str, Any] = {
        "config": made_config(),
        "fabric": "tcp",
        "evidence": evidence(),
        "verdict": Verdict("valid", False, ()),
        "wall_s": 41.5,
        "kernel": (KernelPort("pe0", "snic0", "write", (KernelLane("kv", 12_345, 0),), 0),),
        **changes,
    }
    return FinishedRun(**values)


def nothing_done() -> FinishedRun:
    made = evidence(hosts=False)
    failed = tuple(
        msgspec.structs.replace(r, status="failed", error="refused: never fits") for r in made.records.requests
    )
    records = msgspec.structs.replace(made.records, requests=failed, nodes=())
    return finished(
        evidence=msgspec.structs.replace(made, records=records), verdict=judge_virtual(), fabric="fluid"
    )


def shown(*entries: dict[str, Any], width: int = 200) -> str:
    """The tables of several runs as a terminal of ``width`` columns shows them."""
    console = Console(width=width, file=io.StringIO())
    with console.capture() as printed:
        console.print(comparison(entries))
    return printed.get()
