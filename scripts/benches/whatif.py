"""What the paper left open or fixed: split reads, KV straight into decode HBM, exchanges a forward, doorbells.

In virtual time. ``scripts/bench whatif [--json]``. Most figures have no bound: they are answers. Doorbells have
one, because what they cost follows from arithmetic; and a split read has one, where nobody else reads.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from emulator.config import EngineConfig
from emulator.metrics import done
from emulator.models.shape import load_shape
from emulator.records import RequestRecord
from emulator.roles.traffic import Doorbell
from emulator.rundir import read_run_dir
from emulator.synth import synth_io_bound

from .commands import runs
from .figures import Figure, show
from .workloads import SEEDS, median, preset_with, said, saved

__all__ = ["main"]

GENERATIONS = {"dualpath-rr": (2, 8, 32, 128), "dualpath": (2, 32)}
"""Output tokens of a turn, by system: round robin asks nobody whether there is HBM, DualPath's scheduler does."""

SMALL_HBM = "[engine]\nde_hbm_kv_gb = 6.4\n"
"""Four contexts of 34K tokens a DE: little enough that who holds HBM early takes it from somebody."""

SMALL_BLOCK = 16
BATCHES = (1, 16)
"""Work requests a doorbell rings for."""


def main(argv: Sequence[str]) -> int:
    """Run everything, print every figure; 1 where a bound is missed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures = [*_split(folder), *_direct(folder), *_exchanges(folder), *_doorbells(folder)]
    return show(figures, as_json="--json" in argv)


def _one(*asked: str) -> dict[str, Any]:
    """The one run of a command, and that it was whole."""
    (entry,), code = runs("sim", *asked)
    if code:
        raise SystemExit(f"emulate sim {' '.join(asked)}: exit code {code}")
    return said(entry)


def _split(folder: Path) -> Iterator[Figure]:
    """Contexts of 2K to 100K: a long one is all on one side's queue, or half on each."""
    for agents in (1, 4, 32):
        workload = synth_io_bound(1, agents, 4, first_prompt=(2_000, 100_000), gen=(2, 8))
        asked = ("1p1d", *saved(workload, folder), "--warm")
        jct: dict[str, float] = {}
        reading_s: dict[str, float] = {}
        for system in ("dualpath", "split"):
            entries = [_one(*asked, "--system", system, "--seed", str(seed)) for seed in SEEDS]
            jct[system] = median(entries)
            name = f"uneven contexts, {agents} agents, {system}"
            reading_s[system] = median([e["ttft_breakdown_s"] for e in entries], "reading")
            yield Figure(f"{name}: JCT, median", jct[system], "s")
            yield Figure(f"{name}: TTFT, mean", median([e["ttft_s"] for e in entries], "mean"), "s")
            yield Figure(f"{name}: reading in TTFT, mean", reading_s[system], "s")
        yield Figure(
            f"uneven contexts, {agents} agents: split to dualpath, JCT", jct["split"] / jct["dualpath"], "x"
        )
        if agents == 1:
            # Nobody else reads, so each storage NIC has half of the hit.
            halved = reading_s["split"] / reading_s["dualpath"]
            yield Figure("one agent alone: split to dualpath, reading", halved, "x", high=0.55)


def _direct(folder: Path) -> Iterator[Figure]:
    """KV straight into HBM saves a copy and holds HBM for longer: which is more, by length of generation."""
    topology = preset_with("1p1d", SMALL_HBM, folder)
    for system, lengths in GENERATIONS.items():
        ratios: dict[int, float] = {}
        for generated in lengths:
            workload = synth_io_bound(1, 64, 2, gen=(generated, generated))
            asked = (topology, *saved(workload, folder), "--warm", "--system", system)
            direct, buffered = _one(*asked, "--de-direct")["jct_s"], _one(*asked)["jct_s"]
            ratios[generated] = direct / buffered
            yield Figure(f"{system}, {generated} tokens: JCT, --de-direct to without", ratios[generated], "x")
        for tokens in _crossings(ratios):
            yield Figure(f"{system}: --de-direct neither gains nor costs at", tokens, "tokens")


def _crossings(ratios: Mapping[int, float]) -> Iterator[float]:
    """Where the ratio passes 1, between two lengths on a logarithmic scale."""
    for (short, before), (long, after) in pairwise(sorted(ratios.items())):
        if (before - 1) * (after - 1) < 0:
            yield short * (long / short) ** ((1 - before) / (after - before))


