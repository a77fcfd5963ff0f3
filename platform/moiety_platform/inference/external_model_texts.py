"""Text of a model whose external engine takes images in conversations.

A conversation with images is sent as it is, and the engine renders it, so its tokens are estimated here and counted
there. The client of the engine writes the parts of the answer in one format, whatever the model's own is: reasoning
between the markers of Qwen, and calls as Hermes writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from moiety_platform.engine_client.chat_submit import ChatSubmit
from moiety_platform.inference.answer_format import AnswerFormat
from moiety_platform.inference.chat_fields import chat_messages, chat_options
from moiety_platform.inference.generation import Conversation, Generation, Prompt
from moiety_platform.inference.model_texts import ModelText
from moiety_platform.inference.prompt_images import (
    check_file,
    check_together,
    has_images,
    invalid_image,
    is_image,
)
from moiety_platform.inference.system_messages import as_user_messages
from moiety_text.marker_guards import GuardedReader
from moiety_text.reasoning import AnswerReader, ThoughtReader
from moiety_text.reasoning_formats import THINK
from moiety_text.segment_cache import Scope, SegmentCache
from moiety_text.tools.families.hermes import HermesReader
from moiety_wire.images import ImageAllowance
from moiety_wire.messages import ModelCard, Submit
from moiety_wire.thought_budget import ThoughtMarks

_PADDING_ID = 0  # stands for a token of an image, which only the engine knows


class ExternalModelText(ModelText):
    """Text of one model of an external engine that takes images. Thread-safe."""

    def __init__(
        self, card: ModelCard, allowance: ImageAllowance, inline_bytes: int, cache: SegmentCache | None = None
    ) -> None:
        super().__init__(card, inline_bytes, cache)
        self._allowance = allowance

    def new_readers(self, generation: Generation, prompts: Sequence[Sequence[int]]) -> list[AnswerReader] | None:
        prompt = generation.prompts[0]
        if not self._is_sent_as_chat(prompt):
            return super().new_readers(generation, prompts)
        return [_new_reader(prompt) for _ in range(generation.num_choices)]

    def answer_format(self, generation: Generation, number: int, prompt_ids: Sequence[int]) -> AnswerFormat:
        if not self._is_sent_as_chat(generation.prompts[number]):
            return super().answer_format(generation, number, prompt_ids)
        return AnswerFormat(thought=ThoughtMarks(THINK.opener, THINK.closer, False), grammar=generation.grammar)

    def num_thought_tokens(
        self, generation: Generation, prompts: Sequence[Sequence[int]], answers: Sequence[list[int]]
    ) -> int | None:
        if self._is_sent_as_chat(generation.prompts[0]):
            return None  # the ids of the answer's markers are not known
        return super().num_thought_tokens(generation, prompts, answers)

    def as_chat(self, submit: Submit, prompt: Prompt) -> Submit:
        """Return the request with its conversation, if that has images."""
        if not isinstance(prompt, Conversation) or not prompt.images:
            return submit
        variables: dict[str, Any] = {}
        if self._options is not None and prompt.has_reasoning_options:
            variables = self._options.variables_of(prompt)
        if not self._takes_late_system:
            prompt = msgspec.structs.replace(prompt, messages=tuple(as_user_messages(prompt.messages)))
        messages = chat_messages(prompt)
        if prompt.prefill:
            messages = (*messages, {"role": "assistant", "content": prompt.prefill})
        fields = {name: getattr(submit, name) for name in submit.__struct_fields__}
        return ChatSubmit(**fields, messages=messages, options=chat_options(prompt, variables))

    def _is_sent_as_chat(self, prompt: Prompt) -> bool:
        """Return whether the engine gets the conversation itself."""
        return isinstance(prompt, Conversation) and bool(prompt.images)

    def _encode_conversation(
        self, conversation: Conversation, is_plain: bool, max_tokens: int | None, scope: Scope
    ) -> list[int]:
        """Return the ids of the text, and as many as the allowance has for the images. Raises BadRequest."""
        images, allowance = conversation.images, self._allowance
        if not images:
            return super()._encode_conversation(conversation, is_plain, max_tokens, scope)
        check_together(images, allowance)
        for number, image in enumerate(images):
            try:
                check_file(image.data, allowance)
            except ValueError as exc:
                raise invalid_image(f"image {number} cannot be read: {exc}", image) from exc
        token_ids = super()._encode_conversation(_without_images(conversation), is_plain, max_tokens, scope)
        return [*token_ids, *[_PADDING_ID] * (allowance.image_tokens * len(images))]


def _new_reader(prompt: Prompt) -> AnswerReader:
    offer = prompt.tools if isinstance(prompt, Conversation) else None
    calls = None
    if offer is not None:
        calls = HermesReader(offer.names, offer.max_calls, is_rest=False, schemas=offer.schemas)
    return GuardedReader(ThoughtReader(calls))


def _without_images(conversation: Conversation) -> Conversation:
    messages = tuple(
        {**message, "content": "\n".join(part["text"] for part in message["content"] if not is_image(part))}
        if has_images(message["content"])
        else message
        for message in conversation.messages
    )
    return msgspec.structs.replace(conversation, messages=messages)
