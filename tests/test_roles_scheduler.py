"""The scheduler's queues and books: who is loaded by what, until when, who fetches, and what is committed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from itertools import permutations

import pytest
import trio

from emulator.deployment import Deployment, join_ids
from emulator.errors import ProtocolViolation, Refused, Withdrawn
from emulator.fabric.clock import run_virtual
from emulator.fabric.fluid import FluidNetwork, open_fluid
from emulator.kvcache import BlockId
from emulator.plan import emulated_rates
from emulator.policy import make_policy
from emulator.records import Decision
from emulator.roles.leader import Leader
from emulator.roles.messages import Cancel, Committed, Fetch, Phase, Submit
from emulator.roles.scheduler import Scheduler

from .clusters import config
from .within import assert_within

IDS = [BlockId(bytes([at + 1]) * 32) for at in range(10)]
SETTLE_S = 0.1
"""Long enough for every report and wake-up to have gone round."""

Leaders = Mapping[str, Leader]
Body = Callable[[Scheduler, Leaders], Awaitable[None]]


def _ask(name: str, prompt: int = 640, output: int = 10, blocks: int = 10) -> Submit:
    return Submit(name, prompt, output, join_ids(IDS[:blocks]))


def _run(body: Body, *, pe_nodes: int = 1, de_nodes: int = 1, gpus: int = 2, **replay: object) -> None:
    """Run ``body`` beside a scheduler and the leaders of all nodes."""
    run = config(pe_nodes=pe_nodes, de_nodes=de_nodes, gpus=gpus, **replay)  # type: ignore[arg-type]
    network = FluidNetwork(emulated_rates(run), nodes=[m.name for m in run.members], rpc_latency_s=1e-5)
    deployment = Deployment(run)

    async def main() -> None:
        async with open_fluid(network), trio.open_nursery() as nursery:
            policy = make_policy(deployment.system.policy, deployment.policy_setup)
            scheduler = Scheduler(deployment, network.fabric("sched"), policy, nursery)
            leaders = {
                node: Leader(deployment, network.fabric(node))
                for node in (*deployment.named("pe"), *deployment.named("de"))
            }
            for leader in leaders.values():
                nursery.start_soon(leader.serve)
            await body(scheduler, leaders)
            nursery.cancel_scope.cancel()

    run_virtual(main, horizon_s=1e3)


async def _finish(leaders: Leaders, decision: Decision) -> None:
    """Every phase of a request is over, as its nodes would report it."""
    pe, de = leaders[decision.pe.partition("/")[0]], leaders[decision.de.partition("/")[0]]
    pe.report(decision.request, "read_pe")
    pe.report(decision.request, "prefilled")
    de.report(decision.request, "read_de")
    de.report(decision.request, "finished")
    await trio.sleep(SETTLE_S)


def test_requests_spread_over_idle_engines_and_return() -> None:
    """Each goes to the least loaded engine; a finished one's engine is free again."""

    async def body(scheduler: Scheduler, leaders: Leaders) -> None:
        first = (await scheduler.submit(_ask("a"))).decision
        second = (await scheduler.submit(_ask("b"))).decision
        assert (first.pe, second.pe) == ("pe0/0", "pe0/1")
        assert (first.de, second.de) == ("de0/0", "de0/1")
        await _finish(leaders, first)
        third = (await scheduler.submit(_ask("c"))).decision
        assert (third.pe, third.de) == ("pe0/0", "de0/0")

    _run(body)


def test_a_prompt_hits_what_is_committed_but_never_all_of_itself() -> None:
    """The hit is the committed prefix in blocks; at least one token is left to compute."""

    async def body(scheduler: Scheduler, leaders: Leaders) -> None:
        await scheduler.committed(Committed(join_ids(IDS[:10])))
        assert (await scheduler.submit(_ask("whole"))).decision.hit_blocks == 9
        assert (await scheduler.submit(_ask("more", prompt=641))).decision.hit_blocks == 10
        other = Submit("other", 640, 1, join_ids([*IDS[:3], *IDS[5:]]))
        assert (await scheduler.submit(other)).decision.hit_blocks == 3

    _run(body)


def test_reads_go_to_the_shorter_queue_until_they_are_over() -> None:
    """A read's tokens are in its node's queue from the decision to the report that it is over."""

    async def body(scheduler: Scheduler, leaders: Leaders) -> None:
        await scheduler.committed(Committed(join_ids(IDS)))
        first = (await scheduler.submit(_ask("a"))).decision
        second = (await scheduler.submit(_ask("b"))).decision
        assert {first.path, second.path} == {"pe", "de"}
        leaders["pe0"].report("b", "read_pe")
        leaders["de0"].report("b", "read_de")
        await trio.sleep(SETTLE_S)
        third = (await scheduler.submit(_ask("c"))).decision
        assert third.path == second.path

    _run(body)


