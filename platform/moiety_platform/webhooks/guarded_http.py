"""HTTP client whose requests go only to addresses that a policy permits.

It follows no redirects, uses no proxy, and keeps no connection, since a connection to an address must not serve another
name at the same address.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from functools import cache

import httpx

from moiety_platform.webhooks.addresses import AddressPolicy, LookupName


def guarded_client(timeout_s: float, tls: ssl.SSLContext | None = None) -> httpx.AsyncClient:
    """Return an HTTP client for the requests of `guarded_request`."""
    return httpx.AsyncClient(
        trust_env=False,
        follow_redirects=False,
        timeout=timeout_s,
        limits=httpx.Limits(max_keepalive_connections=0),
        verify=tls or _default_tls(),
    )


async def guarded_request(
    http: httpx.AsyncClient,
    reach: AddressPolicy,
    method: str,
    url: httpx.URL,
    headers: Mapping[str, str],
    content: bytes | None = None,
    lookup: LookupName | None = None,
) -> httpx.Request:
    """Return a request to an address of the URL's host that has been checked. Raises CannotReach.

    `lookup` resolves the host's name; by default the event loop does.
    """
    return http.build_request(
        method,
        url.copy_with(host=str(await reach.resolve(url, lookup))),
        content=content,
        headers={**headers, "Host": url.netloc.decode("ascii")},
        extensions={"sni_hostname": url.raw_host.decode("ascii")},
    )


@cache
def _default_tls() -> ssl.SSLContext:
    """Return the TLS context that trusts the system's certificates, which takes 20 ms to read."""
    return ssl.create_default_context()
