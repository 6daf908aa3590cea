"""The decode node: receives prompts' KV in its buffer, reads hit blocks on the DE path, decodes, persists.

One request here: its DE buffer is reserved before anything moves; the part of its hit that is read on this side
is read into it and streamed to the PE layer by layer; the PE's output completes it. Then pages of HBM are
reserved and the prompt is copied in, the buffer is freed, and the request joins its engine's continuous batch,
one forced token a step. Every block that fills, prompt misses first, is copied to DRAM and written to storage.
"""

from __future__ import annotations

from collections.abc import Iterator

import trio

from ..deployment import Deployment, engine_gpu, engine_node, join_ids
from ..errors import EmulatorError, ProtocolViolation, Withdrawn
from ..fabric.interface import Fabric, Transfer
from ..models.backend import Backend
from ..pool import BufferPool
from ..records import CacheRecord, PoolRecord
from .blockio import Reader, StorageReader, StorageWriter, Wanted
from .decode_engine import DecodeEngine, DecodeRequest, DecodeSequence
from .decode_steps import DecodeGroup
from .drampool import DramPool, PoolReader, PoolWriter
from .leader import Leader, Reports
from .leases import LeaseQueue
from .lockstep import Lockstep
from .messages import (
    CANCEL,
    COMMITTED,
    HIT_READY,
    LOAD,
    PREFILL,
    SERVE,
    SETTLED,
    Ack,
    Cancel,
    Cancelled,
    Committed,
    HitReady,
    Load,
    Pooled,
    Prefill,
    Prefilled,
    Serve,
    Served,
    Settle,
    Settled,
)
from .nodecache import CachedReader, CachingWriter, open_cache
from .segments import (
    buffer_rows,
    hbm_region,
    load_segments,
    load_tag,
    miss_tag,
    page_rows,
    page_segment,
    pages_segment,
)
from .traffic import Traffic

__all__ = ["DecodeNode"]

DE_BUFFER = "de_buffer"
STAGING_BLOCKS = 256
"""Generated Full Blocks of a node that can be in DRAM on their way to storage."""


