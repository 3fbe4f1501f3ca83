"""The rule for public addresses, compared with ipaddress, for every spelling of an address."""

from __future__ import annotations

import ipaddress
import socket

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zarrfs.net.addresses import is_public, literal

NUMBERS = st.one_of(
    st.integers(0, 2**32 - 1),
    st.sampled_from(
        [
            "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
            "192.0.0.0/24", "192.0.2.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24",
            "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4",
        ]
    ).flatmap(lambda text: _numbers_of(ipaddress.IPv4Network(text))),
)  # fmt: skip
SPELLINGS = st.lists(st.sampled_from(["{}", "{:#x}", "0{:o}", "{:#X}"]), min_size=4, max_size=4)

NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def _numbers_of(network: ipaddress.IPv4Network) -> st.SearchStrategy[int]:
    return st.integers(int(network[0]) - bool(int(network[0])), int(network[-1]))  # and the address before it


def model(address: ipaddress.IPv4Address) -> bool:
    """Return the expected verdict for an IPv4 address."""
    return address.is_global and not address.is_multicast and str(address) != "168.63.129.16"


@given(NUMBERS)
@example(int(ipaddress.IPv4Address("168.63.129.16")))
def test_every_form_of_an_ipv4_address_is_judged_alike(number: int) -> None:
    address = ipaddress.IPv4Address(number)
    for form in (str(address), f"::ffff:{address}", f"64:ff9b::{address}"):
        assert is_public(form) == model(address), form
    assert not is_public(f"::{address}")  # IPv4-compatible addresses are not routed
    assert not is_public(f"::ffff:0:{address}")
    assert is_public(str(ipaddress.IPv6Address((0x2002 << 112) + (number << 80) + 1))) == model(address)


@given(NUMBERS, SPELLINGS, st.integers(1, 4))
def test_every_spelling_that_resolvers_take_is_the_same_address(number: int, formats: list[str], parts: int) -> None:
    last = 8 * (5 - parts)  # bits of the last part
    numbers = [number >> (32 - 8 * place) & 255 for place in range(1, parts)] + [number & (1 << last) - 1]
    spelled = ".".join(form.format(value) for form, value in zip(formats, numbers, strict=False))
    assert literal(spelled) == str(ipaddress.IPv4Address(number))
    assert literal(spelled + ".") == literal(spelled)
    [info] = socket.getaddrinfo(spelled, 80, type=socket.SOCK_STREAM)
    assert literal(spelled) == info[4][0]


@given(st.integers(0, 2**128 - 1) | st.integers(0, 2**125 - 1).map(lambda number: number | 1 << 125))
def test_an_ipv6_address_is_public_only_where_ipaddress_says_so(number: int) -> None:
    address = ipaddress.IPv6Address(number)
    for form in (str(address), address.exploded, address.exploded.upper()):
        assert literal(f"[{form}]") == str(address)
        if is_public(form) and address.ipv4_mapped is None and address not in NAT64:
            assert address.is_global
            local = address.is_link_local or address.is_site_local
            assert not any((local, address.is_multicast, address.is_reserved))


@pytest.mark.parametrize(
    "address",
    [
        "::1", "::", "fe80::1", "fe80::1%lo", "fec0::1", "fd00:ec2::254", "ff02::1", "2001:db8::1", "64:ff9b:1::1",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2", "::ffff:169.254.169.254", "2002:a9fe:a9fe::", "100.100.100.200",
        "127.1", "2130706433", "", "example.org", "127.0.0.1 ", "１２７.0.0.1",
    ],
)  # fmt: skip
def test_private_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("host", ["example.org", "localhost", "face", "cafe.be", "1.2.3.4.5", "256.0.0.1", "", "x1"])
def test_host_names_are_not_taken_for_addresses(host: str) -> None:
    assert literal(host) is None
