"""Questions: their fields, the text in which a model reads them, and the options among which it chooses.

An option is a JSON literal: `true` and `false`, or a string. A literal is never the beginning of another one, so the
probabilities that a model's answer begins with one of them are those of events that exclude each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import AfterValidator, Field, StringConstraints

from moiety_platform.decisions.content import Parts, text_of
from moiety_platform.inference.body_fields import StrictBody, refuse, shows
from moiety_platform.inference.typed_values import UnknownType, named_type

MAX_QUESTIONS = 400
MAX_CHOICES = 255
MAX_LEVELS = 10
KINDS = ("predicate", "choice", "score")

_Name = Annotated[str, StringConstraints(max_length=512)]


def _literal(value: str | bool) -> str:
    """Return the value as JSON."""
    return msgspec.json.encode(value).decode()


class _Option(StrictBody):
    """One of the options that a question lists."""

    description: str | None = None

    @property
    def literal(self) -> str:
        """The answer that chooses it, as JSON."""
        raise NotImplementedError


def _check_options(options: list[Any]) -> list[Any]:
    """Check that there are several options, and no answer that chooses two of them."""
    if len(options) < 2:
        raise refuse("it has fewer than two entries; send at least two")
    repeated = [literal for literal, count in Counter(option.literal for option in options).items() if count > 1]
    if repeated:
        raise refuse(f"each entry must be unique; {repeated[0][:64]} is repeated")
    return options


def _literals(options: Sequence[_Option]) -> tuple[str, ...]:
    return tuple(option.literal for option in options)


def _task(instructions: str, heading: str, options: Sequence[_Option]) -> str:
    """Return the instruction for the model: to answer with one of the listed options."""
    listed = "\n".join(
        f"- {option.literal}" + (f": {option.description}" if option.description else "") for option in options
    )
    return (
        f"{instructions}\n\n{heading}, as JSON:\n{listed}\n\n"
        "Answer with exactly one of these JSON values and nothing else."
    )


class _Question(StrictBody):
    name: _Name | None = None
    instructions: Parts

    @property
    def options(self) -> tuple[str, ...]:
        """The answers among which the model chooses, as JSON."""
        raise NotImplementedError

    @property
    def task(self) -> str:
        """The instruction for the model."""
        raise NotImplementedError


class _ListQuestion(_Question):
    """A question that lists its options below a heading."""

    heading: ClassVar[str]

    @property
    def listed(self) -> Sequence[_Option]:
        raise NotImplementedError

    @property
    def options(self) -> tuple[str, ...]:
        return _literals(self.listed)

    @property
    def task(self) -> str:
        return _task(text_of(self.instructions), self.heading, self.listed)


class PredicateQuestion(_Question):
    """Question whether a statement about the input is true."""

    type: Literal["predicate"]

    @property
    def options(self) -> tuple[str, ...]:
        return ("true", "false")

    @property
    def task(self) -> str:
        return (
            f"Statement about the input: {text_of(self.instructions)}\n\n"
            "Is the statement true? Answer with true or false only."
        )


class DecisionChoice(_Option):
    """One of the values of a choice. A string and a boolean with the same text are distinct."""

    value: str | bool

    @property
    def literal(self) -> str:
        return _literal(self.value)


class ChoiceQuestion(_ListQuestion):
    """One of several values."""

    heading = "The possible answers"

    type: Literal["choice"]
    choices: Annotated[
        list[DecisionChoice],
        Field(fail_fast=True, max_length=MAX_CHOICES),
        AfterValidator(_check_options),
        shows(minItems=2, maxItems=MAX_CHOICES),
    ]

    @property
    def listed(self) -> Sequence[_Option]:
        return self.choices


class ScoreLevel(_Option):
    """One level of a score."""

    label: str

    @property
    def literal(self) -> str:
        return _literal(self.label)


class ScoreQuestion(_ListQuestion):
    """A position among ordered levels."""

    heading = "The levels, from the lowest to the highest"

    type: Literal["score"]
    levels: Annotated[
        list[ScoreLevel],
        Field(fail_fast=True, max_length=MAX_LEVELS),
        AfterValidator(_check_options),
        shows(minItems=2, maxItems=MAX_LEVELS),
    ]

    @property
    def listed(self) -> Sequence[_Option]:
        return self.levels


class _OtherQuestion(UnknownType):
    """A question of an unknown type."""

    @staticmethod
    def refusal(kind: str) -> str:
        return f"{kind!r} is not a valid type of a question; use one of {', '.join(KINDS)}"


Question = PredicateQuestion | ChoiceQuestion | ScoreQuestion
_QUESTIONS: dict[str, type[Question]] = dict(
    zip(KINDS, (PredicateQuestion, ChoiceQuestion, ScoreQuestion), strict=True)
)


# All questions are validated, so that one error names the problems of several.
Questions = Annotated[
    list[Annotated[Question, named_type(_QUESTIONS, _OtherQuestion, Question)]],
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
