"""Where webhooks may go to: addresses of the public internet over https, and whatever networks the settings name, there
over http as well. Pure but for the resolver.

A name is resolved once, all its addresses are judged, and the request goes to one of those that were judged: a name
that says something else a moment later leads nowhere.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

import httpx

from moiety_platform.errors import BadRequest
from moiety_platform.webhooks.models import MAX_URL_LENGTH
from moiety_platform.webhooks.special_addresses import is_special

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

ADDRESS_NOT_ALLOWED = "address_not_allowed"
NAME_NOT_RESOLVED = "name_not_resolved"


MIN_PORT, MAX_PORT = 1, 65_535

_AUTHORITY = re.compile(r"^[^:]+:/*([^/?#\\]*)")
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}", re.ASCII)


class CannotReach(Exception):
    """`code` says why, in a word that administrators see."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@dataclass(slots=True)
class AddressPolicy:
    """`networks` are those that the settings allow besides the public internet; may be set to others."""

    networks: tuple[Network, ...] = ()

    def check(self, text: str) -> str:
        """The address of a new webhook, as it is kept. Raises BadRequest where it could never be reached."""
        if len(text) > MAX_URL_LENGTH or not text.isascii() or not text.isprintable() or " " in text:
            raise _bad(f"must have at most {MAX_URL_LENGTH} ASCII characters and no spaces")
        try:
            url = httpx.URL(text)
        except httpx.InvalidURL as exc:
            raise _bad("is not a URL") from exc
        if url.scheme not in ("https", "http") or not (_HOST.fullmatch(url.host) or _literal(url.host)):
            raise _bad("must begin with https://, and name a host")
        if url.port is not None and not MIN_PORT <= url.port <= MAX_PORT:
            raise _bad(f"must have a port from {MIN_PORT} to {MAX_PORT}, or none for the usual one")
        if url.userinfo or "@" in _AUTHORITY.findall(text)[0] or url.fragment:
            raise _bad("must have neither a user nor a fragment (#…)")
        if url.scheme == "http" and not self.networks:
            raise _bad("must begin with https://; http:// is for networks that the setting webhook_networks names")
        literal = _literal(url.host) or _numeric(url.host)
        is_local = url.host.rstrip(".").lower().rpartition(".")[2] == "localhost" and not self.networks
        if is_local or (literal is not None and not self.allows(literal, url.scheme)):
            raise _bad(
                "leads to an address that webhooks may not go to: it is private, or http:// leads out of the networks "
                "of the setting webhook_networks",
                ADDRESS_NOT_ALLOWED,
            )
        return text

    def allows(self, address: Address, scheme: str) -> bool:
        """Whether a request may go there."""
        if any(address in network for network in self.networks):
            return True
        return scheme == "https" and not is_special(address)

    async def resolve(self, url: httpx.URL) -> Address:
        """An address of the URL's host to connect to. Raises CannotReach, also where only one of several addresses is
        not allowed."""
        literal = _literal(url.host)
        addresses = [literal] if literal is not None else await _look_up(url)
        if not all(self.allows(address, url.scheme) for address in addresses):
            raise CannotReach(ADDRESS_NOT_ALLOWED)
        return addresses[0]


async def _look_up(url: httpx.URL) -> Sequence[Address]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            url.raw_host.decode("ascii"), url.port, type=socket.SOCK_STREAM
        )
    except (OSError, UnicodeError) as exc:
        raise CannotReach(NAME_NOT_RESOLVED) from exc
    return [ip_address(where[0]) for *_, where in found]


def _literal(host: str) -> Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def _numeric(host: str) -> Address | None:
    """Return the IPv4 address that a resolver reads from forms such as 127.1, 2130706433 and 0x7f000001."""
    try:
        return IPv4Address(socket.inet_aton(host.rstrip(".")))
    except (OSError, ValueError):
        return None


def _bad(why: str, code: str | None = None) -> BadRequest:
    return BadRequest(f"'url' {why}.", code=code, param="url")
