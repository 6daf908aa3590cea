"""What several commands make of their arguments: one resolved configuration, every error before any act."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..config import RunConfig, load_config
from ..errors import ConfigError
from ..plan import run_config

if TYPE_CHECKING:
    from topology.spec import ClusterSpec

__all__ = ["load_run"]


def load_run(
    topology: str,
    *,
    model: str | None = None,
    kv_bytes: int | None = None,
    dilation: float | None = None,
) -> RunConfig:
    """The configuration of TOPOLOGY with the options that override its file.

    TopologyError or ConfigError (exit 2) name the file and key, or the option.
    """
    from topology.spec import PRESETS, load_topology

    spec: ClusterSpec = load_topology(topology)
    engine, models, scale = load_config(None if topology in PRESETS else Path(topology))
    if model is not None:
        models = msgspec.structs.replace(models, name=model)
    if kv_bytes is not None:
        scale = msgspec.structs.replace(scale, kv_bytes=kv_bytes)
    if dilation is not None:
        if not 0 < dilation < math.inf:
            raise ConfigError(f"--dilation {dilation}: expected a positive, finite number")
        scale = msgspec.structs.replace(scale, dilation=dilation)
    return run_config(spec, engine, models, scale)
