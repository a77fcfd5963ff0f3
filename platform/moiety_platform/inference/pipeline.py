"""The inference pipeline: every request, of every API, from its HTTP head to its usage row, in this order.

authenticate → claim the idempotency key → parse → classify → admit → reserve → place → stream → settle

`RequestPipeline.serve` is the whole order for a request over HTTP; batch lines begin at `start`. The pipeline knows no
API's fields: an `Endpoint` parses the body and formats the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
import structlog
from litestar.types import Receive, Scope, Send

from moiety_platform.adapters.naming import adapting_card, allowed_of
from moiety_platform.admission.gate import is_unattainable, refuse_unattainable
from moiety_platform.agent_runs.terms import RUN_HEADER, RUN_TAG, names_run
from moiety_platform.auth.principal import INFERENCE_SCOPE, Principal, missing_scope
from moiety_platform.errors import Forbidden, Overloaded, PlatformError, Unauthenticated, Unavailable, forget_frames
from moiety_platform.guardrails.terms import ALL_TENANTS
from moiety_platform.http_errors import internal_error
from moiety_platform.idempotency.keys import HEADER as IDEMPOTENCY_KEY
from moiety_platform.inference.endpoint import Body, Endpoint
from moiety_platform.inference.engine_placement import Placement
from moiety_platform.inference.engine_submits import (
    RequestOrigin,
    cache_salt_of,
    check_limits,
    most_output_tokens,
    submits_of,
)
from moiety_platform.inference.engine_wait import start_when_awake
from moiety_platform.inference.field_support import ignorable_fields, ignored_fields
from moiety_platform.inference.generation import (
    Conversation,
    Generation,
    PoolingTask,
    TextPair,
    with_sampling_defaults,
    with_single_texts,
)
from moiety_platform.inference.guarded_run import guarded_runs
from moiety_platform.inference.idempotency import claim_key
from moiety_platform.inference.least_reservation import check_least, reserve_least
from moiety_platform.inference.matched_request import MatchedRequest
from moiety_platform.inference.model_routing import RouteAttempt, RoutedRequest, start_routed
from moiety_platform.inference.option_scores import billed_prompt_tokens
from moiety_platform.inference.pipeline_services import PipelineLimits, PipelineServices
from moiety_platform.inference.prompt_encoding import encode_specially
from moiety_platform.inference.quota_reservation import Tariff, Tariffs
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.request_recorder import STOPPING
from moiety_platform.inference.response import ClientDisconnected, HttpResponse, KeepAlive, WatchingForDisconnect
from moiety_platform.inference.run import InferenceRun
from moiety_platform.known_parameters import check_query
from moiety_platform.openapi.tags_header import TAGS_HEADER
from moiety_platform.prices.token_cost import PriceList
from moiety_platform.quotes.quote import QUOTE_FIELD
from moiety_platform.quotes.quoted_request import QuotedRequest, quoted_class
from moiety_platform.randomness import ordered_hex
from moiety_platform.receipts.capture import RECEIPT_FIELD, salt_of
from moiety_platform.request_head import fields_of, request_id_of
from moiety_platform.routing.choose import (
    RequestNeed,
    are_extensible,
    capable_engines,
    card_of,
    cards_of,
    choose,
    engines_with_vision,
)
from moiety_platform.tenants.models import SpeculativePrefillMode
from moiety_platform.traces.tracing import Phase
from moiety_wire.messages import ModelCard
from moiety_wire.roles import EngineRole

_NOT_COUNTED = contextlib.nullcontext()  # of requests that do not stream
RUN_FIELD, TAGS_FIELD = RUN_HEADER.encode(), TAGS_HEADER.encode()

log = structlog.get_logger(__name__)


class RequestPipeline:
    """Pipeline of one gateway process. `limits` may be replaced, for later requests."""

    def __init__(self, services: PipelineServices, limits: PipelineLimits) -> None:
        self.services = services
        self.limits = limits
        self._tariffs = Tariffs()

    async def serve(  # noqa: PLR0912, PLR0915  the path of a request in one function, without calls for rare cases
        self, endpoint: Endpoint[Body], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Serve one HTTP request, as an ASGI application. Its record is closed before its client gets an error."""
        services = self.services
        fields = fields_of(scope)
        response = HttpResponse(send, scope, endpoint.errors, endpoint.headers)
        try:
            principal = await self._authenticate(endpoint.authorization(fields))
            if scope["query_string"]:
                check_query(scope["query_string"], (), endpoint.ignored_parameters)
            if IDEMPOTENCY_KEY in fields:
                claimed = await claim_key(
                    services.idempotency, services.metrics, principal, endpoint.path, scope, receive, response,
                    services.bodies.limits.max_body_bytes, endpoint.resume,
                )  # fmt: skip
                if claimed is None:
                    return  # the client got the stored answer
                receive = claimed
            quoted = QuotedRequest(services.quotes, scope, receive, principal) if QUOTE_FIELD in fields else None
            with services.recorder.open(
                principal,
                request_id=endpoint.id_prefix + ordered_hex(),
                client_request_id=response.request_id,
                operation=endpoint.operation,
                endpoint=endpoint.path,
                traceparent=fields.get(b"traceparent"),
                status_of=endpoint.errors.status,
            ) as record:
                body = await services.bodies.read(endpoint.schema, quoted or receive, fields, principal.tenant_id)
                record.attribution = body.attribution(fields.get(TAGS_FIELD))
                record.agent_run = (
                    await services.runs.join(record, fields.get(RUN_FIELD))
                    if RUN_FIELD in fields or (RUN_TAG in (tags := record.attribution.tags or "") and names_run(tags))
                    else None
                )
                record.fields, record.quote = fields, await quoted.verify(services.clock) if quoted else None
                ignores = not body.model_fields_set.isdisjoint(ignorable_fields(endpoint.schema))
                record.ignored_fields += [*(ignored_fields(body) if ignores else ()), *body.skipped_entries()]
                streams = body.wants_stream
                with services.streams.hold(principal.root_key_id) if streams else _NOT_COUNTED:
                    with WatchingForDisconnect(response.disconnect):
                        if endpoint.prepare is not None:
                            body = await endpoint.prepare(body, record)
                        accept = None if endpoint.accept is None else partial(endpoint.accept, body, record, response)
                        start = partial(self.start, record, body.generation(), streams=streams, accept=accept)
                        silent_s = self.limits.sse_keep_alive_s if streams else 0.0
                        keep_alive = partial(KeepAlive, response, silent_s, endpoint.keep_alive, record.kept_alive)
                        try:
                            run = await start()
                        except Unavailable as error:
                            if services.waker is None:
                                raise
                            run = await start_when_awake(
                                services.waker, services.gate, services.classes, record, error, keep_alive, start
                            )
                        async with run:
                            response.headers = record.response_headers()
                            async with keep_alive():
                                send_last = await endpoint.answer(body, run, record, response)
                    record.completed()
                    await send_last()
                    ahead = services.next_turn_prefill
                    if ahead is not None and principal.speculative_prefill is not SpeculativePrefillMode.OFF:
                        ahead.ended(record, run)
        except ClientDisconnected:
            return
        except asyncio.CancelledError:
            await response.report(STOPPING)
            raise
        except PlatformError as exc:
            forget_frames(exc)
            await response.report(exc)
        except Exception:  # the root of a request: answered with 500, logged completely
            log.exception("request_failed", request_id=request_id_of(scope))
            await response.report(internal_error())
        finally:
            if response.claim is not None:
                await response.release_claim()

    async def start(
        self,
        record: RequestRecord,
        generation: Generation,
        *,
        streams: bool = False,
        accept: Callable[[], Awaitable[None]] | None = None,
        attempt: RouteAttempt | None = None,
    ) -> InferenceRun:
        """Submit a request, and return its run once an engine has admitted every sequence.

        `accept` is awaited before that, once the model, the prompt, the limits and the quotas are checked. `attempt` is
        given for each model of a route; without it the generation's model may be the name of a route.

        Enter the run as a context: on exit every sequence has ended at its engine and is counted in the record. With
        `streams` engines send each token as it comes. Raises the errors of `moiety_platform.errors`, such as Overloaded
        where an engine rejects one of the sequences, and then all have ended.
        """
        services, limits = self.services, self.limits
        record.trace.enter(Phase.PREPARE)
        terms = RouteAttempt(await services.rules.current(), limits.failover_wait_s) if attempt is None else attempt
        if attempt is None and generation.model in terms.rules.routes:
            asked = RoutedRequest(record=record, generation=generation, streams=streams, accept=accept)
            return await start_routed(self.start, asked, terms, services.shadow.copy)
        matched = await self.classify(record, generation, terms.rules.prices)
        tenant_id = record.principal.tenant_id
        place = services.gate.reserve(f"{tenant_id} shadow" if terms.is_shadow else tenant_id, record.num_sequences)
        run = None
        try:
            _refuse_unattainable(matched)
            if matched.has_images or matched.generation.has_documents:
                await reserve_least(record.reservation, matched)
                matched = await self.read_files(record, matched, terms.rules.prices)
            text = await services.texts.get(matched.card)
            record.generation = generation = matched.generation
            seconds: list[int] = []
            is_edited = bool(generation.truncates or generation.context_edits)
            guards = terms.rules.guardrails.get(record.principal.tenant_id) or terms.rules.guardrails[ALL_TENANTS]
            if guards or is_edited or generation.option_counts or isinstance(generation.prompts[0], TextPair):
                generation, prompts, seconds = await encode_specially(
                    text, generation, matched.card, record, partial(services.guardrails.check_input, guardrails=guards)
                )
            else:
                prompts = await text.encode_prompts(generation, record.principal.tenant_id)
            if not generation.option_counts:  # whose reasoning options are not the client's
                record.adjusted_fields |= text.adjusted_fields(generation)
            longest = self.longest_outputs(record, generation, matched.card, prompts)
            counts = generation.option_counts
            billed = billed_prompt_tokens(prompts, counts) if counts else list(map(len, prompts))
            reserved = sum(billed) if text.estimate is None else record.estimated(text.estimate(generation))
            origin = await self._reserve(record, matched, reserved, max(longest), streams)
            if accept is not None:
                await accept()
            images = matched.card.images if matched.has_images else None
            placement = Placement(
                services.replicas, matched.card.model, matched.chosen.service, terms.failover_wait_s, images
            )
            window, clock = limits.credit_window_tokens, services.clock
            make_run = guarded_runs(services.guardrails, guards) if guards else InferenceRun
            run = make_run(record, matched.chosen, prompts, billed, text, placement, clock, window, place)
            record.reservation.require_current()
            for submit in submits_of(origin, generation, prompts, longest, text, seconds):
                await run.submit(submit)
                if generation.option_counts and run.num_sequences == 1:
                    await run.wait_first_finished()  # the cache then has what others share, and they are judged by it
            await run.wait_admitted()
        except BaseException:
            if run is None:
                place.release()
            else:
                await run.close()
            raise
        record.trace.enter(Phase.ANSWER)
        return run

    async def _authenticate(self, authorization: str | None) -> Principal:
        """Return the caller, who may use models. Raises Unauthenticated, Forbidden or Unavailable."""
        try:
            principal = await self.services.authenticator.authenticate(authorization)
            if INFERENCE_SCOPE not in principal.scopes:
                raise missing_scope(INFERENCE_SCOPE)
        except (Unauthenticated, Forbidden) as exc:
            self.services.metrics.observe_refusal(exc.status)
            raise
        return principal

    async def classify(self, record: RequestRecord, generation: Generation, prices: PriceList) -> MatchedRequest:
        """Choose the model card and the service class, and check the request against them.

        Raises NotFound, BadRequest or Unavailable.
        """
        services, principal, model = self.services, record.principal, generation.model
        record.generation, record.num_sequences = generation, len(generation.prompts) * generation.num_choices
        adapter, allowed = None, principal.allowed_models
        if services.adapters is not None and ":" in model:
            adapter = await services.adapters.find(principal.tenant_id, model)
            allowed = allowed_of(allowed, adapter)
        base, states = model if adapter is None else adapter.model, services.replicas.states()
        prompt = generation.prompts[0]
        has_images = isinstance(prompt, Conversation) and bool(prompt.images)
        try:
            card = card_of(states, base, allowed, has_images=has_images)
        except PlatformError:
            waker = services.waker
            is_asleep = waker is not None and waker.can_wake(base, allowed)
            if is_asleep or base in cards_of(states):  # there is such a model, but not for this request
                record.served_model, record.base_model = model, base
            if waker is not None and is_asleep:
                await check_least(record, await services.classes.current(), self._tariffs, prices, base)
                raise waker.note_request(base) from None
            raise
        record.served_model, record.base_model = model, base
        if adapter is not None:
            card = adapting_card(adapter, card, capable_engines(states, base))
        if generation.task is PoolingTask.SCORE and len(card.labels) != 1:
            generation = with_single_texts(generation)
            record.generation, record.num_sequences = generation, len(generation.prompts)
        if card.sampling_defaults:
            record.generation = generation = with_sampling_defaults(generation, card.sampling_defaults)
        check_limits(generation, record.num_sequences, card, self.limits.max_sequences)
        catalogue = await services.classes.current()
        if principal.service_class not in catalogue.names:
            catalogue = await services.classes.find(principal.service_class)
        chosen = catalogue.choose(principal.service_class, generation.service_tier)
        if record.quote is not None:
            chosen = quoted_class(record.quote.terms, catalogue)
        record.chose(catalogue, chosen.service)
        if RECEIPT_FIELD in record.fields:
            salt_of(record.fields[RECEIPT_FIELD])  # refuses another value
        adapter_name = "" if adapter is None else adapter.engine_name
        priced_model = f"{card.model}:{adapter_name}" if adapter_name else card.model  # of a tenant, as its name is
        tariff = self._tariffs.of(prices, catalogue, chosen, priced_model, card.model)
        if record.quote is not None:
            tariff = Tariff(record.quote.terms.prices)
        elif chosen.service.spot:
            tariff = await services.spot.agree(record, catalogue, chosen, card, tariff)
        return MatchedRequest(generation, card, states, catalogue, chosen, tariff, adapter, adapter_name, has_images)

    async def read_files(self, record: RequestRecord, matched: MatchedRequest, prices: PriceList) -> MatchedRequest:
        """Read the documents and images of an admitted request.

        A document can turn out to be an image, so documents come first, and the request is classified again. Raises
        BadRequest, NotFound, Gone, RateLimited or Unavailable.
        """
        services, principal = self.services, record.principal
        if matched.generation.has_documents:
            generation, replaced = await services.documents.prepare(matched.generation, principal)
            record.ignored_fields += replaced
            matched = await self.classify(record, generation, prices)
        if matched.has_images:
            generation, replaced = await services.images.prepare(matched.generation, matched.card, principal)
            record.ignored_fields += replaced
            matched = msgspec.structs.replace(matched, generation=generation)
        return matched

    def longest_outputs(
        self, record: RequestRecord, generation: Generation, card: ModelCard, prompts: list[list[int]]
    ) -> list[int]:
        """Return the maximum number of output tokens for each prompt. A lowered one is noted in the record.

        Raises ContextTooLong.
        """
        clamps = generation.clamps_max_tokens or self.limits.clamps_max_tokens
        most = partial(most_output_tokens, generation, card, clamps=clamps)
        longest = list(map(most, map(len, prompts)))
        if generation.max_tokens is not None and min(longest) < generation.max_tokens:
            record.adjusted_fields[generation.max_tokens_field] = str(min(longest))
        return longest

    async def _reserve(
        self, record: RequestRecord, matched: MatchedRequest, num_prompt_tokens: int, most_tokens: int, streams: bool
    ) -> RequestOrigin:
        """Reserve the prompts and the first output under every quota, and return what all sequences share.

        Raises QuotaExceeded, RequestExceedsQuota, Forbidden, Unavailable, or Conflict if a quote is for other lengths.
        """
        card, chosen, principal = matched.card, matched.chosen, record.principal
        credit_tokens = most_tokens
        if record.quote is not None:
            record.quote.terms.require_lengths(num_prompt_tokens, most_tokens)
            others = self.services.gate.num_inflight(record.principal.tenant_id) - record.num_sequences
            record.quote = record.quote.for_load(others)
        if are_extensible(matched.states, card.model):
            credit_tokens = min(most_tokens, self.limits.credit_window_tokens)
        record.trace.enter(Phase.HOLD)
        credit_tokens = await record.reservation.begin(
            num_prompt_tokens, record.num_sequences, credit_tokens, matched.tariff
        )
        record.trace.enter(Phase.ADMISSION)
        return RequestOrigin(
            request_id=record.request_id,
            model=card.model,
            tenant_id=principal.tenant_id,
            chosen=chosen,
            cache_salt=cache_salt_of(principal, matched.adapter_name, record.generation),
            arrival_unix_ns=record.arrival_unix_ns,
            credit_tokens=credit_tokens,
            weight=principal.weight,
            traceparent=record.trace.traceparent,
            bill=record.reserved(num_prompt_tokens),
            gathers=not streams,
            adapter=matched.adapter_name,
            keep_s=0.0 if record.agent_run is None else record.agent_run.keep_s,
        )


def _refuse_unattainable(matched: MatchedRequest) -> None:
    """Raise Overloaded if the engine of the request predicts far too late a first token for its class.

    Raises Unavailable if no engine can take the request.
    """
    service, is_plain = matched.chosen.service, matched.adapter is None and not matched.generation.embed
    for state in matched.states:
        load = state.class_load(service.name)
        is_late = load is not None and is_unattainable(service, load)
        if is_late or (state.card is not None and state.card.role is not EngineRole.BOTH):
            is_plain = False
    if is_plain:
        return  # the common case
    need = RequestNeed.PROMPT if matched.generation.embed else RequestNeed.ANSWER
    need = need if matched.adapter is None else RequestNeed.ADAPTED
    states, rules = matched.states, matched.card.images
    if rules is not None and matched.has_images:
        states = engines_with_vision(states, matched.card.model, rules)
    state = choose(states, matched.card.model, service, need=need)
    refusal = refuse_unattainable(service, state.class_load(service.name))
    if refusal is not None:
        raise Overloaded(refusal.message, refusal.reason, retry_after_s=refusal.retry_after_s)
