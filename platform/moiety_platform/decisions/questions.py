"""Questions: their fields, the text in which a model reads them, and the options among which it chooses.

An option is a JSON literal: `true` and `false`, or a string. A literal is never the beginning of another one, so the
probabilities that a model's answer begins with one of them are those of events that exclude each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, Field, PlainValidator, StringConstraints, ValidationInfo, field_validator

from moiety_platform.decisions.content import Parts, text_of
from moiety_platform.inference.body_fields import StrictBody, refuse, shows

MAX_QUESTIONS = 400
MAX_CHOICES = 255
MAX_LEVELS = 10
KINDS = ("predicate", "choice", "score")

_Name = Annotated[str, StringConstraints(max_length=512)]


def _literal(value: str | bool) -> str:
    """Return the value as JSON."""
    return msgspec.json.encode(value).decode()


def _listed(options: Sequence[tuple[str, str | None]]) -> str:
    """Return options with their descriptions as a list."""
    return "\n".join(f"- {option}" + (f": {described}" if described else "") for option, described in options)


def _check_several(entries: list[Any]) -> list[Any]:
    if len(entries) < 2:
        raise refuse("it has fewer than two entries; send at least two")
    return entries


def _check_unique(literals: Sequence[str]) -> None:
    repeated = [literal for literal, count in Counter(literals).items() if count > 1]
    if repeated:
        raise refuse(f"each entry must be unique; {repeated[0][:64]} is repeated")


class PredicateQuestion(StrictBody):
    """Whether a statement about the input is true."""

    type: Literal["predicate"]
    name: _Name | None = None
    instructions: Parts

    @property
    def options(self) -> tuple[str, ...]:
        """The answers among which the model chooses, as JSON."""
        return ("true", "false")

    @property
    def task(self) -> str:
        """What the model is told to do."""
        return (
            f"Statement about the input: {text_of(self.instructions)}\n\n"
            "Is the statement true? Answer with true or false only."
        )


class DecisionChoice(StrictBody):
    """One of the values of a choice. A string and a boolean with the same text are distinct."""

    value: str | bool
    description: str | None = None


class ChoiceQuestion(StrictBody):
    """One of several values."""

    type: Literal["choice"]
    name: _Name | None = None
    instructions: Parts
    choices: Annotated[
        list[DecisionChoice],
        Field(fail_fast=True, max_length=MAX_CHOICES),
        AfterValidator(_check_several),
        shows(minItems=2, maxItems=MAX_CHOICES),
    ]

    @field_validator("choices")
    @classmethod
    def _unique(cls, value: list[DecisionChoice]) -> list[DecisionChoice]:
        _check_unique([_literal(choice.value) for choice in value])
        return value

    @property
    def options(self) -> tuple[str, ...]:
        """The answers among which the model chooses, as JSON."""
        return tuple(_literal(choice.value) for choice in self.choices)

    @property
    def task(self) -> str:
        """What the model is told to do."""
        listed = _listed([(_literal(choice.value), choice.description) for choice in self.choices])
        return (
            f"{text_of(self.instructions)}\n\nThe possible answers, as JSON:\n{listed}\n\n"
            "Answer with exactly one of these JSON values and nothing else."
        )


class ScoreLevel(StrictBody):
    """One level of a score."""

    label: str
    description: str | None = None


class ScoreQuestion(StrictBody):
    """A position among ordered levels."""

    type: Literal["score"]
    name: _Name | None = None
    instructions: Parts
    levels: Annotated[
        list[ScoreLevel],
        Field(fail_fast=True, max_length=MAX_LEVELS),
        AfterValidator(_check_several),
        shows(minItems=2, maxItems=MAX_LEVELS),
    ]

    @field_validator("levels")
    @classmethod
    def _unique(cls, value: list[ScoreLevel]) -> list[ScoreLevel]:
        _check_unique([_literal(level.label) for level in value])
        return value

    @property
    def options(self) -> tuple[str, ...]:
        """The answers among which the model chooses, as JSON."""
        return tuple(_literal(level.label) for level in self.levels)

    @property
    def task(self) -> str:
        """What the model is told to do."""
        listed = _listed([(_literal(level.label), level.description) for level in self.levels])
        return (
            f"{text_of(self.instructions)}\n\nThe levels, from the lowest to the highest, as JSON:\n{listed}\n\n"
            "Answer with exactly one of these JSON values and nothing else."
        )


class _OtherQuestion(StrictBody):
    """A question of an unknown type. Validation raises an error that names the type."""

    type: str

    @field_validator("type")
    @classmethod
    def _known_type(cls, value: str) -> str:
        raise refuse(f"{value[:64]!r} is no type of a question; use one of {', '.join(KINDS)}")


Question = PredicateQuestion | ChoiceQuestion | ScoreQuestion
_QUESTIONS: dict[str, type[Question]] = dict(
    zip(KINDS, (PredicateQuestion, ChoiceQuestion, ScoreQuestion), strict=True)
)


def _as_question(value: Any, info: ValidationInfo) -> Question:
    """Validate a question as the type that it names, so that errors refer to that type only."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _QUESTIONS:
        _OtherQuestion.model_validate(value)
    return _QUESTIONS[str(kind)].model_validate(value, context=info.context)


# All questions are validated, so that one error names the problems of several.
Questions = Annotated[
    list[Annotated[Question, PlainValidator(_as_question, json_schema_input_type=Question)]],
    Field(min_length=1, max_length=MAX_QUESTIONS),
]


def prompts_of(text: str, questions: Sequence[Question]) -> Iterator[tuple[str, str]]:
    """Yield a user's message and an answer to it for each option of each question, in their order.

    The input comes first, since the prefix cache then has it for all questions.
    """
    for question in questions:
        message = f"<input>\n{text}\n</input>\n\n{question.task}"
        for option in question.options:
            yield message, option
