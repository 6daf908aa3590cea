"""A run's configuration is a frozen value: it crosses processes unchanged and refuses what contradicts itself."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from emulator.config import ReplayConfig, RunConfig

from .clusters import config


def test_a_run_crosses_processes_unchanged() -> None:
    """Encoding and decoding a RunConfig is the identity."""
    run = config(agents=3, path="de")
    assert msgspec.json.decode(msgspec.json.encode(run), type=RunConfig) == run


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"agents": 1, "aps": 1.0}, "agents and aps"),
        ({"agents": 0}, "agents = 0"),
        ({"aps": 0.0}, "aps = 0.0"),
        ({"aps": float("nan")}, "aps = nan"),
        ({"aps": float("inf")}, "aps = inf"),
    ],
)
def test_a_replay_is_a_closed_loop_or_an_open_one(options: dict[str, Any], says: str) -> None:
    """Both at once, no agents, and a rate that is none are refused."""
    with pytest.raises(ValueError, match=says):
        ReplayConfig(**options)
