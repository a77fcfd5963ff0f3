"""Answers of `/v1/decisions` from the log-probabilities of all options. Independent of HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from moiety_platform.decisions.answer_types import DecisionAnswer, DecisionObject
from moiety_platform.decisions.questions import ChoiceQuestion, PredicateQuestion, Question
from moiety_platform.decisions.schemas import DecisionBody
from moiety_platform.errors import EngineFailed
from moiety_platform.inference.option_scores import option_probabilities
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.run import InferenceRun
from moiety_platform.responses_api.answers import usage_fields
from moiety_wire.messages import Finished

if TYPE_CHECKING:
    from moiety_platform.responses_api.answer_types import ResponseUsage


async def collect_option_scores(run: InferenceRun) -> list[float]:
    """Wait for the log-probability of every option and return them in order.

    Tokens that all options of a question begin with are left out. Raises EngineFailed if an engine was lost together
    with its scores.
    """
    scores = [0.0] * run.num_sequences
    async for index, message in run:
        if isinstance(message, Finished):
            if message.prompt_logprobs is None:
                raise EngineFailed("the engine was lost after it had scored an option; send the request again")
            scores[index] = sum(entry.logprob for entry in message.prompt_logprobs)
    return scores


def decision_of(
    body: DecisionBody, run: InferenceRun, record: RequestRecord, scores: Sequence[float]
) -> DecisionObject:
    """Return the whole answer."""
    groups = option_probabilities(scores, body.option_counts)
    answers = [_answer(question, group) for question, group in zip(body.questions, groups, strict=True)]
    usage = cast("ResponseUsage", usage_fields(run.usage()))
    return {"model": record.served_model, "answers": answers, "usage": usage}


def _answer(question: Question, probabilities: Sequence[float]) -> DecisionAnswer:
    if isinstance(question, PredicateQuestion):
        return {"type": "predicate", "name": question.name, "probability": probabilities[0]}
    best = max(range(len(probabilities)), key=probabilities.__getitem__)
    if isinstance(question, ChoiceQuestion):
        return {
            "type": "choice",
            "name": question.name,
            "choice": question.choices[best].value,
            "confidence": probabilities[best],
            "probabilities": [
                {"value": choice.value, "probability": probability}
                for choice, probability in zip(question.choices, probabilities, strict=True)
            ],
        }
    return {
        "type": "score",
        "name": question.name,
        "score": sum(value * probability for value, probability in enumerate(probabilities)),
        "confidence": probabilities[best],
        "probabilities": [
            {"label": level.label, "value": value, "probability": probability}
            for value, (level, probability) in enumerate(zip(question.levels, probabilities, strict=True))
        ],
    }
