"""What the agents will ask for: trajectories, their exact tokens, and when they arrive.

Pure: values in, values out; no files, no clock, and randomness only from a seed given by the caller.

A trajectory is one agent's requests in order. Its text is kept as *streams*: a stream is an endless-looking
but finite run of tokens described by a few (length, seed) spans, and every turn is a cut through one stream,
``prompt = stream[:p]`` and ``output = stream[p:p + g]``. Invariants that follow from this:

- a later turn on the same stream finds in its prompt exactly what an earlier one was given and generated;
- spans with equal seeds (one block id met in several places) hold equal tokens, so prefixes shared between
  trajectories are shared token by token;
- a context of any length costs a few vectorised operations and no storage.

Must not import fabrics, roles, the topology or anything that does I/O.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from .errors import ConfigError

__all__ = [
    "MAX_CONTEXT",
    "MAX_REQUESTS",
    "MAX_WAIT_S",
    "VOCABULARY",
    "CacheHits",
    "Stream",
    "Trajectory",
    "Turn",
    "Workload",
    "WorkloadStats",
    "block_seeds",
    "closed_loop",
    "cut",
    "decode",
    "encode",
    "infinite_cache",
    "open_loop",
    "request_id",
    "seed_of",
    "workload_stats",
]

VOCABULARY = 129_280
"""Token ids are below this: the vocabulary of DeepSeek-V3."""

MAX_CONTEXT = 2**24
"""No context may pass this: longer ones are a mistake in a trace, and would fill memory."""

MAX_WAIT_S = 1e6
"""No trajectory waits longer than this, by its arrivals and think times: a longer wait is a mistake in a trace."""

MAX_REQUESTS = 10_000_000
"""No run makes more requests: twice those of the paper's largest, 48 K agents of 106 turns on 1,152 GPUs.

To describe one takes 240 bytes (measured), so that what is refused would take 2.4 GB before the run begins.
"""

_MAX_STREAM = 2**40

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)


class Stream(msgspec.Struct, frozen=True):
    """Tokens as spans: token j of span k is a fixed function of ``seeds[k]`` (64 bits) and j."""

    lengths: tuple[int, ...]
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.seeds):
            raise ValueError(f"a stream of {len(self.lengths)} lengths and {len(self.seeds)} seeds")
        if self.lengths and min(self.lengths) < 1:
            raise ValueError("a stream's spans hold at least one token each")
        if any(not 0 <= seed < 2**64 for seed in self.seeds):
            raise ValueError("a stream's seeds are 0 to 2**64 - 1")
        if sum(self.lengths) > _MAX_STREAM:
            raise ValueError(f"a stream of {sum(self.lengths)} tokens: expected at most {_MAX_STREAM}")

    def __len__(self) -> int:
        return sum(self.lengths)

    def tokens(self, start: int, stop: int) -> NDArray[np.uint32]:
        """Tokens [start, stop), ``uint32 (stop - start,)``, each below VOCABULARY."""
        if not 0 <= start <= stop:
            raise IndexError(f"tokens {start} to {stop}: no such range")
        if start == stop:
            return np.empty(0, np.uint32)
        ends = np.cumsum(np.asarray(self.lengths, np.int64))
        if not len(ends) or stop > ends[-1]:
            raise IndexError(f"tokens {start} to {stop} of a stream of {len(self)}")
        first = int(np.searchsorted(ends, start, "right"))
        last = int(np.searchsorted(ends, stop - 1, "right")) + 1
        here = ends[first:last]
        begins = np.concatenate(([ends[first - 1] if first else 0], here[:-1]))
        counts = np.minimum(here, stop) - np.maximum(begins, start)
        offsets = np.arange(start, stop, dtype=np.int64) - np.repeat(begins, counts)
        seeds = np.repeat(np.asarray(self.seeds[first:last], np.uint64), counts)
        mixed = _mix(seeds + (offsets.view(np.uint64) + np.uint64(1)) * _STEP)
        # A multiply and a shift maps 32 random bits onto the vocabulary without a division.
        high = (mixed >> np.uint64(32)) * np.uint64(VOCABULARY)
        return (high >> np.uint64(32)).astype(np.uint32)


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request. ``prompt_tokens`` is the whole prompt, ``output_tokens`` the forced length of the answer.

    The turn arrives ``think_s`` after its predecessor's last token, and not before ``arrival_s`` (model
    seconds from the start of the replay) where that is set; a trajectory's first turn needs ``arrival_s``.
    ``stream``: which of its trajectory's streams it is a cut of.
    """

    prompt_tokens: int
    output_tokens: int
    think_s: float = 0.0
    arrival_s: float | None = None
    stream: int = 0

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1:
            raise ValueError(f"prompt_tokens = {self.prompt_tokens}: expected 1 or more")
        if self.output_tokens < 0:
            raise ValueError(f"output_tokens = {self.output_tokens}: expected 0 or more")
        if self.total_tokens > MAX_CONTEXT:
            raise ValueError(f"a context of {self.total_tokens} tokens: expected at most {MAX_CONTEXT}")
        for name, seconds in (("think_s", self.think_s), ("arrival_s", self.arrival_s)):
            if seconds is not None and not 0 <= seconds <= MAX_WAIT_S:
                raise ValueError(f"{name} = {seconds}: expected 0 to {MAX_WAIT_S:.0f} seconds")

    @property
    def total_tokens(self) -> int:
        """Prompt and output together: the context that the turn leaves behind."""
        return self.prompt_tokens + self.output_tokens


