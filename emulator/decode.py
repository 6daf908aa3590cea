"""The decode node: receives prompts' KV in its buffer, reads hit blocks on the DE path, decodes, persists.

One request here: its DE buffer is reserved before anything moves; on the DE path its hit is read into it and
streamed to the PE layer by layer; the PE's output completes it. Then pages of HBM are reserved and the prompt
is copied in (through the CNIC), the buffer is freed, and the request joins its engine's continuous batch, one
forced token a step. Every block that fills, prompt misses first, is copied to DRAM and written to storage.

Decode runs in *epochs*: while the batch stays the same and no block fills, its steps have one length, so the
engine sleeps over all of them at once; an arrival ends the epoch at the next step's end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import trio

from .deployment import LAYER_SLOTS, Deployment, engine_gpu, engine_node, join_ids, split_ids
from .errors import ProtocolViolation
from .fabric.interface import Fabric, Region, Target, Transfer
from .kvcache import BlockId
from .leases import LeaseQueue
from .messages import (
    COMMITTED,
    LOAD,
    PREFILL,
    PROGRESS,
    SERVE,
    SETTLED,
    Ack,
    Committed,
    Load,
    Phase,
    Prefill,
    Progress,
    Serve,
    Served,
    Settle,
    Settled,
)
from .models.backend import Backend, Decoder
from .pool import BufferPool, Lease, PagePool
from .records import PoolRecord
from .traffic import (
    StorageReader,
    StorageWriter,
    hbm_region,
    load_segments,
    load_tag,
    miss_tag,
    page_segment,
    pages_segment,
)

__all__ = ["DecodeNode"]

DE_BUFFER = "de_buffer"
STAGING_BLOCKS = 256
"""Generated Full Blocks of a node that can be in DRAM on their way to storage."""


class DecodeNode:
    """One DE node's role: a DE buffer, and an engine a GPU. Registers regions and handlers when it is made."""

    def __init__(
        self, deployment: Deployment, fabric: Fabric, backend: Backend, engines: int, tasks: trio.Nursery
    ) -> None:
        self._deployment = deployment
        self._fabric = fabric
        self._tasks = tasks
        size = deployment.layout.full_block_bytes
        self._region = fabric.register(DE_BUFFER, deployment.limits.de_buffer_blocks * size)
        self._pool = BufferPool(f"{fabric.node}.{DE_BUFFER}", self._region.size_bytes)
        self._buffer = LeaseQueue(self._pool)
        self._staging = fabric.register("staging", STAGING_BLOCKS * size)
        self._staging_pool = BufferPool(f"{fabric.node}.staging", self._staging.size_bytes)
        self._staging_space = LeaseQueue(self._staging_pool)
        self._reader = StorageReader(deployment, fabric)
        self._writer = StorageWriter(deployment, fabric)
        self._requests: dict[str, _Request] = {}
        names = [f"{fabric.node}/{gpu}" for gpu in range(engines)]
        self._engines = {name: _Engine(deployment, fabric, backend, name) for name in names}
        fabric.serve(SERVE, self.serve)
        fabric.serve(LOAD, self.load)
        fabric.serve(SETTLED, self.settled)
        for engine in self._engines.values():
            tasks.start_soon(engine.serve, name=f"decode {engine.name}")

    def pools(self) -> Iterator[PoolRecord]:
        yield self._pool.record()
        yield self._staging_pool.record()
        for engine in self._engines.values():
            yield engine.pool.record()
        for pool in self._writer.pools:
            yield pool.record()

    async def serve(self, message: Serve) -> Served:
        """Serve one request to its last token."""
        decision = message.assignment.decision
        if decision.request in self._requests:
            raise ProtocolViolation(f"{self._fabric.node}: request {decision.request} is being served already")
        request = _Request(message, self._deployment, self._engines[decision.de])
        self._requests[request.id] = request
        layout = self._deployment.layout
        size = layout.blocks(message.prompt_tokens) * layout.full_block_bytes
        buffer = await self._buffer.reserve(size, message.assignment.sequence)
        request.buffer_base = buffer.offset
        allocated_s = read_s = self._fabric.now()
        marks = self._fabric.marks(miss_tag(request.id))
        if request.reads_here:
            order = message.assignment.sequence
            await self._reader.read(request.hit_ids, DE_BUFFER, buffer.offset, Transfer.DE_READ, sequence=order)
            read_s = self._fabric.now()
            self._notify(request, "read")
        prefilled = await self._fabric.call(engine_node(decision.pe), PREFILL, request.prefill())
        if not request.reads_here:
            allocated_s = prefilled.allocated_s
            read_s = prefilled.read_s if prefilled.read_s is not None else allocated_s
            if not decision.hit_blocks:
                self._notify(request, "read")
        await marks.wait(layout.layers)
        marks.forget()
        self._tasks.start_soon(self._persist, request, buffer)
        await self._to_hbm(request)
        transferred_s = self._fabric.now()
        request.in_hbm.set()
        sequence = _Sequence(request, request.engine.open_decoder(request), prefilled.token)
        await request.engine.absorb(request, sequence.decoder)
        await request.engine.decode(sequence)
        request.decoded()
        self._notify(request, "finished")
        return Served(
            allocated_s=allocated_s,
            read_s=read_s,
            prefill_start_s=prefilled.prefill_start_s,
            computed_s=prefilled.computed_s,
            transferred_s=transferred_s,
            first_token_s=sequence.first_token_s,
            last_token_s=sequence.last_token_s,
            token_gaps=tuple(sequence.gaps),
            model_tokens=tuple(sequence.predicted),
        )

    async def load(self, message: Load) -> Ack:
        """DE path: stream a request's hit KV to the PE; goes on in the background."""
        request = self._requests.get(message.request)
        if request is None:
            raise ProtocolViolation(f"{self._fabric.node}: a load for unknown request {message.request}")
        self._tasks.start_soon(self._stream_load, request, message)
        return Ack()

    async def settled(self, message: Settle) -> Settled:
        """Reply when the request's last full block is committed; the request is then forgotten."""
        request = self._requests.get(message.request)
        if request is None:
            raise ProtocolViolation(f"{self._fabric.node}: unknown request {message.request}")
        await request.all_committed.wait()
        del self._requests[request.id]
        persisted = self._deployment.hit_tokens(len(request.block_ids) - request.hit_blocks)
        return Settled(request.committed_s, persisted)

    def _notify(self, request: _Request, phase: Phase) -> None:
        self._tasks.start_soon(self._progress, request.id, phase)

    async def _progress(self, request: str, phase: Phase) -> None:
        await self._fabric.call(self._deployment.scheduler, PROGRESS, Progress(request, phase))

    async def _stream_load(self, request: _Request, message: Load) -> None:
        """Layer l's slot at the PE is free once the miss of layer l - LAYER_SLOTS has arrived here."""
        layers = self._deployment.layout.layers
        target = Target(
            self._deployment.host(request.engine.name),
            self._deployment.gpu(message.pe),
            hbm_region(engine_gpu(message.pe)),
            Transfer.DE_LOAD,
        )
        hit_tokens = self._deployment.hit_tokens(request.hit_blocks)
        segments = load_segments(self._deployment.layout, request.buffer_base, hit_tokens, message.slots)
        marks = self._fabric.marks(miss_tag(request.id))
        async with self._fabric.open_stream(target, self._region, segments, tag=load_tag(request.id)) as stream:
            stream.release(min(LAYER_SLOTS, layers))
            for layer in range(LAYER_SLOTS, layers):
                await marks.wait(layer - LAYER_SLOTS + 1)
                stream.release(layer + 1)
            await stream.wait_placed(layers)

    async def _to_hbm(self, request: _Request) -> None:
        """Reserve pages for prompt and output, and copy the prompt in."""
        pages = self._deployment.layout.blocks(request.prompt_tokens + request.output_tokens)
        request.pages = await request.engine.space.reserve(pages, request.message.assignment.sequence)
        name = request.engine.name
        transfer = Transfer.PE_DE_H2D if request.message.assignment.decision.path == "pe" else Transfer.DE_H2D
        target = Target(self._deployment.host(name), self._deployment.gpu(name), request.engine.hbm.name, transfer)
        segment = pages_segment(
            self._deployment.layout, request.buffer_base, request.prompt_tokens, request.pages.runs
        )
        await self._fabric.write(target, self._region, segment)

    async def _persist(self, request: _Request, buffer: Lease) -> None:
        """Write the prompt's miss blocks, then each generated block as it fills: in order, as the trie grows."""
        layout = self._deployment.layout
        size = layout.full_block_bytes
        ids, first = request.block_ids, request.hit_blocks
        prompt_blocks = layout.full_blocks(request.prompt_tokens)
        if prompt_blocks > first:
            base = request.buffer_base + first * size
            await self._writer.write(ids[first:prompt_blocks], first, self._region, base)
            await self._committed(request, prompt_blocks)
        await request.in_hbm.wait()
        self._buffer.release(buffer)
        name = request.engine.name
        target = Target(self._deployment.gpu(name), self._deployment.host(name), self._staging.name, Transfer.D2H)
        for block in range(prompt_blocks, len(ids)):
            await request.wait_filled(block)
            async with self._staging_space.hold(size) as slot:
                segment = page_segment(layout, request.page(block), slot.offset)
                await self._fabric.write(target, request.engine.hbm, segment)
                request.copied_out()
                await self._writer.write(ids[block : block + 1], block, self._staging, slot.offset)
            await self._committed(request, block + 1)
        request.committed_s = self._fabric.now()
        request.all_committed.set()

    async def _committed(self, request: _Request, blocks: int) -> None:
        chain = join_ids(request.block_ids[:blocks])
        await self._fabric.call(self._deployment.scheduler, COMMITTED, Committed(chain))


