"""Tables of issuers of JWTs, and of the keys as which their tokens act."""

from __future__ import annotations

from sqlalchemy import JSON, ForeignKey, Index, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.classes.models import MAX_CLASS_NAME_LENGTH
from moiety_platform.db.base import Base, DeploymentTable
from moiety_platform.jwt_issuers.terms import MAX_CLAIM_VALUE_LENGTH
from moiety_platform.tenants.models import ID_LENGTH

MAX_ISSUER_NAME_LENGTH = 64
MAX_ISSUER_URL_LENGTH = 500
MAX_JWKS_URL_LENGTH = 1000
MAX_CLAIM_NAME_LENGTH = 128
MAX_AUDIENCE_LENGTH = 500
EVERY_TOKEN = ""
"""Stored claim value of a grant for every token of its issuer."""


class JwtIssuerRecord(DeploymentTable, Base):
    """One trusted issuer. `jwks` is a JSON Web Key Set as text, for issuers whose keys are not fetched."""

    __tablename__ = "jwt_issuers"
    __table_args__ = (UniqueConstraint("url", "audience"),)

    name: Mapped[str] = mapped_column(String(MAX_ISSUER_NAME_LENGTH), primary_key=True)
    url: Mapped[str] = mapped_column(String(MAX_ISSUER_URL_LENGTH))
    audience: Mapped[str] = mapped_column(String(MAX_AUDIENCE_LENGTH))
    jwks_url: Mapped[str | None] = mapped_column(String(MAX_JWKS_URL_LENGTH))
    jwks: Mapped[str | None] = mapped_column(Text)
    claim: Mapped[str | None] = mapped_column(String(MAX_CLAIM_NAME_LENGTH))
    required_claims: Mapped[dict[str, str]] = mapped_column(JSON)
    end_user_claim: Mapped[str | None] = mapped_column(String(MAX_CLAIM_NAME_LENGTH))
    service_class: Mapped[str | None] = mapped_column(String(MAX_CLASS_NAME_LENGTH), ForeignKey("service_classes.name"))
    models: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))


class JwtGrantRecord(Base):
    """The key as which tokens of an issuer act whose claim has the value `claim_value`.

    The key has no text, so nobody can send it. Grants are tried in the order of `position`.
    """

    __tablename__ = "jwt_grants"
    __table_args__ = (Index(None, "tenant_id"), Index(None, "key_id", unique=True))

    issuer_name: Mapped[str] = mapped_column(ForeignKey("jwt_issuers.name"), primary_key=True)
    claim_value: Mapped[str] = mapped_column(String(MAX_CLAIM_VALUE_LENGTH), primary_key=True)
    position: Mapped[int]
    key_id: Mapped[str] = mapped_column(String(ID_LENGTH), ForeignKey("api_keys.id"))
    tenant_id: Mapped[str] = mapped_column(String(ID_LENGTH), ForeignKey("tenants.id"))
    models: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
