"""The traffic manager: the one place through which every transfer of a node's engines goes.

Roles say what moves, from where to where; here is decided over which link it goes (the paired CNIC, a GPU's PCIe
link under ``--copy cuda``, or no link at all for what an oracle gets free) and what submitting it costs.

Doorbells. A transfer is a number of work requests, one a contiguous run. Submitting is serial work of the engine:
one doorbell for each ``doorbell_batch`` RDMA writes, or one call for each CUDA copy, which cannot be batched. The
transfer may begin when its last doorbell has rung.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..deployment import Deployment
from ..fabric.forwarding import ForwardingStream
from ..fabric.interface import Endpoint, Fabric, Region, Segment, Target, Transfer, WriteStream
from .segments import work_requests

__all__ = ["Doorbell", "Traffic"]

COPIES = frozenset({Transfer.PE_H2D, Transfer.PE_DE_H2D, Transfer.DE_H2D, Transfer.D2H})
"""Transfers between an engine's own DRAM and HBM: CUDA copies where the NIC does not carry them."""

FREE = frozenset({*COPIES, Transfer.PE_OUT, Transfer.DE_LOAD, Transfer.DE_MISS, Transfer.RELOAD})
"""What an oracle gets free besides its reads."""


class Doorbell:
    """One engine's submit queue: when the work requests handed to it will have been submitted.

    ``submit_s``: model seconds of the engine's time per doorbell; ``batch``: work requests per doorbell.
    """

    def __init__(self, submit_s: float, batch: int) -> None:
        self._submit_s = submit_s
        self._batch = batch
        self._free_s = 0.0

    def ring(self, now_s: float, requests: int) -> float:
        """Submit ``requests`` at ``now_s``; how many seconds later the last of them is submitted."""
        rings = -(-requests // self._batch)
        self._free_s = max(self._free_s, now_s) + rings * self._submit_s
        return self._free_s - now_s


class Traffic:
    """The traffic manager of one node."""

    def __init__(self, deployment: Deployment, fabric: Fabric) -> None:
        self._deployment = deployment
        self._fabric = fabric
        engine = deployment.config.engine
        self._writes = {
            name: Doorbell(engine.submit_write_s, engine.doorbell_batch)
            for name in deployment.engines_of(fabric.node)
        }
        self._copies = {name: Doorbell(engine.submit_copy_s, 1) for name in self._writes}

    def stream(
        self,
        engine: str,
        transfer: Transfer,
        ends: tuple[Endpoint, Endpoint, str],
        local: Region,
        segments: Sequence[Segment],
        *,
        tag: str = "",
    ) -> WriteStream:
        """A stream of ``engine``'s; ``ends`` are source, destination and remote region. Use ``async with``."""
        target = self._target(transfer, *ends)
        stream = self._fabric.open_stream(target, local, segments, tag=tag)
        doorbell = self._doorbell(engine, transfer, target)
        return stream if doorbell is None else _Submitted(stream, segments, doorbell, self._fabric)

    async def write(
        self,
        engine: str,
        transfer: Transfer,
        ends: tuple[Endpoint, Endpoint, str],
        local: Region,
        segment: Segment,
    ) -> None:
        """One message of ``engine``'s; returns when it is in place."""
        target = self._target(transfer, *ends)
        doorbell = self._doorbell(engine, transfer, target)
        after_s = 0.0 if doorbell is None else doorbell.ring(self._fabric.now(), work_requests(segment))
        await self._fabric.write(target, local, segment, after_s=after_s)

    def _target(self, transfer: Transfer, src: Endpoint, dst: Endpoint, region: str) -> Target:
        if self._deployment.system.free and transfer in FREE:
            return Target(_on(src, "free"), _on(dst, "free"), region, Transfer.FREE)
        if self._deployment.config.replay.copies == "cuda" and transfer in COPIES:
            gpu = src.nic.removeprefix("cnic")
            return Target(_on(src, f"pcie{gpu}"), _on(dst, f"pcie{gpu}"), region, transfer)
        return Target(src, dst, region, transfer)

    def _doorbell(self, engine: str, transfer: Transfer, target: Target) -> Doorbell | None:
        if target.transfer is Transfer.FREE:
            return None
        return (self._copies if target.src.nic.startswith("pcie") else self._writes)[engine]


def _on(endpoint: Endpoint, nic: str) -> Endpoint:
    return msgspec.structs.replace(endpoint, nic=nic)


class _Submitted(ForwardingStream):
    """A stream whose segments begin when they have been submitted."""

    def __init__(
        self, stream: WriteStream, segments: Sequence[Segment], doorbell: Doorbell, fabric: Fabric
    ) -> None:
        super().__init__(stream)
        self._requests = [work_requests(segment) for segment in segments]
        self._doorbell = doorbell
        self._fabric = fabric
        self._released = 0

    def release(self, upto: int, *, after_s: float = 0.0) -> None:
        now = self._fabric.now()
        for index in range(self._released, upto):
            delay_s = self._doorbell.ring(now, self._requests[index])
            super().release(index + 1, after_s=max(after_s, delay_s))
        self._released = max(self._released, upto)