def _exchanges(folder: Path) -> Iterator[Figure]:
    """One exchange of experts' traffic a layer, or one a forward, between two nodes' PEs."""
    asked = (*saved(synth_io_bound(1, 48, 3, append=(400, 700), gen=(8, 32)), folder), "--warm")
    found = {}
    for exchange in ("layer", "forward"):
        topology = preset_with("2p1d", f"[engine]\nprefill_exchange = '{exchange}'\n", folder)
        found[exchange] = _one(topology, *asked)
        yield Figure(f"an exchange a {exchange}: JCT", found[exchange]["jct_s"], "s")
        yield Figure(f"an exchange a {exchange}: TTFT, mean", found[exchange]["ttft_s"]["mean"], "s")
        yield Figure(f"an exchange a {exchange}: TPOT, mean", found[exchange]["tpot_s"]["mean"] * 1e3, "ms")
    yield Figure("a forward to a layer, JCT", found["forward"]["jct_s"] / found["layer"]["jct_s"], "x")


def _doorbells(folder: Path) -> Iterator[Figure]:
    """Blocks of 16 tokens make four times as many work requests; one agent alone, so that nothing else counts."""
    asked = (*saved(synth_io_bound(1, 1, 3, gen=(2, 2)), folder), "--warm", "--path", "pe")
    jct: dict[int, float] = {}
    rows: dict[int, tuple[RequestRecord, ...]] = {}
    for batch in BATCHES:
        engine = f"[engine]\nblock_tokens = {SMALL_BLOCK}\ndoorbell_batch = {batch}\n"
        out = folder / f"doorbell-{batch}"
        jct[batch] = _one(preset_with("1p1d", engine, folder), *asked, "--out", str(out))["jct_s"]
        rows[batch] = done(read_run_dir(out).evidence.records)
        yield Figure(f"doorbell for {batch}: JCT", jct[batch], "s")
        yield Figure(f"doorbell for {batch}: prefill, mean", _mean(_prefill_s(r) for r in rows[batch]), "s")
    single, gathered = (rows[batch] for batch in BATCHES)
    measured = _mean(_prefill_s(r) for r in single)
    predicted = _mean(_submitting_s(r, BATCHES[0]) for r in single)
    yield Figure("doorbell for 1: prefill, to what submitting takes", measured / predicted, "x", 0.98, 1.02)
    measured = _mean(_transfer_s(r) for r in single) - _mean(_transfer_s(r) for r in gathered)
    predicted = _mean(_last_s(r, BATCHES[0]) - _last_s(r, BATCHES[1]) for r in single)
    yield Figure("doorbells: difference in transfer, to the predicted", measured / predicted, "x", 0.98, 1.02)


def _mean(values: Iterator[float]) -> float:
    found = list(values)
    return math.fsum(found) / len(found)


def _prefill_s(r: RequestRecord) -> float:
    assert r.computed_s is not None and r.prefill_start_s is not None
    return r.computed_s - r.prefill_start_s


def _transfer_s(r: RequestRecord) -> float:
    assert r.transferred_s is not None and r.computed_s is not None
    return r.transferred_s - r.computed_s


def _doorbell(batch: int) -> Doorbell:
    return Doorbell(EngineConfig().submit_write_s, batch)


def _submitting_s(r: RequestRecord, batch: int) -> float:
    """Every layer's load, and every layer's output but the last, which goes when the prefill is over."""
    doorbell, at_s = _doorbell(batch), 0.0
    layers = load_shape("ds660b").layers
    for _ in range(layers):
        at_s = doorbell.ring(0.0, r.hit_tokens // SMALL_BLOCK)
    for _ in range(layers - 1):
        at_s = doorbell.ring(0.0, -(-r.prompt_tokens // SMALL_BLOCK))
    return at_s


def _last_s(r: RequestRecord, batch: int) -> float:
    """The last layer's output on the PE; then, on the DE, the prompt: its full blocks, and the rest's layers."""
    rest = load_shape("ds660b").layers if r.prompt_tokens % SMALL_BLOCK else 0
    copied_s = _doorbell(batch).ring(0.0, 1 + rest)
    return _doorbell(batch).ring(0.0, -(-r.prompt_tokens // SMALL_BLOCK)) + copied_s
