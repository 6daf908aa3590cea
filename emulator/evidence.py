"""What a finished run is held against: the reference's tokens, and which turns continue their predecessors.

Pure, and the most of a small run's CPU time, so it comes after the run and not beside it. Must not import a
fabric or ``topology``.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import numpy as np

from .config import RunConfig
from .deployment import Deployment
from .models.reference import reference_tokens
from .workload import Trajectory, Workload, request_id

__all__ = ["continuing_turns", "expected_tokens"]


def expected_tokens(run: RunConfig, workload: Workload, served: Container[str]) -> dict[str, tuple[int, ...]]:
    """The tokens of a single process that never saw a network, by request id; none for what was not ``served``.

    A request that no cluster can hold is refused at once, and its tokens would take longer than the run.
    """
    prompts = (
        (name, trajectory.id, trajectory.prompt(turn), trajectory.output(turn))
        for name, trajectory, turn in _requests(workload)
        if name in served
    )
    found = reference_tokens(Deployment(run).load_backend(), prompts)
    return {name: found.get(name, ()) for name, _, _ in _requests(workload)}


def continuing_turns(workload: Workload) -> dict[str, bool]:
    """For every turn but a first: does its prompt begin with all of its predecessor's prompt and output?"""
    found = {}
    for trajectory in workload.trajectories:
        for turn in range(1, len(trajectory.turns)):
            before, prompt = trajectory.context(turn - 1), trajectory.prompt(turn)
            found[request_id(trajectory, turn)] = np.array_equal(before, prompt[: len(before)])
    return found


def _requests(workload: Workload) -> Iterator[tuple[str, Trajectory, int]]:
    for trajectory in workload.trajectories:
        for turn in range(len(trajectory.turns)):
            yield request_id(trajectory, turn), trajectory, turn
