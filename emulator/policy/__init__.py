"""Every scheduling decision, as functions of what the scheduler or an engine knows at that moment.

``interface`` says what a policy is; ``dualpath`` and ``roundrobin`` are two, and ``builtin`` names them. ``split``
shares a hit between both sides, ``admission`` says what can never be served, and ``packing`` forms a prefill
engine's passes. Pure: no clock, no awaits, no chance but a seeded hash, ties by the order of engines. Only
``plugin``, which loads a user's policy from a file, is not, and is not imported here.
"""

from .admission import Limits, refusal
from .builtin import POLICIES, make_policy
from .interface import Load, Policy, PolicySetup, Queued, Side, group_of
from .packing import Packable, pack
from .split import split_blocks

__all__ = [
    "POLICIES",
    "Limits",
    "Load",
    "Packable",
    "Policy",
    "PolicySetup",
    "Queued",
    "Side",
    "group_of",
    "make_policy",
    "pack",
    "refusal",
    "split_blocks",
]
