"""Table of guardrails."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, String, Text, text
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.db.base import Base, DeploymentTable
from moiety_platform.tenants.models import ID_LENGTH

MAX_NAME_LENGTH = 64
MAX_URL_LENGTH = 1000
ENTRY_POINT_SCHEME = "python:"


class GuardrailRecord(DeploymentTable, Base):
    """One guardrail of the operator. `detectors` are names of built-in ones, separated by commas.

    `url` is that of an HTTP endpoint, or ENTRY_POINT_SCHEME with the name of an entry point.
    """

    __tablename__ = "guardrails"
    __table_args__ = (
        CheckConstraint("stage IN ('input', 'output')", name="stage_known"),
        CheckConstraint("action IN ('block', 'observe')", name="action_known"),
        CheckConstraint("on_failure IN ('open', 'closed')", name="on_failure_known"),
        CheckConstraint("(detectors = '') = (url IS NOT NULL)", name="one_check"),
    )

    name: Mapped[str] = mapped_column(String(MAX_NAME_LENGTH), primary_key=True)
    stage: Mapped[str] = mapped_column(String(16))
    action: Mapped[str] = mapped_column(String(16))
    on_failure: Mapped[str] = mapped_column(String(16))
    detectors: Mapped[str] = mapped_column(Text)
    url: Mapped[str | None] = mapped_column(String(MAX_URL_LENGTH))
    timeout_ms: Mapped[int]
    memory_mb: Mapped[int] = mapped_column(server_default=text("512"))
    tenant_id: Mapped[str | None] = mapped_column(String(ID_LENGTH))
