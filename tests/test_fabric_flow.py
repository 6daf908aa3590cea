"""Laws of pipes and rates: the incremental engine does what a naive one does, exactly and cheaply."""

from __future__ import annotations

import math

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from emulator.fabric import flow
from emulator.fabric.clock import run_virtual
from emulator.fabric.flow import Engine, Message, Pipe, Port
from emulator.fabric.maxmin import Flow, LaneRule, allocate

from .within import assert_within

RULES = {0: LaneRule(0.9, 0), 1: LaneRule(0.1, 1)}
Post = tuple[float, int, int]
"""When, into which pipe, how many bytes."""


class Noted(Message):
    """Notes when it was placed, or by whose death it was lost."""

    def __init__(self, size_bytes: int, log: list[tuple[object, float | str]], name: object = None) -> None:
        super().__init__(size_bytes)
        self.log = log
        self.name = name

    def place(self) -> None:
        self.log.append((self.name, trio.current_time()))

    def lose(self, node: str) -> None:
        self.log.append((self.name, node))


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[float], list[Flow], list[Post]]:
    """Ports, pipes across two of them each, and messages posted at times that often coincide."""
    capacity = draw(st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=2, max_size=6))
    ends = st.lists(st.integers(0, len(capacity) - 1), min_size=2, max_size=2, unique=True).map(tuple)
    pipes = draw(st.lists(st.builds(Flow, ends, st.sampled_from([0, 1])), min_size=1, max_size=8))
    times = st.sampled_from([0.0, 1.0, 2.0, 3.5]) | st.floats(0, 10)
    sizes = st.sampled_from([1, 2, 4]) | st.integers(1, 50)
    posts = draw(st.lists(st.tuples(times, st.integers(0, len(pipes) - 1), sizes), max_size=25))
    return capacity, pipes, sorted(posts, key=lambda post: post[0])


def naive(capacity: list[float], pipes: list[Flow], posts: list[Post]) -> list[float]:
    """When each post is placed: all rates anew at every event, all pipes advanced to every event."""
    queues: list[list[tuple[int, float]]] = [[] for _ in pipes]
    done = [math.inf] * len(posts)
    now, posted = 0.0, 0
    while posted < len(posts) or any(queues):
        while posted < len(posts) and posts[posted][0] <= now:
            queues[posts[posted][1]].append((posted, float(posts[posted][2])))
            posted += 1
        busy = [i for i, queue in enumerate(queues) if queue]
        rates = dict(zip(busy, allocate([pipes[i] for i in busy], capacity, RULES), strict=True))
        ends = {i: now + queues[i][0][1] / rates[i] for i in busy}
        upcoming = posts[posted][0] if posted < len(posts) else math.inf
        later = min([upcoming, *ends.values()])
        for i in busy:
            index, left = queues[i][0]
            if ends[i] == later:
                done[index] = later
                queues[i].pop(0)
            else:
                queues[i][0] = (index, left - rates[i] * (later - now))
        now = later
    return done


@given(plans())
def test_messages_end_when_a_naive_simulation_says(plan: tuple[list[float], list[Flow], list[Post]]) -> None:
    """Recomputing only what a change touches, only when an instant is over, changes no result."""
    capacity, pipes, posts = plan
    log: list[tuple[object, float | str]] = []

    async def program() -> None:
        engine = Engine(RULES)
        ports = [Port(rate) for rate in capacity]
        built = [Pipe(engine, tuple(ports[p] for p in pipe.ports), pipe.lane, 0.0) for pipe in pipes]
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            for index, (at_s, pipe, size) in enumerate(posts):
                await trio.sleep_until(at_s)
                built[pipe].post(Noted(size, log, index))
            await trio.sleep(1e4)
            nursery.cancel_scope.cancel()

    run_virtual(program)
    placed = dict(log)
    assert len(log) == len(posts)
    for index, expected in enumerate(naive(capacity, pipes, posts)):
        at_s = placed[index]
        assert isinstance(at_s, float)
        assert_within(at_s, expected, rel=1e-9, absolute=1e-9, what=f"post {index}")


async def _one_pipe(messages: int, *, start_s: float = 0.0, latency_s: float = 0.0) -> list[float]:
    """When each of ``messages`` of 1000 bytes is placed, posted one after the other on a pipe of 1e9 bytes/s."""
    engine = Engine(RULES)
    pipe = Pipe(engine, (Port(1e9), Port(2e9)), 0, latency_s)
    log: list[tuple[object, float | str]] = []
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        await trio.sleep_until(start_s)
        for i in range(messages):
            pipe.post(Noted(1000, log, i))
        await trio.sleep(1.0)
        nursery.cancel_scope.cancel()
    assert [name for name, _ in log] == list(range(messages))
    return [at_s for _, at_s in log if isinstance(at_s, float)]