class DecodeNode:
    """One DE node's role: a DE buffer, and an engine a GPU. Registers regions and handlers when it is made."""

    def __init__(self, deployment: Deployment, fabric: Fabric, backend: Backend, tasks: trio.Nursery) -> None:
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
        self._reader: Reader = StorageReader(deployment, fabric)
        self._writer = StorageWriter(deployment, fabric)
        if deployment.system.pool:
            pool = DramPool(deployment, fabric)
            self._reader = PoolReader(deployment, fabric, pool, self._region)
            self._writer = PoolWriter(deployment, fabric, pool)
        self._cache = open_cache(deployment, fabric)
        if self._cache is not None:
            self._reader = CachedReader(deployment, fabric, self._cache, self._region)
            self._writer = CachingWriter(deployment, fabric, self._cache)
        self._leader = Leader(deployment, fabric)
        self._traffic = Traffic(deployment, fabric)
        self._requests: dict[str, DecodeRequest] = {}
        self._engines: dict[str, DecodeEngine] = {}
        self._groups: dict[str, DecodeGroup] = {}
        for names, group in deployment.groups(fabric.node):
            engines = [DecodeEngine(deployment, fabric, backend, name) for name in names]
            steps = DecodeGroup(deployment, fabric, Lockstep(deployment, fabric, group), engines)
            for engine in engines:
                self._engines[engine.name] = engine
                self._groups[engine.name] = steps
            tasks.start_soon(steps.serve, name=f"decode {group.name}")
        fabric.serve(SERVE, self.serve)
        fabric.serve(LOAD, self.load)
        fabric.serve(HIT_READY, self.hit_ready)
        fabric.serve(SETTLED, self.settled)
        fabric.serve(CANCEL, self.cancel)
        tasks.start_soon(self._leader.serve, name=f"{fabric.node} leader")

    def pools(self) -> Iterator[PoolRecord]:
        yield self._pool.record()
        yield self._staging_pool.record()
        for engine in self._engines.values():
            yield engine.pool.record()
        for pool in self._writer.pools:
            yield pool.record()

    def cache(self) -> CacheRecord | None:
        """What the node's own cache counted; None where it has none."""
        return None if self._cache is None else self._cache.record()

    @property
    def steps(self) -> int:
        """Decode steps so far, of all engines."""
        return sum(steps.steps for steps in self._groups.values())

    async def serve(self, message: Serve) -> Served:
        """Serve one request to its last token.

        Withdrawn where it was given up before; then nothing of it is under way any more, and it is forgotten.
        """
        decision = message.assignment.decision
        name = decision.request
        if name in self._requests:
            raise ProtocolViolation(f"{self._fabric.node}: request {name} is being served already")
        request = DecodeRequest(message, self._deployment, self._engines[decision.de])
        reports = Reports(self._leader, name, ("read_de", "read_pe", "prefilled", "finished"))
        self._requests[name] = request
        try:
            return await self._serve(request, reports)
        except Withdrawn:
            await self._forget(request)
            reports.all_over()
            raise

    async def cancel(self, request: Cancel) -> Cancelled:
        """Give a request up that is being served, or persisted; whoever asked for it is told by that call."""
        found = self._requests.get(request.request)
        if found is not None:
            found.withdrawal.ask()
        return Cancelled(found is not None)

    def waiting(self) -> Iterator[tuple[str, str]]:
        """Every request here, and what it is doing."""
        for request in self._requests.values():
            yield request.id, f"{request.withdrawal.doing} on {self._fabric.node}"

    async def _serve(self, request: DecodeRequest, reports: Reports) -> Served:
        message, withdrawal = request.message, request.withdrawal
        decision, order = message.assignment.decision, message.assignment.sequence
        direct = self._deployment.config.replay.de_direct
        if direct:
            await self._reserve_pages(request)
        with withdrawal.until_asked("waiting for the DE buffer"):
            request.buffer = await self._buffer.reserve(self._buffer_bytes(request), order)
        allocated_s = self._fabric.now()
        if request.de_blocks and request.pe_ids:
            pooled, read_s, prefilled = await self._read_beside(request, order, reports)
        else:
            pooled, read_s = await self._read(request, order)
            reports.over("read_de")
            prefilled = await self._prefill(request, reports)
        if not request.de_blocks:
            allocated_s = prefilled.allocated_s
            read_s = allocated_s
        if prefilled.read_s is not None:
            read_s = max(read_s, prefilled.read_s)
        if direct:
            withdrawal.begin("being copied to HBM")
            await self._to_hbm(request, self._deployment.hit_tokens(request.de_blocks))
            self._release_buffer(request)
            request.prompt_in_hbm(request.hit_blocks)
            self._start_persist(request)
        else:
            self._start_persist(request)
            await self._reserve_pages(request)
            withdrawal.begin("being copied to HBM")
            await self._to_hbm(request, request.prompt_tokens)
            request.prompt_in_hbm(self._deployment.layout.full_blocks(request.prompt_tokens))
        transferred_s = self._fabric.now()
        decoder = await request.engine.open_decoder(request)
        sequence = DecodeSequence(request, decoder, prefilled.token, self._fabric.now())
        steps = self._groups[decision.de]
        with withdrawal.telling(lambda: steps.leave(request.engine, sequence), "decoding"):
            await steps.decode(request.engine, sequence)
        withdrawal.begin("being persisted")
        request.decoded()
        reports.over("finished")
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
            pooled=pooled + prefilled.pooled,
            de_pooled=pooled,
        )

    async def _read(self, request: DecodeRequest, order: int) -> tuple[Pooled, float]:
        """Read what of the hit is this side's; what of it a pool gave, and when it is in the buffer."""
        pooled = Pooled()
        if request.de_blocks:
            wanted = Wanted(request.de_ids, 0, DE_BUFFER, request.buffer_base, Transfer.DE_READ)
            pooled = await self._reader.read(wanted, sequence=order, withdrawal=request.withdrawal)
        return pooled, self._fabric.now()

    async def _read_beside(
        self, request: DecodeRequest, order: int, reports: Reports
    ) -> tuple[Pooled, float, Prefilled]:
        """Read this side's part of a split hit while the PE reads its own; the PE asks before it computes."""
        read: list[tuple[Pooled, float]] = []

        async def read_here() -> None:
            try:
                read.append(await self._read(request, order))
                reports.over("read_de")
            except EmulatorError as error:
                request.read_error = error
            finally:
                request.read_over.set()

        self._tasks.start_soon(read_here, name=f"{request.id} read on {self._fabric.node}")
        try:
            prefilled = await self._prefill(request, reports)
        finally:
            # Until then blocks may still arrive in the buffer.
            await request.read_over.wait()
        ((pooled, read_s),) = read
        return pooled, read_s, prefilled

    async def hit_ready(self, message: HitReady) -> Ack:
        """Answer when this side's part of a split hit is in the buffer; what its read raised, if it did."""
        request = self._requests.get(message.request)
        if request is None:
            raise ProtocolViolation(f"{self._fabric.node}: a question about unknown request {message.request}")
        await request.read_over.wait()
        if request.read_error is not None:
            raise request.read_error
        return Ack()

    async def _prefill(self, request: DecodeRequest, reports: Reports) -> Prefilled:
        """Have the prompt computed; the PE's answer, once all KV that it sent is here."""
        message = request.message
        pe = engine_node(message.assignment.decision.pe)
        prefill = Prefill(
            message.assignment,
            message.prompt_tokens,
            message.append,
            join_ids(request.pe_ids),
            request.buffer_base,
            () if request.pages is None else request.pages.runs,
        )
        marks = self._traffic.marks(miss_tag(request.id))
        answered = False

        async def cancel() -> None:
            while not answered and not (await self._fabric.call(pe, CANCEL, Cancel(request.id))).found:
                pass

        try:
            with request.withdrawal.telling(lambda: self._tasks.start_soon(cancel), f"in prefill on {pe}"):
                reports.leave("read_pe", "prefilled")
                prefilled = await self._fabric.call(pe, PREFILL, prefill)
            await marks.wait(prefilled.messages)
        finally:
            answered = True
            marks.forget()
        return prefilled

    async def _forget(self, request: DecodeRequest) -> None:
        """Take back what a request that was given up holds, once what is being persisted of it is."""
        request.in_hbm.set()
        if request.persisting:
            await request.persisted.wait()
        self._release_buffer(request)
        request.release_pages()
        del self._requests[request.id]

    def _release_buffer(self, request: DecodeRequest) -> None:
        if request.buffer is not None:
            self._buffer.release(request.buffer)
            request.buffer = None

    async def load(self, message: Load) -> Ack:
        """Stream a request's KV from the buffer to the PE; goes on in the background."""
        request = self._requests.get(message.request)
        if request is None:
            raise ProtocolViolation(f"{self._fabric.node}: a load for unknown request {message.request}")
        self._tasks.start_soon(self._stream_load, request, message)
        return Ack()

    async def settled(self, message: Settle) -> Settled:
        """Reply when the request's last full block is committed; the request is then forgotten.

        Withdrawn where it was given up before that.
        """
        request = self._requests.get(message.request)
        if request is None:
            raise ProtocolViolation(f"{self._fabric.node}: unknown request {message.request}")
        await request.persisted.wait()
        if request.committed_s is None:
            await self._forget(request)
            raise request.withdrawal.error()
        del self._requests[request.id]
        persisted = self._deployment.hit_tokens(len(request.block_ids) - request.hit_blocks)
        return Settled(request.committed_s, persisted)

    async def _stream_load(self, request: DecodeRequest, message: Load) -> None:
        """Send layer l once its slot at the PE is free and what earlier chunks computed of it is here.

        Both are told by the KV that arrives from the PE, one message a layer and chunk: layer l - slots of this
        chunk frees the slot, layer l of the chunk before completes what is to be sent.
        """
        layers, slots = self._deployment.layout.layers, len(message.slots)
        layout = self._deployment.layout
        if request.pages is not None and message.transfer is Transfer.RELOAD:
            # What earlier chunks computed went straight to HBM.
            region, rows = request.engine.hbm, page_rows(layout, request.pages.runs)
            source = self._deployment.gpu(request.engine.name)
        else:
            region, rows = self._region, buffer_rows(layout, request.buffer_base)
            source = self._deployment.host(request.engine.name)
        ends = (source, self._deployment.gpu(message.pe), hbm_region(engine_gpu(message.pe)))
        segments = load_segments(layout, rows, message.first, message.tokens, message.slots)
        marks = self._traffic.marks(miss_tag(request.id))
        before = message.chunk * layers
        tag = load_tag(request.id, message.chunk, message.transfer)
        async with self._traffic.stream(
            request.engine.name, message.transfer, ends, region, segments, tag=tag
        ) as stream:
            for layer in range(layers):
                sent = before - layers + layer + 1 if message.chunk else 0
                free = before + layer - slots + 1 if layer >= slots else 0
                if max(sent, free) > marks.arrived:
                    await marks.wait(max(sent, free))
                stream.release(layer + 1)
            await stream.wait_placed(layers)

    def _buffer_bytes(self, request: DecodeRequest) -> int:
        """Of the DE buffer: the whole prompt's blocks, or of KV that goes straight to HBM what is read here."""
        layout = self._deployment.layout
        direct = self._deployment.config.replay.de_direct
        return (request.de_blocks if direct else layout.blocks(request.prompt_tokens)) * layout.full_block_bytes

    async def _reserve_pages(self, request: DecodeRequest) -> None:
        """Pages for prompt and output."""
        pages = self._deployment.layout.blocks(request.prompt_tokens + request.output_tokens)
        with request.withdrawal.until_asked("waiting for HBM of its DE"):
            request.pages = await request.engine.space.reserve(pages, request.message.assignment.sequence)

    async def _to_hbm(self, request: DecodeRequest, tokens: int) -> None:
        """Copy the first ``tokens`` tokens from the buffer into the pages."""
        if not tokens:
            return
        assert request.pages is not None
        name = request.engine.name
        transfer = Transfer.PE_DE_H2D if request.message.assignment.decision.path == "pe" else Transfer.DE_H2D
        ends = (self._deployment.host(name), self._deployment.gpu(name), request.engine.hbm.name)
        segment = pages_segment(self._deployment.layout, request.buffer_base, tokens, request.pages.runs)
        await self._traffic.write(name, transfer, ends, self._region, segment)

    def _start_persist(self, request: DecodeRequest) -> None:
        request.persisting = True
        self._tasks.start_soon(self._persist, request)

    async def _persist(self, request: DecodeRequest) -> None:
        """Write what the prompt missed, and what decode fills until the request is given up."""
        try:
            first = request.hit_blocks
            if request.buffer is not None:
                first = await self._persist_from_buffer(request)
            await self._persist_from_hbm(request, first)
            request.committed_s = self._fabric.now()
        except Withdrawn:
            pass
        request.persisted.set()

    async def _persist_from_buffer(self, request: DecodeRequest) -> int:
        """Write the prompt's miss blocks, and have done with the buffer; how many blocks are committed then."""
        layout = self._deployment.layout
        ids, first = request.block_ids, request.hit_blocks
        prompt_blocks = layout.full_blocks(request.prompt_tokens)
        if prompt_blocks > first:
            base = request.buffer_base + first * layout.full_block_bytes
            await self._writer.write(ids[first:prompt_blocks], first, self._region, base)
            await self._committed(request, prompt_blocks)
        await request.in_hbm.wait()
        self._release_buffer(request)
        return prompt_blocks

    async def _persist_from_hbm(self, request: DecodeRequest, first: int) -> None:
        """Write block after block from ``first`` on as it fills: in order, as the trie grows."""
        layout, ids = self._deployment.layout, request.block_ids
        name = request.engine.name
        ends = (self._deployment.gpu(name), self._deployment.host(name), self._staging.name)
        for block in range(first, len(ids)):
            with request.withdrawal.until_asked():
                await request.wait_filled(block)
            async with self._staging_space.hold(layout.full_block_bytes) as slot:
                segment = page_segment(layout, request.page(block), slot.offset)
                await self._traffic.write(name, Transfer.D2H, ends, request.engine.hbm, segment)
                request.copied_out()
                await self._writer.write(ids[block : block + 1], block, self._staging, slot.offset)
            await self._committed(request, block + 1)

    async def _committed(self, request: DecodeRequest, blocks: int) -> None:
        chain = join_ids(request.block_ids[:blocks])
        await self._fabric.call(self._deployment.scheduler, COMMITTED, Committed(chain))
