"""Redaction of contents before they are stored: by the built-in detectors, then by an HTTP endpoint of the operator.

The endpoint gets a POST with a JSON object of `request_id`, `tenant_id` and `texts` (that of the request, then those of
the answers), and answers 200 with `{"texts": […]}` of the same number. Everything else is a failure.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass

import httpx
import msgspec

from moiety_platform.guardrails.detectors import redact
from moiety_platform.request_contents.terms import Content
from moiety_platform.webhooks.addresses import AddressPolicy, CannotReach
from moiety_platform.webhooks.guarded_http import guarded_client, guarded_request

MAX_ANSWER_BYTES = 4 * 1024 * 1024


class RedactionFailed(Exception):
    """The endpoint has not redacted a content. The message is a short reason without any of the text."""


class _RedactedTexts(msgspec.Struct):
    texts: list[str]


@dataclass(eq=False, slots=True)
class ContentRedactor:
    """Redactor of one gateway process, for one event loop. Without `url` only the built-in detectors redact.

    Owned by the entry point, which closes it.
    """

    reach: AddressPolicy
    url: str | None = None
    timeout_s: float = 2.0
    tls: ssl.SSLContext | None = None
    _http: httpx.AsyncClient | None = None

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()

    async def redact(self, tenant_id: str, request_id: str, content: Content) -> Content:
        """Return the content as it may be stored. Raises RedactionFailed."""
        found = await asyncio.to_thread(without_secrets, content)
        if self.url is None:
            return found
        sent = {"request_id": request_id, "tenant_id": tenant_id, "texts": [found.input, *found.outputs]}
        try:
            async with asyncio.timeout(self.timeout_s):
                texts = await self._ask(self.url, msgspec.json.encode(sent))
        except (TimeoutError, httpx.TimeoutException) as exc:
            raise RedactionFailed("timeout") from exc
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError) as exc:
            raise RedactionFailed("connection_failed") from exc
        except CannotReach as exc:
            raise RedactionFailed(exc.code) from exc
        if len(texts) != 1 + len(found.outputs):
            raise RedactionFailed("another_number_of_texts")
        return Content(texts[0], texts[1:], found.is_cut)

    async def _ask(self, url: str, body: bytes) -> list[str]:
        if self._http is None:
            self._http = guarded_client(30.0, self.tls)
        headers = {"Content-Type": "application/json"}
        request = await guarded_request(self._http, self.reach, "POST", httpx.URL(url), headers, body)
        answer = await self._http.send(request, stream=True)
        try:
            data = bytearray()
            async for part in answer.aiter_bytes():
                data += part
                if len(data) > MAX_ANSWER_BYTES:
                    raise RedactionFailed("answer_too_long")
        finally:
            await answer.aclose()
        if answer.status_code != httpx.codes.OK:
            raise RedactionFailed(f"status_{answer.status_code}")
        try:
            return msgspec.json.decode(data, type=_RedactedTexts).texts
        except msgspec.MsgspecError as exc:
            raise RedactionFailed("invalid_answer") from exc


def without_secrets(content: Content) -> Content:
    """Return the content without secrets and card numbers that the guardrails' built-in detectors find."""
    return Content(redact(content.input), [redact(one) for one in content.outputs], content.is_cut)
