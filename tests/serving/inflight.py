"""Memory that is given back while a message to or from it is under way: there must be none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from emulator.config import RunConfig
from emulator.deployment import Deployment
from emulator.extent import Extent
from emulator.fabric.fluid_pair import Posted
from emulator.pool import Lease, Pool

__all__ = ["released_in_flight"]

Memory = tuple[str, str]
"""(node, region)."""


@contextmanager
def released_in_flight(config: RunConfig) -> Iterator[list[str]]:
    """Within: every release of a lease over which a message of a fluid fabric was under way, as text."""
    page_bytes = Deployment(config).layout.full_block_bytes
    roles = {member.name: member.role for member in config.members}
    under_way: dict[Posted, tuple[tuple[Memory, Sequence[Extent]], ...]] = {}
    found: list[str] = []
    post, drop, place, lose, release = Posted.post, Posted.drop, Posted.place, Posted.lose, Pool.release

    def begin(message: Posted) -> None:
        route, segment = message._route, message._segment
        target = route.target
        under_way[message] = (
            ((target.src.node, route.local.name), segment.local),
            ((target.dst.node, route.remote.name), segment.remote),
        )
        post(message)

    def ended(how: Any) -> Any:
        def end(message: Posted, *args: Any) -> Any:
            kept = under_way.pop(message, ())
            over = how(message, *args)
            if over is False:
                under_way[message] = kept
            return over

        return end

    def check(pool: Pool, lease: Lease) -> None:
        (node, region), unit = _memory(pool.name, roles, page_bytes)
        for first, count in lease.runs:
            low, high = first * unit, (first + count) * unit
            for ends in under_way.values():
                for memory, extents in ends:
                    if memory == (node, region) and any(e.offset < high and low < e.end for e in extents):
                        found.append(f"{pool.name}: {low} to {high} released with {extents} under way")
        release(pool, lease)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Posted, "post", begin)
        for name, how in (("drop", drop), ("place", place), ("lose", lose)):
            patch.setattr(Posted, name, ended(how))
        patch.setattr(Pool, "release", check)
        yield found


def _memory(pool: str, roles: Mapping[str, str], page_bytes: int) -> tuple[Memory, int]:
    """The memory that a pool divides, and the bytes of its unit."""
    owner, _, part = pool.partition(".")
    node, _, gpu = owner.partition("/")
    if part == "hbm":
        return (node, f"hbm{gpu}"), page_bytes if roles[node] == "de" else 1
    if part.endswith(".landing"):
        return (part.removesuffix(".landing"), f"landing/{node}"), 1
    return (node, part), 1
