"""The Fabric: all that a role sees of a network. Two implementations, ``tcp`` and ``fluid``, one set of laws.

Units: payload bytes (see ``emulator.scale``) and model seconds. A *region* is a registered byte array of one
node. A *queue pair* (QP) joins two endpoints on one virtual lane; it is opened on first use and carries its
messages in order, one after the other: a message posted later never overtakes an earlier one of its QP.
Different QPs share ports by weighted max-min inside a lane, and lanes by their shares.

Theory of operation. ``write`` posts one message (a gather list here, a scatter list there) and returns once
the bytes are in place over there. A *stream* is an ordered series of such messages known up front, each held
back by a gate until it is released. A message that carries a tag bumps the receiver's ``Marks`` of that tag
when it is in place, which is write-with-immediate. Every message names its ``Transfer``; sender and receiver
count its payload independently under that name.

Must not import ``tcp``, ``fluid`` or anything above.
"""

from __future__ import annotations

import enum
import mmap
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..extent import Extent, total_bytes
from ..records import PortBytes, TransferBytes

__all__ = [
    "Endpoint",
    "Fabric",
    "Marks",
    "Method",
    "Region",
    "Segment",
    "Target",
    "Transfer",
    "VirtualLane",
    "WriteStream",
]

_MAP_NORESERVE = 0x4000
"""Linux; named by Python's mmap only from 3.13 on. A cluster's DRAM may exceed the host's; its use does not."""

Side = Literal["host", "gpu"]
Q = TypeVar("Q", bound=msgspec.Struct)
A = TypeVar("A", bound=msgspec.Struct)


class VirtualLane(enum.IntEnum):
    """The lanes of a port. Collectives and model traffic use MODEL; all KV traffic uses KV."""

    CONTROL = 0
    MODEL = 1
    KV = 2
    SPARE = 3


class Transfer(enum.IntEnum):
    """What a message is for: the arrows of the paper's figures 4a and 4b and the writes of the decode side.

    ``sent`` and ``received`` are the report's step keys, counted by the sender and by the receiver.
    """

    PE_READ = 1
    PE_H2D = 2
    PE_OUT = 3
    PE_DE_H2D = 4
    DE_READ = 5
    DE_LOAD = 6
    DE_MISS = 7
    DE_H2D = 8
    D2H = 9
    PERSIST = 10
    OTHER = 11

    @property
    def sent(self) -> str:
        return _STEPS[self][0]

    @property
    def received(self) -> tuple[str, ...]:
        return _STEPS[self][1]


_STEPS: dict[Transfer, tuple[str, tuple[str, ...]]] = {
    Transfer.PE_READ: ("pe1", ("pe2",)),
    Transfer.PE_H2D: ("pe3", ("pe4",)),
    Transfer.PE_OUT: ("pe5", ("pe6", "pe7")),
    Transfer.PE_DE_H2D: ("pe8", ("pe9",)),
    Transfer.DE_READ: ("de1", ("de2",)),
    Transfer.DE_LOAD: ("de3", ("de4", "de5")),
    Transfer.DE_MISS: ("de_miss", ("de_miss",)),
    Transfer.DE_H2D: ("de6", ("de7",)),
    Transfer.D2H: ("d2h", ("d2h",)),
    Transfer.PERSIST: ("persist", ("persist",)),
    Transfer.OTHER: ("other", ("other",)),
}


class Endpoint(msgspec.Struct, frozen=True):
    """One side of a NIC: its DRAM (``host``) or its GPU's HBM (``gpu``). A storage NIC has only ``host``."""

    node: str
    nic: str
    side: Side = "host"


class Region:
    """A registered byte array of this node. ``memory`` is uint8, one dimension, zeroed and lazily resident."""

    def __init__(self, name: str, memory: npt.NDArray[np.uint8]) -> None:
        self.name = name
        self.memory = memory

    @classmethod
    def allocate(cls, name: str, size_bytes: int) -> Region:
        """A region of zeros whose pages become resident when they are first written, however large it is.

        ConfigError for one that this host's address space cannot hold.
        """
        if not size_bytes:
            return cls(name, np.zeros(0, dtype=np.uint8))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            memory = mmap.mmap(-1, size_bytes, flags=flags)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"memory {name} of {size_bytes} bytes: this host cannot map it ({error}); it takes smaller"
                " buffers, blocks or kv_bytes"
            ) from None
        return cls(name, np.frombuffer(memory, dtype=np.uint8))

    @property
    def size_bytes(self) -> int:
        return int(self.memory.size)


