"""The prefill node: reads hit blocks on the PE path, and computes prompts layer by layer in batches.

Each engine is one GPU with its CNIC. A batch runs layer by layer: before a layer's attention its hit KV must be
in HBM (loaded from the PE buffer or from the DE's, at most ``LAYER_SLOTS`` layers of a request at a time);
after it the layer's KV goes to the DE buffer: all of it on the PE path, the miss on the DE path. Layer l's slot
is free for layer l + LAYER_SLOTS once its outgoing segment is in place.

Times are the cost model's; results are real: every layer reads the received bytes and writes the new ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack

import numpy as np
import trio

from . import policy
from .deployment import LAYER_SLOTS, Deployment, engine_gpu, split_ids
from .errors import EmulatorError
from .fabric.interface import Fabric, Region, Target, Transfer, WriteStream
from .kvcache import Layout
from .leases import LeaseQueue
from .messages import (
    LOAD,
    PREFILL,
    PROGRESS,
    REPLAY_BATCHES,
    Ack,
    Batches,
    Load,
    Phase,
    Prefill,
    Prefilled,
    Progress,
)
from .models.backend import Backend, Bytes, State
from .policy import BatchItem
from .pool import BufferPool
from .records import BatchRecord, PoolRecord
from .traffic import StorageReader, hbm_region, load_segments, load_tag, miss_segments, miss_tag

__all__ = ["PrefillNode"]

PE_BUFFER = "pe_buffer"


class PrefillNode:
    """One PE node's role: a PE buffer, and an engine a GPU. Registers regions and handlers when it is made."""

    def __init__(
        self, deployment: Deployment, fabric: Fabric, backend: Backend, engines: int, tasks: trio.Nursery
    ) -> None:
        self._deployment = deployment
        self._fabric = fabric
        self._tasks = tasks
        blocks = deployment.limits.pe_buffer_blocks
        self._region = fabric.register(PE_BUFFER, blocks * deployment.layout.full_block_bytes)
        self._pool = BufferPool(f"{fabric.node}.{PE_BUFFER}", self._region.size_bytes)
        self._buffer = LeaseQueue(self._pool)
        self._reader = StorageReader(deployment, fabric)
        names = [f"{fabric.node}/{gpu}" for gpu in range(engines)]
        self._engines = {name: _Engine(deployment, fabric, backend, name, self._region) for name in names}
        fabric.serve(PREFILL, self.prefill)
        fabric.serve(REPLAY_BATCHES, self.replay)
        for engine in self._engines.values():
            tasks.start_soon(engine.serve, name=f"prefill {engine.name}")

    def batches(self) -> Iterator[BatchRecord]:
        """Every forward pass so far, engine by engine."""
        for engine in self._engines.values():
            yield from engine.batches

    def pools(self) -> Iterator[PoolRecord]:
        yield self._pool.record()
        for engine in self._engines.values():
            yield engine.pool.record()

    async def prefill(self, request: Prefill) -> Prefilled:
        """Read the hit blocks where they are ours to read, compute, and reply when the last layer is computed."""
        decision = request.assignment.decision
        hit_tokens = self._deployment.hit_tokens(decision.hit_blocks)
        if decision.path == "de" or not hit_tokens:
            return await self._compute(_Job(request, hit_tokens, request.buffer_base), self._fabric.now(), None)
        size = decision.hit_blocks * self._deployment.layout.full_block_bytes
        async with self._buffer.hold(size, request.assignment.sequence) as lease:
            allocated_s = self._fabric.now()
            ids, sequence = split_ids(request.hit_ids), request.assignment.sequence
            await self._reader.read(ids, PE_BUFFER, lease.offset, Transfer.PE_READ, sequence=sequence)
            read_s = self._fabric.now()
            self._tasks.start_soon(self._progress, decision.request, "read")
            return await self._compute(_Job(request, hit_tokens, lease.offset), allocated_s, read_s)

    async def replay(self, request: Batches) -> Ack:
        """Form the recorded batches from now on."""
        for engine in self._engines.values():
            engine.recorded = deque(names for name, names in request.batches if name == engine.name)
        return Ack()

    async def _compute(self, job: _Job, allocated_s: float, read_s: float | None) -> Prefilled:
        await self._engines[job.request.assignment.decision.pe].compute(job)
        self._tasks.start_soon(self._progress, job.id, "prefilled")
        return Prefilled(allocated_s, read_s, job.started_s, job.computed_s, job.token)

    async def _progress(self, request: str, phase: Phase) -> None:
        await self._fabric.call(self._deployment.scheduler, PROGRESS, Progress(request, phase))


