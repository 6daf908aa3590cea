"""Engines in step: the barrier of an expert-parallel group before each layer's FFN, and the exchange that it is.

All GPUs of a group attend apart and feed forward together: the FFN's experts are spread over them, so a layer's
tokens are dispatched to their experts and combined again, and nobody's FFN begins before everybody's attention
is over (paper, section 3: why attention time is to be equal). A forward of the group is a *step*. All members
take part in all exchanges of a step, those without a batch too, as idle ranks of a real group run along.

The GPUs of a tensor-parallel engine are in step by themselves. They exchange activations: beside a dense model
that is the exchange of the engine's own group, before experts one that every engine has before the group's.

Inside a node the barrier is a counter and the exchange goes over NVLink, which nothing else uses: it takes its
bytes over the rate. Between nodes it is the fabric's ``collective``. Engines of a dense model are groups of
one.
"""

from __future__ import annotations

from collections.abc import Mapping

import trio

from ..deployment import Deployment, Group
from ..fabric.interface import Exchanged, Fabric

__all__ = ["Lockstep", "Step"]


class Lockstep:
    """One node's part in the steps of its group."""

    def __init__(self, deployment: Deployment, fabric: Fabric, group: Group) -> None:
        self._deployment = deployment
        self._fabric = fabric
        self.group = group
        self.steps = 0
        self._tensors: dict[str, Lockstep] = {}
        """By engine: the exchanges of its own GPUs, where they are not the group's."""
        if deployment.tensor_parallel > 1 and not group.pairs:
            self._tensors = {
                engine: Lockstep(deployment, fabric, deployment.tensor_group(engine))
                for engine in deployment.engines_of(fabric.node)
            }

    async def wanted(self) -> None:
        """Return when another node of the group has begun what this one has not joined. Never for one node."""
        if self.group.ring is None:
            await trio.sleep_forever()
        else:
            await self._fabric.wait_entered(self.group.ring)

    async def begin(self, tokens: Mapping[str, int], ready_s: float) -> Step:
        """Join the group's next prefill forward with ``tokens`` new tokens of each engine that has a batch."""
        started = await self.exchange(0, ready_s, sum(tokens.values()))
        step = Step(self, self.steps, started.started_s, tokens, started.total / self.group.gpus)
        self.steps += 1
        return step

    async def exchange(self, port_bytes: int, ready_s: float, amount: int = 0) -> Exchanged:
        """One exchange of the group: ``port_bytes`` payload bytes leave each of this node's ports of the ring."""
        ring = self.group.ring
        if ring is None:
            return Exchanged(ready_s, ready_s, amount)
        node = self._fabric.node
        payload = {src: port_bytes for src, _ in ring.hops if src.node == node} if port_bytes else {}
        return await self._fabric.collective(ring, payload, ready_s=ready_s, amount=amount)

    async def exchange_layers(
        self, layers: int, mean_tokens: float, ready_s: float, amount: int = 0
    ) -> tuple[float, int]:
        """The exchanges of ``layers`` layers at once, of ``mean_tokens`` tokens a GPU.

        When it is over on all GPUs of the group, and the sum of all nodes' ``amount``.
        """
        volume = self._deployment.exchange_volume(self.group, mean_tokens)
        if volume is None:
            return ready_s, amount
        port_bytes = self._deployment.scale.payload_bytes(layers * volume.cnic_bytes)
        exchanged = await self.exchange(port_bytes, ready_s, amount)
        nvlink_s = layers * volume.nvlink_bytes / self._deployment.costs.gpu.nvlink_bps
        return max(exchanged.over_s, exchanged.started_s + nvlink_s), exchanged.total

    async def attended(self, engine: str, layers: int, tokens: int, ready_s: float) -> float:
        """When the GPUs of ``engine`` have exchanged what its attention of ``layers`` layers, over at
        ``ready_s``, gave.

        At once where that is part of the group's exchange.
        """
        tensors = self._tensors.get(engine)
        if tensors is None:
            return ready_s
        over_s, _ = await tensors.exchange_layers(layers, tokens / tensors.group.gpus, ready_s)
        return over_s

    async def all_attended(self, layers: int, ready: Mapping[str, tuple[int, float]]) -> float:
        """When the last of several engines is there; their tokens, and when their attention is over."""
        ready_s = [at_s for _, at_s in ready.values()]
        if self._tensors:

            async def wait(index: int, engine: str, tokens: int) -> None:
                ready_s[index] = await self.attended(engine, layers, tokens, ready_s[index])

            async with trio.open_nursery() as nursery:
                for index, (engine, (tokens, _)) in enumerate(ready.items()):
                    if tokens:
                        nursery.start_soon(wait, index, engine, tokens)
        return max(ready_s)


class _Barrier:
    """One layer's: how many engines are not there yet, and when the last will be."""

    def __init__(self, missing: int) -> None:
        self.missing = missing
        self.ready_s = 0.0
        self.end_s = 0.0
        self.over = trio.Event()


class Step:
    """One forward of the group, as this node's engines see it: each calls ``layer``, layer by layer."""

    def __init__(
        self, lockstep: Lockstep, index: int, started_s: float, tokens: Mapping[str, int], mean_tokens: float
    ) -> None:
        self.index = index
        self.started_s = started_s
        self._lockstep = lockstep
        self._tokens = tokens
        self._mean_tokens = mean_tokens
        deployment = lockstep._deployment
        self._layers = deployment.layout.layers
        self._each_layer = deployment.config.engine.prefill_exchange == "layer"
        self._rest_s = deployment.hardware.rest_layer_s(mean_tokens)
        self._barrier = _Barrier(len(tokens))

    async def layer(self, engine: str, layer: int, ready_s: float) -> float:
        """The attention of ``layer`` of ``engine`` is over at ``ready_s``; when the layer's FFN is over."""
        if not self._exchanges_after(layer):
            return ready_s + self._rest_s
        ready_s = await self._lockstep.attended(engine, self._layers_at_once, self._tokens[engine], ready_s)
        barrier = self._barrier
        barrier.ready_s = max(barrier.ready_s, ready_s)
        barrier.missing -= 1
        if barrier.missing:
            await barrier.over.wait()
        else:
            self._barrier = _Barrier(len(self._tokens))
            barrier.end_s = await self._exchange(barrier.ready_s) + self._rest_s
            barrier.over.set()
        return barrier.end_s

    async def run_along(self) -> None:
        """Take part in every exchange without a batch on this node."""
        ready_s = self.started_s
        for layer in range(self._layers):
            if self._exchanges_after(layer):
                ready_s = await self._exchange(ready_s) + self._rest_s

    def _exchanges_after(self, layer: int) -> bool:
        return self._each_layer or layer == self._layers - 1

    @property
    def _layers_at_once(self) -> int:
        return 1 if self._each_layer else self._layers

    async def _exchange(self, ready_s: float) -> float:
        over_s, _ = await self._lockstep.exchange_layers(self._layers_at_once, self._mean_tokens, ready_s)
        return over_s
