"""Which module may import which: the arrows of docs/design.md, read off the sources themselves.

Imports inside functions and under TYPE_CHECKING count as arrows too; only for cycles do they not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LAYERS: dict[str, tuple[str, ...]] = {
    "pure": (
        *(
            "errors",
            "extent",
            "scale",
            "records",
            "config",
            "systems",
            "kvcache",
            "pool",
            "dramcache",
            "prefixcache",
            "policy",
            "costmodel",
            "experts",
            "tensors",
            "hardware",
            "predictor",
            "profile",
            "analysis",
        ),
        *("workload", "chains", "traces", "synth", "metrics", "balance", "usage", "steps", "verify"),
        *("judge", "deployment", "roles", "roles.messages", "roles.segments", "roles.decisions"),
        *("models", "models.*", "fabric", "fabric.interface", "fabric.forwarding"),
        *("policy.interface", "policy.dualpath", "policy.roundrobin", "policy.builtin"),
        *("policy.split", "policy.admission", "policy.packing", "policy.placement"),
    ),
    "fabric": ("fabric.*",),
    "keeping": ("store", "roles.leases", "roles.withdrawal", "policy.plugin"),
    "traffic": (
        *("roles.traffic", "roles.striped", "roles.blockio", "roles.drampool", "roles.nodecache"),
        *("roles.lockstep", "roles.leader", "shaper", "watch"),
    ),
    "serving": ("roles.serving",),
    "roles": ("roles.*",),
    "hosts": (
        *("settings", "plan", "cluster", "sim", "logs", "estimate", "evidence", "samples", "hosts", "hosts.*"),
    ),
    "study": ("report", "rundir", "tables", "study", "study.*"),
    "cli": ("cli", "cli.*", "__main__", ""),
}
"""Modules of ``emulator`` by layer, lowest first; the first pattern that fits decides, and "" is the package."""

BELOW: dict[str, tuple[str, ...]] = {
    "pure": (),
    "fabric": ("pure",),
    "keeping": ("pure",),
    "traffic": ("pure", "keeping"),
    "roles": ("pure", "keeping", "traffic"),
    "serving": ("pure", "keeping", "traffic", "roles"),
    "hosts": ("pure", "fabric", "keeping", "traffic", "roles", "serving"),
    "study": ("pure", "fabric", "keeping", "traffic", "roles", "serving", "hosts"),
    "cli": ("pure", "fabric", "keeping", "traffic", "roles", "serving", "hosts", "study"),
}
"""The layers that a layer's modules may import besides their own."""

TOPOLOGY_FREE = ("pure", "fabric", "keeping", "traffic", "roles", "serving")
"""Layers that know nothing of how a network is described or made."""

IMPURE = frozenset(
    "asyncio os random secrets select signal socket structlog subprocess tempfile threading time trio".split()  # noqa: SIM905
)
"""What brings a clock, the environment, chance, tasks or the network into a module."""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def sources() -> dict[str, Path]:
    """All modules of both packages by dotted name."""
    return {
        module_name(p): p for package in ("emulator", "topology") for p in sorted((ROOT / package).rglob("*.py"))
    }


