"""The central request scheduler: who serves a request, over which path, and what of its prompt is stored.

It owns the trie of committed prefixes and the books of every engine's load and every node's read queue; the
decisions themselves are a ``Policy``'s. It sees sizes and block ids, never a token or a byte of KV.

Theory of operation. A submitted request waits in two queues, for a PE and for a DE. Nothing is decided before a
node's leader fetches: then its report enters the books, and the policy is asked for its group. All PE nodes are
one group, which takes from the one FIFO queue; a DE node is a group of its own. A DE group's fetch first drains
the global queue to all groups, then places its own group's. Once a request has both engines its read path is
decided, its reads are on the books, and ``submit`` returns.

Leaders do not poll in vain: while work waits, one leader of the side after the other is woken, round the nodes,
until all of it is placed or none of them can take any. Who could not is asked again when its load has changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import msgspec
import trio

from ..deployment import Deployment, engine_node, split_ids
from ..errors import EmulatorError, ProtocolViolation, Refused, Withdrawn
from ..fabric.interface import Fabric
from ..kvcache import PrefixTrie
from ..policy import Load, Policy, Queued, refusal, split_blocks
from ..records import Decision, Path
from .messages import (
    CANCEL,
    COMMITTED,
    FETCH,
    REPLAY_DECISIONS,
    SUBMIT,
    WAKE,
    Ack,
    Assignment,
    Cancel,
    Cancelled,
    Committed,
    Decided,
    Fetch,
    Phase,
    Submit,
    Wake,
)

__all__ = ["Scheduler"]

Side = Literal["pe", "de"]


class _Waiting:
    """A request until both its engines and its path are decided."""

    def __init__(self, queued: Queued, hit_blocks: int) -> None:
        self.queued = queued
        self.hit_blocks = hit_blocks
        self.pe: str | None = None
        self.de: str | None = None
        self.decided = trio.Event()
        self.decision: Decision | None = None
        self.sequence = 0


class _Open(msgspec.Struct):
    """What a decided request has on the books, until ``ahead``, the phases not over yet, is empty.

    Its nodes report over connections of their own, so that their reports may come in any order.
    """

    decision: Decision
    prompt_tokens: int
    total_tokens: int
    reads: tuple[tuple[str, int], ...]
    ahead: set[Phase]


class _Recorded:
    """Another run's decisions, by request, with their places in its order.

    The place becomes the sequence in which the request reserves memory and reads: batches were formed of what
    had been read, so the order of reads is part of what was decided.
    """

    def __init__(self, decisions: Sequence[Decision]) -> None:
        self._decisions = {decision.request: (place, decision) for place, decision in enumerate(decisions)}

    def take(self, request: str) -> tuple[int, Decision]:
        """Place and decision of ``request``. Refused where the other run did not decide it."""
        if request not in self._decisions:
            raise Refused(f"request {request} was not decided in the run whose decisions are repeated")
        return self._decisions[request]


class _Rota:
    """Whose turn it is to fetch, among one side's nodes: each once, until somebody's chances have changed."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = deque(nodes)
        self._in_vain: set[str] = set()

    def next(self) -> str | None:
        """The next node that may have something to gain by fetching."""
        for _ in range(len(self._nodes)):
            node = self._nodes[0]
            self._nodes.rotate(-1)
            if node not in self._in_vain:
                return node
        return None

    def fetched_in_vain(self, node: str) -> None:
        """Nothing that waits is for this node as it is now."""
        self._in_vain.add(node)

    def changed(self) -> None:
        """Other work is at the head, or there is new load: everybody has a chance again."""
        self._in_vain.clear()


