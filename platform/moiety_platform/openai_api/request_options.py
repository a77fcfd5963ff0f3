"""Objects with options in OpenAI's request bodies: of streams, and of the prompt cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from moiety_platform.inference.body_fields import StrictBody
from moiety_platform.inference.field_support import ignored

CACHE_TTL_S: Mapping[str, float] = {"30m": 1800.0, "12h": 43_200.0}


class StreamOptions(StrictBody):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's; acts with `include_usage`
    include_obfuscation: Annotated[bool | None, ignored("Chunks are not padded.")] = None


class PromptCacheOptions(StrictBody):
    mode: Annotated[
        Literal["implicit", "explicit"] | None, ignored("Every prefix is cached, with and without breakpoints.")
    ] = None
    ttl: Literal["30m", "12h"] | None = None  # retention of the conversation's prefix
