"""A full disk of the database while gateways write what wakes engines: requests end with its name, then all goes on."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import AsyncSession
from structlog.testing import capture_logs

from moiety_platform.clock import SystemClock
from moiety_platform.db.failures import unavailable_if_unreachable
from moiety_platform.db.session import Database
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.errors import EnginesAsleep
from moiety_platform.wake_on_request.store import WakeKind
from moiety_platform.wake_on_request.waker import EngineWaker
from moiety_platform.wake_settings import WakeSettings
from moiety_wire.messages import ModelCard

from .conftest import StartGateway, Until


class PostgresFull(Exception):
    """PostgreSQL's error, as its driver raises it."""

    sqlstate = "53100"


ERRORS: list[DBAPIError] = [
    OperationalError("INSERT", {}, sqlite3.OperationalError("database or disk is full")),
    DBAPIError("INSERT", {}, PostgresFull("could not extend file: No space left on device")),
]


class FillableDatabase(Database):
    """A database whose transactions fail with `error` while it is set."""

    error: DBAPIError | None = None

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        with unavailable_if_unreachable():
            if self.error is not None:
                raise self.error
        async with super().write() as session:
            yield session


class NotifyingEngine(FakeEngineClient):
    """An engine that calls `on_wake` with each command to wake."""

    def set_asleep(self, *, asleep: bool) -> None:
        super().set_asleep(asleep=asleep)
        if not asleep:
            self.on_wake()

    def on_wake(self) -> None:
        """Do nothing, until a test replaces it."""


def no_scaler() -> Any:
    raise AssertionError("no setting names a StatefulSet")


@pytest.mark.parametrize("error", ERRORS, ids=["sqlite", "postgresql"])
async def test_a_waiting_request_ends_with_the_name_of_the_disk_and_measured_times_are_stored_later(
    start_gateway: StartGateway, card: ModelCard, until: Until, error: DBAPIError
) -> None:
    engine = NotifyingEngine(card)
    engine.wake_s = 0.05
    async with start_gateway([engine]) as gateway:
        engine.set_asleep(asleep=True)
        database = FillableDatabase.open(str(gateway.database.engine.url))
        settings = WakeSettings(wake_on_request=True, wake_timeout_s=0.3)
        waker = EngineWaker("gateway-x", database, gateway.replicas, SystemClock(), settings, no_scaler)
        database.error = error
        with capture_logs() as said:
            await waker.start()
            with pytest.raises(EnginesAsleep, match="disk of the database is full"):
                await waker.wait_awake(card.model, 5.0)
        assert engine.num_wakes == 0
        (line,) = [line for line in said if line["event"] == "store_unreachable"]
        assert "disk of the database is full" in line["reason"]
        assert line["advice"] == "free some space on the disk that is full"
        database.error, engine.wake_s = None, 0.2
        engine.on_wake = lambda: setattr(database, "error", error)  # type: ignore[method-assign]
        waker.settings = WakeSettings(wake_on_request=True, wake_timeout_s=60.0)
        await waker.wait_awake(card.model, 5.0)  # it is on its way, and needs no database
        assert database.error is error and not waker.measured()[WakeKind.WAKE]
        database.error = None
        waker.note_request(card.model)
        await until(lambda: waker.measured()[WakeKind.WAKE].get(card.model, 0.0) > 0.1)
        await waker.stop()
        await database.close()
