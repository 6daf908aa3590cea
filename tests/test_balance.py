"""Laws of balance: Max/Avg of storage NICs in windows, of attention in a group's steps, and prediction."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emulator.balance import AttentionBalance, Balance, attention_balance, predictor_error, snic_balance
from emulator.metrics import Port
from emulator.records import BatchRecord, NodeRecord

from .made_records import port, run, setup
from .within import assert_within

SNICS = (
    Port("pe0", "snic0", "pe", 100.0),
    Port("de0", "snic0", "de", 100.0),
    Port("st0", "snic0", "storage", 500.0),
)


def test_balance_is_over_the_serving_nodes_and_high_load() -> None:
    """Idle windows and the storage nodes' own NICs do not count; an even split is 1, one side alone is 2."""
    nodes = (
        NodeRecord(node="pe0", ports=(port("snic0", (100, 100, 1, 0)),)),
        NodeRecord(node="de0", ports=(port("snic0", (100, 0, 0)),)),
        NodeRecord(node="st0", ports=(port("snic0", (900, 900, 900, 900)),)),
    )
    assert snic_balance(run(nodes=nodes), setup(*SNICS)) == Balance(1.5, 1.0, 2)
    assert snic_balance(run(nodes=nodes[:1]), setup(*SNICS)) == Balance(2.0, 1.0, 2)


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), min_size=1, max_size=60))
@settings(max_examples=50)
def test_balance_lies_between_one_and_the_number_of_nics(loads: list[tuple[int, int]]) -> None:
    """Max/Avg over n NICs is between 1 and n, whatever the load."""
    nodes = tuple(
        NodeRecord(node=name, ports=(port("snic0", tuple(pair[i] for pair in loads), 0.5),))
        for i, name in enumerate(("pe0", "de0"))
    )
    figure = snic_balance(run(nodes=nodes, ended_s=len(loads) / 2), setup(*SNICS))
    assert (figure is None) == (sum(map(sum, loads)) == 0)
    assert figure is None or 1.0 <= figure.max_over_avg <= 2.0


def test_windows_of_unequal_width_cannot_be_joined() -> None:
    """Counters with different windows are a fault of the run, not something to average over."""
    nodes = (
        NodeRecord(node="pe0", ports=(port("snic0", (1,)),)),
        NodeRecord(node="de0", ports=(port("snic0", (1,), 0.5),)),
    )
    with pytest.raises(ValueError, match="windows"):
        snic_balance(run(nodes=nodes), setup(*SNICS))


PAIR = (("pe0/0", "pe0/1"),)


def batch(engine: str, step: int, attention_s: float, predicted_s: float = 0.0) -> BatchRecord:
    return BatchRecord(engine, step, ("a.0",), ((0, 1),), 1.0, 2.0, step, attention_s, predicted_s)


def test_attention_is_compared_inside_a_step_of_high_load() -> None:
    """Steps in which every engine has a batch, and no small one; the others are counted and left out."""
    batches = (batch("pe0/0", 0, 1.0), batch("pe0/1", 0, 3.0), batch("pe0/0", 1, 2.0), batch("pe0/1", 1, 2.0))
    idle = (batch("pe0/0", 2, 5.0),)
    light = (batch("pe0/0", 3, 0.4), batch("pe0/1", 3, 2.0))
    records = run(nodes=(NodeRecord(node="pe0", batches=(*batches, *idle, *light)),))
    figure = attention_balance(records, setup(groups=PAIR))
    assert figure == AttentionBalance(max_over_avg=1.25, p95=1.0 + 0.95 * 0.5, steps=2, of=4)
    assert attention_balance(records, setup()) is None
    assert attention_balance(run(nodes=(NodeRecord(node="pe0", batches=idle),)), setup(groups=PAIR)) is None


def test_a_group_of_one_has_no_balance() -> None:
    """One engine is as busy as the average of itself, which says nothing."""
    records = run(nodes=(NodeRecord(node="pe0", batches=(batch("pe0/0", 0, 1.0),)),))
    assert attention_balance(records, setup(groups=(("pe0/0",),))) is None


@given(st.lists(st.tuples(*[st.floats(1e-6, 1e3)] * 3), min_size=1, max_size=20))
def test_attention_balance_lies_between_one_and_the_size_of_the_group(steps: list[tuple[float, ...]]) -> None:
    """Max/Avg over n engines is between 1 and n, wherever the group's engines live."""
    group = ("pe0/0", "pe0/1", "pe1/0")
    nodes = tuple(
        NodeRecord(
            node=name,
            batches=tuple(
                batch(engine, step, loads[group.index(engine)])
                for step, loads in enumerate(steps)
                for engine in group
                if engine.startswith(name)
            ),
        )
        for name in ("pe0", "pe1")
    )
    figure = attention_balance(run(nodes=nodes), setup(groups=(group,)))
    assert figure is not None
    assert 1 <= figure.steps <= figure.of == len(steps)
    assert 1.0 - 1e-9 <= figure.max_over_avg <= 3.0 + 1e-9


def test_predictions_are_wrong_by_their_mean_distance() -> None:
    """Too much and too little do not cancel; without attention times there is nothing to be wrong about."""
    batches = (batch("pe0/0", 0, 2.0, 2.2), batch("pe0/0", 1, 1.0, 0.9))
    error = predictor_error(run(nodes=(NodeRecord(node="pe0", batches=batches),)))
    assert error is not None
    assert_within(error, 0.1, rel=1e-9)
    assert predictor_error(run(nodes=(NodeRecord(node="pe0", batches=(batch("pe0/0", 0, 0.0),)),))) is None
