"""Laws of emulator.kvcache."""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from emulator.extent import gather, total_bytes
from emulator.kvcache import (
    ID_BYTES,
    KEY_BYTES,
    ROOT,
    BlockId,
    KeyChain,
    Layout,
    PrefixTrie,
    block_hash,
    block_keys,
    check_of,
    key_of,
)

layouts = st.builds(Layout, st.integers(1, 5), st.integers(1, 4), st.integers(1, 8))


def tokens_of(values: list[int]) -> npt.NDArray[np.uint32]:
    return np.array(values, dtype=np.uint32)


def number(i: int) -> BlockId:
    """A made-up block id."""
    return BlockId(i.to_bytes(ID_BYTES, "big"))


def same_key(parent: BlockId, tokens: bytes) -> BlockId:
    """A hash whose keys all collide and whose checks are the real ones."""
    return BlockId(bytes(KEY_BYTES) + check_of(block_hash(parent, tokens)))


@given(layouts, st.data())
def test_layer_extents_are_the_layers_bytes(layout: Layout, data: st.DataObject) -> None:
    """Gathering a layer's extents gives what the array [block, layer, token, byte] gives, in token order."""
    blocks = data.draw(st.integers(1, 6))
    base = data.draw(st.integers(0, 50))
    layer = data.draw(st.integers(0, layout.layers - 1))
    first = data.draw(st.integers(0, blocks * layout.block_tokens))
    count = data.draw(st.integers(0, blocks * layout.block_tokens - first))
    memory = np.random.default_rng(0).integers(0, 256, base + blocks * layout.full_block_bytes, dtype=np.uint8)
    shape = (blocks, layout.layers, layout.block_tokens, layout.kv_bytes)
    naive = memory[base:].reshape(shape)[:, layer].reshape(-1, layout.kv_bytes)[first : first + count]

    extents = layout.layer_extents(base, layer, first, count)

    assert len(extents) <= 3
    assert total_bytes(extents) == count * layout.kv_bytes
    assert bytes(gather(memory, extents)) == naive.tobytes()


@given(layouts, st.integers(0, 50), st.integers(0, 5), st.integers(0, 5))
def test_block_extents_are_the_blocks_bytes(layout: Layout, base: int, first: int, count: int) -> None:
    """Full Blocks laid end to end are one extent, or none for no blocks."""
    memory = np.random.default_rng(0).integers(0, 256, base + 10 * layout.full_block_bytes, dtype=np.uint8)
    extents = layout.block_extents(base, first, count)
    assert len(extents) == (1 if count else 0)
    assert bytes(gather(memory, extents)) == memory[base:].reshape(10, -1)[first : first + count].tobytes()


@given(layouts, st.integers(0, 100))
def test_blocks_of_tokens(layout: Layout, tokens: int) -> None:
    """Enough blocks and none too many; full blocks are those that the tokens fill."""
    size = layout.block_tokens
    assert layout.blocks(tokens) * size >= tokens > (layout.blocks(tokens) - 1) * size
    assert layout.full_blocks(tokens) * size <= tokens < (layout.full_blocks(tokens) + 1) * size
    assert layout.full_block_bytes == layout.layers * layout.block_tokens * layout.kv_bytes


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-1, 1, 1)])
def test_a_layout_of_nothing_is_refused(sizes: tuple[int, int, int]) -> None:
    """Every dimension is at least one."""
    with pytest.raises(ValueError, match="expected 1 or more"):
        Layout(*sizes)


@pytest.mark.parametrize("args", [(0, 2, 0, 1), (0, -1, 0, 1), (0, 0, -1, 1), (0, 0, 0, -1)])
def test_extents_outside_the_layout_are_refused(args: tuple[int, int, int, int]) -> None:
    """A layer that does not exist and negative tokens are the caller's fault, not an empty answer."""
    layout = Layout(2, 1)
    with pytest.raises(ValueError, match="expected"):
        layout.layer_extents(*args)
    with pytest.raises(ValueError, match="negative"):
        layout.block_extents(0, -1, 1)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 5), st.data())
def test_pieces_do_not_change_the_keys(values: list[int], block_tokens: int, data: st.DataObject) -> None:
    """However a prompt is cut into pieces (chunked prefill, decode steps), its keys are those of the whole."""
    whole = block_keys(tokens_of(values), block_tokens)
    chain = KeyChain(block_tokens)
    fresh: list[BlockId] = []
    at = 0
    while at < len(values):
        size = data.draw(st.integers(0, len(values) - at))
        fresh += chain.extend(tokens_of(values[at : at + size]))
        at += size
        assert chain.tokens == at
    assert fresh == list(chain.ids) == whole
    assert len(whole) == len(values) // block_tokens
    assert all(len(block) == ID_BYTES for block in whole)


