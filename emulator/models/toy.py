"""The ``toy`` backend: a small model of its own with real attention, computed by torch, exact to the bit.

Four layers, two heads of four dimensions, 16 KV bytes a token and layer (8 of keys, 8 of values, offset by
128), contexts up to 4,096 tokens. Attention weighs every earlier token by the square of its score (a polynomial
kernel in softmax's place), keys shifted by a vector of their row's position, so that order matters::

    q, k, v = projections of x                 |q| <= 63, key and value bytes -128 .. 127
    w[s]    = (q . (k[s] + shift[s])) ** 2     s <= t
    x'      = (x Wx + (sum w v, sum w) Wy mod P) ** 3 mod P
    token   = hash of the exact x of the last layer

Everything is an integer held in float64. Every sum stays below 2**53 (4 dimensions x 63 x 191, squared, x 128,
x 4,096 tokens is 2**50.1), so no product or partial sum is ever rounded, whatever the order: any chunking,
batching or thread count gives the same bits. Cubing is a bijection modulo P because 3 does not divide P - 1.
Sums are kept whole rather than divided by the sum of weights, which would round small changes away.

The only module that imports torch: import it only where a toy is wanted.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from ..errors import ConfigError
from .backend import VOCABULARY, Bytes, State, Tokens, check_layer_call

__all__ = ["CONTEXT_LIMIT", "KV_BYTES", "LAYERS", "ToyBackend", "ToyDecoder"]

LAYERS: Final = 4
KV_BYTES: Final = 16
CONTEXT_LIMIT: Final = 4096

P: Final = 65_519
"""The largest prime below 2**16 of the form 3 n + 2."""
HEADS: Final = 2
DIM: Final = 4
WIDTH: Final = 16
HALF: Final = HEADS * DIM
REACH: Final = 63
"""Bound of query and shift components."""
QUERIES: Final = 128
"""Query rows at a time: the score matrix of a full context stays at 8 MiB."""


class ToyBackend:
    """The toy model. Its weights are fixed: every process has the same."""

    layers: int = LAYERS
    kv_bytes: int = KV_BYTES

    def __init__(self) -> None:
        # A node is one of many on the machine's cores: torch's own threads would only contend.
        torch.set_num_threads(1)
        random = np.random.Generator(np.random.PCG64(2602_21548))

        def weights(*shape: int) -> Any:
            return torch.from_numpy(random.integers(1, P, shape).astype(np.float64))

        # Rows: the token's low 16 bits, its high 16 bits, the position, 1.
        self._embedding = weights(4, WIDTH)
        self._query = weights(LAYERS, WIDTH, HALF)
        self._key_value = weights(LAYERS, WIDTH, KV_BYTES)
        self._carry = weights(LAYERS, WIDTH, WIDTH)
        self._mix = weights(LAYERS, HALF + HEADS, WIDTH)
        shift = random.integers(-REACH, REACH + 1, (HALF, CONTEXT_LIMIT)).astype(np.float64)
        self._shift = torch.from_numpy(shift)

    def check_context(self, tokens: int) -> None:
        if tokens > CONTEXT_LIMIT:
            raise ConfigError(
                f"model.backend = toy: a context of {tokens} tokens is above its limit of {CONTEXT_LIMIT}; "
                f"use --max-len {CONTEXT_LIMIT} or less, or the digest backend"
            )

    def embed(self, tokens: Tokens, position: int) -> State:
        count = len(tokens)
        if count < 1 or position < 0:
            raise ValueError(f"{count} tokens at position {position}: expected at least one, at 0 or later")
        self.check_context(position + count)
        inputs = np.empty((count, 4), dtype=np.float64)
        inputs[:, 0] = tokens & 0xFFFF
        inputs[:, 1] = tokens >> 16
        inputs[:, 2] = np.arange(position, position + count)
        inputs[:, 3] = 1
        return State(position, _cube(torch.from_numpy(inputs) @ self._embedding).numpy())

    def layer(self, index: int, state: State, kv: Bytes, cached: int) -> State:
        check_layer_call(self, index, state, kv, cached)
        x = torch.from_numpy(state.hidden)
        kv[cached:] = torch.remainder(_mod_p(x @ self._key_value[index]), 256).numpy()
        query = torch.remainder(_mod_p(x @ self._query[index]), 2 * REACH + 1) - REACH
        attended = self._attend(query, kv, cached)
        out = _cube(x @ self._carry[index] + _mod_p(attended) @ self._mix[index])
        return State(state.position, out.numpy())

    def token(self, state: State) -> int:
        value = 0
        for component in state.hidden[-1]:
            # One step of a linear congruential generator (Knuth's MMIX) and a fold, on exact integers.
            value = ((value ^ int(component)) * 6364136223846793005 + 1442695040888963407) % (1 << 64)
            value ^= value >> 32
        return value % VOCABULARY

    def open_decode(self) -> ToyDecoder:
        return ToyDecoder(self)

    def _attend(self, query: Any, kv: Bytes, cached: int) -> Any:
        """Sums of weighted values and of weights, (n, 8 + 2), for queries (n, 8) at rows ``cached ..``."""
        # (16, rows): products run along the context.
        columns = torch.from_numpy(kv.T.astype(np.float64, order="C")) - 128
        keys = (columns[:HALF] + self._shift[:, : len(kv)]).unflatten(0, (HEADS, DIM))
        values = columns[HALF:].unflatten(0, (HEADS, DIM)).transpose(1, 2)
        parts = []
        for at in range(0, len(query), QUERIES):
            rows = query[at : at + QUERIES].unflatten(1, (HEADS, DIM)).transpose(0, 1)
            seen = cached + at + rows.shape[1]
            weights = (rows @ keys[:, :, :seen]).square_().tril_(diagonal=cached + at)
            sums = torch.cat([weights @ values[:, :seen], weights.sum(2, keepdim=True)], dim=2)
            parts.append(sums.transpose(0, 1).flatten(1))
        return torch.cat(parts)


def _mod_p(x: Any) -> Any:
    return torch.remainder(x, P)


def _cube(x: Any) -> Any:
    x = _mod_p(x)
    return _mod_p(_mod_p(x * x) * x)


class ToyDecoder:
    """One request in decode; holds the KV of its whole context."""

    def __init__(self, backend: ToyBackend) -> None:
        self._backend = backend
        self._kv: Bytes = np.zeros((LAYERS, CONTEXT_LIMIT, KV_BYTES), dtype=np.uint8)
        self._missing = set(range(LAYERS))
        self._length = 0

    def absorb(self, layer: int, kv: Bytes) -> None:
        if layer not in self._missing:
            raise ValueError(f"layer {layer}: absorbed twice, or not a layer of this model")
        first = len(self._missing) == LAYERS
        if kv.ndim != 2 or kv.shape[1] != KV_BYTES or not (first or len(kv) == self._length):
            raise ValueError(f"layer {layer}: KV of shape {kv.shape} beside {self._length} tokens")
        self._backend.check_context(len(kv))
        self._missing.remove(layer)
        self._length = len(kv)
        self._kv[layer, : len(kv)] = kv

    def step(self, token: int) -> tuple[int, Bytes]:
        if self._missing:
            raise ValueError(f"decode before the KV of layers {sorted(self._missing)} was absorbed")
        at = self._length
        state = self._backend.embed(np.array([token], dtype=np.uint32), at)
        for layer in range(LAYERS):
            state = self._backend.layer(layer, state, self._kv[layer, : at + 1], at)
        self._length += 1
        rows: npt.NDArray[np.uint8] = self._kv[:, at].copy()
        return self._backend.token(state), rows
