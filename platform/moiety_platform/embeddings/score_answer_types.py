"""Types of the answers of `/v1/score`, `/v1/rerank` and `/v1/classify`."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from moiety_platform.openai_api.answer_types import Count


class PoolingUsage(TypedDict):
    """Billed tokens."""

    prompt_tokens: Count
    total_tokens: Count


class ScoreEntry(TypedDict):
    """The score of one pair."""

    object: Literal["score"]
    index: Count
    score: float


class ScoreList(TypedDict):
    """The scores, in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: Count
    model: str
    data: list[ScoreEntry]
    usage: PoolingUsage


class RerankedDocument(TypedDict):
    """The text of a document."""

    text: str


class RerankResult(TypedDict):
    """A document by its index in the request; `document` is left out with `return_documents: false`."""

    index: Count
    relevance_score: float
    document: NotRequired[RerankedDocument]


class RerankAnswer(TypedDict):
    """The documents, the most relevant first; equal ones in the order of the request."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult]


class Classification(TypedDict):
    """The most likely label of one input, and the probabilities of all labels."""

    index: Count
    label: str
    probs: list[float]
    num_classes: Count


class ClassificationList(TypedDict):
    """The classes, in the order of the inputs."""

    id: str
    object: Literal["list"]
    created: Count
    model: str
    data: list[Classification]
    usage: PoolingUsage
