"""Cache of verified tokens: a repeated token is verified once, until it expires or the issuer's key changes."""

from __future__ import annotations

import time
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from tests.token_issuer import AUDIENCE, OTHER_RSA, RSA, TokenIssuer

from moiety_platform.auth.verified_tokens import MAX_CACHED_LENGTH, VerifiedTokens
from moiety_platform.clock import ManualClock, SystemClock
from moiety_platform.errors import Unauthenticated, Unavailable


class CountingRsa(jwt.algorithms.RSAAlgorithm):
    """Verifies signatures, and counts how many."""

    num_verified = 0

    def verify(self, msg: bytes, key: Any, sig: bytes) -> bool:
        CountingRsa.num_verified += 1
        return super().verify(msg, key, sig)


class Issuer(TokenIssuer):
    """An issuer whose one key is looked up here, without HTTP. `away`: its keys cannot be read."""

    def __init__(self) -> None:
        super().__init__()
        self.url = "https://issuer.example"
        CountingRsa.num_verified = 0
        self.publish(RSA)

    def publish(self, key: rsa.RSAPrivateKey) -> None:
        fields = jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)
        self.key = jwt.PyJWK.from_dict({**fields, "kid": "rsa", "alg": "RS256"})
        self.key.Algorithm = CountingRsa(CountingRsa.SHA256)

    async def find(self, key_id: object) -> jwt.PyJWK:
        if self.away:
            raise Unavailable("away", code="issuer_unavailable", retry_after_s=1.0)
        assert key_id == "rsa"
        return self.key


@pytest.fixture
def issuer() -> Issuer:
    return Issuer()


async def subject(tokens: VerifiedTokens, issuer: Issuer, token: str, audience: str = AUDIENCE) -> Any:
    claims = await tokens.verify(token, issuer.find, issuer=issuer.url, audience=audience)
    return claims["sub"]


async def test_a_repeated_token_is_verified_once_until_it_expires(issuer: Issuer) -> None:
    clock = ManualClock()
    tokens, token = VerifiedTokens(clock), issuer.token()
    assert tokens.claims_of(token) is None
    for _ in range(5):
        assert await subject(tokens, issuer, token) == "ada"
    assert CountingRsa.num_verified == 1
    found = tokens.claims_of(token)
    assert found is not None and found["iss"] == issuer.url
    clock.advance(found["exp"] - clock.now().timestamp())
    for number in (2, 3):
        assert await subject(tokens, issuer, token) == "ada", "the library's own clock says that it is valid"
        assert CountingRsa.num_verified == number, "but the cache does not"
    assert not len(tokens)


async def test_an_expired_token_is_refused_and_not_cached(issuer: Issuer) -> None:
    tokens = VerifiedTokens(SystemClock())
    assert await subject(tokens, issuer, issuer.token(exp=int(time.time()) - 10)) == "ada", "clocks may differ"
    with pytest.raises(Unauthenticated) as refused:
        await subject(tokens, issuer, issuer.token(exp=int(time.time()) - 60))
    assert refused.value.code == "token_expired" and not len(tokens)


async def test_a_token_is_verified_again_by_another_key_of_the_same_id(issuer: Issuer) -> None:
    tokens, token = VerifiedTokens(ManualClock()), issuer.token()
    await subject(tokens, issuer, token)
    issuer.publish(RSA)  # read again, and the same
    assert await subject(tokens, issuer, token) == "ada" and CountingRsa.num_verified == 1
    issuer.publish(OTHER_RSA)
    with pytest.raises(Unauthenticated):
        await subject(tokens, issuer, token)
    assert not len(tokens)
    issuer.publish(RSA)
    assert await subject(tokens, issuer, token) == "ada"
    issuer.away = True
    with pytest.raises(Unavailable):
        await subject(tokens, issuer, token)


async def test_a_token_is_verified_again_for_another_audience_or_issuer(issuer: Issuer) -> None:
    tokens, token = VerifiedTokens(ManualClock()), issuer.token(aud=["a", "b"])
    assert [await subject(tokens, issuer, token, one) for one in "ab"] == ["ada", "ada"]
    with pytest.raises(Unauthenticated):
        await subject(tokens, issuer, token, "c")
    await subject(tokens, issuer, token, "a")
    with pytest.raises(Unauthenticated):
        await tokens.verify(token, issuer.find, issuer="https://other.example", audience="a")


async def test_the_cache_keeps_the_tokens_that_were_used_last_and_no_long_ones(issuer: Issuer) -> None:
    tokens = VerifiedTokens(ManualClock(), max_tokens=2)
    first, second, third = (issuer.token(sub=name) for name in "abc")
    for token in (first, second, first, third):
        await subject(tokens, issuer, token)
    assert [tokens.claims_of(token) is not None for token in (first, second, third)] == [True, False, True]
    long = issuer.token(pad="x" * MAX_CACHED_LENGTH)
    assert await subject(tokens, issuer, long) == "ada"
    assert tokens.claims_of(long) is None and len(tokens) == 2
    head, claims, signature = first.split(".")
    with pytest.raises(Unauthenticated):
        await subject(tokens, issuer, f"{head}.{claims}.{signature[:-8]}AAAAAAAA")
    assert await subject(tokens, issuer, first) == "a"
