"""The ``digest`` backend: a cheap model whose every token depends on every KV byte of its prefix, in order.

It keeps a transformer's data flow at the real layer count. With ``h[-1](t)`` from token and position, layer
``l`` writes token t's KV row from ``h[l-1](t)`` and then takes in the rows of all tokens before t::

    row_l(t) = low kv_bytes bytes of mix(h[l-1](t) + salt(l, j)), j = 0, 1, ...
    D_l(t)   = sum over words w_i of the bytes of rows 0 .. t-1 of fold(w_i + key_i)     mod 2**64
    h_l(t)   = mix(h[l-1](t) + D_l(t) + salt(l))
    token    = mix(h_last(t)) mod vocabulary

``mix`` and ``fold`` are bijections of 64 bits, so one changed word always changes D, hence h, hence (but for
the final modulus) the token; several changed, swapped or stale words cancel with a probability near 2**-64,
because ``key_i`` is a pseudo-random number of the word's position. (A plain dot product with odd weights would
be weaker: a word's top byte would meet only a weight's low byte.) Rows are laid end to end and cut into
little-endian words of 8 bytes whatever ``kv_bytes`` is; the last word is padded with zeros. Token t's own row
needs no place in D_l(t): it is a function of h[l-1](t) already.

The sum is exact and incremental, so any chunking, batching or decoding gives the same bytes. A layer costs one
pass over the cached bytes. All arithmetic is modulo 2**64: on arrays numpy wraps silently, scalars are ints.
"""

from __future__ import annotations

import sys
from typing import Final

import numpy as np
import numpy.typing as npt

from .backend import VOCABULARY, Bytes, State, Tokens, check_layer_call

__all__ = ["DigestBackend", "DigestDecoder"]

Words = npt.NDArray[np.uint64]

WORD: Final = 8
MASK: Final = (1 << 64) - 1
# splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
GOLDEN: Final = 0x9E3779B97F4A7C15
MUL1: Final = 0xBF58476D1CE4E5B9
MUL2: Final = 0x94D049BB133111EB
# Separate the uses of one generator: keys of words, salts of rows, salts of layers, token ids.
KEYS, ROWS, LAYERS, TOKENS = 0x6B65, 0x726F, 0x6C61, 0x746F

_S27, _S29, _S30, _S31, _S32 = (np.uint64(s) for s in (27, 29, 30, 31, 32))
_MUL1, _MUL2, _GOLDEN = np.uint64(MUL1), np.uint64(MUL2), np.uint64(GOLDEN)
# Mask of the low r bytes of a word.
_LOW: Final[Words] = np.array([(1 << (8 * r)) - 1 for r in range(WORD)], dtype=np.uint64)
# Words folded at a time: three temporaries of this size stay in a second-level cache.
_CHUNK: Final = 1 << 13


def _mix(x: Words) -> Words:
    """splitmix64's finaliser, element by element; overwrites ``x``."""
    x ^= x >> _S30
    x *= _MUL1
    x ^= x >> _S27
    x *= _MUL2
    x ^= x >> _S31
    return x


def _mix_int(x: int) -> int:
    x = ((x ^ x >> 30) * MUL1) & MASK
    x = ((x ^ x >> 27) * MUL2) & MASK
    return x ^ x >> 31


def _fold(words: Words, keys: Words) -> Words:
    """A bijection of each word that depends on its position through its key; a new array."""
    x = words + keys
    x ^= x >> _S32
    x *= _MUL1
    x ^= x >> _S29
    return x


def _stream(seed: int, start: int, stop: int) -> Words:
    """Numbers ``start .. stop-1`` of the splitmix64 sequence of ``seed``."""
    x: Words = np.arange(start + 1, stop + 1, dtype=np.uint64) * _GOLDEN
    x += np.uint64((seed * MUL2) & MASK)
    return _mix(x)


