"""A run in virtual time that can get no further ends, and says which requests wait, and for what."""

from __future__ import annotations

import pytest

from emulator.config import ModelConfig
from emulator.errors import EmulatorError
from emulator.records import Decisions
from emulator.sim import simulate
from emulator.workload import Workload
from tests.clusters import config, conversation

from .sizes import gigabytes

LOAD = Workload(tuple(conversation(name, (300, 30)) for name in "abc"))
ROOM = {"de_buffer_gb": gigabytes(5 * 64)}
"""A DE buffer for one of the prompts at a time."""


def test_repeated_batches_that_can_never_be_complete_end_the_run() -> None:
    """A batch of two on a buffer for one: the run ends with what each request waits for, and does not hang."""
    model = ModelConfig(name="toy")
    first = simulate(config(gpus=1, agents=3, model=model), LOAD)
    decisions = Decisions(
        tuple(decision for node in first.nodes for decision in node.decisions),
        tuple(batch for node in first.nodes for batch in node.batches),
    )
    assert max(len(batch.requests) for batch in decisions.batches) > 1
    with pytest.raises(EmulatorError) as caught:
        simulate(config(gpus=1, agents=3, model=model, engine=ROOM), LOAD, decisions)
    assert caught.value.text.startswith("the run cannot go on: ")
    assert "\n" not in caught.value.text
    assert "is waiting for the DE buffer on de0" in caught.value.text
    assert "whose next recorded batch lacks" in caught.value.text
