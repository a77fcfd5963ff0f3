"""Requests for a route: the order of its models, and fallbacks to the next one before the first token.

Access, quotas and prices are those of the model that answers. Of a model that failed, nothing is billed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from moiety_platform.auth.principal import Principal
from moiety_platform.errors import (
    EngineFailed,
    EngineRefused,
    NonFiniteOutput,
    NotFound,
    Overloaded,
    PlatformError,
    Unavailable,
)
from moiety_platform.inference.generation import Conversation, Generation
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.run import InferenceRun
from moiety_platform.model_routes.terms import ModelRoute, Stickiness, models_in_order
from moiety_platform.quotes.quoted_request import refuse_route
from moiety_platform.request_rules.cache import RequestRules, RequestRulesCache
from moiety_platform.routing.choose import MODEL_NOT_FOUND
from moiety_platform.routing.replicas import Replicas
from moiety_wire.trace_events import Reason

MAX_STICKY_CHARS = 4096  # of a conversation's beginning that choose its target
_OURS = frozenset({"store_unavailable", "server_stopping", "guardrail_unavailable"})
"""Codes of failures that another model does not avoid."""

Accept = Callable[[], Awaitable[None]]


class RouteAttempt(msgspec.Struct, frozen=True):
    """Terms of a request, or of its attempt at one of the models of its route.

    `failover_wait_s` is how long a sequence without a usable engine waits for one: 0 if there is another model.
    """

    rules: RequestRules
    failover_wait_s: float
    is_shadow: bool = False  # a copy, which takes no place of its tenant's requests


class StartRequest(Protocol):
    """Submission of a request to engines of the model that the generation names, as `RequestPipeline.start` does it."""

    async def __call__(
        self,
        record: RequestRecord,
        generation: Generation,
        *,
        streams: bool = False,
        accept: Accept | None = None,
        attempt: RouteAttempt | None = None,
    ) -> InferenceRun: ...


CopyRequest = Callable[[StartRequest, ModelRoute, RequestRecord, Generation, RouteAttempt], None]
"""Copies a request to the shadow model of its route, as `ShadowTraffic.copy` does it."""


class _AcceptOnce:
    """The acceptance of a request, which the first model that takes it calls."""

    def __init__(self, accept: Accept) -> None:
        self._accept: Accept | None = accept

    async def __call__(self) -> None:
        accept, self._accept = self._accept, None
        if accept is not None:
            await accept()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRequest:
    """A request for a route, with the arguments of `RequestPipeline.start`. The generation's model is the route."""

    record: RequestRecord
    generation: Generation
    streams: bool
    accept: Accept | None


async def start_routed(
    start: StartRequest, request: RoutedRequest, terms: RouteAttempt, copy_request: CopyRequest
) -> InferenceRun:
    """Submit a request to the models of its route, one after the other, until one takes it; return its run.

    If there is a further model, the run has its first token. Raises the error of the last model that is served and that
    the key may use, NotFound if there is none, or Conflict for a request with a quote.
    """
    record, generation = request.record, request.generation
    if record.quote is not None:
        refuse_route(generation.model)
    route = terms.rules.routes[generation.model]
    record.route = route.name
    models = await _models_of(route, record, generation)
    accept = None if request.accept is None else _AcceptOnce(request.accept)
    failure: PlatformError | None = None
    for number, model in enumerate(models):
        is_last = number + 1 == len(models)
        noted = dict(record.adjusted_fields), list(record.ignored_fields)
        target = msgspec.structs.replace(generation, model=model)
        attempt = terms if is_last else msgspec.structs.replace(terms, failover_wait_s=0.0)
        try:
            run = await start(record, target, streams=request.streams, accept=accept, attempt=attempt)
            if not is_last:
                await _wait_first_output(run, terms.failover_wait_s)
        except PlatformError as error:
            if not _may_fall_back(error, record):
                raise
            if failure is None or not isinstance(error, NotFound):
                failure = error
            if not is_last:
                record.abandon_attempt(model, failure=error, unix_ns=record.trace.now_ns())
                record.adjusted_fields, record.ignored_fields = noted
        else:
            copy_request(start, route, record, generation, terms)
            return run
    assert failure is not None, "a route has models"
    if isinstance(failure, NotFound):
        message = f"the route {route.name!r} has no model that is served and that your key may use"
        raise NotFound(message, code=MODEL_NOT_FOUND, param="model") from failure
    raise failure


async def _models_of(route: ModelRoute, record: RequestRecord, generation: Generation) -> list[str]:
    """Return the models to try, each once. Raises Unavailable if the quotas cannot be read."""
    models = models_in_order(route, _sticky_key(route, record, generation))
    if route.downgrade_model is None or route.downgrade_percent is None:
        return models
    if await record.reservation.most_used_percent() < route.downgrade_percent:
        return models
    record.was_downgraded_by_budget = True
    return list(dict.fromkeys((route.downgrade_model, *route.fallbacks)))


def _sticky_key(route: ModelRoute, record: RequestRecord, generation: Generation) -> bytes | None:
    if route.sticky is Stickiness.NONE:
        return None
    tenant_id = record.principal.tenant_id
    text = tenant_id if route.sticky is Stickiness.TENANT else f"{tenant_id}\0{_beginning_of(generation)}"
    return text.encode(errors="replace")


def _beginning_of(generation: Generation) -> str:
    """Return the text that all turns of a conversation begin with: up to the end of the first user message."""
    prompt = generation.prompts[0]
    if not isinstance(prompt, Conversation):
        return repr(prompt)[:MAX_STICKY_CHARS]
    texts: list[str] = []
    for message in prompt.messages:
        texts.append(_text_of(message["content"]))
        if message["role"] == "user":
            break
    return "\0".join(texts)[:MAX_STICKY_CHARS]


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "\0".join(str(part.get("text", "")) for part in content if isinstance(part, dict))


async def _wait_first_output(run: InferenceRun, failover_wait_s: float) -> None:
    """Wait for the first output of the run, which then goes on as one without another model. Ends it on an error."""
    try:
        await run.wait_first_output()
    except BaseException:
        await run.close()
        raise
    run.placement.wait_s = failover_wait_s


def _may_fall_back(error: PlatformError, record: RequestRecord) -> bool:
    """Return whether another model may answer: the error is the model's or its engines', and not the request's."""
    if error.code in _OURS:
        return False
    if isinstance(error, NotFound):
        return error.code == MODEL_NOT_FOUND
    if isinstance(error, EngineRefused):
        return not error.blames_request
    if isinstance(error, Overloaded):  # the bound of the tenant's requests is the same for all models
        return error.reason is not Reason.TENANT_QUEUE_FULL or record.reached_engine
    return isinstance(error, EngineFailed | Unavailable | NonFiniteOutput)


async def counted_model(rules: RequestRulesCache, replicas: Replicas, principal: Principal, name: str) -> str:
    """Return the model by which tokens are counted: of a route, the first that is served and that the key may use."""
    route = (await rules.current()).routes.get(name)
    if route is None:
        return name
    models, served, allowed = route.models(), replicas.cards(), principal.allowed_models
    usable = (one for one in models if one in served and (allowed is None or one in allowed))
    return next(usable, models[0])
