"""Answers of `/v1/responses`: the fields common to all of them, and how they end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moiety_platform.errors import PlatformError
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.run import Usage
from moiety_platform.responses_api.answer_types import TextFormatFields
from moiety_platform.responses_api.items import Item
from moiety_platform.responses_api.schemas import ResponsesBody, TextOptions
from moiety_platform.responses_api.tool_choice import AUTO
from moiety_wire.messages import Finished, FinishReason, Sampling

ID_PREFIX = "resp_"
WHY_INCOMPLETE = {FinishReason.LENGTH: "max_output_tokens", FinishReason.CONTENT_FILTER: "content_filter"}

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Fields of a response that are known before it begins."""

    response_id: str
    created_at: int
    model: str
    served_tier: str | None
    body: ResponsesBody
    sampling: Sampling

    @classmethod
    def of(cls, body: ResponsesBody, record: RequestRecord) -> ResponseHead:
        created_at = record.arrival_unix_ns // 1_000_000_000
        sampling = Sampling() if record.generation is None else record.generation.sampling
        return cls(record.request_id, created_at, record.served_model, record.served_tier, body, sampling)

    def queued(self) -> Fields:
        """Return the response before it has begun."""
        return self._fields("queued", [])

    def in_progress(self) -> Fields:
        """Return the response before it has any output."""
        return self._fields("in_progress", [])

    def ended(self, output: list[Item], finished: Finished, usage: Usage, completed_at: int) -> Fields:
        """Return the ended response. An exhausted quota counts as `max_output_tokens`."""
        if finished.reason in WHY_INCOMPLETE:
            why = {"reason": WHY_INCOMPLETE[finished.reason]}
            return self._fields("incomplete", output, incomplete_details=why, usage=usage_fields(usage))
        return self._fields("completed", output, completed_at=completed_at, usage=usage_fields(usage))

    def failed(self, output: list[Item], error: PlatformError) -> Fields:
        """Return the failed response. Its error has one of OpenAI's codes."""
        fields = {"code": _error_code(error), "message": error.message}
        return self._fields("failed", output, error=fields)

    def _fields(self, status: str, output: list[Item], **end: Any) -> Fields:
        body = self.body
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "conversation": None if body.conversation is None else {"id": body.conversation.id},
            "background": bool(body.background),
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "model": self.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "prompt_cache_retention": body.prompt_cache_retention,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": self.served_tier,
            "store": body.is_stored,
            "temperature": self.sampling.temperature if body.temperature is None else body.temperature,
            "text": {"format": format_fields(body.text), "verbosity": "medium"},
            "tool_choice": (body.tool_choice or AUTO).fields,
            "tools": [tool.fields() for tool in body.tools or () if any(tool.offered())],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self.sampling.top_p if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
            **end,
        }


def format_fields(text: TextOptions | None) -> TextFormatFields:
    """Return the response format as the answer repeats it."""
    asked = None if text is None else text.format
    if asked is None or asked.json_schema is None or asked.name is None or asked.type != "json_schema":
        return {"type": "json_object"} if asked is not None and asked.type == "json_object" else {"type": "text"}
    return {
        "type": "json_schema",
        "name": asked.name,
        "schema": asked.json_schema,
        "description": asked.description,
        "strict": True,
    }


def usage_fields(usage: Usage) -> Fields:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }


def _error_code(error: PlatformError) -> str:
    if error.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if error.status >= 500 else "invalid_prompt"
