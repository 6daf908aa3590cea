"""Engines of several GPUs: what they compute is right, and every one of their NICs carries its share."""

from __future__ import annotations

from collections import Counter

import pytest

from emulator.config import ModelConfig
from emulator.errors import ConfigError
from emulator.fabric.interface import VirtualLane
from emulator.sim import simulate
from emulator.workload import Workload

from ..clusters import broken, config, conversation

LOAD = Workload(tuple(conversation(f"a{i}", (300, 70), (1, 40), (130, 65)) for i in range(5)))
TOY = ModelConfig(name="toy", backend="toy")
QWEN = ModelConfig(name="qwen32b")


@pytest.mark.parametrize("over", ["nvlink", "cnic"])
@pytest.mark.parametrize("gpus", [2, 4])
@pytest.mark.parametrize("system", ["basic", "dualpath", "mooncake", "split", "oracle"])
@pytest.mark.parametrize("model", [ModelConfig(), QWEN], ids=["experts", "dense"])
def test_engines_of_several_gpus_serve_every_request(
    model: ModelConfig, system: str, gpus: int, over: str
) -> None:
    """Every request is done with the tokens of one process; no invariant is broken and no pool keeps anything."""
    run = config(gpus=4, engine={"tensor_parallel": gpus}, model=model, system=system, ep_over=over)
    records = simulate(run, LOAD)
    assert [r.status for r in records.requests] == ["done"] * 15
    assert not broken(run, LOAD, records)
    assert all(pool.free == pool.total for node in records.nodes for pool in node.pools)


@pytest.mark.parametrize("gpus", [2, 4])
def test_real_attention_over_striped_kv_is_exact(gpus: int) -> None:
    """The toy computes its tokens from KV that came over several NICs."""
    pytest.importorskip("torch", reason="torch, the extra `toy`, is not installed")
    run = config(gpus=4, engine={"tensor_parallel": gpus}, model=TOY)
    records = simulate(run, LOAD)
    assert not broken(run, LOAD, records)


@pytest.mark.parametrize("gpus", [2, 4])
@pytest.mark.parametrize("system", ["basic", "dualpath"])
def test_every_nic_of_an_engine_carries_its_share(system: str, gpus: int) -> None:
    """KV on the NICs of one engine differs by no more than a row a message, whichever way it goes."""
    run = config(gpus=4, engine={"tensor_parallel": gpus}, system=system)
    records = simulate(run, LOAD)
    for node in records.nodes:
        carried: Counter[tuple[int, str]] = Counter()
        for port in node.ports:
            if port.nic.startswith("cnic") and port.lane == VirtualLane.KV:
                carried[int(port.nic.removeprefix("cnic")), port.direction] = port.payload_bytes
        for first in range(0, 4, gpus):
            for direction in ("read", "write"):
                shares = [carried[first + gpu, direction] for gpu in range(gpus)]
                # A row of one byte; streams of both sides and of loads and sends take turns of their own.
                assert max(shares) - min(shares) <= 8, (node.node, direction, shares)


def test_attention_and_weights_are_divided() -> None:
    """A dense model whose weights bind takes close to a quarter of the time on four GPUs."""
    alone, four = (
        simulate(run, LOAD)
        for run in (config(gpus=4, model=QWEN), config(gpus=4, model=QWEN, engine={"tensor_parallel": 4}))
    )
    assert 0.25 < (four.ended_s - four.t0_s) / (alone.ended_s - alone.t0_s) < 0.4


@pytest.mark.parametrize("gpus", [3, 8])
def test_engines_that_do_not_fill_a_node_are_refused(gpus: int) -> None:
    """One line names the key, the value and the node."""
    with pytest.raises(ConfigError, match=rf"\[engine\] tensor_parallel = {gpus}: expected a divisor of the 4"):
        simulate(config(gpus=4, engine={"tensor_parallel": gpus}), LOAD)
