"""One prefill engine: a GPU's queue of jobs, its batches, and its part of a forward, layer by layer.

Before a layer's attention its hit KV must be in HBM; after it the layer's KV goes to the DE buffer: what the DE
has not read itself. Under layerwise prefill ``LAYER_SLOTS`` layers of a request are in HBM at a time: layer l's
slot is free for layer l + LAYER_SLOTS once its outgoing segment is in place. Without it all layers are there
from before the forward until they are sent after it.

Chunks. A prompt that would pass the attention quota is computed in several forwards. Under layerwise prefill a
later chunk loads everything before it again: the hit from where it was read, and what earlier chunks computed
from the DE buffer, where it went.

Times are the hardware's; results are real: every layer reads the received bytes and writes the new ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack

import numpy as np
import trio

from ..deployment import Deployment, engine_gpu, engine_node
from ..errors import EmulatorError
from ..fabric.interface import Fabric, Marks, Region, Transfer, WriteStream
from ..kvcache import Layout
from ..models.backend import Backend, Bytes, State
from ..policy import Packable, pack
from ..pool import BufferPool, Lease
from ..records import BatchRecord
from .leases import LeaseQueue
from .lockstep import Step
from .messages import LOAD, Load, PlannedBatch, Prefill
from .segments import buffer_rows, hbm_region, load_segments, load_tag, miss_segments, miss_tag, page_rows
from .traffic import Traffic

__all__ = ["Chunk", "Job", "PrefillEngine"]


class Job:
    """A request in an engine: what it needs and how far it is."""

    def __init__(self, request: Prefill, deployment: Deployment, load_base: int) -> None:
        decision = request.assignment.decision
        self.request = request
        self.id = decision.request
        self.context = request.prompt_tokens
        self.hit_tokens = deployment.hit_tokens(decision.hit_blocks)
        self.de_tokens = deployment.hit_tokens(decision.de_blocks)
        self.pe = decision.pe
        self.de = decision.de
        self.load_base = load_base
        """Where the hit's Full Blocks from token ``de_tokens`` on begin in the PE buffer."""
        self.tokens = np.frombuffer(request.append, dtype="<u4")
        self.done = 0
        """New tokens computed so far."""
        self.chunks = 0
        self.seat: _Seat | None = None
        """Its place in HBM, where it keeps one from forward to forward."""
        self.under_way = 0
        """Forwards that it is in, until all that they send is in place."""
        self.given_up = False
        self.over = trio.Event()
        """Its last layer is computed; or it is given up, and in no forward."""
        self.started_s = 0.0
        self.computed_s = 0.0
        self.token = 0
        if len(self.tokens) != self.context - self.hit_tokens:
            raise EmulatorError(f"request {self.id}: {len(self.tokens)} tokens to append to {self.hit_tokens}")

    @property
    def cached(self) -> int:
        """Tokens whose KV exists."""
        return self.hit_tokens + self.done

    @property
    def computed(self) -> bool:
        """Is its last layer computed?"""
        return not self.left

    @property
    def left(self) -> int:
        """New tokens that are still to be computed."""
        return len(self.tokens) - self.done


class Chunk:
    """A job's part in one forward: ``new`` tokens behind ``cached``."""

    def __init__(self, job: Job, new: int) -> None:
        self.job = job
        self.index = job.chunks
        self.cached = job.cached
        self.new = new

    @property
    def shape(self) -> tuple[int, int]:
        """(cached, new) tokens, as the cost model counts a request."""
        return self.cached, self.new

    @property
    def last(self) -> bool:
        return self.new == self.job.left


class _Seat:
    """A place in HBM for ``rows`` tokens of a request: a slot for each layer that is there at a time."""

    def __init__(self, lease: Lease, offset: int, slots: int, rows: int, layout: Layout, hbm: Bytes) -> None:
        self.lease = lease
        size = rows * layout.kv_bytes
        self.slots = tuple(offset + slot * size for slot in range(slots))
        self.kv = [hbm[at : at + size].reshape(rows, layout.kv_bytes) for at in self.slots]


