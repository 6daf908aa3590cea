"""The systems that are compared: DualPath, the paper's baselines and what it left open, as sets of switches.

Pure. A system is a value, not a class: roles ask for a switch, never for a name. Sources: the paper's evaluation
(Basic, +Layerwise, +DualPath loading under round robin, DualPath, Oracle, SGL(MC)) and its future work (split).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

__all__ = ["SYSTEMS", "Reads", "System"]

Reads = Literal["pe", "de", "auto", "split"]
"""Where a request's hit is read: always on one side, on either as the policy says, or on both at once."""


class System(msgspec.Struct, frozen=True):
    """One system's switches.

    ``layerwise``: PE HBM holds a few layers of a batch, loads and sends overlap its compute; without it all layers
    of a request are in HBM from before its forward until they are sent. ``policy``: what assigns requests.
    ``free``: disk reads, copies and P-D transfers cost nothing (they still happen, and their tokens are proved).
    ``pool``: a DRAM pool over all nodes stands before storage.
    """

    name: str
    about: str
    layerwise: bool = True
    reads: Reads = "auto"
    policy: str = "dualpath"
    free: bool = False
    pool: bool = False


SYSTEMS: Mapping[str, System] = MappingProxyType(
    {
        system.name: system
        for system in (
            System("dualpath", "the paper's system: both read paths, layerwise, scheduled"),
            System("basic", "PE path only, whole requests in HBM, round robin", False, "pe", "round-robin"),
            System("layerwise", "basic with layerwise prefill", True, "pe", "round-robin"),
            System("dualpath-rr", "both read paths, layerwise, round robin", True, "auto", "round-robin"),
            System("oracle", "dualpath whose reads, copies and P-D transfers cost nothing", free=True),
            System(
                "mooncake",
                "basic behind a DRAM pool over all PE and DE nodes, like SGLang with a Mooncake store",
                layerwise=False,
                reads="pe",
                policy="round-robin",
                pool=True,
            ),
            System("split", "dualpath that reads every request on both sides at once", reads="split"),
        )
    }
)
"""Every system by name, the default first."""
