"""Whole runs in virtual time: every role, real bytes, every invariant."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator.config import ModelConfig, ScaleConfig
from emulator.errors import ConfigError, EmulatorError
from emulator.fabric.interface import VirtualLane
from emulator.records import Decisions, RunRecords
from emulator.sim import simulate
from emulator.systems import SYSTEMS
from emulator.workload import Stream, Trajectory, Turn, Workload

from .clusters import broken, config, conversation, expected_tokens

ROUNDS = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 80)), min_size=1, max_size=4)


def _mixed() -> Workload:
    return Workload(
        (
            conversation("long", (900, 70), (1, 1), (130, 64)),
            conversation("short", (5, 3), (10, 0), (200, 90)),
            conversation("exact", (128, 64), (64, 128), (64, 1)),
        )
    )


def _decisions(records: RunRecords) -> Decisions:
    return Decisions(
        tuple(decision for node in records.nodes for decision in node.decisions),
        tuple(batch for node in records.nodes for batch in node.batches),
    )


_RECORDED = _decisions(simulate(config(agents=3, path="pe"), _mixed()))


@pytest.mark.parametrize("path", ["pe", "de", "auto"])
@pytest.mark.parametrize("warm", [False, True])
def test_both_paths_serve_every_request_and_break_nothing(path: str, warm: bool) -> None:
    """All done, tokens as the reference, step bytes exact, pools whole, on either path, warm or cold."""
    run = config(path=path, agents=3, warm=warm)
    records = simulate(run, _mixed())
    assert [request.status for request in records.requests] == ["done"] * 9
    assert broken(run, _mixed(), records) == []
    if path != "auto":
        assert {request.path for request in records.requests} == {path}
    if warm:
        assert records.requests[0].hit_tokens == 896


@settings(max_examples=25, deadline=None)
@given(st.lists(ROUNDS, min_size=1, max_size=5), st.sampled_from(["pe", "de", "auto"]), st.integers(1, 2))
def test_any_workload_is_served(rounds: list[list[tuple[int, int]]], path: str, nodes: int) -> None:
    """Whatever the lengths, no invariant breaks."""
    load = Workload(tuple(conversation(f"t{at}", *each) for at, each in enumerate(rounds)))
    run = config(path=path, agents=len(rounds), pe_nodes=nodes, de_nodes=nodes)
    assert broken(run, load, simulate(run, load)) == []


def test_the_same_seed_gives_the_same_records() -> None:
    """Two runs are equal to the byte; another seed may choose other paths."""
    run = config(agents=3, seed=4)
    first, second = (msgspec.json.encode(simulate(run, _mixed())) for _ in range(2))
    assert first == second


def test_a_turn_hits_what_its_predecessor_generated() -> None:
    """Turn n+1 reads every full block of turn n's prompt and output, and computes only the rest."""
    load = Workload((conversation("t", (100, 60), (30, 70), (64, 2)),))
    hits = [request.hit_tokens for request in simulate(config(agents=1), load).requests]
    assert hits == [0, 128, 256]


def test_a_request_that_never_fits_is_refused_and_the_rest_complete() -> None:
    """Refused at admission with the setting's name; its later turns are cancelled; others are served."""
    load = Workload((conversation("big", (2000, 1), (10, 1)), conversation("small", (100, 5), (10, 5))))
    run = config(agents=2, engine={"de_buffer_gb": 0.05})
    records = simulate(run, load)
    assert [request.status for request in records.requests] == ["failed", "cancelled", "done", "done"]
    assert "de_buffer_gb" in (records.requests[0].error or "")
    assert broken(run, load, records) == []


@pytest.mark.parametrize("path", ["pe", "de", "auto"])
def test_one_request_of_buffer_is_enough_for_all(path: str) -> None:
    """With room for a single request's KV in each buffer, many requests still complete, in turn."""
    load = Workload(tuple(conversation(f"t{at}", (700, 65), (64, 3)) for at in range(5)))
    run = config(path=path, agents=5, engine={"de_buffer_gb": 0.037, "pe_buffer_gb": 0.037})
    records = simulate(run, load)
    assert {request.status for request in records.requests} == {"done"}
    assert broken(run, load, records) == []


def test_recorded_decisions_are_repeated() -> None:
    """A replayed run takes the same engines, paths and batches whatever its own policy would say."""
    first = simulate(config(agents=3), _mixed())
    again = simulate(config(agents=3, seed=9), _mixed(), _decisions(first))
    key = [(r.id, r.path, r.pe, r.de, r.hit_tokens) for r in first.requests]
    assert [(r.id, r.path, r.pe, r.de, r.hit_tokens) for r in again.requests] == key
    assert [b.requests for b in _decisions(again).batches] == [b.requests for b in _decisions(first).batches]


