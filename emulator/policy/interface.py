"""What a policy is asked, with what it is told, and what it answers: the seam that a user's own policy plugs into.

Pure. Loads are counted in tokens. A policy sees frozen values and answers with names; it changes nothing itself:
whoever asks books each answer, so that the next question carries it. Between the requests of *one* question the
policy adds them up itself: a prompt on the PE that gets it, prompt and output on the DE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec

__all__ = ["Load", "Policy", "PolicySetup", "Queued", "Side", "group_of"]

Side = Literal["pe", "de"]
"""Which of its two nodes reads a request's hit from storage."""


class Queued(msgspec.Struct, frozen=True):
    """A request that waits for an engine. ``sequence`` is its place in the order of all arrivals, from 0."""

    request: str
    sequence: int
    prompt_tokens: int
    output_tokens: int
    hit_tokens: int

    @property
    def tokens(self) -> int:
        """The length of the request on a DE, which keeps its prompt and its output: len(r) of the paper."""
        return self.prompt_tokens + self.output_tokens


class Load(msgspec.Struct, frozen=True):
    """What an engine has to do, as its leader reported at this fetch.

    ``requests`` are its unfinished ones (seq_e), ``tokens`` those requests' total (tok_e), ``read_queue`` the
    tokens that its *node* has yet to read from storage (read_q). ``free_tokens`` is a DE's HBM, in tokens of KV,
    that is neither taken nor promised; 0 for a PE, whose HBM is no matter of assignment.
    """

    engine: str
    node: str
    requests: int
    tokens: int
    read_queue: int
    free_tokens: int


class PolicySetup(msgspec.Struct, frozen=True):
    """What a policy is made with: the engines of a cluster, in order, and its profiled constants.

    ``alpha_tokens``: what a node reads in 3 s. ``beta_tokens``: what one GPU prefills in 5 s. ``z``: by how much
    a DE may pass its group's mean. ``seed``: of whatever the policy draws.
    """

    pe_engines: tuple[str, ...]
    de_engines: tuple[str, ...]
    alpha_tokens: int
    beta_tokens: int
    z: float = 1.05
    seed: int = 0


class Policy(Protocol):
    """Decides which engines serve a request and on which side its hit is read.

    Queues are first in, first out. An answer is about the *leading* requests of a queue: it may be shorter, and
    then the rest waits for the next question, but it skips nobody.
    """

    def assign_prefill(self, queue: Sequence[Queued], engines: Sequence[Load]) -> Sequence[str]:
        """The PEs of the leading requests; ``engines`` are those of the group that fetches."""

    def route_decode(self, queue: Sequence[Queued], groups: Mapping[str, int]) -> Sequence[str]:
        """A DE group for every request; ``groups`` maps each to the sum of its engines' tok_e."""

    def assign_decode(self, queue: Sequence[Queued], engines: Sequence[Load]) -> Sequence[str]:
        """The DEs of the leading requests of one group's own queue; ``engines`` are all of that group."""

    def choose_path(self, request: Queued, pe_read_queue: int, de_read_queue: int) -> Side:
        """Where the hit is read, given how many tokens wait to be read at its PE's and at its DE's node."""


def group_of(engine: str) -> str:
    """The group of an engine, which is its node: "de0" of "de0/3"."""
    return engine.partition("/")[0]