class _Request:
    """A request on its DE: what is reserved, what is filled, what is committed."""

    def __init__(self, message: Serve, deployment: Deployment, engine: _Engine) -> None:
        decision = message.assignment.decision
        layout = deployment.layout
        self.message = message
        self.id = decision.request
        self.engine = engine
        self.prompt_tokens = message.prompt_tokens
        self.output = np.frombuffer(message.output, dtype="<u4")
        self.hit_blocks = decision.hit_blocks
        self.block_ids = split_ids(message.block_ids)
        self.buffer_base = 0
        self.pages: Lease | None = None
        self.in_hbm = trio.Event()
        self.all_committed = trio.Event()
        self.committed_s = 0.0
        full = layout.full_blocks(self.prompt_tokens + len(self.output))
        if len(self.block_ids) != full:
            raise ProtocolViolation(f"request {self.id}: {len(self.block_ids)} block ids, {full} blocks fill")
        self._filled = layout.full_blocks(self.prompt_tokens)
        self._to_copy = full - self._filled
        self._filling = trio.Event()
        self._decoded = False

    @property
    def output_tokens(self) -> int:
        return len(self.output)

    @property
    def reads_here(self) -> bool:
        """Is the hit read on this side?"""
        return self.message.assignment.decision.path == "de" and self.hit_blocks > 0

    @property
    def hit_ids(self) -> list[BlockId]:
        return self.block_ids[: self.hit_blocks]

    def prefill(self) -> Prefill:
        """What the PE is asked to do."""
        hit = b"" if self.reads_here else join_ids(self.hit_ids)
        return Prefill(self.message.assignment, self.prompt_tokens, self.message.append, hit, self.buffer_base)

    def page(self, block: int) -> int:
        """The HBM page of the request's block ``block``."""
        assert self.pages is not None
        for first, count in self.pages.runs:
            if block < count:
                return first + block
            block -= count
        raise ProtocolViolation(f"request {self.id}: block {block} is beyond its pages")

    def filled(self, blocks: int) -> None:
        """The first ``blocks`` blocks are full."""
        self._filled = blocks
        self._filling.set()
        self._filling = trio.Event()

    async def wait_filled(self, block: int) -> None:
        while self._filled <= block:
            await self._filling.wait()

    def copied_out(self) -> None:
        """One generated block has left HBM."""
        self._to_copy -= 1
        self._free_pages()

    def decoded(self) -> None:
        """The last token is out."""
        self._decoded = True
        self._free_pages()

    def _free_pages(self) -> None:
        if self._decoded and not self._to_copy and self.pages is not None:
            self.engine.space.release(self.pages)
            self.pages = None