class Trajectory(msgspec.Struct, frozen=True):
    """One agent's turns in order, and the streams they are cut from."""

    id: str
    turns: tuple[Turn, ...]
    streams: tuple[Stream, ...]

    def __post_init__(self) -> None:
        if not self.turns:
            raise ValueError(f"trajectory {self.id}: no turns")
        lengths = [len(stream) for stream in self.streams]
        for index, turn in enumerate(self.turns):
            if not 0 <= turn.stream < len(lengths):
                raise ValueError(
                    f"trajectory {self.id}: turn {index} names stream {turn.stream} of {len(lengths)}"
                )
            if turn.total_tokens > lengths[turn.stream]:
                raise ValueError(
                    f"trajectory {self.id}: turn {index} needs {turn.total_tokens} tokens,"
                    f" its stream has {lengths[turn.stream]}"
                )
        wait_s = math.fsum(turn.think_s for turn in self.turns) + max(turn.arrival_s or 0.0 for turn in self.turns)
        if wait_s > MAX_WAIT_S:
            raise ValueError(
                f"trajectory {self.id}: {wait_s} s of arrivals and think times: expected at most {MAX_WAIT_S:.0f}"
            )

    def prompt(self, turn: int) -> NDArray[np.uint32]:
        """The whole prompt of a turn, ``uint32 (prompt_tokens,)``."""
        it = self.turns[turn]
        return self.streams[it.stream].tokens(0, it.prompt_tokens)

    def output(self, turn: int) -> NDArray[np.uint32]:
        """The forced output of a turn, ``uint32 (output_tokens,)``."""
        it = self.turns[turn]
        return self.streams[it.stream].tokens(it.prompt_tokens, it.total_tokens)

    def context(self, turn: int) -> NDArray[np.uint32]:
        """Prompt and output of a turn, ``uint32 (total_tokens,)``."""
        it = self.turns[turn]
        return self.streams[it.stream].tokens(0, it.total_tokens)

    def append_tokens(self, turn: int) -> int:
        """Tokens that the turn adds to its predecessor's context; its whole prompt where it continues none."""
        it = self.turns[turn]
        if turn == 0 or self.turns[turn - 1].stream != it.stream:
            return it.prompt_tokens
        return max(0, it.prompt_tokens - self.turns[turn - 1].total_tokens)


def request_id(trajectory: Trajectory, turn: int) -> str:
    """The name of a turn as a request: "trajectory:turn"."""
    return f"{trajectory.id}:{turn}"


class Workload(msgspec.Struct, frozen=True):
    """Trajectories with distinct ids; ``name`` says where they come from."""

    trajectories: tuple[Trajectory, ...]
    name: str = ""

    def __post_init__(self) -> None:
        if len({trajectory.id for trajectory in self.trajectories}) != len(self.trajectories):
            raise ValueError(f"workload {self.name}: two trajectories have one id")

    @property
    def requests(self) -> int:
        """Turns of all trajectories together."""
        return sum(len(trajectory.turns) for trajectory in self.trajectories)


