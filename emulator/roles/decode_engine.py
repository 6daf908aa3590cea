"""One decode engine: paged HBM, and the sequences of its continuous batch.

A ``DecodeRequest`` is a request on its DE: what is reserved, what is filled, what is committed. A
``DecodeSequence`` is the same request while it is in the batch. When steps happen is decided by
``decode_steps``; here is what a step does: every sequence takes its next forced token, and the KV of it goes
into its page.
"""

from __future__ import annotations

import math

import numpy as np
import trio

from ..deployment import Deployment, engine_gpu, split_ids
from ..errors import EmulatorError, ProtocolViolation
from ..fabric.interface import Fabric, Region
from ..kvcache import BlockId
from ..models.backend import Backend, Decoder
from ..pool import Lease, PagePool
from .leases import LeaseQueue
from .messages import Serve
from .segments import hbm_region
from .withdrawal import Withdrawal

__all__ = ["DecodeEngine", "DecodeRequest", "DecodeSequence"]


class DecodeRequest:
    """A request on its DE: what is reserved, what is filled, what is committed."""

    def __init__(self, message: Serve, deployment: Deployment, engine: DecodeEngine) -> None:
        decision = message.assignment.decision
        self._layout = layout = deployment.layout
        self.message = message
        self.id = decision.request
        self.engine = engine
        self.prompt_tokens = message.prompt_tokens
        self.output = np.frombuffer(message.output, dtype="<u4")
        self.hit_blocks = decision.hit_blocks
        self.de_blocks = decision.de_blocks
        self.block_ids = split_ids(message.block_ids)
        self.buffer: Lease | None = None
        self.pages: Lease | None = None
        self.read_over = trio.Event()
        """Set when this side's part of the hit is in the buffer, or will not come, as ``read_error`` says."""
        self.read_error: EmulatorError | None = None
        self.in_hbm = trio.Event()
        self.persisting = False
        self.persisted = trio.Event()
        """Nothing is being persisted any more: all is committed, or the request is given up."""
        self.committed_s: float | None = None
        """When the last block was committed."""
        self.withdrawal = Withdrawal(self.id)
        full = layout.full_blocks(self.prompt_tokens + len(self.output))
        if len(self.block_ids) != full:
            raise ProtocolViolation(f"request {self.id}: {len(self.block_ids)} block ids, {full} blocks fill")
        self._filled = 0
        self._to_copy = 0
        self._filling = trio.Event()
        self._decoded = False

    @property
    def buffer_base(self) -> int:
        """Where its Full Blocks begin in the DE buffer; 0 where it has none there."""
        return 0 if self.buffer is None else self.buffer.offset

    @property
    def output_tokens(self) -> int:
        return len(self.output)

    @property
    def de_ids(self) -> list[BlockId]:
        """The hit blocks that are read on this side."""
        return self.block_ids[: self.de_blocks]

    @property
    def pe_ids(self) -> list[BlockId]:
        """The hit blocks that the PE reads."""
        return self.block_ids[self.de_blocks : self.hit_blocks]

    def page(self, block: int) -> int:
        """The HBM page of the request's block ``block``."""
        assert self.pages is not None
        for first, count in self.pages.runs:
            if block < count:
                return first + block
            block -= count
        raise ProtocolViolation(f"request {self.id}: block {block} is beyond its pages")

    def prompt_in_hbm(self, copied_from: int) -> None:
        """The whole prompt is in its pages; blocks from ``copied_from`` on leave for storage from there."""
        self._to_copy = len(self.block_ids) - copied_from
        self.filled(self._layout.full_blocks(self.prompt_tokens))
        self.in_hbm.set()

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
        if self._decoded and not self._to_copy:
            self.release_pages()

    def release_pages(self) -> None:
        """Give the pages back, if there are any."""
        if self.pages is not None:
            self.engine.space.release(self.pages)
            self.pages = None


class DecodeSequence:
    """A request in the batch: its decoder, and the tokens so far."""

    def __init__(self, request: DecodeRequest, decoder: Decoder, first: int, joined_s: float) -> None:
        self.request = request
        self.decoder = decoder
        self.context = request.prompt_tokens
        self.joined_s = joined_s
        self.emitted = 0
        self.predicted = [first]
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.gaps: list[tuple[float, int]] = []
        self.gone_s: float | None = None
        """When it was taken out of the batch, at the end of whose step it is gone."""
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


class DecodeEngine:
    """One GPU, or a few as one: paged HBM and a continuous batch of all its sequences."""

    def __init__(self, deployment: Deployment, fabric: Fabric, backend: Backend, name: str) -> None:
        self.name = name
        self._deployment = deployment
        self._backend = backend
        layout = deployment.layout
        pages = deployment.limits.de_hbm_pages
        self.hbm: Region = fabric.register(hbm_region(engine_gpu(name)), pages * layout.full_block_bytes)
        self.pool = PagePool(f"{name}.hbm", pages)
        self.space = LeaseQueue(self.pool)
        self._pages = self.hbm.memory.reshape(pages, layout.layers, layout.block_tokens, layout.kv_bytes)
        self.batch: list[DecodeSequence] = []
        self.joining: list[DecodeSequence] = []

    async def open_decoder(self, request: DecodeRequest) -> Decoder:
        """A decoder with the prompt's KV as it lies in HBM, absorbed a layer at a time."""
        assert request.pages is not None
        self._backend.check_context(request.prompt_tokens + request.output_tokens)
        decoder = self._backend.open_decode()
        layout = self._deployment.layout
        pages = np.concatenate([np.arange(first, first + count) for first, count in request.pages.runs])
        pages = pages[: layout.blocks(request.prompt_tokens)]
        for layer in range(layout.layers):
            rows = self._pages[pages, layer].reshape(-1, layout.kv_bytes)
            decoder.absorb(layer, rows[: request.prompt_tokens])
            await trio.lowlevel.checkpoint()
        return decoder

    def admit(self, started_s: float) -> None:
        """Who joined by ``started_s`` takes part in the steps from there on."""
        self.batch += [sequence for sequence in self.joining if sequence.joined_s <= started_s]
        self.joining = [sequence for sequence in self.joining if sequence.joined_s > started_s]

    def attention_s(self) -> float:
        """Attention of the batch in one step, all layers."""
        if not self.batch:
            return 0.0
        return self._deployment.hardware.decode_attention_s([sequence.context for sequence in self.batch])

    def uniform_steps(self) -> int | None:
        """Steps until one of the batch ends or fills a block; None without a batch."""
        block = self._deployment.layout.block_tokens
        return min((min(s.left, block - s.context % block) for s in self.batch), default=None)

    async def advance(self, steps: int, started_s: float, step_s: float) -> None:
        """The batch takes ``steps`` steps; who has its last token, or is to leave, leaves it."""
        for sequence in self.batch:
            await self._compute(sequence, steps)
            sequence.emit(steps, started_s, step_s)
        over = [sequence for sequence in self.batch if not sequence.left or sequence.gone_s is not None]
        self.batch = [sequence for sequence in self.batch if sequence not in over]
        for sequence in over:
            sequence.finished.set()

    async def _compute(self, sequence: DecodeSequence, steps: int) -> None:
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
