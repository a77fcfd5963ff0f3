"""Checks of an issuer that an administrator submits, before it reaches the database."""

from __future__ import annotations

import json
from typing import Any, Protocol

from moiety_platform.errors import BadRequest
from moiety_platform.jwt_issuers.models import (
    MAX_AUDIENCE_LENGTH,
    MAX_CLAIM_NAME_LENGTH,
    MAX_ISSUER_URL_LENGTH,
    MAX_JWKS_URL_LENGTH,
)
from moiety_platform.jwt_issuers.schemas import MAX_GRANTS, MAX_REQUIRED_CLAIMS, NAME, NewJwtIssuer
from moiety_platform.jwt_issuers.terms import MAX_CLAIM_VALUE_LENGTH

MAX_JWKS_CHARS = 64 * 1024


class HttpAddresses(Protocol):
    """Policy that says which addresses keys may be read from."""

    def check(self, text: str) -> str:
        """Return the URL as stored. Raises BadRequest."""
        ...


def check_issuer(new: NewJwtIssuer, reach: HttpAddresses) -> None:
    """Check what needs no database. Raises BadRequest, which names the field."""
    if not NAME.fullmatch(new.name):
        raise BadRequest("'name' must have 1 to 64 lower-case letters, digits and hyphens.", param="name")
    _check_text(new.url, "url", MAX_ISSUER_URL_LENGTH)
    if not new.url.isascii():
        raise BadRequest("'url' must be ASCII, exactly as in the tokens' claim 'iss'.", param="url")
    _check_text(new.audience, "audience", MAX_AUDIENCE_LENGTH)
    _check_keys(new, reach)
    for field in ("claim", "end_user_claim"):
        if (value := getattr(new, field)) is not None:
            _check_text(value, field, MAX_CLAIM_NAME_LENGTH)
    if len(new.required_claims) > MAX_REQUIRED_CLAIMS:
        raise BadRequest(f"'required_claims' must have at most {MAX_REQUIRED_CLAIMS} claims.", param="required_claims")
    for name, value in new.required_claims.items():
        _check_text(name, "required_claims", MAX_CLAIM_NAME_LENGTH)
        _check_text(value, "required_claims", MAX_CLAIM_VALUE_LENGTH)
    _check_grants(new)


def _check_keys(new: NewJwtIssuer, reach: HttpAddresses) -> None:
    if new.jwks is not None:
        if new.jwks_url is not None:
            raise BadRequest("Give either 'jwks' or 'jwks_url', not both.", param="jwks")
        text = json.dumps(new.jwks)
        if len(text) > MAX_JWKS_CHARS:
            raise BadRequest(f"'jwks' must have at most {MAX_JWKS_CHARS} characters as JSON.", param="jwks")
        if not _has_usable_key(new.jwks):
            message = (
                "'jwks' has no key that can check signatures: it must be a JSON Web Key Set whose 'keys' are public "
                "keys (RSA of at least 2048 bits, EC or Ed25519), each with a 'kid'."
            )
            raise BadRequest(message, param="jwks")
    elif new.jwks_url is not None:
        _check_text(new.jwks_url, "jwks_url", MAX_JWKS_URL_LENGTH)
        _check_address(new.jwks_url, "jwks_url", reach)
    else:
        _check_address(new.url, "url", reach)


def _has_usable_key(document: dict[str, Any]) -> bool:
    from moiety_platform.auth.jwt_verification import usable_keys  # noqa: PLC0415  slow to import, and rarely needed

    try:
        return bool(usable_keys(document))
    except (KeyError, TypeError):
        return False


def _check_address(text: str, field: str, reach: HttpAddresses) -> None:
    try:
        reach.check(text)
    except BadRequest as exc:
        raise BadRequest(
            f"Keys cannot be read from {text[:200]!r}: {exc} For an issuer that gateways cannot reach, give its keys "
            "as 'jwks'.",
            code=exc.code,
            param=field,
        ) from exc


def _check_grants(new: NewJwtIssuer) -> None:
    if not 1 <= len(new.grants) <= MAX_GRANTS:
        raise BadRequest(f"'grants' must have 1 to {MAX_GRANTS} entries.", param="grants")
    values = [grant.claim_value for grant in new.grants]
    if len(set(values)) < len(values):
        raise BadRequest("Each 'claim_value' in 'grants' must be given once.", param="grants")
    if new.claim is None and values != [None]:
        message = "Without 'claim' there must be one grant, without 'claim_value': it is for every token."
        raise BadRequest(message, param="grants")
    if new.claim is not None and None in values:
        raise BadRequest(f"Each grant needs a 'claim_value' of the claim {new.claim!r}.", param="grants")
    for value in values:
        if value is not None:
            _check_text(value, "claim_value", MAX_CLAIM_VALUE_LENGTH)


def _check_text(text: str, field: str, max_length: int) -> None:
    if not 1 <= len(text) <= max_length or not text.isprintable():
        raise BadRequest(f"'{field}' must have 1 to {max_length} printable characters.", param=field)
