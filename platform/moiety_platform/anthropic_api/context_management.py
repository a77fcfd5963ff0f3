"""Anthropic's `context_management`: edits of the conversation before the model reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field

from moiety_platform.anthropic_api.answer_types import (
    ClearedReasoning,
    ClearedToolUses,
    ContextManagementResult,
)
from moiety_platform.inference.body_fields import INT32_MAX, StrictBody, shows
from moiety_platform.inference.context_edits import AppliedEdit, ContextEdit, ReasoningClearing, ToolUseClearing
from moiety_platform.inference.typed_values import named_type

CLEAR_THINKING: Literal["clear_thinking_20251015"] = "clear_thinking_20251015"
CLEAR_TOOL_USES: Literal["clear_tool_uses_20250919"] = "clear_tool_uses_20250919"
MAX_EDITS = 4  # each may encode the conversation once more
MAX_TOOL_NAMES = 1024
DEFAULT_TRIGGER_TOKENS = 100_000
DEFAULT_KEPT_USES = 3

_ToolNames = Annotated[list[str], Field(fail_fast=True, max_length=MAX_TOOL_NAMES)]


class KeptTurns(StrictBody):
    """Number of the last answers whose reasoning is kept."""

    type: Literal["thinking_turns", "all"]
    value: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None


class ClearedTokensMinimum(StrictBody):
    """Number of tokens that an edit must clear to be made."""

    type: Literal["input_tokens"]
    value: Annotated[int, Field(ge=0, le=INT32_MAX)]


class KeptToolUses(StrictBody):
    """Number of the last tool uses that are kept."""

    type: Literal["tool_uses"]
    value: Annotated[int, Field(ge=0, le=INT32_MAX)]


class EditTrigger(StrictBody):
    """Number of input tokens or of tool uses above which an edit is made."""

    type: Literal["input_tokens", "tool_uses"]
    value: Annotated[int, Field(ge=0, le=INT32_MAX)]


class RequestedEdit(StrictBody):
    """One edit. Those of other types than Anthropic documents have no effect."""

    type: str

    @property
    def is_skipped(self) -> bool:
        return True

    def context_edit(self) -> ContextEdit | None:
        """Return the edit of the conversation, or None where nothing is to be edited."""
        return None


class ClearThinkingEdit(RequestedEdit):
    """Removal of the reasoning of earlier answers."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | KeptTurns | None = None

    @property
    def is_skipped(self) -> bool:
        return False

    def context_edit(self) -> ContextEdit | None:
        kept = self.keep
        if kept == "all" or (isinstance(kept, KeptTurns) and kept.type == "all"):
            return None
        return ReasoningClearing(kept.value or 1 if isinstance(kept, KeptTurns) else 1)


class ClearToolUsesEdit(RequestedEdit):
    """Removal of the results of earlier tool uses, and of their inputs."""

    type: Literal["clear_tool_uses_20250919"]
    trigger: EditTrigger | None = None
    keep: KeptToolUses | None = None
    clear_at_least: ClearedTokensMinimum | None = None
    exclude_tools: _ToolNames | None = None
    clear_tool_inputs: bool | _ToolNames | None = None

    @property
    def is_skipped(self) -> bool:
        return False

    def context_edit(self) -> ContextEdit | None:
        trigger = self.trigger or EditTrigger(type="input_tokens", value=DEFAULT_TRIGGER_TOKENS)
        inputs = self.clear_tool_inputs
        return ToolUseClearing(
            trigger_tokens=trigger.value if trigger.type == "input_tokens" else None,
            trigger_uses=trigger.value if trigger.type == "tool_uses" else None,
            num_kept=DEFAULT_KEPT_USES if self.keep is None else self.keep.value,
            least_tokens=0 if self.clear_at_least is None else self.clear_at_least.value,
            excluded_tools=frozenset(self.exclude_tools or ()),
            clears_inputs=frozenset(inputs) if isinstance(inputs, list) else bool(inputs),
        )


_SCHEMAS: Mapping[str, type[RequestedEdit]] = MappingProxyType(
    {CLEAR_THINKING: ClearThinkingEdit, CLEAR_TOOL_USES: ClearToolUsesEdit}
)


class OtherEdit(StrictBody):
    """Edit of a type that has no effect, for the JSON schema."""

    type: Annotated[str, shows(**{"not": {"enum": list(_SCHEMAS)}})]


class ContextManagement(StrictBody):
    edits: (
        Annotated[
            list[
                Annotated[
                    RequestedEdit,
                    named_type(_SCHEMAS, RequestedEdit, ClearThinkingEdit | ClearToolUsesEdit | OtherEdit),
                ]
            ],
            Field(fail_fast=True, max_length=MAX_EDITS),
        ]
        | None
    ) = None

    def context_edits(self) -> tuple[ContextEdit, ...]:
        """Return the edits of the conversation, in their order."""
        found = (edit.context_edit() for edit in self.edits or ())
        return tuple(edit for edit in found if edit is not None)

    def skipped_edits(self) -> Iterator[str]:
        """Yield the paths of edits that have no effect."""
        for place, edit in enumerate(self.edits or ()):
            if edit.is_skipped:
                yield f"context_management.edits.{place}"


def result_of(applied: Sequence[AppliedEdit]) -> ContextManagementResult:
    """Return what an answer says of the edits that have changed the conversation."""
    return {"applied_edits": [_applied(one) for one in applied]}


def _applied(one: AppliedEdit) -> ClearedReasoning | ClearedToolUses:
    if isinstance(one.edit, ReasoningClearing):
        return {
            "type": CLEAR_THINKING,
            "cleared_thinking_turns": one.num_cleared,
            "cleared_input_tokens": one.num_tokens,
        }
    return {"type": CLEAR_TOOL_USES, "cleared_tool_uses": one.num_cleared, "cleared_input_tokens": one.num_tokens}
