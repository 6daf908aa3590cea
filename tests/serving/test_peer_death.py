"""A node that is gone in the middle of a run: the run ends at once, with one line that names it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator.config import ModelConfig, RunConfig
from emulator.errors import PeerLost
from emulator.fabric.fluid import FluidNetwork
from emulator.roles.serving import Role
from emulator.sim import simulate
from emulator.workload import Workload
from tests.clusters import broken, config, conversation

from .virtual import client_of, disturbed, failure

LOAD = Workload(
    (
        conversation("a", (700, 70), (64, 3)),
        conversation("b", (300, 130), (136, 10)),
        conversation("c", (500, 70), (640, 5)),
    )
)
NODES = ("pe0", "de0", "st0", "st1", "sched", "client")


def _config(system: str) -> RunConfig:
    return config(
        gpus=1, pe_nodes=2, warm=True, model=ModelConfig(name="toy"), system=system, engine={"pool_gb": 1.0}
    )


@cache
def _lasts_s(system: str) -> float:
    records = simulate(_config(system), LOAD)
    return records.ended_s - records.t0_s


@pytest.mark.parametrize("system", ["basic", "dualpath", "split", "mooncake"])
@settings(max_examples=8)
@given(node=st.sampled_from(NODES), part=st.floats(0, 1), given_up=st.booleans())
def test_a_node_lost_at_any_moment_ends_the_run_with_its_name(
    system: str, node: str, part: float, given_up: bool
) -> None:
    """Whichever node is gone, at whichever moment: no hang, no traceback, one error that names it, or a whole run.

    A run in which nobody needs the node any more comes to its end as if nothing had happened.
    """
    run = _config(system)
    at_s = part * _lasts_s(system)

    def kill(network: FluidNetwork, roles: Mapping[str, Role]) -> None:
        if given_up:
            client_of(roles).give_up("a:0")
        network.kill(node)

    error = failure(run, LOAD, at_s, kill)
    if error is not None:
        assert isinstance(error, PeerLost)
        assert node in error.text and "\n" not in error.text
    else:
        records, _ = disturbed(run, LOAD, at_s, kill)
        assert broken(run, LOAD, records) == []