class _Job:
    """A request in an engine: what it needs and how far it is."""

    def __init__(self, request: Prefill, hit_tokens: int, load_base: int) -> None:
        self.request = request
        self.id = request.assignment.decision.request
        self.hit_tokens = hit_tokens
        self.context = request.prompt_tokens
        self.load_base = load_base
        """Where the hit's Full Blocks begin: in the PE buffer on the PE path, in the DE buffer on the DE path."""
        self.tokens = np.frombuffer(request.append, dtype="<u4")
        self.computed = trio.Event()
        self.started_s = 0.0
        self.computed_s = 0.0
        self.token = 0
        if len(self.tokens) != self.context - hit_tokens:
            raise EmulatorError(f"request {self.id}: {len(self.tokens)} tokens to append to {hit_tokens}")

    @property
    def on_pe_path(self) -> bool:
        return self.request.assignment.decision.path == "pe"

    @property
    def shape(self) -> tuple[int, int]:
        """(cached, new) tokens, as the cost model counts a request."""
        return self.hit_tokens, self.context - self.hit_tokens


class _Seat:
    """A job's place in the running batch: its two layers of HBM and its streams."""

    def __init__(self, job: _Job, layout: Layout, hbm: Bytes, base: int) -> None:
        self.job = job
        size = job.context * layout.kv_bytes
        self.slots = tuple(base + slot * size for slot in range(LAYER_SLOTS))
        self.kv = [hbm[at : at + size].reshape(job.context, layout.kv_bytes) for at in self.slots]
        self.state: State | None = None


