"""What follows from a run's configuration: engine names, block arithmetic, capacities, who keeps which block.

Pure. Every role is given one ``Deployment`` and reads its sizes here, so that no two of them can disagree. An
engine is named ``node/gpu`` ("pe0/3") and uses its GPU's paired NIC (``cnic3``). A tensor-parallel one is
named by the first of its GPUs, which are neighbours, and uses the NICs of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import msgspec

from .config import RunConfig
from .costmodel import CostModel, load_costs
from .errors import ConfigError
from .experts import Volume, layer_volume
from .fabric.interface import Endpoint, Ring
from .hardware import Hardware
from .kvcache import ID_BYTES, BlockId, Layout
from .models import load_backend
from .models.backend import Backend
from .models.shape import ModelShape, load_shape
from .policy import Limits, PolicySetup
from .profile import Profile, profile
from .scale import Scale
from .systems import SYSTEMS, Reads, System
from .tensors import tensor_volume

__all__ = ["LAYER_SLOTS", "Deployment", "Group", "engine_gpu", "engine_node", "join_ids", "split_ids"]

LAYER_SLOTS = 2
"""Layers of a request in PE HBM under layerwise prefill: one being computed and sent, the next being loaded."""

GB = 1e9


def engine_node(engine: str) -> str:
    """The node of an engine: "pe0" of "pe0/3"."""
    return engine.partition("/")[0]


def engine_gpu(engine: str) -> int:
    """The index of an engine's GPU, or of its first: 3 of "pe0/3"."""
    return int(engine.partition("/")[2])


def join_ids(ids: Sequence[BlockId]) -> bytes:
    """Block ids as they cross in a message."""
    return b"".join(ids)


def split_ids(data: bytes) -> list[BlockId]:
    """The block ids of a message."""
    return [BlockId(data[at : at + ID_BYTES]) for at in range(0, len(data), ID_BYTES)]


class Group(msgspec.Struct, frozen=True):
    """GPUs that run in step: all of a role under expert parallelism, else those of one engine.

    ``ring``: how their exchanges cross the compute network; None where no byte of them does. ``pairs``: of an
    engine's own GPUs, how many times a layer they reduce and gather activations; 0 where experts are exchanged.
    """

    name: str
    nodes: int
    gpus: int
    ring: Ring | None = None
    pairs: int = 0


