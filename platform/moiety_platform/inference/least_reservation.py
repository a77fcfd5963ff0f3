"""Lower bounds of requests whose prompt is not known yet, reserved or checked under their quotas."""

from __future__ import annotations

from moiety_platform.classes.terms import Catalogue
from moiety_platform.inference.generation import Conversation
from moiety_platform.inference.matched_request import MatchedRequest
from moiety_platform.inference.quota_reservation import NO_TARIFF, QuotaReservation, Tariff, Tariffs
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.prices.token_cost import PriceList


async def reserve_least(reservation: QuotaReservation, matched: MatchedRequest) -> None:
    """Reserve a lower bound of a request with files, so that none is read for a tenant whose quota is used up.

    Each document and image has at least one token. Raises the errors of `QuotaReservation.begin`.
    """
    generation = matched.generation
    prompt = generation.prompts[0]
    assert isinstance(prompt, Conversation), "only conversations have files"
    num_files = len(prompt.documents) + len(prompt.images)
    await reservation.begin_least(num_files, len(generation.prompts) * generation.num_choices, matched.tariff)


async def check_least(
    record: RequestRecord, catalogue: Catalogue, tariffs: Tariffs, prices: PriceList, model: str
) -> None:
    """Check the quotas of a request before it wakes an engine of the base model, whose tokenizer may be unknown.

    A tenant whose quota is used up wakes nothing. A spot request is checked without its price, which is agreed later.
    Raises the errors of `QuotaReservation.begin`, and BadRequest for an unknown service tier.
    """
    principal, generation = record.principal, record.generation
    if record.quote is not None:
        tariff = Tariff(record.quote.terms.prices)
    elif principal.service_class not in catalogue.names or generation is None:
        tariff = NO_TARIFF  # a class made a moment ago: the request is classified once an engine is awake
    else:
        chosen = catalogue.choose(principal.service_class, generation.service_tier)
        tariff = NO_TARIFF if chosen.service.spot else tariffs.of(prices, catalogue, chosen, model, model)
    await record.reservation.check_least(record.num_sequences, tariff)
