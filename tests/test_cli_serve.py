"""`sim` and `verify` end to end, and what all replaying commands refuse before they begin."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from emulator.cli import main
from emulator.models.backend import State
from emulator.models.digest import DigestBackend
from emulator.traces import write_native
from emulator.workload import Workload
from tests.clusters import conversation
from topology import spec


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The options that name a trace of two short conversations."""
    path = tmp_path_factory.mktemp("trace") / "small.jsonl"
    write_native(Workload((conversation("a", (300, 5), (70, 3)), conversation("b", (130, 64), (1, 2)))), path)
    return ("--trace", str(path), "--trace-format", "native")


def _run(*argv: str) -> Result:
    return CliRunner().invoke(main, argv, prog_name="emulate")


def _json(*argv: str) -> Any:
    done = _run(*argv, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def test_sim_compares_and_keeps_runs_that_verify(tmp_path: Path, small: tuple[str, ...]) -> None:
    """One entry a path in the order given, one directory each, every invariant holds when read back."""
    runs = _json("sim", "1p1d", *small, "--path", "de", "--path", "pe", "--out", str(tmp_path / "out"))["runs"]
    assert [(run["system"], run["path"], run["fabric"]) for run in runs] == [
        ("dualpath", "de", "fluid"),
        ("dualpath", "pe", "fluid"),
    ]
    for run in runs:
        assert run["tokens_equal"] is True and run["verdict"] == "valid"
        assert run["path_share"][run["path"]] == 1
        findings = _json("verify", run["out"])
        assert findings["ok"] and all(finding["ok"] for finding in findings["findings"])
    table = _run("sim", "1p1d", *small).stdout
    assert "dualpath" in table and "equal" in table and "valid" in table


def test_the_same_simulation_gives_the_same_report(tmp_path: Path, small: tuple[str, ...]) -> None:
    """Byte for byte, and no wall clock or path in it."""
    reports = []
    for name in ("a", "b"):
        _json("sim", "1p1d", *small, "--seed", "3", "--out", str(tmp_path / name))
        reports.append((tmp_path / name / "report.json").read_bytes())
    assert reports[0] == reports[1]
    assert str(tmp_path).encode() not in reports[0]


def test_decisions_can_be_repeated(tmp_path: Path, small: tuple[str, ...]) -> None:
    """A run with another's decisions takes every path as that one did."""
    first, second = tmp_path / "first", tmp_path / "second"
    _json("sim", "1p1d", *small, "--path", "de", "--out", str(first))
    again = _json("sim", "1p1d", *small, "--decisions", str(first), "--out", str(second))
    assert again["runs"][0]["path_share"] == {"pe": 0, "de": 1}


def test_a_changed_record_is_found(tmp_path: Path, small: tuple[str, ...]) -> None:
    """One wrong token in a finished run: exit 4 and the invariant's name."""
    out = tmp_path / "out"
    _json("sim", "1p1d", *small, "--out", str(out))
    lines = (out / "requests.jsonl").read_text().splitlines()
    row = json.loads(lines[0])
    row["model_tokens"][0] ^= 1
    (out / "requests.jsonl").write_text("\n".join([json.dumps(row), *lines[1:]]) + "\n")
    done = _run("verify", str(out))
    assert done.exit_code == 4
    assert "BROKEN" in done.stdout


def test_a_changed_report_is_found(tmp_path: Path, small: tuple[str, ...]) -> None:
    """One wrong figure in the report of a sound run: exit 4 and the figure's name. No report at all: exit 2."""
    path = tmp_path / "report.json"
    _json("sim", "1p1d", *small, "--out", str(tmp_path))
    written = json.loads(path.read_text())
    path.write_text(json.dumps(written | {"jct_s": written["jct_s"] + 1e-9}))
    done = _run("verify", str(tmp_path))
    assert done.exit_code == 4 and "jct_s" in done.stdout
    path.unlink()
    done = _run("verify", str(tmp_path))
    assert done.exit_code == 2 and "report.json" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--agents", "2", "--aps", "1"), "--aps"),
        (("--aps", "nan"), "aps"),
        (("--agents", "0"), "--agents"),
        (("--max-len", "1"), "starts longer than that"),
        (("--trace", "no/such/file"), "--trace-format"),
        (("--trace", "no/such/file", "--trace-format", "weka"), "no/such/file"),
        (("--trace", "agentic", "--trace-format", "weka"), "bundled"),
        (("--path", "both"), "--path"),
        (("--system", "sglang"), "--system"),
        (("--decisions", "no/such/run"), "no/such/run"),
        (("--decisions", "no/such/run", "--policy", "round-robin"), "--policy"),
        (("--think", "hard"), "--think"),
    ],
)
def test_bad_replay_options_are_refused(options: tuple[str, ...], said: str) -> None:
    """Exit 2 and one line that names the option or the file."""
    done = _run("sim", "1p1d", *options)
    assert done.exit_code == 2, done.output
    assert said in done.stderr and done.stderr.count("\n") == 1


