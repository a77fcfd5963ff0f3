"""Types of the answer of `/v1/embeddings` for the OpenAPI schema. The answer is built in pieces (`answers.py`)."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

from msgspec import Meta

from moiety_platform.openai_api.answer_types import Count, PromptTokensDetails


class Embedding(TypedDict):
    """The vector of one input: numbers, or with `encoding_format` base64 the encoded little-endian float32 values."""

    object: Literal["embedding"]
    index: Count
    embedding: list[float] | Annotated[str, Meta(extra_json_schema={"contentEncoding": "base64"})]


class EmbeddingUsage(TypedDict):
    """Billed tokens."""

    prompt_tokens: Count
    total_tokens: Count
    prompt_tokens_details: PromptTokensDetails


class EmbeddingList(TypedDict):
    """The vectors, in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
