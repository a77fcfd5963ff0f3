"""Names: what they may be, which count as the same, and that placeholders give way."""

from __future__ import annotations

import re

import pytest
import sqlalchemy as sa
from sqlalchemy import insert

from moiety_migrations import downgrade, upgrade
from moiety_platform.clock import ManualClock
from moiety_platform.db.session import Database
from moiety_platform.db.url import to_sync_url
from moiety_platform.errors import BadRequest
from moiety_platform.tenant_deletion.names import blank_names
from moiety_platform.tenants.checks import check_name
from moiety_platform.tenants.models import Project, Tenant

from .conftest import Admin, Demo

INVISIBLE = (
    "\u3164\u115f\u1160\u2800\uffa0\u200b\u200d\u202e\u2066\ufeff\u00ad\u034f\ufe0f\U000e0041\U000e0101\u0000\x1b\u2028"
)


@pytest.mark.parametrize("character", INVISIBLE, ids=lambda one: f"U+{ord(one):04X}")
def test_a_name_with_an_invisible_character_is_refused(character: str) -> None:
    for name in (character, f"a{character}b", f"a{character}"):
        with pytest.raises(BadRequest) as refused:
            check_name(name)
        assert refused.value.param == "name"


def test_a_name_is_kept_in_nfc() -> None:
    assert check_name("Cafe\u0301") == "Caf\u00e9"
    assert check_name("株式会社 Ünïcode &#33;") == "株式会社 Ünïcode &#33;"


@pytest.mark.parametrize(
    ("one", "other"),
    [("acme", "ACME"), ("Caf\u00e9", "cafe\u0301"), ("Straße", "STRASSE"), ("ΣΊΣΥΦΟΣ", "σίσυφος"), ("\u212b", "å")],
)
async def test_names_that_fold_to_the_same_are_taken_once_and_found(admin: Admin, one: str, other: str) -> None:
    made = await admin.call("POST", "tenants", 201, json={"name": f"{one} ltd"})
    refused = await admin.call("POST", "tenants", 409, json={"name": f"{other} ltd"})
    assert refused["error"]["code"] == "name_taken"
    found = await admin.call("GET", "tenants", 200, params={"name": f"{other} ltd"})
    assert found["data"] == [made]
    project = await admin.call("POST", "projects", 201, json={"name": one, "tenant_id": made["id"]})
    refused = await admin.call("POST", "projects", 409, json={"name": other, "tenant_id": made["id"]})
    assert refused["error"]["code"] == "name_taken"
    found = await admin.call("GET", "projects", 200, params={"name": other, "tenant_id": made["id"]})
    assert found["data"] == [project]
    second = await admin.call("POST", "tenants", 201, json={"name": "second"})
    await admin.call("PATCH", f"tenants/{second['id']}", 409, json={"name": f"{other} ltd"})
    await admin.call("PATCH", f"tenants/{made['id']}", 200, json={"name": f"{other} ltd"})  # its own


async def test_a_name_that_looks_like_an_id_is_refused(admin: Admin, demo: Demo) -> None:
    for name in (demo.tenant_id, demo.tenant_id.upper(), demo.project_id, f"erased-{demo.tenant_id}"):
        for path, more in (("tenants", {}), ("projects", {"tenant_id": demo.tenant_id})):
            refused = await admin.call("POST", path, 400, json={"name": name, **more})
            assert refused["error"]["param"] == "name"
        await admin.call("PATCH", f"tenants/{demo.tenant_id}", 400, json={"name": name})


async def test_names_that_a_gateway_of_the_release_before_makes_count_too(
    admin: Admin, database: Database, clock: ManualClock
) -> None:
    first = await admin.call("POST", "tenants", 201, json={"name": "first"})
    async with database.write() as session:
        old = {"service_class": "standard", "weight": 1, "status": "active", "created_at": clock.now()}
        rows = [{**old, "id": "ten_a", "name": "Globex"}, {**old, "id": "ten_b", "name": "FIRST"}]
        await session.execute(insert(Tenant.__table__), rows)
    refused = await admin.call("POST", "tenants", 409, json={"name": "globex"})
    assert refused["error"]["code"] == "name_taken"
    await admin.call("POST", "tenants", 201, json={"name": "another"})
    for name, tenant_id in (("GLOBEX", "ten_a"), ("FIRST", "ten_b"), ("first", first["id"]), ("First", first["id"])):
        found = await admin.call("GET", "tenants", 200, params={"name": name})
        assert [one["id"] for one in found["data"]] == [tenant_id]


async def test_a_placeholder_steps_aside_for_a_name_that_blocks_it(
    admin: Admin, database: Database, demo: Demo, clock: ManualClock
) -> None:
    other = await admin.call("POST", "projects", 201, json={"name": "other", "tenant_id": demo.tenant_id})
    async with database.write() as session:  # by a release that did not refuse such names
        blocking = await session.get_one(Project, other["id"])
        blocking.name = f"erased-{demo.project_id}".upper()
        row = {"id": "ten_c", "service_class": "standard", "weight": 1, "status": "active", "created_at": clock.now()}
        session.add(Tenant(**row, name=f"erased-{demo.tenant_id}"))
    async with database.write() as session:
        assert (await blank_names(session, demo.tenant_id))["projects"] == 2
    async with database.write() as session:
        assert not (await blank_names(session, demo.tenant_id)).total()
        tenant = await session.get_one(Tenant, demo.tenant_id)
        projects = [await session.get_one(Project, one) for one in (demo.project_id, other["id"])]
    assert re.fullmatch(rf"erased-{demo.tenant_id}-[0-9a-f]{{8}}", tenant.name)
    for project in projects:
        assert re.fullmatch(rf"erased-{project.id}(-[0-9a-f]{{8}})?", project.name)
        assert project.folded_name == project.name


def test_rows_whose_names_count_as_the_same_come_along_and_go_back(
    empty_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    upgrade(empty_url)
    downgrade(empty_url, "0021")
    engine = sa.create_engine(to_sync_url(empty_url), poolclass=sa.NullPool)
    values = "'standard', 1.0, 'active', '2026-01-0{} 00:00:00', 'off'"
    with engine.begin() as connection:
        for tenant_id, name, day in (("t1", "ACME", 2), ("t2", "acme", 1), ("t3", "Stra\u00dfe", 3)):
            connection.execute(sa.text(f"INSERT INTO tenants VALUES ('{tenant_id}', '{name}', {values.format(day)})"))
        for project_id, tenant_id in (("p1", "t1"), ("p2", "t2")):
            made = f"INSERT INTO projects VALUES ('{project_id}', '{tenant_id}', 'Web', '2026-01-01 00:00:00')"
            connection.execute(sa.text(made))
    with caplog.at_level("WARNING"):
        upgrade(empty_url)
    told = [record.getMessage() for record in caplog.records if record.name == "moiety_migrations"]
    assert told == [
        "tenants: the name 'ACME' of t1 counts as that of t2, which is older; both keep their names: rename one of them"
    ]
    with engine.connect() as connection:
        rows = connection.execute(sa.text("SELECT id, name, folded_name FROM tenants ORDER BY id")).all()
        projects = connection.execute(sa.text("SELECT folded_name FROM projects")).all()
    assert [tuple(row) for row in rows] == [
        ("t1", "ACME", "acme\tt1"), ("t2", "acme", "acme"), ("t3", "Stra\u00dfe", "strasse"),
    ]  # fmt: skip
    assert [tuple(row) for row in projects] == [("web",), ("web",)]
    downgrade(empty_url, "0021")
    upgrade(empty_url)
