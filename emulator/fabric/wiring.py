"""The shared resources of a fluid network, and which of them a queue pair crosses.

- A *NIC* is crossed by what leaves a node through it (``read``) and by what enters (``write``); each direction has
  its rate, and lanes.
- A node's *DRAM* is half duplex: one rate for what is read from it and written to it. Every message with a host
  side there crosses it once for each such side, so that host to host inside one node takes it twice.
- A *PCIe link* joins a GPU to its NIC; each direction has its rate. Whatever comes from the GPU's memory or goes
  there crosses it: through the NIC to anywhere, or, where the link itself is named as the NIC of both ends
  (``pcie3`` for the GPU of ``cnic3``), as a copy between the node's DRAM and the GPU, which crosses no NIC.

DRAM and PCIe know no lanes: there all messages are alike. A free path crosses nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Literal

import msgspec

from ..errors import ProtocolViolation
from .flow import Port
from .interface import Endpoint

__all__ = ["DRAM", "Crossing", "Wiring", "pcie_of"]

DRAM = "dram"
"""The name under which a node's DRAM is counted among its ports."""

Direction = Literal["read", "write"]


def pcie_of(nic: str) -> str:
    """The name of the PCIe link of a NIC's GPU: ``pcie3`` of ``cnic3``. ValueError for a NIC without a number."""
    number = re.fullmatch(r"\D+(\d+)", nic)
    if number is None:
        raise ValueError(f"NIC {nic}: a PCIe link is named by the number of its NIC, and this one has none")
    return f"pcie{number[1]}"


class Crossing(msgspec.Struct, frozen=True):
    """One resource that a queue pair crosses, and the row of ``node``'s counters that it is counted in."""

    port: Port
    node: str
    nic: str
    direction: Direction


class Wiring:
    """Rates are payload bytes per model second, of each NIC and PCIe link in each direction.

    ``ports`` and ``pcie`` are by (node, NIC), ``dram`` by node. ValueError for a rate that is none, or for a
    resource of something that is not there.
    """

    def __init__(
        self,
        nodes: Collection[str],
        ports: Mapping[tuple[str, str], float],
        dram: Mapping[str, float],
        pcie: Mapping[tuple[str, str], float],
    ) -> None:
        self._duplex: dict[tuple[str, str, Direction], Port] = {}
        for (node, nic), rate in ports.items():
            self._add(nodes, node, nic, rate, laned=True)
        for (node, nic), rate in pcie.items():
            if (node, nic) not in ports:
                raise ValueError(f"PCIe link of {node}/{nic}: no such port")
            if (node, pcie_of(nic), "read") in self._duplex:
                raise ValueError(f"PCIe link of {node}/{nic}: there is a {node}/{pcie_of(nic)} already")
            self._add(nodes, node, pcie_of(nic), rate, laned=False)
        self._links = {(node, nic): pcie_of(nic) for node, nic in pcie}
        self._is_link = {(node, link) for (node, _), link in self._links.items()}
        self._dram = {node: _port(nodes, node, DRAM, rate, laned=False) for node, rate in dram.items()}

    def _add(self, nodes: Collection[str], node: str, nic: str, rate: float, *, laned: bool) -> None:
        for direction in _DIRECTIONS:
            self._duplex[node, nic, direction] = _port(nodes, node, nic, rate, laned=laned)

    def crossed(self, src: Endpoint, dst: Endpoint) -> tuple[Crossing, ...]:
        """What messages from ``src`` to ``dst`` cross, in their order. ProtocolViolation for what is not there."""
        if src.free and dst.free:
            return ()
        links = [end for end in (src, dst) if (end.node, end.nic) in self._is_link]
        if links:
            return tuple(self._copy(src, dst))
        return tuple(self._through_nics(src, dst))

    def _through_nics(self, src: Endpoint, dst: Endpoint) -> Iterator[Crossing]:
        yield from self._memory(src, "read")
        yield self._crossing(src.node, src.nic, "read")
        yield self._crossing(dst.node, dst.nic, "write")
        yield from self._memory(dst, "write")

    def _copy(self, src: Endpoint, dst: Endpoint) -> Iterator[Crossing]:
        """Between the two sides of one PCIe link; the link's directions are those of the GPU's memory."""
        if (src.node, src.nic) != (dst.node, dst.nic) or src.side == dst.side:
            raise ProtocolViolation(f"a PCIe link joins a node's DRAM to one of its GPUs, not {src} to {dst}")
        into_gpu = dst.side == "gpu"
        yield from self._in_dram(src.node, "read" if into_gpu else "write")
        yield self._crossing(src.node, src.nic, "write" if into_gpu else "read")

    def _memory(self, end: Endpoint, direction: Direction) -> Iterator[Crossing]:
        """Between a NIC and the memory behind it."""
        if end.side == "host":
            yield from self._in_dram(end.node, direction)
        elif (link := self._links.get((end.node, end.nic))) is not None:
            yield self._crossing(end.node, link, direction)

    def _in_dram(self, node: str, direction: Direction) -> Iterator[Crossing]:
        port = self._dram.get(node)
        if port is not None:
            yield Crossing(port, node, DRAM, direction)

    def _crossing(self, node: str, nic: str, direction: Direction) -> Crossing:
        try:
            return Crossing(self._duplex[node, nic, direction], node, nic, direction)
        except KeyError:
            raise ProtocolViolation(f"no port {node}/{nic} in this network") from None


_DIRECTIONS: tuple[Direction, Direction] = ("read", "write")


def _port(nodes: Collection[str], node: str, nic: str, rate: float, *, laned: bool) -> Port:
    if not 0 < rate < math.inf:
        raise ValueError(f"port {node}/{nic}: rate {rate}: expected a positive, finite number")
    if node not in nodes:
        raise ValueError(f"port {node}/{nic}: no node {node}")
    return Port(rate, laned=laned)
