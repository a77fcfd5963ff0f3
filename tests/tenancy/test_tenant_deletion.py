"""Deletion of a tenant removes everything that it wrote, keeps every sum, and leaves a verifiable audit log."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, text, update
from tests.usage_rows import make_row

from moiety_platform.access.roles import Role
from moiety_platform.audit.chain import FIELDS, GENESIS, BrokenChain, entry_hash, verify
from moiety_platform.audit.models import AuditEntry
from moiety_platform.audit.trail import AuditedStore
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.row_scope import tenant_of
from moiety_platform.batches.models import Batch, BatchLine, BatchStatus, LineState
from moiety_platform.bootstrap.pending_work import PendingWorkReader
from moiety_platform.clock import ManualClock
from moiety_platform.controllers import with_services
from moiety_platform.db.base import Base
from moiety_platform.db.session import Database
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.errors import Unauthenticated, Unavailable
from moiety_platform.files.models import FileChunk, FileState, StoredFile
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.quota.models import QuotaLease, QuotaWindow
from moiety_platform.responses_api.models import StoredResponse
from moiety_platform.tenant_deletion.controller import DeletionServices, TenantDeletionController
from moiety_platform.tenant_deletion.data import KEPT, tables_to_delete
from moiety_platform.tenant_deletion.engine_notice import EngineNotice
from moiety_platform.tenant_deletion.service import TenantDeleter
from moiety_platform.tenants.schemas import TenantChange
from moiety_platform.tenants.service import change_tenant
from moiety_platform.usage.models import LedgerEntry, UsageHour, UsageRecord
from moiety_platform.usage.store import insert_rows
from moiety_wire.messages import ModelCard

from .conftest import PEPPER, Admin, Demo, admin_app
from .test_audit import log
from .test_trace_store import num_rows, sent
from .test_trace_store import store as store_traces

MARK = "zebra"  # in everything that the tenant wrote
OTHER = "giraffe"
CARD = ModelCard("engine-1", "tiny", "scripted", "{}", "", {}, (0,), 64, 8, 0, 0, "float32", "none")


@pytest.fixture
def authenticator(database: Database, clock: ManualClock) -> Authenticator:
    return Authenticator(database, PEPPER, clock)


@pytest.fixture
async def admin(
    database: Database, objects: ObjectStore, clock: ManualClock, demo: Demo, authenticator: Authenticator
) -> AsyncIterator[Admin]:
    deletion = with_services(TenantDeletionController, deletion=DeletionServices(objects))
    app = admin_app(database, clock, authenticator=authenticator, more=[deletion])
    client = Admin(app, demo.admin_key)
    async with client.http:
        yield client


async def make_tenant(admin: Admin, database: Database, clock: ManualClock, word: str) -> dict[str, Any]:
    """A tenant that has everything that one can have, with the word in whatever it wrote."""
    tenant = await admin.call("POST", "tenants", 201, json={"name": f"{word} & sons"})
    project = await admin.call("POST", "projects", 201, json={"name": f"{word}-web", "tenant_id": tenant["id"]})
    new_key: dict[str, Any] = {
        "name": f"{word}'s laptop",
        "project_id": project["id"],
        "allowed_models": [f"{word}-7b"],
    }
    key = await admin.call("POST", "keys", 201, json=new_key)
    boss = await admin.call(
        "POST", "keys", 201, json={"name": f"{word}'s boss", "role": "tenant-admin", "tenant_id": tenant["id"]}
    )
    limit: dict[str, Any] = {
        "level": "tenant",
        "scope_id": tenant["id"],
        "kind": "tokens_per_day",
        "cap": 1000,
        "alert_at": [50],
    }
    quota = await admin.call("PUT", "quotas", 200, json=limit)
    person = AuditedStore(database, f"oidc:{word}@example.com", Role.TENANT_ADMIN, tenant_of, clock)
    async with person.write() as session:
        await change_tenant(session, tenant["id"], TenantChange(name=f"{word} ltd"))
    ids: dict[str, Any] = {"tenant_id": tenant["id"], "project_id": project["id"], "key_id": key["key"]["id"]}
    named = {"end_user": f"{word}@example.com", "tags": f'{{"team":"{word}"}}'}
    rows = [make_row(f"req-{word[0]}-{n}", **ids, **named, started_at=clock.now(), model="tiny") for n in range(4)]
    unknown: dict[str, Any] = {"outcome": "rejected", "http_status": 404, "error_code": "model_not_found"}
    nothing = dict.fromkeys(("prompt_tokens", "cached_tokens", "output_tokens", "cost_nanodollars"), 0)
    rows += [
        make_row(f"req-{word[0]}-bad-{n}", **ids, **unknown, **nothing, started_at=clock.now(), model=f"{word}-{n}")
        for n in range(2)
    ]
    owner: dict[str, Any] = {"tenant_id": tenant["id"], "project_id": project["id"]}
    async with database.write() as session:
        await insert_rows(session, rows)
        session.add(QuotaWindow(quota_id=quota["id"], start=clock.now(), granted=90, settled=70))
        session.add(
            QuotaLease(quota_id=quota["id"], start=clock.now(), replica_id="r", granted=90, settled=70, expires_ms=0,
                       state="live")
        )  # fmt: skip
        of_batch = f"b-{word[0]}"
        for state, batch_id in ((FileState.READY, None), (FileState.UPLOADING, None), (FileState.READY, of_batch)):
            file_id = f"file-{word[0]}-{state}-{batch_id}"
            session.add(
                StoredFile(id=file_id, **owner, purpose="batch", filename=f"{word}.jsonl", state=state, num_bytes=7,
                           created_ms=0, touched_ms=0, batch_id=batch_id, line_state=None)
            )  # fmt: skip
            for start in range(0, 70 if batch_id is None else 0):
                session.add(FileChunk(file_id=file_id, start=start, stop=start + 1, data=f"{word}?".encode()))
        zeros = dict.fromkeys(("prompt_tokens", "cached_tokens", "output_tokens", "available_ms", "created_ms"), 0)
        session.add(
            Batch(id=f"b-{word[0]}", **owner, key_id=key["key"]["id"], endpoint="/v1/completions", input_file_id="f",
                  note={"for": word}, status=BatchStatus.IN_PROGRESS, total=3, completed=2, failed=0, **zeros,
                  expires_ms=2**40)
        )  # fmt: skip
        for number, line in enumerate((LineState.COMPLETED, LineState.COMPLETED, LineState.PENDING), 1):
            session.add(
                BatchLine(batch_id=f"b-{word[0]}", number=number, custom_id=f"{word}-{number}", start=0, num_bytes=1,
                          state=line, available_ms=0, num_refusals=0, num_failures=0, answer=word.encode(),
                          answer_bytes=5)
            )  # fmt: skip
        session.add(
            StoredResponse(id=f"resp-{word[0]}", **owner, model=f"{word}-7b", num_items=2, num_bytes=9, total_bytes=9,
                           expires_ms=2**40, items=word.encode(), body=word.encode())
        )  # fmt: skip
    return {**tenant, "key": key["secret"], "key_id": key["key"]["id"], "boss": boss["secret"]}


async def sums(database: Database) -> list[Any]:
    """What was used and booked: by tenant, project, key and hour, and each request and window for itself."""
    hour_sums = [func.sum(column) for column in UsageHour.__table__.c if not column.primary_key]
    whose = UsageHour.hour, UsageHour.tenant_id, UsageHour.project_id, UsageHour.key_id, UsageHour.service_class
    statements = [
        select(*whose, *hour_sums).group_by(*whose).order_by(*whose),
        select(*(c for c in UsageRecord.__table__.c if c.name not in ("model", "end_user", "tags"))).order_by(
            UsageRecord.request_id
        ),
        select(LedgerEntry.__table__).order_by(LedgerEntry.request_id),
        select(QuotaWindow.__table__).order_by(QuotaWindow.quota_id),
        select(QuotaLease.__table__).order_by(QuotaLease.quota_id),
    ]
    async with database.read() as session:
        return [[tuple(row) for row in await session.execute(statement)] for statement in statements]


async def places_of(database: Database, word: str) -> set[str]:
    """The columns of any table, ours or not known to us, in which the word stands."""
    found = set()
    async with database.read() as session:
        for table in Base.metadata.sorted_tables:
            for row in (await session.execute(text(f"SELECT * FROM {table.name}"))).mappings():
                found |= {f"{table.name}.{name}" for name, value in row.items() if word in str(value).lower()}
    return found


async def erase(admin: Admin, clock: ManualClock, tenant_id: str) -> Any:
    assert (await admin.call("DELETE", f"tenants/{tenant_id}/data", 202))["state"] == "erasing"
    clock.advance(6)
    return await admin.call("DELETE", f"tenants/{tenant_id}/data", 200)


async def test_nothing_that_the_tenant_wrote_is_left_and_every_sum_is_what_it_was(
    admin: Admin, database: Database, clock: ManualClock, demo: Demo, authenticator: Authenticator
) -> None:
    tenant = await make_tenant(admin, database, clock, MARK)
    await make_tenant(admin, database, clock, OTHER)
    others = await places_of(database, OTHER)
    written = {place.split(".")[0] for place in await places_of(database, MARK)}
    assert written == {place.split(".")[0] for place in others} >= {"tenants", "projects", "api_keys", "usage",
        "usage_hours", "files", "file_chunks", "batches", "batch_lines", "responses", "audit_log"}  # fmt: skip
    before = await sums(database)
    done = await erase(admin, clock, tenant["id"])
    assert done["state"] == "erased"
    assert await places_of(database, MARK) == set()
    assert await sums(database) == before
    assert await places_of(database, OTHER) == others, "another tenant's things are untouched"
    assert {name: done["counts"][name] for name in ("files", "file_chunks", "batches", "batch_lines", "api_keys")} == {
        "files": 3, "file_chunks": 140, "batches": 1, "batch_lines": 3, "api_keys": 2,
    }  # fmt: skip
    assert (done["counts"]["usage"], done["counts"]["usage_hours"], done["counts"]["revoked_keys"]) == (6, 2, 2)
    verified = verify(entries := await log(admin))
    assert verified.num_erased == done["counts"]["audit_log"] > 5
    last = entries[-1]
    assert (last["action"], last["object_kind"], last["object_id"]) == ("erase", "tenants", tenant["id"])
    assert (last["after"]["counts"], last["actor"]) == (done["counts"], demo.admin_key_id)
    shown = await admin.call("GET", f"tenants/{tenant['id']}", 200)
    assert (shown["name"], shown["status"]) == (f"erased-{tenant['id']}", "suspended")
    for secret in (tenant["key"], tenant["boss"]):
        with pytest.raises(Unauthenticated) as refused:
            await authenticator.authenticate(f"Bearer {secret}")
        assert refused.value.code == "key_revoked"
    usage = (await admin.call("GET", "usage", 200, params={"group_by": "tenant,model"}))["data"]
    mine = [one for one in usage if one["group"]["tenant_id"] == tenant["id"]]
    assert {one["group"]["model"]: one["totals"]["requests"] for one in mine} == {"tiny": 4, "erased": 2}


async def test_objects_are_deleted_before_their_rows_and_counted_orphaned_ones_too(
    admin: Admin, database: Database, clock: ManualClock, objects: ObjectStore, tmp_path: Path
) -> None:
    tenant, other = [await make_tenant(admin, database, clock, word) for word in (MARK, OTHER)]
    keys = [f"files/{tenant['id']}/file-{n}" for n in range(3)] + [f"adapters/{tenant['id']}/ada/{n}" for n in range(2)]
    kept = f"files/{other['id']}/file-0"
    for key in (*keys, kept):
        writer = objects.begin_object(key)
        await writer.write(MARK.encode())
        await writer.finish()
    async with database.write() as session:  # the other objects are orphaned
        await session.execute(
            update(StoredFile)
            .where(StoredFile.tenant_id == tenant["id"], StoredFile.state == FileState.READY)
            .values(object_key=keys[0])
        )

    async def refuse() -> None:
        raise Unavailable("away", code="object_store_unavailable")

    objects.guard = refuse
    refused = await admin.call("DELETE", f"tenants/{tenant['id']}/data", 503)
    assert refused["error"]["code"] == "object_store_unavailable"
    async with database.read() as session:
        assert keys[0] in (await session.scalars(select(StoredFile.object_key))).all(), "no row went before its object"
    objects.guard = None
    unfinished = tmp_path / "objects" / "files" / tenant["id"] / "file-3#1"  # as a killed upload leaves it
    unfinished.write_text(MARK)
    done = await erase(admin, clock, tenant["id"])
    assert (done["counts"]["objects"], done["counts"]["files"]) == (6, 3)
    assert not unfinished.exists()
    left = [one.key for kind in ("files/", "adapters/") async for page in objects.list_pages(kind) for one in page]
    assert left == [kept]


async def test_erasing_again_changes_nothing_and_finds_what_came_late(
    admin: Admin, database: Database, clock: ManualClock
) -> None:
    tenant = await make_tenant(admin, database, clock, MARK)
    done = await erase(admin, clock, tenant["id"])
    entries = await log(admin)
    assert await admin.call("DELETE", f"tenants/{tenant['id']}/data", 200) == done
    assert await log(admin) == entries
    async with database.write() as session:
        session.add(
            StoredFile(id="late", tenant_id=tenant["id"], project_id="p", purpose="", filename=MARK, num_bytes=1,
                       state=FileState.UPLOADING, created_ms=0, touched_ms=0)
        )  # fmt: skip
        session.add(FileChunk(file_id="late", start=0, stop=1, data=MARK.encode()))
    again = await admin.call("DELETE", f"tenants/{tenant['id']}/data", 200)
    assert again["counts"]["files"] == done["counts"]["files"] + 1
    assert await places_of(database, MARK) == set()
    verify(await log(admin))


async def test_engines_hear_of_it_and_those_that_join_later_do_too(
    admin: Admin, database: Database, clock: ManualClock
) -> None:
    engines = [FakeEngineClient(CARD)]
    teller = EngineNotice(database, lambda: engines, count_deletions=PendingWorkReader(database).num_deletions)
    await teller.round()
    assert engines[0].forgotten_ids == []
    erased = [await make_tenant(admin, database, clock, word) for word in (MARK, OTHER)]
    await erase(admin, clock, erased[0]["id"])
    await teller.round()
    assert engines[0].forgotten_ids == [erased[0]["id"]]
    assert (await admin.call("DELETE", f"tenants/{erased[1]['id']}/data", 202))["state"] == "erasing"
    engines.append(FakeEngineClient(CARD))
    await teller.round()
    assert [sorted(one.forgotten_ids) for one in engines] == [sorted(one["id"] for one in erased)] * 2


async def test_an_interrupted_deletion_continues_where_it_stopped(
    admin: Admin, database: Database, clock: ManualClock, objects: ObjectStore
) -> None:
    tenant = await make_tenant(admin, database, clock, MARK)
    before = await sums(database)
    store = AuditedStore(database, "root", Role.OWNER, tenant_of, clock)
    eraser = TenantDeleter(store, tenant["id"], objects)
    await eraser.begin()
    for moment_s in (0.0, 0.01, 0.03, 0.06):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(eraser.work(60.0), moment_s)
    clock.advance(6)
    for _ in range(4):  # a transaction that was cut off may keep SQLite's lock for a moment longer
        answer = await admin.http.request("DELETE", f"tenants/{tenant['id']}/data")
        if answer.status_code != 503:
            break
    assert answer.status_code == 200, answer.text
    done = answer.json()
    assert (done["counts"]["file_chunks"], done["counts"]["batch_lines"]) == (140, 3)
    assert await places_of(database, MARK) == set()
    assert await sums(database) == before
    verify(await log(admin))


async def test_an_erased_tenant_comes_to_nothing_new(admin: Admin, database: Database, clock: ManualClock) -> None:
    tenant = await make_tenant(admin, database, clock, MARK)
    (project,) = (await admin.call("GET", "projects", 200, params={"tenant_id": tenant["id"]}))["data"]
    await admin.call("DELETE", f"tenants/{tenant['id']}/data", 202)
    for method, path, body in (
        ("PATCH", f"tenants/{tenant['id']}", {"status": "active"}),
        ("POST", "projects", {"tenant_id": tenant["id"], "name": "new"}),
        ("POST", "keys", {"project_id": project["id"], "name": "new"}),
        ("POST", "keys", {"tenant_id": tenant["id"], "role": "viewer", "name": "new"}),
    ):
        refused = await admin.call(method, path, 409, json=body)
        assert refused["error"]["code"] == "tenant_erased"
    await admin.call("POST", f"keys/{tenant['key_id']}/rotate", 409)
    await admin.call("DELETE", "tenants/ten_nobody/data", 404)


async def test_entries_from_before_there_were_digests_are_erased_and_verify(
    admin: Admin, database: Database, clock: ManualClock
) -> None:
    tenant = await make_tenant(admin, database, clock, MARK)
    async with database.write() as session:  # as an earlier release has written them
        previous, found = GENESIS, (await session.scalars(select(AuditEntry).order_by(AuditEntry.seq))).all()
        for entry in found:
            fields = {name: getattr(entry, name) for name in (*FIELDS, "actor_role")} | {"at": entry.at.isoformat()}
            previous = entry.hash = entry_hash(previous, fields)
            entry.version, entry.salt, entry.digest = 1, None, None
    earlier = await log(admin)
    assert verify(earlier).num_entries == len(earlier) > 5
    done = await erase(admin, clock, tenant["id"])
    entries = await log(admin)
    assert verify(entries).num_erased == done["counts"]["audit_log"]
    assert [one["hash"] for one in entries[: len(earlier)]] == [one["hash"] for one in earlier]
    assert await places_of(database, MARK) == set()
    await assert_tampering_shows(entries)


async def test_a_log_that_was_tampered_with_is_broken_before_and_after_an_erasure(
    admin: Admin, database: Database, clock: ManualClock
) -> None:
    tenant = await make_tenant(admin, database, clock, MARK)
    done = await erase(admin, clock, tenant["id"])
    assert done["counts"]["audit_log"] > 5
    await assert_tampering_shows(await log(admin))
    other = await make_tenant(admin, database, clock, OTHER)
    async with database.write() as session:
        changed = AuditEntry.object_id == other["id"], AuditEntry.action == "create"
        await session.execute(update(AuditEntry).where(*changed).values(after={"name": "somebody else"}))
    with pytest.raises(BrokenChain):
        verify(await log(admin))
    await erase(admin, clock, other["id"])
    with pytest.raises(BrokenChain):  # a deletion does not hide it
        verify(await log(admin))
    assert await places_of(database, "somebody else") == set()


async def assert_tampering_shows(entries: list[dict[str, Any]]) -> None:
    """Whatever is done to an entry that was erased, or to those that say so, breaks the chain."""
    verify(entries)
    erased = next(n for n, one in enumerate(entries) if one["erased_at"] is not None)
    for field in ("actor", "action", "object_id", "at", "actor_role", "hash", "before", "salt"):
        forged = [*entries]
        forged[erased] = {**entries[erased], field: "forged"}
        with pytest.raises(BrokenChain):
            verify(forged)
    whole = next(n for n, one in enumerate(entries) if one["erased_at"] is None and one["version"] == 2)
    blank: dict[str, Any] = {"before": None, "after": None, "salt": None, "erased_at": entries[-1]["at"]}
    forged = [*entries]
    forged[whole] = {**entries[whole], **blank}
    with pytest.raises(BrokenChain):
        verify(forged)
    listing = next(n for n, one in enumerate(entries) if one["object_kind"] == "audit_log")
    forged = [*entries]
    forged[listing] = {**entries[listing], **blank}
    with pytest.raises(BrokenChain):
        verify(forged)


def test_every_table_is_declared_as_deleted_or_kept() -> None:
    going = {table.__tablename__ for table in tables_to_delete()}
    assert going >= {"files", "file_chunks", "batches", "batch_lines", "responses"}
    assert not going & {table.__tablename__ for table in KEPT}


@pytest.mark.parametrize("has_tables", [True, False])
async def test_traces_in_a_database_of_their_own_are_erased_there_and_none_is_no_obstacle(
    admin: Admin,
    database: Database,
    clock: ManualClock,
    demo: Demo,
    tmp_path: Path,
    has_tables: bool,
    objects: ObjectStore,
) -> None:
    traces = Database.open(f"sqlite:///{tmp_path / 'traces.db'}")
    if has_tables:
        async with traces.engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        await store_traces(traces, sent(range(1, 5), **{"moiety.tenant_id": demo.tenant_id}))
        await store_traces(traces, sent(range(5, 7), **{"moiety.tenant_id": "another"}))
    eraser = TenantDeleter(
        AuditedStore(database, "root", Role.OWNER, tenant_of, clock), demo.tenant_id, objects, traces
    )
    await eraser.begin()
    clock.advance(6)
    done = await eraser.work(120.0)
    assert done.ended_at is not None
    if has_tables:
        assert (done.counts["traces"], done.counts["spans"]) == (4, 8)
        assert await num_rows(traces) == [2, 4]
    await traces.close()
