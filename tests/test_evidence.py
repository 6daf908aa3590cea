"""What a run is held against follows from the workload alone."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from emulator.evidence import continuing_turns, expected_tokens
from emulator.workload import Stream, Trajectory, Turn, Workload
from tests.clusters import config, conversation


def test_every_request_has_expected_tokens() -> None:
    """One token after the prompt and one after each forced output, for every turn; any path, any agents."""
    load = Workload((conversation("a", (100, 3), (10, 0)), conversation("b", (5, 1))))
    served = ("a:0", "a:1", "b:0")
    found = expected_tokens(config(agents=2), load, served)
    assert {name: len(tokens) for name, tokens in found.items()} == {"a:0": 4, "a:1": 1, "b:0": 2}
    assert found == expected_tokens(config(agents=1, path="de", warm=True, seed=9), load, served)


@given(st.sets(st.sampled_from(["a:0", "a:1", "a:2", "b:0"])))
def test_what_was_not_served_costs_nothing_and_is_known_to_have_arrived(served: set[str]) -> None:
    """Its id is there without tokens, and the tokens of the others are those of a run that served all."""
    load = Workload((conversation("a", (100, 3), (10, 0), (7, 2)), conversation("b", (5, 1))))
    whole = expected_tokens(config(), load, ("a:0", "a:1", "a:2", "b:0"))
    assert expected_tokens(config(), load, served) == {
        name: tokens if name in served else () for name, tokens in whole.items()
    }


def test_a_turn_continues_only_what_it_begins_with() -> None:
    """A conversation's turns continue; one cut short or of another stream does not."""
    whole = conversation("a", (100, 3), (10, 5))
    shorter = msgspec.structs.replace(whole, id="b", turns=(whole.turns[0], Turn(102, 1)))
    other = Trajectory("c", (Turn(100, 3), Turn(200, 1, stream=1)), (Stream((300,), (1,)), Stream((300,), (2,))))
    assert continuing_turns(Workload((whole, shorter, other))) == {"a:1": True, "b:1": False, "c:1": False}
