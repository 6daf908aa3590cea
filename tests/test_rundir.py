"""Laws of the run directory: what is written is read back, what is damaged is named, the report follows."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from emulator import report, rundir, verify
from emulator.errors import ConfigError, EmulatorError
from emulator.judge import Verdict, judge_virtual
from emulator.sim import simulate
from emulator.verify import Evidence
from emulator.workload import Workload

from .clusters import config as small_config
from .clusters import conversation, expected_tokens
from .made_run import evidence, finished, replace_node
from .within import assert_within


@pytest.mark.parametrize("fabric", ["tcp", "fluid"])
def test_a_run_directory_is_read_back_exactly(tmp_path: Path, fabric: str) -> None:
    """What is written is what is read, so that a later verification sees what the run saw."""
    hosts = fabric == "tcp"
    run = finished(
        fabric=fabric,
        evidence=evidence(hosts=hosts),
        verdict=Verdict("invalid", False, ("why",), 12.5) if hosts else judge_virtual(),
        kernel=finished().kernel if hosts else None,
    )
    written = rundir.write_run_dir(tmp_path, run)
    again = rundir.read_run_dir(tmp_path)
    assert again == run
    assert report.build_report(again) == written == json.loads((tmp_path / "report.json").read_bytes())


def test_a_request_without_a_record_is_not_forgotten(tmp_path: Path) -> None:
    """A run that lost a request is still found out from its directory."""
    made = evidence()
    lost = msgspec.structs.replace(made, expected={**made.expected, "ghost": (1, 2)})
    stray = replace_node(
        lost, "st1", ports=(msgspec.structs.replace(made.records.nodes[3].ports[0], nic="snic9"),)
    )
    rundir.write_run_dir(tmp_path, finished(evidence=stray))
    again = rundir.read_run_dir(tmp_path)
    assert again.evidence == stray
    assert verify.verify(again.evidence) == verify.verify(stray)


def test_the_report_tells_nothing_of_the_host(tmp_path: Path) -> None:
    """The same run on a slower host and in another directory has the same report, byte for byte."""
    for name, wall_s in (("a", 1.0), ("b", 99.0)):
        (tmp_path / name).mkdir()
        rundir.write_run_dir(tmp_path / name, finished(wall_s=wall_s))
    one, other = ((tmp_path / name / "report.json").read_bytes() for name in "ab")
    assert one == other
    assert str(tmp_path).encode() not in one
    assert b"wall" not in one


def test_decisions_are_read_from_a_run_or_its_file(tmp_path: Path) -> None:
    """What another run decided, and how it composed its batches, comes back in its order."""
    rundir.write_run_dir(tmp_path, finished())
    decisions = rundir.read_decisions(tmp_path)
    nodes = {n.node: n for n in evidence().records.nodes}
    assert decisions.requests == nodes["sched"].decisions
    assert decisions.batches == nodes["pe0"].batches
    assert rundir.read_decisions(tmp_path / "decisions.jsonl") == decisions


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("requests.jsonl", b"{}\n", r"requests\.jsonl:1: "),
        ("decisions.jsonl", b'{"kind":"guess"}\n', r"decisions\.jsonl:1: "),
        ("ports.jsonl", b"\xff\xfe\n", r"ports\.jsonl:1: "),
        ("nodes.jsonl", b"\x00", r"nodes\.jsonl:1: "),
        ("host.json", b"", r"host\.json: "),
        ("run.json", b'{"format": 2}', r"run\.json: "),
        ("config.toml", b"topology = 1", r"config\.toml: "),
        ("config.toml", b"\xff", r"config\.toml: "),
        *((name, b"[" * 100_000, name) for name in ("host.json", "run.json", "requests.jsonl")),
        *(
            (name, b'{"node":' * 100_000, name)
            for name in ("host.json", "run.json", "requests.jsonl", "nodes.jsonl")
        ),
        ("config.toml", b"a = " + b"[" * 100_000, r"config\.toml: "),
    ],
)
def test_a_damaged_run_is_a_users_error(tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
    """Every file that cannot be understood is named, with the line where it has lines; one line, exit 2."""
    rundir.write_run_dir(tmp_path, finished())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=complaint) as caught:
        rundir.read_run_dir(tmp_path)
    assert "\n" not in caught.value.text


@pytest.mark.parametrize(
    ("name", "old", "new", "complaint"),
    [
        ("ports.jsonl", '"rate_bps":20000.0', '"rate_bps":0', r"ports\.jsonl:1: .*rate_bps 0"),
        ("ports.jsonl", '"rate_bps":20000.0', '"rate_bps":-1', r"ports\.jsonl:1: .*rate_bps -1"),
        ("ports.jsonl", '"window_s":1.0', '"window_s":0', r"ports\.jsonl:\d+: .*window_s 0"),
        ("ports.jsonl", '"window_s":1.0', '"window_s":2.0', r"ports\.jsonl: window_s .*one width"),
        ("nodes.jsonl", '"transfer":"PE_READ"', '"transfer":"PE_RAED"', r"nodes\.jsonl:\d+: .*PE_RAED.*PE_READ"),
        ("run.json", '"kv_bytes": 4', '"kv_bytes": 8', r"run\.json: kv_bytes"),
    ],
)
def test_a_value_that_no_run_has_is_a_users_error(
    tmp_path: Path, name: str, old: str, new: str, complaint: str
) -> None:
    """What parses and is yet impossible is refused where it is read, not met as a traceback later."""
    rundir.write_run_dir(tmp_path, finished())
    text = (tmp_path / name).read_text()
    assert old in text
    (tmp_path / name).write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=complaint) as caught:
        rundir.read_run_dir(tmp_path)
    assert "\n" not in caught.value.text


def test_a_report_follows_from_its_records(tmp_path: Path) -> None:
    """Every figure that is changed or left out is named; so is one whose records, rates or scale were changed."""
    written = rundir.write_run_dir(tmp_path, finished())
    assert rundir.report_as_counted(tmp_path, rundir.read_run_dir(tmp_path)).ok
    for key in written.keys() - {"config", "invariants"}:
        for other in (written | {key: "other"}, {k: v for k, v in written.items() if k != key}):
            (tmp_path / "report.json").write_text(json.dumps(other))
            found = rundir.report_as_counted(tmp_path, rundir.read_run_dir(tmp_path))
            assert not found.ok and found.detail.endswith(f" {key}")
    (tmp_path / "report.json").write_text(json.dumps(written))
    for name, old, new, key in (
        ("ports.jsonl", '"rate_bps":20000.0', '"rate_bps":20001.0', "utilisation"),
        ("run.json", '"model_kv_bytes": ', '"model_kv_bytes": 1', "steps_bytes"),
        ("run.json", '"t0_s": ', '"t0_s": 1', "jct_s"),
    ):
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text.replace(old, new))
        found = rundir.report_as_counted(tmp_path, rundir.read_run_dir(tmp_path))
        assert not found.ok and key in found.detail
        (tmp_path / name).write_text(text)


def test_no_report_or_no_json_is_named(tmp_path: Path) -> None:
    """A report that cannot be read is a user's error like any other file of the directory."""
    rundir.write_run_dir(tmp_path, finished())
    run = rundir.read_run_dir(tmp_path)
    for content in (b"", b"[]", b"[" * 100_000, None):
        (tmp_path / "report.json").unlink()
        if content is not None:
            (tmp_path / "report.json").write_bytes(content)
        with pytest.raises(ConfigError, match=r"report\.json: "):
            rundir.report_as_counted(tmp_path, run)