def seed_of(*parts: str | int) -> int:
    """A 64-bit seed that is the same for the same parts on every machine and run."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def block_seeds(scope: str, ids: Sequence[int]) -> tuple[int, ...]:
    """The seeds of trace blocks: equal for equal (scope, id). Ids are 0 to 2**64 - 1; '' is the global scope."""
    if not ids:
        return ()
    mixed = _mix(_mix(np.asarray(ids, np.uint64) * _STEP) + np.uint64(seed_of("block", scope)))
    return tuple(mixed.tolist())


def cut(workload: Workload, max_len: int) -> tuple[Workload, int]:
    """Cut every trajectory before its first turn whose prompt and output pass ``max_len`` tokens.

    A trajectory whose first turn passes it is left out. Returns the workload and how many were left out.
    """
    if max_len < 1:
        raise ConfigError(f"max_len {max_len}: expected 1 token or more")
    kept = [short for trajectory in workload.trajectories if (short := _cut(trajectory, max_len))]
    left_out = len(workload.trajectories) - len(kept)
    return msgspec.structs.replace(workload, trajectories=tuple(kept)), left_out


def closed_loop(workload: Workload, agents: int, seed: int = 0, max_len: int | None = None) -> Workload:
    """``agents`` trajectories that all start at 0 and go on as fast as they are answered.

    The first ``agents`` of the workload; beyond its end they repeat in order, each repeat behind a random
    first round of its own (as in the paper's section on workloads), so that it shares no block with the
    original. The round's lengths are those of a later round of the same trajectory, drawn with ``seed`` (of a
    single block and one token where there is none); ``max_len`` cuts the lengthened repeats again.
    Raises ConfigError for fewer than one agent, for an empty workload, for a repeat beyond MAX_CONTEXT and, before
    any is made, for more than MAX_REQUESTS.
    """
    if agents < 1:
        raise ConfigError(f"agents {agents}: expected 1 or more")
    originals = _some(workload)
    requests = _looped_requests(originals, agents)
    if requests > MAX_REQUESTS:
        mean = requests / agents
        raise ConfigError(
            f"agents {agents}: {requests} requests, {mean:.1f} of an agent: expected at most {MAX_REQUESTS} in a"
            f" run, about {int(MAX_REQUESTS / mean)} agents"
        )
    chosen = list(originals[:agents])
    taken = {trajectory.id for trajectory in originals}
    rng = np.random.default_rng([seed, 0xC10])
    for index in range(len(originals), agents):
        original, copy = originals[index % len(originals)], index // len(originals)
        name = f"{original.id}~{copy}"
        while name in taken:
            name += "~"
        taken.add(name)
        try:
            repeat = _repeated(original, name, seed_of("repeat", original.id, copy, seed), rng)
        except ValueError as error:
            raise ConfigError(
                f"agents {agents}: trajectory {name}, a repeat behind a first round: {error}"
            ) from None
        cut_repeat = repeat if max_len is None else _cut(repeat, max_len)
        if cut_repeat is None:
            needs = repeat.turns[0].total_tokens
            raise ConfigError(f"max_len {max_len}: trajectory {repeat.id} starts with {needs} tokens")
        chosen.append(cut_repeat)
    return _starting(workload, chosen, [0.0] * agents)


def open_loop(workload: Workload, aps: float, seed: int = 0) -> Workload:
    """All trajectories, started as a Poisson process of ``aps`` agents per second from 0 on.

    Raises ConfigError for a rate that is not positive and finite, for one so low that an agent would start
    after MAX_WAIT_S, and for an empty workload.
    """
    if not (math.isfinite(aps) and aps > 0):
        raise ConfigError(f"aps {aps}: expected a positive, finite number of agents per second")
    trajectories = _some(workload)
    # In units of the mean gap: its reciprocal may overflow.
    starts = np.cumsum(np.random.default_rng([seed, 0x09E]).exponential(1.0, len(trajectories))).tolist()
    if starts[-1] > aps * MAX_WAIT_S:
        raise ConfigError(
            f"aps {aps}: the last of {len(starts)} agents would start after more than {MAX_WAIT_S:.0f} s:"
            " expected a higher rate"
        )
    return _starting(workload, trajectories, [start / aps for start in starts])


def encode(workload: Workload) -> bytes:
    """The workload as MessagePack, for another process."""
    return msgspec.msgpack.encode(workload)


def decode(data: bytes) -> Workload:
    """The workload that ``encode`` wrote. Raises ConfigError for anything else."""
    try:
        return msgspec.msgpack.decode(data, type=Workload)
    except msgspec.DecodeError as error:
        raise ConfigError(f"not an encoded workload: {error}") from None


class CacheHits(msgspec.Struct, frozen=True):
    """What an infinite cache gives: hit tokens by trajectory and turn, and how many tokens it ends up with."""

    hit_tokens: tuple[tuple[int, ...], ...]
    distinct_tokens: int


def infinite_cache(workload: Workload, block_tokens: int = 64, warm: bool = False) -> CacheHits:
    """Replay the workload against a cache that never evicts and is filled the moment a request is over.

    A hit is a leading run of full blocks that an earlier request had in its prompt or generated, and a
    prompt's last token is never one. Requests are taken turn by turn over all trajectories, those of a turn
    in the order of arrival where it is known. ``warm``: the first prompts' blocks are there from the start.
    """
    known: set[int] = set()
    marks: dict[tuple[int, int], list[int]] = {}
    hits: list[list[int]] = [[] for _ in workload.trajectories]
    for index, trajectory in enumerate(workload.trajectories):
        for stream in {turn.stream for turn in trajectory.turns}:
            marks[index, stream] = _prefix_marks(_longest_cut(trajectory, stream), block_tokens)
        if warm:
            first = trajectory.turns[0]
            known.update(marks[index, first.stream][: first.prompt_tokens // block_tokens])
    for index, turn in _in_order(workload.trajectories):
        blocks = marks[index, turn.stream][: turn.total_tokens // block_tokens]
        old = _known_prefix(blocks, known)
        hits[index].append(min(old, (turn.prompt_tokens - 1) // block_tokens) * block_tokens)
        known.update(blocks[old:])
    return CacheHits(tuple(map(tuple, hits)), len(known) * block_tokens)


class WorkloadStats(msgspec.Struct, frozen=True, kw_only=True):
    """A workload in the terms of the paper's table of trajectories; all lengths are tokens.

    ``append`` and ``gen`` are means over trajectories of each trajectory's mean, a first prompt being an append
    too, and ``context`` the mean prompt over all requests (the reading under which the five published means
    agree with each other); ``total`` is the mean last context, output included. ``hit_ratio``: the part of all
    prompt tokens that an ``infinite_cache`` holds; ``prompt_tokens``, ``hit_tokens``, ``output_tokens`` and
    ``distinct_tokens`` (what that cache holds at the end: the working set without eviction) are sums.
    """

    trajectories: int
    requests: int
    turns: float
    append: float
    gen: float
    total: float
    context: float
    prompt_tokens: int
    hit_tokens: int
    output_tokens: int
    distinct_tokens: int
    hit_ratio: float
    max_total: int


def workload_stats(workload: Workload, block_tokens: int = 64) -> WorkloadStats:
    """Compute the table's means and replay the workload against an infinite cache of ``block_tokens`` blocks.

    Raises ConfigError for an empty workload.
    """
    trajectories = _some(workload)
    appends = [[t.append_tokens(i) for i in range(len(t.turns))] for t in trajectories]
    prompt_tokens = sum(turn.prompt_tokens for t in trajectories for turn in t.turns)
    cache = infinite_cache(workload, block_tokens)
    hit_tokens = sum(map(sum, cache.hit_tokens))
    return WorkloadStats(
        trajectories=len(trajectories),
        requests=workload.requests,
        turns=_mean([len(t.turns) for t in trajectories]),
        append=_mean([_mean(each) for each in appends]),
        gen=_mean([_mean([turn.output_tokens for turn in t.turns]) for t in trajectories]),
        total=_mean([t.turns[-1].total_tokens for t in trajectories]),
        context=prompt_tokens / workload.requests,
        prompt_tokens=prompt_tokens,
        hit_tokens=hit_tokens,
        output_tokens=sum(turn.output_tokens for t in trajectories for turn in t.turns),
        distinct_tokens=cache.distinct_tokens,
        hit_ratio=hit_tokens / prompt_tokens,
        max_total=max(turn.total_tokens for t in trajectories for turn in t.turns),
    )


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): every input bit moves every output bit."""
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLY_1
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLY_2
    return values ^ (values >> np.uint64(31))


