"""The pepper is replaced while gateways run: no key is refused, and afterwards no key needs the old pepper."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog.testing
from pydantic import SecretStr
from sqlalchemy import update

from moiety_platform.auth.authenticator import OUTAGE_PAUSE_S, TTL_S, Authenticator
from moiety_platform.auth.keys import generate_key, mark_of
from moiety_platform.auth.pepper import BadPepper, PepperRotation, pepper_of, pepper_rotation_of
from moiety_platform.auth.schemas import NewKey
from moiety_platform.auth.service import create_key
from moiety_platform.clock import ManualClock
from moiety_platform.db.session import Database
from moiety_platform.errors import Unauthenticated
from moiety_platform.settings import GatewaySettings
from moiety_platform.tenants.models import ApiKey
from moiety_platform.webhooks.events import derive_secret, signature

from .conftest import PEPPER, CuttableStore, Demo, make_demo

NEW = b"the next pepper for tests, longer"


class Gateways:
    """Gateways of each configuration that exists while the pepper is replaced."""

    def __init__(self, database: Database, clock: ManualClock) -> None:
        self.before = Authenticator(database, PEPPER, clock)
        self.knowing = Authenticator(database, PEPPER, clock, turn=PepperRotation(coming=NEW))
        self.turned = Authenticator(database, NEW, clock, turn=PepperRotation(previous=PEPPER))
        self.after = Authenticator(database, NEW, clock)


@pytest.fixture
async def gateways(database: Database, clock: ManualClock) -> AsyncIterator[Gateways]:
    made = Gateways(database, clock)
    yield made
    for one in vars(made).values():
        await one.close()


async def takes(authenticator: Authenticator, key: str) -> bool:
    try:
        await authenticator.authenticate(f"Bearer {key}")
    except Unauthenticated:
        return False
    await authenticator.rehashing.idle()
    return True


async def mark(database: Database, key_id: str) -> str | None:
    async with database.read() as session:
        return (await session.get_one(ApiKey, key_id)).pepper_mark


async def test_a_key_that_is_used_is_hashed_anew_and_needs_the_old_pepper_no_more(
    database: Database, demo: Demo, gateways: Gateways
) -> None:
    assert await mark(database, demo.key_id) == mark_of(PEPPER)
    assert not await takes(gateways.after, demo.key)
    assert await takes(gateways.turned, demo.key)
    assert await mark(database, demo.key_id) == mark_of(NEW)
    assert await takes(gateways.turned, demo.key)


async def test_gateways_of_both_steps_take_every_key_at_every_moment(
    database: Database, demo: Demo, gateways: Gateways, clock: ManualClock
) -> None:
    both = gateways.knowing, gateways.turned
    async with database.write() as session:
        made = [await create_key(session, NewKey(name="n", project_id=demo.project_id), NEW, clock.now())]
    keys = [demo.key, demo.admin_key, made[0][1].text]
    for _ in range(3):
        for key in keys:
            assert [await takes(one, key) for one in both] == [True, True]
        clock.advance(TTL_S)
    assert [await takes(gateways.after, key) for key in keys] == [True, True, True]
    assert [await takes(gateways.before, key) for key in keys] == [False, False, False]


async def test_a_wrong_secret_is_refused_by_whatever_pepper_and_writes_nothing(
    database: Database, demo: Demo, gateways: Gateways
) -> None:
    wrong = demo.key[:-4] + "0000"
    assert [await takes(one, wrong) for one in vars(gateways).values()] == [False] * 4
    assert not await takes(gateways.turned, generate_key().text)
    assert await mark(database, demo.key_id) == mark_of(PEPPER)


async def test_a_key_of_before_there_were_marks_is_marked_when_it_is_used(
    database: Database, demo: Demo, gateways: Gateways
) -> None:
    async with database.write() as session:
        await session.execute(update(ApiKey).values(pepper_mark=None))
    assert await takes(gateways.before, demo.key)
    assert await mark(database, demo.key_id) == mark_of(PEPPER)
    assert await mark(database, demo.admin_key_id) is None


async def test_a_key_whose_new_hash_cannot_be_written_is_served_and_hashed_at_a_later_use(
    cuttable: CuttableStore, clock: ManualClock
) -> None:
    demo = await make_demo(cuttable.database, clock)
    turned = Authenticator(cuttable.database, NEW, clock, turn=PepperRotation(previous=PEPPER))
    assert not await takes(turned, demo.key[:-4] + "0000")  # so what is stored is known here
    await cuttable.wire.cut()
    with structlog.testing.capture_logs() as logged:
        assert await takes(turned, demo.key)
    assert [one["event"] for one in logged] == ["keys_not_rehashed"]
    assert await mark(cuttable.steady, demo.key_id) == mark_of(PEPPER)
    await cuttable.wire.mend()
    clock.advance(OUTAGE_PAUSE_S)
    assert await takes(turned, demo.key)
    assert await mark(cuttable.steady, demo.key_id) == mark_of(NEW)


async def test_a_gateway_that_ends_writes_the_hash_first_and_leaves_no_transaction(
    database: Database, clock: ManualClock
) -> None:
    demo = await make_demo(database, clock)
    turned = Authenticator(database, NEW, clock, turn=PepperRotation(previous=PEPPER))
    await turned.authenticate(f"Bearer {demo.key}")
    await turned.close()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("key-")]
    assert await mark(database, demo.key_id) == mark_of(NEW)


def test_receivers_of_webhooks_know_what_is_sent_by_the_secret_of_either_pepper() -> None:
    secrets = [derive_secret("whk_1", pepper) for pepper in (NEW, PEPPER)]
    both = signature(secrets, b"{}", 17)
    assert [part.partition("=")[0] for part in both.split(",")] == ["t", "v1", "v1"]
    for secret in secrets:
        assert signature([secret], b"{}", 17).partition(",")[2] in both.split(",")


def test_peppers_come_from_settings_or_from_files_of_the_data_directory(tmp_path: Path) -> None:
    given = GatewaySettings(
        data_dir=tmp_path,
        key_pepper=SecretStr("n" * 32),
        key_pepper_next=SecretStr("c" * 32),
        key_pepper_previous=SecretStr("p" * 32),
    )
    assert (pepper_of(given), pepper_rotation_of(given)) == (b"n" * 32, PepperRotation(b"c" * 32, b"p" * 32))
    local = GatewaySettings(data_dir=tmp_path)
    old = pepper_of(local)
    assert pepper_rotation_of(local) == PepperRotation()
    (tmp_path / "pepper").rename(tmp_path / "pepper.previous")
    assert pepper_of(local) != old
    assert pepper_rotation_of(local) == PepperRotation(previous=old)
    assert "p" * 32 not in repr(pepper_rotation_of(given))


@pytest.mark.parametrize("name", ["next", "previous"])
def test_a_weak_pepper_is_refused_beside_the_present_one_too(name: str, tmp_path: Path) -> None:
    settings = GatewaySettings(data_dir=tmp_path, **{f"key_pepper_{name}": SecretStr("short")})
    with pytest.raises(BadPepper, match=f"MOIETY_KEY_PEPPER_{name.upper()} has 5 bytes"):
        pepper_rotation_of(settings)
