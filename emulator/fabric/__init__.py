"""The network as roles see it (``interface``), over sockets (``tcp``) and in virtual time (``fluid``)."""

from .interface import (
    Endpoint,
    Fabric,
    Marks,
    Method,
    Region,
    Segment,
    Target,
    Transfer,
    VirtualLane,
    WriteStream,
)

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
