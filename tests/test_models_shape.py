"""Laws of model shapes and of the files they come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulator.errors import ConfigError
from emulator.models.shape import Experts, bundled_shapes, load_shape

TEXT = """
name = "mine"
layers = 2
kv_bytes = 64
active_params = 1000
weight_bytes_per_gpu = 1000
compute = "bf16"
prefill_layer_overhead_us = 1.0
decode_layer_overhead_us = 1
[attention]
kind = "gqa"
heads = 2
head_dim = 4
"""


def test_bundled_shapes_are_the_papers() -> None:
    """Layers, KV bytes and Full Block sizes of the paper's models."""
    assert bundled_shapes() == ("ds27b", "ds660b", "qwen32b", "toy")
    per_token = {name: load_shape(name).kv_bytes_per_token for name in bundled_shapes()}
    assert per_token == {"ds27b": 19_200, "ds660b": 42_944, "qwen32b": 262_144, "toy": 64}
    assert all(load_shape(name).name == name for name in bundled_shapes())


def test_experts_are_the_papers() -> None:
    """Models with experts say what a token's exchange is made of; a dense model has none."""
    assert load_shape("ds660b").experts == Experts(hidden=7168, top_k=8, dispatch_bytes=1, combine_bytes=2)
    assert load_shape("ds27b").experts == Experts(hidden=2560, top_k=6, dispatch_bytes=1, combine_bytes=2)
    assert load_shape("qwen32b").experts is load_shape("toy").experts is None


@pytest.mark.parametrize(
    ("table", "error"),
    [
        ("hidden = 8\ntop_k = 2\ndispatch_bytes = 1", r"missing required field `combine_bytes`"),
        (
            "hidden = 8\ntopk = 2\ndispatch_bytes = 1\ncombine_bytes = 2",
            r"experts\.topk: unknown key; did you mean experts\.top_k\?",
        ),
        ("hidden = 0\ntop_k = 2\ndispatch_bytes = 1\ncombine_bytes = 2", r"hidden = 0: expected 1 or more"),
        ("hidden = 8\ntop_k = 99999\ndispatch_bytes = 1\ncombine_bytes = 2", r"top_k = 99999: expected at most"),
        ("hidden = 8\ntop_k = 2.5\ndispatch_bytes = 1\ncombine_bytes = 2", r"\$\.experts\.top_k"),
    ],
)
def test_malformed_experts_are_refused(tmp_path: Path, table: str, error: str) -> None:
    """Each fault of the table names the file and the key in one line; a good table is read."""
    path = tmp_path / "mine.toml"
    path.write_text(f"{TEXT}[experts]\n{table}\n")
    with pytest.raises(ConfigError, match=error) as caught:
        load_shape(str(path))
    assert "mine.toml" in caught.value.text
    assert "\n" not in caught.value.text
    path.write_text(f"{TEXT}[experts]\nhidden = 8\ntop_k = 2\ndispatch_bytes = 1\ncombine_bytes = 2\n")
    assert load_shape(str(path)).experts == Experts(8, 2, 1, 2)


def test_a_users_file(tmp_path: Path) -> None:
    """A path is a shape of one's own."""
    path = tmp_path / "mine.toml"
    path.write_text(TEXT)
    shape = load_shape(str(path))
    assert (shape.name, shape.layers, shape.decode_layer_overhead_us) == ("mine", 2, 1.0)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("layers = 2", "layer = 2", r"mine\.toml: layer: unknown key; did you mean layers\?"),
        (
            "head_dim = 4",
            "head_dims = 4",
            r"attention\.head_dims: unknown key; did you mean attention\.head_dim\?",
        ),
        ("head_dim = 4", "head_dim = 4\nzzz = 1", r"attention\.zzz: unknown key; known keys: kind, heads"),
        ("layers = 2", "", r"missing required field `layers`"),
        ("layers = 2", "layers = 2.5", r"\$\.layers"),
        ("layers = 2", "layers = true", r"\$\.layers"),
        ("layers = 2", "layers = 0", r"layers = 0: expected 1 or more"),
        ("prefill_layer_overhead_us = 1.0", "prefill_layer_overhead_us = nan", r"prefill_layer_overhead_us = nan"),
        ("prefill_layer_overhead_us = 1.0", "prefill_layer_overhead_us = inf", r"prefill_layer_overhead_us = inf"),
        ("prefill_layer_overhead_us = 1.0", "prefill_layer_overhead_us = 1e300", r"1e\+300: expected at most"),
        ("layers = 2", "layers = 1000000000", r"layers = 1000000000: expected at most 10,000"),
        ('compute = "bf16"', 'compute = "int4"', r"int4"),
        ('kind = "gqa"', 'kind = "mha"', r"attention\.kind = 'mha': expected gqa or mla-sparse"),
        ('kind = "gqa"', 'kind = ["gqa"]', r"attention\.kind = \['gqa'\]"),
        ('kind = "gqa"\n', "", r"attention\.kind = None"),
        ("[attention]", "[[attention]]", r"attention"),
        ('name = "mine"', 'name = "mine', r"not readable as TOML"),
    ],
)
def test_malformed_shapes_are_refused(tmp_path: Path, old: str, new: str, error: str) -> None:
    """Each fault names the file and the key in one line."""
    path = tmp_path / "mine.toml"
    path.write_text(TEXT.replace(old, new))
    with pytest.raises(ConfigError, match=error) as caught:
        load_shape(str(path))
    assert "mine.toml" in caught.value.text
    assert "\n" not in caught.value.text


def test_the_indexer_has_only_a_part_of_the_kv(tmp_path: Path) -> None:
    """An indexer that needs all KV bytes leaves none for attention: refused."""
    sparse = (
        'kind = "mla-sparse"\nheads = 1\nqk_dim = 1\nv_dim = 1\ntop_k = 1\nindexer_heads = 1\nindexer_dim = 1\n'
    )
    path = tmp_path / "mine.toml"
    path.write_text(TEXT.split('kind = "gqa"', maxsplit=1)[0] + sparse + "indexer_kv_bytes = 64\n")
    with pytest.raises(ConfigError, match=r"indexer_kv_bytes = 64: expected a part of kv_bytes = 64"):
        load_shape(str(path))
    path.write_text(TEXT.split('kind = "gqa"', maxsplit=1)[0] + sparse + "indexer_kv_bytes = 16\n")
    assert load_shape(str(path)).attention.token_bytes(10, 64) == 16 * 10 + 48


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("ds660", r"model 'ds660': .*; did you mean ds660b\?"),
        ("llama", r"model 'llama': expected one of ds27b, .*ends in \.toml"),
        ("", r"model ''"),
        ("none.toml", r"none\.toml: no such model shape file"),
        ("/", r"expected a model shape, a regular TOML file"),
        ("a\0b.toml", r"toml"),
    ],
)
def test_what_is_no_shape_is_refused(name: str, error: str) -> None:
    """An unknown name gets a suggestion; a path that is no file says so."""
    with pytest.raises(ConfigError, match=error):
        load_shape(name)


@pytest.mark.parametrize(
    "data",
    [b"\x7fELF\xff\xfe", "name = 1".encode("utf-16"), b"\0\0", b"", b"caf\xe9 = 1", b"a = " + b"[" * 100_000],
)
def test_what_is_no_toml_is_refused(tmp_path: Path, data: bytes) -> None:
    """Binary, UTF-16, Latin-1, NUL and empty files are one clear line."""
    path = tmp_path / "bad.toml"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"bad\.toml") as caught:
        load_shape(str(path))
    assert "\n" not in caught.value.text
