"""Request and response bodies of the admin API for keys. Only the response to a key's creation contains its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, ClassVar

import msgspec

from moiety_platform.access.roles import Role, key_complaint, tenant_complaint
from moiety_platform.auth.principal import INFERENCE_SCOPE, scope_of
from moiety_platform.db.paging import Page
from moiety_platform.etags import Tagged
from moiety_platform.openapi.schemas import shows
from moiety_platform.quota.schemas import QuotaCaps
from moiety_platform.tenants.checks import NAME
from moiety_platform.tenants.models import ApiKey
from moiety_wire.shared_fields import copy_fields

AwareTime = Annotated[datetime, msgspec.Meta(tz=True)]

DEFAULT_GRACE_S = 24 * 3600
MAX_GRACE_S = 90 * 24 * 3600
MAX_ALLOWED_MODELS = 100
MAX_MODEL_LENGTH = 200

ModelName = Annotated[str, shows(minLength=1, maxLength=MAX_MODEL_LENGTH, format="printable")]


def _purposes() -> list[dict[str, Any]]:
    """Return the possible purposes of a key as JSON schemas: inference, or a role for all tenants or for one."""
    none, given = {"type": "null"}, {"type": "string"}
    shown = [_purpose(INFERENCE_SCOPE, ["project_id"], project_id=given, role=none, tenant_id=none)]
    for role in Role:
        if key_complaint(role) is not None:
            continue
        fields = {"role": {"const": role}, "project_id": none}
        if tenant_complaint(role, None) is None:
            shown.append(_purpose(scope_of(role), ["role"], tenant_id=none, **fields))
        if tenant_complaint(role, "one") is None:
            shown.append(_purpose(scope_of(role), ["role", "tenant_id"], tenant_id=given, **fields))
    return shown


def _purpose(scope: str, required: list[str], **fields: Any) -> dict[str, Any]:
    return {"required": required, "properties": {**fields, "scopes": {"items": {"const": scope}}}}


class NewKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key to create: with a `project_id` for inference, or with a `role` for administration.

    With `tenant_id`, an administrator's key is restricted to that tenant. `allowed_models` null means every model.
    `scopes` is optional. `limits` are quotas of the key, which a rotated key keeps.
    """

    rules: ClassVar[Sequence[Mapping[str, Any]]] = ({"anyOf": _purposes()},)

    name: Annotated[str, NAME]
    project_id: str | None = None
    role: Role | None = None
    tenant_id: str | None = None
    scopes: Annotated[list[str], shows(minItems=1)] | None = None
    allowed_models: Annotated[list[ModelName], shows(minItems=1, maxItems=MAX_ALLOWED_MODELS)] | None = None
    expires_at: AwareTime | None = None
    limits: QuotaCaps | None = None


class Rotation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds for which the old key stays valid beside the new one."""

    grace_s: Annotated[int, shows(minimum=0, maximum=MAX_GRACE_S)] = DEFAULT_GRACE_S


class KeyDetails(msgspec.Struct, frozen=True):
    """Use of a key, and its quotas.

    `last_used_at` is the start of its last request whose row is kept; null if there is none. Requests and cost are
    those since the beginning of the month, in UTC.
    """

    last_used_at: datetime | None
    month_requests: int
    month_cost_nanodollars: int
    limits: dict[str, int]


class KeyView(Tagged, frozen=True):
    """A key as the API shows it.

    `status` is active, expired or revoked; `hint` contains the key's last four characters. `role` and `tenant_id` are
    an administrator's: null in keys for inference, which have their tenant through the project. `user_id` is that of
    the user who made the key for itself. `details` are null unless requested.
    """

    transient: ClassVar[frozenset[str]] = frozenset({"status", "details"})

    id: str
    project_id: str | None
    role: str | None
    tenant_id: str | None
    name: str
    hint: str
    scopes: list[str]
    allowed_models: list[str] | None
    status: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    replaced_by: str | None
    user_id: str | None
    details: KeyDetails | None = None

    @classmethod
    def of(cls, key: ApiKey, now: datetime, details: KeyDetails | None = None) -> KeyView:
        return copy_fields(key, cls, scopes=list(key.scopes), status=_status(key, now), details=details)


class KeyPage(Page[KeyView], frozen=True):
    """A page of keys, oldest first; `next_cursor` is null on the last page."""


class CreatedKey(msgspec.Struct, frozen=True):
    """A new key with its text in `secret`, which is shown only once."""

    key: KeyView
    secret: str


def _status(key: ApiKey, now: datetime) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "expired" if key.expires_at is not None and key.expires_at <= now else "active"
