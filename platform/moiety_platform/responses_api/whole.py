"""Whole responses of ended runs, for clients that do not stream and for batch lines."""

from __future__ import annotations

from typing import Any, Self

import msgspec
from pydantic import model_validator

from moiety_platform.inference.body_fields import refuse
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.run import InferenceRun
from moiety_platform.responses_api.answers import Fields, ResponseHead
from moiety_platform.responses_api.input import REFERENCE, CompactionItem, CompactionTrigger, ItemReference
from moiety_platform.responses_api.output import ResponseOutput
from moiety_platform.responses_api.schemas import ResponsesBody
from moiety_wire.messages import Finished, Tokens


class BatchResponsesBody(ResponsesBody):
    """`/v1/responses` in a line of a batch, whose answer is in the output file and is not stored elsewhere."""

    @model_validator(mode="before")
    @classmethod
    def _without_storage(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: field for name, field in value.items() if name not in ("store", "background")}

    @model_validator(mode="after")
    def _has_whole_conversation(self) -> Self:
        if self.previous_response_id is not None or self.conversation is not None:
            raise refuse(
                "a line of a batch cannot continue a stored conversation; leave 'previous_response_id' and "
                "'conversation' out, and send all items as 'input'"
            )
        for item in self.input:
            if isinstance(item, ItemReference | CompactionItem | CompactionTrigger):
                kind = item.type or REFERENCE
                raise refuse(f"a line of a batch cannot have items of type {kind!r} in 'input'; send others")
        return self


def take_message(output: ResponseOutput, message: Tokens | Finished) -> None:
    """Add a message of the engine to an answer that is not streamed."""
    if isinstance(message, Finished):
        output.take(message.text, None)
        output.end(message)
    else:
        output.take(message.text, message.logprobs)


def ended_response(head: ResponseHead, output: ResponseOutput, run: InferenceRun, record: RequestRecord) -> Fields:
    """Return the response of a run that has ended."""
    assert output.finished is not None, "an answer has come to its end"
    return head.ended(output.items, output.finished, run.usage(), record.ended_unix_s)


async def whole_response(body: ResponsesBody, run: InferenceRun, record: RequestRecord) -> bytes:
    """Read a run to its end, and return the response as JSON. Its reasoning is not encrypted."""
    readers = run.new_readers()
    tools = {one.tool.name: one for one in body.offered}
    output = ResponseOutput(record.request_id, None if readers is None else readers[0], tools)
    async for _, message in run:
        take_message(output, message)
    return msgspec.json.encode(ended_response(ResponseHead.of(body, record), output, run, record))
