"""The configuration of one run: the `[engine]`, `[model]` and `[scale]` tables and the options of a replay.

Pure values. Everything a node needs to play its role is in ``RunConfig``, a frozen value that
crosses processes as JSON. ``settings`` reads the tables from a file.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .systems import SYSTEMS

__all__ = [
    "READ_BLOCKS",
    "EngineConfig",
    "ModelConfig",
    "ReplayConfig",
    "RunConfig",
    "ScaleConfig",
]

READ_BLOCKS = 512
"""Full Blocks that one read call asks for at the most; a longer context takes several."""

_MOST_GB_OR_S = 1e6
"""Of a buffer or a quota: a petabyte, eleven days. More is a mistake of unit."""

_MOST_COUNT = 2**31 - 1

PathChoice = Literal["pe", "de", "auto"]
Exchange = Literal["layer", "forward"]
BackendName = Literal["digest", "toy"]


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes and limits of an engine and its node, in model units.

    Buffers: paper section 2 (80 GB a node for the DS models). ``pool_gb``: what a PE or DE node gives to the DRAM
    pool of a system that has one (1.5 TB a node in the paper's SGL(MC)). ``prefix_cache_gb``: what it gives to a
    cache of its own in front of storage; 0: none, as in the paper. ``de_hbm_kv_gb``: what 80 GB of HBM
    leave beside the weights under EP over 16-32 GPUs (660 GB / 16 = 41 GB) and activations. ``pe_hbm_kv_gb``:
    150 K tokens of DS 660B (the study of the paper's numbers). ``rpc_latency_s`` is one way.

    Scheduling (paper, section 3): ``alpha_s`` and ``beta_s`` are what a node reads and a GPU processes in that
    time, in tokens by `emulate profile`; ``z`` bounds a DE's load over the mean; a group's leader fetches work at
    most once a ``fetch_period_s`` (ASSUMED: the paper does not print it, and it hardly matters).
    Traffic: a doorbell rings for ``doorbell_batch`` work requests and costs the engine ``submit_write_s`` (RDMA
    write: about 1 us) or ``submit_copy_s`` (CUDA copy: 5 to 7 us; both the paper, section 4). Exchanges of an
    expert-parallel group: one a layer or one a forward. ``hardware_deviation``: how far attention times of the
    emulated GPUs lie off the formula, by a hidden function of ``hardware_seed``. ``shaper_tick_s``: how often
    ``--qos software`` looks (ASSUMED: a millisecond is the unit of epoll's timeouts and of the kernel's tick, and
    what a loop that shares its processor with an engine's other work keeps; a faster one would have to spin).

    ``tensor_parallel``: GPUs of one engine, of PEs and DEs alike (``tensors``); it divides the GPUs of every node.
    ``pe_hbm_kv_gb`` and ``de_hbm_kv_gb`` are of each of them.

    ``request_timeout_s``: a turn that is not settled so long after it arrived is given up; 0: never.
    ``stall_s``: *wall* seconds without any progress after which a run on real links ends with an error.
    """

    pe_buffer_gb: float = 80.0
    de_buffer_gb: float = 80.0
    pool_gb: float = 1500.0
    prefix_cache_gb: float = 0.0
    pe_hbm_kv_gb: float = 6.4
    de_hbm_kv_gb: float = 30.0
    quota_s: float = 0.300
    batch_tokens: int = 8192
    rpc_latency_s: float = 20e-6
    block_tokens: int = 64
    read_message_blocks: int = 32
    stripe_blocks: int = 32
    alpha_s: float = 3.0
    beta_s: float = 5.0
    z: float = 1.05
    fetch_period_s: float = 0.010
    submit_write_s: float = 1e-6
    submit_copy_s: float = 6e-6
    doorbell_batch: int = 16
    shaper_tick_s: float = 1e-3
    dram_gbps: float = 4000.0
    pcie_gbps: float = 512.0
    prefill_exchange: Exchange = "layer"
    tensor_parallel: int = 1
    hardware_seed: int = 0
    hardware_deviation: float = 0.04
    request_timeout_s: float = 0.0
    stall_s: float = 120.0

    def __post_init__(self) -> None:
        for name in (
            *("pe_buffer_gb", "de_buffer_gb", "pool_gb", "pe_hbm_kv_gb", "de_hbm_kv_gb", "quota_s"),
            *("alpha_s", "beta_s", "z", "dram_gbps", "pcie_gbps", "stall_s"),
        ):
            value = getattr(self, name)
            if not 0 < value <= _MOST_GB_OR_S:
                raise ValueError(f"{name} = {value}: expected a positive number, at most {_MOST_GB_OR_S:.0f}")
        if not 0 <= self.prefix_cache_gb <= _MOST_GB_OR_S:
            raise ValueError(
                f"prefix_cache_gb = {self.prefix_cache_gb}: expected 0 (none) to {_MOST_GB_OR_S:.0f} GB"
            )
        if not 0 <= self.rpc_latency_s < 1:
            raise ValueError(f"rpc_latency_s = {self.rpc_latency_s}: expected 0 to 1 s")
        for name in ("fetch_period_s", "submit_write_s", "submit_copy_s"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name)}: expected 0 to 1 s")
        if not 0 <= self.request_timeout_s <= _MOST_GB_OR_S:
            raise ValueError(
                f"request_timeout_s = {self.request_timeout_s}: expected 0 (never) to {_MOST_GB_OR_S:.0f} s"
            )
        if not 1e-6 <= self.shaper_tick_s <= 1:
            raise ValueError(f"shaper_tick_s = {self.shaper_tick_s}: expected 1e-6 to 1 s")
        if not 0 <= self.hardware_deviation < 0.5:
            raise ValueError(f"hardware_deviation = {self.hardware_deviation}: expected 0 to 0.5")
        if not 0 <= self.hardware_seed < 2**63:
            raise ValueError(f"hardware_seed = {self.hardware_seed}: expected 0 or more")
        for name in (
            *("batch_tokens", "block_tokens", "read_message_blocks", "stripe_blocks", "doorbell_batch"),
            "tensor_parallel",
        ):
            if not 1 <= getattr(self, name) <= _MOST_COUNT:
                raise ValueError(f"{name} = {getattr(self, name)}: expected 1 to {_MOST_COUNT}")
        if self.read_message_blocks > READ_BLOCKS:
            raise ValueError(f"read_message_blocks = {self.read_message_blocks}: expected 1 to {READ_BLOCKS}")


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``name``: a bundled shape or a TOML file; ``backend``: what computes; ``costs``: a measured CSV or ''."""

    name: str = "ds660b"
    backend: BackendName = "digest"
    costs: str = ""


class ScaleConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``kv_bytes``: emulated KV bytes per token and layer; ``dilation``: wall seconds per model second."""

    kv_bytes: int = 1
    dilation: float = 8.0

    def __post_init__(self) -> None:
        if self.kv_bytes < 1:
            raise ValueError(f"kv_bytes = {self.kv_bytes}: expected 1 or more")
        if not 0 < self.dilation < float("inf"):
            raise ValueError(f"dilation = {self.dilation}: expected a positive, finite number")


class ReplayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of one replay. At most one of ``agents`` (closed loop) and ``aps`` (open loop) is set;

    with neither, the workload keeps the arrivals that it has. ``system``: a key of ``systems.SYSTEMS``, whose read
    path and policy ``path`` and ``policy`` (a name, or the absolute path of a Python file) override.
    """

    system: str = "dualpath"
    path: PathChoice = "auto"
    policy: str = ""
    qos: Literal["lanes", "off", "software"] = "lanes"
    copies: Literal["cnic", "cuda"] = "cnic"
    ep_over: Literal["nvlink", "cnic"] = "nvlink"
    de_direct: bool = False
    agents: int | None = None
    aps: float | None = None
    think: Literal["zero", "trace"] = "zero"
    warm: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.system not in SYSTEMS:
            raise ValueError(f"system = {self.system!r}: expected one of {', '.join(SYSTEMS)}")
        if self.agents is not None and self.aps is not None:
            raise ValueError("agents and aps: a replay is either a closed loop or an open one")
        if self.agents is not None and self.agents < 1:
            raise ValueError(f"agents = {self.agents}: expected 1 or more")
        if self.aps is not None and not 0 < self.aps < float("inf"):
            raise ValueError(f"aps = {self.aps}: expected a positive, finite number of agents per second")


class Member(msgspec.Struct, frozen=True):
    """A node of the cluster as roles know it; ``engines``: its GPUs, an engine each unless engines have several.

    ``snic_bytes_s``: model bytes per second of its storage NIC, 0 where it has none.
    """

    name: str
    role: Literal["pe", "de", "storage", "scheduler", "client"]
    engines: int = 0
    snic_bytes_s: float = 0.0


class RunConfig(msgspec.Struct, frozen=True):
    """All that a node needs. ``topology`` is the resolved cluster description as plain data, for the report;

    ``members`` are its nodes, which is all that the roles see of it.
    """

    topology: dict[str, Any]
    members: tuple[Member, ...]
    engine: EngineConfig = EngineConfig()
    model: ModelConfig = ModelConfig()
    scale: ScaleConfig = ScaleConfig()
    replay: ReplayConfig = ReplayConfig()
