"""The Fabric: all that a role sees of a network. Two implementations, ``tcp`` and ``fluid``, one set of laws.

Units: payload bytes (see ``emulator.scale``) and model seconds. A *region* is a registered byte array of one
node. A *queue pair* (QP) joins two endpoints on one virtual lane; it is opened on first use and carries its
messages in order, one after the other: a message posted later never overtakes an earlier one of its QP.
Different QPs share ports by weighted max-min inside a lane, and lanes by their shares.

Theory of operation. ``write`` posts one message (a gather list here, a scatter list there) and returns once
the bytes are in place over there. A *stream* is an ordered series of such messages known up front, each held
back by a gate until it is released. A message that carries a tag bumps the receiver's ``Marks`` of that tag
when it is in place, which is write-with-immediate. Every message names its ``Transfer``; sender and receiver
count its payload independently under that name. A *collective* is an exchange of many ports at once, behind a
barrier of all its members.

Must not import ``tcp``, ``fluid`` or anything above.
"""

from __future__ import annotations

import enum
import mmap
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Generic, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from ..extent import Extent, total_bytes
from ..records import ExchangeRecord, PortBytes, TransferBytes

__all__ = [
    "FREE_NIC",
    "MAX_PAYLOAD_BYTES",
    "Endpoint",
    "Exchanged",
    "Fabric",
    "Marks",
    "Method",
    "Region",
    "Ring",
    "Segment",
    "Target",
    "Transfer",
    "VirtualLane",
    "WriteStream",
]

_MAP_NORESERVE = 0x4000
"""Linux; named by Python's mmap only from 3.13 on. A cluster's DRAM may exceed the host's; its use does not."""

FREE_NIC = "free"
"""The NIC's name of an endpoint whose path costs nothing: what an oracle is given. It has no port and no rate."""

MAX_PAYLOAD_BYTES = 1 << 30
"""What one port may send in one exchange."""

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

    ``sent`` and ``received`` are the report's step keys, counted by the sender and by the receiver. FREE stands
    for any of them where it costs nothing; RELOAD and POOL are reads of memory that keeps KV in front of storage.
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
    COLLECTIVE = 12
    RELOAD = 13
    POOL = 14
    FREE = 15

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
    Transfer.COLLECTIVE: ("collective", ("collective",)),
    Transfer.RELOAD: ("reload", ("reload",)),
    Transfer.POOL: ("pool", ("pool",)),
    Transfer.FREE: ("free", ("free",)),
}


class Endpoint(msgspec.Struct, frozen=True):
    """One side of a NIC: its DRAM (``host``) or its GPU's HBM (``gpu``). A storage NIC has only ``host``.

    With ``FREE_NIC`` for its NIC it is one end of a path that costs nothing: messages are moved, counted and in
    order as on any queue pair, but nothing shapes or times them, and they take nothing from others.
    """

    node: str
    nic: str
    side: Side = "host"

    @property
    def free(self) -> bool:
        return self.nic == FREE_NIC


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
    """One message: bytes of ``local`` (gather) go to ``remote`` (scatter), in order; equal totals.

    Both may be empty: a message of no bytes keeps its place in the queue pair, marks its tag and is counted.
    """

    local: tuple[Extent, ...]
    remote: tuple[Extent, ...]

    def __post_init__(self) -> None:
        if total_bytes(self.local) != total_bytes(self.remote):
            raise ValueError(f"gather of {total_bytes(self.local)} bytes, scatter of {total_bytes(self.remote)}")

    @property
    def size_bytes(self) -> int:
        return total_bytes(self.local)


class Target(msgspec.Struct, frozen=True):
    """Where and how a message goes: the QP (src, dst, lane), the remote region's name, and what it is for.

    Both ends are free or none is, and what goes between free ends is counted as FREE. ValueError otherwise.
    """

    src: Endpoint
    dst: Endpoint
    region: str
    transfer: Transfer
    lane: VirtualLane = VirtualLane.KV

    def __post_init__(self) -> None:
        if len({self.transfer is Transfer.FREE, self.src.free, self.dst.free}) != 1:
            raise ValueError(
                f"{self.transfer.name} from {self.src} to {self.dst}: a free path joins two free ends, and carries"
                " what is FREE"
            )


