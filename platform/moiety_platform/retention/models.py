"""Table of retention jobs: lease owner and next due time of each."""

from __future__ import annotations

from sqlalchemy import BigInteger, String
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.db.base import Base, DeploymentTable

MAX_JOB_NAME_LENGTH = 32
OWNER_LENGTH = 64


class RetentionJobRecord(DeploymentTable, Base):
    """One job.

    `available_ms` is the end of a lease or of the pause after it, in Unix milliseconds of the database's clock: until
    then only the owner takes the row, whether the job is running or done for the interval.
    """

    __tablename__ = "retention_jobs"

    name: Mapped[str] = mapped_column(String(MAX_JOB_NAME_LENGTH), primary_key=True)
    owner: Mapped[str | None] = mapped_column(String(OWNER_LENGTH))
    available_ms: Mapped[int] = mapped_column(BigInteger)