class Segment(msgspec.Struct, frozen=True):
    """One message: bytes of ``local`` (gather) go to ``remote`` (scatter), in order; equal totals."""

    local: tuple[Extent, ...]
    remote: tuple[Extent, ...]

    def __post_init__(self) -> None:
        if total_bytes(self.local) != total_bytes(self.remote):
            raise ValueError(f"gather of {total_bytes(self.local)} bytes, scatter of {total_bytes(self.remote)}")

    @property
    def size_bytes(self) -> int:
        return total_bytes(self.local)


class Target(msgspec.Struct, frozen=True):
    """Where and how a message goes: the QP (src, dst, lane), the remote region's name, and what it is for."""

    src: Endpoint
    dst: Endpoint
    region: str
    transfer: Transfer
    lane: VirtualLane = VirtualLane.KV


class Marks(ABC):
    """The receiver's view of a tag: how many messages with it are in place. Kept until ``forget``."""

    @property
    @abstractmethod
    def arrived(self) -> int: ...

    @abstractmethod
    async def wait(self, count: int) -> None:
        """Return once ``count`` messages of the tag are in place. PeerLost when a sender of the tag died."""

    @abstractmethod
    def forget(self) -> None:
        """Drop the tag. A message that arrives later is placed and counted, and wakes nobody."""


class WriteStream(ABC):
    """An ordered series of segments on one QP, each behind a gate. ``async with``: leaving it closes it.

    Closing drops what was not released and what is queued but not begun, and returns once nothing of the
    stream is in flight, cancelled or not, so that its memory may be reused.
    """

    @abstractmethod
    def release(self, upto: int) -> None:
        """Let segments 0 .. upto-1 go. Never goes backwards; beyond the last segment is an error."""

    @property
    @abstractmethod
    def placed(self) -> int:
        """How many leading segments are in place over there."""

    @abstractmethod
    async def wait_placed(self, upto: int) -> None:
        """Return once segments 0 .. upto-1 are in place. PeerLost when the peer died.

        ``trio.ClosedResourceError``, in another task too, when the stream was closed before.
        """

    @abstractmethod
    async def aclose(self) -> None: ...

    async def __aenter__(self) -> WriteStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


class Method(Generic[Q, A]):
    """A remote procedure's name and the types of its request and reply (msgspec Structs)."""

    def __init__(self, name: str, request: type[Q], reply: type[A]) -> None:
        self.name = name
        self.request = request
        self.reply = reply


class Fabric(ABC):
    """One node's network. Everything in payload bytes and model seconds."""

    node: str

    @abstractmethod
    def now(self) -> float:
        """Model seconds since the run's epoch, the same on every node."""

    @abstractmethod
    async def sleep_until(self, at_s: float) -> None:
        """Return at model time ``at_s`` or at once (a checkpoint) if that is past."""

    async def sleep(self, seconds: float) -> None:
        await self.sleep_until(self.now() + seconds)

    @abstractmethod
    def register(self, name: str, size_bytes: int) -> Region:
        """Register a region under a name unique on this node; peers may write into it from now on."""

    @abstractmethod
    async def write(self, target: Target, local: Region, segment: Segment, *, tag: str = "") -> None:
        """Post one message and return when its bytes are in place. Checkpoints even for a cancelled caller;

        a cancelled write whose message has begun returns only when it is over (its memory is in use).
        """

    @abstractmethod
    def open_stream(
        self, target: Target, local: Region, segments: Sequence[Segment], *, tag: str = ""
    ) -> WriteStream:
        """A stream of ``segments``; none goes before it is released. Use it with ``async with``."""

    @abstractmethod
    def marks(self, tag: str) -> Marks:
        """The receiver's view of ``tag`` (made on first mention by either side)."""

    @abstractmethod
    def serve(self, method: Method[Q, A], handler: Callable[[Q], Awaitable[A]]) -> None:
        """Answer ``method`` with ``handler``, each call in a task of its own.

        An EmulatorError from the handler reaches the caller as the same type with the same text.
        """

    @abstractmethod
    async def call(self, node: str, method: Method[Q, A], request: Q) -> A:
        """Call over the management network; each way takes at least the modelled RPC latency.

        Calling one's own node is allowed and costs the same. PeerLost when the node is gone.
        """

    @abstractmethod
    def sent(self) -> tuple[TransferBytes, ...]:
        """What this node sent (counted when a message is complete at the sender), sorted."""

    @abstractmethod
    def received(self) -> tuple[TransferBytes, ...]:
        """What this node received (counted when a message is in place here), sorted."""

    @abstractmethod
    def ports(self) -> tuple[PortBytes, ...]:
        """Counters of this node's NICs, sorted."""
