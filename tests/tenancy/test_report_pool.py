"""Administrators who read reports do not take connections from requests, and are limited in number."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import httpx
import psycopg

from moiety_platform.bootstrap.composition import assembled
from moiety_platform.clock import ManualClock
from moiety_platform.db.session import REPORTING, SERVING, Database
from moiety_platform.reloading.source import SettingsSource
from moiety_platform.settings import SECTION, GatewaySettings

from .conftest import PEPPER, make_demo

DEADLINE_S = 60.0
STUCK = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"


async def test_clients_are_served_while_many_administrators_read_reports(
    clean_postgres: str, clock: ManualClock, tmp_path: Path
) -> None:
    database = Database.open(clean_postgres)
    demo = await make_demo(database, clock)
    await database.close()
    settings = GatewaySettings(database_url=clean_postgres, data_dir=tmp_path, key_pepper=PEPPER.decode())
    with contextlib.closing(psycopg.connect(clean_postgres, autocommit=True)) as watcher:
        source = SettingsSource.open(None, SECTION, lambda: settings)
        async with assembled(source) as gateway, asyncio.timeout(DEADLINE_S):
            transport = httpx.ASGITransport(app=gateway.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=None) as http:
                admin, tenant = ({"Authorization": f"Bearer {key}"} for key in (demo.admin_key, demo.key))
                with contextlib.closing(psycopg.connect(clean_postgres)) as holder:
                    holder.execute("LOCK TABLE audit_log IN ACCESS EXCLUSIVE MODE")  # reads of it take so long
                    looks = [
                        asyncio.create_task(http.get("/admin/v1/audit", headers=admin)) for _ in range(2 * SERVING.size)
                    ]
                    while watcher.execute(STUCK).fetchone() != (REPORTING.size,):  # noqa: ASYNC110 - another process's state
                        await asyncio.sleep(0.02)
                    served = await http.get("/v1/models", headers=tenant)  # with a key that was not seen before
                    assert served.status_code == 200, served.text
                    assert not any(look.done() for look in looks)
                assert {look.status_code for look in await asyncio.gather(*looks)} == {200}
