"""How fast one prefill node really reads: a burst of hits in virtual time.

alpha is profiled from the rate of a node's storage NICs alone. How far a node falls short of that is what stands
between: storage links, the requests for blocks, memory that must be free first.
"""

from __future__ import annotations

import msgspec

from ..config import ReplayConfig, RunConfig, ScaleConfig
from ..deployment import Deployment
from ..errors import EmulatorError
from ..plan import cluster_spec, run_config
from ..sim import simulate
from ..workload import Stream, Trajectory, Turn, Workload

__all__ = ["ReadRate", "measure_read_rate"]

REQUESTS = 16
CONTEXT_TOKENS = 16_384


class ReadRate(msgspec.Struct, frozen=True):
    """``tokens`` in ``blocks`` Full Blocks, read within ``seconds`` (model) of the first request's reservation."""

    tokens: int
    blocks: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def measure_read_rate(run: RunConfig) -> ReadRate:
    """Replay warm single-token requests, all at once, on one PE and one DE node of ``run`` with its storage links.

    Contexts are of CONTEXT_TOKENS, or less where buffers could not hold those of all requests at once.
    EmulatorError where a request was not served.
    """
    alone = run_config(
        msgspec.structs.replace(cluster_spec(run), pe_nodes=1, de_nodes=1),
        run.engine,
        # Bytes and their times are the model's whatever computes; the toy would have its own limit of contexts.
        msgspec.structs.replace(run.model, backend="digest", costs=""),
        ScaleConfig(kv_bytes=1),
        ReplayConfig(path="pe", warm=True),
    )
    blocks = _blocks_each(Deployment(alone))
    # One token more than the hit: a prompt that is all hit has nothing to compute.
    tokens = blocks * run.engine.block_tokens + 1
    records = simulate(
        alone,
        Workload(
            tuple(
                Trajectory(f"read{at}", (Turn(tokens, 1, arrival_s=0.0),), (Stream((tokens + 1,), (at,)),))
                for at in range(REQUESTS)
            )
        ),
    )
    began, ended, read = [], [], 0
    for request in records.requests:
        if request.allocated_s is None or request.read_s is None:
            raise EmulatorError(f"profile: reading was not measured: {request.error or request.status}")
        began.append(request.allocated_s)
        ended.append(request.read_s)
        read += request.hit_tokens
    return ReadRate(tokens=read, blocks=read // run.engine.block_tokens, seconds=max(ended) - min(began))


def _blocks_each(deployment: Deployment) -> int:
    """Full Blocks of one request's hit, such that memory makes none of them wait if it can be helped."""
    limits = deployment.limits
    each_engine = -(-REQUESTS // len(deployment.de_engines))
    room = min(
        limits.pe_buffer_blocks // REQUESTS,
        limits.de_buffer_blocks // REQUESTS,
        limits.de_hbm_pages // each_engine,
    )
    # A block more is for the tokens that are not hit.
    return max(1, min(CONTEXT_TOKENS // deployment.layout.block_tokens, room - 1))
