"""Who gets what of shared ports: max-min fair rates inside a lane, lanes by guarantee and priority.

Pure. A flow crosses a few port directions, some of them perhaps twice, and belongs to one lane; there are ports
that know no lanes. What holds of the rates:

- no port carries more than its capacity;
- every flow has a full port, so no flow can be raised without lowering another;
- with one lane: at some full port of its own no other flow gets more than it does (max-min fairness);
- at a contended port with lanes a lane that asks for it gets its guaranteed share, and what a lane leaves idle
  goes to the others as HTB lends: to the best priority first, and among lanes of one priority by their weights.

The last holds exactly where lanes meet at one port of each flow. Along a chain of ports at which lanes meet,
what a lane can use here depends on what others leave it there, and so on; the chain is followed one step. So it
is with ports without lanes: a flow's part of them is fair among what all flows there could get elsewhere.

Must not import anything of the emulator.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby

import msgspec

__all__ = ["Flow", "LaneRule", "allocate", "max_min"]


class LaneRule(msgspec.Struct, frozen=True):
    """A lane's guaranteed share of every port (0 to 1), its priority for idle capacity (0 is best), and its weight
    among lanes of that priority.
    """

    guarantee: float
    prio: int
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.guarantee <= 1:
            raise ValueError(f"lane guarantee {self.guarantee}: expected 0 to 1")
        if not self.weight > 0:
            raise ValueError(f"lane weight {self.weight}: expected more than 0")


class Flow(msgspec.Struct, frozen=True, array_like=True):
    """One queue pair with something to send: the indices of the ports it crosses, and its lane.

    An index that is there twice stands for a port of which the flow takes twice its rate.
    """

    ports: tuple[int, ...]
    lane: int


def allocate(
    flows: Sequence[Flow],
    capacity: Sequence[float],
    rules: Mapping[int, LaneRule],
    laneless: Collection[int] = (),
) -> list[float]:
    """Rates of ``flows`` in the unit of ``capacity`` (one entry a port), in their order.

    ``rules`` has every lane that occurs; the guarantees of all lanes sum to at most 1. On ``laneless`` ports all
    lanes are one.
    """
    lanes = sorted({f.lane for f in flows}, key=lambda lane: (rules[lane].prio, -rules[lane].guarantee, lane))
    if len(lanes) <= 1:
        return max_min([f.ports for f in flows], capacity)
    if not laneless:
        return _by_lane(flows, capacity, rules, lanes)
    return _with_laneless(flows, capacity, rules, lanes, frozenset(laneless))


def _by_lane(
    flows: Sequence[Flow], capacity: Sequence[float], rules: Mapping[int, LaneRule], lanes: Sequence[int]
) -> list[float]:
    """Where all ports have lanes; ``lanes`` are in the order in which idle capacity is lent."""
    members = {lane: [i for i, f in enumerate(flows) if f.lane == lane] for lane in lanes}
    paths = {lane: [flows[i].ports for i in members[lane]] for lane in lanes}
    reserved = _reserved(paths, capacity, rules)

    rates = [0.0] * len(flows)
    room = list(capacity)
    for _, alike in groupby(lanes, key=lambda lane: rules[lane].prio):
        group = list(alike)
        # All that this priority may take now: what others have not taken, less what worse ones are kept.
        worse = lanes[lanes.index(group[-1]) + 1 :]
        kept = [sum(reserved[lane][port] for lane in worse) for port in range(len(capacity))]
        limits = {group[0]: [max(0.0, free - later) for free, later in zip(room, kept, strict=True)]}
        if len(group) > 1:
            limits = _divided(limits[group[0]], {lane: paths[lane] for lane in group}, reserved, rules)
        for lane in group:
            _grant(rates, room, members[lane], paths[lane], max_min(paths[lane], limits[lane]))
        for _ in group[1:]:
            _share_out(rates, room, kept, {lane: (members[lane], paths[lane]) for lane in group}, rules)
    _lend(rates, room, flows, lanes)
    return rates


def _divided(
    open_to_all: Sequence[float],
    paths: Mapping[int, Sequence[Sequence[int]]],
    reserved: Mapping[int, Sequence[float]],
    rules: Mapping[int, LaneRule],
) -> dict[int, list[float]]:
    """What lanes of one priority may take of every port: what each is kept, and a part of the rest."""
    weights = [0.0] * len(open_to_all)
    left = list(open_to_all)
    for lane, lane_paths in paths.items():
        for port in {port for path in lane_paths for port in path}:
            weights[port] += rules[lane].weight
            left[port] -= reserved[lane][port]
    return {
        lane: [
            kept + max(0.0, surplus) * rules[lane].weight / weight if weight else 0.0
            for kept, surplus, weight in zip(reserved[lane], left, weights, strict=True)
        ]
        for lane in paths
    }


def _share_out(
    rates: list[float],
    room: list[float],
    kept: Sequence[float],
    group: Mapping[int, tuple[Sequence[int], Sequence[Sequence[int]]]],
    rules: Mapping[int, LaneRule],
) -> None:
    """What lanes of one priority left of their parts, being stopped elsewhere, goes to those that were not.

    ``group`` has of each lane its flows and their paths.
    """
    left = [max(0.0, free - later) for free, later in zip(room, kept, strict=True)]
    able = {
        lane: [(i, path) for i, path in zip(*of_lane, strict=True) if all(left[port] > 0 for port in path)]
        for lane, of_lane in group.items()
    }
    weights = [0.0] * len(room)
    for lane, flows in able.items():
        for port in {port for _, path in flows for port in path}:
            weights[port] += rules[lane].weight
    for lane, flows in able.items():
        limits = [
            free * rules[lane].weight / weight if weight else 0.0
            for free, weight in zip(left, weights, strict=True)
        ]
        paths = [path for _, path in flows]
        _grant(rates, room, [i for i, _ in flows], paths, max_min(paths, limits))


def _lend(rates: list[float], room: list[float], flows: Sequence[Flow], lanes: Sequence[int]) -> None:
    """A lane that was kept a share may have been stopped elsewhere: hand on what it left."""
    for lane in lanes:
        members = [i for i, f in enumerate(flows) if f.lane == lane]
        paths = [flows[i].ports for i in members]
        _grant(rates, room, members, paths, max_min(paths, room))


def _with_laneless(
    flows: Sequence[Flow],
    capacity: Sequence[float],
    rules: Mapping[int, LaneRule],
    lanes: Sequence[int],
    laneless: frozenset[int],
) -> list[float]:
    """Three allocations: what each flow could get of the laned ports, its fair part of the others within that,
    and the laned ports anew within those parts. A bound on a flow is a port of its own. Where the first asks no
    more of the ports without lanes than they have, as memory mostly has enough, it is the answer.
    """
    held = [tuple(port for port in flow.ports if port in laneless) for flow in flows]
    laned = [tuple(port for port in flow.ports if port not in laneless) for flow in flows]
    own = {index: len(capacity) + at for at, index in enumerate(i for i, ports in enumerate(held) if ports)}

    def within(bounds: Sequence[float]) -> list[float]:
        bounded = [Flow((*laned[i], own[i]) if i in own else laned[i], flow.lane) for i, flow in enumerate(flows)]
        return _by_lane(bounded, [*capacity, *bounds], rules, lanes)

    alone = [min(capacity[port] / held[i].count(port) for port in held[i]) for i in own]
    wanted = within(alone)
    asked = dict.fromkeys(laneless, 0.0)
    for i in own:
        for port in held[i]:
            asked[port] += wanted[i]
    if all(load <= capacity[port] for port, load in asked.items()):
        return wanted
    parts = max_min([(*held[i], own[i]) for i in own], [*capacity, *(wanted[i] for i in own)])
    rates = within(parts)
    room = list(capacity)
    for flow, rate in zip(flows, rates, strict=True):
        for port in flow.ports:
            room[port] = max(0.0, room[port] - rate)
    _lend(rates, room, flows, lanes)
    return rates


def max_min(paths: Sequence[Sequence[int]], capacity: Sequence[float]) -> list[float]:
    """Max-min fair rates of flows along ``paths`` (port indices, at least one each), in their order.

    Fill all flows alike; the port that is full first fixes its flows; go on with the rest. O(F log P).
    """
    members: dict[int, list[int]] = {}
    for flow, path in enumerate(paths):
        for port in path:
            members.setdefault(port, []).append(flow)
    room = {port: float(capacity[port]) for port in members}
    waiting = {port: len(flows) for port, flows in members.items()}
    heap = [(room[port] / count, port) for port, count in waiting.items()]
    heapq.heapify(heap)
    rates = [-1.0] * len(paths)
    while heap:
        share, port = heapq.heappop(heap)
        count = waiting[port]
        if not count:
            continue
        level = max(0.0, room[port] / count)
        if level > share:
            # Others of its flows were fixed meanwhile at less than this port's share: it fills later.
            heapq.heappush(heap, (level, port))
            continue
        for flow in members[port]:
            if rates[flow] < 0:
                rates[flow] = level
                for crossed in paths[flow]:
                    room[crossed] -= level
                    waiting[crossed] -= 1
    return rates


def _reserved(
    paths: Mapping[int, Sequence[Sequence[int]]], capacity: Sequence[float], rules: Mapping[int, LaneRule]
) -> dict[int, list[float]]:
    """What each lane can use of its guarantees, per port: its max-min rates where it has only those.

    A port that no other lane uses is all the lane's.
    """
    present: list[set[int]] = [set() for _ in capacity]
    for lane, lane_paths in paths.items():
        for path in lane_paths:
            for port in path:
                present[port].add(lane)
    reserved: dict[int, list[float]] = {}
    for lane, lane_paths in paths.items():
        share = rules[lane].guarantee
        limits = [rate if present[port] == {lane} else rate * share for port, rate in enumerate(capacity)]
        used = [0.0] * len(capacity)
        for path, rate in zip(lane_paths, max_min(lane_paths, limits), strict=True):
            for port in path:
                used[port] += rate
        reserved[lane] = used
    return reserved


def _grant(
    rates: list[float],
    room: list[float],
    members: Sequence[int],
    paths: Sequence[Sequence[int]],
    extra: Sequence[float],
) -> None:
    """Add ``extra`` to the rates of ``members`` and take it from the room of their ports."""
    for flow, path, rate in zip(members, paths, extra, strict=True):
        rates[flow] += rate
        for port in path:
            room[port] = max(0.0, room[port] - rate)
