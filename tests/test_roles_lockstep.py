"""Laws of engines in step, in virtual time over the cluster's own network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator.config import ModelConfig, RunConfig, ScaleConfig
from emulator.deployment import Deployment
from emulator.fabric.clock import run_virtual
from emulator.fabric.fluid import open_fluid
from emulator.fabric.interface import Fabric, VirtualLane
from emulator.roles.lockstep import Lockstep, Step
from emulator.sim import fluid_network
from tests.clusters import config
from tests.within import assert_within

CNIC_BPS = 400e9 / 8
ROUNDING = 1e-4
"""An exchange is whole payload bytes, each of which stands for hundreds of model bytes."""
TOKENS = 2000
ATTENTION_S = 0.004
"""Of one engine in one layer."""

Loads = Mapping[str, float | Sequence[float]]
"""Attention seconds a layer of each engine that has a batch; a series is gone round layer by layer."""


class _Forward:
    """One prefill forward of the PE group: when each engine ended each layer, and each node's exchanges."""

    def __init__(self, run: RunConfig, loads: Loads) -> None:
        self.deployment = Deployment(run)
        self.layers = self.deployment.layout.layers
        self.ends_s: dict[str, list[float]] = {}
        self.started_s = 0.0
        self.moved: dict[str, int] = {}
        self.exchanged: dict[str, int] = {}
        run_virtual(self._all, run, loads)

    async def _all(self, run: RunConfig, loads: Loads) -> None:
        network = fluid_network(run)
        async with open_fluid(network), trio.open_nursery() as nursery:
            for node in self.deployment.named("pe"):
                nursery.start_soon(self._node, network.fabric(node), node, loads)

    async def _node(self, fabric: Fabric, node: str, loads: Loads) -> None:
        async with trio.open_nursery() as nursery:
            for engines, group in self.deployment.groups(node):
                nursery.start_soon(
                    self._part,
                    fabric,
                    Lockstep(self.deployment, fabric, group),
                    [e for e in engines if e in loads],
                    loads,
                )
        self.moved[node] = sum(
            row.payload_bytes
            for row in fabric.ports()
            if row.direction == "read" and row.lane == VirtualLane.MODEL
        )
        self.exchanged[node] = sum(row.count for row in fabric.exchanges() if row.payload_bytes)

    async def _part(self, fabric: Fabric, lockstep: Lockstep, engines: Sequence[str], loads: Loads) -> None:
        step = await lockstep.begin(dict.fromkeys(engines, TOKENS), 0.0)
        self.started_s = max(self.started_s, step.started_s)
        async with trio.open_nursery() as nursery:
            for engine in engines:
                nursery.start_soon(self._engine, fabric, step, engine, loads[engine])
            if not engines:
                nursery.start_soon(step.run_along)

    async def _engine(self, fabric: Fabric, step: Step, engine: str, load: float | Sequence[float]) -> None:
        attention_s = [load] if isinstance(load, float) else load
        end_s, ends = step.started_s, []
        for layer in range(self.layers):
            end_s = await step.layer(engine, layer, end_s + attention_s[layer % len(attention_s)])
            ends.append(end_s)
            await fabric.sleep_until(end_s)
        self.ends_s[engine] = ends

    @property
    def mean_tokens(self) -> float:
        return len(self.ends_s) * TOKENS / len(self.deployment.pe_engines)

    @property
    def rest_s(self) -> float:
        return self.deployment.hardware.rest_layer_s(self.mean_tokens)

    @property
    def exchange_s(self) -> float:
        """Of one layer's dispatch and combine, over whichever of its two ways takes longer."""
        (_, group) = self.deployment.groups("pe0")[0]
        volume = self.deployment.exchange_volume(group, round(self.mean_tokens))
        assert volume is not None
        return max(volume.cnic_bytes / CNIC_BPS, volume.nvlink_bytes / self.deployment.costs.gpu.nvlink_bps)


def _run(**options: Any) -> RunConfig:
    """Two PE nodes of two engines; in virtual time there is no dilation."""
    run = config(pe_nodes=2, **options)
    return msgspec.structs.replace(run, scale=ScaleConfig(run.scale.kv_bytes, dilation=1.0))


def _even(run: RunConfig) -> dict[str, float]:
    return dict.fromkeys(Deployment(run).pe_engines, ATTENTION_S)


@pytest.mark.parametrize("over", ["nvlink", "cnic"])
def test_a_layer_is_the_slowest_attention_the_exchange_and_the_rest(over: str) -> None:
    """Of all engines alike, on whichever node: none begins its FFN before everybody's attention is over."""
    run = _run(ep_over=over)
    loads = _even(run) | {"pe0/1": 2.5 * ATTENTION_S, "pe1/0": 0.5 * ATTENTION_S}
    forward = _Forward(run, loads)
    assert len({tuple(ends) for ends in forward.ends_s.values()}) == 1
    layer_s = 2.5 * ATTENTION_S + forward.exchange_s + forward.rest_s
    for layer, end_s in enumerate(forward.ends_s["pe0/0"], 1):
        expected = forward.started_s + layer * layer_s
        assert_within(end_s, expected, rel=ROUNDING, what=f"end of layer {layer}")


