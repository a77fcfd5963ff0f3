"""Compaction: the model summarizes a conversation, and the client goes on with the encrypted summary in its place.

A small model may write no summary. The item then has a shortened transcript, since a client whose conversation is too
long cannot go on after an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal

import structlog

from moiety_platform.inference.body_fields import Retention
from moiety_platform.inference.field_support import ignored, mapped
from moiety_platform.inference.generation import Conversation, Generation
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.responses_api.item_bodies import ItemsBody
from moiety_platform.responses_api.items import COMPACTION, MESSAGE, with_id
from moiety_platform.responses_api.output import ItemBegun, ItemEnded, ResponseOutput, Step
from moiety_platform.responses_api.transcript import shortened_transcript
from moiety_text.reasoning import AnswerReader
from moiety_wire.messages import Finished, Sampling, TokenLogprob

MAX_SUMMARY_TOKENS = 4096
TIERS: Mapping[str, str] = MappingProxyType({"fast": "priority", "ultrafast": "priority", "scale": "auto"})
REQUEST = (
    "Summarize this conversation so that another assistant can continue it without reading it. State the user's "
    "requests and constraints, what has been done and found so far, names of files and exact values that matter, and "
    "what remains to be done. Answer with the summary only."
)

log = structlog.get_logger(__name__)


class CompactBody(ItemsBody):
    """`POST /v1/responses/compact`."""

    service_tier: Annotated[
        Literal["auto", "default", "flex", "priority", "fast", "scale", "ultrafast"] | None,
        mapped("`fast` and `ultrafast` mean `priority`, and `scale` means `auto`."),
    ] = None
    prompt_cache_key: Annotated[str | None, ignored("Prefixes are cached without a key.")] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, ignored("Every prefix is cached.")] = None
    prompt_cache_retention: Annotated[
        Retention | None, ignored("The original of a compacted conversation is not returned.")
    ] = None
    image: Annotated[dict[str, Any] | None, ignored("Images are not compressed.")] = None

    def generation(self) -> Generation:
        """Return the generation of the summary. Raises BadRequest if calls and results do not match."""
        return compaction_of(self.model, self.messages(), self.service_tier)


def request_for_summary(messages: Sequence[dict[str, Any]]) -> Conversation:
    """Return the conversation that asks the model for the summary of another one."""
    return Conversation((*messages, {"role": "user", "content": REQUEST}))


def compaction_of(model: str, messages: Sequence[dict[str, Any]], service_tier: str | None) -> Generation:
    """Return the generation of a conversation's summary. What does not fit the context is left out."""
    return Generation(
        model=model,
        prompts=(request_for_summary(messages),),
        num_choices=1,
        sampling=Sampling(temperature=0.0),
        max_tokens=None,
        default_max_tokens=MAX_SUMMARY_TOKENS,
        service_tier=TIERS.get(service_tier or "", service_tier),
        truncates=True,
    )


class CompactionOutput(ResponseOutput):
    """Output of a compaction: one item with the encrypted summary, made at the end.

    If the model writes none, its place is taken by a transcript of what `record` says that the model was asked.
    """

    def __init__(self, record: RequestRecord, reader: AnswerReader | None, encrypt: Callable[[str], str]) -> None:
        super().__init__(record.request_id, reader, {})
        self._summary_cipher = encrypt
        self._record = record

    def take(self, text: str, logprobs: Sequence[TokenLogprob] | None) -> list[Step]:
        """Add text of the summary. There are no steps before the end."""
        super().take(text, None)
        return []

    def end(self, finished: Finished) -> list[Step]:
        """End the summary, and return the steps of its item."""
        super().end(finished)
        messages = [item for item in self.items if item["type"] == MESSAGE]
        summary = "\n".join(part["text"] for message in messages for part in message["content"]).strip()
        record = self._record
        if not summary:
            assert record.generation is not None and isinstance(record.generation.prompts[0], Conversation), "submitted"
            asked = record.generation.prompts[0].messages[:-1]  # without the request to summarize
            summary = shortened_transcript(asked, finished.num_prompt_tokens)
            record.adjusted_fields["summary"] = "transcript"
            log.info("compaction_without_summary", request_id=record.request_id, reason=finished.reason.value)
        item = with_id({"type": COMPACTION, "encrypted_content": self._summary_cipher(summary)}, record.request_id, 0)
        self.items = [item]
        return [ItemBegun(item), ItemEnded(item)]
