"""Laws of the bytes per step: what was counted on either side, and what a request needs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.fabric.interface import Transfer
from emulator.kvcache import Layout
from emulator.metrics import Setup
from emulator.records import NodeRecord, RequestRecord, RunRecords, TransferBytes
from emulator.scale import Scale
from emulator.steps import STEPS, as_steps, expected_transfers, steps_model_bytes
from emulator.systems import SYSTEMS

TOKEN = 2 * 4
BLOCK = 64
CHUNKS = ((256, 300), (556, 100), (656, 45))
"""A prompt of 701 tokens whose hit of four blocks is followed by three forwards."""


def setup(system: str = "dualpath", **changes: Any) -> Setup:
    scale = Scale(model_kv_bytes=704, kv_bytes=4)
    return Setup(layout=Layout(2, 4), scale=scale, ports=(), system=SYSTEMS[system], **changes)


def request(path: str, **changes: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "id": "a.0",
        "trajectory": "a",
        "turn": 0,
        "status": "done",
        "path": path,
        "prompt_tokens": 701,
        "hit_tokens": 256,
        "output_tokens": 70,
        "arrived_s": 0.0,
        **changes,
    }
    return RequestRecord(**values)


def tokens(path: str, at: Setup, **changes: Any) -> dict[str, int]:
    """What moves under each step key, in tokens, keys of nothing left out."""
    moved = as_steps(expected_transfers(request(path, **changes), CHUNKS, at))
    return {key: size // TOKEN for key, size in moved.items() if size}


def test_steps_keep_both_sides_counts_apart() -> None:
    """A sent key shows what the sender counted, a received one what the receiver counted, in model bytes."""
    sent = tuple(TransferBytes(t.name, "a", "b", 8 * t, 1) for t in Transfer)
    received = tuple(TransferBytes(t.name, "a", "b", 8 * t + 4, 1) for t in Transfer)
    nodes = (NodeRecord(node="a", sent=sent), NodeRecord(node="b", received=received))
    steps = steps_model_bytes(
        RunRecords(t0_s=0.0, ended_s=1.0, requests=(), nodes=nodes), Scale(model_kv_bytes=704, kv_bytes=4)
    )
    assert tuple(steps) == STEPS
    assert len(steps) == 9 + 7 + len(("de_miss", "d2h", "persist", "collective", "reload", "pool", "free"))
    for t in Transfer:
        if t is Transfer.OTHER:
            continue
        if t.sent not in t.received:
            assert steps[t.sent] == 8 * t * 176
        assert {steps[key] for key in t.received} == {(8 * t + 4) * 176}


def test_a_chunk_loads_everything_before_it_again() -> None:
    """Layerwise, the hit is loaded for each of three forwards, and earlier chunks' KV comes back from the DE."""
    assert tokens("pe", setup()) == {
        **dict.fromkeys(("pe1", "pe2"), 256),
        **dict.fromkeys(("pe3", "pe4"), 3 * 256),
        **dict.fromkeys(("pe5", "pe6", "pe7", "pe8", "pe9"), 701),
        "reload": 300 + 400,
        "d2h": 2 * BLOCK,
        "persist": 8 * BLOCK,
    }


def test_without_layerwise_prefill_nothing_is_loaded_twice() -> None:
    """All layers of a request stay in HBM from chunk to chunk."""
    moved = tokens("pe", setup("basic"))
    assert moved["pe3"] == 256
    assert "reload" not in moved


def test_a_split_hit_is_read_where_it_was_split() -> None:
    """The DE's part goes to the PE and not back; the rest is the PE's, of which a pool may give some."""
    assert tokens("split", setup("split"), de_hit_tokens=64, pool_tokens=128) == {
        **dict.fromkeys(("pe1", "pe2"), 64),
        "pool": 128,
        **dict.fromkeys(("pe3", "pe4"), 3 * 192),
        **dict.fromkeys(("de1", "de2"), 64),
        **dict.fromkeys(("de3", "de4", "de5"), 3 * 64),
        **dict.fromkeys(("pe5", "pe6", "pe7"), 701 - 64),
        **dict.fromkeys(("de6", "de7"), 701),
        "reload": 700,
        "d2h": 2 * BLOCK,
        "persist": 8 * BLOCK,
    }


def test_what_caches_give_is_not_read_on_either_side() -> None:
    """Of a split hit each side's storage gives what its own cache did not; everything else moves as ever."""
    cached = {"pool_tokens": 128, "pool_local_tokens": 128, "pool_de_tokens": 64}
    moved = tokens("split", setup("split"), de_hit_tokens=128, **cached)
    plain = tokens("split", setup("split"), de_hit_tokens=128)
    read = ("pe1", "pe2", "de1", "de2")
    assert {key: moved.get(key, 0) for key in read} == {key: plain[key] - 64 for key in read}
    assert {k: v for k, v in moved.items() if k not in read} == {k: v for k, v in plain.items() if k not in read}


@pytest.mark.parametrize(("path", "copied"), [("pe", {}), ("de", {"de6": 256, "de7": 256})])
def test_straight_into_hbm_only_the_des_own_reads_are_copied(path: str, copied: dict[str, int]) -> None:
    """What the PE sends needs no copy at the end, and new blocks of the prompt leave through d2h."""
    moved = tokens(path, setup(de_direct=True))
    assert {key: moved[key] for key in ("pe8", "pe9", "de6", "de7") if key in moved} == copied
    assert moved["d2h"] == moved["persist"] == 8 * BLOCK


@given(st.sampled_from(["pe", "de", "split"]), st.integers(0, 4), st.booleans())
def test_free_is_all_but_persist_and_each_byte_once(path: str, de_blocks: int, de_direct: bool) -> None:
    """An oracle's bytes are those of dualpath, summed over transfers and not over both sides' keys."""
    asked = request(path, de_hit_tokens=64 * de_blocks)
    paid = expected_transfers(asked, CHUNKS, setup(de_direct=de_direct))
    free = expected_transfers(asked, CHUNKS, setup("oracle", de_direct=de_direct))
    assert free == {
        Transfer.FREE: sum(paid.values()) - paid[Transfer.PERSIST],
        Transfer.PERSIST: paid[Transfer.PERSIST],
    }
