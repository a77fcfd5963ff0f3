"""A request that sends a quote: its body, which the quote must be of, and its class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import msgspec
from litestar.types import Receive, Scope

from moiety_platform.auth.principal import Principal
from moiety_platform.classes.terms import Catalogue, ChosenClass
from moiety_platform.clock import Clock
from moiety_platform.errors import Conflict
from moiety_platform.quotes.body_digest import RecordedBody
from moiety_platform.quotes.guarantee import (
    NO_OUTCOME,
    GuaranteeOutcome,
    SequenceTimes,
    judge_guarantee,
    needed_margin,
)
from moiety_platform.quotes.quote import QUOTE_FIELD, Quote, QuoteSigner
from moiety_platform.request_head import fields_of


@dataclass(frozen=True, slots=True)
class AcceptedQuote:
    """Quote that a request sent and that is valid for it."""

    terms: Quote
    signer: QuoteSigner

    def for_load(self, num_inflight: int) -> AcceptedQuote:
        """Return the quote, without its guarantee if the tenant has more sequences in flight than when it was made.

        A quote predicts no later requests: otherwise many quotes of an idle moment, used at once, miss each other.
        """
        if num_inflight <= self.terms.num_inflight:
            return self
        terms = msgspec.structs.replace(self.terms, guarantee=None, prediction=None, computed=None)
        return AcceptedQuote(terms, self.signer)

    def outcome_of(
        self,
        sequences: Sequence[SequenceTimes],
        cost_nanodollars: int,
        now_unix_ms: int,
        *,
        has_completed: bool,
        has_failed: bool,
        was_paused: bool,
        was_cached: bool,
    ) -> GuaranteeOutcome:
        """Return what the quote came to, and learn from the times.

        Its guarantee is for the first request of this process to which it applies. Quotes are for prompts without a
        cached prefix, so a cached one (`was_cached`) teaches no time to the first token.
        """
        outcome = judge_guarantee(
            self.terms,
            sequences,
            cost_nanodollars,
            has_completed=has_completed,
            has_failed=has_failed,
            was_paused=was_paused,
        )
        if has_completed and not was_paused and self.terms.computed is not None and sequences:
            first_s, token_s = _measured(sequences)
            calibration, of = self.signer.calibration, (self.terms.model, self.terms.service_class)
            calibration.observe(*of, self.terms.computed, None if was_cached else first_s, token_s)
            if self.terms.prediction is not None:
                calibration.observe_margin(*of, needed_margin(self.terms.prediction, sequences))
        if outcome.is_met is None or self.signer.take_guarantee(self.terms, now_unix_ms):
            return outcome
        return NO_OUTCOME


class QuotedRequest(RecordedBody):
    """Receives the body of a request with a quote. Call it in place of the ASGI `receive`, then verify the quote."""

    def __init__(self, signer: QuoteSigner, scope: Scope, receive: Receive, principal: Principal) -> None:
        super().__init__(receive)
        self._signer, self._tenant_id = signer, principal.tenant_id
        self._text, self._endpoint = fields_of(scope)[QUOTE_FIELD], scope["path"]

    async def verify(self, clock: Clock) -> AcceptedQuote:
        """Return the quote once the body is received. Raises the errors of `QuoteSigner.verify`."""
        digest, now_ms = await self.digest(), clock.unix_ns() // 1_000_000
        quote = self._signer.verify(self._text, self._tenant_id, self._endpoint, digest, now_ms)
        return AcceptedQuote(quote, self._signer)


def _measured(sequences: Sequence[SequenceTimes]) -> tuple[float, float | None]:
    """Return the latest first token, and the time per token of the longest sequence, None if it has only one."""
    longest = max(sequences, key=lambda one: one.num_tokens)
    num_gaps = longest.num_tokens - 1
    token_s = max(0.0, longest.last_s - longest.first_s) / num_gaps if num_gaps > 0 else None
    return max(one.first_s for one in sequences), token_s


def quoted_class(quote: Quote, catalogue: Catalogue) -> ChosenClass:
    """Return the quoted class, with its fallback if the quote has a price for it.

    Raises Conflict if the class was deleted meanwhile.
    """
    if quote.service_class not in catalogue.names:
        raise Conflict(
            f"The class {quote.service_class!r} of the quote was deleted; get a new quote with POST /v1/quote.",
            code="quote_mismatch",
        )
    chosen = catalogue.named(quote.service_class)
    has_fallback = chosen.fallback is not None and chosen.fallback.name in quote.prices
    return chosen if has_fallback else ChosenClass(chosen.service, None)


def refuse_route(name: str) -> NoReturn:
    """Refuse a request with a quote whose model has become a route. Raises Conflict."""
    raise Conflict(
        f"The model {name!r} of the quote is now a route, which can choose other models; send the request without the "
        "quote, or get a quote for one of the models of the route.",
        code="quote_mismatch",
    )