def test_decisions_of_another_workload_are_refused() -> None:
    """A decision for a request that is not there ends the run before it starts, with the option's name."""
    first = simulate(config(agents=1), Workload((conversation("other", (10, 1)),)))
    with pytest.raises(ConfigError, match="--decisions: request other:0 is not in this workload"):
        simulate(config(agents=3), _mixed(), _decisions(first))


def test_a_run_with_refusals_is_repeated_with_them() -> None:
    """What was refused had no decision, and is refused again; the rest is repeated in its order."""
    load = Workload((conversation("big", (2000, 1), (10, 1)), conversation("small", (100, 5), (10, 5))))
    run = config(agents=2, engine={"de_buffer_gb": 0.05})
    first = simulate(run, load)
    again = simulate(config(agents=2, engine={"de_buffer_gb": 0.05}, seed=3), load, _decisions(first))
    assert [r.status for r in again.requests] == [r.status for r in first.requests]
    assert _decisions(again) == msgspec.structs.replace(_decisions(again), requests=_decisions(first).requests)


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_decisions_in_any_order_are_repeated_or_refused(data: st.DataObject) -> None:
    """However a file was shuffled, or a batch repeated: it is refused at once, or every request is served."""
    recorded = _RECORDED
    requests = data.draw(st.one_of(st.just(recorded.requests), st.permutations(recorded.requests)))
    batches = data.draw(st.one_of(st.just(recorded.batches), st.permutations(recorded.batches)))
    again = data.draw(st.lists(st.sampled_from(recorded.batches), max_size=1))
    try:
        records = simulate(config(agents=3, path="pe"), _mixed(), Decisions(tuple(requests), (*batches, *again)))
    except ConfigError as error:
        assert error.text.startswith("--decisions: ") and "\n" not in error.text
        return
    assert all(r.status == "done" for r in records.requests)


def test_decisions_of_a_larger_topology_are_refused() -> None:
    """An engine that does not exist here is named."""
    recorded = _decisions(simulate(config(agents=3, gpus=4), _mixed()))
    assert any(d.pe not in {"pe0/0", "pe0/1"} for d in recorded.requests)
    with pytest.raises(ConfigError, match="not a PE engine in this topology"):
        simulate(config(agents=3), _mixed(), recorded)


def test_decisions_that_no_longer_hold_end_the_run() -> None:
    """Recorded hits that the store does not have (here: not warmed) end the run with the reason."""
    recorded = _decisions(simulate(config(agents=3, warm=True), _mixed()))
    with pytest.raises(EmulatorError, match="--warm"):
        simulate(config(agents=3), _mixed(), recorded)


def _changed(recorded: Decisions, **changes: Any) -> Decisions:
    """With fields of the first decision changed that has hits."""
    rows = list(recorded.requests)
    place = next(index for index, row in enumerate(rows) if row.hit_blocks)
    rows[place] = msgspec.structs.replace(rows[place], **changes)
    return msgspec.structs.replace(recorded, requests=tuple(rows))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"de": "pe0/0"}, "which is not a DE engine"),
        ({"pe": "de0/0"}, "which is not a PE engine"),
        ({"split_blocks": 1}, "split_blocks 1: expected 0 to 0"),
        ({"path": "split", "split_blocks": -1}, "split_blocks -1: expected 0 to"),
        ({"path": "split"}, "read on the split path, and this run reads pe"),
        ({"path": "de"}, "read on the de path, and this run reads pe"),
    ],
)
def test_decisions_that_no_scheduler_makes_are_refused(changes: dict[str, Any], said: str) -> None:
    """An engine of the other side, or a path that this run does not read, is named before anything runs."""
    with pytest.raises(ConfigError, match=said):
        simulate(config(agents=3, path="pe"), _mixed(), _changed(_RECORDED, **changes))


def test_no_decisions_are_refused() -> None:
    """A file without any would have every request wait for its own."""
    with pytest.raises(ConfigError, match="there are none in it"):
        simulate(config(agents=3), _mixed(), Decisions((), ()))


