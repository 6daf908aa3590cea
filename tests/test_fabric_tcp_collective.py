"""Collectives over sockets: what only notices and connections can get wrong.

What both fabrics must hold is in tests/conformance.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import trio

from emulator.errors import PeerLost, ProtocolViolation
from emulator.fabric.interface import Endpoint, Ring
from emulator.fabric.tcp_collective import ENTERED, IN_PLACE, Entered, InPlace
from emulator.fabric.wire import NOTICE_ID, Call, RpcHello, encode_frame, encode_hello
from tests.test_fabric_tcp import A, B, Cluster, open_cluster

RING = Ring("r", ("a", "b"), ((A, B), (B, A)))
NOW = Entered("r", 0, 0.0, 0, 0.0)


async def test_news_of_a_ring_may_come_before_its_first_use() -> None:
    """What a member enters while another knows nothing of the ring is not lost."""
    async with open_cluster() as cluster:
        a, b = await cluster.open("a"), await cluster.open("b")
        totals: list[int] = []

        async def member(payload: dict[Endpoint, int]) -> None:
            totals.append((await a.collective(RING, payload, ready_s=0.0, amount=2)).total)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(member, {A: 100})
            await trio.sleep(0.1)
            await b.wait_entered(RING)
            totals.append((await b.collective(RING, {}, ready_s=0.0, amount=3)).total)
        assert totals == [5, 5]


async def test_a_member_that_closes_after_an_exchange_ends_no_other() -> None:
    """Who has what it needs may go at once; the others hear of the end all the same."""
    async with open_cluster() as cluster:
        a, b = await cluster.open("a"), await cluster.open("b")

        async def leave() -> None:
            await b.collective(RING, {B: 1000}, ready_s=0.0)
            await cluster.close("b")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave)
            await a.collective(RING, {A: 100_000}, ready_s=0.0)
        with pytest.raises(PeerLost):
            await a.wait_entered(RING)


async def test_a_member_that_cannot_be_reached_is_lost() -> None:
    """Nobody listens where the other should be: the first call says so."""
    async with open_cluster() as cluster:
        a = await cluster.open("a")
        with pytest.raises(PeerLost, match="b"):
            await a.collective(RING, {A: 10}, ready_s=0.0)


def notices(*said: tuple[str, msgspec.Struct]) -> bytes:
    """What a node b would send that says these."""
    calls = [Call(NOTICE_ID, name, 0.0, msgspec.Raw(msgspec.msgpack.encode(body))) for name, body in said]
    return encode_hello(RpcHello("b", "a")) + b"".join(part for call in calls for part in encode_frame(call))


async def say(cluster: Cluster, data: bytes) -> bytes:
    """Send ``data`` to node a as b; what it says until it closes."""
    addresses = cluster.addresses
    with trio.socket.socket() as sock:
        await sock.bind((addresses.management["b"], 0))
        await sock.connect((addresses.management["a"], addresses.rpc_port))
        await sock.send(data)
        return await sock.recv(1000)


@pytest.mark.parametrize(
    "said",
    [
        [(ENTERED, Entered("r", 1, 0.0, 0, 0.0))],
        [(ENTERED, NOW), (ENTERED, NOW)],
        [(IN_PLACE, InPlace("r", 0, 0.0))],
        [(ENTERED, NOW), (IN_PLACE, InPlace("r", 0, 0.0)), (IN_PLACE, InPlace("r", 0, 0.0))],
        [(IN_PLACE, InPlace("r", 7, 0.0))],
    ],
    ids=["ahead", "twice", "unentered", "over twice", "unknown"],
)
async def test_a_notice_that_cannot_be_ends_the_ring(said: Sequence[tuple[str, msgspec.Struct]]) -> None:
    """Out of turn, twice, or of an exchange that is none: a violation, for the caller and on the connection."""
    async with open_cluster() as cluster:
        a = await cluster.open("a")
        b = await cluster.open("b")
        ended: list[str] = []

        async def member() -> None:
            with pytest.raises(ProtocolViolation):
                await a.collective(RING, {}, ready_s=a.now() + 1000.0)
            ended.append("a")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(member)
            await b.wait_entered(RING)
            assert await say(cluster, notices(*said)) == b""
        assert ended == ["a"]
        with pytest.raises(ProtocolViolation):
            await a.collective(RING, {}, ready_s=0.0)


@pytest.mark.parametrize(
    "said", [("nonsense", NOW), (ENTERED, InPlace("r", 0, 0.0)), (IN_PLACE, InPlace("none", 0, 0.0))]
)
async def test_a_notice_that_nobody_understands_ends_its_connection(said: tuple[str, msgspec.Struct]) -> None:
    """An unknown name, another's body, a ring that is none; calls of others go on."""
    async with open_cluster() as cluster:
        a, b = await cluster.open("a"), await cluster.open("b")
        assert await say(cluster, notices(said)) == b""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: a.collective(RING, {A: 1}, ready_s=0.0))
            await b.collective(RING, {B: 1}, ready_s=0.0)
