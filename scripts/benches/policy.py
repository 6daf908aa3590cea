"""How long a fetch takes at the paper's largest scale: 1,152 engines and 10,000 queued requests.

Lengths are spread as those of agents' turns are (lognormal), and HBM and beta let all requests be placed: a queue
that is long because they do not costs far less. All engines are one group, the worst case inside of a group, or
groups of a node's eight, the worst among groups. A time is CPU time, at the lower quartile of a few runs, because
a fetch waits for nothing and whatever else runs on the machine only adds to it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from emulator.policy import Load, Policy, PolicySetup, Queued, make_policy

from .figures import Figure, show

__all__ = ["main"]

ENGINES = 1152
REQUESTS = 10_000
NODE = 8
RUNS = 12
MOST_MS = 20.0

MEAN_TOKENS, SIGMA = 25_000, 0.7
ALPHA_TOKENS = 3_000_000
"""Of a node that reads 43 GB/s."""
BETA_TOKENS = 1_000_000
"""More than it would be, so that a PE fetch places all requests too."""
HBM_TOKENS = 1_200_000
"""Of a DE that has 50 GB for KV of 43 KB a token."""


def main(argv: Sequence[str]) -> int:
    """Measure, print, and return 1 when a bound is missed."""
    parser = argparse.ArgumentParser(prog="scripts/bench policy", description="A fetch at the largest scale.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    figures: list[Figure] = []
    for group in (ENGINES, NODE):
        what = f"groups of {group}"
        setup = PolicySetup(_names("pe", group), _names("de", group), ALPHA_TOKENS, BETA_TOKENS)
        policy, queue = make_policy("dualpath", setup), _queue(Random(1))
        fetches = {
            "PE": partial(_pe_fetch, policy, queue, _loads(setup.pe_engines, Random(2))),
            "DE": partial(_de_fetch, policy, queue, _loads(setup.de_engines, Random(3))),
        }
        for side, fetch in fetches.items():
            figures += [
                Figure(f"{side} fetch, {what}", _time_ms(fetch), "ms", high=MOST_MS),
                Figure(f"requests placed by a {side} fetch, {what}", fetch(), ""),
            ]
    return show(figures, as_json=options.json)


def _names(role: str, group: int) -> tuple[str, ...]:
    return tuple(f"{role}{at // group}/{at % group}" for at in range(ENGINES))


def _queue(random: Random) -> list[Queued]:
    prompts = [int(random.lognormvariate(0, SIGMA) * MEAN_TOKENS) + 1 for _ in range(REQUESTS)]
    return [Queued(f"r{at}", at, prompt, random.randrange(1, 400), prompt) for at, prompt in enumerate(prompts)]


def _loads(engines: Sequence[str], random: Random) -> dict[str, list[Load]]:
    """Every group's engines, with a few requests each."""
    groups: dict[str, list[Load]] = {}
    for engine in engines:
        node, requests = engine.partition("/")[0], random.randrange(4)
        tokens = sum(random.randrange(1, 2 * MEAN_TOKENS) for _ in range(requests))
        load = Load(engine, node, requests, tokens, random.randrange(2 * ALPHA_TOKENS), HBM_TOKENS - tokens)
        groups.setdefault(node, []).append(load)
    return groups


def _pe_fetch(policy: Policy, queue: Sequence[Queued], groups: dict[str, list[Load]]) -> int:
    """The first group's fetch; how many requests it placed."""
    return len(policy.assign_prefill(queue, next(iter(groups.values()))))


def _de_fetch(policy: Policy, queue: Sequence[Queued], groups: dict[str, list[Load]]) -> int:
    """The first group's fetch, both phases; how many requests it placed."""
    first = next(iter(groups))
    tokens = {group: sum(load.tokens for load in loads) for group, loads in groups.items()}
    routed = policy.route_decode(queue, tokens)
    own = [request for request, group in zip(queue, routed, strict=True) if group == first]
    return len(policy.assign_decode(own, groups[first]))


def _time_ms(fetch: Callable[[], int]) -> float:
    times_ms = []
    for _ in range(RUNS):
        began_ns = time.process_time_ns()
        fetch()
        times_ms.append((time.process_time_ns() - began_ns) / 1e6)
    return statistics.quantiles(times_ms, n=4)[0]