@pytest.mark.parametrize("key", ["dram_gbps", "pcie_gbps"])
def test_memory_too_slow_for_the_horizon_is_refused_at_once(key: str) -> None:
    """What binds inside a node is held against the end of virtual time as links are."""
    run = config(agents=3, engine={key: 1e-300})
    run = msgspec.structs.replace(run, replay=msgspec.structs.replace(run.replay, copies="cuda"))
    with pytest.raises(ConfigError, match=r"give it a higher rate"):
        simulate(run, _mixed())


@pytest.mark.parametrize("key", ["snic_gbps", "cnic_gbps"])
def test_a_link_too_slow_for_the_horizon_is_refused_at_once(key: str) -> None:
    """A rate that is a mistake of unit is told in one line, with the link, before anything runs."""
    run = config(agents=3)
    slow = msgspec.structs.replace(run, topology={**run.topology, key: 1e-9})
    with pytest.raises(ConfigError, match=r"nic0: at its rate .* give it a higher rate"):
        simulate(slow, _mixed())


def test_progress_counts_to_the_total() -> None:
    """Progress ends at the number of requests, refused and cancelled ones included."""
    seen: list[tuple[int, int]] = []
    simulate(config(agents=3), _mixed(), on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(count, 9) for count in range(1, 10)]


def test_the_toy_proves_the_same() -> None:
    """Real attention over the bytes that crossed: the toy's tokens equal the reference's."""
    pytest.importorskip("torch")
    load = Workload((conversation("a", (300, 20), (70, 66)), conversation("b", (40, 4), (9, 1))))
    run = config(agents=2, model=ModelConfig(name="toy", backend="toy"))
    records = simulate(run, load)
    assert broken(run, load, records) == []
    assert len(expected_tokens(run, load)) == 4


def test_open_loop_turns_arrive_on_time() -> None:
    """A turn with an arrival of its own does not arrive before it, even when its predecessor is long done."""
    base = conversation("t", (50, 2), (20, 2))
    late = msgspec.structs.replace(base.turns[1], arrival_s=30.0)
    load = Workload((Trajectory("t", (base.turns[0], late), base.streams),))
    records = simulate(config(aps=1.0), load)
    assert records.requests[1].arrived_s == 30.0


def test_a_context_beyond_the_backend_is_refused_before_the_start() -> None:
    """The toy's limit is said with the request's name and the option that mends it."""
    pytest.importorskip("torch")
    load = Workload((conversation("a", (5000, 1)),))
    with pytest.raises(ConfigError, match="--max-len"):
        simulate(config(agents=1, model=ModelConfig(name="toy", backend="toy")), load)


@pytest.mark.parametrize(
    ("engine", "kv_bytes"),
    [({"block_tokens": 2**31 - 1}, 1), ({"pe_buffer_gb": 1e6}, 704), ({"de_buffer_gb": 1e6}, 704)],
)
def test_memory_that_no_host_can_map_is_a_users_error(engine: dict[str, Any], kv_bytes: int) -> None:
    """Sizes beyond an address space are one line with the memory's name and its bytes."""
    large = msgspec.structs.replace(config(engine=engine), scale=ScaleConfig(kv_bytes=kv_bytes))
    with pytest.raises(ConfigError, match=r"memory \w+ of \d+ bytes: this host cannot map it"):
        simulate(large, Workload((conversation("a", (3, 1)),)))


@given(
    engine=st.fixed_dictionaries(
        {
            "block_tokens": st.sampled_from([1, 7, 16, 63, 64, 128, 1000]),
            "stripe_blocks": st.sampled_from([1, 3, 32, 10**6]),
            "read_message_blocks": st.sampled_from([1, 5, 512]),
        }
    ),
    rounds=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 80), st.integers(0, 1)), min_size=1, max_size=4),
    alike=st.integers(1, 4),
    path=st.sampled_from(["pe", "de", "auto"]),
    warm=st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_sharing_is_safe_with_any_blocks(
    engine: dict[str, int], rounds: list[tuple[int, int, int]], alike: int, path: str, warm: bool
) -> None:
    """Agents of one content miss and commit the same blocks at once, rewind and fork, whatever a block is."""
    streams = (Stream((100, 300), (1, 2)), Stream((100, 300), (1, 3)))
    turns = tuple(Turn(prompt, output, stream=stream) for prompt, output, stream in rounds)
    turns = (msgspec.structs.replace(turns[0], arrival_s=0.0), *turns[1:])
    workload = Workload(tuple(Trajectory(f"a{index}", turns, streams) for index in range(alike)))
    run = config(engine=engine, path=path, warm=warm)
    records = simulate(run, workload)
    assert all(r.status == "done" for r in records.requests)
    assert broken(run, workload, records) == []


