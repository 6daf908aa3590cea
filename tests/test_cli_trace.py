"""`emulate trace` and `emulate analyze`: results on stdout, one line on stderr for a mistake."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from emulator.cli import main
from emulator.samples import load_sample
from emulator.synth import synth_agentic, synth_io_bound
from emulator.traces import native_bytes, read_trace

from .within import assert_within


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


def emulate(*args: str) -> Outcome:
    result = CliRunner().invoke(main, list(args))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr)


def refused(*args: str) -> str:
    outcome = emulate(*args)
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    assert outcome.err.startswith("emulate: ")
    assert len(outcome.err.splitlines()) == 1
    return outcome.err


def test_synth_writes_what_the_synthesiser_makes(tmp_path: Path) -> None:
    """To stdout or to a file, plain or compressed, the bytes are native_bytes of the workload."""
    made = native_bytes(synth_agentic(3, 2, 32_768, 0.05))
    args = (
        "trace",
        "synth",
        "agentic",
        "--seed",
        "3",
        "--trajectories",
        "2",
        "--max-len",
        "32768",
        "--scale",
        "0.05",
    )
    assert emulate(*args).out.encode() == made
    plain, small = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    outcome = emulate(*args, "--out", str(plain))
    assert (outcome.code, outcome.out, plain.read_bytes()) == (0, "", made)
    assert emulate(*args, "--out", str(small)).code == 0
    assert gzip.decompress(small.read_bytes()) == made
    io_bound = ("trace", "synth", "io-bound", "--trajectories", "2", "--turns", "3")
    assert emulate(*io_bound).out.encode() == native_bytes(synth_io_bound(1, 2, 3))


def test_stats_of_a_sample_and_of_its_file_agree(tmp_path: Path) -> None:
    """A sample needs no format; --json is one object with the table's figures."""
    path = tmp_path / "agentic.jsonl"
    path.write_bytes(native_bytes(load_sample("agentic")))
    of_sample = json.loads(emulate("trace", "stats", "agentic", "--json").out)
    of_file = json.loads(emulate("trace", "stats", str(path), "--trace-format", "native", "--json").out)
    assert of_sample == of_file
    assert of_sample["requests"] == load_sample("agentic").requests
    assert of_sample["hit_ratio"] > 0.95
    assert of_sample["store_bytes"] == of_sample["distinct_tokens"] * 42_944
    human = emulate("trace", "stats", "agentic")
    assert human.code == 0
    assert f"{of_sample['requests']:,}" in human.out


def test_cut_trajectories_and_notes_are_said(tmp_path: Path) -> None:
    """What --max-len leaves out and what the reader noticed is told, on stderr for a person."""
    path = tmp_path / "trace.jsonl"
    rows = [(10, 5, 5), (0, 100, 0), (20, 7, 1)]
    path.write_text(
        "".join(f'{{"timestamp": {t}, "input_length": {i}, "output_length": {o}}}\n' for t, i, o in rows)
    )
    args = ("trace", "stats", str(path), "--trace-format", "mooncake", "--max-len", "50")
    notes = json.loads(emulate(*args, "--json").out)["notes"]
    assert notes == {"out_of_order": 1, "zero_outputs": 1, "left_out": 1}
    assert emulate(*args).err.splitlines() == [
        "trace: 1 out of order",
        "trace: 1 zero outputs",
        "trace: 1 trajectories left out, because they start beyond --max-len",
    ]


def test_convert_keeps_lengths_times_and_tokens(tmp_path: Path) -> None:
    """Converting to native and reading back gives the trace's own workload."""
    path, out = tmp_path / "trace.jsonl", tmp_path / "out.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2], "session_id": "a"}\n'
        '{"delay": 5, "input_length": 700, "output_length": 5, "hash_ids": [1, 3], "session_id": "a"}\n'
    )
    assert emulate("trace", "convert", str(path), "--trace-format", "mooncake", "--out", str(out)).code == 0
    assert read_trace(out, "native").workload == read_trace(path, "mooncake").workload
    assert emulate("trace", "convert", str(out), "--trace-format", "native").out.encode() == out.read_bytes()


def test_cumulative_and_delta_convert_to_the_same_bytes(tmp_path: Path) -> None:
    """One session told in both dialects is one native trace."""
    first = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2], "session_id": "a"}\n'
    path = tmp_path / "trace.jsonl"
    converted = []
    for trace_format, length, ids in (("mooncake", 1205, "[1, 3, 4]"), ("mooncake-delta", 600, "[8, 9]")):
        path.write_text(
            f'{first}{{"delay": 5, "input_length": {length}, "output_length": 5, "session_id": "a",'
            f' "hash_ids": {ids}}}'
        )
        converted.append(emulate("trace", "convert", str(path), "--trace-format", trace_format).out)
    assert converted[0] == converted[1]