def statements(tree: ast.AST, *, inside: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements; with ``inside`` also those of functions and of TYPE_CHECKING blocks."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif inside or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.If):
            yield from statements(node, inside=inside)


@cache
def imports(module: str, *, inside: bool = True) -> frozenset[str]:
    """Dotted names that ``module`` imports: modules of ours in full, others as they stand."""
    path = sources()[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in statements(ast.parse(path.read_text(encoding="utf-8")), inside=inside):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
            continue
        base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
        origin = ".".join(part for part in (base, node.module) if part)
        submodules = {f"{origin}.{a.name}" for a in node.names} & sources().keys()
        found |= submodules
        if len(submodules) < len(node.names):
            found.add(origin)
    return frozenset(found)


def layer(module: str) -> str | None:
    """The layer of a module of ``emulator``; None where nobody gave it one."""
    name = module.partition(".")[2]
    return next((la for la, patterns in LAYERS.items() if any(fnmatchcase(name, p) for p in patterns)), None)


def wrong_arrows(module: str) -> list[str]:
    """What a module of ``emulator`` imports from a layer that is not below its own."""
    own = layer(module)
    assert own is not None
    allowed = {own, *BELOW[own]}
    return [name for name in sorted(imports(module)) if top(name) == "emulator" and layer(name) not in allowed]


def top(name: str) -> str:
    return name.partition(".")[0]


EMULATOR = [name for name in sources() if top(name) == "emulator"]


def test_every_module_has_a_layer() -> None:
    """A new module is put into a layer here, which is where its arrows are decided."""
    assert [name for name in EMULATOR if layer(name) is None] == []


def test_every_layer_is_lived_in() -> None:
    """No pattern stands for a module that is gone."""
    names = [name.partition(".")[2] for name in EMULATOR]
    patterns = [pattern for group in LAYERS.values() for pattern in group]
    assert [p for p in patterns if not any(fnmatchcase(name, p) for name in names)] == []


@pytest.mark.parametrize("module", EMULATOR)
def test_arrows_point_down(module: str) -> None:
    """A module imports its own layer and the ones below it, and no other."""
    assert wrong_arrows(module) == []


@pytest.mark.parametrize("module", [name for name in EMULATOR if layer(name) in TOPOLOGY_FREE])
def test_roles_do_not_know_the_network(module: str) -> None:
    """Below the hosts nobody imports ``topology``; roles and pure modules do not see the environment either."""
    assert [name for name in sorted(imports(module)) if top(name) == "topology"] == []
    if layer(module) in ("traffic", "roles", "serving"):
        assert "os" not in {top(name) for name in imports(module)}


@pytest.mark.parametrize("module", [name for name in EMULATOR if layer(name) == "pure"])
def test_pure_modules_take_values_and_return_values(module: str) -> None:
    """No clock, task, socket, log, environment or global chance in a pure module."""
    assert sorted({top(name) for name in imports(module)} & IMPURE) == []


def test_topology_knows_nothing_of_the_emulator() -> None:
    """``topology`` makes networks for anybody: it imports nothing of ``emulator``."""
    for module in sources():
        if top(module) == "topology":
            assert [name for name in imports(module) if top(name) == "emulator"] == [], module


def test_only_netlink_uses_pyroute2_and_only_the_toy_torch() -> None:
    """Heavy or privileged packages have one user each."""
    users = {
        package: {module for module in sources() if any(top(name) == package for name in imports(module))}
        for package in ("pyroute2", "torch")
    }
    assert users["pyroute2"] == {"topology.netlink"}
    assert users["torch"] == {"emulator.models.toy"}


def reached_from(module: str) -> set[str]:
    """All of our modules that it imports, however far down, and itself."""
    reached, front = set[str](), [module]
    while front:
        module = front.pop()
        if module not in reached:
            reached.add(module)
            front += [name for name in imports(module) if name in sources()]
    return reached


def test_virtual_time_needs_no_network() -> None:
    """Nothing that ``sim`` imports, however far down, makes namespaces, links or sockets."""
    forbidden = {
        "emulator.fabric.tcp",
        "emulator.hosts.isolate",
        "topology.netns",
        "topology.namespaces",
        "topology.netlink",
    }
    assert sorted(reached_from("emulator.sim") & forbidden) == []


def test_a_node_does_not_make_networks() -> None:
    """A node's process, of which there are many, loads nothing that speaks to the kernel about links."""
    assert "topology.netlink" not in reached_from("emulator.hosts.node")


def test_no_module_needs_itself() -> None:
    """Imports at module level form no cycle."""
    graph = {m: {name for name in imports(m, inside=False) if name in sources() and name != m} for m in sources()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another source tree, in which every form of import and two wrong arrows occur."""
    files = {
        "emulator/__init__.py": "",
        "emulator/policy.py": "def f():\n    from .roles import scheduler",
        "emulator/roles/__init__.py": "",
        "emulator/roles/scheduler.py": "from ..fabric.tcp import open_tcp_fabric\nfrom ..policy import f",
        "emulator/fabric/__init__.py": "from ..policy import y",
        "emulator/fabric/tcp.py": "from .. import policy\nfrom ..policy import x\nfrom . import wire, other",
        "emulator/fabric/wire.py": "import os.path\nif 1:\n    import trio\nclass C:\n    import time",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    for cached in (sources, imports):
        cached.cache_clear()
    yield
    monkeypatch.undo()
    for cached in (sources, imports):
        cached.cache_clear()


@pytest.mark.usefixtures("planted")
def test_the_reader_of_imports_sees_every_form() -> None:
    """Absolute, relative, of a submodule, inside a function and inside a condition: all are arrows."""
    assert imports("emulator.policy") == {"emulator.roles.scheduler"}
    assert imports("emulator.policy", inside=False) == set()
    assert imports("emulator.fabric") == {"emulator.policy"}
    assert imports("emulator.fabric.tcp") == {"emulator.policy", "emulator.fabric.wire", "emulator.fabric"}
    assert imports("emulator.fabric.wire") == {"os.path", "trio", "time"}
    assert imports("emulator.fabric.wire", inside=False) == {"os.path", "time"}


@pytest.mark.usefixtures("planted")
def test_a_wrong_arrow_is_found() -> None:
    """A policy that asks the scheduler and a role that opens sockets are both wrong."""
    assert wrong_arrows("emulator.policy") == ["emulator.roles.scheduler"]
    assert wrong_arrows("emulator.roles.scheduler") == ["emulator.fabric.tcp"]
    assert wrong_arrows("emulator.fabric.tcp") == []
