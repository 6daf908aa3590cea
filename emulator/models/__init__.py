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
    if name != "toy":
        raise ConfigError(f"model.backend = {name!r}: expected digest or toy")
    # torch takes 1.3 s and 275 MB to import: only a toy pays for it.
    try:
        from . import toy
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ConfigError("model.backend = toy: needs torch: install the extra dualpath-emulator[toy]") from None
    if (layers, kv_bytes) != (toy.LAYERS, toy.KV_BYTES):
        raise ConfigError(
            f"model.backend = toy: has {toy.LAYERS} layers of {toy.KV_BYTES} KV bytes, not {layers} of {kv_bytes}"
            f'; set model.name = "toy" and scale.kv_bytes = {toy.KV_BYTES}'
        )
    return toy.ToyBackend()
