"""Laws that every backend keeps: exactness under any cut, and tokens that depend on every KV byte."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator.models import load_backend
from emulator.models.backend import VOCABULARY, Backend, Bytes, Decoder, State, Tokens
from emulator.models.reference import prompt_blocks

BLOCK = 64


@cache
def backend_of(name: str) -> Backend:
    """``digest`` at the real layer count and one byte; ``digest-5``: rows that straddle words; ``toy``."""
    if name == "toy":
        return load_backend("toy", layers=4, kv_bytes=16)
    return load_backend("digest", layers=61, kv_bytes=1) if name == "digest" else DIGEST_5


DIGEST_5 = load_backend("digest", layers=3, kv_bytes=5)
NEEDS_TORCH = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch, the extra `toy`, is not installed"
)
NAMES = ["digest", "digest-5", pytest.param("toy", marks=NEEDS_TORCH)]
every_backend = pytest.mark.parametrize("name", NAMES)


def tokens_of(seed: int, count: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).astype(np.uint32)


def prefill(backend: Backend, kv: Bytes, tokens: Tokens, start: int) -> State:
    """Forward over ``tokens[start:]`` behind the rows below ``start`` of ``kv`` (layers, length, kv_bytes)."""
    state = backend.embed(tokens[start:], start)
    for layer in range(backend.layers):
        state = backend.layer(layer, state, kv[layer], start)
    return state


def from_scratch(backend: Backend, tokens: Tokens) -> tuple[Bytes, State]:
    kv = np.zeros((backend.layers, len(tokens), backend.kv_bytes), dtype=np.uint8)
    return kv, prefill(backend, kv, tokens, 0)


def decoder_of(backend: Backend, kv: Bytes) -> Decoder:
    decoder = backend.open_decode()
    for layer in reversed(range(backend.layers)):
        decoder.absorb(layer, kv[layer])
    return decoder


def chunked(backend: Backend, tokens: Tokens, cuts: Sequence[int]) -> tuple[Bytes, int]:
    """Prefill in chunks that end at ``cuts``."""
    kv = np.zeros((backend.layers, len(tokens), backend.kv_bytes), dtype=np.uint8)
    bounds = [0, *cuts, len(tokens)]
    token = -1
    for begin, end in pairwise(bounds):
        token = backend.token(prefill(backend, kv[:, :end], tokens[:end], begin))
    return kv, token


@every_backend
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(1, 300), data=st.data())
def test_chunks_are_exact(name: str, seed: int, length: int, data: st.DataObject) -> None:
    """However a prompt is cut into chunks, every KV byte and the token are the same."""
    backend = backend_of(name)
    tokens = tokens_of(seed, length)
    cuts = data.draw(st.sets(st.integers(1, length - 1), max_size=6)) if length > 1 else set()
    kv, state = from_scratch(backend, tokens)
    got_kv, got_token = chunked(backend, tokens, sorted(cuts))
    assert np.array_equal(got_kv, kv)
    assert got_token == backend.token(state)


@every_backend
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(1, 200), outputs=st.integers(1, 40))
def test_decode_is_prefill(name: str, seed: int, length: int, outputs: int) -> None:
    """Forced outputs fed one by one give the KV rows and tokens of a prefill over prompt and outputs."""
    backend = backend_of(name)
    tokens = tokens_of(seed, length + outputs)
    kv, state = from_scratch(backend, tokens)
    decoder = decoder_of(backend, kv[:, :length])
    for at in range(length, length + outputs):
        token, rows = decoder.step(int(tokens[at]))
        assert np.array_equal(rows, kv[:, at])
        assert token == backend.token(State(at, state.hidden[at : at + 1]))


@every_backend
def test_requests_do_not_meet(name: str) -> None:
    """Layers of several requests run in any interleaving: a backend holds no request's state."""
    backend = backend_of(name)
    prompts = [tokens_of(seed, length) for seed, length in ((1, 70), (2, 130), (3, 1))]
    expected = [from_scratch(backend, tokens) for tokens in prompts]
    kvs = [np.zeros_like(kv) for kv, _ in expected]
    states = [backend.embed(tokens, 0) for tokens in prompts]
    for layer in range(backend.layers):
        for i in (layer % 3, (layer + 1) % 3, (layer + 2) % 3):
            states[i] = backend.layer(layer, states[i], kvs[i][layer], 0)
    for (kv, state), got_kv, got in zip(expected, kvs, states, strict=True):
        assert np.array_equal(got_kv, kv)
        assert backend.token(got) == backend.token(state)


@every_backend
def test_kv_in_a_larger_region(name: str) -> None:
    """A layer's KV may be an unaligned view into a region; bytes around it stay untouched."""
    backend = backend_of(name)
    tokens = tokens_of(7, 90)
    kv, state = from_scratch(backend, tokens)
    size = kv[0].size
    region = np.full(size + 6, 0xA5, dtype=np.uint8)
    got = backend.embed(tokens, 0)
    for layer in range(backend.layers):
        got = backend.layer(layer, got, region[3 : 3 + size].reshape(kv[0].shape), 0)
        assert np.array_equal(region[3 : 3 + size].reshape(kv[0].shape), kv[layer])
    assert (region[:3] == 0xA5).all()
    assert (region[-3:] == 0xA5).all()
    assert backend.token(got) == backend.token(state)


