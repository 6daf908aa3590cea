"""Laws of the reference: what it keeps between requests changes no token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator.models import load_backend
from emulator.models.backend import Backend, Bytes, State, Tokens
from emulator.models.digest import DigestBackend, DigestDecoder
from emulator.models.reference import Prompt, reference_tokens

DIGEST = load_backend("digest", layers=5, kv_bytes=3)


def by_decode(backend: Backend, prompt: Tokens, output: Tokens) -> tuple[int, ...]:
    """A request from scratch, the other way: prefill of the prompt alone, then decode of the outputs."""
    kv = np.zeros((backend.layers, len(prompt), backend.kv_bytes), dtype=np.uint8)
    state = backend.embed(prompt, 0)
    for layer in range(backend.layers):
        state = backend.layer(layer, state, kv[layer], 0)
    decoder = backend.open_decode()
    for layer in range(backend.layers):
        decoder.absorb(layer, kv[layer])
    return (backend.token(state), *(decoder.step(int(token))[0] for token in output))


words = st.lists(st.integers(0, 3), max_size=6).map(lambda x: np.array(x, dtype=np.uint32))
prompts = st.lists(st.integers(0, 3), min_size=1, max_size=8).map(lambda x: np.array(x, dtype=np.uint32))


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(st.tuples(st.sampled_from("abc"), prompts, words), max_size=8),
    kept_bytes=st.sampled_from([0, 200, 1 << 20]),
)
def test_any_history_gives_the_tokens_of_a_fresh_start(
    requests: list[tuple[str, Tokens, Tokens]], kept_bytes: int
) -> None:
    """Prompts that grow, shrink, repeat or diverge, in any order, with any memory: as if each were the first."""
    numbered: list[Prompt] = [(str(i), *request) for i, request in enumerate(requests)]
    found = reference_tokens(DIGEST, numbered, kept_bytes=kept_bytes)
    assert found == {request: by_decode(DIGEST, prompt, output) for request, _, prompt, output in numbered}


def test_the_toys_reference() -> None:
    """A growing session and a diverging turn on the toy backend."""
    pytest.importorskip("torch", reason="torch, the extra `toy`, is not installed")
    toy = load_backend("toy", layers=4, kv_bytes=16)
    tokens = np.random.default_rng(1).integers(0, 1000, 400).astype(np.uint32)
    changed = tokens.copy()
    changed[150] += 1
    session: list[Prompt] = [
        ("1", "s", tokens[:100], tokens[100:108]),
        ("2", "s", tokens[:300], tokens[300:303]),
        ("3", "s", changed[:310], tokens[:2]),
    ]
    expected = {request: by_decode(toy, prompt, output) for request, _, prompt, output in session}
    assert reference_tokens(toy, session) == expected


class Counting:
    """A digest that counts the tokens that it is given."""

    def __init__(self) -> None:
        self._inner = DigestBackend(2, 1)
        self.layers, self.kv_bytes = 2, 1
        self.seen: list[int] = []

    def check_context(self, tokens: int) -> None:
        self._inner.check_context(tokens)

    def embed(self, tokens: Tokens, position: int) -> State:
        self.seen.append(len(tokens))
        return self._inner.embed(tokens, position)

    def layer(self, index: int, state: State, kv: Bytes, cached: int) -> State:
        return self._inner.layer(index, state, kv, cached)

    def token(self, state: State) -> int:
        return self._inner.token(state)

    def open_decode(self) -> DigestDecoder:
        return self._inner.open_decode()


def test_only_new_tokens_are_computed() -> None:
    """A turn costs its new tokens; a turn that drops tokens costs what comes after the drop."""
    counting = Counting()
    tokens = np.arange(1000, dtype=np.uint32)
    empty = tokens[:0]
    dropped = np.concatenate([tokens[:150], tokens[160:300]])
    session: list[Prompt] = [
        ("1", "s", tokens[:100], tokens[100:110]),
        ("2", "s", tokens[:200], tokens[200:205]),
        ("3", "s", dropped, empty),
        ("4", "s", dropped, empty),
    ]
    reference_tokens(counting, session)
    assert counting.seen == [110, 95, 140, 1]


def test_malformed_requests_are_refused() -> None:
    """An empty prompt has no next token, and an id names one request."""
    one = np.ones(1, dtype=np.uint32)
    with pytest.raises(ValueError, match="request a: an empty prompt"):
        reference_tokens(DIGEST, [("a", "s", one[:0], one)])
    with pytest.raises(ValueError, match="request a"):
        reference_tokens(DIGEST, [("a", "s", one, one), ("a", "s", one, one)])
    assert reference_tokens(DIGEST, []) == {}
