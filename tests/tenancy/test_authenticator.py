"""Authentication of keys: which keys are accepted, when changes take effect, and behaviour during database outages."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
import sqlalchemy as sa

from moiety_platform.auth.authenticator import CONFIRM_TIMEOUT_S, OUTAGE_PAUSE_S, TTL_S, Authenticator
from moiety_platform.auth.keys import derive_cache_salt, generate_key, parse_key
from moiety_platform.auth.principal import ADMIN_SCOPE, INFERENCE_SCOPE, require_scope
from moiety_platform.auth.schemas import NewKey
from moiety_platform.auth.service import create_key, revoke_key, rotate_key
from moiety_platform.clock import ManualClock
from moiety_platform.db.session import Database
from moiety_platform.errors import Forbidden, PlatformError, Unauthenticated, Unavailable
from moiety_platform.tenants.schemas import TenantChange
from moiety_platform.tenants.service import change_tenant

from .conftest import PEPPER, CuttableStore, Demo, make_demo


class Statements:
    """Counts the statements that an engine sends."""

    def __init__(self, database: Database) -> None:
        self.sent: list[str] = []
        sa.event.listen(database.engine.sync_engine, "before_cursor_execute", self._note)

    def _note(self, _connection: object, _cursor: object, statement: str, *_: object) -> None:
        self.sent.append(statement)

    @property
    def selects(self) -> int:
        return sum(statement.startswith("SELECT") for statement in self.sent)


@pytest.fixture
def authenticator(database: Database, clock: ManualClock) -> Authenticator:
    return Authenticator(database, PEPPER, clock)


async def refusal(authenticator: Authenticator, key: str) -> PlatformError:
    with pytest.raises(PlatformError) as caught:
        await authenticator.authenticate(f"Bearer {key}")
    return caught.value


async def test_a_good_key_is_its_tenants_principal(authenticator: Authenticator, demo: Demo) -> None:
    principal = await authenticator.authenticate(f"Bearer {demo.key}")
    assert (principal.tenant_id, principal.tenant_name, principal.project_id) == (
        demo.tenant_id,
        "acme",
        demo.project_id,
    )
    assert (principal.service_class, principal.weight) == ("standard", 2.0)
    assert principal.cache_salt == derive_cache_salt(demo.tenant_id, PEPPER)
    assert principal.scopes == {INFERENCE_SCOPE}
    assert principal.allowed_models is None
    with pytest.raises(Forbidden, match="lacks the scope 'admin'"):
        require_scope(principal, ADMIN_SCOPE)


async def test_an_administrators_key_belongs_to_no_tenant(authenticator: Authenticator, demo: Demo) -> None:
    principal = await authenticator.authenticate(f"bearer {demo.admin_key}")
    assert principal.scopes == {ADMIN_SCOPE}
    assert principal.tenant_id == ""


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (None, "missing_api_key"),
        ("", "missing_api_key"),
        ("Basic abc", "invalid_api_key"),
        ("Bearer", "invalid_api_key"),
        ("Bearer sk-123", "invalid_api_key"),
        ("Bearer " + "x" * 100_000, "invalid_api_key"),
        ("Bearer mty_" + "é" * 16 + "." + "a" * 32, "invalid_api_key"),
        ("Bearer mty_" + "a" * 16 + "." + "'; DROP TABLE api_keys; --".ljust(32, "x"), "invalid_api_key"),
    ],
)
async def test_malformed_keys_cost_no_sql_statement(
    authenticator: Authenticator, database: Database, header: str | None, code: str
) -> None:
    statements = Statements(database)
    with pytest.raises(Unauthenticated) as caught:
        await authenticator.authenticate(header)
    assert caught.value.code == code
    assert "Authorization: Bearer mty_" in caught.value.message
    assert statements.sent == []


async def test_a_wrong_secret_and_an_unknown_id_get_the_same_answer(authenticator: Authenticator, demo: Demo) -> None:
    good, other = parse_key(demo.key), generate_key()
    assert good is not None
    wrong_secret = await refusal(authenticator, f"mty_{good.key_id}.{other.secret}")
    unknown_id = await refusal(authenticator, other.text)
    assert isinstance(wrong_secret, Unauthenticated)
    assert (wrong_secret.message, wrong_secret.code) == (unknown_id.message, unknown_id.code)


async def test_a_key_is_read_once_however_many_ask_at_once_and_then_comes_from_memory(
    authenticator: Authenticator, database: Database, demo: Demo
) -> None:
    statements = Statements(database)
    header = f"Bearer {demo.key}"
    principals = await asyncio.gather(*(authenticator.authenticate(header) for _ in range(50)))
    await authenticator.authenticate(header)
    assert len(set(principals)) == 1
    assert statements.selects == 1


async def test_a_caller_that_leaves_does_not_break_the_lookup_of_the_others(
    authenticator: Authenticator, demo: Demo
) -> None:
    impatient = asyncio.create_task(authenticator.authenticate(f"Bearer {demo.key}"))
    patient = asyncio.create_task(authenticator.authenticate(f"Bearer {demo.key}"))
    await asyncio.sleep(0)
    impatient.cancel()
    assert (await patient).tenant_id == demo.tenant_id


async def test_unknown_keys_are_remembered_too_and_neither_memory_grows_without_bound(
    database: Database, clock: ManualClock, demo: Demo
) -> None:
    authenticator = Authenticator(database, PEPPER, clock, max_cached_keys=4)
    statements = Statements(database)
    unknown = generate_key().text
    for _ in range(3):
        await refusal(authenticator, unknown)
    assert statements.selects == 1
    await authenticator.authenticate(f"Bearer {demo.key}")
    for _ in range(20):
        await refusal(authenticator, generate_key().text)
    assert authenticator.num_cached == 5
    before = statements.selects
    await authenticator.authenticate(f"Bearer {demo.key}")  # a flood of unknown keys does not push out a known one
    assert statements.selects == before


async def test_revocation_made_elsewhere_counts_here_within_two_seconds(
    authenticator: Authenticator, database: Database, clock: ManualClock, demo: Demo
) -> None:
    await authenticator.authenticate(f"Bearer {demo.key}")
    async with database.write() as session:
        await revoke_key(session, demo.key_id, clock.now())
    clock.advance(2.0)
    refused = await refusal(authenticator, demo.key)
    assert (refused.status, refused.code) == (401, "key_revoked")


async def test_suspending_a_tenant_refuses_its_keys_and_activating_it_lets_them_in_again(
    authenticator: Authenticator, database: Database, clock: ManualClock, demo: Demo
) -> None:
    async with database.write() as session:
        await change_tenant(session, demo.tenant_id, TenantChange(status="suspended"))
    refused = await refusal(authenticator, demo.key)
    assert (refused.status, refused.code) == (403, "tenant_suspended")
    async with database.write() as session:
        await change_tenant(session, demo.tenant_id, TenantChange(status="active"))
    clock.advance(2.0)
    await authenticator.authenticate(f"Bearer {demo.key}")


async def test_a_key_expires_on_time_even_from_memory(
    database: Database, authenticator: Authenticator, clock: ManualClock, demo: Demo
) -> None:
    new = NewKey(name="brief", project_id=demo.project_id, expires_at=clock.now() + timedelta(seconds=1))
    async with database.write() as session:
        _, text = await create_key(session, new, PEPPER, clock.now())
    await authenticator.authenticate(f"Bearer {text.text}")
    clock.advance(1.0)
    refused = await refusal(authenticator, text.text)
    assert (refused.status, refused.code) == (401, "key_expired")


async def test_a_rotated_key_works_through_its_grace_and_its_successor_beyond(
    database: Database, authenticator: Authenticator, clock: ManualClock, demo: Demo
) -> None:
    async with database.write() as session:
        _, successor = await rotate_key(session, demo.key_id, 60, PEPPER, clock.now())
    clock.advance(59)
    await authenticator.authenticate(f"Bearer {demo.key}")
    clock.advance(1)
    assert (await refusal(authenticator, demo.key)).code == "key_expired"
    principal = await authenticator.authenticate(f"Bearer {successor.text}")
    assert principal.project_id == demo.project_id


async def test_another_pepper_makes_every_key_worthless(database: Database, clock: ManualClock, demo: Demo) -> None:
    stranger = Authenticator(database, b"another pepper of 32 bytes......", clock)
    assert (await refusal(stranger, demo.key)).status == 401


async def test_a_database_that_does_not_answer_holds_up_no_known_key_and_costs_one_statement_for_all(
    cuttable: CuttableStore, clock: ManualClock
) -> None:
    demo = await make_demo(cuttable.database, clock)
    statements = Statements(cuttable.database)
    authenticator = Authenticator(cuttable.database, PEPPER, clock)
    keys = (demo.key, demo.admin_key)
    for key in keys:
        await authenticator.authenticate(f"Bearer {key}")
    cuttable.wire.stall()
    clock.advance(TTL_S)
    sent = len(statements.sent)
    await authenticator.authenticate(f"Bearer {demo.key}")  # the first one waits for a late answer
    clock.advance(CONFIRM_TIMEOUT_S)
    for _ in range(200):
        for key in keys:
            await authenticator.authenticate(f"Bearer {key}")
    assert len(statements.sent) <= sent + 2
    async with cuttable.steady.write() as session:
        await revoke_key(session, demo.key_id, clock.now())
    cuttable.wire.resume()
    async with asyncio.timeout(60):
        while True:
            clock.advance(OUTAGE_PAUSE_S)
            try:
                await authenticator.authenticate(f"Bearer {demo.key}")
            except Unauthenticated:
                break
            await asyncio.sleep(0.01)


async def test_while_the_database_is_away_known_keys_work_for_the_grace_and_unknown_ones_get_503(
    cuttable: CuttableStore, clock: ManualClock
) -> None:
    demo = await make_demo(cuttable.database, clock)
    authenticator = Authenticator(cuttable.database, PEPPER, clock, grace_s=60)
    await authenticator.authenticate(f"Bearer {demo.key}")
    await cuttable.wire.cut()
    clock.advance(30)
    assert (await authenticator.authenticate(f"Bearer {demo.key}")).tenant_id == demo.tenant_id
    for stranger in (demo.admin_key, generate_key().text):
        refused = await refusal(authenticator, stranger)
        assert isinstance(refused, Unavailable)
        assert refused.retry_after_s is not None
    good, other = parse_key(demo.key), generate_key()
    assert good is not None
    assert (await refusal(authenticator, f"mty_{good.key_id}.{other.secret}")).status == 401  # never open
    clock.advance(30)
    assert isinstance(await refusal(authenticator, demo.key), Unavailable)
    await cuttable.wire.mend()
    clock.advance(OUTAGE_PAUSE_S)
    assert (await authenticator.authenticate(f"Bearer {demo.key}")).tenant_id == demo.tenant_id
