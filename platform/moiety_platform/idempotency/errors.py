"""Errors of requests with an `Idempotency-Key`."""

from __future__ import annotations

from moiety_platform.errors import BadRequest, Conflict, Gone, RateLimited, Unprocessable

IN_USE_RETRY_S = 1.0
EXHAUSTED_RETRY_S = 60.0


class BadKey(BadRequest):
    default_code = "invalid_idempotency_key"


class KeyReused(Unprocessable):
    default_code = "idempotency_key_reused"

    def __init__(self) -> None:
        super().__init__(
            "This Idempotency-Key was used with another body, endpoint or kind of API key; repeat the first request as "
            "it was, or send this one with a new Idempotency-Key"
        )


class KeyInUse(Conflict):
    default_code = "idempotency_key_in_use"

    def __init__(self) -> None:
        super().__init__(
            "The first request with this Idempotency-Key is still running; send it again a little later",
            retry_after_s=IN_USE_RETRY_S,
        )


class AnswerNotStored(Gone):
    default_code = "idempotency_answer_not_kept"

    def __init__(self) -> None:
        super().__init__(
            "The first request with this Idempotency-Key was answered, with more than this server stores; send "
            "the request with a new Idempotency-Key to have it answered, and charged, once more"
        )


class TooManyKeys(RateLimited):
    default_code = "idempotency_keys_exhausted"

    def __init__(self, max_keys: int) -> None:
        super().__init__(
            f"{max_keys:,} Idempotency-Keys of this tenant are stored, which is the limit; wait until the oldest "
            "expire, or send the request without one",
            retry_after_s=EXHAUSTED_RETRY_S,
        )
