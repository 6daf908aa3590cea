"""Another run's decisions: do they fit this workload and this cluster?

Pure. Whatever would leave an engine waiting for a batch that can never be complete is refused before a run begins,
with one line.
"""

from __future__ import annotations

from collections import Counter
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from ..deployment import Deployment
from ..errors import ConfigError
from ..policy import refusal
from ..records import Decisions
from ..workload import Workload, request_id

__all__ = ["check_decisions"]

READ_BY = {"pe": ("pe",), "de": ("de",), "auto": ("pe", "de"), "split": ("pe", "de", "split")}
"""The paths that requests may take by where a run reads hits."""


def check_decisions(decisions: Decisions, workload: Workload, deployment: Deployment) -> None:
    """ConfigError unless a run of ``workload`` on ``deployment`` can repeat ``decisions`` to its end."""
    if not decisions.requests:
        raise ConfigError("--decisions: there are none in it; take a run that ended well")
    _check_requests(decisions, workload, deployment)
    _check_batches(decisions, deployment)
    _check_order(decisions, workload)


def _check_requests(decisions: Decisions, workload: Workload, deployment: Deployment) -> None:
    turns = {request_id(t, index): turn for t in workload.trajectories for index, turn in enumerate(t.turns)}
    sides = (("a PE", {*deployment.pe_engines}), ("a DE", {*deployment.de_engines}))
    batched = {name: batch.engine for batch in decisions.batches for name in batch.requests}
    new: Counter[str] = Counter()
    for batch in decisions.batches:
        for name, (_, tokens) in zip(batch.requests, batch.shape, strict=False):
            new[name] += tokens
    for decision in decisions.requests:
        name = decision.request
        if name not in turns:
            raise ConfigError(f"--decisions: request {name} is not in this workload; replay the same trace")
        for used, (side, engines) in zip((decision.pe, decision.de), sides, strict=True):
            if used not in engines:
                raise ConfigError(
                    f"--decisions: request {name} ran on {used}, which is not {side} engine in this topology"
                )
        most = decision.hit_blocks if decision.path == "split" else 0
        if not 0 <= decision.split_blocks <= most:
            raise ConfigError(
                f"--decisions: request {name} on the {decision.path} path: split_blocks {decision.split_blocks}:"
                f" expected 0 to {most}"
            )
        if decision.hit_blocks and decision.path not in READ_BY[deployment.reads]:
            raise ConfigError(
                f"--decisions: request {name} read on the {decision.path} path, and this run reads"
                f" {deployment.reads}; leave --path out, and take the --system of the run that decided"
            )
        reason = refusal(
            deployment.limits,
            prompt_tokens=turns[name].prompt_tokens,
            output_tokens=turns[name].output_tokens,
            hit_blocks=decision.hit_blocks,
            path="de" if decision.path == "split" else decision.path,
            block_tokens=deployment.layout.block_tokens,
        )
        if reason is not None:
            raise ConfigError(f"--decisions: request {name} does not fit this cluster: {reason}")
        if batched.pop(name, None) != decision.pe:
            raise ConfigError(
                f"--decisions: request {name} is in no batch of {decision.pe}; take a run that ended well"
            )
        missed = turns[name].prompt_tokens - deployment.hit_tokens(decision.hit_blocks)
        if new[name] != missed:
            raise ConfigError(
                f"--decisions: batches compute {new[name]} tokens of request {name}, {missed} are to be computed;"
                " take a run's own file"
            )
    for name, engine in batched.items():
        raise ConfigError(f"--decisions: request {name} is in a batch of {engine} and was not decided")


def _check_batches(decisions: Decisions, deployment: Deployment) -> None:
    limit = deployment.limits.pe_hbm_tokens
    for batch in decisions.batches:
        tokens = sum(cached + new for cached, new in batch.shape)
        if tokens > limit:
            raise ConfigError(
                f"--decisions: batch {batch.index} of {batch.engine} has {tokens} tokens, a PE's HBM here"
                f" {limit} (pe_hbm_kv_gb)"
            )


def _check_order(decisions: Decisions, workload: Workload) -> None:
    """Refuse an order that no run can have had: some request or batch would wait for itself.

    A request is decided after those before it, computed after it is decided and after its chunks before; a turn is
    decided after its predecessor is computed; an engine's batches, and a group's steps, come one after the other.
    """
    order: TopologicalSorter[str | int] = TopologicalSorter()
    for earlier, later in pairwise(decisions.requests):
        order.add(later.request, earlier.request)
    last_batch: dict[str, int] = {}
    last_of: dict[str, int] = {}
    for place, batch in enumerate(decisions.batches):
        before = [last_batch[batch.engine]] if batch.engine in last_batch else []
        chunks = [last_of[name] for name in batch.requests if name in last_of]
        order.add(place, *batch.requests, *before, *chunks)
        last_batch[batch.engine] = place
        last_of.update(dict.fromkeys(batch.requests, place))
    for trajectory in workload.trajectories:
        names = [
            name for turn in range(len(trajectory.turns)) if (name := request_id(trajectory, turn)) in last_of
        ]
        for earlier_name, name in pairwise(names):
            order.add(name, last_of[earlier_name])
    for engine in last_batch:
        steps = [batch.step for batch in decisions.batches if batch.engine == engine]
        if any(b <= a for a, b in pairwise(steps)):
            raise ConfigError(f"--decisions: the steps of {engine} do not go forward; take a run's own file")
    try:
        order.prepare()
    except CycleError:
        raise ConfigError("--decisions: not in the order of any run; take a run's own file") from None