def test_a_pipe_without_ports_takes_no_time() -> None:
    """Its messages are over in the instant in which they are posted, in order, and nobody's rate changes."""

    async def program() -> list[tuple[object, float | str]]:
        log: list[tuple[object, float | str]] = []
        engine, port = Engine(RULES), Port(10.0)
        free, shared = Pipe(engine, (), 0, 0.0), Pipe(engine, (port,), 0, 0.0)
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            shared.post(Noted(10, log, "paid"))
            await trio.sleep(0.5)
            for name in ("first", "second"):
                free.post(Noted(10**12, log, name))
            await trio.sleep(1.0)
            nursery.cancel_scope.cancel()
        return log

    assert run_virtual(program) == [("first", 0.5), ("second", 0.5), ("paid", 1.0)]


def test_a_port_that_is_crossed_twice_is_let_go_once() -> None:
    """A pipe that takes a port twice has half its rate, and all of it is free again when it runs dry."""

    async def program() -> list[tuple[object, float | str]]:
        log: list[tuple[object, float | str]] = []
        engine, port = Engine(RULES), Port(10.0, laned=False)
        twice, once = Pipe(engine, (port, port), 0, 0.0), Pipe(engine, (port,), 1, 0.0)
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            twice.post(Noted(10, log, "twice"))
            await trio.sleep(2.0)
            once.post(Noted(10, log, "once"))
            await trio.sleep(1.0)
            nursery.cancel_scope.cancel()
        return log

    assert run_virtual(program) == [("twice", 2.0), ("once", 3.0)]


def test_time_passes_even_below_an_ulp() -> None:
    """At 1e12 s a microsecond is less than floats can tell; messages end all the same, in order."""
    placed = run_virtual(_one_pipe, 100)
    assert_within(placed[-1], 100e-6, rel=1e-9)

    async def late() -> list[float]:
        return await _one_pipe(100, start_s=1e12)

    assert set(run_virtual(late, horizon_s=1e13)) == {1e12}


def test_latency_delays_the_placing_and_not_the_pipe() -> None:
    """Each message is placed one latency after its last byte; the next follows at once."""

    async def program() -> list[float]:
        return await _one_pipe(3, latency_s=0.25)

    for i, at_s in enumerate(run_virtual(program), 1):
        assert_within(at_s, 0.25 + i * 1e-6, rel=1e-12)


def test_a_loss_reaches_what_is_queued_in_flight_and_landing() -> None:
    """Losing an end loses every message that is not placed, once, in order; the pipe can be used again."""
    log: list[tuple[object, float | str]] = []

    async def program() -> None:
        engine = Engine(RULES)
        pipe = Pipe(engine, (Port(1000.0), Port(1000.0)), 0, 0.5)
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            for i in range(4):
                pipe.post(Noted(1000, log, i))
            await trio.sleep(2.2)
            pipe.lose("de0")
            pipe.post(Noted(1000, log, "again"))
            await trio.sleep(5)
            nursery.cancel_scope.cancel()

    run_virtual(program)
    assert log == [(0, 1.5), (1, "de0"), (2, "de0"), (3, "de0"), ("again", 3.7)]


def test_writers_in_turn_cost_no_new_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that runs dry and is fed within one instant has not changed."""
    calls = 0

    def counted(*args: object) -> list[float]:
        nonlocal calls
        calls += bool(args[0])
        return allocate(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(flow, "allocate", counted)

    async def program() -> None:
        engine = Engine(RULES)
        pipe = Pipe(engine, (Port(1000.0), Port(1000.0)), 0, 0.0)

        class Next(Noted):
            def place(self) -> None:
                super().place()
                if len(self.log) < 100:
                    pipe.post(Next(10, self.log))

        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            log: list[tuple[object, float | str]] = []
            pipe.post(Next(10, log))
            await trio.sleep(2)
            assert len(log) == 100
            nursery.cancel_scope.cancel()

    run_virtual(program)
    assert calls == 1


def test_an_engine_needs_virtual_time() -> None:
    """Under a real clock it says what to use."""
    with pytest.raises(RuntimeError, match="run_virtual"):
        trio.run(Engine(RULES).run)
    with pytest.raises(RuntimeError, match="not open"):
        Pipe(Engine(RULES), (Port(1.0),), 0, 0.0).post(Noted(1, []))