class Ring(msgspec.Struct, frozen=True):
    """Who takes part in a collective, and over which ports.

    ``hops`` are the (source port, destination port) of all members; a port is the source of at most one hop and
    the destination of at most one. ValueError for anything else.
    """

    name: str
    nodes: tuple[str, ...]
    hops: tuple[tuple[Endpoint, Endpoint], ...]

    def __post_init__(self) -> None:
        if not self.nodes or len(set(self.nodes)) != len(self.nodes):
            raise ValueError(f"ring {self.name}: members {list(self.nodes)}: expected one or more, each once")
        for ends in ([src for src, _ in self.hops], [dst for _, dst in self.hops]):
            if len(set(ends)) != len(ends):
                raise ValueError(f"ring {self.name}: a port has two successors or two predecessors")
            for end in ends:
                if end.node not in self.nodes or end.free:
                    raise ValueError(f"ring {self.name}: {end} is no port of a member")


class Exchanged(msgspec.Struct, frozen=True):
    """One exchange, the same for all members: when it ideally began and ended, the sum of their amounts."""

    started_s: float
    over_s: float
    total: int


class Marks(ABC):
    """The receiver's view of a tag: how many messages with it are in place. Kept until ``forget``."""

    @property
    @abstractmethod
    def arrived(self) -> int: ...

    @abstractmethod
    def arrived_s(self, count: int) -> float:
        """When the first ``count`` messages were in place, however late anybody was told; they are."""

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
    def release(self, upto: int, *, after_s: float = 0.0) -> None:
        """Let segments 0 .. upto-1 go. Never goes backwards; beyond the last segment is an error.

        Those that this releases are posted in ``after_s`` seconds, as a doorbell that is rung later; none
        overtakes what the stream was told to release before. Closing the stream drops what is not yet due.
        """

    @property
    @abstractmethod
    def placed(self) -> int:
        """How many leading segments are in place over there."""

    @abstractmethod
    def placed_s(self, upto: int) -> float:
        """When segments 0 .. upto-1, which are in place, were so, by the receiver's clock."""

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
    async def write(
        self, target: Target, local: Region, segment: Segment, *, tag: str = "", after_s: float = 0.0
    ) -> None:
        """Post one message, in ``after_s`` seconds, and return when its bytes are in place.

        Checkpoints even for a cancelled caller; a cancelled write whose message has begun returns only when it
        is over (its memory is in use).
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
    async def collective(
        self,
        ring: Ring,
        payload: Mapping[Endpoint, int],
        *,
        ready_s: float,
        amount: int = 0,
        lane: VirtualLane = VirtualLane.MODEL,
    ) -> Exchanged:
        """Take part in the next exchange of ``ring``: the n-th call of every member is its n-th exchange.

        Nobody's bytes leave before all members have entered, the news of it has travelled for the RPC latency,
        and ``started_s``, the latest ``ready_s`` of all, is reached. Then each source port of this node sends
        ``payload[port]`` bytes (none where it is absent or 0) to its successor, counted as COLLECTIVE. Returns
        when everything that any member sends is in place.

        Times are ideal: ``over_s`` is ``started_s`` and what the exchange took from its actual start on. Where
        all enter an RPC latency before ``started_s`` that is when it was over; where somebody enters too late,
        or wakes up too late, the delay is not in it, so that delays do not add up over many exchanges.
        ``amount`` is summed over the members. A ring of one node that sends nothing is over when it is ready.

        PeerLost when a member died. Who is cancelled has entered all the same: the exchange goes on without
        him, since the others wait for his bytes, and his next call enters the next one.
        """

    @abstractmethod
    async def wait_entered(self, ring: Ring) -> None:
        """Return once some other member has entered an exchange of ``ring`` that this node has not.

        The news takes the RPC latency. PeerLost when a member died. May be cancelled at no cost.
        """

    @abstractmethod
    def exchanges(self) -> tuple[ExchangeRecord, ...]:
        """The exchanges that this node took part in and that are over, sorted."""

    @abstractmethod
    def sent(self) -> tuple[TransferBytes, ...]:
        """What this node sent (counted when a message is complete at the sender), sorted."""

    @abstractmethod
    def received(self) -> tuple[TransferBytes, ...]:
        """What this node received (counted when a message is in place here), sorted."""

    @abstractmethod
    def ports(self) -> tuple[PortBytes, ...]:
        """Counters of this node's NICs, sorted."""
