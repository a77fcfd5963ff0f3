"""Redaction of contents before they are stored: by the built-in detectors, then by an HTTP endpoint of the operator.

The endpoint gets a POST with a JSON object of `request_id`, `tenant_id` and `texts` (that of the request, then those of
the answers), and answers 200 with `{"texts": […]}` of the same number. Everything else is a failure.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from moiety_platform.guardrails.detectors import redact
from moiety_platform.request_contents.terms import Content
from moiety_platform.webhooks.addresses import ADDRESS_NOT_ALLOWED
from moiety_platform.webhooks.json_endpoint import EndpointFailed, JsonEndpoint

MAX_ANSWER_BYTES = 4 * 1024 * 1024


class RedactionFailed(Exception):
    """The endpoint has not redacted a content. The message is a short reason without any of the text."""

    @property
    def advice(self) -> str:
        """Advice for the operator."""
        if str(self) == ADDRESS_NOT_ALLOWED:
            return (
                "the endpoint of content_redaction_url must be in the public internet and https://, or its network in "
                "webhook_networks: no contents are stored until then"
            )
        return "check the endpoint of content_redaction_url: contents that it does not redact are not stored"


class _RedactedTexts(msgspec.Struct):
    texts: list[str]


@dataclass(eq=False, slots=True)
class ContentRedactor:
    """Redactor of one gateway process, for one event loop. Without `url` only the built-in detectors redact.

    Owned by the entry point, which closes `endpoint`.
    """

    endpoint: JsonEndpoint
    url: str | None = None
    timeout_s: float = 2.0

    async def redact(self, tenant_id: str, request_id: str, content: Content) -> Content:
        """Return the content as it may be stored. Raises RedactionFailed."""
        found = await asyncio.to_thread(without_secrets, content)
        if self.url is None:
            return found
        sent = {"request_id": request_id, "tenant_id": tenant_id, "texts": [found.input, *found.outputs]}
        try:
            answer = await self.endpoint.ask(self.url, msgspec.json.encode(sent), _RedactedTexts, self.timeout_s)
        except EndpointFailed as exc:
            raise RedactionFailed(str(exc)) from exc
        if len(answer.texts) != 1 + len(found.outputs):
            raise RedactionFailed("another_number_of_texts")
        return Content(answer.texts[0], answer.texts[1:], found.is_cut)


def without_secrets(content: Content) -> Content:
    """Return the content without secrets and card numbers that the guardrails' built-in detectors find."""
    return Content(redact(content.input), [redact(one) for one in content.outputs], content.is_cut)
