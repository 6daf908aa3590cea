"""The network as roles see it (``interface``), over sockets (``tcp``) and in virtual time (``fluid``)."""

from .interface import (
    FREE_NIC,
    MAX_PAYLOAD_BYTES,
    Endpoint,
    Exchanged,
    Fabric,
    Marks,
    Method,
    Region,
    Ring,
    Segment,
    Target,
    Transfer,
    VirtualLane,
    WriteStream,
)

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
