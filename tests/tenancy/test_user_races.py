"""Users who are changed, deleted or invited by several transactions at once: no key outlives its user."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import delete, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.access.roles import Role
from moiety_platform.auth.self_service.schemas import NewOwnKey
from moiety_platform.auth.self_service.service import make_own_key
from moiety_platform.auth.users import service as users
from moiety_platform.auth.users.invitations import read_invitation
from moiety_platform.auth.users.models import User, UserState
from moiety_platform.auth.users.schemas import UserChange
from moiety_platform.auth.users.sign_in import TokenSubject
from moiety_platform.clock import ManualClock
from moiety_platform.db.session import Database
from moiety_platform.errors import Conflict, Forbidden, NotFound, Unauthenticated
from moiety_platform.tenants.schemas import NewProject
from moiety_platform.tenants.service import create_project

from .conftest import PEPPER, Demo
from .people import People, people_of


@pytest.fixture
async def people(database: Database, clock: ManualClock, demo: Demo) -> AsyncIterator[People]:
    async with people_of(database, clock, demo) as opened:
        await opened.call("owner", "PUT", "key-policies", {"tenant_id": demo.tenant_id, "max_keys": 1})
        yield opened


@pytest.fixture
def postgres_only(dialect: str) -> None:
    if dialect == "sqlite":
        pytest.skip("SQLite has one writer at a time, so its writing transactions cannot overlap")


async def wait_until_blocked(session: AsyncSession, task: asyncio.Task[Any], num_blocked: int = 1) -> None:
    """Wait until the task's transaction waits for a lock of this one, as so many do."""
    while (await session.scalar(text("SELECT count(*) FROM pg_locks WHERE NOT granted")) or 0) < num_blocked:
        assert not task.done(), "it did not wait"
        await asyncio.sleep(0.01)


async def test_a_key_that_is_made_while_its_user_is_deleted_is_revoked(
    postgres_only: None, people: People, database: Database, second: Database, demo: Demo, clock: ManualClock
) -> None:
    ada = await people.join("ada", "developer", demo.tenant_id)

    async def delete_ada() -> list[str]:
        async with second.write() as session:
            user = await users.get_user(session, ada["id"])
            return list(await users.delete_user(session, user, clock.now()))

    async with database.write() as session:
        user = await session.get_one(User, ada["id"])
        key, made = await make_own_key(session, user, NewOwnKey("k", demo.project_id), PEPPER, clock.now())
        deletion = asyncio.create_task(delete_ada())
        await wait_until_blocked(session, deletion)
    assert await deletion == [key.id]
    with pytest.raises(Unauthenticated, match="revoked"):
        await people.authenticator.authenticate(f"Bearer {made.text}")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (None, "missing_role"),
        (UserChange(state="disabled"), "user_disabled"),
        (UserChange(role=Role.VIEWER), "missing_role"),
    ],
)
async def test_a_user_who_lost_the_right_since_it_was_read_makes_no_key(
    postgres_only: None,
    people: People,
    database: Database,
    second: Database,
    demo: Demo,
    clock: ManualClock,
    change: UserChange | None,
    code: str,
) -> None:
    ada = await people.join("ada", "developer", demo.tenant_id)
    with pytest.raises(Forbidden, match="Ask an administrator") as refused:
        async with database.write() as session:
            user = await session.get_one(User, ada["id"])
            async with second.write() as other:
                found = await users.get_user(other, ada["id"])
                if change is None:
                    await users.delete_user(other, found, clock.now())
                else:
                    await users.change_user(other, found, change, clock.now())
            await make_own_key(session, user, NewOwnKey("k", demo.project_id), PEPPER, clock.now())
    assert refused.value.code == code


async def test_a_project_that_a_user_lost_since_it_was_read_gets_no_key(
    postgres_only: None, people: People, database: Database, second: Database, demo: Demo, clock: ManualClock
) -> None:
    async with database.write() as session:
        search = await create_project(session, NewProject(demo.tenant_id, "search"), clock.now())
    ada = await people.join("ada", "developer", demo.tenant_id)
    async with database.write() as session:
        user = await session.get_one(User, ada["id"])
        async with second.write() as other:
            found = await users.get_user(other, ada["id"])
            await users.change_user(other, found, UserChange(project_ids=[search.id]), clock.now())
        with pytest.raises(NotFound):
            await make_own_key(session, user, NewOwnKey("k", demo.project_id), PEPPER, clock.now())


