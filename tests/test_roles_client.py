"""The client ends a run that cannot be repeated before its clock starts, and one that breaks with one error."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from emulator.deployment import Deployment
from emulator.errors import ConfigError, StoreError, reported
from emulator.fabric.clock import run_virtual
from emulator.fabric.fluid import FluidNetwork, open_fluid
from emulator.plan import emulated_rates
from emulator.records import Decisions
from emulator.roles.client import Client
from emulator.sim import simulate
from emulator.store import MemoryStore
from emulator.workload import Workload

from .clusters import config, conversation

LOAD = Workload((conversation("a", (700, 70), (64, 3)), conversation("b", (500, 5))))


def _recorded() -> Decisions:
    records = simulate(config(gpus=1, warm=True), LOAD)
    return Decisions(
        tuple(decision for node in records.nodes for decision in node.decisions),
        tuple(batch for node in records.nodes for batch in node.batches),
    )


def _prepare(decisions: Decisions, **engine: Any) -> None:
    run = config(gpus=1, warm=True, engine=engine)
    network = FluidNetwork(emulated_rates(run), nodes=[m.name for m in run.members], rpc_latency_s=1e-5)

    async def main() -> None:
        async with open_fluid(network):
            deployment = Deployment(run)
            await Client(deployment, network.fabric("client"), deployment.load_backend()).prepare(LOAD, decisions)

    try:
        run_virtual(main)
    except BaseExceptionGroup as group:
        raise reported(group) or group from None


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ({"de_buffer_gb": 0.02}, "request .* does not fit this cluster: .*de_buffer_gb"),
        ({"de_hbm_kv_gb": 0.02}, "request .* does not fit this cluster: .*de_hbm_kv_gb"),
        ({"pe_hbm_kv_gb": 0.001}, "pe_hbm_kv_gb"),
    ],
)
def test_decisions_that_a_smaller_cluster_cannot_take_are_refused(engine: dict[str, float], says: str) -> None:
    """Less memory than a repeated request or batch needs is said before the start, with the setting's name."""
    with pytest.raises(ConfigError, match=f"--decisions: .*{says}"):
        _prepare(_recorded(), **engine)


def test_a_batch_that_fits_no_longer_is_refused() -> None:
    """Requests that fit one by one, but not as the batch that they were, are named with their batch."""
    recorded = _recorded()
    (first, *rest) = (batch for batch in recorded.batches)
    names = tuple(name for batch in (first, *rest) for name in batch.requests)
    shape = tuple(part for batch in (first, *rest) for part in batch.shape)
    together = msgspec.structs.replace(first, requests=names, shape=shape)
    limit_gb = 900 * 2 * Deployment(config()).shape.kv_bytes / 1e9
    with pytest.raises(ConfigError, match=r"--decisions: batch 0 of pe0/0 has \d+ tokens"):
        _prepare(Decisions(recorded.requests, (together,)), pe_hbm_kv_gb=limit_gb)


def test_batches_have_to_have_all_that_was_decided_and_nothing_else() -> None:
    """A request without its batch, as a broken run leaves it, or a batch without its decision is named."""
    recorded = _recorded()
    with pytest.raises(ConfigError, match=r"--decisions: request .* is in no batch of pe0/0"):
        _prepare(Decisions(recorded.requests, recorded.batches[:-1]))
    with pytest.raises(ConfigError, match=r"--decisions: request .* and was not decided"):
        _prepare(Decisions(recorded.requests[:-1], recorded.batches))


@pytest.mark.parametrize("path", ["pe", "de"])
@pytest.mark.parametrize("what", ["read_into", "append"])
def test_a_store_that_fails_ends_the_run(path: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a storage node, read or write, is the run's one error, and nothing waits for ever."""

    def fail(store: MemoryStore, *_: object) -> None:
        raise StoreError("the disk is gone")

    run = config(gpus=1, path=path)
    monkeypatch.setattr(MemoryStore, what, fail)
    with pytest.raises(StoreError, match="the disk is gone"):
        simulate(run, LOAD)