def _cut(trajectory: Trajectory, max_len: int) -> Trajectory | None:
    for index, turn in enumerate(trajectory.turns):
        if turn.total_tokens > max_len:
            return msgspec.structs.replace(trajectory, turns=trajectory.turns[:index]) if index else None
    return trajectory


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _some(workload: Workload) -> tuple[Trajectory, ...]:
    if not workload.trajectories:
        raise ConfigError(f"workload {workload.name or '(unnamed)'}: no trajectories left to replay")
    return workload.trajectories


def _starting(workload: Workload, trajectories: Sequence[Trajectory], starts: Sequence[float]) -> Workload:
    """First turns arrive at ``starts``; later ones follow their predecessors alone."""
    timed = []
    for trajectory, start_s in zip(trajectories, starts, strict=True):
        turns = tuple(
            msgspec.structs.replace(turn, arrival_s=None if index else start_s)
            for index, turn in enumerate(trajectory.turns)
        )
        try:
            timed.append(msgspec.structs.replace(trajectory, turns=turns))
        except ValueError as error:
            raise ConfigError(str(error)) from None
    return msgspec.structs.replace(workload, trajectories=tuple(timed))


def _looped_requests(originals: Sequence[Trajectory], agents: int) -> int:
    """Requests of that many agents, with the first round of each repeat."""
    rounds, rest = divmod(agents, len(originals))
    turns = [len(trajectory.turns) for trajectory in originals]
    return rounds * sum(turns) + sum(turns[:rest]) + max(0, agents - len(originals))


