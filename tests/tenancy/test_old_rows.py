"""A database migrates from the first schema to the newest, with rows that the releases of each version wrote;
afterwards its keys work, its sums are right and its audit log verifies."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config

import moiety_migrations
from moiety_migrations import HEAD, downgrade, upgrade
from moiety_migrations.transaction import exclusive_connection
from moiety_platform.audit.chain import verify
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.clock import ManualClock
from moiety_platform.db.session import Database
from moiety_platform.db.url import to_sync_url
from moiety_platform.usage.reconciliation import Amounts, reconcile

from .conftest import PEPPER

CHART = "0015"  # the schema of the chart's first release, to which a downgrade is possible
DAY = datetime(2026, 3, 1, tzinfo=UTC)
KEYS = {"client": f"mty_{'c' * 16}.{'s' * 32}", "owner": f"mty_{'o' * 16}.{'t' * 32}"}
TENANT = {"id": "ten_1", "name": "acme", "service_class": "flex", "weight": 2.0, "status": "active", "created_at": DAY}
PROJECT = {"id": "prj_1", "tenant_id": "ten_1", "name": "web", "created_at": DAY}
USE = {
    "tenant_id": "ten_1", "project_id": "prj_1", "key_id": "c" * 16, "endpoint": "/v1/chat/completions", "model": "m",
    "service_class": "flex", "http_status": 200, "num_choices": 1, "prompt_tokens": 100, "cached_tokens": 30,
    "output_tokens": 7, "queue_ms": 1.0, "ttft_ms": 2.0, "duration_ms": 50.0, "outcome": "stop",
}  # fmt: skip


class OldDatabase:
    """A database that is being upgraded, and that is written to in SQL, since its tables are not those of today."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.audit: list[dict[str, Any]] = []
        self.engine = sa.create_engine(to_sync_url(url), poolclass=sa.NullPool)

    def to(self, revision: str) -> None:
        """Upgrade to a revision by the migrations themselves."""
        config = Config()
        config.set_main_option("script_location", str(Path(moiety_migrations.__file__).parent))
        config.set_main_option("path_separator", "os")
        with exclusive_connection(self.url) as (connection, _):
            config.attributes["connection"] = connection
            command.upgrade(config, revision)

    def put(self, table: str, **row: Any) -> None:
        with self.engine.begin() as connection:
            known = sa.Table(table, sa.MetaData(), autoload_with=connection)
            connection.execute(known.insert().values(row))

    def use(self, number: int, hour: int, **more: Any) -> dict[str, Any]:
        """Store a request as its usage row."""
        row = {**USE, "request_id": f"r-{number}", "started_at": DAY + timedelta(hours=hour, minutes=7), **more}
        self.put("usage", **row)
        return row

    def log(self, **change: Any) -> None:
        """An entry of version 1: its content is hashed itself, after the hash before it."""
        previous = self.audit[-1]["hash"] if self.audit else "0" * 64
        at = DAY + timedelta(minutes=len(self.audit))
        entry = {"seq": len(self.audit) + 1, "actor": "o" * 16, "before": None, "after": None, **change}
        content = json.dumps({**entry, "at": at.isoformat()}, sort_keys=True, separators=(",", ":"))
        whole = {**entry, "at": at, "hash": hashlib.sha256(f"{previous}\n{content}".encode()).hexdigest()}
        self.put("audit_log", **whole)
        self.audit.append(whole)

    def rows(self, table: str) -> list[Mapping[str, Any]]:
        with self.engine.connect() as connection:
            known = sa.Table(table, sa.MetaData(), autoload_with=connection)
            return list(connection.execute(known.select()).mappings())


def key_row(name: str, project_id: str | None) -> dict[str, Any]:
    """As the first release stored it: HMAC-SHA256 of the whole key under the pepper."""
    text = KEYS[name]
    hashed = hmac.digest(PEPPER, b"key:" + text.encode(), hashlib.sha256)
    key_id = text.removeprefix("mty_").split(".")[0]
    return {
        "id": key_id, "project_id": project_id, "name": name, "secret_hash": hashed, "hint": text[-4:], "scopes": [],
        "created_at": DAY,
    }  # fmt: skip


