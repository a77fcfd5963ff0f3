"""Checks of texts by guardrails: built-in detectors, HTTP endpoints and Python entry points, within their time.

An endpoint gets a POST with a JSON object of `guardrail`, `stage`, `request_id`, `tenant_id`, `model`, `text` and
`is_last`, and answers 200 with `{"allow": true}`, or `{"allow": false}`. Everything else is a failure.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import structlog

from moiety_platform.errors import BadRequest, Unavailable
from moiety_platform.guardrails.detectors import MAX_MATCH_CHARS, find
from moiety_platform.guardrails.entry_point_checks import EntryPointChecks, EntryPointFailed
from moiety_platform.guardrails.terms import Guardrail, GuardrailAction, GuardrailFailure, GuardrailStage
from moiety_platform.inference.generation import Conversation, Generation, TextPair
from moiety_platform.inference.model_texts import ModelText
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.metrics import Metrics
from moiety_platform.request_contents.terms import CapturedContent, terms_of
from moiety_platform.request_rules.cache import TextRule
from moiety_platform.webhooks.addresses import AddressPolicy
from moiety_platform.webhooks.json_endpoint import EndpointFailed, JsonEndpoint

SLICE_CHARS = 32 * 1024  # searched at once, which takes about a millisecond
MAX_ANSWER_BYTES = 4096
MAX_SENT_CHARS = 1024 * 1024  # of a request's text
GUARDRAIL_BLOCKED, GUARDRAIL_UNAVAILABLE = "guardrail_blocked", "guardrail_unavailable"
PASSED, BLOCKED, OBSERVED = "passed", "blocked", "observed"
FAILED_OPEN, FAILED_CLOSED = "failed_open", "failed_closed"

log = structlog.get_logger(__name__)


class _CheckFailed(Exception):
    """The check did not come to a result."""


class _Verdict(msgspec.Struct):
    allow: bool


@dataclass(eq=False)
class GuardrailChecks:
    """Checks of one gateway process. Owned by the entry point, which closes it."""

    metrics: Metrics
    reach: AddressPolicy
    tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        self._endpoint = JsonEndpoint(self.reach, MAX_ANSWER_BYTES, self.tls)
        self._entry_points = EntryPointChecks()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._entry_points.close)
        await self._endpoint.close()

    async def check_input(
        self, record: RequestRecord, generation: Generation, text: ModelText, *, guardrails: Iterable[TextRule]
    ) -> None:
        """Check the text of a request, once, and note it for tenants whose contents are logged.

        Raises BadRequest if a guardrail blocks it, or Unavailable.
        """
        if record.passed_input_guardrails:
            return
        mine, content_terms = stage_of(guardrails, GuardrailStage.INPUT), terms_of(guardrails)
        if mine or content_terms is not None:
            given = await input_text(generation, text)
            if content_terms is not None:
                record.content = CapturedContent(content_terms, given)
            await self.check(mine, record, given, is_last=True)
        record.passed_input_guardrails = True

    async def check(self, guardrails: Sequence[Guardrail], record: RequestRecord, text: str, *, is_last: bool) -> None:
        """Check a text by guardrails of one stage. Raises BadRequest if one blocks it.

        Raises Unavailable if the check of a guardrail fails that fails closed.
        """
        for guardrail in guardrails:
            found, outcome = "", PASSED
            try:
                found = await self._find(guardrail, record, text, is_last=is_last)
            except _CheckFailed as exc:
                is_open = guardrail.on_failure is GuardrailFailure.OPEN
                outcome = FAILED_OPEN if is_open else FAILED_CLOSED
                log.warning(
                    "guardrail_failed",
                    guardrail=guardrail.name,
                    reason=str(exc),
                    advice="check the endpoint or package of the guardrail; on_failure says what happens to requests",
                )
            if found:
                outcome = BLOCKED if guardrail.action is GuardrailAction.BLOCK else OBSERVED
                log.info("guardrail_found", guardrail=guardrail.name, outcome=outcome, request_id=record.request_id)
            self.metrics.observe_guardrail(guardrail.name, guardrail.stage, outcome)
            if outcome != PASSED or guardrail.name not in record.guardrails:
                record.guardrails[guardrail.name] = outcome
            if outcome == BLOCKED:
                raise _blocked(guardrail, found)
            if outcome == FAILED_CLOSED:
                message = f"the guardrail {guardrail.name!r} cannot check this request right now; try again shortly"
                raise Unavailable(message, code=GUARDRAIL_UNAVAILABLE, retry_after_s=1)

    async def _find(self, guardrail: Guardrail, record: RequestRecord, text: str, *, is_last: bool) -> str:
        """Return what the guardrail finds in the text, "" for nothing. Raises _CheckFailed."""
        if guardrail.detectors:
            for start in range(0, len(text), SLICE_CHARS):
                if found := find(text[max(0, start - MAX_MATCH_CHARS) : start + SLICE_CHARS], guardrail.detectors):
                    return found.value
                if start + SLICE_CHARS < len(text):
                    await asyncio.sleep(0)
            return ""
        if len(text) > MAX_SENT_CHARS:
            raise _CheckFailed("text_too_long")
        sent = {
            "guardrail": guardrail.name,
            "stage": guardrail.stage.value,
            "request_id": record.request_id,
            "tenant_id": record.principal.tenant_id,
            "model": record.served_model,
            "text": text,
            "is_last": is_last,
        }
        timeout_s = guardrail.timeout_ms / 1000
        if guardrail.entry_point is not None:
            data, memory_bytes = json.dumps(sent).encode(), guardrail.memory_mb << 20
            try:
                allows = await self._entry_points.allows(
                    guardrail.entry_point, data, timeout_s, memory_bytes, record.principal.tenant_id
                )
            except EntryPointFailed as exc:
                raise _CheckFailed(str(exc)) from exc
            return "" if allows else "entry point"
        assert guardrail.url is not None, "a guardrail has detectors, an endpoint or an entry point"
        try:
            verdict = await self._endpoint.ask(guardrail.url, json.dumps(sent).encode(), _Verdict, timeout_s)
        except EndpointFailed as exc:
            raise _CheckFailed(str(exc)) from exc
        return "" if verdict.allow else "endpoint"


def stage_of(rules: Iterable[TextRule], stage: GuardrailStage) -> list[Guardrail]:
    """Return the guardrails of the stage."""
    return [one for one in rules if isinstance(one, Guardrail) and one.stage is stage]


async def input_text(generation: Generation, text: ModelText) -> str:
    """Return the text of a request that clients have written, a line for each part of it."""
    texts: list[str] = []
    for prompt in generation.prompts:
        if isinstance(prompt, str):
            texts.append(prompt)
        elif isinstance(prompt, TextPair):
            texts += (prompt.first, prompt.second)
        elif isinstance(prompt, Conversation):
            for message in prompt.messages:
                texts += _texts_in(message)
            for tool in () if prompt.tools is None else prompt.tools.tools:  # templates show all of it to the model
                texts.append(json.dumps(tool.for_template(), ensure_ascii=False))
            texts += _texts_in({"arguments": prompt.template_options} if prompt.template_options else {})
            texts.append(prompt.prefill)
        else:
            texts.append(await text.decode(prompt))
    return "\n".join(dict.fromkeys(texts))


def _texts_in(value: Any) -> Iterable[str]:
    """Yield the texts in a message, and the arguments of its tool calls as JSON, as templates show them to the model.

    The JSON has also their names and numbers.
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, one in value.items():
            if name == "arguments" and not isinstance(one, str):
                yield json.dumps(one, ensure_ascii=False)
            yield from _texts_in(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts_in(one)


def _blocked(guardrail: Guardrail, found: str) -> BadRequest:
    what = "text of the request" if guardrail.stage is GuardrailStage.INPUT else "answer"
    reason = "" if not guardrail.detectors else f", because it contains {found.replace('_', ' ')}"
    return BadRequest(f"the guardrail {guardrail.name!r} blocks the {what}{reason}", code=GUARDRAIL_BLOCKED)
