"""Tenants of a fleet, written into its database: by the admin API, a thousand of them take minutes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from moiety_platform.auth.keys import generate_key, hash_key, mark_of
from moiety_platform.bench.gateway import LARGE_CAPS
from moiety_platform.db.session import Database
from moiety_platform.quota.kinds import LimitKind, LimitLevel
from moiety_platform.quota.models import Quota
from moiety_platform.tenants.checks import new_id
from moiety_platform.tenants.models import ApiKey, Project, Tenant


async def insert_tenants(url: str, pepper: str, count: int, limits: Sequence[str]) -> list[str]:
    """Create tenants with one project, one key and these limits each; return their keys."""
    database, now = Database.open(url), datetime.now(UTC)
    tenants, projects, keys, quotas, texts = [], [], [], [], []
    for number in range(count):
        tenant_id, project_id, text = new_id("ten"), new_id("prj"), generate_key()
        tenants.append(
            Tenant(
                id=tenant_id,
                name=f"fleet-{number}",
                service_class="standard",
                weight=1.0,
                status="active",
                created_at=now,
            )
        )
        projects.append(Project(id=project_id, tenant_id=tenant_id, name="default", created_at=now))
        keys.append(
            ApiKey(
                id=text.key_id,
                project_id=project_id,
                name="key",
                secret_hash=hash_key(text, pepper.encode()),
                pepper_mark=mark_of(pepper.encode()),
                hint=text.hint,
                scopes=["inference"],
                created_at=now,
            )
        )
        quotas += [
            Quota(
                id=new_id("quo"),
                level=LimitLevel.TENANT,
                scope_id=tenant_id,
                kind=LimitKind(kind),
                cap=LARGE_CAPS[kind],
                created_at=now,
            )
            for kind in limits
        ]
        texts.append(text.text)
    for rows in (tenants, projects, keys, quotas):  # referenced rows first
        async with database.write() as session:
            session.add_all(rows)
    await database.close()
    return texts