def fill(old_database: OldDatabase) -> None:
    """Upgrade from the first schema to that of the chart's first release, and write rows on the way."""
    old_database.to("0001")
    old_database.put("tenants", **TENANT)
    old_database.put("projects", **PROJECT)
    old_database.put("api_keys", **key_row("client", "prj_1"))
    old_database.put("api_keys", **key_row("owner", None))
    old_database.use(1, hour=0)
    old_database.use(2, hour=1, outcome="disconnected", output_tokens=3)
    old_database.to("0002")
    old_database.use(3, hour=1, num_preemptions=1, sla_attained=True)
    old_database.to("0003")
    quota = {"id": "quo_1", "level": "tenant", "scope_id": "ten_1", "kind": "tokens_per_day", "cap": 1000}
    old_database.put("quotas", **quota, created_at=DAY)
    old_database.put("quota_windows", quota_id="quo_1", start=DAY, granted=500, settled=107)
    lease = {"replica_id": "gone", "expires_ms": 1, "state": "live"}
    old_database.put("quota_leases", quota_id="quo_1", start=DAY, granted=500, settled=107, **lease)
    old_database.to("0004")
    old_database.put("prices", model="m", service_class="", input=10, cached_input=5, output=20)
    old_database.use(4, hour=2, num_preemptions=0, cost_nanodollars=990)
    old_database.to("0005")
    old_database.log(action="create", object_kind="tenants", object_id="ten_1", after={"name": "acme", "weight": 1.0})
    old_database.log(
        action="change", object_kind="tenants", object_id="ten_1", before={"weight": 1.0}, after={"weight": 2.0}
    )
    old_database.to("0006")  # which enters what there was; from now on gateways do
    row = old_database.use(5, hour=3, num_preemptions=0, cost_nanodollars=1010)
    sums = {name: row[name] for name in ("prompt_tokens", "cached_tokens", "output_tokens", "cost_nanodollars")}
    ids = {name: row[name] for name in ("tenant_id", "project_id", "key_id", "model", "service_class")}
    entry = {"request_id": "r-5", "kind": "settled", "sequence": 0, "started_at": row["started_at"]}
    old_database.put("ledger", **entry, tenant_id="ten_1", **sums)
    counts = {"requests": 1, "failed": 0, "rejected": 0, "disconnected": 0, "preemptions": 0, "num_ttft": 1}
    times = {"ttft_ms": 2.0, "duration_ms": 50.0, "num_kept": 0, "num_promised": 0}
    old_database.put("usage_hours", hour=DAY + timedelta(hours=3), **ids, **sums, **counts, **times)
    old_database.to("0007")
    old_database.log(action="create", object_kind="api_keys", object_id="c" * 16, after={"name": "client"})
    old_database.to(CHART)


async def check(old_database: OldDatabase) -> None:
    """Check the upgraded rows with the code that gateways use today."""
    database = Database.open(old_database.url)
    authenticator = Authenticator(database, PEPPER, ManualClock())
    client = await authenticator.authenticate(f"Bearer {KEYS['client']}")
    assert (client.tenant_id, client.service_class, client.weight, client.role) == ("ten_1", "flex", 2.0, None)
    owner = await authenticator.authenticate(f"Bearer {KEYS['owner']}")
    assert (owner.role, owner.tenant_id) == ("owner", "")
    await authenticator.close()
    async with database.read() as session:
        report = await reconcile(session, DAY, DAY + timedelta(days=1))
    await database.close()
    assert report.agrees
    assert report.total == Amounts(5, 500, 150, 31, 2000)
    (window,) = old_database.rows("quota_windows")
    assert (window["granted"], window["settled"]) == (500, 107)
    (price,) = old_database.rows("prices")
    assert (price["input"], price["cached_input"], price["output"]) == (10, 5, 20)
    entries = sorted(old_database.rows("audit_log"), key=lambda one: one["seq"])
    told = verify({**entry, "at": entry["at"].replace(tzinfo=UTC).isoformat()} for entry in entries)
    assert (told.num_entries, told.head) == (len(old_database.audit), old_database.audit[-1]["hash"])


async def test_rows_of_every_age_come_to_the_newest_schema_and_back_to_the_charts_first(empty_url: str) -> None:
    old_database = OldDatabase(empty_url)
    fill(old_database)
    assert upgrade(empty_url) == HEAD
    await check(old_database)
    downgrade(empty_url, CHART)
    assert upgrade(empty_url) == HEAD
    await check(old_database)


async def test_a_row_that_was_changed_on_the_way_is_noticed(tmp_path: Path) -> None:
    old_database = OldDatabase(f"sqlite:///{tmp_path / 'moiety.db'}")
    fill(old_database)
    with old_database.engine.begin() as connection:
        connection.execute(sa.text("UPDATE ledger SET output_tokens = output_tokens + 1 WHERE request_id = 'r-1'"))
    upgrade(old_database.url)
    with pytest.raises(AssertionError, match="agrees"):
        await check(old_database)
