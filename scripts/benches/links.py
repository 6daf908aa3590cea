"""Are the links what they claim to be? Goodput, lane shares, single messages and bursts, measured from outside.

A cluster of three nodes with one CNIC each is realised at each rate; plain non-blocking TCP sockets, opened
inside the nodes' namespaces by this one process, move the bytes. Rates are payload bits per second. Needs root.
"""

from __future__ import annotations

import os
import selectors
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from scripts.benches.figures import Figure, show
from topology.lanes import DSCP_OF_LANE, KV_LANE, MODEL_LANE
from topology.namespaces import inside, new_netns
from topology.netns import Network, realise
from topology.spec import AddressPlan, ClusterSpec

__all__ = ["main"]

MBIT = 1e6 / 8
GOODPUT_RATES = (50.0, 400.0, 2000.0)
MESSAGE_RATES = (50.0, 400.0)
MESSAGE_SIZES = (37_000, 64_000, 128_000)
BURST_BYTES = 1_000_000
SETTLE_S = 0.4
DRAIN_S = 0.1
MEASURES, MEASURE_S = 5, 0.5
REPEATS = 9
BURSTS = 7
DEADLINE_S = 20.0
WINDOW_BYTES = 256 << 10
WINDOW_S = 0.016
"""How long a link stays busy while this process does not get a processor."""
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
_CHUNK = bytes(256 << 10)
_SPEC = ClusterSpec(name="links", pe_nodes=1, de_nodes=2, gpus_per_node=1, storage_nodes=1)


@dataclass
class Flow:
    """A connection on one lane. ``owed`` bytes are still to be sent; a pump always owes more."""

    sender: socket.socket
    receiver: socket.socket
    received: int = 0
    owed: float = 0
    buffer: bytearray = field(default_factory=lambda: bytearray(256 << 10))

    def send(self) -> None:
        """Hand over as much as the socket takes."""
        while self.owed:
            try:
                self.owed -= self.sender.send(memoryview(_CHUNK)[: int(min(self.owed, len(_CHUNK)))])
            except BlockingIOError:
                return

    def receive(self) -> None:
        while True:
            try:
                count = self.receiver.recv_into(self.buffer)
            except BlockingIOError:
                return
            if not count:
                raise ConnectionError("the sender hung up")
            self.received += count


class Bench:
    """A realised network and the flows over it."""

    def __init__(self, rate_mbit: float) -> None:
        self.rate = rate_mbit * MBIT
        self.plan = AddressPlan(_SPEC)
        self.netns = {node.name: new_netns() for node in _SPEC.nodes}
        rates = {(port.node, port.nic.name): self.rate for port in _SPEC.ports()}
        self.network: Network = realise(_SPEC, self.plan, rates, self.netns)
        self.flows: list[Flow] = []

    def close(self) -> None:
        for flow in self.flows:
            flow.sender.close()
            flow.receiver.close()
        self.network.close()
        for fd in self.netns.values():
            os.close(fd)

    def flow(self, src: str, dst: str, lane: int) -> Flow:
        """Connect ``src`` to ``dst`` over their ``cnic0``; only the sending end is marked with the lane."""
        with inside(self.netns[dst]):
            listener = socket.socket()
        with inside(self.netns[src]):
            sender = socket.socket()
        with listener:
            for sock in (listener, sender):
                window = int(max(WINDOW_BYTES, self.rate * WINDOW_S))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
                sock.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, window)
                sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, window)
            sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, DSCP_OF_LANE[lane])
            listener.bind((self.plan.address(dst, "cnic0", "gpu"), 0))
            listener.listen(1)
            sender.bind((self.plan.address(src, "cnic0"), 0))
            sender.connect(listener.getsockname())
            receiver, _ = listener.accept()
        sender.setblocking(False)
        receiver.setblocking(False)
        flow = Flow(sender, receiver)
        self.flows.append(flow)
        return flow

    def run(self, *, seconds: float = DEADLINE_S, until: Flow | None = None, target: int = 0) -> float:
        """Move bytes for ``seconds``, or until ``until`` has received ``target``; return how long it took."""
        started = time.perf_counter()
        with selectors.DefaultSelector() as selector:
            for flow in self.flows:
                selector.register(flow.receiver, selectors.EVENT_READ, flow)
                flow.send()
                if flow.owed:
                    selector.register(flow.sender, selectors.EVENT_WRITE, flow)
            while (left := started + seconds - time.perf_counter()) > 0:
                for key, ready in selector.select(left):
                    flow = key.data
                    if ready & selectors.EVENT_READ:
                        flow.receive()
                        continue
                    flow.send()
                    if not flow.owed:
                        selector.unregister(flow.sender)
                if until is not None and until.received >= target:
                    return time.perf_counter() - started
        if until is not None:
            raise TimeoutError(f"{until.received} of {target} bytes after {seconds:g} s")
        return time.perf_counter() - started

    def rates_of(self, *flows: Flow) -> list[float]:
        """Let ``flows`` send all they can; payload bytes/s of each, once settled: the median of some windows.

        A shared host now and then takes both processors away for a moment, which is no property of a link.
        """
        for flow in flows:
            flow.owed = float("inf")
        self.run(seconds=SETTLE_S)
        rates = []
        for _ in range(MEASURES):
            before = [flow.received for flow in flows]
            took = self.run(seconds=MEASURE_S)
            rates.append([(flow.received - start) / took for flow, start in zip(flows, before, strict=True)])
        for flow in flows:
            flow.owed = 0
        return [statistics.median(each) for each in zip(*rates, strict=True)]

    def drain(self) -> None:
        """Let the queues run empty and the links come to rest."""
        self.run(seconds=DRAIN_S)

    def message(self, flow: Flow, size: int) -> float:
        """Seconds from handing ``size`` bytes over to having read the last of them."""
        flow.owed = size
        return self.run(until=flow, target=flow.received + size)