class Scheduler:
    """The scheduler's role. Registers its handlers when it is made."""

    def __init__(self, deployment: Deployment, fabric: Fabric, policy: Policy, tasks: trio.Nursery) -> None:
        self._deployment = deployment
        self._fabric = fabric
        self._policy = policy
        self._tasks = tasks
        self._trie = PrefixTrie()
        self._tokens = dict.fromkeys((*deployment.pe_engines, *deployment.de_engines), 0)
        self._requests = dict.fromkeys(self._tokens, 0)
        self._engines: dict[str, list[str]] = {}
        for engine in self._tokens:
            self._engines.setdefault(engine_node(engine), []).append(engine)
        self._side: dict[str, Side] = {
            **dict.fromkeys(deployment.named("pe"), "pe"),
            **dict.fromkeys(deployment.named("de"), "de"),
        }
        self._read_queue = dict.fromkeys(self._side, 0)
        self._pages = dict.fromkeys(deployment.de_engines, deployment.limits.de_hbm_pages)
        self._waiting: dict[str, _Waiting] = {}
        self._open: dict[str, _Open] = {}
        self._for_pe: list[Queued] = []
        self._for_de: list[Queued] = []
        self._for_group: dict[str, list[Queued]] = {node: [] for node in deployment.named("de")}
        self._rota = {"pe": _Rota(deployment.named("pe")), "de": _Rota(deployment.named("de"))}
        self._recorded: _Recorded | None = None
        self._arrived = 0
        self._decisions: dict[int, Decision] = {}
        self._decided = 0
        fabric.serve(SUBMIT, self.submit)
        fabric.serve(FETCH, self.fetch)
        fabric.serve(COMMITTED, self.committed)
        fabric.serve(CANCEL, self.cancel)
        fabric.serve(REPLAY_DECISIONS, self.replay)

    def decisions(self) -> tuple[Decision, ...]:
        """All decisions taken, in order."""
        return tuple(self._decisions[sequence] for sequence in sorted(self._decisions))

    def waiting(self) -> Iterator[tuple[str, str]]:
        """Every request that is not decided yet, and what it waits for."""
        for name, waiting in self._waiting.items():
            missing = [side.upper() for side, engine in (("pe", waiting.pe), ("de", waiting.de)) if engine is None]
            yield name, f"waiting for a {' and a '.join(missing)} to take it"

    def booked(self) -> dict[str, int]:
        """Requests on the books, and what they put there: tokens of engines and read queues, pages; no zeros."""
        pages = {name: self._deployment.limits.de_hbm_pages - free for name, free in self._pages.items()}
        books = {
            "tokens": self._tokens,
            "requests": self._requests,
            "read_queue": self._read_queue,
            "pages": pages,
            "queued": {"pe": len(self._for_pe), "de": len(self._for_de)},
            "group": {group: len(queue) for group, queue in self._for_group.items()},
            "request": dict.fromkeys((*self._waiting, *self._open), 1),
        }
        return {f"{book} {name}": value for book, rows in books.items() for name, value in rows.items() if value}

    async def submit(self, request: Submit) -> Assignment:
        """Decide, once both sides have fetched the request; Refused where it can never fit."""
        if request.request in self._open or request.request in self._waiting:
            raise ProtocolViolation(f"{self._fabric.node}: request {request.request} was submitted twice")
        hit = self._hit_blocks(request)
        if self._recorded is not None:
            sequence, decision = self._replayed(request, hit, self._recorded)
            self._refuse(request, decision.hit_blocks, decision.path)
            self._book_engine(decision.pe, request.prompt_tokens, 1)
            self._book_engine(decision.de, request.prompt_tokens + request.output_tokens, 1)
        else:
            # Where the policy chooses the path, the DE's buffer takes the whole prompt in any case.
            self._refuse(request, hit, "pe" if self._deployment.reads == "pe" else "de")
            sequence, decision = await self._decide(request, hit)
        self._book_reads(request, decision)
        self._decisions[sequence] = decision
        return Assignment(decision, sequence, self._fabric.now())

    async def fetch(self, request: Fetch) -> Ack:
        """Take a leader's report, and place what waits on its engines."""
        side = self._side[request.node]
        for changed in dict.fromkeys(self._over(name, phase) for name, phase in request.over):
            self._rota[changed].changed()
            if changed != side:
                # A DE's node reports for a PE that never heard of a request that was given up.
                self._freed(changed)
        if side == "pe":
            self._fetch_prefill(request.node)
        else:
            self._fetch_decode(request.node)
        return Ack()

    async def cancel(self, request: Cancel) -> Cancelled:
        """Forget a request that no DE has been told of: it waits here, or its decision does at the client."""
        name = request.request
        waiting = self._waiting.pop(name, None)
        if waiting is not None:
            self._leave_queues(waiting)
            waiting.decided.set()
            return Cancelled(True)
        entry = self._open.get(name)
        if entry is None:
            return Cancelled(False)
        for phase in sorted(entry.ahead):
            self._over(name, phase)
        self._freed("pe")
        self._freed("de")
        return Cancelled(True)

    async def committed(self, request: Committed) -> Ack:
        """The blocks of a chain are committed up to here, so later prompts hit them."""
        self._trie.insert(split_ids(request.block_ids))
        return Ack()

    async def replay(self, request: Decided) -> Ack:
        """Decide from now on as another run did."""
        self._recorded = _Recorded(request.decisions)
        return Ack()

    def _hit_blocks(self, request: Submit) -> int:
        """Committed blocks of the prompt; at least its last token is always computed."""
        layout = self._deployment.layout
        matched = self._trie.match(split_ids(request.block_ids))
        return min(matched, layout.full_blocks(request.prompt_tokens - 1))

    def _refuse(self, request: Submit, hit_blocks: int, path: Path) -> None:
        reason = refusal(
            self._deployment.limits,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            hit_blocks=hit_blocks,
            path=path,
            block_tokens=self._deployment.layout.block_tokens,
        )
        if reason is not None:
            replay = self._deployment.config.replay
            raise Refused(
                f"request {request.request} refused under {replay.system} --path {replay.path}: {reason}"
            )

    async def _decide(self, request: Submit, hit_blocks: int) -> tuple[int, Decision]:
        """Queue the request for both sides and wait for its engines and path: which decision it was, and it."""
        hit_tokens = self._deployment.hit_tokens(hit_blocks)
        queued = Queued(request.request, self._arrived, request.prompt_tokens, request.output_tokens, hit_tokens)
        self._arrived += 1
        waiting = self._waiting[request.request] = _Waiting(queued, hit_blocks)
        self._for_pe.append(queued)
        self._for_de.append(queued)
        if len(self._for_pe) == 1:
            self._rota["pe"].changed()
        self._wake("pe")
        self._rota["de"].changed()
        self._wake("de")
        await waiting.decided.wait()
        if waiting.decision is None:
            raise Withdrawn(f"request {request.request} was given up while waiting for its engines")
        return waiting.sequence, waiting.decision

    def _leave_queues(self, waiting: _Waiting) -> None:
        """Take a request out of every queue and off the books; who was behind it may have its turn."""
        queued = waiting.queued
        for queue in (self._for_pe, self._for_de, *self._for_group.values()):
            if queued in queue:
                queue.remove(queued)
        if waiting.pe is not None:
            self._book_engine(waiting.pe, -queued.prompt_tokens, -1)
        if waiting.de is not None:
            self._book_engine(waiting.de, -queued.tokens, -1)
        self._freed("pe")
        self._freed("de")

    def _freed(self, side: Side) -> None:
        """Load has left the books of this side, or a queue its head, and no leader has come to say so."""
        self._rota[side].changed()
        if side == "pe":
            if self._for_pe:
                self._wake("pe")
        else:
            for group, queue in self._for_group.items():
                if queue:
                    self._wake_leader(group)

    def _fetch_prefill(self, node: str) -> None:
        if not self._for_pe:
            return
        # Read queues are a node's, so classes that go by them make sense in a group of all nodes only.
        loads = [load for pe in self._deployment.named("pe") for load in self._loads(pe)]
        engines = self._policy.assign_prefill(self._for_pe, loads)
        for queued, engine in zip(self._for_pe, engines, strict=False):
            self._book_engine(engine, queued.prompt_tokens, 1)
            waiting = self._waiting[queued.request]
            waiting.pe = engine
            self._choose_path(waiting)
        del self._for_pe[: len(engines)]
        rota = self._rota["pe"]
        if engines:
            rota.changed()
        else:
            rota.fetched_in_vain(node)
        if self._for_pe:
            self._wake("pe")

    def _fetch_decode(self, node: str) -> None:
        if self._for_de:
            loads = {group: sum(self._tokens[e] for e in self._engines[group]) for group in self._for_group}
            for group in loads:
                loads[group] += sum(queued.tokens for queued in self._for_group[group])
            routed = self._policy.route_decode(self._for_de, loads)
            for queued, group in zip(self._for_de, routed, strict=True):
                self._for_group[group].append(queued)
            self._for_de.clear()
            for group in dict.fromkeys(routed):
                if group != node:
                    self._wake_leader(group)
        queue = self._for_group[node]
        if not queue:
            return
        engines = self._policy.assign_decode(queue, self._loads(node))
        for queued, engine in zip(queue, engines, strict=False):
            self._book_engine(engine, queued.tokens, 1)
            waiting = self._waiting[queued.request]
            waiting.de = engine
            self._choose_path(waiting)
        del queue[: len(engines)]

    def _choose_path(self, waiting: _Waiting) -> None:
        """Decide the read path once both engines are known, by both nodes' read queues as they are now."""
        if waiting.pe is None or waiting.de is None:
            return
        pe_queue = self._read_queue[engine_node(waiting.pe)]
        de_queue = self._read_queue[engine_node(waiting.de)]
        reads, split = self._deployment.reads, 0
        path: Path
        if reads == "auto":
            path = self._policy.choose_path(waiting.queued, pe_queue, de_queue)
            if waiting.hit_blocks > self._deployment.limits.pe_buffer_blocks:
                path = "de"
        elif reads == "split":
            split = split_blocks(
                waiting.hit_blocks,
                pe_queue,
                de_queue,
                block_tokens=self._deployment.layout.block_tokens,
                pe_buffer_blocks=self._deployment.limits.pe_buffer_blocks,
            )
            path = "pe" if split == 0 else "de" if split == waiting.hit_blocks else "split"
        else:
            path = reads
        name = waiting.queued.request
        del self._waiting[name]
        waiting.decision = Decision(
            name, waiting.pe, waiting.de, path, waiting.hit_blocks, split if path == "split" else 0
        )
        waiting.sequence, self._decided = self._decided, self._decided + 1
        self._queue_reads(waiting.decision)
        waiting.decided.set()

    def _replayed(self, request: Submit, hit: int, recorded: _Recorded) -> tuple[int, Decision]:
        sequence, decision = recorded.take(request.request)
        if decision.hit_blocks != hit:
            raise EmulatorError(
                f"request {request.request}: {decision.hit_blocks} blocks hit when recorded, {hit} now;"
                " replay decisions with the same trace, --warm and --max-len"
            )
        self._queue_reads(decision)
        return sequence, decision

    def _loads(self, node: str) -> list[Load]:
        free = self._deployment.layout.block_tokens
        return [
            Load(
                engine,
                node,
                self._requests[engine],
                self._tokens[engine],
                self._read_queue[node],
                self._pages.get(engine, 0) * free,
            )
            for engine in self._engines[node]
        ]

    def _wake(self, side: Side) -> None:
        """Let the next leader of ``side`` fetch, if one has something to gain."""
        node = self._rota[side].next()
        if node is not None:
            self._wake_leader(node)

    def _wake_leader(self, node: str) -> None:
        self._tasks.start_soon(self._call_wake, node)

    async def _call_wake(self, node: str) -> None:
        await self._fabric.call(node, WAKE, Wake())

    def _reads_of(self, decision: Decision) -> tuple[tuple[str, int], ...]:
        """(node, tokens) that a decision puts into read queues."""
        on_de = self._deployment.hit_tokens(decision.de_blocks)
        on_pe = self._deployment.hit_tokens(decision.hit_blocks) - on_de
        return (engine_node(decision.pe), on_pe), (engine_node(decision.de), on_de)

    def _queue_reads(self, decision: Decision) -> None:
        for node, tokens in self._reads_of(decision):
            self._read_queue[node] += tokens

    def _book_reads(self, request: Submit, decision: Decision) -> None:
        self._open[request.request] = _Open(
            decision,
            request.prompt_tokens,
            request.prompt_tokens + request.output_tokens,
            self._reads_of(decision),
            set(get_args(Phase)),
        )

    def _over(self, name: str, phase: Phase) -> Side:
        """A phase of a request is over: its load leaves the books; of which side's nodes."""
        entry = self._open.get(name)
        if entry is None:
            raise ProtocolViolation(f"{self._fabric.node}: a report of unknown request {name}")
        if phase not in entry.ahead:
            raise ProtocolViolation(f"{self._fabric.node}: {name} was {phase} before")
        if phase == "read_pe":
            node, tokens = entry.reads[0]
            self._read_queue[node] -= tokens
        elif phase == "read_de":
            node, tokens = entry.reads[1]
            self._read_queue[node] -= tokens
        elif phase == "prefilled":
            self._book_engine(entry.decision.pe, -entry.prompt_tokens, -1)
        else:
            self._book_engine(entry.decision.de, -entry.total_tokens, -1)
        entry.ahead.remove(phase)
        if not entry.ahead:
            del self._open[name]
        return "pe" if phase in ("read_pe", "prefilled") else "de"

    def _book_engine(self, engine: str, tokens: int, requests: int) -> None:
        self._tokens[engine] += tokens
        self._requests[engine] += requests
        if engine in self._pages:
            pages = self._deployment.layout.blocks(abs(tokens))
            self._pages[engine] += pages if tokens < 0 else -pages