@pytest.mark.parametrize("path", ["pe", "de"])
def test_a_forced_path_is_taken(path: str) -> None:
    """Under ``--path`` every request takes it."""

    async def body(scheduler: Scheduler, leaders: Leaders) -> None:
        for at in range(4):
            assert (await scheduler.submit(_ask(str(at)))).decision.path == path

    _run(body, path=path)


def test_a_hit_beyond_the_pe_buffer_is_read_on_the_other_side() -> None:
    """Left to choose, no request is refused for a buffer that it need not use."""

    async def body(scheduler: Scheduler, leaders: Leaders) -> None:
        await scheduler.committed(Committed(join_ids(IDS)))
        paths = {(await scheduler.submit(_ask(str(at)))).decision.path for at in range(6)}
        assert paths == {"de"}

    _run(body, engine={"pe_buffer_gb": 0.02})


def test_a_split_request_is_on_both_nodes_books() -> None:
    """With idle queues both sides read one half; the first blocks are the DE's."""

    async def body(scheduler: Scheduler, leaders: Leaders) -> None:
        await scheduler.committed(Committed(join_ids(IDS)))
        decision = (await scheduler.submit(_ask("a", prompt=641))).decision
        assert (decision.path, decision.hit_blocks, decision.de_blocks) == ("split", 10, 5)

    _run(body, system="split")


def test_a_refused_request_leaves_no_trace() -> None:
    """Its load is not booked and it is not among the decisions."""

    async def body(scheduler: Scheduler, leaders: Leaders) -> None:
        with pytest.raises(Refused, match=r"pe_hbm_kv_gb|de_buffer_gb|de_hbm_kv_gb"):
            await scheduler.submit(_ask("huge", prompt=10**9))
        decision = (await scheduler.submit(_ask("a"))).decision
        assert scheduler.decisions() == (decision,)
        assert decision == Decision("a", "pe0/0", "de0/0", decision.path, 0)

    _run(body)


def test_overloaded_engines_fetch_nothing_until_they_report() -> None:
    """Beyond beta on every PE the queue's head waits; it is placed when an engine has reported its work over."""

    async def body(scheduler: Scheduler, leaders: Leaders) -> None:
        first = (await scheduler.submit(_ask("a"))).decision
        waits: list[Decision] = []

        async def submit() -> None:
            waits.append((await scheduler.submit(_ask("b"))).decision)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(submit)
            await trio.sleep(10.0)
            assert not waits
            await _finish(leaders, first)
            assert [decision.pe for decision in waits] == [first.pe]

    _run(body, gpus=1, engine={"beta_s": 1e-6})


def test_a_request_waits_for_hbm_and_nobody_passes_it() -> None:
    """Where no DE has the pages the head waits, and what is behind it too, though it would fit."""

    async def body(scheduler: Scheduler, leaders: Leaders) -> None:
        first = (await scheduler.submit(_ask("a", prompt=6_000))).decision
        done: list[str] = []

        async def submit(name: str, prompt: int) -> None:
            await scheduler.submit(_ask(name, prompt=prompt, blocks=0))
            done.append(name)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(submit, "large", 6_000)
            await trio.sleep(1.0)
            nursery.start_soon(submit, "small", 64)
            await trio.sleep(1.0)
            assert done == []
            await _finish(leaders, first)
            await trio.sleep(SETTLE_S)
            assert done == ["large", "small"]

    _run(body, gpus=1, engine={"de_hbm_kv_gb": 0.3})


@pytest.mark.parametrize("system", ["dualpath", "dualpath-rr", "basic"])
def test_every_node_of_a_larger_cluster_gets_work(system: str) -> None:
    """Whoever's turn it is to fetch, all requests are placed; PEs that are full leave the rest to others."""

    async def body(scheduler: Scheduler, leaders: Leaders) -> None:
        decisions: list[Decision] = []

        async def submit(at: int) -> None:
            decisions.append((await scheduler.submit(_ask(str(at)))).decision)

        async with trio.open_nursery() as nursery:
            for at in range(6):
                nursery.start_soon(submit, at)
        assert {d.pe.partition("/")[0] for d in decisions} == {"pe0", "pe1", "pe2"}
        assert {d.de.partition("/")[0] for d in decisions} == {"de0", "de1"}

    _run(body, pe_nodes=3, de_nodes=2, system=system, engine={"beta_s": 1e-6})


