"""A cluster description becomes what roles, fabric and kernel are given, or is refused before anything starts."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import msgspec
import pytest

from emulator.config import EngineConfig, ModelConfig, ReplayConfig, RunConfig, ScaleConfig
from emulator.deployment import Deployment
from emulator.errors import ConfigError
from emulator.fabric.localbus import LocalRates
from emulator.plan import (
    cluster_spec,
    emulated_rates,
    local_rates,
    members_of,
    model_file,
    pace_of,
    run_config,
)
from tests.within import assert_within
from topology.errors import TopologyError
from topology.spec import PRESETS, ClusterSpec, load_topology

DEFAULTS = (EngineConfig(), ModelConfig(), ScaleConfig())


@pytest.mark.parametrize("name", PRESETS)
def test_a_configuration_crosses_processes_whole(name: str) -> None:
    """As JSON and back it is equal, and the cluster description inside it is the one that went in."""
    spec = load_topology(name)
    run = run_config(spec, *DEFAULTS)
    assert msgspec.json.decode(msgspec.json.encode(run), type=RunConfig) == run
    assert cluster_spec(run) == spec


def test_roles_see_every_node_and_its_engines() -> None:
    """Names, roles and engines as the topology has them; nodes without GPUs have none."""
    members = {m.name: (m.role, m.engines) for m in members_of(load_topology("1p2d"))}
    assert members == {
        "pe0": ("pe", 8),
        "de0": ("de", 8),
        "de1": ("de", 8),
        "st0": ("storage", 0),
        "st1": ("storage", 0),
        "sched": ("scheduler", 0),
        "client": ("client", 0),
    }


def test_the_kernel_is_given_scaled_rates() -> None:
    """Every shaped NIC, its model rate over shrink and dilation."""
    spec = load_topology("1p1d")
    run = run_config(spec, EngineConfig(), ModelConfig(), ScaleConfig(kv_bytes=2, dilation=5.0))
    shrink = float(Deployment(run).scale.shrink)
    rates = emulated_rates(run)
    assert len(rates) == len(spec.ports())
    for port in spec.ports():
        expected = port.nic.rate_bytes_s / shrink / 5.0
        assert_within(rates[port.node, port.nic.name], expected, rel=1e-12, what=port.node)


def test_what_cannot_run_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """A model that is not there, KV larger than the model's, a bad cost table, a cluster without addresses."""
    spec = load_topology("1p1d")
    with pytest.raises(ConfigError, match="nope"):
        run_config(spec, EngineConfig(), ModelConfig(name="nope"), ScaleConfig())
    with pytest.raises(ConfigError, match="kv_bytes"):
        run_config(spec, EngineConfig(), ModelConfig(), ScaleConfig(kv_bytes=10**6))
    with pytest.raises(ConfigError, match=r"costs\.csv"):
        run_config(spec, EngineConfig(), ModelConfig(costs=str(tmp_path / "costs.csv")), ScaleConfig())
    with pytest.raises(TopologyError, match="address plan"):
        run_config(ClusterSpec(name="big", pe_nodes=200, de_nodes=100), *DEFAULTS)


def test_files_of_the_users_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative model or cost file becomes absolute; a bundled name stays a name."""
    shape = resources.files("emulator.models").joinpath("ds27b.toml").read_text()
    (tmp_path / "mine.toml").write_text(shape)
    (tmp_path / "costs.csv").write_text("cached,bsz,ms\n0,1,10\n0,99999,20000\n199999,1,20\n199999,99999,90000\n")
    monkeypatch.chdir(tmp_path)
    model = run_config(
        load_topology("1p1d"), EngineConfig(), ModelConfig(name="mine.toml", costs="costs.csv"), ScaleConfig()
    ).model
    assert (model.name, model.costs) == (str(tmp_path / "mine.toml"), str(tmp_path / "costs.csv"))
    assert model_file(model) == tmp_path / "mine.toml"
    assert model_file(ModelConfig()) is None


def test_a_relative_file_needs_a_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the working directory was deleted, a relative model or cost file is refused by its name."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    spec = ClusterSpec(name="x", pe_nodes=1, de_nodes=1)
    for model in (ModelConfig(name="mine.toml"), ModelConfig(costs="mine.csv")):
        with pytest.raises(ConfigError, match=r"mine.*absolute path"):
            run_config(spec, EngineConfig(), model, ScaleConfig())


def test_a_node_paces_its_own_cnics_in_model_time() -> None:
    """Only where software is asked for; every CNIC of the node at its payload rate, KV's share from the lanes."""
    spec = load_topology("1p1d")
    run = run_config(spec, *DEFAULTS, ReplayConfig(qos="software"))
    pace = pace_of(run, "pe0")
    assert pace is not None
    assert set(pace.rates) == {f"cnic{gpu}" for gpu in range(8)}
    rate = Deployment(run).scale.payload_rate(400e9 / 8)
    for nic, paced in pace.rates.items():
        assert_within(paced, rate, rel=1e-12, what=nic)
    assert (pace.share, pace.tick_s) == (spec.lanes.kv, run.engine.shaper_tick_s)
    storage = pace_of(run, "st0")
    assert storage is not None and not storage.rates
    for qos in ("lanes", "off"):
        assert pace_of(msgspec.structs.replace(run, replay=ReplayConfig(qos=qos)), "pe0") is None


def test_what_binds_inside_a_node_is_the_same_however_dilated() -> None:
    """DRAM of whoever serves, at its payload rate; PCIe links of all its GPUs where copies use them, else none."""
    spec = load_topology("1p1d")
    for replay, links in ((ReplayConfig(), 0), (ReplayConfig(copies="cuda"), 8)):
        found = set()
        for dilation in (1.0, 7.5):
            run = run_config(spec, EngineConfig(), ModelConfig(), ScaleConfig(2, dilation), replay)
            scale = Deployment(run).scale
            for node in ("pe0", "de0"):
                rates = local_rates(run, node)
                assert rates.dram == scale.payload_rate(4000e9 / 8)
                assert rates.pcie == {f"cnic{gpu}": scale.payload_rate(512e9 / 8) for gpu in range(links)}
                found.add(rates.dram)
            for node in ("st0", "sched", "client"):
                assert local_rates(run, node) == LocalRates()
        assert len(found) == 1
