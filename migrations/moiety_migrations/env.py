"""Alembic's environment.

The caller passes a connection that is already in a transaction. Alembic's own command line, used in development, makes
one from `-x url=…`.
"""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

from moiety_migrations.transaction import exclusive_connection
from moiety_platform.db.base import Base
from moiety_platform.db.tables import load_tables

load_tables()
target_metadata = Base.metadata


def _run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=target_metadata,
        render_as_batch=connection.dialect.name == "sqlite",
        compare_type=True,
        transactional_ddl=True,
    )
    context.run_migrations()


_given = context.config.attributes.get("connection")
if _given is not None:
    _run(_given)
else:
    with exclusive_connection(context.get_x_argument(as_dictionary=True)["url"]) as (_own, _):
        _run(_own)
