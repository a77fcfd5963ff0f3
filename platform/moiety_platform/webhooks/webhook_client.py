"""Sends one request to a webhook. No SQL."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Self

import httpx

from moiety_platform.webhooks.addresses import AddressPolicy, CannotReach
from moiety_platform.webhooks.guarded_http import guarded_client, guarded_request

TIMEOUT_S = 10.0


class WebhookClient:
    """HTTP client of webhooks, closed by its owner.

    It reads only the status of a response.
    """

    def __init__(
        self, reach: AddressPolicy, *, timeout_s: float = TIMEOUT_S, tls: ssl.SSLContext | None = None
    ) -> None:
        self._reach = reach
        self._timeout_s = timeout_s
        self._http = guarded_client(timeout_s, tls)

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
        request = await guarded_request(self._http, self._reach, "POST", url, headers, body)
        answer = await self._http.send(request, stream=True)
        await answer.aclose()
        if not answer.is_success:
            raise CannotReach(f"status_{answer.status_code}")
