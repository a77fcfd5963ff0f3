"""The audit log records every change in the change's own transaction, in a hash chain that reveals tampering."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import delete, select, update

from moiety_platform.audit import stored_chain
from moiety_platform.audit.chain import FIELDS, GENESIS, BrokenChain, digest, entry_hash, verify
from moiety_platform.audit.models import AuditEntry
from moiety_platform.db.session import Database


async def log(admin: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    after: int | None = 0
    while after is not None:
        page = await admin.call("GET", "audit", 200, params={"after": after, "limit": 3})
        found += page["data"]
        after = page["next_after"]
    return found


async def test_every_kind_of_change_is_logged_with_who_and_what(admin: Any, demo: Any) -> None:
    earlier = len(await log(admin))
    tenant = await admin.call("POST", "tenants", 201, json={"name": "initech"})
    await admin.call("PATCH", f"tenants/{tenant['id']}", 200, json={"weight": 3})
    await admin.call("PATCH", f"tenants/{tenant['id']}", 200, json={"weight": 3})  # changes nothing
    project = await admin.call("POST", "projects", 201, json={"name": "p", "tenant_id": tenant["id"]})
    made = await admin.call("POST", "keys", 201, json={"name": "k", "project_id": project["id"]})
    await admin.call("POST", f"keys/{made['key']['id']}/rotate", 201, json={"grace_s": 0})
    quota = {"level": "tenant", "scope_id": tenant["id"], "kind": "tokens_per_day", "cap": 5}
    limit = await admin.call("PUT", "quotas", 200, json=quota)
    await admin.call("PUT", "quotas", 200, json={**quota, "cap": 7})
    await admin.call("DELETE", f"quotas/{limit['id']}", 200)
    await admin.call("PUT", "prices", 200, json={"model": "m", "input": "1", "output": "2"})
    await admin.call("PATCH", "classes/flex", 200, json={"price_factor": 0.25})
    entries = (await log(admin))[earlier:]
    told = [(entry["action"], entry["object_kind"]) for entry in entries]
    assert told == [
        ("create", "tenants"), ("change", "tenants"), ("create", "projects"), ("create", "api_keys"),
        ("create", "api_keys"), ("change", "api_keys"), ("create", "quotas"), ("change", "quotas"),
        ("delete", "quotas"), ("create", "prices"), ("change", "service_classes"),
    ]  # fmt: skip
    assert {entry["actor"] for entry in entries} == {demo.admin_key.split("_")[1].split(".")[0]}
    assert (entries[1]["before"]["weight"], entries[1]["after"]["weight"]) == (1.0, 3.0)
    assert (entries[7]["before"]["cap"], entries[7]["after"]["cap"]) == (5, 7)
    assert entries[8]["after"] is None
    assert made["secret"].split(".")[1] not in str(entries)
    assert all("secret_hash" not in (entry["after"] or {}) for entry in entries)
    only = await admin.call("GET", "audit", 200, params={"object_id": limit["id"]})
    assert len(only["data"]) == 3


async def test_a_change_that_fails_is_not_logged(admin: Any) -> None:
    earlier = await log(admin)
    await admin.call("POST", "tenants", 409, json={"name": "acme"})
    assert await log(admin) == earlier


async def test_the_chain_covers_the_role_of_who_acted_and_entries_from_before_roles_verify(
    admin: Any,
) -> None:
    await admin.call("POST", "tenants", 201, json={"name": "initech"})
    (entry,) = await log(admin)
    assert entry["actor_role"] == "owner"
    verify([entry])
    for role in ("viewer", None):
        with pytest.raises(BrokenChain):
            verify([{**entry, "actor_role": role}])
    earlier = {**entry, "actor_role": None, "version": 1, "salt": None, "digest": None}
    written = {name: earlier[name] for name in FIELDS}  # all that there was
    verify([{**earlier, "hash": entry_hash(GENESIS, written)}])


async def test_the_newest_entries_come_first_where_they_are_asked_for(admin: Any) -> None:
    for number in range(5):
        await admin.call("POST", "tenants", 201, json={"name": f"t{number}"})
    whole = await log(admin)
    page = await admin.call("GET", "audit", 200, params={"before": "1000", "limit": 3})
    rest = await admin.call("GET", "audit", 200, params={"before": page["next_before"], "limit": 500})
    assert [*page["data"], *rest["data"]] == whole[::-1]
    assert (rest["next_before"], rest["next_after"]) == (None, None)


async def test_the_server_verifies_the_chain_page_by_page_and_says_where_it_is_broken(
    admin: Any, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_chain, "VERIFIED_AT_ONCE", 2)
    for number in range(5):
        await admin.call("POST", "tenants", 201, json={"name": f"t{number}"})
    entries = await log(admin)
    verdict = await admin.call("GET", "audit/verification", 200)
    expected = {"num_entries": len(entries), "num_erased": 0, "head": entries[-1]["hash"]}
    assert verdict == {"intact": True, "complaint": None, **expected}
    async with database.write() as session:
        await session.execute(update(AuditEntry).where(AuditEntry.seq == 3).values(action="delete"))
    broken = await admin.call("GET", "audit/verification", 200)
    assert (broken["intact"], broken["num_entries"], broken["head"]) == (False, 2, entries[1]["hash"])
    assert "entry 3 or an earlier entry was modified" in broken["complaint"]


async def test_changes_at_once_make_one_chain(admin: Any) -> None:
    await asyncio.gather(*(admin.call("POST", "tenants", 201, json={"name": f"t{n}"}) for n in range(12)))
    entries = await log(admin)
    verified = verify(entries)
    assert verified.num_entries == len(entries) >= 12
    assert verified.head == entries[-1]["hash"]


async def test_audit_entries_of_concurrent_changes_have_the_right_previous_values(admin: Any, demo: Any) -> None:
    quota = {"level": "tenant", "scope_id": demo.tenant_id, "kind": "tokens_per_day"}
    caps, earlier_entries = [5, 10, 20, 30, 40], len(await log(admin))
    await asyncio.gather(*(admin.call("PUT", "quotas", 200, json={**quota, "cap": cap}) for cap in caps))
    told = (await log(admin))[earlier_entries:]
    assert [entry["action"] for entry in told] == ["create"] + ["change"] * 4
    for earlier, later in pairwise(told):
        assert later["before"]["cap"] == earlier["after"]["cap"]


async def test_audit_verification_detects_changes_of_the_log(admin: Any, database: Database) -> None:
    for name in ("a", "b", "c"):
        await admin.call("POST", "tenants", 201, json={"name": name})
    entries = await log(admin)
    verify(entries)
    async with database.write() as session:
        await session.execute(update(AuditEntry).where(AuditEntry.seq == 2).values(actor="nobody"))
    with pytest.raises(BrokenChain, match="entry 2"):
        verify(await log(admin))
    async with database.write() as session:
        await session.execute(delete(AuditEntry).where(AuditEntry.seq == 1))
    with pytest.raises(BrokenChain, match="something is missing"):
        verify(await log(admin))
    forged = {**entries[1], "after": {}}
    with pytest.raises(BrokenChain, match="entry 2"):
        verify([entries[0], forged, *entries[2:]])
    forged["digest"] = digest(forged["salt"], forged)
    forged["hash"] = entry_hash(entries[0]["hash"], forged)
    with pytest.raises(BrokenChain, match="entry 3"):
        verify([entries[0], forged, *entries[2:]])
    async with database.read() as session:
        assert len((await session.scalars(select(AuditEntry))).all()) == len(entries) - 1
