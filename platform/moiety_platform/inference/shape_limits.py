"""The operator's size limits on request bodies. The schemas get them as pydantic's validation context."""

from __future__ import annotations

from dataclasses import dataclass

from moiety_platform.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class ShapeLimits:
    """Size limits. The defaults are those of the settings."""

    max_messages: int = 2048
    max_choices: int = 16  # n
    max_stop_strings: int = 16
    max_stop_chars: int = 1024  # of each
    max_tools: int = 128
    max_tool_schema_bytes: int = 65_536  # of each
    max_grammar_bytes: int = 65_536  # size of a grammar for structured outputs

    @classmethod
    def of(cls, settings: GatewaySettings) -> ShapeLimits:
        return cls(
            max_messages=settings.max_messages,
            max_choices=settings.max_choices,
            max_stop_strings=settings.max_stop_strings,
            max_stop_chars=settings.max_stop_chars,
            max_tools=settings.max_tools,
            max_tool_schema_bytes=settings.max_tool_schema_bytes,
            max_grammar_bytes=settings.max_grammar_bytes,
        )


DEFAULT_SHAPE = ShapeLimits()
