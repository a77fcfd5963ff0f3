"""Declaration of issuers of JWTs as an administered resource. An issuer has no id: its name identifies it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moiety_platform.access.actions import OPERATORS_ONLY
from moiety_platform.resources.commands import Command, Parameter
from moiety_platform.resources.declaration import Resource

_NAME = Parameter.argument("name", "Name of the issuer here.")
_IN_PATH = _NAME.in_path()


def parse_grants(text: str) -> list[dict[str, Any]]:
    """Return grants from text such as `org-a=acme/web,org-b=beta/web`, or `acme/web` for every token.

    Raises ValueError.
    """
    grants = []
    for part in text.split(","):
        value, has_value, project = part.strip().rpartition("=")
        if not project or (has_value and not value):
            raise ValueError(
                f"must be CLAIM_VALUE=TENANT/PROJECT, separated by commas, or TENANT/PROJECT, not {text!r}"
            )
        grants.append({"project": project, "claim_value": value or None})
    return grants


def parse_claims(text: str) -> dict[str, str]:
    """Return claims from text such as `environment=production,ref=refs/heads/main`. Raises ValueError."""
    claims = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if not name or not value:
            raise ValueError(f"must be claims with values, such as environment=production, not {text!r}")
        claims[name] = value
    return claims


def parse_names(text: str) -> list[str]:
    """Return the names in a text, which commas separate."""
    return [name.strip() for name in text.split(",") if name.strip()]


def read_jwks(path: str) -> Any:
    """Return the JSON Web Key Set in a file. Raises ValueError."""
    try:
        return json.loads(Path(path).read_text())
    except OSError as exc:
        raise ValueError(f"names a file that cannot be read: {exc}") from exc
    except ValueError as exc:
        raise ValueError(f"names a file that is not JSON: {exc}") from exc


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its lists as the command takes them."""
    grants = [
        grant["project"] if grant["claim_value"] is None else f"{grant['claim_value']}={grant['project']}"
        for grant in row["grants"]
    ]
    required = [f"{name}={value}" for name, value in row["required_claims"].items()]
    shown = {"grants": grants, "required_claims": required, "models": row["models"] or [], "key_ids": row["key_ids"]}
    keys = "given" if row["jwks"] is not None else row["jwks_url"] or "discovered"
    return {**row, **{name: ", ".join(values) or None for name, values in shown.items()}, "jwks": keys}


ISSUERS = Resource(
    name="issuer",
    help="List, show, set and delete issuers whose JWTs are accepted for inference, instead of API keys.",
    access=OPERATORS_ONLY,
    page="jwt-authentication.md",
    columns={
        "name": "name",
        "url": "issuer",
        "audience": "audience",
        "claim": "claim",
        "grants": "grants",
        "required_claims": "requires",
        "service_class": "class",
        "models": "models",
        "end_user_claim": "end user",
        "jwks": "keys",
        "key_ids": "acts as key",
    },
    details=("jwks", "end_user_claim", "models", "service_class", "required_claims", "key_ids"),
    prose=("grants", "key_ids"),
    plain=plain,
    commands=(
        Command.list_objects("List all issuers by name."),
        Command.show_object("Show one issuer, and the keys as which its tokens act.", _IN_PATH),
        Command.set_object(
            "Trust an issuer, or replace the issuer of that name. It applies at every gateway within seconds.",
            _NAME,
            Parameter(name="issuer_url", field="url", help="Issuer as in the tokens' claim 'iss'.", is_required=True),
            Parameter(name="audience", help="Audience that the tokens' 'aud' must contain.", is_required=True),
            Parameter(
                name="grants",
                flag="--grant",
                parse=parse_grants,
                help="Projects by the value of --claim, such as org-a=acme/web,org-b=beta/web. Without --claim one "
                "project for every token, such as acme/web.",
                is_required=True,
            ),
            Parameter(
                name="claim", help="Claim whose value selects the project. Dots select a claim inside another one."
            ),
            Parameter(
                name="required_claims",
                flag="--require",
                parse=parse_claims,
                help="Claims that tokens must have, such as environment=production, separated by commas.",
            ),
            Parameter(name="jwks_url", help="URL of the issuer's keys. If not given, its discovery document says."),
            Parameter(
                name="jwks_file",
                field="jwks",
                parse=read_jwks,
                help="File with the issuer's public keys (JWKS), for issuers that gateways cannot reach.",
            ),
            Parameter(
                name="end_user_claim", help="Claim that becomes the end user of requests in usage. Default: sub."
            ),
            Parameter(
                name="service_class",
                flag="--class",
                help="Best service class of the tokens. If not given, or better than the tenant's: the tenant's.",
            ),
            Parameter(
                name="models",
                parse=parse_names,
                help="Models that tokens may use, separated by commas. If not given, all.",
            ),
        ),
        Command.delete_object("Trust an issuer no longer, and revoke the keys as which its tokens act.", _IN_PATH),
    ),
    apply_kind="moiety_platform.jwt_issuers.declared:ISSUER",
)
