"""Laws of what a queue pair crosses, on whose side, and what is no resource at all."""

from __future__ import annotations

from typing import Any

import pytest

from emulator.errors import ProtocolViolation
from emulator.fabric.interface import FREE_NIC, Endpoint, Side
from emulator.fabric.wiring import Wiring, pcie_of

NICS = {("pe0", "cnic0"), ("pe0", "cnic1"), ("de0", "cnic0"), ("pe0", "snic0"), ("st0", "snic0")}
DRAM = {"pe0", "de0"}
PCIE = [("pe0", "cnic0"), ("pe0", "cnic1"), ("de0", "cnic0")]


def built(**changed: Any) -> Wiring:
    return Wiring(**{"nics": NICS, "dram": DRAM, "pcie": PCIE, **changed})


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


@pytest.mark.parametrize(
    ("src", "dst", "sent"),
    [
        (Endpoint("pe0", "cnic0", "gpu"), Endpoint("de0", "cnic0"), 2),
        (Endpoint("pe0", "cnic0"), Endpoint("pe0", "cnic0", "gpu"), 2),
        (Endpoint("st0", "snic0"), Endpoint("pe0", "snic0"), 1),
        (Endpoint("pe0", "pcie1"), Endpoint("pe0", "pcie1", "gpu"), 2),
        (Endpoint("pe0", FREE_NIC), Endpoint("de0", FREE_NIC, "gpu"), 0),
    ],
)
def test_a_crossing_is_of_one_side(src: Endpoint, dst: Endpoint, sent: int) -> None:
    """The sender's come first, up to its NIC or a whole copy; a node can tell its own side without the other's."""
    whole = built()
    assert len(whole.sent(src, dst)) == sent
    assert whole.crossed(src, dst) == whole.sent(src, dst) + whole.received(src, dst)
    for end, side in ((src, "sent"), (dst, "received")):
        alone = Wiring(
            {nic for nic in NICS if nic[0] == end.node},
            DRAM & {end.node},
            [link for link in PCIE if link[0] == end.node],
        )
        assert getattr(alone, side)(src, dst) == getattr(whole, side)(src, dst)


def test_what_is_not_told_of_does_not_bind() -> None:
    """Without DRAM and PCIe a message crosses its two NICs."""
    assert crossed(("pe0", "cnic0", "host"), ("pe0", "cnic0", "gpu"), built(dram=(), pcie=())) == [
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
    ("pcie", "error"),
    [
        ([("pe0", "cnic7")], "PCIe link of pe0/cnic7: no such port"),
        ([("pe0", "cnic0"), ("pe0", "snic0")], "there is a pe0/pcie0 already"),
    ],
)
def test_a_link_is_of_a_nic_and_of_no_other(pcie: list[tuple[str, str]], error: str) -> None:
    """A link of a NIC that is not there, and a second link of one name, are refused by name."""
    with pytest.raises(ValueError, match=error):
        built(pcie=pcie)


def test_a_link_has_the_number_of_its_nic() -> None:
    """cnic3's is pcie3; a NIC without a number has none."""
    assert pcie_of("cnic3") == "pcie3"
    assert pcie_of("cnic12") == "pcie12"
    with pytest.raises(ValueError, match="NIC eth"):
        pcie_of("eth")
