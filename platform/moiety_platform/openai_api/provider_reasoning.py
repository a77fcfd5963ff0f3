"""Fields for reasoning that providers of open models add to OpenAI's chats.

DeepSeek, Z.ai and Moonshot have `thinking`, Alibaba has `enable_thinking` and `thinking_budget`, and OpenRouter has
`reasoning`. OpenAI's and vLLM's fields take precedence over them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, get_args

from moiety_platform.inference.body_fields import INT32_MAX
from moiety_platform.inference.field_support import mapped
from moiety_platform.inference.generation import ReasoningFields
from moiety_platform.inference.reasoning_fields import Effort
from moiety_platform.openai_api.vllm_fields import VllmChatFields
from moiety_text.efforts import NO_EFFORT

_EFFORTS = frozenset(get_args(get_args(get_args(Effort)[0])[0]))
_ON, _OFF = (True, "enabled", "adaptive"), (False, "disabled")


class AskedReasoning(NamedTuple):
    """Reasoning that a chat asks for, and the names of the fields that do."""

    thinks: bool | None
    effort: str | None
    budget: int | None
    fields: ReasoningFields


class ProviderReasoningFields(VllmChatFields):
    """Providers' fields of chats. Values of a form that no provider has are ignored."""

    thinking: Annotated[Any, mapped("Switch of DeepSeek, Z.ai and Moonshot: `enabled` or `disabled` as `type`.")] = None
    enable_thinking: Annotated[Any, mapped("Alibaba's switch of the reasoning.")] = None
    thinking_budget: Annotated[Any, mapped("Alibaba's name of `thinking_token_budget`.")] = None
    reasoning: Annotated[
        Any, mapped("OpenRouter's object: `effort`, `max_tokens`, `enabled` and `exclude` have an effect.")
    ] = None

    def asked_reasoning(self, effort: str | None, budget: int | None) -> AskedReasoning:
        """Return the reasoning that a chat asks for. `effort` and `budget` are those of OpenAI's and vLLM's fields."""
        thinking, options = _object(self.thinking), _object(self.reasoning)
        switches = {
            "thinking": thinking.get("type"),
            "enable_thinking": self.enable_thinking,
            "reasoning": options.get("enabled"),
        }
        off, on = _first(switches, _OFF), _first(switches, _ON)
        effort_field, budget_field = "reasoning_effort", "thinking_token_budget"
        if effort is None and off is not None:
            effort, effort_field = NO_EFFORT, off
        elif effort is None and isinstance(options.get("effort"), str) and options["effort"] in _EFFORTS:
            effort, effort_field = options["effort"], "reasoning"
        if budget is None:
            budgets = {
                "thinking": thinking.get("budget_tokens"),
                "thinking_budget": self.thinking_budget,
                "reasoning": options.get("max_tokens"),
            }
            told = {name: min(value, INT32_MAX) for name, value in budgets.items() if type(value) is int and value >= 0}
            budget_field, budget = next(iter(told.items()), (budget_field, None))
        elif budget != self.thinking_token_budget:
            budget_field = "max_thinking_tokens"
        thinks = True if on is not None and off is None and effort != NO_EFFORT else None
        return AskedReasoning(thinks, effort, budget, ReasoningFields(effort_field, on or "thinking", budget_field))

    @property
    def excludes_reasoning(self) -> bool:
        """Return whether the answer is to be without the reasoning."""
        return _object(self.reasoning).get("exclude") is True


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _first(switches: Mapping[str, Any], values: tuple[bool, str] | tuple[bool, str, str]) -> str | None:
    """Return the first field that has one of the values."""
    for name, value in switches.items():
        if isinstance(value, bool | str) and value in values:
            return name
    return None
