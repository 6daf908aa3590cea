"""Model shapes: the numbers of a model that decide how many bytes and FLOPs a token costs.

Pure but for reading a file. A shape is a TOML file: bundled beside this module (``ds660b``, ``ds27b``,
``qwen32b``, ``toy``) or the user's own; every constant carries its source there. FLOPs count a multiply-add
as two.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..errors import ConfigError

__all__ = ["Attention", "Experts", "Gqa", "MlaSparse", "ModelShape", "bundled_shapes", "load_shape"]


_MOST = {
    "layers": 10_000,
    "kv_bytes": 2**30,
    "active_params": 10**16,
    "weight_bytes_per_gpu": 10**16,
    "prefill_layer_overhead_us": 1e6,
    "decode_layer_overhead_us": 1e6,
}
"""Far beyond any model: above these a run would take for ever, so they are mistakes of unit or typing."""

_MOST_OF_EXPERTS = {"hidden": 2**24, "top_k": 2**16, "dispatch_bytes": 16, "combine_bytes": 16}


def _at_least_one(value: msgspec.Struct, *names: str) -> None:
    for name in names:
        if getattr(value, name) < 1:
            raise ValueError(f"{name} = {getattr(value, name)}: expected 1 or more")


def _at_most(value: msgspec.Struct, limits: Mapping[str, float]) -> None:
    for name, most in limits.items():
        if getattr(value, name) > most:
            raise ValueError(f"{name} = {getattr(value, name)}: expected at most {most:,.0f}")


class Gqa(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="gqa"):
    """Grouped-query attention over the whole context; ``heads`` query heads of ``head_dim``."""

    heads: int
    head_dim: int

    def __post_init__(self) -> None:
        _at_least_one(self, "heads", "head_dim")

    def token_flops(self, context: int) -> int:
        """FLOPs of one layer's attention for one token that attends to ``context`` tokens."""
        return 4 * self.heads * self.head_dim * context

    def span_flops(self, cached: int, new: int) -> int:
        """FLOPs of one layer for ``new`` tokens after ``cached``; token i of them attends to cached + i."""
        return 4 * self.heads * self.head_dim * _sum_of_contexts(cached, new)

    def token_bytes(self, context: int, kv_bytes: int) -> int:
        """KV bytes that one layer reads for one decoded token, of ``kv_bytes`` per token."""
        return context * kv_bytes


class MlaSparse(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="mla-sparse"):
    """Latent attention over the ``top_k`` tokens that an indexer picks from the whole context.

    ``qk_dim`` and ``v_dim`` are the absorbed (latent) widths; the indexer scores every token with
    ``indexer_heads`` heads of ``indexer_dim`` and keeps ``indexer_kv_bytes`` of a token's KV bytes for that.
    """

    heads: int
    qk_dim: int
    v_dim: int
    top_k: int
    indexer_heads: int
    indexer_dim: int
    indexer_kv_bytes: int

    def __post_init__(self) -> None:
        _at_least_one(self, "heads", "qk_dim", "v_dim", "top_k")
        _at_least_one(self, "indexer_heads", "indexer_dim", "indexer_kv_bytes")

    @property
    def _attended(self) -> int:
        return 2 * self.heads * (self.qk_dim + self.v_dim)

    @property
    def _indexed(self) -> int:
        return 2 * self.indexer_heads * self.indexer_dim

    def token_flops(self, context: int) -> int:
        """FLOPs of one layer's attention for one token that may attend to ``context`` tokens."""
        return self._attended * min(context, self.top_k) + self._indexed * context

    def span_flops(self, cached: int, new: int) -> int:
        """FLOPs of one layer for ``new`` tokens after ``cached``; token i of them may attend to cached + i."""
        below = min(max(self.top_k - cached, 0), new)
        attended = _sum_of_contexts(cached, below) + (new - below) * self.top_k
        return self._attended * attended + self._indexed * _sum_of_contexts(cached, new)

    def token_bytes(self, context: int, kv_bytes: int) -> int:
        """KV bytes that one layer reads for one decoded token, of ``kv_bytes`` per token."""
        latent = kv_bytes - self.indexer_kv_bytes
        return self.indexer_kv_bytes * context + latent * min(context, self.top_k)


def _sum_of_contexts(cached: int, new: int) -> int:
    """Sum of cached + i over i = 1 .. new."""
    return new * cached + new * (new + 1) // 2


Attention = Gqa | MlaSparse


