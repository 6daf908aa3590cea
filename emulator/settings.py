"""Reading the `[engine]`, `[model]` and `[scale]` tables of a topology file.

``topology`` reads its own tables of the same file and ignores these; every error here names the line and the key.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from topology.spec import line_of

from .config import EngineConfig, ModelConfig, ScaleConfig
from .errors import ConfigError

__all__ = ["load_config"]


def load_config(path: Path | None) -> tuple[EngineConfig, ModelConfig, ScaleConfig]:
    """Read `[engine]`, `[model]` and `[scale]` of a TOML file (all optional; None: the defaults).

    Raises ConfigError with the file, the line, the key's path and a suggestion for an unknown key.
    """
    if path is None:
        return EngineConfig(), ModelConfig(), ScaleConfig()
    try:
        text = path.read_bytes().decode("utf-8-sig")
        data = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not readable as TOML: {error}") from None
    return (
        _table(path, text, data, "engine", EngineConfig),
        _table(path, text, data, "model", ModelConfig),
        _table(path, text, data, "scale", ScaleConfig),
    )


def _table(path: Path, text: str, data: dict[str, Any], name: str, kind: Any) -> Any:
    table = data.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{_place(path, text, (), name)}: {name}: expected a table [{name}]")
    for key in table:
        if key not in kind.__struct_fields__:
            near = difflib.get_close_matches(key, kind.__struct_fields__, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; known keys: {', '.join(kind.__struct_fields__)}"
            raise ConfigError(f"{_place(path, text, (name,), key)}: {name}.{key}: unknown key{hint}")
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        key, what = _key_of(str(error))
        raise ConfigError(f"{_place(path, text, (name,), key)}: {name}.{key}{what}") from None


def _key_of(error: str) -> tuple[str, str]:
    """The key that a validation error is about, and what it says of it: a wrong type, or a value out of range."""
    if typed := re.fullmatch(r"(.*) - at `\$\.(\w+)`", error):
        return typed.group(2), f": {typed.group(1)}"
    key = re.match(r"\w*", error)
    assert key is not None
    return key.group(), error.removeprefix(key.group())


def _place(path: Path, text: str, table: tuple[str, ...], key: str) -> str:
    number = line_of(text, table, key)
    return f"{path}:{number}" if number else str(path)
