"""Address policy of webhooks: the public internet over https, and the networks of the settings, also over http.

Pure except for the resolver. A name is resolved once, all its addresses are checked, and the request goes to a checked
address: a changed DNS answer (DNS rebinding) has no effect.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any

import httpx

from moiety_platform.errors import BadRequest
from moiety_platform.webhooks.models import MAX_URL_LENGTH
from moiety_platform.webhooks.special_addresses import is_special

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
Found = Sequence[tuple[Any, ...]]  # as `socket.getaddrinfo` returns it
LookupName = Callable[[str, int | None], Awaitable[Found]]  # by host and port

ADDRESS_NOT_ALLOWED = "address_not_allowed"
NAME_NOT_RESOLVED = "name_not_resolved"


MIN_PORT, MAX_PORT = 1, 65_535

_AUTHORITY = re.compile(r"^[^:]+:/*([^/?#\\]*)")
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}", re.ASCII)


class CannotReach(Exception):
    """The address cannot be reached; `code` is the reason that administrators see."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@dataclass(slots=True)
class AddressPolicy:
    """Permitted addresses. `networks` of the settings are permitted beside the public internet; can be changed."""

    networks: tuple[Network, ...] = ()

    def check(self, text: str) -> str:
        """Return the address of a new webhook, as stored. Raises BadRequest where it could never be reached."""
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
        """Return whether a request may go there."""
        if any(address in network for network in self.networks):
            return True
        return scheme == "https" and not is_special(address)

    async def resolve(self, url: httpx.URL, lookup: LookupName | None = None) -> Address:
        """Return an address of the URL's host to connect to. Raises CannotReach.

        `lookup` resolves a name; by default the event loop does.

        One forbidden address among several suffices for CannotReach.
        """
        literal = _literal(url.host)
        addresses = [literal] if literal is not None else await _lookup(url, lookup or _ask_loop)
        if not all(self.allows(address, url.scheme) for address in addresses):
            raise CannotReach(ADDRESS_NOT_ALLOWED)
        return addresses[0]


async def _lookup(url: httpx.URL, ask: LookupName) -> Sequence[Address]:
    try:
        found = await ask(url.raw_host.decode("ascii"), url.port)
    except (OSError, UnicodeError) as exc:
        raise CannotReach(NAME_NOT_RESOLVED) from exc
    return [ip_address(one[-1][0]) for one in found]


async def _ask_loop(host: str, port: int | None) -> Found:
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)


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
