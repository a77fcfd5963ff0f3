"""Questions to an HTTP endpoint of the operator: a POST with JSON, whose answer is 200 with JSON of a known type."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import TypeVar

import httpx
import msgspec

from moiety_platform.webhooks.addresses import AddressPolicy, CannotReach
from moiety_platform.webhooks.guarded_http import guarded_client, guarded_request

T = TypeVar("T")
_HEADERS = {"Content-Type": "application/json"}
_CLIENT_TIMEOUT_S = 30.0  # of the client's single steps; each question has a time of its own


class EndpointFailed(Exception):
    """The endpoint has not answered as it must. The message is a short reason without any of the text."""


@dataclass(eq=False, slots=True)
class JsonEndpoint:
    """Client of endpoints for one event loop, which reads answers up to a length. Owned by who asks, and closed by it.

    The URL is given with each question, since it can be a setting that changes.
    """

    reach: AddressPolicy
    max_answer_bytes: int
    tls: ssl.SSLContext | None = None
    _http: httpx.AsyncClient | None = None

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()

    async def ask(self, url: str, body: bytes, answer_type: type[T], timeout_s: float) -> T:
        """Return the answer to the JSON text `body`. Raises EndpointFailed."""
        try:
            async with asyncio.timeout(timeout_s):
                data = await self._post(url, body)
        except (TimeoutError, httpx.TimeoutException) as exc:
            raise EndpointFailed("timeout") from exc
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError) as exc:
            raise EndpointFailed("connection_failed") from exc
        except CannotReach as exc:
            raise EndpointFailed(exc.code) from exc
        try:
            return msgspec.json.decode(data, type=answer_type)
        except msgspec.MsgspecError as exc:
            raise EndpointFailed("invalid_answer") from exc

    async def _post(self, url: str, body: bytes) -> bytes:
        if self._http is None:
            self._http = guarded_client(_CLIENT_TIMEOUT_S, self.tls)
        request = await guarded_request(self._http, self.reach, "POST", httpx.URL(url), _HEADERS, body)
        answer = await self._http.send(request, stream=True)
        data = bytearray()
        try:
            async for part in answer.aiter_bytes():
                data += part
                if len(data) > self.max_answer_bytes:
                    raise EndpointFailed("answer_too_long")
        finally:
            await answer.aclose()
        if answer.status_code != httpx.codes.OK:
            raise EndpointFailed(f"status_{answer.status_code}")
        return bytes(data)
