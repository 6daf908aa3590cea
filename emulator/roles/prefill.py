"""The prefill node: reads hit blocks on the PE side, and computes prompts on its engines, a forward at a time.

Engines of an expert-parallel group form their batches at the same moment and run their forwards in step;
engines of a dense model each go their own way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import trio

from ..deployment import Deployment, engine_node, split_ids
from ..errors import Withdrawn
from ..fabric.interface import Fabric, Transfer
from ..models.backend import Backend
from ..pool import BufferPool
from ..records import BatchRecord, CacheRecord, PoolRecord
from .blockio import Reader, StorageReader, Wanted
from .drampool import DramPool, PoolReader
from .leader import Leader, Reports
from .leases import LeaseQueue
from .lockstep import Lockstep
from .messages import (
    CANCEL,
    HIT_READY,
    PREFILL,
    REPLAY_BATCHES,
    Ack,
    Batches,
    Cancel,
    Cancelled,
    HitReady,
    Pooled,
    Prefill,
    Prefilled,
)
from .nodecache import CachedReader, open_cache
from .prefill_engine import Chunk, Job, PrefillEngine
from .traffic import Traffic
from .withdrawal import Withdrawal

__all__ = ["PrefillNode"]

PE_BUFFER = "pe_buffer"


class PrefillNode:
    """One PE node's role: a PE buffer, and an engine a GPU. Registers regions and handlers when it is made."""

    def __init__(self, deployment: Deployment, fabric: Fabric, backend: Backend, tasks: trio.Nursery) -> None:
        self._deployment = deployment
        self._fabric = fabric
        blocks = deployment.limits.pe_buffer_blocks
        self._region = fabric.register(PE_BUFFER, blocks * deployment.layout.full_block_bytes)
        self._pool = BufferPool(f"{fabric.node}.{PE_BUFFER}", self._region.size_bytes)
        self._buffer = LeaseQueue(self._pool)
        self._reader: Reader = StorageReader(deployment, fabric)
        if deployment.system.pool:
            self._reader = PoolReader(deployment, fabric, DramPool(deployment, fabric), self._region)
        self._cache = open_cache(deployment, fabric)
        if self._cache is not None:
            self._reader = CachedReader(deployment, fabric, self._cache, self._region)
        self._leader = Leader(deployment, fabric)
        self._withdrawals: dict[str, Withdrawal] = {}
        traffic = Traffic(deployment, fabric)
        self._engines: dict[str, PrefillEngine] = {}
        self._groups: dict[str, _Group] = {}
        for names, group in deployment.groups(fabric.node):
            engines = [PrefillEngine(deployment, fabric, backend, traffic, name, self._region) for name in names]
            steps = _Group(fabric, Lockstep(deployment, fabric, group), engines)
            for engine in engines:
                self._engines[engine.name] = engine
                self._groups[engine.name] = steps
            tasks.start_soon(steps.serve, name=f"prefill {group.name}")
        fabric.serve(PREFILL, self.prefill)
        fabric.serve(CANCEL, self.cancel)
        fabric.serve(REPLAY_BATCHES, self.replay)
        tasks.start_soon(self._leader.serve, name=f"{fabric.node} leader")

    def batches(self) -> Iterator[BatchRecord]:
        """Every forward so far, engine by engine."""
        for engine in self._engines.values():
            yield from engine.batches

    def pools(self) -> Iterator[PoolRecord]:
        yield self._pool.record()
        for engine in self._engines.values():
            yield engine.pool.record()

    def cache(self) -> CacheRecord | None:
        """What the node's own cache counted; None where it has none."""
        return None if self._cache is None else self._cache.record()

    async def prefill(self, request: Prefill) -> Prefilled:
        """Read the hit blocks where they are ours to read, compute, and reply when the last layer is computed.

        Withdrawn where the request was given up before; then nothing of it is under way from here, nor to here.
        """
        decision = request.assignment.decision
        name = decision.request
        withdrawal = self._withdrawals[name] = Withdrawal(name)
        reports = Reports(self._leader, name, ("read_pe", "prefilled"))
        try:
            return await self._prefill(request, withdrawal, reports)
        except Withdrawn:
            reports.all_over()
            raise
        finally:
            del self._withdrawals[name]

    async def cancel(self, request: Cancel) -> Cancelled:
        """Give a request up whose ``prefill`` is being answered."""
        withdrawal = self._withdrawals.get(request.request)
        if withdrawal is not None:
            withdrawal.ask()
        return Cancelled(withdrawal is not None)

    async def replay(self, request: Batches) -> Ack:
        """Form the recorded batches from now on."""
        for engine in self._engines.values():
            engine.recorded = deque(batch for batch in request.batches if batch.engine == engine.name)
        return Ack()

    def waiting(self) -> Iterator[tuple[str, str]]:
        """Every request here, and what it is doing."""
        for name, withdrawal in self._withdrawals.items():
            doing = f"{withdrawal.doing} on {self._fabric.node}"
            for engine in self._engines.values():
                if lacking := engine.lacks(name):
                    doing = f"waiting on {engine.name}, whose next recorded batch lacks {', '.join(lacking)}"
            yield name, doing

    async def _prefill(self, request: Prefill, withdrawal: Withdrawal, reports: Reports) -> Prefilled:
        decision, sequence = request.assignment.decision, request.assignment.sequence
        ids = split_ids(request.hit_ids)
        if not ids:
            reports.over("read_pe")
            job = Job(request, self._deployment, 0)
            return await self._compute(job, withdrawal, reports, self._fabric.now(), None, Pooled())
        with withdrawal.until_asked("waiting for the PE buffer"):
            lease = await self._buffer.reserve(len(ids) * self._deployment.layout.full_block_bytes, sequence)
        try:
            allocated_s = self._fabric.now()
            wanted = Wanted(ids, decision.de_blocks, PE_BUFFER, lease.offset, Transfer.PE_READ)
            pooled = await self._reader.read(wanted, sequence=sequence, withdrawal=withdrawal)
            reports.over("read_pe")
            if decision.path == "split":
                with withdrawal.until_asked(f"waiting for what {decision.de} reads of its hit"):
                    await self._fabric.call(engine_node(decision.de), HIT_READY, HitReady(decision.request))
            read_s = self._fabric.now()
            job = Job(request, self._deployment, lease.offset)
            return await self._compute(job, withdrawal, reports, allocated_s, read_s, pooled)
        finally:
            self._buffer.release(lease)

    async def _compute(
        self,
        job: Job,
        withdrawal: Withdrawal,
        reports: Reports,
        allocated_s: float,
        read_s: float | None,
        pooled: Pooled,
    ) -> Prefilled:
        engine, steps = self._engines[job.pe], self._groups[job.pe]
        with withdrawal.telling(lambda: engine.withdraw(job), "in prefill"):
            engine.add(job)
            steps.arrived()
            await job.over.wait()
        if not job.computed:
            raise withdrawal.error()
        reports.over("prefilled")
        messages = job.chunks * self._deployment.layout.layers
        return Prefilled(allocated_s, read_s, job.started_s, job.computed_s, job.token, messages, pooled)


