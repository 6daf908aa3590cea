"""However a prompt is cut into forwards: the same hits, keys and bytes in storage, and the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator.config import ModelConfig
from emulator.records import RunRecords
from emulator.sim import simulate
from emulator.store import MemoryStore
from emulator.workload import Workload
from tests.clusters import broken, config, conversation

WHOLE = {"quota_s": 1e3, "batch_tokens": 1 << 20}
Kept = dict[bytes, bytes]


def _run(load: Workload, backend: str, engine: dict[str, Any], system: str) -> tuple[RunRecords, Kept]:
    """A run, and every block that came to storage, by its key."""
    kept: Kept = {}
    append = MemoryStore.append

    def keep(store: MemoryStore, blocks: list[tuple[bytes, memoryview]]) -> int:
        for key, data in blocks:
            assert kept.setdefault(bytes(key), bytes(data)) == bytes(data)
        return append(store, blocks)  # type: ignore[arg-type, return-value]

    model = ModelConfig(name="toy", backend=backend)  # type: ignore[arg-type]
    run = config(gpus=1, warm=True, model=model, engine=engine, system=system)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryStore, "append", keep)
        records = simulate(run, load)
    assert broken(run, load, records) == []
    return records, kept


@pytest.mark.parametrize("backend", ["digest", "toy"])
@settings(max_examples=6)
@given(
    rounds=st.lists(st.tuples(st.integers(1, 400), st.integers(0, 70)), min_size=1, max_size=3),
    quota_s=st.sampled_from([1e-6, 1e-4, 1e3]),
    batch_tokens=st.sampled_from([7, 64, 150]),
    system=st.sampled_from(["dualpath", "basic", "split"]),
)
def test_chunked_and_unchunked_prefill_are_the_same_but_for_time(
    backend: str, rounds: list[tuple[int, int]], quota_s: float, batch_tokens: int, system: str
) -> None:
    """Small quotas and batches cut prompts into forwards; hits, keys, stored bytes and tokens stay the same."""
    if backend == "toy":
        pytest.importorskip("torch")
    # A prompt of a token a forward would take a minute.
    if quota_s == 1e-6:
        rounds = [(min(append, 40), output) for append, output in rounds]
    load = Workload((conversation("a", *rounds), conversation("b", (100, 30), (90, 5))))
    whole, whole_kept = _run(load, backend, WHOLE, system)
    cut, cut_kept = _run(load, backend, {"quota_s": quota_s, "batch_tokens": batch_tokens}, system)
    most = max(new for node in cut.nodes for batch in node.batches for _, new in batch.shape)
    assert most <= batch_tokens
    facts = [
        [(r.id, r.status, r.hit_tokens, r.persisted_tokens, r.model_tokens) for r in records.requests]
        for records in (whole, cut)
    ]
    assert facts[0] == facts[1]
    assert whole_kept == cut_kept
