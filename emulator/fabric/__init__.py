"""The network as roles see it (``interface``), over sockets (``tcp``) and in virtual time (``fluid``)."""

from .interface import (
    Endpoint,
    Fabric,
    Marks,
    Method,
    PortBytes,
    Region,
    Segment,
    Target,
    Transfer,
    TransferBytes,
    VirtualLane,
    WriteStream,
)

__all__ = [
    "Endpoint",
    "Fabric",
    "Marks",
    "Method",
    "PortBytes",
    "Region",
    "Segment",
    "Target",
    "Transfer",
    "TransferBytes",
    "VirtualLane",
    "WriteStream",
]
