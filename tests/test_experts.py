"""Laws of expert traffic."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from math import comb
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.experts import Volume, layer_volume
from emulator.models.shape import Experts, load_shape

from .within import assert_within

EXPERTS = st.builds(
    Experts, st.integers(1, 10_000), st.integers(1, 16), st.integers(1, 2), combine_bytes=st.integers(1, 4)
)
TOKENS = st.integers(0, 20_000)
NODES = st.integers(1, 12)
PER_NODE = st.integers(1, 8)
OVER = st.sampled_from(["nvlink", "cnic"])
Over = Literal["nvlink", "cnic"]


def _total(volume: Volume) -> int:
    return volume.nvlink_bytes + volume.cnic_bytes


def test_the_papers_models_by_hand() -> None:
    """DS 660B over two nodes of eight: 255 of 256 tokens cross once; 7 of 8 copies take an NVLink hop."""
    experts = load_shape("ds660b").experts
    assert experts is not None
    there_and_back = 7168 * (1 + 2)
    volume = layer_volume(experts, 256, nodes=2, gpus=16, over="nvlink")
    assert volume == Volume(nvlink_bytes=256 * 7 * there_and_back, cnic_bytes=255 * there_and_back)
    stress = layer_volume(experts, 256, nodes=2, gpus=16, over="cnic")
    assert stress == Volume(nvlink_bytes=0, cnic_bytes=round(256 * 7.5 * there_and_back))


@given(EXPERTS, TOKENS, OVER)
def test_one_gpu_sends_nothing(experts: Experts, tokens: int, over: Over) -> None:
    """All experts are on it."""
    assert _total(layer_volume(experts, tokens, nodes=1, gpus=1, over=over)) == 0


@given(EXPERTS, TOKENS, PER_NODE)
def test_one_node_needs_no_network(experts: Experts, tokens: int, gpus: int) -> None:
    """Its exchange is NVLink's; the stress puts the same bytes on the CNICs."""
    volume = layer_volume(experts, tokens, nodes=1, gpus=gpus, over="nvlink")
    assert volume.cnic_bytes == 0
    stress = layer_volume(experts, tokens, nodes=1, gpus=gpus, over="cnic")
    assert stress == Volume(nvlink_bytes=0, cnic_bytes=volume.nvlink_bytes)


@given(EXPERTS, TOKENS, TOKENS, NODES, PER_NODE, OVER)
def test_more_tokens_and_wider_groups_send_more(
    experts: Experts, tokens: int, more: int, nodes: int, per_node: int, over: Over
) -> None:
    """Bytes are proportional to tokens, to a rounding; a further node adds to what crosses between nodes."""
    base = layer_volume(experts, tokens, nodes=nodes, gpus=nodes * per_node, over=over)
    grown = layer_volume(experts, tokens + more, nodes=nodes, gpus=nodes * per_node, over=over)
    added = layer_volume(experts, more, nodes=nodes, gpus=nodes * per_node, over=over)
    assert abs(grown.nvlink_bytes - base.nvlink_bytes - added.nvlink_bytes) <= 1
    assert abs(grown.cnic_bytes - base.cnic_bytes - added.cnic_bytes) <= 1
    wider = layer_volume(experts, tokens, nodes=nodes + 1, gpus=(nodes + 1) * per_node, over=over)
    assert wider.cnic_bytes >= base.cnic_bytes
    assert wider.nvlink_bytes == base.nvlink_bytes


@given(EXPERTS, TOKENS, NODES, PER_NODE)
def test_sending_once_to_a_node_is_never_more(experts: Experts, tokens: int, nodes: int, per_node: int) -> None:
    """Between nodes a token crosses at most once a remote node, and at most once an expert."""
    volume = layer_volume(experts, tokens, nodes=nodes, gpus=nodes * per_node, over="nvlink")
    copies = layer_volume(experts, tokens, nodes=nodes, gpus=nodes * per_node, over="cnic")
    assert volume.cnic_bytes <= copies.cnic_bytes
    there_and_back = experts.hidden * (experts.dispatch_bytes + experts.combine_bytes)
    assert volume.cnic_bytes <= tokens * (nodes - 1) * there_and_back


@pytest.mark.parametrize(("nodes", "k"), [(2, 1), (2, 8), (3, 6), (4, 5), (6, 4)])
def test_remote_nodes_are_counted_as_they_are_drawn(nodes: int, k: int) -> None:
    """The formula is the mean over all ways in which k experts can lie on the nodes, node 0 being the sender's."""
    draws = list(product(range(nodes), repeat=k))
    mean = Fraction(sum(len(set(draw) - {0}) for draw in draws), len(draws))
    tokens = 10**9
    volume = layer_volume(Experts(1, k, 1, 1), tokens, nodes=nodes, gpus=nodes * 8, over="nvlink")
    assert_within(volume.cnic_bytes, float(2 * tokens * mean), absolute=1)


@pytest.mark.parametrize(("experts", "k"), [(256, 8), (72, 6)])
@pytest.mark.parametrize("nodes", [2, 4])
def test_independent_draws_are_close_to_distinct_experts(experts: int, k: int, nodes: int) -> None:
    """A router never picks an expert twice; for the paper's models that moves the bytes by less than 2 %."""
    missed = Fraction(comb(experts - experts // nodes, k), comb(experts, k))
    distinct = (nodes - 1) * (1 - missed)
    tokens = 10**6
    volume = layer_volume(Experts(1, k, 1, 1), tokens, nodes=nodes, gpus=nodes, over="nvlink")
    assert_within(volume.cnic_bytes, float(2 * tokens * distinct), rel=0.02)


@pytest.mark.parametrize(("tokens", "nodes", "gpus"), [(1, 2, 15), (1, 0, 8), (1, 2, 0), (-1, 1, 8), (1, -1, -8)])
def test_impossible_groups_are_refused(tokens: int, nodes: int, gpus: int) -> None:
    """GPUs that do not spread evenly over the nodes, none at all, negative tokens."""
    with pytest.raises(ValueError, match="expected"):
        layer_volume(Experts(1, 1, 1, 1), tokens, nodes=nodes, gpus=gpus, over="nvlink")
