"""Alembic's environment.

The caller passes a connection that is already in a transaction. Alembic's own command line, used in development, makes
one from `-x url=…`.
"""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

from moiety_migrations.transaction import exclusive_connection
from moiety_platform.adapters.models import Adapter
from moiety_platform.batches.models import Batch
from moiety_platform.declarative_config.models import Declaration
from moiety_platform.files.models import StoredFile
from moiety_platform.idempotency.models import IdempotentRequest
from moiety_platform.object_storage.models import ObjectStoreRecord
from moiety_platform.responses_api.models import StoredResponse
from moiety_platform.retention.models import RetentionJobRecord
from moiety_platform.simulations.models import SimulationRecord
from moiety_platform.tenants.models import ApiKey
from moiety_platform.trace_store.models import SpanRecord
from moiety_platform.usage.models import UsageRecord
from moiety_platform.webhooks.models import Webhook

# this list loads every module that defines tables
TABLES = (
    *(ApiKey, UsageRecord, StoredFile, Batch, IdempotentRequest, StoredResponse),
    *(RetentionJobRecord, SpanRecord, Declaration, SimulationRecord, Webhook, Adapter, ObjectStoreRecord),
)
target_metadata = ApiKey.metadata


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
