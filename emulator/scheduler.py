"""The central request scheduler: who serves a request, over which path, and what of its prompt is stored.

It owns the trie of committed prefixes and the books of every engine's load and every node's read queue; the
decisions themselves are pure functions of ``emulator.policy``. It sees sizes and block ids, never a token or a
byte of KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import msgspec

from . import policy
from .deployment import Deployment, engine_node, split_ids
from .errors import EmulatorError, ProtocolViolation, Refused
from .fabric.interface import Fabric
from .kvcache import PrefixTrie
from .messages import (
    COMMITTED,
    PROGRESS,
    REPLAY_DECISIONS,
    SUBMIT,
    Ack,
    Assignment,
    Committed,
    Decided,
    Phase,
    Progress,
    Submit,
)
from .policy import EngineLoad
from .records import Decision, Path

__all__ = ["Scheduler"]


class _Open(msgspec.Struct):
    """What a request in flight has on the books, until ``ahead``, the phases not over yet, is empty.

    Its nodes report over connections of their own, so that their reports may come in any order.
    """

    decision: Decision
    prompt_tokens: int
    total_tokens: int
    read_node: str
    read_tokens: int
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


class Scheduler:
    """The scheduler's role. Registers its handlers when it is made."""

    def __init__(self, deployment: Deployment, fabric: Fabric) -> None:
        self._deployment = deployment
        self._fabric = fabric
        self._trie = PrefixTrie()
        self._tokens = dict.fromkeys((*deployment.pe_engines, *deployment.de_engines), 0)
        self._requests = dict.fromkeys(self._tokens, 0)
        self._read_queue = {engine_node(engine): 0 for engine in self._tokens}
        self._open: dict[str, _Open] = {}
        self._recorded: _Recorded | None = None
        self._decisions: list[Decision] = []
        fabric.serve(SUBMIT, self.submit)
        fabric.serve(PROGRESS, self.progress)
        fabric.serve(COMMITTED, self.committed)
        fabric.serve(REPLAY_DECISIONS, self.replay)

    def decisions(self) -> tuple[Decision, ...]:
        """All decisions taken, in order."""
        return tuple(self._decisions)

    async def submit(self, request: Submit) -> Assignment:
        """Decide; Refused where the request can never fit."""
        if request.request in self._open:
            raise ProtocolViolation(f"{self._fabric.node}: request {request.request} was submitted twice")
        if self._recorded is None:
            sequence, decision = len(self._decisions), self._decide(request, self._hit_blocks(request))
        else:
            sequence, decision = self._replayed(request, self._recorded)
        replay = self._deployment.config.replay
        reason = policy.refusal(
            self._deployment.limits,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            hit_blocks=decision.hit_blocks,
            path=decision.path,
            block_tokens=self._deployment.layout.block_tokens,
        )
        if reason is not None:
            raise Refused(f"request {request.request} refused under --path {replay.path}: {reason}")
        self._book(request, decision)
        self._decisions.append(decision)
        return Assignment(decision, sequence, self._fabric.now())

    async def progress(self, request: Progress) -> Ack:
        """A phase is over: its load leaves the books."""
        entry = self._open.get(request.request)
        if entry is None:
            raise ProtocolViolation(f"{self._fabric.node}: progress of unknown request {request.request}")
        if request.phase not in entry.ahead:
            raise ProtocolViolation(f"{self._fabric.node}: {request.request} was {request.phase} before")
        if request.phase == "read":
            self._read_queue[entry.read_node] -= entry.read_tokens
        elif request.phase == "prefilled":
            self._charge(entry.decision.pe, -entry.prompt_tokens, -1)
        else:
            self._charge(entry.decision.de, -entry.total_tokens, -1)
        entry.ahead.remove(request.phase)
        if not entry.ahead:
            del self._open[request.request]
        return Ack()

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

    def _decide(self, request: Submit, hit: int) -> Decision:
        replay = self._deployment.config.replay
        pe = policy.choose_engine(self._loads(self._deployment.pe_engines))
        de = policy.choose_engine(self._loads(self._deployment.de_engines))
        if replay.path != "auto":
            path: Path = replay.path
        else:
            queues: dict[Path, int] = {
                "pe": self._read_queue[engine_node(pe)],
                "de": self._read_queue[engine_node(de)],
            }
            path = policy.choose_path(queues, request.request, replay.seed)
            if hit > self._deployment.limits.pe_buffer_blocks:
                # The DE's buffer takes the whole prompt in any case, so the other side can still read.
                path = "de"
        return Decision(request.request, pe, de, path, hit)

    def _replayed(self, request: Submit, recorded: _Recorded) -> tuple[int, Decision]:
        sequence, decision = recorded.take(request.request)
        hit = self._hit_blocks(request)
        if decision.hit_blocks != hit:
            raise EmulatorError(
                f"request {request.request}: {decision.hit_blocks} blocks hit when recorded, {hit} now;"
                " replay decisions with the same trace, --warm and --max-len"
            )
        return sequence, decision

    def _loads(self, engines: tuple[str, ...]) -> list[EngineLoad]:
        return [EngineLoad(engine, self._requests[engine], self._tokens[engine]) for engine in engines]

    def _book(self, request: Submit, decision: Decision) -> None:
        entry = _Open(
            decision,
            request.prompt_tokens,
            request.prompt_tokens + request.output_tokens,
            engine_node(decision.pe if decision.path == "pe" else decision.de),
            self._deployment.hit_tokens(decision.hit_blocks),
            set(get_args(Phase)),
        )
        self._open[request.request] = entry
        self._read_queue[entry.read_node] += entry.read_tokens
        self._charge(decision.pe, entry.prompt_tokens, 1)
        self._charge(decision.de, entry.total_tokens, 1)

    def _charge(self, engine: str, tokens: int, requests: int) -> None:
        self._tokens[engine] += tokens
        self._requests[engine] += requests
