"""Reservation of a lower bound of a request whose files are not read yet."""

from __future__ import annotations

from moiety_platform.inference.generation import Conversation
from moiety_platform.inference.matched_request import MatchedRequest
from moiety_platform.inference.quota_reservation import QuotaReservation


async def reserve_least(reservation: QuotaReservation, matched: MatchedRequest) -> None:
    """Reserve a lower bound of a request with files, so that none is read for a tenant whose quota is used up.

    Each document and image has at least one token. Raises the errors of `QuotaReservation.begin`.
    """
    generation = matched.generation
    prompt = generation.prompts[0]
    assert isinstance(prompt, Conversation), "only conversations have files"
    num_files = len(prompt.documents) + len(prompt.images)
    await reservation.begin_least(num_files, len(generation.prompts) * generation.num_choices, matched.tariff)
