"""The client: the agents. It replays a workload turn by turn and keeps each request's record.

A turn arrives when its predecessor's last token is out (plus think time) or, where the trace sets it, not
before its own arrival; it is submitted once its predecessor's last block is committed, so that it hits all that
was generated. A trajectory whose turn is refused cannot go on: its later turns are cancelled, and counted. Any
other error, of whichever node, ends the run.

With a ``request_timeout_s`` a turn that is not settled in time is given up: whoever has it is told, and the agent
waits until nothing of it is under way. It is cancelled, and so are its trajectory's later turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import trio

from ..deployment import Deployment, engine_node, join_ids
from ..errors import ConfigError, Refused, Withdrawn
from ..fabric.interface import Fabric, Method
from ..kvcache import BlockId, KeyChain
from ..models.backend import Backend
from ..models.reference import prompt_blocks
from ..records import Decisions, RequestRecord, Status
from ..watch import watch
from ..workload import Trajectory, Workload, request_id
from .decisions import check_decisions
from .messages import (
    CANCEL,
    COMMITTED,
    PUT,
    REPLAY_BATCHES,
    REPLAY_DECISIONS,
    SERVE,
    SETTLED,
    SUBMIT,
    Assignment,
    Batches,
    Cancel,
    Committed,
    Decided,
    PlannedBatch,
    Put,
    Serve,
    Settle,
    Submit,
)

__all__ = ["Client", "Replayed"]

Q = TypeVar("Q", bound=msgspec.Struct)
A = TypeVar("A", bound=msgspec.Struct)

Replayed = tuple[float, float, tuple[RequestRecord, ...]]
"""(when the clock started, when the last request settled, all records in trace order)."""


class Client:
    """The client's role."""

    def __init__(self, deployment: Deployment, fabric: Fabric, backend: Backend) -> None:
        self._deployment = deployment
        self._fabric = fabric
        self._backend = backend
        self._records: dict[str, RequestRecord] = {}
        self._agents: dict[str, _Agent] = {}
        self._requests: dict[str, _Request] = {}
        self._on_progress: Callable[[int, int], None] = lambda done, total: None
        self._total = 0

    async def prepare(self, workload: Workload, decisions: Decisions | None = None) -> None:
        """What comes before the clock starts: impose ``decisions``, warm the store, name the first turns' blocks.

        Raises ConfigError for a request that the backend cannot hold, and for decisions that do not fit here.
        """
        self._check(workload, decisions)
        if decisions is not None:
            await self._impose(decisions)
        for trajectory in workload.trajectories:
            agent = self._agents[trajectory.id] = _Agent(trajectory, self._deployment)
            if self._deployment.config.replay.warm:
                await self._warm(trajectory, agent)
            agent.ids(0)

    async def replay(self, workload: Workload, on_progress: Callable[[int, int], None] | None = None) -> Replayed:
        """Run every trajectory to its end. ``on_progress(finished, total)`` is told of every request's end."""
        self._total = sum(len(trajectory.turns) for trajectory in workload.trajectories)
        if on_progress is not None:
            self._on_progress = on_progress
        t0_s = self._fabric.now()
        async with trio.open_nursery() as nursery:
            for trajectory in workload.trajectories:
                agent = self._agents[trajectory.id]
                nursery.start_soon(self._follow, agent, t0_s, nursery, name=f"agent {trajectory.id}")
        order = [request_id(t, turn) for t in workload.trajectories for turn in range(len(t.turns))]
        return t0_s, self._fabric.now(), tuple(self._records[name] for name in order)

    async def watch(self, on_round: Callable[[], None]) -> NoReturn:
        """Raise EmulatorError when the replay gets no further; for fabrics whose clock does not know.

        ``on_round`` is told now and then, for as long as it goes on.
        """
        await watch(self._deployment, self._fabric, lambda: bool(self._requests), on_round)

    def give_up(self, request: str) -> bool:
        """Give a request up, whatever is being done for it; whether it was under way."""
        found = self._requests.get(request)
        if found is not None:
            found.give_up()
        return found is not None

    def _check(self, workload: Workload, decisions: Decisions | None) -> None:
        layout, engine = self._deployment.layout, self._deployment.config.engine
        longest = max((turn.prompt_tokens for t in workload.trajectories for turn in t.turns), default=1)
        cached = layout.full_blocks(longest - 1) * layout.block_tokens
        self._deployment.costs.check_covers(cached, max(longest, engine.batch_tokens))
        for trajectory in workload.trajectories:
            for index, turn in enumerate(trajectory.turns):
                name = request_id(trajectory, index)
                try:
                    self._backend.check_context(turn.total_tokens)
                except ConfigError as error:
                    raise ConfigError(f"request {name}: {error.text}; cut the trace with --max-len") from None
        if decisions is not None:
            if engine.request_timeout_s:
                raise ConfigError(
                    f"--decisions: request_timeout_s = {engine.request_timeout_s}: expected 0, since a request"
                    " that is given up leaves its recorded batch incomplete"
                )
            check_decisions(decisions, workload, self._deployment)

    async def _impose(self, decisions: Decisions) -> None:
        await self._fabric.call(self._deployment.scheduler, REPLAY_DECISIONS, Decided(decisions.requests))
        for node in self._deployment.named("pe"):
            batches = tuple(
                PlannedBatch(b.engine, b.step, b.requests, tuple(new for _, new in b.shape))
                for b in decisions.batches
                if engine_node(b.engine) == node
            )
            await self._fabric.call(node, REPLAY_BATCHES, Batches(batches))

    async def _warm(self, trajectory: Trajectory, agent: _Agent) -> None:
        """Commit the first prompt's full blocks, as if an earlier turn had left them."""
        layout = self._deployment.layout
        ids = agent.ids(0)[: layout.full_blocks(trajectory.turns[0].prompt_tokens)]
        blocks = prompt_blocks(self._backend, trajectory.prompt(0), block_tokens=layout.block_tokens)
        for node, first, count in self._deployment.stripes(0, len(ids)):
            data = blocks[first : first + count].tobytes()
            await self._fabric.call(node, PUT, Put(join_ids(ids[first : first + count]), data))
        if ids:
            await self._fabric.call(self._deployment.scheduler, COMMITTED, Committed(join_ids(ids)))

    async def _follow(self, agent: _Agent, t0_s: float, tasks: trio.Nursery) -> None:
        replay = self._deployment.config.replay
        trajectory = agent.trajectory
        out_s = eligible_s = t0_s
        why = ""
        for index, turn in enumerate(trajectory.turns):
            think_s = turn.think_s if replay.think == "trace" and index else 0.0
            arrived_s = out_s + think_s
            if turn.arrival_s is not None:
                arrived_s = max(arrived_s, t0_s + turn.arrival_s)
            if why:
                self._keep(_unserved(trajectory, index, "cancelled", out_s, why))
                continue
            await self._fabric.sleep_until(arrived_s)
            request = _Request(trajectory, index, arrived_s, max(arrived_s, eligible_s))
            try:
                record = await self._in_time(agent, request, tasks)
            except Refused as error:
                self._keep(_unserved(trajectory, index, "failed", arrived_s, error.text))
                why = "its predecessor failed"
                continue
            except Withdrawn as error:
                self._keep(self._given_up(request, error.text))
                why, out_s = "its predecessor was given up", self._fabric.now()
                continue
            self._keep(record)
            assert record.settled_s is not None
            eligible_s = record.settled_s
            out_s = record.last_token_s if record.last_token_s is not None else eligible_s

    async def _in_time(self, agent: _Agent, request: _Request, tasks: trio.Nursery) -> RequestRecord:
        """Have a turn served; from its deadline on it is given up."""
        timeout_s = self._deployment.config.engine.request_timeout_s
        self._requests[request.id] = request
        patience = trio.CancelScope()

        async def expire() -> None:
            with patience:
                await self._fabric.sleep_until(request.arrived_s + timeout_s)
                request.give_up()

        if timeout_s:
            tasks.start_soon(expire)
        try:
            return await self._request(agent, request, tasks)
        finally:
            patience.cancel()
            del self._requests[request.id]

    async def _request(self, agent: _Agent, request: _Request, tasks: trio.Nursery) -> RequestRecord:
        trajectory, layout, index = agent.trajectory, self._deployment.layout, request.turn
        turn, ids = trajectory.turns[index], agent.ids(index)
        name = request.id
        prompt_ids = join_ids(ids[: layout.full_blocks(turn.prompt_tokens)])
        submit = Submit(name, turn.prompt_tokens, turn.output_tokens, prompt_ids)
        scheduler = self._deployment.scheduler
        request.assignment = assignment = await self._call(request, tasks, scheduler, SUBMIT, submit)
        if request.given_up:
            await self._fabric.call(scheduler, CANCEL, Cancel(name))
            raise Withdrawn(f"request {name} was given up before it was served")
        decision = assignment.decision
        hit_tokens = self._deployment.hit_tokens(decision.hit_blocks)
        append, output = agent.tokens(index, hit_tokens)
        serve = Serve(assignment, turn.prompt_tokens, append, output, join_ids(ids))
        de_node = engine_node(decision.de)
        tasks.start_soon(agent.think_ahead, index + 1)
        served = await self._call(request, tasks, de_node, SERVE, serve)
        settled = await self._call(request, tasks, de_node, SETTLED, Settle(name))
        return RequestRecord(
            id=name,
            trajectory=trajectory.id,
            turn=index,
            status="done",
            path=decision.path,
            pe=decision.pe,
            de=decision.de,
            prompt_tokens=turn.prompt_tokens,
            hit_tokens=hit_tokens,
            de_hit_tokens=self._deployment.hit_tokens(decision.de_blocks),
            pool_tokens=self._deployment.hit_tokens(served.pooled.blocks),
            pool_local_tokens=self._deployment.hit_tokens(served.pooled.local),
            pool_de_tokens=self._deployment.hit_tokens(served.de_pooled.blocks),
            output_tokens=turn.output_tokens,
            persisted_tokens=settled.persisted_tokens,
            arrived_s=request.arrived_s,
            eligible_s=request.eligible_s,
            scheduled_s=assignment.scheduled_s,
            allocated_s=served.allocated_s,
            read_s=served.read_s,
            prefill_start_s=served.prefill_start_s,
            computed_s=served.computed_s,
            transferred_s=served.transferred_s,
            first_token_s=served.first_token_s,
            last_token_s=served.last_token_s,
            settled_s=settled.settled_s,
            token_gaps=served.token_gaps,
            model_tokens=served.model_tokens,
        )

    async def _call(
        self, request: _Request, tasks: trio.Nursery, node: str, method: Method[Q, A], message: Q
    ) -> A:
        """Call for a request. Where that is given up, ``node`` is told, whose answer may then be Withdrawn."""
        answered = False

        async def cancel() -> None:
            while not answered and not (await self._fabric.call(node, CANCEL, Cancel(request.id))).found:
                pass

        request.tell = lambda: tasks.start_soon(cancel)
        if request.given_up:
            request.tell()
        try:
            return await self._fabric.call(node, method, message)
        finally:
            answered = True
            request.tell = None

    def _given_up(self, request: _Request, why: str) -> RequestRecord:
        record = _unserved(request.trajectory, request.turn, "cancelled", request.arrived_s, why)
        if request.assignment is None:
            return record
        decision = request.assignment.decision
        return msgspec.structs.replace(
            record,
            path=decision.path,
            pe=decision.pe,
            de=decision.de,
            hit_tokens=self._deployment.hit_tokens(decision.hit_blocks),
            de_hit_tokens=self._deployment.hit_tokens(decision.de_blocks),
            eligible_s=request.eligible_s,
            scheduled_s=request.assignment.scheduled_s,
        )

    def _keep(self, record: RequestRecord) -> None:
        self._records[record.id] = record
        self._on_progress(len(self._records), self._total)


