"""`emulate profile`: what it prints is what the scheduler is told, and every mistake is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from emulator.cli import main
from emulator.cli.options import load_run
from emulator.deployment import Deployment
from emulator.experts import layer_volume

from .within import assert_within


def _run(*argv: str) -> Result:
    return CliRunner().invoke(main, ("profile", *argv), prog_name="emulate")


def _json(*argv: str) -> Any:
    done = _run(*argv, "--json")
    assert done.exit_code == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def _topology(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text('[cluster]\nname = "mine"\npe_nodes = 2\nde_nodes = 1\ngpus_per_node = 4\n' + text)
    return str(path)


def test_it_prints_what_the_scheduler_is_told(tmp_path: Path) -> None:
    """alpha, beta and the fit are the deployment's own; the file's [engine] table counts."""
    topology = _topology(tmp_path, "[engine]\nalpha_s = 1.5\nhardware_seed = 7\n")
    shown = _json(topology)
    setup = Deployment(load_run(topology)).policy_setup
    predictor = Deployment(load_run(topology)).profile.predictor
    assert (shown["alpha"]["tokens"], shown["beta"]["tokens"]) == (setup.alpha_tokens, setup.beta_tokens)
    assert shown["alpha"]["seconds"] == 1.5
    assert shown["fit"]["max_error"] == predictor.max_error > 0
    assert shown["fit"]["flop_factor"] == predictor.flop_factor
    assert_within(
        shown["alpha"]["tokens_per_s"] * (1 + shown["alpha"]["measured"]["difference"]),
        shown["alpha"]["measured"]["tokens_per_s"],
        rel=1e-9,
    )
    assert shown["alpha"]["measured"]["blocks"] > 2000
    assert_within(shown["alpha"]["measured"]["difference"], 0, absolute=0.01)


def test_chunks_fill_the_quota(tmp_path: Path) -> None:
    """No chunk passes the quota as predicted; one token more would; longer contexts leave smaller ones."""
    topology = _topology(tmp_path, "[engine]\nquota_s = 0.1\n")
    shown = _json(topology)
    predictor = Deployment(load_run(topology)).profile.predictor
    sizes = [chunk["new"] for chunk in shown["chunks"]]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) == 5
    for chunk in shown["chunks"]:
        assert chunk["predicted_s"] <= 0.1 < predictor.attention_s([(chunk["cached"], chunk["new"] + 1)])
        assert_within(chunk["taken_s"], chunk["predicted_s"], rel=0.08)


def test_expert_traffic_is_of_each_group(tmp_path: Path) -> None:
    """Two prefill nodes exchange over the CNICs, one decode node over NVLink; a dense model nothing."""
    topology = _topology(tmp_path, "")
    pe, de = _json(topology)["experts"]
    experts = Deployment(load_run(topology)).shape.experts
    assert experts is not None
    volume = layer_volume(experts, 1, nodes=2, gpus=8, over="nvlink")
    assert (pe["nodes"], pe["gpus"], pe["nvlink_bytes"]) == (2, 8, volume.nvlink_bytes)
    assert pe["cnic_bytes"] == volume.cnic_bytes > 0
    assert (de["nodes"], de["gpus"], de["cnic_bytes"]) == (1, 4, 0)
    assert de["cnic_bytes_over_cnic"] == de["nvlink_bytes"] > 0
    assert _json(topology, "--model", "qwen32b")["experts"] == []


def test_the_page_shows_what_is_printed() -> None:
    """The example in docs/profile.md is the command's output."""
    page = (Path(__file__).parents[1] / "docs" / "profile.md").read_text()
    example = page.split("```\n")[1]
    assert [line.rstrip() for line in _run("2p4d").stdout.splitlines()] == example.splitlines()


def test_the_printed_profile_names_its_numbers() -> None:
    """The figures of the JSON object are in what people read; a dense model's experts are not."""
    shown = _json("1p1d", "--model", "qwen32b")
    printed = " ".join(_run("1p1d", "--model", "qwen32b").stdout.split())
    assert f"alpha = {shown['alpha']['tokens']:,} tokens" in printed
    assert f"beta = {shown['beta']['tokens']:,} tokens" in printed
    assert f"{shown['fit']['mean_error']:.1%} on average and {shown['fit']['max_error']:.1%} at most" in printed
    assert f"{shown['chunks'][2]['new']:,}" in printed
    assert "exchange no tokens" in printed


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    """An unknown topology or model, and a measured table with too little to profile from: exit 2."""
    costs = tmp_path / "costs.csv"
    costs.write_text("cached,bsz,ms\n0,1,50\n0,8192,5000\n")
    small = _topology(tmp_path, f'[model]\ncosts = "{costs}"\n')
    for argv, error in (
        (("9p9p",), "9p9p"),
        (("1p1d", "--model", "ds660"), "did you mean ds660b?"),
        ((small,), "costs.csv: too few rows to profile attention from"),
    ):
        done = _run(*argv)
        assert done.exit_code == 2, done.output
        assert error in done.stderr and done.stderr.count("\n") == 1
        assert done.stdout == ""
