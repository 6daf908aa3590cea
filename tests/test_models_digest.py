"""Laws of the digest backend that are its own; those of every backend are in test_models_laws.py."""

from __future__ import annotations

import numpy as np
import pytest

from emulator.models import load_backend
from emulator.models.backend import VOCABULARY, State
from emulator.models.digest import DigestBackend

MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
    return x ^ x >> 31


def _number(seed: int, index: int) -> int:
    return _mix((0x9E3779B97F4A7C15 * (index + 1) + seed * 0x94D049BB133111EB) & MASK)


def _fold(word: int, index: int) -> int:
    x = (word + _number(0x6B65, index)) & MASK
    x = ((x ^ x >> 32) * 0xBF58476D1CE4E5B9) & MASK
    return x ^ x >> 29


@pytest.mark.parametrize("kv_bytes", [1, 3, 8, 11])
def test_formula(kv_bytes: int) -> None:
    """The vectorised model is the documented formula, written out token by token with Python integers."""
    layers, tokens = 3, [5, 129_279, 0, 7, 7, 4_000_000_000, 1, 2, 3, 4, 5]
    row_words = -(-kv_bytes // 8)
    hidden = [_mix((_number(0x746F, t) + token) & MASK) for t, token in enumerate(tokens)]
    expected = []
    for layer in range(layers):
        rows = b""
        out = []
        for h in hidden:
            words = [rows[i : i + 8] for i in range(0, len(rows), 8)]
            if len(rows) % 8 == 0:
                words.append(b"")
            digest = sum(_fold(int.from_bytes(w, "little"), i) for i, w in enumerate(words))
            out.append(_mix((h + digest + _number(0x6C61, layer)) & MASK))
            salted = (_mix((h + _number(0x726F, layer * row_words + j)) & MASK) for j in range(row_words))
            rows += b"".join(w.to_bytes(8, "little") for w in salted)[:kv_bytes]
        expected.append(rows)
        hidden = out
    backend = DigestBackend(layers, kv_bytes)
    state = backend.embed(np.array(tokens, dtype=np.uint32), 0)
    for layer in range(layers):
        kv = np.zeros((len(tokens), kv_bytes), dtype=np.uint8)
        state = backend.layer(layer, state, kv, 0)
        assert kv.tobytes() == expected[layer]
    assert [int(h) for h in state.hidden] == hidden
    assert backend.token(state) == _mix(hidden[-1]) % VOCABULARY


def test_real_layer_count() -> None:
    """61 layers and a context of 40,000 tokens, longer than any table prepared beforehand."""
    backend = load_backend("digest", layers=61, kv_bytes=1)
    kv = np.arange(40_001, dtype=np.uint64).astype(np.uint8)[:, None]
    state = backend.layer(60, backend.embed(np.array([1], dtype=np.uint32), 40_000), kv, 40_000)
    other = kv.copy()
    other[0, 0] ^= 1
    assert backend.layer(60, state, kv, 40_000).hidden != backend.layer(60, state, other, 40_000).hidden


def test_misuse_is_refused() -> None:
    """A role's mistake is a ValueError, never a wrong token."""
    backend = DigestBackend(2, 4)
    state = backend.embed(np.array([1, 2], dtype=np.uint32), 3)
    with pytest.raises(ValueError, match="begin at 3"):
        backend.layer(0, state, np.zeros((4, 4), dtype=np.uint8), 2)
    with pytest.raises(ValueError, match="expected uint8"):
        backend.layer(0, state, np.zeros((6, 4), dtype=np.uint8), 3)
    with pytest.raises(ValueError, match="layers 0 to 1"):
        backend.layer(2, state, np.zeros((5, 4), dtype=np.uint8), 3)
    with pytest.raises(ValueError, match="at least one"):
        backend.embed(np.zeros(0, dtype=np.uint32), 0)
    decoder = backend.open_decode()
    with pytest.raises(ValueError, match=r"layers \[0, 1\]"):
        decoder.step(1)
    decoder.absorb(1, np.zeros((5, 4), dtype=np.uint8))
    with pytest.raises(ValueError, match="twice"):
        decoder.absorb(1, np.zeros((5, 4), dtype=np.uint8))
    with pytest.raises(ValueError, match="5 tokens"):
        decoder.absorb(0, np.zeros((6, 4), dtype=np.uint8))
    assert isinstance(state, State)
