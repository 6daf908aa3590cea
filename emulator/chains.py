"""From rows of a trace, which have lengths and block ids, to the exact tokens of a trajectory.

Pure. Rows of one session that continue each other (the full blocks of a row are the first of the next row's)
form a *chain*, and a chain is one stream: a prompt then contains, position by position, what its predecessors
were given and generated, also where a row's last block is partial and its answer has no ids. A row that
continues nothing starts a new chain, whose ids still share the blocks they have in common with earlier ones.

Equal ids give equal tokens, within a scope ('' is global). In dialects with sessions, ids after the first
prompt of a chain count only where another chain has them as well (a fork or a rewind): elsewhere they say
nothing that the position in the session does not say, and the incremental dialect, which has no ids for
generated text, could not give the same tokens as the cumulative one.

Must not import readers, fabrics, roles or the topology.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

from .errors import ConfigError
from .workload import Stream, Trajectory, Turn, block_seeds, seed_of

__all__ = ["Chain", "Row", "chains_of", "check_ids", "shared_ids", "trajectory_of"]


class Row(NamedTuple):
    """One request as a trace gives it: whole prompt and answer in tokens, ids of the prompt's leading blocks,
    times in seconds, and where it stands (file and line) for error messages."""

    prompt: int
    output: int
    ids: Sequence[int]
    think_s: float
    arrival_s: float | None
    where: str

    def full_ids(self, block: int) -> Sequence[int]:
        """Ids of the prompt's full blocks, without the partial last one's."""
        return self.ids[: self.prompt // block]


class Chain(NamedTuple):
    """Rows that continue each other; ``block`` tokens per id."""

    rows: list[Row]
    block: int

    def full_ids(self) -> Sequence[int]:
        """Ids of the full blocks of the chain's longest prompt."""
        return max((row.full_ids(self.block) for row in self.rows), key=len)


def check_ids(where: str, ids: Sequence[int], tokens: int, block: int) -> None:
    """A prompt of ``tokens`` has an id per block of ``block``; its partial last block may have none.

    Raises ConfigError for another count, and for an id that is not 0 to 2**64 - 1.
    """
    full, partial = divmod(tokens, block)
    if len(ids) not in {full, full + bool(partial)}:
        expected = f"{full} or {full + 1}" if partial else f"{full}"
        raise ConfigError(
            f"{where}: {len(ids)} hash_ids for {tokens} tokens: expected {expected} blocks of {block}"
        )
    for value in ids:
        if not 0 <= value < 2**64:
            raise ConfigError(f"{where}: hash id {value}: expected 0 to 2**64 - 1")


def chains_of(rows: Sequence[Row], block: int) -> list[Chain]:
    """Cut a session's rows into chains.

    A row without full blocks to compare is continued by any row whose prompt is not shorter.
    """
    chains: list[Chain] = []
    for row in rows:
        if chains and _continues(chains[-1].rows[-1], row, block):
            chains[-1].rows.append(row)
        else:
            chains.append(Chain([row], block))
    return chains


def shared_ids(chains: Iterable[Chain]) -> set[int]:
    """The ids that more than one chain has."""
    seen: set[int] = set()
    shared: set[int] = set()
    for chain in chains:
        ids = {*chain.full_ids(), *chain.rows[0].ids}
        shared |= ids & seen
        seen |= ids
    return shared


def trajectory_of(
    name: str, chains: Sequence[Chain], scope: str, own: str, shared: Set[int] | None = None
) -> Trajectory:
    """A session's chains as a trajectory, a stream each.

    ``scope``: of the ids. ``own``: seeds, with the name, the tokens that no id names. ``shared``: which ids
    count beyond a chain's first prompt; None: all. Raises ConfigError, naming the row, for impossible lengths
    and waits.
    """
    turns: list[Turn] = []
    for index, chain in enumerate(chains):
        for row in chain.rows:
            try:
                turns.append(Turn(row.prompt, row.output, row.think_s, row.arrival_s, index))
            except ValueError as error:
                raise ConfigError(f"{row.where}: {error}") from None
    streams = tuple(_stream(chain, scope, (own, name, index), shared) for index, chain in enumerate(chains))
    try:
        return Trajectory(name, tuple(turns), streams)
    except ValueError as error:
        raise ConfigError(f"{chains[0].rows[0].where}: {error}") from None


def _continues(before: Row, row: Row, block: int) -> bool:
    known = before.full_ids(block)
    if not known:
        return row.prompt >= before.prompt
    return list(row.full_ids(block)[: len(known)]) == list(known)


def _stream(chain: Chain, scope: str, own: tuple[str | int, ...], shared: Set[int] | None) -> Stream:
    """Spans of the chain: one per block that an id names, and one per run of tokens between those."""
    first, block = chain.rows[0], chain.block
    ids = chain.full_ids()
    in_first = first.prompt // block
    named = [
        (index * block, block, index)
        for index, value in enumerate(ids)
        if index < in_first or shared is None or value in shared
    ]
    seeds = block_seeds(scope, [*ids, *first.ids[in_first:]])
    if len(first.ids) > in_first and (in_first * block, block, in_first) not in named:
        # The id of the first prompt's partial block holds for its tokens; what follows them has no id.
        named.append((in_first * block, first.prompt - in_first * block, len(ids)))
        named.sort()
    lengths: list[int] = []
    span_seeds: list[int] = []
    end = 0
    total = max(row.prompt + row.output for row in chain.rows)
    for start, length, which in [*named, (total, 0, None)]:
        if start > end:
            lengths.append(start - end)
            span_seeds.append(seed_of(*own, end))
        if which is not None:
            lengths.append(length)
            span_seeds.append(seeds[which])
        end = start + length
    return Stream(tuple(lengths), tuple(span_seeds))
