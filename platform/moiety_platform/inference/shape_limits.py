"""The operator's size limits on request bodies. The schemas get them as pydantic's validation context."""

from __future__ import annotations

from dataclasses import dataclass

from moiety_platform.settings import GatewaySettings
from moiety_wire.shared_fields import CopyOf


@dataclass(frozen=True, slots=True)
class ShapeLimits(CopyOf[GatewaySettings]):
    """Size limits. The defaults are those of the settings."""

    max_messages: int = 2048
    max_choices: int = 16  # n
    max_stop_strings: int = 32
    max_stop_chars: int = 1024  # of each
    max_tools: int = 128
    max_tool_schema_bytes: int = 65_536  # of each
    max_grammar_bytes: int = 65_536  # size of a grammar for structured outputs


DEFAULT_SHAPE = ShapeLimits()
