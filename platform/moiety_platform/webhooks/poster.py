"""Sends one request to a webhook. No SQL."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from functools import cache
from typing import Self

import httpx

from moiety_platform.webhooks.addresses import AddressPolicy, CannotReach

TIMEOUT_S = 10.0


class WebhookClient:
    """HTTP client of webhooks, closed by its owner.

    It follows no redirects, uses no proxy, reads only the status of a response, and keeps no connection, since a
    connection to an address must not serve another name at the same address.
    """

    def __init__(
        self, reach: AddressPolicy, *, timeout_s: float = TIMEOUT_S, tls: ssl.SSLContext | None = None
    ) -> None:
        self._reach = reach
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(
            trust_env=False,
            follow_redirects=False,
            timeout=timeout_s,
            limits=httpx.Limits(max_keepalive_connections=0),
            verify=tls or _default_tls(),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def post(self, address: str, body: bytes, headers: Mapping[str, str]) -> None:
        """Send the request and wait for a success status. Raises CannotReach."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._post(httpx.URL(address), body, headers)
        except (TimeoutError, httpx.TimeoutException) as exc:
            raise CannotReach("timeout") from exc
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError) as exc:
            raise CannotReach("connection_failed") from exc

    async def _post(self, url: httpx.URL, body: bytes, headers: Mapping[str, str]) -> None:
        there = url.copy_with(host=str(await self._reach.resolve(url)))
        request = self._http.build_request(
            "POST",
            there,
            content=body,
            headers={**headers, "Host": url.netloc.decode("ascii")},
            extensions={"sni_hostname": url.raw_host.decode("ascii")},
        )
        answer = await self._http.send(request, stream=True)
        await answer.aclose()
        if not answer.is_success:
            raise CannotReach(f"status_{answer.status_code}")


@cache
def _default_tls() -> ssl.SSLContext:
    """Return the TLS context that trusts the system's certificates, which takes 20 ms to read."""
    return ssl.create_default_context()
