"""OpenAI's `/v1/decisions` endpoint.

Each option of each question is one sequence: a prompt that ends with the option as the model's answer. The engine
returns the log-probabilities of the tokens in which the options of a question differ, which give the exact
probabilities of the options for the served model. Nothing is sampled.
"""

from __future__ import annotations

from functools import partial

import msgspec
from litestar.handlers import HTTPRouteHandler

from moiety_platform.decisions.answer_types import DecisionObject
from moiety_platform.decisions.answers import collect_option_scores, decision_of
from moiety_platform.decisions.schemas import DecisionBody
from moiety_platform.inference.endpoint import Endpoint, EndpointDocs, SendLast, Serve, route
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.response import HttpResponse
from moiety_platform.inference.run import InferenceRun


def decision_route(serve: Serve) -> HTTPRouteHandler:
    """Return the handler of the endpoint."""
    return route(DECISIONS, serve)


async def _answer(body: DecisionBody, run: InferenceRun, record: RequestRecord, reply: HttpResponse) -> SendLast:
    answer = msgspec.json.encode(decision_of(body, run, record, await collect_option_scores(run)))
    return partial(_send, answer, record, reply)


async def _send(answer: bytes, record: RequestRecord, reply: HttpResponse) -> None:
    record.answered_status = 200
    await reply.pieces(iter((answer,)))


DECISIONS = Endpoint(
    "/v1/decisions",
    "decisions",
    "decision-",
    DecisionBody,
    _answer,
    EndpointDocs(
        tag="decisions",
        summary="Answer closed questions with probabilities",
        detail="OpenAI's Decisions: whether statements about an input are true, which of several values fit it, and "
        "where it is among ordered levels, with the probabilities that the model gives them.",
        answer=DecisionObject,
    ),
)
