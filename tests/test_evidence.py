"""What a run is held against follows from the workload alone."""

from __future__ import annotations

import msgspec

from emulator.evidence import continuing_turns, expected_tokens
from emulator.workload import Stream, Trajectory, Turn, Workload
from tests.clusters import config, conversation


def test_every_request_has_expected_tokens() -> None:
    """One token after the prompt and one after each forced output, for every turn; any path, any agents."""
    load = Workload((conversation("a", (100, 3), (10, 0)), conversation("b", (5, 1))))
    found = expected_tokens(config(agents=2), load)
    assert {name: len(tokens) for name, tokens in found.items()} == {"a:0": 4, "a:1": 1, "b:0": 2}
    assert found == expected_tokens(config(agents=1, path="de", warm=True, seed=9), load)


def test_a_turn_continues_only_what_it_begins_with() -> None:
    """A conversation's turns continue; one cut short or of another stream does not."""
    whole = conversation("a", (100, 3), (10, 5))
    shorter = msgspec.structs.replace(whole, id="b", turns=(whole.turns[0], Turn(102, 1)))
    other = Trajectory("c", (Turn(100, 3), Turn(200, 1, stream=1)), (Stream((300,), (1,)), Stream((300,), (2,))))
    assert continuing_turns(Workload((whole, shorter, other))) == {"a:1": True, "b:1": False, "c:1": False}
