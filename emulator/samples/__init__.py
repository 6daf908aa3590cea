"""The bundled workloads, for a run without a trace. Made by ``emulator.synth``; a test makes them again.

``agentic``: 16 agents of the paper's 32K set at an eighth of all lengths (contexts to 4,096 tokens).
``io-bound``: 48 agents of 4 turns on contexts of 32K and more, short appends, 2 to 8 generated tokens;
sized for 1P1D serving DS 660B with a warm store, where one storage NIC is offered more than twice what it
carries for most of the run (``emulate analyze`` prints the figure).
``hbm-bound``: 20 agents of 3 turns on contexts of 76K and more; a quarter of the later appends are 1.5K to 2.5K
tokens, the others short. Without layerwise prefill one such context fits a GPU's HBM (149K tokens of DS 660B),
while two are read for it in the time of a forward that computes a long append: on 1P1D Basic's HBM binds.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from ..errors import ConfigError
from ..synth import synth_agentic, synth_hbm_bound, synth_io_bound
from ..traces import read_trace
from ..workload import Workload

__all__ = ["SAMPLES", "load_sample", "make_sample"]

SAMPLES = ("agentic", "io-bound", "hbm-bound")


def load_sample(name: str) -> Workload:
    """The bundled workload ``name``. Raises ConfigError for a name that is none of SAMPLES."""
    _known(name)
    with resources.as_file(resources.files(__name__) / f"{name}.jsonl") as path:
        return read_trace(Path(path), "native").workload


def make_sample(name: str) -> Workload:
    """Synthesise the workload that is bundled as ``name``."""
    _known(name)
    if name == "agentic":
        return synth_agentic(seed=1, trajectories=16, max_len=32_768, scale=1 / 8)
    if name == "hbm-bound":
        return synth_hbm_bound(seed=1, trajectories=20, turns=3)
    return synth_io_bound(seed=1, trajectories=48, turns=4, gen=(2, 8))


def _known(name: str) -> None:
    if name not in SAMPLES:
        raise ConfigError(f"sample {name!r}: expected one of {', '.join(SAMPLES)}")