class Experts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What expert parallelism exchanges: a layer sends a token to ``top_k`` experts and adds up what they return.

    ``hidden``: elements of a token's activation; ``dispatch_bytes`` and ``combine_bytes``: of one element on the
    way to an expert and back.
    """

    hidden: int
    top_k: int
    dispatch_bytes: int
    combine_bytes: int

    def __post_init__(self) -> None:
        _at_least_one(self, *self.__struct_fields__)
        _at_most(self, _MOST_OF_EXPERTS)


class ModelShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model as its costs see it.

    ``kv_bytes``: per token and layer. ``active_params``: used per token, attention scores apart.
    ``weight_bytes_per_gpu``: resident on one GPU under the deployment's parallelism, read by every forward.
    ``compute``: the precision of its matrix products. Overheads: fixed time per layer of a forward.
    ``experts``: None for a dense model. ``hidden``: elements of a token's activation, which tensor-parallel
    engines exchange; a model with experts says it there, and a dense one need not say it where an engine is
    one GPU.
    """

    name: str
    layers: int
    kv_bytes: int
    active_params: int
    weight_bytes_per_gpu: int
    compute: Literal["fp8", "bf16"]
    prefill_layer_overhead_us: float
    decode_layer_overhead_us: float
    attention: Attention
    experts: Experts | None = None
    hidden: int | None = None

    def __post_init__(self) -> None:
        if self.hidden is not None:
            _at_least_one(self, "hidden")
            _at_most(self, {"hidden": _MOST_OF_EXPERTS["hidden"]})
            if self.experts is not None and self.experts.hidden != self.hidden:
                raise ValueError(
                    f"hidden = {self.hidden}: expected experts.hidden = {self.experts.hidden}, or none"
                )
        _at_least_one(self, "layers", "kv_bytes", "active_params", "weight_bytes_per_gpu")
        for name in ("prefill_layer_overhead_us", "decode_layer_overhead_us"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} = {getattr(self, name)}: expected 0 or more")
        _at_most(self, _MOST)
        if isinstance(self.attention, MlaSparse) and self.attention.indexer_kv_bytes >= self.kv_bytes:
            raise ValueError(
                f"attention.indexer_kv_bytes = {self.attention.indexer_kv_bytes}: expected a part of "
                f"kv_bytes = {self.kv_bytes}"
            )

    @property
    def activation_width(self) -> int | None:
        """Elements of a token's activation between layers; None where the model's file does not say."""
        return self.hidden if self.experts is None else self.experts.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        """KV bytes of one token in all layers."""
        return self.layers * self.kv_bytes


def bundled_shapes() -> tuple[str, ...]:
    """Names of the shapes that come with the package, sorted."""
    files = resources.files(__package__).iterdir()
    return tuple(sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml")))


def load_shape(name_or_path: str) -> ModelShape:
    """The bundled shape of that name, or the one in a TOML file (a path: it has a ``/`` or ends in .toml).

    Raises ConfigError with the file, the key, what was expected, and a suggestion for an unknown name or key.
    """
    if "/" not in name_or_path and not name_or_path.endswith(".toml"):
        names = bundled_shapes()
        if name_or_path not in names:
            near = difflib.get_close_matches(name_or_path, names, 1)
            hint = f"did you mean {near[0]}?" if near else "a shape of your own is a path that ends in .toml"
            raise ConfigError(f"model {name_or_path!r}: expected one of {', '.join(names)}; {hint}")
        text = resources.files(__package__).joinpath(f"{name_or_path}.toml").read_text(encoding="utf-8")
        return _parse(f"{name_or_path}.toml", text)
    path = Path(name_or_path)
    try:
        if not path.is_file():
            raise ConfigError(
                f"{path}: expected a model shape, a regular TOML file"
                if path.exists()
                else f"{path}: no such model shape file"
            )
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name_or_path!r}: not readable as TOML: {error}") from None
    return _parse(str(path), text)


def _parse(source: str, text: str) -> ModelShape:
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{source}: not readable as TOML: {error}") from None
    _refuse_unknown(source, "", data, ModelShape.__struct_fields__)
    attention = data.get("attention")
    if isinstance(attention, dict):
        kind = attention.get("kind")
        if kind not in ("gqa", "mla-sparse"):
            raise ConfigError(f"{source}: attention.kind = {kind!r}: expected gqa or mla-sparse")
        fields = Gqa.__struct_fields__ if kind == "gqa" else MlaSparse.__struct_fields__
        _refuse_unknown(source, "attention.", attention, ("kind", *fields))
    experts = data.get("experts")
    if isinstance(experts, dict):
        _refuse_unknown(source, "experts.", experts, Experts.__struct_fields__)
    try:
        return msgspec.convert(data, ModelShape)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}") from None


def _refuse_unknown(source: str, prefix: str, table: dict[str, Any], known: tuple[str, ...]) -> None:
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known keys: {', '.join(known)}"
            raise ConfigError(f"{source}: {prefix}{key}: unknown key; {hint}")
