"""Table of declarations."""

from __future__ import annotations

from enum import StrEnum

from sqlalchemy import String
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.db.base import Base
from moiety_platform.tenants.models import ID_LENGTH

MAX_DECLARED_NAME_LENGTH = 700  # names of tenant, project, key and limit together; or of model and class
MAX_SOURCE_LENGTH = 64


class DeclaredKind(StrEnum):
    """Kinds of objects that can be declared."""

    CLASS = "class"
    PRICE = "price"
    ROUTE = "route"
    TENANT = "tenant"
    PROJECT = "project"
    KEY = "key"
    USER = "user"
    KEY_POLICY = "key_policy"
    LIMIT = "limit"
    WEBHOOK = "webhook"
    GUARDRAIL = "guardrail"
    ISSUER = "issuer"


class Declaration(Base):
    """An object that a file declares; the tool that applies the file may change and delete it.

    `object_id` is null until the object exists. Deleted with the tenant's data, since it contains its names.
    """

    __tablename__ = "declarations"

    kind: Mapped[str] = mapped_column(String(16), primary_key=True)
    name: Mapped[str] = mapped_column(String(MAX_DECLARED_NAME_LENGTH), primary_key=True)
    source: Mapped[str] = mapped_column(String(MAX_SOURCE_LENGTH))
    object_id: Mapped[str | None] = mapped_column(String(MAX_DECLARED_NAME_LENGTH))
    tenant_id: Mapped[str | None] = mapped_column(String(ID_LENGTH))
