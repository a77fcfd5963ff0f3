"""Output options in Anthropic's fields: the effort, and the JSON schema that an answer follows."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from moiety_platform.inference.body_fields import StrictBody
from moiety_platform.inference.field_support import ignored, mapped
from moiety_platform.openai_api.response_formats import GrammarSchema, grammars_of
from moiety_wire.grammars import GrammarSpec

Effort = Annotated[
    Literal["low", "medium", "high", "xhigh", "max"] | None,
    mapped("Reasoning effort for the model's chat template, if the template supports it."),
]


class JsonOutputFormat(StrictBody):
    """JSON schema that the answer follows."""

    type: Literal["json_schema"]
    json_schema: Annotated[GrammarSchema, Field(alias="schema")]

    def grammar(self) -> GrammarSpec:
        return grammars_of(self.json_schema, None, None, None)[0]


class OutputConfig(StrictBody):
    """Options of the output."""

    effort: Effort = None
    format: JsonOutputFormat | None = None
    task_budget: Annotated[
        dict[str, Any] | None, ignored("Models do not receive a token budget for a task. Use `max_tokens`.")
    ] = None
