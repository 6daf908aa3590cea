"""Kernel objects: a request, read like a dump, is the value it was made from."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from topology.netlink import read
from topology.rtnl import Address, Forward, KernelObject, Neighbour, OnDevice, Route, Rule

INDEX = st.integers(1, 2**31 - 1)
IP = st.ip_addresses(v=4).map(str)
MAC = st.binary(min_size=6, max_size=6).map(lambda raw: raw.hex(":"))
PREFIX = st.integers(0, 32)
TABLE = st.integers(1, 255)
PREF = st.integers(0, 2**32 - 1)


def assert_survives(value: KernelObject) -> None:
    """Written and read; a device's copy of what another had first is what it would have got itself."""
    made = value.request("here").message
    assert made == value.encode()
    assert value.of_message(made) == value == value.decode(read(made))


@given(st.builds(Address, INDEX, IP, PREFIX))
def test_addresses(value: Address) -> None:
    """Device, address and prefix."""
    assert_survives(value)


@given(st.builds(Neighbour, INDEX, IP, MAC))
def test_neighbours(value: Neighbour) -> None:
    """Device, address and link-layer address; permanent."""
    assert_survives(value)


@given(st.builds(Forward, INDEX, MAC))
def test_forwarding_entries(value: Forward) -> None:
    """Port and link-layer address; and no neighbour of IPv4."""
    assert_survives(value)
    assert Neighbour.of_message(value.request("here").message) is None


@given(st.builds(Route, TABLE, IP, PREFIX, INDEX))
def test_routes(value: Route) -> None:
    """Table, subnet and device."""
    assert_survives(value)


@given(
    st.one_of(
        st.builds(Rule, PREF, TABLE),
        st.builds(Rule, PREF, TABLE, source=IP, prefix=st.integers(1, 32)),
        st.builds(Rule, PREF, TABLE, unless_iif=st.just("lo")),
    )
)
def test_rules(value: Rule) -> None:
    """Preference, table and condition; the same when it is to be deleted."""
    assert_survives(value)
    assert Rule.of_message(value.removal("here").message) == value


@given(st.lists(st.tuples(INDEX, IP), min_size=2, max_size=5), MAC)
def test_what_differs_in_its_device_only_stays_apart(pairs: list[tuple[int, str]], mac: str) -> None:
    """Whatever was made and read before, in any order, each keeps its own device."""
    values: list[OnDevice] = [Neighbour(index, ip, mac) for index, _ in pairs for _, ip in pairs]
    for value in values + values[::-1]:
        assert_survives(value)


def test_an_error_would_say_where_and_what() -> None:
    """Every request carries the name of its place and of its object."""
    assert (
        Address(1, "10.1.1.10", 16).request("pe0.cnic0 (node end)").what
        == "pe0.cnic0 (node end): address 10.1.1.10"
    )
    assert Rule(20, 101).request("pe0").what == "pe0: rule 20"
