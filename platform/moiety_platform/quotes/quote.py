"""A quote and its signature.

A quote is not stored: the client gets all of it, signed with a key that is derived from the deployment's pepper, and
sends it back in the header `x-moiety-quote`. So every gateway of the deployment honours it. A quote binds its tenant,
endpoint, body, model, class, prices and guarantee until it expires.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac

import msgspec

from moiety_platform.auth.pepper import PepperRotation
from moiety_platform.errors import BadRequest, Conflict, Gone
from moiety_platform.prices.token_cost import Price
from moiety_platform.quotes.calibration import QuoteCalibration
from moiety_platform.quotes.timing import Timing

QUOTE_HEADER = "x-moiety-quote"
QUOTE_FIELD = QUOTE_HEADER.encode()
MAX_QUOTE_BYTES = 4096
MAX_USED = 1024  # quotes after which expired ones are forgotten
PREFIX = b"mtq_"
_PURPOSE = b"moiety: quotes of requests"
_MAC_BYTES = 32
_ADVICE = "get a new one with POST /v1/quote"


class Quote(msgspec.Struct, frozen=True, array_like=True):
    """Terms of one request in one class. `prices` has the class and its fallback; None means that there is no price.

    `guarantee` is None where no times could be predicted, or the class is overloaded.
    """

    quote_id: bytes
    tenant_id: str
    endpoint: str
    body_digest: bytes
    model: str  # the served one, without an adapter; the body names the client's
    service_class: str
    expires_unix_ms: int
    num_prompt_tokens: int
    max_output_tokens: int  # of each sequence
    prices: dict[str, Price | None]
    credit_percent: int
    prediction: Timing | None
    guarantee: Timing | None
    computed: Timing | None = None  # the prediction without the factors that were learned
    spot_percent: int | None = None  # of the class's price, in a spot class
    num_inflight: int = 0  # sequences of the tenant at the gateway, which the prediction may contain

    def require_lengths(self, num_prompt_tokens: int, max_output_tokens: int) -> None:
        """Raise Conflict if the request has other lengths, for example because its conversation has grown."""
        if (num_prompt_tokens, max_output_tokens) != (self.num_prompt_tokens, self.max_output_tokens):
            raise Conflict(
                f"The quote is for {self.num_prompt_tokens} prompt tokens and at most {self.max_output_tokens} output "
                f"tokens, and the request now has {num_prompt_tokens} and {max_output_tokens}; {_ADVICE}.",
                code="quote_mismatch",
            )


class QuoteSigner:
    """Signs quotes, and verifies those that clients send. For one event loop.

    During a rotation of the pepper, quotes under the next and the previous one are accepted too.
    """

    def __init__(self, pepper: bytes, rotation: PepperRotation | None = None) -> None:
        others = () if rotation is None else (rotation.coming, rotation.previous)
        self._keys = [_key_of(one) for one in (pepper, *others) if one is not None]
        self.calibration = QuoteCalibration()  # of the quotes that it signs
        self._used: dict[bytes, int] = {}  # expiry of the quotes whose guarantee a request has taken, in Unix ms

    def sign(self, quote: Quote) -> str:
        """Return the quote as text for a header."""
        data = msgspec.msgpack.encode(quote)
        return (PREFIX + base64.urlsafe_b64encode(_mac(self._keys[0], data) + data)).decode("ascii")

    def verify(self, text: bytes, tenant_id: str, endpoint: str, body_digest: bytes, now_unix_ms: int) -> Quote:
        """Return the quote that a request sends.

        Raises BadRequest for a text that this deployment has not signed for the tenant, Conflict for another endpoint
        or body, and Gone for an expired quote.
        """
        quote = self._decode(text)
        if quote is None or quote.tenant_id != tenant_id:
            raise BadRequest(
                f"The header {QUOTE_HEADER} has no quote of this deployment for your tenant; {_ADVICE}.",
                code="invalid_quote",
                param=QUOTE_HEADER,
            )
        if now_unix_ms >= quote.expires_unix_ms:
            late_s = (now_unix_ms - quote.expires_unix_ms) / 1000
            raise Gone(f"The quote expired {late_s:.1f} s ago; {_ADVICE}.", code="quote_expired")
        if (quote.endpoint, quote.body_digest) != (endpoint, body_digest):
            raise Conflict(
                f"The quote is for another body, or for another endpoint than {endpoint}; send the quoted body, or "
                f"{_ADVICE}.",
                code="quote_mismatch",
            )
        return quote

    def take_guarantee(self, quote: Quote, now_unix_ms: int) -> bool:
        """Return whether no earlier request of this process has taken the quote's guarantee; it is taken now."""
        if quote.quote_id in self._used:
            return False
        if len(self._used) >= MAX_USED:
            self._used = {one: expiry for one, expiry in self._used.items() if expiry > now_unix_ms}
        self._used[quote.quote_id] = quote.expires_unix_ms
        return True

    def _decode(self, text: bytes) -> Quote | None:
        if len(text) > MAX_QUOTE_BYTES or not text.startswith(PREFIX):
            return None
        try:
            signed = base64.b64decode(text[len(PREFIX) :], altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        mac, data = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
        if not any(hmac.compare_digest(mac, _mac(key, data)) for key in self._keys):
            return None
        try:
            return msgspec.msgpack.decode(data, type=Quote)
        except msgspec.MsgspecError:  # of another release
            return None


def _key_of(pepper: bytes) -> bytes:
    return hmac.digest(pepper, _PURPOSE, hashlib.sha256)


def _mac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, hashlib.sha256)
