"""The table of declarations."""

from __future__ import annotations

from enum import StrEnum

from sqlalchemy import String
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.db.base import Base
from moiety_platform.tenants.models import ID_LENGTH

MAX_DECLARED_NAME_LENGTH = 700  # a tenant's, its project's, a key's and a limit's; or a model's and a class's
MAX_SOURCE_LENGTH = 64


class DeclaredKind(StrEnum):
    """What can be declared."""

    CLASS = "class"
    PRICE = "price"
    TENANT = "tenant"
    PROJECT = "project"
    KEY = "key"
    LIMIT = "limit"
    WEBHOOK = "webhook"


class Declaration(Base):
    """Something that a file declares: it may be changed and deleted by what applies that file. `object_id` is null
    until the thing is there. Deleted with the tenant's data, since it has its names."""

    __tablename__ = "declarations"

    kind: Mapped[str] = mapped_column(String(16), primary_key=True)
    name: Mapped[str] = mapped_column(String(MAX_DECLARED_NAME_LENGTH), primary_key=True)
    source: Mapped[str] = mapped_column(String(MAX_SOURCE_LENGTH))
    object_id: Mapped[str | None] = mapped_column(String(MAX_DECLARED_NAME_LENGTH))
    tenant_id: Mapped[str | None] = mapped_column(String(ID_LENGTH))
