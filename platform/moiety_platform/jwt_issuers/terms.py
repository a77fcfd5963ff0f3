"""Trusted issuers of JWTs as requests read them. Pure, and without SQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_CLAIM_VALUE_LENGTH = 200  # the name of an issuer and this fit the audit log


@dataclass(frozen=True, slots=True)
class JwtGrant:
    """Key as which tokens act whose claim has the value `claim_value`; None: every token of the issuer."""

    claim_value: str | None
    key_id: str


@dataclass(frozen=True, slots=True)
class JwtIssuer:
    """One trusted issuer.

    Its keys are in `jwks`, or read from `jwks_url`, or found by the discovery document of `url`. The value of `claim`
    selects the grant. `service_class` is the best class of its tokens, if it is not the tenant's; `end_user_claim` None
    leaves the end user to the request.
    """

    name: str
    url: str
    audience: str
    jwks_url: str | None
    jwks: str | None
    claim: str | None
    required_claims: Mapping[str, str]
    end_user_claim: str | None
    service_class: str | None
    grants: tuple[JwtGrant, ...]

    def grant_of(self, claims: Mapping[str, Any]) -> JwtGrant | None:
        """Return the first grant that matches the claims of a token; None if there is none."""
        values = () if self.claim is None else claim_values(claims, self.claim)
        for grant in self.grants:
            if grant.claim_value is None or grant.claim_value in values:
                return grant
        return None

    def missing_claim(self, claims: Mapping[str, Any]) -> str | None:
        """Return the name of a required claim that a token lacks, or None."""
        for name, value in self.required_claims.items():
            if value not in claim_values(claims, name):
                return name
        return None


@dataclass(frozen=True, slots=True)
class JwtIssuers:
    """All trusted issuers by URL, and the ranks of the service classes, of which 0 is the best.

    `key_classes` are the best classes of the keys of grants, where the issuer has one.
    """

    by_url: Mapping[str, Sequence[JwtIssuer]]
    class_ranks: Mapping[str, int]
    key_classes: Mapping[str, str]

    def worse_class(self, service_class: str, other: str | None) -> str:
        """Return the class with the worse rank; `service_class` if there is no `other` one.

        The other one if a rank is not known yet, so that a new class of the tenant is not used beyond the issuer's.
        """
        if other is None:
            return service_class
        if other not in self.class_ranks or service_class not in self.class_ranks:
            return other
        return max(service_class, other, key=self.class_ranks.__getitem__)


def find_claim(claims: Mapping[str, Any], path: str) -> Any:
    """Return the claim of that name, or a nested one where dots separate names; None if there is none.

    Names may contain dots themselves: `kubernetes.io.namespace` finds `namespace` in `kubernetes.io`.
    """
    if path in claims:
        return claims[path]
    at = path.find(".")
    while at >= 0:
        inner = claims.get(path[:at])
        if isinstance(inner, Mapping) and (found := find_claim(inner, path[at + 1 :])) is not None:
            return found
        at = path.find(".", at + 1)
    return None


def claim_values(claims: Mapping[str, Any], path: str) -> tuple[str, ...]:
    """Return the values of a claim as text: those of a list, or the one value. Objects are left out."""
    found = find_claim(claims, path)
    return tuple(_text(value) for value in (found if isinstance(found, list) else [found]) if _is_plain(value))


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int)  # a boolean is an integer


def _text(value: str | int) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)
