"""Sends one request to a webhook. No SQL."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import httpx

from moiety_platform.webhooks.addresses import AddressPolicy, CannotReach
from moiety_platform.webhooks.guarded_http import guarded_client, guarded_request

TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class WebhookResponse:
    """Status of a response, and the beginning of its body, if it was requested."""

    status: int
    excerpt: str = ""

    @property
    def is_success(self) -> bool:
        return httpx.codes.is_success(self.status)


class WebhookClient:
    """HTTP client of webhooks, closed by its owner.

    It reads only the status of a response, except for a test delivery.
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
        response = await self.send(address, body, headers)
        if not response.is_success:
            raise CannotReach(f"status_{response.status}")

    async def send(
        self, address: str, body: bytes, headers: Mapping[str, str], *, max_excerpt_bytes: int = 0
    ) -> WebhookResponse:
        """Send the request and return the response, whatever its status. Raises CannotReach where there is none."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._send(httpx.URL(address), body, headers, max_excerpt_bytes)
        except (TimeoutError, httpx.TimeoutException) as exc:
            raise CannotReach("timeout") from exc
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError) as exc:
            raise CannotReach("connection_failed") from exc

    async def _send(
        self, url: httpx.URL, body: bytes, headers: Mapping[str, str], max_excerpt_bytes: int
    ) -> WebhookResponse:
        request = await guarded_request(self._http, self._reach, "POST", url, headers, body)
        response = await self._http.send(request, stream=True)
        try:
            excerpt = b""
            if max_excerpt_bytes:
                async for part in response.aiter_raw():  # not decompressed
                    excerpt += part
                    if len(excerpt) >= max_excerpt_bytes:
                        break
        finally:
            await response.aclose()
        return WebhookResponse(response.status_code, excerpt[:max_excerpt_bytes].decode(errors="replace"))
