"""Network addresses: which are public, in all spellings that a resolver accepts."""

from __future__ import annotations

import ipaddress
import socket

_PUBLIC_6 = ipaddress.IPv6Network("2000::/3")  # IANA: global unicast; all others are local, mapped or not assigned
# Azure's host agent: an address of the public range, which leads each machine of Azure to its own host.
_NOT_PUBLIC = frozenset(("168.63.129.16",))
# Networks in which the last 32 bits are the IPv4 address that is reached: mapped (RFC 4291), NAT64 (RFC 6052).
_EMBEDDED = tuple(map(ipaddress.IPv6Network, ("::ffff:0:0/96", "64:ff9b::/96")))


def is_public(address: str) -> bool:
    """Return whether `address`, as a socket returns it, is public; False for text that is not an address."""
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
    """Return the address that `host` spells; None if `host` is a name that must be looked up.

    IPv4 is parsed as by inet_aton(3): 127.0.0.1, 127.1, 0x7f.1, 017700000001 and 2130706433 are all the same.
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
    """Return the error message for an address that is not public."""
    return f"a set from the network reaches only public addresses, and {address} is none (-o allow=private)"
