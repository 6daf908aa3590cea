"""Configuration files are read whole or refused with the key's path."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulator.config import EngineConfig, ModelConfig, ScaleConfig
from emulator.errors import ConfigError
from emulator.settings import load_config


def test_no_file_means_the_defaults() -> None:
    """All tables are optional."""
    assert load_config(None) == (EngineConfig(), ModelConfig(), ScaleConfig())


def test_given_keys_replace_defaults(tmp_path: Path) -> None:
    """A key that is given is what the run gets; the others stay."""
    path = tmp_path / "x.toml"
    path.write_text("[engine]\npe_buffer_gb = 40\n[scale]\ndilation = 2.5\n[cluster]\nname = 'not ours'\n")
    engine, _, scale = load_config(path)
    assert (engine.pe_buffer_gb, engine.de_buffer_gb, scale.dilation) == (40, 80, 2.5)


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    """As for the topology's own tables, which are read from the same file."""
    path = tmp_path / "x.toml"
    path.write_bytes(b"\xef\xbb\xbf[engine]\r\nblock_tokens = 32\r\n")
    assert load_config(path)[0].block_tokens == 32


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[engine]\npe_bufer_gb = 1\n", "engine.pe_bufer_gb: unknown key; did you mean pe_buffer_gb?"),
        ("[engine]\nzzz = 1\n", "known keys: "),
        ("engine = 3\n", "expected a table [engine]"),
        ("[engine]\npe_buffer_gb = -1\n", "pe_buffer_gb = -1"),
        ("[engine]\npe_buffer_gb = nan\n", "pe_buffer_gb = nan"),
        ("[engine]\npe_buffer_gb = '80'\n", "pe_buffer_gb"),
        ("[engine]\nblock_tokens = 0\n", "block_tokens = 0"),
        ("[engine]\npe_buffer_gb = 1e300\n", "pe_buffer_gb = 1e+300: expected a positive number, at most 1000000"),
        ("[engine]\nquota_s = inf\n", "quota_s = inf"),
        (
            "[engine]\nstripe_blocks = 99999999999999999999\n",
            "stripe_blocks = 99999999999999999999: expected 1 to",
        ),
        ("[engine]\nread_message_blocks = 513\n", "read_message_blocks = 513: expected 1 to 512"),
        ("[engine]\nrpc_latency_s = 2.0\n", "rpc_latency_s = 2.0"),
        ("[model]\nbackend = 'gpu'\n", "backend"),
        ("[scale]\nkv_bytes = true\n", "kv_bytes"),
        ("[scale]\nkv_bytes = 1.5\n", "kv_bytes"),
        ("[scale]\ndilation = 0\n", "dilation"),
        ("[scale]\ndilation = -inf\n", "dilation"),
        ("[scale\n", "not readable as TOML"),
        ("a = " + "[" * 100_000, "not readable as TOML"),
    ],
)
def test_bad_values_are_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    """One line with the file and the key; no value is clamped."""
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert says in caught.value.text
    assert str(path) in caught.value.text
    assert "\n" not in caught.value.text


@pytest.mark.parametrize(
    "line",
    [
        "quota = 1",
        "quota_s = 'x'",
        "quota_s = nan",
        "batch_tokens = 0",
        "batch_tokens = true",
        "de_buffer_gb = []",
    ],
)
def test_a_mistake_is_told_with_its_line(tmp_path: Path, line: str) -> None:
    """Unknown, of a wrong type, out of range: file, line, table and key."""
    path = tmp_path / "x.toml"
    path.write_text(f"[scale]\n\n[engine]\nblock_tokens = 32\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.text.startswith(f"{path}:5: engine.{line.split(maxsplit=1)[0]}")