def test_a_leader_fetches_at_most_once_a_period() -> None:
    """Ten requests that come at once or one by one: the fetches are a period apart."""

    async def body(scheduler: Scheduler, leaders: Leaders) -> None:
        began_s = trio.current_time()
        for at in range(10):
            await scheduler.submit(_ask(str(at)))
        assert_within(trio.current_time() - began_s, 9 * 0.5, rel=0.01)

    _run(body, engine={"fetch_period_s": 0.5})


@pytest.mark.parametrize("order", list(permutations(("read_pe", "read_de", "prefilled", "finished"))))
def test_phases_may_be_reported_in_any_order(order: tuple[Phase, ...]) -> None:
    """PE and DE report over connections of their own; whoever comes first, the books end as they began."""

    async def body(scheduler: Scheduler, leaders: Leaders) -> None:
        await scheduler.committed(Committed(join_ids(IDS)))
        first = (await scheduler.submit(_ask("a"))).decision
        for phase in order:
            await scheduler.fetch(Fetch("pe0" if phase in ("read_pe", "prefilled") else "de0", (("a", phase),)))
        again = (await scheduler.submit(_ask("a"))).decision
        assert again == first

    _run(body)


def test_what_makes_no_sense_is_a_violation() -> None:
    """A request twice, a report of one that is not there, or the same phase twice."""

    async def body(scheduler: Scheduler, leaders: Leaders) -> None:
        await scheduler.submit(_ask("a"))
        with pytest.raises(ProtocolViolation, match="twice"):
            await scheduler.submit(_ask("a"))
        with pytest.raises(ProtocolViolation, match="unknown"):
            await scheduler.fetch(Fetch("pe0", (("b", "read_pe"),)))
        await scheduler.fetch(Fetch("pe0", (("a", "read_pe"),)))
        with pytest.raises(ProtocolViolation, match="a was read_pe before"):
            await scheduler.fetch(Fetch("pe0", (("a", "read_pe"),)))

    _run(body)


@pytest.mark.parametrize("decided", [False, True])
def test_a_request_given_up_leaves_the_books_and_lets_others_pass(decided: bool) -> None:
    """One that waits, or whose decision no DE has heard of, is forgotten; who was behind it gets its place."""
    engine = {"beta_s": 0.01}
    beta = Deployment(config(engine=engine)).policy_setup.beta_tokens

    async def body(scheduler: Scheduler, leaders: Leaders) -> None:
        taken = [(await scheduler.submit(_ask(f"full{at}", beta + 1))).decision for at in range(2)]
        answers: dict[str, object] = {}

        async def submit(name: str) -> None:
            try:
                answers[name] = (await scheduler.submit(_ask(name))).decision.pe
            except Withdrawn as error:
                answers[name] = error.text

        async with trio.open_nursery() as nursery:
            nursery.start_soon(submit, "first")
            await trio.sleep(SETTLE_S)
            nursery.start_soon(submit, "second")
            await trio.sleep(SETTLE_S)
            assert answers == {}
            if decided:
                assert (await scheduler.cancel(Cancel(taken[0].request))).found
                await trio.sleep(SETTLE_S)
                assert answers == {"first": taken[0].pe, "second": taken[0].pe}
            else:
                assert (await scheduler.cancel(Cancel("first"))).found
                await trio.sleep(SETTLE_S)
                assert answers == {"first": "request first was given up while waiting for its engines"}
                await _finish(leaders, taken[0])
                assert answers["second"] == taken[0].pe
        for name in ("full0", "full1", "first", "second"):
            await scheduler.cancel(Cancel(name))
        await trio.sleep(SETTLE_S)
        assert scheduler.booked() == {}
        assert not (await scheduler.cancel(Cancel("first"))).found

    _run(body, engine=engine)


def test_giving_up_the_head_of_a_queue_lets_those_behind_it_have_their_turn() -> None:
    """What waits behind a request too large for now is placed once that is given up, not at the next report."""
    pages = Deployment(config(gpus=1)).limits.de_hbm_pages

    async def body(scheduler: Scheduler, leaders: Leaders) -> None:
        decided: list[str] = []

        async def submit(name: str, blocks: int) -> None:
            with suppress(Withdrawn):
                decided.append((await scheduler.submit(_ask(name, 64 * blocks - 10))).decision.request)

        async with trio.open_nursery() as nursery:
            for name, blocks in (("holder", pages * 6 // 10), ("large", pages * 8 // 10), ("small", pages // 10)):
                nursery.start_soon(submit, name, blocks)
                await trio.sleep(SETTLE_S)
            assert decided == ["holder"]
            await scheduler.cancel(Cancel("large"))
            await trio.sleep(SETTLE_S)
            assert decided == ["holder", "small"]

    _run(body, gpus=1)
