"""What follows from a configuration is the same for everybody and adds up."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.config import ScaleConfig
from emulator.deployment import Deployment, engine_gpu, engine_node, join_ids, split_ids
from emulator.errors import ConfigError
from emulator.kvcache import BlockId

from .clusters import config


@given(st.integers(0, 200), st.integers(0, 200))
def test_stripes_cover_a_chain_in_order(first: int, count: int) -> None:
    """Stripes are consecutive, cover exactly the blocks asked for, and each lies on the node that keeps it."""
    deployment = Deployment(config())
    at = first
    for node, begin, blocks in deployment.stripes(first, count):
        assert begin == at
        assert {deployment.placement(begin), deployment.placement(begin + blocks - 1)} == {node}
        at += blocks
    assert at == first + count


def test_a_long_chain_is_spread_evenly() -> None:
    """Over whole rounds of stripes every storage node keeps the same number of blocks."""
    deployment = Deployment(config())
    kept = [deployment.placement(block) for block in range(64 * 5)]
    assert {kept.count(node) for node in deployment.storage} == {160}


def test_engines_are_named_by_node_and_gpu() -> None:
    """Names list every GPU of every node, and their parts come back out."""
    deployment = Deployment(config(pe_nodes=2, de_nodes=1, gpus=2))
    assert deployment.pe_engines == ("pe0/0", "pe0/1", "pe1/0", "pe1/1")
    assert deployment.de_engines == ("de0/0", "de0/1")
    assert (engine_node("pe1/0"), engine_gpu("pe1/1")) == ("pe1", 1)
    assert (deployment.host("pe1/1").nic, deployment.gpu("pe1/1").side) == ("cnic1", "gpu")


def test_capacities_are_in_whole_blocks_of_the_model() -> None:
    """80 GB of DRAM hold 80e9 / 2,748,416 Full Blocks of DS 660B, whatever the emulated bytes."""
    for kv_bytes in (1, 4):
        run = config()
        run = msgspec.structs.replace(run, scale=ScaleConfig(kv_bytes=kv_bytes))
        assert Deployment(run).limits.de_buffer_blocks == int(80e9 // (61 * 64 * 704))


def test_a_scale_that_cannot_be_is_the_users_error() -> None:
    """More emulated bytes than the model has are refused with the expected range."""
    run = msgspec.structs.replace(config(), scale=ScaleConfig(kv_bytes=705))
    with pytest.raises(ConfigError, match="1 to 704"):
        Deployment(run)


@given(st.lists(st.binary(min_size=32, max_size=32), max_size=5))
def test_ids_cross_unchanged(ids: list[bytes]) -> None:
    """Splitting undoes joining."""
    assert split_ids(join_ids([BlockId(each) for each in ids])) == ids
