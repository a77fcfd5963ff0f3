"""Reasoning fields of several APIs' request bodies."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moiety_platform.inference.body_fields import INT32_MAX, StrictBody
from moiety_platform.inference.field_support import mapped

# "none": no reasoning. Each model has some of the levels.
Effort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
    mapped("The nearest level that the model's chat template knows is used."),
]
TokenBudget = Annotated[int, Field(ge=0, le=INT32_MAX)]


class ThoughtBudgetFields(StrictBody):
    """Limits on the tokens of the reasoning, by the names of several servers. 0: no reasoning."""

    thinking_token_budget: TokenBudget | None = None  # vLLM's name
    max_thinking_tokens: TokenBudget | None = None

    @property
    def thought_budget(self) -> int | None:
        """Most tokens of the reasoning; None without a limit."""
        budgets = (self.thinking_token_budget, self.max_thinking_tokens)
        return min((budget for budget in budgets if budget is not None), default=None)