@contextmanager
def bench(rate_mbit: float) -> Iterator[Bench]:
    made = Bench(rate_mbit)
    try:
        yield made
    finally:
        made.close()


def main(argv: Sequence[str]) -> int:
    """Measure everything at every rate; 1 when a bound is missed, 2 without root."""
    if os.geteuid() != 0:
        print("scripts/bench links: makes network namespaces; run it with sudo", file=sys.stderr)
        return 2
    # The links are in question, not how busy the host is: this process goes before what else runs here.
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    clock, started, own = time.perf_counter(), _busy_s(), time.process_time()
    figures: list[Figure] = []
    for rate in GOODPUT_RATES:
        with bench(rate) as made:
            figures += _goodput(made, rate)
    for rate in MESSAGE_RATES:
        with bench(rate) as made:
            figures += _messages(made, rate)
    with bench(400.0) as made:
        figures += _bursts(made)
    others = _busy_s() - started - (time.process_time() - own)
    elapsed = time.perf_counter() - clock
    figures.append(Figure("processors taken by others meanwhile", others / elapsed, "CPUs"))
    return show(figures, as_json="--json" in argv)


def _busy_s() -> float:
    """Seconds that all processors of the host together have been busy since it started."""
    user, nice, system, _idle, _iowait, *interrupts = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]
    return sum(map(int, (user, nice, system, *interrupts))) / os.sysconf("SC_CLK_TCK")


def _goodput(made: Bench, rate: float) -> list[Figure]:
    """Each lane alone, a loopback, then the high lane of one node against KV of another at the receiver's port."""
    model, kv = made.flow("pe0", "de0", MODEL_LANE), made.flow("de1", "de0", KV_LANE)
    (alone,) = made.rates_of(model)
    made.drain()
    (low,) = made.rates_of(kv)
    made.drain()
    (loopback,) = made.rates_of(made.flow("pe0", "pe0", KV_LANE))
    made.drain()
    high_shared, low_shared = made.rates_of(model, kv)
    title = f"{rate:g} Mb/s: "
    return [
        Figure(title + "payload goodput", 100 * alone / made.rate, "% of rate", 99, 101),
        Figure(title + "KV lane alone", 100 * low / made.rate, "% of rate", 98, 101),
        Figure(title + "loopback through the switch", 100 * loopback / made.rate, "% of rate", 99, 101),
        Figure(title + "both lanes together", 100 * (high_shared + low_shared) / made.rate, "% of rate", 99, 101),
        Figure(title + "high lane against KV", 100 * high_shared / (high_shared + low_shared), "%", 98.7, 99.3),
    ]


def _messages(made: Bench, rate: float) -> list[Figure]:
    """One message on an idle link, as a share of the time that its size over the rate takes."""
    flow = made.flow("pe0", "de0", KV_LANE)
    figures = []
    for size in MESSAGE_SIZES:
        took = []
        for _ in range(REPEATS):
            made.drain()
            took.append(made.message(flow, size))
        share = statistics.median(took) * made.rate / size
        figures.append(
            Figure(f"{rate:g} Mb/s: one message of {size // 1000} KB", share, "of size/rate", 0.85, 1.1)
        )
    return figures


def _bursts(made: Bench) -> list[Figure]:
    """A burst on the high lane with the link idle and with KV saturating it; and one on KV's own lane."""
    model, kv = made.flow("pe0", "de0", MODEL_LANE), made.flow("pe0", "de0", KV_LANE)
    shared = made.flow("pe0", "de0", KV_LANE)
    times: dict[str, list[float]] = {"alone": [], "against KV": [], "on KV's lane": []}
    for _ in range(BURSTS):
        made.drain()
        times["alone"].append(made.message(model, BURST_BYTES))
        kv.owed = float("inf")
        made.run(seconds=SETTLE_S)
        times["against KV"].append(made.message(model, BURST_BYTES))
        made.run(seconds=SETTLE_S)
        times["on KV's lane"].append(made.message(shared, BURST_BYTES))
        kv.owed = 0
    median = {name: statistics.median(took) for name, took in times.items()}
    figures = [Figure(f"1 MB burst at 400 Mb/s {name}", 1e3 * took, "ms") for name, took in median.items()]
    alone = median["alone"]
    return [
        *figures,
        Figure("1 MB burst: high lane against KV", median["against KV"] / alone, "x alone", 0, 1.1),
        Figure("1 MB burst: shared lane", median["on KV's lane"] / alone, "x alone"),
    ]
