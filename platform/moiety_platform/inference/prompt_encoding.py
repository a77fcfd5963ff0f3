"""Encodes unusual prompts: pairs, options, and conversations that are edited first."""

from __future__ import annotations

from moiety_platform.inference.context_editing import encode_edited
from moiety_platform.inference.generation import Generation, TextPair
from moiety_platform.inference.model_texts import ModelText
from moiety_platform.inference.option_scores import encode_options
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.truncation import encode_fitting
from moiety_wire.messages import ModelCard


async def encode_specially(
    text: ModelText, generation: Generation, card: ModelCard, record: RequestRecord
) -> tuple[Generation, list[list[int]], list[int]]:
    """Encode pairs, options, or a conversation that is edited first.

    Return the generation of what is left, the prompts, and where the second text of each pair begins.
    Raises BadRequest or ContextTooLong.
    """
    if isinstance(generation.prompts[0], TextPair):
        return generation, *await text.encode_pairs(generation)
    if generation.option_counts:
        return generation, await encode_options(text, generation), []
    encode = encode_fitting if generation.truncates else encode_edited
    record.generation, prompts = await encode(text, generation, card, record)
    return record.generation, prompts, []