class _Request:
    """A turn that has arrived; its assignment once it has one."""

    def __init__(self, trajectory: Trajectory, turn: int, arrived_s: float, eligible_s: float) -> None:
        self.trajectory = trajectory
        self.turn = turn
        self.id = request_id(trajectory, turn)
        self.arrived_s = arrived_s
        self.eligible_s = eligible_s
        self.assignment: Assignment | None = None
        self.given_up = False
        self.tell: Callable[[], None] | None = None
        """Tells whoever has the request now that it is given up."""

    def give_up(self) -> None:
        """Want no more of it."""
        if not self.given_up:
            self.given_up = True
            if self.tell is not None:
                self.tell()


class _Agent:
    """A trajectory on its way: its turns' block ids and tokens, worked out while the turn before is served.

    A context of 64K tokens costs a millisecond or two to name, which no agent should be seen to wait for.
    """

    def __init__(self, trajectory: Trajectory, deployment: Deployment) -> None:
        self.trajectory = trajectory
        self._layout = deployment.layout
        self._chains = [KeyChain(deployment.layout.block_tokens) for _ in trajectory.streams]

    def ids(self, index: int) -> Sequence[BlockId]:
        """The ids of turn ``index``'s full blocks, prompt and output together.

        Hashes only the tokens that no earlier turn on the same stream had.
        """
        turn = self.trajectory.turns[index]
        chain = self._chains[turn.stream]
        if chain.tokens < turn.total_tokens:
            chain.extend(self.trajectory.streams[turn.stream].tokens(chain.tokens, turn.total_tokens))
        return chain.ids[: self._layout.full_blocks(turn.total_tokens)]

    def tokens(self, index: int, hit_tokens: int) -> tuple[bytes, bytes]:
        """What turn ``index`` appends behind its hit, and its forced output, encoded."""
        turn = self.trajectory.turns[index]
        stream = self.trajectory.streams[turn.stream]
        append = stream.tokens(hit_tokens, turn.prompt_tokens)
        return _encode(append), _encode(stream.tokens(turn.prompt_tokens, turn.total_tokens))

    async def think_ahead(self, index: int) -> None:
        """Name turn ``index``'s blocks, after whatever else is to be done now."""
        await trio.lowlevel.checkpoint()
        if index < len(self.trajectory.turns):
            self.ids(index)


def _unserved(trajectory: Trajectory, index: int, status: Status, at_s: float, why: str) -> RequestRecord:
    turn = trajectory.turns[index]
    return RequestRecord(
        id=request_id(trajectory, index),
        trajectory=trajectory.id,
        turn=index,
        status=status,
        error=why,
        prompt_tokens=turn.prompt_tokens,
        output_tokens=turn.output_tokens,
        arrived_s=at_s,
    )


def _encode(tokens: npt.NDArray[np.uint32]) -> bytes:
    return tokens.astype("<u4", copy=False).tobytes()
