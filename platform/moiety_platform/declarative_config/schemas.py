"""Request and response bodies of the admin API for declarations."""

from __future__ import annotations

from typing import Annotated

import msgspec

from moiety_platform.declarative_config.models import (
    MAX_DECLARED_NAME_LENGTH,
    MAX_SOURCE_LENGTH,
    Declaration,
    DeclaredKind,
)
from moiety_platform.openapi.schemas import shows
from moiety_platform.tenants.models import ID_LENGTH

Name = Annotated[str, shows(minLength=1, maxLength=MAX_DECLARED_NAME_LENGTH, format="printable")]
Source = Annotated[str, shows(minLength=1, maxLength=MAX_SOURCE_LENGTH, format="printable")]
TenantId = Annotated[str, shows(minLength=1, maxLength=ID_LENGTH, pattern="^[A-Za-z0-9_]+$")]


class NewDeclaration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An object that the file `source` declares; sent again with its `object_id` once the object exists."""

    kind: DeclaredKind
    name: Name
    source: Source
    object_id: Name | None = None
    tenant_id: TenantId | None = None


class DeclarationView(msgspec.Struct, frozen=True):
    """A declared object."""

    kind: str
    name: str
    source: str
    object_id: str | None
    tenant_id: str | None

    @classmethod
    def of(cls, record: Declaration) -> DeclarationView:
        return cls(record.kind, record.name, record.source, record.object_id, record.tenant_id)


class DeclarationViews(msgspec.Struct, frozen=True):
    """All declared objects by kind and name."""

    data: list[DeclarationView]
