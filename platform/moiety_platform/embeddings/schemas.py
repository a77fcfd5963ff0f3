"""The body of `/v1/embeddings`: OpenAI's fields, strictly typed, and what they ask for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from moiety_platform.completions.generation import Generation, Prompt
from moiety_platform.completions.schemas import INT32_MAX, MAX_PROMPTS, TokenIds
from moiety_platform.errors import BadRequest
from moiety_wire.messages import Sampling


class EmbeddingBody(BaseModel):
    """Unknown fields are ignored, and null means the default, as everywhere in OpenAI's API. `user` is accepted and
    means nothing here."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    model: Annotated[str, StringConstraints(min_length=1, max_length=512)]
    input: (
        str
        | Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS)]
        | TokenIds
        | Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_PROMPTS)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    user: str | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None

    def generation(self) -> Generation:
        """What is asked of the engines. Raises BadRequest for an input without anything in it."""
        return Generation(
            model=self.model,
            prompts=_prompts(self.input),
            num_choices=1,
            sampling=Sampling(),
            max_tokens=0,
            service_tier=self.service_tier,
            embed=True,
            dimensions=self.dimensions,
            prompt_field="input",
        )


def _prompts(given: str | list[str] | list[int] | list[list[int]]) -> tuple[Prompt, ...]:
    if not given:
        raise BadRequest("'input' is empty; send a text, token ids, or a list of either", param="input")
    if isinstance(given, str):
        return (given,)
    if isinstance(given[0], int):
        return (tuple(given),)
    for index, one in enumerate(given):
        if not one:
            raise BadRequest(f"'input.{index}' is empty; leave it out, or send text or token ids", param="input")
    return tuple(one if isinstance(one, str) else tuple(one) for one in given)
