"""The body of `/v1/embeddings`: OpenAI's fields, strictly typed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from moiety_platform.errors import BadRequest
from moiety_platform.inference.body_fields import (
    INT32_MAX,
    InferenceBody,
    ModelName,
    RawPrompts,
    TruncateTokens,
    as_prompts,
    forms_of_prompts,
)
from moiety_platform.inference.field_support import ignored
from moiety_platform.inference.generation import Generation
from moiety_wire.messages import Sampling

MAX_NUMBERS = 1 << 24  # of the results of one request, which are held as float32: 64 MiB


class EmbeddingBody(InferenceBody):
    """`POST /v1/embeddings`. null means the default, as everywhere in OpenAI's API."""

    forms: ClassVar[Mapping[str, str]] = MappingProxyType({"input": forms_of_prompts("inputs")})

    model: ModelName
    input: RawPrompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    truncate_prompt_tokens: TruncateTokens | None = None
    user: Annotated[str | None, ignored("a vector does not depend on it")] = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None

    def generation(self) -> Generation:
        """Return the generation to run. Raises BadRequest for an empty input."""
        check_filled(self.input)
        return Generation(
            model=self.model,
            prompts=as_prompts(self.input),
            num_choices=1,
            sampling=Sampling(),
            max_tokens=0,
            service_tier=self.service_tier,
            embed=True,
            truncate_tokens=self.truncate_prompt_tokens,
            dimensions=self.dimensions,
            max_numbers=MAX_NUMBERS,
            prompt_field="input",
        )


def check_filled(given: str | list[str] | list[int] | list[list[int]]) -> None:
    """Raise BadRequest if there is no input, or an empty one."""
    if not given:
        raise BadRequest("'input' is empty; send a text, token ids, or a list of either", param="input")
    if isinstance(given, list):
        for index, one in enumerate(given):
            if not one and not isinstance(one, int):
                raise BadRequest(f"'input.{index}' is empty; leave it out, or send text or token ids", param="input")
