"""Kernel objects: a request, read like a dump, is the value it was made from."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from topology.rtnl import Address, Forward, Neighbour, Route, Rule

INDEX = st.integers(1, 2**31 - 1)
IP = st.ip_addresses(v=4).map(str)
MAC = st.binary(min_size=6, max_size=6).map(lambda raw: raw.hex(":"))
PREFIX = st.integers(0, 32)
TABLE = st.integers(1, 255)
PREF = st.integers(0, 2**32 - 1)


@given(st.builds(Address, INDEX, IP, PREFIX))
def test_addresses(value: Address) -> None:
    """Device, address and prefix."""
    assert Address.decode(value.request("here").body) == value


@given(st.builds(Neighbour, INDEX, IP, MAC))
def test_neighbours(value: Neighbour) -> None:
    """Device, address and link-layer address; permanent."""
    assert Neighbour.decode(value.request("here").body) == value


@given(st.builds(Forward, INDEX, MAC))
def test_forwarding_entries(value: Forward) -> None:
    """Port and link-layer address; and no neighbour of IPv4."""
    assert Forward.decode(value.request("here").body) == value
    assert Neighbour.decode(value.request("here").body) is None


@given(st.builds(Route, TABLE, IP, PREFIX, INDEX))
def test_routes(value: Route) -> None:
    """Table, subnet and device."""
    assert Route.decode(value.request("here").body) == value


@given(
    st.one_of(
        st.builds(Rule, PREF, TABLE),
        st.builds(Rule, PREF, TABLE, source=IP, prefix=st.integers(1, 32)),
        st.builds(Rule, PREF, TABLE, unless_iif=st.just("lo")),
    )
)
def test_rules(value: Rule) -> None:
    """Preference, table and condition; the same when it is to be deleted."""
    assert Rule.decode(value.request("here").body) == value
    assert Rule.decode(value.request("here", delete=True).body) == value


def test_an_error_would_say_where_and_what() -> None:
    """Every request carries the name of its place and of its object."""
    assert (
        Address(1, "10.1.1.10", 16).request("pe0.cnic0 (node end)").what
        == "pe0.cnic0 (node end): address 10.1.1.10"
    )
    assert Rule(20, 101).request("pe0").what == "pe0: rule 20"