@pytest.mark.parametrize("name", ["run.json", "host.json", "requests.jsonl", "nodes.jsonl", "ports.jsonl"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    """A directory that is no whole run says which file it lacks."""
    rundir.write_run_dir(tmp_path, finished())
    (tmp_path / name).unlink()
    with pytest.raises(ConfigError, match=name):
        rundir.read_run_dir(tmp_path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    """A run directory of another version is not guessed at."""
    rundir.write_run_dir(tmp_path, finished())
    text = (tmp_path / "run.json").read_text()
    (tmp_path / "run.json").write_text(text.replace('"format": 3', '"format": 4'))
    with pytest.raises(ConfigError, match="format 4, this version reads 3"):
        rundir.read_run_dir(tmp_path)


def test_no_run_is_written_over_another(tmp_path: Path) -> None:
    """A directory that holds a run is refused before the next one begins; an empty or new one is not."""
    out = tmp_path / "deep" / "run"
    assert rundir.claim_run_dir(out) == (out, out.parent)
    assert rundir.claim_run_dir(out) == ()
    rundir.write_run_dir(out, finished())
    with pytest.raises(ConfigError, match="holds a run already"):
        rundir.claim_run_dir(out)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        rundir.claim_run_dir(tmp_path / "file")
    with pytest.raises(ConfigError, match="empty directory or a new one"):
        rundir.claim_run_dir(tmp_path)


def test_a_disk_that_takes_nothing_is_named(tmp_path: Path) -> None:
    """A file that cannot be written is an error that names it, not a traceback."""
    (tmp_path / "ports.jsonl").mkdir()
    with pytest.raises(EmulatorError, match=r"ports\.jsonl: cannot be written"):
        rundir.write_run_dir(tmp_path, finished())


def test_the_same_seed_gives_the_same_report(tmp_path: Path) -> None:
    """Two runs in virtual time of one configuration, workload and seed: the same report.json, byte for byte."""
    workload = Workload((conversation("long", (900, 20), (70, 5)), conversation("short", (200, 9), (64, 3))))
    config = small_config(path="auto", agents=2, seed=5)
    for name in "ab":
        (tmp_path / name).mkdir()
        run = Evidence(
            setup=report.setup_of(config, "fluid"),
            records=simulate(config, workload),
            expected=expected_tokens(config, workload),
        )
        made = finished(config=config, fabric="fluid", evidence=run, verdict=judge_virtual(), kernel=None)
        assert rundir.write_run_dir(tmp_path / name, made)["invariants"]["broken"] == []
        assert rundir.read_run_dir(tmp_path / name) == made
    one, other = ((tmp_path / name / "report.json").read_bytes() for name in "ab")
    assert one == other


def _summary(values: list[float]) -> dict[str, float]:
    """What numpy makes of the values."""
    points = {f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 95, 99)}
    return {"mean": float(np.mean(values)), **points, "max": max(values), "count": len(values)}


def _assert_same(got: dict[str, float], expected: dict[str, float], what: str) -> None:
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert_within(got[key], float(value), rel=1e-9, what=f"{what} {key}")


@pytest.mark.parametrize("path", ["pe", "de", "auto"])
def test_figures_are_what_the_rows_on_disk_say(tmp_path: Path, path: str) -> None:
    """Latencies, their parts, hits and step bytes, computed anew from requests.jsonl with numpy."""
    agents = (
        conversation("a", (900, 20), (70, 5)),
        conversation("b", (200, 9), (64, 0), (3, 1)),
        conversation("c", (64, 1)),
    )
    config, workload = small_config(path=path, agents=3, warm=True), Workload(agents)
    setup = report.setup_of(config, "fluid")
    run = Evidence(setup=setup, records=simulate(config, workload), expected=expected_tokens(config, workload))
    written = rundir.write_run_dir(
        tmp_path, finished(config=config, fabric="fluid", evidence=run, verdict=judge_virtual(), kernel=None)
    )
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    told = [row for row in rows if row["output_tokens"]]
    paced = [row for row in told if row["output_tokens"] > 1]
    figures = {
        "ttft_s": [row["first_token_s"] - row["arrived_s"] for row in told],
        "e2e_s": [row["last_token_s"] - row["arrived_s"] for row in told],
        "tpot_s": [(row["last_token_s"] - row["first_token_s"]) / (row["output_tokens"] - 1) for row in paced],
        "itl_s": [gap for row in paced for gap, count in row["token_gaps"] for _ in range(count)],
        "ttst_s": [row["token_gaps"][0][0] for row in paced],
        "itl_max_s": [max(gap for gap, _ in row["token_gaps"]) for row in paced],
    }
    for name, values in figures.items():
        _assert_same(written[name], _summary(values), name)
    t0_s = json.loads((tmp_path / "run.json").read_text())["t0_s"]
    ratios = {"jct_s": max(row["last_token_s"] for row in told) - t0_s}
    stamps = ("arrived_s", "eligible_s", "scheduled_s", "allocated_s", "read_s", "computed_s", "transferred_s")
    spent = np.diff([[row[name] for name in (*stamps, "first_token_s")] for row in told]).mean(axis=0)
    parts = dict(
        zip(("scheduling", "reading", "prefill", "transfer", "first_decode"), spent[[1, 3, 4, 5, 6]], strict=True)
    )
    _assert_same(written["ttft_breakdown_s"], parts | {"allocating": spent[0] + spent[2]}, "parts of TTFT")
    ratios["reading_share"] = parts["reading"] / spent.sum()
    hit, prompt = (sum(row[name] for row in rows) for name in ("hit_tokens", "prompt_tokens"))
    ratios["hit_ratio"] = hit / prompt
    _assert_same({name: written[name] for name in ratios}, ratios, "a ratio")
    token_bytes = 61 * 704
    by_path = {
        side: [sum(row[name] for row in rows if row["path"] == side) for name in ("hit_tokens", "prompt_tokens")]
        for side in ("pe", "de")
    }
    for step, moved in {
        **dict.fromkeys(("pe1", "pe2", "pe3", "pe4"), by_path["pe"][0]),
        **dict.fromkeys(("pe5", "pe6", "pe7", "pe8", "pe9"), by_path["pe"][1]),
        **dict.fromkeys(("de1", "de2", "de3", "de4", "de5"), by_path["de"][0]),
        **dict.fromkeys(("de6", "de7"), by_path["de"][1]),
        "de_miss": by_path["de"][1] - by_path["de"][0],
        "persist": sum(
            (row["prompt_tokens"] + row["output_tokens"]) // 64 * 64 - row["hit_tokens"] for row in rows
        ),
    }.items():
        assert written["steps_bytes"][step] == moved * token_bytes, step