@every_backend
def test_tokens_depend_on_content_and_position(name: str) -> None:
    """Among 200 prompts that differ in one token or in its place, tokens are (but for chance) all different."""
    backend = backend_of(name)
    base = tokens_of(11, 40)
    seen = set()
    for at in range(40):
        for delta in (1, 1 << 16, 65_519, 0x8000_0000):
            changed = base.copy()
            changed[at] ^= np.uint32(delta)
            seen.add(backend.token(from_scratch(backend, changed)[1]))
        rotated = np.roll(base, at)
        seen.add(backend.token(from_scratch(backend, rotated)[1]))
    assert len(seen) >= 198
    assert all(0 <= token < VOCABULARY for token in seen)


class Mutator:
    """Random faults in the KV of a prefix of whole blocks, (layers, length, kv_bytes)."""

    def __init__(self, backend: Backend, blocks: int, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.blocks = blocks
        length = blocks * BLOCK
        self.stale = from_scratch(backend, tokens_of(seed + 1, length))[0]

    def _block(self, kv: Bytes) -> Bytes:
        """A random layer's random block, as a view."""
        layer, block = self.random.integers(len(kv)), self.random.integers(self.blocks)
        view: Bytes = kv[layer, block * BLOCK : (block + 1) * BLOCK]
        return view

    def _swap(self, a: Bytes, b: Bytes) -> None:
        a[:], b[:] = b.copy(), a.copy()

    def bit_flip(self, kv: Bytes) -> None:
        """One bit anywhere."""
        at = tuple(self.random.integers(kv.shape))
        kv[at] ^= np.uint8(1 << self.random.integers(8))

    def swap_positions(self, kv: Bytes) -> None:
        """Two blocks of one layer, which is what a wrong gather order does."""
        layer = kv[self.random.integers(len(kv))].reshape(self.blocks, -1)
        a, b = self.random.choice(self.blocks, 2, replace=False)
        self._swap(layer[a], layer[b])

    def swap_anywhere(self, kv: Bytes) -> None:
        """Two blocks of any layers and positions."""
        self._swap(self._block(kv), self._block(kv))

    def swap_layers(self, kv: Bytes) -> None:
        """The same block of two layers."""
        a, b = self.random.choice(len(kv), 2, replace=False)
        block = self.random.integers(self.blocks)
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        self._swap(kv[a, rows], kv[b, rows])

    def swap_full_blocks(self, kv: Bytes) -> None:
        """Two Full Blocks: all layers of two positions."""
        split = kv.reshape(len(kv), self.blocks, -1)
        a, b = self.random.choice(self.blocks, 2, replace=False)
        self._swap(split[:, a], split[:, b])

    def stale_prefix(self, kv: Bytes) -> None:
        """A block of another prefix at the same layer and position."""
        layer, block = self.random.integers(len(kv)), self.random.integers(self.blocks)
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        kv[layer, rows] = self.stale[layer, rows]

    def stale_position(self, kv: Bytes) -> None:
        """A block of another position over this one (and its own lost)."""
        self._block(kv)[:] = self._block(kv).copy()

    def missing(self, kv: Bytes) -> None:
        """A block that never arrived."""
        self._block(kv)[:] = 0

    def apply(self, kv: Bytes) -> Bytes:
        """A changed copy."""
        kinds = (
            self.bit_flip,
            self.bit_flip,
            self.swap_positions,
            self.swap_anywhere,
            self.swap_layers,
            self.swap_full_blocks,
            self.stale_prefix,
            self.stale_position,
            self.missing,
        )
        changed = kv.copy()
        while np.array_equal(changed, kv):
            kinds[self.random.integers(len(kinds))](changed)
        return changed


@every_backend
def test_a_thousand_mutations_before_prefill(name: str) -> None:
    """Of 1,000 faults in the cached KV of a prompt, at least 990 change the token that follows the prompt."""
    backend = backend_of(name)
    blocks = 4
    cached = blocks * BLOCK
    tokens = tokens_of(21, cached + 12)
    kv, state = from_scratch(backend, tokens)
    expected = backend.token(state)
    mutator = Mutator(backend, blocks, seed=22)
    caught = 0
    for _ in range(1000):
        changed = np.concatenate([mutator.apply(kv[:, :cached]), np.zeros_like(kv[:, cached:])], axis=1)
        caught += backend.token(prefill(backend, changed, tokens, cached)) != expected
    assert caught >= 990


@every_backend
def test_a_thousand_mutations_before_decode(name: str) -> None:
    """Of 1,000 faults in the KV that a decoder absorbs, at least 990 change the token of its first step."""
    backend = backend_of(name)
    blocks = 3
    kv, _ = from_scratch(backend, tokens_of(31, blocks * BLOCK))
    expected, _ = decoder_of(backend, kv).step(77)
    mutator = Mutator(backend, blocks, seed=32)
    caught = sum(decoder_of(backend, mutator.apply(kv)).step(77)[0] != expected for _ in range(1000))
    assert caught >= 990


@every_backend
def test_warm_blocks_are_what_prefill_writes(name: str) -> None:
    """``prompt_blocks`` is the KV of the prompt's full blocks in Full Block order, the rest left out."""
    backend = backend_of(name)
    tokens = tokens_of(41, 3 * BLOCK + 5)
    kv, _ = from_scratch(backend, tokens)
    full = prompt_blocks(backend, tokens)
    assert full.shape == (3, backend.layers, BLOCK, backend.kv_bytes)
    assert full.flags.c_contiguous
    for block in range(3):
        assert np.array_equal(full[block], kv[:, block * BLOCK : (block + 1) * BLOCK])
    assert prompt_blocks(backend, tokens[:63]).shape == (0, backend.layers, BLOCK, backend.kv_bytes)