@pytest.mark.parametrize("name", ["[/nope]", "[bold]loud"])
def test_a_traces_name_is_text(tmp_path: Path, name: str) -> None:
    """Brackets in a name are printed as they stand, never read as markup."""
    path = tmp_path / "trace.jsonl"
    head = json.dumps({"emulate_trace": 1, "name": name})
    path.write_text(
        head + '\n{"id": "a", "turns": [{"prompt_tokens": 100, "output_tokens": 2, "arrival_s": 0}]}\n'
    )
    for command in (("trace", "stats"), ("analyze", "1p1d", "--trace")):
        outcome = emulate(*command, str(path), "--trace-format", "native")
        assert outcome.code == 0, outcome
        assert name in outcome.out


def test_analyze_prints_the_offered_load_with_its_formula() -> None:
    """For people the formula and the figure; as JSON the same figure, at least 2 on one SNIC when warm."""
    human = emulate("analyze", "1p1d", "--warm", "--trace", "io-bound")
    result = json.loads(emulate("analyze", "1p1d", "--warm", "--trace", "io-bound", "--json").out)
    (warm,) = result["offered_load"]
    assert warm["snic_offered"]["pe"] >= 2
    assert_within(warm["snic_offered"]["pe"], warm["read_bytes"] / 50e9 / warm["free_s"], rel=1e-9)
    assert f"{warm['snic_offered']['pe']:.2f} x what it can carry" in " ".join(human.out.split())
    assert "offered = seconds of a resource that all requests need" in " ".join(human.out.split())
    assert result["bottleneck_free"]["holds"]
    assert_within(result["bottleneck_free"]["ratio_low"], 1 / 7, rel=1e-9)


def test_analyze_weighs_warm_and_cold_and_as_many_agents_as_asked() -> None:
    """Without --warm or --cold both are given; --agents beyond the trace repeats trajectories."""
    result = json.loads(emulate("analyze", "2p4d", "--agents", "40", "--json").out)
    assert [report["warm"] for report in result["offered_load"]] == [True, False]
    assert all(report["agents"] == 40 for report in result["offered_load"])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("trace", "stats", "nothing"), "expected --trace-format"),
        (("trace", "stats", "nothing", "--trace-format", "native"), "nothing: not readable"),
        (("trace", "stats", "nothing", "--trace-format", "csv"), "expected one of weka"),
        (("trace", "stats", "agentic", "--max-len", "10"), "starts longer"),
        (("trace", "stats", "agentic", "--max-len", "0"), "max_len 0"),
        (("trace", "stats", "agentic", "--block-tokens", "32"), "block_tokens 32"),
        (("trace", "stats", "a" * 5000, "--trace-format", "weka"), "not readable"),
        (("trace", "stats", "agentic", "--model", "ds661b"), "ds660b"),
        (("trace", "synth", "agentic", "--max-len", "0"), "max_len 0"),
        (("trace", "synth", "agentic", "--scale", "2"), "scale 2"),
        (("trace", "synth", "agentic", "--scale", "nan"), "scale nan"),
        (("trace", "synth", "agentic", "--turns", "2"), "--turns"),
        (("trace", "synth", "agentic", "--trajectories", "0"), "trajectories 0"),
        (("trace", "synth", "agentic", "--seed", "-1"), "--seed -1"),
        (("trace", "synth", "io-bound", "--scale", "0.5"), "--max-len and --scale"),
        (("trace", "synth", "io-bound", "--out", "/nowhere/at/all"), "not writable"),
        (("trace", "synth", "random"), "random"),
        (("trace", "convert", "/dev/null", "--trace-format", "azure"), "expected a regular file"),
        (("analyze", "1p1e"), "did you mean 1p1d"),
        (("analyze", "1p1d", "--agents", "0"), "agents 0"),
        (("analyze", "1p1d", "--trace", "x"), "expected --trace-format"),
        (("analyze", "1p1d", "--seed", "-1"), "--seed -1"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(args: tuple[str, ...], said: str) -> None:
    """Never a traceback, nothing on stdout."""
    assert said in refused(*args)


def test_help_loads_nothing_heavy() -> None:
    """The commands' modules import neither numpy nor torch, rich or pyroute2."""
    code = (
        "import sys; import emulator.cli.trace, emulator.cli.analyze;"
        "heavy = {'numpy', 'torch', 'rich', 'pyroute2', 'trio'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
