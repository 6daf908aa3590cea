"""What expert parallelism exchanges: the bytes that one GPU sends in a layer to bring tokens to experts and back.

Pure; model bytes. Experts are spread evenly over the GPUs of a group and routing is uniform: each of a token's k
experts is on any GPU with the same chance, independently. Then every GPU sends as many bytes as any other, and as
many as it receives, and the combine retraces the dispatch.

Between nodes a token is sent once to each remote node that has one of its experts, to the GPU of the sender's own
rank there (so by the sender's CNIC to the CNIC of that rank), which forwards it over NVLink; results are added up
in the node before they go back, once as well (DeepEP's kernels for prefill). Of N nodes that is ::

    (N - 1) (1 - (1 - 1/N)^k)        expected remote nodes with at least one of k experts

per token. Inside of the nodes each of the k copies takes one NVLink hop, unless its expert is on the GPU that has
the token: k (1 - 1/m) copies, m GPUs a node. DeepEP sends one copy for all experts of a GPU, so this is the upper
end of what its NVLinks carry. Not counted: a cap on the nodes that a token may be routed to, and the scales and
indices that go with the activations.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from .models.shape import Experts

__all__ = ["Volume", "layer_volume"]


class Volume(msgspec.Struct, frozen=True):
    """Model bytes that one GPU sends (and receives) in one layer, over its NVLink and over its CNIC."""

    nvlink_bytes: int
    cnic_bytes: int


def layer_volume(
    experts: Experts, tokens: int, *, nodes: int, gpus: int, over: Literal["nvlink", "cnic"]
) -> Volume:
    """Dispatch and combine of ``tokens`` new tokens of one GPU in a group of ``gpus`` GPUs over ``nodes`` nodes.

    ``over`` "cnic": every copy goes straight to its expert's GPU through the CNIC, inside of a node too (a stress;
    k (1 - 1/``gpus``) copies). ValueError unless ``gpus`` is a multiple of ``nodes``, both positive, and
    ``tokens`` is not negative.
    """
    if nodes < 1 or gpus < 1 or gpus % nodes:
        raise ValueError(f"a group of {gpus} GPUs over {nodes} nodes: expected a positive multiple of the nodes")
    if tokens < 0:
        raise ValueError(f"{tokens} tokens: expected 0 or more")
    k = experts.top_k
    copy_bytes = tokens * experts.hidden * (experts.dispatch_bytes + experts.combine_bytes)
    if over == "cnic":
        return Volume(nvlink_bytes=0, cnic_bytes=round(copy_bytes * k * (1 - 1 / gpus)))
    remote_nodes = (nodes - 1) * (1 - (1 - 1 / nodes) ** k)
    return Volume(
        nvlink_bytes=round(copy_bytes * k * (1 - nodes / gpus)), cnic_bytes=round(copy_bytes * remote_nodes)
    )
