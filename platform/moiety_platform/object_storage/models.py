"""Table of the object store that belongs to the database."""

from __future__ import annotations

from sqlalchemy import String
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.db.base import Base, DeploymentTable

MARK_LENGTH = 80


class ObjectStoreRecord(DeploymentTable, Base):
    """The object store of this database, in the only row.

    `mark` is the content of the object `moiety-store-id` there, which begins with the `deployment_id`; None until the
    first gateway has written it.
    """

    __tablename__ = "object_stores"

    name: Mapped[str] = mapped_column(String(16), primary_key=True)
    deployment_id: Mapped[str] = mapped_column(String(32))
    mark: Mapped[str | None] = mapped_column(String(MARK_LENGTH))
