"""Table of the exported days."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.db.base import Base, DeploymentTable, UtcDateTime

FORMAT_LENGTH = 8
DIGEST_LENGTH = 64


class UsageExport(DeploymentTable, Base):
    """The file of one day in one format, as it was written last.

    Its sums are those of the day at that time: a day whose sums differ, because of a late row or a correction, is
    written again. `digest` is the SHA-256 of the file in hexadecimal.
    """

    __tablename__ = "usage_exports"

    day: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)
    format: Mapped[str] = mapped_column(String(FORMAT_LENGTH), primary_key=True)
    object_key: Mapped[str] = mapped_column(Text)
    digest: Mapped[str] = mapped_column(String(DIGEST_LENGTH))
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    num_rows: Mapped[int] = mapped_column(BigInteger)
    requests: Mapped[int] = mapped_column(BigInteger)
    tokens: Mapped[int] = mapped_column(BigInteger)
    cost_nanodollars: Mapped[int] = mapped_column(BigInteger)
    exported_at: Mapped[datetime] = mapped_column(UtcDateTime)
