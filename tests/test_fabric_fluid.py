"""Laws of the fluid fabric beyond the conformance suite: exact times, determinism, what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from emulator.errors import PeerLost, ProtocolViolation
from emulator.extent import Extent
from emulator.fabric.clock import run_virtual
from emulator.fabric.fluid import FluidNetwork, open_fluid
from emulator.fabric.interface import Endpoint, Method, Ring, Segment, Side, Target, Transfer, VirtualLane
from emulator.records import PortBytes

from .within import assert_within

ROOT = Path(__file__).parents[1]
RATE = 1000.0
NODES = ("a", "b", "c", "boss")
PORTS = {(node, "nic"): RATE for node in "abc"}


class Ask(msgspec.Struct, frozen=True):
    n: int


ADD = Method("add", Ask, Ask)


def network(**options: Any) -> FluidNetwork:
    options.setdefault("rpc_latency_s", 0.01)
    return FluidNetwork(PORTS, nodes=NODES, **options)


def to(src: str, dst: str, *, lane: VirtualLane = VirtualLane.KV, side: str = "host") -> Target:
    return Target(
        Endpoint(src, "nic"), Endpoint(dst, "nic", "gpu" if side == "gpu" else "host"), "m", Transfer.OTHER, lane
    )


def whole(size: int) -> Segment:
    return Segment((Extent(0, size),), (Extent(0, size),))


async def timeline(seed_of_work: int = 0) -> list[tuple[str, float]]:
    """A busy little program: who finished what, and when."""
    log: list[tuple[str, float]] = []
    net = network()
    async with open_fluid(net):
        regions = {node: net.fabric(node).register("m", 5000) for node in "abc"}

        async def work(index: int) -> None:
            src, dst = "abc"[index % 3], "abc"[(index + index // 3 + seed_of_work) % 3]
            fabric = net.fabric(src)
            for size in (100, 250, 1000 + index):
                await fabric.write(to(src, dst, side="gpu"), regions[src], whole(size), tag=str(index % 4))
                log.append((f"{index}:{size}", fabric.now()))
                log.append((f"{index}: {(await fabric.call('boss', ADD, Ask(index))).n}", fabric.now()))

        total = 0

        async def add(ask: Ask) -> Ask:
            nonlocal total
            total += ask.n
            return Ask(total)

        net.fabric("boss").serve(ADD, add)
        async with trio.open_nursery() as nursery:
            for index in range(12):
                nursery.start_soon(work, index)
    return log


def test_a_run_is_a_function_of_its_seed() -> None:
    """Same seed: the same events in the same order at the same times, to the bit, in any process."""
    code = (
        "from tests.test_fabric_fluid import timeline\n"
        "from emulator.fabric.clock import run_virtual\n"
        "print(run_virtual(timeline, seed=3))"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    here = run_virtual(timeline, seed=3)
    assert here == run_virtual(timeline, seed=3)
    assert there.stdout == f"{here}\n"
    assert here != run_virtual(timeline, seed=4)


def test_rates_follow_who_is_there() -> None:
    """Alone for a second, shared while another sends, alone again: to the instant."""

    async def program() -> dict[str, float]:
        done: dict[str, float] = {}
        net = network()
        async with open_fluid(net):
            regions = {node: net.fabric(node).register("m", 5000) for node in "abc"}

            async def write(src: str, delay_s: float, size: int) -> None:
                await net.fabric(src).sleep(delay_s)
                await net.fabric(src).write(to(src, "c"), regions[src], whole(size))
                done[src] = net.fabric(src).now()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(write, "a", 0.0, 3000)
                nursery.start_soon(write, "b", 1.0, 500)
        return done

    done = run_virtual(program)
    assert_within(done["b"], 2.0, rel=1e-12)
    assert_within(done["a"], 3.5, rel=1e-12)


@pytest.mark.parametrize("handler", [True, False])
def test_a_network_that_ends_lets_land_what_has_begun(handler: bool) -> None:
    """Whether the block fails or is cancelled from outside, a begun write ends when its bytes are in place."""
    ended: list[float] = []

    async def program() -> None:
        net = network()
        with trio.move_on_after(2.0):
            async with open_fluid(net):
                here, there = net.fabric("a").register("m", 5000), net.fabric("b").register("m", 5000)
                here.memory[:] = 7

                async def send(ask: Ask) -> Ask:
                    try:
                        await net.fabric("a").write(to("a", "b"), here, whole(5000))
                    finally:
                        ended.append(trio.current_time())
                        assert there.memory.all()
                    return ask

                net.fabric("a").serve(ADD, send)
                if not handler:
                    await send(Ask(0))
                with trio.move_on_after(1.0):
                    await net.fabric("boss").call("a", ADD, Ask(0))
                raise PeerLost("the block fails")

    if handler:
        with pytest.RaisesGroup(pytest.RaisesExc(PeerLost, match="the block fails"), flatten_subgroups=True):
            run_virtual(program)
    else:
        run_virtual(program)
    assert_within(ended[0], 5.01 if handler else 5.0, rel=1e-12)


def test_memory_is_read_when_it_is_placed() -> None:
    """Whoever overwrites memory that is in use sends what he wrote: a fault of his that must not be hidden."""

    async def program() -> bytes:
        net = network()
        async with open_fluid(net), trio.open_nursery() as nursery:
            here, there = net.fabric("a").register("m", 100), net.fabric("b").register("m", 100)
            nursery.start_soon(net.fabric("a").write, to("a", "b"), here, whole(100))
            await trio.sleep(0.05)
            here.memory[:] = 7
            await trio.sleep(0.1)
            return there.memory.tobytes()

    assert run_virtual(program) == bytes([7]) * 100


def test_a_lane_without_a_rule_shares_with_control() -> None:
    """SPARE and CONTROL are one class of the port: half of it each, whatever KV does."""

    async def program() -> list[float]:
        net = network()
        async with open_fluid(net):
            here = net.fabric("a").register("m", 5000)
            net.fabric("b").register("m", 5000)
            done: list[float] = []

            async def write(lane: VirtualLane) -> None:
                await net.fabric("a").write(to("a", "b", lane=lane), here, whole(500))
                done.append(trio.current_time())

            async with trio.open_nursery() as nursery:
                nursery.start_soon(write, VirtualLane.SPARE)
                nursery.start_soon(write, VirtualLane.CONTROL)
        return done

    assert run_virtual(program) == [1.0, 1.0]


async def _times(net: FluidNetwork, writes: list[Target], size: int = 1000) -> list[float]:
    """When each of ``writes``, all posted at 0, is over."""
    done = [0.0] * len(writes)
    async with open_fluid(net):
        regions = {node: net.fabric(node).register("m", 5000) for node in "abc"}

        async def write(index: int, target: Target) -> None:
            await net.fabric(target.src.node).write(target, regions[target.src.node], whole(size))
            done[index] = trio.current_time()

        async with trio.open_nursery() as nursery:
            for index, target in enumerate(writes):
                nursery.start_soon(write, index, target)
    return done


def through(nic: str, src: str, src_side: Side, dst: str, dst_side: Side, **options: Any) -> Target:
    options.setdefault("lane", VirtualLane.KV)
    return Target(Endpoint(src, nic, src_side), Endpoint(dst, nic, dst_side), "m", Transfer.OTHER, **options)


def test_dram_is_half_duplex() -> None:
    """What is read and what is written share its rate, lanes or not; host to host in one node takes it twice."""
    dram = {"a": 1000.0}
    lone = through("nic", "a", "host", "a", "host")
    assert run_virtual(_times, network(dram=dram), [lone]) == [2.0]
    out = through("nic", "a", "host", "b", "host", lane=VirtualLane.MODEL)
    into = through("nic", "c", "host", "a", "host")
    assert run_virtual(_times, network(dram=dram), [out, into]) == [2.0, 2.0]
    from_gpu = through("nic", "a", "gpu", "b", "host")
    assert run_virtual(_times, network(dram=dram), [from_gpu, into]) == [1.0, 1.0]
    load = through("nic", "a", "host", "a", "gpu")
    assert run_virtual(_times, network(dram=dram), [load]) == [1.0]


@pytest.mark.parametrize(
    ("resource", "error"),
    [
        ({"dram": {"a": 0.0}}, "port a/dram: rate 0.0"),
        ({"dram": {"nobody": 1.0}}, "no node nobody"),
        ({"pcie": {("a", "cnic0"): float("nan")}}, "port a/pcie0: rate nan"),
        ({"pcie": {("a", "cnic7"): 1.0}}, "PCIe link of a/cnic7: no such port"),
    ],
)
def test_a_resource_is_checked_where_it_is_built(resource: dict[str, Any], error: str) -> None:
    """A rate that is none, and a resource of something that is not there, are refused by name."""
    with pytest.raises(ValueError, match=error):
        FluidNetwork({("a", "cnic0"): 1.0}, nodes=NODES, rpc_latency_s=0.0, **resource)


def test_a_copy_crosses_the_pcie_link_and_no_nic() -> None:
    """It goes beside what the NIC sends, shares the link with what goes to the GPU, and knows no lane there."""
    ports = {(node, "cnic0"): RATE for node in "abc"}
    pcie = {("a", "cnic0"): RATE}

    def net(**more: Any) -> FluidNetwork:
        return FluidNetwork(ports, nodes=NODES, rpc_latency_s=0.0, pcie=pcie, **more)

    copy = through("pcie0", "a", "host", "a", "gpu")
    out, into = through("cnic0", "a", "host", "b", "host"), through("cnic0", "b", "host", "a", "gpu")
    assert run_virtual(_times, net(), [copy, out]) == [1.0, 1.0]
    assert run_virtual(_times, net(), [copy, into]) == [2.0, 2.0]
    for lane in VirtualLane:
        into = through("cnic0", "b", "host", "a", "gpu", lane=lane)
        assert run_virtual(_times, net(), [copy, into]) == [2.0, 2.0]
    from_gpu = through("pcie0", "a", "gpu", "a", "host")
    assert run_virtual(_times, net(), [copy, from_gpu]) == [1.0, 1.0]
    slow = net(dram={"a": RATE / 2})
    assert run_virtual(_times, slow, [copy]) == [2.0]


def test_local_resources_have_counters_of_their_own() -> None:
    """DRAM and PCIe have rows like ports, in the direction of the memory that is read or written."""
    ports = {(node, "cnic0"): RATE for node in "ab"}
    net = FluidNetwork(ports, nodes="abc", rpc_latency_s=0.0, dram={"a": 4000.0}, pcie={("a", "cnic0"): 4000.0})
    writes = [
        through("pcie0", "a", "host", "a", "gpu"),
        through("cnic0", "a", "host", "a", "host"),
        through("cnic0", "a", "gpu", "b", "host", lane=VirtualLane.MODEL),
    ]

    async def program() -> list[tuple[PortBytes, ...]]:
        await _times(net, writes)
        return [net.fabric(node).ports() for node in "ab"]

    at_a, at_b = run_virtual(program)
    rows = {(p.nic, p.direction, p.lane): p.payload_bytes for p in at_a}
    assert rows == {
        ("cnic0", "read", VirtualLane.MODEL): 1000,
        ("cnic0", "read", VirtualLane.KV): 1000,
        ("cnic0", "write", VirtualLane.KV): 1000,
        ("dram", "read", VirtualLane.KV): 2000,
        ("dram", "write", VirtualLane.KV): 1000,
        ("pcie0", "read", VirtualLane.MODEL): 1000,
        ("pcie0", "write", VirtualLane.KV): 1000,
    }
    assert [(p.nic, p.direction) for p in at_b] == [("cnic0", "write")]


def test_an_exchange_is_exact() -> None:
    """On time it is over after its slowest port's bytes; entered late it begins a latency after the last entry,

    and counts as if it had begun in time.
    """
    ring = Ring(
        "r",
        ("a", "b"),
        ((Endpoint("a", "nic"), Endpoint("b", "nic")), (Endpoint("b", "nic"), Endpoint("a", "nic"))),
    )

    async def program() -> list[tuple[float, float, float]]:
        log = []
        net = network()
        async with open_fluid(net):

            async def member(node: str, enter_s: float) -> None:
                for ready_s, size in ((1.0, 500), (2.0, 0), (4.0, 100)):
                    await trio.sleep_until(enter_s + ready_s)
                    payload = {Endpoint(node, "nic"): size if node == "a" else size // 2}
                    result = await net.fabric(node).collective(ring, payload, ready_s=ready_s)
                    log.append((result.started_s, result.over_s, trio.current_time()))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(member, "a", -0.5)
                nursery.start_soon(member, "b", 0.25)
            (record,) = [record for record in net.fabric("b").exchanges() if record.payload_bytes == 250]
            assert (record.count, record.total_s, record.max_s, record.late_s) == (1, 0.5, 0.5, 0.26)
        return log

    log = run_virtual(program)
    assert log[::2] == log[1::2]
    for (started_s, over_s, returned_s), expected in zip(
        log[::2], [(1.0, 1.5, 1.76), (2.0, 2.0, 2.26), (4.0, 4.1, 4.36)], strict=True
    ):
        assert started_s == expected[0]
        assert_within(over_s, expected[1], absolute=1e-12)
        assert_within(returned_s, expected[2], absolute=1e-12)


def test_an_exchange_that_is_in_time_is_over_when_its_last_byte_is_there() -> None:
    """Its ideal end is the very instant at which it returns, to the bit, whatever the times are."""
    ring = Ring("r", ("a", "b"), ((Endpoint("a", "nic"), Endpoint("b", "nic")),))

    async def program() -> None:
        net = network()
        async with open_fluid(net):

            async def member(node: str) -> None:
                ready_s = 0.1
                for size in range(1, 50):
                    payload = {Endpoint("a", "nic"): size} if node == "a" else {}
                    result = await net.fabric(node).collective(ring, payload, ready_s=ready_s)
                    assert result.started_s == ready_s
                    assert result.over_s == trio.current_time() > ready_s
                    ready_s = result.over_s + 0.1

            async with trio.open_nursery() as nursery:
                for node in "ab":
                    nursery.start_soon(member, node)

    run_virtual(program)


def test_a_handlers_fault_ends_the_run() -> None:
    """What is no EmulatorError is a fault of ours: it is not sent to the caller but comes out."""

    async def program() -> None:
        net = network()
        async with open_fluid(net):

            async def broken(ask: Ask) -> Ask:
                raise ZeroDivisionError(ask.n)

            net.fabric("boss").serve(ADD, broken)
            await net.fabric("a").call("boss", ADD, Ask(1))

    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(program)
    assert caught.group_contains(ZeroDivisionError)


def test_a_dead_node_stops_and_its_late_reply_is_ignored() -> None:
    """Its handlers are cancelled, its own calls and writes fail, and what it had posted never lands."""

    async def program() -> list[str]:
        log: list[str] = []
        net = network()
        async with open_fluid(net):
            here, there = net.fabric("a").register("m", 5000), net.fabric("b").register("m", 5000)
            here.memory[:] = 1

            async def slow(ask: Ask) -> Ask:
                try:
                    await trio.sleep(100)
                finally:
                    log.append(f"handler ended at {trio.current_time()}")
                return ask

            net.fabric("a").serve(ADD, slow)

            async def lost(name: str, async_fn: Any, *args: Any) -> None:
                with pytest.raises(PeerLost, match="node a is gone"):
                    await async_fn(*args)
                log.append(name)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(lost, "call to it", net.fabric("b").call, "a", ADD, Ask(1))
                nursery.start_soon(lost, "its write", net.fabric("a").write, to("a", "b"), here, whole(5000))
                await trio.sleep(1)
                net.kill("a")
                net.kill("a")
            await lost("its call", net.fabric("a").call, "boss", ADD, Ask(1))
            await trio.sleep(100)
            assert not there.memory.any()
            assert net.fabric("b").received() == net.fabric("a").sent() == ()
        return sorted(log)

    assert run_virtual(program) == ["call to it", "handler ended at 1.0", "its call", "its write"]


def test_a_call_that_was_given_up_goes_on_over_there() -> None:
    """Cancelling a call ends the wait for it, not its handler; its reply finds nobody."""

    async def program() -> int:
        handled = 0
        net = network()
        async with open_fluid(net):

            async def count(ask: Ask) -> Ask:
                nonlocal handled
                await trio.sleep(1)
                handled += ask.n
                return ask

            net.fabric("boss").serve(ADD, count)
            with trio.move_on_after(0.5):
                await net.fabric("a").call("boss", ADD, Ask(5))
            assert trio.current_time() == 0.5
            await trio.sleep(1)
        return handled

    assert run_virtual(program) == 5


@pytest.mark.parametrize(
    ("target", "error"),
    [
        (to("b", "c"), "a cannot send from b"),
        (to("a", "nobody"), "no node 'nobody'"),
        (to("a", "boss"), "boss has no region"),
        (msgspec.structs.replace(to("a", "b"), src=Endpoint("a", "cnic9")), "no port a/cnic9"),
    ],
)
def test_what_is_not_there_is_refused(target: Target, error: str) -> None:
    """A target that the network does not have is a violation that names it."""

    async def program() -> None:
        net = network()
        async with open_fluid(net):
            here = net.fabric("a").register("m", 10)
            net.fabric("b").register("m", 10)
            with pytest.raises(ValueError, match="region 'm' already"):
                net.fabric("a").register("m", 10)
            with pytest.raises(ProtocolViolation, match=error):
                await net.fabric("a").write(target, here, whole(10))
            with pytest.raises(ProtocolViolation, match=error):
                net.fabric("a").open_stream(target, here, [whole(10)])

    run_virtual(program)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"ports": {("a", "nic"): 0.0}}, "rate 0.0"),
        ({"ports": {("a", "nic"): float("inf")}}, "rate inf"),
        ({"ports": {("z", "nic"): 1.0}}, "no node z"),
        ({"rpc_latency_s": -1.0}, "rpc_latency_s"),
        ({"message_latency_s": float("nan")}, "message_latency_s"),
        ({"window_s": 0.0}, "window_s"),
    ],
)
def test_a_network_is_checked_where_it_is_built(options: dict[str, Any], error: str) -> None:
    """A number that cannot be is refused by its name."""
    with pytest.raises(ValueError, match=error):
        FluidNetwork(**{"ports": PORTS, "nodes": NODES, "rpc_latency_s": 0.0, **options})
