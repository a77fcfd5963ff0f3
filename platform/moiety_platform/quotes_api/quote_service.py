"""Makes quotes of requests: parses and counts them as the pipeline does, and checks quotas without charging them."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from litestar.types import Receive

from moiety_platform.admission.gate import refuse_unattainable
from moiety_platform.auth.principal import Principal
from moiety_platform.classes.terms import SPOT_TIER, ChosenClass
from moiety_platform.errors import BadRequest
from moiety_platform.inference.body_fields import InferenceBody
from moiety_platform.inference.context_editing import encode_edited
from moiety_platform.inference.generation import Generation
from moiety_platform.inference.least_reservation import reserve_least
from moiety_platform.inference.matched_request import MatchedRequest
from moiety_platform.inference.pipeline import RequestPipeline
from moiety_platform.inference.quota_reservation import NOTHING_USED, QuotaReservation, tariff_of
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.token_count_limits import TokenCountLimits
from moiety_platform.inference.truncation import encode_fitting
from moiety_platform.prices.token_cost import Price, PriceList
from moiety_platform.quotes.body_digest import RecordedBody
from moiety_platform.quotes.prediction import expected_output_tokens, guarantee_of, predict_timing
from moiety_platform.quotes.quote import Quote
from moiety_platform.quotes.timing import Timing
from moiety_platform.quotes_api.answer_types import ClassQuote, QuotedPrice, QuotedTimes, QuoteList
from moiety_platform.routing.choose import RequestNeed, choose, engines_with_vision

TIERS = ("auto", "priority", "default", "flex")
Prepare = Callable[[Any, Principal], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class QuotedEndpoint:
    """Endpoint whose requests can be quoted. `prepare` adds to a body what must be looked up."""

    path: str
    schema: type[InferenceBody]
    prepare: Prepare | None = None


@dataclass(frozen=True, slots=True)
class QuoteTerms:
    """Settings of quotes, which can change for later quotes."""

    ttl_s: float  # for which a quote binds
    margin: float  # the least one of a guarantee over the prediction


@dataclass(frozen=True, slots=True)
class _Counted:
    """A request with its counts. `longest` has the maximum number of output tokens for each prompt."""

    matched: MatchedRequest
    generation: Generation
    prompt_lengths: list[int]
    longest: list[int]
    digest: bytes

    @property
    def num_sequences(self) -> int:
        return len(self.prompt_lengths) * self.generation.num_choices

    @property
    def max_output_tokens(self) -> int:
        return max(self.longest)


class QuoteService:
    """Quotes of one gateway process. `terms` may be replaced, for later quotes."""

    def __init__(
        self,
        pipeline: RequestPipeline,
        endpoints: Mapping[str, QuotedEndpoint],
        terms: QuoteTerms,
        token_counts: TokenCountLimits,
    ) -> None:
        self.endpoints, self.terms = endpoints, terms
        self._pipeline, self._token_counts = pipeline, token_counts

    async def quote(
        self, endpoint: QuotedEndpoint, principal: Principal, receive: Receive, fields: Mapping[bytes, bytes]
    ) -> QuoteList:
        """Return quotes of the request in every class that the key may use.

        Raises the errors that the request would get before it is admitted, except for that of `concurrent_requests`,
        and those of `TokenCountLimits.counted`.
        """
        services = self._pipeline.services
        recorded = RecordedBody(receive)
        body = await services.bodies.read(endpoint.schema, recorded, fields, principal.tenant_id)
        digest = await recorded.digest()
        async with self._token_counts.counted(principal):
            return await self._quote_body(endpoint, principal, body, digest)

    async def _quote_body(
        self, endpoint: QuotedEndpoint, principal: Principal, body: InferenceBody, digest: bytes
    ) -> QuoteList:
        services = self._pipeline.services
        if endpoint.prepare is not None:
            body = await endpoint.prepare(body, principal)
        record = services.recorder.open(
            principal,
            request_id="",
            client_request_id="",
            operation="quote",
            endpoint=endpoint.path,
            traceparent=None,
            status_of=lambda error: error.status,
        ).unopened
        counted = await self._count(record, body.generation(), digest)
        expires_ms = services.clock.unix_ns() // 1_000_000 + round(self.terms.ttl_s * 1000)
        loads = [state.load for state in counted.matched.states if state.load is not None and state.card is not None
                 and state.card.model == counted.matched.card.model]  # fmt: skip
        expected = expected_output_tokens(loads, counted.max_output_tokens)
        return QuoteList(
            object="quote",
            model=counted.generation.model,
            endpoint=endpoint.path,
            expires_at=datetime.fromtimestamp(expires_ms / 1000, UTC),
            prompt_tokens=sum(counted.prompt_lengths),
            expected_output_tokens=expected,
            max_output_tokens=counted.max_output_tokens,
            num_sequences=counted.num_sequences,
            data=[
                await self._quote_class(record, counted, chosen, expected, expires_ms)
                for chosen in _classes_of(counted.matched, principal)
            ],
        )

    async def _count(self, record: RequestRecord, generation: Generation, digest: bytes) -> _Counted:
        pipeline = self._pipeline
        rules = await pipeline.services.rules.current()
        route = rules.routes.get(generation.model)
        if route is not None:
            allowed = record.principal.allowed_models
            models = [model for model in route.models() if allowed is None or model in allowed]
            raise BadRequest(
                f"{generation.model!r} is a route, which chooses a model for each request: quote one of its models"
                + (f" ({', '.join(models)})" if models else ""),
                param="model",
            )
        matched = await pipeline.classify(record, generation, rules.prices)
        reservation = QuotaReservation(pipeline.services.recorder.quotas, record.principal, num_slots=0)
        try:
            return await self._count_within(reservation, record, matched, rules.prices, digest)
        finally:
            reservation.settle(NOTHING_USED, 0)

    async def _count_within(
        self,
        reservation: QuotaReservation,
        record: RequestRecord,
        matched: MatchedRequest,
        prices: PriceList,
        digest: bytes,
    ) -> _Counted:
        """Count the request, and raise what its reservation would raise. The caller settles the reservation."""
        pipeline = self._pipeline
        if matched.has_images or matched.generation.has_documents:  # counts as a request of the tenant meanwhile
            place = pipeline.services.gate.reserve(record.principal.tenant_id, 1)
            try:
                await reserve_least(reservation, matched)
                matched = await pipeline.read_files(record, matched, prices)
            finally:
                place.release()
        text, generation = await pipeline.services.texts.get(matched.card), matched.generation
        if text.estimate is not None:
            message = (
                f"only the provider of the model {matched.card.model!r} can count the tokens, so there is no quote"
            )
            raise BadRequest(message, code="tokens_not_countable", param="model")
        if generation.truncates or generation.context_edits:
            encode = encode_fitting if generation.truncates else encode_edited
            generation, prompts = await encode(text, generation, matched.card, record)
        else:
            prompts = await text.encode_prompts(generation, record.principal.tenant_id)
        longest = pipeline.longest_outputs(record, generation, matched.card, prompts)
        lengths = list(map(len, prompts))
        await reservation.begin(sum(lengths), record.num_sequences, min(1, max(longest)), matched.tariff)
        return _Counted(matched, generation, lengths, longest, digest)

    async def _quote_class(
        self, record: RequestRecord, counted: _Counted, chosen: ChosenClass, expected: int, expires_ms: int
    ) -> ClassQuote:
        services, matched = self._pipeline.services, counted.matched
        service, card = chosen.service, matched.card
        terms = matched.catalogue[service.name]
        priced_model = f"{card.model}:{matched.adapter_name}" if matched.adapter_name else card.model
        tariff = tariff_of((await services.rules.current()).prices, matched.catalogue, chosen, priced_model, card.model)
        spot_percent = None
        if service.spot:
            price = await services.spot.price_of(terms, card.model)
            tariff, spot_percent = price.tariff(tariff, service.name), price.percent
        names = [one.name for one in (chosen.service, chosen.fallback) if one is not None]
        computed, is_overloaded = _predict(counted, chosen)
        calibration = services.quotes.calibration
        prediction = None if computed is None else calibration.corrected(card.model, service.name, computed)
        has_guarantee = prediction is not None and not is_overloaded and not service.spot
        margin = calibration.margin(card.model, service.name, self.terms.margin)
        guarantee = guarantee_of(prediction, margin) if prediction is not None and has_guarantee else None
        quote = Quote(
            quote_id=secrets.token_bytes(12),
            tenant_id=record.principal.tenant_id,
            endpoint=record.endpoint,
            body_digest=counted.digest,
            model=card.model,
            service_class=service.name,
            expires_unix_ms=expires_ms,
            num_prompt_tokens=sum(counted.prompt_lengths),
            max_output_tokens=counted.max_output_tokens,
            prices={name: tariff.prices.get(name) for name in names},
            credit_percent=terms.credit_percent,
            prediction=prediction,
            guarantee=guarantee,
            computed=computed,
            spot_percent=spot_percent,
            num_inflight=services.gate.num_inflight(record.principal.tenant_id),
        )
        return ClassQuote(
            service_class=service.name,
            service_tier=matched.catalogue.tier_of(service),
            quote=services.quotes.sign(quote),
            price=_price(tariff.prices.get(service.name), counted, expected),
            prediction=_times(prediction, counted, expected),
            guarantee=_times(guarantee, counted, expected),
            credit_percent=terms.credit_percent,
            is_overloaded=is_overloaded,
            spot_percent=spot_percent,
        )


def _classes_of(matched: MatchedRequest, principal: Principal) -> list[ChosenClass]:
    """Return the classes that the service tiers select for the caller, the best first."""
    tiers = (*TIERS, SPOT_TIER) if matched.card.serves_spot and matched.catalogue.spot_classes else TIERS
    chosen = [matched.catalogue.choose(principal.service_class, tier) for tier in tiers]
    by_name = {one.service.name: one for one in chosen}
    return sorted(by_name.values(), key=lambda one: one.service.rank)


def _predict(counted: _Counted, chosen: ChosenClass) -> tuple[Timing | None, bool]:
    """Return the times at the engine that would get the request, and whether it would refuse the class.

    The times lack the factors that were learned.
    """
    matched, states = counted.matched, counted.matched.states
    if matched.has_images and matched.card.images is not None:
        states = engines_with_vision(states, matched.card.model, matched.card.images)
    need = RequestNeed.ANSWER if matched.adapter is None else RequestNeed.ADAPTED
    state = choose(states, matched.card.model, chosen.service, need=need)
    class_load = state.class_load(chosen.service.name)
    is_overloaded = refuse_unattainable(chosen.service, class_load) is not None
    if state.load is None or not state.load_is_fresh:
        return None, is_overloaded
    return predict_timing(state.load, class_load, counted.prompt_lengths, counted.num_sequences), is_overloaded


def _price(price: Price | None, counted: _Counted, expected: int) -> QuotedPrice | None:
    if price is None:
        return None
    num_prompt_tokens, choices = sum(counted.prompt_lengths), counted.generation.num_choices
    most = sum(counted.longest) * choices
    likely = sum(min(expected, longest) for longest in counted.longest) * choices
    return QuotedPrice(*(price.cost(num_prompt_tokens, 0, num_output) for num_output in (0, likely, most)))


def _times(timing: Timing | None, counted: _Counted, expected: int) -> QuotedTimes | None:
    if timing is None:
        return None
    finishes = timing.finish_s(expected), timing.finish_s(counted.max_output_tokens)
    return QuotedTimes(timing.first_token_s, timing.token_s, *finishes)
