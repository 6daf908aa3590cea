"""Laws of the toy backend that are its own; those of every backend are in test_models_laws.py."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import emulator.models
from emulator.errors import ConfigError
from emulator.models import load_backend
from emulator.models.shape import load_shape


def test_without_torch_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch is not installed, asking for a toy is a user error that names the extra to install."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "emulator.models.toy", raising=False)
    monkeypatch.delattr(emulator.models, "toy", raising=False)
    with pytest.raises(ConfigError, match=r"needs torch: install the extra dualpath-emulator\[toy\]"):
        load_backend("toy", layers=4, kv_bytes=16)


def test_unknown_backend_is_refused() -> None:
    """A backend that is not there is a user error."""
    with pytest.raises(ConfigError, match="expected digest or toy"):
        load_backend("gpt", layers=4, kv_bytes=16)  # type: ignore[arg-type]


class TestWithTorch:
    """What needs torch."""

    @pytest.fixture(autouse=True)
    def _torch(self) -> None:
        pytest.importorskip("torch", reason="torch, the extra `toy`, is not installed")

    def test_shape_is_its_own(self) -> None:
        """The bundled shape ``toy`` is the backend's, and another is refused with what to set."""
        from emulator.models import toy

        shape = load_shape("toy")
        assert (shape.layers, shape.kv_bytes) == (toy.LAYERS, toy.KV_BYTES)
        with pytest.raises(ConfigError, match=r"4 layers of 16 KV bytes, not 61 of 1; set model\.name = \"toy\""):
            load_backend("toy", layers=61, kv_bytes=1)

    def test_contexts_above_the_limit_are_refused(self) -> None:
        """4,096 tokens fit, 4,097 are a user error that says what to do."""
        backend = load_backend("toy", layers=4, kv_bytes=16)
        backend.check_context(4096)
        with pytest.raises(ConfigError, match=r"4097 tokens .* 4096; use --max-len 4096"):
            backend.check_context(4097)
        with pytest.raises(ConfigError, match="4097 tokens"):
            backend.embed(np.zeros(2, dtype=np.uint32), 4095)

    def test_attention_is_exact_at_its_extremes(self) -> None:
        """At a full context of the largest keys, values and queries, sums are those of unbounded integers."""
        import torch

        from emulator.models import toy

        backend = toy.ToyBackend()
        shift = backend._shift.numpy().T.astype(int)
        kv = np.zeros((toy.CONTEXT_LIMIT, toy.KV_BYTES), dtype=np.uint8)
        kv[:, : toy.HALF] = np.where(shift > 0, 255, 0)
        kv[::3, toy.HALF :] = 255
        query = np.full((2, toy.HALF), toy.REACH)
        query[:, ::2] *= -1
        got = backend._attend(torch.from_numpy(query.astype(np.float64)), kv, toy.CONTEXT_LIMIT - 2).numpy()
        signed = kv.astype(int) - 128
        for row in range(2):
            for head in range(toy.HEADS):
                dims = slice(head * toy.DIM, (head + 1) * toy.DIM)
                weight_sum, sums = 0, [0] * toy.DIM
                for s in range(toy.CONTEXT_LIMIT - 1 + row):
                    keys = (signed[s, : toy.HALF] + shift[s])[dims]
                    weight = sum(int(q) * int(k) for q, k in zip(query[row, dims], keys, strict=True)) ** 2
                    weight_sum += weight
                    for d in range(toy.DIM):
                        sums[d] += weight * int(signed[s, toy.HALF :][dims][d])
                at = head * (toy.DIM + 1)
                assert [int(x) for x in got[row, at : at + toy.DIM + 1]] == [*sums, weight_sum]
                assert max(map(abs, [*sums, weight_sum])) < 2**53

    def test_a_full_context_decodes(self) -> None:
        """The last position of the limit is usable, the one after it is refused."""
        backend = load_backend("toy", layers=4, kv_bytes=16)
        decoder = backend.open_decode()
        kv = np.zeros((4095, 16), dtype=np.uint8)
        for layer in range(4):
            decoder.absorb(layer, kv)
        decoder.step(1)
        with pytest.raises(ConfigError, match="4097 tokens"):
            decoder.step(2)

    def test_misuse_is_refused(self) -> None:
        """A role's mistake is a ValueError, never a wrong token."""
        backend = load_backend("toy", layers=4, kv_bytes=16)
        with pytest.raises(ValueError, match="at least one"):
            backend.embed(np.zeros(0, dtype=np.uint32), 0)
        decoder = backend.open_decode()
        with pytest.raises(ValueError, match="before the KV"):
            decoder.step(1)
        decoder.absorb(1, np.zeros((5, 16), dtype=np.uint8))
        with pytest.raises(ValueError, match="twice"):
            decoder.absorb(1, np.zeros((5, 16), dtype=np.uint8))
        with pytest.raises(ValueError, match="5 tokens"):
            decoder.absorb(0, np.zeros((6, 16), dtype=np.uint8))
