"""The traffic manager: the one place through which every transfer of a node's engines goes.

Roles say what moves, from where to where; here is decided over which link it goes (the paired CNIC, a GPU's PCIe
link under ``--copy cuda``, or no link at all for what an oracle gets free) and what submitting it costs.

An engine of several GPUs stripes every transfer over their NICs (``striped``): each carries an equal part,
from the i-th GPU's NIC of the source to the i-th of the destination. What is free crosses no NIC and is not
striped.

Doorbells. A transfer is a number of work requests, one a contiguous run. Submitting is serial work of a GPU's
process: one doorbell for each ``doorbell_batch`` RDMA writes, or one call for each CUDA copy, which cannot be
batched. The transfer may begin when its last doorbell has rung.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import trio

from ..deployment import Deployment
from ..errors import EmulatorError
from ..fabric.forwarding import ForwardingStream
from ..fabric.interface import Endpoint, Fabric, Marks, Region, Segment, Target, Transfer, WriteStream
from .segments import work_requests
from .striped import StripedMarks, StripedStream, Striper, part_tag

__all__ = ["Doorbell", "Traffic"]

COPIES = frozenset({Transfer.PE_H2D, Transfer.PE_DE_H2D, Transfer.DE_H2D, Transfer.D2H})
"""Transfers between an engine's own DRAM and HBM: CUDA copies where the NIC does not carry them."""

FREE = frozenset({*COPIES, Transfer.PE_OUT, Transfer.DE_LOAD, Transfer.DE_MISS, Transfer.RELOAD})
"""What an oracle gets free besides its reads."""


class Doorbell:
    """One GPU's submit queue: when the work requests handed to it will have been submitted.

    ``submit_s``: model seconds of its time per doorbell; ``batch``: work requests per doorbell.
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
            gpu: Doorbell(engine.submit_write_s, engine.doorbell_batch)
            for gpu in deployment.node_gpus(fabric.node)
        }
        self._copies = {gpu: Doorbell(engine.submit_copy_s, 1) for gpu in self._writes}
        # Nobody pays for what is free, so that nothing is spread over NICs.
        self._parts = 1 if deployment.system.free else deployment.tensor_parallel
        self._stripers = {
            name: Striper(self._parts, deployment.layout.kv_bytes) for name in deployment.engines_of(fabric.node)
        }

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
        """A stream of ``engine``'s; ``ends`` are source, destination and remote region. Use ``async with``.

        The endpoints are the first GPU's at either end. ``marks`` is the receiver's view of ``tag``.
        """
        if self._parts == 1:
            return self._open(engine, self._target(transfer, *ends), local, segments, tag)
        split = self._stripers[engine].split
        parts = zip(*map(split, segments), strict=True)
        return StripedStream(
            [
                self._open(gpu, target, local, part, part_tag(tag, index))
                for index, ((gpu, target), part) in enumerate(
                    zip(self._targets(engine, transfer, ends), parts, strict=True)
                )
            ]
        )

    def marks(self, tag: str) -> Marks:
        """The receiver's view of what another node's traffic manager streams under ``tag``."""
        if self._parts == 1:
            return self._fabric.marks(tag)
        return StripedMarks([self._fabric.marks(part_tag(tag, part)) for part in range(self._parts)])

    async def write(
        self,
        engine: str,
        transfer: Transfer,
        ends: tuple[Endpoint, Endpoint, str],
        local: Region,
        segment: Segment,
    ) -> None:
        """One message of ``engine``'s, without a mark; returns when it is in place. ``ends`` as of a stream."""
        if self._parts == 1:
            await self._write(engine, self._target(transfer, *ends), local, segment)
            return
        failures: list[EmulatorError] = []

        async def attempt(gpu: str, target: Target, part: Segment) -> None:
            try:
                await self._write(gpu, target, local, part)
            except EmulatorError as error:
                failures.append(error)

        parts = self._stripers[engine].split(segment)
        async with trio.open_nursery() as nursery:
            for (gpu, target), part in zip(self._targets(engine, transfer, ends), parts, strict=True):
                if part.size_bytes:
                    nursery.start_soon(attempt, gpu, target, part)
        if failures:
            raise failures[0]

    def _open(self, gpu: str, target: Target, local: Region, segments: Sequence[Segment], tag: str) -> WriteStream:
        stream = self._fabric.open_stream(target, local, segments, tag=tag)
        doorbell = self._doorbell(gpu, target)
        return stream if doorbell is None else _Submitted(stream, segments, doorbell, self._fabric)

    async def _write(self, gpu: str, target: Target, local: Region, segment: Segment) -> None:
        doorbell = self._doorbell(gpu, target)
        after_s = 0.0 if doorbell is None else doorbell.ring(self._fabric.now(), work_requests(segment))
        await self._fabric.write(target, local, segment, after_s=after_s)

    def _targets(
        self, engine: str, transfer: Transfer, ends: tuple[Endpoint, Endpoint, str]
    ) -> list[tuple[str, Target]]:
        """Each GPU of ``engine`` and where its part of a transfer goes."""
        src, dst, region = ends
        return [
            (gpu, self._target(transfer, _nth(src, index), _nth(dst, index), region))
            for index, gpu in enumerate(self._deployment.gpus_of(engine))
        ]

    def _target(self, transfer: Transfer, src: Endpoint, dst: Endpoint, region: str) -> Target:
        if self._deployment.system.free and transfer in FREE:
            return Target(_on(src, "free"), _on(dst, "free"), region, Transfer.FREE)
        if self._deployment.config.replay.copies == "cuda" and transfer in COPIES:
            gpu = src.nic.removeprefix("cnic")
            return Target(_on(src, f"pcie{gpu}"), _on(dst, f"pcie{gpu}"), region, transfer)
        return Target(src, dst, region, transfer)

    def _doorbell(self, gpu: str, target: Target) -> Doorbell | None:
        if target.transfer is Transfer.FREE:
            return None
        return (self._copies if target.src.nic.startswith("pcie") else self._writes)[gpu]


def _on(endpoint: Endpoint, nic: str) -> Endpoint:
    return msgspec.structs.replace(endpoint, nic=nic)


def _nth(endpoint: Endpoint, index: int) -> Endpoint:
    """The CNIC ``index`` further on."""
    return _on(endpoint, f"cnic{int(endpoint.nic.removeprefix('cnic')) + index}")


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