class _Sequence:
    """A request in the batch: its decoder, and the tokens so far."""

    def __init__(self, request: _Request, decoder: Decoder, first: int) -> None:
        self.request = request
        self.decoder = decoder
        self.context = request.prompt_tokens
        self.joined_s = 0.0
        self.emitted = 0
        self.predicted = [first]
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.gaps: list[tuple[float, int]] = []
        self.finished = trio.Event()

    @property
    def left(self) -> int:
        return self.request.output_tokens - self.emitted

    def emit(self, steps: int, started_s: float, step_s: float) -> None:
        """``steps`` tokens became visible, the first one step after ``started_s``."""
        first_s = started_s + step_s
        if self.first_token_s is None or self.last_token_s is None:
            self.first_token_s = first_s
        else:
            self._gap(first_s - self.last_token_s, 1)
        if steps > 1:
            self._gap(step_s, steps - 1)
        self.last_token_s = started_s + steps * step_s

    def _gap(self, seconds: float, count: int) -> None:
        if self.gaps and math.isclose(self.gaps[-1][0], seconds, rel_tol=1e-9):
            self.gaps[-1] = (self.gaps[-1][0], self.gaps[-1][1] + count)
        else:
            self.gaps.append((seconds, count))


class _Engine:
    """One GPU: paged HBM and a continuous batch of all its sequences."""

    def __init__(self, deployment: Deployment, fabric: Fabric, backend: Backend, name: str) -> None:
        self.name = name
        self._deployment = deployment
        self._fabric = fabric
        self._backend = backend
        layout = deployment.layout
        pages = deployment.limits.de_hbm_pages
        self.hbm: Region = fabric.register(hbm_region(engine_gpu(name)), pages * layout.full_block_bytes)
        self.pool = PagePool(f"{name}.hbm", pages)
        self.space = LeaseQueue(self.pool)
        self._pages = self.hbm.memory.reshape(pages, layout.layers, layout.block_tokens, layout.kv_bytes)
        self._batch: list[_Sequence] = []
        self._joining: list[_Sequence] = []
        self._arrived = trio.Event()
        self._epoch: trio.CancelScope | None = None

    def open_decoder(self, request: _Request) -> Decoder:
        self._backend.check_context(request.prompt_tokens + request.output_tokens)
        return self._backend.open_decode()

    async def absorb(self, request: _Request, decoder: Decoder) -> None:
        """Hand the decoder the prompt's KV as it lies in HBM, a layer at a time."""
        assert request.pages is not None
        layout = self._deployment.layout
        pages = np.concatenate([np.arange(first, first + count) for first, count in request.pages.runs])
        pages = pages[: layout.blocks(request.prompt_tokens)]
        for layer in range(layout.layers):
            rows = self._pages[pages, layer].reshape(-1, layout.kv_bytes)
            decoder.absorb(layer, rows[: request.prompt_tokens])
            await trio.lowlevel.checkpoint()

    async def decode(self, sequence: _Sequence) -> None:
        """Join the batch at the next step; return when the last token is out (at once for no tokens)."""
        if sequence.left:
            sequence.joined_s = self._fabric.now()
            self._joining.append(sequence)
            self._arrived.set()
            if self._epoch is not None:
                self._epoch.cancel()
            await sequence.finished.wait()

    async def serve(self) -> None:
        """Run steps while there are sequences; never returns."""
        started_s = self._fabric.now()
        while True:
            if not self._batch:
                if not self._joining:
                    self._arrived = trio.Event()
                    await self._arrived.wait()
                started_s = max(started_s, min(sequence.joined_s for sequence in self._joining))
            # However late this process is, none decodes before its KV was there, and none delays the others.
            self._batch += [sequence for sequence in self._joining if sequence.joined_s <= started_s]
            self._joining = [sequence for sequence in self._joining if sequence.joined_s > started_s]
            step_s = self._deployment.costs.decode_step_s([sequence.context for sequence in self._batch])
            steps = await self._sleep_steps(started_s, step_s, min(self._uniform_steps(s) for s in self._batch))
            for sequence in self._batch:
                await self._advance(sequence, steps)
                sequence.emit(steps, started_s, step_s)
                if not sequence.left:
                    sequence.finished.set()
            started_s += steps * step_s
            self._batch = [sequence for sequence in self._batch if sequence.left]

    def _uniform_steps(self, sequence: _Sequence) -> int:
        """Steps until the sequence ends or fills a block."""
        block = self._deployment.layout.block_tokens
        return min(sequence.left, block - sequence.context % block)

    async def _sleep_steps(self, started_s: float, step_s: float, most: int) -> int:
        """Sleep over ``most`` steps, or to the end of the one in which a sequence arrives; return how many.

        It counts when the sequence arrived, not when this task came to hear of it.
        """
        if not self._joining:
            with trio.CancelScope() as self._epoch:
                await self._fabric.sleep_until(started_s + most * step_s)
            self._epoch = None
            if not self._joining:
                return most
        arrived_s = min(sequence.joined_s for sequence in self._joining)
        steps = min(most, max(1, math.ceil((arrived_s - started_s) / step_s)))
        await self._fabric.sleep_until(started_s + steps * step_s)
        return steps

    async def _advance(self, sequence: _Sequence, steps: int) -> None:
        """The real compute of ``steps`` forced tokens: each one's KV goes into its page."""
        request = sequence.request
        block_tokens = self._deployment.layout.block_tokens
        for token in request.output[sequence.emitted : sequence.emitted + steps]:
            predicted, kv = sequence.decoder.step(int(token))
            block, row = divmod(sequence.context, block_tokens)
            self._pages[request.page(block), :, row] = kv
            sequence.predicted.append(predicted)
            sequence.context += 1
            await trio.lowlevel.checkpoint()
        sequence.emitted += steps
        if sequence.context % block_tokens == 0:
            request.filled(sequence.context // block_tokens)
