"""Addresses outside the public internet, by IANA's registries of special-purpose addresses. Pure.

The tables are copied here, since those of Python's `ipaddress` differ between its releases: 3.11 counts 64:ff9b::/96,
behind which NAT64 has all of IPv4, and 3fff::/20 as global. https://www.iana.org/assignments/iana-ipv4-special-registry
and …/iana-ipv6-special-registry, of 2025.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

SPECIAL_IPV4: tuple[IPv4Network, ...] = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network (RFC 791)
        "10.0.0.0/8",  # private (RFC 1918)
        "100.64.0.0/10",  # shared by a carrier's NAT (RFC 6598)
        "127.0.0.0/8",  # loopback (RFC 1122)
        "169.254.0.0/16",  # link-local, and clouds' metadata (RFC 3927)
        "172.16.0.0/12",  # private (RFC 1918)
        "192.0.0.0/24",  # protocol assignments (RFC 6890)
        "192.0.2.0/24",  # documentation (RFC 5737)
        "192.31.196.0/24",  # AS112 (RFC 7535)
        "192.52.193.0/24",  # AMT (RFC 7450)
        "192.88.99.0/24",  # 6to4 relays, deprecated (RFC 7526)
        "192.168.0.0/16",  # private (RFC 1918)
        "192.175.48.0/24",  # AS112 (RFC 7534)
        "198.18.0.0/15",  # benchmarking (RFC 2544)
        "198.51.100.0/24",  # documentation (RFC 5737)
        "203.0.113.0/24",  # documentation (RFC 5737)
        "224.0.0.0/4",  # multicast (RFC 5771)
        "240.0.0.0/4",  # reserved, and broadcast (RFC 1112, 919)
    )
)

GLOBAL_UNICAST_IPV6 = IPv6Network("2000::/3")
"""The only range of global addresses.

All others are loopback, mapped or compatible IPv4 (::/96, ::ffff:0:0/96), NAT64 (64:ff9b::/96, 64:ff9b:1::/48),
discard-only (100::/64), segment routing (5f00::/16), unique local (fc00::/7), link-local (fe80::/10), site-local
(fec0::/10), multicast (ff00::/8) or not assigned (RFC 4291).
"""

SPECIAL_IPV6: tuple[IPv6Network, ...] = tuple(
    IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments: Teredo, benchmarking, ORCHID and others (RFC 2928)
        "2001:db8::/32",  # documentation (RFC 3849)
        "2002::/16",  # 6to4, which encodes an IPv4 address (RFC 3056)
        "2620:4f:8000::/48",  # AS112 (RFC 7534)
        "3fff::/20",  # documentation (RFC 9637)
    )
)


def is_special(address: IPv4Address | IPv6Address) -> bool:
    """Return whether the address has a special purpose, or encodes another address."""
    if isinstance(address, IPv4Address):
        return any(address in network for network in SPECIAL_IPV4)
    if address.scope_id is not None or address not in GLOBAL_UNICAST_IPV6:
        return True
    return any(address in network for network in SPECIAL_IPV6)
