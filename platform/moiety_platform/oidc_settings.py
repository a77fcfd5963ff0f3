"""Settings of the sign-in of administrators with an identity provider (OIDC)."""

from __future__ import annotations

import json
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import field_validator, model_validator
from pydantic_settings import NoDecode

from moiety_platform.access.group_roles import parse_group_roles
from moiety_platform.process_settings import ProcessSettings
from moiety_platform.reloadable import live

LOOPBACK = ("127.0.0.1", "::1", "localhost")


class OidcSettings(ProcessSettings):
    """Issuer of the tokens that the admin API accepts, and the roles that they give."""

    oidc_issuer: str | None = live(
        None, "OIDC issuer whose tokens the admin API accepts in addition to keys. It requires oidc_audience."
    )
    oidc_audience: str | None = live(None, "Audience that OIDC tokens must have.")
    oidc_roles_claim: str = live(
        "moiety_roles",
        "Claim with the administrator's role or a list of roles. Dots select a claim inside another one.",
    )
    oidc_tenant_claim: str = live(
        "moiety_tenant", "Claim with the id of the tenant that the token is restricted to. Optional in a token."
    )
    oidc_groups_claim: str = live(
        "groups", "Claim with the user's groups, for oidc_group_roles. Dots select a claim inside another one."
    )
    oidc_group_roles: Annotated[dict[str, str], NoDecode] = live(
        {},
        "Roles by group of the identity provider, with the id or name of a tenant after a colon, such as "
        "platform-admins=owner,acme-leads=tenant-admin:acme, or the same as a JSON object.",
    )

    oidc_key_days: float = live(
        30,
        "Days for which the keys of a developer by groups stay valid after its last token with the role. 0 for no "
        "limit.",
        ge=0,
        le=3650,
    )

    @field_validator("oidc_issuer")
    @classmethod
    def _check_issuer(cls, value: str | None) -> str | None:
        if value is not None:
            url = urlsplit(value)
            if not url.hostname or (url.scheme != "https" and not (url.scheme == "http" and url.hostname in LOOPBACK)):
                raise ValueError(f"the issuer {value!r} must be an https:// address, or http:// on this machine")
        return value

    @field_validator("oidc_group_roles", mode="before")
    @classmethod
    def _split_group_roles(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        if value.lstrip().startswith("{"):
            try:
                return json.loads(value)
            except ValueError as exc:
                raise ValueError(f"the JSON object of roles by group is not valid: {exc}") from exc
        pairs = (part.partition("=") for part in value.split(","))
        return {group.strip(): role for group, _, role in pairs if group.strip()}

    @field_validator("oidc_group_roles")
    @classmethod
    def _check_group_roles(cls, value: dict[str, str]) -> dict[str, str]:
        parse_group_roles(value)
        return value

    @model_validator(mode="after")
    def _check_oidc(self) -> Self:
        if (self.oidc_issuer is None) != (self.oidc_audience is None):
            raise ValueError("set oidc_issuer and oidc_audience together, or neither of them")
        if self.oidc_group_roles and self.oidc_issuer is None:
            raise ValueError("oidc_group_roles needs oidc_issuer and oidc_audience, whose tokens name the groups")
        return self
