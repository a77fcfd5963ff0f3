"""Types of the answers of `/v1/decisions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

from moiety_platform.openai_api.answer_types import Count
from moiety_platform.openapi.schemas import either
from moiety_platform.responses_api.answer_types import ResponseUsage


class PredicateAnswer(TypedDict):
    """The probability that the statement is true."""

    type: Literal["predicate"]
    name: str | None
    probability: float


class ChoiceProbability(TypedDict):
    """The probability of one value."""

    value: str | bool
    probability: float


class ChoiceAnswer(TypedDict):
    """The most likely value, its probability as `confidence`, and the probabilities of all."""

    type: Literal["choice"]
    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[ChoiceProbability]


class LevelProbability(TypedDict):
    """The probability of one level, whose `value` is its index."""

    label: str
    value: Count
    probability: float


class ScoreAnswer(TypedDict):
    """The expected index of the level, and the highest probability of a level as `confidence`."""

    type: Literal["score"]
    name: str | None
    score: float
    confidence: float
    probabilities: list[LevelProbability]


DecisionAnswer = PredicateAnswer | ChoiceAnswer | ScoreAnswer


class DecisionObject(TypedDict):
    """The answers, in the order of the questions."""

    model: str
    answers: list[Annotated[Any, either(PredicateAnswer, ChoiceAnswer, ScoreAnswer)]]
    usage: ResponseUsage
