"""What computes a forward pass: the interface between the roles and a model.

Theory of operation. Prefill of ``n`` new tokens at absolute positions ``position ..`` is ``embed``, then
``layer`` for every layer in order, then ``token``. Before a layer, rows ``[0, cached)`` of its KV are what was
received; the call writes rows ``[cached, cached + n)``. However a prompt is cut into chunks and batches, the
bytes and tokens are the same. A decoder absorbs each layer's KV of the whole prompt once and then takes the
forced output tokens one by one. A backend holds no request's state: that is in ``State``, the KV and the decoder.

Errors: ValueError where a role breaks these rules (a fault of ours), ConfigError where a user asked for what
the backend cannot do. Must not import a fabric or a role.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["VOCABULARY", "Backend", "Bytes", "Decoder", "State", "Tokens", "check_layer_call"]

Bytes = npt.NDArray[np.uint8]
Tokens = npt.NDArray[np.uint32]

VOCABULARY = 129_280
"""Token ids are below this: DeepSeek-V3.2's vocabulary (its published config.json)."""


@dataclass(frozen=True, slots=True)
class State:
    """The hidden state of ``n`` tokens between two layers; ``hidden[i]`` belongs to ``position + i``."""

    position: int
    hidden: npt.NDArray[Any]


class Decoder(Protocol):
    """One request in decode: its prompt's KV and that of every token since."""

    def absorb(self, layer: int, kv: Bytes) -> None:
        """Take a layer's KV of the whole prompt, (length, kv_bytes); once a layer, in any order.

        ``kv`` is read before the call returns and not kept.
        """

    def step(self, token: int) -> tuple[int, Bytes]:
        """Append a forced ``token``: the model's own next token, and the token's KV (layers, kv_bytes)."""


class Backend(Protocol):
    """A model that computes real bytes from real bytes."""

    @property
    def layers(self) -> int: ...

    @property
    def kv_bytes(self) -> int:
        """Payload KV bytes per token and layer."""

    def check_context(self, tokens: int) -> None:
        """ConfigError when a context of ``tokens`` is more than the backend can hold."""

    def embed(self, tokens: Tokens, position: int) -> State:
        """Begin a forward over new ``tokens`` (n,) at positions ``position ..``; n >= 1."""

    def layer(self, index: int, state: State, kv: Bytes, cached: int) -> State:
        """Run one layer. ``kv`` is (cached + n, kv_bytes); rows from ``cached`` on are written in place.

        ``cached`` equals ``state.position``: all that came before is in the rows below it.
        """

    def token(self, state: State) -> int:
        """The model's own next token at the last position, after the last layer."""

    def open_decode(self) -> Decoder: ...


def check_layer_call(backend: Backend, index: int, state: State, kv: Bytes, cached: int) -> None:
    """ValueError unless the arguments of ``Backend.layer`` fit together."""
    if not 0 <= index < backend.layers:
        raise ValueError(f"layer {index}: the model has layers 0 to {backend.layers - 1}")
    if cached != state.position:
        raise ValueError(f"layer {index}: {cached} rows are cached, but the new tokens begin at {state.position}")
    expected = (cached + len(state.hidden), backend.kv_bytes)
    if kv.shape != expected or kv.dtype != np.uint8:
        raise ValueError(f"layer {index}: KV is {kv.dtype} {kv.shape}, expected uint8 {expected}")
