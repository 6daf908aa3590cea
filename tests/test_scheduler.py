"""The scheduler's books: who is loaded by what, until when, and what is committed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import permutations

import pytest

from emulator.deployment import Deployment, join_ids
from emulator.errors import ProtocolViolation, Refused
from emulator.fabric.clock import run_virtual
from emulator.fabric.fluid import FluidNetwork, open_fluid
from emulator.kvcache import BlockId
from emulator.messages import Committed, Phase, Progress, Submit
from emulator.plan import emulated_rates
from emulator.records import Decision
from emulator.scheduler import Scheduler

from .clusters import config

IDS = [BlockId(bytes([at + 1]) * 32) for at in range(10)]


def _ask(name: str, prompt: int = 640, output: int = 10, blocks: int = 10) -> Submit:
    return Submit(name, prompt, output, join_ids(IDS[:blocks]))


def _run(body: Callable[[Scheduler], Awaitable[None]], **replay: object) -> None:
    run = config(**replay)  # type: ignore[arg-type]
    network = FluidNetwork(emulated_rates(run), nodes=[m.name for m in run.members], rpc_latency_s=1e-5)

    async def main() -> None:
        async with open_fluid(network):
            await body(Scheduler(Deployment(run), network.fabric("sched")))

    run_virtual(main)


def test_requests_spread_over_idle_engines_and_return() -> None:
    """Each goes to the least loaded engine; a finished one's engine is free again."""

    async def body(scheduler: Scheduler) -> None:
        first = (await scheduler.submit(_ask("a"))).decision
        second = (await scheduler.submit(_ask("b"))).decision
        assert (first.pe, second.pe) == ("pe0/0", "pe0/1")
        assert (first.de, second.de) == ("de0/0", "de0/1")
        await scheduler.progress(Progress("a", "read"))
        await scheduler.progress(Progress("a", "prefilled"))
        await scheduler.progress(Progress("a", "finished"))
        third = (await scheduler.submit(_ask("c"))).decision
        assert (third.pe, third.de) == ("pe0/0", "de0/0")

    _run(body)


def test_a_prompt_hits_what_is_committed_but_never_all_of_itself() -> None:
    """The hit is the committed prefix in blocks; at least one token is left to compute."""

    async def body(scheduler: Scheduler) -> None:
        await scheduler.committed(Committed(join_ids(IDS[:10])))
        assert (await scheduler.submit(_ask("whole"))).decision.hit_blocks == 9
        assert (await scheduler.submit(_ask("more", prompt=641))).decision.hit_blocks == 10
        other = Submit("other", 640, 1, join_ids([*IDS[:3], *IDS[5:]]))
        assert (await scheduler.submit(other)).decision.hit_blocks == 3

    _run(body)


def test_reads_go_to_the_shorter_queue_until_they_are_over() -> None:
    """A read's tokens are in its node's queue from the decision to its completion."""

    async def body(scheduler: Scheduler) -> None:
        await scheduler.committed(Committed(join_ids(IDS)))
        first = (await scheduler.submit(_ask("a"))).decision
        second = (await scheduler.submit(_ask("b"))).decision
        assert {first.path, second.path} == {"pe", "de"}
        await scheduler.progress(Progress("b", "read"))
        third = (await scheduler.submit(_ask("c"))).decision
        assert third.path == second.path

    _run(body)


@pytest.mark.parametrize("path", ["pe", "de"])
def test_a_forced_path_is_taken(path: str) -> None:
    """Under ``--path`` every request takes it."""

    async def body(scheduler: Scheduler) -> None:
        for at in range(4):
            assert (await scheduler.submit(_ask(str(at)))).decision.path == path

    _run(body, path=path)


def test_a_hit_beyond_the_pe_buffer_is_read_on_the_other_side() -> None:
    """Left to choose, no request is refused for a buffer that it need not use."""

    async def body(scheduler: Scheduler) -> None:
        await scheduler.committed(Committed(join_ids(IDS)))
        paths = {(await scheduler.submit(_ask(str(at)))).decision.path for at in range(6)}
        assert paths == {"de"}

    _run(body, engine={"pe_buffer_gb": 0.02})


def test_a_refused_request_leaves_no_trace() -> None:
    """Its load is not booked and it is not among the decisions."""

    async def body(scheduler: Scheduler) -> None:
        with pytest.raises(Refused, match=r"pe_hbm_kv_gb|de_buffer_gb|de_hbm_kv_gb"):
            await scheduler.submit(_ask("huge", prompt=10**9))
        decision = (await scheduler.submit(_ask("a"))).decision
        assert scheduler.decisions() == (decision,)
        assert decision == Decision("a", "pe0/0", "de0/0", decision.path, 0)

    _run(body)


@pytest.mark.parametrize("order", list(permutations(("read", "prefilled", "finished"))))
def test_phases_may_be_reported_in_any_order(order: tuple[Phase, ...]) -> None:
    """PE and DE report over connections of their own; whoever comes first, the books end as they began."""

    async def body(scheduler: Scheduler) -> None:
        await scheduler.committed(Committed(join_ids(IDS)))
        first = (await scheduler.submit(_ask("a"))).decision
        for phase in order:
            await scheduler.progress(Progress("a", phase))
        again = (await scheduler.submit(_ask("a"))).decision
        assert again == first

    _run(body)


def test_what_makes_no_sense_is_a_violation() -> None:
    """A request twice, progress of one that is not there, or the same phase twice."""

    async def body(scheduler: Scheduler) -> None:
        await scheduler.submit(_ask("a"))
        with pytest.raises(ProtocolViolation, match="twice"):
            await scheduler.submit(_ask("a"))
        with pytest.raises(ProtocolViolation, match="unknown"):
            await scheduler.progress(Progress("b", "read"))
        await scheduler.progress(Progress("a", "read"))
        with pytest.raises(ProtocolViolation, match="a was read before"):
            await scheduler.progress(Progress("a", "read"))

    _run(body)
