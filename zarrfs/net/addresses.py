"""Network addresses: which are public, in every spelling that a resolver takes for one; which a process has met."""

from __future__ import annotations

import ipaddress
import os
import socket

_PUBLIC_6 = ipaddress.IPv6Network("2000::/3")  # IANA: global unicast; all else is local, mapped or not assigned
# Azure's host agent: a public number that every machine there has to itself.
_NOT_PUBLIC = frozenset(("168.63.129.16",))
# Where the last 32 bits are the IPv4 address that is reached: mapped (RFC 4291), NAT64 (RFC 6052).
_EMBEDDED = tuple(map(ipaddress.IPv6Network, ("::ffff:0:0/96", "64:ff9b::/96")))

_met: set[bool] = set()  # whether the addresses of servers are public that this process has connected to
os.register_at_fork(after_in_child=_met.clear)


def note_met(public: bool) -> None:
    """Note that this process connects to a server with a public or private address, directly or through a proxy.

    The address of a proxy is not noted: it says nothing about the server.
    """
    _met.add(public)


def met_private_only() -> bool:
    """Return whether this process, which fetched one document, connected to private addresses only."""
    return _met == {False}


def is_public(address: str) -> bool:
    """Return whether `address`, as a socket has it, is public; False for anything that is no address."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv4Address):
        return found.is_global and not found.is_multicast and str(found) not in _NOT_PUBLIC
    if any(found in network for network in _EMBEDDED):
        return is_public(str(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)))
    if found.sixtofour is not None:
        return is_public(str(found.sixtofour))
    return found in _PUBLIC_6 and found.is_global


def literal(host: str) -> str | None:
    """The address that `host` spells, None where it is a name that must be looked up.

    IPv4 as inet_aton(3) reads it: 127.0.0.1, 127.1, 0x7f.1, 017700000001 and 2130706433 are all the same.
    """
    host = host.strip("[]").rstrip(".")
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return None if set(host) - set("0123456789abcdefABCDEFxX.") else socket.inet_ntoa(socket.inet_aton(host))
    except OSError:
        return None


def not_public(address: str) -> str:
    """Return why an address is not connected to."""
    return f"a set from the network reaches only public addresses, and {address} is none (-o allow=private)"
