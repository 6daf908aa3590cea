"""Synthetic workloads have the published shape, and the bundled samples are what the synthesiser makes."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources

import numpy as np
import pytest

from emulator.config import EngineConfig
from emulator.errors import ConfigError
from emulator.models.shape import load_shape
from emulator.samples import SAMPLES, load_sample, make_sample
from emulator.synth import AGENTIC_SETS, synth_agentic, synth_hbm_bound, synth_io_bound
from emulator.traces import native_bytes
from emulator.workload import Workload, workload_stats

from .within import assert_within


def _sums(workload: Workload) -> tuple[float, float, float]:
    """Mean turns, context tokens and generated tokens of a trajectory."""
    each = [
        (len(t.turns), sum(turn.prompt_tokens for turn in t.turns), sum(turn.output_tokens for turn in t.turns))
        for t in workload.trajectories
    ]
    turns, context, generated = np.mean(each, axis=0)
    return float(turns), float(context), float(generated)


@pytest.mark.parametrize("max_len", AGENTIC_SETS)
def test_the_five_published_means_hold(max_len: int) -> None:
    """Turns, append, gen, total and context of the paper's table, each within 6 % over 1,000 trajectories."""
    published = AGENTIC_SETS[max_len]
    workload = synth_agentic(seed=1, trajectories=1000, max_len=max_len)
    stats = workload_stats(workload)
    for name in ("turns", "append", "gen", "total", "context"):
        assert_within(getattr(stats, name), getattr(published, name), rel=0.06, what=name)
    assert stats.max_total <= max_len
    assert stats.hit_ratio > 0.95


def test_the_spread_over_trajectories_is_as_wide_as_studied() -> None:
    """At 64K: turns at p10 34, p50 127, p90 322, p99 616; 4.9 to 5.15 M context tokens; a quarter ends early."""
    workload = synth_agentic(seed=1, trajectories=2000, max_len=65_536)
    turns = [len(trajectory.turns) for trajectory in workload.trajectories]
    for percent, studied in ((10, 34), (50, 127), (90, 322), (99, 616)):
        assert_within(float(np.percentile(turns, percent)), studied, rel=0.15, what=f"p{percent} of turns")
    _, context, generated = _sums(workload)
    assert_within(context, 5.05e6, rel=0.06, what="context tokens a trajectory")
    assert_within(generated, 16_600, rel=0.08, what="generated tokens a trajectory")
    early = np.mean([trajectory.turns[-1].total_tokens < 0.9 * 65_536 for trajectory in workload.trajectories])
    assert_within(float(early), 0.27, absolute=0.05, what="share that ends early")


def test_scale_multiplies_all_lengths() -> None:
    """At an eighth, contexts stay below an eighth of MaxLen and the number of turns is about the same."""
    full = workload_stats(synth_agentic(1, 500, 32_768))
    small = workload_stats(synth_agentic(1, 500, 32_768, 1 / 8))
    assert small.max_total <= 4096
    assert_within(small.turns, full.turns, rel=0.05, what="turns")
    assert_within(small.append * 8, full.append, rel=0.05, what="append")


def test_a_seed_decides_everything() -> None:
    """Equal seeds give equal workloads, other seeds other lengths and tokens."""
    assert synth_agentic(1, 3) == synth_agentic(1, 3)
    assert synth_io_bound(1, 3, 2) == synth_io_bound(1, 3, 2)
    assert synth_hbm_bound(1, 3, 2) == synth_hbm_bound(1, 3, 2)
    first, second = synth_io_bound(1, 1, 1), synth_io_bound(2, 1, 1)
    assert not np.array_equal(first.trajectories[0].prompt(0)[:64], second.trajectories[0].prompt(0)[:64])


def test_io_bound_lengths_stay_in_their_ranges() -> None:
    """Contexts of 32K and more from the first prompt on, short appends, short generations."""
    workload = synth_io_bound(3, 20, 5, append=(64, 200), gen=(1, 16))
    for trajectory in workload.trajectories:
        assert len(trajectory.turns) == 5
        assert 32_768 <= trajectory.turns[0].prompt_tokens <= 34_816
        assert all(64 <= trajectory.append_tokens(turn) <= 200 for turn in range(1, 5))
        assert all(1 <= turn.output_tokens <= 16 for turn in trajectory.turns)


