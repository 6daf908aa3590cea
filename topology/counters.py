"""What the kernel has counted at a NIC: plain values, for those who read but do not make networks."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Direction", "LaneCounters", "PortCounters"]

Direction = Literal["read", "write"]


class LaneCounters(msgspec.Struct, frozen=True):
    """One lane class of a port direction, as its qdisc counts: link-layer bytes, wire segments."""

    lane: str
    sent_bytes: int
    packets: int
    drops: int
    backlog_bytes: int


class PortCounters(msgspec.Struct, frozen=True):
    """One direction of a NIC: ``read`` leaves the node, ``write`` enters it.

    ``direct_packets`` bypassed all classes and so were not shaped: a run in which it is not 0 is void.
    """

    node: str
    nic: str
    direction: Direction
    lanes: tuple[LaneCounters, ...]
    direct_packets: int

    def lane(self, name: str) -> LaneCounters:
        """``high``, ``kv``, ``control``, or ``ack`` for what passes beside the lanes."""
        return next(lane for lane in self.lanes if lane.lane == name)
