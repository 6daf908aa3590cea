"""KV blocks: where their bytes lie, what they are called, and which prefixes are committed.

Pure. Three concepts that share one word, the *block* (64 tokens):

- ``Layout``: a Full Block is the array [layer, token, byte]; one layer of it is a Layer Block. Full Blocks lie
  end to end in a buffer, so the Layer Blocks of one layer are one strided ``Extent``.
- ``BlockId``: names a block *and the whole prefix before it*, because the digest chains over the parent's id.
  Its halves are the ``key``, which is what people and logs see of it, and the ``check``. Tries and stores
  compare both, so that two prefixes whose keys collide are told apart. Tokens that do not fill a block have no id.
- ``PrefixTrie``: which prefixes are committed, path-compressed: about 32 bytes a block, not one node a block.

Must not import fabrics, stores or roles.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NewType

import msgspec
import numpy as np
import numpy.typing as npt

from .extent import Extent

__all__ = [
    "BLOCK_TOKENS",
    "ID_BYTES",
    "KEY_BYTES",
    "ROOT",
    "BlockHash",
    "BlockId",
    "KeyChain",
    "Layout",
    "PrefixTrie",
    "block_hash",
    "block_keys",
    "check_of",
    "key_of",
]

BLOCK_TOKENS = 64
KEY_BYTES = 16
ID_BYTES = 32

BlockId = NewType("BlockId", bytes)
"""32 bytes: the key (16) and the check (16) of a block. Equal ids mean equal prefixes, block included."""

BlockHash = Callable[[BlockId, bytes], BlockId]
"""(parent's id, the block's tokens as little-endian uint32) -> the block's id. Pure."""

ROOT = BlockId(bytes(ID_BYTES))
"""The parent of a first block."""

Tokens = npt.NDArray[np.uint32]

_PERSON = b"dualpath-kv"
_TOKEN_BYTES = 4


