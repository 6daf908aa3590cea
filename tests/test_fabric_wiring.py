"""Laws of a fluid network's resources: what a queue pair crosses, what is no resource at all."""

from __future__ import annotations

from typing import Any

import pytest

from emulator.errors import ProtocolViolation
from emulator.fabric.interface import FREE_NIC, Endpoint, Side
from emulator.fabric.wiring import Wiring, pcie_of

NODES = ("pe0", "de0", "st0")
PORTS = {
    ("pe0", "cnic0"): 1.0,
    ("pe0", "cnic1"): 1.0,
    ("de0", "cnic0"): 1.0,
    ("pe0", "snic0"): 1.0,
    ("st0", "snic0"): 2.0,
}
DRAM = {"pe0": 10.0, "de0": 10.0}
PCIE = {("pe0", "cnic0"): 1.5, ("pe0", "cnic1"): 1.5, ("de0", "cnic0"): 1.5}


def built(**changed: Any) -> Wiring:
    return Wiring(**{"nodes": NODES, "ports": PORTS, "dram": DRAM, "pcie": PCIE, **changed})


def crossed(src: tuple[str, str, Side], dst: tuple[str, str, Side], wiring: Wiring | None = None) -> list[str]:
    """The resources from ``src`` to ``dst`` as text."""
    crossings = (wiring or built()).crossed(Endpoint(*src), Endpoint(*dst))
    return [f"{c.node}/{c.nic} {c.direction}" for c in crossings]


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        (
            ("pe0", "cnic0", "gpu"),
            ("de0", "cnic0", "host"),
            ["pe0/pcie0 read", "pe0/cnic0 read", "de0/cnic0 write", "de0/dram write"],
        ),
        (
            ("de0", "cnic0", "host"),
            ("pe0", "cnic1", "gpu"),
            ["de0/dram read", "de0/cnic0 read", "pe0/cnic1 write", "pe0/pcie1 write"],
        ),
        (
            ("pe0", "cnic0", "host"),
            ("pe0", "cnic0", "gpu"),
            ["pe0/dram read", "pe0/cnic0 read", "pe0/cnic0 write", "pe0/pcie0 write"],
        ),
        (
            ("pe0", "cnic0", "host"),
            ("pe0", "cnic1", "host"),
            ["pe0/dram read", "pe0/cnic0 read", "pe0/cnic1 write", "pe0/dram write"],
        ),
        (
            ("st0", "snic0", "host"),
            ("pe0", "snic0", "host"),
            ["st0/snic0 read", "pe0/snic0 write", "pe0/dram write"],
        ),
        (("pe0", "pcie1", "host"), ("pe0", "pcie1", "gpu"), ["pe0/dram read", "pe0/pcie1 write"]),
        (("pe0", "pcie1", "gpu"), ("pe0", "pcie1", "host"), ["pe0/dram write", "pe0/pcie1 read"]),
        (("pe0", FREE_NIC, "host"), ("de0", FREE_NIC, "gpu"), []),
    ],
)
def test_what_is_crossed(src: tuple[str, str, Side], dst: tuple[str, str, Side], expected: list[str]) -> None:
    """Memory, NIC, NIC, memory; a copy over the link alone; nothing for what is free."""
    assert crossed(src, dst) == expected


def test_dram_is_one_port_and_a_link_is_two() -> None:
    """Reading and writing DRAM take from one rate; into a GPU and out of it from two; only NICs have lanes."""
    wiring = built()
    through = wiring.crossed(Endpoint("pe0", "cnic0"), Endpoint("pe0", "cnic1"))
    assert through[0].port is through[-1].port
    out, into = (
        next(c.port for c in wiring.crossed(*ends) if c.nic == "pcie0")
        for ends in (
            (Endpoint("pe0", "cnic0", "gpu"), Endpoint("de0", "cnic0")),
            (Endpoint("de0", "cnic0"), Endpoint("pe0", "cnic0", "gpu")),
        )
    )
    assert out is not into
    assert (out.rate, out.laned, through[0].port.rate, through[0].port.laned) == (1.5, False, 10.0, False)
    assert (through[1].port.rate, through[1].port.laned) == (1.0, True)


def test_what_is_not_told_of_does_not_bind() -> None:
    """Without DRAM and PCIe a message crosses its two NICs."""
    assert crossed(("pe0", "cnic0", "host"), ("pe0", "cnic0", "gpu"), built(dram={}, pcie={})) == [
        "pe0/cnic0 read",
        "pe0/cnic0 write",
    ]


@pytest.mark.parametrize(
    ("src", "dst", "error"),
    [
        (("pe0", "pcie0", "host"), ("pe0", "pcie1", "gpu"), "joins a node's DRAM to one of its GPUs"),
        (("pe0", "pcie0", "host"), ("de0", "cnic0", "gpu"), "joins a node's DRAM to one of its GPUs"),
        (("pe0", "pcie0", "gpu"), ("pe0", "pcie0", "gpu"), "joins a node's DRAM to one of its GPUs"),
        (("st0", "pcie0", "host"), ("st0", "pcie0", "gpu"), "no port st0/pcie0"),
        (("pe0", "cnic9", "host"), ("de0", "cnic0", "host"), "no port pe0/cnic9"),
    ],
)
def test_what_is_not_there_is_refused(src: tuple[str, str, Side], dst: tuple[str, str, Side], error: str) -> None:
    """A path that the network does not have is a violation that names it."""
    with pytest.raises(ProtocolViolation, match=error):
        crossed(src, dst)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"dram": {"pe0": 0.0}}, "port pe0/dram: rate 0.0"),
        ({"dram": {"nobody": 1.0}}, "no node nobody"),
        ({"pcie": {("pe0", "cnic0"): float("nan")}}, "port pe0/pcie0: rate nan"),
        ({"pcie": {("pe0", "cnic7"): 1.0}}, "PCIe link of pe0/cnic7: no such port"),
        ({"pcie": {("pe0", "cnic0"): 1.0, ("pe0", "snic0"): 1.0}}, "there is a pe0/pcie0 already"),
    ],
)
def test_a_resource_is_checked_where_it_is_built(changed: dict[str, Any], error: str) -> None:
    """A rate that is none, and a resource of something that is not there, are refused by name."""
    with pytest.raises(ValueError, match=error):
        built(**changed)


def test_a_link_has_the_number_of_its_nic() -> None:
    """cnic3's is pcie3; a NIC without a number has none."""
    assert pcie_of("cnic3") == "pcie3"
    assert pcie_of("cnic12") == "pcie12"
    with pytest.raises(ValueError, match="NIC eth"):
        pcie_of("eth")
