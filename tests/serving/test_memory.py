"""Memory that is too small, or just large enough: who can never fit is refused, and all others are served."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator.config import ModelConfig, RunConfig
from emulator.deployment import Deployment
from emulator.records import RunRecords
from emulator.sim import simulate
from emulator.workload import Workload
from tests.clusters import broken, config, conversation

from .sizes import gigabytes

TOY = ModelConfig(name="toy")
BLOCK = 64
AMPLE = 4096
"""Tokens for which there is always room."""

SETTINGS = ("de_buffer_gb", "pe_buffer_gb", "de_hbm_kv_gb", "pe_hbm_kv_gb")


def _config(tokens: dict[str, int], **replay: Any) -> RunConfig:
    """A small cluster whose memories hold so many tokens."""
    room = dict.fromkeys(SETTINGS, AMPLE) | tokens
    return config(gpus=1, model=TOY, engine={name: gigabytes(count) for name, count in room.items()}, **replay)


def _served(run: RunConfig, load: Workload) -> RunRecords:
    records = simulate(run, load)
    assert broken(run, load, records) == []
    return records


@pytest.mark.parametrize(
    ("key", "replay"),
    [
        ("de_buffer_gb", {"path": "pe"}),
        ("de_buffer_gb", {"path": "de"}),
        ("de_buffer_gb", {"system": "split"}),
        ("pe_buffer_gb", {"path": "pe"}),
        ("pe_buffer_gb", {"system": "basic"}),
        ("de_hbm_kv_gb", {"system": "dualpath"}),
        ("de_hbm_kv_gb", {"de_direct": True}),
        ("pe_hbm_kv_gb", {"system": "basic"}),
        ("pe_hbm_kv_gb", {"system": "dualpath"}),
    ],
)
def test_what_can_never_fit_is_refused_and_those_behind_it_complete(key: str, replay: dict[str, Any]) -> None:
    """Whichever memory is too small: the reason names its setting; the later turns are cancelled; nobody hangs."""
    # Without layerwise prefill a context has all its layers in HBM, else two of the toy's four.
    tokens = 512 if key != "pe_hbm_kv_gb" or replay == {"system": "basic"} else 256
    load = Workload(
        (
            conversation("big", (900, 20), (10, 1)),
            *(conversation(f"small{at}", (200, 70), (64, 3)) for at in range(3)),
        )
    )
    records = _served(_config({key: tokens}, warm=True, agents=4, **replay), load)
    first, later, *others = records.requests
    assert (first.status, later.status) == ("failed", "cancelled")
    assert key in (first.error or "")
    assert {request.status for request in others} == {"done"}


@settings(max_examples=40)
@given(
    room=st.dictionaries(st.sampled_from(SETTINGS), st.integers(1, 16).map(lambda blocks: blocks * BLOCK)),
    rounds=st.lists(st.tuples(st.integers(1, 700), st.integers(0, 80)), min_size=1, max_size=4),
    system=st.sampled_from(["basic", "layerwise", "dualpath", "split", "oracle"]),
    direct=st.booleans(),
)
def test_every_request_is_served_or_refused_with_a_setting(
    room: dict[str, int], rounds: list[tuple[int, int]], system: str, direct: bool
) -> None:
    """However little memory there is, a request is done, or failed with the name of a setting; none waits on."""
    load = Workload(tuple(conversation(f"t{at}", each, (5, 2)) for at, each in enumerate(rounds)))
    for request in _served(_config(room, warm=True, system=system, de_direct=direct), load).requests:
        if request.turn == 0 and request.status != "done":
            assert request.status == "failed"
            assert any(key in (request.error or "") for key in room)


@pytest.mark.parametrize("replay", [{"path": "pe"}, {"path": "de"}, {"path": "auto"}, {"de_direct": True}])
def test_a_pe_buffer_of_one_block_and_a_de_buffer_of_one_request_serve_all(replay: dict[str, Any]) -> None:
    """Hits of one block, a buffer for one of them at a time on either side: all complete, in turn."""
    load = Workload(tuple(conversation(f"t{at}", (100, 30), (50, 20)) for at in range(6)))
    run = _config({"pe_buffer_gb": BLOCK, "de_buffer_gb": 3 * BLOCK}, warm=True, agents=6, **replay)
    assert Deployment(run).limits.pe_buffer_blocks == 1
    records = _served(run, load)
    assert {request.status for request in records.requests if request.turn == 0} == {"done"}
    peaks = {pool.pool: (pool.peak_used, pool.total) for node in records.nodes for pool in node.pools}
    used, total = peaks["de0.de_buffer"]
    assert 0 < used <= total
    refused = [request for request in records.requests if request.status != "done"]
    # A second turn hits two blocks, which only the DE's side has room for.
    assert bool(refused) == (replay.get("path") == "pe")
    assert all("pe_buffer_gb" in (request.error or "") for request in refused)


def test_split_leaves_a_pe_buffer_of_one_block_its_one_block() -> None:
    """Hits of many blocks are read on both sides, on the PE's never more than its buffer holds; all complete."""
    load = Workload(tuple(conversation(f"t{at}", (500, 30), (50, 20)) for at in range(6)))
    run = _config({"pe_buffer_gb": BLOCK, "de_buffer_gb": 10 * BLOCK}, warm=True, agents=6, system="split")
    records = _served(run, load)
    assert {request.status for request in records.requests} == {"done"}
    assert {request.path for request in records.requests} == {"split"}
    assert all(request.hit_tokens - request.de_hit_tokens <= BLOCK for request in records.requests)


@pytest.mark.parametrize("policy", ["dualpath", "round-robin"])
@pytest.mark.parametrize("direct", [False, True])
def test_a_full_de_makes_requests_wait_and_resume(policy: str, direct: bool) -> None:
    """With HBM for one request, the next one's KV comes only once the last one's pages are free.

    Pages are reserved before what goes into them is sent: from the DE buffer, or, straight into HBM, by the PE.
    """
    load = Workload(tuple(conversation(f"t{at}", (300, 50 + at)) for at in range(4)))
    run = _config({"de_hbm_kv_gb": 6 * BLOCK}, warm=True, agents=4, policy=policy, de_direct=direct)
    records = _served(run, load)
    turns = sorted(records.requests, key=lambda r: r.first_token_s or 0.0)
    assert {request.status for request in turns} == {"done"}
    for before, after in pairwise(turns):
        begun_s = after.prefill_start_s if direct else after.transferred_s
        assert before.last_token_s is not None and begun_s is not None
        assert begun_s > before.last_token_s