def _repeated(original: Trajectory, name: str, prefix_seed: int, rng: np.random.Generator) -> Trajectory:
    """The trajectory behind a random first round; every later prompt grows by that round's tokens."""
    first = Turn(64, 1, stream=original.turns[0].stream)
    if len(original.turns) > 1:
        like = int(rng.integers(1, len(original.turns)))
        length = max(1, original.append_tokens(like))
        first = msgspec.structs.replace(
            first, prompt_tokens=length, output_tokens=original.turns[like].output_tokens
        )
    return Trajectory(
        id=name,
        turns=(
            first,
            *(
                msgspec.structs.replace(turn, prompt_tokens=turn.prompt_tokens + first.total_tokens)
                for turn in original.turns
            ),
        ),
        streams=tuple(
            Stream((first.total_tokens, *stream.lengths), (prefix_seed, *stream.seeds))
            for stream in original.streams
        ),
    )


def _in_order(trajectories: Sequence[Trajectory]) -> Iterator[tuple[int, Turn]]:
    """(index of the trajectory, turn) by round; within a round by the first turns' arrivals, then as listed."""
    rounds = max((len(trajectory.turns) for trajectory in trajectories), default=0)
    by_arrival = sorted(range(len(trajectories)), key=lambda index: trajectories[index].turns[0].arrival_s or 0.0)
    for turn in range(rounds):
        for index in by_arrival:
            if turn < len(trajectories[index].turns):
                yield index, trajectories[index].turns[turn]


def _longest_cut(trajectory: Trajectory, stream: int) -> NDArray[np.uint32]:
    """The longest context that a turn cuts from the stream; the others are prefixes of it."""
    longest = max(turn.total_tokens for turn in trajectory.turns if turn.stream == stream)
    return trajectory.streams[stream].tokens(0, longest)


def _prefix_marks(tokens: NDArray[np.uint32], block_tokens: int) -> list[int]:
    """One 64-bit mark per full block that stands for the block and all before it."""
    blocks = tokens[: len(tokens) // block_tokens * block_tokens].reshape(-1, block_tokens).astype(np.uint64)
    within = _mix(np.arange(1, block_tokens + 1, dtype=np.uint64) * _STEP)
    digests = _mix((blocks * within).sum(axis=1, dtype=np.uint64))
    places = np.arange(1, len(digests) + 1, dtype=np.uint64) * _STEP
    return [int(mark) for mark in np.cumsum(_mix(digests + places), dtype=np.uint64).tolist()]


def _known_prefix(marks: Sequence[int], known: set[int]) -> int:
    """How many leading marks are known: a known block's predecessors are known, so bisect."""
    low, high = 0, len(marks)
    while low < high:
        middle = (low + high) // 2
        if marks[middle] in known:
            low = middle + 1
        else:
            high = middle
    return low