@pytest.mark.parametrize("path", ["pe", "de", "auto"])
@pytest.mark.parametrize("engine", [{}, {"batch_tokens": 100}, {"de_hbm_kv_gb": 0.1}])
def test_decode_kv_goes_straight_to_hbm(path: str, engine: dict[str, float]) -> None:
    """Without the DE buffer between, every request is served on either path, in chunks or with little HBM."""
    run = config(path=path, agents=3, de_direct=True, engine=engine)
    records = simulate(run, _mixed())
    assert [request.status for request in records.requests] == ["done"] * 9
    assert broken(run, _mixed(), records) == []


@pytest.mark.parametrize("system", list(SYSTEMS))
@pytest.mark.parametrize("engine", [{}, {"batch_tokens": 100}, {"quota_s": 0.001}])
def test_every_system_serves_and_breaks_nothing(system: str, engine: dict[str, float]) -> None:
    """Whole or in chunks, one group or two: all done, tokens as the reference, no invariant broken."""
    for nodes in (1, 2):
        run = config(system=system, agents=3, pe_nodes=nodes, de_nodes=nodes, engine=engine)
        records = simulate(run, _mixed())
        assert [request.status for request in records.requests] == ["done"] * 9
        assert broken(run, _mixed(), records) == []


@pytest.mark.parametrize("system", list(SYSTEMS))
@pytest.mark.parametrize("dram_gbps", [0.1, 1])
def test_dram_that_everything_waits_for_keeps_its_rate(system: str, dram_gbps: float) -> None:
    """Messages of all NICs at once are under way in it; a DRAM that is said to have half its rate is found out."""
    run = config(system=system, agents=6, engine={"dram_gbps": dram_gbps})
    workload = Workload(tuple(conversation(name, (900, 70), (130, 64), (200, 90)) for name in "abcdef"))
    records = simulate(run, workload)
    assert broken(run, workload, records) == []
    if system != "oracle":
        slower = config(system=system, agents=6, engine={"dram_gbps": dram_gbps / 2})
        assert [line.split(":")[0] for line in broken(slower, workload, records)] == ["rates kept"]


@pytest.mark.parametrize("system", list(SYSTEMS))
def test_every_system_repeats_its_decisions(system: str) -> None:
    """Chunks, group steps and split reads are repeated as they were."""
    run = config(system=system, agents=3, pe_nodes=2, engine={"batch_tokens": 200})
    first = simulate(run, _mixed())
    again = simulate(run, _mixed(), _decisions(first))
    assert set(_decisions(again).requests) == set(_decisions(first).requests)
    formed = [
        [(b.engine, b.step, b.requests, b.shape) for b in _decisions(records).batches]
        for records in (first, again)
    ]
    assert formed[0] == formed[1]
    assert broken(run, _mixed(), again) == []


@pytest.mark.parametrize("ep_over", ["nvlink", "cnic"])
@pytest.mark.parametrize("traffic", [{"qos": "off"}, {"qos": "software"}, {"copies": "cuda"}])
def test_whatever_isolates_traffic_serves_and_breaks_nothing(traffic: dict[str, Any], ep_over: str) -> None:
    """Tokens, bytes and pools do not depend on it, whole requests at once in HBM or layer by layer."""
    for system in ("dualpath", "basic"):
        run = config(agents=3, pe_nodes=2, de_nodes=2, system=system, ep_over=ep_over, **traffic)
        records = simulate(run, _mixed())
        assert [request.status for request in records.requests] == ["done"] * 9
        assert broken(run, _mixed(), records) == []


@pytest.mark.parametrize(
    ("qos", "lane"), [("lanes", VirtualLane.MODEL), ("off", VirtualLane.KV), ("software", VirtualLane.KV)]
)
def test_records_name_the_lane_that_carried(qos: str, lane: VirtualLane) -> None:
    """Exchanges, and the bytes of the ports that they leave by, are those of the one lane that is used."""
    run = config(agents=3, pe_nodes=2, de_nodes=2, ep_over="cnic", qos=qos)
    nodes = simulate(run, _mixed()).nodes
    exchanges = [exchange for node in nodes for exchange in node.exchanges if exchange.payload_bytes]
    assert exchanges and {exchange.lane for exchange in exchanges} == {lane}
    ports = {
        port.lane for node in nodes for port in node.ports if port.nic.startswith("cnic") and port.payload_bytes
    }
    assert ports == {lane, VirtualLane.KV}
