"""Request and response bodies of the admin API for issuers of JWTs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec

from moiety_platform.auth.schemas import MAX_ALLOWED_MODELS, ModelName
from moiety_platform.etags import Tagged
from moiety_platform.jwt_issuers.models import (
    MAX_AUDIENCE_LENGTH,
    MAX_CLAIM_NAME_LENGTH,
    MAX_ISSUER_NAME_LENGTH,
    MAX_ISSUER_URL_LENGTH,
    MAX_JWKS_URL_LENGTH,
)
from moiety_platform.jwt_issuers.terms import MAX_CLAIM_VALUE_LENGTH
from moiety_platform.openapi.schemas import shows

NAME = re.compile(rf"[a-z0-9][a-z0-9-]{{0,{MAX_ISSUER_NAME_LENGTH - 1}}}", re.ASCII)
MAX_GRANTS = 200
MAX_REQUIRED_CLAIMS = 10

ClaimName = Annotated[str, shows(minLength=1, maxLength=MAX_CLAIM_NAME_LENGTH, format="printable")]
ClaimValue = Annotated[str, shows(minLength=1, maxLength=MAX_CLAIM_VALUE_LENGTH, format="printable")]
Models = Annotated[list[ModelName], shows(minItems=1, maxItems=MAX_ALLOWED_MODELS)]


class NewJwtGrant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Project for which tokens act whose claim has the value `claim_value`.

    `project` is the id of a project, or the names of its tenant and of the project, such as `acme/web`. `models`
    replaces the list of the issuer. `claim_value` null is for an issuer without `claim`.
    """

    project: Annotated[str, shows(minLength=1)]
    claim_value: ClaimValue | None = None
    models: Models | None = None


class NewJwtIssuer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An issuer to trust, which replaces the issuer of the same name.

    Its keys are in `jwks`, or at `jwks_url`, or where the discovery document of `url` says. The first of `grants` that
    matches the token's `claim` decides on the project; without `claim` there is one grant, for every token. Tokens must
    have each of `required_claims`. `service_class` is the best class of the tokens, `end_user_claim` the claim that
    becomes the end user in usage; null leaves the end user to the request.
    """

    rules: ClassVar[Sequence[Mapping[str, Any]]] = (
        {"anyOf": [{"properties": {"jwks": {"type": "null"}}}, {"properties": {"jwks_url": {"type": "null"}}}]},
    )

    name: Annotated[str, shows(pattern=f"^{NAME.pattern}$")]
    url: Annotated[str, shows(minLength=1, maxLength=MAX_ISSUER_URL_LENGTH)]
    audience: Annotated[str, shows(minLength=1, maxLength=MAX_AUDIENCE_LENGTH, format="printable")]
    grants: Annotated[list[NewJwtGrant], shows(minItems=1, maxItems=MAX_GRANTS)]
    claim: ClaimName | None = None
    required_claims: Annotated[dict[str, str], shows(maxProperties=MAX_REQUIRED_CLAIMS)] = {}
    jwks_url: Annotated[str, shows(minLength=1, maxLength=MAX_JWKS_URL_LENGTH)] | None = None
    jwks: dict[str, Any] | None = None
    end_user_claim: ClaimName | None = "sub"
    service_class: str | None = None
    models: Models | None = None


class JwtGrantView(msgspec.Struct, frozen=True):
    """One grant of an issuer. `project` are the names of the tenant and of the project."""

    project: str
    claim_value: str | None
    models: list[str] | None


class JwtIssuerView(Tagged, frozen=True):
    """One trusted issuer. `key_ids` are the keys as which the tokens of each grant act, for quotas and usage."""

    name: str
    url: str
    audience: str
    grants: list[JwtGrantView]
    claim: str | None
    required_claims: dict[str, str]
    jwks_url: str | None
    jwks: dict[str, Any] | None
    end_user_claim: str | None
    service_class: str | None
    models: list[str] | None
    key_ids: list[str]


class JwtIssuerViews(msgspec.Struct, frozen=True):
    """All trusted issuers by name."""

    data: list[JwtIssuerView]