class _Group:
    """The engines of one node that run their forwards in step."""

    def __init__(self, fabric: Fabric, lockstep: Lockstep, engines: Sequence[PrefillEngine]) -> None:
        self._fabric = fabric
        self._lockstep = lockstep
        self._engines = engines
        self._arrived = trio.Event()

    def arrived(self) -> None:
        """A job was added to one of the engines."""
        self._arrived.set()

    async def serve(self) -> None:
        """Run forwards while there is work, here or elsewhere in the group; never returns."""
        async with trio.open_nursery() as tails:
            while True:
                batches = await self._next()
                tokens = {engine.name: sum(chunk.new for chunk in batch) for engine, batch in batches if batch}
                step = await self._lockstep.begin(tokens, self._fabric.now())
                async with trio.open_nursery() as forwards:
                    if not tokens:
                        forwards.start_soon(step.run_along)
                    for engine, batch in batches:
                        if batch:
                            forwards.start_soon(tails.start, engine.run, batch, step)

    async def _next(self) -> list[tuple[PrefillEngine, list[Chunk]]]:
        """The batches of the next step, once there is anything to do in it."""
        wanted = False
        while True:
            self._arrived = trio.Event()
            batches = self._take()
            if batches is not None and (wanted or any(batch for _, batch in batches)):
                return batches
            wanted = await self._work() or wanted

    def _take(self) -> list[tuple[PrefillEngine, list[Chunk]]] | None:
        """Every engine's batch; None, and none taken, while a recorded one is not complete."""
        step = self._lockstep.steps
        if not all(engine.complete(step) for engine in self._engines):
            return None
        return [(engine, engine.take(step)) for engine in self._engines]

    async def _work(self) -> bool:
        """Wait for a job here, or for a step that others of the group began; whether it was that."""
        wanted = False

        async def until_wanted() -> None:
            nonlocal wanted
            await self._lockstep.wanted()
            wanted = True
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(until_wanted)
            await self._arrived.wait()
            nursery.cancel_scope.cancel()
        return wanted