async def test_a_key_whose_user_is_gone_is_refused(
    people: People, database: Database, demo: Demo, clock: ManualClock
) -> None:
    ada = await people.join("ada", "developer", demo.tenant_id)
    made = await people.call("ada", "POST", "me/keys", {"name": "k", "project_id": demo.project_id}, 201)
    async with database.write() as session:
        await session.execute(delete(User).where(User.id == ada["id"]))  # not through the API, so nothing is revoked
    with pytest.raises(Forbidden, match="deleted"):
        await people.authenticator.authenticate(f"Bearer {made['secret']}")


async def test_only_an_invited_user_accepts(people: People, database: Database, demo: Demo) -> None:
    user, invitation = await people.invite("ada", "developer", demo.tenant_id)
    for state in ("active", "disabled"):
        async with database.write() as session:
            await session.execute(update(User).where(User.id == user["id"]).values(state=state))
        refused = await people.refuse("ada", "POST", "invitations/accept", {"invitation": invitation})
        assert refused == (410, "invitation_ended"), state


async def test_a_user_who_accepted_since_it_was_read_is_not_invited_again(
    postgres_only: None, people: People, database: Database, demo: Demo, clock: ManualClock
) -> None:
    invited, invitation = await people.invite("ada", "developer", demo.tenant_id)
    async with database.write() as session:
        user = await users.get_user(session, invited["id"])
        await people.call("ada", "POST", "invitations/accept", {"invitation": invitation})
        with pytest.raises(Conflict, match="can sign in already"):
            await users.invite_user(session, user, 1, PEPPER, clock.now())


@pytest.mark.parametrize("is_of_tenant", [True, False])
async def test_a_person_has_one_row_in_each_tenant(
    people: People, database: Database, demo: Demo, is_of_tenant: bool
) -> None:
    place = ("developer", demo.tenant_id) if is_of_tenant else ("viewer", None)
    await people.join("ada", *place)
    other, _ = await people.invite("ada2", *place)
    same = {"issuer": people.issuer.url, "subject": "ada", "state": "active"}
    with pytest.raises(IntegrityError):
        async with database.write() as session:
            await session.execute(update(User).where(User.id == other["id"]).values(same))


async def test_of_two_invitations_that_a_person_accepts_at_once_one_is_good(
    postgres_only: None, people: People, database: Database, second: Database, demo: Demo, clock: ManualClock
) -> None:
    ada = TokenSubject(people.issuer.url, "ada", None, "oidc:ada")
    (_, first), (_, other) = [await people.invite(who, "developer", demo.tenant_id) for who in ("a", "b")]

    async def accept_other() -> None:
        async with second.write() as session:
            await users.accept_invitation(session, read_invitation(other, PEPPER, clock.now()), ada, clock.now())

    async with database.write() as session:
        await users.accept_invitation(session, read_invitation(first, PEPPER, clock.now()), ada, clock.now())
        accepting = asyncio.create_task(accept_other())
        await wait_until_blocked(session, accepting)
    with pytest.raises(Conflict) as refused:
        await accepting
    assert refused.value.code == "user_exists"


async def test_two_changes_of_a_person_everywhere_do_not_deadlock(
    postgres_only: None, people: People, database: Database, second: Database, demo: Demo
) -> None:
    """Both name another role of the person. A third transaction holds the first row until both wait."""
    await people.invite("ada", "developer", demo.tenant_id)
    await people.invite("ada", "viewer", None)
    listed = await people.call("owner", "GET", "users", email="ada@example.com")
    ids = sorted(user["id"] for user in listed["data"])

    async def disable(user_id: str) -> list[str]:
        async with second.write() as session:
            user, roles = await users.lock_user_everywhere(session, user_id)
            assert user.id == user_id
            for role in roles:
                users.set_state(role, UserState.DISABLED)
            return [role.id for role in roles]

    changes = []
    async with database.write() as session:
        await users.lock_user(session, ids[0])
        for user_id in ids:
            changes.append(asyncio.create_task(disable(user_id)))
            await wait_until_blocked(session, changes[-1], num_blocked=len(changes))
    assert await asyncio.gather(*changes) == [ids, ids]


async def test_a_user_who_is_deleted_while_another_change_waits_for_it_is_not_found(
    postgres_only: None, people: People, database: Database, second: Database, demo: Demo, clock: ManualClock
) -> None:
    ada, _ = await people.invite("ada", "developer", demo.tenant_id)

    async def lock() -> None:
        async with second.write() as session:
            await users.lock_user_everywhere(session, ada["id"])

    async with database.write() as session:
        await users.delete_user(session, await users.get_user(session, ada["id"]), clock.now())
        locking = asyncio.create_task(lock())
        await wait_until_blocked(session, locking)
    with pytest.raises(NotFound):
        await locking
