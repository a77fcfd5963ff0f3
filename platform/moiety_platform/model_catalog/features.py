"""Features of a model, from its card. Pure."""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache

from moiety_platform.engine_addresses import HOSTED_FAMILIES
from moiety_text.chat import ChatTemplate
from moiety_text.errors import TextError
from moiety_text.harmony.format import FINAL_OPENER
from moiety_text.reasoning_formats import find_reasoning_markers
from moiety_text.tools.registry import find_tool_format
from moiety_wire.messages import ModelCard

MAX_CACHED = 64


class ModelFeature(StrEnum):
    """Features of a model that clients ask for."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    TOOLS = "tools"
    REASONING = "reasoning"
    STRUCTURED_OUTPUTS = "structured_outputs"
    VISION = "vision"
    EMBEDDINGS = "embeddings"
    SCORES = "scores"
    LORA = "lora"
    LOGPROBS = "logprobs"


def features_of(card: ModelCard) -> list[ModelFeature]:
    """Return the features of a model, in their order."""
    is_hosted = card.family in HOSTED_FAMILIES
    tokens = tuple(sorted(card.special_tokens.items()))
    has_tools, reasons = _of_template(card.chat_template, tokens, card.tool_format, card.reasoning_format)
    has = {
        ModelFeature.CHAT: card.generates and (is_hosted or bool(card.chat_template)),
        ModelFeature.COMPLETIONS: card.generates and not is_hosted,
        ModelFeature.TOOLS: card.generates and (is_hosted or has_tools),
        ModelFeature.REASONING: card.generates and reasons,
        ModelFeature.STRUCTURED_OUTPUTS: card.follows_grammars,
        ModelFeature.VISION: card.images is not None or card.image_allowance is not None,
        ModelFeature.EMBEDDINGS: card.embedding_width > 0,
        ModelFeature.SCORES: bool(card.labels),
        ModelFeature.LORA: card.takes_adapters,
        ModelFeature.LOGPROBS: card.generates and card.max_num_logprobs > 0,
    }
    return [feature for feature in ModelFeature if has[feature]]


@lru_cache(maxsize=MAX_CACHED)
def _of_template(
    source: str, special_tokens: tuple[tuple[str, str], ...], tool_format: str, reasoning_format: str
) -> tuple[bool, bool]:
    """Return whether a chat template knows tool calls and reasoning; neither if it cannot be used."""
    if not source:
        return False, False
    try:
        template = ChatTemplate(source, dict(special_tokens))
        has_tools = template.knows_tools and find_tool_format(source, tool_format) is not None
        reasons = template.spells(FINAL_OPENER) or find_reasoning_markers(template, reasoning_format) is not None
    except TextError:
        return False, False
    return has_tools, reasons
