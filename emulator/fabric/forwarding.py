"""A fabric, and a stream, that do what another does: for those that change some of it.

Must not import ``tcp``, ``fluid`` or anything above.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from ..records import ExchangeRecord, PortBytes, TransferBytes
from .interface import (
    Endpoint,
    Exchanged,
    Fabric,
    Marks,
    Method,
    Region,
    Ring,
    Segment,
    Target,
    VirtualLane,
    WriteStream,
)

__all__ = ["ForwardingFabric", "ForwardingStream"]

Q = TypeVar("Q", bound=msgspec.Struct)
A = TypeVar("A", bound=msgspec.Struct)


class ForwardingStream(WriteStream):
    """``inner`` under another's hand."""

    def __init__(self, inner: WriteStream) -> None:
        self._inner = inner

    def release(self, upto: int, *, after_s: float = 0.0) -> None:
        self._inner.release(upto, after_s=after_s)

    @property
    def placed(self) -> int:
        return self._inner.placed

    def placed_s(self, upto: int) -> float:
        return self._inner.placed_s(upto)

    async def wait_placed(self, upto: int) -> None:
        await self._inner.wait_placed(upto)

    async def aclose(self) -> None:
        await self._inner.aclose()


class ForwardingFabric(Fabric):
    """``inner`` under another's hand; of the same node."""

    def __init__(self, inner: Fabric) -> None:
        self.node = inner.node
        self._inner = inner

    def now(self) -> float:
        return self._inner.now()

    async def sleep_until(self, at_s: float) -> None:
        await self._inner.sleep_until(at_s)

    def register(self, name: str, size_bytes: int) -> Region:
        return self._inner.register(name, size_bytes)

    async def write(
        self, target: Target, local: Region, segment: Segment, *, tag: str = "", after_s: float = 0.0
    ) -> None:
        await self._inner.write(target, local, segment, tag=tag, after_s=after_s)

    def open_stream(
        self, target: Target, local: Region, segments: Sequence[Segment], *, tag: str = ""
    ) -> WriteStream:
        return self._inner.open_stream(target, local, segments, tag=tag)

    def marks(self, tag: str) -> Marks:
        return self._inner.marks(tag)

    def serve(self, method: Method[Q, A], handler: Callable[[Q], Awaitable[A]]) -> None:
        self._inner.serve(method, handler)

    async def call(self, node: str, method: Method[Q, A], request: Q) -> A:
        return await self._inner.call(node, method, request)

    async def collective(
        self,
        ring: Ring,
        payload: Mapping[Endpoint, int],
        *,
        ready_s: float,
        amount: int = 0,
        lane: VirtualLane = VirtualLane.MODEL,
    ) -> Exchanged:
        return await self._inner.collective(ring, payload, ready_s=ready_s, amount=amount, lane=lane)

    async def wait_entered(self, ring: Ring) -> None:
        await self._inner.wait_entered(ring)

    def exchanges(self) -> tuple[ExchangeRecord, ...]:
        return self._inner.exchanges()

    def sent(self) -> tuple[TransferBytes, ...]:
        return self._inner.sent()

    def received(self) -> tuple[TransferBytes, ...]:
        return self._inner.received()

    def ports(self) -> tuple[PortBytes, ...]:
        return self._inner.ports()
