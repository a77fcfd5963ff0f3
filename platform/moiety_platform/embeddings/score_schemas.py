"""Bodies of `/v1/score`, `/v1/rerank` and `/v1/classify`, in the form of vLLM, Jina and Cohere."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from moiety_platform.embeddings.schemas import MAX_NUMBERS, check_filled
from moiety_platform.inference.body_fields import (
    INT32_MAX,
    MAX_PROMPTS,
    InferenceBody,
    ModelName,
    RawPrompts,
    StrictBody,
    TruncateTokens,
    as_prompts,
    forms_of_prompts,
    refuse,
)
from moiety_platform.inference.field_support import ignored
from moiety_platform.inference.generation import Generation, PoolingTask, Prompt, TextPair
from moiety_wire.messages import Sampling

ScoredText = Annotated[str, StringConstraints(min_length=1)]
ScoredTexts = Annotated[list[ScoredText], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]

User = Annotated[str | None, ignored("a score does not depend on it")]
Priority = Annotated[int | None, ignored("the service class decides the priority; see service_tier")]
ServiceTier = Literal["auto", "default", "flex", "priority"]

_TEXTS = f"must be a non-empty string or a list of 1 to {MAX_PROMPTS:,} non-empty strings"


class PoolingBody(InferenceBody):
    """Fields of all bodies here."""

    model: ModelName
    truncate_prompt_tokens: TruncateTokens | None = None
    service_tier: ServiceTier | None = None
    user: User = None
    priority: Priority = None

    def pooling(self, prompts: tuple[Prompt, ...], task: PoolingTask, prompt_field: str) -> Generation:
        """Return the generation of a task."""
        return Generation(
            model=self.model,
            prompts=prompts,
            num_choices=1,
            sampling=Sampling(),
            max_tokens=0,
            service_tier=self.service_tier,
            embed=True,
            task=task,
            max_numbers=MAX_NUMBERS,
            truncate_tokens=self.truncate_prompt_tokens,
            prompt_field=prompt_field,
        )


class ScoreBody(PoolingBody):
    """`POST /v1/score`: one text with each of several, or two lists of the same length entry by entry."""

    forms: ClassVar[Mapping[str, str]] = MappingProxyType({"text_1": _TEXTS, "text_2": _TEXTS})

    text_1: ScoredText | ScoredTexts
    text_2: ScoredText | ScoredTexts

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        firsts, seconds = _as_list(self.text_1), _as_list(self.text_2)
        if len(firsts) not in (1, len(seconds)):
            raise refuse(
                f"'text_1' has {len(firsts):,} texts and 'text_2' {len(seconds):,}; send one 'text_1', or as many "
                "of both",
                code="text_count_mismatch",
            )
        return self

    def pairs(self) -> tuple[TextPair, ...]:
        """Return the pairs to score, in the order of the answer."""
        firsts, seconds = _as_list(self.text_1), _as_list(self.text_2)
        if len(firsts) == 1:
            firsts = firsts * len(seconds)
        return tuple(TextPair(*pair) for pair in zip(firsts, seconds, strict=True))

    def generation(self) -> Generation:
        """Return the generation to run."""
        return self.pooling(self.pairs(), PoolingTask.SCORE, "text_2")


class DocumentBody(StrictBody):
    """A document as an object."""

    text: ScoredText


Document = ScoredText | DocumentBody


class RerankBody(PoolingBody):
    """`POST /v1/rerank`, `/v2/rerank` and `/rerank`: documents in the order of their relevance to a query."""

    forms: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "documents": f"must be a list of 1 to {MAX_PROMPTS:,} documents, each a non-empty string or an object "
            "with a non-empty 'text'"
        }
    )

    query: ScoredText
    documents: Annotated[list[Document], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
    top_n: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None  # 0: all, as in vLLM
    return_documents: bool | None = None

    def texts(self) -> list[str]:
        """Return the documents' texts."""
        return [one if isinstance(one, str) else one.text for one in self.documents]

    def pairs(self) -> tuple[TextPair, ...]:
        """Return the query with each document."""
        return tuple(TextPair(self.query, text) for text in self.texts())

    def generation(self) -> Generation:
        """Return the generation to run."""
        return self.pooling(self.pairs(), PoolingTask.SCORE, "documents")


class ClassifyBody(PoolingBody):
    """`POST /v1/classify`: texts or token ids to classify."""

    forms: ClassVar[Mapping[str, str]] = MappingProxyType({"input": forms_of_prompts("inputs")})

    input: RawPrompts

    def generation(self) -> Generation:
        """Return the generation to run. Raises BadRequest for an empty input."""
        check_filled(self.input)
        return self.pooling(as_prompts(self.input), PoolingTask.CLASSIFY, "input")


def _as_list(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given
