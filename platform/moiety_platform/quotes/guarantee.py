"""Judgement of a quote's guarantee at the end of its request, and the credit for a missed one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from moiety_platform.quotes.prediction import GRACE_S
from moiety_platform.quotes.quote import Quote
from moiety_platform.quotes.timing import Timing


class CreditReason(StrEnum):
    """Why a guarantee counts as missed."""

    TTFT = "ttft"  # a first token came late
    FINISH = "finish"  # a last token came late
    FAILED = "failed"  # the answer broke off for a reason on the side of the server


class SequenceTimes(msgspec.Struct, frozen=True):
    """Times of one sequence of an answer, in seconds from the request's arrival, and its number of output tokens."""

    num_tokens: int
    first_s: float
    last_s: float


class GuaranteeOutcome(msgspec.Struct, frozen=True):
    """Outcome of a quote. `is_met` is None where the guarantee does not apply."""

    is_met: bool | None
    reason: CreditReason | None
    credit_nanodollars: int
    predicted_ttft_ms: float | None
    predicted_duration_ms: float | None


NO_OUTCOME = GuaranteeOutcome(None, None, 0, None, None)


def judge_guarantee(
    quote: Quote,
    sequences: Sequence[SequenceTimes],
    cost_nanodollars: int,
    *,
    has_completed: bool,
    has_failed: bool,
    was_paused: bool,
) -> GuaranteeOutcome:
    """Return whether the guarantee was met, and the credit.

    A request that neither completed nor failed was refused or left by its client: no guarantee applies. An answer that
    paused, because its client read slowly or a rate limit was used up, has a first token but no finish to judge. The
    credit is rounded down, so it never exceeds the cost.
    """
    reason = None
    if has_failed:
        reason = CreditReason.FAILED
    elif has_completed and quote.guarantee is not None:
        reason = _missed(quote, sequences, was_paused=was_paused)
    applies = quote.guarantee is not None and (has_completed or has_failed)
    is_missed = applies and reason is not None
    predicted = quote.prediction if has_completed else None
    longest = max((one.num_tokens for one in sequences), default=1)
    return GuaranteeOutcome(
        (not is_missed) if applies else None,
        reason if is_missed else None,
        cost_nanodollars * quote.credit_percent // 100 if is_missed else 0,
        None if predicted is None else predicted.first_token_s * 1000,
        None if predicted is None else predicted.finish_s(longest) * 1000,
    )


def needed_margin(prediction: Timing, sequences: Sequence[SequenceTimes]) -> float:
    """Return the least margin of a guarantee over the prediction that the sequences meet."""
    pairs = [(one.first_s, prediction.first_token_s) for one in sequences]
    pairs += [(one.last_s, prediction.finish_s(one.num_tokens)) for one in sequences]
    needed = [(actual_s - GRACE_S) / predicted_s - 1 for actual_s, predicted_s in pairs if predicted_s > 0]
    return max(needed, default=0.0)


def _missed(quote: Quote, sequences: Sequence[SequenceTimes], *, was_paused: bool) -> CreditReason | None:
    guarantee = quote.guarantee
    assert guarantee is not None, "checked by the caller"
    if any(one.first_s > guarantee.first_token_s for one in sequences):
        return CreditReason.TTFT
    if not was_paused and any(one.last_s > guarantee.finish_s(one.num_tokens) for one in sequences):
        return CreditReason.FINISH
    return None
