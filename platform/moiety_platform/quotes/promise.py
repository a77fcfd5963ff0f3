"""Judgement of a quote's promise at the end of its request, and the credit for a broken one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from moiety_platform.quotes.quote import Quote


class CreditReason(StrEnum):
    """Why a promise counts as broken."""

    TTFT = "ttft"  # a first token came late
    FINISH = "finish"  # a last token came late
    FAILED = "failed"  # the answer broke off for a reason on the side of the server


class SequenceTimes(msgspec.Struct, frozen=True):
    """Times of one sequence of an answer, in seconds from the request's arrival, and its number of output tokens."""

    num_tokens: int
    first_s: float
    last_s: float


class PromiseOutcome(msgspec.Struct, frozen=True):
    """What a quote came to. `is_kept` is None where the promise does not apply."""

    is_kept: bool | None
    reason: CreditReason | None
    credit_nanodollars: int
    predicted_ttft_ms: float | None
    predicted_duration_ms: float | None


NO_OUTCOME = PromiseOutcome(None, None, 0, None, None)


def judge_promise(
    quote: Quote,
    sequences: Sequence[SequenceTimes],
    cost_nanodollars: int,
    *,
    has_completed: bool,
    has_failed: bool,
    was_paused: bool,
) -> PromiseOutcome:
    """Return whether the promise was kept, and the credit.

    A request that neither completed nor failed was refused or left by its client: no promise applies. An answer that
    paused, because its client read slowly or a rate limit was used up, has a first token but no finish to judge. The
    credit is rounded down, so it never exceeds the cost.
    """
    reason = None
    if has_failed:
        reason = CreditReason.FAILED
    elif has_completed and quote.promise is not None:
        reason = _broken(quote, sequences, was_paused=was_paused)
    applies = quote.promise is not None and (has_completed or has_failed)
    is_broken = applies and reason is not None
    predicted = quote.prediction if has_completed else None
    longest = max((one.num_tokens for one in sequences), default=1)
    return PromiseOutcome(
        (not is_broken) if applies else None,
        reason if is_broken else None,
        cost_nanodollars * quote.credit_percent // 100 if is_broken else 0,
        None if predicted is None else predicted.first_token_s * 1000,
        None if predicted is None else predicted.finish_s(longest) * 1000,
    )


def _broken(quote: Quote, sequences: Sequence[SequenceTimes], *, was_paused: bool) -> CreditReason | None:
    promise = quote.promise
    assert promise is not None, "checked by the caller"
    if any(one.first_s > promise.first_token_s for one in sequences):
        return CreditReason.TTFT
    if not was_paused and any(one.last_s > promise.finish_s(one.num_tokens) for one in sequences):
        return CreditReason.FINISH
    return None
