"""Models: their shapes (``shape``), what computes their tensors (``digest``, ``toy``), and the reference."""

from __future__ import annotations

from typing import Literal

from ..errors import ConfigError
from .backend import Backend
from .digest import DigestBackend

__all__ = ["load_backend"]


def load_backend(name: Literal["digest", "toy"], *, layers: int, kv_bytes: int) -> Backend:
    """The backend ``name`` for a model of ``layers`` layers with ``kv_bytes`` payload KV bytes per token each.

    ConfigError where the backend cannot have this shape, or needs a package that is not installed.
    """
    if name == "digest":
        return DigestBackend(layers, kv_bytes)
    raise ConfigError(f"model.backend = {name!r}: expected digest or toy")
