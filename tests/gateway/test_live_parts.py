"""Live settings of a whole gateway: its senders, the clients that it trusts, what it stores and logs."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from sqlalchemy import func, select
from tests.usage_rows import make_row

from moiety_platform.batches.models import Batch, BatchStatus
from moiety_platform.bootstrap.composition import assembled
from moiety_platform.clock import SystemClock
from moiety_platform.db.session import Database
from moiety_platform.listening import bind
from moiety_platform.live_settings import LiveSettings
from moiety_platform.logs import set_log_level
from moiety_platform.quota.models import QuotaWindow
from moiety_platform.reloadable import is_live
from moiety_platform.reloading.source import SettingsSource
from moiety_platform.request_contents.models import RequestContent
from moiety_platform.settings import SECTION, GatewaySettings
from moiety_platform.trace_receiver.process import build_app
from moiety_platform.trace_receiver.settings import TraceSettings
from moiety_platform.traces.sampling import EndedRequest
from moiety_platform.usage.models import UsageRecord
from moiety_platform.usage.store import insert_rows
from moiety_platform.wake_settings import WakeSettings

from .conftest import PEPPER, make_store
from .test_live_settings import DEADLINE_S, ROWS
from .test_reload import engine

NOW, DAY_MS = datetime.now(UTC), 24 * 3600 * 1000
HELLO: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
TOKEN = "a token of gateways"


class Receiver:
    """An HTTP server that answers 404 and records the requests."""

    port: int
    url: str

    def __init__(self) -> None:
        self.heads: list[str] = []
        self.came = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            first = await reader.readline()
            if first.startswith(b"PRI "):  # HTTP/2, which gRPC speaks
                self._note("PRI")
            else:
                self._note((first + await reader.readuntil(b"\r\n\r\n")).decode().lower())
            writer.write(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
        writer.close()

    def _note(self, head: str) -> None:
        self.heads.append(head)
        self.came.set()

    async def wait(self, *words: str) -> bool:
        """True once something with all these words has come."""
        async with asyncio.timeout(DEADLINE_S):
            while not any(all(word in head for word in words) for head in self.heads):
                self.came.clear()
                await self.came.wait()
        self.heads.clear()
        return True


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    found = Receiver()
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    found.url = f"http://127.0.0.1:{found.port}"
    async with server:
        yield found


class Whole:
    """A gateway with a configuration file, in this process."""

    def __init__(self, file: Any, services: Any, url: str, keys: Any, database: Database) -> None:
        self.file, self.services, self.database = file, services, database
        self.http = httpx.AsyncClient(base_url=url, timeout=DEADLINE_S)
        self.tenant = {"Authorization": f"Bearer {keys.tenant_key}"}
        self.admin = {"Authorization": f"Bearer {keys.admin_key}"}
        self.given: dict[str, object] = {}

    async def change(self, **settings: object) -> None:
        """Write the first contents of the file with these changes, and reload it."""
        self.file.write_text(json.dumps({"gateway": self.given | settings}))
        self.services.reloader.ask()
        await self.services.reloader.check_file()
        assert self.services.reloader.standing.problem == ""
        for name, value in settings.items():
            assert name in type(self.services.live.now).model_fields, (name, value)

    async def hello(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while (await self.http.post("/v1/chat/completions", json=HELLO, headers=self.tenant)).status_code != 200:
                pass

    async def metric(self, words: str) -> float:
        lines = (await self.http.get("/metrics")).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(words))

    async def count(self, table: Any) -> int:
        async with self.database.read() as session:
            return (await session.scalar(select(func.count()).select_from(table))) or 0


@pytest.fixture
async def whole(tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Whole]]:
    @asynccontextmanager
    async def run(**given: Any) -> AsyncIterator[Whole]:
        file = tmp_path / "moiety.yaml"
        given = {"data_dir": str(tmp_path), "key_pepper": PEPPER.decode(), **given}
        file.write_text(json.dumps({"gateway": given}))
        source = SettingsSource.open(file, SECTION, partial(GatewaySettings.load, file))
        database = Database.open(source.first.store_url)
        keys = await make_store(database, SystemClock())
        async with assembled(source) as gateway:
            server = gateway.server
            listener = bind("127.0.0.1", 0)
            serving = asyncio.create_task(server.serve([listener]))
            running = Whole(file, gateway.services, f"http://127.0.0.1:{listener.getsockname()[1]}", keys, database)
            running.given = given
            try:
                yield running
            finally:
                await running.http.aclose()
                server.request_exit()
                await serving
        await database.close()

    return run


async def test_spans_and_metrics_go_where_the_file_says(
    whole: Callable[..., AbstractAsyncContextManager[Whole]], receiver: Receiver, tmp_path: Path
) -> None:
    async with engine(tmp_path, "a") as address, whole(engines=[address], trace_first_per_s=1000) as gateway:
        await gateway.change(traces_endpoint=f"{receiver.url}/otlp", traces_token=TOKEN)
        await gateway.hello()
        assert await receiver.wait("post /otlp/v1/traces", f"bearer {TOKEN}")
        await gateway.change(traces_endpoint=f"{receiver.url}/otlp", traces_token="another token of them")
        await gateway.hello()
        assert await receiver.wait("post /otlp/v1/traces", "bearer another token of them")
        await gateway.change(otlp_endpoint=receiver.url)
        await gateway.hello()
        assert await receiver.wait("post /v1/traces")
        await gateway.change(otlp_endpoint=receiver.url, otlp_protocol="grpc")
        await gateway.hello()
        assert await receiver.wait("PRI")
        metrics: dict[str, Any] = {"otlp_metrics_endpoint": f"{receiver.url}/v1/metrics"}
        await gateway.change(**metrics, otlp_metrics_interval_ms=100)
        assert await receiver.wait("post /v1/metrics")
        assert await receiver.wait("post /v1/metrics"), "again, after the interval"
        await gateway.change()
        assert gateway.services.tracing.senders == ()
        assert await gateway.metric("moiety_metric_exports") == 0, "nobody tells of what nobody sends"


async def test_the_rates_of_traces_are_those_of_the_file(
    whole: Callable[..., AbstractAsyncContextManager[Whole]], receiver: Receiver, tmp_path: Path
) -> None:
    async with engine(tmp_path, "a") as address:
        fixed: dict[str, Any] = {
            "engines": [address],
            "otlp_endpoint": receiver.url,
            "trace_first_per_s": 0,
            "trace_sample_rate": 0,
        }
        async with whole(**fixed) as gateway:
            sampler = gateway.services.tracing.sampler
            ending = EndedRequest("t" * 32, b"salt", "standard", False, None, 0, 0)

            def verdict() -> str:
                return sampler.decide(ending, 0.5).value

            assert verdict() == "unsampled"
            await gateway.change(trace_sample_rate=1)
            assert verdict() == "rate"
            await gateway.change(trace_sample_rates={"standard": 1})
            assert verdict() == "rate"
            await gateway.change(trace_first_per_s=9)
            assert verdict() == "first"
            await gateway.change(trace_sample_rate=1, trace_max_per_s=1)
            assert verdict() == "over_budget"


async def test_the_key_of_servers_of_others_is_read_again_from_its_file_too(
    whole: Callable[..., AbstractAsyncContextManager[Whole]], receiver: Receiver, tmp_path: Path
) -> None:
    from moiety_demo import checkpoint_path

    key_file = tmp_path / "key"
    key_file.write_text("first\n")
    theirs = f"openai+{receiver.url}/v1?model=m&kind=generic&tokenizer={checkpoint_path()}"
    async with whole(external_engine_api_key="one", engines=[theirs]) as gateway:
        assert await receiver.wait("bearer one")
        await gateway.change(external_engine_api_key="two")
        assert await receiver.wait("bearer two")
        await gateway.change(engines=[f"{theirs}&key_file={key_file}"])
        assert await receiver.wait("bearer first")
        key_file.write_text("second\n")
        for _ in range(2):
            await gateway.services.reloader.check_file()
        assert await receiver.wait("bearer second")


async def test_reload_applies_limits_of_the_admin_api(
    whole: Callable[..., AbstractAsyncContextManager[Whole]],
) -> None:
    async with whole() as gateway:

        async def status(path: str, body: dict[str, Any]) -> int:
            return (await gateway.http.post(f"/admin/v1/{path}", json=body, headers=gateway.admin)).status_code

        hook = {"url": "http://127.0.0.1:9/x"}
        assert await status("webhooks", hook) == 400
        await gateway.change(webhook_networks=["127.0.0.0/8"])
        assert await status("webhooks", hook) == 201
        tenants = (await gateway.http.get("/admin/v1/tenants", headers=gateway.admin)).json()["data"]
        new: dict[str, Any] = {"tenant_id": tenants[0]["id"], "model": "m", "config": '{"peft_type": "LORA", "r": 4}'}
        made = await gateway.http.post("/admin/v1/adapters", json=new | {"name": "a"}, headers=gateway.admin)
        part: dict[str, Any] = {"start": 0, "data": "QUFB" * 500}
        for name in ("max_adapter_bytes", "max_adapter_bytes_per_tenant"):
            await gateway.change(**{name: 1024})
            assert await status(f"adapters/{made.json()['id']}/parts", part) in (409, 413), name
        await gateway.change()
        assert await status(f"adapters/{made.json()['id']}/parts", part) == 200
        await gateway.change(max_body_bytes=1024)
        assert await status("tenants", {"name": "x" * 2000}) == 413


def old_batch(created_ms: int) -> Batch:
    zeros = dict.fromkeys(("completed", "failed", "prompt_tokens", "cached_tokens", "output_tokens"), 0)
    return Batch(
        id="batch_old", tenant_id="t", project_id="p", key_id="k", endpoint="/v1/completions", available_ms=0,
        created_ms=created_ms, expires_ms=created_ms + DAY_MS, status=BatchStatus.COMPLETED, input_file_id="in",
        total=0, **zeros,
    )  # fmt: skip


async def test_reload_applies_retention_times(
    whole: Callable[..., AbstractAsyncContextManager[Whole]],
) -> None:
    async with whole(retention_interval_s=3600) as gateway:
        old = NOW - timedelta(days=100)
        async with gateway.database.write() as session:
            await insert_rows(session, [make_row("old", started_at=old)])
            session.add(QuotaWindow(quota_id="q", start=old, granted=1, settled=1))
            session.add(old_batch(round(NOW.timestamp() * 1000) - 10 * DAY_MS))
        kept = {UsageRecord: 1, QuotaWindow: 1, Batch: 1}
        assert {table: await gateway.count(table) for table in kept} == kept
        await gateway.change(
            keep_requests_days=62, keep_limit_windows_days=62, keep_batches_days=2, retention_interval_s=0.2
        )
        async with asyncio.timeout(DEADLINE_S):
            while any([await gateway.count(table) for table in kept]):
                pass
        assert not any([await gateway.count(table) for table in kept])


async def test_reload_begins_and_ends_the_export_of_usage(
    whole: Callable[..., AbstractAsyncContextManager[Whole]], tmp_path: Path
) -> None:
    async with whole(retention_interval_s=3600) as gateway:
        async with gateway.database.write() as session:
            rows = [make_row(f"r{day}", started_at=NOW - timedelta(days=day)) for day in (3, 5, 90)]
            await insert_rows(session, rows)
        await gateway.change(usage_export_format="csv", usage_export_days=4, retention_interval_s=0.2)
        exports = tmp_path / "objects" / "exports"
        async with asyncio.timeout(DEADLINE_S):
            while not any(exports.rglob("*.csv")):
                await gateway.count(UsageRecord)
        day = NOW - timedelta(days=3)
        assert [path.name for path in exports.rglob("*.csv")] == [f"usage-{day:%Y-%m-%d}.csv"]


async def test_reload_applies_the_redaction_of_contents(
    whole: Callable[..., AbstractAsyncContextManager[Whole]], receiver: Receiver, logged: io.StringIO, tmp_path: Path
) -> None:
    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(never, "127.0.0.1", 0)
    async with silent, engine(tmp_path, "a") as address, whole(engines=[address]) as gateway:
        (tenant,) = (await gateway.http.get("/admin/v1/tenants", headers=gateway.admin)).json()["data"]
        new = {"name": "boss", "role": "tenant-admin", "tenant_id": tenant["id"]}
        made = (await gateway.http.post("/admin/v1/keys", json=new, headers=gateway.admin)).json()
        own, path = {"Authorization": f"Bearer {made['secret']}"}, f"/admin/v1/request-contents/logging/{tenant['id']}"
        assert (await gateway.http.put(path, json={"keep_days": 2}, headers=own)).json()["is_on"]

        async def failed(reason: str) -> None:
            async with asyncio.timeout(DEADLINE_S):
                while not any(
                    "content_not_redacted" in line and reason in line for line in logged.getvalue().splitlines()
                ):
                    await gateway.hello()

        url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}/redact"
        await gateway.change(content_redaction_url=url)
        await failed("address_not_allowed")
        networks: dict[str, Any] = {"webhook_networks": ["127.0.0.0/8"]}
        await gateway.change(**networks, content_redaction_url=f"{receiver.url}/redact")
        await failed("status_404")
        assert await receiver.wait("post /redact")
        await gateway.change(**networks, content_redaction_url=url, content_redaction_timeout_ms=50)
        await failed("timeout")
        assert await gateway.count(RequestContent) == 0
        await gateway.change()
        async with asyncio.timeout(DEADLINE_S):
            while not await gateway.count(RequestContent):
                await gateway.hello()


async def test_reload_applies_log_and_metric_settings(
    whole: Callable[..., AbstractAsyncContextManager[Whole]], logged: io.StringIO, tmp_path: Path
) -> None:
    log = structlog.get_logger("somebody")
    async with engine(tmp_path, "a") as address, whole(engines=[address], log_level="warning") as gateway:
        set_log_level("warning")  # as the entry point does
        log.info("at_first")
        await gateway.change(log_level="info")
        log.info("since_then")
        await asyncio.sleep(0)  # lines are written by the end of a loop's turn
        assert ("since_then" in logged.getvalue(), "at_first" in logged.getvalue()) == (True, False)
        await gateway.hello()
        named = 'moiety_tenant_requests_total{tenant="ten_'
        async with asyncio.timeout(DEADLINE_S):
            while not await gateway.metric(named):
                pass
        await gateway.change(metrics_tenants=0)
        assert await gateway.metric(named) == 0
        assert await gateway.metric('moiety_tenant_requests_total{tenant="other') > 0


async def test_successful_requests_are_logged_at_the_rate_of_the_settings(
    whole: Callable[..., AbstractAsyncContextManager[Whole]], logged: io.StringIO, tmp_path: Path
) -> None:
    async with engine(tmp_path, "a") as address, whole(engines=[address], access_log_rate=0.0) as gateway:
        set_log_level("info")
        await gateway.hello()
        another = HELLO | {"model": "another"}
        refused = await gateway.http.post("/v1/chat/completions", json=another, headers=gateway.tenant)
        await asyncio.sleep(0)
        told = {line["status"] for line in request_lines(logged)}
        assert refused.status_code in told and 200 not in told
        await gateway.change(access_log_rate=1.0)
        await gateway.hello()
        await asyncio.sleep(0)
        assert request_lines(logged)[-1]["status"] == 200


def request_lines(logged: io.StringIO) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in logged.getvalue().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == "request"]


async def test_a_trace_store_goes_by_its_file_as_well(tmp_path: Path) -> None:
    given: dict[str, Any] = {"data_dir": tmp_path, "traces_token": TOKEN}
    live = LiveSettings(TraceSettings(**given))
    live.follow(["log_level"], lambda wanted: None)
    async with build_app(live.now, live=live) as app:
        assert live.unfollowed == []
        await live.change(
            TraceSettings(
                **given | {"traces_token": "another token of them"}, traces_untrusted_token="of others, such as",
                traces_max_body_bytes=2048, traces_queue_spans=1000, keep_traces_days=1, retention_interval_s=5,
            )
        )  # fmt: skip
        assert app.tokens.is_trusted("Bearer another token of them")
        assert not app.tokens.is_trusted("Bearer of others, such as")
        assert app.max_body_bytes == 2048


LOOKED_AT_HERE = {
    "traces_endpoint", "traces_token", "otlp_endpoint", "otlp_protocol", "otlp_metrics_endpoint",
    "otlp_metrics_interval_ms", "trace_sample_rate", "trace_sample_rates", "trace_first_per_s", "trace_max_per_s",
    "external_engine_api_key", "webhook_networks", "max_adapter_bytes", "max_adapter_bytes_per_tenant",
    "keep_requests_days", "usage_export_format", "usage_export_days",
    "keep_limit_windows_days", "keep_batches_days", "retention_interval_s", "log_level", "metrics_tenants",
    "access_log_rate", "content_redaction_url", "content_redaction_timeout_ms",
}  # fmt: skip
LOOKED_AT_ELSEWHERE = {
    "engines",  # test_reload.py
    "oidc_issuer", "oidc_audience", "oidc_roles_claim", "oidc_tenant_claim",  # tenancy/test_oidc.py
    "oidc_groups_claim", "oidc_group_roles",  # tenancy/test_oidc.py
    "oidc_key_days",  # tenancy/test_provisioned_developers.py: what the authenticator is told
    "clamp_max_tokens",  # test_message_fields.py
    "sse_keep_alive_s", "cors_allowed_origins",  # test_http_clients.py
    "max_image_links", "image_link_networks", "max_image_link_requests_per_tenant",  # test_image_links.py
    "max_document_links", "document_link_networks",  # test_image_links.py
    "prefix_routing",  # test_prefix_routing.py
    "expert_routing_tokens",  # test_expert_routing.py
    "document_memory_bytes", "document_cpu_s", "document_wall_s", "document_cache_bytes",
    "max_document_bytes", "max_document_pages", "max_document_characters",
    "max_document_requests_per_tenant",  # test_documents.py
    "max_resumed_streams_per_tenant",  # test_resumed_streams.py
    "max_token_counts_per_tenant",  # test_token_counts.py
    "simulation_limit_s", "simulation_niceness",  # tenancy/test_simulations.py
    *WakeSettings.model_fields,  # test_wake_on_request.py
    "alert_engine_down_s", "alert_disk_free_percent", "alert_slo_burn_rate",  # tenancy/test_operational_alerts.py
}  # fmt: skip


def test_every_live_setting_is_looked_at() -> None:
    live = {name for name in GatewaySettings.model_fields if is_live(GatewaySettings, name)}
    assert {row[0] for row in ROWS} | LOOKED_AT_HERE | LOOKED_AT_ELSEWHERE == live