class _Engine:
    """One GPU: a queue of jobs whose hit is in DRAM, one forward pass at a time."""

    def __init__(
        self, deployment: Deployment, fabric: Fabric, backend: Backend, name: str, buffer_region: Region
    ) -> None:
        self.name = name
        self.batches: list[BatchRecord] = []
        self.recorded: deque[tuple[str, ...]] | None = None
        self._deployment = deployment
        self._fabric = fabric
        self._backend = backend
        self._buffer_region = buffer_region
        layout = deployment.layout
        size = deployment.limits.pe_hbm_tokens * LAYER_SLOTS * layout.kv_bytes
        self._hbm = fabric.register(hbm_region(engine_gpu(name)), size)
        self.pool = BufferPool(f"{name}.hbm", size)
        self._space = LeaseQueue(self.pool)
        self._ready: dict[str, _Job] = {}
        self._arrived = trio.Event()

    async def compute(self, job: _Job) -> None:
        """Queue ``job``; return when its last layer is computed."""
        self._backend.check_context(job.context)
        self._ready[job.id] = job
        self._arrived.set()
        await job.computed.wait()

    async def serve(self) -> None:
        """Form and run batches; never returns."""
        async with trio.open_nursery() as nursery:
            while True:
                batch = self._next_batch()
                if not batch:
                    self._arrived = trio.Event()
                    await self._arrived.wait()
                    continue
                await nursery.start(self._run, batch)

    def _next_batch(self) -> list[_Job]:
        """Take the next batch from the queue: as recorded, or as the policy packs it; empty: wait for more."""
        if self.recorded is not None:
            names = self.recorded[0] if self.recorded else ()
            if not names or any(name not in self._ready for name in names):
                return []
            self.recorded.popleft()
            return [self._ready.pop(name) for name in names]
        ready = list(self._ready.values())
        engine = self._deployment.config.engine
        count = policy.pack_batch(
            [BatchItem(job.id, *job.shape) for job in ready],
            attention_s=self._deployment.costs.attention_s,
            quota_s=engine.quota_s,
            batch_tokens=engine.batch_tokens,
            hbm_tokens=self._deployment.limits.pe_hbm_tokens,
        )
        return [self._ready.pop(job.id) for job in ready[:count]]

    async def _run(self, batch: Sequence[_Job], task_status: trio.TaskStatus[None]) -> None:
        """One forward pass. Started once the last layer is computed; ends when all KV is out of HBM."""
        layout = self._deployment.layout
        sizes = [LAYER_SLOTS * job.context * layout.kv_bytes for job in batch]
        async with self._space.hold(sum(sizes)) as lease, AsyncExitStack() as stack, trio.open_nursery() as loads:
            base = lease.offset
            seats: list[tuple[_Seat, WriteStream]] = []
            for job, size in zip(batch, sizes, strict=True):
                seat = _Seat(job, layout, self._hbm.memory, base)
                base += size
                out = await stack.enter_async_context(self._open_out(seat))
                seats.append((seat, out))
                if job.hit_tokens:
                    loads.start_soon(self._load if job.on_pe_path else self._ask_load, seat, out)
            await self._forward(seats)
            task_status.started()
            for _, out in seats:
                await out.wait_placed(layout.layers)

    def _open_out(self, seat: _Seat) -> WriteStream:
        """The stream of computed KV to the DE buffer: hit and miss on the PE path, the miss on the DE path."""
        job, decision = seat.job, seat.job.request.assignment.decision
        first = 0 if job.on_pe_path else job.hit_tokens
        target = Target(
            self._deployment.gpu(self.name),
            self._deployment.host(decision.de),
            "de_buffer",
            Transfer.PE_OUT if job.on_pe_path else Transfer.DE_MISS,
        )
        segments = miss_segments(
            self._deployment.layout, job.request.buffer_base, first, job.context - first, seat.slots
        )
        return self._fabric.open_stream(target, self._hbm, segments, tag=miss_tag(job.id))

    async def _load(self, seat: _Seat, out: WriteStream) -> None:
        """PE path: stream the hit from the PE buffer through our own CNIC, never more layers than slots ahead."""
        job = seat.job
        layers = self._deployment.layout.layers
        target = Target(
            self._deployment.host(self.name), self._deployment.gpu(self.name), self._hbm.name, Transfer.PE_H2D
        )
        segments = load_segments(self._deployment.layout, job.load_base, job.hit_tokens, seat.slots)
        async with self._fabric.open_stream(target, self._buffer_region, segments, tag=load_tag(job.id)) as stream:
            stream.release(min(LAYER_SLOTS, layers))
            for layer in range(LAYER_SLOTS, layers):
                await out.wait_placed(layer - LAYER_SLOTS + 1)
                stream.release(layer + 1)
            await stream.wait_placed(layers)

    async def _ask_load(self, seat: _Seat, out: WriteStream) -> None:
        """DE path: ask the DE to stream the hit; it paces itself by the miss that it receives from us."""
        decision = seat.job.request.assignment.decision
        node = self._deployment.host(decision.de).node
        await self._fabric.call(node, LOAD, Load(seat.job.id, self.name, seat.slots))

    async def _forward(self, seats: Sequence[tuple[_Seat, WriteStream]]) -> None:
        layers = self._deployment.layout.layers
        shape = [seat.job.shape for seat, _ in seats]
        layer_s = self._deployment.costs.prefill_layer_s(shape)
        marks = [self._fabric.marks(load_tag(seat.job.id)) if seat.job.hit_tokens else None for seat, _ in seats]
        for seat, _ in seats:
            seat.state = self._backend.embed(seat.job.tokens, seat.job.hit_tokens)
        started_s = end_s = self._fabric.now()
        for layer in range(layers):
            waited = False
            for mark, (_, out) in zip(marks, seats, strict=True):
                if mark is not None and mark.arrived <= layer:
                    await mark.wait(layer + 1)
                    waited = True
                if layer >= LAYER_SLOTS and out.placed <= layer - LAYER_SLOTS:
                    await out.wait_placed(layer - LAYER_SLOTS + 1)
                    waited = True
            # A layer whose KV was there in time begins when the one before it ends, however late we wake up.
            end_s = (max(end_s, self._fabric.now()) if waited else end_s) + layer_s
            for seat, _ in seats:
                assert seat.state is not None
                kv = seat.kv[layer % LAYER_SLOTS]
                seat.state = self._backend.layer(layer, seat.state, kv, seat.job.hit_tokens)
            await self._fabric.sleep_until(end_s)
            for _, out in seats:
                out.release(layer + 1)
        for mark in marks:
            if mark is not None:
                mark.forget()
        for seat, _ in seats:
            assert seat.state is not None
            seat.job.token = self._backend.token(seat.state)
            seat.job.started_s, seat.job.computed_s = started_s, end_s
            seat.job.computed.set()
        names = tuple(seat.job.id for seat, _ in seats)
        self.batches.append(BatchRecord(self.name, len(self.batches), names, tuple(shape), started_s, end_s))