class Layout(msgspec.Struct, frozen=True):
    """The byte arithmetic of Full Blocks of ``layers`` x ``block_tokens`` x ``kv_bytes`` payload bytes."""

    layers: int
    kv_bytes: int
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        for name in ("layers", "kv_bytes", "block_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"layout {name} = {getattr(self, name)}: expected 1 or more")

    @property
    def layer_block_bytes(self) -> int:
        return self.block_tokens * self.kv_bytes

    @property
    def full_block_bytes(self) -> int:
        return self.layers * self.layer_block_bytes

    def blocks(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens, the last one perhaps partly filled."""
        return -(-tokens // self.block_tokens)

    def full_blocks(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens fill."""
        return tokens // self.block_tokens

    def block_extents(self, base: int, first_block: int, blocks: int) -> tuple[Extent, ...]:
        """All bytes of Full Blocks first_block .. first_block + blocks - 1 of those laid end to end from ``base``.

        One extent, or none for no blocks.
        """
        if first_block < 0 or blocks < 0:
            raise ValueError(f"blocks {first_block}+{blocks}: expected no negative number")
        if not blocks:
            return ()
        return (Extent(base + first_block * self.full_block_bytes, blocks * self.full_block_bytes),)

    def layer_extents(self, base: int, layer: int, first_token: int, tokens: int) -> tuple[Extent, ...]:
        """The bytes of ``layer`` for tokens first_token .. first_token + tokens - 1, in token order.

        Inside Full Blocks laid end to end from byte ``base``. At most three extents: the rest of a first block,
        the whole blocks (one strided extent), the beginning of a last block; none for no tokens.
        """
        if not 0 <= layer < self.layers:
            raise ValueError(f"layer {layer}: expected 0 to {self.layers - 1}")
        if first_token < 0 or tokens < 0:
            raise ValueError(f"tokens {first_token}+{tokens}: expected no negative number")
        if not tokens:
            return ()
        block, head = divmod(first_token, self.block_tokens)
        end_block, tail = divmod(first_token + tokens, self.block_tokens)
        if block == end_block:
            return (self._run(base, layer, block, head, tail),)
        extents = []
        if head:
            extents.append(self._run(base, layer, block, head, self.block_tokens))
            block += 1
        if end_block - block == 1:
            extents.append(self._run(base, layer, block, 0, self.block_tokens))
        elif end_block > block:
            start = base + block * self.full_block_bytes + layer * self.layer_block_bytes
            extents.append(Extent(start, self.layer_block_bytes, end_block - block, self.full_block_bytes))
        if tail:
            extents.append(self._run(base, layer, end_block, 0, tail))
        return tuple(extents)

    def _run(self, base: int, layer: int, block: int, begin: int, end: int) -> Extent:
        start = base + block * self.full_block_bytes + layer * self.layer_block_bytes
        return Extent(start + begin * self.kv_bytes, (end - begin) * self.kv_bytes)


def key_of(block: BlockId) -> bytes:
    """The 16 bytes that name the block in messages."""
    return block[:KEY_BYTES]


def check_of(block: BlockId) -> bytes:
    """The 16 bytes that tell two blocks of equal keys apart."""
    return block[KEY_BYTES:]


def block_hash(parent: BlockId, tokens: bytes) -> BlockId:
    """One 256-bit BLAKE2b over the parent's id and the block's tokens.

    The halves of one digest are as independent as two digests, at half the price (about 1 us a block).
    """
    return BlockId(hashlib.blake2b(parent + tokens, digest_size=ID_BYTES, person=_PERSON).digest())


def block_keys(
    tokens: Tokens, block_tokens: int = BLOCK_TOKENS, *, block_hash: BlockHash = block_hash
) -> list[BlockId]:
    """The ids of the full blocks of a prompt (uint32, one dimension); ``len(tokens) // block_tokens`` of them."""
    return KeyChain(block_tokens, block_hash=block_hash).extend(tokens)


class KeyChain:
    """The ids of a growing sequence: however the tokens are cut into pieces, the ids are the same."""

    def __init__(self, block_tokens: int = BLOCK_TOKENS, *, block_hash: BlockHash = block_hash) -> None:
        if block_tokens < 1:
            raise ValueError(f"block_tokens = {block_tokens}: expected 1 or more")
        self._hash = block_hash
        self._block_bytes = block_tokens * _TOKEN_BYTES
        self._pending = b""
        self._ids: list[BlockId] = []

    @property
    def ids(self) -> Sequence[BlockId]:
        """The ids of all completed blocks, in order."""
        return self._ids

    @property
    def tokens(self) -> int:
        """How many tokens the sequence has, those of an unfinished block included."""
        return (len(self._ids) * self._block_bytes + len(self._pending)) // _TOKEN_BYTES

    def extend(self, tokens: Tokens) -> list[BlockId]:
        """Append ``tokens`` (uint32, one dimension); return the ids of the blocks that they completed."""
        if tokens.dtype != np.uint32 or tokens.ndim != 1:
            raise ValueError(f"tokens of {tokens.dtype} and shape {tokens.shape}: expected uint32, one dimension")
        data = self._pending + tokens.astype("<u4", copy=False).tobytes()
        size, block_hash = self._block_bytes, self._hash
        parent = self._ids[-1] if self._ids else ROOT
        fresh = []
        full = len(data) - len(data) % size
        for at in range(0, full, size):
            parent = block_hash(parent, data[at : at + size])
            fresh.append(parent)
        self._pending = data[full:]
        self._ids += fresh
        return fresh


class _Node:
    """``edge``: the joined ids on the way into this node; ``children``: by the first id of their edge."""

    __slots__ = ("children", "edge")

    def __init__(self, edge: bytearray, children: dict[bytes, _Node]) -> None:
        self.edge = edge
        self.children = children


class PrefixTrie:
    """The committed prefixes: a path-compressed radix trie over sequences of block ids.

    Invariants: no edge but the root's is empty; siblings differ in their first id; a node with exactly one
    child is the root. Whatever is in the trie is committed, so every prefix of what is in it is in it too.
    """

    def __init__(self) -> None:
        self._root = _Node(bytearray(), {})
        self._blocks = 0

    def __len__(self) -> int:
        """Committed blocks, each counted once however many sequences share it."""
        return self._blocks

    def match(self, ids: Sequence[BlockId]) -> int:
        """Length in blocks of the longest committed prefix of ``ids``."""
        _, _, matched = self._walk(_join(ids))
        return matched // ID_BYTES

    def insert(self, ids: Sequence[BlockId], first: int = 0) -> int:
        """Commit the blocks ``ids[first:]``, whose predecessors ``ids[:first]`` must be committed already.

        Returns how many blocks were new. Raises ValueError, and changes nothing, where a predecessor is missing.
        """
        if not 0 <= first <= len(ids):
            raise ValueError(f"commit from block {first} of {len(ids)}: out of range")
        data = _join(ids)
        node, on_edge, matched = self._walk(data)
        if matched < first * ID_BYTES:
            raise ValueError(f"commit from block {first}: its predecessor {matched // ID_BYTES} is not committed")
        rest = data[matched:]
        if not rest:
            return 0
        if on_edge < len(node.edge):
            _split(node, on_edge)
        if node is self._root or node.children:
            node.children[rest[:ID_BYTES]] = _Node(bytearray(rest), {})
        else:
            node.edge += rest
        fresh = len(rest) // ID_BYTES
        self._blocks += fresh
        return fresh

    def _walk(self, data: bytes) -> tuple[_Node, int, int]:
        """Follow ``data`` down: (last node reached, bytes matched on its edge, bytes matched in all)."""
        node, on_edge, matched = self._root, 0, 0
        while on_edge == len(node.edge):
            child = node.children.get(data[matched : matched + ID_BYTES])
            if child is None:
                break
            node = child
            on_edge = _common(node.edge, data, matched)
            matched += on_edge
        return node, on_edge, matched


def _join(ids: Sequence[BlockId]) -> bytes:
    data = b"".join(ids)
    if len(data) != len(ids) * ID_BYTES:
        raise ValueError(f"block ids of {len(data)} bytes for {len(ids)} blocks: expected {ID_BYTES} each")
    return data


def _split(node: _Node, at: int) -> None:
    """Cut ``node``'s edge after ``at`` bytes; the lower part moves into a child of its own."""
    lower = _Node(node.edge[at:], node.children)
    node.edge = node.edge[:at]
    node.children = {bytes(lower.edge[:ID_BYTES]): lower}


def _common(edge: bytearray, data: bytes, at: int) -> int:
    """Bytes, in whole ids, that ``edge`` and ``data`` from ``at`` on have in common at their beginning."""
    if data.startswith(edge, at):
        return len(edge)
    low, high = 0, min(len(edge), len(data) - at) // ID_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if edge[low * ID_BYTES : middle * ID_BYTES] == data[at + low * ID_BYTES : at + middle * ID_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low * ID_BYTES