def _to_words(flat: Bytes, used: int) -> Words:
    """The first ``used`` bytes as little-endian words, and at least one byte of zero padding."""
    words = np.empty(used // WORD + 1, dtype=np.uint64)
    words[-1] = 0
    words.view(np.uint8)[:used] = flat[:used]
    return words if sys.byteorder == "little" else words.byteswap()


class DigestBackend:
    """The digest model with ``layers`` layers of ``kv_bytes`` KV bytes per token (any number from 1 on)."""

    def __init__(self, layers: int, kv_bytes: int) -> None:
        if layers < 1 or kv_bytes < 1:
            raise ValueError(f"{layers} layers, {kv_bytes} KV bytes: expected 1 or more of each")
        self.layers = layers
        self.kv_bytes = kv_bytes
        row_words = -(-kv_bytes // WORD)
        self._row_salts = _stream(ROWS, 0, layers * row_words).reshape(layers, row_words)
        self._layer_salts = _stream(LAYERS, 0, layers)
        self._keys: Words = _stream(KEYS, 0, 1024)

    def check_context(self, tokens: int) -> None:
        """Any context will do."""

    def embed(self, tokens: Tokens, position: int) -> State:
        count = len(tokens)
        if count < 1 or position < 0:
            raise ValueError(f"{count} tokens at position {position}: expected at least one, at 0 or later")
        hidden = _stream(TOKENS, position, position + count)
        hidden += tokens
        return State(position, _mix(hidden))

    def layer(self, index: int, state: State, kv: Bytes, cached: int) -> State:
        check_layer_call(self, index, state, kv, cached)
        hidden: Words = state.hidden
        kv[cached:] = self._rows(hidden[:, None] + self._row_salts[index])
        mixed = self._digests(kv.reshape(-1), cached, len(hidden))
        mixed += hidden
        mixed += self._layer_salts[index]
        return State(state.position, _mix(mixed))

    def token(self, state: State) -> int:
        return _mix_int(int(state.hidden[-1])) % VOCABULARY

    def open_decode(self) -> DigestDecoder:
        return DigestDecoder(self, self._row_salts, self._layer_salts)

    def keys(self, count: int) -> Words:
        """The keys of word positions ``0 .. count-1``."""
        if count > len(self._keys):
            grown = max(count, 2 * len(self._keys))
            self._keys = np.concatenate([self._keys, _stream(KEYS, len(self._keys), grown)])
        return self._keys[:count]

    def absorbed(self, flat: Bytes) -> tuple[int, int]:
        """Sum over the whole words of ``flat``, and its last, partial word, padded (0 where there is none)."""
        words = _to_words(flat, flat.size)
        return self._sum(words, len(words) - 1), int(words[-1])

    def _rows(self, words: Words) -> Bytes:
        """KV rows (..., kv_bytes) from their words before mixing (..., row_words); overwrites ``words``."""
        mixed = _mix(words)
        if sys.byteorder != "little":
            mixed = mixed.byteswap()
        return mixed.view(np.uint8)[..., : self.kv_bytes]

    def _sum(self, words: Words, count: int) -> int:
        """Sum of the folded words ``0 .. count-1`` modulo 2**64."""
        keys = self.keys(count)
        total = 0
        for at in range(0, count, _CHUNK):
            end = min(at + _CHUNK, count)
            total += int(_fold(words[at:end], keys[at:end]).sum())
        return total & MASK

    def _digests(self, flat: Bytes, first: int, count: int) -> Words:
        """D of tokens ``first .. first+count-1``: each over the bytes of the rows before it. A new array."""
        words = _to_words(flat, (first + count - 1) * self.kv_bytes)
        ends = np.arange(first, first + count) * self.kv_bytes
        whole = ends // WORD
        start = first * self.kv_bytes // WORD
        keys = self.keys(len(words))
        sums = np.empty(len(words) - start, dtype=np.uint64)
        sums[0] = self._sum(words, start)
        sums[1:] = _fold(words[start:-1], keys[start:-1])
        np.cumsum(sums, out=sums)
        partial = words[whole] & _LOW[ends - whole * WORD]
        out = _fold(partial, keys[whole])
        out += sums[whole - start]
        return out


class DigestDecoder:
    """One request in decode. Holds 16 bytes a layer: the sum over whole words, and the partial word."""

    def __init__(self, backend: DigestBackend, row_salts: Words, layer_salts: Words) -> None:
        self._backend = backend
        self._row_salts = row_salts
        self._layer_salts = layer_salts
        self._sums: Words = np.zeros(backend.layers, dtype=np.uint64)
        self._partial: Words = np.zeros(backend.layers, dtype=np.uint64)
        self._missing = set(range(backend.layers))
        self._length = 0

    def absorb(self, layer: int, kv: Bytes) -> None:
        if layer not in self._missing:
            raise ValueError(f"layer {layer}: absorbed twice, or not a layer of this model")
        first = len(self._missing) == self._backend.layers
        if kv.ndim != 2 or kv.shape[1] != self._backend.kv_bytes or not (first or len(kv) == self._length):
            raise ValueError(f"layer {layer}: KV of shape {kv.shape} beside {self._length} tokens")
        self._missing.remove(layer)
        self._length = len(kv)
        self._sums[layer], self._partial[layer] = self._backend.absorbed(kv.reshape(-1))

    def step(self, token: int) -> tuple[int, Bytes]:
        if self._missing:
            raise ValueError(f"decode before the KV of layers {sorted(self._missing)} was absorbed")
        backend = self._backend
        begin = self._length * backend.kv_bytes
        at = begin // WORD
        digests = _fold(self._partial, backend.keys(at + 1)[at:])
        digests += self._sums
        digests += self._layer_salts
        hidden = int(backend.embed(np.array([token], dtype=np.uint32), self._length).hidden[0])
        before = []
        for digest in digests.tolist():
            before.append(hidden)
            hidden = _mix_int((hidden + digest) & MASK)
        rows = backend._rows(np.array(before, dtype=np.uint64)[:, None] + self._row_salts)
        self._append(rows, begin)
        self._length += 1
        return _mix_int(hidden) % VOCABULARY, rows

    def _append(self, rows: Bytes, begin: int) -> None:
        """Take in every layer's row at byte ``begin`` of its KV."""
        held = begin % WORD
        end = held + rows.shape[1]
        padded = np.zeros((len(rows), (end // WORD + 1) * WORD), dtype=np.uint8)
        padded[:, held:end] = rows
        words = padded.view(np.uint64) if sys.byteorder == "little" else padded.view(np.uint64).byteswap()
        words[:, 0] |= self._partial
        whole = end // WORD
        if whole:
            at = begin // WORD
            self._sums += _fold(words[:, :whole], self._backend.keys(at + whole)[at:]).sum(axis=1)
        self._partial = words[:, whole].copy()
