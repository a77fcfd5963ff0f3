"""Truncation of conversations that do not fit a model's context: the oldest messages are left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from moiety_platform.errors import ContextTooLong
from moiety_platform.inference.generation import Conversation, Generation
from moiety_platform.inference.model_texts import ModelText
from moiety_platform.inference.request_record import RequestRecord
from moiety_wire.messages import ModelCard

OUTPUT_SHARE = 8  # without an output limit, one part in so many of the context is left for the output
MAX_OUTPUT_ROOM = 4096  # and no more tokens than that


async def encode_fitting(
    text: ModelText, generation: Generation, card: ModelCard, record: RequestRecord
) -> tuple[Generation, list[list[int]]]:
    """Return the token ids of each prompt, of a conversation with truncation without what does not fit.

    The generation is returned with the messages that are kept. Messages of the system and the last message are kept,
    and results stay with their calls. The record says how many messages are left out. Raises the errors of
    `encode_prompts`.
    """
    conversation = generation.prompts[0]
    if not generation.truncates or not isinstance(conversation, Conversation):
        return generation, await text.encode_prompts(generation)
    most = card.max_context_tokens - _output_room(generation, card)

    def without(num_dropped: int) -> Generation:
        kept = msgspec.structs.replace(conversation, messages=_without(conversation.messages, groups[:num_dropped]))
        return msgspec.structs.replace(generation, prompts=(kept,))

    async def encode_without(num_dropped: int) -> list[list[int]] | None:
        try:
            prompts = await text.encode_prompts(without(num_dropped))
        except ContextTooLong:
            return None
        return prompts if len(prompts[0]) <= most else None

    groups = _droppable(conversation.messages)
    fitting = await encode_without(0)
    if fitting is not None or not groups:
        return generation, await text.encode_prompts(generation) if fitting is None else fitting
    low, high, fitting = 1, len(groups), await encode_without(len(groups))
    if fitting is None:
        return generation, await text.encode_prompts(generation)  # the error names the lengths
    while low < high:
        middle = (low + high) // 2
        found = await encode_without(middle)
        if found is None:
            low = middle + 1
        else:
            high, fitting = middle, found
    num_dropped = sum(map(len, groups[:high]))
    record.adjusted_fields["truncation"] = f"{num_dropped} of {len(conversation.messages)} messages left out"
    return without(high), fitting


def _output_room(generation: Generation, card: ModelCard) -> int:
    """Return the number of tokens that the prompt must leave for the output."""
    if generation.max_tokens is not None:
        return generation.max_tokens
    return max(1, min(MAX_OUTPUT_ROOM, card.max_context_tokens // OUTPUT_SHARE))


def _droppable(messages: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Return the indices of messages that are left out together, the oldest first, without those that are kept."""
    groups: list[list[int]] = []
    for index, message in enumerate(messages):
        if message["role"] == "system":
            continue
        if message["role"] == "tool" and groups:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups[:-1]


def _without(messages: Sequence[dict[str, Any]], groups: Sequence[Sequence[int]]) -> tuple[dict[str, Any], ...]:
    dropped = {index for group in groups for index in group}
    return tuple(message for index, message in enumerate(messages) if index not in dropped)
