"""Anthropic's `context_management`: edits of the conversation before the model reads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from moiety_platform.inference.body_fields import INT32_MAX, StrictBody

CLEAR_THINKING = "clear_thinking_20251015"
MAX_EDITS = 16


class KeptTurns(StrictBody):
    """Number of the last answers whose reasoning is kept."""

    type: Literal["thinking_turns", "all"]
    value: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None


class ContextEdit(StrictBody):
    """One edit. Only those that clear reasoning have an effect."""

    type: str
    keep: Any = None  # of an edit that clears reasoning: "all", or `KeptTurns`

    @model_validator(mode="after")
    def _check_keep(self) -> Self:
        if self.clears_thinking and self.keep not in (None, "all"):
            KeptTurns.model_validate(self.keep)
        return self

    @property
    def clears_thinking(self) -> bool:
        return self.type == CLEAR_THINKING

    @property
    def num_kept_turns(self) -> int | None:
        """Number of the last answers whose reasoning is kept, or None for all."""
        if self.keep == "all":
            return None
        kept = KeptTurns(type="thinking_turns") if self.keep is None else KeptTurns.model_validate(self.keep)
        return None if kept.type == "all" else kept.value or 1


class ContextManagement(StrictBody):
    edits: Annotated[list[ContextEdit], Field(fail_fast=True, max_length=MAX_EDITS)] | None = None

    @property
    def num_kept_turns(self) -> int | None:
        """Number of the last answers whose reasoning the model reads, or None for all."""
        kept = [edit.num_kept_turns for edit in self.edits or () if edit.clears_thinking]
        return min((number for number in kept if number is not None), default=None)

    def skipped_edits(self) -> Iterator[str]:
        """Yield the paths of edits that have no effect."""
        for place, edit in enumerate(self.edits or ()):
            if not edit.clears_thinking:
                yield f"context_management.edits.{place}"