@given(st.lists(st.lists(st.floats(0.001, 0.02), min_size=4, max_size=4), min_size=1, max_size=3))
@settings(max_examples=20)
def test_every_layer_waits_for_its_slowest(attention_s: list[list[float]]) -> None:
    """The barrier is each layer's own: who is slow in one does not slow the next."""
    run = _run()
    loads = {engine: [layer[place] for layer in attention_s] for place, engine in enumerate(_even(run))}
    forward = _Forward(run, loads)
    assert len({tuple(ends) for ends in forward.ends_s.values()}) == 1
    ends = forward.ends_s["pe0/0"]
    for layer, (before_s, after_s) in enumerate(pairwise([forward.started_s, *ends])):
        slowest_s = max(attention_s[layer % len(attention_s)])
        expected = slowest_s + forward.exchange_s + forward.rest_s
        assert_within(after_s - before_s, expected, rel=ROUNDING, what=f"layer {layer}")


@pytest.mark.parametrize("slow", ["pe0/0", "pe1/1"])
def test_an_engine_at_half_speed_slows_its_group(slow: str) -> None:
    """All attention of the group takes twice as long, and nothing else does."""
    run = _run()
    even, slowed = _Forward(run, _even(run)), _Forward(run, _even(run) | {slow: 2 * ATTENTION_S})
    for engine, ends in slowed.ends_s.items():
        more_s = ends[-1] - even.ends_s[engine][-1]
        assert_within(more_s, even.layers * ATTENTION_S, rel=ROUNDING, what=f"what {engine} waits for {slow}")


def test_engines_of_a_dense_model_are_groups_of_one() -> None:
    """Nobody waits for anybody, nothing is exchanged: a slow engine slows itself alone."""
    run = _run(model=ModelConfig(name="qwen32b"))
    even, slowed = _Forward(run, _even(run)), _Forward(run, _even(run) | {"pe0/0": 2 * ATTENTION_S})
    assert not any(slowed.moved.values())
    more_s = slowed.ends_s["pe0/0"][-1] - even.ends_s["pe0/0"][-1]
    assert_within(more_s, even.layers * ATTENTION_S, rel=ROUNDING, what="what it costs itself")
    for engine in ("pe0/1", "pe1/0", "pe1/1"):
        assert slowed.ends_s[engine] == even.ends_s[engine]


def test_a_node_without_a_batch_runs_along() -> None:
    """It takes part in every exchange with its ports' bytes, and the step counts the tokens that there are."""
    run = _run()
    forward = _Forward(run, {"pe0/0": ATTENTION_S, "pe0/1": ATTENTION_S})
    assert forward.mean_tokens == TOKENS / 2
    assert forward.exchanged == dict.fromkeys(("pe0", "pe1"), forward.layers)
    assert forward.moved["pe0"] == forward.moved["pe1"] > 0
    layer_s = ATTENTION_S + forward.exchange_s + forward.rest_s
    expected = forward.started_s + forward.layers * layer_s
    assert_within(forward.ends_s["pe0/0"][-1], expected, rel=ROUNDING, what="end of the forward")


def test_exchanges_may_be_joined_into_one_a_forward() -> None:
    """As many bytes in one exchange as else in one a layer; barriers between are gone, so that idling is too.

    Engines whose slow layers differ wait for each other in every layer, or for the sum once.
    """
    loads = {
        "pe0/0": [ATTENTION_S, 3 * ATTENTION_S],
        "pe0/1": [ATTENTION_S],
        "pe1/0": [3 * ATTENTION_S, ATTENTION_S],
        "pe1/1": [ATTENTION_S],
    }
    by_layer = _Forward(_run(), loads)
    joined = _Forward(_run(engine={"prefill_exchange": "forward"}), loads)
    layers = by_layer.layers
    assert by_layer.exchanged == dict.fromkeys(("pe0", "pe1"), layers)
    assert joined.exchanged == dict.fromkeys(("pe0", "pe1"), 1)
    for node, moved in joined.moved.items():
        assert_within(moved, by_layer.moved[node], rel=ROUNDING, what=f"bytes of {node}")
    other_s = layers * (joined.exchange_s + joined.rest_s)
    took = {name: f.ends_s["pe0/0"][-1] - f.started_s for name, f in (("layer", by_layer), ("forward", joined))}
    assert_within(took["layer"], 3 * layers * ATTENTION_S + other_s, rel=ROUNDING, what="a barrier a layer")
    longest_s = ATTENTION_S * (2 * layers + layers % 2)
    assert_within(took["forward"], longest_s + other_s, rel=ROUNDING, what="a barrier a forward")


def test_who_is_idle_is_told_that_others_began() -> None:
    """`wanted` returns once another node of the group is in a forward that this one has not joined."""
    run = _run()
    deployment = Deployment(run)

    async def work() -> None:
        network = fluid_network(run)
        async with open_fluid(network), trio.open_nursery() as nursery:
            busy, idle = (
                Lockstep(deployment, network.fabric(node), deployment.groups(node)[0][1])
                for node in ("pe0", "pe1")
            )
            with trio.move_on_after(1.0) as scope:
                await idle.wanted()
            assert scope.cancelled_caught
            nursery.start_soon(busy.begin, {"pe0/0": TOKENS}, trio.current_time())
            await idle.wanted()
            step = await idle.begin({}, trio.current_time())
            assert step.index == 0 and idle.steps == 1

    run_virtual(work)
