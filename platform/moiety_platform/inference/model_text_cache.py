"""The texts of all connected models, each built once."""

from __future__ import annotations

import asyncio

from moiety_platform.engine_addresses import HOSTED_FAMILIES
from moiety_platform.inference.external_model_texts import ExternalModelText
from moiety_platform.inference.hosted_model_texts import HostedModelText
from moiety_platform.inference.model_texts import ModelText
from moiety_text.segment_cache import SegmentCache
from moiety_wire.messages import ModelCard

MAX_CACHED_MODELS = 16


class ModelTexts:
    """The `ModelText` of each connected model, built once, in a thread."""

    def __init__(self, inline_bytes: int, cache: SegmentCache) -> None:
        """Create the texts, whose encoders share the cache of token ids."""
        self._inline_bytes = inline_bytes
        self._cache = cache
        self._built: dict[tuple[object, ...], ModelText] = {}
        self._building = asyncio.Lock()

    def use(self, inline_bytes: int, encoding_cache_bytes: int) -> None:
        """Set the inline limit for later prompts, and the size of the encoding cache."""
        self._inline_bytes = inline_bytes
        self._cache.resize(encoding_cache_bytes)
        for text in self._built.values():
            text.inline_bytes = inline_bytes

    async def get(self, card: ModelCard) -> ModelText:
        """Return the `ModelText` of a card. Raises moiety_text's errors if the card's files cannot be used."""
        answers = card.controls_reasoning, card.follows_grammars, card.shows_special_tokens, card.eos_token_ids
        formats = card.tool_format, card.reasoning_format
        key: tuple[object, ...] = (card.model, card.device, card.tokenizer_json, card.chat_template)
        key += (card.max_context_tokens, answers, formats, card.labels, card.score_activation, card.images)
        key += (card.unit_vectors, card.image_allowance, card.family in HOSTED_FAMILIES and card.family)
        text = self._built.get(key)
        if text is not None:
            return text
        async with self._building:
            if key not in self._built:
                built = await asyncio.to_thread(_built, card, self._inline_bytes, self._cache)
                while len(self._built) >= MAX_CACHED_MODELS:
                    self._built.pop(next(iter(self._built)))
                self._built[key] = built
            return self._built[key]


def _built(card: ModelCard, inline_bytes: int, cache: SegmentCache) -> ModelText:
    if card.family in HOSTED_FAMILIES:
        return HostedModelText(card, inline_bytes)
    if card.image_allowance is not None:
        return ExternalModelText(card, card.image_allowance, inline_bytes, cache)
    return ModelText(card, inline_bytes, cache)
