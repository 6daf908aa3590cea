"""The doctor's findings, and what each advises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from emulator.cli import doctor, main
from emulator.hosts import probe

PASSED = dict.fromkeys(probe.TRIALS, (True, "made"))


def _diagnose(monkeypatch: pytest.MonkeyPatch, found: dict[str, tuple[bool, str]]) -> dict[str, doctor.Check]:
    monkeypatch.setattr(probe, "run_trials", lambda: found)
    return {check.name: check for check in doctor.checks()}


@pytest.mark.root
def test_this_host_can_emulate() -> None:
    """Every trial passes where the other tests run."""
    assert {trial: ok for trial, (ok, _) in probe.run_trials().items()} == dict.fromkeys(probe.TRIALS, True)


def test_what_failed_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing kernel feature: the module to load; the trials after it are not claimed to work."""
    found = {"user namespace": (True, ""), "network namespace": (True, "")}
    found["links"] = (False, "pe0 cnic0: kernel feature missing: CONFIG_NET_SCH_HTB: not there")
    checks = _diagnose(monkeypatch, found)
    assert checks["links"].status == "fail" and checks["links"].mend == "sudo modprobe sch_htb"
    assert checks["PID namespace"].status == "fail"


@pytest.mark.parametrize(
    ("switch", "value", "remedy"),
    [
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
        ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
        ("user/max_user_namespaces", "0", "user.max_user_namespaces="),
    ],
)
def test_a_host_that_forbids_user_namespaces(
    switch: str, value: str, remedy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The very switch that forbids them, and the command that allows them."""
    (tmp_path / switch).parent.mkdir(parents=True)
    (tmp_path / switch).write_text(f"{value}\n")
    monkeypatch.setattr(doctor, "_PROC_SYS", tmp_path)
    checks = _diagnose(monkeypatch, {"user namespace": (False, "Operation not permitted")})
    assert remedy in checks["user namespace"].mend


def test_bridged_packets_through_iptables_are_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Slower, not impossible."""
    (tmp_path / "net/bridge").mkdir(parents=True)
    (tmp_path / "net/bridge/bridge-nf-call-iptables").write_text("1\n")
    monkeypatch.setattr(doctor, "_PROC_SYS", tmp_path)
    check = _diagnose(monkeypatch, PASSED)["br_netfilter"]
    assert check.status == "warn" and "bridge-nf-call-iptables=0" in check.mend


@pytest.mark.parametrize(("found", "code"), [(PASSED, 0), ({"user namespace": (False, "no")}, 1)])
def test_the_exit_code_is_the_answer(
    found: dict[str, tuple[bool, str]], code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """0 if this host can emulate, 1 if not; the object says the same."""
    monkeypatch.setenv("EMULATE_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(probe, "run_trials", lambda: found)
    done = CliRunner().invoke(main, ["doctor", "--json"])
    assert done.exit_code == code
    assert json.loads(done.stdout)["able"] is (code == 0)
    assert ("cannot emulate" in CliRunner().invoke(main, ["doctor"]).stdout) is (code == 1)