def _with_cache(folder: Path, gigabytes: float | str) -> str:
    """A copy of the preset whose nodes have caches of so many gigabytes."""
    preset = Path(spec.__file__).parent / "presets" / "1p1d.toml"
    path = folder / "cached.toml"
    path.write_text(f"{preset.read_text()}\n[engine]\nprefix_cache_gb = {gigabytes}\n")
    return str(path)


def test_a_run_with_caches_says_what_they_gave_and_verifies(tmp_path: Path, small: tuple[str, ...]) -> None:
    """The figure is in the entry, the table and the run directory, from which it follows again."""
    cached = _with_cache(tmp_path, 40)
    (run,) = _json("sim", cached, *small, "--path", "de", "--out", str(tmp_path / "out"))["runs"]
    found = run["prefix_cache"]
    # Second turns read on the side that wrote their blocks: nothing else is ever hit.
    assert found["hit_ratio"] == 1 and found["cached_bytes"] == found["wanted_bytes"] > 0
    assert run["steps_bytes"]["de1"] == 0
    assert _json("verify", run["out"])["ok"]
    assert "cache" in _run("sim", cached, *small).stdout


@pytest.mark.parametrize(
    ("gigabytes", "options", "said"),
    [
        (
            20,
            ("--system", "basic", "--system", "mooncake"),
            "prefix_cache_gb = 20.0: expected 0 with --system mooncake",
        ),
        (1e-6, (), "prefix_cache_gb = 1e-06: expected room for a block of 0.00275 GB, or 0 for none"),
        (-1, (), "cached.toml:"),
        ("nan", (), "prefix_cache_gb = nan: expected 0 (none) to 1000000 GB"),
        ('"much"', (), "engine.prefix_cache_gb: Expected `float`"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(
    gigabytes: float | str, options: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    """Exit 2 and one line, before anything runs: beside a pool, too small for a block, or no size at all."""
    done = _run("sim", _with_cache(tmp_path, gigabytes), *options, "--out", str(tmp_path / "out"))
    assert done.exit_code == 2, done.output
    assert said in done.stderr and done.stderr.count("\n") == 1
    assert "prefix_cache_gb" in done.stderr and not (tmp_path / "out").exists()


def test_a_run_directory_is_not_overwritten(tmp_path: Path, small: tuple[str, ...]) -> None:
    """The second run into one directory is refused before it begins."""
    _json("sim", "1p1d", *small, "--out", str(tmp_path))
    done = _run("sim", "1p1d", *small, "--out", str(tmp_path))
    assert done.exit_code == 2 and str(tmp_path) in done.stderr


def test_two_runs_are_not_kept_in_one_directory(tmp_path: Path, small: tuple[str, ...]) -> None:
    """One path given twice would be written over itself."""
    done = _run("sim", "1p1d", *small, "--path", "pe", "--path", "pe", "--out", str(tmp_path / "out"))
    assert done.exit_code == 2 and "--path once" in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.root
def test_only_what_was_made_for_a_run_is_given_away(
    tmp_path: Path, small: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under sudo the caller owns the new directories and files; a directory that was there stays whose it is."""
    monkeypatch.setenv("SUDO_UID", "1234")
    monkeypatch.setenv("SUDO_GID", "1235")
    out = tmp_path / "new" / "out"
    _json("sim", "1p1d", *small, "--path", "pe", "--path", "de", "--out", str(out))
    made = [out.parent, out, *out.rglob("*")]
    assert len(made) > 10 and {(path.stat().st_uid, path.stat().st_gid) for path in made} == {(1234, 1235)}
    there = tmp_path / "there"
    there.mkdir()
    _json("sim", "1p1d", *small, "--out", str(there))
    assert there.stat().st_uid == tmp_path.stat().st_uid == 0


@pytest.mark.parametrize("what", ["a FIFO", "a device", "a directory"])
def test_decisions_that_are_no_file_are_refused_without_waiting(what: str, tmp_path: Path) -> None:
    """Exit 2 and the name; a pipe nobody writes to and a device without an end are never read."""
    path = Path("/dev/zero") if what == "a device" else tmp_path / "it"
    if what == "a FIFO":
        os.mkfifo(path)
    elif what == "a directory":
        (path / "decisions.jsonl").mkdir(parents=True)
    done = _run("sim", "1p1d", "--decisions", str(path))
    assert done.exit_code == 2 and str(path) in done.stderr and done.stderr.count("\n") == 1


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    """`verify` of a missing or empty directory: exit 2, one line."""
    for path in (tmp_path / "none", tmp_path):
        done = _run("verify", str(path))
        assert done.exit_code == 2 and done.stderr.count("\n") == 1


def test_virtual_time_has_no_dilation() -> None:
    """An option without meaning is refused, not ignored."""
    assert "--dilation" in _run("sim", "1p1d", "--dilation", "2").stderr


def test_a_request_that_is_not_served_fails_the_run(tmp_path: Path, small: tuple[str, ...]) -> None:
    """Nothing fits, not even a block: a report with nulls, exit 1, no traceback."""
    path = tmp_path / "tiny.toml"
    path.write_text("[cluster]\npe_nodes = 1\nde_nodes = 1\n[engine]\nde_buffer_gb = 0.001\n")
    done = _run("sim", str(path), *small, "--json")
    assert done.exit_code == 1, done.output
    run = json.loads(done.stdout)["runs"][0]
    assert run["requests"]["done"] == 0 and run["ttft_s"] is None and run["tokens_equal"] is None


def test_a_request_that_no_cluster_holds_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed of it, not even by the reference; the others are served and their tokens compared."""
    path = tmp_path / "long.jsonl"
    write_native(Workload((conversation("long", (100, 2_000_000)), conversation("b", (130, 4)))), path)
    computed: list[int] = []
    token = DigestBackend.token

    def counted(self: DigestBackend, state: State) -> int:
        computed.append(state.position)
        return token(self, state)

    monkeypatch.setattr(DigestBackend, "token", counted)
    done = _run(
        "sim", "1p1d", "--trace", str(path), "--trace-format", "native", "--json", "--out", str(tmp_path / "o")
    )
    assert done.exit_code == 1, done.output
    run = json.loads(done.stdout)["runs"][0]
    assert (run["requests"]["done"], run["requests"]["failed"], run["tokens_equal"]) == (1, 1, True)
    # Each forced token of the one served is computed in the run and by the reference, and its prompt's too.
    assert len(computed) <= 2 * 5
    assert _run("verify", str(tmp_path / "o")).exit_code == 0


def test_a_name_that_no_cluster_can_have_is_refused_first(tmp_path: Path, small: tuple[str, ...]) -> None:
    """Before an estimate is made or a directory for the run."""
    done = _run("run", "1p1d", *small, "--name", "../x", "--out", str(tmp_path / "o"))
    assert done.exit_code == 2 and done.stderr.startswith("emulate: cluster name '../x'")
    assert done.stderr.count("\n") == 1 and not (tmp_path / "o").exists()