@given(st.lists(st.integers(0, 3), min_size=8, max_size=8), st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_a_key_names_the_whole_prefix(a: list[int], b: list[int]) -> None:
    """Two prompts agree in block i's key, and in its check, exactly when they agree in all tokens up to it."""
    pairs = zip(block_keys(tokens_of(a), 2), block_keys(tokens_of(b), 2), strict=True)
    for i, (x, y) in enumerate(pairs, 1):
        same = a[: 2 * i] == b[: 2 * i]
        assert (key_of(x) == key_of(y)) == same
        assert (check_of(x) == check_of(y)) == same


def test_keys_are_stable_across_versions_and_machines() -> None:
    """A warm store outlives a process: the digest is a format, tokens little-endian, and must not drift."""
    first, second = block_keys(np.arange(128, dtype=np.uint32))
    assert first == block_hash(ROOT, b"".join(i.to_bytes(4, "little") for i in range(64)))
    assert second == block_hash(first, b"".join(i.to_bytes(4, "little") for i in range(64, 128)))
    assert key_of(first) + check_of(first) == first
    assert first.hex() == "6772c9b6af781e2998dadd8ccff34f9747ff129ff8c5f3e0ec1a4cfeb2cde518"


def test_tokens_of_another_type_are_refused() -> None:
    """Token ids are uint32 in one dimension; nothing is cast silently."""
    for bad in (np.zeros(64, dtype=np.int64), np.zeros((2, 64), dtype=np.uint32)):
        with pytest.raises(ValueError, match="expected uint32, one dimension"):
            block_keys(bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="block_tokens = 0"):
        KeyChain(0)


def test_prefixes_whose_keys_collide_are_told_apart() -> None:
    """With a hash whose keys are all equal, the checks still separate every prefix, in the trie too."""
    a = block_keys(tokens_of([1, 2, 3, 4]), 2, block_hash=same_key)
    b = block_keys(tokens_of([1, 2, 3, 5]), 2, block_hash=same_key)
    c = block_keys(tokens_of([9, 2, 3, 4]), 2, block_hash=same_key)
    assert len({key_of(block) for block in (*a, *b, *c)}) == 1
    trie = PrefixTrie()
    trie.insert(a)
    assert (trie.match(a), trie.match(b), trie.match(c)) == (2, 1, 0)
    assert (trie.insert(b), trie.insert(c)) == (1, 2)
    assert [trie.match(ids) for ids in (a, b, c)] == [2, 2, 2]
    assert trie.match([a[0], c[1]]) == 1


class TrieMachine(RuleBasedStateMachine):
    """The trie beside the plain set of all committed prefixes."""

    def __init__(self) -> None:
        super().__init__()
        self.trie = PrefixTrie()
        self.prefixes: set[tuple[BlockId, ...]] = set()

    def model_match(self, ids: list[BlockId]) -> int:
        length = 0
        while length < len(ids) and tuple(ids[: length + 1]) in self.prefixes:
            length += 1
        return length

    sequences = st.lists(st.integers(0, 2).map(number), max_size=12)

    @rule(ids=sequences, first=st.integers(0, 12))
    def insert(self, ids: list[BlockId], first: int) -> None:
        """What is committed is found; what lacks a predecessor raises and changes nothing."""
        matched = self.model_match(ids)
        if first > len(ids) or matched < first:
            with pytest.raises(ValueError, match="commit from block"):
                self.trie.insert(ids, first)
            return
        fresh = {tuple(ids[:n]) for n in range(1, len(ids) + 1)} - self.prefixes
        assert self.trie.insert(ids, first) == len(fresh)
        self.prefixes |= fresh

    @rule(data=st.data(), more=st.lists(st.integers(0, 2).map(number), min_size=1, max_size=3))
    def append(self, data: st.DataObject, more: list[BlockId]) -> None:
        """A later turn appends to a sequence that is there."""
        if self.prefixes:
            known = data.draw(st.sampled_from(sorted(self.prefixes)))
            self.insert([*known, *more], len(known))

    @rule(ids=sequences)
    def match(self, ids: list[BlockId]) -> None:
        assert self.trie.match(ids) == self.model_match(ids)

    @invariant()
    def compressed(self) -> None:
        """Blocks are counted once, and no node but the root has a single child: a path is one edge."""
        assert len(self.trie) == len(self.prefixes)
        stack = list(self.trie._root.children.values())
        assert not self.trie._root.edge
        while stack:
            node = stack.pop()
            assert len(node.edge) >= ID_BYTES
            assert len(node.children) != 1
            stack += node.children.values()


TrieMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTrie = TrieMachine.TestCase


def test_ids_of_the_wrong_length_are_refused() -> None:
    """A malformed id never shifts the ones behind it."""
    for call in (PrefixTrie().insert, PrefixTrie().match):
        with pytest.raises(ValueError, match="32 each"):
            call([BlockId(b"short")])


def test_a_blocks_memory_is_its_id() -> None:
    """Two sequences of 10,000 blocks that share half of them take less than 64 bytes a block."""
    trie = PrefixTrie()
    shared = [number(i) for i in range(5000)]
    for start in (10_000, 20_000):
        ids = [*shared, *(number(i) for i in range(start, start + 5000))]
        for first in range(0, len(ids), 500):
            trie.insert(ids[: first + 500], first)
    total, stack = 0, [trie._root]
    while stack:
        node = stack.pop()
        total += sum(sys.getsizeof(part) for part in (node, node.edge, node.children, *node.children))
        stack += node.children.values()
    assert len(trie) == 15_000
    assert total < 64 * len(trie)
