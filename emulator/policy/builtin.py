"""The policies that come with the emulator, by name. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from ..errors import ConfigError
from .dualpath import DualPath
from .interface import Policy, PolicySetup
from .roundrobin import RoundRobin

__all__ = ["POLICIES", "make_policy"]

POLICIES: Mapping[str, Callable[[PolicySetup], Policy]] = MappingProxyType(
    {"dualpath": DualPath, "round-robin": RoundRobin}
)
"""Every policy by the name that a system or a user gives it."""


def make_policy(name: str, setup: PolicySetup) -> Policy:
    """The policy called ``name``. ConfigError where there is none."""
    if name not in POLICIES:
        raise ConfigError(f"no policy is called {name!r}; it is one of {', '.join(POLICIES)}, or a Python file")
    return POLICIES[name](setup)
