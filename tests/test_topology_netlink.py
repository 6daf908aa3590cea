"""Netlink attributes: what is written is what is read."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

from topology.netlink import attribute, integer, nested, parse_attributes, text_attribute

ATTRIBUTES = st.dictionaries(st.integers(1, 0x3FFF), st.binary(max_size=40), max_size=8)


@given(ATTRIBUTES)
def test_attributes_survive_whatever_their_length(wanted: dict[int, bytes]) -> None:
    """Padding to four bytes is neither value nor lost."""
    encoded = b"".join(attribute(kind, value) for kind, value in wanted.items())
    assert len(encoded) % 4 == 0
    assert parse_attributes(encoded) == wanted
    assert parse_attributes(b"prefix" + encoded, 6) == wanted


@given(st.integers(1, 0x3FFF), ATTRIBUTES)
def test_nesting_is_transparent(kind: int, wanted: dict[int, bytes]) -> None:
    """The mark of a nest is no part of its type."""
    inner = [attribute(key, value) for key, value in wanted.items()]
    (found,) = parse_attributes(nested(kind, *inner)).items()
    assert found[0] == kind
    assert parse_attributes(found[1]) == wanted


@given(st.binary(max_size=64))
def test_rubbish_neither_hangs_nor_raises(data: bytes) -> None:
    """A cut or senseless tail ends the list."""
    parse_attributes(data)


@given(st.sampled_from([1, 2, 4, 8]).flatmap(lambda width: st.binary(min_size=width, max_size=width)))
def test_integers_are_read_at_their_width(raw: bytes) -> None:
    """Absent is 0; text carries its NUL."""
    assert integer({5: raw}, 5) == int.from_bytes(raw, sys.byteorder)
    assert integer({}, 5) == 0
    assert parse_attributes(text_attribute(3, "cnic0")) == {3: b"cnic0\0"}