class PrefillEngine:
    """One GPU, or a few as one: a queue of jobs whose hit is in DRAM, one forward at a time."""

    def __init__(
        self, deployment: Deployment, fabric: Fabric, backend: Backend, traffic: Traffic, name: str, buffer: Region
    ) -> None:
        self.name = name
        self.batches: list[BatchRecord] = []
        self.recorded: deque[PlannedBatch] | None = None
        self._deployment = deployment
        self._fabric = fabric
        self._backend = backend
        self._traffic = traffic
        self._buffer_region = buffer
        layout = deployment.layout
        self._slots = deployment.layer_slots
        self._resident = not deployment.system.layerwise
        size = deployment.limits.pe_hbm_tokens * self._slots * layout.kv_bytes
        self._hbm = fabric.register(hbm_region(engine_gpu(name)), size)
        self.pool = BufferPool(f"{name}.hbm", size)
        self._space = LeaseQueue(self.pool)
        self._ready: dict[str, Job] = {}

    def add(self, job: Job) -> None:
        """Queue ``job`` until it is ``over``."""
        self._backend.check_context(job.context)
        self._ready[job.id] = job

    def withdraw(self, job: Job) -> None:
        """Give ``job`` up. A forward that it is in computes it to the end of its chunk."""
        job.given_up = True
        self._ready.pop(job.id, None)
        self._leave(job)

    def complete(self, step: int) -> bool:
        """Are all jobs here of what was recorded for the group's forward ``step``?"""
        planned = self._planned(step)
        return planned is None or all(name in self._ready for name in planned.requests)

    def lacks(self, job: str) -> tuple[str, ...]:
        """The requests that the next recorded batch waits for, where ``job`` waits behind it."""
        if not self.recorded or job not in self._ready:
            return ()
        return tuple(name for name in self.recorded[0].requests if name not in self._ready)

    def take(self, step: int) -> list[Chunk]:
        """The next batch, for the group's forward ``step``: as recorded, or as packed now; maybe empty."""
        if self.recorded is None:
            taken = self._pack()
        else:
            planned = self._planned(step)
            if planned is None:
                return []
            self.recorded.popleft()
            taken = [(self._ready[name], new) for name, new in zip(planned.requests, planned.new, strict=True)]
        for job, _ in taken:
            del self._ready[job.id]
            job.under_way += 1
        return [Chunk(job, new) for job, new in taken]

    def _planned(self, step: int) -> PlannedBatch | None:
        return self.recorded[0] if self.recorded and self.recorded[0].step == step else None

    def _pack(self) -> list[tuple[Job, int]]:
        ready = list(self._ready.values())
        engine = self._deployment.config.engine
        held = sum(job.context for job in ready if job.seat is not None)
        taken = pack(
            [Packable(job.id, job.cached, job.left, 0 if job.seat is not None else job.context) for job in ready],
            attention_s=self._deployment.profile.predictor.attention_s,
            quota_s=engine.quota_s,
            batch_tokens=engine.batch_tokens,
            hbm_tokens=self._deployment.limits.pe_hbm_tokens - held,
        )
        return self._seat_whole(list(zip(ready, taken, strict=False)))

    def _seat_whole(self, taken: list[tuple[Job, int]]) -> list[tuple[Job, int]]:
        """Without layerwise prefill: HBM now for as many of ``taken`` as there is room for beside what is sent.

        The head alone may wait for room: whoever follows it could hold what it waits for.
        """
        for count, (job, _) in enumerate(taken):
            if self._resident and job.seat is None:
                lease = self._space.reserve_nowait(self._whole_bytes(job))
                if lease is None:
                    return taken[: max(count, 1)]
                job.seat = self._whole_seat(job, lease)
        return taken

    def _whole_bytes(self, job: Job) -> int:
        return self._slots * job.context * self._deployment.layout.kv_bytes

    def _whole_seat(self, job: Job, lease: Lease) -> _Seat:
        return _Seat(lease, lease.offset, self._slots, job.context, self._deployment.layout, self._hbm.memory)

    async def run(
        self, batch: Sequence[Chunk], step: Step, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """One forward. Started once the last layer is computed; ends when all KV that is sent is out of HBM."""
        layers = self._deployment.layout.layers
        async with AsyncExitStack() as stack, trio.open_nursery() as loads:
            seats, leases = await self._seats(batch)
            outs = [
                await stack.enter_async_context(self._open_out(*pair)) for pair in zip(batch, seats, strict=True)
            ]
            marks = [
                self._start_loads(chunk, seat, out, loads)
                for chunk, seat, out in zip(batch, seats, outs, strict=True)
            ]
            await self._forward(batch, seats, outs, marks, step)
            task_status.started()
            for out in outs:
                await out.wait_placed(layers)
            for lease in leases:
                self._space.release(lease)
            for chunk in batch:
                chunk.job.under_way -= 1
                self._leave(chunk.job)

    def _leave(self, job: Job) -> None:
        """Give back the HBM that ``job`` keeps from forward to forward, if it is in none and comes into none."""
        if job.under_way or not (job.computed or job.given_up):
            return
        if job.seat is not None:
            self._space.release(job.seat.lease)
            job.seat = None
        job.over.set()

    async def _seats(self, batch: Sequence[Chunk]) -> tuple[list[_Seat], list[Lease]]:
        """HBM for every chunk, and the leases that end with this forward."""
        layout, memory = self._deployment.layout, self._hbm.memory
        if not self._resident:
            rows = [sum(chunk.shape) for chunk in batch]
            lease = await self._space.reserve(self._slots * sum(rows) * layout.kv_bytes)
            seats, offset = [], lease.offset
            for count in rows:
                seats.append(_Seat(lease, offset, self._slots, count, layout, memory))
                offset += self._slots * count * layout.kv_bytes
            return seats, [lease]
        for chunk in batch:
            job = chunk.job
            if job.seat is None:
                job.seat = self._whole_seat(job, await self._space.reserve(self._whole_bytes(job)))
        return [chunk.job.seat for chunk in batch if chunk.job.seat is not None], []

    def _open_out(self, chunk: Chunk, seat: _Seat) -> WriteStream:
        """The stream of KV to the DE buffer: new tokens, and with the first chunk the hit that is not there."""
        job = chunk.job
        first = job.de_tokens if chunk.index == 0 else chunk.cached
        transfer = Transfer.DE_MISS if job.request.assignment.decision.path == "de" else Transfer.PE_OUT
        layout, request = self._deployment.layout, job.request
        if request.pages:
            ends = (self._deployment.gpu(self.name), self._deployment.gpu(job.de), hbm_region(engine_gpu(job.de)))
            rows = page_rows(layout, request.pages)
        else:
            ends = (self._deployment.gpu(self.name), self._deployment.host(job.de), "de_buffer")
            rows = buffer_rows(layout, request.buffer_base)
        segments = miss_segments(layout, rows, first, sum(chunk.shape) - first, seat.slots)
        return self._traffic.stream(self.name, transfer, ends, self._hbm, segments, tag=miss_tag(job.id))

    def _start_loads(self, chunk: Chunk, seat: _Seat, out: WriteStream, loads: trio.Nursery) -> list[Marks]:
        """Have everything before the chunk brought into HBM; the marks of the streams that bring it."""
        job = chunk.job
        if self._resident and chunk.index:
            return []
        marks = []
        parts = (
            (Transfer.DE_LOAD, 0, job.de_tokens),
            (Transfer.PE_H2D, job.de_tokens, job.hit_tokens - job.de_tokens),
            (Transfer.RELOAD, job.hit_tokens, chunk.cached - job.hit_tokens),
        )
        for transfer, first, tokens in parts:
            if tokens:
                marks.append(self._traffic.marks(load_tag(job.id, chunk.index, transfer)))
                if transfer is Transfer.PE_H2D:
                    loads.start_soon(self._load, chunk, seat, out, first, tokens)
                else:
                    loads.start_soon(self._ask_load, chunk, seat, first, tokens, transfer)
        return marks

    async def _load(self, chunk: Chunk, seat: _Seat, out: WriteStream, first: int, tokens: int) -> None:
        """Stream the hit from the PE buffer, never more layers than slots ahead."""
        job = chunk.job
        layers, slots = self._deployment.layout.layers, self._slots
        ends = (self._deployment.host(self.name), self._deployment.gpu(self.name), self._hbm.name)
        layout = self._deployment.layout
        segments = load_segments(layout, buffer_rows(layout, job.load_base, first), first, tokens, seat.slots)
        tag = load_tag(job.id, chunk.index, Transfer.PE_H2D)
        async with self._traffic.stream(
            self.name, Transfer.PE_H2D, ends, self._buffer_region, segments, tag=tag
        ) as stream:
            stream.release(slots)
            for layer in range(slots, layers):
                await out.wait_placed(layer - slots + 1)
                stream.release(layer + 1)
            await stream.wait_placed(layers)

    async def _ask_load(self, chunk: Chunk, seat: _Seat, first: int, tokens: int, transfer: Transfer) -> None:
        """Ask the DE to stream what lies in its buffer; it paces itself by what it receives from us."""
        message = Load(chunk.job.id, self.name, seat.slots, chunk.index, first, tokens, transfer)
        await self._fabric.call(engine_node(chunk.job.de), LOAD, message)

    async def _forward(
        self,
        batch: Sequence[Chunk],
        seats: Sequence[_Seat],
        outs: Sequence[WriteStream],
        marks: Sequence[Sequence[Marks]],
        step: Step,
    ) -> None:
        layers, slots = self._deployment.layout.layers, self._slots
        shape = [chunk.shape for chunk in batch]
        attention_s = self._deployment.hardware.attention_layer_s(shape)
        states: list[State] = []
        for chunk in batch:
            tokens = chunk.job.tokens[chunk.job.done : chunk.job.done + chunk.new]
            states.append(self._backend.embed(tokens, chunk.cached))
        end_s = max(step.started_s, self._fabric.now())
        if self._resident:
            for mark in [mark for group in marks for mark in group]:
                await mark.wait(layers)
                end_s = max(end_s, mark.arrived_s(layers))
        started_s = end_s
        for layer in range(layers):
            # A layer begins when the one before it has ended and its KV is there, however late we wake up.
            end_s = max(end_s, await self._wait_layer(layer, marks, outs))
            for index, (chunk, seat) in enumerate(zip(batch, seats, strict=True)):
                kv = seat.kv[layer % slots][: sum(chunk.shape)]
                states[index] = self._backend.layer(layer, states[index], kv, chunk.cached)
            end_s = await step.layer(self.name, layer, end_s + attention_s)
            await self._fabric.sleep_until(end_s)
            if not self._resident:
                for out in outs:
                    out.release(layer + 1)
        if self._resident:
            for out in outs:
                out.release(layers)
        for mark in [mark for group in marks for mark in group]:
            mark.forget()
        self.batches.append(
            BatchRecord(
                self.name,
                len(self.batches),
                tuple(chunk.job.id for chunk in batch),
                tuple(shape),
                started_s,
                end_s,
                step.index,
                attention_s * layers,
                self._deployment.profile.predictor.attention_s(shape),
            )
        )
        self._finish(batch, states, started_s, end_s)

    async def _wait_layer(
        self, layer: int, marks: Sequence[Sequence[Marks]], outs: Sequence[WriteStream]
    ) -> float:
        """Wait until the layer's KV is in HBM and its slot free; since when both are so."""
        since_s = 0.0
        for group, out in zip(marks, outs, strict=True):
            for mark in group:
                if mark.arrived <= layer:
                    await mark.wait(layer + 1)
                since_s = max(since_s, mark.arrived_s(layer + 1))
            before = layer - self._slots + 1
            if before > 0:
                if out.placed < before:
                    await out.wait_placed(before)
                since_s = max(since_s, out.placed_s(before))
        return since_s

    def _finish(self, batch: Sequence[Chunk], states: Sequence[State], started_s: float, end_s: float) -> None:
        """Enter what is computed; who has tokens left goes back to the head of the queue."""
        unfinished = {}
        for chunk, state in zip(batch, states, strict=True):
            job = chunk.job
            if chunk.index == 0:
                job.started_s = started_s
            if chunk.last:
                job.token = self._backend.token(state)
                job.computed_s = end_s
            job.done += chunk.new
            job.chunks += 1
            if job.computed:
                job.over.set()
            elif not job.given_up:
                unfinished[job.id] = job
        self._ready = {**unfinished, **self._ready}
