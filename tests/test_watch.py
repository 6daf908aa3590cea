"""The watch over a run on links: who gets no further, and who says nothing, is named when patience is over."""

from __future__ import annotations

import msgspec
import pytest
import trio

from emulator.config import ScaleConfig
from emulator.deployment import Deployment
from emulator.errors import EmulatorError
from emulator.fabric.clock import run_virtual
from emulator.fabric.fluid import open_fluid
from emulator.roles.messages import INQUIRE, Inquiry, Standing
from emulator.sim import fluid_network
from emulator.watch import waiting_line, watch

from .clusters import config


def test_a_long_list_of_requests_is_cut_and_counted() -> None:
    """A line names eight requests at most, and how many more there are."""
    line = waiting_line({f"r{at}": "waiting" for at in range(11)})
    assert line.count(" is waiting") == 8 and line.endswith("; and 3 more requests wait")
    assert waiting_line({"a": "decoding on de0"}) == "a is decoding on de0"


def _watched(silent: str, *, moves: bool, under_way: bool, for_s: float) -> tuple[float, str]:
    """When and how the watch of a client ends, if it does within ``for_s``; its patience is of 2 s.

    One node says nothing (none where ``silent`` is ""), the others that they moved or not.
    """
    run = config(gpus=1, engine={"stall_s": 2.0})
    deployment = Deployment(msgspec.structs.replace(run, scale=ScaleConfig(dilation=1.0)))
    network = fluid_network(run)

    async def main() -> tuple[float, str]:
        async def inquire(request: Inquiry) -> Standing:
            return Standing(int(trio.current_time() * 10) if moves else 3, {"a:0": "decoding on de0"})

        async def say_nothing(request: Inquiry) -> Standing:
            await trio.sleep_forever()

        async with open_fluid(network):
            for member in run.members:
                network.fabric(member.name).serve(INQUIRE, say_nothing if member.name == silent else inquire)
            try:
                with trio.move_on_after(for_s):
                    await watch(deployment, network.fabric("client"), lambda: under_way, lambda: None)
            except EmulatorError as error:
                return trio.current_time(), error.text
        return for_s, "nothing"

    return run_virtual(main, horizon_s=1e3)


def test_who_gets_no_further_is_named_after_the_patience() -> None:
    """All nodes say the same for 2 s, while a request is under way: an error with what it is doing."""
    ended_s, text = _watched("", moves=False, under_way=True, for_s=50.0)
    assert text == "no progress for 2 s (stall_s): a:0 is decoding on de0"
    assert 2.0 <= ended_s <= 4.0


@pytest.mark.parametrize("node", ["pe0", "de0", "st1", "sched"])
def test_who_says_nothing_is_named_after_the_patience(node: str) -> None:
    """A node that does not answer for 2 s, such as one that is stopped, is named, whatever the others do."""
    ended_s, text = _watched(node, moves=True, under_way=True, for_s=50.0)
    assert text == f"{node}: no answer for 2 s (stall_s); is it stopped?"
    assert 2.0 <= ended_s <= 4.0


@pytest.mark.parametrize(("moves", "under_way"), [(True, True), (False, False)])
def test_progress_and_idleness_are_no_stall(moves: bool, under_way: bool) -> None:
    """Neither a run that moves nor a time in which no request is under way ends the watch."""
    assert _watched("", moves=moves, under_way=under_way, for_s=50.0) == (50.0, "nothing")
