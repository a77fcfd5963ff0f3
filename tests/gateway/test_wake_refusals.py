"""Refused and rejected requests for sleeping models, their cost for the database, and the gateway's readiness."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.exc import OperationalError

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_platform.wake_on_request.store import WakeKind
from moiety_wire.messages import ModelCard

from .conftest import NewCard, StartGateway, Until
from .test_wake_on_request import ON, chat, put_to_sleep


@pytest.mark.parametrize("kind", ["tokens_per_day", "requests_per_minute", "money_per_month"])
async def test_a_tenant_whose_quota_is_used_up_wakes_nothing(
    start_gateway: StartGateway, card: ModelCard, kind: str
) -> None:
    engine = FakeEngineClient(card)
    async with start_gateway([engine], **ON, scaled_models="large") as gateway:
        for model in ("tiny", "large"):
            await gateway.admin("PUT", "/prices", {"model": model, "input": "0", "output": "1"})
        used = (await chat(gateway, max_tokens=1))[2]["usage"]["total_tokens"]
        (tenant,) = (await gateway.admin("GET", "/tenants"))["data"]
        cap = {"tokens_per_day": used, "requests_per_minute": 1, "money_per_month": 1000}[kind]  # of one request
        await gateway.admin("PUT", "/quotas", {"level": "tenant", "scope_id": tenant["id"], "kind": kind, "cap": cap})
        statuses = [(await chat(gateway, max_tokens=1))[0] for _ in range(3)]
        assert statuses[-1] == 429
        put_to_sleep(engine)
        assert [(await chat(gateway, model=model, max_tokens=1))[0] for model in ("tiny", "large")] == [429, 429]
        waker = gateway.assembled.services.waker
        assert waker is not None and not any(waker.demands().values())
        assert engine.num_wakes == 0


async def test_a_woken_request_is_charged_once_after_its_quota_was_checked(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    engine = FakeEngineClient(card)
    async with start_gateway([engine], **ON) as gateway:
        (tenant,) = (await gateway.admin("GET", "/tenants"))["data"]
        quota = {"level": "tenant", "scope_id": tenant["id"], "kind": "requests_per_minute", "cap": 2}
        await gateway.admin("PUT", "/quotas", quota)
        put_to_sleep(engine)
        assert [(await chat(gateway))[0] for _ in range(3)] == [200, 200, 429]


async def test_requests_for_a_sleeping_model_ask_for_few_transactions(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    engine = FakeEngineClient(card)
    async with start_gateway([engine], **ON) as gateway:
        put_to_sleep(engine)
        engine.wake_s = 3600
        waker, notes = gateway.assembled.services.waker, []
        assert waker is not None

        def count(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
            notes.extend(["wake_demands"] if statement.startswith("INSERT INTO wake_demands") else [])

        event.listen(Engine, "before_cursor_execute", count)
        try:
            begin_s = time.monotonic()
            for _ in range(100):
                waker.note_request("tiny")
                await asyncio.sleep(0.01)
            took_s = time.monotonic() - begin_s
        finally:
            event.remove(Engine, "before_cursor_execute", count)
        assert 1 <= len(notes) <= 3 + 3 * took_s, (len(notes), took_s)


async def test_a_measured_time_outlives_a_failed_transaction(
    start_gateway: StartGateway, card: ModelCard, until: Until
) -> None:
    engine = FakeEngineClient(card)
    async with start_gateway([engine], **ON) as gateway:
        put_to_sleep(engine)
        engine.wake_s = 0.1
        failed: list[str] = []

        def fail(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
            if statement.startswith("INSERT INTO wake_times") and not failed:
                failed.append(statement)
                raise OperationalError(statement, {}, ConnectionError("the database is away"))

        event.listen(Engine, "before_cursor_execute", fail)
        try:
            assert (await chat(gateway))[0] == 200
            waker = gateway.assembled.services.waker
            assert waker is not None
            await until(lambda: waker.measured()[WakeKind.WAKE])
        finally:
            event.remove(Engine, "before_cursor_execute", fail)
        assert failed


async def test_a_gateway_whose_unscaled_engines_are_lost_is_not_ready(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    engines = [FakeEngineClient(new_card("one", "kept")), FakeEngineClient(new_card("two", "large"))]
    async with start_gateway(engines, **ON, scaled_models="large") as gateway:

        async def readiness() -> tuple[int, bool]:
            shown = (await gateway.request("GET", "/metrics"))[2].decode()
            return (await gateway.request("GET", "/readyz"))[0], "moiety_wake_ready 1.0" in shown

        assert await readiness() == (200, True)
        engines[0].die()
        assert await readiness() == (200, True), "an engine serves"
        engines[1].die()
        assert await readiness() == (503, False)
        gateway.replicas.retire(engines[0].address)
        assert await readiness() == (200, True), "requests start the other one"
        gateway.replicas.missing["a"] = "the name cannot be resolved"
        assert await readiness() == (200, True), "it can be the name of the stopped engines"
        gateway.replicas.missing["b"] = "the name cannot be resolved"
        assert await readiness() == (503, False)
