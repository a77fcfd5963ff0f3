"""Answer of `POST /v1/quote`. Times are seconds from the request's arrival; money is in nano-dollars."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import msgspec


class QuotedPrice(msgspec.Struct, frozen=True):
    """Cost of the request in a class: of its prompt, with the expected output, and at most."""

    input_nanodollars: int
    expected_nanodollars: int
    max_nanodollars: int


class QuotedTimes(msgspec.Struct, frozen=True):
    """Times of the answer: the last of n output tokens comes `first_token_s` + (n - 1) · `token_s` after arrival.

    `expected_finish_s` and `max_finish_s` are that time for the expected and for the largest number of output tokens.
    """

    first_token_s: float
    token_s: float
    expected_finish_s: float
    max_finish_s: float


class ClassQuote(msgspec.Struct, frozen=True):
    """Quote of the request in one class. `quote` is the value of the header `x-moiety-quote`.

    `price` is null for a model without a price. `prediction` is null while the engine has not learned its step times,
    and for external engines. Without a prediction, and where the class would be refused now, `guarantee` is null.
    """

    service_class: str
    service_tier: str
    quote: str
    price: QuotedPrice | None
    prediction: QuotedTimes | None
    guarantee: QuotedTimes | None
    credit_percent: int
    is_overloaded: bool
    spot_percent: int | None  # of the class's price, in a spot class, which has no guarantee


class QuoteList(msgspec.Struct, frozen=True):
    """Quotes of one request, the best class first."""

    object: Literal["quote"]
    model: str
    endpoint: str
    expires_at: datetime
    prompt_tokens: int
    expected_output_tokens: int  # of each sequence
    max_output_tokens: int  # of each sequence
    num_sequences: int
    data: list[ClassQuote]
