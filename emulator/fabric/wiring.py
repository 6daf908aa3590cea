"""Which shared resources a queue pair crosses: one rule for both fabrics.

- A *NIC* is crossed by what leaves a node through it (``read``) and by what enters (``write``); each direction has
  its rate, and lanes.
- A node's *DRAM* is half duplex: one rate for what is read from it and written to it. Every message with a host
  side there crosses it once for each such side, so that host to host inside one node takes it twice.
- A *PCIe link* joins a GPU to its NIC; each direction has its rate. Whatever comes from the GPU's memory or goes
  there crosses it: through the NIC to anywhere, or, where the link itself is named as the NIC of both ends
  (``pcie3`` for the GPU of ``cnic3``), as a copy between the node's DRAM and the GPU, which crosses no NIC.

DRAM and PCIe know no lanes: there all messages are alike. A free path crosses nothing. Pure: the rule knows names,
and what a resource is (a share of a fluid, a socket and a clock of debts) is the fabric's affair.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Literal

import msgspec

from ..errors import ProtocolViolation
from .interface import Endpoint

__all__ = ["DIRECTIONS", "DRAM", "Crossing", "Direction", "Wiring", "pcie_of"]

DRAM = "dram"
"""The name under which a node's DRAM is counted among its ports."""

Direction = Literal["read", "write"]
DIRECTIONS: tuple[Direction, Direction] = ("read", "write")


def pcie_of(nic: str) -> str:
    """The name of the PCIe link of a NIC's GPU: ``pcie3`` of ``cnic3``. ValueError for a NIC without a number."""
    number = re.fullmatch(r"\D+(\d+)", nic)
    if number is None:
        raise ValueError(f"NIC {nic}: a PCIe link is named by the number of its NIC, and this one has none")
    return f"pcie{number[1]}"


class Crossing(msgspec.Struct, frozen=True):
    """One direction of a resource of ``node``, and the row of its counters."""

    node: str
    nic: str
    direction: Direction


class Wiring:
    """``nics``: the (node, NIC) that are there. ``dram``: the nodes whose DRAM counts. ``pcie``: the (node, NIC)
    whose GPU's link does. ValueError for a link of a NIC that is not there, or for two links of one name.
    """

    def __init__(
        self, nics: Collection[tuple[str, str]], dram: Collection[str], pcie: Collection[tuple[str, str]]
    ) -> None:
        self._nics = frozenset(nics)
        self._dram = frozenset(dram)
        self._links: dict[tuple[str, str], str] = {}
        self._ends: set[tuple[str, str]] = set()
        for node, nic in pcie:
            if (node, nic) not in self._nics:
                raise ValueError(f"PCIe link of {node}/{nic}: no such port")
            link = pcie_of(nic)
            if self.is_link(node, link):
                raise ValueError(f"PCIe link of {node}/{nic}: there is a {node}/{link} already")
            self._links[node, nic] = link
            self._ends.add((node, link))

    def is_link(self, node: str, nic: str) -> bool:
        """Is what is named as a NIC the PCIe link of a GPU?"""
        return (node, nic) in self._ends

    def crossed(self, src: Endpoint, dst: Endpoint) -> tuple[Crossing, ...]:
        """What messages from ``src`` to ``dst`` cross, in their order. ProtocolViolation for what is not there."""
        return self.sent(src, dst) + self.received(src, dst)

    def sent(self, src: Endpoint, dst: Endpoint) -> tuple[Crossing, ...]:
        """What of it is the sender's: all up to the source's NIC, and a copy inside a node as a whole."""
        if src.free and dst.free:
            return ()
        if self._is_copy(src, dst):
            return tuple(self._copy(src, dst))
        return (*self._memory(src, "read"), self._nic(src, "read"))

    def received(self, src: Endpoint, dst: Endpoint) -> tuple[Crossing, ...]:
        """What of it is the receiver's."""
        if (src.free and dst.free) or self._is_copy(src, dst):
            return ()
        return (self._nic(dst, "write"), *self._memory(dst, "write"))

    def _is_copy(self, src: Endpoint, dst: Endpoint) -> bool:
        return self.is_link(src.node, src.nic) or self.is_link(dst.node, dst.nic)

    def _copy(self, src: Endpoint, dst: Endpoint) -> Iterator[Crossing]:
        """Between the two sides of one PCIe link; the link's directions are those of the GPU's memory."""
        if (src.node, src.nic) != (dst.node, dst.nic) or src.side == dst.side:
            raise ProtocolViolation(f"a PCIe link joins a node's DRAM to one of its GPUs, not {src} to {dst}")
        into_gpu = dst.side == "gpu"
        yield from self._in_dram(src.node, "read" if into_gpu else "write")
        yield Crossing(src.node, src.nic, "write" if into_gpu else "read")

    def _memory(self, end: Endpoint, direction: Direction) -> Iterator[Crossing]:
        """Between a NIC and the memory behind it."""
        if end.side == "host":
            yield from self._in_dram(end.node, direction)
        elif (link := self._links.get((end.node, end.nic))) is not None:
            yield Crossing(end.node, link, direction)

    def _in_dram(self, node: str, direction: Direction) -> Iterator[Crossing]:
        if node in self._dram:
            yield Crossing(node, DRAM, direction)

    def _nic(self, end: Endpoint, direction: Direction) -> Crossing:
        if (end.node, end.nic) not in self._nics:
            raise ProtocolViolation(f"no port {end.node}/{end.nic} in this network")
        return Crossing(end.node, end.nic, direction)
