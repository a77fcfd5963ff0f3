"""Truncation of conversations that do not fit a model's context: the oldest messages are left out."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec

from moiety_platform.errors import ContextTooLong
from moiety_platform.inference.generation import Conversation, Generation
from moiety_platform.inference.model_texts import ModelText
from moiety_platform.inference.prompt_images import is_image
from moiety_platform.inference.request_record import RequestRecord
from moiety_wire.messages import ModelCard

OUTPUT_SHARE = 8  # without an output limit, one part in so many of the context is left for the output
TOKENS_A_BYTE = 0.5  # of messages in JSON, before anything is measured
MIN_TOKENS_A_BYTE = 0.001
BYTES_AN_IMAGE = 2048  # of JSON that has about as many tokens
MAX_ESTIMATES = 6
MAX_RESERVED_OUTPUT = 4096  # and no more tokens than that


async def encode_fitting(
    text: ModelText, generation: Generation, card: ModelCard, record: RequestRecord
) -> tuple[Generation, list[list[int]]]:
    """Return the token ids of each prompt, of a conversation with truncation without what does not fit.

    The generation is returned with the messages that are kept. Messages of the system and the last message are kept,
    and results stay with their calls. The record says how many messages are left out. Raises the errors of
    `encode_prompts`.
    """
    conversation = generation.prompts[0]
    if not isinstance(conversation, Conversation):
        return generation, await text.encode_prompts(generation)
    most, tenant_id = card.max_context_tokens - _reserved_output(generation, card), record.principal.tenant_id

    def without(num_dropped: int) -> Generation:
        kept = msgspec.structs.replace(conversation, messages=_without(conversation.messages, groups[:num_dropped]))
        return msgspec.structs.replace(generation, prompts=(kept,))

    async def encode_without(num_dropped: int) -> list[list[int]] | None:
        try:
            prompts = await text.encode_prompts(without(num_dropped), tenant_id)
        except ContextTooLong:
            return None
        return prompts if len(prompts[0]) <= most else None

    groups = _droppable(conversation.messages)
    fitting = await encode_without(0)
    if fitting is not None or not groups:
        return generation, await text.encode_prompts(generation, tenant_id) if fitting is None else fitting
    fitting = await encode_without(len(groups))
    if fitting is None:
        return generation, await text.encode_prompts(generation, tenant_id)  # the error names the lengths
    search = _Search([_num_bytes(conversation.messages, group) for group in groups], most, len(fitting[0]))
    while (middle := search.next()) is not None:
        found = await encode_without(middle)
        search.note(middle, None if found is None else len(found[0]))
        fitting = fitting if found is None else found
    num_dropped = sum(map(len, groups[: search.high]))
    record.adjusted_fields["truncation"] = f"{num_dropped} of {len(conversation.messages)} messages left out"
    return without(search.high), fitting


class _Search:
    """Search for the fewest groups to leave out, with few encodings of the conversation.

    Encoding costs much, so a number is estimated from the sizes of the messages and the tokens that were measured: the
    first estimate is nearly right, and the next ones prove it. Whatever the estimates are, the interval is bisected
    after `MAX_ESTIMATES` of them. Without `high` groups the conversation fits; without `low` groups it does not.
    """

    def __init__(self, group_bytes: Sequence[int], most_tokens: int, num_tokens: int) -> None:
        self.low, self.high = 0, len(group_bytes)
        self._bytes_before = [0, *accumulate(group_bytes)]
        self._most_tokens = most_tokens
        self._num_tokens = num_tokens  # without `high` groups
        self._tokens_a_byte = TOKENS_A_BYTE
        self._is_measured = False
        self._num_estimates = 0

    def next(self) -> int | None:
        """Return the number of groups to try, or None at the end."""
        if self.high - self.low <= 1:
            return None
        if self._num_estimates == MAX_ESTIMATES:
            return (self.low + self.high) // 2
        self._num_estimates += 1
        available_bytes = (self._most_tokens - self._num_tokens) / self._tokens_a_byte
        estimate = bisect_left(self._bytes_before, self._bytes_before[self.high] - available_bytes)
        return min(max(estimate, self.low + 1), self.high - 1)

    def note(self, num_groups: int, num_tokens: int | None) -> None:
        """Note the number of tokens without so many groups, None if that does not fit."""
        if num_tokens is None:
            self.low = num_groups
            self._tokens_a_byte *= 1 if self._is_measured else 2
            return
        more_bytes = self._bytes_before[self.high] - self._bytes_before[num_groups]
        self._tokens_a_byte = max((num_tokens - self._num_tokens) / more_bytes, MIN_TOKENS_A_BYTE)
        self.high, self._num_tokens, self._is_measured = num_groups, num_tokens, True


def _num_bytes(messages: Sequence[dict[str, Any]], group: Sequence[int]) -> int:
    """Return the size of a group of messages, in which an image counts as text of about as many tokens."""
    return sum(len(msgspec.json.encode(_text_of(messages[index]))) + _image_bytes(messages[index]) for index in group)


def _text_of(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    return {**message, "content": [part for part in content if not is_image(part)]} if _is_parts(content) else message


def _image_bytes(message: dict[str, Any]) -> int:
    content = message["content"]
    return BYTES_AN_IMAGE * sum(map(is_image, content)) if _is_parts(content) else 0


def _is_parts(content: object) -> bool:
    return isinstance(content, list)


def _reserved_output(generation: Generation, card: ModelCard) -> int:
    """Return the number of tokens that the prompt must leave for the output."""
    if generation.max_tokens is not None:
        return generation.max_tokens
    return max(1, min(MAX_RESERVED_OUTPUT, card.max_context_tokens // OUTPUT_SHARE))


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