class Deployment:
    """Facts of one run, all in payload bytes, blocks and tokens."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.shape: ModelShape = load_shape(config.model.name)
        try:
            self.scale = Scale(self.shape.kv_bytes, config.scale.kv_bytes, config.scale.dilation)
        except ValueError as error:
            raise ConfigError(f"scale: {error}") from None
        self.layout = Layout(self.shape.layers, config.scale.kv_bytes, config.engine.block_tokens)
        self.system: System = SYSTEMS[config.replay.system]
        self._check_tensor_parallel()
        self._check_dram()

    def _check_dram(self) -> None:
        engine = self.config.engine
        block_gb = self.scale.model_bytes(self.layout.full_block_bytes) / GB
        if self.system.pool and not self.pool_blocks:
            raise ConfigError(
                f"[engine] pool_gb = {engine.pool_gb}: expected room for a block of {block_gb:.3g} GB"
            )
        if not engine.prefix_cache_gb:
            return
        if self.system.pool:
            raise ConfigError(
                f"[engine] prefix_cache_gb = {engine.prefix_cache_gb}: expected 0 with --system"
                f" {self.system.name}, which keeps blocks in a pool of all nodes' DRAM (pool_gb)"
            )
        if not self.cache_blocks:
            raise ConfigError(
                f"[engine] prefix_cache_gb = {engine.prefix_cache_gb}: expected room for a block of"
                f" {block_gb:.3g} GB, or 0 for none"
            )

    def _check_tensor_parallel(self) -> None:
        gpus = self.tensor_parallel
        if gpus == 1:
            return
        for member in self.config.members:
            if member.role in ("pe", "de") and member.engines % gpus:
                raise ConfigError(
                    f"[engine] tensor_parallel = {gpus}: expected a divisor of the {member.engines} GPUs of"
                    f" {member.name}"
                )
        if self.shape.activation_width is None:
            raise ConfigError(
                f"model {self.config.model.name}: hidden: missing; with [engine] tensor_parallel = {gpus} expected"
                " the elements of a token's activation (hidden_size), which the GPUs of an engine exchange"
            )

    @property
    def tensor_parallel(self) -> int:
        """GPUs of one engine."""
        return self.config.engine.tensor_parallel

    @property
    def reads(self) -> Reads:
        """Where hits are read: the system's way, or the side that ``--path`` forces."""
        path = self.config.replay.path
        return self.system.reads if path == "auto" else path

    @property
    def layer_slots(self) -> int:
        """Layers of a request that are in PE HBM at once."""
        return min(LAYER_SLOTS, self.layout.layers) if self.system.layerwise else self.layout.layers

    @cached_property
    def hardware(self) -> Hardware:
        """What the emulated GPUs really take."""
        engine = self.config.engine
        return Hardware(self.costs, engine.hardware_seed, engine.hardware_deviation)

    @cached_property
    def profile(self) -> Profile:
        """What was profiled in advance: alpha, beta, and the predictor of attention times."""
        engine = self.config.engine
        return profile(
            self.costs,
            self.hardware,
            snic_model_bps=max(member.snic_bytes_s for member in self.config.members if member.role == "pe"),
            alpha_s=engine.alpha_s,
            beta_s=engine.beta_s,
            quota_s=engine.quota_s,
            batch_tokens=engine.batch_tokens,
        )

    @cached_property
    def policy_setup(self) -> PolicySetup:
        """What a scheduling policy is told before the first request."""
        return PolicySetup(
            pe_engines=self.pe_engines,
            de_engines=self.de_engines,
            alpha_tokens=self.profile.alpha_tokens,
            beta_tokens=self.profile.beta_tokens,
            z=self.config.engine.z,
            seed=self.config.replay.seed,
        )

    @cached_property
    def costs(self) -> CostModel:
        table = Path(self.config.model.costs) if self.config.model.costs else None
        return load_costs(self.shape, table, self.tensor_parallel)

    @cached_property
    def pe_engines(self) -> tuple[str, ...]:
        return self._engines("pe")

    @cached_property
    def de_engines(self) -> tuple[str, ...]:
        return self._engines("de")

    @cached_property
    def storage(self) -> tuple[str, ...]:
        return self.named("storage")

    @cached_property
    def scheduler(self) -> str:
        return self.named("scheduler")[0]

    def named(self, role: str) -> tuple[str, ...]:
        """The names of the nodes that play ``role``, in order."""
        return tuple(m.name for m in self.config.members if m.role == role)

    def engines_of(self, node: str) -> tuple[str, ...]:
        """The engines of one node."""
        step = self.tensor_parallel
        return tuple(
            f"{m.name}/{gpu}" for m in self.config.members if m.name == node for gpu in range(0, m.engines, step)
        )

    def gpus_of(self, engine: str) -> tuple[str, ...]:
        """The GPUs of one engine, named as engines of one GPU are."""
        node, first = engine_node(engine), engine_gpu(engine)
        return tuple(f"{node}/{gpu}" for gpu in range(first, first + self.tensor_parallel))

    def node_gpus(self, node: str) -> tuple[str, ...]:
        """The GPUs of all engines of one node."""
        return tuple(gpu for engine in self.engines_of(node) for gpu in self.gpus_of(engine))

    @property
    def expert_groups(self) -> tuple[tuple[str, ...], ...]:
        """The engines of each expert-parallel group; none for a dense model."""
        return () if self.shape.experts is None else (self.pe_engines, self.de_engines)

    def groups(self, node: str) -> list[tuple[tuple[str, ...], Group]]:
        """The node's engines by group: one group of all where experts are spread over them, else one for each."""
        engines = self.engines_of(node)
        if self.shape.experts is None:
            return [((engine,), self.tensor_group(engine)) for engine in engines]
        role = next(member.role for member in self.config.members if member.name == node)
        return [(engines, self._expert_group(role))]

    def tensor_group(self, engine: str) -> Group:
        """The GPUs of one engine, as they exchange activations."""
        gpus = self.gpus_of(engine)
        ring = None
        if len(gpus) > 1 and self.config.replay.ep_over == "cnic":
            ring = Ring(engine, (engine_node(engine),), self._hops(gpus, 1))
        return Group(engine, 1, len(gpus), ring, pairs=2 if self.shape.experts is None else 1)

    def _expert_group(self, role: str) -> Group:
        nodes = self.named(role)
        gpus = tuple(gpu for node in nodes for gpu in self.node_gpus(node))
        # GPUs of one rank exchange between nodes; inside of a node there is NVLink.
        hops = self._hops(gpus, 1 if self.config.replay.ep_over == "cnic" else len(self.node_gpus(nodes[0])))
        return Group(role, len(nodes), len(gpus), Ring(role, nodes, hops) if hops else None)

    def _hops(self, gpus: Sequence[str], step: int) -> tuple[tuple[Endpoint, Endpoint], ...]:
        """From each GPU to the one ``step`` further on, around; none where that is itself."""
        after = [*gpus[step:], *gpus[:step]]
        return tuple((self.gpu(a), self.gpu(b)) for a, b in zip(gpus, after, strict=True) if a != b)

    def exchange_volume(self, group: Group, mean_tokens: float) -> Volume | None:
        """Model bytes that one GPU of the group sends in a layer for ``mean_tokens`` new tokens a GPU.

        None where GPUs have nothing to exchange: one alone, of a dense model.
        """
        over = self.config.replay.ep_over
        if group.pairs:
            width = self.shape.activation_width
            if group.gpus == 1 or width is None:
                return None
            return tensor_volume(width, round(mean_tokens * group.gpus), group.gpus, pairs=group.pairs, over=over)
        if self.shape.experts is None:
            return None
        tokens = math.ceil(mean_tokens)
        return layer_volume(self.shape.experts, tokens, nodes=group.nodes, gpus=group.gpus, over=over)

    def _engines(self, role: str) -> tuple[str, ...]:
        return tuple(engine for node in self.named(role) for engine in self.engines_of(node))

    def _blocks_of(self, gigabytes: float) -> int:
        return self.scale.payload_bytes(int(gigabytes * GB)) // self.layout.full_block_bytes

    @cached_property
    def limits(self) -> Limits:
        """Capacities of one node's buffers and one engine's HBM."""
        engine = self.config.engine
        gpus = self.tensor_parallel
        pe_hbm_bytes = self.scale.payload_bytes(int(engine.pe_hbm_kv_gb * gpus * GB))
        return Limits(
            pe_buffer_blocks=self._blocks_of(engine.pe_buffer_gb),
            de_buffer_blocks=self._blocks_of(engine.de_buffer_gb),
            de_hbm_pages=self._blocks_of(engine.de_hbm_kv_gb * gpus),
            pe_hbm_tokens=pe_hbm_bytes // (self.layer_slots * self.layout.kv_bytes),
        )

    @cached_property
    def pool_blocks(self) -> int:
        """Full Blocks that one node keeps of the DRAM pool, where the system has one."""
        return self._blocks_of(self.config.engine.pool_gb)

    @cached_property
    def cache_blocks(self) -> int:
        """Full Blocks that a PE or DE node keeps in a cache of its own; 0 where there is none."""
        return self._blocks_of(self.config.engine.prefix_cache_gb)

    def hit_tokens(self, hit_blocks: int) -> int:
        return hit_blocks * self.layout.block_tokens

    def placement(self, block_index: int) -> str:
        """The storage node that keeps the block at ``block_index`` of a chain: stripes go round."""
        return self.storage[block_index // self.config.engine.stripe_blocks % len(self.storage)]

    def stripes(self, first: int, count: int) -> Iterator[tuple[str, int, int]]:
        """(storage node, first block, blocks) of the stripes that blocks first .. first + count - 1 lie in."""
        stripe = self.config.engine.stripe_blocks
        end = first + count
        while first < end:
            run = min(end, (first // stripe + 1) * stripe) - first
            yield self.placement(first), first, run
            first += run

    def load_backend(self) -> Backend:
        """The model that computes; the toy needs torch."""
        return load_backend(self.config.model.backend, layers=self.layout.layers, kv_bytes=self.layout.kv_bytes)

    @staticmethod
    def host(engine: str) -> Endpoint:
        """The DRAM side of an engine's CNIC."""
        return Endpoint(engine_node(engine), f"cnic{engine_gpu(engine)}", "host")

    @staticmethod
    def gpu(engine: str) -> Endpoint:
        """The HBM side of an engine's CNIC."""
        return Endpoint(engine_node(engine), f"cnic{engine_gpu(engine)}", "gpu")

    @staticmethod
    def snic(node: str) -> Endpoint:
        return Endpoint(node, "snic0", "host")

    def reader_endpoint(self, node: str) -> Endpoint:
        """Where a node's reads arrive: at its storage NIC, or nowhere that costs anything."""
        return Endpoint(node, "free", "host") if self.system.free else self.snic(node)
