"""Encodes unusual prompts: pairs, options, conversations that are edited first, and texts that guardrails check."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from moiety_platform.inference.context_editing import encode_edited
from moiety_platform.inference.generation import Generation, TextPair
from moiety_platform.inference.model_texts import ModelText
from moiety_platform.inference.option_scores import encode_options
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.truncation import encode_fitting
from moiety_wire.messages import ModelCard

CheckInput = Callable[[RequestRecord, Generation, ModelText], Awaitable[None]]
"""Checks the text of a request by its guardrails; raises BadRequest or Unavailable."""


async def encode_specially(
    text: ModelText, generation: Generation, card: ModelCard, record: RequestRecord, check_input: CheckInput
) -> tuple[Generation, list[list[int]], list[int]]:
    """Encode pairs, options, a conversation that is edited first, or a prompt that guardrails check first.

    Return the generation of what is left, the prompts, and where the second text of each pair begins.
    Raises BadRequest, ContextTooLong or Unavailable.
    """
    await check_input(record, generation, text)
    if isinstance(generation.prompts[0], TextPair):
        return generation, *await text.encode_pairs(generation)
    if generation.option_counts:
        return generation, await encode_options(text, generation), []
    if not (generation.truncates or generation.context_edits):
        return generation, await text.encode_prompts(generation, record.principal.tenant_id), []
    encode = encode_fitting if generation.truncates else encode_edited
    edited, prompts = await encode(text, generation, card, record)
    record.generation = edited
    return edited, prompts, []
