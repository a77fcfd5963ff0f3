"""Deployments that are backed up and restored: a data directory with one tenant, and its database."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from sqlalchemy import insert
from tests.usage_rows import make_row

from moiety_migrations import downgrade, upgrade
from moiety_platform.access.roles import Role
from moiety_platform.audit.trail import AuditedStore
from moiety_platform.auth.principal import Principal
from moiety_platform.auth.row_scope import tenant_of
from moiety_platform.auth.schemas import NewKey
from moiety_platform.auth.service import create_key
from moiety_platform.backups.backup import create_backup
from moiety_platform.backups.restore import Migrations, RestoreReport, restore_backup
from moiety_platform.clock import SystemClock
from moiety_platform.db.session import Database
from moiety_platform.files.models import StoredFile
from moiety_platform.object_storage.keys import file_key
from moiety_platform.object_storage.readiness import ObjectStoreReadiness
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.receipts.content import ReceiptDraft
from moiety_platform.settings import GatewaySettings
from moiety_platform.tenants.schemas import NewProject, NewTenant
from moiety_platform.tenants.service import create_project, create_tenant
from moiety_platform.usage.recorder import storable
from moiety_platform.usage.store import insert_rows

PEPPER = "a pepper for tests, 32 bytes long"
CONTENT = b'{"custom_id": "one"}\n' * 100
DRAFT = ReceiptDraft("0" * 32, {"sampling": {"seed": 1}}, [{"model": "demo"}], None, ["aa"], ["bb"])
MIGRATIONS = Migrations(upgrade, downgrade)

_numbers = count()


async def why_not_ready(database: Database, objects: ObjectStore) -> str:
    """Return why the object store is not that of the database; wait until it is known."""
    check = ObjectStoreReadiness(database, objects)
    while (why := await check.why_not_ready()) == check.silence:
        pass
    return why


class Deployment:
    """A data directory and its database, in which one tenant has used a model and uploaded a file."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.key = ""
        self.project_id = self.tenant_id = self.key_id = self.object_key = ""

    async def fill(self) -> None:
        """Make a tenant with a key, a file and three requests; all changes are in the audit log."""
        self.settings.data_dir.mkdir(mode=0o700)
        (self.settings.data_dir / "pepper").write_text(PEPPER + "\n")
        await asyncio.to_thread(upgrade, self.settings.store_url)
        async with self.database() as database:
            store = AuditedStore(database, "tester", Role.OWNER, tenant_of, SystemClock())
            now = datetime.now(UTC)
            async with store.write() as session:
                tenant = await create_tenant(session, NewTenant(name="acme – \\N \\. back\\slash"), now)
            async with store.write() as session:
                project = await create_project(session, NewProject(name="web", tenant_id=tenant.id), now)
            async with store.write() as session:
                key, text = await create_key(session, NewKey(name="ci", project_id=project.id), PEPPER.encode(), now)
            self.tenant_id, self.project_id, self.key_id, self.key = tenant.id, project.id, key.id, text.text
            await self.add_requests(database, 3)
            objects = ObjectStore.open(self.settings.objects_url)
            assert await why_not_ready(database, objects) == ""
            self.object_key = file_key(tenant.id, "file_1")
            writer = objects.begin_object(self.object_key)
            await writer.write(CONTENT)
            await writer.finish()
            await objects.close()
            async with database.write() as session:
                row = {"id": "file_1", "tenant_id": tenant.id, "project_id": project.id, "purpose": "batch",
                       "filename": "in.jsonl", "state": "ready", "num_bytes": len(CONTENT), "created_ms": 1,
                       "touched_ms": 1, "object_key": self.object_key,
                       "digest": hashlib.sha256(CONTENT).hexdigest()}  # fmt: skip
                await session.execute(insert(StoredFile).values(row))

    async def add_requests(self, database: Database, num: int) -> None:
        owner = {"tenant_id": self.tenant_id, "project_id": self.project_id, "key_id": self.key_id}
        for _ in range(num):
            row = make_row(f"chatcmpl-{next(_numbers):032x}", started_at=datetime.now(UTC), **owner)
            async with database.write() as session:
                await insert_rows(session, [storable(row)])

    async def add_receipt(self, database: Database) -> str:
        """Store a request that asked for a receipt; return its id."""
        owner = {"tenant_id": self.tenant_id, "project_id": self.project_id, "key_id": self.key_id}
        row = make_row(f"chatcmpl-{next(_numbers):032x}", receipt=DRAFT, **owner)
        async with database.write() as session:
            await insert_rows(session, [storable(row)])
        return row.request_id

    @property
    def owner(self) -> Principal:
        return Principal(
            self.key_id,
            self.key_id,
            self.tenant_id,
            "acme",
            self.project_id,
            "standard",
            1.0,
            b"",
            frozenset({"inference"}),
        )

    def at(self, settings: GatewaySettings) -> Deployment:
        """Return the same tenant in a copy of the deployment."""
        copy = Deployment(settings)
        copy.tenant_id, copy.project_id, copy.key_id = self.tenant_id, self.project_id, self.key_id
        return copy

    @contextlib.asynccontextmanager
    async def database(self) -> AsyncIterator[Database]:
        database = Database.open(self.settings.store_url)
        try:
            yield database
        finally:
            await database.close()


async def backed_up(deployment: Deployment, tmp_path: Path) -> Path:
    folder = tmp_path / f"backup-{next(_numbers)}"
    await create_backup(deployment.settings, folder, "1.0")
    return folder


async def restored(folder: Path, settings: GatewaySettings, **options: Any) -> RestoreReport:
    return await restore_backup(folder, settings, MIGRATIONS, **options)
