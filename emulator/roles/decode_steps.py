"""When decode engines step: all engines of an expert-parallel group together, each step as long as its slowest.

A step of a node that is a group by itself (or of one engine of a dense model) depends on nothing elsewhere, so
such a group runs in *epochs*: while the batches stay the same and no block fills, its steps have one length,
and it sleeps over all of them at once; an arrival ends the epoch at the next step's end. Where a group spans
nodes, every step has one exchange, all layers' bytes in one, and its barrier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import trio

from ..deployment import Deployment
from ..fabric.interface import Fabric
from .decode_engine import DecodeEngine, DecodeSequence
from .lockstep import Lockstep

__all__ = ["DecodeGroup"]


class DecodeGroup:
    """This node's engines of one group. ``serve`` must be running in a task."""

    def __init__(
        self, deployment: Deployment, fabric: Fabric, lockstep: Lockstep, engines: Sequence[DecodeEngine]
    ) -> None:
        self._deployment = deployment
        self._fabric = fabric
        self._lockstep = lockstep
        self._engines = engines
        self._arrived = trio.Event()
        self._epoch: trio.CancelScope | None = None
        self.steps = 0
        """Steps so far."""

    async def decode(self, engine: DecodeEngine, sequence: DecodeSequence) -> None:
        """Join ``engine``'s batch at the next step; return when the last token is out (at once for no tokens)."""
        if sequence.left:
            engine.joining.append(sequence)
            self._arrived.set()
            if self._epoch is not None:
                self._epoch.cancel()
            await sequence.finished.wait()

    def leave(self, engine: DecodeEngine, sequence: DecodeSequence) -> None:
        """Take ``sequence`` out of the batch at the end of the step; ``decode`` returns then."""
        if sequence in engine.joining:
            engine.joining.remove(sequence)
            sequence.finished.set()
            return
        sequence.gone_s = self._fabric.now()
        if self._epoch is not None:
            self._epoch.cancel()

    async def serve(self) -> None:
        """Run steps while there are sequences, here or elsewhere in the group; never returns."""
        started_s = self._fabric.now()
        while True:
            if not any(engine.batch for engine in self._engines):
                started_s = max(started_s, await self._work())
            # However late this process is, none decodes before its KV was there, and none delays the others.
            for engine in self._engines:
                engine.admit(started_s)
            if self._lockstep.group.ring is None:
                step_s = await self._alone()
                steps = await self._sleep_steps(started_s, step_s)
            else:
                step_s, steps = await self._together(started_s) - started_s, 1
                await self._fabric.sleep_until(started_s + step_s)
            for engine in self._engines:
                await engine.advance(steps, started_s, step_s)
            started_s += steps * step_s
            self.steps += steps

    async def _alone(self) -> float:
        """The length of a step with these batches, for a group without others."""
        mean = self._tokens() / self._lockstep.group.gpus
        layers = self._deployment.layout.layers
        exchanged_s, _ = await self._lockstep.exchange_layers(layers, mean, await self._attended(0.0))
        return exchanged_s + self._deployment.hardware.decode_rest_s(mean)

    async def _together(self, started_s: float) -> float:
        """One step of a group that spans ports; when it ends."""
        here, gpus = self._tokens(), len(self._engines) * self._deployment.tensor_parallel
        exchanged_s, total = await self._lockstep.exchange_layers(
            self._deployment.layout.layers, here / gpus, await self._attended(started_s), here
        )
        return exchanged_s + self._deployment.hardware.decode_rest_s(total / self._lockstep.group.gpus)

    async def _attended(self, started_s: float) -> float:
        """When attention of a step that begins at ``started_s`` is over on all engines here."""
        return await self._lockstep.all_attended(
            self._deployment.layout.layers,
            {engine.name: (len(engine.batch), started_s + engine.attention_s()) for engine in self._engines},
        )

    def _tokens(self) -> int:
        return sum(len(engine.batch) for engine in self._engines)

    async def _work(self) -> float:
        """Wait for a sequence here, or for a step that others of the group began; when there was either."""
        wanted = False
        while (joined_s := self._joined()) is None and not wanted:
            wanted = await self._wait()
        return self._fabric.now() if joined_s is None else joined_s

    async def _wait(self) -> bool:
        """Wait for an arrival here, or for a step that others of the group began; whether it was that."""
        wanted = False
        self._arrived = trio.Event()
        async with trio.open_nursery() as nursery:

            async def until_wanted() -> None:
                nonlocal wanted
                await self._lockstep.wanted()
                wanted = True
                nursery.cancel_scope.cancel()

            nursery.start_soon(until_wanted)
            await self._arrived.wait()
            nursery.cancel_scope.cancel()
        return wanted

    def _joined(self) -> float | None:
        """When the first of those who wait to join came."""
        return min((s.joined_s for engine in self._engines for s in engine.joining), default=None)

    def _changed(self) -> float | None:
        """When the first came to join, or was to leave."""
        left = [s.gone_s for engine in self._engines for s in engine.batch if s.gone_s is not None]
        joined_s = self._joined()
        return min(left if joined_s is None else [*left, joined_s], default=None)

    async def _sleep_steps(self, started_s: float, step_s: float) -> int:
        """Sleep to the end of the epoch, or of the step in which a sequence comes or is to leave; how many steps.

        It counts when that was, not when this task came to hear of it.
        """
        uniform = [steps for engine in self._engines if (steps := engine.uniform_steps()) is not None]
        most = min(uniform)
        if self._changed() is None:
            with trio.CancelScope() as self._epoch:
                await self._fabric.sleep_until(started_s + most * step_s)
            self._epoch = None
        changed_s = self._changed()
        if changed_s is None:
            return most
        steps = min(most, max(1, math.ceil((changed_s - started_s) / step_s)))
        await self._fabric.sleep_until(started_s + steps * step_s)
        return steps
