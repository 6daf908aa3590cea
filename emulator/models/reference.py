"""The single-process reference: what a model says to a prompt, without cluster, blocks or decode.

It computes a request as one forward over the prompt and the forced outputs, and reads the model's own tokens
off the last positions, so it shares no code with a decoder. The KV of a trajectory's latest request is kept: a
request computes only what comes after the longest prefix that it shares with it. Must not import a fabric or a
role.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .backend import Backend, Bytes, State, Tokens

__all__ = ["Prompt", "prompt_blocks", "reference_tokens"]

Prompt = tuple[str, str, Tokens, Tokens]
"""(request id, trajectory id, prompt tokens, forced output tokens)."""

KEPT_BYTES = 1 << 29


class _Context:
    """The tokens of one trajectory and their KV in every layer, (layers, capacity, kv_bytes)."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.tokens: Tokens = np.zeros(0, dtype=np.uint32)
        self.kv: Bytes = np.zeros((backend.layers, 0, backend.kv_bytes), dtype=np.uint8)

    def forward(self, tokens: Tokens, at_most: int) -> State:
        """Make the context ``tokens``, computing from the first changed one on, or from ``at_most`` if earlier.

        The state after the last layer of all that was computed.
        """
        start = min(_common_prefix(self.tokens, tokens), at_most)
        if len(tokens) > self.kv.shape[1]:
            layers, capacity, width = self.kv.shape
            grown: Bytes = np.empty((layers, max(len(tokens), capacity * 5 // 4), width), dtype=np.uint8)
            grown[:, :start] = self.kv[:, :start]
            self.kv = grown
        state = self._backend.embed(tokens[start:], start)
        for layer in range(self._backend.layers):
            state = self._backend.layer(layer, state, self.kv[layer, : len(tokens)], start)
        self.tokens = tokens
        return state


def _common_prefix(a: Tokens, b: Tokens) -> int:
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def reference_tokens(
    backend: Backend, prompts: Iterable[Prompt], *, kept_bytes: int = KEPT_BYTES
) -> dict[str, tuple[int, ...]]:
    """The model's own tokens of each request: after the prompt, then after each forced output.

    The least recently used trajectories' KV is dropped beyond ``kept_bytes``: an order that comes back to a
    trajectory late costs time, never a token. ValueError for an empty prompt or a repeated request id.
    """
    found: dict[str, tuple[int, ...]] = {}
    contexts: dict[str, _Context] = {}
    for request, trajectory, prompt, output in prompts:
        if not len(prompt) or request in found:
            raise ValueError(f"request {request}: an empty prompt, or seen before")
        context = contexts.pop(trajectory, None) or _Context(backend)
        contexts[trajectory] = context
        last = len(prompt) - 1
        tokens = np.concatenate([prompt, output]).astype(np.uint32, copy=False)
        state = context.forward(tokens, last)
        found[request] = tuple(
            backend.token(State(at, state.hidden[at - state.position : at - state.position + 1]))
            for at in range(last, len(tokens))
        )
        held = sum(c.kv.nbytes for c in contexts.values())
        while held > kept_bytes and len(contexts) > 1:
            held -= contexts.pop(next(iter(contexts))).kv.nbytes
    return found


def prompt_blocks(backend: Backend, tokens: Tokens, *, block_tokens: int = 64) -> Bytes:
    """KV of the full blocks of a prompt, (blocks, layers, block_tokens, kv_bytes): each one is a Full Block."""
    blocks = len(tokens) // block_tokens
    whole = blocks * block_tokens
    if not blocks:
        return np.zeros((0, backend.layers, block_tokens, backend.kv_bytes), dtype=np.uint8)
    context = _Context(backend)
    context.forward(tokens[:whole], 0)
    split = context.kv.reshape(backend.layers, blocks, block_tokens, backend.kv_bytes)
    return np.ascontiguousarray(split.transpose(1, 0, 2, 3))