def test_hbm_bound_appends_are_short_or_long() -> None:
    """Every append is in one of the two ranges, and the long ones come up as often as asked."""
    workload = synth_hbm_bound(3, 200, 6, append=(64, 200), long_append=(1_500, 2_500), long_share=0.25)
    appends = [t.append_tokens(turn) for t in workload.trajectories for turn in range(1, 6)]
    assert all(64 <= append <= 200 or 1_500 <= append <= 2_500 for append in appends)
    # 1,000 draws: a standard deviation of 1.4 points.
    assert_within(sum(append >= 1_500 for append in appends) / len(appends), 0.25, absolute=0.05, what="long")


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_share_of_none_or_all_is_none_or_all(share: float) -> None:
    """At the ends of its range the share decides every append."""
    workload = synth_hbm_bound(1, 10, 4, long_share=share)
    appends = [t.append_tokens(turn) for t in workload.trajectories for turn in range(1, 4)]
    assert {append >= 1_500 for append in appends} == {bool(share)}


def test_what_cannot_be_made_is_refused() -> None:
    """Counts, scales and ranges that make no workload are one clear line."""
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: synth_agentic(1, 0), "trajectories 0"),
        (lambda: synth_agentic(1, 1, 1000), "max_len 1000"),
        (lambda: synth_agentic(1, 1, scale=0.0), "scale 0"),
        (lambda: synth_agentic(1, 1, scale=float("nan")), "scale nan"),
        (lambda: synth_io_bound(1, 1, 0), "turns 0"),
        (lambda: synth_io_bound(1, 10**9, 1), "trajectories 1000000000"),
        (lambda: synth_io_bound(1, 1, 2, append=(2**24, 2**24)), "of turn 2, a context of"),
        (lambda: synth_agentic(1, 10**9), "trajectories 1000000000"),
        (lambda: synth_io_bound(1, 1, 1, gen=(5, 4)), "gen 5 to 4"),
        (lambda: synth_hbm_bound(1, 1, 1, long_append=(9, 8)), "long_append 9 to 8"),
        (lambda: synth_hbm_bound(1, 1, 1, long_share=float("nan")), "long_share nan"),
        (lambda: synth_hbm_bound(1, 0, 1), "trajectories 0"),
        (lambda: load_sample("agentik"), "sample 'agentik'"),
    ]
    for act, said in refused:
        with pytest.raises(ConfigError, match=said):
            act()


@pytest.mark.parametrize("name", SAMPLES)
def test_a_bundled_sample_is_what_the_synthesiser_makes(name: str) -> None:
    """The file's bytes are reproduced, and reading it gives the workload that was made; it stays small."""
    made = make_sample(name)
    data = resources.files("emulator.samples").joinpath(f"{name}.jsonl").read_bytes()
    assert data == native_bytes(made)
    assert load_sample(name) == made
    assert len(data) < 100_000


def test_the_agentic_sample_is_agentic() -> None:
    """Almost every prompt token was there before; contexts fit the toy's 4K."""
    stats = workload_stats(load_sample("agentic"))
    assert stats.hit_ratio > 0.95
    assert stats.max_total <= 4096


def test_the_io_bound_sample_reads_much_and_generates_little() -> None:
    """32 agents or more; contexts of 32K and more; short appends; at most 16 tokens generated."""
    workload = load_sample("io-bound")
    assert len(workload.trajectories) >= 32
    turns = [turn for trajectory in workload.trajectories for turn in trajectory.turns]
    assert min(turn.prompt_tokens for turn in turns) >= 32_768
    assert 1 < max(turn.output_tokens for turn in turns) <= 16
    later = [t.append_tokens(index) for t in workload.trajectories for index in range(1, len(t.turns))]
    assert max(later) <= 200


def test_one_hbm_bound_context_fits_a_gpu_and_two_do_not() -> None:
    """Whole, as without layerwise prefill: every context is over half of a PE's HBM by default, none over all."""
    hbm_tokens = EngineConfig().pe_hbm_kv_gb * 1e9 / load_shape("ds660b").kv_bytes_per_token
    prompts = [turn.prompt_tokens for t in load_sample("hbm-bound").trajectories for turn in t.turns]
    assert hbm_tokens / 2 < min(prompts) <= max(prompts) < hbm_tokens
